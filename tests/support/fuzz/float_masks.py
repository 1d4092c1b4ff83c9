"""Random masks of floats as Python text: infinities, NaN, zeros of both signs, numbers at an overflow, in every float dtype.

Their operations are rounded correctly, so that every reader of a mask computes the same numbers. What torch itself computes differently in
vectorised code is left out: subnormal numbers, and divisors that are a zero of a minimum or maximum, whose sign varies.
"""

from __future__ import annotations

import math

import torch

from tests.support.fuzz.whole_numbers import LENGTH, Program, Writer

__all__ = ["float_masks"]

DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}
_PLAIN = (0.0, 1.0, 0.5, 1.5, 2.5, 3.0, 7.0, 20.0, 40.0, 63.0, 0.1, 100.0)
_SPECIAL = (math.inf, -math.inf, math.nan, -0.0, 1e30, -1e30, 3e38, 1e-30, 70000.0)


def float_masks(count: int, first: int = 0) -> list[Program]:
    return [_FloatWriter(seed).program() for seed in range(first, first + count)]


class _FloatWriter(Writer):
    def program(self) -> Program:
        self.may_read_positions = self.random.random() < 0.5
        self.dtype = self.random.choice(("float32", "float32", *DTYPES))
        return Program("mask", f"lambda b, h, q, k: {self.condition(2)}", self.captured, self.reads_positions, self.seed)

    def condition(self, depth: int) -> str:
        if self.random.random() < 0.25:
            return super().condition(depth)
        choice = self.random.random()
        if depth > 0 and choice < 0.35:
            return f"({self.condition(depth - 1)} {self.random.choice('&&||^')} {self.condition(depth - 1)})"
        if depth > 0 and choice < 0.42:
            return f"(~{self.condition(depth - 1)})"
        if choice < 0.55:
            return self.random.choice(("torch.isnan({})", "torch.isinf({})", "{}.to(torch.bool)")).format(self.real(2))
        compare = self.random.choice(("<", "<=", ">", ">=", "==", "!="))
        right = self.real(1) if self.random.random() < 0.5 else self.real_number()
        return f"({self.real(2)} {compare} {right})"

    def real(self, depth: int) -> str:
        """A tensor of ``self.dtype``."""
        choice = self.random.random()
        if depth == 0 or choice < 0.2:
            return self.real_leaf()
        if choice < 0.55:
            return self.real_binary(depth)
        if choice < 0.7:
            form = self.random.choice(("torch.minimum({}, {})", "torch.maximum({}, {})", f"torch.where({self.condition(0)}, {{}}, {{}})"))
            return form.format(self.real(depth - 1), self.real(depth - 1))
        if choice < 0.75:
            return f"{self.real(depth - 1)}.clamp(-2.0, 30.0)"
        names = ("neg", "abs", "floor", "ceil", "trunc", "round", "sign", "relu", "nan_to_num", "square")
        return f"torch.{self.random.choice(names)}({self.real(depth - 1)})"

    def real_binary(self, depth: int) -> str:
        """Two tensors, or a tensor and a number."""
        op, choice = self.random.choice("+-**/"), self.random.random()
        a = self.real_number() if choice < 0.15 else self.real(depth - 1)
        if choice > 0.65:
            b = self.real_number()
        elif op == "/":
            b = self.random.choice(("{}", "torch.neg({})")).format(self.real_leaf())
        else:
            b = self.real(depth - 1)
        return f"({a} {op} {b})"

    def real_leaf(self) -> str:
        if self.random.random() < 0.5:
            return self.real_read()
        return f"{self.distance(1)[0] if self.random.random() < 0.5 else self.whole(1)[0]}.to(torch.{self.dtype})"

    def real_read(self) -> str:
        """A table's entry; in some tables the special numbers lie in runs."""
        least, values = self.random.choice((1, 1, 4)), []
        while len(values) < LENGTH:
            values += [self.random.choice(self.random.choice((_PLAIN, _PLAIN, _SPECIAL)))] * least
        table = torch.tensor(values[:LENGTH], dtype=torch.float64).to(DTYPES[self.dtype])
        name = self.capture(torch.where(table.abs() < torch.finfo(table.dtype).tiny, table * 0, table))
        if self.may_read_positions and self.random.random() < 0.7:
            self.reads_positions = True
            return f"{name}[{self.random.choice('qk')}]"
        return f"{name}[{self.random.choice(('q % 64', 'k % 64', '(q + k) % 64', '(q ^ k) % 64', '(q * 7 - k) & 63'))}]"

    def real_number(self) -> str:
        """A literal or a captured number, within the dtype's range: beyond it torch's result depends on the tensor's shape."""
        value, info = self.random.choice(self.random.choice((_PLAIN, _PLAIN, _SPECIAL))), torch.finfo(DTYPES[self.dtype])
        if math.isfinite(value) and value != 0 and not info.tiny <= abs(value) <= info.max:
            value = 7.0
        return self.capture(value) if self.random.random() < 0.5 or not math.isfinite(value) else f"({value})"
