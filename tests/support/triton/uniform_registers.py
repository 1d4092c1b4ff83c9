"""Uniform registers that a Hopper kernel reads before it writes them: errors of ptxas, whose results are anything.

Some versions lose the address of an operand of a matrix product (``backends.triton.wide_tiles.alike``). The check is a liveness analysis of
the disassembled machine code: what is live at a kernel's entry has no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tests.support.sass import blocks, following

__all__ = ["unwritten"]

_WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "REDUX", "VOTEU")  # the first operand is what they write, if it is a uniform register


def unwritten(sass: str) -> list[int]:
    """The numbers of the uniform registers of a kernel that are read on some path on which nothing was written to them.

    sass: nvdisasm's text of one kernel.
    """
    found, labels = blocks(sass)
    live: list[set[int]] = [set() for _ in found]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(found))):
            now = set[int]().union(*(live[j] for j in following(found, labels, i)))
            for instruction in reversed(found[i].instructions):
                written, read = _effects(instruction.name, instruction.operands)
                now = (now - written) | read
            changed |= now != live[i]
            live[i] = now
    return sorted(live[0])


def _effects(name: str, operands: str) -> tuple[set[int], set[int]]:
    """The uniform registers that an instruction writes and reads. A write under a predicate counts: so do reads under it."""
    written: set[int] = set()
    if name.startswith(_WRITERS) and (first := re.match(r"UR(\d+)\b", operands)):
        written = set(_group(first[1], 2 if ".64" in name or ".WIDE" in name else 1))
        operands = operands[first.end() :]
    if name.startswith("HGMMA"):
        return written, set(_of_product(operands))
    is_double = name.startswith("U") and ".64" in name and not name.startswith("ULDC")
    found = re.findall(r"(desc\[)?UR(\d+)\b", operands)
    return written, {n for is_descriptor, number in found for n in _group(number, 2 if is_descriptor or is_double else 1)}


def _of_product(operands: str) -> Iterator[int]:
    """Four registers hold the descriptors of A and B, the first two of which are not read where A is in registers."""
    for found in re.finditer(r"gdesc\[UR(\d+)\]", operands):
        group = _group(found[1], 4)
        yield from group if re.match(r"R\d+, gdesc", operands) else group[2:]


def _group(first: str, count: int) -> range:
    return range(int(first), int(first) + count)
