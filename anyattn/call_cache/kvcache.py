"""Call cache of ``flash_attn_with_kvcache`` on a CPU: for calls of one signature only the tables' contents are checked again.

The signature is shapes, strides, dtypes and options; cache_seqlens, cache_leftpad, cache_batch_idx and page_table are read on every call,
as plain numbers. Tables that are not plainly right go through ``validate.kvcache``, which raises the error. Nothing is written before both
have passed. A call with mods, rotary tables, ALiBi or packed queries is not cached.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import hardware, planner
from anyattn.call_cache import attention
from anyattn.call_cache.kvcache_step import asks_mods, facts_of_options, named_tensors, seen, step_call
from anyattn.kvcache import append
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.batch import OnHost
from anyattn.sequences.host_lists import ListedSequences, bases
from anyattn.sequences.seqlen_info import SeqlenInfoQKNewK
from anyattn.tensors import kinds
from anyattn.validate import sequences as check_lengths
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheCall, Given, cache_call, with_own_pages
from anyattn.validate.window import band

__all__ = ["KnownCall", "decode_call"]

_MOST_PLANS = 8  # the layers of one step ask for the same one
_MOST_ROWS = 2048  # new rows; from here on vectors beat lists, and hardly any of the time is the host's


class KnownCall(NamedTuple):
    """One call of known facts, whose tables are good. new: k, v and the caches' two leading indices of every new row, or None."""

    problem: Problem
    k_cache: Tensor
    v_cache: Tensor
    new: tuple[Tensor, Tensor, Tensor, Tensor] | None

    def prepared(self, chosen: Plan) -> Problem:
        """Appends to the caches and returns the attention over what they then hold. chosen: as ``CacheCall`` takes it."""
        if self.new is not None:
            k, v, first, second = self.new
            append.append(self.k_cache, k, first, second)
            append.append(self.v_cache, v, first, second)
        return self.problem


class _Numbers(NamedTuple):
    """What the tables of one call say. starts: the storage row of each entry's first new row."""

    sequences: ListedSequences
    starts: list[int]


class _Remembered(NamedTuple):
    """fields: the problem's, but for its tensors, sequences and mask. plans: by backend asked for and greatest number of keys, which is
    all that the plan of such a call hangs on beyond its facts. reach: the caches', see ``append.reach``."""

    fields: dict[str, Any]
    plans: dict[tuple[str | None, int], Plan]
    reach: tuple[int, int]


def decode_call(
    given: Given, options: Options, backend: str | None, is_operator: bool = False
) -> tuple[CacheCall | KnownCall, Plan] | None:
    """The call, checked, and its plan; nothing is written. None where it belongs to its operator (``tensor_kinds``).

    Raises as ``check_cache.cache_call`` and the plan.
    """
    given = with_own_pages(given)
    step = step_call(given, options, backend, is_operator)
    if step is not None:
        return step
    facts = None if backend not in (None, "torch") or attention.is_listened_to() else _facts(given, options)
    found = None if facts is None else attention.remembered(facts)
    known = None if found is None else _known_call(given, options, found)
    if known is not None and found is not None:
        return known, _plan(known.problem, backend, found.plans)
    if not is_operator and kinds.belong_to_operators(named_tensors(given, options)):
        return None
    checked = cache_call(given, options)
    chosen = planner.choose(checked.problem, hardware.of(given.q.device.type), backend)
    if facts is not None:
        score = checked.problem.score
        if score is None or not score.tensors:
            reaches = append.reach(given.k_cache), append.reach(given.v_cache)
            attention.remember(facts, _Remembered(attention.fields_of(checked.problem) | {"score": score}, {}, reaches))
    return checked, chosen


def _plan(problem: Problem, backend: str | None, plans: dict[tuple[str | None, int], Plan]) -> Plan:
    key = (backend, problem.seqlen_k)
    found = plans.get(key)
    if found is None:
        if len(plans) >= _MOST_PLANS:
            plans.clear()
        found = plans[key] = planner.choose(problem, hardware.of("cpu"), backend)
    return found


# ---- facts


def _facts(given: Given, options: Options) -> tuple | None:
    """None for a call that is not remembered, such as one with a wrong argument."""
    if given.rotary_cos is not None or given.rotary_sin is not None or given.cu_seqlens_q is not None or given.max_seqlen_q is not None:
        return None
    if asks_mods(options):
        return None
    try:
        device = given.q.device
        if device.type != "cpu" or check_lengths.takes_their_word(device, given.validate) or (given.k is None) != (given.v is None):
            return None
        flags = facts_of_options(options, given.validate)
        rows = tuple([seen(x) for x in (given.q, given.k_cache, given.v_cache, given.k, given.v, options.sink)])
        lengths = int if type(given.cache_seqlens) is int else seen(given.cache_seqlens)
        return ("cache", rows, lengths, seen(given.cache_batch_idx), seen(given.cache_leftpad), seen(given.page_table), flags)
    except (attention.Unfit, *attention.UNREADABLE):
        return None


# ---- a call of known facts


def _known_call(given: Given, options: Options, remembered: _Remembered) -> KnownCall | None:
    """None where what the tables hold is not plainly right."""
    q, k_cache, v_cache = given.q, given.k_cache, given.v_cache
    new = 0 if given.k is None else given.k.shape[1]
    found = _numbers(given, new)
    if found is None or new * len(q) > _MOST_ROWS:
        return None
    sequences, starts = found
    table = given.page_table
    if table is not None:
        ends = [s + new for s in starts]
        append.check_pages(table, sequences.on_host.k_start, ends, sequences.page_size, len(k_cache))
    written = None
    if given.k is not None:
        append.check_disjoint(k_cache, v_cache, remembered.reach)
        places = _row_places(sequences.on_host.k_row, starts, new) if table is None else _page_places(table, starts, new, k_cache.shape[1])
        if places is None:
            return None
        written = (given.k.reshape(-1, *given.k.shape[2:]), given.v.reshape(-1, *given.v.shape[2:]), *places)
    visible = band(options.causal, options.window_size, 0, sequences.max_seqlen_q, sequences.max_seqlen_k, q.device)
    own = dict(remembered.fields)
    own["q"], own["k"], own["v"], own["sink"] = q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2), options.sink
    own["sequences"], own["predicates"] = sequences, () if visible is None else (visible,)
    if options.softmax_scale is not None:
        own["scale"] = float(options.softmax_scale)
    return KnownCall(Problem.of_fields(own), k_cache, v_cache, written)


def _numbers(given: Given, new: int) -> _Numbers | None:
    """None where a number is out of range, or a cache row is appended to twice."""
    (batch, queries), table, (storage, rows_each) = given.q.shape[:2], given.page_table, given.k_cache.shape[:2]
    capacity = rows_each if table is None else table.shape[1] * rows_each
    lengths, padding, chosen = given.cache_seqlens, given.cache_leftpad, given.cache_batch_idx
    used = [capacity] * batch if lengths is None else [lengths] * batch if type(lengths) is int else lengths.tolist()
    if not used or min(used) < 0 or max(used) + new > capacity:
        return None
    pads = None if padding is None else padding.tolist()
    if pads is not None and not all(0 <= p <= n for p, n in zip(pads, used, strict=True)):
        return None
    rows = list(range(batch)) if chosen is None else chosen.tolist()
    if chosen is not None and (min(rows) < 0 or max(rows) >= storage or (new and len(set(rows)) < batch)):
        return None
    none = [0] * batch
    entries = list(zip(used, none if pads is None else pads, strict=True))
    places = {entry: _places(*entry, queries, new) for entry in set(entries)}  # most are alike
    seqlens_k, k_start, q_first, starts = map(list, zip(*[places[entry] for entry in entries], strict=True))
    host = OnHost(
        seqlens_q=[queries] * batch,
        seqlens_k=seqlens_k,
        q_row=list(range(batch)),
        q_start=none,
        k_row=rows,
        k_start=k_start,
        q_first=q_first,
        row_base=list(range(0, batch * queries, queries)) if queries else none,
        key_base=bases(seqlens_k),
    )
    page_size = 0 if table is None else rows_each
    return _Numbers(ListedSequences(host, given.q.device, table, page_size, is_cache=True, most_q=queries), starts)


def _places(used: int, padding: int, queries: int, new: int) -> tuple[int, int, int, int]:
    """Of one entry: its keys, where they begin in its storage, the place of its first query among them, and its first new row."""
    info = SeqlenInfoQKNewK.create(0, queries, None, new, seqused_k=(used,), leftpad_k=(padding,))
    return info.seqlen_k, info.offset_k, info.seqlen_k - info.seqlen_q, info.leftpad_k + info.seqlen_k_og


def _row_places(rows: list[int], starts: list[int], new: int) -> tuple[Tensor, Tensor]:
    """Of every new row the cache's row and the place in it, int64."""
    if new == 1:
        return _vector(rows), _vector(starts)
    first = [row for row in rows for _ in range(new)]
    return _vector(first), _vector([s + j for s in starts for j in range(new)])


def _page_places(table: Tensor, starts: list[int], new: int, page_size: int) -> tuple[Tensor, Tensor] | None:
    """Of every new row its page and the place in it, int64; None where two entries would be appended to in one page."""
    width, rows = table.shape[1], starts if new == 1 else [s + j for s in starts for j in range(new)]
    places = [i // new * width + row // page_size for i, row in enumerate(rows)]
    pages = table.take(_vector(places))
    if len(set(pages.tolist())) < len(set(places)):
        return None
    return pages.to(torch.int64), _vector([row % page_size for row in rows])


def _vector(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64)
