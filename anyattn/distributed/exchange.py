"""Keys and values that travel, forward, and their gradients, back: packed, sent, and put where local attention calls read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.distributed.channel import Channel
from anyattn.distributed.layout import Interval, Route

__all__ = ["Pending", "Remote", "awaited_gradients", "awaited_keys", "copy_rows", "remote_keys", "return_gradients", "send_keys"]


class Pending(NamedTuple):
    """An exchange that has been started. The tensors must live until it is finished."""

    work: Any
    sent: Tensor
    received: Tensor


Remote = list[tuple[Tensor, Tensor]]  # keys (B, Hkv, length, D) and values (B, Hkv, length, Dv) of each interval of ``Route.keys``


def send_keys(k: Tensor, v: Tensor, route: Route, channel: Channel) -> Pending:
    """Starts to send each rank the rows of ``k`` and ``v`` that it needs, (B, Hkv, rows of this rank, D or Dv)."""
    width = _width(k, v)
    flat = torch.empty(sum(route.sent) * width, dtype=k.dtype, device=k.device)
    for (start, stop), (to_k, to_v) in zip(route.rows, _views(flat, route.rows, k, v)):
        copy_rows(to_k, k[:, :, start:stop])
        copy_rows(to_v, v[:, :, start:stop])
    return _started(flat, route.sent, route.received, width, channel)


def awaited_keys(pending: Pending, channel: Channel) -> Tensor:
    """Waits for the message of ``send_keys`` of the other ranks."""
    channel.finish(pending.work, "attention's exchange of keys")
    return pending.received


def remote_keys(message: Tensor, k: Tensor, v: Tensor, route: Route) -> Remote:
    """The keys and values in a received message."""
    return _views(message, route.keys, k, v)


def return_gradients(grads: Sequence[tuple[Tensor, Tensor]], k: Tensor, v: Tensor, route: Route, channel: Channel) -> Pending:
    """Starts to send the gradients of received keys and values home, in float32 (float64). grads: of keys and values, for each interval
    of ``Route.keys``."""
    width = _width(k, v)
    flat = torch.empty(sum(route.received) * width, dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    for (to_k, to_v), (x, y) in zip(_views(flat, route.keys, k, v), grads):
        copy_rows(to_k, x)
        copy_rows(to_v, y)
    return _started(flat, route.received, route.sent, width, channel)


def awaited_gradients(pending: Pending, k: Tensor, v: Tensor, route: Route, channel: Channel) -> Remote:
    """Waits for the gradients of this rank's keys from other ranks: one pair for each of ``Route.rows``, in the order of the ranks."""
    channel.finish(pending.work, "attention's exchange of gradients")
    return _views(pending.received, route.rows, k, v)


def _started(flat: Tensor, sent: tuple[int, ...], received: tuple[int, ...], width: int, channel: Channel) -> Pending:
    to = torch.empty(sum(received) * width, dtype=flat.dtype, device=flat.device)
    return Pending(channel.exchange(flat, [n * width for n in sent], to, [n * width for n in received]), flat, to)


def copy_rows(to: Tensor, source: Tensor) -> None:
    """``to.copy_(source)``. Parts of tensors are not contiguous, and torch then moves one element a thread: on a GPU elements of 16 bytes
    are moved instead where the rows allow it, at twice the bandwidth or more."""
    size = to.element_size()
    if to.is_cuda and to.dtype is source.dtype and not (to.shape[-1] * size) % 16 and _is_aligned(to) and _is_aligned(source):
        to, source = to.detach().view(torch.complex128), source.detach().view(torch.complex128)
    to.copy_(source)


def _is_aligned(t: Tensor) -> bool:
    """Whether every row begins at a multiple of 16 bytes and has its elements side by side."""
    size = t.element_size()
    return t.stride(-1) == 1 and not t.data_ptr() % 16 and all(not (s * size) % 16 for s in t.stride()[:-1])


def _width(k: Tensor, v: Tensor) -> int:
    """Elements of one key and its value, over batch entries and heads."""
    return k.shape[0] * k.shape[1] * (k.shape[3] + v.shape[3])


def _views(flat: Tensor, intervals: Sequence[Interval], k: Tensor, v: Tensor) -> Remote:
    """Per interval, the places of its keys (B, Hkv, length, D) and of its values (B, Hkv, length, Dv) in a message."""
    views, at = [], 0
    (batch, heads, _, width), width_v = k.shape, v.shape[3]
    for start, stop in intervals:
        rows = stop - start
        cut = at + batch * heads * rows * width
        end = cut + batch * heads * rows * width_v
        views.append((flat[at:cut].view(batch, heads, rows, width), flat[cut:end].view(batch, heads, rows, width_v)))
        at = end
    return views
