"""Programs whose gradients of keys travel in bfloat16."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed.channel import Channel
from tests.distributed.uses import mask_of, tensors
from tests.support.ranks import message_of

MASK = masks.causal()


def _gradients(plan: Any, dtype: torch.dtype) -> tuple[list[Tensor], list[int]]:
    """Out, the gradients of q, k, v, and the bytes of each message that this rank sends."""
    leaves = [t.detach().requires_grad_() for t in plan.shard(*tensors(dtype=dtype), dim=2)]
    sizes, send = [], Channel.exchange

    def counted(self: Channel, sent: Tensor, *more: Any) -> Any:
        sizes.append(sent.numel() * sent.element_size())
        return send(self, sent, *more)

    Channel.exchange = counted  # type: ignore[method-assign]
    try:
        out = anyattn.flex_attention(*leaves, None, plan.mask, enable_gqa=True)
        grads = torch.autograd.grad(out.square().sum(), leaves)
    finally:
        Channel.exchange = send  # type: ignore[method-assign]
    return [out, *grads], sizes


def both_wires(mesh: Any, dtype: torch.dtype, options: dict[str, Any]) -> dict[str, bool]:
    """What differs between the wires, and by how much: by the rounding of what other ranks add to a gradient."""
    plans = [ad.plan(mask_of(MASK), mesh, wire=wire, **options) for wire in ("float32", "bfloat16")]
    (wide, of_wide), (half, of_half) = (_gradients(plan, dtype) for plan in plans)
    others = [_of_others(plans[0], which, dtype) for which in (1, 2)]
    spacing = torch.finfo(dtype).eps  # of the sum at home, which is rounded to the dtype
    within = [
        bool(((a - b).abs() <= 2**-8 * mesh.size() * of + spacing * b.abs() + torch.finfo(torch.bfloat16).tiny).all())
        for a, b, of in zip(half[2:], wide[2:], others, strict=True)
    ]
    travels = of_wide[-1] > 0
    return {
        "out and dq are the same": all(torch.equal(a, b) for a, b in zip(half[:2], wide[:2])),
        "gradients of keys are near": all(within),
        "and not the same": dtype is torch.bfloat16 or not travels or not all(torch.equal(a, b) for a, b in zip(half[2:], wide[2:])),
        "half the bytes": of_half[:-1] == of_wide[:-1] and 2 * of_half[-1] == of_wide[-1],
        "it is explained": "travel in bfloat16" in plans[1].explain() and "travel in float32" in plans[0].explain(),
        "digests differ": plans[0].digest != plans[1].digest,
    }


def _of_others(plan: Any, which: int, dtype: torch.dtype) -> Tensor:
    """A bound of what rows of other ranks add to the gradient of this rank's k (1) or v (2): from whole tensors in float64, the sum over
    rows of absolute values."""
    q, k, v = [t.double().requires_grad_() for t in tensors(dtype=dtype)]
    out = anyattn.flex_attention(q, k, v, None, mask_of(MASK), enable_gqa=True)
    of_rows = out.square().sum((0, 1, 3))
    mine = {int(p) for p in plan.positions}
    total = torch.zeros_like((k, v)[which - 1])
    for row in range(plan.length):
        if row not in mine:
            (grad,) = torch.autograd.grad(of_rows[row], (k, v)[which - 1], retain_graph=True)
            total += grad.abs()
    return plan.shard(total, dim=2)  # type: ignore[no-any-return]


def mistakes(mesh: Any) -> list[str]:
    rank = mesh.get_local_rank()
    return [
        message_of(lambda: ad.plan(mask_of(MASK), mesh, wire="float16")),
        message_of(lambda: ad.plan(mask_of(MASK), mesh, wire=("float32", "bfloat16")[rank % 2])),
    ]
