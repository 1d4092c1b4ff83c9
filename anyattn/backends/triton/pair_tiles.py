"""Launches of ``kernels.pair_tile``: all gradients of a small problem in one launch.

The three launches of ``backward_pass`` each wait longer than a window of 49 or 64 positions computes, and add a term to a captured
tensor's gradient for every pair of every entry. Times on an H200 of 1,024 windows of 49 positions, 4 heads, head dimension 32, bfloat16,
with a table looked up by pair, in microseconds:

                     three launches    one launch    SDPA with a dense bias
gradient of table    306               66            220
no such gradient     129               39            191
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from anyattn import hardware
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
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.tile_config import Shape, Tiles
from anyattn.problem import Problem
from anyattn.triton_tools.launch import strides_of

__all__ = ["launch_pairs", "needed", "pair_tiles_of", "pairs_for"]

_GROUPS = (
    Group("pointer", PairTensors), Group("stride", BackwardStrides), Group("long", PairSpans), Group("int", PairSizes),
    Group("pointer", Lists), Group("float", "scale"),
)  # fmt: skip
_PAIRS = Signature("pair_tile.pair_tile", _GROUPS, PARTS, PairConstants)
_NO_TABLES = Tables(1, None, None, None, (None, None, None, None), (0, 0), (0, 0, 0, 0, 1))
_SIDES = (32, 64)  # positions of a tile: few, so that problems of many sizes share their kernels
_MOST_SUMS = 2  # that a program has registers for
_PROCESSORS = 132  # where a device has none: the interpreter
_PROGRAMS = 2  # per multiprocessor, all resident with 255 registers a thread: the fastest of 2, 3, 4, 6 and 8 on an H200


def pair_tiles_of(problem: Problem, asked: Tiles | None) -> Tiles | None:
    """The kernel's tile, which has all pairs of an entry, for a plan's problem. None if it is left to the other kernels: with more
    positions or wider heads, with sequences, with given lists, where heads share keys, and for wide gradients of keys, which spill. asked:
    of kernel_options."""
    if problem.sequences is not None or problem.wide_kv_grads or program_of(problem).lists == "given" or problem.qhead_per_kvhead > 1:
        return None
    shape, capability = shape_of(problem), tile_config.capability_of(problem.q.device)
    most = _SIDES[-1] if asked is None else min(asked.tile_m, asked.tile_n)
    side = next((n for n in _SIDES if max(problem.q.shape[2], problem.k.shape[2]) <= n <= most), None)
    if side is None or max(shape.d, shape.dv) > _widest_whole(shape, capability):
        return None
    return _fitting(shape, capability, side)


def _widest_whole(shape: Shape, capability: tuple[int, int] | None) -> int:
    """The widest head dimension; beyond it the loop spills registers. In float32 it always does, and delta would not be exact enough."""
    if shape.dtype.itemsize != 2:
        return 0
    return 128 if tile_config.architecture(capability) in ("sm_90", "sm_100") else 32


def _fitting(shape: Shape, capability: tuple[int, int] | None, side: int) -> Tiles | None:
    """Warps, and as many stages as leave room for several programs on a multiprocessor; None if one stage does not fit."""
    widest, room = max(shape.d, shape.dv), tile_config.shared_memory(capability)
    each = 1024 if widest <= 32 or _has_warp_groups(capability, side) else 512  # elements of a warp
    warps = min(8, max(2, side * max(side, widest) // each))
    choices = [(Tiles(side, side, warps, stages), room // programs) for stages, programs in ((3, 3), (2, 2), (2, 1), (1, 1))]
    return next((tiles for tiles, most in choices if needed(tiles, shape, capability) <= most), None)


def needed(tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> int:
    """Shared memory bytes that suffice: for the stages, p or ds by columns, a result on its way to memory, and small parts; later for the
    places to which sums are added."""
    m, n, size = tiles.tile_m, tiles.tile_n, shape.dtype.itemsize
    stages = max(1, tiles.num_stages - (not _has_warp_groups(capability, m)))
    step = size * (m + n) * (shape.d + shape.dv) + 8 * m
    return max(stages * step + size * (m * n + max(m, n) * max(shape.d, shape.dv)), 8 * m * n) + 2048


def _has_warp_groups(capability: tuple[int, int] | None, tile_m: int) -> bool:
    """Whether warp groups multiply, whose products read stages in flight."""
    return tile_m >= 64 and tile_config.architecture(capability) in ("sm_90", "sm_100")


def pairs_for(problem: Problem, pairs: Tiles | None) -> Tiles | None:
    """``pairs``, of the plan, for a call; None if the gradients of its captured tensors are left to the other kernels."""
    wanted, score = problem.wanted_slots, problem.score
    if pairs is None or score is None or not wanted:
        return pairs
    sums = summed_over_entries(score, wanted, problem.q.dtype)
    return pairs if sums is not None and sums <= _MOST_SUMS else None


def _entries_each(problem: Problem) -> int:
    """The batch entries of a program: so many that a multiprocessor has about ``_PROGRAMS`` programs."""
    device = problem.q.device
    processors = hardware.of(device.type, device.index).sm_count or _PROCESSORS
    chunks = max(1, _PROGRAMS * processors // problem.heads_q)
    return ceil_div(problem.batch, min(chunks, problem.batch))


def launch_pairs(
    launches: LaunchCache,
    problem: Problem,
    pairs: Tiles,
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


def _spec(problem: Problem, tiles: Tiles, named: PairTensors, filled: tuple[Tensor, ...], totals: tuple[Tensor, ...]) -> LaunchSpec:
    call_program, captured = _program(problem, totals)
    program, entries = call_program.program, _entries_each(problem)
    aligned, strides = strides_of(*filled)
    rows, keys = problem.q.shape[2], problem.k.shape[2]
    dlse = (0, 0, 0) if named.dlse is None else named.dlse.stride()
    sums = 0 if program.score is None else len({load.term for load in program.score.loads})
    options = constants_of(problem, call_program, _NO_TABLES) | {
        "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n, "num_warps": tiles.num_warps, "num_stages": tiles.num_stages,
        "IS_NEAR": all((t.stride(2) + 1) * t.shape[2] < 2**31 for t in filled),
        "IS_CUT": bool(rows % tiles.tile_m or keys % tiles.tile_n), "TERMS": sums,
        "HAS_DQ": named.dq is not None, "HAS_DK": named.dk is not None, "HAS_DV": named.dv is not None,
        "HAS_DLSE": named.dlse is not None, "HAS_DELTA": named.delta is not None,
    }  # fmt: skip
    grid = problem.heads_q, ceil_div(problem.batch, entries), 1
    numbers = (*strides, *dlse, *PairSizes(problem.batch, rows, keys, problem.heads_q, entries))
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
        wanted = problem.wanted_slots
        are_exact = tuple(s for s, total in zip(wanted, totals, strict=True) if deterministic_sum.is_exact(total))
        changes["score"] = part = by_entry(gradient_part(problem, wanted, are_exact))
        captured[0] = CapturedValues(*captured[0][:2], totals, part.style.even)
    return CallProgram(replace(program, **changes), tuple(mods), None), captured
