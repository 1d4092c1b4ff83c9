"""A small layer of multi-head latent attention, computed three ways to the same answer on a CPU.

The layer (DeepSeek-V2, arXiv:2405.04434) keeps of each token one latent row, from which all heads make their keys and values, and one
rotated row that all heads share:

- materialised: keys and values of every head are made from the latent rows, as in training and prefill;
- absorbed: the matrices that would make them are applied to queries and outputs, and all heads attend to one head of keys, the latent row
  with the rotated row behind it, whose values are its own first columns: ``v = k[..., :LATENT]``, a view, which a GPU's kernel reads once;
- paged: the same, a token at a time, from a ``PagedKVCache`` with ``v_dim``, which holds and appends one tensor; the call rotates the last
  columns of queries and keys (``rotary_last``).

Outputs, and the gradients of the first two, are compared in float64. Run it with ``python examples/latent.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from rich.console import Console
from torch import Tensor, nn

import anyattn

HIDDEN, HEADS = 64, 4
PLAIN, ROTATED, VALUES, LATENT = 16, 8, 16, 32  # columns of a head's keys that are not rotated, that are; of its values; of the latent row
BATCH, LENGTH, PAGE = 2, 40, 16
SCALE = 1 / math.sqrt(PLAIN + ROTATED)
AGREE = 1e-11  # the greatest difference of two ways, in float64, relative to the norm


class LatentAttention(nn.Module):
    """Its three ways take hidden states (B, S, HIDDEN) and return as many."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q = nn.Linear(HIDDEN, HEADS * (PLAIN + ROTATED), bias=False)
        self.to_latent = nn.Linear(HIDDEN, LATENT + ROTATED, bias=False)
        self.to_keys = nn.Parameter(torch.randn(HEADS, PLAIN, LATENT) / math.sqrt(LATENT))
        self.to_values = nn.Parameter(torch.randn(HEADS, VALUES, LATENT) / math.sqrt(LATENT))
        self.to_out = nn.Linear(HEADS * VALUES, HIDDEN, bias=False)
        angle = torch.arange(LENGTH)[:, None] * 100.0 ** (-torch.arange(0, ROTATED, 2) / ROTATED)
        self.register_buffer("cos", angle.cos())
        self.register_buffer("sin", angle.sin())

    def rotated(self, x: Tensor) -> Tensor:
        """x (B, S, H, ROTATED) by the angles of its positions."""
        return anyattn.apply_rotary_emb(x, self.cos, self.sin, interleaved=True)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Of hidden states: queries (B, S, HEADS, PLAIN) and (B, S, HEADS, ROTATED), and rows (B, S, 1, LATENT + ROTATED); not rotated."""
        q = self.to_q(x).unflatten(-1, (HEADS, PLAIN + ROTATED))
        return q[..., :PLAIN], q[..., PLAIN:], self.to_latent(x)[:, :, None]

    def materialised(self, x: Tensor) -> Tensor:
        plain, turned, rows = self.parts(x)
        latent, shared = rows[:, :, 0, :LATENT], self.rotated(rows[..., LATENT:])
        k = torch.einsum("bsl,hdl->bshd", latent, self.to_keys)
        v = torch.einsum("bsl,hdl->bshd", latent, self.to_values)
        q = torch.cat((plain, self.rotated(turned)), -1)
        k = torch.cat((k, shared.expand(-1, -1, HEADS, -1)), -1)
        return self.to_out(anyattn.flash_attn_func(q, k, v, softmax_scale=SCALE, causal=True).flatten(-2))

    def absorbed(self, x: Tensor) -> Tensor:
        plain, turned, rows = self.parts(x)
        q = torch.cat((torch.einsum("bshd,hdl->bshl", plain, self.to_keys), self.rotated(turned)), -1)
        k = torch.cat((rows[..., :LATENT], self.rotated(rows[..., LATENT:])), -1)
        out = anyattn.flash_attn_func(q, k, k[..., :LATENT], softmax_scale=SCALE, causal=True)
        return self.of_latent(out)

    @torch.no_grad()
    def paged(self, x: Tensor) -> Tensor:
        cache = anyattn.PagedKVCache(
            num_pages=BATCH * math.ceil(LENGTH / PAGE), page_size=PAGE, num_heads_kv=1, head_dim=LATENT + ROTATED, v_dim=LATENT,
            dtype=x.dtype,
        )  # fmt: skip
        sequences = [cache.add_sequence() for _ in range(BATCH)]
        found = []
        for token in x.split(1, 1):
            plain, turned, rows = self.parts(token)
            q = torch.cat((torch.einsum("bshd,hdl->bshl", plain, self.to_keys), turned), -1)
            cache.reserve(sequences, 1)
            out = anyattn.flash_attn_with_kvcache(
                q, cache.k_cache(), cache.v_cache(), k=rows, rotary_cos=self.cos, rotary_sin=self.sin, rotary_last=True,
                cache_seqlens=cache.seqlens(sequences), page_table=cache.page_table(sequences), softmax_scale=SCALE, causal=True,
            )  # fmt: skip
            cache.advance(sequences, 1)
            found.append(self.of_latent(out))
        return torch.cat(found, 1)

    def of_latent(self, out: Tensor) -> Tensor:
        """Hidden states of outputs in latent columns, (B, S, HEADS, LATENT)."""
        return self.to_out(torch.einsum("bshl,hdl->bshd", out, self.to_values).flatten(-2))


def gradients(layer: LatentAttention, way: Callable[[Tensor], Tensor], x: Tensor, dout: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(way(x), list(layer.parameters()), dout))


def difference(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def main() -> None:
    torch.manual_seed(0)
    layer = LatentAttention().double()
    x, dout = torch.randn(2, BATCH, LENGTH, HIDDEN, dtype=torch.float64)
    with torch.no_grad():
        wanted = layer.materialised(x)
        of_outputs = {name: difference(way(x), wanted) for name, way in (("absorbed", layer.absorbed), ("paged", layer.paged))}
    pairs = zip(gradients(layer, layer.absorbed, x, dout), gradients(layer, layer.materialised, x, dout), strict=True)
    of_outputs["absorbed, gradients"] = max(difference(*pair) for pair in pairs)
    console = Console()
    for name, one in of_outputs.items():
        console.print(f"{name:20} {one:.1e} from materialised")
        if one > AGREE:
            raise SystemExit(f"{name}: wanted at most {AGREE}")
    held = LATENT + ROTATED
    console.print(f"The cache holds {held} numbers a token; keys and values of {HEADS} heads are {HEADS * (PLAIN + ROTATED + VALUES)}.")


if __name__ == "__main__":
    main()
