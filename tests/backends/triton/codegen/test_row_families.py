"""Derivatives by the elements of captured rows: which ones a Triton kernel has in a loop, and that they are those written out."""

from __future__ import annotations

import pytest
import torch

from anyattn import planner
from anyattn.backends.triton.codegen.row_families import families, reason_against
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from tests.support.hopper.pretended import H200

N = 64
x, y = (torch.randn(N, 8, generator=torch.Generator().manual_seed(i), dtype=torch.float64) for i in range(2))
gain = torch.rand(4, dtype=torch.float64)
MODS = {
    "dot": (lambda s, b, h, i, j: s + gain[h] * torch.dot(x[i], y[j]), [(0, range(8)), (1, range(8))], 1),
    "distance": (lambda s, b, h, i, j: s - 0.3 * (x[i] - y[j]).pow(2).sum(-1), [(0, range(8)), (1, range(8))], 0),
    "of the score": (lambda s, b, h, i, j: (torch.tanh(s * x[i]) * 2).mean(), [(0, range(8))], 0),
    "part of a row": (lambda s, b, h, i, j: s + (x[i, 2:7] * y[j, :5]).sum(), [(0, range(2, 7)), (1, range(5))], 0),
    "every other": (lambda s, b, h, i, j: s + (x[i][::2] * y[j][1::2]).sum(), [(0, range(0, 7, 2)), (1, range(1, 8, 2))], 0),
    "two rows of one": (lambda s, b, h, i, j: s + torch.dot(x[i], x[j]), [(0, range(8)), (0, range(8))], 0),
    "few": (lambda s, b, h, i, j: s + x[i, :3].sum(), [], 3),
    "a norm": (lambda s, b, h, i, j: s + (x[i] - y[j]).norm(), [], 16),
}


@pytest.mark.parametrize("name", MODS)
def test_a_loop_has_the_derivatives_of_every_element(name: str) -> None:
    fn, wanted, alone = MODS[name]
    mod = trace(fn, "score", score_dtype=torch.float64)
    gradients = score_gradients(mod.expr)
    found, others = families(gradients, len(mod.scalars))
    slots = [next(k for k, t in enumerate((x, y, gain)) if t is mod.tensors[family.slot]) for family in found]
    assert sorted(zip(slots, map(str, (f.elements for f in found)), strict=True)) == sorted((s, str(r)) for s, r in wanted)
    assert len(others) == alone and len(others) + sum(len(f.elements) for f in found) == len(gradients.loads)
    score = torch.randn(5, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    leaves = {"b": 0, "h": 1, "q_idx": torch.arange(5)[:, None], "kv_idx": torch.arange(7), "score": score}
    values = run(gradients.expr, leaves, mod.scalars, mod.tensors)
    sums = {}
    for load in gradients.loads:
        places = tuple(torch.as_tensor(values[i]).expand(5, 7) for i in load.indices)
        total = sums.setdefault(load.slot, torch.zeros_like(mod.tensors[load.slot]))
        total.index_put_(places, torch.as_tensor(values[load.output], dtype=torch.float64).expand(5, 7), accumulate=True)
        if load in others:
            total.index_put_(places, -torch.as_tensor(values[load.output], dtype=torch.float64).expand(5, 7), accumulate=True)
    for family in found:
        for element in family.elements:
            by_element, *places = run(family.expr, leaves, (*mod.scalars, element), mod.tensors)
            at = tuple(torch.as_tensor(p).expand(5, 7) for p in places)
            sums[family.slot].index_put_(at, -torch.as_tensor(by_element, dtype=torch.float64).expand(5, 7), accumulate=True)
    assert all(float(total.abs().max()) < 1e-13 for total in sums.values())


def problem_of(score) -> Problem:  # type: ignore[no-untyped-def]
    q = torch.zeros(1, 4, N, 64, dtype=torch.bfloat16, requires_grad=True)
    return Problem(q, q, q, 0.1, trace(score, "score"))


def test_what_would_be_written_out_at_length_is_torchs_and_explain_says_so() -> None:
    """The derivative of a norm holds all elements: no loop has it, and Triton's compiler takes many minutes for 128."""
    left, right = (torch.zeros(N, 64, requires_grad=True) for _ in range(2))
    assert reason_against(problem_of(lambda s, b, h, i, j: s + torch.dot(left[i], right[j]))) is None
    far = problem_of(lambda s, b, h, i, j: s - (left[i] - right[j]).norm())
    assert "needs 128 separate expressions" in (reason_against(far) or "")
    made = planner.choose(far, H200, "triton")
    assert made.backward == "torch" and any("needs 128 separate expressions" in line for line in made.why)
    assert planner.choose(problem_of(lambda s, b, h, i, j: s - (x[i] - y[j]).norm()), H200, "triton").backward == "triton"
