"""Size limits of the command line: refuses pictures, explanations and demos that would fill the memory or take hours."""

from __future__ import annotations

from collections.abc import Callable

import click

from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace

__all__ = ["BLOCK", "HEADS", "HEAD_DIM", "SEQLEN", "check_mask", "check_memory", "check_tiles"]

SEQLEN = click.IntRange(1, 2**22)
BLOCK = SEQLEN
HEADS = click.IntRange(1, 2**12)
HEAD_DIM = click.IntRange(1, 2**12)
_TILES = 2**24  # their lists take some hundred MiB
_PAIRS = 2**32  # evaluating a mask at so many takes minutes
_BYTES = 2**34


def check_tiles(seqlen: tuple[int, int], block: int) -> None:
    """Refuses a grid with more tiles than can be listed."""
    rows, columns = (ceil_div(n, block) for n in seqlen)
    if rows * columns > _TILES:
        raise click.BadParameter(
            f"{seqlen[0]} queries and {seqlen[1]} keys are {rows} x {columns} tiles of {block}; wanted at most {_TILES}: "
            f"take a larger --block, {least_block(seqlen)}, or fewer positions"
        )


def least_block(seqlen: tuple[int, int]) -> int:
    """The smallest power of two that gives few enough tiles."""
    block = 1
    while ceil_div(seqlen[0], block) * ceil_div(seqlen[1], block) > _TILES:
        block *= 2
    return block


def check_mask(mask: Callable, seqlen: tuple[int, int]) -> None:
    """Refuses a mask without row ranges over long sequences, because it may have to be evaluated at every pair."""
    if seqlen[0] * seqlen[1] > _PAIRS and row_ranges(trace(mask, "mask")) is None:
        raise click.BadParameter(
            f"{seqlen[0]} queries x {seqlen[1]} keys are too many for a mask that is not a few ranges of keys per row: it may be evaluated "
            f"at every pair; wanted at most {_PAIRS} pairs, such as --seqlen {2**16}"
        )


def check_memory(seqlen: int, heads: int, head_dim: int) -> None:
    """Refuses a demo whose dense bias (heads, seqlen, seqlen) or other tensors would not fit: the demo's peers allocate them."""
    needed = 4 * heads * seqlen * max(seqlen, 8 * head_dim)
    if needed > _BYTES:
        raise click.BadParameter(
            f"--seqlen {seqlen} --heads {heads} --head-dim {head_dim} needs {needed >> 30} GiB for torch's side of the comparison; "
            f"wanted at most {_BYTES >> 30} GiB: fewer positions or heads"
        )
