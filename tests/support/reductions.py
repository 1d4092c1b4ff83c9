"""Reductions of the softmax's weights in tests: from the oracle's dense weights, and their judgement by the budget."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyattn import oracle
from anyattn.arithmetic import ceil_div
from anyattn.testing import budget
from anyattn.testing.rounding import Noise

__all__ = ["blocks", "judged", "listed"]


def blocks(x: Tensor, block: tuple[int, int], how: str) -> Tensor:
    """(B, H, M, N) of dense (B, H, Sq, Sk)."""
    (m, n), (sq, sk) = block, x.shape[2:]
    size = ceil_div(sq, m), ceil_div(sk, n)
    x = pad(x, (0, size[1] * n - sk, 0, size[0] * m - sq), value=0.0 if how == "sum" else -math.inf)
    x = x.unflatten(3, (size[1], n)).unflatten(2, (size[0], m))
    return x.sum((3, 5)) if how == "sum" else x.amax((3, 5))


def judged(
    name: str, got: Tensor, weights: tuple[oracle.Weights, ...], reduced: Callable[[oracle.Weights], Tensor],
    drawn: Callable[[], list[oracle.Weights]] | None = None, keys: int = 1,
) -> None:  # fmt: skip
    """reduced: the sums, or maxima, of weights. weights: the oracle's and the plain formula's. drawn: weights with other roundings of the
    mods; None if the mods round no more than the product does. keys: of one sum, whose errors of the row's log-sum-exp are one."""

    def noise() -> Noise | None:
        (scores, p), eps = weights[0], torch.finfo(got.dtype).eps
        exact = reduced(weights[0])
        if "sums" in name:  # of each probability, the roundings of score, log-sum-exp, exponential and sum
            size = torch.where(p > 0, scores, 0.0).abs()
            error = p * (eps / 2) * (2 + size + (size - p.clamp_min(1e-300).log()).abs())
            variance = reduced(oracle.Weights(scores, error.square() * _alike(p, keys, has_heads=name.startswith("listed"))))
        else:  # the change of the base and back
            variance = (torch.where(exact.isneginf(), 0.0, exact) * eps).square()
        if drawn is not None:
            errors = [torch.where(exact.isneginf(), 0.0, reduced(w) - exact) for w in drawn()]
            variance = variance + torch.stack(errors).square().mean(0)
        return Noise(variance.sqrt(), variance.sqrt())

    budget.check(name, got, *(reduced(w) for w in weights), noise)


def _alike(p: Tensor, keys: int, has_heads: bool) -> Tensor:
    """How many probabilities of a sum have the error of each: (B, H, Sq, 1). Those of a query's keys have that of its log-sum-exp, and
    queries of a head, or of all heads, with the same probabilities err alike. Such errors add up as they are, not as independent ones do:
    the variance of each counts as often."""
    greatest = (p.amax(-1) if p.shape[3] else p.sum(-1)).float()
    others = greatest.flatten(1)[:, None, None] if has_heads else greatest[:, :, None]
    of_row = (p > 0).sum(-1, keepdim=True).clamp(1, keys)
    return ((greatest[..., None] == others).sum(-1, keepdim=True) * of_row).double()


def listed(sums: Tensor, indices: Tensor) -> Tensor:
    (batch, heads, rows, count), groups = indices.shape, sums.shape[1] // indices.shape[1]
    found = torch.zeros(indices.shape, dtype=sums.dtype)
    for b, g, m, i in torch.cartesian_prod(*map(torch.arange, (batch, heads, rows, count))).tolist():
        n = int(indices[b, g, m, i])
        if 0 <= n < sums.shape[3]:
            found[b, g, m, i] = sums[b, g * groups : (g + 1) * groups, m, n].sum()
    return found
