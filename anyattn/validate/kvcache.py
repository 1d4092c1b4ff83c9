"""Validation of ``flash_attn_with_kvcache``: raises every user error, and finds the slots of appended rows, before anything is written."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import hardware, planner
from anyattn.backends import backend_module
from anyattn.kvcache import append, rotary
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences, end_to_end
from anyattn.sequences.seqlen_info import SeqlenInfoQKNewK
from anyattn.sequences.unread_kvcache import CacheSizes, CacheStep, CacheTables, StoredCache
from anyattn.tensors.strides import in_order
from anyattn.validate import flash
from anyattn.validate import sequences as check_lengths
from anyattn.validate.flash import Options

__all__ = [
    "CacheCall",
    "Given",
    "cache_call",
    "cached_rows",
    "check_no_captured_gradients",
    "check_no_gradients",
    "check_storage",
    "heads_first",
    "with_own_pages",
]


class Given(NamedTuple):
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


@dataclass(frozen=True, eq=False)
class CacheCall:
    """The attention of one call, and the step before it (append, rotary embedding).

    problem.q: the queries as given, not rotated. looked: the checked contents of the tables, None if they have not been read.
    """

    problem: Problem
    step: CacheStep
    given: Given
    looked: _Looked | None
    turn: _Turn | None

    def prepared(self, chosen: Plan) -> Problem:
        """Appends to the caches and returns the attention over their new contents, for the plan that was chosen for ``problem``.

        If no kernel runs the step, tables that have not been read are read and checked first.
        """
        problem, step = self.problem, self.step
        appender = planner.appender(chosen, hardware.of(step.q.device.type))
        if appender is not None:
            turned = backend_module(appender).append(step)
            return problem if turned is step.q else problem.like(q=in_order(heads_first(turned), problem.q))
        looked, turn = self.looked, self.turn
        if looked is None:
            looked = _look(self.given, step.tables, step.sizes)
            turn, problem = _turn(step, looked), problem.like(sequences=looked.sequences)
        if looked.slots is None or step.k is None or step.v is None:
            return problem
        new_k, new_v = (t.reshape(-1, *t.shape[-2:]) for t in (step.k, step.v))
        if len(new_k) != len(looked.slots[0]):  # packed rows of no entry are not appended
            of_entries = end_to_end(looked.sequences.q_start, looked.sequences.seqlens_q)[1]
            new_k, new_v = new_k[of_entries], new_v[of_entries]
        if turn is not None:
            new_k = turn.applied(new_k, turn.k_positions)
            turned = turn.applied(step.q.reshape(-1, *step.q.shape[-2:]), turn.q_positions)
            problem = problem.like(q=in_order(heads_first(turned.view(step.q.shape)), problem.q))
        append.append(step.k_cache, new_k, *looked.slots)
        append.append(step.v_cache, new_v, *looked.slots)
        return problem


def heads_first(q: Tensor) -> Tensor:
    """The entry point's queries with heads before positions, as in a ``Problem``."""
    return (q if q.ndim == 4 else q.unsqueeze(0)).transpose(1, 2)


@dataclass(frozen=True, eq=False)
class _Looked:
    """The checked contents of the tables. slots: the two leading cache indices of every new row, int64 (total_new,) each."""

    info: SeqlenInfoQKNewK
    sequences: Sequences
    slots: tuple[Tensor, Tensor] | None


@dataclass(frozen=True, eq=False)
class _Turn:
    """Rotary tables, and the position of every row of the queries' storage and of every new key."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    q_positions: Tensor
    k_positions: Tensor

    def applied(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotary.apply_rotary(x, self.cos, self.sin, positions, self.interleaved)


def cache_call(given: Given, options: Options) -> CacheCall:
    """A checked call; nothing is written.

    On a GPU, unless ``validate`` is True, the tables' contents are not read.
    """
    given = with_own_pages(given)
    tables, sizes = _tables(given)
    q = given.q
    looked = None if check_lengths.skips_device_reads(q.device, given.validate) else _look(given, tables, sizes)
    sequences = StoredCache(tables, sizes, q.device) if looked is None else looked.sequences
    problem = flash.problem_of(q, given.k_cache, given.v_cache, sequences, options, 0)  # before _turn, which also uses the options
    follows = options.causal or any(side not in (None, -1) for side in options.window_size)
    cos, sin = given.rotary_cos, given.rotary_sin
    if (cos is not None or sin is not None) and given.k is None:
        raise ValueError(
            "rotary_cos is given without k and v; wanted k and v too, because cached keys must be rotated already: to append nothing, pass "
            "a rotated q and leave out rotary_cos and rotary_sin"
        )
    rotary.check_rotary(cos, sin, q.shape[-1], -1, q.device)
    step = CacheStep(q, given.k_cache, given.v_cache, given.k, given.v, tables, sizes, cos, sin, bool(given.rotary_interleaved), follows)
    return CacheCall(problem, step, given, looked, None if looked is None else _turn(step, looked))


def with_own_pages(given: Given) -> Given:
    """The call with one page table row per batch entry, where cache_batch_idx selects them from a table with one row per cache entry.

    On a GPU the values are not checked, and a row outside the table is replaced by the nearest row inside it.
    """
    rows, table = given.cache_batch_idx, given.page_table
    if rows is None or table is None:
        return given
    q, ends = given.q, given.cu_seqlens_q
    if not isinstance(q, Tensor) or not isinstance(given.k_cache, Tensor) or (ends is not None and not isinstance(ends, Tensor)):
        return given  # wrong types are refused later
    batch = check_lengths.batch_of_ends("cu_seqlens_q", ends) if ends is not None else q.shape[0]
    check_lengths.check_table("cache_batch_idx", rows, batch, q.device)
    check_lengths.check_pages_of("(cache entries, pages)", table, given.k_cache)
    if len(table) == 0 and batch:
        raise ValueError("page_table has no rows; wanted one for each entry of the cache, which cache_batch_idx selects")
    if not check_lengths.skips_device_reads(q.device, given.validate):
        _cache_rows(rows, batch, len(table), "page_table", q.device)
    chosen = rows.clamp(0, max(len(table) - 1, 0)) if q.is_cuda else rows
    return given._replace(page_table=table.index_select(0, chosen), cache_batch_idx=None)


_DIFFERENTIABLE = ("q", "k_cache", "v_cache", "k", "v", "rotary_cos", "rotary_sin")


def check_no_gradients(tensors: Iterable[Any], options: Options) -> None:
    """Raises ``ValueError`` for a tensor that requires grad: there are no gradients, and a result without one would be silently wrong.

    tensors: of the call, in the order of ``_DIFFERENTIABLE``; more may follow. Only called in grad mode.
    """
    for name, x in zip(_DIFFERENTIABLE, tensors):
        if isinstance(x, Tensor) and x.requires_grad:
            _refuse_gradient(name)
    for name, x in (("alibi_slopes", options.alibi_slopes), ("sink", options.sink)):
        if isinstance(x, Tensor) and x.requires_grad:
            _refuse_gradient(name)


def check_no_captured_gradients(tensors: Iterable[Tensor]) -> None:
    """``check_no_gradients`` for the tensors that a score mod reads."""
    for x in tensors:
        if x.requires_grad:
            _refuse_gradient(f"a tensor of shape {tuple(x.shape)} that score_mod reads")


def _refuse_gradient(name: str) -> None:
    raise ValueError(
        f"{name} requires grad, but flash_attn_with_kvcache has no gradients; wanted a call under torch.no_grad() or "
        "torch.inference_mode(), or the tensor's .detach(); to train, use flash_attn_varlen_func, which has gradients"
    )


def _tables(given: Given) -> tuple[CacheTables, CacheSizes]:
    """The call's tables, checked by shape, dtype and device only."""
    q, k_cache, k, ends = given.q, given.k_cache, given.k, given.cu_seqlens_q
    check_storage(q, k_cache, given.v_cache, k, given.v, ends, given.page_table)
    batch = q.shape[0] if ends is None else check_lengths.batch_of_ends("cu_seqlens_q", ends)
    check_lengths.check_device("cu_seqlens_q", ends, q.device)
    table = None if given.page_table is None else check_lengths.pages(given.page_table, batch, k_cache)
    capacity = k_cache.shape[1] * (1 if table is None else table.shape[1])
    cached = cached_rows(given.cache_seqlens, batch, capacity, q.device)
    check_lengths.check_table("cache_leftpad", given.cache_leftpad, batch, q.device)
    _check_rows(given.cache_batch_idx, batch, k_cache, table, q.device)
    if k is not None:
        append.check_apart("k_cache", k_cache)
        append.check_apart("v_cache", given.v_cache)
        append.check_step(q, k, given.v, k_cache, given.v_cache)
    rows_q = q.shape[0] if ends is not None else q.shape[1]
    bound_q = rows_q if ends is None else check_lengths.bound("max_seqlen_q", given.max_seqlen_q, rows_q)
    most_q = rows_q if ends is None else given.max_seqlen_q if isinstance(given.max_seqlen_q, int) else 0
    new = None if k is not None and k.ndim == 3 else 0 if k is None else k.shape[1]
    page_size = 0 if table is None else k_cache.shape[1]
    sizes = CacheSizes(batch, rows_q, bound_q, new, capacity, k_cache.shape[0], page_size, most_q)
    return CacheTables(cached, given.cache_leftpad, given.cache_batch_idx, ends, table), sizes


def _look(given: Given, tables: CacheTables, sizes: CacheSizes) -> _Looked:
    """Reads the tables' contents and checks them."""
    q, k_cache, table, batch = given.q, given.k_cache, tables.page_table, sizes.batch
    ends = check_lengths.ends("cu_seqlens_q", tables.cu_seqlens_q, q, given.validate)
    cached = check_lengths.sequence_lengths("cache_seqlens", tables.cached, batch, q.device)
    leftpad = check_lengths.sequence_lengths("cache_leftpad", tables.leftpad, batch, q.device)
    assert cached is not None
    _check_cached(cached, leftpad, sizes.capacity)
    rows = _cache_rows(tables.rows, batch, k_cache.shape[0], "k_cache", q.device)
    number = torch.arange(batch, device=q.device)
    zero = torch.zeros_like(number)
    seqlen_q, new_ends = q.shape[1] if ends is None else None, ends if sizes.new is None else None
    info = SeqlenInfoQKNewK.create(number, seqlen_q, None, sizes.new or 0, ends, None, new_ends, None, cached, leftpad)
    info = _as_vectors(info, zero)
    sequences = Sequences(
        seqlens_q=info.seqlen_q,
        seqlens_k=info.seqlen_k,
        q_row=number if ends is None else zero,
        q_start=info.offset_q,
        k_row=rows,
        k_start=info.offset_k,
        q_first=info.seqlen_k - info.seqlen_q,
        page_table=table,
        page_size=sizes.page_size,
        is_cache=True,
        most_q=sizes.most_q,
    )
    check_lengths.check_max("max_seqlen_q", given.max_seqlen_q, sequences.max_seqlen_q)
    if given.k is not None:
        # a cache row may be appended to only once; without cache_batch_idx all rows are different
        append.check_append(info, rows if tables.rows is not None else None, table, k_cache.shape[1], k_cache.shape[0])
        return _Looked(info, sequences, append.slots(info, rows, table, k_cache.shape[1]))
    if table is not None:
        append.check_pages(table, sequences.k_start, sequences.k_start + sequences.seqlens_k, sequences.page_size, k_cache.shape[0])
    return _Looked(info, sequences, None)


def _as_vectors(info: SeqlenInfoQKNewK, zero: Tensor) -> SeqlenInfoQKNewK:
    """The fields with one number per entry."""
    return SeqlenInfoQKNewK(*(f if isinstance(f, Tensor) else zero + f if f else zero for f in vars(info).values()))


def check_storage(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cu_seqlens_q: Any, page_table: Any) -> None:
    q_shape = "(batch, length, heads, head_dim)" if cu_seqlens_q is None else "(total, heads, head_dim)"
    flash.storage({"q": q}, q_shape, 4 if cu_seqlens_q is None else 3)
    kind = "(cache batch, capacity, heads, head_dim)" if page_table is None else "(pages, page_size, heads, head_dim)"
    flash.storage({"q": q, "k_cache": k_cache, "v_cache": v_cache}, kind, 4, skip="q")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"v_cache has shape {tuple(v_cache.shape)} but k_cache has {tuple(k_cache.shape)}"
        raise ValueError(f"{shapes}; wanted the same but for head_dim")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None but {'v' if k is None else 'k'} is given; pass both or neither")
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


def cached_rows(given: Any, batch: int, capacity: int, device: torch.device) -> Tensor:
    """The rows of each entry's cache that are in use, padding included."""
    if given is None:
        given = capacity
    if isinstance(given, int) and not isinstance(given, bool):
        if batch and not 0 <= given <= capacity:
            wanted = "0 or more" if given < 0 else f"at most {capacity}, for which the cache has room"
            raise ValueError(f"cache_seqlens={given}; wanted {wanted}")
        return torch.full((batch,), given, dtype=torch.int64, device=device)
    check_lengths.check_table("cache_seqlens", given, batch, device)
    return given


def _check_cached(cached: Tensor, leftpad: Tensor | None, capacity: int) -> None:
    if len(cached) and int(cached.max()) > capacity:
        at = int(cached.argmax())
        raise ValueError(f"cache_seqlens[{at}]={int(cached[at])} but the cache has room for {capacity} rows; wanted at most {capacity}")
    if leftpad is not None and bool((leftpad > cached).any()):
        at = int((leftpad > cached).nonzero()[0])
        raise ValueError(
            f"cache_leftpad[{at}]={int(leftpad[at])} but cache_seqlens[{at}]={int(cached[at])}; wanted at most {int(cached[at])}"
        )


def _check_rows(given: Any, batch: int, k_cache: Tensor, table: Tensor | None, device: torch.device) -> None:
    """Raises if the shapes show that entries have no cache row."""
    check_lengths.check_table("cache_batch_idx", given, batch, device)
    if given is None and table is None and k_cache.shape[0] < batch:
        raise ValueError(f"k_cache has batch {k_cache.shape[0]} but q has {batch}; wanted at least as many, or cache_batch_idx")


def _cache_rows(given: Tensor | None, batch: int, have: int, name: str, device: torch.device) -> Tensor:
    """The row of the cache, or of another tensor called ``name``, of each batch entry. have: number of rows of that tensor."""
    rows = check_lengths.sequence_lengths("cache_batch_idx", given, batch, device)
    if rows is None:
        return torch.arange(batch, device=device)
    if len(rows) and int(rows.max()) >= have:
        at = int(rows.argmax())
        raise ValueError(f"cache_batch_idx[{at}]={int(rows[at])} but {name} has {have} rows; wanted 0 to {have - 1}")
    return rows


def _turn(step: CacheStep, looked: _Looked) -> _Turn | None:
    """The call's rotary positions: new key j is at ``seqlen_rotary + j``; query i too if causal or windowed, else at seqlen_rotary."""
    if step.cos is None or step.sin is None:
        return None
    info, s, q = looked.info, looked.sequences, step.q
    k_positions = end_to_end(info.seqlen_rotary, info.seqlen_k_new)[1]
    used = end_to_end(info.seqlen_rotary, s.seqlens_q)[1] if step.follows else info.seqlen_rotary[s.row_entry]
    q_positions = torch.zeros(q.shape[:-2].numel(), dtype=torch.int64, device=q.device)
    per_row = q.shape[1] if q.ndim == 4 else 0
    q_positions[end_to_end(s.q_row * per_row + s.q_start, s.seqlens_q)[1]] = used
    last = max((int(p.max()) for p in (k_positions, q_positions) if len(p)), default=-1)
    rotary.check_rotary(step.cos, step.sin, q.shape[-1], last, q.device)
    return _Turn(step.cos, step.sin, step.interleaved, q_positions, k_positions)
