"""What ranks run in the tests of context parallelism; every rank gets the whole tensors and takes its rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from tests.support import compiling
from tests.support.cases import Case, Expected

__all__ = ["attention", "compiled", "summed", "tensors_of"]


def tensors_of(want: Expected) -> tuple[Any, ...]:
    """What the ranks need of a case: not its results."""
    return tuple(want)[:-1]


def attention(
    mesh: Any, case: Case, tensors: tuple[Any, ...], block: int | tuple[int, int], plan_options: dict[str, Any], options: dict[str, Any]
) -> dict[str, Tensor]:
    """The results of ``flex_attention`` over all ranks, under the names of ``Expected``: rows are gathered, other gradients summed.

    plan_options: of ``plan``; "as_causal": rows lie as under a causal mask.
    """
    device = mesh.device_type
    q, k, v, dout, dlse, sink, *drawn = [None if t is None else t.to(device) for t in (*tensors[:-1], *tensors[-1])]
    captured = [t.clone().requires_grad_() if t.is_floating_point() else t for t in drawn]
    mods = case.recipe.mods(captured, case.shape)
    batch, heads, S = q.shape[:3]
    every = mods["mask"] or (lambda b, h, q, k: q == q)
    mask = anyattn.create_block_mask(every, batch, heads, S, S, device=device, BLOCK_SIZE=block)
    plan_options = dict(plan_options)
    if plan_options.pop("as_causal", False):
        plan = ad.plan(anyattn.create_block_mask(masks.causal(), None, None, S, S, device=device, BLOCK_SIZE=block), mesh, **plan_options)
        shard = plan.also(mask)
    else:
        plan = ad.plan(mask, mesh, **plan_options)
        shard = plan.mask
    local = [plan.shard(t, dim=2).detach().requires_grad_() for t in (q, k, v)]
    sink = None if sink is None else sink.clone().requires_grad_()
    out, lse = anyattn.flex_attention(*local, mods["score"], shard, enable_gqa=True, return_lse=True, sink=sink, **options)
    of_out, of_lse = (plan.shard(t, dim=2) for t in (dout, dlse))
    ((out * of_out).sum() + torch.where(torch.isfinite(lse), lse, 0).mul(of_lse).sum()).backward()
    rows = {"out": out, "lse": lse, "dq": local[0].grad, "dk": local[1].grad, "dv": local[2].grad}
    found = {name: plan.unshard(t.detach(), dim=2) for name, t in rows.items()}
    leaves = {"dsink": sink, **{f"captured{i}": t for i, t in enumerate(t for t in captured if t.requires_grad)}}
    for name, t in leaves.items():
        if t is not None:
            found[name] = summed(t.grad, mesh)  # a rank without rows has one too
    return {name: t.detach().cpu() for name, t in found.items()}


def summed(t: Tensor, mesh: Any) -> Tensor:
    """The sum of the ranks' tensors, by the gradient of ``ad.reduced``."""
    leaf = torch.zeros_like(t).requires_grad_()
    ad.reduced(leaf, mesh).backward(t)
    assert leaf.grad is not None
    return leaf.grad


def compiled(mesh: Any, S: int, plans: int, backend: str, transport: str, node_size: int | None = None) -> tuple[bool, int]:
    """Whether a compiled layer agrees with the eager one over plans of several documents, and the number of compilations."""
    call, counter = compiling.fresh(_layer, backend)
    agree = True
    for seed in range(plans):
        g = torch.Generator().manual_seed(seed)
        x = torch.randn(1, S, 64, generator=g, device="cpu")
        w = torch.randn(64, 192, generator=g, device="cpu") / 8
        ids = (torch.rand(S, generator=g, device="cpu") < 5 / S).cumsum(0)
        mask = anyattn.create_block_mask(masks.document(ids) & masks.causal(), None, None, S, S, device="cpu", BLOCK_SIZE=16)
        plan = ad.plan(mask, mesh, transport=transport, node_size=node_size)
        leaves = [plan.shard(x).detach().requires_grad_(), w.requires_grad_(), torch.ones(4, device="cpu").requires_grad_()]
        agree = compiling.nearly_same(call, _layer, (*leaves, plan.mask), leaves) and agree
    return agree, counter.frame_count


def _layer(x: Tensor, w: Tensor, slopes: Tensor, mask: Any) -> Tensor:
    """Self-attention of four heads with learned ALiBi slopes."""
    q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), mask)
    return out.transpose(1, 2).flatten(2)
