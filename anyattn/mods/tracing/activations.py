"""Activations and other compound functions that a mod may call, each composed of simpler torch functions.

They are called with symbolic values while a mod is traced, so torch's functions and Python's operators record their nodes. The formulas
keep float32 precision: they subtract no two numbers near 1, and no exponential overflows where the result is finite. At a kink, the branch
that ``where`` takes here is the side whose derivative torch's autograd uses.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from anyattn.arithmetic import LOG2E
from anyattn.mods.tracing.diagnostics import mod_error

__all__ = ["ACTIVATIONS", "rounded_to"]

ACTIVATIONS: dict[str, Callable[..., Any]] = {}  # by the name that torch reports for the function
_SELU_ALPHA, _SELU_SCALE = 1.6732632423543772, 1.0507009873554805  # G. Klambauer et al., 2017
_SQRT_2_OVER_PI = 0.7978845608028654


def _need_floats(name: str, *values: Any) -> None:
    for x in values:
        if not isinstance(x, (int, float)) and not x.is_floating_point():
            raise mod_error(f"`{name}` takes floats, and got a {x.dtype} value", "convert it first, as in x.float()")


def _refuse_inplace(name: str, inplace: Any) -> None:
    if inplace is not False:
        raise mod_error(f"`{name}` with inplace=True has no meaning inside a mod", "leave inplace out and use the result")


def _activation(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a function of one float value; of ``inplace`` only False is accepted."""

    def wrap(f: Callable[..., Any]) -> Callable[..., Any]:
        def apply(x: Any, *args: Any, inplace: Any = False, **kwargs: Any) -> Any:
            _refuse_inplace(name, inplace)
            _need_floats(name, x)
            return f(x, *args, **kwargs)

        ACTIVATIONS[name] = apply
        return apply

    return wrap


@_activation("silu")
def _silu(x: Any) -> Any:
    return x * torch.sigmoid(x)


@_activation("gelu")
def _gelu(x: Any, approximate: str = "none") -> Any:
    if approximate == "none":
        return 0.5 * x * (1.0 + torch.erf(x * math.sqrt(0.5)))
    if approximate == "tanh":
        return 0.5 * x * (1.0 + torch.tanh(_SQRT_2_OVER_PI * (x + 0.044715 * (x * x * x))))
    raise mod_error(f"gelu has approximate={approximate!r}", "use 'none' or 'tanh'")


def _softplus_of(x: Any) -> Any:
    return torch.maximum(x, torch.zeros_like(x)) + torch.log1p(torch.exp(-abs(x)))


@_activation("softplus")
def _softplus(x: Any, beta: Any = 1.0, threshold: Any = 20.0) -> Any:
    scaled = x * beta
    return torch.where(scaled > threshold, x, _softplus_of(scaled) / beta)


@_activation("log_sigmoid")
def _log_sigmoid(x: Any) -> Any:
    return torch.minimum(x, torch.zeros_like(x)) - torch.log1p(torch.exp(-abs(x)))


@_activation("mish")
def _mish(x: Any) -> Any:
    return x * torch.tanh(_softplus_of(x))


@_activation("leaky_relu")
def _leaky_relu(x: Any, negative_slope: Any = 0.01) -> Any:
    return torch.where(x > 0, x, x * negative_slope)


@_activation("elu")
def _elu(x: Any, alpha: Any = 1.0) -> Any:
    return torch.where(x > 0, x, torch.expm1(x) * alpha)


@_activation("selu")
def _selu(x: Any) -> Any:
    return _SELU_SCALE * _elu(x, _SELU_ALPHA)


@_activation("celu")
def _celu(x: Any, alpha: Any = 1.0) -> Any:
    return torch.where(x > 0, x, torch.expm1(x / alpha) * alpha)


@_activation("hardtanh")
def _hardtanh(x: Any, min_val: Any = -1.0, max_val: Any = 1.0) -> Any:
    return torch.where(x <= min_val, min_val, torch.where(x >= max_val, max_val, x))


@_activation("relu6")
def _relu6(x: Any) -> Any:
    return _hardtanh(x, 0.0, 6.0)


@_activation("hardsigmoid")
def _hardsigmoid(x: Any) -> Any:
    return torch.where(x <= -3, 0.0, torch.where(x >= 3, 1.0, (x + 3.0) / 6.0))


@_activation("hardswish")
def _hardswish(x: Any) -> Any:
    return x * torch.where(x <= -3, 0.0, torch.where(x >= 3, 6.0, x + 3.0)) / 6.0


@_activation("softsign")
def _softsign(x: Any) -> Any:
    return x / (abs(x) + 1.0)


@_activation("special_logit")
@_activation("logit")
def _logit(x: Any, eps: Any = None) -> Any:
    if eps is not None:
        x = torch.where(x < eps, eps, torch.where(x > 1.0 - eps, 1.0 - eps, x))
    return torch.log(x / (1.0 - x))


@_activation("frac")
def _frac(x: Any) -> Any:
    return x - torch.trunc(x)


# ---- NaN and infinity tests; whole numbers are neither


def _isnan(x: Any) -> Any:
    return x != x


def _isinf(x: Any) -> Any:
    return abs(x) == math.inf if x.is_floating_point() else x != x


def _isfinite(x: Any) -> Any:
    return abs(x) < math.inf if x.is_floating_point() else x == x


def _isposinf(x: Any) -> Any:
    return x == math.inf if x.is_floating_point() else x != x


def _isneginf(x: Any) -> Any:
    return x == -math.inf if x.is_floating_point() else x != x


def _nan_to_num(x: Any, nan: Any = None, posinf: Any = None, neginf: Any = None) -> Any:
    if not x.is_floating_point():
        return x
    most = torch.finfo(x.dtype).max
    high, low = (most if posinf is None else posinf), (-most if neginf is None else neginf)
    finite = torch.where(x == math.inf, high, torch.where(x == -math.inf, low, x))
    return torch.where(x != x, 0.0 if nan is None else nan, finite)


# ---- functions of two and three values


def _lerp(start: Any, end: Any, weight: Any) -> Any:
    """Interpolates from the nearer end, so weights 0 and 1 give exactly the ends."""
    _need_floats("lerp", start, end, weight)
    way = end - start
    near_start, near_end = start + weight * way, end - way * (1.0 - weight)
    if isinstance(weight, (int, float)):
        return near_start if abs(weight) < 0.5 else near_end
    return torch.where(abs(weight) < 0.5, near_start, near_end)


def _addcdiv(x: Any, tensor1: Any, tensor2: Any, value: Any = 1) -> Any:
    if not (tensor1.is_floating_point() or tensor2.is_floating_point()):
        raise mod_error("addcdiv divides two whole numbers", "convert one first, as in x.float()")
    return x + value * tensor1 / tensor2


def _logaddexp(x: Any, y: Any) -> Any:
    _need_floats("logaddexp", x, y)
    return torch.maximum(x, y) + torch.log1p(torch.exp(-abs(_difference(x, y))))


def _logaddexp2(x: Any, y: Any) -> Any:
    _need_floats("logaddexp2", x, y)
    return torch.maximum(x, y) + torch.log1p(torch.exp2(-abs(_difference(x, y)))) * LOG2E


def _difference(x: Any, y: Any) -> Any:
    """x - y, and 0 for two equal infinities."""
    return torch.where(x == y, 0.0, x - y)


def _heaviside(x: Any, values: Any) -> Any:
    if x.dtype != values.dtype:
        raise mod_error(f"heaviside of a {x.dtype} value has {values.dtype} values", "give both one dtype, as in values.to(x.dtype)")
    return torch.where(x == 0, values, torch.where(x > 0, 1, 0).to(x.dtype))


def rounded_to(nearest: Callable[[Any], Any]) -> Callable[..., Any]:
    """``torch.round`` with decimals: rounds the value times a power of ten, as torch does, 16-bit values in float32."""

    def apply(x: Any, *, decimals: Any = 0) -> Any:
        places = int(decimals)
        if places == 0:
            return nearest(x)
        _need_floats("round", x)
        wide, step = x.to(torch.promote_types(x.dtype, torch.float32)), 10.0 ** abs(places)
        return (nearest(wide * step) / step if places > 0 else nearest(wide / step) * step).to(x.dtype)

    return apply


ACTIVATIONS |= {
    "isnan": _isnan,
    "isinf": _isinf,
    "isfinite": _isfinite,
    "isposinf": _isposinf,
    "isneginf": _isneginf,
    "nan_to_num": _nan_to_num,
    "lerp": _lerp,
    "addcdiv": _addcdiv,
    "logaddexp": _logaddexp,
    "logaddexp2": _logaddexp2,
    "heaviside": _heaviside,
}
