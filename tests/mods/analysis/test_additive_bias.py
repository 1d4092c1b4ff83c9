"""``additive_bias`` finds ``score + bias`` and nothing else."""

from __future__ import annotations

import math

import pytest
import torch

from anyattn import scores
from anyattn.mods.analysis.additive_bias import additive_bias
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.tracing.trace import trace

H, M, N = 3, 5, 6
table = torch.randn(H, M + N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LEAVES = {"b": 0, "h": torch.arange(H).view(-1, 1, 1), "q_idx": torch.arange(M).view(-1, 1), "kv_idx": torch.arange(N)}
SCORE = torch.randn(H, M, N, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

ADDITIVE = {
    "alibi": scores.alibi(table[:, 0]),
    "t5": scores.t5_bias(table.T),
    "left": lambda s, b, h, q, k: table[h, q + k] + s,
    "minus": lambda s, b, h, q, k: s - table[h, k] - 2.0,
    "many": lambda s, b, h, q, k: 1.0 + (table[h, q] + (s + 0.5 * q)) - table[h, k],
    "masked": lambda s, b, h, q, k: s + torch.where(q >= k, 0.0, -math.inf),
}
OTHER = {
    "identity": lambda s, b, h, q, k: s,
    "scaled": lambda s, b, h, q, k: 2 * s + table[h, q],
    "twice": lambda s, b, h, q, k: s + s,
    "negated": lambda s, b, h, q, k: table[h, q] - s,
    "softcap": scores.softcap(2.0),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, 0.0),
    "gated": lambda s, b, h, q, k: s + s * table[h, q],
    "rounded": lambda s, b, h, q, k: s.to(torch.float32) + 1.0,
    "constant": lambda s, b, h, q, k: table[h, q],
}


@pytest.mark.parametrize("factor", [1.0, 0.5, -2.0])
@pytest.mark.parametrize("name", ADDITIVE)
def test_additive(name, factor):
    traced = trace(ADDITIVE[name], "score", score_dtype=torch.float64)
    bias = additive_bias(traced.expr, factor)
    (got,) = run(bias, {**LEAVES, "score": None}, traced.scalars, traced.tensors)
    (want,) = run(traced.expr, {**LEAVES, "score": torch.zeros(H, M, N, dtype=torch.float64)}, traced.scalars, traced.tensors)
    assert torch.equal((got + 0 * want.nan_to_num(neginf=0)), factor * want) and not bias.uses_score


@pytest.mark.parametrize("name", OTHER)
def test_not_additive(name):
    assert additive_bias(trace(OTHER[name], "score", score_dtype=torch.float64).expr) is None
