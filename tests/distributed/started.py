"""Programs that start a call's exchange of keys before its query exists, rightly and wrongly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed import channel
from tests.distributed.uses import S, _close, mask_of, tensors
from tests.support import compiling
from tests.support.ranks import message_of

__all__ = ["MISTAKES"]


def _plan(mesh: Any, **options: Any) -> Any:
    return ad.plan(mask_of(masks.causal()), mesh, **options)


def _attend(q: Tensor, k: Tensor, v: Tensor, plan: Any, starts: bool = True) -> Tensor:
    if starts:
        ad.start(k, v, plan)
    return anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True)


def results(mesh: Any, options: dict[str, Any]) -> tuple[bool, int]:
    """Whether two layers have the bits of calls without a start, gradients included; and how many messages more they send."""
    plan = _plan(mesh, **options)
    found, sent = [], []
    for starts in (False, True):
        leaves = [t.detach().requires_grad_() for t in plan.shard(*tensors(), dim=2, pad=0)]
        before = plan.channel._messages
        first = _attend(*leaves, plan, starts)
        out = _attend(first, leaves[1] * 2, leaves[2] + 1, plan, starts)
        grads = torch.autograd.grad(out.square().sum(), leaves)
        with torch.no_grad():
            found.append([out, *grads, _attend(*leaves, plan, starts)])
        sent.append(plan.channel._messages - before)
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True)), sent[1] - sent[0]


def checkpointed(mesh: Any) -> bool:
    plan = _plan(mesh)
    found = []
    for call in (lambda *t: _attend(*t, plan, False), lambda *t: checkpoint.checkpoint(_attend, *t, plan, use_reentrant=False)):
        leaves = [t.detach().requires_grad_() for t in plan.shard(*tensors(), dim=2)]
        out = call(*leaves)
        found.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    return all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def one_of_several_masks(mesh: Any) -> bool:
    """A layer's mask is named by itself; one whose keys travel nowhere starts nothing."""
    plan = ad.plan({"full": mask_of(masks.causal()), "own": mask_of(lambda b, h, q, k: q == k)}, mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    same = []
    for mask in plan.mask.values():
        ad.start(k, v, mask)
        out = anyattn.flex_attention(q, k, v, None, mask, enable_gqa=True)
        same.append(torch.equal(out, anyattn.flex_attention(q, k, v, None, mask, enable_gqa=True)))
    return all(same)


def in_compiled_code(mesh: Any) -> bool:
    plan = _plan(mesh)
    local = plan.shard(*tensors(), dim=2)

    def layer(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        ad.start(k, v, mask)
        return anyattn.flex_attention(q, k, v, None, mask, enable_gqa=True)

    call, _ = compiling.fresh(layer)
    return compiling.nearly_same(call, layer, (*local, plan.mask))


def where_heads_travel(mesh: Any) -> bool:
    plan = _plan(mesh, transport="heads")
    local = plan.shard(*tensors(), dim=2)
    return torch.equal(_attend(*local, plan), _attend(*local, plan, False)) and plan.channel.started is None


# ---- mistakes, on every rank alike


def written_keys(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k, v, plan)
    v.mul_(2)
    return anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True)


def other_keys(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k.clone(), v, plan)
    return anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True)


def other_mask(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k, v, plan)
    return anyattn.flex_attention(q, k, v, None, plan.also(masks.sliding_window(40, 0)), enable_gqa=True)


def gathered_between(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k, v, plan)
    return plan.unshard(q, dim=2)


def started_twice(mesh: Any) -> Any:
    plan = _plan(mesh)
    _, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k, v, plan)
    ad.start(k, v, plan)


def call_that_raises(mesh: Any) -> Any:
    plan = _plan(mesh)
    q, k, v = plan.shard(*tensors(), dim=2)
    ad.start(k, v, plan)
    return anyattn.flex_attention(q, k, v, None, plan.mask, enable_gqa=True, dropout_p=0.5)


def in_a_mode(mesh: Any) -> Any:
    plan = _plan(mesh)
    with FlopCounterMode(display=False):
        return _attend(*plan.shard(*tensors(), dim=2), plan)


def under_autocast(mesh: Any) -> Any:
    plan = _plan(mesh)
    with torch.autocast("cpu", torch.bfloat16):
        return _attend(*plan.shard(*tensors(), dim=2), plan)


def whole_keys(mesh: Any) -> Any:
    return _attend(*tensors(), _plan(mesh))


def several_masks(mesh: Any) -> Any:
    plan = ad.plan({"full": mask_of(masks.causal())}, mesh)
    return ad.start(*plan.shard(*tensors(), dim=2)[1:], plan)


_LOST = "RuntimeError: anyattn.distributed.start(k, v, plan) was not followed by its call"

MISTAKES: dict[Callable[[Any], Any], str] = {
    written_keys: "ValueError: k or v was written to between anyattn.distributed.start and its call",
    other_keys: _LOST,
    other_mask: _LOST,
    gathered_between: _LOST,
    started_twice: _LOST,
    call_that_raises: "NotImplementedError: dropout_p",
    in_a_mode: _LOST,
    under_autocast: "ValueError: k and v are torch.float32 under an autocast",
    whole_keys: f"ValueError: k has shape (1, 2, {S}, 16)",
    several_masks: "TypeError: plan is a dict; wanted a plan of one mask",
}


# ---- a rank that does not start


def one_rank_does_not_start(mesh: Any, warm: str) -> tuple[str, bool]:
    """The error, if there is one, and whether the results are right. warm: calls that all ranks have made before."""
    channel._PATIENCE = 0.5
    plan = _plan(mesh)
    local = plan.shard(*tensors(), dim=2)
    mask = mask_of(masks.causal())
    want = plan.shard(anyattn.flex_attention(*tensors(), None, mask, enable_gqa=True), dim=2)
    for starts in {"": (), "started": (True,), "both": (True, False)}[warm]:
        _attend(*local, plan, starts)
    out: list[Tensor] = []
    text = message_of(lambda: out.append(_attend(*local, plan, mesh.get_local_rank() != 1)))
    return text, bool(out) and _close(out[0], want)
