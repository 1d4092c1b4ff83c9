"""C++ operations against torch's, op by op: each is a predicate that is true where both agree."""

from __future__ import annotations

import ctypes
import tempfile
from array import array

import pytest
import torch

from anyattn.backends.torch.compiled import arguments, build, emit
from anyattn.backends.torch.compiled.kernel import FIELDS
from anyattn.backends.torch.mod_runner import Bound
from anyattn.mods.tracing.trace import trace

pytestmark = pytest.mark.skipif(build.reason_against() is not None, reason="no C++ compiler")
N = 512
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
FLOATS = (torch.float32, torch.float64)
HALVES = (torch.bfloat16, torch.float16)


def numbers(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(0, 2, (N,), generator=generator).bool()
    if not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        few = torch.randint(max(info.min, -9), 9, (N,), generator=generator).to(dtype)
        few[:64] = torch.randint(info.min, info.max, (64,), generator=generator, dtype=torch.int64).to(dtype)
        few[64:67] = torch.tensor([info.min, info.max, 0], dtype=dtype)
        return few
    values = torch.randn(N, generator=generator, dtype=torch.float64).mul(4).to(dtype)
    values[100:200] = values[100:200].round() / 2
    values[:8] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 1e30, -1e30, 1e-30], dtype=dtype)
    return values


# name: (dtypes, function of two tables' values, relative error in units of the last place)
UNARY = {
    "neg": lambda x, y: -x, "abs": lambda x, y: abs(x), "rsqrt": lambda x, y: x.rsqrt(),
    "reciprocal": lambda x, y: x.reciprocal(),
    "floor": lambda x, y: x.floor(), "ceil": lambda x, y: x.ceil(),
    "trunc": lambda x, y: x.trunc(), "round": lambda x, y: x.round(), "div": lambda x, y: x / y, "square": lambda x, y: x**2,
    "cube": lambda x, y: x**3, "sign": lambda x, y: x.sign(),
}  # fmt: skip
BOTH = {
    "add": lambda x, y: x + y, "sub": lambda x, y: x - y, "mul": lambda x, y: x * y, "min": torch.minimum, "max": torch.maximum,
    "eq": lambda x, y: x == y, "ne": lambda x, y: x != y, "lt": lambda x, y: x < y, "le": lambda x, y: x <= y, "gt": lambda x, y: x > y,
    "ge": lambda x, y: x >= y, "where": lambda x, y: torch.where(x > y, x, y), "to int64": lambda x, y: (x > y).to(torch.int64) - 3,
    "to float": lambda x, y: x.to(torch.float32) * 0.1, "to double": lambda x, y: x.to(torch.float64) + 0.1,
    "to bool": lambda x, y: x.to(torch.bool), "to bfloat16": lambda x, y: x.to(torch.bfloat16),
    "to float16": lambda x, y: x.to(torch.float16),
}  # fmt: skip
# torch computes products with a number, and quotients by one, before it rounds; any other number is rounded to the values' dtype
WITH_NUMBERS = {
    "plus": lambda x, y: x + 257.3, "minus": lambda x, y: x - 0.1001, "minus x": lambda x, y: 257.3 - x, "times": lambda x, y: 257.3 * x,
    "over": lambda x, y: x / 257.3, "over x": lambda x, y: 0.1001 / x, "least": lambda x, y: torch.clamp(x, max=0.1001),
    "less": lambda x, y: x < 257.3, "is": lambda x, y: x.round() == 1.0001, "or": lambda x, y: torch.where(x > y, x, 0.1001),
    "more": lambda x, y: x * 3 + y,
}  # fmt: skip
WHOLE = {
    "floordiv": lambda x, y: x // 7, "mod": lambda x, y: x % 7, "floordiv by 1": lambda x, y: (x + y) // 4, "and": lambda x, y: x & y,
    "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y, "not": lambda x, y: ~x, "shl": lambda x, y: x << 3, "shr": lambda x, y: x >> 2,
    "sign": lambda x, y: x.sign(), "neg": lambda x, y: -x, "abs": lambda x, y: abs(x), "to int8": lambda x, y: x.to(torch.int8),
    "to int32": lambda x, y: x.to(torch.int32),
    "to uint8": lambda x, y: x.to(torch.uint8), "to int16": lambda x, y: (x + y).to(torch.int16),
}  # fmt: skip
LOGIC = {"and": lambda x, y: x & y, "or": lambda x, y: x | y, "xor": lambda x, y: x ^ y, "not": lambda x, y: ~x, "eq": lambda x, y: x == y}
ABOUT = {
    "exp": (lambda x, y: x.exp(), 4), "sqrt": (lambda x, y: x.sqrt(), 2), "exp2": (lambda x, y: x.exp2(), 4),
    "tanh": (lambda x, y: x.tanh(), 8), "sigmoid": (lambda x, y: x.sigmoid(), 8),
}  # fmt: skip


def cases():
    for dtype in FLOATS:
        yield from ((f"{name} {dtype}", dtype, f, 0) for name, f in (UNARY | BOTH).items())
    for dtype in HALVES:
        yield from ((f"{name} {dtype}", dtype, f, 0) for name, f in (UNARY | BOTH | WITH_NUMBERS).items() if name != "cube")
    for dtype in INTEGERS:
        yield from ((f"{name} {dtype}", dtype, f, 0) for name, f in (WHOLE | BOTH).items())
    yield from ((f"{name} bool", torch.bool, f, 0) for name, f in LOGIC.items())
    yield from ((name, torch.float32, f, ulps) for name, (f, ulps) in ABOUT.items())


def agreement(x, y, expected, f, ulps):
    """A mask that is true at the keys at which f of the tables' values is as expected."""

    def mask(b, h, i, j):
        got, want = f(x[i, j], y[i, j]), expected[i, j]
        if not expected.dtype.is_floating_point:
            return got == want
        both_nan = (got != got) & (want != want)
        if not ulps:
            return (got == want) | both_nan
        return (got == want) | both_nan | (abs(got - want) <= ulps * 2.0**-24 * abs(want) + 2.0**-126)

    return mask


def library_of(text):
    with tempfile.NamedTemporaryFile(suffix=".so") as file:
        file.write(build._compile(build._compiler(""), text))
        file.flush()
        return ctypes.CDLL(file.name)


def agreeing(text, tables, predicates, leaves=()):
    """For each predicate the keys at which it is true, (N,). leaves: the numbers of ``Args.leaves``."""
    extra = (
        'extern "C" void each(Args *a, float *s, i64 predicate) {'
        f"  const Place p = {{0, 0, 0, 0, 0, 0}}; modify(a, &p, s, nullptr, 0, {N}, (i64)1 << predicate); }}"
    )
    places = array("q", [n for t in tables for n in (t.data_ptr(), *(n for pair in zip(t.stride(), t.shape, strict=True) for n in pair))])
    fields = array("q", [0] * len(FIELDS))
    fields[FIELDS.index("tables")] = places.buffer_info()[0]
    values = array("q", leaves)
    fields[FIELDS.index("leaves")] = values.buffer_info()[0]
    each = library_of(text + extra).each
    each.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64]
    scores = torch.zeros(predicates, N)
    for predicate in range(predicates):
        each(fields.buffer_info()[0], scores[predicate].data_ptr(), predicate)
    return scores == 0


@pytest.mark.parametrize("dtype", [*FLOATS, *HALVES, *INTEGERS, torch.bool], ids=str)
def test_operations_are_torchs(dtype):
    found = [case for case in cases() if case[1] is dtype]
    assert len(found) < 63
    sources, tables, expected = [], [], []
    for place, (_, _, f, ulps) in enumerate(found):
        x, y = (numbers(dtype, seed)[None] for seed in (1, 2))
        expected.append(f(x, y).contiguous())
        mod = trace(agreement(x, y, expected[-1], f, ulps), "mask")
        sources.append(emit.Source(place, mod.expr.without_detach, tuple(emit.Table(t.dtype, t.ndim, True) for t in mod.tensors)))
        tables.append(mod.tensors)
    loops = emit.loops_of(tuple(sources), False)
    assert not loops.leaves
    visible = agreeing(loops.text, [tables[mod][slot] for mod, slot in loops.slots], len(found))
    for place, (name, *_) in enumerate(found):
        agrees = visible[place]
        assert bool(agrees.all()), (
            f"{name}: differs at {(~agrees).nonzero().flatten().tolist()[:9]}, wanted {expected[place][0][~agrees][:9]}"
        )


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_captured_numbers_are_rounded_where_torch_rounds_them(dtype):
    x, y = (numbers(dtype, seed)[None] for seed in (1, 2))
    number = 257.3
    functions = [
        lambda x: x * number, lambda x: x / number, lambda x: x + number, lambda x: number - x, lambda x: x < number,
        lambda x: torch.where(x > y[0, 0], x, number), lambda x: torch.clamp(x, min=number), lambda x: (x > 0) * number + x,
    ]  # fmt: skip
    expected = [f(x).contiguous() for f in functions]
    mods = [trace(agreement(x, y, e, lambda x, _, f=f: f(x), 0), "mask") for f, e in zip(functions, expected, strict=True)]
    sources = [
        emit.Source(at, m.expr.without_detach, tuple(emit.Table(t.dtype, t.ndim, True) for t in m.tensors)) for at, m in enumerate(mods)
    ]
    loops = emit.loops_of(tuple(sources), False)
    assert loops.leaves
    bounds = [Bound(m.expr, m.scalars, m.tensors, 1, 1, 1, N, torch.device("cpu")) for m in mods]
    found = [arguments._leaf(bounds[mod], node) for mod, node in loops.leaves]
    tables = [mods[mod].tensors[slot] for mod, slot in loops.slots]
    visible = agreeing(loops.text, tables, len(mods), [n for leaf in found for n in arguments._leaf_numbers(leaf)])
    assert visible.all(1).tolist() == [True] * len(mods)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("f", [lambda x: x**3, torch.exp, torch.tanh], ids=["cube", "exp", "tanh"])
def test_operations_of_16_bits_whose_rounding_is_unknown_are_not_compiled(f, dtype):
    x = numbers(dtype, 1)[None]
    mod = trace(lambda b, h, i, j: f(x[i, j]) > 0, "mask")
    with pytest.raises(emit.NotCompiledError, match=f"of {dtype}"):
        emit.loops_of((emit.Source(0, mod.expr, (emit.Table(dtype, 2, True),)),), False)


def test_conversions_of_16_bits_are_torchs():
    every = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    wide = torch.cat([torch.randn(2**16, generator=torch.Generator().manual_seed(1)) * 10.0**e for e in (-8, -5, -3, 0, 3, 5, 38)])
    extra = """
extern "C" void widen_all(const u16 *x, f32 *b, f32 *h) {
  for (i64 n = 0; n < 65536; ++n) b[n] = from_bfloat16(x[n]), h[n] = from_float16(x[n]); }
extern "C" void narrow_all(const f32 *x, u16 *b, u16 *h, i64 n) {
  for (i64 j = 0; j < n; ++j) b[j] = to_bfloat16(x[j]), h[j] = to_float16(x[j]); }
"""
    library = library_of(emit.loops_of((), False).text + extra)
    b, h = torch.empty(2**16), torch.empty(2**16)
    address = lambda t: ctypes.c_void_p(t.data_ptr())
    library.widen_all(address(every), address(b), address(h))
    for got, dtype in ((b, torch.bfloat16), (h, torch.float16)):
        assert torch.equal(got.nan_to_num(nan=-77.0), every.view(dtype).float().nan_to_num(nan=-77.0))
    wide = torch.cat([wide, b, h, torch.nextafter(h, torch.tensor(0.0)), torch.nextafter(b, torch.tensor(9e9))])
    b, h = torch.empty(len(wide), dtype=torch.int16), torch.empty(len(wide), dtype=torch.int16)
    library.narrow_all(address(wide), address(b), address(h), ctypes.c_int64(len(wide)))
    for got, dtype in ((b, torch.bfloat16), (h, torch.float16)):
        assert torch.equal(got.view(dtype).nan_to_num(nan=-77.0), wide.to(dtype).nan_to_num(nan=-77.0))
