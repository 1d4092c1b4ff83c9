"""Programs with padded shards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.arithmetic import ceil_div
from tests.distributed.uses import HEADS, _close, mask_of, tensors
from tests.support import compiling
from tests.support.ranks import message_of


def _learned(heat: Tensor) -> Callable:
    return lambda s, b, h, i, j: s * heat[i]


def results(mesh: Any, length: int, dtype: torch.dtype, transport: str) -> dict[str, bool]:
    """A padded call against one process: what the rows get, what padding gets, and the gradients of all that it passes."""
    q, k, v = [t.requires_grad_() for t in tensors(length=length, dtype=dtype)]
    mask = mask_of(masks.causal(), length)
    sink = torch.linspace(-1, 1, HEADS, device="cpu").to(dtype)
    plan = ad.plan(mask, mesh, transport=transport)
    rows, most = len(plan.positions), ceil_div(ceil_div(length, plan.chunk), mesh.size()) * plan.chunk
    local = [t.detach().requires_grad_() for t in plan.shard(q, k, v, dim=2, pad=(7, torch.nan, -torch.inf))]
    gate = plan.shard(torch.linspace(0.5, 1, length, device="cpu"), dim=0, pad=torch.nan).requires_grad_()
    options: Any = {"enable_gqa": True, "sink": sink, "return_aux": AuxRequest(lse=True, max_scores=True)}
    out, stats = anyattn.flex_attention(
        *local, _learned(plan.rows(gate) if transport == "keys" else plan.gather(gate)), plan.mask, **options
    )
    heat = torch.linspace(0.5, 1, length, device="cpu").requires_grad_()
    of_all, of_stats = anyattn.flex_attention(q, k, v, _learned(heat), mask, **options)

    def loss(out: Tensor, lse: Tensor) -> Tensor:
        return out.square().sum() + torch.where(torch.isfinite(lse), lse, 0).sum()

    grads = torch.autograd.grad(loss(out, stats[0]), (*local, gate), materialize_grads=True)  # a rank may have no rows
    wanted = torch.autograd.grad(loss(of_all, of_stats[0]), (q, k, v, heat))
    pairs = [(out, of_all, 2), *[(a, b, 2) for a, b in zip(stats, of_stats)], *zip(grads, wanted, (2, 2, 2, 0))]
    return {
        "every rank has as many rows": out.shape[2] == min(most, length),
        "out of padding is 0": not out[:, :, rows:].any(),
        "lse of padding is -inf": all(bool((s[:, :, rows:] == -torch.inf).all()) for s in stats),
        "gradients of padding are 0": not any(bool(g.narrow(d, rows, g.shape[d] - rows).any()) for g, d in zip(grads, (2, 2, 2, 0))),
        "strides are those of the arguments": [t.stride() for t in (out, *grads[:3])] == [t.stride() for t in (local[0], *local[:3])],
        "rows are those of one process": all(_close(plan.unshard(a.detach(), dim=d), b.detach()) for a, b, d in pairs),
    }


def shards(mesh: Any) -> dict[str, bool]:
    """Shapes and contents of padded shards, and what is gathered from them, with gradients."""
    length = 203
    plan = ad.plan(mask_of(masks.causal(), length), mesh)
    other = ad.plan(mask_of(masks.document(torch.arange(length, device="cpu") // 40), length), mesh)
    ids, labels = torch.arange(length, device="cpu")[None], torch.arange(length, device="cpu")[None]
    a, b = plan.shard(ids, labels, pad=(0, -100))
    rows = len(plan.positions)
    x = plan.shard(torch.linspace(0, 1, length, device="cpu"), dim=0, pad=9).requires_grad_()
    weights = torch.linspace(1, 2, length, device="cpu")
    (plan.gather(x) * weights).sum().backward()
    assert x.grad is not None
    return {
        "one shape for all plans": a.shape == b.shape == other.shard(ids, pad=0).shape,
        "padding": not a[0, rows:].any() and bool((b[0, rows:] == -100).all()),
        "rows": torch.equal(a[0, :rows], plan.positions) and torch.equal(plan.unshard(b), labels),
        "gradient": _close(x.grad[:rows], mesh.size() * weights[plan.positions]) and not x.grad[rows:].any(),
    }


def compiled(mesh: Any, backend: str) -> tuple[bool, int]:
    """Whether a compiled layer agrees with the eager one over plans whose ranks have other numbers of rows, and the compilations."""
    call, counter = compiling.fresh(_layer, backend)
    agree, seen = True, set()
    for seed in range(3):
        g = torch.Generator().manual_seed(seed)
        ids = (torch.rand(203, generator=g, device="cpu") < 5 / 203).cumsum(0)
        plan = ad.plan(mask_of(masks.document(ids), 203), mesh)
        seen.add(len(plan.positions))
        x = plan.shard(torch.randn(1, 203, 64, generator=g, device="cpu"), pad=0).requires_grad_()
        w = (torch.randn(64, 192, generator=g, device="cpu") / 8).requires_grad_()
        agree = compiling.nearly_same(call, _layer, (x, w, plan.mask), [x, w]) and agree
    return agree, counter.frame_count


def _layer(x: Tensor, w: Tensor, mask: Any) -> Tensor:
    q, k, v = (x @ w).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
    return anyattn.flex_attention(q, k, v, None, mask).transpose(1, 2).flatten(2)


def mistakes(mesh: Any) -> list[str]:
    q, k, v = tensors()
    plan = ad.plan(mask_of(masks.causal()), mesh)
    ids = torch.arange(203, device="cpu")
    padded, plain = plan.shard(q, dim=2, pad=0), plan.shard(k, v, dim=2)
    return [
        message_of(lambda: plan.shard(ids, dim=0, pad=0.5)),
        message_of(lambda: plan.shard(ids, ids, dim=0, pad=(0, 1, 2))),
        message_of(lambda: anyattn.flex_attention(padded, *plain, None, plan.mask, enable_gqa=True)),
    ]
