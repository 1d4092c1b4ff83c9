"""Words of bits that the Hopper kernels make of masks, by value: the source runs as Python for 128 threads at once."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anyattn.backends.hopper.codegen.score_analysis import parts_if_wide, parts_of
from anyattn.backends.hopper.config import slots
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.analysis.tile_lines import LEVELS, least_divisor
from anyattn.mods.tracing.trace import TracedMod, trace
from tests.support.hopper.backward_machine import COLUMN, LANES, ROW
from tests.support.hopper.backward_roles import vectorised
from tests.support.hopper.emitted import Array
from tests.support.hopper.masks import DIVISORS, MASKS, WIDTHS

SIZES = 300, 330
BATCH, HEAD = 1, 1


@cache
def names() -> dict[str, Any]:
    return vectorised()


def whole(mod: TracedMod) -> Tensor:
    rows, keys = torch.arange(SIZES[0])[:, None], torch.arange(SIZES[1])
    return torch.as_tensor(evaluate(mod, BATCH, HEAD, rows, keys)).expand(SIZES)


def given(mod: TracedMod, expr: Any) -> tuple[tuple, tuple]:
    numbers, tensors = slots(expr)
    return tuple(np.int32(x) for x in mod.scalars[:numbers]), tuple(Array(t) for t in mod.tensors[:tensors])


def test_words_of_limits() -> None:
    """Bits from a limit on, before it, and of ranges, at limits near to and far from a tile's ends, for all threads of a warp."""
    made = names()
    for positions in (8, 32, 64):
        line = made["Line"]("kv_idx", 256, COLUMN, positions, 4 * positions)
        places = COLUMN[:, None] + [c // 2 * 8 + c % 2 for c in range(positions)]
        for limit in (-(2**30), -9, -1, *range(0, 40), 4 * positions - 1, 4 * positions, 4 * positions + 1, 2**30):
            words = made["at_least"](limit, line), made["below"](limit, line), made["within"](limit, limit + 9, line)
            wanted = places >= limit, places < limit, (places >= limit) & (places < limit + 9)
            for found, right in zip(words, wanted, strict=True):
                assert np.array_equal(np.stack([made["holds_at"](found, c) for c in range(positions)], 1), right), (limit, positions)


def found_by(name: str, mod: TracedMod, index: str, start: int, other: int, extent: int, level: int) -> tuple[np.ndarray, Any]:
    """What the words, for captured divisors those of ``level``, say of threads' positions from ``start`` on and two of the other index; and
    what they leave to be asked of each pair. Positions past the last are lowered to it where a mask is asked of each, as in the kernels."""
    made, is_q = names(), index == "q_idx"
    last, last_other = (SIZES[0] - 1, SIZES[1] - 1) if is_q else (SIZES[1] - 1, SIZES[0] - 1)
    positions = extent // 4
    line = made["Line"](index, start, COLUMN, positions, extent)
    others = [np.minimum(other + ROW + 8 * r, last_other).astype(np.int32) for r in range(2)]
    along = [np.minimum(start + COLUMN + c // 2 * 8 + c % 2, last).astype(np.int32) for c in range(positions)]
    places = {"b": BATCH, "h": HEAD, index: along, "kv_idx" if is_q else "q_idx": others}
    known, rest = parts_of(mod.expr, False, index, extent)
    parts = [(part, 0) for part in known]
    if rest is not None and (wide := parts_if_wide(rest, index, extent, level))[0]:
        is_wide = made["are_wide"](wide[0], *given(mod, rest), places, line, level)
        assert is_wide == (DIVISORS[name] >= least_divisor(extent, level))
        if is_wide:
            parts, rest = [*parts, *((part, level) for part in wide[0])], wide[1]
    found = np.ones((len(LANES), 2, positions), dtype=bool)
    for part, of in parts:
        words = made["emit_words"](part, *given(mod, part), places, line, of)
        found &= np.stack([np.stack([np.broadcast_to(made["holds_at"](w, c), 128) for c in range(positions)], 1) for w in words], 1)
    return found, rest


@pytest.mark.covering(1)
@pytest.mark.parametrize("index", ["q_idx", "kv_idx"])
@pytest.mark.parametrize("name", MASKS)
def test_words_of_masks(name: str, index: str) -> None:
    """With what they leave over they are the mask, in whole tiles and in those that reach past the last row or key."""
    mod = trace(MASKS[name], "mask")
    seen = whole(mod).numpy()
    for (start, other, extent), level in product(((0, 0, 64), (128, 64, 128), (256, 128, 64), (256, 256, 128)), LEVELS):
        bits, rest = found_by(name, mod, index, start, other, extent, level)
        left = np.ones(SIZES, dtype=bool) if rest is None else whole(TracedMod("mask", rest, mod.scalars, mod.tensors)).numpy()
        for r in range(2):
            for c in range(bits.shape[2]):
                along, across = start + COLUMN + c // 2 * 8 + c % 2, other + ROW + 8 * r
                row, key = (along, across) if index == "q_idx" else (across, along)
                there = (row < SIZES[0]) & (key < SIZES[1])
                assert np.array_equal((bits[:, r, c] & left[row * there, key * there])[there], seen[row * there, key * there][there])


@pytest.mark.parametrize("index", ["q_idx", "kv_idx"])
@pytest.mark.parametrize("name", [*WIDTHS, "hashed", "floats"])
def test_words_of_pairs(name: str, index: str) -> None:
    """Masks that are asked of each pair, whatever else of them would be words."""
    mod, is_q = trace(MASKS[name], "mask"), index == "q_idx"
    seen, made, (here, there) = whole(mod).numpy(), names(), SIZES if is_q else SIZES[::-1]
    for start, other, extent in ((0, 0, 64), (128, 64, 128), (256, 256, 128)):
        line = made["Line"](index, start, COLUMN, extent // 4, extent)
        others = [np.minimum(other + ROW + 8 * r, there - 1).astype(np.int32) for r in range(2)]
        along = [np.minimum(start + COLUMN + c // 2 * 8 + c % 2, here - 1).astype(np.int32) for c in range(extent // 4)]
        places = {"b": BATCH, "h": HEAD, index: along, "kv_idx" if is_q else "q_idx": others}
        places |= {"apart": [0, 8], "steps": [c // 2 * 8 + c % 2 for c in range(extent // 4)]}
        if is_q:
            places["apart"], places["steps"] = places["steps"], places["apart"]
        for c, step in enumerate(places["apart" if is_q else "steps"]):
            ones = made["emit_each"](mod.expr, *given(mod, mod.expr), places, line, np.int32(c))
            for r, one in enumerate(ones):
                place, across = start + COLUMN + step, other + ROW + 8 * r
                exist = (place < here) & (across < there)
                row, key = (place, across) if is_q else (across, place)
                assert np.array_equal(np.broadcast_to(one, 128)[exist] == 1, seen[row[exist], key[exist]])


@pytest.mark.parametrize("index", ["q_idx", "kv_idx"])
@pytest.mark.parametrize("name", ["causal", "window", "sinks"])
def test_row_ranges_are_words(name: str, index: str) -> None:
    """Limits that change evenly from row to row say as much for each key."""
    mod = trace(MASKS[name], "mask")
    ranges = ranges_unread(mod)
    assert ranges is not None
    known, rest = parts_of(ranges.expr, True, index, 128)
    assert len(known) == 1 and rest is None


def test_ranges_of_a_row() -> None:
    made = names()
    line = made["Line"]("kv_idx", 128, COLUMN, 32, 128)
    places = 128 + COLUMN[:, None] + [c // 2 * 8 + c % 2 for c in range(32)]
    limits = (0, 131 + LANES, LANES + 170, 190 + LANES // 2, 240, 2**31 - 1)
    words = made["in_ranges"](limits, line)
    wanted = np.zeros(places.shape, dtype=bool)
    for low, high in zip(limits[::2], limits[1::2], strict=True):
        wanted |= (places >= np.reshape(low, (-1, 1))) & (places < np.reshape(high, (-1, 1)))
    assert np.array_equal(np.stack([made["holds_at"](words, c) for c in range(32)], 1), wanted)
