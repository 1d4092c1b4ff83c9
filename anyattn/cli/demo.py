"""``anyattn demo``: runs the gallery forward and backward, judges it, times it beside plain torch, and draws it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import Tensor

import anyattn
from anyattn import gallery
from anyattn.cli import limits, measure, tiles
from anyattn.cli.judge import shares
from anyattn.cli.peer import peer
from anyattn.mods import masks
from anyattn.testing.harness.timing import CpuClock, Limits
from anyattn.testing.harness.timing import measure as timed

__all__ = ["command"]

_DTYPES = ("float32", "bfloat16", "float16")
_STEPS = ("tiles", "run", "judge", "time")
# Drawn at a shorter length than computed, so that single elements are visible.
_DRAWN_SEQLEN, _DRAWN_TILE = 512, 64


@dataclass(frozen=True)
class _Size:
    seqlen: int
    heads: int
    head_dim: int
    dtype: torch.dtype
    block: int
    rounds: int


@dataclass(frozen=True)
class _Row:
    """One variant's row of the table. budget: largest share of out, dq, dk, dv. seconds: forward and backward together."""

    title: str
    counts: tuple[int, int, int]  # empty, partial, full
    budget: float
    mine: float
    theirs: float
    peer: str
    memory: int | None
    peer_memory: int | None


@click.command("demo")
@click.option("--seqlen", default=2048, show_default=True, type=click.IntRange(32, 2**14), help="Queries and keys.")
@click.option("--heads", default=4, show_default=True, type=limits.HEADS, help="Heads.")
@click.option("--head-dim", default=64, show_default=True, type=limits.HEAD_DIM, help="Elements per head.")
@click.option("--dtype", default="float32", show_default=True, type=click.Choice(_DTYPES), help="Of the inputs.")
@click.option("--block", default=128, show_default=True, type=limits.BLOCK, help="Tile size of the counts.")
@click.option("--rounds", default=5, show_default=True, type=click.IntRange(1, 1000), help="Timed rounds; the median counts.")
@click.option("--only", "names", multiple=True, type=click.Choice(list(gallery.VARIANTS)), help="Only this variant (may be repeated).")
@click.option("--out", default="demo", show_default=True, type=click.Path(path_type=Path, file_okay=False), help="Where pictures go.")
def command(seqlen: int, heads: int, head_dim: int, dtype: str, block: int, rounds: int, names: tuple[str, ...], out: Path) -> int:
    """Run the gallery of variants forward and backward, and draw it; ends with status 1 if a result is over its error budget."""
    limits.check_tiles((seqlen, seqlen), block)
    limits.check_memory(seqlen, heads, head_dim)
    size = _Size(seqlen, heads, head_dim, getattr(torch, dtype), block, rounds)
    variants = [variant for variant in gallery.VARIANTS.values() if not names or variant.name in names]
    console = Console()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("gallery", total=len(variants) * len(_STEPS) + 1)
        for variant in variants:

            def step(name: str, title: str = variant.title) -> None:
                progress.update(task, advance=1, description=f"{title}: {name}")

            rows.append(_measured(variant, size, step))
        progress.update(task, advance=1, description="pictures")
        written = _draw(variants, out)
    console.print(_table(rows, size))
    console.print(
        "error: the greatest share that out, dq, dk and dv use of the error allowed against float64 (100% fails; one head).\n"
        "time: forward and backward; torch's dense masks and biases are made beforehand. "
        "memory: how much the process grew at the most.",
        style="dim",
    )
    console.print(written, highlight=False)
    return 0 if all(row.budget <= 1 for row in rows) else 1


def _measured(variant: gallery.Variant, size: _Size, step: Callable[[str], None]) -> _Row:
    step("tiles")
    mods = variant.mods(gallery.Setting(size.seqlen, size.heads))
    grid = tiles.panel(variant.title, mods.mask or masks.full(), (size.seqlen,) * 2, (size.block,) * 2)
    step("run")
    generator = torch.Generator().manual_seed(0)
    shape = (1, size.heads, size.seqlen, size.head_dim)
    q, k, v, dout = (torch.randn(shape, generator=generator, device="cpu").to(size.dtype) for _ in range(4))
    qkv = tuple(t.requires_grad_() for t in (q, k, v))
    # made once, as in a training loop that uses the block mask at every step
    blocks = None
    if mods.mask is not None:
        blocks = anyattn.create_block_mask(mods.mask, None, None, size.seqlen, size.seqlen, "cpu", size.block)
    attend = partial(_anyattn, score=mods.score, blocks=blocks)
    out, *gradients = _forward_and_backward(attend, qkv, dout)
    step("judge")
    budget = max(shares(mods, qkv, dout, out, tuple(gradients)).values())
    step("time")
    name, plain = peer(variant, mods, size.heads, size.seqlen)
    calls = {"mine": partial(_forward_and_backward, attend, qkv, dout), "theirs": partial(_forward_and_backward, plain, qkv, dout)}
    memory = {who: measure.extra_memory(call) for who, call in calls.items()}
    timings = timed(calls, CpuClock(), Limits(size.rounds, math.inf, size.rounds, 0.0), _raised)
    counts = (grid.count(0), grid.count(1), grid.count(2))
    return _Row(variant.title, counts, budget, timings["mine"].median, timings["theirs"].median, name, memory["mine"], memory["theirs"])


def _raised(name: str, error: Exception) -> None:
    raise error


def _anyattn(q: Tensor, k: Tensor, v: Tensor, *, score: Callable[..., Any] | None, blocks: Any) -> Tensor:
    return anyattn.flex_attention(q, k, v, score, blocks)


def _forward_and_backward(attend: Callable[..., Tensor], qkv: tuple[Tensor, ...], dout: Tensor) -> tuple[Tensor, ...]:
    out = attend(*qkv)
    return (out, *torch.autograd.grad(out, qkv, dout))


def _table(rows: list[_Row], size: _Size) -> Table:
    dtype = str(size.dtype).removeprefix("torch.")
    heading = f"S={size.seqlen} H={size.heads} D={size.head_dim} {dtype}, tiles of {size.block}, {torch.get_num_threads()} threads"
    table = Table(title=heading, title_justify="left", header_style="bold", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("variant", no_wrap=True)
    for name in ("tiles\nskip/part/full", "error", "ms\nours/torch", "speed", "MB\nours/torch"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("torch does\nit by")
    for row in rows:
        fine = "green" if row.budget <= 1 else "bold red"
        ratio = row.theirs / row.mine
        table.add_row(
            row.title,
            "/".join(str(count) for count in row.counts),
            f"[{fine}]{row.budget:.0%}[/]",
            f"{row.mine * 1e3:.0f}/{row.theirs * 1e3:.0f}",
            f"[{'green' if ratio >= 1 else 'yellow'}]{ratio:.1f}x[/]",
            f"{_megabytes(row.memory)}/{_megabytes(row.peer_memory)}",
            row.peer,
        )
    return table


def _megabytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.0f}"


def _draw(variants: list[gallery.Variant], folder: Path) -> str:
    """Draws each distinct mask of the variants and returns where; without matplotlib, how to install it."""
    setting = gallery.Setting(_DRAWN_SEQLEN, 1)
    shown = {}
    for variant in variants:
        mods = variant.mods(setting)
        # ALiBi, softcap and the per-head bias are causal too: one picture of a causal mask suffices
        if mods.mask is not None and (mods.score is None or variant.name == "own"):
            shown[variant.name] = tiles.panel(variant.title, mods.mask, (_DRAWN_SEQLEN,) * 2, (_DRAWN_TILE,) * 2)
    if not shown:
        return "no picture: none of these variants has a mask of its own"
    paths = [folder / "gallery.png", folder / "gallery.svg"]
    try:
        from anyattn.cli import pictures

        heading = f"What is computed and what is skipped: {_DRAWN_SEQLEN} positions in tiles of {_DRAWN_TILE}"
        pictures.save(pictures.figure(list(shown.values()), heading=heading, columns=3), *paths)
    except ImportError as error:
        return f"no picture: {error}"
    except OSError as error:
        raise click.ClickException(f"cannot write to {folder}: {error}") from error
    return "wrote " + ", ".join(map(str, paths))
