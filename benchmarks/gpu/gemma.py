"""Training step of a stack of Gemma-4-like layers beside SDPA's: ``python -m benchmarks.gpu.gemma``.

Of six layers five see a window of 1,024 keys with heads of 256, and one sees all keys before a query with heads of 512, whose values are
its keys. A layer is attention and a gated MLP, in bfloat16. Times, in a CUDA graph, of the forward and backward pass with the gradients of
all weights, without an optimizer: of anyattn, of ``scaled_dot_product_attention`` (windows as a mask, a bool of each pair), and of both
without the MLPs. Bar: 1.4 times SDPA's speed for the whole layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import click
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import anyattn
from anyattn import masks
from benchmarks.graphs import medians

__all__ = ["Layer", "Size", "Stack", "anyattn_attend", "sdpa_attend"]

BAR = 1.4
Attend = Callable[[Tensor, Tensor, Tensor, int], Tensor]  # q, k, v: (B, H, S, D); the window, 0 without


class Size(NamedTuple):
    """hidden: columns between layers. inner: of the MLPs, 0 without. local, wide: (query heads, K/V heads, head dimension) of windows and
    of all keys. layers: of which every sixth sees all keys."""

    seqlen: int = 8192
    hidden: int = 2560
    inner: int = 10_240
    local: tuple[int, int, int] = (8, 4, 256)
    wide: tuple[int, int, int] = (8, 4, 512)
    window: int = 1024
    layers: int = 6


def anyattn_attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    mask = masks.causal() & masks.sliding_window(window - 1, 0) if window else masks.causal()
    return anyattn.flex_attention(q, k, v, mask_mod=mask, enable_gqa=True)  # type: ignore[no-any-return]


def sdpa_attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    if not window:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    at = torch.arange(q.shape[2], device=q.device)
    distance = at[:, None] - at
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(distance >= 0) & (distance < window), enable_gqa=True)


class Layer(nn.Module):
    """attend: set by the caller before each use of the layer."""

    attend: Attend

    def __init__(self, size: Size, is_wide: bool, **factory: Any):
        super().__init__()
        heads, of_keys, dim = size.wide if is_wide else size.local
        self.shape, self.is_wide, self.window = (heads, of_keys, dim), is_wide, 0 if is_wide else size.window
        linear = partial(nn.Linear, bias=False, **factory)
        self.before, self.between = (nn.RMSNorm(size.hidden, **factory) for _ in range(2))
        self.qkv = linear(size.hidden, (heads + (1 if is_wide else 2) * of_keys) * dim)
        self.out = linear(heads * dim, size.hidden)
        self.mlp = nn.ModuleList([linear(size.hidden, 2 * size.inner), linear(size.inner, size.hidden)] if size.inner else [])

    def forward(self, x: Tensor) -> Tensor:
        heads, of_keys, dim = self.shape
        sizes = [heads, of_keys] if self.is_wide else [heads, of_keys, of_keys]
        rows = self.qkv(self.before(x)).unflatten(2, (-1, dim)).transpose(1, 2).split(sizes, 1)
        q, k, v = rows if len(rows) == 3 else (*rows, rows[1])
        x = x + self.out(self.attend(q, k, v, self.window).transpose(1, 2).flatten(2))
        if self.mlp:
            gate, up = self.mlp[0](self.between(x)).chunk(2, -1)
            x = x + self.mlp[1](F.gelu(gate, approximate="tanh") * up)
        return x


class Stack(nn.Module):
    def __init__(self, size: Size, **factory: Any):
        super().__init__()
        self.layers = nn.ModuleList(Layer(size, n % 6 == 5, **factory) for n in range(size.layers))

    def step(self, x: Tensor, attend: Attend) -> tuple[Tensor, ...]:
        """The gradients of all weights, for the output itself as its gradient."""
        with torch.enable_grad():
            out = x
            for layer in self.layers:
                layer.attend = attend
                out = layer(out)
            return torch.autograd.grad(out, [p for p in self.parameters() if p.requires_grad], out.detach(), allow_unused=True)


def steps_of(size: Size, device: str = "cuda") -> dict[str, Callable[[], Any]]:
    """The steps that are timed, by name."""
    factory: dict[str, Any] = {"device": device, "dtype": torch.bfloat16}
    x, found = torch.randn(1, size.seqlen, size.hidden, **factory), dict[str, Callable[[], Any]]()
    for name, own in (("layers", size), ("attention", size._replace(inner=0))):
        stack = Stack(own, **factory)
        found[f"{name}, anyattn"] = partial(stack.step, x, anyattn_attend)
        found[f"{name}, SDPA"] = partial(stack.step, x, sdpa_attend)
    return found


@click.command()
@click.option("--seqlen", default=Size().seqlen, show_default=True)
@click.option("--window", default=Size().window, show_default=True)
@click.option("--rounds", default=7, show_default=True)
def main(seqlen: int, window: int, rounds: int) -> None:
    """Times training steps of layers with heads of 256 and 512."""
    found = medians(steps_of(Size(seqlen=seqlen, window=window)), rounds, 1)
    for name in ("layers", "attention"):
        mine, theirs = found[f"{name}, anyattn"], found[f"{name}, SDPA"]
        note = f", below {BAR:g}" if name == "layers" and theirs / mine < BAR else ""
        click.echo(f"{name:10} anyattn {mine / 1e3:8.2f} ms, SDPA {theirs / 1e3:8.2f} ms, {theirs / mine:.2f} times its speed{note}")


if __name__ == "__main__":
    main()
