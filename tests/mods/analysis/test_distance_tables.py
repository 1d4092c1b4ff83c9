"""Tables by row and distance: which loads of a score mod are of such, by what a mod does to their places and values."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyattn.mods.analysis.captured_loads import distance_tables
from anyattn.mods.tracing.trace import trace

TABLE, OTHER, FLAT = torch.zeros(2, 3, 99, 40), torch.zeros(2, 3, 99, 40), torch.zeros(3, 99, 40)


def near(q: Any, k: Any) -> Any:
    return torch.clamp(q - k, -8, 8) + 8


FOUND: dict[str, tuple[Callable, list[tuple[int, bool]]]] = {
    "by query": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)], [(0, False)]),
    "by key": (lambda s, b, h, q, k: s + TABLE[b, h, k, near(k, q)], [(0, True)]),
    "both": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)] + OTHER[b, h, k, near(k, q)], [(0, False), (1, True)]),
    "two of one derivative": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)] + OTHER[b, h, q, near(k, q)], [(0, False), (1, False)]),
    "two of two derivatives": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)] - OTHER[b, h, q, near(k, q)], [(0, False)]),
    "by the head's distance": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k) + h], [(0, False)]),
    "a factor of the score": (lambda s, b, h, q, k: s * TABLE[b, h, q, near(q, k)], [(0, False)]),
    "read twice": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)] + TABLE[b, h, q, near(k, q)], []),
    "read by row and by key": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)] + TABLE[b, h, k, near(k, q)], []),
    "without far sides": (lambda s, b, h, q, k: s + TABLE[b, h, q, (q - k) % 40], []),
    "one far side": (lambda s, b, h, q, k: s + TABLE[b, h, q, torch.where(q - k > 8, 0, (q - k) % 40)], []),
    "shared by heads": (lambda s, b, h, q, k: s + TABLE[b, 0, q, near(q, k)], []),
    "of another row": (lambda s, b, h, q, k: s + TABLE[b, h, q + 1, near(q, k)], []),
    "by row and more than distance": (lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k) + q % 3], []),
    "without batch entries": (lambda s, b, h, q, k: s + FLAT[h, q, near(q, k)], []),
}


@pytest.mark.parametrize("name", FOUND)
def test_tables(name: str) -> None:
    mod, wanted = FOUND[name]
    traced = trace(mod, "score")
    slots = tuple(range(len(traced.tensors)))
    assert [(table.slot, table.by_key) for table in distance_tables(traced.expr, slots)] == wanted
    assert not distance_tables(traced.expr, ())


def test_float16_wants_derivatives_of_its_range() -> None:
    mods = {
        1.0: lambda s, b, h, q, k: s + TABLE[b, h, q, near(q, k)],
        -1.0: lambda s, b, h, q, k: s - TABLE[b, h, q, near(q, k)],
        0.5: lambda s, b, h, q, k: s + 0.5 * TABLE[b, h, q, near(q, k)],
    }
    exprs = {factor: trace(mod, "score").expr for factor, mod in mods.items()}
    assert {factor: len(distance_tables(expr, (0,))) for factor, expr in exprs.items()} == {1.0: 1, -1.0: 1, 0.5: 1}
    assert {factor: len(distance_tables(expr, (0,), is_float16=True)) for factor, expr in exprs.items()} == {1.0: 1, -1.0: 1, 0.5: 0}
