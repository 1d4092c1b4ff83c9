"""``anyattn show``: a mask's tiles in the terminal, and optionally as a picture."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from anyattn import gallery
from anyattn.cli import limits, tiles
from anyattn.cli.loading import errors_of, named_mods
from anyattn.sparsity.drawing import coarser

__all__ = ["command"]


@click.command("show")
@click.argument("mask")
@click.option("--seqlen", default=2048, show_default=True, type=limits.SEQLEN, help="Queries; keys too unless --seqlen-k is given.")
@click.option("--seqlen-k", type=limits.SEQLEN, help="Keys.")
@click.option("--block", default=128, show_default=True, type=limits.BLOCK, help="Tile size, rows and columns.")
@click.option("--batch", default=0, show_default=True, type=click.IntRange(0, 2**16), help="Which batch entry.")
@click.option("--head", default=0, show_default=True, type=click.IntRange(0, 2**12 - 1), help="Which query head.")
@click.option("--out", "outs", multiple=True, type=click.Path(path_type=Path), help="Also write a .png or .svg (may be repeated).")
def command(mask: str, seqlen: int, seqlen_k: int | None, block: int, batch: int, head: int, outs: tuple[Path, ...]) -> None:
    """Draw the tiles of MASK: a name of the gallery, a call such as 'causal() & document(...)', or file.py:function.

    \b
    anyattn show causal
    anyattn show 'sliding_window(256, 0) | block_diagonal(512)' --seqlen 4096
    anyattn show mymasks.py:tree --block 64 --out tree.svg
    """
    for out in outs:
        if out.suffix.lower() not in (".png", ".svg"):
            raise click.BadParameter(f"--out {out}: the name must end in .png or .svg")
    lengths = (seqlen, seqlen_k or seqlen)
    limits.check_tiles(lengths, block)
    found = named_mods(mask, gallery.Setting(seqlen, head + 1)).mask
    if found is None:
        raise click.BadParameter(f"{mask!r} has no mask: it hides nothing. 'anyattn explain' says what a score mod does")
    with errors_of(mask):
        limits.check_mask(found, lengths)
        shown = tiles.panel(mask, found, lengths, (block, block), batch, head)
    console = Console()
    # two characters per tile; in a pipe rich reports 80 columns
    grid, factor = coarser(shown.classes, max(console.height - 6, 32), max(console.width // 2, 8))
    rows, columns = shown.classes.shape
    merged = f", drawn {factor} x {factor} to a square" if factor > 1 else ""
    console.print(f"[bold]{mask}[/]  {rows} x {columns} tiles of {block} x {block}{merged}", highlight=False)
    console.print(tiles.drawing(grid), end="")
    console.print(tiles.legend(shown))
    if outs:
        _write(shown, outs)
        console.print("wrote " + ", ".join(map(str, outs)), highlight=False)


def _write(shown: tiles.TilePanel, outs: tuple[Path, ...]) -> None:
    from anyattn.cli import pictures

    try:
        pictures.save(pictures.figure([shown]), *outs)
    except (ImportError, OSError) as error:
        raise click.ClickException(str(error)) from error
