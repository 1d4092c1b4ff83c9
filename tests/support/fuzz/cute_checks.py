"""The CuTe text of programs by value, as ``tests/backends/hopper/test_emit.py`` runs it."""

from __future__ import annotations

import numpy as np
import torch

from anyattn.backends.hopper.config import sides
from anyattn.backends.hopper.plan import _against_mod
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.tracing.trace import TracedMod
from tests.support.fuzz.whole_number_checks import B, H, called, grid, origin_of
from tests.support.fuzz.whole_numbers import Program
from tests.support.hopper.emitted import Array, emitter, numbers_of

ROWS, COLUMNS = 3, 5


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


def _seen(limits: list[tuple], kv: torch.Tensor) -> torch.Tensor:
    pairs = [[(int(lo), int(hi)) for lo, hi in zip(row[::2], row[1::2], strict=True)] for row in limits]
    return torch.stack([torch.stack([(lo <= kv) & (kv < hi) for lo, hi in row]).any(0) for row in pairs])
