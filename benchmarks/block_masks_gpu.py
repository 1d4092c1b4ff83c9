"""``python -m benchmarks.block_masks_gpu``: building block masks on a CUDA device, in turns with torch's compiled ``create_block_mask``.

Three times of each: one call with a wait before and after it (what a user sees), one of many calls in a row without a wait between them
(what a training step sees), and the host's part of those. The lists are compared before anything is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import click
import torch
from torch.nn.attention import flex_attention as torch_flex

import anyattn
from anyattn import masks
from anyattn.mods.algebra import Mask

LISTS = [f"{side}_{part}" for side in ("kv", "full_kv", "q", "full_q") for part in ("num_blocks", "indices")]


def document_ids(length: int) -> torch.Tensor:
    """About sixteen documents of uneven lengths."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[:15].sort().values + 1
    return torch.bucketize(torch.arange(length), cuts, right=True).to(torch.int32).cuda()


def mods(length: int) -> dict[str, Mask]:
    ids = document_ids(length)
    return {
        "causal": masks.causal(),
        "document_causal": masks.document(ids) & masks.causal(),
        "sliding_window": masks.sliding_window(1024, 0),
        "dilated": masks.dilated(512, 3),
    }


def listed(mask: Any) -> list[torch.Tensor]:
    """Counts, and indices with what lies beyond them cleared."""
    found = []
    for counts, indices in zip(LISTS[0::2], LISTS[1::2], strict=True):
        count, index = getattr(mask, counts), getattr(mask, indices)
        found += [count, index * (torch.arange(index.shape[-1], device=index.device) < count[..., None])]
    return found


def alone(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def in_a_row(call: Callable[[], Any], calls: int) -> tuple[float, float]:
    """Seconds a call, of everything and of the host."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        call()
    host = time.perf_counter() - start
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls, host / calls


@click.command()
@click.option("--lengths", default="8192,32768,131072", show_default=True, help="Sequence lengths.")
@click.option("--rounds", default=15, show_default=True, type=click.IntRange(3), help="Interleaved rounds.")
@click.option("--calls", default=20, show_default=True, type=click.IntRange(1), help="Calls in a row.")
def main(lengths: str, rounds: int, calls: int) -> None:
    compiled = torch.compile(torch_flex.create_block_mask)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; medians in microseconds: alone, in a row, host")
    for length in map(int, lengths.split(",")):
        for name, mod in mods(length).items():
            makers = {
                "anyattn": lambda mod=mod, n=length: anyattn.create_block_mask(mod, None, None, n, n, "cuda"),
                "torch": lambda mod=mod.fn, n=length: compiled(mod, None, None, n, n, "cuda"),
            }
            same = all(torch.equal(a, b) for a, b in zip(*(listed(make()) for make in makers.values()), strict=True))
            assert same, f"the lists of {name} at {length} are not torch's"
            times: dict[str, list[tuple[float, ...]]] = {who: [] for who in makers}
            for at in range(rounds + 2):
                for who, make in makers.items():
                    taken = (alone(make), *in_a_row(make, calls if length < 2**16 or who == "anyattn" else 3))
                    if at >= 2:  # the first rounds warm up
                        times[who].append(taken)
            middle = {who: [1e6 * statistics.median(column) for column in zip(*rows, strict=True)] for who, rows in times.items()}
            shown = "   ".join(f"{who} {' '.join(f'{t:8.1f}' for t in row)}" for who, row in middle.items())
            print(f"{length:7} {name:16} {shown}   ratio alone {middle['torch'][0] / middle['anyattn'][0]:.1f}", flush=True)


if __name__ == "__main__":
    main()
