"""A small GPT in the usual style; its training step is judged against the same step in float64 with the plain formula."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.testing import budget

__all__ = ["Sizes", "check_compiled_step"]

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


class Sizes(NamedTuple):
    batch: int = 2
    length: int = 32
    heads: int = 16
    heads_kv: int = 4
    head_dim: int = 8
    layers: int = 2


class Block(torch.nn.Module):
    """One projection, split, and seen with heads first: q, k and v are strided, and no two of them alike."""

    def __init__(self, sizes: Sizes, attention: Attention) -> None:
        super().__init__()
        width, of_keys = sizes.heads * sizes.head_dim, sizes.heads_kv * sizes.head_dim
        self.parts, self.head_dim, self.attention = (width, of_keys, of_keys), sizes.head_dim, attention
        self.norm = torch.nn.LayerNorm(width)
        self.project, self.back = torch.nn.Linear(width, sum(self.parts)), torch.nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(self.norm(x)).split(self.parts, -1)
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in parts)
        return x + self.back(self.attention(q, k, v).transpose(1, 2).reshape(x.shape))


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    hidden = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril().logical_not()
    return (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def _step(model: torch.nn.Module, x: Tensor) -> list[Tensor]:
    """The output's mean square, and the gradients by x and all parameters."""
    x = x.detach().requires_grad_()
    loss = model(x).square().mean()
    return [loss.detach()[None], *torch.autograd.grad(loss, [x, *model.parameters()])]


def check_compiled_step(attention: Attention, compiler: str, sizes: Sizes, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Raises ``AssertionError`` where the compiled or the eager step exceeds its budget."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(Block(sizes, attention) for _ in range(sizes.layers))).to(device, dtype)
    x = torch.randn(sizes.batch, sizes.length, sizes.heads * sizes.head_dim).to(device, dtype)
    torch._dynamo.reset()
    found = {"eager": _step(model, x), compiler: _step(torch.compile(model, fullgraph=True, backend=compiler), x)}
    for block in model:
        block.attention = plain
    same_dtype = _step(model, x)
    exact = _step(model.double(), x.double())
    for name, results in found.items():
        for i, (got, wanted, formula) in enumerate(zip(results, exact, same_dtype, strict=True)):
            budget.check(f"{name} {i}", got.reshape(1, -1), wanted.reshape(1, -1), formula.reshape(1, -1))
