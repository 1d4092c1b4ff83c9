"""Decoding: entries of one query each, whose heads see one range of keys, by ATen's flash-attention CPU kernel on views of the cache.

The query heads that share K and V are the rows of the kernel's matrix. Each entry is a call of its own: in a call of several the last bits
of an entry depend on the thread that computes it, by the alignment of the thread's memory, and so on the rest of the batch.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.result import Result
from anyattn.backends.torch import aten_flash
from anyattn.backends.torch.coverage import Group
from anyattn.backends.torch.plan import TorchPlan
from anyattn.backends.torch.tiles import rows_of_queries, statistic_of_queries
from anyattn.backends.torch.workspace import Workspace
from anyattn.mods.analysis.row_ranges import RowRanges, has_range_on_host, range_on_host, row_ranges
from anyattn.problem import Problem

__all__ = ["Decoder", "forward"]

_EXACT = (torch.float32, torch.float64)  # dtypes in which the kernel rounds no probability
_MOST_HEADS = 2048  # more may be in several groups
_COPIED = 2**21  # most bytes of an entry's keys that are copied: more leave the CPU's cache before they are read


def forward(problem: Problem, plan: TorchPlan) -> Result | None:
    """The results of a call whose rows of storage hold one query each, without tables of tiles; None for other calls, also those whose
    masks have several ranges or read tensors."""
    sequences, q = problem.sequences, problem.q
    if q.shape[2] != 1 or (problem.blocks is not None and not problem.blocks_follow) or not problem.has_pairs:
        return None
    decoder, ranges, batch = Decoder.of(problem, plan), _ranges(problem), problem.batch
    has_one_each = sequences is None or (len(q) == batch and sequences.on_host.seqlens_q.count(1) == batch)
    if decoder is None or ranges is None or not has_one_each:
        return None
    keys = [_visible(problem, ranges, b) for b in range(batch)]
    if decoder.copies and max(decoder.bytes_of(lo, hi) for lo, hi in keys) > _COPIED:
        return None
    rows = decoder.rows(q)
    if batch == 1 and not problem.wants_lse and (whole := decoder.whole(rows, *keys[0])) is not None:
        return Result(whole, None, None)
    out = rows_of_queries(problem, q.shape[3], q.dtype)
    lse = statistic_of_queries(problem) if problem.wants_lse else None
    outs, lses = decoder.rows(out).split(1), [None] * batch if lse is None else decoder.rows(lse).split(1)
    for b, range_, *views in zip(range(batch), keys, rows.split(1), outs, lses, strict=True):
        decoder.attend(b, *range_, *views)
    return Result(out, lse, None)


def _ranges(problem: Problem) -> list[RowRanges] | None:
    """The row ranges of each predicate; None if ``_visible`` cannot compute with one of them."""
    found = [None if mask.tensors else row_ranges(mask) for mask in problem.predicates]
    return found if all(r is not None and has_range_on_host(r) for r in found) else None  # type: ignore[return-value]


def _visible(problem: Problem, ranges: list[RowRanges], b: int) -> tuple[int, int]:
    """The keys ``lo:hi`` that the query of entry ``b`` sees."""
    sequences, lo, q_idx, hi = problem.sequences, 0, 0, problem.seqlen_k
    if sequences is not None:
        q_idx, hi = sequences.on_host.q_first[b], sequences.on_host.seqlens_k[b]
    for each in ranges:
        first, end = range_on_host(each, q_idx)
        lo, hi = max(lo, first), min(hi, end)
    return lo, hi


class Decoder:
    """The attention of a call's entries that have one query and one range of keys."""

    def __init__(self, problem: Problem, dtype: torch.dtype) -> None:
        self.problem, self.dtype, self.workspace = problem, dtype, Workspace(problem.q.device)
        # one matrix for each query head where there is one K/V head: the kernel shares matrices among threads
        self.heads = problem.heads_kv if problem.heads_kv > 1 else problem.heads_q
        self.sink = None if problem.sink is None else problem.sink.to(problem.stat_dtype).view(self.heads, -1)
        self.copies = dtype != problem.k.dtype or (problem.sequences is not None and problem.sequences.page_table is not None)

    @classmethod
    def of(cls, problem: Problem, plan: TorchPlan) -> Decoder | None:
        """None for a call that the kernel does not compute, which does not depend on lengths and masks."""
        q, k, v = problem.q, problem.k, problem.v
        if problem.score is not None or problem.dropout is not None or problem.wants_max or plan.product_dtype not in _EXACT:
            return None
        width = q.shape[3]
        if width != v.shape[3] or not 0 < problem.heads_q <= _MOST_HEADS or not width or not aten_flash.has_few_rows(q, k, v):
            return None
        overlaps = q.stride(1) < width or k.stride(2) < width or v.stride(2) < width  # not in the kernel's matrices
        return None if overlaps else cls(problem, plan.product_dtype)

    def serves(self, group: Group) -> bool:
        """Whether a group has one query an entry and all heads, which see one range of keys."""
        if [t.q_hi for t in group.row_tiles] != [1] or (group.h_lo, group.h_hi) != (0, self.problem.heads_q):
            return False
        segments = group.row_tiles[0].segments
        if any(s.predicates for s in segments) or any(a.hi != b.lo for a, b in pairwise(segments)):
            return False
        return not (self.copies and segments) or self.bytes_of(segments[0].lo, segments[-1].hi) <= _COPIED

    def bytes_of(self, lo: int, hi: int) -> int:
        """The bytes of an entry's copied keys ``lo:hi``."""
        return (hi - lo) * self.problem.k.shape[1] * self.problem.k.shape[3] * self.dtype.itemsize

    def attend_group(self, group: Group, out: Tensor, lse: Tensor | None) -> None:
        """Writes the results of a group that ``serves`` into those of the call."""
        segments, sequences = group.row_tiles[0].segments, self.problem.sequences
        lo, hi = (segments[0].lo, segments[-1].hi) if segments else (0, 0)
        for b in range(group.b_lo, group.b_hi):
            row, start = (b, 0) if sequences is None else (sequences.on_host.q_row[b], sequences.on_host.q_start[b])
            place = slice(row, row + 1), slice(None), slice(start, start + 1)
            of_lse = None if lse is None else self.rows(lse[place])
            self.attend(b, lo, hi, self.rows(self.problem.q[place]), self.rows(out[place]), of_lse)

    def rows(self, x: Tensor) -> Tensor:
        """(entries, heads, rows, ...): the rows of the kernel's matrices in ``x`` (entries, query heads, 1, ...)."""
        return x if x.shape[1] == self.heads else x.reshape(x.shape[0], self.heads, x.shape[1] // self.heads, *x.shape[3:])

    def whole(self, q: Tensor, lo: int, hi: int) -> Tensor | None:
        """The output of the only entry in the kernel's memory; None if strides, dtype or copies of keys do not allow that."""
        if self.copies or q.shape[2] > 1 or lo >= hi:
            return None
        out, _ = self._attention(0, lo, hi, q)
        return out if out.stride() == q.stride() else None

    def attend(self, b: int, lo: int, hi: int, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        """Writes the results of entry ``b`` over its keys ``lo:hi``. q, out, lse: its ``rows``."""
        if lo < hi:
            result, statistic = self._attention(b, lo, hi, q)
            out.copy_(result)
            if lse is not None:
                lse.copy_(statistic)
            return
        out.zero_()
        if lse is not None:
            lse.fill_(-math.inf) if self.sink is None else lse.copy_(self.sink)

    def _attention(self, b: int, lo: int, hi: int, q: Tensor) -> tuple[Tensor, Tensor]:
        """The normalised output and the log-sum-exp, as ``rows``."""
        problem = self.problem
        k, v = self._keys(problem.k, "k", b, lo, hi), self._keys(problem.v, "v", b, lo, hi)
        if k.shape[1] != self.heads:
            k, v = k.expand(-1, self.heads, -1, -1), v.expand(-1, self.heads, -1, -1)
        out, lse = aten_flash.few_rows(q if q.dtype == self.dtype else q.to(self.dtype), k, v, None, problem.scale, False)
        return (out, lse) if self.sink is None else _with_sink(out, lse, self.sink)

    def _keys(self, x: Tensor, name: str, b: int, lo: int, hi: int) -> Tensor:
        """(1, K/V heads, hi - lo, D) of keys or values, a view where storage allows."""
        sequences, (_, heads, size, width) = self.problem.sequences, x.shape
        row, start = b, lo
        if sequences is not None:
            row, start = sequences.on_host.k_row[b], sequences.on_host.k_start[b] + lo
            if sequences.page_table is not None:
                first = start // size
                pages = sequences.page_table[b, first : ceil_div(start + hi - lo, size)]
                pages = pages if pages.dtype in (torch.int32, torch.int64) else pages.long()
                taken = self.workspace.take(f"pages of {name}", (len(pages), size, heads, width), x.dtype)
                torch.index_select(x.transpose(1, 2), 0, pages, out=taken)
                x, row, start = taken.view(1, -1, heads, width).transpose(1, 2), 0, start - first * size
        steps = x.stride()
        part = x.as_strided((1, heads, hi - lo, width), steps, x.storage_offset() + row * steps[0] + start * steps[2])
        if x.dtype == self.dtype:
            return part
        tokens = self.workspace.take(f"converted {name}", (1, hi - lo, heads, width), self.dtype).transpose(1, 2).copy_(part)
        factors = self._factors(name, b, lo, hi)
        return tokens if factors is None else tokens.mul_(factors)

    def _factors(self, name: str, b: int, lo: int, hi: int) -> Tensor | None:
        """(K/V heads, hi - lo or 1, 1): the factors of the 8-bit keys or values ``lo:hi`` of entry b."""
        scales, sequences = self.problem.kv_scales, self.problem.sequences
        factors = None if scales is None else scales.k if name == "k" else scales.v
        if factors is None:
            return None
        if factors.ndim == 2:
            return factors[b, :, None, None]
        if sequences is None:
            return factors[b, :, lo:hi, None]
        row, start, size = sequences.on_host.k_row[b], sequences.on_host.k_start[b] + lo, factors.shape[2]
        if sequences.page_table is None:
            return factors[row, :, start : start + hi - lo, None]
        first = start // size
        pages = sequences.page_table[b, first : ceil_div(start + hi - lo, size)].long()
        return factors[pages].transpose(0, 1).flatten(1)[:, start - first * size :][:, : hi - lo, None]


def _with_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """The normalised output and log-sum-exp with a sink's logits, which broadcast to ``lse``, in the denominator."""
    highest = torch.maximum(lse, sink).clamp_min_(torch.finfo(lse.dtype).min)
    of_keys = (lse - highest).exp_()
    total = of_keys + (sink - highest).exp_()
    return out * (of_keys / total)[..., None], highest + total.log()
