"""Texts of every style against torch, by Triton's interpreter. Run by test_in_the_interpreter.py in a process of its own."""

import pytest
import torch
import triton
import triton.language as tl

from anyattn.backends.triton.codegen.assumptions import style_of
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.triton_tools.emit import PLAIN, Style
from tests.support.torch_functions import CASES, arguments, corners, steps_apart, wrong
from tests.support.triton.texts import COLUMNS, ROWS, by_triton


def by_torch(traced, score, first):  # type: ignore[no-untyped-def]
    b, h, q, kv = torch.tensor(1), torch.tensor(2), first + torch.arange(ROWS)[:, None], torch.arange(COLUMNS)
    leaves = {"b": b, "h": h, "q_idx": q, "kv_idx": kv, "score": score}
    return torch.broadcast_to(torch.as_tensor(run(traced.expr, leaves, traced.scalars, traced.tensors)[0]), (ROWS, COLUMNS))


def problem(length: int = 64) -> Problem:
    x = torch.zeros(1).expand(2, 3, length, 16)
    return Problem(x, x, x, 1.0)


torch.manual_seed(0)
TABLE, PAIRS, IDS = torch.randn(3, 200), torch.randn(64, 64), torch.arange(64) // 5
HALVES, SHORT = torch.randn(200).bfloat16(), (torch.arange(64) * 7 % 5).int()
BYTES = (torch.arange(64) * 37 - 100).to(torch.int8)
SHIFT, NEAR, FAR, REAL = 64, 5, 2**40, 0.37
SCORES = {
    "alibi": lambda s, b, h, q, k: s + TABLE[h, 0] * (q - k),
    "distance": lambda s, b, h, q, k: s - TABLE[h, 0] * ((q - k).abs() + NEAR) + (k - (q + k)) / 7.0,
    "bytes": lambda s, b, h, q, k: s + (BYTES[q] - BYTES[k]) * 0.5,
    "relative": lambda s, b, h, q, k: s + TABLE[h, q - k + SHIFT],
    "from the end": lambda s, b, h, q, k: s + TABLE[h, q - k],
    "pairs": lambda s, b, h, q, k: s - PAIRS[q, k],
    "turned pairs": lambda s, b, h, q, k: s - PAIRS.T[q, k],
    "buckets": lambda s, b, h, q, k: s + HALVES[((q - k).abs() + 1.0).log2().to(torch.int64)],
    "far": lambda s, b, h, q, k: s + (q - k + FAR) % 1000,
    "products": lambda s, b, h, q, k: s + ((q * 3001 * 70001) % 97 - k * k) * REAL,
    "rest": lambda s, b, h, q, k: torch.where((q - k) % 3 == 1, s * REAL, s - (q // 4) * (k >> 1)),
}
MASKS = {
    "window": lambda b, h, q, k: (q - k <= NEAR) & (k - q < FAR),
    "far away": lambda b, h, q, k: q + FAR >= k + FAR - 3,
    "documents": lambda b, h, q, k: IDS[q] == IDS[k],
    "int32": lambda b, h, q, k: SHORT[q] + 1 == SHORT[k],
    "bits": lambda b, h, q, k: ((q ^ k) & 5) < (~q & 3),
}


@pytest.mark.parametrize("first", [0, 31])
@pytest.mark.parametrize("name", [*SCORES, *MASKS])
def test_exact_texts(name, first):  # type: ignore[no-untyped-def]
    kind, mod = ("score", SCORES[name]) if name in SCORES else ("mask", MASKS[name])
    traced, score = trace(mod, kind), torch.randn(ROWS, COLUMNS)
    theirs = by_torch(traced, score, first)
    found = style_of(traced, traced.expr, problem())
    assert found.is_small == (name not in ("far", "far away", "window"))
    for style in (PLAIN, found, found._replace(is_inside=False), found._replace(dense=())):
        assert torch.equal(by_triton(traced, style, score, first), theirs), (name, style)


@pytest.mark.parametrize("by", [1, -1, 2, -3, 7, 32, 100, -4096, 2**20 + 1, 2**28 - 1, 1 - 2**28, 2**29 - 1])
@pytest.mark.parametrize(("first", "step"), [(0, 1), (3000, 90_001), (2**22 - 99, 31)])
def test_captured_divisors(by, first, step):  # type: ignore[no-untyped-def]
    """Of numbers of either sign, up to those of 31 bits; and their products, which have more."""
    score = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for mod in (
        lambda s, b, h, q, k, n=by: s + ((q - 3005) * step // n),
        lambda s, b, h, q, k, n=by: s + ((9 - q) * step % n),
        lambda s, b, h, q, k, n=by: s + ((5 - k) * step // n % 5 - q // n),
        lambda s, b, h, q, k, n=by, m=3 * by // 2: s + (q - k) * 60 // (n * m),
        lambda s, b, h, q, k, n=by, m=-5: s + k // (n * m) + q // (m * m),
    ):
        traced = trace(mod, "score", score_dtype=torch.float64)
        theirs = by_torch(traced, score, first)
        for style in (PLAIN, PLAIN._replace(is_small=True), PLAIN._replace(is_small=True, is_near=True)):
            if abs(by) < 2**28 or not style.is_small:
                assert torch.equal(by_triton(traced, style, score, first), theirs), style


def test_literal_divisors_beyond_32_bits():  # type: ignore[no-untyped-def]
    score = torch.zeros(ROWS, COLUMNS, dtype=torch.float64)
    for mod in (
        lambda s, b, h, q, k: s + k // (2**40 + 1) - q % (2**32 + 1),
        lambda s, b, h, q, k: s + k % (2**31 + 1) + q // 2**31 + k // (2**31 - 1),
        lambda s, b, h, q, k: s + k % 2**31 + q % 2**30 + (q - k) // 2**30,
    ):
        traced = trace(mod, "score", score_dtype=torch.float64)
        for style in (PLAIN, PLAIN._replace(is_small=True)):
            assert torch.equal(by_triton(traced, style, score, 5), by_torch(traced, score, 5)), style


def test_quotients_by_0_stay_inside_their_table():  # type: ignore[no-untyped-def]
    """Whatever they are: what lies before and after a table is not read."""
    around = torch.full((150,), torch.inf)
    around[50:100], n = torch.arange(50.0), 0
    table = around[50:100]
    for mod in (
        lambda s, b, h, q, k: s + table[q % abs(n)],
        lambda s, b, h, q, k: s + table[k // n],
        lambda s, b, h, q, k: s + table[q // abs(n) + 3],
    ):
        traced = trace(mod, "score")
        for style in (PLAIN, PLAIN._replace(is_small=True), PLAIN._replace(is_small=True, is_near=True)):
            assert by_triton(traced, style, torch.zeros(ROWS, COLUMNS), -9).isfinite().all(), style


FUNCTIONS = {
    "tanh": lambda s, b, h, q, k: 30 * torch.tanh(s / 30),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s * 3),
    "quotients": lambda s, b, h, q, k: s.abs() / (q + 1.5) / (k + 0.3) / REAL + 1 / s.abs().sqrt(),
    "powers": lambda s, b, h, q, k: s**4 + (k + 1.0) ** -REAL + s.abs().rsqrt() + torch.reciprocal(s).abs() + s.abs() ** ((k - 3.0) * 0.1),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_fast_functions(name):  # type: ignore[no-untyped-def]
    """To 18 bits of the result, small and large; the same at infinities, and NaN stays NaN."""
    traced = trace(FUNCTIONS[name], "score")
    for size in (1e-6, 1e-2, 1.0, 40.0):
        score = torch.randn(ROWS, COLUMNS) * size
        ours, theirs = by_triton(traced, Style(True, True, (), "fast"), score, 3).double(), by_torch(traced, score.double(), 3).double()
        assert bool(((ours - theirs).abs() <= theirs.abs() * 2**-17).all()), (name, size)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e30, -1e30, 1.0]).repeat(ROWS, COLUMNS // 8)
    if name in ("tanh", "sigmoid"):
        ours, theirs = by_triton(traced, Style(True, True, (), "fast"), odd, 0), by_torch(traced, odd, 0)
        assert torch.equal(ours.isnan(), theirs.isnan()) and torch.equal(ours[:, 1:4], theirs[:, 1:4])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if case.terms else pytest.mark.slow) for name, case in CASES.items()])
def test_functions_of_captured_values_are_torchs(name, dtype):  # type: ignore[no-untyped-def]
    """Of 16 bits within a unit in the last place, of float32 within 3 roundings, 6 for NumPy's logarithms, which are off by up to 4."""
    f, count, terms = CASES[name]
    table = arguments(count, dtype, ROWS * COLUMNS)
    mod = lambda s, b, h, q, k: f(*(table[n, q * COLUMNS + k] for n in range(count))).double()
    traced = trace(mod, "score", score_dtype=torch.float64)
    ours = by_triton(traced, PLAIN, torch.zeros(ROWS, COLUMNS, dtype=torch.float64), 0).flatten()
    theirs, values = f(*table), table.double()
    room = float(name == "erf") if terms is None else terms(*values)  # torch's own erf of float16 is off by 5 units near 0
    has_logarithm = not {"log", "log2", "erfinv"}.isdisjoint(node.op for node in traced.expr.nodes)
    bad = wrong(ours, theirs, 6 if has_logarithm else 3, room)
    assert not bad.any(), (table[:, bad], ours[bad], theirs[bad])


EXPONENTIALS = ("exp", "expm1", "log1p", "sigmoid", "tanh", "sinh", "cosh")


@pytest.mark.parametrize("name", EXPONENTIALS)
def test_exponentials_are_as_exact_as_torchs(name):  # type: ignore[no-untyped-def]
    """Within 1 ulp of the rounded true value wherever torch is, which overflows early; the same zeros, by sign, and NaN."""
    f = getattr(torch, name)
    traced, scores = trace(lambda s, b, h, q, k: f(s), "score"), corners(32 * ROWS * COLUMNS)
    ours = torch.cat([by_triton(traced, PLAIN, part.view(ROWS, COLUMNS), 0).flatten() for part in scores.split(ROWS * COLUMNS)])
    theirs, true = f(scores), f(scores.double()).float()
    is_exact = steps_apart(theirs, true) <= 1
    bad = is_exact & ((steps_apart(ours, true) > 1) | ((true == 0) & (ours.signbit() != true.signbit())))
    assert is_exact.float().mean() > 0.85 and not bad.any(), (is_exact.float().mean(), scores[bad], ours[bad], true[bad])


@triton.jit
def cast(x, out, N: tl.constexpr):
    lane = tl.arange(0, N)
    tl.store(out + lane, tl.load(x + lane).to(out.dtype.element_ty))


@pytest.mark.parametrize("other", [torch.bool, torch.int32, torch.int64, torch.float16, torch.float32, torch.float64], ids=str)
def test_casts_of_bfloat16(other):  # type: ignore[no-untyped-def]
    """What the interpreter is mended for; powers of two, so that nothing is rounded."""
    numbers = torch.tensor([0.0, 1.0, 2.0, 64.0])
    for source, target in ((torch.bfloat16, other), (other, torch.bfloat16)):
        out = torch.empty(4, dtype=target)
        cast[(1,)](numbers.to(source), out, 4)
        assert torch.equal(out, numbers.to(source).to(target)), (source, target)
