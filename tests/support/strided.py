"""Layouts of q, k and v in callers' programs, and the layouts that results must have: those of torch's flex.

A layout makes a (B, H, S, D) tensor with given numbers. ``LAYOUTS`` gives for each the nesting of its dimensions, outermost first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["EACH", "EXPANDED", "LAYOUTS", "inputs", "laid_out", "nesting"]

Layout = Callable[[Tensor], Tensor]


def _nested(*order: int) -> Layout:
    def make(x: Tensor) -> Tensor:
        return x.permute(order).contiguous().permute([order.index(i) for i in range(4)])

    return make


def _of_projection(x: Tensor) -> Tensor:
    """One of three parts of each token's row: (B, S, 3, H, D)."""
    rows = x.transpose(1, 2)
    return torch.stack([torch.zeros_like(rows), rows, torch.ones_like(rows)], 2)[:, :, 1].transpose(1, 2)


def _sliced(x: Tensor) -> Tensor:
    """A window of a larger tensor, whose rows are no neighbours."""
    batch, heads, length, dim = x.shape
    whole = torch.zeros(batch, heads + 1, length + 7, dim + 8, dtype=x.dtype, device=x.device)
    whole[:, 1:, 3:-4, :dim] = x
    return whole[:, 1:, 3:-4, :dim]


LAYOUTS: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "contiguous": (lambda x: x.contiguous(), (0, 1, 2, 3)),
    "transposed": (_nested(0, 2, 1, 3), (0, 2, 1, 3)),
    "projected": (_of_projection, (0, 2, 1, 3)),
    "sequence first": (_nested(2, 0, 1, 3), (2, 0, 1, 3)),
    "heads first": (_nested(1, 0, 2, 3), (1, 0, 2, 3)),
    "sliced": (_sliced, (0, 1, 2, 3)),
}
EXPANDED: dict[str, tuple[Layout, tuple[int, ...]]] = {
    "one batch entry": (lambda x: x[:1].expand(x.shape), (0, 1, 2, 3)),
    "one head": (lambda x: x[:, :1].expand(x.shape), (0, 1, 2, 3)),
    "one batch entry, transposed": (lambda x: _nested(0, 2, 1, 3)(x[:1]).expand(x.shape), (0, 2, 1, 3)),
}


# of q, k and v
EACH = [
    *((name, name, name) for name in (*LAYOUTS, *EXPANDED)),
    ("transposed", "contiguous", "sequence first"),
    ("contiguous", "one head", "transposed"),
]


def laid_out(x: Tensor, name: str) -> Tensor:
    return {**LAYOUTS, **EXPANDED}[name][0](x)


def nesting(name: str) -> tuple[int, ...]:
    return {**LAYOUTS, **EXPANDED}[name][1]


def inputs(
    *layouts: str,
    shape: tuple[int, int, int, int] = (2, 4, 24, 8),
    heads_kv: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Tensor]:
    """q, k and v, each in its layout, without gradients asked for. shape: q's."""
    g = torch.Generator().manual_seed(0)
    batch, heads, length, dim = shape
    counts = (heads, heads_kv or heads, heads_kv or heads)
    made = (torch.randn(batch, n, length, dim, generator=g).to(device, dtype) for n in counts)
    return [laid_out(x, name) for x, name in zip(made, layouts, strict=True)]
