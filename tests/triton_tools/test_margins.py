"""Conjunctions of comparisons as one, of the least margin: by value at every pair of positions."""

from __future__ import annotations

import pytest
import torch

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.separated import separated
from anyattn.mods.ir.expr import Expr
from anyattn.mods.ir.extents import Box
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.triton_tools.margins import with_margins
from tests.support.hopper.masks import MASKS

BOX = Box.of_sizes(2**22, 2**22)._replace(by_zero=False)
ROWS, KEYS = torch.arange(300)[:, None], torch.arange(330)
NUMBERS = 5, 2**21
JOINED = {
    "every comparison": lambda b, h, q, k: (q - k <= 90) & (k - q < 80) & (k // 3 >= q // 4) & (k % 50 > q % 40),
    "others between": lambda b, h, q, k: (q >= k) & (q % 3 == k % 3) & (k > q - 99) & (k < 200) & (q * 0.5 < k) & (q // 2 <= k),
    "in a choice": lambda b, h, q, k: torch.where((q > k) & (q < k + 40) & (k > q // 3), k % 2 == 0, (q <= k) & (q % 8 >= k % 8)),
    "one of two": lambda b, h, q, k: ((q >= k) & (q < k + 60) & (k >= q // 2)) | ((k > q) & (k <= q + 7) & (k // 2 >= q // 2)),
    "captured": lambda b, h, q, k: (q - k <= NUMBERS[0]) & (k - NUMBERS[1] < q) & (k + NUMBERS[1] > q) & (q // 7 - k // 7 <= NUMBERS[0]),
    "short": lambda b, h, q, k: (q.to(torch.int8) >= k.to(torch.int8)) & (q < k + 90) & (k < q + 90) & (k >= q // 2),
}


def value(expr: Expr, mod: TracedMod) -> torch.Tensor:
    leaves = {"b": torch.tensor(1), "h": torch.tensor(1), "q_idx": ROWS, "kv_idx": KEYS}
    return torch.as_tensor(run(expr, leaves, mod.scalars, mod.tensors)[0]).expand(300, 330)


@pytest.mark.parametrize("name", [*MASKS, *JOINED])
def test_least_margins_are_the_mask(name: str) -> None:
    mod = trace((MASKS | JOINED)[name], "mask")
    whole = value(mod.expr, mod)
    for expr in (mod.expr, separated(mod.expr, BOX)):
        assert torch.equal(value(with_margins(expr, BOX), mod), whole)
    assert name not in JOINED or any(node.op == "min" for node in with_margins(mod.expr, BOX).nodes)


def test_numbers_that_leave_no_room_are_compared() -> None:
    far = trace(lambda b, h, q, k: (q * 1000 >= k * 999) & (q < k + 40) & (k <= q + 2) & (q - 9 <= k), "mask")
    least = [node for node in with_margins(far.expr, BOX).nodes if node.op == "min"]
    assert len(least) == 2 and torch.equal(value(with_margins(far.expr, BOX), far), value(far.expr, far))
