"""Machine code of NVIDIA's GPUs: the tools that print it, its instructions, and the blocks between which it jumps."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

__all__ = ["Block", "Instruction", "blocks", "following", "of_cubin"]

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*(.*?);")
_HIGH = re.compile(r"\s*/\* (0x[0-9a-f]{16}) \*/")  # the second half of an instruction, on a line of its own
_LABEL = re.compile(r"\s*(\.L_\w+):")
_SOURCE = re.compile(r'\s*//## File "(.*?)", line (\d+)')
_ENDS = ("BRA", "BRX", "JMP", "EXIT", "RET", "BREAK", "BSYNC")
_CONTROL = 41  # the first of the bits by which the compiler schedules an instruction: see ``Instruction``


class Instruction(NamedTuple):
    """control: by bits: cycles until the next instruction (4), whether another warp may come in between (1), the scoreboard of its result
    (3, ``NO_SCOREBOARD`` for none), that of its operands (3), those it waits for (6); 0 if the text has no encodings. source: (file, line),
    None if unknown."""

    address: int
    is_conditional: bool
    name: str
    operands: str
    control: int = 0
    source: tuple[str, int] | None = None

    @property
    def scoreboard(self) -> int:
        return self.control >> 5 & 7

    def waits_for(self, scoreboard: int) -> bool:
        return bool(self.control >> 11 + scoreboard & 1)


@dataclass
class Block:
    """Instructions in order. targets: labels. goes_on: whether the next block may follow."""

    instructions: list[Instruction] = field(default_factory=list)
    targets: list[str] = field(default_factory=list)
    goes_on: bool = True


def blocks(sass: str) -> tuple[list[Block], dict[str, int]]:
    """The blocks of a kernel, and the numbers of those that have labels.

    sass: nvdisasm's text of one kernel. With ``-hex`` it has encodings, with ``-g`` the lines of the source.
    """
    found, labels, source = [Block()], {}, None
    lines = iter(sass.splitlines())
    for line in lines:
        if match := _LABEL.match(line):
            labels[match[1]] = len(found)
            found.append(Block())
        elif match := _SOURCE.match(line):
            source = match[1], int(match[2])
        elif match := _INSTRUCTION.search(line):
            address, predicate, name, operands = match.groups()
            control = 0
            if "/* 0x" in line:
                high = _HIGH.match(next(lines))
                assert high is not None, f"an instruction without its second half: {line}"
                control = int(high[1], 16) >> _CONTROL
            found[-1].instructions.append(Instruction(int(address, 16), bool(predicate), name, operands.strip(), control, source))
            if name.startswith(_ENDS):
                found[-1].targets = re.findall(r"\.L_\w+", operands)
                found[-1].goes_on = bool(predicate) or name.startswith("BSYNC") or "P" in operands.partition("`")[0]
                found.append(Block())
    return found, labels


def following(found: list[Block], labels: dict[str, int], i: int) -> list[int]:
    """The numbers of the blocks that may follow block ``i``."""
    goes_on = found[i].goes_on and i + 1 < len(found)
    return [labels[name] for name in found[i].targets if name in labels] + [i + 1] * goes_on


def of_cubin(tool: str, cubin: bytes, *arguments: str) -> str:
    """What a tool of Triton's prints for a cubin."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([str(path), *arguments, file.name], capture_output=True, text=True, check=True).stdout
