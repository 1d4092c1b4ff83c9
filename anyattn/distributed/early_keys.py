"""``start``: the exchange of keys of a call that comes later, begun as soon as the keys exist."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.compiler import is_compiling
from torch.nn.attention import flex_attention as torch_flex

from anyattn.distributed.channel import Channel
from anyattn.distributed.exchange import Pending, key_moves
from anyattn.distributed.share import Share
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.tensors import autocast
from anyattn.tensors.strides import innermost

__all__ = ["Started", "ending_on_error", "start", "taken"]


class Started(NamedTuple):
    """An exchange that waits for its call. writes: of k and v, as torch counts them, when they were sent."""

    k: Tensor
    v: Tensor
    writes: tuple[int, int]
    share: Share
    pending: Pending

    @property
    def work(self) -> Any:
        return self.pending.work


def start(k: Tensor, v: Tensor, plan: Any) -> None:
    """Begins the exchange of keys before the query exists: the next thing that the plan's group does must be ``flex_attention`` of the same
    ``k`` and ``v`` with the plan's mask, which then does not send them again.

    k, v: this rank's rows (B, Hkv, rows, D or Dv), the very tensors of the call, not written to before it. plan: the ``ContextPlan``, or
        its mask of the layer, as the call gets it. Every rank calls it. It does nothing on one rank, inside of compiled code, and
        where heads travel.

    Raises as the call would, and ``ValueError`` under an autocast that would cast ``k`` or ``v``. If the group does something else next,
    that raises ``RuntimeError``, on every rank, after the exchange has ended.

    >>> import torch
    >>> from anyattn import distributed as ad
    >>> plan, k = ad.plan(None, ranks=1, S=64, device="cpu"), torch.randn(1, 2, 64, 16)
    >>> ad.start(k, k, plan)  # on one rank nothing travels
    """
    if not is_compiling():
        _start(k, v, plan.mask if hasattr(plan, "rows_of") else plan)


@without_default_device
def _start(k: Tensor, v: Tensor, mask: Any) -> None:
    if not isinstance(mask, torch_flex.BlockMask):
        raise TypeError(f"plan is a {type(mask).__name__}; wanted a plan of one mask, or the mask of the layer, such as plan.mask['full']")
    plan: Any = getattr(mask, "plan", None)
    if plan is None:  # of one rank
        return
    channel, share = plan.channel, mask.share  # type: ignore[attr-defined]
    if not isinstance(share, Share):  # heads travel: those of q with those of k and v
        return
    _check(k, v, share)
    facts = ("start", tuple(k.shape[:2]), k.shape[3], v.shape[3], k.dtype, share.layout.needs.tobytes())
    with channel.reporting_failure(int(share.messages > 0), plan.asks_first):
        plan.agree_once("start's exchange", facts, "start of the same batch, heads, head_dim, dtype and mask on every rank")
        if share.messages:
            of_k, of_v = (innermost(t.detach()[:, :, : share.length]) for t in (k, v))
            pending = key_moves(share, share.by_lists, of_k, of_v).send(of_k, of_v, channel)
            channel.started = Started(k, v, _writes(k, v), share, pending)


def _check(k: Tensor, v: Tensor, share: Share) -> None:
    for name, t in (("k", k), ("v", v)):
        if t.ndim != 4 or t.shape[2] not in (share.length, share.padded) or t.shape[:3] != k.shape[:3] or t.dtype is not k.dtype:
            raise ValueError(
                f"{name} has shape {tuple(t.shape)} and {t.dtype}; wanted (B, Hkv, {share.length}, D), the rows of rank {share.rank}, of "
                "one dtype with k"
            )
        if t.device != share.device:
            raise ValueError(f"{name} is on {t.device}, but the plan's mask is on {share.device}; wanted a plan of mask.to('{t.device}')")
    if autocast.is_on() and any(a is not b for a, b in zip(autocast.arguments(k, k, v), (k, k, v))):
        raise ValueError(
            f"k and v are {k.dtype} under an autocast that casts them in the call; wanted start(k, v, ...) of the cast tensors"
        )


def taken(k: Tensor, v: Tensor, share: Share, channel: Channel) -> Pending | None:
    """The exchange that was started for a call of ``k`` and ``v``; None if none was. Raises ``RuntimeError`` if one was started for another
    call, ``ValueError`` if the tensors were written to since; that exchange has ended then."""
    started: Started | None = channel.started
    if started is None or not (started.k is k and started.v is v and started.share is share):
        return None  # a started one of another call: the channel raises when this call begins its own
    if started.writes != _writes(k, v):
        channel.end_started()
        raise ValueError("k or v was written to between anyattn.distributed.start and its call; wanted start after the last write")
    channel.started = None
    return started.pending


@contextmanager
def ending_on_error(early: Pending | None, channel: Channel) -> Iterator[None]:
    """An exception inside leaves no exchange behind: the group goes on to others."""
    try:
        yield
    except Exception:
        if early is not None:
            channel.finish(early.work, "the exchange of anyattn.distributed.start")
        raise


def _writes(k: Tensor, v: Tensor) -> tuple[int, int]:
    return tuple([-1 if t.is_inference() else t._version for t in (k, v)])  # type: ignore[return-value]
