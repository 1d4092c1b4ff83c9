"""Serialisation of expressions as text: compiled and exported graphs carry it, and any process can read it.

The text is JSON with single quotes, and ";" between programs: Inductor's C++ wrapper puts a string operand between double quotes unescaped.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

from anyattn.mods.ir.expr import DType, Expr, Node, is_weak, verify

__all__ = ["decode", "encode", "joined", "quoted", "read", "separated"]

_WEAK: dict[str, type] = {"int": int, "float": float}


def encode(expr: Expr) -> str:
    """The text of a program; ``decode(encode(expr)) == expr``."""
    nodes = [[n.op, list(n.args), _dtype_name(n.dtype), _plain(n.attr)] for n in expr.nodes]
    return quoted([nodes, list(expr.outputs)])


def quoted(value: Any) -> str:
    """Lists, dicts, numbers and names as text."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace('"', "'")


def read(text: str) -> Any:
    """The inverse of ``quoted``; also reads plain JSON, which older graphs carry."""
    return json.loads(text.replace("'", '"'))


def joined(programs: Iterable[str]) -> str:
    """Several programs as one text."""
    return ";".join(programs)


def separated(programs: str) -> list[str]:
    """The inverse of ``joined``; also reads one program per line, as in older graphs."""
    return programs.replace("\n", ";").split(";") if programs else []


@lru_cache(maxsize=1024)
def decode(text: str) -> Expr:
    """The expression that ``encode`` wrote; raises ``ValueError`` for any other text."""
    try:
        nodes, outputs = read(text)
        expr = Expr(tuple(Node(op, tuple(args), _dtype(dtype), _value(attr)) for op, args, dtype, attr in nodes), tuple(outputs))
        verify(expr)
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError) as error:
        raise ValueError(f"not a mod's program: {text[:80]!r} ({error}); wanted the text of anyattn.mods.ir.codec.encode") from error
    return expr


def _dtype_name(dtype: DType) -> str:
    return dtype.__name__ if is_weak(dtype) else str(dtype).removeprefix("torch.")  # type: ignore[union-attr]


def _dtype(name: str) -> DType:
    dtype = _WEAK[name] if name in _WEAK else getattr(torch, name)
    if not is_weak(dtype) and not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch.{name} is no dtype")
    return dtype


def _plain(attr: Any) -> Any:
    """An attribute as JSON, which has no infinity and no NaN: those become {"float": text}."""
    return {"float": repr(attr)} if isinstance(attr, float) and not math.isfinite(attr) else attr


def _value(attr: Any) -> Any:
    return float(attr["float"]) if isinstance(attr, dict) else attr
