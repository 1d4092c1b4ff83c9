"""The IR's promises: interned, canonical, verified; literals folded as Python would."""

from __future__ import annotations

import math

import pytest
import torch

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.ir.expr import OPS, Builder, Expr, Node, category, is_weak, result_dtype, verify
from anyattn.mods.tracing.trace import trace


def index(b: Builder, name: str = "q_idx") -> int:
    return b.add("index", dtype=torch.int64, attr=name)


def test_equal_nodes_are_one():
    b = Builder()
    x, y = index(b), index(b, "kv_idx")
    assert b.add("add", x, y) == b.add("add", x, y) != b.add("add", y, x)
    assert b.const(0.0) != b.const(-0.0) and b.const(1) != b.const(True) and b.const(math.nan) == b.const(math.nan)


def test_build_prunes_and_renumbers():
    one, two = Builder(), Builder()
    index(two, "h")
    dead = two.add("neg", index(two, "b"))
    exprs = [b.build(b.add("sub", index(b), index(b, "kv_idx"))) for b in (one, two)]
    assert exprs[0] == exprs[1] and exprs[0].key == exprs[1].key and hash(exprs[0]) == hash(exprs[1])
    assert len(exprs[0].nodes) == 3 and len(two.nodes) > 3 and dead < len(two.nodes)


def test_copy_replaces():
    expr = trace(lambda s, b, h, q, k: s * 2 + 1, "score").expr
    b = Builder()
    start = b.add("score", dtype=torch.float32)
    doubled = b.copy(expr, replace={next(i for i, n in enumerate(expr.nodes) if n.op == "score"): b.copy(expr)})
    assert start < doubled
    (got,) = run(b.build(doubled), {"score": torch.tensor(3.0)}, (), ())
    assert float(got) == (3 * 2 + 1) * 2 + 1


@pytest.mark.parametrize(
    ("op", "args", "want"),
    [
        ("add", (2, 3), 5),
        ("sub", (2.5, 1.0), 1.5),
        ("floordiv", (-7, 2), -4),
        ("mod", (-7, 2), 1),
        ("mod", (7, -2), -1),
        ("pow", (2, 10), 1024),
        ("min", (2, -3), -3),
        ("abs", (-2.5,), 2.5),
        ("round", (2.5,), 2.0),
        ("round", (math.inf,), math.inf),
        ("sign", (-3,), -1),
        ("shl", (1, 5), 32),
        ("exp", (0.0,), 1.0),
        ("lt", (1, 2), True),
        ("not", (5,), -6),
    ],
)
def test_literals_fold(op, args, want):
    b = Builder()
    node = b.nodes[b.add(op, *(b.const(a) for a in args))]
    assert node.op == "const" and node.attr == want and type(node.attr) is type(want)


@pytest.mark.parametrize(("op", "args"), [("floordiv", (1, 0)), ("log", (-1.0,)), ("div", (1.0, 0.0)), ("exp", (1e4,)), ("shl", (1, -1))])
def test_what_python_refuses_is_left_to_run_time(op, args):
    b = Builder()
    assert b.nodes[b.add(op, *(b.const(a) for a in args))].op == op


def test_strong_literals_do_not_fold():
    b = Builder()
    x = b.const(1.0, torch.float32)
    assert b.nodes[b.add("div", x, b.const(3.0, torch.float32))].op == "div", "Python would compute it in float64"


def test_boolean_simplifications():
    b = Builder()
    c = b.add("lt", index(b), index(b, "kv_idx"))
    yes, no = b.const(True), b.const(False)
    assert b.add("and", c, yes) == c == b.add("and", yes, c) == b.add("or", no, c) == b.add("or", c, c) == b.add("not", b.add("not", c))
    assert b.add("and", c, no) == no and b.add("or", yes, c) == yes and b.add("not", yes) == no
    assert b.add("where", yes, index(b), index(b, "kv_idx")) == index(b) and b.add("where", c, index(b), index(b)) == index(b)


def test_number_simplifications():
    b = Builder()
    x, zero, one = index(b), b.const(0, torch.int64), b.const(1, torch.int64)
    assert (
        b.add("add", x, zero) == x == b.add("sub", x, zero) == b.add("mul", one, x) == b.add("floordiv", x, one) == b.cast(x, torch.int64)
    )
    f, z = b.add("score", dtype=torch.float32), b.const(0.0, torch.float32)
    assert b.add("add", f, z) != f, "-0.0 + 0.0 is 0.0"
    assert b.nodes[b.add("floordiv", f, b.const(1.0, torch.float32))].op == "floordiv", "a float divided by one is floored"


DTYPES = [
    torch.bool,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
    torch.float64,
]


@pytest.mark.parametrize("left", [*DTYPES, int, float], ids=str)
def test_promotion_is_torchs(left):
    for right in DTYPES:
        x = left(1) if is_weak(left) else torch.ones((), dtype=left)
        assert result_dtype([left, right]) == torch.result_type(x, torch.ones((), dtype=right)) == result_dtype([right, left]), right


def test_weak_promotion():
    assert result_dtype([int, int]) is int and result_dtype([int, float]) is float
    assert [category(d) for d in (int, float, torch.bool, torch.uint8, torch.bfloat16)] == ["int", "float", "bool", "int", "float"]


Q, SCORE, LESS = Node("index", (), torch.int64, "q_idx"), Node("score", (), torch.float32), Node("lt", (0, 0), torch.bool)
BROKEN = {
    "argument after": (Node("neg", (0,), torch.int64),),
    "unknown operation": (Q, Node("frobnicate", (0,), torch.int64)),
    "takes 2 arguments": (Q, Node("add", (0,), torch.int64)),
    "several dtypes": (Q, SCORE, Node("add", (0, 1), torch.int64)),
    "operands, not": (Q, Node("exp", (0,), torch.int64)),
    "wrong result dtype": (Q, Node("lt", (0, 0), torch.int64)),
    "condition is not bool": (Q, Node("where", (0, 0, 0), torch.int64)),
    "not an index": (Node("index", (), torch.int64, "z"),),
    "float32 or float64": (Node("score", (), torch.float16),),
    "indices must be int64": (Node("index", (), torch.int64, "b"), LESS, Node("load", (1,), torch.float32, 0)),
    "captured number is weak": (Node("scalar", (), torch.float32, 0),),
    "takes no arguments": (Q, Node("const", (0,), int, 3)),
    "output that is not a node": (),
}


@pytest.mark.parametrize("name", BROKEN)
def test_verify(name):
    nodes = BROKEN[name]
    words = "does not stand before" if name == "argument after" else name
    with pytest.raises(AssertionError, match=words):
        verify(Expr(nodes, (max(len(nodes) - 1, 0),)))


def test_every_operation_has_one_meaning_on_host_and_in_torch():
    from anyattn.mods.analysis.evaluate import TORCH_OPS

    assert set(TORCH_OPS) == set(OPS) - {"cast"}
    for name, spec in OPS.items():
        if spec.on_host is None:
            continue
        for values in ((3, 2), (-7, 2), (1, 1)) if "float" not in spec.operands else ((0.75, 0.5), (0.25, 2.0), (1.0, 1.0)):
            want = spec.on_host(*values[: spec.arity])
            got = TORCH_OPS[name](
                *(torch.tensor(v, dtype=torch.float64 if isinstance(v, float) else None) for v in values[: spec.arity])
            ).item()
            assert abs(got - want) <= math.ulp(want), (name, values, got, want)


def test_text():
    text = str(trace(lambda b, h, q, k: q >= k, "mask").expr)
    assert text.splitlines()[-1] == "-> %2" and "%2: bool = ge %0 %1" in text
