"""Blocks that a model has chosen, in CUDA graphs: ``python -m benchmarks.gpu.chosen``.

For each shape: the time of ``BlockMask.from_topk`` with the lists of both directions and of the forward pass alone, of the attention under
that mask, and of dense causal attention, with their ratios. Choices are random blocks up to a query's own. Bars: making the masks takes at
most 0.03 of the forward pass at 32,768 keys; choices of each query are 3 times as fast as dense causal attention.
"""

from __future__ import annotations

from typing import NamedTuple

import click
import torch
from torch import Tensor

import anyattn
from anyattn import BlockMask
from benchmarks.graphs import medians

_DENSE_UP_TO = 65_536  # keys


class Shape(NamedTuple):
    """block: queries and keys of a block. kept: key blocks that a block of queries chooses."""

    heads_q: int
    heads_kv: int
    seqlen: int
    block: tuple[int, int]
    kept: int

    @property
    def name(self) -> str:
        return f"{self.heads_q}/{self.heads_kv} heads, S {self.seqlen}, {self.kept} blocks of {self.block[0]} x {self.block[1]}"


SHAPES = (
    Shape(64, 4, 32_768, (64, 64), 16),
    Shape(64, 4, 32_768, (128, 128), 16),
    Shape(64, 4, 32_768, (1, 64), 16),
    Shape(16, 16, 40_768, (64, 64), 64),
    Shape(7, 7, 109_632, (64, 64), 64),
)


def chosen(shape: Shape, device: str = "cuda") -> Tensor:
    """int64 (1, Hkv, query blocks, kept): random blocks that begin at or before a block of queries; -1 where there are too few."""
    (m, n), rows = shape.block, -(-shape.seqlen // shape.block[0])
    last = torch.arange(rows, device=device) * m // n
    scores = torch.rand(1, shape.heads_kv, rows, -(-shape.seqlen // n), device=device)
    best = scores.masked_fill_(torch.arange(scores.shape[-1], device=device) > last[:, None], -1.0).topk(shape.kept)
    return torch.where(best.values >= 0, best.indices, -1)


def times_of(shape: Shape, backend: str | None, rounds: int, device: str = "cuda") -> dict[str, float]:
    """Microseconds by name."""
    indices, lengths, is_per_query = chosen(shape, device), (shape.seqlen, shape.seqlen), shape.block[0] == 1

    def made(both: bool) -> BlockMask:
        return BlockMask.from_topk(indices, BLOCK_SIZE=shape.block, seq_lengths=lengths, causal=True, compute_q_blocks=both)

    q, k, v = (torch.randn(1, h, shape.seqlen, 128, device=device, dtype=torch.bfloat16) for h in (shape.heads_q, *2 * [shape.heads_kv]))
    mask = made(not is_per_query)
    calls = {"mask, rows": lambda: made(False)}
    if not is_per_query:
        calls["mask, both"] = lambda: made(True)
    calls["forward"] = lambda: anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, backend=backend)
    if shape.seqlen <= _DENSE_UP_TO:
        rows = [t.transpose(1, 2) for t in (q, k, v)]
        calls["dense causal"] = lambda: anyattn.flash_attn_func(*rows, causal=True)
    return medians(calls, rounds, 2)


@click.command()
@click.option("--backend", default=None, help="Of the chosen blocks; by default anyattn's choice.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--only", default="", help="Shapes whose names contain this.")
def main(backend: str | None, rounds: int, only: str) -> None:
    """Times making masks of chosen blocks, and attention under them."""
    with torch.no_grad():
        for shape in (s for s in SHAPES if only in s.name):
            times = times_of(shape, backend, rounds)
            ratios = [f"{name} {us:.1f} us ({us / times['forward']:.3f} of the forward pass)" for name, us in times.items()]
            click.echo(f"{shape.name}: " + ", ".join(ratios))


if __name__ == "__main__":
    main()
