"""Functions of torch that a mod may call, with the magnitude of what they add up, and the comparison of their values with torch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Case(NamedTuple):
    """count: of arguments. terms: the size of the numbers that ``f`` adds up, whose rounding the sum inherits; None if it is one operation,
    or torch writes it in Python, so that the torch backend has torch's very bits."""

    f: Callable[..., Tensor]
    count: int = 1
    terms: Callable[..., Tensor] | None = None


def _itself(x: Tensor, *_: Tensor) -> Tensor:
    return x * 0


_OPERATIONS = [
    "neg", "abs", "exp", "exp2", "log", "log2", "log1p", "expm1", "sqrt", "rsqrt", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh",
    "sigmoid", "erf", "erfinv", "floor", "ceil", "trunc", "round", "sign", "reciprocal", "square", "positive", "relu", "frac", "logit",
    "nan_to_num",
]  # fmt: skip
_PAIRS = [
    "add", "sub", "mul", "div", "floor_divide", "remainder", "fmod", "pow", "atan2", "hypot", "minimum", "maximum", "fmin", "fmax",
    "heaviside", "rsub", "true_divide",
]  # fmt: skip

CASES: dict[str, Case] = {
    **{name: Case(getattr(torch, name)) for name in _OPERATIONS},
    **{name: Case(getattr(torch, name), 2) for name in _PAIRS},
    "relu6": Case(F.relu6),
    "hardtanh": Case(lambda x: F.hardtanh(x, -0.3, 1.7)),
    "leaky_relu": Case(lambda x: F.leaky_relu(x, 0.3)),
    "softsign": Case(F.softsign),
    "logit with eps": Case(lambda x: torch.logit(x, 1e-3)),
    "round to 2 decimals": Case(lambda x: torch.round(x, decimals=2)),
    "x + 0.3": Case(lambda x: x + 0.3),
    "0.3 - x": Case(lambda x: 0.3 - x),
    "x * 0.3": Case(lambda x: x * 0.3),
    "x / 0.3": Case(lambda x: x / 0.3),
    "0.3 / x": Case(lambda x: 0.3 / x),
    "x // 0.3": Case(lambda x: x // 0.3),
    "0.3 // x": Case(lambda x: 0.3 // x),
    "0.3 % x": Case(lambda x: 0.3 % x),
    "fmod of a number": Case(lambda x: torch.fmod(x, 0.3)),
    "x ** 0.3": Case(lambda x: abs(x) ** 0.3),
    "x > 0.3": Case(lambda x: (x > 0.3).to(x.dtype)),
    "x % 0.3": Case(lambda x: x % 0.3),
    "x ** 3": Case(lambda x: x**3),
    "x ** -0.5": Case(lambda x: abs(x) ** -0.5),
    "2 ** x": Case(lambda x: 2**x),
    "clamp": Case(lambda x: x.clamp(-0.3, 0.7)),
    "where": Case(lambda x: torch.where(x > 0, x, 0.3)),
    "div, floor": Case(lambda x, y: torch.div(x, y, rounding_mode="floor"), 2),
    "div, trunc": Case(lambda x, y: torch.div(x, y, rounding_mode="trunc"), 2),
    "div by a number, trunc": Case(lambda x: torch.div(x, 0.3, rounding_mode="trunc")),
    "silu": Case(F.silu, terms=_itself),
    "gelu": Case(F.gelu, terms=abs),
    "gelu, tanh": Case(lambda x: F.gelu(x, approximate="tanh"), terms=abs),
    "softplus": Case(F.softplus, terms=_itself),
    "softplus with beta": Case(lambda x: F.softplus(x, 0.7, 5.0), terms=_itself),
    "log_sigmoid": Case(F.logsigmoid, terms=_itself),
    "mish": Case(F.mish, terms=_itself),
    "elu": Case(lambda x: F.elu(x, alpha=0.7), terms=_itself),
    "selu": Case(F.selu, terms=_itself),
    "celu": Case(lambda x: F.celu(x, 0.7), terms=_itself),
    "hardsigmoid": Case(F.hardsigmoid, terms=_itself),
    "hardswish": Case(F.hardswish, terms=_itself),
    "xlogy": Case(lambda x, y: torch.xlogy(x, abs(y)), 2, _itself),
    "logaddexp": Case(torch.logaddexp, 2, lambda x, y: 1 + abs(x) + abs(y)),
    "logaddexp2": Case(torch.logaddexp2, 2, lambda x, y: 1 + abs(x) + abs(y)),
    "add with alpha": Case(lambda x, y: torch.add(x, y, alpha=0.3), 2, lambda x, y: abs(x) + abs(y)),
    "sub with alpha": Case(lambda x, y: torch.sub(x, y, alpha=0.3), 2, lambda x, y: abs(x) + abs(y)),
    "rsub of a number": Case(lambda x: torch.rsub(x, 0.3, alpha=0.7), terms=lambda x: 1 + abs(x)),
    "lerp": Case(torch.lerp, 3, lambda x, y, w: abs(x) + abs(w * (y - x)) + abs((1 - w) * (y - x))),
    "lerp from the start": Case(lambda x, y: torch.lerp(x, y, 0.3), 2, lambda x, y: abs(x) + abs(y)),
    "lerp from the end": Case(lambda x, y: torch.lerp(x, y, 0.7), 2, lambda x, y: abs(x) + abs(y)),
    "addcmul": Case(lambda x, y, z: torch.addcmul(x, y, z, value=0.3), 3, lambda x, y, z: abs(x) + abs(y * z)),
    "addcdiv": Case(lambda x, y, z: torch.addcdiv(x, y, z, value=0.3), 3, lambda x, y, z: abs(x) + abs(y / z)),
}  # fmt: skip


def arguments(count: int, dtype: torch.dtype, size: int) -> Tensor:
    """Numbers of several magnitudes and special ones, (count, size)."""
    found = torch.randn(count, size, generator=torch.Generator().manual_seed(count), dtype=torch.float64)
    found *= torch.tensor([0.01, 1.0, 3.0, 20.0], dtype=torch.float64)[torch.arange(size) % 4]
    found[:, :12] = torch.tensor([0.0, -0.0, 1, -1, 0.5, -0.5, 3, -3, 6, 20, 2, -2], dtype=torch.float64)
    return found.to(dtype)


def wrong(ours: Tensor, theirs: Tensor, room: float, terms: Any = 0.0) -> Tensor:
    """Where ``ours``, in any dtype, is more than one unit in the last place of ``theirs`` away from it, and more than ``room`` float32 (or
    float64) roundings of the result and its terms."""
    info = torch.finfo(theirs.dtype)
    eps = torch.finfo(torch.promote_types(theirs.dtype, torch.float32)).eps
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    ours, theirs = ours.double(), theirs.double()
    unit = torch.exp2(torch.floor(torch.log2(theirs.abs().clamp(min=info.tiny)))) * info.eps
    return ~(same | ((ours - theirs).abs() <= torch.maximum(unit, room * eps * (theirs.abs() + terms))))


def corners(size: int) -> Tensor:
    """Float32 numbers where functions change their form or their results overflow, and of every magnitude; (size,)."""
    special = [0, torch.inf, torch.nan, 1e-45, 1e-39, 6e-8, 1.2e-7, 0.625, 1, 10, 17, 87, 88.7, 89, 89.4, 89.5, 103, 105, 3e38]
    heads = torch.tensor([*special, *(-float(x) for x in special), -0.99999994], device="cpu")
    bits = torch.randint(-(2**31), 2**31, (size // 4,), generator=torch.Generator().manual_seed(0), device="cpu").int()
    near, wide = torch.linspace(-1.2, 1.2, size // 4, device="cpu"), torch.linspace(-100, 100, size // 4, device="cpu")
    rest = torch.linspace(-5, 5, size - len(heads) - 3 * (size // 4), device="cpu")
    return torch.cat([heads, bits.view(torch.float32), near, wide, rest])


def steps_apart(ours: Tensor, theirs: Tensor) -> Tensor:
    """How many float32 numbers apart two are, infinities included; 0 for two NaN, many for one."""
    lines = []
    for x in (ours, theirs):
        bits = x.view(torch.int32).long()
        lines.append(torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits).where(~x.isnan(), 2**40))
    return (lines[0] - lines[1]).abs()
