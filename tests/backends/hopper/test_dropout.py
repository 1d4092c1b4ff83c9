"""Dropout in the Hopper forward pass: the kernel's text on the registers of a warp group's threads, and who computes the gradients."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from anyattn import planner
from anyattn.backends.hopper.make_backward_config import backward_spec, reason_against_backward
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.plan import reason_against
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from tests.support.hopper.backward_roles import fold
from tests.support.hopper.emitted import Int32
from tests.support.hopper.pretended import H200
from tests.support.hopper.role_source import compiled

DROPOUT = dropout_of(Seeded(torch.tensor([5, -6], dtype=torch.int32), 0.4))
assert DROPOUT is not None


def signs(a: Any, b: Any, selector: str) -> int:
    """PRMT whose selector asks for signs: byte i of the result is the sign of byte (digit i - 8) of b and a, as 8 bits."""
    whole = (int(b) & 0xFFFFFFFF) << 32 | int(a) & 0xFFFFFFFF
    digits = [int(d, 16) for d in reversed(selector[2:])]
    assert all(d >= 8 for d in digits)
    return sum(0xFF << 8 * i for i, d in enumerate(digits) if whole >> 8 * (d - 8) + 7 & 1)


@pytest.mark.parametrize("p", [0.4, 0.1, 1e-4, 0.9999])
@pytest.mark.parametrize(("n", "tile_n", "warp_groups"), [(0, 128, 2), (3, 80, 2), (5, 96, 3)])
def test_probabilities_are_dropped_by_the_definition(n: int, tile_n: int, warp_groups: int, p: float) -> None:
    dropout = dropout_of(Seeded(torch.tensor([5, -6], dtype=torch.int32), p))
    assert dropout is not None
    names: dict[str, Any] = {
        "dsl_user_op": lambda f: f,
        "Int32": Int32,
        "Float32": np.float32,
        "cute": SimpleNamespace(),
        "T": None,
        "llvm": None,
    }
    exec(*compiled(("dropout",))[0], names)
    names |= {"fold": lambda a, b: Int32(int(fold(a, b))), "_signs": signs, "_both": lambda a, b: int(a) & int(b)}
    names["cute"].recast_tensor = lambda p, _: p
    names["cute"].size = len
    names["cute"].make_rmem_tensor = lambda size, _: [0] * size
    names["narrowed"] = lambda p, _: p
    entry, head, m_block = 3, 5, 2
    (count, factor), (seed,) = dropout.captured
    places = torch.tensor(entry), torch.tensor(head), m_block * 128 + torch.arange(128)[:, None]
    kept = evaluate(dropout.keep, *places, n * tile_n + torch.arange(tile_n))
    for thread in range(0, 128, 7):
        row, column = thread // 32 * 16 + thread % 32 // 4, thread % 4 * 2
        drops = names["Drops"]()
        drops.config, drops.dtype = SimpleNamespace(tiles=SimpleNamespace(tile_n=tile_n, warp_groups=warp_groups)), None
        drops.first_row = lambda *_, q=m_block * 128 + row: Int32(q)
        drops.head = lambda *_: Int32(head)
        captured: tuple = ((Int32(count), factor), ([Int32(int(x)) for x in seed],))
        pairs, positions = [0xFFFFFFFF] * (2 * tile_n // 8), {(0, 0): (row, column)}
        with np.errstate(over="ignore"):
            rows = drops.words_of_rows(positions, SimpleNamespace(entry=Int32(entry)), captured)
            ahead = drops.words_ahead(rows, Int32(n))
            assert (ahead is None) is (warp_groups == 3)
            drops.keep(pairs, drops.narrowed_apart(pairs, (rows, Int32(n), ahead)))
        found = {}
        for at, pair in enumerate(pairs):  # wgmma's first operand: 16 columns at a time, rows before the later 8 columns
            sixteen, eight, r = at // 4, at // 2 % 2, at % 2
            for i in range(2):
                found[r, 16 * sixteen + 8 * eight + i] = (pair >> 16 * i) & 0xFFFF
        for (r, c), mask in found.items():
            assert mask == (0xFFFF if kept[row + 8 * r, column + c] else 0), (thread, r, c)


def problem(d: int = 128, **changes: Any) -> Problem:
    q = torch.randn(1, 2, 64, d, dtype=torch.bfloat16)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1, "dropout": DROPOUT} | changes))


def test_who_computes_the_gradients() -> None:
    capped = trace(lambda s, b, h, q, k: 20 * torch.tanh(s / 20), "score")
    for given, reason in (
        (problem(), None),
        (problem(64), None),
        (problem(192), "head dimension 128"),
        (problem(score=capped), "score mod"),
    ):
        assert reason_against(given) is None
        against = reason_against_backward(given)
        assert against is None if reason is None else reason in str(against)
        plan = planner.choose(given, H200)
        assert plan.backend == "hopper" and plan.backward == ("hopper" if reason is None else "triton")


def test_one_kernel_for_all_probabilities_and_the_same_without() -> None:
    other = dropout_of(Seeded(torch.tensor([1, 2], dtype=torch.int32), 0.1))
    for made in (forward_spec, backward_spec):
        configs = [made(problem(dropout=d)).config for d in (DROPOUT, other, None)]
        assert configs[0] == configs[1] != configs[2] and not configs[2].has_dropout
    (numbers, tensors), (least, factor) = forward_spec(problem()).captured(problem()), DROPOUT.captured[0]  # type: ignore[union-attr]
    assert numbers[-2:] == (least, factor) and tensors[-1] is DROPOUT.keep.tensors[0]  # type: ignore[union-attr]
