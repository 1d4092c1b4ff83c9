"""Uniform registers that a Hopper kernel reads before it writes them: errors of ptxas, whose results are anything.

Some versions lose the address of an operand of a matrix product (``backends.triton.wide_tiles.alike``). The check is a liveness analysis of
the disassembled machine code: what is live at a kernel's entry has no value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

__all__ = ["unwritten"]

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_LABEL = re.compile(r"\s*(\.L_\w+):")
_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "BREAK", "BSYNC")
_WRITERS = ("U", "R2UR", "S2UR", "CS2UR", "REDUX", "VOTEU")  # the first operand is what they write, if it is a uniform register


@dataclass
class _Block:
    """Instructions in order: their names and operands. targets: labels. goes_on: whether the next block may follow."""

    instructions: list[tuple[str, str]] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    goes_on: bool = True


def unwritten(sass: str) -> list[int]:
    """The numbers of the uniform registers of a kernel that are read on some path on which nothing was written to them.

    sass: nvdisasm's text of one kernel.
    """
    blocks, labels = _blocks(sass)
    live: list[set[int]] = [set() for _ in blocks]
    changed = True
    while changed:
        changed = False
        for i in reversed(range(len(blocks))):
            after = [labels[name] for name in blocks[i].targets if name in labels] + [i + 1] * (blocks[i].goes_on and i + 1 < len(blocks))
            now = set[int]().union(*(live[j] for j in after))
            for name, operands in reversed(blocks[i].instructions):
                written, read = _effects(name, operands)
                now = (now - written) | read
            changed |= now != live[i]
            live[i] = now
    return sorted(live[0])


def _blocks(sass: str) -> tuple[list[_Block], dict[str, int]]:
    blocks, labels = [_Block()], {}
    for line in sass.splitlines():
        if found := _LABEL.match(line):
            labels[found[1]] = len(blocks)
            blocks.append(_Block())
        elif found := _INSTRUCTION.search(line):
            predicate, name, operands = found.groups()
            blocks[-1].instructions.append((name, operands))
            if name.startswith(_ENDS):
                blocks[-1].targets = re.findall(r"\.L_\w+", operands)
                blocks[-1].goes_on = bool(predicate) or name.startswith("BSYNC") or "P" in operands.partition("`")[0]
                blocks.append(_Block())
    return blocks, labels


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
