"""Gathered keys: a contiguous copy of the keys and values that a call reads, in its queries' dtype, for kernels that read no others.

A contiguous cache of the queries' dtype is such a copy already.

Numbers of 8 bits are converted exactly, and scales of keys multiply the scores, in float32: rounding their products with keys would exceed
the budget, for a large score's error is as large as the weights' exponents. Products of values with their scales are rounded once to the
queries' dtype, as a cache of that dtype holds them: values cannot be scaled after the sum over them, or are then rounded twice. The plain
formula, the budget's unit, rounds the same products (``oracle.same_dtype``). float16 has not the range of all of them, so calls with scales
of values and float16 queries are left to kernels that apply them to float32 sums.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.backends.triton.codegen import assumptions
from anyattn.backends.triton.kernels.arguments import NO_FACTOR, OF_HEAD, OF_KEY
from anyattn.kvcache.gathered import FEW, MANY, MOST_BYTES, Gathering, gathering, line_of
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.compose import behind, chained
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_kvcache import StoredCache
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.triton_tools.launch import row_bytes, run_plain

__all__ = ["described", "gathered", "reason_against"]

_LENGTHS = 128  # of a program
_NUMBERS = 64 * 128  # keys' of a program, 64 for each of its 128 threads: with twice as many, registers are spilled
_OF_16_BITS = (torch.bfloat16, torch.float16)


class _Places(NamedTuple):
    """Where the keys of a call are: tables and sizes of ``kernels.gathered_keys.gather_keys``; None for absent tables. lines: of the
    copy."""

    used: Tensor | None
    ends: Tensor | None
    starts: Tensor | None
    rows: Tensor | None
    pages: Tensor | None
    new_ends: Tensor | None
    lines: int
    line: int
    bound: int


def reason_against(problem: Problem, is_asked: bool = False) -> str | None:
    """None if the keys of a call are gathered before its attention, else the reason against it, for people. Reads no tensor.

    is_asked: gathering need not pay.
    """
    has_8_bits, s = problem.k.dtype is not problem.q.dtype, problem.sequences
    is_cache = s is not None and s.is_cache
    is_known = is_cache or s is None or isinstance(s, StoredSequences)
    if not (is_known and (has_8_bits or is_cache)):
        return "they are read where they are"
    if _are_in_place(problem) and problem.has_wide_heads:
        return "gradients read them where they are" if problem.needs_grad else _against_rows(problem)
    if problem.bound_q <= FEW:
        return "few queries read them faster where they are"
    if problem.q.dtype not in _OF_16_BITS:
        return "there are no products of 16 bits to gain"
    if problem.q.dtype is torch.float16 and problem.kv_scales is not None and problem.kv_scales.v is not None:
        return "values times their scales may be out of float16's range"
    if problem.needs_grad or problem.num_splits > 1:
        return "gradients and split keys read them where they are"
    if against := _against_rows(problem):
        return against
    places, queries = _places(problem, reads=False), problem.q.shape[0] * problem.q.shape[2]
    copied = _bytes(problem, places)
    if copied > MOST_BYTES:
        return f"a copy may have {copied >> 20} MiB; {MOST_BYTES >> 20} are allowed"
    group = problem.qhead_per_kvhead
    pays = Gathering.ALWAYS if is_asked else gathering(queries, problem.heads_q, problem.batch, places.bound, copied, group)
    if pays is Gathering.NEVER or (pays is Gathering.SEEN and not _sees_first_keys(problem)):
        return f"it pays from {MANY} queries of an entry on, if they fill all multiprocessors and few keys are hidden from them"
    return None


def _against_rows(problem: Problem) -> str | None:
    has_rows = problem.may_have_pairs and not any(t.shape[3] > 1 and t.stride(3) != 1 for t in (problem.k, problem.v))
    return None if has_rows else "there are no rows to read"


def _are_in_place(problem: Problem) -> bool:
    """Whether the keys of a cache can be read where they are: each entry's at the beginning of its own row, or of its first page."""
    s = problem.sequences
    if (
        not isinstance(s, StoredCache)
        or problem.k.dtype is not problem.q.dtype
        or s.tables.leftpad is not None
        or s.tables.rows is not None
    ):
        return False
    return s.page_table is None or problem.has_wide_heads  # read as fast out of pages: products with wide heads take as long


def _bytes(problem: Problem, places: _Places) -> int:
    if _are_in_place(problem):
        return 0
    copied = places.lines * places.line * problem.heads_kv * (problem.k.shape[3] + problem.v.shape[3]) * problem.q.element_size()
    return copied + (0 if _of_keys(problem) is None else problem.batch * problem.heads_kv * places.bound * 4)


def _of_keys(problem: Problem) -> Tensor | None:
    """The factor of each key, None if there is none of its own."""
    factors = problem.kv_scales.k if problem.kv_scales is not None else None
    return factors if factors is not None and factors.ndim == 3 else None


def _sees_first_keys(problem: Problem) -> bool:
    """Whether every query sees all keys before the last one that it sees."""
    for mask in problem.predicates:
        ranges = ranges_unread(mask)
        if ranges is None or ranges.count != 1:
            return False
        first = ranges.expr.nodes[ranges.expr.outputs[0]]
        if first.op != "const" or first.attr > 0:  # type: ignore[operator]
            return False
    return problem.blocks is None


def described(problem: Problem) -> tuple[Problem, int]:
    """The call over gathered keys, for planning: copies have no memory. And the bytes of the copies."""
    if _are_in_place(problem):
        return _over(problem, problem.k, problem.v, None, None), 0
    places = _places(problem, reads=False)
    k, v = (
        torch.empty((places.lines, places.line, *t.shape[1::2]), dtype=problem.q.dtype, device="meta").transpose(1, 2)
        for t in (problem.k, problem.v)
    )
    return _over(problem, k, v, None, _factors_copied(problem, places, torch.device("meta"))), _bytes(problem, places)


def gathered(problem: Problem) -> Problem:
    """The call over gathered keys, by one launch. Rows of the copy that belong to no sequence are left as memory has them."""
    if _are_in_place(problem):
        s = problem.sequences
        assert isinstance(s, StoredCache)
        return _over(problem, problem.k, problem.v, _lengths(s), None)
    from anyattn.backends.triton.kernels.gathered_keys import gather_keys

    q, k, v, s, places = problem.q, problem.k, problem.v, problem.sequences, _places(problem)
    batch, heads, device = problem.batch, problem.heads_kv, q.device
    copies = [torch.empty((places.lines, places.line, heads, t.shape[3]), dtype=q.dtype, device=device) for t in (k, v)]
    lengths = torch.empty(batch, dtype=torch.int32, device=device)
    factors, of_keys = problem.kv_scales or (None, None), _factors_copied(problem, places, device)
    given = [lengths if t is None else t.detach() for t in (*factors, *places[:6], lengths, of_keys)]  # an absent tensor is any one
    new, rows_q = (s.sizes.new or 0, s.sizes.rows_q) if isinstance(s, StoredCache) else (0, 0)
    widths = [max(16, next_power_of_2(t.shape[3])) for t in (k, v)]  # in one block: nothing is computed with idle columns
    rows = min(64, _NUMBERS // max(widths))
    tiles = ceil_div(places.bound, rows)
    numbers = (
        *_strides(k), *_strides(v), *_strides(factors[0]), *_strides(factors[1]), 0 if places.pages is None else places.pages.stride(0),
        k.shape[0] - 1, k.shape[0], heads, places.line, tiles, places.bound, new, rows_q,
    )  # fmt: skip
    options = {
        "PAGE_SIZE": 0 if places.pages is None else k.shape[2], "HAS_USED": places.used is not None, "HAS_ENDS": places.ends is not None,
        "HAS_STARTS": places.starts is not None, "HAS_ROWS": places.rows is not None, "IS_CACHE": isinstance(s, StoredCache),
        "HAS_NEW_ENDS": places.new_ends is not None, "K_SCALE": _form(factors[0]), "V_SCALE": _form(factors[1]), "HEAD_DIM": k.shape[3],
        "HEAD_DIM_V": v.shape[3], "BLOCK_D": widths[0], "BLOCK_DV": widths[1], "KV_BYTES": row_bytes(k, v),
        "IS_NVIDIA": assumptions.is_nvidia(device.type), "ROWS": rows, "num_warps": 4,
    }  # fmt: skip
    run_plain(gather_keys, batch * tiles * heads, (k, v, *copies, *given, *numbers), (), device, options)
    return _over(problem, copies[0].transpose(1, 2), copies[1].transpose(1, 2), lengths, of_keys)


def _lengths(s: StoredCache) -> Tensor:
    """The keys of each entry that has no padding and a row of its own, after appending."""
    cached, new = s.tables.cached, s.sizes.new
    if new is None:
        return s.seqlens_k.to(torch.int32)
    if new == 0:
        return cached.to(torch.int32)
    from anyattn.backends.triton.kernels.gathered_keys import grown_lengths

    lengths = torch.empty(s.batch, dtype=torch.int32, device=cached.device)
    programs, cached = ceil_div(s.batch, _LENGTHS), cached if cached.is_contiguous() else cached.contiguous()
    given = cached, lengths, new, s.sizes.capacity, s.batch
    run_plain(grown_lengths, programs, given, (), lengths.device, {"BLOCK": _LENGTHS, "num_warps": 4})
    return lengths


def _places(problem: Problem, reads: bool = True) -> _Places:
    """reads: with the tables, some of which are computed by operations on the device."""
    s, k = problem.sequences, problem.k
    if s is None:
        return _Places(None, None, None, None, None, None, k.shape[0], k.shape[2], k.shape[2])
    pages = s.page_table
    if reads and pages is not None and pages.shape[1] > 1 and pages.stride(1) != 1:
        pages = pages.contiguous()
    if isinstance(s, StoredSequences):
        used, ends, line = s.tables.seqused_k, s.tables.cu_seqlens_k, line_of(s.sizes.rows_k, s.bound_k, s.page_size)
        lines = 1 if ends is not None else s.batch
        return _Places(_side_by_side(used), _side_by_side(ends), None, None, pages, None, lines, line, s.bound_k)
    line = k.shape[2] if pages is None else pages.shape[1] * s.page_size  # a sequence may begin anywhere in its line
    if isinstance(s, StoredCache):
        t = s.tables
        rows, new_ends = t.rows if pages is None else None, t.cu_seqlens_q if s.sizes.new is None else None
        used, starts, rows, new_ends = (_side_by_side(x) for x in (t.cached, t.leftpad, rows, new_ends))
        return _Places(used, None, starts, rows, pages, new_ends, s.batch, line, line)
    used, starts, rows = (s.seqlens_k, s.k_start, s.k_row) if reads else (None, None, None)
    return _Places(used, None, starts, rows if pages is None else None, pages, None, s.batch, line, min(s.bound_k, line))


def _factors_copied(problem: Problem, places: _Places, device: torch.device) -> Tensor | None:
    """Memory for the factors of keys in the order of each sequence's keys; None without any."""
    if _of_keys(problem) is None:
        return None
    return torch.empty((problem.batch, problem.heads_kv, places.bound), dtype=torch.float32, device=device)


def _over(problem: Problem, k: Tensor, v: Tensor, lengths: Tensor | None, of_keys: Tensor | None) -> Problem:
    """The call over copies (lines, Hkv, line, D). lengths: of the sequences; None for planning, which does not read them. of_keys: the
    factor of each key, (B, Hkv, keys)."""
    s, score, predicates = problem.sequences, problem.score, problem.predicates
    factors = of_keys if of_keys is not None or problem.kv_scales is None else problem.kv_scales.k
    if isinstance(s, StoredCache):  # whose rows are at the positions of the last keys
        keys = torch.empty(s.batch, dtype=torch.int32, device="meta") if lengths is None else lengths
        queries = s.sizes.rows_q if s.tables.cu_seqlens_q is None else s.tables.cu_seqlens_q
        predicates = tuple([behind(mask, keys, queries) for mask in predicates])
        score = None if score is None else behind(score, keys, queries)
        lengths = keys
    if factors is not None:
        first = replace(_scaled(problem.qhead_per_kvhead, factors.ndim), tensors=(factors,))
        score = first if score is None else chained(first, score)
    moved = None if s is None else _in_lines(s, k.shape[2], lengths, k is problem.k)
    splits = problem.num_splits if k is problem.k and problem.has_wide_heads else problem.num_splits or 1
    return replace(problem, k=k, v=v, score=score, predicates=predicates, sequences=moved, num_splits=splits, kv_scales=None)


def _in_lines(s: Sequences, line: int, lengths: Tensor | None, are_in_place: bool) -> Sequences:
    """The sequences after the keys of each have been moved to a line of ``line`` rows, or are read where they are."""
    if isinstance(s, StoredCache) and are_in_place and s.page_table is not None:
        rows = s.page_table.shape[1] * s.page_size
        sizes = StoredSizes(s.batch, s.sizes.rows_q, rows, s.bound_q, rows, s.page_size)
        return StoredSequences(LengthTables(s.tables.cu_seqlens_q, None, None, lengths), sizes, s.page_table, s.device)
    if isinstance(s, StoredCache):
        sizes = StoredSizes(s.batch, s.sizes.rows_q, line, s.bound_q, line)
        return StoredSequences(LengthTables(s.tables.cu_seqlens_q, None, None, lengths), sizes, None, s.device)
    if not isinstance(s, StoredSequences):
        own = torch.arange(s.batch, device=s.k_start.device)
        return replace(s, page_table=None, page_size=0, k_row=own, is_cache=False)
    if s.tables.cu_seqlens_k is not None:  # packed, as before
        return s
    cu_seqlens_q, _, seqused_q, seqused_k = s.tables
    tables = LengthTables(cu_seqlens_q, None, seqused_q, seqused_k if lengths is None else lengths)
    sizes = s.sizes._replace(rows_k=line, bound_k=min(s.bound_k, line), page_size=0)
    return StoredSequences(tables, sizes, None, s.device)


@lru_cache(maxsize=64)
def _scaled(ratio: int, dims: int) -> TracedMod:
    """The score mod that multiplies by the factor of the batch entry and the K/V head, or of the key, traced with a placeholder for the
    factors."""
    factors = torch.ones((1,) * dims, device="cpu")
    if dims == 2:
        return trace(lambda score, b, h, q_idx, kv_idx: score * factors[b, h // ratio], "score")
    return trace(lambda score, b, h, q_idx, kv_idx: score * factors[b, h // ratio, kv_idx], "score")


def _strides(t: Tensor | None) -> tuple[int, int, int]:
    """Of lines or batch entries, heads and positions."""
    return (0, 0, 0) if t is None else t.stride()[:3] if t.ndim > 2 else (*t.stride(), 0)  # type: ignore[return-value]


def _form(factors: Tensor | None) -> int:
    return NO_FACTOR if factors is None else OF_HEAD if factors.ndim == 2 else OF_KEY


def _side_by_side(table: Tensor | None) -> Tensor | None:
    return table if table is None or table.is_contiguous() else table.contiguous()
