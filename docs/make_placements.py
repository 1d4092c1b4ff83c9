"""Writes the table of docs/context-parallel.md from the planner: ``make docs``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from anyattn.cli.plan import Case, planned
from anyattn.mods import masks

PAGE = Path(__file__).resolve().parent / "context-parallel.md"
BEGIN, END = "<!-- written by docs/make_placements.py -->", "<!-- end -->"
COLUMNS = "mask", "positions", "ranks", "placement", "load", "received", "bound", "most by a rank", "across nodes", "pieces", "efficiency"
HEADER = f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}"
SHORT, LONG = 2**18, 2**24


class Row(NamedTuple):
    """A mask for a length, by its name in the table. ranks: the numbers of ranks that it is placed on."""

    name: str
    mask: Callable[[int], Callable]
    length: int = SHORT
    ranks: tuple[int, ...] = (2, 8, 64)


def documents(length: int) -> Callable:
    """Twelve documents whose edges are drawn by chance, with a fixed seed."""
    edges = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0), device="cpu")[:11].sort()[0] + 1
    return masks.document(torch.searchsorted(edges, torch.arange(length, device="cpu"), right=True).to(torch.int32))


ROWS = (
    Row("causal", lambda n: masks.causal()),
    Row("12 documents, causal", lambda n: masks.causal() & documents(n)),
    Row("12 documents", documents),
    Row("window of 4,096 keys", lambda n: masks.sliding_window(4096, 0)),
    Row("prefix of a quarter", lambda n: masks.causal() | (lambda b, h, q, k: k < n // 4)),
    Row("window and 128 first keys", lambda n: masks.sliding_window(4096, 0) | (masks.causal() & (lambda b, h, q, k: k < 128))),
    Row("12 documents with a window", lambda n: masks.sliding_window(4096, 0) & documents(n)),
    Row("causal", lambda n: masks.causal(), LONG, (64, 1024)),
    Row("12 documents, causal", lambda n: masks.causal() & documents(n), LONG, (64, 1024)),
    Row("window of 4,096 keys", lambda n: masks.sliding_window(4096, 0), LONG, (64, 1024)),
)


def lines(row: Row) -> Iterator[str]:
    """The lines of the table for a mask."""
    for placement, _ in planned(Case(row.mask(row.length), row.length), row.ranks):
        s = placement.stats
        keys = f"{s.received_share:.3f} | {s.bound:.3f} | {max(s.received):,} | {s.across_share:.3f}"
        numbers = f"{s.load:.3f} | {keys} | {max(s.pieces)} | {s.efficiency:.2f}"
        yield f"| {row.name} | {_short(row.length)} | {s.ranks:,} | {s.placement} | {numbers} |"


def _short(length: int) -> str:
    return f"{length >> 20}M" if length >= 2**20 else f"{length >> 10}k"


def text(page: str) -> str:
    """The page with the table made anew."""
    before, _, rest = page.partition(BEGIN)
    table = "\n".join([HEADER, *(line for row in ROWS for line in lines(row))])
    return f"{before}{BEGIN}\n\n{table}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    PAGE.write_text(text(PAGE.read_text()))
