"""torch's clamp inside a mod, with the derivatives and the integer bounds of the installed torch.

Up to torch 2.13 a value equal to its bound gets the whole derivative; from 2.14 on it gets none of it where the bound is a number, and
half where it is a tensor. Up to torch 2.14 a bound that an integer dtype does not hold is refused; from 2.15 on it is no bound where all
numbers of the dtype are within it.
"""

from __future__ import annotations

from typing import Any

import torch

from anyattn.mods.ir.expr import category, is_weak, result_dtype
from anyattn.mods.tracing.arguments import fitting, misfit, refuse_bare
from anyattn.mods.tracing.diagnostics import mod_error
from anyattn.mods.tracing.symbolic import FUNCTIONS, Value, binary, builder_in
from anyattn.mods.tracing.weak_captures import HAS_FAR_BOUNDS

__all__ = ["EXTREME_TIE", "clamp"]

_SHARES_TIES = torch.__version__ >= "2.14"
EXTREME_TIE = None if _SHARES_TIES else "first"  # of fmin and fmax


def clamp(input: Any, min: Any = None, max: Any = None) -> Value:
    if min is None and max is None:
        raise mod_error("clamp is given neither min nor max", "give one, as in torch.clamp(x, min=0)")
    builder = builder_in((input, min, max))
    assert builder is not None, "called without a symbolic value"
    value, low, high = (None if x is None else Value.lift(builder, x) for x in (input, min, max))
    assert value is not None
    refuse_bare(value, *(end for end in (low, high) if end is not None))
    low, high = _bound(value, low, "max"), _bound(value, high, "min")
    if low is not None and high is not None and not is_weak(low.kind) and not is_weak(high.kind):
        return _between_tensors(value, low, high)
    if low is not None:
        value = binary("max", tie=_tie(low))(value, low)
    return value if high is None else binary("min", tie=_tie(high))(value, high)


def _tie(end: Value) -> str | None:
    if not _SHARES_TIES:
        return "first"
    return "second" if is_weak(end.kind) else None


def _between_tensors(value: Value, low: Value, high: Value) -> Value:
    """Where both bounds are equal, a value equal to them gets the whole derivative. Otherwise the bound that it is beyond gets it, the
    lower one only from torch 2.14 on."""
    between = binary("min", tie=_tie(high))(binary("max", tie=_tie(low))(value, low), high)
    if category(between.kind) != "float":
        return between
    below = low if _SHARES_TIES else FUNCTIONS["detach"](low)
    fixed = binary("min", tie="first")(binary("max", tie="first")(value, below), high)
    return FUNCTIONS["where"](FUNCTIONS["eq"](low, high), fixed, between)  # type: ignore[no-any-return]


def _bound(value: Value, end: Value | None, op: str) -> Value | None:
    """A lower (op: max) or upper bound; None for a number beyond all numbers of the value's dtype, which bounds nothing."""
    if end is None:
        return None
    dtype: Any = result_dtype([value.kind, end.kind])
    node, strong = end.builder.nodes[end.node], torch.int64 if dtype is int else dtype
    if not HAS_FAR_BOUNDS or not is_weak(node.dtype) or not category(node.dtype) == category(strong) == "int":
        return fitting(end, dtype, "clamp")  # type: ignore[no-any-return]
    if node.op != "const":
        return fitting(end, dtype, "clamp")  # type: ignore[no-any-return]
    info, number = torch.iinfo(strong), int(node.attr)  # type: ignore[call-overload]
    if (number > info.max) if op == "max" else (number < info.min):
        raise mod_error(*misfit("clamp", number, strong))
    return None if (number < info.min if op == "max" else number > info.max) else end
