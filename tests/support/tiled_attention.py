"""A small tile-wise attention for these tests alone, with switches that plant errors, to test the error budget."""

from __future__ import annotations

import math

import torch
from torch import Tensor

BUGS = (
    "scale_1_percent", "lost_key", "window_off_by_one", "stale_max", "no_rescale", "wrong_gqa_head", "dropped_tile", "unmasked_tail",
    "causal_offset", "stale_lse", "no_delta", "dq_without_scale", "half_probabilities_dropped", "key_gradient_shifted", "dv_unnormalised",
    "one_nan", "base_2_lse", "first_row_zero", "delta_of_next_row",
)  # fmt: skip
_TILE = 48


def attention(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, window: int, half_scores: bool = False, bug: str = "") -> dict[str, Tensor]:
    """out, lse, dq, dk, dv under a causal sliding window; q (1, Hq, S, D), k and v (1, Hkv, S, D); statistics in float32 or better."""
    dtype, wide = q.dtype, torch.promote_types(q.dtype, torch.float32)
    product = dtype if half_scores else wide
    ratio = q.shape[1] // k.shape[1]
    heads = torch.arange(q.shape[1]) // ratio
    if bug == "wrong_gqa_head":
        heads = torch.arange(q.shape[1]) % k.shape[1]
    keys, values = k[:, heads], v[:, heads]
    seqlen, scale = q.shape[2], 1 / math.sqrt(q.shape[3])
    if bug == "scale_1_percent":
        scale *= 1.01
    rows = torch.arange(seqlen)[:, None]
    starts = range(0, seqlen, _TILE)

    def tile(start: int) -> tuple[slice, Tensor]:
        cols = torch.arange(start, min(start + _TILE, seqlen))
        near = rows - cols <= window - (bug == "window_off_by_one")
        seen = (cols <= rows + (bug == "causal_offset")) & near & (cols != (seqlen // 2 if bug == "lost_key" else -1))
        if bug == "unmasked_tail" and start == starts[-1]:
            seen = torch.ones_like(seen)
        s = (q.to(product) @ keys[:, :, cols].to(product).mT).to(wide) * scale
        return slice(start, start + len(cols)), torch.where(seen, s, -math.inf)

    row_max = torch.full((*q.shape[:3], 1), -math.inf, dtype=wide)
    total, acc = torch.zeros_like(row_max), torch.zeros((*q.shape[:3], v.shape[3]), dtype=wide)
    for start in starts:
        at, s = tile(start)
        if bug == "dropped_tile" and start == starts[1]:
            continue
        new = torch.maximum(row_max, s.amax(-1, keepdim=True))
        safe = torch.where(new == -math.inf, 0.0, new)
        p, keep = torch.exp(s - safe), torch.exp(row_max - safe)
        total = total * keep + p.sum(-1, keepdim=True)
        acc = acc * (1.0 if bug == "no_rescale" else keep) + (p.to(dtype) @ values[:, :, at]).to(wide)
        row_max = row_max if bug == "stale_max" and start > 0 else new
    out = (acc / torch.where(total == 0, 1.0, total)).to(dtype)
    lse = torch.log(total) + row_max
    if bug == "base_2_lse":
        lse = lse * math.log2(math.e)
    if bug == "first_row_zero":
        out[:, :, 0] = 0.0
    if bug == "one_nan":
        out[0, 0, seqlen // 2, 0] = math.nan
    return {"out": out, "lse": lse[..., 0], **_gradients(q, keys, values, dout, out, lse, scale, starts, tile, ratio, bug)}


def _gradients(q, keys, values, dout, out, lse, scale, starts, tile, ratio, bug):  # type: ignore[no-untyped-def]
    dtype, wide = q.dtype, lse.dtype
    delta = (dout.to(wide) * out.to(wide)).sum(-1, keepdim=True)
    if bug == "no_delta":
        delta = delta * 0
    if bug == "delta_of_next_row":
        delta = delta.roll(-1, 2)
    saved = lse.roll(1, 2) if bug == "stale_lse" else lse
    dq, dk, dv = (torch.zeros(t.shape, dtype=wide) for t in (q, keys, values))
    for start in starts:
        at, s = tile(start)
        p = torch.exp(s - saved)
        dp = (dout.to(wide) @ values[:, :, at].to(wide).mT).to(wide)
        ds = (p * (dp - delta) * (1.0 if bug == "dq_without_scale" else scale)).to(dtype)
        if bug == "half_probabilities_dropped":
            p = torch.where(p < 0.01, 0.0, p)
        if bug == "dv_unnormalised":
            p = p * 1.02
        dq += (ds @ keys[:, :, at]).to(wide)
        dk[:, :, at] = (ds.mT @ q).to(wide)
        dv[:, :, at] = (p.to(dtype).mT @ dout).to(wide)
    if bug == "key_gradient_shifted":
        dk = dk.roll(1, 2)
    dk, dv = (t.unflatten(1, (-1, ratio)).sum(2) for t in (dk, dv))
    return {"dq": dq.to(dtype), "dk": dk.to(dtype), "dv": dv.to(dtype)}
