"""Calls that the Hopper kernels can compute, but Triton's in less time: measured classes, of which the planner asks if no backend is named.

A Hopper thread block computes 128 rows of queries, forward, or 128 keys, backward, whatever the lengths, and pads head dimensions below 64;
Triton's programs are smaller. Loads of a score mod for every pair stall a thread block's products, which several smaller programs on one
multiprocessor hide; where they read even tiles of a table, Triton loads those ahead. Times of Triton over Hopper's, bfloat16, head
dimensions 32 and 64 unless said (docs/history/reach.md):

forward, at most 64 queries and keys                            0.40 to 0.74
forward, a load for every pair at an index read from a table    0.50 to 1.00
forward, even tiles                                             0.45 to 0.70
forward, any load for every pair, few row tiles                 0.72 to 0.81
forward, the same, head dimension 32, at most 512 queries       0.93 to 0.96
forward, clamped distances, 8 times as many keys as are near    0.89 (the near ones by a table, which Hopper's time has not)
backward, at most 64 queries and keys, to head dimension 128    0.21 to 0.68
backward, the same, gradients of tables that a batch shares     0.05 to 0.78
backward, even tiles with gradients, at most 64 keys            0.44 to 0.56
backward, even tiles, head dimension 32                         0.71 to 0.89
backward, even tiles, head dimension 64, 384 keys or more       0.82 to 0.97
backward, a load at an index read from a table, few key tiles   0.48 to 0.57
backward, gradients of tables by row and clamped distance       counted, not measured: no atomic additions
"""

from __future__ import annotations

from functools import lru_cache

import torch

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.codegen.score_analysis import reads, stages
from anyattn.backends.hopper.config import LEAST_ROWS, TILE_M
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.pack_gqa import groups_of_entry, row_tiles_of_batch
from anyattn.backends.hopper.split_keys import reason_against_splits
from anyattn.hardware import Hardware
from anyattn.mods.analysis.captured_loads import distance_tables, even_slots, loads_even_tiles
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.far_sides import far_sides
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.problem import Problem

__all__ = ["FEW_QUERIES", "slower_backward", "slower_forward"]

_EVEN = "it takes longer where the score mod reads even tiles of a table by pair"
_SHORT = 64  # queries and keys
_WIDEST = 64  # head dimension up to which the classes were measured
_WIDEST_SHORT = 128  # of short calls, backward
_NARROW, _FEW_ROWS = 32, 512  # head dimension and queries
_LONG = 384  # keys
FEW_QUERIES = 16  # whose keys take longer to read than to multiply: 65,536 keys of 8 heads take one program each 740 us, shared evenly 69
_FAR = 8  # times as many keys as distances that are not far
_LEAST_VISITS = 1  # of tiles of keys, for each multiprocessor: 256 in all take 24 us, Triton's kernel 33 to 38 (H200)
_LEAST_TALL, _LEAST = 0.65, 0.45  # row tiles of each multiprocessor, of more than 128 rows and of 128: see ``_reason_in_order``
_FEW = 2  # the multiprocessors are so many times the tiles


def slower_forward(problem: Problem, hardware: Hardware) -> str | None:
    """The reason why Triton takes less time for the forward pass, as text; None if none is known."""
    if problem.is_batch_invariant:
        return _reason_in_order(problem, hardware)
    if problem.num_splits == 0 and problem.bound_q <= FEW_QUERIES and reason_against_splits(problem):
        return f"it has no split keys, which at most {FEW_QUERIES} queries want"
    if reason := _reason_of_wide(problem, hardware):
        return reason
    if not _is_measured(problem):
        return None
    if _is_short(problem):
        return f"it takes longer for at most {_SHORT} queries and keys"
    if problem.score is None or not reads(problem.score.expr):
        return None
    if _looks_up(problem.score.expr):
        return "it takes longer where the score mod looks up every pair in a table"
    if _reads_even_tiles(problem):
        return _EVEN
    if _is_mostly_far(problem):
        return "it takes longer where the score mod loads for every pair, but not of queries and keys that are far apart, which are most"
    if max(problem.q.shape[3], problem.v.shape[3]) <= _NARROW and problem.q.shape[2] <= _FEW_ROWS:
        return f"it takes longer where the score mod loads for every pair, up to head dimension {_NARROW} and {_FEW_ROWS} queries"
    return _reason_of_few(problem, problem.q.shape[2], hardware, "rows")


def _reason_in_order(problem: Problem, hardware: Hardware) -> str | None:
    """The same of a call of ``deterministic="batch"``, whose sections of keys are programs of their own in Triton's kernel.

    Microseconds of Triton and Hopper, causal (H200): D 64, 8 heads of 2,048 rows 33.5 and 28.2, 4 heads of 4,096 rows 50.0 and 50.2, two
    heads 29.0 and 49.8; D 96, 8 heads of 2,048 rows 60.0 and 31.7; D 128, 4 heads of 2,048 rows 35.4 and 27.0, one head of 8,192 rows 78.5
    and 92.2, 8 heads of 512 rows and 8,192 keys 57.4 and 91.9; D 256, 4 heads of 2,048 rows 76.0 and 46.1, 8 heads of 512 rows and 8,192
    keys 147 and 171.
    """
    if problem.bound_q <= FEW_QUERIES:
        return f"it has no programs for each section of keys, which at most {FEW_QUERIES} queries want"
    config = forward_spec(problem).config
    tiles = round(groups_of_entry(problem, config) * row_tiles_of_batch(problem, config.tile_q))
    share = _LEAST_TALL if config.tiles.tile_m > TILE_M else _LEAST
    return f"its {tiles} row tiles are for fewer than {share:.0%} of the multiprocessors" if tiles < share * hardware.sm_count else None


def slower_backward(problem: Problem, hardware: Hardware) -> str | None:
    """``slower_forward`` for the backward pass."""
    if not _is_measured(problem, _WIDEST_SHORT if _is_short(problem) else _WIDEST) or problem.deterministic:
        return None
    is_narrow, learns = max(problem.q.shape[3], problem.v.shape[3]) <= _NARROW, bool(problem.wanted_slots)
    if _is_short(problem) and (not learns or _are_shared(problem.score.expr, problem.wanted_slots)):  # type: ignore[union-attr]
        return f"it takes longer for at most {_SHORT} queries and keys"
    if problem.score is not None and _reads_even_tiles(problem):
        if is_narrow or problem.k.shape[2] >= _LONG or (learns and _is_short(problem)):
            return _EVEN
    if learns and _sums_by_distance(problem):
        return "it adds the gradients of tables by row and distance pair by pair"
    if learns or problem.score is None or not _looks_up(problem.score.expr):
        return None
    return _reason_of_few(problem, problem.k.shape[2], hardware, "keys")


@lru_cache(maxsize=256)
def _are_shared(expr: Expr, slots: tuple[int, ...]) -> bool:
    """Whether no batch entry reads entries of its own of these captured tensors: Triton sums their gradients before it adds them up."""
    deps = dependence(expr)
    return not any(n.op == "load" and n.attr in slots and any(deps[a].b or deps[a].score for a in n.args) for n in expr.nodes)


def _reads_even_tiles(problem: Problem) -> bool:
    """Whether the score mod reads a value for every pair, all of them from tables with even rows."""
    score = problem.score
    if score is None or not reads(score.expr):
        return False
    return loads_even_tiles(score.expr, even_slots(score.expr, score.tensors))


def _is_mostly_far(problem: Problem) -> bool:
    """Whether Triton's kernel loads nothing per pair in most tiles (``far_sides``): only Triton's has loops of their own for them."""
    score, are_near = problem.score, 0
    assert score is not None
    for side in far_sides(score.expr):
        if side is None or problem.skip is not None:
            return False
        are_near += int(run(side.reach, {}, score.scalars, ())[0])
    masks = [ranges_unread(mask) for mask in problem.predicates]
    return all(ranges is not None and ranges.count == 1 for ranges in masks) and problem.k.shape[2] >= _FAR * are_near


def _sums_by_distance(problem: Problem) -> bool:
    """Whether all captured gradients are those of tables by row and distance, and most pairs are far apart: Triton's kernels sum them
    without atomic additions, if the near places of a row are not many more than the table has."""
    score, wanted = problem.score, problem.wanted_slots
    assert score is not None
    if len(distance_tables(score.expr, wanted, problem.q.dtype is torch.float16)) < len(wanted) or not _is_mostly_far(problem):
        return False
    near = sum(int(run(side.reach, {}, score.scalars, ())[0]) for side in far_sides(score.expr) if side is not None)
    return near <= 2 * min(score.tensors[slot].shape[3] for slot in wanted)


def _reason_of_wide(problem: Problem, hardware: Hardware) -> str | None:
    """The reason for heads above 256, whose row tiles have 64 rows. Padded to 512 columns as in Triton's kernel, heads of 264 to 480 took
    0.55 to 0.62 of its time (H200). Decoding of 32 sequences of 8,192 keys from one cache took 101 us with 64 heads, Triton's kernel 167,
    and 134 with 16 heads, which take Hopper's no longer; with 128 heads 143 and 285. Other calls of few rows are counted, not measured."""
    if not problem.has_wide_heads:
        return None
    config, is_decoding = forward_spec(problem).config, problem.bound_q <= FEW_QUERIES and problem.sequences is not None
    rows = min(problem.bound_q, config.own_q) * min(problem.qhead_per_kvhead, config.own_heads)
    if rows < min(LEAST_ROWS, problem.bound_q * problem.qhead_per_kvhead) if is_decoding else 2 * rows <= LEAST_ROWS:
        return f"{rows} of the {LEAST_ROWS} rows of its tiles are in use"
    if not is_decoding:
        return None
    if not problem.has_one_kv:
        return "few queries of values apart from keys, of which it has one tile in flight, are not measured"
    tiles = problem.batch * problem.heads_kv * ceil_div(problem.bound_q * problem.qhead_per_kvhead, LEAST_ROWS)
    tiles *= ceil_div(problem.bound_k, LEAST_ROWS)
    if tiles < _LEAST_VISITS * hardware.sm_count:
        return f"the {tiles} tiles of scores take about as long as the launches for tables and splits"
    return None


def _is_measured(problem: Problem, widest: int = _WIDEST) -> bool:
    """Whether a call is of a kind whose times are known: dense, without block lists and dropout, each head with its own keys."""
    is_dense = problem.sequences is None and problem.blocks is None and problem.dropout is None
    return is_dense and problem.qhead_per_kvhead == 1 and max(problem.q.shape[3], problem.v.shape[3]) <= widest


def _is_short(problem: Problem) -> bool:
    return max(problem.q.shape[2], problem.k.shape[2]) <= _SHORT


def _reason_of_few(problem: Problem, length: int, hardware: Hardware, what: str) -> str | None:
    tiles = problem.batch * problem.heads_q * ceil_div(length, TILE_M)
    if _FEW * tiles > hardware.sm_count:
        return None
    return f"it takes longer where the score mod loads for every pair and there are few tiles of {what}: {tiles} of {TILE_M}"


@lru_cache(maxsize=256)
def _looks_up(expr: Expr) -> bool:
    """Whether some tensor is loaded for every pair at an index that was itself loaded for every pair.

    >>> import torch
    >>> from anyattn.mods.tracing.trace import trace
    >>> bias, buckets, table = torch.rand(9, 9), torch.zeros(9, 9, dtype=torch.int64), torch.rand(5)
    >>> _looks_up(trace(lambda s, b, h, q, k: s + table[buckets[q, k]], "score").expr)
    True
    >>> _looks_up(trace(lambda s, b, h, q, k: s + bias[q, k], "score").expr)
    False
    """
    depends: list[bool] = []  # whether a node depends on a load for every pair, or is one
    for node, due in zip(expr.nodes, stages(expr), strict=True):
        is_load, above = node.op == "load" and due == "tile", any(depends[i] for i in node.args)
        if is_load and above:
            return True
        depends.append(is_load or above)
    return False
