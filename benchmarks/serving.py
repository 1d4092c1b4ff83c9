"""Decoding of uneven batches on a GPU, in CUDA graphs: anyattn beside FlashAttention-3, and a copy of as many bytes.

``python -m benchmarks.serving`` prints, for each distribution of lengths, heads and storage, microseconds of a step and its ratios.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch import Tensor

import anyattn
from benchmarks.graphs import medians

LENGTHS = ("uniform", "log-normal", "one long", "equal")
SHORTEST, LONGEST = 512, 16384
HEADS = ((32, 8, 128), (64, 8, 64), (8, 1, 128), (32, 8, 256))
PAGES = (0, 16, 64)
_MODULE = "flash_attn_interface"  # FlashAttention-3 with pages


class Case(NamedTuple):
    """page: rows per page, 0 for a contiguous cache."""

    lengths: str
    heads_q: int
    heads_kv: int
    head_dim: int
    page: int
    batch: int = 32

    @property
    def name(self) -> str:
        where = f"pages of {self.page}" if self.page else "contiguous"
        return f"{self.lengths}, B{self.batch} {self.heads_q}/{self.heads_kv} D{self.head_dim}, {where}"


class Step(NamedTuple):
    """A decoding step: one query per sequence. q: (B, 1, Hq, D). k, v: (B, capacity, Hkv, D), or pages."""

    q: Tensor
    k: Tensor
    v: Tensor
    lengths: Tensor
    table: Tensor | None

    @property
    def read_bytes(self) -> int:
        """Of the keys and values that the step reads."""
        return int(self.lengths.sum()) * 2 * self.k[0, 0].nbytes


def lengths_of(kind: str, batch: int, generator: torch.Generator) -> Tensor:
    """int32 (batch,): from ``SHORTEST`` to ``LONGEST`` keys."""
    if kind == "uniform":
        found = torch.randint(SHORTEST, LONGEST + 1, (batch,), generator=generator, device="cpu")
    elif kind == "log-normal":
        found = torch.empty(batch, device="cpu").log_normal_(7.5, 1.0, generator=generator).clamp(SHORTEST, LONGEST)
    elif kind == "one long":
        found = torch.full((batch,), 2 * SHORTEST, device="cpu")
        found[batch // 3] = LONGEST
    else:
        found = torch.full((batch,), LONGEST // 4, device="cpu")
    return found.to(torch.int32)


def step_of(case: Case, device: str) -> Step:
    """Random tensors; pages are in random order."""
    generator = torch.Generator().manual_seed(1)
    lengths = lengths_of(case.lengths, case.batch, generator)
    capacity, shape = LONGEST, (case.heads_kv, case.head_dim)
    lead = (case.batch, capacity) if not case.page else (case.batch * capacity // case.page, case.page)
    q = torch.randn(case.batch, 1, case.heads_q, case.head_dim, dtype=torch.bfloat16, device=device)
    k, v = (torch.randn(*lead, *shape, dtype=torch.bfloat16, device=device) for _ in range(2))
    table = None
    if case.page:
        table = torch.randperm(lead[0], generator=generator, device="cpu").view(case.batch, -1).to(device, torch.int32)
    return Step(q, k, v, lengths.to(device), table)


def contestants(step: Step, splits: tuple[int, ...]) -> Iterator[tuple[str, Callable[[], Any]]]:
    def ours(num_splits: int) -> Callable[[], Any]:
        options: dict[str, Any] = {"cache_seqlens": step.lengths, "page_table": step.table, "causal": True, "num_splits": num_splits}
        return lambda: anyattn.flash_attn_with_kvcache(step.q, step.k, step.v, **options)

    yield "anyattn", ours(0)
    for count in splits:
        yield f"{count} splits", ours(count)
    if importlib.util.find_spec(_MODULE) is not None:
        flash = importlib.import_module(_MODULE)
        options: dict[str, Any] = {"cache_seqlens": step.lengths, "page_table": step.table, "causal": True}
        yield "fa3", lambda: flash.flash_attn_with_kvcache(step.q, step.k, step.v, **options)
    source = torch.randn(step.read_bytes // 4, dtype=torch.bfloat16, device=step.q.device)  # half as many bytes, read and written
    target = torch.empty_like(source)
    yield "copy", lambda: target.copy_(source)


@click.command()
@click.option("--rounds", default=7, show_default=True)
@click.option("--repeats", default=5, show_default=True, help="Calls in a graph.")
@click.option("--splits", default="", help="Also with these numbers of splits, such as 1,4,8.")
@click.option("--only", default="", help="Cases whose names contain this.")
@click.option("--out", type=click.Path(path_type=Path), help="Writes the times as JSON.")
def main(rounds: int, repeats: int, splits: str, only: str, out: Path | None) -> None:
    """Times decoding steps of uneven batches."""
    cases = [Case(kind, *heads, page) for heads in HEADS for page in PAGES for kind in LENGTHS]
    results = {}
    for case in (c for c in cases if only in c.name):
        step = step_of(case, "cuda")
        calls = dict(contestants(step, tuple(int(n) for n in splits.split(",") if n)))
        times = results[case.name] = medians(calls, rounds, repeats)
        mine = times["anyattn"]
        others = "  ".join(f"{name} {us:.1f} ({us / mine:.2f})" for name, us in times.items() if name != "anyattn")
        click.echo(f"{case.name:50} {mine:7.1f} us  {others}")
    if out is not None:
        out.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
