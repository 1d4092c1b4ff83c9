"""Composition of traced mods: conjunctions, and the parts that they are taken apart into."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.compose import anded, conjuncts
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.cute_mod import native_mod
from anyattn.mods.tracing.trace import TracedMod, compact, trace


def _jitted(fn: Any) -> Any:
    """``fn`` with the marks of ``@cute.jit``."""

    @functools.wraps(fn)
    def jitted(*args: Any) -> Any:
        return fn(*args)

    jitted._decorator_kind, jitted._dsl_cls = "jit", object
    return jitted


@_jitted
def _native(b: Any, h: Any, q_idx: Any, kv_idx: Any, aux_tensors: Any) -> Any:
    return q_idx < aux_tensors[0][b] + aux_tensors[1][b]


def _table(tensor: Tensor, least: int) -> TracedMod:
    return trace(lambda b, h, q_idx, kv_idx: tensor[kv_idx] >= least, "mask")


def _read(expr: Expr, op: str) -> list[Any]:
    """The slots of the nodes of this kind."""
    return [node.attr for node in expr.nodes if node.op == op]


def test_a_conjunct_keeps_the_tensors_of_a_cute_function() -> None:
    table, *aux = (torch.zeros(4, dtype=torch.int64) for _ in range(3))
    parts = (_table(table, 1), native_mod(_native, "mask", aux), _table(table, 2))
    found = conjuncts(anded(parts))
    for part, wanted in zip(found, parts, strict=True):
        assert len(part.tensors) == len(wanted.tensors) and all(map(lambda a, b: a is b, part.tensors, wanted.tensors))
        assert part.expr == wanted.expr and part.scalars == wanted.scalars
    assert _read(found[1].expr, "tensor") == [0, 1]


def test_a_tensor_that_is_loaded_from_and_handed_over_whole_keeps_one_slot() -> None:
    unused, table, other = (torch.zeros(4) for _ in range(3))
    builder = Builder()
    at = builder.add("index", dtype=torch.int64, attr="kv_idx")
    load = builder.add("load", at, dtype=torch.float32, attr=1)
    whole = [builder.add("tensor", dtype=torch.float32, attr=slot) for slot in (2, 1)]
    native = builder.add("native", load, *whole, dtype=torch.float32, attr="f")
    expr, scalars, tensors = compact(builder.build(native), [unused, table, other])
    assert not scalars and len(tensors) == 2 and tensors[0] is table and tensors[1] is other
    assert _read(expr, "load") == [0] and _read(expr, "tensor") == [1, 0]
