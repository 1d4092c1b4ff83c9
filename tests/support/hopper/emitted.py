"""The Hopper emitter and its generated code, run as Python on NumPy numbers."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

import anyattn

HOPPER = Path(anyattn.__file__).parent / "backends" / "hopper"  # type: ignore[arg-type]
OUTSIDE = ("cutlass", "anyattn.backends.hopper.codegen.cute_mod", "anyattn.backends.hopper.codegen.device_math")


class Array:
    """A captured tensor: what is read from it is a number of its own dtype, a bool a byte."""

    def __init__(self, values: Tensor):
        dtype = {torch.bool: torch.uint8, torch.bfloat16: torch.float32}.get(values.dtype, values.dtype)  # NumPy has no bfloat16
        self.values, self.shape = values.to(dtype).numpy(), values.shape
        self.iterator, self.layout = Start(self), None

    def __getitem__(self, place: Any) -> Any:
        return self.values[place]


class Start:
    """The address of an array's first entry; with a place added, a view of what comes from there on along the last dimension."""

    def __init__(self, array: Array, place: tuple = ()):
        self.array, self.place = array, place

    def __add__(self, place: Any) -> Start:
        return Start(self.array, place if isinstance(place, tuple) else (place,))

    def __getitem__(self, step: int) -> Any:
        assert step >= 0 and self.place[-1] >= 0
        return self.array[(*self.place[:-1], self.place[-1] + step)]


class _Whole(type):
    def __instancecheck__(cls, x: Any) -> bool:
        return isinstance(x, cls.kind)  # type: ignore[attr-defined]


class Int32(metaclass=_Whole):
    """A conversion that wraps around, as the device's does."""

    kind = np.int32

    def __new__(cls, x: Any) -> Any:
        return np.asarray(x).astype(np.int64).astype(cls.kind)[()]


class Int64(Int32):
    kind = np.int64


_ROUNDED = ("floor", "ceil", "trunc", "roundeven", "absf")  # exact also where others are approximate


def _unary(function: Callable, is_exact: bool = True) -> Callable:
    """is_exact: otherwise the fast form is off by one unit in the last place."""

    def called(x: Any, fastmath: bool = False) -> Any:
        found = np.float32(function(np.float32(x)))
        return found if is_exact or not fastmath else _approximately(found)

    return called


def _approximately(x: Any) -> Any:
    return np.nextafter(x, np.float32(0)) if np.isfinite(x) else x


def least(a: Any, b: Any, nan: bool = False) -> Any:
    """The lesser number; NaN of one number only if ``nan``."""
    return np.minimum(a, b) if nan else np.fmin(a, b)


def most(a: Any, b: Any, nan: bool = False) -> Any:
    return np.maximum(a, b) if nan else np.fmax(a, b)


def _once_rounded(a: Any, b: Any, c: Any) -> Any:
    return np.float32(np.longdouble(a) * np.longdouble(b) + np.longdouble(c))


class _Rests(ast.NodeTransformer):
    """``a % b`` and ``a // b`` as calls: the compiler's may take either sign, and round towards 0."""

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        name = {ast.Mod: "_rest", ast.FloorDiv: "_quotient"}.get(type(node.op))
        return node if name is None else ast.Call(ast.Name(name, ast.Load()), [node.left, node.right], [])


def quotient(a: Any, b: Any) -> Any:
    """``a // b`` as the compiler computes it for coordinates, from which positions come; of the host's own integers, Python's."""
    return a // b if isinstance(a, int) and isinstance(b, int) else (a - np.fmod(a, b)) // b


@cache
def emitter(sign: str) -> dict[str, Any]:
    """The names of ``emit.py``. sign: whose sign the compiler's ``%`` of run-time integers takes, the "dividend"'s or the "divisor"'s."""
    plain = ("exp", "exp2", "expm1", "log", "log2", "log1p", "sqrt", "sin", "cos", "floor", "ceil", "trunc", "tanh", "sinh", "cosh")
    functions: dict[str, Any] = {name: _unary(getattr(np, name), name in _ROUNDED) for name in plain}
    functions |= {"rsqrt": _unary(lambda x: 1 / np.sqrt(x)), "erf": _unary(math.erf), "roundeven": _unary(np.rint), "absf": _unary(np.abs)}
    functions |= {"copysign": np.copysign, "fma": _once_rounded, "atan": _unary(np.arctan), "atan2": np.arctan2}
    arch = SimpleNamespace(rcp_approx=lambda x: _approximately(np.float32(1) / np.float32(x)), fmin=least, fmax=most)
    cutlass = SimpleNamespace(select_=lambda condition, yes, no: yes if condition else no, min=min, max=max)

    def rest(a: Any, b: Any) -> Any:
        return np.fmod(a, b) if sign == "dividend" and not isinstance(a, (int, float)) else a % b

    laid = {"crd2idx": lambda place, layout: place, "make_tensor": lambda view, layout: view, "make_layout": lambda size: size}
    cute = SimpleNamespace(math=SimpleNamespace(**functions), arch=arch, **laid)
    given = {"cute": cute, "cutlass": cutlass, "dsl_user_op": lambda f: f}
    given |= {"Float32": np.float32, "Int32": Int32, "Int64": Int64, "Boolean": np.bool_, "_rest": rest, "call_native": None}
    below = run_source("codegen/device_math", given)
    below |= divisions(np.floor_divide)
    made = run_source("codegen/emit", given | {name: below[name] for name in below["__all__"]})
    made["_UNARY"] |= {"tanh": functions["tanh"], "sigmoid": _unary(lambda x: 1 / (1 + np.exp(-x)))}
    made["product"] = operator.mul
    return made


def divisions(floor_quotient: Callable) -> dict[str, Callable]:
    """The operations of ``device_math`` that are instructions without sign, and floor division."""

    def reciprocal(size: Any) -> Any:
        return np.asarray((2**32 - 1) // np.asarray(size, np.int64)).astype(np.int32)[()]

    def upper_half(a: Any, b: Any) -> Any:
        return np.asarray(np.asarray(a, np.int64) * (np.asarray(b, np.int64) % 2**32) >> 32).astype(np.int32)[()]

    return {"_floor_quotient": floor_quotient, "_reciprocal": reciprocal, "_upper_half": upper_half}


def mask_words(made: dict[str, Any]) -> dict[str, Any]:
    """The names of ``mask_words.py``, above those of an emitter; numbers may be a warp group's, one for each thread."""
    names = {"dsl_user_op": lambda f: f, "T": None, "llvm": None, **made}
    found = run_source("codegen/mask_words", names, (*OUTSIDE, "anyattn.backends.hopper.codegen.emit"))
    ones = lambda place: np.where(place < 32, -1 << np.minimum(place, 31).astype(np.int64), 0).astype(np.int32)[()]
    found["_ones_from"], found["_opaque"] = ones, lambda word: word
    return found


def run_source(module: str, given: dict[str, Any], outside: tuple[str, ...] = OUTSIDE) -> dict[str, Any]:
    """A module of the backend without its imports of CuTe DSL, for which ``given`` stands in."""
    names = {"__name__": module, "_quotient": quotient, **given}
    exec(_code(module, outside), names)
    return names


@cache
def _code(module: str, outside: tuple[str, ...]) -> CodeType:
    tree = ast.parse((HOPPER / f"{module}.py").read_text())
    tree.body = [n for n in tree.body if not any(name.startswith(outside) for name in _imported(n))]
    return compile(ast.fix_missing_locations(_Rests().visit(tree)), str(HOPPER / f"{module}.py"), "exec")


def _imported(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Import):
        return [a.name for a in node.names]
    return [node.module or ""] if isinstance(node, ast.ImportFrom) else []


def numbers_of(scalars: tuple) -> tuple:
    return tuple(np.float32(x) if isinstance(x, float) else np.int32(x) for x in scalars)
