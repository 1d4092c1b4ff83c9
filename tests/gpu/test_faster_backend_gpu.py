"""Calls without a backend's name, of the classes in which the planner prefers Triton for one pass or for both, judged on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from tests.support.gpu import judging
from tests.support.gpu.judging import Capturing, judge, qkv, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread"), judging.on_the_gpu_alone]
judging.needs_the_backend(only="hopper")

PAIRS, TABLE = random(4, 512, 512), random(99, 4)
BUCKETS = torch.randint(0, 99, (512, 512), generator=torch.Generator().manual_seed(3))
SCORES: dict[str, Any] = {
    "none": None,
    "pairs": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i, j])(to(PAIRS))),
    "buckets": Capturing(lambda to: (lambda t, at: lambda s, b, h, i, j: s + t[at[i, j], h])(to(TABLE), to(BUCKETS))),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("seqlen", "d"), [(1, 32), (49, 32), (64, 64), (65, 64), (300, 32), (512, 64)])
@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("mask", [None, masks.causal(), lambda b, h, i, j: (i + j) % 5 > 0], ids=["full", "causal", "fifths"])
def test_results_and_gradients(mask: Any, name: str, seqlen: int, d: int, dtype: torch.dtype) -> None:
    judge(qkv(2, 4, 4, sq=seqlen, sk=seqlen, d=d, dtype=dtype), backward=True, score=SCORES[name], mask=mask, backend=None)


def test_a_learned_table_and_the_log_sum_exp_have_gradients_after_another_backend_s_forward_pass() -> None:
    found, table, buckets = [], TABLE.cuda().requires_grad_(), BUCKETS.cuda()

    def score(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return s + table[buckets[i, j], h]

    for backend in (None, "hopper"):
        leaves = [t.detach().requires_grad_() for t in qkv(8, 4, 4, sq=49, sk=49, d=32)]
        out, lse = anyattn.flex_attention(*leaves, score, return_lse=True, backend=backend)
        given = random(*out.shape, seed=1).to(out), random(*lse.shape, seed=2).to(lse)
        found.append([t.float() for t in torch.autograd.grad((out, lse), [*leaves, table], given)])
    for own, other in zip(*found, strict=True):
        assert (own - other).norm() <= 2**-7 * other.norm()
