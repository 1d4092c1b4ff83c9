"""Gradients of tables by row and distance without atomic additions: the bands of derivatives, and the launch that sums them.

Where a score mod reads ``table[b, h, q_idx, place(q_idx - kv_idx)]``, a pair's derivative would be one atomic addition. Instead the kernel
whose programs own the table's rows stores the derivatives of near pairs once, in 16 bits as its products take them, and one sum for each
row and side of all far pairs (``kernels.bands.keep``); a launch for each table sums the near ones by place (``kernels.bands.sum``).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.triton import tile_config
from anyattn.backends.triton.codegen.assumptions import style_of
from anyattn.backends.triton.codegen.entry import Group, Signature
from anyattn.backends.triton.codegen.programs import CapturedValues, Part, Program, captured_of, program_of
from anyattn.backends.triton.kernel_arguments import PARTS
from anyattn.backends.triton.kernels.arguments import BandConstants, Lists
from anyattn.backends.triton.launch_cache import LaunchCache, LaunchSpec, launch_cached, launch_key
from anyattn.backends.triton.launch_shape import MOST_BLOCKS
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.tile_config import Shape, Tiles
from anyattn.backends.triton.wide_tiles import is_wide, padded
from anyattn.mods.analysis.captured_loads import DistanceTable, distance_tables
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.far_sides import far_sides
from anyattn.mods.ir.expr import Expr
from anyattn.problem import Problem
from anyattn.triton_tools.launch import run_plain
from anyattn.triton_tools.recording import active_recorder

__all__ = ["Bands", "bands_of", "tables_of_bands", "tiles_of_bands"]

_ROWS, _PLACES, _STEP, _WARPS = 64, 64, 64, 4  # of a program of ``sum_band``, and the distances that it sums at once
# Most bytes of a band's row: those of the other tensors' rows together at a head dimension of 64, or twice those of sums in float32.
_MOST_BYTES, _MOST_SUMS = 1 << 10, 2
_MOST_NEAR = 1.0  # the band's columns, times the positions on the other side
# Tiles of the dk and dv kernel on Hopper, 16 bits, head dimensions up to 64: both passes of B 2, H 12, L 8,192, D 64 take 9.9 ms with every
# distance in a place of its own, with 32 x 128 and 8 warps 11.2; with 8 warps 64 x 64 scores would be computed twice.
_NARROW, _DKDV = 64, Tiles(64, 64, 4, 3)
_NAMES = ("heads", "rows", "columns", "reach", "width")
_PLACES_OF = Signature(
    "bands.sum.store_places",
    (
        Group("pointer", "places"), Group("pointer", "bounds"), *(Group("int", name) for name in _NAMES), Group("pointer", Lists),
        Group("float", "scale"),
    ),
    PARTS,
    BandConstants,
)  # fmt: skip
_NO_TABLES = Tables(1, None, None, None, (None, None, None, None), (0, 0), (0, 0, 0, 0, 1))


class Bands(NamedTuple):
    """tables: those of the call. reach: pairs of this distance or more are in no band. totals: by ``DistanceTable.by_key`` the band, from
    its first row and column on, and the far sums, float32 (2, B, H, rows): of columns below and above the row's number."""

    tables: tuple[DistanceTable, ...]
    reach: int
    totals: dict[bool, tuple[Tensor, Tensor]]

    @property
    def slots(self) -> tuple[int, ...]:
        return tuple([table.slot for table in self.tables])

    def slot_of(self, by_key: bool) -> int | None:
        """One of the slots of an orientation, whose derivative all others have; None if there is none."""
        return next((table.slot for table in self.tables if table.by_key is by_key), None)

    def gradient(self, problem: Problem, table: DistanceTable, launches: LaunchCache) -> Tensor:
        """The gradient of a table's tensor."""
        score = problem.score
        assert score is not None
        own, (band, sums) = score.tensors[table.slot], self.totals[table.by_key]
        (rows, columns), heads, width, reach = _sides(problem, table.by_key), problem.batch * problem.heads_q, own.shape[3], self.reach
        places, bounds = (
            torch.empty(shape, dtype=torch.int32, device=own.device) for shape in ((heads, 2 * reach + 2), (heads, 2 * reach // _STEP, 2))
        )
        key = (*launch_key(problem, _NO_TABLES), table.slot, reach)
        launch_cached(launches, key, problem, (places, bounds), _NO_TABLES.lists, _spec, (problem, table, reach, (rows, columns)))
        out = torch.empty(own.shape, dtype=own.dtype, device=own.device)
        if own.shape[:3] != (problem.batch, problem.heads_q, rows):
            out.zero_()  # rows that no pair reads
        from anyattn.backends.triton.kernels.bands.sum import sum_band

        given = out, band, sums, places, bounds, rows, band.stride(1), reach, problem.heads_q, *own.shape[1:]
        programs = ceil_div(width, _PLACES) * ceil_div(rows, _ROWS) * heads
        options = {"ROWS": _ROWS, "PLACES": _PLACES, "STEP": _STEP, "num_warps": _WARPS, "num_stages": 1}
        run_plain(sum_band, programs, given, (), own.device, options)
        return out


def tables_of_bands(problem: Problem, tiles: dict[str, Tiles]) -> tuple[tuple[DistanceTable, ...], int]:
    """The tables whose gradients are summed from bands, and ``Bands.reach``; none where a call has other kernels, or a band would take much
    more memory than sums in float32."""
    score = problem.score
    if (
        score is None
        or problem.sequences is not None
        or problem.q.dtype.itemsize != 2
        or is_wide(padded(problem.k.shape[3]), padded(problem.v.shape[3]))
    ):
        return (), 0
    part = program_of(problem).program.score
    if part is None or None in part.sides or problem.batch * problem.heads_q > MOST_BLOCKS or 0 in (problem.q.shape[2], problem.k.shape[2]):
        return (), 0
    most = max(0, *_reaches(score.expr, tuple(score.scalars))) + max(t.tile_m + t.tile_n for t in tiles.values())
    reach = ceil_div(most, _STEP // 2) * (_STEP // 2)  # whole steps; and rows begin at multiples of 16 bytes, except for their number
    size = problem.q.dtype.itemsize

    def pays(table: DistanceTable) -> bool:
        width = score.tensors[table.slot].shape[3]
        return 2 * reach * size <= max(_MOST_BYTES, _MOST_SUMS * 4 * width) and 2 * reach <= _MOST_NEAR * _sides(problem, table.by_key)[1]

    found = distance_tables(score.expr, problem.wanted_slots, problem.q.dtype is torch.float16)
    return tuple([table for table in found if pays(table)]), reach


def tiles_of_bands(problem: Problem, tiles: dict[str, Tiles], shape: Shape, capability: tuple[int, int] | None) -> dict[str, Tiles]:
    """``tiles``, the default ones, changed for a call that keeps bands."""
    is_narrow = max(shape.d, shape.dv) <= _NARROW and tile_config.architecture(capability) == "sm_90"
    if not is_narrow or not tables_of_bands(problem, {**tiles, "dkdv": _DKDV})[0]:
        return tiles
    return {**tiles, "dkdv": tile_config.fitting("dkdv", _DKDV, shape, capability)}


def bands_of(problem: Problem, tiles: dict[str, Tiles]) -> Bands | None:
    """The bands of a call, zeros yet."""
    tables, reach = tables_of_bands(problem, tiles)
    if not tables:
        return None
    if (recorder := active_recorder()) is not None:
        recorder.refuse("the size of a band depends on captured numbers")
    return Bands(tables, reach, {by_key: _totals(problem, by_key, reach) for by_key in {table.by_key for table in tables}})


@lru_cache(maxsize=1024)
def _reaches(expr: Expr, scalars: tuple[Any, ...]) -> tuple[int, int]:
    after, before = far_sides(expr)
    assert after is not None and before is not None
    return int(run(after.reach, {}, scalars, ())[0]), int(run(before.reach, {}, scalars, ())[0])


def _sides(problem: Problem, by_key: bool) -> tuple[int, int]:
    """(rows, columns) of the pairs, for tables of this orientation."""
    sizes = problem.q.shape[2], problem.k.shape[2]
    return sizes[::-1] if by_key else sizes


def _totals(problem: Problem, by_key: bool, reach: int) -> tuple[Tensor, Tensor]:
    """``Bands.totals``. Row i's entry for column j is at ``i * 2 * reach + j`` from the first row's: an aligned place for all aligned j."""
    batch, heads, rows, device = problem.batch, problem.heads_q, _sides(problem, by_key)[0], problem.q.device
    of_head = ceil_div(rows * (2 * reach + 1), _STEP) * _STEP
    band = torch.zeros((batch * heads * of_head + reach,), dtype=problem.q.dtype, device=device)
    view = band.as_strided((batch, heads, rows, 1), (heads * of_head, of_head, 2 * reach, 1), reach)
    return view, torch.empty((2, batch, heads, rows), dtype=torch.float32, device=device)


def _spec(problem: Problem, table: DistanceTable, reach: int, sides: tuple[int, int]) -> LaunchSpec:
    call_program, part, score = replace(program_of(problem), lists=None), _place_part(problem, table), problem.score
    assert score is not None
    captured = [CapturedValues(*captured_of(call_program)[0][:2], even=part.style.even)]
    numbers = (problem.heads_q, *sides, reach, score.tensors[table.slot].shape[3])
    grid = 2 * reach // _STEP, problem.batch * problem.heads_q, 1
    options = {"STEP": _STEP, "BY_KEY": table.by_key, "num_warps": 1, "num_stages": 1}
    return LaunchSpec(_PLACES_OF, call_program, Program(part, None, None, None), captured, True, grid, numbers, options)


def _place_part(problem: Problem, table: DistanceTable) -> Part:
    score = problem.score
    assert score is not None

    def made(expr: Expr, name: str) -> Part:
        ranks = tuple([t.ndim for t in score.tensors])
        return Part(name, "gradient", expr, len(score.scalars), ranks, style=style_of(score, expr, problem))

    near, after, before = table.places
    return made(near, "score")._replace(sides=(made(after, "score_after"), made(before, "score_before")))
