"""Bounds by interval arithmetic contain every value, for each operation and for random programs, at special numbers too."""

from __future__ import annotations

import functools
import math
import random

import pytest
import torch
from torch import Tensor

from anyattn import create_block_mask
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.intervals import spans
from anyattn.mods.analysis.range_tables import RangeTables
from anyattn.mods.ir.bounds import WILD
from anyattn.mods.ir.expr import OPS, Builder, Expr, category
from tests.support.covering import few

ROWS, COLUMNS, BOXES = 40, 48, 300
INTS = (torch.int8, torch.uint8, torch.int32, torch.int64)
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
REALS = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 1e-9, -1e-9, 0.3, 3.7, -7.9, 40.0, -40.0, 88.9, -89.2, 1e4, -1e4, 1e30, -1e30]
SPECIAL = [math.inf, -math.inf, math.nan]
WHOLES = [0, 1, -1, 2, -2, 3, 5, 7, -7, 8, 63, -64, 100, -100, 127]
FAR = [2**31 - 1, -(2**31), 2**40, -(2**40), 2**61, -(2**61), 2**62, -(2**62), 2**63 - 1, -(2**63)]


def table(dtype: torch.dtype, count: int, seed: int) -> Tensor:
    """Values in runs, so that many boxes hold similar ones."""
    kind, draw = category(dtype), random.Random(seed)
    pool: list = [False, True] if kind == "bool" else REALS + SPECIAL if kind == "float" else WHOLES + FAR * (dtype is torch.int64)
    values: list = []
    while len(values) < count:
        values += [draw.choice(pool)] * draw.choice((1, 1, 2, 4))
    found = torch.tensor(values[:count], dtype=torch.float64 if kind == "float" else torch.int64)
    return (found.abs() if dtype is torch.uint8 else found).to(dtype)


def boxes(seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    random_, zero = torch.Generator().manual_seed(seed), torch.zeros(BOXES, dtype=torch.int64)
    found = {"b": (zero, zero), "h": (zero, zero)}
    for name, count in (("q_idx", ROWS), ("kv_idx", COLUMNS)):
        first = torch.randint(count, (BOXES,), generator=random_)
        found[name] = first, torch.minimum(first + torch.randint(5, (BOXES,), generator=random_) ** 2, torch.tensor(count - 1))
    return found


@functools.cache
def pairs_of_boxes(seed: int) -> tuple[Tensor, Tensor]:
    """Every pair of every box: the box's number, and the pair's place in (ROWS, COLUMNS), flat."""
    rows, columns = (
        (first[:, None] <= at) & (at <= last[:, None])
        for (first, last), at in ((boxes(seed)["q_idx"], torch.arange(ROWS)), (boxes(seed)["kv_idx"], torch.arange(COLUMNS)))
    )
    box, pair = (rows[:, :, None] & columns[:, None]).flatten(1).nonzero(as_tuple=True)
    return box, pair


def escaped(values: Tensor, lo: Tensor, hi: Tensor) -> Tensor:
    """Which values their bounds deny."""
    if values.dtype is torch.bool:
        return (lo & ~values) | (~hi & values)
    if values.is_floating_point():
        return ~((values >= lo) & (values <= hi)) & (lo == lo)
    return ((values < lo) & (lo > -WILD)) | ((values > hi) & (hi < WILD))


def check(expr: Expr, tensors: list[Tensor], seed: int = 0) -> None:
    """Every node's bounds contain its values at all pairs of every box."""
    everything = Expr(expr.nodes, tuple(range(len(expr.nodes))))
    leaves = {"b": torch.tensor(0), "h": torch.tensor(0), "q_idx": torch.arange(ROWS)[:, None], "kv_idx": torch.arange(COLUMNS)}
    values = run(everything, leaves, (), tensors)
    found = spans(everything, boxes(seed), (), RangeTables(tensors, "cpu"))
    box, pair = pairs_of_boxes(seed)
    for node, value, span in zip(expr.nodes, values, found, strict=True):
        inside = torch.as_tensor(value).expand(ROWS, COLUMNS).flatten()[pair]
        lo, hi = (t.expand(BOXES)[box] for t in span[:2])
        denied = escaped(inside, lo, hi)
        if denied.any():
            first = int(denied.nonzero()[0])
            raise AssertionError(f"{node.op}: {inside[first]} outside [{lo[first]}, {hi[first]}]")


def loads(builder: Builder, dtypes: tuple[torch.dtype, ...]) -> list[int]:
    """Loads at q_idx and kv_idx in turn."""
    at = [builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx")]
    return [builder.add("load", at[slot % 2], dtype=dtype, attr=slot) for slot, dtype in enumerate(dtypes)]


def divisible(op: str, second: Tensor) -> Tensor:
    """Second operands for which torch has a result."""
    if op in ("floordiv", "mod", "fmod"):
        return torch.where(second == 0, 3, second).to(second.dtype)
    if op == "pow":
        return (second % 9).abs()
    return second % 64 if op in ("shl", "shr") else second


CASES = [
    (op, dtype)
    for op, spec in OPS.items()
    for dtype in (torch.bool, *INTS, *FLOATS)
    if op not in ("cast", "where") and category(dtype) in spec.operands
]


@pytest.mark.covering(1, of=lambda op, dtype: (op, dtype, (op, category(dtype))))
@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_every_operation(op: str, dtype: torch.dtype) -> None:
    builder = Builder()
    a, b = loads(builder, (dtype, dtype))
    tensors = [table(dtype, ROWS, 1), table(dtype, COLUMNS, 2)]
    if category(dtype) == "int":
        tensors[1] = divisible(op, tensors[1])
    check(builder.build(builder.add(op, *([a, b][: OPS[op].arity]))), tensors)


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bool, *INTS, *FLOATS], ids=str)
def test_where(dtype: torch.dtype) -> None:
    builder = Builder()
    *operands, a, b = loads(builder, (torch.float32, torch.float32, dtype, dtype))
    tensors = [table(t, n, s) for t, n, s in ((torch.float32, ROWS, 1), (torch.float32, COLUMNS, 2), (dtype, ROWS, 3), (dtype, COLUMNS, 4))]
    check(builder.build(builder.add("where", builder.add("lt", *operands), a, b)), tensors)


@pytest.mark.covering(1)
@pytest.mark.parametrize("source", [torch.bool, *INTS, *FLOATS], ids=str)
@pytest.mark.parametrize("target", [torch.bool, *INTS, *FLOATS], ids=str)
def test_every_cast(source: torch.dtype, target: torch.dtype) -> None:
    values = table(source, ROWS, 1)
    if category(source) == "float" and category(target) == "int":  # outside of the target's range torch's result is any number
        info = torch.iinfo(target)
        values = values.nan_to_num(0, 0, 0).double().clamp(info.min // 2, info.max // 2).to(source)
    builder = Builder()
    check(builder.build(builder.cast(loads(builder, (source,))[0], target)), [values])


def program(seed: int) -> tuple[Expr, list[Tensor]]:
    """A random program over numbers of one float dtype, one integer dtype and bools."""
    draw, builder = random.Random(seed), Builder()
    real, whole = draw.choice((torch.float32, *FLOATS)), draw.choice((torch.int64, *INTS))
    dtypes = (real, real, whole, whole, torch.bool, real)
    kinds: dict[str, list[int]] = {"bool": [], "int": [], "float": []}

    def keep(node: int) -> None:
        kinds[category(builder.nodes[node].dtype)].append(node)

    for node in loads(builder, dtypes):
        keep(node)
    partial = ("floordiv", "mod", "fmod", "pow", "shl", "shr")  # torch has no result for some integers as second operands
    for _ in range(12):
        op = draw.choice([op for op in OPS if op != "cast"])
        kind = draw.choice(OPS[op].operands)
        operands = [draw.choice(kinds[kind][-6:]) for _ in range(OPS[op].arity)]
        if op in partial and kind == "int":
            operands[1] = builder.cast(builder.add("const", dtype=int, attr=draw.choice((1, 2, 3, 5, 6))), whole)
        if op == "where":
            operands[0] = draw.choice(kinds["bool"])
        keep(builder.add(op, *operands))
        if draw.random() < 0.3:
            keep(builder.cast(draw.choice(kinds["int"]), real))
            keep(builder.cast(draw.choice(kinds["float"]), torch.bool))
    outputs = [builder.add("lt", *draw.sample(kinds[kind][-4:], 2)) for kind in ("float", "int")]
    tensors = [table(dtype, (ROWS, COLUMNS)[slot % 2], seed + slot) for slot, dtype in enumerate(dtypes)]
    return builder.build(builder.add("or", *outputs)), tensors


@pytest.mark.parametrize("seed", few(range(200), *range(30)))
def test_random_programs(seed: int) -> None:
    check(*program(seed), seed)


@pytest.mark.parametrize(
    "mask",
    [
        lambda i, j: torch.sign(1.0 / ((i ^ j) - 40)) <= 0,
        lambda i, j: torch.sign(torch.tan((i ^ j) * 1.0)) == 0,
        lambda i, j: torch.sin(torch.where((i ^ j) % 2 == 0, math.inf, 1.0)) < 2,
    ],
)
def test_masks_of_unknown_floats(mask) -> None:  # type: ignore[no-untyped-def]
    """Every tile's class is that of its pairs."""
    lists = create_block_mask(lambda b, h, q, k: mask(q, k), None, None, 64, 64, "cpu", 16)
    seen = mask(torch.arange(64)[:, None], torch.arange(64)).unflatten(0, (4, 16)).unflatten(2, (4, 16))
    partial, full = seen.any(3).any(1) & ~seen.all(3).all(1), seen.all(3).all(1)
    for counts, wanted in ((lists.kv_num_blocks, partial), (lists.full_kv_num_blocks, full)):
        assert counts[0, 0].tolist() == wanted.sum(1).tolist()
