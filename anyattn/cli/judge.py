"""Judging of gallery results against float64, as shares of the error budget."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn import oracle
from anyattn.gallery import Mods
from anyattn.testing import budget
from anyattn.testing.rounding import rounding

__all__ = ["decode_share", "shares"]


def shares(mods: Mods, qkv: tuple[Tensor, ...], dout: Tensor, out: Tensor, gradients: tuple[Tensor, ...]) -> dict[str, float]:
    """The share of its budget that each of the last head's out, dq, dk and dv uses; at most 1 passes.

    Only one head, since dense float64 attention from the definition is slow. Query and key heads must be equally many.
    """
    head = qkv[0].shape[1] - 1
    part = [t.detach()[:, head:] for t in (*qkv, dout)]
    given: dict[str, Any] = {}
    if mods.mask is not None:
        mask = mods.mask
        given["mask"] = lambda b, h, q_idx, kv_idx: mask(b, h + head, q_idx, kv_idx)
    if mods.score is not None:
        score = mods.score
        given["score"] = lambda s, b, h, q_idx, kv_idx: score(s, b, h + head, q_idx, kv_idx)
    with torch.enable_grad():
        fp64 = (oracle.attention(*part[:3], **given).out, *oracle.gradients(*part, **given)[:3])
        plain = (oracle.same_dtype(*part[:3], **given).out, *oracle.same_dtype_gradients(*part, **given)[:3])
        noise = rounding(*part, **given)
    noises = (noise.out, noise.dq, noise.dk, noise.dv)
    mine = [t.detach()[:, head:] for t in (out, *gradients)]
    compared = zip(("out", "dq", "dk", "dv"), mine, fp64, plain, noises)
    return {name: budget.share(got, exact, by_hand, rough) for name, got, exact, by_hand, rough in compared}


def decode_share(q: Tensor, k_cache: Tensor, v_cache: Tensor, lengths: Tensor, out: Tensor) -> float:
    """The share of its budget that a decoding step uses: q and out (B, 1, H, D) see the first ``lengths + 1`` keys of their entry."""
    part = (q.transpose(1, 2), k_cache.transpose(1, 2), v_cache.transpose(1, 2))
    given: dict[str, Any] = {"mask": lambda b, h, q_idx, kv_idx: kv_idx <= lengths[b]}
    with torch.enable_grad():
        noise = rounding(*part, torch.zeros_like(part[0]), **given)
    exact, by_hand = oracle.attention(*part, **given).out, oracle.same_dtype(*part, **given).out
    return budget.share(out.transpose(1, 2), exact, by_hand, noise.out)
