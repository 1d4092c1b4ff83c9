"""Launches of ``kernels.pair_tile``: gradients of small problems in one launch, and of captured tensors that all batch entries share.

The three launches of ``backward_pass`` each wait longer than a window of 49 or 64 positions computes, and add a term to a captured
tensor's gradient for every pair of every entry: with them alone, gradients of 2,048 windows of 64 positions with a table take 2.5 times as
long on an H200 as SDPA's with a dense bias (14 and 35 TFLOPS).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.triton import deterministic_sum, tile_config
from anyattn.backends.triton.codegen.assumptions import shape_of
from anyattn.backends.triton.codegen.entry import Group, Signature
from anyattn.backends.triton.codegen.programs import (
    CallProgram,
    CapturedValues,
    by_entry,
    captured_of,
    gradient_part,
    program_of,
    summed_over_entries,
)
from anyattn.backends.triton.kernel_arguments import PARTS, constants_of
from anyattn.backends.triton.kernels.arguments import BackwardStrides, Lists, PairConstants, PairSizes, PairSpans, PairTensors
from anyattn.backends.triton.launch_cache import LaunchCache, LaunchSpec, launch_cached, launch_key
from anyattn.backends.triton.launch_shape import MOST_BLOCKS
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.tile_config import Shape, Tiles
from anyattn.mods.ir.dependence import dependence
from anyattn.problem import Problem
from anyattn.triton_tools.launch import strides_of

__all__ = ["PairTiles", "launch_pairs", "needed", "pair_tiles_of", "pairs_for"]

_GROUPS = (
    Group("pointer", PairTensors), Group("stride", BackwardStrides), Group("long", PairSpans), Group("int", PairSizes),
    Group("pointer", Lists), Group("float", "scale"),
)  # fmt: skip
_PAIRS = Signature("pair_tile.pair_tile", _GROUPS, PARTS, PairConstants)
_NO_TABLES = Tables(1, None, None, None, (None, None, None, None), (0, 0), (0, 0, 0, 0))
_MOST = 64  # positions of a tile
_SIDES = (32, _MOST)  # of tiles with all pairs of an entry: few, so that problems of many sizes share their kernels
_MOST_SUMS = 2  # that a program has registers for
_FEWEST_ENTRIES = 8  # with fewer, additions for each entry cost less than computing the scores once more
_FEWEST_EACH = 4  # of them, of a program
_MOST_FLOATS = 64  # terms of a float32 sum, whose total is more precise
_PROGRAMS = 4  # per multiprocessor


class PairTiles(NamedTuple):
    """is_whole: one tile has all pairs of an entry."""

    tiles: Tiles
    is_whole: bool


def pair_tiles_of(problem: Problem, asked: Tiles | None) -> PairTiles | None:
    """The kernel's tiles for a plan's problem, None if it is left to the other kernels: with sequences, with given lists, and with several
    tiles where a mask hides most of them, which a program looks at one by one. asked: of kernel_options."""
    call_program = program_of(problem)
    if problem.sequences is not None or call_program.lists == "given":
        return None
    shape, capability = shape_of(problem), tile_config.capability_of(problem.q.device)
    most_m, most_n = (_MOST, _MOST) if asked is None else (asked.tile_m, asked.tile_n)
    side = next((n for n in _SIDES if max(problem.q.shape[2], problem.k.shape[2]) <= n <= min(most_m, most_n)), None)
    is_whole = side is not None and max(shape.d, shape.dv) <= _widest_whole(shape, capability) and problem.qhead_per_kvhead == 1
    if not is_whole and (call_program.program.ranges is None or call_program.program.has_band):
        return None
    tiles = _fitting(shape, capability, *((side, side) if side is not None and is_whole else (most_m, most_n)))
    return None if tiles is None else PairTiles(tiles, is_whole)


def _widest_whole(shape: Shape, capability: tuple[int, int] | None) -> int:
    """The widest head dimension of a tile with all pairs of an entry; beyond it the loop spills registers. In float32 it always does, and
    delta would not be exact enough."""
    if shape.dtype.itemsize != 2:
        return 0
    return 128 if tile_config.architecture(capability) in ("sm_90", "sm_100") else 32


def _fitting(shape: Shape, capability: tuple[int, int] | None, tile_m: int, tile_n: int) -> Tiles | None:
    """Warps, and as many stages as leave room for several programs on a multiprocessor; None if one stage does not fit."""
    widest, room = max(shape.d, shape.dv), tile_config.shared_memory(capability)
    each = 1024 if widest <= 32 or _has_warp_groups(shape, capability, tile_m) else 512  # elements of a warp
    warps = min(8, max(2, tile_m * max(tile_n, widest) // each))
    choices = [(Tiles(tile_m, tile_n, warps, stages), room // programs) for stages, programs in ((3, 3), (2, 2), (2, 1), (1, 1))]
    return next((tiles for tiles, most in choices if needed(tiles, shape, capability) <= most), None)


def needed(tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> int:
    """Shared memory bytes that suffice: for the stages, p or ds by columns, a result on its way to memory, and small parts; later for the
    places to which sums are added."""
    m, n, size = tiles.tile_m, tiles.tile_n, shape.dtype.itemsize
    stages = max(1, tiles.num_stages - (not _has_warp_groups(shape, capability, m)))
    step = size * (m + n) * (shape.d + shape.dv) + 8 * m
    return max(stages * step + size * (m * n + max(m, n) * max(shape.d, shape.dv)), 8 * m * n) + 2048


def _has_warp_groups(shape: Shape, capability: tuple[int, int] | None, tile_m: int) -> bool:
    """Whether warp groups multiply, whose products read stages in flight."""
    return shape.dtype.itemsize == 2 and tile_m >= 64 and tile_config.architecture(capability) in ("sm_90", "sm_100")


def pairs_for(problem: Problem, pairs: PairTiles | None) -> PairTiles | None:
    """``pairs`` for the kernel's share of a call's gradients: all of them (``is_whole``) or those of captured tensors; None if it has none.
    pairs: of the plan."""
    wanted, score = problem.wanted_slots, problem.score
    if pairs is None or score is None or not wanted:
        return pairs if pairs is not None and pairs.is_whole else None
    sums = summed_over_entries(score, wanted, problem.q.dtype)
    if sums is None or sums.tiles > _MOST_SUMS:
        return None
    return pairs if pairs.is_whole or (sums.has_pairs and problem.batch >= _FEWEST_ENTRIES) else None


@lru_cache(maxsize=16)
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132


def _entries_each(problem: Problem, tiles: int, is_whole: bool, has_sums: bool) -> int:
    """The batch entries of a program: so many that a multiprocessor has about ``_PROGRAMS`` programs. tiles: of an entry's heads."""
    chunks = max(1, _PROGRAMS * _processors(problem.q.device) // tiles)
    entries = ceil_div(problem.batch, min(chunks, problem.batch))
    if not is_whole:  # with fewer, a sum saves too few additions
        entries = min(problem.batch, max(entries, _FEWEST_EACH))
    if has_sums and problem.q.dtype is torch.float32:
        entries = min(entries, _MOST_FLOATS)
    return max(entries, ceil_div(problem.batch, MOST_BLOCKS))


def launch_pairs(
    launches: LaunchCache,
    problem: Problem,
    pairs: PairTiles,
    tensors: tuple[Tensor | None, ...],
    filled: tuple[Tensor, ...],
    totals: tuple[Tensor, ...],
) -> None:
    """Launches the kernel. tensors: ``PairTensors``, dq, dk and dv None if not needed. filled: q, k, v, dout and the gradients, which other
    tensors of the same shapes replace if they are not needed. totals: buffers for the gradients of captured tensors."""
    named = PairTensors(*tensors)
    flags = tuple([t is None for t in (named.dlse, named.delta, named.dq, named.dk, named.dv)])
    of_dlse = None if named.dlse is None else named.dlse.stride()
    key = (*launch_key(problem, _NO_TABLES, *filled[3:]), pairs, flags, of_dlse, problem.wanted_slots, *[t.dtype for t in totals])
    launch_cached(launches, key, problem, tensors, _NO_TABLES.lists, _spec, (problem, pairs, named, filled, totals), totals)


def _spec(problem: Problem, pairs: PairTiles, named: PairTensors, filled: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> LaunchSpec:
    call_program, captured = _program(problem, totals)
    program, tiles = call_program.program, pairs.tiles
    aligned, strides = strides_of(*filled)
    rows, keys = problem.q.shape[2], problem.k.shape[2]
    row_tiles, key_tiles = ceil_div(rows, tiles.tile_m), ceil_div(keys, tiles.tile_n)
    entries = _entries_each(problem, row_tiles * key_tiles * problem.heads_q, pairs.is_whole, bool(totals))
    dlse = (0, 0, 0) if named.dlse is None else named.dlse.stride()
    ranges = program.ranges
    skips = not pairs.is_whole and ranges is not None and not any(dependence(ranges.expr)[at].b for at in ranges.expr.outputs)
    sums = 0 if program.score is None else len({load.term for load in program.score.loads})
    options = constants_of(problem, call_program, _NO_TABLES) | {
        "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        "IS_NEAR": all((t.stride(2) + 1) * t.shape[2] < 2**31 for t in filled),
        "IS_CUT": bool(rows % tiles.tile_m or keys % tiles.tile_n), "IS_WHOLE": pairs.is_whole, "TERMS": sums, "SKIPS": skips,
        "HAS_DQ": named.dq is not None, "HAS_DK": named.dk is not None, "HAS_DV": named.dv is not None,
        "HAS_DLSE": named.dlse is not None, "HAS_DELTA": named.delta is not None,
    }  # fmt: skip
    grid = (row_tiles * key_tiles, problem.heads_q, ceil_div(problem.batch, entries))
    numbers = (*strides, *dlse, *PairSizes(problem.batch, rows, keys, problem.heads_q, problem.qhead_per_kvhead, key_tiles, entries))
    return LaunchSpec(_PAIRS, call_program, program, captured, aligned, grid, numbers, options)


def _program(problem: Problem, totals: tuple[Tensor, ...]) -> tuple[CallProgram, list[CapturedValues]]:
    """The program of a call for a loop over its batch entries, and its captured values. A mask is evaluated, no lists are made for it."""
    call_program = replace(program_of(problem), lists=None)
    program, captured, mods = call_program.program, list(captured_of(call_program)), list(call_program.mods)
    if program.sees_all:
        at = program.parts.index(program.ranges)  # type: ignore[arg-type]
        del captured[at], mods[at]
        program = replace(program, ranges=None)
    changes: dict[str, Any] = {name: by_entry(p) for name in ("listed", "always") if (p := getattr(program, name)) is not None}
    if problem.score is not None:
        wanted = problem.wanted_slots if totals else ()
        are_exact = tuple(s for s, total in zip(wanted, totals, strict=True) if deterministic_sum.is_exact(total))
        changes["score"] = part = by_entry(gradient_part(problem, wanted, are_exact))
        captured[0] = CapturedValues(*captured[0][:2], totals, part.style.even)
    return CallProgram(replace(program, **changes), tuple(mods), None), captured
