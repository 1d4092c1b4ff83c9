"""Evaluation of programs' CuTe text by value, as in ``tests/backends/hopper/test_emit.py``."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch

from anyattn.backends.hopper.codegen.score_analysis import parts_if_wide, parts_of
from anyattn.backends.hopper.config import sides
from anyattn.backends.hopper.plan import _against_mod
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.analysis.tile_lines import LEVELS
from anyattn.mods.tracing.trace import TracedMod
from tests.support.fuzz.whole_number_checks import B, H, called, grid, origin_of
from tests.support.fuzz.whole_numbers import Program
from tests.support.hopper.emitted import Array, emitter, mask_words, numbers_of

ROWS, COLUMNS = 3, 5
EXTENT = 64  # positions of a tile, of which a thread has a quarter


def check_cute(made: Program, mod: TracedMod) -> bool:
    """Whether the backend takes the program at all."""
    if _against_mod(mod):
        return False
    at = origin_of(made)
    score = torch.linspace(-3, 3, ROWS * COLUMNS).view(ROWS, COLUMNS) if made.kind == "score" else None
    want = called(made, *grid(at, ROWS, COLUMNS), score)
    got = torch.empty_like(want)
    q, kv = ([np.int32(first + i) for i in range(n)] for first, n in zip(at, (ROWS, COLUMNS), strict=True))
    places = {"b": np.int32(B), "h": np.int32(H), "q_idx": q, "kv_idx": kv, "apart": list(range(ROWS)), "steps": list(range(COLUMNS))}
    read = None if score is None else (lambda r, c: np.float32(score[r, c].item()))
    store = lambda r, c, x: got.__setitem__((r, c), x.item())
    with np.errstate(all="ignore"):
        emit = emitter(("dividend", "divisor")[made.seed % 2])["emit"]
        emit(mod.expr, numbers_of(mod.scalars), [Array(t) for t in mod.tensors], places, read, store)
    assert torch.equal(got, want), f"CuTe text\n{made}{mod.expr}\n{got}\n{want}"
    return True


def check_cute_ranges(made: Program, mod: TracedMod) -> None:
    """The limits of rows as the kernel computes them: row by row, and where they are a band from its first row on."""
    ranges = ranges_unread(mod) if not _against_mod(mod) else None
    if ranges is None:
        return
    at = origin_of(made)
    want = called(made, *grid(at, ROWS, COLUMNS))
    captured = numbers_of(ranges.scalars), [Array(t) for t in ranges.tensors]
    names, rows = emitter("dividend"), [np.int32(at[0] + i) for i in range(ROWS)]
    kv = torch.arange(COLUMNS) + at[1]
    with np.errstate(all="ignore"):
        limits = [names["emit_rows"](ranges.expr, *captured, np.int32(B), np.int32(H), [q])[0] for q in rows]
        if sides(ranges.expr) is not None:
            first = names["emit_rows"](ranges.expr, *captured, np.int32(B), np.int32(H), [np.int32(0)])[0]
            has = sides(ranges.expr)
            moved = [tuple(int(x) + int(q) * side for x, side in zip(first, has, strict=True)) for q in rows]
            assert bool((_seen(moved, kv) == want).all()), f"CuTe band\n{made}{ranges.expr}"
    assert all(isinstance(x, (int, np.int32)) for row in limits for x in row)
    assert bool((_seen(limits, kv) == want).all()), f"CuTe limits\n{made}{ranges.expr}"


@cache
def _word_names() -> dict[str, Any]:
    return mask_words(emitter("dividend"))


def check_words(made: Program, mod: TracedMod, at: tuple[int, int] | None = None) -> bool:
    """Words of bits along the rows and along the keys of an aligned tile, with what they leave to be asked of each pair; whether there are
    any that are not the same at all positions. at: a row and a key, else the program's own."""
    if _against_mod(mod):
        return False
    at, first, are_some = at or origin_of(made), made.seed % 4 * 2, False
    captured = numbers_of(mod.scalars), [Array(t) for t in mod.tensors]
    names = _word_names()
    for index, own, other in (("q_idx", 0, 1), ("kv_idx", 1, 0)):
        origin = at[own] // EXTENT * EXTENT
        along = [origin + first + c // 2 * 8 + c % 2 for c in range(EXTENT // 4)]
        across = [at[other], at[other] + 1, at[other] + 37]
        place = {index: [np.int32(x) for x in along], "kv_idx" if own == 0 else "q_idx": [np.int32(x) for x in across]}
        places = {"b": np.int32(B), "h": np.int32(H), **place}
        line = names["Line"](index, np.int32(origin), np.int32(first), len(along), EXTENT)
        known, rest = parts_of(mod.expr, False, index, EXTENT)
        with np.errstate(all="ignore"):
            made_of = [names["emit_words"](part, *captured, places, line) for part in known]
            wide = parts_if_wide(rest, index, EXTENT, LEVELS[-1]) if rest is not None else ((), None)
            if wide[0] and names["are_wide"](wide[0], *captured, places, line, LEVELS[-1]):
                levels = [next(n for n in LEVELS if names["are_wide"]((part,), *captured, places, line, n)) for part in wide[0]]
                made_of += [names["emit_words"](part, *captured, places, line, n) for part, n in zip(wide[0], levels, strict=True)]
                rest = wide[1]
        ends = torch.tensor(along)[:, None], torch.tensor(across)[None]
        leaves = (torch.tensor([[B]]), torch.tensor([[H]]), *(ends if own == 0 else ends[::-1]))
        got = torch.tensor([[all(names["holds_at"](words[y], c) for words in made_of) for y in range(3)] for c in range(len(along))])
        if rest is not None:
            got = got & evaluate(TracedMod("mask", rest, mod.scalars, mod.tensors), *leaves)
        want = called(made, *leaves)
        assert torch.equal(got, want), f"words along {index}\n{made}{mod.expr}\n{got.T}\n{want.T}"
        are_some |= any(len({bool(names["holds_at"](words[y], c)) for c in range(len(along))}) > 1 for words in made_of for y in range(3))
    return are_some


def _seen(limits: list[tuple], kv: torch.Tensor) -> torch.Tensor:
    pairs = [[(int(lo), int(hi)) for lo, hi in zip(row[::2], row[1::2], strict=True)] for row in limits]
    return torch.stack([torch.stack([(lo <= kv) & (kv < hi) for lo, hi in row]).any(0) for row in pairs])
