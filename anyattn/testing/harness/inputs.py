"""A benchmark case's tensors, in every layout that a contestant takes, and its mods."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from anyattn.gallery import Mods
from anyattn.testing.harness.case import Case
from anyattn.testing.harness.dense import entries_and_heads
from anyattn.testing.harness.variants import VARIANTS, Setting, Variant

Three = tuple[Tensor, Tensor, Tensor]
__all__ = ["Inputs", "intervals", "visible_pairs"]


class Inputs:
    """Random normal q, k, v of a case, the same for every contestant, and the gradient of its output.

    bshd: contiguous (batch, length, heads, head dim), FlashAttention's layout. bhsd: a contiguous copy, torch's layout. packed: bshd as
    one row of tokens. If gradients are timed, each is a separate leaf. device: default the case's. variant: replaces the case's one for
    a user's own mods.
    """

    def __init__(self, case: Case, device: str | None = None, variant: Variant | None = None):
        shape = case.shape
        self.case, self.device, self.variant = case, device or case.device, variant or VARIANTS[case.device][case.variant]
        self.bshd: Three = ()  # type: ignore[assignment]  # of a mask alone, none
        if case.kind != "mask":
            device, dtype = self.device, case.torch_dtype
            random = torch.Generator(device).manual_seed(0)
            rows, keys = (shape.batch, shape.seqlen_q, shape.heads_q), (shape.batch, shape.seqlen_k, shape.heads_kv)
            sizes = [(*rows, shape.head_dim), (*keys, shape.head_dim), (*keys, shape.value_dim)]
            sizes += [(*rows, shape.value_dim)] if case.is_backward else []
            drawn = [torch.randn(size, generator=random, device=device, dtype=dtype) for size in sizes]
            self.bshd = self._leaves(drawn[:3])
            self._gradient = drawn[3] if case.is_backward else None

    def _leaves(self, tensors: Iterable[Tensor]) -> Three:
        q, k, v = (t.detach().requires_grad_(self.case.is_backward) for t in tensors)
        return q, k, v

    @cached_property
    def bhsd(self) -> Three:
        return self._leaves(t.detach().transpose(1, 2).contiguous() for t in self.bshd)

    @cached_property
    def packed(self) -> Three:
        return self._leaves(t.detach().flatten(0, 1) for t in self.bshd)

    def leaves(self, layout: str) -> Three:
        return {"bshd": self.bshd, "bhsd": self.bhsd, "packed": self.packed}[layout]

    def gradient(self, layout: str) -> Tensor:
        """The gradient of the output, contiguous in that layout."""
        assert self._gradient is not None
        if layout == "bhsd":
            return self._gradient.transpose(1, 2).contiguous()
        return self._gradient.flatten(0, 1) if layout == "packed" else self._gradient

    @cached_property
    def setting(self) -> Setting:
        shape = self.case.shape
        dtype = self.case.torch_dtype if self.case.dtype else torch.float32
        return Setting(shape.seqlen_k, shape.heads_q, self.device, shape.batch, self.case.learns, dtype)

    @cached_property
    def mods(self) -> Mods:
        return self.variant.mods(self.setting)

    @property
    def captured(self) -> list[Tensor]:
        """The tensors that the score mod reads and whose gradients are timed."""
        return self.setting.captured if self.case.learns else []

    @property
    def enable_gqa(self) -> bool:
        return self.case.shape.heads_q != self.case.shape.heads_kv

    @property
    def lengths(self) -> list[int]:
        """The lengths of the documents of all batch entries, one after the other."""
        assert self.variant.documents is not None, f"{self.case.variant} has no documents"
        return self.variant.documents(self.case.shape.seqlen_q) * self.case.shape.batch

    @cached_property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor([0, *accumulate(self.lengths)], dtype=torch.int32, device=self.device)

    @cached_property
    def grid(self) -> tuple[int, int, int, int]:
        """The shape of a block mask: 1 for batch entries or heads if the mask is the same for all of them."""
        shape, (by_entry, by_head) = self.case.shape, entries_and_heads(self.mods)
        return shape.batch if by_entry else 1, shape.heads_q if by_head else 1, shape.seqlen_q, shape.seqlen_k

    @cached_property
    def block_mask(self) -> Any:
        """anyattn's block mask, or None if everything is visible."""
        import anyattn

        mask = self.mods.mask
        size = self.variant.block_size
        return None if mask is None else anyattn.create_block_mask(mask, *self.grid, device=self.device, BLOCK_SIZE=size)

    def pairs(self) -> int:
        """Visible pairs of all batch entries and heads, counted by evaluating the mask."""
        if not any(self.case.products):
            return 0
        shape, (entries, heads, seqlen_q, seqlen_k) = self.case.shape, self.grid
        shown = [visible_pairs(self.mods.mask, seqlen_q, seqlen_k, self.device, (b, h)) for b in range(entries) for h in range(heads)]
        return sum(shown) * (shape.batch // entries) * (shape.heads_q // heads)

    def comparable(self, result: Any, layout: str) -> Any:
        """A contestant's result, or its gradients of q, k and v, as (batch, length, heads, head dim); a block mask unchanged.

        layout: one of ``leaves``, mask, padded (documents, heads, longest, head dim), or per-document, each (1, length, heads, head dim).
        """
        if layout == "mask":
            return result
        if self.case.is_backward:
            return tuple(self._as_bshd(grad, layout, like) for grad, like in zip(result, self.bshd))
        if layout == "per-document":
            return torch.cat(result, dim=1).reshape(self.bshd[0].shape)
        if layout == "padded":
            rows = [row[:, :length].transpose(0, 1) for row, length in zip(result, self.lengths, strict=True)]
            return torch.cat(rows).reshape(self.bshd[0].shape)
        return self._as_bshd(result[0] if isinstance(result, (tuple, list)) else result, layout, self.bshd[0])

    def _as_bshd(self, t: Tensor, layout: str, like: Tensor) -> Tensor:
        if layout == "bhsd":
            return t.transpose(1, 2)
        return t.reshape(*like.shape[:3], -1) if layout == "packed" else t


def visible_pairs(mask: Any, seqlen_q: int, seqlen_k: int, device: str, at: tuple[int, int] = (0, 0), rows_at_once: int = 1024) -> int:
    """The number of (query, key) pairs that the mask shows in one (batch entry, head)."""
    if mask is None:
        return seqlen_q * seqlen_k
    (b, h), keys = torch.tensor(at, device=device), torch.arange(seqlen_k, device=device)
    total = 0
    for start in range(0, seqlen_q, rows_at_once):
        rows = torch.arange(start, min(start + rows_at_once, seqlen_q), device=device)[:, None]
        total += int(mask(b, h, rows, keys).expand(len(rows), seqlen_k).sum())
    return total


def intervals(mask: Any, seqlen_q: int, seqlen_k: int, device: str, rows_at_once: int = 1024) -> Tensor:
    """The keys that each query sees as int32 endpoints (n, seqlen_q), n odd: ``[0, F0), [F1, F2), ...``, ascending.

    Found by evaluating the mask. A query with fewer intervals than the largest number has empty ones at the end.
    """
    if mask is None:
        return torch.full((1, seqlen_q), seqlen_k, dtype=torch.int32, device=device)
    zero, keys = torch.zeros((), dtype=torch.int64, device=device), torch.arange(seqlen_k, device=device)
    parts = []
    for first in range(0, seqlen_q, rows_at_once):
        rows = torch.arange(first, min(first + rows_at_once, seqlen_q), device=device)[:, None]
        seen = mask(zero, zero, rows, keys).expand(len(rows), seqlen_k)
        edges = torch.nn.functional.pad(seen, (1, 1)).int().diff().ne(0)  # (rows, seqlen_k + 1): starts and ends of visible keys
        edges[:, 0] ^= True  # the first interval's 0 is omitted; if visible keys start later, it is [0, 0)
        parts.append(_listed(edges))
    longest = max(part.shape[1] for part in parts)
    padded = [torch.cat([p, p[:, -1:].expand(-1, longest - p.shape[1])], dim=1) for p in parts]
    return torch.cat(padded).T.contiguous()


def _listed(edges: Tensor) -> Tensor:
    """The indices of each row's true entries, int32 (rows, n), n odd and the same for all, padded with the row's last index."""
    counts = edges.sum(1)
    most = int(counts.max()) | 1
    places = torch.arange(edges.shape[1], device=edges.device).where(edges, edges.shape[1]).sort(dim=1).values[:, :most]
    last = places.gather(1, (counts - 1).clamp(min=0)[:, None])
    return places.where(torch.arange(most, device=edges.device) < counts[:, None], last).int()
