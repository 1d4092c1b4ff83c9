"""What the Triton kernels compute, by Triton's interpreter on the CPU. Run by test_triton_emit.py in a process of its own, for the
interpreter has to be chosen before Triton is imported."""

import os

assert os.environ.get("TRITON_INTERPRET") == "1"

import pytest
import torch
import triton
import triton.language as tl

from anyattn.backends.triton import emit, generated
from anyattn.mods.evaluate import run
from anyattn.mods.ir import OPS, Builder, category

ROWS, COLUMNS = 16, 32


@triton.jit
def everywhere(out, scalars, tensors, score, FN: tl.constexpr, M: tl.constexpr, N: tl.constexpr, USES_SCORE: tl.constexpr):
    q, kv = tl.arange(0, M)[:, None], tl.arange(0, N)[None, :]
    place = q * N + kv
    if USES_SCORE:
        value = FN(1, 2, q, kv, tl.load(score + place), scalars, tensors)
    else:
        value = FN(1, 2, q, kv, scalars, tensors)
    tl.store(out + place, tl.broadcast_to(value, (M, N)).to(out.dtype.element_ty))


def by_triton(expr, scalars, tensors, score=None):  # type: ignore[no-untyped-def]
    out = torch.empty(ROWS, COLUMNS, dtype=expr.output.dtype)
    fn = generated.load("@triton.jit".join(["", emit.function("mod", expr).removeprefix("@triton.jit")]), expr.key).mod
    packed = emit.packed_scalars(scalars), emit.packed_tensors(tensors)
    everywhere[(1,)](out, *packed, out if score is None else score, fn, ROWS, COLUMNS, score is not None)
    return out


def by_torch(expr, scalars, tensors, score=None):  # type: ignore[no-untyped-def]
    leaves = {"b": torch.tensor(1), "h": torch.tensor(2), "q_idx": torch.arange(ROWS)[:, None], "kv_idx": torch.arange(COLUMNS), "score": score}
    return torch.broadcast_to(torch.as_tensor(run(expr, leaves, scalars, tensors)[0]), (ROWS, COLUMNS))


REALS = torch.tensor([0.0, -0.0, 1e-9, -1e-9, 0.3, -0.3, 0.5, 1.5, 2.5, -2.5, 1.0, -1.0, 3.7, -7.9, 40.0, -40.0])
MORE_REALS = torch.cat([REALS, REALS * 0.7 + 0.9])
WHOLES = torch.tensor([0, 1, -1, 2, -2, 3, -3, 5, 7, -7, 8, 63, -64, 100, -100, 127])
MORE_WHOLES = torch.cat([WHOLES, WHOLES.flip(0) // 3])


def operands(dtype, count):  # type: ignore[no-untyped-def]
    kind = category(dtype)
    if kind == "bool":
        return torch.arange(count) % 3 == 1
    values = (REALS, MORE_REALS) if kind == "float" else (WHOLES, MORE_WHOLES)
    values = values[count > ROWS]
    return (values.abs() if dtype is torch.uint8 else values).to(dtype)


CASES = [
    (op, dtype)
    for op, spec in OPS.items()
    for dtype in (torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    if op != "cast" and category(dtype) in spec.operands
]


EXACT = ("add", "sub", "mul", "neg", "abs", "min", "max", "floor", "ceil", "trunc", "round", "sign", "where")


def same(op, ours, theirs):  # type: ignore[no-untyped-def]
    """Equal; for rounded functions within 8 roundings of the computation's dtype (float64: of a power's exponent too) and 2 of the result's.

    Triton's interpreter cuts bfloat16 off where hardware rounds it.
    """
    dtype = theirs.dtype
    if not dtype.is_floating_point:
        return torch.equal(ours, theirs)
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    if op in EXACT and dtype is not torch.bfloat16:
        return bool(equal.all())
    inner = torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps
    growth = 1 + theirs.double().abs().log2().abs().nan_to_num(0, 0, 0) if op == "pow" else 1
    room = theirs.double().abs() * (8 * inner * growth + 2 * torch.finfo(dtype).eps) + torch.finfo(dtype).tiny
    room = room + 1e-8 * (op == "erf")  # torch's own bfloat16 erf cancels near 0
    return bool((equal | (torch.isfinite(theirs) & ((ours.double() - theirs.double()).abs() <= room))).all())


@pytest.mark.parametrize(("op", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_every_operation(op, dtype):  # type: ignore[no-untyped-def]
    builder = Builder()
    q, kv = (builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx"))
    a, b = builder.add("load", q, dtype=dtype, attr=0), builder.add("load", kv, dtype=dtype, attr=1)
    tensors = [operands(dtype, ROWS), operands(dtype, COLUMNS)]
    if op in ("floordiv", "mod", "fmod") and category(dtype) == "int":
        tensors[1] = torch.where(tensors[1] == 0, 3, tensors[1]).to(dtype)
    if op == "pow" and category(dtype) == "int":
        tensors[1] = tensors[1].abs() % 9
    args = {1: [a], 2: [a, b], 3: [builder.add("lt", q, kv), a, b]}[OPS[op].arity]
    expr = builder.build(builder.add(op, *args))
    ours, theirs = by_triton(expr, (), tensors), by_torch(expr, (), tensors)
    assert same(op, ours, theirs), (ours[ours != theirs], theirs[ours != theirs])


@pytest.mark.parametrize("source", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("target", [torch.bool, torch.int8, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64])
def test_every_cast(source, target):  # type: ignore[no-untyped-def]
    builder = Builder()
    q = builder.add("index", dtype=torch.int64, attr="q_idx")
    expr = builder.build(builder.cast(builder.add("load", q, dtype=source, attr=0), target))
    tensors = [operands(source, ROWS)]
    assert torch.equal(by_triton(expr, (), tensors), by_torch(expr, (), tensors))
