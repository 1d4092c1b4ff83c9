"""A layer under FSDP and DDP, over ranks that are data-parallel and context-parallel."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import anyattn
from anyattn import distributed as ad
from anyattn import masks

S, WIDTH, HEADS = 96, 32, 4


class Layer(nn.Module):
    """Attention with learned slopes and sinks; returns the sum of squares of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.qkv, self.out = (nn.Linear(WIDTH, n, bias=False, device="cpu") for n in (3 * WIDTH, WIDTH))
        self.slopes, self.sinks = (nn.Parameter(torch.rand(HEADS, generator=g, device="cpu")) for _ in range(2))
        with torch.no_grad():
            for linear in (self.qkv, self.out):
                linear.weight.copy_(torch.randn(linear.weight.shape, generator=g, device="cpu") / WIDTH**0.5)

    def forward(self, x: Tensor, mask: Any) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        slopes = self.slopes
        out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s - slopes[h] * (i - j), mask, sink=self.sinks)
        return self.out(out.transpose(1, 2).flatten(2)).square().sum()


def _batches() -> Tensor:
    """Two entries, one for each data-parallel group."""
    return torch.randn(2, S, WIDTH, generator=torch.Generator().manual_seed(1), device="cpu")


def _mask() -> Any:
    return anyattn.create_block_mask(masks.sliding_window(40, 0), None, None, S, S, device="cpu", BLOCK_SIZE=16)


def gradients(mesh: Any, how: str, transport: str) -> list[bool]:
    """Whether the gradients of all parameters are those of one process that sees both entries. how: "fsdp" or "ddp".
    transport: of the plan."""
    both = init_device_mesh("cpu", (2, mesh.size() // 2), mesh_dim_names=("dp", "cp"))
    plan = ad.plan(_mask(), both["cp"], transport=transport)
    model: Any = Layer()
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=both["dp", "cp"]._flatten())
    else:
        model = nn.parallel.DistributedDataParallel(model)
    entry = _batches()[both["dp"].get_local_rank()][None]
    model(plan.shard(entry), plan.mask).backward()
    alone = Layer()
    sum(alone(entry[None], _mask()) for entry in _batches()).backward()  # type: ignore[union-attr, misc]
    found = []
    for (name, got), want in zip(model.named_parameters(), alone.parameters(), strict=True):
        grad = got.grad.full_tensor() if hasattr(got.grad, "full_tensor") else got.grad
        assert want.grad is not None, name
        # both average over all ranks
        found.append(float((grad * mesh.size() - want.grad).abs().max()) <= 1e-5 * float(want.grad.abs().max()))
    return found
