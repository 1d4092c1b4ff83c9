"""Work list of the compiled loops: a coverage and the places of batch entries as arrays of 64-bit numbers."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.torch.compiled.kernel import GROUP, RECORD
from anyattn.backends.torch.coverage import Coverage
from anyattn.problem import Problem

__all__ = ["ITEM_ROWS", "Work", "work_of"]

ITEM_ROWS = 64
_PANEL = 32  # a multiple of the panel's keys on any CPU


@dataclass(frozen=True, eq=False)
class Work:
    """entries, groups, records, segments: ``kernel.ENTRY``, ``GROUP``, ``RECORD`` and (lo, hi, predicates as bits). ranges: of each
    predicate (count, address, strides of b, h and limits), zeros without row ranges; limits: the tensors at these addresses. items:
    of 64 rows. packed_keys: of one K/V head of all entries, each entry's padded."""

    entries: array
    groups: array
    records: array
    segments: array
    ranges: array
    limits: tuple[Tensor, ...]
    items: int
    packed_keys: int

    @property
    def record_count(self) -> int:
        return len(self.records) // len(RECORD)

    @property
    def group_count(self) -> int:
        return len(self.groups) // len(GROUP)


def work_of(problem: Problem, coverage: Coverage) -> Work:
    entries, packed_keys = _entries(problem)
    records, segments, items = array("q"), array("q"), 0
    known: dict[tuple, tuple[int, int]] = {}  # row tiles of several groups share their segments
    groups = array("q")
    for group in coverage.groups:
        groups.extend((group.b_lo, group.b_hi, group.h_lo, group.h_hi, len(records) // len(RECORD), len(group.row_tiles)))
        pairs = (group.b_hi - group.b_lo) * (group.h_hi - group.h_lo)
        for tile in group.row_tiles:
            if (place := known.get(tile.segments)) is None:
                place = known[tile.segments] = len(segments) // 3, len(tile.segments)
                for s in tile.segments:
                    segments.extend((s.lo, s.hi, sum(1 << p for p in s.predicates)))
            records.extend((items, group.b_lo, group.b_hi, group.h_lo, group.h_hi, tile.q_lo, tile.q_hi, *place))
            items += pairs * ceil_div(tile.q_hi - tile.q_lo, ITEM_ROWS)
    limits = tuple(_limits(r) for r in coverage.ranges if r is not None)
    return Work(entries, groups, records, segments, _ranges(coverage, limits), limits, items, packed_keys)


def _entries(problem: Problem) -> tuple[array, int]:
    s, entries, first = problem.sequences, array("q"), 0
    asked = range(problem.batch) if s is None else s.asked_entry.tolist()
    for b in range(problem.batch):
        if s is None:
            keys, place = problem.seqlen_k, (b, 0, b, 0, problem.seqlen_k, 0, 0, 0)
        else:
            host = s.on_host
            keys = host.seqlens_k[b]
            place = (
                host.q_row[b], host.q_start[b], host.k_row[b], host.k_start[b], keys, host.q_first[b], host.row_base[b], host.key_base[b],
            )  # fmt: skip
        padded = ceil_div(keys, _PANEL) * _PANEL
        entries.extend((*place, asked[b], first, padded))
        first += padded
    return entries, first


def _limits(limit: tuple[Tensor, Tensor]) -> Tensor:
    """(n, 2, B or 1, H or 1, rows) int32: where the ranges begin and end."""
    return torch.stack(limit, 1).to(torch.int32).contiguous()


def _ranges(coverage: Coverage, limits: tuple[Tensor, ...]) -> array:
    found, rest = array("q"), iter(limits)
    for limit in coverage.ranges:
        if limit is None:
            found.extend((0,) * 5)
            continue
        t = next(rest)
        steps = (0 if size == 1 else step for size, step in zip(t.shape[2:4], t.stride()[2:4], strict=True))
        found.extend((t.shape[0], t.data_ptr(), *steps, t.stride(1)))
    return found
