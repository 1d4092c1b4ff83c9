"""Launches of the reduction kernels: sums of the probabilities per key; sums and maxima of the scores by blocks."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.triton import tile_config
from anyattn.backends.triton.backward_pass import Passes, log_sums_by_tiles, slots_per_head
from anyattn.backends.triton.codegen import assumptions
from anyattn.backends.triton.codegen.assumptions import shape_of
from anyattn.backends.triton.codegen.entry import Group, Signature
from anyattn.backends.triton.codegen.programs import CallProgram, captured_of, program_of
from anyattn.backends.triton.kernel_arguments import PARTS, constants_of, programs_along_batch, sizes_of
from anyattn.backends.triton.kernels.arguments import (
    BackwardSizes,
    BlockConstants,
    Lists,
    ListSpans,
    Reduced,
    ReductionConstants,
    ReductionStrides,
    ReductionTensors,
)
from anyattn.backends.triton.launch_cache import LaunchSpec, launch_cached, launch_key
from anyattn.backends.triton.launch_shape import grid_of
from anyattn.backends.triton.plan import TritonPlan
from anyattn.backends.triton.tables import Tables, key_tables_of, tables_of
from anyattn.backends.triton.tile_config import Tiles
from anyattn.errors import BackendError
from anyattn.problem import Problem
from anyattn.triton_tools.launch import strides_of

__all__ = ["block_reductions", "key_sums", "passes_of"]

_MOST_PARTS, _MOST_BYTES = 16, 2**28  # of a block, each with a number in memory; of all parts, which may be more where they are few
_GROUPS = (
    Group("pointer", ReductionTensors), Group("stride", ReductionStrides), Group("long", ListSpans), Group("int", BackwardSizes),
    Group("int", Reduced, "reduced_"), Group("pointer", Lists), Group("float", "scale"),
)  # fmt: skip
_KEY_SUMS = Signature("reductions.key_sums_tile", _GROUPS, PARTS, ReductionConstants)
_BLOCKS = Signature("reductions.block_tile", _GROUPS, PARTS, BlockConstants)
# 16 bits: two programs of two warp groups on a multiprocessor, one of which exponentiates while the other multiplies
_TILES = {"dq": Tiles(128, 64, 8, 3), "dkdv": Tiles(64, 128, 8, 3)}


def passes_of(problem: Problem, plan: TritonPlan) -> Passes:
    """The passes of the reductions of a plan's calls: sums per key loop as "dkdv" does, blocks as "dq"."""
    return Passes.of(problem, {name: _tiles(problem, plan, name) for name in _TILES}, None)


def key_sums(problem: Problem, passes: Passes, lse: Tensor, first: int) -> Tensor:
    """(B, Hq, Sk) float32: the sums of the probabilities over the queries from ``first`` on. lse: (B, Hq, Sq), contiguous."""
    tiles, cache = passes.tiles["dkdv"], passes.launches["dkdv"]
    sums = torch.empty((*problem.q.shape[:2], problem.k.shape[2]), dtype=torch.float32, device=lse.device)
    call_program = None if cache.knows_lists else program_of(problem)
    tables = key_tables_of(problem, cache.lists if call_program is None else call_program.lists, tiles.tile_n)
    tensors = (problem.q, problem.k, *log_sums_by_tiles(problem, passes, lse), sums, None)  # ``ReductionTensors``
    key = (*launch_key(problem, tables), tiles, first)
    arguments = _Call(problem, call_program, tables, tiles), first
    launch_cached(cache, key, problem, tensors, tables.lists, _spec_of_keys, arguments)
    return sums


def block_reductions(
    problem: Problem, passes: Passes, lse: Tensor, block: tuple[int, int], wants_sums: bool, wants_max: bool
) -> tuple[Tensor | None, Tensor | None]:
    """(B, Hq, M, N) float32 twice, None if not wanted: sums and maxima of blocks of (queries, keys). lse: (B, Hq, Sq), contiguous."""
    tiles, cache = passes.tiles["dq"], passes.launches["dq"]
    call_program = None if cache.knows_lists else program_of(problem)
    tables = tables_of(problem, cache.lists if call_program is None else call_program.lists, tiles.tile_m)
    part = _part_of(problem, block, tiles, tables)
    counts = ceil_div(problem.q.shape[2], part[0]), ceil_div(problem.k.shape[2], part[1])
    sums, maxima = (
        torch.full((*problem.q.shape[:2], *counts), fill, dtype=torch.float32, device=lse.device) if is_wanted else None
        for fill, is_wanted in ((0.0, wants_sums), (-math.inf, wants_max))
    )
    tensors = (problem.q, problem.k, lse, None, sums, maxima)  # ``ReductionTensors``
    key = (*launch_key(problem, tables), tiles, part, wants_sums, wants_max)
    arguments = _Call(problem, call_program, tables, tiles), part, counts, (wants_sums, wants_max)
    launch_cached(cache, key, problem, tensors, tables.lists, _spec_of_blocks, arguments)
    times = block[0] // part[0], block[1] // part[1]
    return None if sums is None else _joined(sums, times, 0.0), None if maxima is None else _joined(maxima, times, -math.inf)


def _joined(parts: Tensor, times: tuple[int, int], fill: float) -> Tensor:
    """The blocks that consist of ``times`` parts along each side, by their sum, or with a ``fill`` of -inf by their maximum."""
    for dim, count in ((3, times[1]), (2, times[0])):
        if count > 1:
            short = -parts.shape[dim] % count
            parts = torch.nn.functional.pad(parts, (0, short) if dim == 3 else (0, 0, 0, short), value=fill).unflatten(dim, (-1, count))
            parts = parts.amax(dim + 1) if fill else parts.sum(dim + 1)
    return parts


def _part_of(problem: Problem, block: tuple[int, int], tiles: Tiles, tables: Tables) -> tuple[int, int]:
    """The blocks that the kernel stores: they divide ``block``, the kernel's tiles, and the lists' tiles where there are several."""
    lengths = problem.q.shape[2], problem.k.shape[2]
    sides = zip(block, (tiles.tile_m, tiles.tile_n), tables.list_tile, lengths, strict=True)
    m, n = (math.gcd(size, tile, of_list if of_list < length else 0) for size, tile, of_list, length in sides)
    needed = problem.batch * problem.heads_q * ceil_div(lengths[0], m) * ceil_div(lengths[1], n) * 4
    if block[0] // m * (block[1] // n) > _MOST_PARTS and needed > _MOST_BYTES:
        lists = f", of block lists of {tables.list_tile[0]} x {tables.list_tile[1]}" if tables.list_tile[0] else ""
        raise BackendError(
            f"a block of {block[0]} queries and {block[1]} keys has no large common divisor with the tiles of {tiles.tile_m} x "
            f"{tiles.tile_n}{lists}: parts of {m} x {n} would take {block[0] // m * (block[1] // n)} times its memory; wanted a block "
            "whose sides are multiples of a large power of two, such as 64 x 64, or of 1 query, or backend='torch'"
        )
    return m, n


def _tiles(problem: Problem, plan: TritonPlan, name: str) -> Tiles:
    shape, capability = replace(shape_of(problem), dv=0), tile_config.capability_of(problem.q.device)
    tiles = _TILES[name] if problem.q.element_size() == 2 else tile_config.backward_tiles(shape, capability)[name]
    if plan.has_asked_tiles:
        tiles = replace(tiles, tile_m=plan.tile_m, tile_n=plan.tile_n)
    return tile_config.fitting(name, tiles, shape, capability)


class _Call(NamedTuple):
    problem: Problem
    call_program: CallProgram | None
    tables: Tables
    tiles: Tiles


def _spec_of_keys(call: _Call, first: int) -> LaunchSpec:
    constants = {"IS_NVIDIA": assumptions.is_nvidia(call.problem.q.device.type), "IS_GROUPED": True, "HAS_FIRST": first > 0}
    return _spec(_KEY_SUMS, call, "dkdv", constants, (first, 0, 0))


def _spec_of_blocks(call: _Call, part: tuple[int, int], counts: tuple[int, int], wants: tuple[bool, bool]) -> LaunchSpec:
    constants = {"HAS_SUMS": wants[0], "HAS_MAX": wants[1], "BLOCK_ROWS": part[0], "BLOCK_KEYS": part[1]}
    return _spec(_BLOCKS, call, "dq", constants, (0, *counts))


def _spec(signature: Signature, call: _Call, name: str, constants: dict[str, Any], reduced: tuple[int, int, int]) -> LaunchSpec:
    problem, call_program, tables, tiles = call
    call_program = program_of(problem) if call_program is None else call_program
    program, (q, k), by_key = call_program.program, (problem.q, problem.k), name == "dkdv"
    is_aligned, strides = strides_of(q, k)
    constants = {**constants_of(problem, call_program, tables), "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n, **constants}
    constants["IS_NEAR"] = all((t.stride(2) + 1) * t.shape[2] < 2**31 for t in (q, k))
    if by_key:
        constants["SEES_ALL"] = program.sees_all
    head_bytes = (q if by_key else k).shape[2] * k.shape[3] * k.element_size() // (1 if by_key else problem.qhead_per_kvhead)
    together = tile_config.heads_in_turn(name, problem.heads_q * problem.batch, head_bytes, program.range_count > 1)
    sizes = (*sizes_of(problem, tables), slots_per_head(problem, tiles.tile_m), together)
    options = constants | {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
    grid = grid_of(tables.row_tiles, problem.heads_q, programs_along_batch(problem, tables))
    numbers = (*strides, *tables.strides, *sizes, *reduced)
    return LaunchSpec(signature, call_program, program, list(captured_of(call_program)), is_aligned, grid, numbers, options)
