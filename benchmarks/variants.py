"""The variants that are timed: pairs of plain functions, the same for anyattn and for its peers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

__all__ = ["VARIANTS", "Variant", "visible_pairs"]


@dataclass(frozen=True)
class Variant:
    """mask: (b, h, q_idx, kv_idx) -> bool, or None for everything. score: (score, b, h, q_idx, kv_idx) -> score, or None."""

    mask: Callable[..., Any] | None = None
    score: Callable[..., Any] | None = None

    def masked(self) -> Callable[..., Any]:
        """The mask of a variant that has one."""
        assert self.mask is not None
        return self.mask


def _causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def _full(seqlen: int, heads: int, device: str) -> Variant:
    return Variant()


def _causal_variant(seqlen: int, heads: int, device: str) -> Variant:
    return Variant(_causal)


def _sliding_window(window: int) -> Callable[[int, int, str], Variant]:
    return lambda seqlen, heads, device: Variant(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window))


def document_ids(seqlen: int, documents: int, device: str) -> torch.Tensor:
    """(S,) int64, sorted: ``documents`` documents cut at random, seed 1."""
    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(1))[: documents - 1] + 1
    ids = torch.zeros(seqlen, dtype=torch.int64)
    ids[cuts] = 1
    return ids.cumsum(0).to(device)


def _document(seqlen: int, heads: int, device: str) -> Variant:
    ids = document_ids(seqlen, 8, device)
    return Variant(lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx])


def _document_causal(documents: int) -> Callable[[int, int, str], Variant]:
    def make(seqlen: int, heads: int, device: str) -> Variant:
        ids = document_ids(seqlen, documents, device)
        return Variant(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx))

    return make


def _prefix_lm(seqlen: int, heads: int, device: str) -> Variant:
    prefix = seqlen // 4
    return Variant(lambda b, h, q_idx, kv_idx: (kv_idx < prefix) | (q_idx >= kv_idx))


def _sink_window(seqlen: int, heads: int, device: str) -> Variant:
    sink, window = 16, 512
    return Variant(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < sink) | (q_idx - kv_idx < window)))


def _alibi(seqlen: int, heads: int, device: str) -> Variant:
    slopes = torch.exp2(-8.0 * torch.arange(1, heads + 1, device=device) / heads)
    return Variant(_causal, lambda score, b, h, q_idx, kv_idx: score - slopes[h] * (q_idx - kv_idx))


def _t5_bias(seqlen: int, heads: int, device: str) -> Variant:
    distance = torch.arange(seqlen, device=device)
    far = 16 + (torch.log(distance.clamp(min=1) / 16) / math.log(128 / 16) * 16).long()
    bucket = torch.where(distance < 16, distance, far.clamp(max=31))
    table = torch.randn(32, heads, generator=torch.Generator().manual_seed(2)).to(device)
    return Variant(_causal, lambda score, b, h, q_idx, kv_idx: score + table[bucket[torch.abs(q_idx - kv_idx)], h])


def _softcap(seqlen: int, heads: int, device: str) -> Variant:
    return Variant(_causal, lambda score, b, h, q_idx, kv_idx: 30.0 * torch.tanh(score / 30.0))


def _head_bias(seqlen: int, heads: int, device: str) -> Variant:
    bias = torch.randn(heads, generator=torch.Generator().manual_seed(3)).to(device)
    return Variant(_causal, lambda score, b, h, q_idx, kv_idx: score + bias[h])


def _own(seqlen: int, heads: int, device: str) -> Variant:
    """Nobody's kernel: keys of the own or of every second paragraph of 256, near ones preferred."""
    paragraph = 256

    def mask(b, h, q_idx, kv_idx):
        own, other = q_idx // paragraph, kv_idx // paragraph
        return (q_idx >= kv_idx) & ((own == other) | (other % 2 == 0))

    return Variant(mask, lambda score, b, h, q_idx, kv_idx: score - torch.log1p(torch.abs(q_idx - kv_idx).float()))


VARIANTS: dict[str, Callable[[int, int, str], Variant]] = {
    "full": _full,
    "causal": _causal_variant,
    "window-512": _sliding_window(512),
    "document": _document,
    "prefix-lm": _prefix_lm,
    "sink-window": _sink_window,
    "alibi": _alibi,
    "t5-bias": _t5_bias,
    "softcap": _softcap,
    "head-bias": _head_bias,
    "own-mod": _own,
    "document-causal": _document_causal(9),
}


def visible_pairs(mask: Callable | None, seqlen_q: int, seqlen_k: int, device: str, rows_at_once: int = 1024) -> int:
    """How many (query, key) pairs of one head the mask shows; a mask of these benchmarks depends on neither b nor h."""
    if mask is None:
        return seqlen_q * seqlen_k
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(seqlen_k, device=device)
    total = 0
    for start in range(0, seqlen_q, rows_at_once):
        rows = torch.arange(start, min(start + rows_at_once, seqlen_q), device=device)[:, None]
        total += int(mask(zero, zero, rows, keys).expand(len(rows), seqlen_k).sum())
    return total
