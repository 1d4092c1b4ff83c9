"""Gathered keys: the rule by which they pay, and the budget of values times their scales, which copies hold in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anyattn.kvcache.gathered import MANY, MOST_BYTES, Gathering, gathering, line_of
from tests.support import sequences as seq
from tests.support.eight_bits import DTYPES
from tests.support.sequences import Meaning


def test_the_rule() -> None:
    n, many = MANY, 132
    assert gathering(n, many, 1, 10, MOST_BYTES) is Gathering.ALWAYS and gathering(n, many, 1, 10, MOST_BYTES + 1) is Gathering.NEVER
    assert gathering(2 * n - 1, many, 2, 10, 1) is Gathering.NEVER and gathering(2 * n, many // 2 - 1, 2, 10, 1) is Gathering.NEVER
    assert gathering(2 * n, many, 2, 4 * n, 1) is Gathering.ALWAYS and gathering(2 * n, many, 2, 4 * n + 1, 1) is Gathering.SEEN
    assert gathering(2 * n, many, 2, 10**6, 0) is Gathering.ALWAYS


def test_the_rule_for_keys_that_are_read_in_place() -> None:
    assert gathering(8 * 32, 32, 8, 8192, 0, 4) is Gathering.SEEN and gathering(8 * 32, 32, 8, 8192, 1, 4) is Gathering.NEVER
    assert gathering(8 * 31, 64, 8, 8192, 0, 8) is Gathering.NEVER  # so few take fewer loads by Triton
    assert gathering(8 * 32, 32, 8, 8192, 0, 3) is Gathering.NEVER  # 96 rows of a tile
    assert gathering(7 * 32, 32, 7, 8192, 0, 4) is Gathering.NEVER  # 56 tiles
    assert gathering(4 * 128, 16, 4, 16384, 0, 8) is Gathering.SEEN


def test_lines() -> None:
    assert line_of(160, 33, 16) == 48 and line_of(160, 1000, 16) == 160 and line_of(160, 0, 16) == 16 and line_of(160, 33, 0) == 160


def far_apart(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return 0.02 * torch.exp2((torch.rand(shape, generator=g) - 0.5) * 16)


def alike(shape: tuple[int, ...], g: torch.Generator) -> Tensor:
    return 0.01 + 0.01 * torch.rand(shape, generator=g)


def as_a_kernel(q: Tensor, k: Tensor, v: Tensor, of_k: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse, causal, of float32 scores and sums, with weights rounded to 16 bits, as Hopper's kernel rounds them."""
    k, v, of_k = (t.float().repeat_interleave(len(q) // len(k), 0) for t in (k, v, of_k))
    scores = q.float() @ k.mT * q.shape[-1] ** -0.5 * of_k[:, None]
    hidden = torch.ones(scores.shape[1:], dtype=torch.bool).triu(scores.shape[2] - scores.shape[1] + 1)
    scores = scores.masked_fill(hidden, -torch.inf)
    row_max = scores.amax(-1, keepdim=True)
    weights = (scores - row_max).exp()
    row_sum = weights.sum(-1, keepdim=True)
    return (weights.to(q.dtype).float() @ v / row_sum).to(q.dtype), (row_max + row_sum.log())[..., 0]


KINDS = ("random", "large scores", "one key a row", "opposite values", "cancelling scores")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scales", [alike, far_apart])
def test_rounded_products_are_within_the_budget(scales, kind: str, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    """Keys exactly, whose scales multiply the scores, and values times scales of their own, rounded. What the plain formula is judged by
    rounds both; here the weights are rounded besides."""
    g, keys, d = torch.Generator().manual_seed(0), 300, 64
    batch = seq.ragged([70], [keys], 4, 2, d, d, torch.bfloat16)
    strength = {"large scores": 12.0, "one key a row": 200.0}.get(kind, 1.0)
    q = (batch.q[0].float() * strength).bfloat16()
    k, v = (t.float() * 40 for t in (batch.k[0], batch.v[0]))
    if kind == "opposite values":  # of two keys that are seen alike
        k[:, 1::2], v[:, 1::2] = k[:, ::2], -v[:, ::2]
    if kind == "cancelling scores":
        k, q = k.abs() + 60, torch.tensor([4.0, -4.0]).repeat(d // 2).expand(q.shape).bfloat16()
    k8, v8 = (t.clamp(-127, 127).round().to(dtype) for t in (k, v))
    of_k, of_v = (scales((2, keys), g) for _ in range(2))
    if kind == "opposite values":
        of_k[:, 1::2] = of_k[:, ::2]
    out, lse = as_a_kernel(q, k8, (v8.float() * of_v[..., None]).bfloat16(), of_k)
    wide = [t.double() * f.double()[..., None] for t, f in ((k8, of_k), (v8, of_v))]
    whole = seq.Ragged([q], [wide[0]], [wide[1]], batch.dout)
    seq.judge({"out": [out], "lse": [lse]}, whole, Meaning(causal=True))
