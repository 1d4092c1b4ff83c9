"""DeBERTa's disentangled scores on a GPU: ``python -m benchmarks.gpu.deberta``.

``anyattn.scores.disentangled`` reads two tables, one by query and one by key, at a place that depends on the distance. Both are learned. In
bfloat16, B 2, H 12, L 8,192, D 64 and 256 buckets by default: times of the forward pass, in a CUDA graph, and of forward and backward pass
with the gradients of q, k, v and both tables. Bars: a fifth of the published 8.5 and 45 ms of an H200.
"""

from __future__ import annotations

from statistics import median

import click
import torch
from torch import Tensor

import anyattn
from anyattn import scores
from benchmarks.graphs import medians

PUBLISHED = {"forward": 8.5, "forward and backward": 45.0}  # ms
BAR = 5.0
_WARM = 3  # calls that are not counted


def _both_passes(
    q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor, Tensor], dout: Tensor, rounds: int, max_distance: int | None
) -> float:
    """Median milliseconds."""
    times = []
    for n in range(rounds + _WARM):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        out = anyattn.flex_attention(q, k, v, scores.disentangled(tables[0], tables[1], max_distance), scale=(3 * q.shape[-1]) ** -0.5)
        torch.autograd.grad(out, (q, k, v, *tables), dout)
        end.record()
        end.synchronize()
        if n >= _WARM:
            times.append(begin.elapsed_time(end))
    return median(times)


@click.command()
@click.option("--batch", default=2, show_default=True)
@click.option("--heads", default=12, show_default=True)
@click.option("--seqlen", default=8192, show_default=True)
@click.option("--head-dim", default=64, show_default=True)
@click.option("--buckets", default=256, show_default=True)
@click.option("--max-distance", default=512, show_default=True, help="0: every distance has a place of its own.")
@click.option("--rounds", default=9, show_default=True)
def main(batch: int, heads: int, seqlen: int, head_dim: int, buckets: int, max_distance: int, rounds: int) -> None:
    """Times disentangled attention with learned tables."""
    shape = batch, heads, seqlen
    q, k, v, dout = (torch.randn(*shape, head_dim, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    c2p, p2c = (torch.randn(*shape, 2 * buckets, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    score = scores.disentangled(c2p, p2c, max_distance or None)
    with torch.no_grad():
        call = lambda: anyattn.flex_attention(q, k, v, score, scale=(3 * head_dim) ** -0.5)
        found = {"forward": medians({"forward": call}, rounds, 3)["forward"] / 1e3}
    for t in (q, k, v, c2p, p2c):
        t.requires_grad_()
    found["forward and backward"] = _both_passes(q, k, v, (c2p, p2c), dout, rounds, max_distance or None)
    for name, ms in found.items():
        times = PUBLISHED[name] / ms
        click.echo(f"{name:22} {ms:8.3f} ms, {times:.2f} times the published speed{'' if times >= BAR else f', below {BAR:g}'}")


if __name__ == "__main__":
    main()
