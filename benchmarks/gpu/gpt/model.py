"""GPT model of the training step, its sizes and its data. Attention is a function that contestants supply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

__all__ = ["GPT", "SIZES", "Attend", "Batch", "Size", "batches"]

# q (B, Hq, S, D), k and v (B, Hkv, S, D), and the mask in the contestant's form -> (B, Hq, S, D)
Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]


@dataclass(frozen=True)
class Size:
    """documents: smallest and largest number per row. is_mixed: autocast to bfloat16 over float32 parameters; else all is float32.

    exact: the dtype of the reference that results are judged by. The vocabulary is small, since a large one's logits would take most of
    the memory and are unrelated to attention.
    """

    name: str
    batch: int
    seqlen: int
    documents: tuple[int, int]
    layers: int = 8
    heads: int = 16
    heads_kv: int = 4
    head_dim: int = 128
    vocabulary: int = 8192
    is_mixed: bool = True
    exact: torch.dtype = torch.float32

    @property
    def width(self) -> int:
        return self.heads * self.head_dim

    def __str__(self) -> str:
        dtype = "bfloat16 autocast over float32 parameters" if self.is_mixed else "float32"
        least, most = self.documents
        return (
            f"{self.layers} layers, width {self.width}, {self.heads}/{self.heads_kv} heads, D {self.head_dim}, "
            f"vocabulary {self.vocabulary:,}, B {self.batch}, S {self.seqlen:,}, {least} to {most} documents a row, {dtype}, AdamW"
        )


SIZES = {
    "8k": Size("8k", 2, 8192, (8, 12)),
    "32k": Size("32k", 1, 32_768, (4, 8)),
    "tiny": Size("tiny", 2, 256, (3, 5), 2, 4, 2, 16, 128, False, torch.float64),
}


@dataclass(frozen=True)
class Batch:
    """ids, tokens, targets: (B, S), ids int32: the document of each position. lengths: those of each row's documents, on the host."""

    ids: Tensor
    tokens: Tensor
    targets: Tensor
    lengths: list[list[int]]


def batches(size: Size, steps: int, device: str, seed: int = 1) -> list[Batch]:
    """Random documents and tokens in separate tensors for each step, reproducible by the seed. A target is the token before."""
    random = torch.Generator().manual_seed(seed)
    return [_batch(size, random, device) for _ in range(steps)]


def _batch(size: Size, random: torch.Generator, device: str) -> Batch:
    least, most = size.documents
    lengths = []
    for _ in range(size.batch):
        count = int(torch.randint(least, most + 1, (), generator=random))
        cuts = torch.randperm(size.seqlen - 1, generator=random)[: count - 1] + 1
        ends = torch.cat([torch.tensor([0]), cuts.sort().values, torch.tensor([size.seqlen])])
        lengths.append(ends.diff().tolist())
    ids = torch.stack([torch.repeat_interleave(torch.arange(len(row)), torch.tensor(row)) for row in lengths]).to(torch.int32)
    tokens = torch.randint(size.vocabulary, (size.batch, size.seqlen), generator=random)
    return Batch(ids.to(device), tokens.to(device), tokens.roll(1, -1).to(device), lengths)


class GPT(nn.Module):
    """Transformer with RMS norm before attention and MLP, sinusoidal positions, and a head that shares the embedding's weights.

    q, k and v are strided views of one projection. inside: makes the mask in forward from ``seen``, the ids; else ``seen`` is passed to
    attention unchanged. is_checkpointed: blocks are computed again in the backward pass.
    """

    def __init__(self, size: Size, attend: Attend, inside: Callable[[Tensor], Any] | None = None, is_checkpointed: bool = False):
        super().__init__()
        self.embedding = nn.Embedding(size.vocabulary, size.width)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.blocks = nn.ModuleList(Block(size, attend) for _ in range(size.layers))
        self.norm = Norm(size.width)
        self.register_buffer("positions", 0.02 * _sines(size.seqlen, size.width))
        self.inside, self.is_checkpointed = inside, is_checkpointed

    def forward(self, tokens: Tensor, targets: Tensor, seen: Any) -> Tensor:
        """The loss of each token (B, S)."""
        if self.inside is not None:
            seen = self.inside(seen)
        x = self.embedding(tokens) + self.positions
        for block in self.blocks:
            x = checkpoint(block, x, seen, use_reentrant=False) if self.is_checkpointed else block(x, seen)
        logits = F.linear(self.norm(x), self.embedding.weight).flatten(0, 1)
        logits = logits if logits.dtype is torch.float64 else logits.float()
        return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


class Block(nn.Module):
    def __init__(self, size: Size, attend: Attend):
        super().__init__()
        width, keys = size.width, size.heads_kv * size.head_dim
        self.norm_attention, self.norm_mlp = Norm(width), Norm(width)
        self.qkv = nn.Linear(width, width + 2 * keys, bias=False)
        self.project = nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)
        self.parts, self.head_dim, self.attend = (width, keys, keys), size.head_dim, attend

    def forward(self, x: Tensor, seen: Any) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norm_attention(x)).split(self.parts, -1)
        q, k, v = (part.view(batch, length, -1, self.head_dim).transpose(1, 2) for part in parts)
        out = self.attend(q, k, v, seen).transpose(1, 2).reshape(batch, length, width)
        x = x + self.project(out)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x)), approximate="tanh"))


class Norm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * self.weight


def _sines(length: int, width: int) -> Tensor:
    angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, width, 2) / width)
    return torch.cat([angles.sin(), angles.cos()], -1)
