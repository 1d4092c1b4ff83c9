"""Separated comparisons: the same mask at every pair, with nothing but comparisons where both positions meet."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.separated import separated
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.mods.ir.extents import Box
from anyattn.mods.tracing.trace import TracedMod, trace
from tests.support.hopper.masks import MASKS

BOX = Box.of_sizes(2**24, 2**29)
COMPARED = {
    "sides": lambda b, h, q, k: q - k < 9,
    "right": lambda b, h, q, k: k - q - h <= 4,
    "sums": lambda b, h, q, k: q // 7 + (3 - k // 7) > h - k % 5,
    "negative": lambda b, h, q, k: -(q - k) <= 3,
    "equal": lambda b, h, q, k: (q - k == 5) | (k - q != 7) & (q < 50),
    "size": lambda b, h, q, k: (q % 20 - k % 20).abs() <= 3,
    "not within": lambda b, h, q, k: (q - k).abs() > 30,
    "negative size": lambda b, h, q, k: -(q - k).abs() >= -30,
    "size on the right": lambda b, h, q, k: (k - q + 1).abs() < 12,
    "two sizes": lambda b, h, q, k: torch.maximum((q // 9 - k // 9).abs(), (q % 9 - k % 9).abs()) <= 2,
    "smaller": lambda b, h, q, k: torch.minimum(q - k, k - q + 40) >= 5,
    "size of sizes": lambda b, h, q, k: ((q - k).abs() - 20).abs() < 5,
    "compared sizes": lambda b, h, q, k: (q - k).abs() < (q - 2 * k).abs(),
}


def seen(expr: Expr, mod: TracedMod) -> torch.Tensor:
    leaves = {"b": 1, "h": 2, "q_idx": torch.arange(150)[:, None], "kv_idx": torch.arange(170)}
    return torch.as_tensor(run(expr, leaves, mod.scalars, mod.tensors)[0]).expand(150, 170)


def mixed(expr: Expr) -> set[str]:
    return {node.op for node, dep in zip(expr.nodes, dependence(expr), strict=True) if dep.q and dep.kv}


@pytest.mark.parametrize("beside", ["q_idx", "kv_idx"])
@pytest.mark.parametrize("name", [*MASKS, *COMPARED])
def test_the_same_mask(name: str, beside: str) -> None:
    mod = trace((MASKS | COMPARED)[name], "mask")
    made = separated(mod.expr, BOX, beside)
    assert torch.equal(seen(made, mod), seen(mod.expr, mod))
    if name in COMPARED and name not in ("size of sizes", "compared sizes"):
        assert mixed(made) <= {"lt", "le", "gt", "ge", "eq", "ne", "and", "or"}


def test_the_side_of_what_depends_on_neither() -> None:
    """A captured number is added to the position that it is wanted beside."""
    for beside, alone in (("q_idx", "kv"), ("kv_idx", "q")):
        mod = trace(lambda b, h, q, k, n=7: (q - k).abs() <= n, "mask")
        made = separated(mod.expr, BOX, beside)
        deps = dependence(made)
        sums = [dep for node, dep in zip(made.nodes, deps, strict=True) if node.op in ("add", "sub")]
        assert len(sums) == 2 and not any(getattr(dep, alone) for dep in sums)


def test_what_may_wrap_around_stays_as_it_is() -> None:
    """Of int8, of sums that 64 bits do not hold, and of those that 32 do not: those would take more, not less."""

    def of_bytes(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q.to(torch.int8) - k.to(torch.int8) < 9

    def far(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q * 2**40 - k * 2**39 < q * 2**39

    def wide(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k) < q * 2**20

    for mask in (of_bytes, far, wide):
        mod = trace(mask, "mask")
        made = separated(mod.expr, BOX)
        assert "sub" in mixed(made) and torch.equal(seen(made, mod), seen(mod.expr, mod))
