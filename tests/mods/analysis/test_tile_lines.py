"""Lines of tiles by value: the bits that the analysis says a mask is made of, against the mask itself at every pair of positions."""

from __future__ import annotations

import operator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.analysis.row_ranges import NO_LIMIT, mask_of, row_ranges
from anyattn.mods.analysis.tile_lines import (
    LEVELS,
    All,
    Each,
    Limit,
    Not,
    Pieces,
    Same,
    Sides,
    Some,
    Term,
    bits,
    least_divisor,
    slopes,
    split,
)
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.extents import Box
from anyattn.mods.tracing.trace import TracedMod, trace
from tests.support.hopper.masks import MASKS, WHOLE, WIDTHS

BOX = Box.of_sizes(2**24, 2**29)._replace(by_zero=False)
POSITIONS = 384
OTHER = {"q_idx": "kv_idx", "kv_idx": "q_idx"}


class Line:
    """One tile of positions along an index, and many of the other: values as (others, positions)."""

    def __init__(self, mod: TracedMod, index: str, start: int, extent: int, head: int):
        self.mod, self.extent = mod, extent
        self.here, self.others = torch.arange(start, start + extent), torch.arange(POSITIONS)[:, None]
        self.leaves = {"b": 1, "h": head, index: self.here, OTHER[index]: self.others}
        self.at_first = self.leaves | {index: torch.tensor(start)}
        self.replaced: dict[int, Tensor] = {}

    def value(self, node: int, at_first: bool) -> Tensor:
        builder = Builder()
        alone = builder.build(builder.copy(self.mod.expr, node))
        if at_first and node in self.replaced:
            return self.replaced[node]
        if at_first and self.replaced:
            builder, nodes = Builder(), self.mod.expr.nodes
            stand_ins = {i: builder.add("load", dtype=torch.int64, attr=100 + n) for n, i in enumerate(self.replaced)}
            alone = builder.build(builder.copy(self.mod.expr, node, stand_ins))
            assert len(nodes) > node
        values = [*self.mod.tensors, *[None] * (100 - len(self.mod.tensors)), *self.replaced.values()]
        (found,) = run(alone, self.at_first if at_first else self.leaves, self.mod.scalars, values)
        return torch.as_tensor(found).expand(POSITIONS, 1 if at_first else self.extent)

    def term(self, term: Term) -> Tensor:
        return term.sign * self.value(term.node, True)

    def made(self, tree: Any) -> Tensor:
        shape = (POSITIONS, self.extent)
        if isinstance(tree, Same):
            return self.value(tree.node, True).expand(shape)
        if isinstance(tree, Limit):
            apart = self.term(tree.left) - self.term(tree.right) + tree.slope * torch.arange(self.extent)
            return getattr(operator, tree.op)(apart, 0)
        if isinstance(tree, Each):
            found = self.value(tree.node, False)
            assert bool((found == found[:1]).all()), "a part that the other index changes"
            return found
        if isinstance(tree, Pieces):
            return self.in_pieces(tree)
        if isinstance(tree, Not):
            return ~self.made(tree.part)
        if isinstance(tree, Sides):
            return torch.where(*(self.made(part) for part in tree))
        assert isinstance(tree, All | Some)
        parts = torch.stack([self.made(part) for part in tree.parts])
        return parts.all(0) if isinstance(tree, All) else parts.any(0)

    def in_pieces(self, tree: Pieces) -> Tensor:
        dividend, divisor = (self.value(node, True) for node in tree.cut)
        quotient, rest, place = dividend // divisor, dividend % divisor, torch.arange(self.extent)
        total, pieces = torch.zeros(POSITIONS, self.extent, dtype=torch.bool), torch.zeros(POSITIONS, self.extent, dtype=torch.long)
        for n in range(tree.most):
            made = {"floordiv": quotient + n, "mod": rest - n * divisor}
            nodes = enumerate(self.mod.expr.nodes)
            self.replaced = {i: made[node.op] for i, node in nodes if node.op in made and node.args == tree.cut}
            here = (place >= n * divisor - rest) & (place < (n + 1) * divisor - rest)
            total, pieces = total | (here & self.made(tree.part)), pieces + here
        self.replaced = {}
        assert bool((pieces == 1).all()), "pieces that are not the tile"
        return total


def seen(expr: Expr, mod: TracedMod, line: Line) -> Tensor:
    (found,) = run(expr, line.leaves, mod.scalars, mod.tensors)
    return torch.as_tensor(found).expand(POSITIONS, line.extent)


@pytest.mark.covering(1)
@pytest.mark.parametrize("index", OTHER)
@pytest.mark.parametrize("name", MASKS)
def test_bits_are_the_mask(name: str, index: str) -> None:
    """What is known and what is left over together are the mask, in tiles of several sizes and places."""
    mod = trace(MASKS[name], "mask")
    for extent, level in product((64, 128, 48), LEVELS):
        least = least_divisor(extent, level)
        least = least if WIDTHS.get(name, 0) >= least else 0
        known, rest = split(mod.expr, index, extent, BOX, least)
        if least or name == "literal image" or (name in WHOLE and extent != 48):
            assert rest is None
        for start, head in ((0, 0), (extent, 1), (2 * extent, 1)):
            line = Line(mod, index, start, extent, head)
            whole = torch.as_tensor(evaluate(mod, 1, head, *(line.leaves[i] for i in ("q_idx", "kv_idx")))).expand(POSITIONS, extent)
            found = torch.ones(POSITIONS, extent, dtype=torch.bool)
            for part in known:
                alone = Line(TracedMod("mask", part, mod.scalars, mod.tensors, ""), index, start, extent, head)
                tree = bits(part, index, extent, BOX, least)
                assert tree is not None
                found = found & alone.made(tree)
            if rest is not None:
                found = found & seen(rest, mod, line)
            assert torch.equal(found, whole)


@pytest.mark.parametrize("index", OTHER)
@pytest.mark.parametrize("name", MASKS)
def test_slopes_are_those_of_the_values(name: str, index: str) -> None:
    """Wherever a slope is said to be known, values change by it from position to position."""
    mod = trace(MASKS[name], "mask")
    for extent in (64, 48):
        known = slopes(mod.expr, index, extent, BOX)
        for start in (0, 3 * extent):
            line = Line(mod, index, start, extent, 0)
            for node, slope in enumerate(known):
                if slope is not None:
                    value = line.value(node, False).long()
                    assert bool((value.diff(dim=1) == slope).all()), (mod.expr.nodes[node], slope)


def test_divisions_need_aligned_tiles() -> None:
    """A quotient is one number in a tile only if the divisor is a multiple of the tile and the tile begins at one of them."""
    cases = {
        "q // 128": (lambda b, h, q, k: q // 128 == k, 64, 0),
        "q // 64": (lambda b, h, q, k: q // 64 == k, 64, 0),
        "q // 96": (lambda b, h, q, k: q // 96 == k, 64, None),
        "q // 32": (lambda b, h, q, k: q // 32 == k, 64, None),
        "(q + 1) // 128": (lambda b, h, q, k: (q + 1) // 128 == k, 64, None),
        "(q + 64) // 128": (lambda b, h, q, k: (q + 64) // 128 == k, 64, 0),
        "(q - 128) % 128": (lambda b, h, q, k: (q - 128) % 128 == k, 64, 1),
        "(q % 256) // 128": (lambda b, h, q, k: (q % 256) // 128 == k, 128, 0),
        "2 * q % 128": (lambda b, h, q, k: 2 * q % 128 == k, 64, None),
        "q // -128": (lambda b, h, q, k: q // -128 == k, 64, None),
    }
    for name, (mask, extent, wanted) in cases.items():
        expr = trace(mask, "mask").expr
        left = expr.nodes[expr.outputs[0]].args[0]
        assert slopes(expr, "q_idx", extent, BOX)[left] == wanted, name


def test_numbers_that_may_be_far_apart_are_no_bits() -> None:
    far = trace(lambda b, h, q, k: q >= k + 2**31, "mask").expr
    table = torch.zeros(9, dtype=torch.int64)
    loaded = trace(lambda b, h, q, k: k < table[q], "mask").expr
    for expr in (far, loaded):
        assert bits(expr, "kv_idx", 128, BOX) is None
    near = trace(lambda b, h, q, k, n=2**28: q >= k + n, "mask").expr
    assert isinstance(bits(near, "kv_idx", 128, BOX), Limit)


@pytest.mark.parametrize("name", ["causal", "window", "sinks", "not equal", "nothing", "all"])
def test_masks_of_row_ranges(name: str) -> None:
    mod = trace(MASKS[name], "mask")
    ranges = row_ranges(mod)
    assert ranges is not None
    made = mask_of(ranges.expr)
    leaves = {"b": 1, "h": 0, "q_idx": torch.arange(POSITIONS)[:, None], "kv_idx": torch.arange(POSITIONS)}
    (found,) = run(made, leaves, ranges.scalars, ranges.tensors)
    wanted = evaluate(mod, 1, 0, leaves["q_idx"], leaves["kv_idx"])
    shape = (POSITIONS, POSITIONS)
    assert torch.equal(torch.as_tensor(found).expand(shape), torch.as_tensor(wanted).expand(shape))
    assert name in ("nothing", "all") or all(node.attr != NO_LIMIT for node in made.nodes if node.op == "const")
