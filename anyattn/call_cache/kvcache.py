"""Warm calls of ``flash_attn_with_kvcache`` on a CPU: for a known signature only the tables' contents are checked again.

cache_seqlens, cache_leftpad, cache_batch_idx and page_table are read at every call, as Python numbers. If one is not clearly right, the
call goes through ``validate.kvcache``, which raises the error; nothing is written before. A call with mods, rotary tables, ALiBi or packed
queries has no signature.
"""

from __future__ import annotations

from functools import lru_cache, partial
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn import planner
from anyattn.call_cache import kvcache_step
from anyattn.call_cache.calls import RememberedCall, known, remember
from anyattn.call_cache.kvcache_step import OPTIONS_WITHOUT_MODS, attended, extents_of, named_tensors
from anyattn.call_cache.replays import Results
from anyattn.call_cache.signature import Kind, Signature, fields, signature
from anyattn.kvcache import append
from anyattn.kvcache.quantise import Scaling
from anyattn.kvcache.scales import EIGHT_BITS, kv_scales
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.batch import OnHost
from anyattn.sequences.host_lists import ListedSequences, bases
from anyattn.sequences.seqlen_info import SeqlenInfoQKNewK
from anyattn.tensors import kinds
from anyattn.tensors.strides import begins, innermost
from anyattn.validate import sequences as check_lengths
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import (
    CacheArguments,
    CacheCall,
    cache_call,
    check_contents,
    check_no_captured_gradients,
    check_no_gradients,
    with_own_pages,
    with_values,
)
from anyattn.validate.window import band

__all__ = ["KnownCall", "decode", "decode_call"]

_CPU = torch.device("cpu")
_NO_PAGES = torch.empty(0, 0, dtype=torch.int32, device="cpu")
_MOST_ROWS = 2048  # new rows: with more, vectors are faster than lists, and the host takes a small part of the time

_ARGUMENTS = fields(
    CacheArguments, q=Kind.STORAGE, k_cache=Kind.STORAGE, v_cache=Kind.STORAGE, k=Kind.STORAGE, v=Kind.STORAGE, rotary_cos=Kind.ABSENT,
    rotary_sin=Kind.ABSENT, cache_seqlens=Kind.LENGTHS, cache_batch_idx=Kind.STORAGE, cache_leftpad=Kind.STORAGE,
    page_table=Kind.STORAGE, cu_seqlens_q=Kind.ABSENT, max_seqlen_q=Kind.ABSENT, rotary_interleaved=Kind.ELSEWHERE, validate=Kind.VALUE,
    saturated=Kind.STORAGE, rotary_last=Kind.ELSEWHERE,
)  # fmt: skip
_signature = signature("flash_attn_with_kvcache", arguments=_ARGUMENTS, options=OPTIONS_WITHOUT_MODS, backend=Kind.VALUE)


class KnownCall(NamedTuple):
    """A warm call whose tables have been checked. new: k, v and the two leading cache indices of every new row (batch, new), or None."""

    problem: Problem
    k_cache: Tensor
    v_cache: Tensor
    new: tuple[Tensor, Tensor, Tensor, Tensor] | None
    scaling: tuple[Scaling, Scaling]

    def prepared(self, chosen: Plan) -> Problem:
        """Appends to the caches and returns the attention over their new contents. chosen: as in ``CacheCall.prepared``."""
        if self.new is not None:
            k, v, first, second = self.new
            entry = torch.arange(len(k), device="cpu")[:, None] if self.k_cache.dtype in EIGHT_BITS else None
            append.append(self.k_cache, k, first, second, self.scaling[0], entry)
            if not begins(self.v_cache, self.k_cache):
                append.append(self.v_cache, v, first, second, self.scaling[1], entry)
        return self.problem


def decode(arguments: CacheArguments, options: Options, backend: str | None, is_operator: bool = False) -> Results | None:
    """out and lse of a call, laid out as q; None as for ``decode_call``. Grad mode is off in an operator.

    Raises as ``decode_call``, and ``ValueError`` for a tensor that requires grad in grad mode.
    """
    arguments = with_values(with_own_pages(arguments))
    if _is_unread(arguments):
        return kvcache_step.decode(arguments, options, backend, is_operator)
    is_grad_mode = torch.is_grad_enabled()
    if is_grad_mode:
        check_no_gradients(arguments, options)
    with torch.no_grad():
        step = decode_call(arguments, options, backend, is_operator)
        if step is not None and is_grad_mode:
            check_no_captured_gradients(step[0].problem.score)
        return None if step is None else attended(*step, arguments.cu_seqlens_q is not None)


def decode_call(
    arguments: CacheArguments, options: Options, backend: str | None, is_operator: bool = False
) -> tuple[CacheCall | KnownCall, Plan] | None:
    """The checked call and its plan; nothing is written. None if the call must run as its operator (``tensors.kinds``).

    Raises as ``validate.kvcache.cache_call`` and the planner.
    """
    arguments = with_values(with_own_pages(arguments))
    if planner.misfits((arguments.q,), backend):  # the caches are written in place, and are not copied
        arguments = arguments._replace(q=innermost(arguments.q))
    if _is_unread(arguments):
        return kvcache_step.step_call(arguments, options, backend, is_operator)
    call_signature = _signature_of_call(arguments, options, backend)
    warm = known(call_signature)
    if warm is not None and call_signature is not None:
        warm_call = _warm_call(arguments, options, warm, call_signature)
        if warm_call is not None:
            return warm_call, warm.plan
    if not is_operator and kinds.belong_to_operators(named_tensors(arguments, options)):
        return None
    call = cache_call(arguments, options)
    plan = planner.planned(call.problem, backend)
    if call_signature is not None:
        recompute = partial(_signature_of_call, arguments, options, backend)
        remember(call_signature, recompute, call.problem, plan, extents=extents_of(arguments))
    return call, plan


def _is_unread(arguments: CacheArguments) -> bool:
    return isinstance(arguments.q, Tensor) and check_lengths.skips_device_reads(arguments.q.device, arguments.validate)


def _signature_of_call(arguments: CacheArguments, options: Options, backend: str | None) -> Signature | None:
    """The call's signature; None also for a call that another backend computes."""
    if backend not in (None, "torch") or not isinstance(arguments.q, Tensor) or arguments.q.device.type != "cpu":
        return None
    if (arguments.k is None) != (arguments.v is None):
        return None
    return _signature(arguments, options, backend)


# ---- a warm call


def _warm_call(arguments: CacheArguments, options: Options, warm: RememberedCall, call_signature: Signature) -> KnownCall | None:
    """The call with its tables checked; None if their contents are not clearly right."""
    q, k_cache, v_cache = arguments.q, arguments.k_cache, arguments.v_cache
    new = 0 if arguments.k is None else arguments.k.shape[1]
    numbers = _numbers(arguments, new) if new * len(q) <= _MOST_ROWS else None
    if numbers is None:
        return None
    sequences, step = numbers
    table = arguments.page_table
    if table is not None:
        ends = [s + new for s in step.starts]
        append.check_pages(table, sequences.on_host.k_start, ends, sequences.page_size, len(k_cache))
    written = None
    if arguments.k is not None:
        append.check_step(q, arguments.k, arguments.v, k_cache, v_cache, warm.extents)
        append.check_scales(options.k_descale, options.v_descale, k_cache, v_cache)
        places = step.places if table is None else _page_places(table, step.starts, new, k_cache.shape[1])
        if places is None:
            return None
        written = (arguments.k, arguments.v, *places)
    visible = _band(options.causal, tuple(options.window_size), sequences.max_seqlen_q, sequences.max_seqlen_k)
    storage = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2)
    filled = warm.filled(*storage, options.sink, options.softmax_scale, call_signature)
    filled["sequences"], filled["predicates"] = sequences, () if visible is None else (visible,)
    filled["kv_scales"] = scales = kv_scales(options.k_descale, options.v_descale, storage[1], len(q))
    check_contents(arguments, options, scales, sequences, [new] * len(q))
    scaling = Scaling(options.k_descale, arguments.saturated), Scaling(options.v_descale, arguments.saturated)
    return KnownCall(Problem.of_fields(filled), k_cache, v_cache, written, scaling)


@lru_cache(maxsize=64)
def _band(causal: bool, window_size: tuple, most_q: int, most_k: int) -> TracedMod | None:
    """``window.band`` of checked arguments."""
    return band(causal, window_size, 0, most_q, most_k, _CPU)


def _numbers(arguments: CacheArguments, new: int) -> tuple[ListedSequences, _Step] | None:
    """The contents of a call's tables.

    None if a number is out of range, or two entries append to one cache row.
    """
    (batch, queries), table, (storage, rows_each) = arguments.q.shape[:2], arguments.page_table, arguments.k_cache.shape[:2]
    capacity = rows_each if table is None else table.shape[1] * rows_each
    lengths, padding, chosen = arguments.cache_seqlens, arguments.cache_leftpad, arguments.cache_batch_idx
    used = (capacity,) * batch if lengths is None else (lengths,) * batch if type(lengths) is int else tuple(lengths.tolist())
    pads, rows = (None if t is None else tuple(t.tolist()) for t in (padding, chosen))
    step = _step(used, pads, rows, queries, new, capacity, storage, 0 if table is None else rows_each)
    return None if step is None else (step.sequences if table is None else step.sequences.of_pages(table), step)


class _Step(NamedTuple):
    """What the numbers in a call's tables decide. With pages, ``sequences`` has no table.

    starts: the storage row of each entry's first new row. places: for every new row the cache row and the position in it.
    """

    sequences: ListedSequences
    starts: list[int]
    places: tuple[Tensor, Tensor]


@lru_cache(maxsize=32)  # the layers of a step pass equal numbers
def _step(
    used: tuple[int, ...], pads: tuple[int, ...] | None, rows: tuple[int, ...] | None, queries: int, new: int, capacity: int, storage: int,
    page_size: int,
) -> _Step | None:  # fmt: skip
    batch = len(used)
    if not used or min(used) < 0 or max(used) + new > capacity:
        return None
    if pads is not None and not all(0 <= p <= n for p, n in zip(pads, used, strict=True)):
        return None
    if rows is not None and (min(rows) < 0 or max(rows) >= storage or (new and len(set(rows)) < batch)):
        return None
    none = [0] * batch
    entries = list(zip(used, none if pads is None else pads, strict=True))
    places = {entry: _places(*entry, queries, new) for entry in set(entries)}  # most entries are equal
    seqlens_k, k_start, q_first, starts = map(list, zip(*[places[entry] for entry in entries], strict=True))
    host = OnHost(
        seqlens_q=[queries] * batch,
        seqlens_k=seqlens_k,
        q_row=list(range(batch)),
        q_start=none,
        k_row=list(range(batch) if rows is None else rows),
        k_start=k_start,
        q_first=q_first,
        row_base=list(range(0, batch * queries, queries)) if queries else none,
        key_base=bases(seqlens_k),
    )
    sequences = ListedSequences(host, _CPU, _NO_PAGES if page_size else None, page_size, is_cache=True, most_q=queries)
    _ = sequences.has_pairs, sequences.max_seqlen_q, sequences.max_seqlen_k  # computed once for all calls
    return _Step(sequences, starts, _row_places(host.k_row, starts, new))


def _places(used: int, padding: int, queries: int, new: int) -> tuple[int, int, int, int]:
    """For one entry: number of keys, their first storage row, position of the first query among
    them, and storage row of the first new row."""
    info = SeqlenInfoQKNewK.create(0, queries, None, new, seqused_k=(used,), leftpad_k=(padding,))
    return info.seqlen_k, info.offset_k, info.seqlen_k - info.seqlen_q, info.leftpad_k + info.seqlen_k_og


def _row_places(rows: list[int], starts: list[int], new: int) -> tuple[Tensor, Tensor]:
    """For every new row (batch, new) the cache row and the position in it, int64."""
    first, second = _vector([row for row in rows for _ in range(new)]), _vector([s + j for s in starts for j in range(new)])
    return first.view(len(rows), new), second.view(len(rows), new)


def _page_places(table: Tensor, starts: list[int], new: int, page_size: int) -> tuple[Tensor, Tensor] | None:
    """For every new row (batch, new) its page and the position in it, int64; None if two entries append to one page."""
    width, rows = table.shape[1], starts if new == 1 else [s + j for s in starts for j in range(new)]
    places = [i // new * width + row // page_size for i, row in enumerate(rows)]
    pages = table.take(_vector(places))
    if len(set(pages.tolist())) < len(set(places)):
        return None
    shape = len(table), new
    return pages.to(torch.int64).view(shape), _vector([row % page_size for row in rows]).view(shape)


def _vector(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")
