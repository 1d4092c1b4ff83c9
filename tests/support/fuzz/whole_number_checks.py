"""Checks of a program in all its interpretations against torch: evaluation, tile classes, row ranges, CuTe text by value."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from anyattn.backends.torch.mod_runner import Bound, Tile
from anyattn.errors import ModError
from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.analysis.row_ranges import limits_of_rows, row_ranges
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, classify, judge
from anyattn.mods.ir.bounds import bounds
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr, category
from anyattn.mods.ir.extents import Box
from anyattn.mods.tracing.trace import TracedMod, trace
from tests.support.fuzz.whole_numbers import LENGTH, Program, called

ROWS, COLUMNS = 12, 16
ORIGINS = ((0, 0), (1000, 990), (2**20, 2**19), (2**23 + 1, 2**23 - 5))
TILES = ((16, 16), (5, 7), (48, 64))
B, H = 1, 2


def origin_of(made: Program) -> tuple[int, int]:
    return (0, 0) if made.reads_positions else ORIGINS[made.seed % len(ORIGINS)]


def grid(at: tuple[int, int], rows: int = ROWS, columns: int = COLUMNS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.tensor([[B]]), torch.tensor([[H]]), torch.arange(rows)[:, None] + at[0], torch.arange(columns)[None] + at[1]


def traced(made: Program) -> TracedMod | None:
    """The program's trace; None where torch refuses to compute it, and then so do we, with a line of the user's."""
    leaves = grid(origin_of(made))
    score = torch.zeros(ROWS, COLUMNS) if made.kind == "score" else None
    try:
        called(made, *leaves, score)
    except OverflowError:  # a literal of more than 64 bits
        try:
            trace(made.function(), made.kind)
        except ModError as error:
            assert "64 bits" in str(error), f"{error}\n{made}"
            return None
        raise AssertionError(f"torch refuses what we take\n{made}") from None
    return trace(made.function(), made.kind)


def check_evaluation(made: Program, mod: TracedMod) -> None:
    leaves = grid(origin_of(made))
    score = torch.linspace(-3, 3, ROWS * COLUMNS).view(ROWS, COLUMNS) if made.kind == "score" else None
    want = called(made, *leaves, score)
    got = evaluate(mod, *leaves, score)
    assert got.dtype == want.dtype and torch.equal(got.expand_as(want), want), f"evaluate\n{made}{mod.expr}"


def check_classes(made: Program, mod: TracedMod) -> None:
    """Interval arithmetic is sound, and the classes are exact, for every source of the numbers."""
    tile = TILES[made.seed % len(TILES)]
    seen = called(made, torch.tensor([[0]]), torch.tensor([[0]]), *grid((0, 0), 48, LENGTH)[2:])
    parts = [row.split(tile[1], 1) for row in seen.split(tile[0])]
    want = torch.tensor([[int(part.any()) + int(part.all()) for part in row] for row in parts], dtype=torch.uint8)
    judged = judge(mod, (48, LENGTH), tile, (1, 1))[0, 0]
    for sure in (EMPTY, FULL):
        assert bool((want[judged == sure] == sure).all()), f"judge, tiles of {tile}\n{made}{mod.expr}"
    got = classify(mod, 48, LENGTH, *tile)[0, 0]
    assert torch.equal(got, want), f"classify, tiles of {tile}\n{made}{mod.expr}"


def check_tile_bounds(made: Program, mod: TracedMod) -> None:
    """The bounds of tiles, as kernels have them: from the extremes of loads and of other parts of one position, chosen at random."""
    expr, draw, deps = mod.expr, random.Random(made.seed), dependence(mod.expr)
    is_far = any(isinstance(n, int) and abs(n) >= 2**40 for n in mod.scalars)
    if is_far or any(node.op == "load" and dep.q and dep.kv for node, dep in zip(expr.nodes, deps, strict=True)):
        return  # numbers that kernels do not take, and indices that only kernels clamp
    is_part = [dep.q != dep.kv and category(node.dtype) != "float" for node, dep in zip(expr.nodes, deps, strict=True)]
    parts = [at for at, node in enumerate(expr.nodes) if is_part[at] and (node.op == "load" or draw.random() < 0.3)]
    b, h, q, kv = grid(origin_of(made))
    leaves = {"b": B, "h": H, "q_idx": q, "kv_idx": kv}
    values = run(Expr(expr.nodes, tuple(parts)), leaves, mod.scalars, mod.tensors)
    extremes = {at: value.to(torch.int64).expand(ROWS, COLUMNS) for at, value in zip(parts, values, strict=True)}
    ends = {}
    for name, value in (extremes | {"q_idx": q, "kv_idx": kv}).items():
        tiles = value.expand(ROWS, COLUMNS).unflatten(1, (2, -1)).unflatten(0, (3, -1))
        ends[name, 0], ends[name, 1] = tiles.amin((1, 3)), tiles.amax((1, 3))
    wanted = bounds(expr, Box.of_sizes(2**30, 2**40), frozenset(parts))
    must, may = (torch.as_tensor(end).expand(3, 2) for end in run(wanted, leaves | ends, mod.scalars, mod.tensors))
    seen = called(made, b, h, q, kv).expand(ROWS, COLUMNS).unflatten(1, (2, -1)).unflatten(0, (3, -1))
    assert bool((seen.all(3).all(1) | ~must).all()) and bool((may | ~seen.any(3).any(1)).all()), f"tile bounds\n{made}{expr}\n{wanted}"


def check_ranges(made: Program, mod: TracedMod) -> bool:
    """Of rows near and far: at every limit, beside it and elsewhere. Whether there are ranges."""
    ranges = row_ranges(mod)
    if ranges is None:
        return False
    seqlen_k = LENGTH if made.reads_positions else 2**29
    at = torch.tensor([0, 1, 2, 7, 40, 63] if made.reads_positions else [0, 1, 5, 41, 1000, 2**20 + 3, 2**23, 2**29 - 1])
    b = torch.arange(len(at)) % 3
    found = limits_of_rows(ranges, b, at, torch.full_like(at, seqlen_k), 1)
    assert found is not None
    lo, hi = (t[:, 0, 0].to(torch.int64) for t in found)  # (n, rows)
    near = torch.cat([torch.arange(70), torch.tensor([999, 1001, 2**20, 2**23, 2**28])]).expand(len(at), -1)
    edges = torch.cat([t + d for t in (lo, hi, at[None]) for d in (-1, 0, 1)]).T
    kv = torch.cat([near, edges], 1).clamp(0, seqlen_k - 1)
    got = ((lo[..., None] <= kv) & (kv < hi[..., None])).any(0)
    want = called(made, b[:, None], torch.tensor([[0]]), at[:, None], kv)
    assert torch.equal(got, want), f"row ranges\n{made}{mod.expr}\n{ranges.expr}"
    return True


def check_stages(made: Program, mod: TracedMod) -> None:
    """What the torch backend computes once a row, a column or a diagonal, and what tile by tile."""
    want = called(made, torch.tensor([[0]]), torch.tensor([[0]]), *grid((0, 0), 20, 24)[2:])
    bound = Bound(mod.expr, mod.scalars, mod.tensors, 1, 1, 20, 24, torch.device("cpu"))
    (got,) = bound.on(Tile(0, 1, 0, 1, 4, 20, 8, 24))
    got = torch.broadcast_to(torch.as_tensor(got), (1, 1, 16, 16))[0, 0].flip(0)
    assert torch.equal(got, want[4:, 8:]), f"stages\n{made}{mod.expr}"
