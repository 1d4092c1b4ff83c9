"""Validation of ``flash_attn_with_kvcache``: raises every user error before anything is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import hardware, planner
from anyattn.backends import backend_module
from anyattn.kvcache import append, rotary
from anyattn.kvcache.quantise import Scaling, check_saturated, is_written
from anyattn.kvcache.scales import EIGHT_BITS, KVScales
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences, end_to_end
from anyattn.sequences.unread_kvcache import CacheSizes, CacheStep, CacheTables, StoredCache
from anyattn.tensors.kinds import are_fake, has_memory
from anyattn.tensors.strides import begins, in_order
from anyattn.validate import flash
from anyattn.validate import scales as check_scales
from anyattn.validate import sequences as check_lengths
from anyattn.validate.flash import Options, heads_first

__all__ = [
    "CacheArguments",
    "CacheCall",
    "cache_call",
    "cached_rows",
    "check_contents",
    "check_no_captured_gradients",
    "check_no_gradients",
    "check_storage",
    "heads_first",
    "with_own_pages",
    "with_values",
]


class CacheArguments(NamedTuple):
    """The entry point's arguments that describe the cache, unchecked."""

    q: Any
    k_cache: Any
    v_cache: Any
    k: Any = None
    v: Any = None
    rotary_cos: Any = None
    rotary_sin: Any = None
    cache_seqlens: Any = None
    cache_batch_idx: Any = None
    cache_leftpad: Any = None
    page_table: Any = None
    cu_seqlens_q: Any = None
    max_seqlen_q: Any = None
    rotary_interleaved: bool = True
    validate: bool | None = None
    saturated: Any = None
    rotary_last: bool = False


@dataclass(frozen=True, eq=False)
class CacheCall:
    """The attention of one call, and the step before it (append, rotary embedding). problem.q: the queries as given, not rotated."""

    problem: Problem
    step: CacheStep
    arguments: CacheArguments

    def prepared(self, chosen: Plan) -> Problem:
        """Appends to the caches and returns the attention over their new contents, for the plan that was chosen for ``problem``.

        If no kernel runs the step, tables that have not been read are read and checked first.
        """
        problem, step = self.problem, self.step
        appender = planner.appender(chosen, hardware.of(step.q.device.type))
        if appender is not None:
            q = backend_module(appender).append(step)
            return problem if q is step.q else problem.like(q=in_order(heads_first(q), problem.q))
        sequences = problem.sequences
        assert sequences is not None
        if sequences.is_unread:
            sequences = _read(self.arguments, step.tables, step.sizes)
            problem = problem.like(sequences=sequences)
        if step.k is None or step.v is None:
            return problem
        start, new = step.tables.cached.to(torch.int64), _counts(sequences, step.sizes)
        entry = end_to_end(start, new)[0]
        slots = append.slots(start, new, sequences.k_row, sequences.page_table, sequences.page_size)
        k, v = (t.reshape(-1, *t.shape[-2:]) for t in (step.k, step.v))
        if len(k) != len(slots[0]):  # packed rows of no entry are not appended
            of_entries = end_to_end(sequences.q_start, new)[1]
            k, v = k[of_entries], v[of_entries]
        if step.k_cache.dtype in EIGHT_BITS:
            k = k.to(torch.promote_types(k.dtype, torch.float32))  # rotated keys are rounded only once
        if step.cos is not None and step.sin is not None:
            positions = end_to_end(start, new)[1], _q_positions(step, sequences, start)
            last = max((int(p.max()) for p in positions if len(p)), default=-1)
            rotary.check_rotary(step.cos, step.sin, step.q.shape[-1], last, step.q.device)
            rows = k, step.q.reshape(-1, *step.q.shape[-2:])
            how = step.interleaved, step.rotary_last
            k, q = (rotary.apply_rotary(x, step.cos, step.sin, at, *how) for x, at in zip(rows, positions, strict=True))
            problem = problem.like(q=in_order(heads_first(q.view(step.q.shape)), problem.q))
        append.append(step.k_cache, k, *slots, Scaling(step.k_descale, step.saturated), entry)
        if not step.has_one_cache:
            append.append(step.v_cache, v, *slots, Scaling(step.v_descale, step.saturated), entry)
        return problem


def cache_call(arguments: CacheArguments, options: Options) -> CacheCall:
    """A checked call, whose pages are its own (``with_own_pages``); nothing is written.

    On a GPU, unless ``validate`` is True, the tables' contents are not read. How many rows rotary tables need is checked by ``prepared``.
    """
    tables, sizes = _tables(arguments)
    q, cos, sin = arguments.q, arguments.rotary_cos, arguments.rotary_sin
    is_unread = check_lengths.skips_device_reads(q.device, arguments.validate)
    sequences = StoredCache(tables, sizes, q.device) if is_unread else _read(arguments, tables, sizes)
    problem = flash.problem_of(q, arguments.k_cache, arguments.v_cache, sequences, options, 0)
    check_saturated(arguments.saturated, q.device)
    if arguments.k is not None:
        append.check_scales(options.k_descale, options.v_descale, arguments.k_cache, arguments.v_cache)
    if not is_unread:
        check_contents(arguments, options, problem.kv_scales, sequences, _counts(sequences, sizes).tolist())
    if cos is not None or sin is not None:
        if arguments.k is None:
            raise ValueError(
                "rotary_cos is given without k and v; wanted k and v too, because cached keys must be rotated already: to append nothing, "
                "pass a rotated q and leave out rotary_cos and rotary_sin"
            )
        rotary.check_rotary(cos, sin, q.shape[-1], -1, q.device)
    follows = options.causal or any(side not in (None, -1) for side in options.window_size)
    step = CacheStep(
        q,
        arguments.k_cache,
        arguments.v_cache,
        arguments.k,
        arguments.v,
        tables,
        sizes,
        cos,
        sin,
        bool(arguments.rotary_interleaved),
        follows,
        options.k_descale,
        options.v_descale,
        arguments.saturated,
        bool(arguments.rotary_last),
    )
    return CacheCall(problem, step, arguments)


def check_contents(
    arguments: CacheArguments, options: Options, scales: KVScales | None, sequences: Sequences | None, new: Sequence[int]
) -> None:
    """``validate.scales.check_contents`` of a call. new: the number of new rows of each entry, which are appended if there are ``k``."""
    if scales is None:
        return
    caches = arguments.k_cache, arguments.v_cache
    for i, (descale, cache) in enumerate(zip((options.k_descale, options.v_descale), caches, strict=True)):
        unknown = new if arguments.k is not None and is_written(descale, cache) else ()
        check_scales.check_contents(scales._replace(**{"vk"[i]: None}), sequences, unknown)


def with_own_pages(arguments: CacheArguments) -> CacheArguments:
    """The call with one page table row per batch entry, where cache_batch_idx selects them from a table with one row per cache entry.

    On a GPU the values are not checked, and a row outside the table is replaced by the nearest row inside it.
    """
    rows, table = arguments.cache_batch_idx, arguments.page_table
    if rows is None or table is None:
        return arguments
    q, ends = arguments.q, arguments.cu_seqlens_q
    if not isinstance(q, Tensor) or not isinstance(arguments.k_cache, Tensor) or (ends is not None and not isinstance(ends, Tensor)):
        return arguments  # wrong types are refused later
    batch = check_lengths.batch_of_ends("cu_seqlens_q", ends) if ends is not None else q.shape[0]
    check_lengths.check_table("cache_batch_idx", rows, batch, q.device)
    check_lengths.check_pages_of("(cache entries, pages)", table, arguments.k_cache)
    if len(table) == 0 and batch:
        raise ValueError("page_table has no rows; wanted one for each entry of the cache, which cache_batch_idx selects")
    if not check_lengths.skips_device_reads(q.device, arguments.validate):
        _check_cache_rows(rows, len(table), "page_table")
    chosen = rows.clamp(0, max(len(table) - 1, 0)) if q.is_cuda else rows
    return arguments._replace(page_table=table.index_select(0, chosen), cache_batch_idx=None)


def with_values(arguments: CacheArguments) -> CacheArguments:
    """The call with the new values where only keys are given, for a cache whose values are the first columns of its keys."""
    _, k_cache, v_cache, k, v, *_ = arguments
    if v is not None or not all(isinstance(t, Tensor) for t in (k, k_cache, v_cache)) or not _are_first_columns(v_cache, k_cache):
        return arguments
    return arguments._replace(v=k[..., : v_cache.shape[-1]])


def _are_first_columns(v_cache: Tensor, k_cache: Tensor) -> bool:
    """``begins``; of caches without values or entries, which have no addresses, by their storage."""
    if v_cache.numel() and has_memory(v_cache) and has_memory(k_cache):
        return begins(v_cache, k_cache)
    if v_cache.numel() and not are_fake((v_cache, k_cache)):
        return False
    places = [(t.untyped_storage()._cdata, t.storage_offset(), t.dtype, t.shape[:-1], t.stride()) for t in (v_cache, k_cache)]
    return places[0] == places[1] and v_cache.shape[-1] <= k_cache.shape[-1]


_DIFFERENTIABLE = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")


def check_no_gradients(tensors: Iterable[Any], options: Options) -> None:
    """Raises ``ValueError`` for a tensor that requires grad: there are no gradients, and a result without one would be silently wrong.

    tensors: of the call, in the order of ``_DIFFERENTIABLE``; more may follow. Only called in grad mode.
    """
    check_scales.check_no_gradient(options.k_descale, options.v_descale)
    for name, x in (*zip(_DIFFERENTIABLE, tensors), ("alibi_slopes", options.alibi_slopes), ("sink", options.sink)):
        if isinstance(x, Tensor) and x.requires_grad:
            _refuse_gradient(name)


def check_no_captured_gradients(score: TracedMod | None) -> None:
    """``check_no_gradients`` for the tensors that a score mod reads."""
    for x in () if score is None else score.tensors:
        if x.requires_grad:
            _refuse_gradient(f"a tensor of shape {tuple(x.shape)} that score_mod reads")


def _refuse_gradient(name: str) -> None:
    raise ValueError(
        f"{name} requires grad, but flash_attn_with_kvcache has no gradients; wanted a call under torch.no_grad() or "
        "torch.inference_mode(), or the tensor's .detach(); to train, use flash_attn_varlen_func, which has gradients"
    )


def _tables(arguments: CacheArguments) -> tuple[CacheTables, CacheSizes]:
    """The call's tables, checked by shape, dtype and device only."""
    q, k_cache, k, ends = arguments.q, arguments.k_cache, arguments.k, arguments.cu_seqlens_q
    check_storage(q, k_cache, arguments.v_cache, k, arguments.v, ends, arguments.page_table)
    batch = q.shape[0] if ends is None else check_lengths.batch_of_ends("cu_seqlens_q", ends)
    check_lengths.check_device("cu_seqlens_q", ends, q.device)
    table = None if arguments.page_table is None else check_lengths.pages(arguments.page_table, batch, k_cache)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    cached = cached_rows(arguments.cache_seqlens, batch, capacity, q.device)
    check_lengths.check_table("cache_leftpad", arguments.cache_leftpad, batch, q.device)
    check_lengths.check_table("cache_batch_idx", arguments.cache_batch_idx, batch, q.device)
    if arguments.cache_batch_idx is None and table is None and k_cache.shape[0] < batch:
        raise ValueError(f"k_cache has batch {k_cache.shape[0]} but q has {batch}; wanted at least as many, or cache_batch_idx")
    if k is not None:
        append.check_apart("k_cache", k_cache)
        append.check_apart("v_cache", arguments.v_cache)
        append.check_step(q, k, arguments.v, k_cache, arguments.v_cache)
    rows_q = q.shape[0] if ends is not None else q.shape[1]
    bound_q = rows_q if ends is None else check_lengths.bound("max_seqlen_q", arguments.max_seqlen_q, rows_q)
    most_q = rows_q if ends is None else arguments.max_seqlen_q if isinstance(arguments.max_seqlen_q, int) else 0
    new = None if k is not None and k.ndim == 3 else 0 if k is None else k.shape[1]
    page_size = 0 if table is None else k_cache.shape[1]
    sizes = CacheSizes(batch, rows_q, bound_q, new, capacity, k_cache.shape[0], page_size, most_q)
    return CacheTables(cached, arguments.cache_leftpad, arguments.cache_batch_idx, ends, table), sizes


def _read(arguments: CacheArguments, tables: CacheTables, sizes: CacheSizes) -> Sequences:
    """Reads the tables' contents and checks them; the sequences after the step."""
    q, k_cache, table = arguments.q, arguments.k_cache, tables.page_table
    check_lengths.ends("cu_seqlens_q", tables.cu_seqlens_q, q, arguments.validate)
    cached, leftpad = (check_lengths.not_negative(n, t) for n, t in (("cache_seqlens", tables.cached), ("cache_leftpad", tables.leftpad)))
    _check_cached(cached, leftpad, sizes.capacity)
    _check_cache_rows(tables.rows, len(k_cache), "k_cache")
    sequences = StoredCache(tables, sizes, q.device).read()
    check_lengths.check_max("max_seqlen_q", arguments.max_seqlen_q, sequences.max_seqlen_q)
    first = sequences.k_start
    if arguments.k is not None:
        # a cache row may be appended to only once; without cache_batch_idx all rows are different
        append.check_append(first, cached, _counts(sequences, sizes), tables.rows, table, k_cache.shape[1], len(k_cache))
    elif table is not None:
        append.check_pages(table, first, first + sequences.seqlens_k, sizes.page_size, len(k_cache))
    return sequences


def _counts(sequences: Sequences, sizes: CacheSizes) -> Tensor:
    """The number of new rows of each entry."""
    return sequences.seqlens_q if sizes.new is None else torch.full_like(sequences.seqlens_q, sizes.new)


def _q_positions(step: CacheStep, sequences: Sequences, start: Tensor) -> Tensor:
    """The rotary position of every row of the queries' storage: ``start + i`` if they follow the new keys, else start."""
    s, q = sequences, step.q
    positions = torch.zeros(q.shape[:-2].numel(), dtype=torch.int64, device=q.device)
    per_row = q.shape[1] if q.ndim == 4 else 0
    used = end_to_end(start, s.seqlens_q)[1] if step.follows else start[s.row_entry]
    positions[end_to_end(s.q_row * per_row + s.q_start, s.seqlens_q)[1]] = used
    return positions


def check_storage(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cu_seqlens_q: Any, page_table: Any) -> None:
    q_shape = "(batch, length, heads, head_dim)" if cu_seqlens_q is None else "(total, heads, head_dim)"
    flash.storage({"q": q}, q_shape, 4 if cu_seqlens_q is None else 3)
    kind = "(cache batch, capacity, heads, head_dim)" if page_table is None else "(pages, page_size, heads, head_dim)"
    flash.storage({"q": q, "k_cache": k_cache, "v_cache": v_cache}, kind, 4, skip="q", stored=("k_cache", "v_cache"))
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"v_cache has shape {tuple(v_cache.shape)} but k_cache has {tuple(k_cache.shape)}"
        raise ValueError(f"{shapes}; wanted the same but for head_dim")
    if v is None and k is not None:
        raise ValueError(
            "v is None but k is given, and v_cache is not the first columns of k_cache in the same memory; wanted both, or neither, or "
            "v_cache=k_cache[..., :n] for one cache of both (PagedKVCache(v_dim=n) has one)"
        )
    if k is None and v is not None:
        raise ValueError("k is None but v is given; pass both or neither")
    if k is None:
        return
    rank = k.ndim if isinstance(k, Tensor) and cu_seqlens_q is not None and k.ndim == 3 else 4
    new = "(batch, new, heads, head_dim)" if rank == 4 else "(total, heads, head_dim), laid out as q is"
    flash.storage({"q": q, "k": k, "v": v}, new, rank, skip="q")
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name} has (heads, head_dim) {tuple(rows.shape[-2:])} but {name}_cache has {tuple(cache.shape[-2:])}")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; wanted the same but for head_dim")
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if rank == 4 and k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]} but q has {batch}; wanted the same")
    if rank == 3 and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} rows but q has {q.shape[0]}; packed new keys are laid out as q is, by cu_seqlens_q")


def cached_rows(cache_seqlens: Any, batch: int, capacity: int, device: torch.device) -> Tensor:
    """The rows of each entry's cache that are in use, padding included."""
    rows = capacity if cache_seqlens is None else cache_seqlens
    if isinstance(rows, int) and not isinstance(rows, bool):
        if batch and not 0 <= rows <= capacity:
            wanted = "0 or more" if rows < 0 else f"at most {capacity}, for which the cache has room"
            raise ValueError(f"cache_seqlens={rows}; wanted {wanted}")
        return torch.full((batch,), rows, dtype=torch.int64, device=device)
    check_lengths.check_table("cache_seqlens", rows, batch, device)
    return rows


def _check_cached(cached: Tensor, leftpad: Tensor | None, capacity: int) -> None:
    if len(cached) and int(cached.max()) > capacity:
        at = int(cached.argmax())
        raise ValueError(f"cache_seqlens[{at}]={int(cached[at])} but the cache has room for {capacity} rows; wanted at most {capacity}")
    if leftpad is not None and bool((leftpad > cached).any()):
        at = int((leftpad > cached).nonzero()[0])
        raise ValueError(
            f"cache_leftpad[{at}]={int(leftpad[at])} but cache_seqlens[{at}]={int(cached[at])}; wanted at most {int(cached[at])}"
        )


def _check_cache_rows(rows: Tensor | None, have: int, name: str) -> None:
    """Raises if an entry selects a row that the cache, or another tensor called ``name``, does not have. have: number of its rows."""
    check_lengths.not_negative("cache_batch_idx", rows)
    if rows is not None and len(rows) and int(rows.max()) >= have:
        at = int(rows.argmax())
        raise ValueError(f"cache_batch_idx[{at}]={int(rows[at])} but {name} has {have} rows; wanted 0 to {have - 1}")
