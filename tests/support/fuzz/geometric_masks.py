"""Random geometric masks as Python text, most of which are, wholly or in part, words of bits along a tile.

Positions are compared, divided and reduced by literals and captured widths, as in masks of images, strides, blocks and windows.
"""

from __future__ import annotations

import random

import torch
from torch import Tensor

from tests.support.fuzz.whole_numbers import LENGTH, Program

__all__ = ["geometric_masks"]

_WIDTHS = (1, 2, 3, 7, 12, 21, 22, 31, 43, 50, 63, 64, 75, 100, 127, 128, 192, 256, 1000)
_NEAR = (-70, -9, -3, -1, 0, 1, 2, 5, 6, 12, 40, 63, 64, 128, 300)
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=")


def geometric_masks(count: int, first: int = 0) -> list[Program]:
    """Programs as of ``whole_numbers.programs``."""
    return [_Writer(seed).program() for seed in range(first, first + count)]


class _Writer:
    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(f"geometry {seed}")
        self.captured: dict[str, int | Tensor] = {}
        self.reads_positions = False

    def program(self) -> Program:
        text = f"lambda b, h, q, k: {self._condition(2)}"
        return Program("mask", text, self.captured, self.reads_positions, self.seed)

    def _condition(self, depth: int) -> str:
        if depth and self.random.random() < 0.75:
            parts = [self._condition(depth - 1) for _ in range(2)]
            kind = self.random.choice(("&", "&", "|", "^", "~", "where"))
            if kind == "where":
                return f"torch.where({self._condition(0)}, {parts[0]}, {parts[1]})"
            return f"~({parts[0]})" if kind == "~" else f"({parts[0]}) {kind} ({parts[1]})"
        return self.random.choice((self._apart, self._apart, self._compared, self._alone, self._read))()

    def _apart(self) -> str:
        """What of a row and of a key is made alike, compared."""
        make = self._made()
        difference = f"({make('q')} - {make('k')})"
        if self.random.random() < 0.6:
            difference += ".abs()"
        elif self.random.random() < 0.2:
            difference = f"torch.{self.random.choice(('maximum', 'minimum'))}({difference}, {self._made()('q')} - {self._made()('k')})"
        return f"{difference} {self.random.choice(_COMPARISONS)} {self._number()}"

    def _compared(self) -> str:
        return f"{self._made()('q')} {self.random.choice(_COMPARISONS)} {self._made()('k')} + {self._number()}"

    def _alone(self) -> str:
        return f"{self._made()(self.random.choice('qk'))} {self.random.choice(_COMPARISONS)} {self._number()}"

    def _read(self) -> str:
        if self.random.random() < 0.5:
            self.reads_positions = True
            return f"{self._table(LENGTH)}[{self.random.choice('qk')}]"
        width = self.random.choice((64, 128, 256))
        return f"{self._table(8)}[{self.random.choice('qk')} // {width} % 8]"

    def _made(self):  # type: ignore[no-untyped-def]
        kind, offset = (
            self.random.choice(("", "", "//", "%", "//", "%", "*", ">>", "&")),
            self.random.choice((0, 0, 0, 1, 3, 64, 128, 1000)),
        )
        number = {">>": str(self.random.choice((1, 3, 6, 7, 8))), "&": str(self.random.choice((1, 7, 63, 127, 255)))}.get(kind)
        number = number or ("2" if kind == "*" else self._width())
        sign = "-" if self.random.random() < 0.1 else ""

        def make(x: str) -> str:
            moved = f"({x} + {offset})" if offset else x
            return f"({sign}({moved} {kind} {number}))" if kind else f"({sign}{moved})"

        return make

    def _width(self) -> str:
        width = self.random.choice(_WIDTHS)
        return str(width) if self.random.random() < 0.5 else self._captured(width)

    def _number(self) -> str:
        number = self.random.choice(_NEAR)
        return f"({number})" if self.random.random() < 0.7 else self._captured(number)

    def _captured(self, number: int) -> str:
        name = f"n{len(self.captured)}"
        self.captured[name] = number
        return name

    def _table(self, size: int) -> str:
        name = f"t{len(self.captured)}"
        self.captured[name] = torch.tensor([self.random.random() < 0.5 for _ in range(size)])
        return name
