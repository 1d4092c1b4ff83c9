"""Random integer mods as Python text: casts of every width, shifts, bits, huge literals and captures, division of negatives.

A program is its text and its captured values, so a failure prints all of it. ``called`` runs the user's own function on torch's tensors,
which gives the reference.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

LENGTH = 64  # of tables, and of what is asked of programs that read them at a position
FRESH = int(os.environ.get("ANYATTN_FUZZ") or os.environ.get("ANYATTN_FUZZ_EXAMPLES") or 0)
FIRST_SEED = int(os.environ.get("ANYATTN_FUZZ_SEED") or (random.SystemRandom().randrange(10**6) if FRESH else 0))

DTYPES = {"int64": torch.int64, "int32": torch.int32, "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}
_SMALL = (0, 1, 2, 3, 5, 7, 8, 12, 31, 40, 63, 64, 100)
_EDGES = tuple(2**n + d for n in (7, 8, 15, 16, 31, 32, 53, 62) for d in (-1, 0, 1))
_HUGE = (2**63 - 1, 2**63 - 10, -(2**63), -(2**63) + 9, 0x9E3779B97F4A7C15, 6364136223846793005, 0xDEADBEEF, 1103515245, 2654435761)
_WIDTHS = {"int64": 64, "int32": 32, "int16": 16, "int8": 8, "uint8": 8}


class Program(NamedTuple):
    """kind: "mask" or "score". reads_positions: it reads tables at q or k themselves, which then stay below ``LENGTH``."""

    kind: str
    text: str
    captured: dict[str, int | Tensor]
    reads_positions: bool
    seed: int

    def function(self) -> Callable:
        """A function of its own with the captures as its globals."""
        names = {"torch": torch, **self.captured}
        return eval(self.text, names)

    def __str__(self) -> str:
        shown = {n: f"torch.tensor({x.tolist()}, dtype={x.dtype})" if isinstance(x, Tensor) else x for n, x in self.captured.items()}
        return f"program {self.seed}:\n    {self.text}\n" + "".join(f"    {n} = {x}\n" for n, x in shown.items())


def program(seed: int) -> Program:
    return Writer(seed).program()


def programs(count: int, first: int = 0) -> list[Program]:
    return [program(seed) for seed in range(first, first + count)]


def called(made: Program, b: Tensor, h: Tensor, q: Tensor, kv: Tensor, score: Tensor | None = None) -> Tensor:
    """What torch makes of the user's own function on int64 tensors; raises what torch raises."""
    leaves = (b, h, q, kv) if score is None else (score, b, h, q, kv)
    value = made.function()(*leaves)
    return torch.broadcast_to(torch.as_tensor(value), torch.broadcast_shapes(b.shape, h.shape, q.shape, kv.shape))


class Writer:
    """Writes one program; every choice follows from the seed."""

    def __init__(self, seed: int) -> None:
        self.seed, self.random = seed, random.Random(seed)
        self.captured: dict[str, int | Tensor] = {}
        self.reads_positions = False

    def program(self) -> Program:
        kind = "mask" if self.random.random() < 0.85 else "score"
        may_read = self.random.random() < 0.5
        self.may_read_positions = may_read
        if kind == "score":
            value = f"({self.whole(3)[0]} & 255)"
            text = f"lambda s, b, h, q, k: s + {value}.to(torch.float32) * 0.25"
        else:
            text = f"lambda b, h, q, k: {self.condition(2)}"
        return Program(kind, text, self.captured, self.reads_positions, self.seed)

    # -- leaves
    def number(self, largest: int = 2**63) -> str:
        """A literal or a captured number of at most this size."""
        value = self.random.choice(self.random.choice((_SMALL, _SMALL, _EDGES, _HUGE)))
        value = -value if self.random.random() < 0.3 and value <= 2**63 else value
        if abs(value) > largest:
            value = self.random.choice(_SMALL) % (largest + 1)
        return self.capture(value) if self.random.random() < 0.4 else f"({value})"

    def capture(self, value: int | Tensor) -> str:
        name = f"{'t' if isinstance(value, Tensor) else 'n'}{len(self.captured)}"
        self.captured[name] = value
        return name

    def table(self) -> tuple[str, str]:
        dtype = self.random.choice(list(DTYPES))
        info = torch.iinfo(DTYPES[dtype])
        most = self.random.choice((6, 100, info.max))
        values = [self.random.randint(max(info.min, -most), min(most, info.max)) for _ in range(LENGTH)]
        if self.random.random() < 0.3:  # sentinels
            step = self.random.randint(2, 9)
            values[::step] = [self.random.choice((info.max, info.min, info.max - 1)) for _ in values[::step]]
        if self.random.random() < 0.4:
            values.sort()
        name = self.capture(torch.tensor(values, dtype=DTYPES[dtype]))
        return name, dtype

    def read(self) -> tuple[str, str]:
        name, dtype = self.table()
        if self.may_read_positions and self.random.random() < 0.7:
            self.reads_positions = True
            return f"{name}[{self.random.choice('qkkb')}]", dtype
        return f"{name}[{self.random.choice(('b', 'h', 'q % 64', 'k % 64', '(q + k) % 64', '(q * 7 - k) & 63'))}]", dtype

    # -- whole numbers: (text, dtype)
    def whole(self, depth: int) -> tuple[str, str]:
        choice = self.random.random()
        if depth == 0 or choice < 0.12:
            return self.read() if self.random.random() < 0.25 else (self.random.choice("qqkkkbh"), "int64")
        if choice < 0.2:
            return self.distance(depth)
        rest = (self.shift, self.divided, self.unary, self.chosen)
        return self.random.choice((self.binary, self.binary, self.binary, self.cast, self.cast, *rest))(depth)

    def distance(self, depth: int) -> tuple[str, str]:
        """What row ranges are derived from."""
        text = self.random.choice(("(q - k)", "(k - q)", "abs(q - k)", "(k // 3)", "(2 * k - q)", "(q + k)", "(k - q // 2)", "k"))
        return (f"({text} {self.random.choice('+-')} {self.number()})" if self.random.random() < 0.5 else text), "int64"

    def binary(self, depth: int) -> tuple[str, str]:
        (a, dtype), op = self.whole(depth - 1), self.random.choice(("+", "-", "*", "*", "&", "|", "^"))
        if self.random.random() < 0.5:
            n = self.weak()
            return (f"({a} {op} {n})" if self.random.random() < 0.7 else f"({n} {op} {a})"), dtype
        b, other = self.whole(depth - 1)
        return f"({a} {op} {b})", _promoted(dtype, other)

    def weak(self) -> str:
        """A number, or arithmetic among numbers."""
        if self.random.random() < 0.8:
            return self.number()
        return f"({self.number()} {self.random.choice('+-*')} {self.number()})"

    def cast(self, depth: int) -> tuple[str, str]:
        (a, _), dtype = self.whole(depth - 1), self.random.choice(list(DTYPES))
        if self.random.random() < 0.1:
            return f"{self.condition(0)}.to(torch.{dtype})", dtype
        if self.random.random() < 0.1:  # which torch casts to and from, and hardly more
            return f"{a}.to(torch.{self.random.choice(('uint16', 'uint32'))}).to(torch.{dtype})", dtype
        return f"{a}.to(torch.{dtype})", dtype

    def shift(self, depth: int) -> tuple[str, str]:
        a, dtype = self.whole(depth - 1)
        op = self.random.choice(("<<", ">>"))
        if self.random.random() < 0.7:
            return f"({a} {op} {self.random.choice((0, 1, 3, 4, 7, 8, 15, 31, 32, 40, 63, 64, 70))})", dtype
        return f"({a} {op} ({self.whole(0)[0]} % 70))", "int64"

    def divided(self, depth: int) -> tuple[str, str]:
        a, dtype = self.whole(depth - 1)
        by = self.random.choice((2, 3, 7, 10, 64, 100, -2, -3, -7, -100))  # not -1, for the least number over -1 ends a process
        by = abs(by) if dtype == "uint8" else by
        plain = self.random.random() < 0.7
        form = self.random.choice(
            ("({} // {})", "({} % {})") if plain else ("torch.fmod({}, {})", "torch.div({}, {}, rounding_mode='trunc')")
        )
        if self.random.random() < 0.2 and dtype == "int64":
            return form.format(a, f"(({self.whole(0)[0]}.to(torch.int64) & 15) + 2)"), dtype
        return form.format(a, self.capture(by) if self.random.random() < 0.3 else f"({by})"), dtype

    def unary(self, depth: int) -> tuple[str, str]:
        a, dtype = self.whole(depth - 1)
        return self.random.choice(("(-{})", "(~{})", "abs({})", "torch.sign({})", "({} ** 2)", "({} ** 3)")).format(a), dtype

    def chosen(self, depth: int) -> tuple[str, str]:
        (a, one), (b, other) = self.whole(depth - 1), self.whole(depth - 1)
        dtype = _promoted(one, other)
        forms = ("torch.where({c}, {a}, {b})", "torch.minimum({a}, {b})", "torch.maximum({a}, {b})", "{a}.clamp({lo}, {hi})")
        form = self.random.choice(forms)
        lo, hi = sorted(self.random.sample((0, 1, 5, 60, 100), 2))
        return form.format(c=self.condition(0), a=a, b=b, lo=lo, hi=hi), one if "clamp" in form else dtype

    # -- conditions
    def condition(self, depth: int) -> str:
        choice = self.random.random()
        if depth > 0 and choice < 0.35:
            op = self.random.choice("&&||^")
            return f"({self.condition(depth - 1)} {op} {self.condition(depth - 1)})"
        if depth > 0 and choice < 0.42:
            return f"(~{self.condition(depth - 1)})"
        compare = self.random.choice(("<", "<=", ">", ">=", "<", "<=", ">", ">=", "==", "!="))
        a, _ = self.distance(1) if choice > 0.75 else self.whole(depth + 1)
        if choice < 0.5:
            return f"(({a} & {self.random.choice((1, 2, 3, 7, 64, 2**31, 2**40))}) {self.random.choice(('==', '!='))} 0)"
        if choice < 0.54:
            return f"{a}.to(torch.bool)"
        if choice < 0.6:
            real = self.random.choice((0.0, -3.5, 40.0, 1e6, 4e9))
            return f"({a}.to(torch.float32) {self.random.choice(('', '* 0.5', '* 0.5 + 3.0'))} {compare} {real})"
        right = self.random.random()
        b = self.weak() if right < 0.5 else self.read()[0] if right < 0.7 else self.whole(depth)[0]
        return f"({a} {compare} {b})"


def _promoted(one: str, other: str) -> str:
    return str(torch.promote_types(DTYPES[one], DTYPES[other])).removeprefix("torch.")
