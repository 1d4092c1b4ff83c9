"""The CuTe text of programs by value, as ``tests/backends/test_hopper_emit.py`` runs it."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from whole_number_checks import B, H, called, grid, origin_of
from whole_numbers import Program

from anyattn.backends.hopper.supports import _against_mod
from anyattn.mods.trace import TracedMod

sys.path.insert(0, str(Path(__file__).parent.parent / "backends"))
from test_hopper_emit import Array, emitter, numbers_of

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
    with np.errstate(all="ignore"):
        emitter(("dividend", "divisor")[made.seed % 2])["emit"](
            mod.expr, numbers_of(mod.scalars), [Array(t) for t in mod.tensors], places, read, lambda r, c, x: got.__setitem__((r, c), x.item())
        )
    assert torch.equal(got, want), f"CuTe text\n{made}{mod.expr}\n{got}\n{want}"
    return True
