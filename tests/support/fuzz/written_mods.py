"""Random mods as Python source: masks of whole numbers, tables and floats, and score mods with gradients.

A ``Writer`` writes one mod from a seed. Its captured numbers and tables are drawn afterwards, for any sizes: calls of one mod with other
values and other lengths need no new kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = ["Sizes", "Writer"]

_INDICES = ("q", "k", "q", "k", "b", "h", "(q - k)", "(k - q)", "(q + k)")
_CONSTANTS = (0, 1, 2, 3, -1, -2, 5, 7, 16, 31, 64)
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=", ">=", "<=", "==")
_FAMILIAR = ("(q >= k)", "(q - k < 5)", "(k < 7)", "(q // 4 == k // 4)", "(q > k)", "(k >= q)")
_ACTIVATIONS = (
    "silu", "gelu", "softplus", "elu", "leaky_relu", "hardtanh", "logsigmoid", "mish", "relu6", "hardswish", "softsign", "selu", "celu",
)  # fmt: skip
_OF_VECTORS = (
    "({0} * {1}).sum(-1)", "torch.dot({0}, {1})", "({0} - {1}).pow(2).mean(-1)", "({0} - {1}).norm(dim=-1)", "({0} * {1}).amax(-1)",
    "torch.tanh({0} + {1}).sum(-1)", "({0} - {1}).abs().max(-1).values",
)  # fmt: skip


class Sizes(NamedTuple):
    """The sizes of a call: batch, query heads, queries, keys."""

    b: int
    h: int
    q: int
    k: int


class _Table(NamedTuple):
    """A captured tensor. shape: numbers, or names of ``Sizes``' fields (m: the greater of q and k)."""

    shape: tuple[int | str, ...]
    kind: str


class Writer:
    """One random mod. kind: "mask" or "score". depth: the greatest depth of its expression. has_floats: whether masks compute floats."""

    def __init__(self, random: Random, kind: str, depth: int, has_floats: bool = True) -> None:
        self.random, self.has_floats = random, has_floats
        self.numbers: list[tuple[int, ...]] = []  # what each captured number is drawn from
        self.tables: list[_Table] = []
        body = self._mask(depth) if kind == "mask" else self._score(depth)
        names = [f"n{i}" for i in range(len(self.numbers))] + [f"t{i}" for i in range(len(self.tables))]
        arguments = "b, h, q, k" if kind == "mask" else "s, b, h, q, k"
        self.source = f"def make({', '.join(names)}):\n    def mod({arguments}):\n        return {body}\n    return mod\n"

    def make(self) -> Callable[..., Callable]:
        """A function of the captured values that returns the mod."""
        scope: dict[str, Any] = {"torch": torch}
        exec(compile(self.source, "<written>", "exec"), scope)
        return scope["make"]

    def values(self, random: Random, sizes: Sizes) -> list[int | Tensor]:
        """Captured values for a call of these sizes, on the CPU: numbers, then tensors, float64 ones of score mods with gradients."""
        lengths = {**sizes._asdict(), "m": max(sizes.q, sizes.k)}
        shapes = (tuple(lengths[n] if isinstance(n, str) else n for n in t.shape) for t in self.tables)
        tensors = [_stored(random, _drawn(random, t.kind, shape)) for t, shape in zip(self.tables, shapes, strict=True)]
        for table, tensor in zip(self.tables, tensors, strict=True):
            tensor.requires_grad_(table.kind == "learned")
        return [*(random.choice(n) for n in self.numbers), *tensors]

    # ---- captures

    def _number(self, low: int = -3, high: int = 9) -> str:
        if self.numbers and self.random.random() < 0.5:
            return f"n{self.random.randrange(len(self.numbers))}"
        self.numbers.append(tuple(range(low, high + 1)))
        return f"n{len(self.numbers) - 1}"

    def _divisor(self) -> str:
        if self.random.random() < 0.75:
            return str(self.random.choice((1, 2, 3, 4, 5, 7, 8, 16, -2, -3, 13)))
        self.numbers.append((1, 2, 3, 4, 6, 8, 11, -1, -2, -5))
        return f"n{len(self.numbers) - 1}"

    def _table(self, kind: str, *shape: int | str) -> str:
        self.tables.append(_Table(shape, kind))
        return f"t{len(self.tables) - 1}"

    def _index(self, size: int, depth: int) -> str:
        """An expression between -size and size - 1."""
        at = self._whole(depth - 1)
        forms = (
            f"({at}) % {size}",
            f"torch.clamp({at}, 0, {size - 1})",
            f"torch.clamp({at}, {-size}, {size - 1})",
            f"torch.abs({at}) % {size}",
        )
        return self.random.choices(forms, (60, 25, 10, 5))[0]

    def _load(self, depth: int, kind: str) -> str:
        choose, draw = self.random.choice, self.random.random()
        if draw < 0.45:
            axis = choose("qk")
            return f"{self._table(kind, axis)}[{axis}]"
        if draw < 0.6:
            axes = choose(("bq", "bk", "hq", "hk", "bh", "m"))
            return f"{self._table(kind, *axes)}[{choose('qk') if axes == 'm' else ', '.join(axes)}]"
        if draw < 0.68:
            return f"{self._table(kind, 'q', 'k')}[q, k]"
        shape = [choose((1, 2, 3, 5, 8, 17)) for _ in range(1 if draw < 0.85 else 2)]
        at = [self._index(n, depth) for n in shape]
        return f"{self._table(kind, *shape)}[{('][' if draw > 0.95 else ', ').join(at)}]"

    # ---- whole numbers, floats and bools

    def _whole(self, depth: int) -> str:
        random, choose = self.random, self.random.choice
        if depth <= 0 or random.random() < 0.15:
            draw = random.random()
            if draw < 0.65:
                return choose(_INDICES)
            return f"(q * 0 + {self._number()})" if draw < 0.8 else f"(k * 0 + {choose((0, 1, 2, -1, 5, 7, 100, -100))})"

        def one() -> str:
            return self._whole(depth - 1)

        def other() -> str:
            return choose((one, lambda: str(choose(_CONSTANTS)), self._number))()

        cast = choose(("int64", "int32", "int16", "int8", "uint8"))
        low = choose((-5, 0, 2))
        forms: dict[Callable[[], str], int] = {
            lambda: f"({one()} {choose('+-')} {other()})": 17,
            lambda: f"({one()} * {other()})": 8,
            lambda: f"({one()} // {self._divisor()})": 12,
            lambda: f"({one()} % {self._divisor()})": 10,
            lambda: f"torch.{choose(('remainder', 'fmod'))}({one()}, {self._divisor()})": 4,
            lambda: f"torch.div({one()}, {self._divisor()}, rounding_mode={choose(('trunc', 'floor'))!r})": 3,
            lambda: f"({one()} {choose(('<<', '>>'))} {choose((0, 1, 2, 3, 5))})": 4,
            lambda: f"({one()} {choose('&|^')} {choose((one(), str(choose((1, 3, 7, 15, -1, -4, 6)))))})": 6,
            lambda: f"({choose('-~')}{one()})": 2,
            lambda: f"torch.{choose(('minimum', 'maximum'))}({one()}, {one()})": 6,
            lambda: f"torch.clamp({one()}, {low}, {low + choose((0, 1, 7, 20))})": 3,
            lambda: f"torch.{choose(('abs', 'sign'))}({one()})": 3,
            lambda: f"torch.where({self._mask(depth - 1)}, {one()}, {one()})": 7,
            lambda: f"({self._mask(depth - 1)}).{choose(('int', 'long'))}()": 2,
            lambda: self._load(depth, choose(("ids", "small", "sorted", "places"))): 10,
            lambda: f"({one()}).to(torch.{cast}).to(torch.int64)": 3,
        }
        return random.choices(list(forms), list(forms.values()))[0]()

    def _float(self, depth: int) -> str:
        random, choose = self.random, self.random.choice

        def one() -> str:
            return self._float(depth - 1) if depth > 0 else f"({self._whole(0)}).float()"

        if depth <= 0 or random.random() < 0.3:
            return f"({self._whole(depth - 1)}).{choose(('float()', 'double()', 'to(torch.float32)', 'half()', 'bfloat16()'))}"
        forms: dict[Callable[[], str], int] = {
            lambda: f"({one()} {choose('+-*')} {choose(('0.5', '0.1', '3.0', '-1.25', one()))})": 4,
            lambda: f"torch.{choose(('floor', 'ceil', 'trunc', 'round'))}({one()})": 2,
            lambda: f"torch.sqrt(torch.abs({one()}))": 1,
            lambda: self._load(depth, "float"): 2,
            lambda: f"torch.where({self._mask(depth - 1)}, {one()}, {one()})": 2,
        }
        return random.choices(list(forms), list(forms.values()))[0]()

    def _mask(self, depth: int) -> str:
        random, choose = self.random, self.random.choice

        def one() -> str:
            return self._mask(depth - 1)

        if depth <= 0 or random.random() < 0.42:
            if random.random() < 0.3:
                return choose((*_FAMILIAR, f"(q - k <= {self._number(0, 20)})"))
            right = choose((lambda: self._whole(depth - 1), lambda: str(choose((0, 1, 3, 8))), self._number))()
            return f"({self._whole(depth - 1)} {choose(_COMPARISONS)} {right})"
        floats = f"({self._float(depth - 1)} {choose(('<', '<=', '>', '>='))} {choose((self._float(depth - 1), '0.5', '2.0', '3.3'))})"
        forms: dict[Callable[[], str], int] = {
            self._documents: 8,
            lambda: f"({one()} {choose('&|&|&|^')} {one()})": 25,
            lambda: f"(~{one()})": 6,
            lambda: self._load(depth, "flags"): 5,
            lambda: f"torch.where({one()}, {one()}, {one()})": 4,
            lambda: f"torch.logical_{choose(('and', 'or', 'xor'))}({one()}, {one()})": 3,
            lambda: f"({self._whole(depth - 1)}).bool()": 2,
            lambda: floats if self.has_floats else f"({one()} == {one()})": 5,
        }
        return random.choices(list(forms), list(forms.values()))[0]()

    def _documents(self) -> str:
        kind, by_entry = self.random.choice(("sorted", "ids", "small")), self.random.random() < 0.3
        ids = self._table(kind, *(("b", "m") if by_entry else ("m",)))
        return f"({ids}[b, q] == {ids}[b, k])" if by_entry else f"({ids}[q] == {ids}[k])"

    # ---- scores

    def _score(self, depth: int) -> str:
        random, choose = self.random, self.random.choice
        if depth <= 0:
            return choose(("s", "s", "s", "(s + 0.25)", "(-s)", "(s * 0.5)"))

        def one() -> str:
            return self._score(depth - 1)

        def learned() -> str:
            return self._load(depth, "learned")

        def either() -> str:
            return choose((one, learned))()

        forms: dict[Callable[[], str], int] = {
            lambda: f"({one()} {choose('+-*')} {choose((one, learned, lambda: '0.3'))()})": 20,
            lambda: f"torch.where({self._mask(depth - 1)}, {one()}, {choose((one, learned, lambda: '-1.5'))()})": 13,
            lambda: f"torch.{choose(('tanh', 'sigmoid', 'sin', 'cos', 'abs', 'relu', 'erf', 'atan', 'exp2'))}({one()} * 0.3)": 10,
            lambda: f"torch.{choose(('maximum', 'minimum'))}({one()}, {either()})": 7,
            lambda: f"torch.clamp({one()}, {choose(('-0.5, 0.5', '-1, 1', 'min=-0.25', 'max=0.75'))})": 6,
            lambda: f"({one()} / {choose(('3.0', '7', f'(1.0 + torch.abs({one()}))'))})": 6,
            lambda: f"({one()} + ({self._whole(depth - 1)}) * {choose(('0.01', '0.003', '-0.002'))})": 8,
            lambda: f"torch.nn.functional.{choose(_ACTIVATIONS)}({one()})": 6,
            lambda: f"torch.log1p(torch.abs({one()}))": 4,
            lambda: f"torch.{choose(('logaddexp', 'hypot', 'fmax', 'fmin'))}({one()}, {either()})": 4,
            lambda: f"torch.lerp({one()}, {one()}, {choose(('0.3', '0.7', f'torch.sigmoid({one()})'))})": 4,
            lambda: f"({one()}).masked_fill({self._mask(depth - 1)}, {choose(('-2.0', '0.0'))})": 4,
            lambda: f"({one()} + {self._of_vectors()} * 0.3)": 4,
            lambda: f"({one()} * {learned()})": 4,
        }
        return random.choices(list(forms), list(forms.values()))[0]()

    def _of_vectors(self) -> str:
        width, axes = self.random.choice((1, 2, 3, 4)), [self.random.choice("qkhb") for _ in range(2)]
        return self.random.choice(_OF_VECTORS).format(*(f"{self._table('learned', axis, width)}[{axis}]" for axis in axes))


def _drawn(random: Random, kind: str, shape: tuple[int, ...]) -> Tensor:
    n = math.prod(shape)
    whole = random.choice((torch.int64, torch.int32))
    if kind in ("ids", "small"):
        low, high = (-1, 3) if kind == "ids" else (0, 40)
        return torch.tensor([random.randint(low, high) for _ in range(n)], dtype=whole, device="cpu").reshape(shape)
    if kind == "sorted":
        steps = torch.tensor([random.random() < 0.2 for _ in range(n)], device="cpu").reshape(shape)
        return (steps.cumsum(-1) + random.randint(0, 2)).to(whole)
    if kind == "places":
        return torch.tensor([random.randrange(max(1, shape[-1])) for _ in range(n)], device="cpu").reshape(shape)
    if kind == "flags":
        share = random.choice((0.1, 0.5, 0.9))
        return torch.tensor([random.random() < share for _ in range(n)], dtype=torch.bool, device="cpu").reshape(shape)
    if kind == "float":
        dtype = random.choice((torch.float32, torch.float64))
        return torch.tensor([random.choice((0.0, 0.5, 1.0, -2.0, 3.3, math.inf)) for _ in range(n)], dtype=dtype, device="cpu").reshape(
            shape
        )
    return torch.tensor([random.gauss(0, 1) for _ in range(n)], dtype=torch.float64, device="cpu").reshape(shape)


def _stored(random: Random, tensor: Tensor) -> Tensor:
    """The tensor in plain storage or, sometimes, as a view with an offset and strides, or with its dimensions stored in reverse."""
    draw = random.random()
    if draw < 0.15:
        whole = tensor.new_zeros([2 * n + 1 for n in tensor.shape])
        view = whole[tuple(slice(1, 2 * n + 1, 2) for n in tensor.shape)]
        return view.copy_(tensor)
    return tensor.t().contiguous().t() if draw < 0.25 and tensor.ndim == 2 else tensor
