"""A program survives being text."""

from __future__ import annotations

import math

import pytest
import torch

from anyattn import masks, scores
from anyattn.mods.ir import codec
from anyattn.mods.ir.expr import OPS, Builder, is_weak
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace
from tests.support import cases

SHAPE = cases.Shape(1, 4, 2, 64, 64, 8, 8)


@pytest.mark.parametrize("name", cases.VARIANTS)
def test_the_gallery_round_trips(name):
    variant = cases.VARIANTS[name]
    mods = variant.mods(variant.make(SHAPE, torch.Generator().manual_seed(0)), SHAPE)
    for kind in ("mask", "score"):
        if mods[kind] is not None:
            expr = trace(mods[kind], kind).expr
            again = codec.decode(codec.encode(expr))
            assert again == expr and again.key == expr.key and not set('"\\\n;') & set(codec.encode(expr))


def test_gradients_round_trip():
    expr = score_gradients(trace(scores.softcap(3.0).then(scores.alibi(torch.ones(4))), "score").expr).expr
    assert len(expr.outputs) > 1 and codec.decode(codec.encode(expr)) == expr


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan, 0.1, -0.0, 1e-320, 1.0, True, False, 2**62, -1])
@pytest.mark.parametrize("dtype", [None, torch.float64])
def test_constants_keep_type_and_value(value, dtype):
    b = Builder()
    expr = b.build(b.const(float(value) if dtype else value, dtype))
    again = codec.decode(codec.encode(expr)).output
    assert type(again.attr) is type(expr.output.attr) and repr(again.attr) == repr(expr.output.attr)
    assert again.dtype == expr.output.dtype and codec.decode(codec.encode(expr)).key == expr.key


@pytest.mark.parametrize("op", sorted(OPS))
def test_every_operation(op):
    b = Builder()
    spec = OPS[op]
    leaf = b.add("score", dtype=torch.float32) if "float" in spec.operands else b.add("index", dtype=torch.int64, attr="b")
    args = [leaf] * spec.arity
    if op == "where":
        args = [b.add("lt", leaf, leaf), leaf, b.add("neg", leaf)]
    expr = b.build(b.add(op, *args, dtype=torch.bfloat16 if op == "cast" else None))
    assert codec.decode(codec.encode(expr)) == expr


def test_weak_numbers_stay_weak():
    n = 3
    expr = trace(lambda s, b, h, q, k: s * n + 0.5, "score").expr
    again = codec.decode(codec.encode(expr))
    assert again == expr and any(is_weak(node.dtype) for node in again.nodes)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "[[], [0]]",
        '[[["nosuch",[],"int64",null]],[0]]',
        '[[["add",[0,0],"int64",null]],[0]]',
        '[[["index",[],"int65","b"]],[0]]',
        '[[["index",[],"int64","z"]],[0]]',
        "print()",
        '[[["const",[],"nn",1]],[0]]',
    ],
)
def test_other_text_is_refused(text):
    with pytest.raises(ValueError, match="not a mod's program"):
        codec.decode(text)


def test_masks_encode_alike_whatever_their_values():
    assert codec.encode(trace(masks.causal(3), "mask").expr) == codec.encode(trace(masks.causal(9), "mask").expr)


def test_graphs_of_before_are_read():
    """Their programs are JSON, one a line."""
    programs = [codec.encode(trace(mask, "mask").expr) for mask in (masks.causal(), masks.sliding_window(3, 0))]
    before = "\n".join(programs).replace("'", '"')
    assert codec.separated(codec.joined(programs)) == programs and codec.separated("") == []
    assert [codec.decode(text) for text in codec.separated(before)] == [codec.decode(text) for text in programs]
    assert codec.read('{"tile_m": 16}') == codec.read(codec.quoted({"tile_m": 16})) == {"tile_m": 16}
