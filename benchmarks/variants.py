"""The variants that are timed, most of them the gallery's: pairs of plain functions, the same for anyattn and for its peers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from anyattn import gallery

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


def _from_gallery(variant: gallery.Variant) -> Callable[[int, int, str], Variant]:
    def make(seqlen: int, heads: int, device: str) -> Variant:
        mods = variant.mods(gallery.Setting(seqlen, heads, device))
        return Variant(_plain(mods.mask), _plain(mods.score))

    return make


def _plain(mod: Callable[..., Any] | None) -> Callable[..., Any] | None:
    """What a user would have written himself, without the wrapper that makes anyattn's masks compose."""
    return getattr(mod, "fn", mod)


def _full(seqlen: int, heads: int, device: str) -> Variant:
    return Variant()


def _window_512(seqlen: int, heads: int, device: str) -> Variant:
    window = 512
    return Variant(lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < window))


def _document_causal(seqlen: int, heads: int, device: str) -> Variant:
    """9 documents, cut at random."""
    cuts = torch.randperm(seqlen - 1, generator=torch.Generator().manual_seed(1))[:8] + 1
    starts = torch.zeros(seqlen, dtype=torch.int64)
    starts[cuts] = 1
    ids = starts.cumsum(0).to(device)
    return Variant(lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx))


VARIANTS: dict[str, Callable[[int, int, str], Variant]] = {
    "full": _full,
    **{name: _from_gallery(variant) for name, variant in gallery.VARIANTS.items()},
    "window-512": _window_512,
    "document-causal": _document_causal,
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
