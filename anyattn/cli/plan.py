"""``anyattn plan``: which rank of a context-parallel group owns which rows of a sequence, and what that is expected to cost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click
import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anyattn import gallery
from anyattn.arithmetic import ceil_div
from anyattn.block_masks import create_block_mask
from anyattn.cli import limits
from anyattn.cli.loading import errors_of, named_mods
from anyattn.cli.pictures import CURVES
from anyattn.distributed.overlap import demand_of
from anyattn.distributed.placement import Placement, Work, chunk_of, costs_of, work_of
from anyattn.distributed.transport import TRANSPORTS, Layer, placed_rows
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.trace import trace

__all__ = ["Case", "command", "planned"]

_MOST_POSITIONS, _MOST_RANKS = 2**26, 1024
_TILES, _LEAST_BLOCK = 4096, 128  # tiles on each side of the grid that is counted: 4 a rank
_MOST_TILES = 2**24  # of all heads
_NODE_SIZE = 8
_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SUFFIXES = {"k": 2**10, "m": 2**20}


class _Positions(click.ParamType):
    """A number of positions: 4096, 256k, 16M."""

    name = "positions"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        text = str(value).lower()
        factor = _SUFFIXES.get(text[-1:], 1)
        digits = text[:-1] if factor > 1 else text
        if not digits.isdecimal() or not 1 <= int(digits) * factor <= _MOST_POSITIONS:
            self.fail(f"{value!r} is not a number of positions; wanted 1 to 64M, such as 4096, 256k or 1M", param, ctx)
        return int(digits) * factor


class _Numbers(click.ParamType):
    """Whole numbers with commas between them."""

    def __init__(self, name: str, most: int, count: int | None = None):
        self.name, self.most, self.count = name, most, count

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        parts = str(value).split(",")
        is_legal = all(part.isdecimal() and 1 <= int(part) <= self.most for part in parts)
        if not is_legal or self.count not in (None, len(parts)):
            some = "numbers" if self.count is None else f"{self.count} numbers"
            self.fail(f"{value!r}: wanted {some} from 1 to {self.most}, with commas between them", param, ctx)
        return tuple(map(int, parts))


class Case(NamedTuple):
    """A mask over a sequence. mask: None, if every row sees every key. heads: of queries and of keys. transport: of ``plan``."""

    mask: Callable | None
    length: int
    heads: tuple[int, int] = (16, 4)
    head_dim: int = 128
    transport: str = "auto"

    @property
    def differs_by_head(self) -> bool:
        return self.mask is not None and any(d.h for d in dependence(trace(self.mask, "mask").expr))

    @property
    def block(self) -> int:
        """Rows and keys of the tiles that are counted: 128, or a power of two with which a long sequence has few enough."""
        most = _TILES
        while self.differs_by_head and most * most * self.heads[0] > _MOST_TILES:
            most //= 2
        block = _LEAST_BLOCK
        while ceil_div(self.length, block) > most:
            block *= 2
        return block


def planned(case: Case, ranks: tuple[int, ...], node_size: int | None = None, costs: Path | None = None) -> list[tuple[Placement, Work]]:
    """The placement of each number of ranks, and what it was made from. node_size: ranks of a node, a divisor of all numbers of ranks that
    are greater; by default 8, and where that is no divisor, every key crosses the network. costs: a file of ``Rates``."""
    lists = None
    if case.mask is not None:
        heads = case.heads[0] if case.differs_by_head else None
        lists = create_block_mask(case.mask, None, heads, case.length, case.length, "cpu", case.block)
    found = []
    for number in ranks:
        work = work_of([lists], [1.0], chunk_of(case.length, number, case.block), case.length)
        size = min(node_size or _NODE_SIZE, number)
        model = costs_of(costs, case.heads, case.head_dim, number, size if node_size or number % size == 0 else None)
        layer = Layer(lists, work, demand_of(work, model), 1.0)
        placement = placed_rows([layer], number, model, case.heads, case.transport, "auto", 2 * case.heads[0] * case.head_dim)
        found.append((placement, work))
    return found


@click.command("plan")
@click.argument("mask")
@click.option("--S", "--seqlen", "seqlen", default="256k", show_default=True, type=_Positions(), help="Queries and keys: 4096, 256k, 16M.")
@click.option("--ranks", default="2,8,64", show_default=True, type=_Numbers("ranks", _MOST_RANKS), help="Sizes of the group.")
@click.option("--node-size", type=click.IntRange(1, _MOST_RANKS), help="Ranks of a node; more of them cross the network.  [default: 8]")
@click.option("--heads", default="16,4", show_default=True, type=_Numbers("heads", 2**12, 2), help="Of queries and of keys.")
@click.option("--head-dim", default=128, show_default=True, type=limits.HEAD_DIM, help="Elements per head.")
@click.option("--transport", default="auto", show_default=True, type=click.Choice(TRANSPORTS), help="What travels between ranks.")
@click.option("--costs", type=click.Path(path_type=Path, exists=True, dir_okay=False), help="Of anyattn bench --context --json.")
@click.option("--out", "outs", multiple=True, type=click.Path(path_type=Path), help="Also write a .png or .svg (may be repeated).")
def command(
    mask: str,
    seqlen: int,
    ranks: tuple[int, ...],
    node_size: int | None,
    heads: tuple[int, int],
    head_dim: int,
    transport: str,
    costs: Path | None,
    outs: tuple[Path, ...],
) -> None:
    """Place the rows of MASK on ranks: a name of the gallery, a call such as 'causal() & document(...)', or file.py:function.

    \b
    anyattn plan causal --S 256k --ranks 2,8,64
    anyattn plan mymasks.py:tree --S 64k --ranks 8 --out owners.svg
    """
    for out in outs:
        if out.suffix.lower() not in (".png", ".svg"):
            raise click.BadParameter(f"--out {out}: the name must end in .png or .svg")
    for number in ranks:
        if node_size is not None and number > node_size and number % node_size:
            raise click.BadParameter(f"--node-size {node_size}: wanted a divisor of the {number} ranks")
    mods = named_mods(mask, gallery.Setting(seqlen, heads[0]))
    case = Case(mods.mask, seqlen, heads, head_dim, transport)
    with errors_of(mask):
        if case.mask is not None:
            limits.check_mask(case.mask, (seqlen, seqlen))
        found = planned(case, ranks, node_size, costs)
    console = Console()
    what = f"counted in tiles of {case.block} x {case.block}" if case.mask is not None else "no mask: every row sees every key"
    console.print(f"[bold]{mask}[/]  {seqlen} positions, {what}", highlight=False)
    console.print(_table(found))
    for placement, _ in found:
        if placement.stats.ranks <= len(_LETTERS):
            console.print(_strip(placement, max(min(console.width, 128), 16)))
    if outs:
        _write(mask, found, outs)
        console.print("wrote " + ", ".join(map(str, outs)), highlight=False)


def _table(found: list[tuple[Placement, Work]]) -> Table:
    table = Table(box=box.SIMPLE, show_edge=False, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
    for heading in ("ranks", "placement", "load", "received", "bound", "most by a rank", "far", "pieces", "efficiency"):
        table.add_column(heading, justify="left" if heading == "placement" else "right")
    for placement, _ in found:
        table.add_row(*_cells(placement))
    table.caption = "load: max / mean; received, bound, far (from other nodes): parts of an all-gather; efficiency: predicted, forward"
    table.caption_justify = "left"
    return table


def _cells(placement: Placement) -> list[str]:
    """A row of the table."""
    s = placement.stats
    shares = [f"{share:.3f}" for share in (s.received_share, s.bound, s.across_share)]
    return [
        str(s.ranks), s.placement, f"{s.load:.3f}", *shares[:2], str(max(s.received)), shares[2], str(max(s.pieces)), f"{s.efficiency:.2f}",
    ]  # fmt: skip


def _strip(placement: Placement, width: int) -> Text:
    """The sequence from left to right, a letter for the owner of each part."""
    owner = placement.owner
    columns = min(len(owner), width)
    text = Text(f"{placement.stats.ranks} ranks\n")
    for rank in owner[np.arange(columns) * len(owner) // columns].tolist():
        text.append(_LETTERS[rank], style=CURVES[rank % len(CURVES)])
    return text


def _write(title: str, found: list[tuple[Placement, Work]], outs: tuple[Path, ...]) -> None:
    from anyattn.cli import pictures

    try:
        panels = [pictures.OwnerPanel(title, placement.owner, work.needs, work.chunk, _note(placement)) for placement, work in found]
        pictures.save(pictures.figure(panels), *outs)
    except (ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error


def _note(placement: Placement) -> str:
    s = placement.stats
    return f"{s.placement}: load {s.load:.2f}, {s.received_share:.3f} of an all-gather"
