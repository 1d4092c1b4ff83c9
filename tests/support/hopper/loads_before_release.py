"""Loads from shared memory that a Hopper kernel may execute after it has released the memory that they read.

A warp that arrives at an mbarrier does not wait for its loads: while other warps' products keep shared memory busy, a load may come after
the copy that the arrival allows. What the load reads must be used before the arrival, or a fence must stand between. The check is a data
flow analysis of the disassembled machine code: an instruction that uses a load's result waits for the load's scoreboard.

Named barriers are no part of it, nor is memory that threads write by ordinary stores (``_ORDINARY``): a store that follows an arrival
is ordered after what preceded it. Copies by TMA and bulk copies go another way to shared memory, past that order.
"""

from __future__ import annotations

import linecache
import re
from typing import Any, NamedTuple

from tests.support.sass import Block, Instruction, blocks, following

__all__ = ["Late", "late_loads"]

# Source lines that load what threads store: what the loading warp posts on the board, which all roles call so.
_ORDINARY = re.compile(r"\bboard\[")
_NO_SCOREBOARD = 7


class Late(NamedTuple):
    """A load that may be executed after an arrival that follows it. Both as (file, line), or the address where that is unknown."""

    load: Any
    arrival: Any

    def __str__(self) -> str:
        load, arrival = (f"{x[0]}:{x[1]}" if isinstance(x, tuple) else f"/*{x:04x}*/" for x in self)
        return f"{arrival} releases what {load} may not have loaded yet: use it before, or wait for it (``WideGradient.read``)"


def late_loads(sass: str) -> list[Late]:
    """The loads from shared memory from which some path leads to an arrival at an mbarrier without a wait for them.

    sass: nvdisasm's text of one kernel, with encodings (``-hex``) and the lines of the source (``-g``).
    """
    found, labels = blocks(sass)
    before: list[frozenset[tuple[int, Instruction]]] = [frozenset()] * len(found)
    late, left = set(), list(range(len(found)))
    while left:
        i = left.pop()
        after, of_block = _through(found[i], before[i])
        late |= of_block
        for j in following(found, labels, i):
            if not after <= before[j]:
                before[j] |= after
                left.append(j)
    pairs = sorted((load, arrival) for load, arrival in late if not _is_ordinary(load))
    return list(dict.fromkeys(Late(*(x.source or x.address for x in pair)) for pair in pairs))


def _through(
    block: Block, before: frozenset[tuple[int, Instruction]]
) -> tuple[frozenset[tuple[int, Instruction]], set[tuple[Instruction, Instruction]]]:
    """(what is under way at a block's end, the (load, arrival) pairs in it). before: the loads under way at its begin, with the
    scoreboards by which their ends are known."""
    under_way, late = set(before), set()
    for x in block.instructions:
        under_way = {(board, load) for board, load in under_way if board == _NO_SCOREBOARD or not x.waits_for(board)}
        if x.name.startswith("SYNCS.ARRIVE"):
            late |= {(load, x) for _, load in under_way}
        elif x.name.startswith("LDS"):  # LDSM too
            if x.scoreboard != _NO_SCOREBOARD and not x.is_conditional:  # loads end in order
                under_way = {(x.scoreboard if board == _NO_SCOREBOARD else board, load) for board, load in under_way}
            under_way.add((x.scoreboard, x))
        elif x.name.startswith("MEMBAR") and not x.is_conditional:
            under_way = set()
        elif x.name.startswith("DEPBAR") and not x.is_conditional and (waited := re.match(r"SB(\d), 0x0\b", x.operands)):
            under_way = {(board, load) for board, load in under_way if board != int(waited[1])}
    return frozenset(under_way), late


def _is_ordinary(load: Instruction) -> bool:
    return load.source is not None and _ORDINARY.search(linecache.getline(*load.source)) is not None
