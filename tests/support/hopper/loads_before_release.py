"""Loads from shared memory that a Hopper kernel may execute after it has released the memory that they read.

A warp that arrives at an mbarrier does not wait for its loads: while other warps' products keep shared memory busy, a load may come after
the copy that the arrival allows. What the load reads must be used before the arrival, or a fence must stand between. The check is a data
flow analysis of the disassembled machine code: an instruction that uses a load's result waits for the load's scoreboard. A load whose
result nothing reads after the arrival is no matter.

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
_WIDE = ("LD", "HGMMA", "IMAD.WIDE", "CS2R")  # instructions whose first operand has ``_width`` registers


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
    pairs = sorted((load, arrival) for load, arrival in late if not _is_ordinary(load) and _is_used_after(found, labels, arrival, load))
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


def _is_used_after(found: list[Block], labels: dict[str, int], arrival: Instruction, load: Instruction) -> bool:
    """Whether some path from the arrival on reads what was loaded. K held in registers is not, if no row tile sees the keys."""
    before: list[frozenset[int]] = [frozenset()] * len(found)
    left = [
        (i, block.instructions.index(arrival) + 1, _registers(load)[0]) for i, block in enumerate(found) if arrival in block.instructions
    ]
    while left:
        i, first, loaded = left.pop()
        for x in found[i].instructions[first:]:
            written, read = _registers(x)
            if loaded & read:
                return True
            loaded = loaded if x.is_conditional else loaded - written
        for j in following(found, labels, i):
            if not loaded <= before[j]:
                before[j] |= loaded
                left.append((j, 0, before[j]))
    return False


def _registers(x: Instruction) -> tuple[frozenset[int], frozenset[int]]:
    """The numbers of the registers that an instruction writes, or fewer, and of those that it reads, or more, conditions aside."""
    written, read = set[int](), set[int]()
    for place, operand in enumerate(x.operands.split(", ")):
        for number, is_address in re.findall(r"\bR(\d+)(\.64)?", operand):
            if place == 0 and operand[0] == "R":
                written.update(range(int(number), int(number) + (_width(x.name, 0) if x.name.startswith(_WIDE) else 1)))
            else:
                read.update(range(int(number), int(number) + (2 if is_address else _width(x.name, place))))
    return frozenset(written), frozenset(read)


def _width(name: str, place: int) -> int:
    """The registers of the operand at ``place``, or more."""
    if product := re.match(r"HGMMA\.64x(\d+)x", name):
        return 4 if place == 1 else int(product[1]) // 2  # A is 64 x 16 numbers of 16 bits
    return 4 if re.search(r"128|x4|M88\.4", name) else 2 if re.search(r"64|WIDE|x2|^D|CS2R$", name) else 1


def _is_ordinary(load: Instruction) -> bool:
    return load.source is not None and _ORDINARY.search(linecache.getline(*load.source)) is not None
