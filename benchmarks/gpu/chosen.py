"""Blocks that a model has chosen, in CUDA graphs: ``python -m benchmarks.gpu.chosen``.

For each shape: the time of ``BlockMask.from_topk`` with the lists of both directions and of the forward pass alone, of the attention under
that mask, and of dense causal attention, by FlashAttention-3 too if it is installed, with their ratios. Choices are random blocks up to a
query's own. Choices of each query are timed with the backward pass too, in which the lists of keys are made, but not those of single keys.

Bars: making the masks takes at most 0.03 of the forward pass at 32,768 keys; blocks of 64 keys of each query are 3 times as fast as dense
causal attention by FlashAttention-3, 2 times with the backward pass, and 2,048 single keys of each 1.5 times.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import anyattn
from anyattn import BlockMask
from benchmarks.graphs import medians

_DENSE_UP_TO = 65_536  # keys
_ROWS = 1024  # of queries whose choices are drawn at once


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
    Shape(64, 4, 32_768, (1, 1), 2048),
    Shape(16, 16, 40_768, (64, 64), 64),
    Shape(7, 7, 109_632, (64, 64), 64),
)


def chosen(shape: Shape, device: str = "cuda") -> Tensor:
    """int64 (1, Hkv, query blocks, kept): random blocks that begin at or before a block of queries; -1 where there are too few."""
    (m, n), rows = shape.block, -(-shape.seqlen // shape.block[0])
    last, parts = torch.arange(rows, device=device) * m // n, []
    for own in last.split(_ROWS):
        scores = torch.rand(1, shape.heads_kv, len(own), -(-shape.seqlen // n), device=device)
        best = scores.masked_fill_(torch.arange(scores.shape[-1], device=device) > own[:, None], -1.0).topk(shape.kept)
        parts.append(torch.where(best.values >= 0, best.indices, -1))
    return torch.cat(parts, 2)


def fa3() -> tuple[Callable[..., Tensor], bool] | None:
    """FlashAttention-3's function, and whether its package has gradients; None without a package."""
    name = next((n for n in ("flash_attn_interface", "fa3_fwd_interface") if importlib.util.find_spec(n)), None)
    if name is None:
        return None
    attend = importlib.import_module(name).flash_attn_func

    def call(*rows: Tensor) -> Tensor:
        out: Any = attend(*rows, causal=True)
        return out[0] if isinstance(out, tuple) else out  # type: ignore[no-any-return]

    return call, name == "flash_attn_interface"


def times_of(shape: Shape, backend: str | None, rounds: int, device: str = "cuda") -> dict[str, float]:
    """Microseconds by name."""
    indices, lengths, is_per_query = chosen(shape, device), (shape.seqlen, shape.seqlen), shape.block[0] == 1

    def made(both: bool) -> BlockMask:
        return BlockMask.from_topk(indices, BLOCK_SIZE=shape.block, seq_lengths=lengths, causal=True, compute_q_blocks=both)

    q, k, v = (torch.randn(1, h, shape.seqlen, 128, device=device, dtype=torch.bfloat16) for h in (shape.heads_q, *2 * [shape.heads_kv]))
    mask = made(not is_per_query)
    calls: dict[str, Callable[[], Any]] = {"mask, rows": lambda: made(False)}
    if not is_per_query:
        calls["mask, both"] = lambda: made(True)

    def sparse(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, backend=backend)  # type: ignore[no-any-return]

    def dense(*rows: Tensor) -> Tensor:
        return anyattn.flash_attn_func(*rows, causal=True)  # type: ignore[no-any-return]

    attentions: dict[str, tuple[Callable[..., Tensor], list[Tensor], bool]] = {"forward": (sparse, [q, k, v], True)}
    if shape.seqlen <= _DENSE_UP_TO:
        rows = [t.transpose(1, 2) for t in (q, k, v)]
        attentions["dense causal"] = dense, rows, True
        if device == "cuda" and (peer := fa3()) is not None:
            attentions["FA3 causal"] = peer[0], rows, peer[1]
    for name, (attend, inputs, has_gradients) in attentions.items():
        calls[name] = partial(attend, *inputs)
        if is_per_query and has_gradients and shape.block[1] > 1:
            calls[f"{name} + backward"] = partial(gradients, attend, inputs)
    return medians(calls, rounds, 2)


def gradients(attend: Callable[..., Tensor], inputs: list[Tensor]) -> tuple[Tensor, ...]:
    """Of the inputs, for the output itself as its gradient."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_() for t in inputs]
        out = attend(*leaves)
        return torch.autograd.grad(out, leaves, out.detach())


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
            if both := times.get("forward + backward"):
                ratios += [f"{name} {us / both:.2f} of ours" for name, us in times.items() if name.endswith("causal + backward")]
            click.echo(f"{shape.name}: " + ", ".join(ratios))


if __name__ == "__main__":
    main()
