"""Coverage: the ranges of keys that each tile of query rows reads, and the predicates that mask inside them.

A *row tile* is a run of query rows that are computed together for a block of batch entries and heads (a *group*) with equal lists. Its
*segments* are disjoint ascending ranges of keys; in a segment without predicates every row sees every key.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import groupby, pairwise

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mask_plan import MaskAbilities, mask_plan
from anyattn.mods.analysis.row_ranges import MAX_RANGES
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, classify
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sequences.split_kv import split_range
from anyattn.sparsity.lists import kept_classes

__all__ = ["Coverage", "Group", "RowTile", "Segment", "cover", "split_of"]

# On the host any row ranges and lists can be intersected, and a call's own lists cost nothing.
_ABILITIES = MaskAbilities(most_ranges=MAX_RANGES, reads_tensors=True, drops_blocks=False, most_lists=None)
_TILE_N = 128  # tile width for classifying masks without row ranges, and for dividing keys among splits
_FEW_KEYS, _TOGETHER = 256, 64  # sequences of a KV cache with at most so many keys are computed together, so many at a time
_SCORES_OF_A_SEQUENCE = 2**21  # scores of a KV cache sequence computed at once, over all its heads


@dataclass(frozen=True)
class Segment:
    """Keys ``lo <= kv < hi``; ``predicates`` are the places in ``Problem.predicates`` of those to evaluate there."""

    lo: int
    hi: int
    predicates: tuple[int, ...] = ()


@dataclass(frozen=True)
class RowTile:
    q_lo: int
    q_hi: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class Group:
    """Batch entries ``b_lo:b_hi`` and query heads ``h_lo:h_hi``, computed together because their lists are equal.

    is_small: sequences of a KV cache with few keys. Results must not depend, bit for bit, on their number.
    """

    b_lo: int
    b_hi: int
    h_lo: int
    h_hi: int
    row_tiles: tuple[RowTile, ...]
    is_small: bool = False


@dataclass(frozen=True, eq=False)
class Coverage:
    """The groups, and for each predicate its row ranges (``Problem.row_limits``), or None if it must be evaluated."""

    groups: tuple[Group, ...]
    ranges: tuple[tuple[Tensor, Tensor] | None, ...]


# One source of segments: for each (b, h) the stretches of its row tiles as (lo, hi, is_full). batch or heads of 1 are broadcast.
@dataclass(frozen=True, eq=False)
class _Source:
    predicate: int | None
    batch: int
    heads: int
    stretches: list[list[list[list[tuple[int, int, bool]]]]]  # [b][h][row tile]


def cover(problem: Problem, tile_m: int, pairs_at_once: int) -> Coverage:
    """Groups with row tiles of ``tile_m`` rows, at most ``pairs_at_once`` (batch, head) pairs to a group."""
    plan, ranges = mask_plan(problem, _ABILITIES), problem.row_limits
    assert not plan.always, "torch runs no CuTe functions"
    sources = []
    if plan.uses_blocks:
        assert problem.blocks is not None
        predicate = None if plan.of_blocks is None else plan.of_blocks.predicates[0]
        sources.append(_from_classes(kept_classes(problem.blocks), problem.blocks.tile, predicate, tile_m, problem))
    for part in plan.ranged:
        limit = ranges[part.predicates[0]]
        assert limit is not None, "validation refuses longer sequences than row ranges are right for"
        sources.append(_from_ranges(*limit, part.predicates[0], tile_m, problem))
    sources += [_classified(part.mask, part.predicates[0], tile_m, problem) for part in plan.listed]
    return Coverage(tuple(_groups(problem, sources, tile_m, pairs_at_once)), ranges)


def _classified(mask: TracedMod, predicate: int, tile_m: int, problem: Problem) -> _Source:
    """Stretches of a mask without row ranges, from its tile classes."""
    s, tile = problem.sequences, (tile_m, _TILE_N)
    if s is not None:
        classes = classify_ragged(mask, s.seqlens_q, s.seqlens_k, *tile, problem.heads_q, s.q_first)
    else:
        classes = classify(mask, problem.seqlen_q, problem.seqlen_k, *tile, problem.batch, problem.heads_q, problem.q.device)
    return _from_classes(classes, tile, predicate, tile_m, problem)


def split_of(coverage: Coverage, split: int, splits: int) -> Coverage:
    """The part of every row tile for one of ``splits`` workers: an equal share of the key tiles between its first and last."""

    def part(row_tile: RowTile) -> RowTile:
        if not row_tile.segments:
            return row_tile
        first, last = row_tile.segments[0].lo // _TILE_N, ceil_div(row_tile.segments[-1].hi, _TILE_N)
        lo, hi = (n * _TILE_N for n in split_range(first, last, split, splits))
        kept = (replace(s, lo=max(s.lo, lo), hi=min(s.hi, hi)) for s in row_tile.segments if max(s.lo, lo) < min(s.hi, hi))
        return replace(row_tile, segments=tuple(kept))

    groups = tuple(replace(g, row_tiles=tuple(part(t) for t in g.row_tiles)) for g in coverage.groups)
    return replace(coverage, groups=groups)


def _from_ranges(lo: Tensor, hi: Tensor, predicate: int, tile_m: int, problem: Problem) -> _Source:
    """Stretches from row ranges: per row tile and range, every row sees [max lo, min hi), and some row sees [min lo, max hi)."""
    empty = lo >= hi
    big = torch.iinfo(lo.dtype).max
    rows = _rows_of_tiles(lo.shape[-1], tile_m, problem)
    lo, hi = lo.masked_fill(empty, big), hi.masked_fill(empty, 0)
    lo, hi = (x[..., rows] for x in (lo, hi))  # (n, batch, heads, tiles, tile_m)
    table = torch.stack([lo.amin(-1), hi.amax(-1), lo.amax(-1), hi.amin(-1)], -1)  # (n, batch, heads, tiles, 4)
    _, batch, heads, _, _ = table.shape
    found: list = table.permute(1, 2, 3, 0, 4).tolist()
    stretches = [[[_sweep([tuple(r) for r in ranges]) for ranges in per_head] for per_head in per_batch] for per_batch in found]
    if problem.sequences is None:
        return _Source(predicate, batch, heads, stretches)
    return _Source(predicate, problem.batch, heads, _by_sequence(stretches[0], _tile_counts(problem, tile_m)))


def _rows_of_tiles(rows: int, tile_m: int, problem: Problem) -> Tensor:
    """(tiles, tile_m): each row tile's rows in the numbering of all concatenated rows; a short tile repeats its last row."""
    device = problem.q.device
    within = torch.arange(tile_m, device=device)
    if problem.sequences is None:
        return (torch.arange(0, rows, tile_m, device=device)[:, None] + within).clamp(max=max(rows - 1, 0))
    s = problem.sequences
    counts = ceil_div(s.seqlens_q, tile_m)
    entry = torch.repeat_interleave(counts)
    tile = torch.arange(len(entry), device=device) - (counts.cumsum(0) - counts)[entry]
    first, last = s.row_base[entry] + tile * tile_m, (s.row_base + s.seqlens_q - 1)[entry]
    return torch.minimum(first[:, None] + within, last[:, None])


def _tile_counts(problem: Problem, tile_m: int) -> list[int]:
    assert problem.sequences is not None
    return [ceil_div(n, tile_m) for n in problem.sequences.on_host.seqlens_q]


def _by_sequence(per_head: list[list], counts: list[int]) -> list[list[list]]:
    """Reorders [h][row tiles of all sequences] to [b][h][row tile]."""
    found, start = [], 0
    for count in counts:
        found.append([tiles[start : start + count] for tiles in per_head])
        start += count
    return found


def _from_classes(classes: Tensor, tile: tuple[int, int], predicate: int | None, tile_m: int, problem: Problem) -> _Source:
    """Stretches of tile classes (B or 1, H or 1, M, N), or (H or 1, tiles of all sequences) in the order of ``classify_ragged``."""
    assert tile[0] % tile_m == 0, f"row tile {tile_m} does not divide the lists' tile {tile[0]}"

    def stretches(rows: list[list[int]], seqlen_q: int, seqlen_k: int) -> list[list[tuple[int, int, bool]]]:
        by_block = [_runs(row, tile[1], seqlen_k) for row in rows]
        return [by_block[t * tile_m // tile[0]] for t in range(ceil_div(seqlen_q, tile_m))]

    if problem.sequences is None:
        lengths = problem.seqlen_q, problem.seqlen_k
        batch, heads = classes.shape[:2]
        listed = [_of_query_heads([stretches(rows, *lengths) for rows in entry], problem) for entry in classes.tolist()]
        return _Source(predicate, batch, problem.heads_q if heads > 1 else heads, listed)
    entries: list = [[] for _ in range(problem.batch)]
    host = problem.sequences.on_host
    for per_head in classes.tolist():
        start = 0
        for entry, seqlen_q, seqlen_k in zip(entries, host.seqlens_q, host.seqlens_k, strict=True):
            rows, columns = ceil_div(seqlen_q, tile[0]), ceil_div(seqlen_k, tile[1])
            ends = [start + m * columns for m in range(rows + 1)]
            entry.append(stretches([per_head[at:end] for at, end in pairwise(ends)], seqlen_q, seqlen_k))
            start = ends[-1]
    entries = [_of_query_heads(entry, problem) for entry in entries]
    return _Source(predicate, problem.batch, problem.heads_q if len(classes) > 1 else len(classes), entries)


def _of_query_heads(per_head: list, problem: Problem) -> list:
    """Stretches per query head, from those of each query head, of each K/V head, or of one head for all, which stay."""
    each = problem.heads_q // len(per_head) if len(per_head) > 1 else 1
    return [one for one in per_head for _ in range(each)]


def _runs(classes: list[int], block_n: int, seqlen_k: int) -> list[tuple[int, int, bool]]:
    """Runs of adjacent tiles of one class as stretches; empty tiles are left out."""
    stretches, start = [], 0
    for kind, run in groupby(classes):
        end = start + len(list(run))
        if kind != EMPTY:
            stretches.append((start * block_n, min(end * block_n, seqlen_k), kind == FULL))
        start = end
    return stretches


def _sweep(found: list[tuple[int, ...]]) -> list[tuple[int, int, bool]]:
    """The union of ranges (some_lo, some_hi, every_lo, every_hi) as disjoint ascending stretches (lo, hi, full)."""
    found = [r for r in found if r[0] < r[1]]
    if len(found) == 1:
        some_lo, some_hi, every_lo, every_hi = found[0]
        if every_lo >= every_hi:
            return [(some_lo, some_hi, False)]
        parts = [(some_lo, every_lo, False), (every_lo, every_hi, True), (every_hi, some_hi, False)]
        return [p for p in parts if p[0] < p[1]]
    edges = sorted({e for r in found for e in (r if r[2] < r[3] else r[:2])})
    stretches: list[tuple[int, int, bool]] = []
    for lo, hi in pairwise(edges):
        if not any(r[0] <= lo and hi <= r[1] for r in found):
            continue
        full = any(r[2] <= lo and hi <= r[3] for r in found)
        if stretches and stretches[-1][1] == lo and stretches[-1][2] == full:
            stretches[-1] = (stretches[-1][0], hi, full)
        else:
            stretches.append((lo, hi, full))
    return stretches


def _groups(problem: Problem, sources: list[_Source], tile_m: int, pairs_at_once: int) -> list[Group]:
    """Rectangles of (batch, head) with equal stretches, of at most ``pairs_at_once`` pairs and of whole K/V heads or parts of one."""
    if problem.sequences is not None:
        return _ragged_groups(problem, sources, tile_m, pairs_at_once)
    by_head = any(s.heads > 1 and any(x != per_b[0] for per_b in s.stretches for x in per_b[1:]) for s in sources)
    groups = []
    head_chunks = [(h, h + 1) for h in range(problem.heads_q)] if by_head else _head_chunks(problem, pairs_at_once)
    most = max(1, pairs_at_once // max(1, head_chunks[0][1] - head_chunks[0][0])) if head_chunks else 1
    known: dict[int, tuple[RowTile, ...]] = {}  # of ``b_lo`` and its like, by head
    b_lo = 0
    while b_lo < problem.batch:
        b_hi = b_lo + 1
        while b_hi < min(problem.batch, b_lo + most) and _agree(sources, b_lo, b_hi):
            b_hi += 1
        for h_lo, h_hi in head_chunks:
            at = h_lo if by_head else 0
            if at not in known:
                known[at] = _row_tiles(problem, sources, (b_lo, at), tile_m)
            groups.append(Group(b_lo, b_hi, h_lo, h_hi, known[at]))
        if b_hi < problem.batch and not _agree(sources, b_lo, b_hi):
            known.clear()
        b_lo = b_hi
    return groups


def _ragged_groups(problem: Problem, sources: list[_Source], tile_m: int, pairs_at_once: int) -> list[Group]:
    """One group per sequence or, for a KV cache, per run of ``alike`` neighbours with few keys.

    The computation of a KV cache's sequence depends on that sequence only, so that its bits do not depend on the batch.
    """
    assert problem.sequences is not None
    s, host = problem.sequences, problem.sequences.on_host
    groups = []
    b_lo, batch, may_join = 0, len(host.seqlens_q), s.is_cache and problem.score is None
    while b_lo < batch:
        seqlen_q, seqlen_k = host.seqlens_q[b_lo], host.seqlens_k[b_lo]
        is_small = may_join and seqlen_k <= _FEW_KEYS
        b_hi = b_lo + 1
        last = min(batch, b_lo + _TOGETHER) if is_small else b_hi
        while b_hi < last and s.alike[b_hi] == s.alike[b_lo] and _agree(sources, b_lo, b_hi):
            b_hi += 1
        pairs = pairs_at_once
        if s.is_cache or seqlen_q == 1:
            pairs = max(1, _SCORES_OF_A_SEQUENCE // max(1, min(tile_m, seqlen_q) * min(1024, seqlen_k)))
        by_head = any(x != source.stretches[b_lo][0] for source in sources for x in source.stretches[b_lo][1:])
        for h_lo, h_hi in [(h, h + 1) for h in range(problem.heads_q)] if by_head else _head_chunks(problem, pairs):
            row_tiles = _row_tiles(problem, sources, (b_lo, h_lo if by_head else 0), tile_m)
            groups.append(Group(b_lo, b_hi, h_lo, h_hi, row_tiles, is_small))
        b_lo = b_hi
    return groups


def _agree(sources: list[_Source], one: int, other: int) -> bool:
    return all(s.batch == 1 or s.stretches[one] == s.stretches[other] for s in sources)


def _row_tiles(problem: Problem, sources: list[_Source], at: tuple[int, int], tile_m: int) -> tuple[RowTile, ...]:
    seqlen_q, seqlen_k = problem.seqlen_q, problem.seqlen_k
    if problem.sequences is not None:
        host = problem.sequences.on_host
        seqlen_q, seqlen_k = host.seqlens_q[at[0]], host.seqlens_k[at[0]]
    starts = range(0, seqlen_q, tile_m)
    return tuple(RowTile(lo, min(lo + tile_m, seqlen_q), _intersect(seqlen_k, sources, at, t)) for t, lo in enumerate(starts))


def _head_chunks(problem: Problem, pairs_at_once: int) -> list[tuple[int, int]]:
    ratio = problem.qhead_per_kvhead
    if pairs_at_once >= ratio:
        step = max(1, pairs_at_once // ratio) * ratio
        return [(h, min(h + step, problem.heads_q)) for h in range(0, problem.heads_q, step)]
    chunks = []
    for kv_head in range(problem.heads_kv):
        first, last = kv_head * ratio, (kv_head + 1) * ratio
        chunks += [(h, min(h + pairs_at_once, last)) for h in range(first, last, pairs_at_once)]
    return chunks


def _intersect(seqlen_k: int, sources: list[_Source], at: tuple[int, int], tile: int) -> tuple[Segment, ...]:
    """The intersection of all sources; a segment has the predicates of the sources that are not full there."""
    segments = [Segment(0, seqlen_k)] if seqlen_k else []
    for source in sources:
        stretches = source.stretches[min(at[0], source.batch - 1)][min(at[1], source.heads - 1)][tile]
        segments = [
            Segment(max(s.lo, lo), min(s.hi, hi), s.predicates if full or source.predicate is None else (*s.predicates, source.predicate))
            for s in segments
            for lo, hi, full in stretches
            if max(s.lo, lo) < min(s.hi, hi)
        ]
    return tuple(segments)
