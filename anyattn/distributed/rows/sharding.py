"""Tensors of the whole sequence and of a rank's rows: cut, and gathered in global order, with gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from anyattn.distributed.channel import Channel
from anyattn.distributed.layout import Layout, length_of

__all__ = ["check_rows", "gathered", "pads_of", "reduced", "shard_of"]


def pads_of(pad: Any, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The value of padding for each tensor, None for none. pad: one for all, or a tuple of them."""
    pads = pad if isinstance(pad, tuple) else (pad,) * len(tensors)
    if len(pads) != len(tensors):
        raise ValueError(f"pad has {len(pads)} values for {len(tensors)} tensors; wanted one for all, or one for each")
    for value, t in zip(pads, tensors):
        is_whole = t.is_floating_point() or t.is_complex() or (isinstance(value, (int, float)) and value == value // 1)
        if value is not None and not (isinstance(value, (int, float)) and is_whole):
            raise ValueError(f"pad={value!r} for a tensor of {t.dtype}; wanted a number that it can hold")
    return pads


def shard_of(t: Tensor, layout: Layout, rank: int, dim: int, pad: Any = None) -> Tensor:
    """The rows of ``rank``, a copy. pad: the value of the rows behind them, up to ``layout.padded_rows``; None for none."""
    if t.shape[dim] != layout.length:
        raise ValueError(
            f"a tensor of shape {tuple(t.shape)} has {t.shape[dim]} positions in dimension {dim}; wanted the {layout.length} of the plan: "
            "pass the whole sequence (a shard is not sharded again), or another dim="
        )
    parts = [t.narrow(dim, start, stop - start) for start, stop in layout.rows_of(rank)]
    if pad is not None:
        shape = list(t.shape)
        shape[dim] = layout.padded_rows - length_of(layout.rows_of(rank))
        parts.append(t.new_full(shape, pad))
    # a copy even of one interval: compiled code is for its strides
    return torch.cat(parts, dim) if parts else t.narrow(dim, 0, 0)


def check_rows(t: Tensor, layout: Layout, rank: int, dim: int) -> int:
    """The number of the rank's rows. Raises ``ValueError`` unless ``t`` has them, with or without padding."""
    rows = length_of(layout.rows_of(rank))
    if t.shape[dim] not in (rows, layout.padded_rows):
        raise ValueError(f"a tensor of shape {tuple(t.shape)} has {t.shape[dim]} rows in dimension {dim}; wanted the {rows} of rank {rank}")
    return rows


def gathered(t: Tensor, layout: Layout, channel: Channel, dim: int) -> Tensor:
    """The rows of all ranks in global order, without padding. Its gradient is the sum of the ranks' gradients of the result, at this
    rank's rows."""
    rows = check_rows(t, layout, channel.rank, dim)
    return _Gathered.apply(t.narrow(dim, 0, rows), layout, channel, dim)  # type: ignore[no-any-return, no-untyped-call]


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, layout: Layout, channel: Channel, dim: int) -> Tensor:  # type: ignore[override]
        ctx.layout, ctx.channel, ctx.dim = layout, channel, dim
        moved = t.movedim(dim, 0).contiguous()
        width = _width(t, dim)
        lengths = [length_of(layout.rows_of(r)) for r in range(channel.size)]
        received = torch.empty(layout.length * width, dtype=t.dtype, device=t.device)
        sent = moved.reshape(-1).repeat(channel.size)
        work = channel.exchange(sent, [moved.numel()] * channel.size, received, [n * width for n in lengths])
        channel.finish(work, "gathering rows")
        whole = torch.empty((layout.length, *moved.shape[1:]), dtype=t.dtype, device=t.device)
        at = 0
        for start, stop in _by_rank(layout):
            whole[start:stop] = received[at : at + (stop - start) * width].view(stop - start, *moved.shape[1:])
            at += (stop - start) * width
        return whole.movedim(0, dim)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        layout, channel = ctx.layout, ctx.channel
        moved = grad.movedim(ctx.dim, 0).to(torch.promote_types(grad.dtype, torch.float32))
        width = _width(grad, ctx.dim)
        sent = torch.cat([moved[start:stop] for start, stop in _by_rank(layout)]).reshape(-1)
        mine = length_of(layout.rows_of(channel.rank)) * width
        received = torch.empty(mine * channel.size, dtype=moved.dtype, device=grad.device)
        sizes = [length_of(layout.rows_of(r)) * width for r in range(channel.size)]
        channel.finish(channel.exchange(sent, sizes, received, [mine] * channel.size), "returning gradients of gathered rows")
        total = received.view(channel.size, -1).sum(0) if mine else received
        return total.view(-1, *moved.shape[1:]).movedim(0, ctx.dim).to(grad.dtype), None, None, None


def _width(t: Tensor, dim: int) -> int:
    """Elements of one position."""
    size = 1
    for d, n in enumerate(t.shape):
        size *= n if d != dim % t.ndim else 1
    return size


def _by_rank(layout: Layout) -> list[tuple[int, int]]:
    """The intervals of all ranks, rank after rank."""
    return [interval for rank in range(layout.ranks) for interval in layout.rows_of(rank)]


def reduced(t: Tensor, channel: Channel) -> Tensor:
    """``t`` itself, whose gradient is the sum over the ranks."""
    return _Reduced.apply(t, channel)  # type: ignore[no-any-return, no-untyped-call]


class _Reduced(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, t: Tensor, channel: Channel) -> Tensor:  # type: ignore[override]
        ctx.channel = channel
        return t.view_as(t)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        wide = grad.to(torch.promote_types(grad.dtype, torch.float32), copy=True)
        ctx.channel.sum(wide, "the sum of a captured tensor's gradient")
        return wide.to(grad.dtype), None
