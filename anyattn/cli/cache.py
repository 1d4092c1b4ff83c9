"""``anyattn cache``: lists or removes the compiled kernels and measured tiles in the disk cache."""

from __future__ import annotations

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from anyattn import disk_cache
from anyattn.disk_cache import DiskCache

__all__ = ["command"]


@click.group("cache")
def command() -> None:
    """List or remove the compiled kernels on disk."""


@command.command("list")
def list_kernels() -> None:
    """List the kernels, and the tiles that autotuning found: variant, head dimension, dtype, size and age."""
    cache, console = _cache(), Console()
    entries, texts = cache.entries(), cache.texts()
    if texts:
        count = f"{len(texts)} source" + "s" * (len(texts) != 1)
        console.print(f"{count} of Triton kernels to read: {cache.folder}/*{texts[0].suffix}", highlight=False, soft_wrap=True)
    if not entries:
        console.print(f"no kernels in {cache.folder}", highlight=False, soft_wrap=True)
        return
    table = Table("variant", "head dim", "dtype", "size", "age", box=None, pad_edge=False, header_style="bold")
    for entry in entries:
        facts = entry.facts
        name = str(facts.get("name", "?")) if entry.is_sound else "torn or altered: made again when needed"
        tiles = facts.get("tiles")
        if isinstance(tiles, list) and len(tiles) == 4:
            name += " = {} x {}, {} warps, {} stages".format(*tiles)
        cells = (name, str(facts.get("head_dim", "")), str(facts.get("dtype", "")), _size(entry.size), _age(entry.age))
        table.add_row(*map(Text, cells))  # Text: brackets in a name are no markup
    console.print(table, highlight=False)
    total = _size(sum(entry.size for entry in entries))
    console.print(f"{_count(len(entries))}, {total}, in {cache.folder}", highlight=False, soft_wrap=True)


@command.command("clear")
def clear() -> None:
    """Remove all kernels, measured tiles and sources; programs that are running keep theirs.

    Files that anyattn did not write are left alone, and so are those of its earlier versions.
    """
    cache, console = _cache(), Console()
    count, size = cache.clear()
    console.print(f"removed {_count(count)}, {_size(size)}, from {cache.folder}", highlight=False, soft_wrap=True, markup=False)
    left = len(cache.strangers())
    if left:
        said = f"left {left} other file{'s' * (left != 1)} alone: not marked as written by anyattn (its earlier versions marked nothing)"
        console.print(said, highlight=False, soft_wrap=True)


def _cache() -> DiskCache:
    """The user's cache, even if it is turned off."""
    if (reason := disk_cache.cannot_check()) is not None:
        click.echo(f"no kernels are kept: {reason}")
        raise click.exceptions.Exit(0)
    folder = disk_cache.default_folder()
    reason = disk_cache.why_not(folder)
    if reason is not None:
        raise click.ClickException(reason)
    return DiskCache(folder)


def _count(kernels: int) -> str:
    return f"{kernels} kernel" + "s" * (kernels != 1)


def _size(size: int) -> str:
    return f"{size / 1024:.0f} KiB" if size < 1024**2 else f"{size / 1024**2:.1f} MiB"


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"
