"""Programs of padded shards, marked rows, started exchanges and bfloat16 on the wire, on any device, against the plain way, by bits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed import share

S, HEADS = 1500, 8


def _tensors(device: str) -> list[Tensor]:
    g = torch.Generator().manual_seed(0)
    drawn = [torch.randn(1, S, n, 64, generator=g, device="cpu").transpose(1, 2) for n in (HEADS, 2, 2)]
    return [t.to(device, torch.bfloat16) for t in drawn]


def _bias(device: str) -> Tensor:
    return torch.randn(S, HEADS, generator=torch.Generator().manual_seed(1), device="cpu").to(device)


def _run(plan: Any, local: list[Tensor], score: Callable | None = None, starts: bool = False) -> list[Tensor]:
    """Out, lse and the gradients of q, k, v."""
    leaves = [t.detach().requires_grad_() for t in local]
    if starts:
        ad.start(leaves[1], leaves[2], plan)
    out, lse = anyattn.flex_attention(*leaves, score, plan.mask, enable_gqa=True, return_lse=True, deterministic=True)
    grads = torch.autograd.grad(out.float().square().sum() + torch.where(torch.isfinite(lse), lse, 0).sum(), leaves)
    return [out.detach(), lse.detach(), *grads]


def same_bits(mesh: Any, has_documents: bool, node_size: int | None = None) -> dict[str, bool]:
    """has_documents: the mask is one of documents, which are sequences of one local call."""
    device = mesh.device_type
    share.RUN_DOCUMENTS = [device] if has_documents else []
    ids = torch.tensor([0, 400, 900, 1100], device=device)
    ids = torch.searchsorted(ids, torch.arange(S, device=device), right=True)
    mask = masks.causal() & masks.document(ids) if has_documents else masks.causal()
    options: Any = {"S": S, "device": device, "node_size": node_size}
    plan, other = (ad.plan(mask, mesh, **options, wire=wire) for wire in ("float32", "bfloat16"))
    q, k, v = _tensors(device)
    local = plan.shard(q, k, v, dim=2)
    first = _run(plan, local)
    rows = len(plan.positions)
    padded = _run(plan, plan.shard(q, k, v, dim=2, pad=torch.nan))
    bias = _bias(device)
    marked = plan.rows(plan.shard(bias, dim=0))
    by_rows, by_all = (_run(plan, local, lambda s, b, h, i, j, t=t: s * t[i, h]) for t in (marked, bias))
    rounded = _run(other, local)
    return {
        "passed on": plan.mask.share.messages == (1 if node_size is None else 2),
        "documents": (plan.mask.share.by_documents is not None) is has_documents,
        "started": all(map(torch.equal, _run(plan, local, starts=True), first)),
        "padded": all(torch.equal(a[:, :, :rows], b) for a, b in zip(padded, first)) and not padded[0][:, :, rows:].any(),
        "marked rows": all(map(torch.equal, by_rows, by_all)) and not torch.equal(by_rows[0], first[0]),
        "wire": all(map(torch.equal, rounded[:3], first[:3])) and _is_near(rounded[3], first[3]) and _is_near(rounded[4], first[4]),
    }


def _is_near(a: Tensor, b: Tensor) -> bool:
    """Whether they differ by roundings to bfloat16 of what is added."""
    return float((a.float() - b.float()).norm()) <= 2**-7 * float(b.float().norm())
