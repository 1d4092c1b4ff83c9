"""What the Hopper emitter writes, by value: its source runs as Python, CuTe operations as NumPy's, and torch says what is right."""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from anyattn.backends.hopper.codegen.operations import WRITTEN
from anyattn.backends.hopper.codegen.score_analysis import bias, cases, is_even
from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.ir.expr import OPS, Builder, Expr, category
from anyattn.mods.tracing.trace import trace
from tests.support import torch_operations as operations
from tests.support.hopper.emitted import OUTSIDE, Array, Int32, emitter, numbers_of, run_source

REAL = torch.tensor([0.0, 0.25, -0.75, 1.0, -1.0, 1.5, 2.0, -2.5, 3.0, -3.0, 7.25, -12.5, 0.1, 30.0, -0.001, 1000.0])
WHOLE = torch.tensor([0, 1, -1, 2, -2, 3, -3, 5, 7, -8, 16, 31, -100, 1000, 4, 9])
ROWS, COLUMNS = 16, 16


def emitted(
    expr: Expr,
    scalars: tuple,
    tensors: list[Tensor],
    score: Tensor | None = None,
    sign: str = "dividend",
    reads_ahead: bool = False,
    at: Any = (0, 0),
) -> Tensor:
    """at: the position of the fragment's first row and column."""
    kind = category(expr.output.dtype)
    dtype = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[kind]
    out = torch.empty(ROWS, COLUMNS, dtype=dtype)
    places, numbers = places_at(at), numbers_of(scalars)
    read = None if score is None else (lambda r, c: np.float32(score[r, c].item()))
    with np.errstate(all="ignore"):
        store = lambda r, c, x: out.__setitem__((r, c), x.item() if isinstance(x, np.generic) else x)
        emitter(sign)["emit"](expr, numbers, [Array(t) for t in tensors], places, read, store, reads_ahead)
    return out


def places_at(at: tuple[int, int], rows: int = ROWS, columns: int = COLUMNS) -> dict[str, Any]:
    q_idx, kv_idx = ([np.int32(first + i) for i in range(n)] for first, n in zip(at, (rows, columns), strict=True))
    return {"b": np.int32(1), "h": np.int32(2), "q_idx": q_idx, "kv_idx": kv_idx, "apart": list(range(rows)), "steps": list(range(columns))}


def assert_same(op: str, ours: Tensor, theirs: Tensor) -> None:
    """Equal; of rounded functions within 8 roundings of float32, as many more as a power's exponent of 2 is large."""
    if not theirs.is_floating_point():
        assert torch.equal(ours, theirs.to(ours.dtype))
        return
    theirs = theirs.double()
    growth = 1 + theirs.abs().log2().abs().nan_to_num(0, 0, 0) if op == "pow" else 1
    room = theirs.abs() * 8 * torch.finfo(torch.float32).eps * growth + torch.finfo(torch.float32).tiny
    equal = (ours == theirs) | (ours.isnan() & theirs.isnan())
    fits = equal | (torch.isfinite(theirs) & ((ours - theirs).abs() <= (0 if op in ("fmod", "mod") else room)))
    assert bool(fits.all()), (op, ours[~fits], theirs[~fits])


# dropout's hash is written by the kernels themselves
CASES = [
    (op, kind) for op, spec in OPS.items() for kind in ("float", "int", "bool") if op not in ("cast", "fold") and kind in spec.operands
]


@pytest.mark.covering(1)
@pytest.mark.parametrize("sign", ["dividend", "divisor"])
@pytest.mark.parametrize("op,kind", CASES, ids=str)
def test_every_operation(op: str, kind: str, sign: str) -> None:
    """On numbers of rows and columns, all pairs of which meet."""
    assert op in WRITTEN
    dtype = {"float": torch.float32, "int": torch.int64, "bool": torch.bool}[kind]
    values = {"float": REAL, "int": WHOLE, "bool": torch.arange(ROWS) % 3 == 1}[kind].to(dtype)
    a, b = values, values.roll(5)
    if op in ("floordiv", "mod", "fmod", "div") and kind == "int":
        b = torch.where(b == 0, 6, b)
    if op in ("shl", "shr"):
        b = b.abs() % 31
    if op == "pow" and kind == "int":
        pytest.skip("an exponent of whole numbers is a literal: below")
    builder = Builder()
    q, kv = (builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx"))
    x, y = builder.add("load", q, dtype=dtype, attr=0), builder.add("load", kv, dtype=dtype, attr=1)
    args = {1: [x], 2: [x, y], 3: [builder.add("lt", q, kv), x, y]}[OPS[op].arity]
    expr = builder.build(builder.add(op, *args))
    leaves = {"b": 1, "h": 2, "q_idx": torch.arange(ROWS)[:, None], "kv_idx": torch.arange(COLUMNS), "score": None}
    theirs = torch.broadcast_to(run(expr, leaves, (), [a, b])[0], (ROWS, COLUMNS))
    assert_same(op, emitted(expr, (), [a, b], sign=sign), theirs)


@pytest.mark.parametrize("name", operations.EVERY)
def test_activations_rows_and_mods_of_other_libraries(name: str) -> None:
    """Scores within 64 roundings of what torch makes of them in float64, masks equal."""
    made = operations.EVERY[name]()
    mod = trace(made.score or made.mask, "score" if made.score else "mask")  # type: ignore[arg-type]
    score = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(2)) * 2
    leaves = (1, 2, torch.arange(ROWS)[:, None], torch.arange(COLUMNS))
    theirs = evaluate(mod, *leaves, score.double() if made.score else None).expand(ROWS, COLUMNS)
    ours = emitted(mod.expr, mod.scalars, list(mod.tensors), score if made.score else None)
    if made.score is None:
        assert torch.equal(ours, theirs)
    else:
        room = 64 * torch.finfo(torch.float32).eps * theirs.abs().clamp(min=1)
        assert bool(((ours - theirs).abs() <= room).all()), (ours - theirs).abs().max()


def test_nan_and_infinities() -> None:
    """Checks of them, as masks and in scores."""
    table = torch.tensor([0.0, -1.0, math.inf, -math.inf, math.nan, 3.0, 1e38, -0.0] * 2)
    for f in (torch.isnan, torch.isinf, torch.isfinite, lambda x: torch.nan_to_num(x, 2.0) > 1, lambda x: torch.hypot(x, x) > 1):
        mod = trace(lambda b, h, q, k, f=f: f(table[k]), "mask")
        theirs = evaluate(mod, 1, 2, torch.arange(ROWS)[:, None], torch.arange(COLUMNS)).expand(ROWS, COLUMNS)
        assert torch.equal(emitted(mod.expr, mod.scalars, [table]), theirs)


EXPONENTS = [0.0, 1.0, -1.0, 3.0, -2.0, 4.0, -5.0, 16.0, 0.5, -0.5, 1.5, -2.5, 1.7, -0.3, 21.0, -33.0, 40.0, math.inf, -math.inf]


@pytest.mark.parametrize("exponent", EXPONENTS)
def test_literal_exponents(exponent: float) -> None:
    """Scores of either sign, zeros, inf and NaN among them."""
    score, builder = _scores(), Builder()
    expr = builder.build(builder.add("pow", builder.add("score", dtype=torch.float32), builder.const(exponent, torch.float32)))
    theirs = score.double() ** exponent
    assert_same("pow", emitted(expr, (), [], score), theirs.float())


def _scores() -> Tensor:
    return torch.cat([REAL, REAL * 0.37 + 0.2, -REAL * 1.9, torch.tensor([math.inf, math.nan, 1e-30, 65504.0] * 4)]).repeat(4).view(16, 16)


def test_captured_exponents_and_bases() -> None:
    """Numbers and tensors at run time: bases below 0 have whole powers alone."""
    table = torch.tensor([0.0, 1.0, 2.0, -3.0, 0.5, -1.5, 7.0, 100.0] * 2)
    for number in (2, 3.0, -1, 0, 0.5, 2.5):
        for mod in (
            trace(lambda s, b, h, q, k, n=number: s**n, "score"),
            trace(lambda s, b, h, q, k, n=number: (q + 1.0) ** n, "score"),
            trace(lambda s, b, h, q, k: s ** table[k], "score"),
            trace(lambda s, b, h, q, k: 2.0 ** (-k), "score"),
            trace(lambda s, b, h, q, k: 0.5 ** (q - k), "score"),
            trace(lambda s, b, h, q, k: (-2.0) ** (q - k), "score"),
            trace(lambda s, b, h, q, k: 1.0 ** (q - k), "score"),
        ):
            score = _scores().nan_to_num(1.0, 3.0)
            leaves = (1, 2, torch.arange(ROWS)[:, None], torch.arange(COLUMNS))
            theirs = evaluate(mod, *leaves, score.double()).expand(ROWS, COLUMNS)
            assert_same("pow", emitted(mod.expr, mod.scalars, list(mod.tensors), score), theirs)


DIVISORS = (1, -1, 2, -3, 7, 32, 100, -4096, 2**20 + 1, 2**28 - 1, 1 - 2**28, 2**29 - 1)


@pytest.mark.parametrize("by", DIVISORS)
@pytest.mark.parametrize(("at", "step"), [((0, 0), 1), ((3000, 5000), 90_001), ((2**24 - 17, 2**24 - 40), 31)])
def test_captured_divisors(by: int, at: tuple[int, int], step: int) -> None:
    """Of numbers of either sign, up to those of 31 bits; and their products, which have more."""
    for mask in (
        lambda b, h, q, k, n=by: (q - 3005) * step // n >= 0,
        lambda b, h, q, k, n=by: (k - 5005) * step % n >= 0,
        lambda b, h, q, k, n=by: (5005 - k) * step // n % 5 - q // n >= 0,
        lambda b, h, q, k, n=by, m=3 * by // 2: (q - k) * 60 // (n * m) >= 0,
        lambda b, h, q, k, n=by, m=-5: k // (n * m) + q // (m * m) >= 0,
    ):
        mod, builder = trace(mask, "mask"), Builder()
        expr = builder.build(builder.copy(mod.expr, mod.expr.output.args[0]))
        leaves = {"b": 1, "h": 2, "q_idx": at[0] + torch.arange(ROWS)[:, None], "kv_idx": at[1] + torch.arange(COLUMNS)}
        theirs = torch.as_tensor(run(expr, leaves, mod.scalars, ())[0]).expand(ROWS, COLUMNS)
        assert_same("floordiv", emitted(expr, mod.scalars, [], at=at), theirs)


def test_quotients_by_0() -> None:
    """0 or -1, so that a table that they index is not left."""
    mod, builder = trace(lambda b, h, q, k, n=0: (q - 5) // n >= 0, "mask"), Builder()
    expr = builder.build(builder.copy(mod.expr, mod.expr.output.args[0]))
    assert set(emitted(expr, mod.scalars, []).unique().tolist()) <= {0, -1}


@pytest.mark.parametrize("exponent", [0, 1, 3, 4, 7, -1, -2, -3])
def test_whole_numbers_have_whole_powers(exponent: int) -> None:
    """In 64 bits; under 0 only 1 and -1 have one."""
    values = torch.tensor([0, 1, -1, 2, -2, 3, -5, 10, 1300, -1300, 2000, 77, -9, 30, 100, 255])
    builder = Builder()
    at = builder.add("load", builder.add("index", dtype=torch.int64, attr="q_idx"), dtype=torch.int64, attr=0)
    expr = builder.build(builder.add("pow", at, builder.const(exponent, torch.int64)))
    below = {1: 1, -1: -1 if exponent % 2 else 1}
    theirs = [(x**exponent + 2**63) % 2**64 - 2**63 if exponent >= 0 else below.get(x, 0) for x in values.tolist()]
    assert emitted(expr, (), [values])[:, 0].tolist() == theirs


def test_rests_of_floats_are_exact() -> None:
    """Quotients that lie next to whole numbers, where a rounded division says the wrong one."""
    g = torch.Generator().manual_seed(0)
    b = (torch.rand(16, generator=g) * 3 + 0.1) * torch.tensor([1, -1] * 8)
    a = (b[None] * torch.arange(-8, 8)[:, None] * 1000.0)[:, torch.randperm(16, generator=g)].diagonal()
    a = torch.cat([a[:8], torch.nextafter(a[8:], torch.tensor(math.inf))])
    for op in ("fmod", "mod"):
        builder = Builder()
        q, kv = (builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx"))
        x, y = builder.add("load", q, dtype=torch.float32, attr=0), builder.add("load", kv, dtype=torch.float32, attr=1)
        expr = builder.build(builder.add(op, x, y))
        theirs = getattr(torch, {"fmod": "fmod", "mod": "remainder"}[op])(a[:, None], b[None])
        assert torch.equal(emitted(expr, (), [a, b]), theirs), op
    for divisor in (3.0, -1.5, math.inf, 0.0):
        for function in (torch.fmod, torch.remainder):
            mod = trace(lambda s, b, h, q, k, f=function, by=divisor: f(s, by), "score")
            assert_same("fmod", emitted(mod.expr, mod.scalars, [], _scores()), function(_scores(), divisor))
            builder = Builder()
            leaf, by = builder.add("score", dtype=torch.float32), builder.const(divisor, torch.float32)
            literal = builder.build(builder.add("fmod" if function is torch.fmod else "mod", leaf, by))
            assert_same("fmod", emitted(literal, (), [], _scores()), function(_scores(), divisor))


TABLE = torch.randn(4, 99, generator=torch.Generator().manual_seed(1))
SLOPES = torch.tensor([0.5, 0.25, 0.3, 0.7])
BIASES = {
    "alibi": lambda s, b, h, q, k: s - SLOPES[h] * (q - k).abs(),
    "alibi and a number": lambda s, b, h, q, k: s - 3.0 - SLOPES[h] * (q - k).abs() + SLOPES[b],
    "near": lambda s, b, h, q, k: s + torch.where(q - k < 3, 1.5, SLOPES[h]) * (q + k),
    "by distance": lambda s, b, h, q, k: s + TABLE[h, (q - k).abs()],
    "clamped": lambda s, b, h, q, k: s + TABLE[h, torch.clamp(q - k, -4, 4) + 4],
    "buckets": lambda s, b, h, q, k: s + TABLE[h, torch.log2((q - k).abs().clamp(min=1).float() * 3.0).to(torch.int64)],
    "curved": lambda s, b, h, q, k: s - torch.exp(SLOPES[h] * (k - q)) * 0.125,
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("at", [(0, 0), (40, 3), (3, 40), (30, 16), (16, 30), (20, 16)], ids=str)
@pytest.mark.parametrize("name", BIASES)
def test_biases_by_cases(name: str, at: tuple[int, int]) -> None:
    """Left of the diagonal, right of it and across: in whichever case is found to hold, and as written."""
    mod = trace(BIASES[name], "score")
    added = bias(mod.expr)
    assert added is not None
    q, k = torch.arange(ROWS)[:, None] + at[0], torch.arange(COLUMNS) + at[1]
    theirs = evaluate(mod, 1, 2, q, k, torch.zeros(ROWS, COLUMNS, dtype=torch.float64))
    tensors, numbers, names = [Array(t) for t in mod.tensors], numbers_of(mod.scalars), emitter("dividend")
    held = 0
    for piece in cases(added):
        where = torch.ones(ROWS, COLUMNS, dtype=torch.bool)
        for condition in piece.conditions:
            where &= torch.as_tensor(run(condition, {"b": 1, "h": 2, "q_idx": q, "kv_idx": k}, mod.scalars, list(mod.tensors))[0]) >= 0
        said = bool(names["holds"](piece.conditions, numbers, tensors, places_at(at))) if piece.conditions else True
        assert said == bool(where.all())
        if said:
            held += 1
            assert_added(piece.expr, mod, theirs, at)
    assert_added(added, mod, theirs, at, False)
    assert held <= 1 and (held == 1 or name in ("near", "buckets", "curved", "clamped") or abs(at[0] - at[1]) < 16)


def assert_added(expr: Expr, mod: Any, theirs: Tensor, at: tuple[int, int], ahead: bool = True) -> None:
    if is_even(expr):
        lines = emitter("dividend")["emit_lines"](expr, numbers_of(mod.scalars), [Array(t) for t in mod.tensors], places_at(at))
        ours = torch.tensor([[float(start) + float(change) * c for c in range(COLUMNS)] for start, change in lines])
    else:
        ours = emitted(expr, mod.scalars, list(mod.tensors), None, "dividend", ahead, at)
    # what grows along a row is added up from its first column, at most 16 roundings of the largest number there
    room = theirs.abs().amax(-1, keepdim=True) * 16 * torch.finfo(torch.float32).eps
    assert bool(((ours - theirs).abs() <= room).all()), (ours, theirs)


def test_positions_past_the_last_disturb_no_other() -> None:
    """They are lowered to the last, so that their diagonals are not where literals have them."""
    mod = trace(BIASES["by distance"], "score")
    places = places_at((0, 0))
    places["q_idx"] = [min(i, np.int32(9)) for i in places["q_idx"]]
    places["kv_idx"] = [min(i, np.int32(11)) for i in places["kv_idx"]]
    out = torch.zeros(ROWS, COLUMNS)
    added = bias(mod.expr)
    assert added is not None
    emitter("dividend")["emit"](added, (), [Array(t) for t in mod.tensors], places, None, lambda r, c, x: out.__setitem__((r, c), float(x)))
    theirs = TABLE[2][(torch.arange(10)[:, None] - torch.arange(12)).abs()]
    assert torch.equal(out[:10, :12], theirs)


@pytest.mark.parametrize(
    "mask",
    [
        lambda t, i, j: (i + 41) / 41.0 >= 1,  # 41 * (1 / 41) is less than 1 in float32
        lambda t, i, j: torch.floor((i + 41).float() / t[j % 4]) > 0,
        lambda t, i, j: torch.sqrt((i + 1) * 1.0) == torch.sqrt((j + 1) * 1.0),
        lambda t, i, j: 1 / t[j % 4] * 41 == (i + 41) * 0.024390243902439025,
        lambda t, i, j: torch.maximum(t[j % 5], t[i % 5]) > 40,
        lambda t, i, j: torch.clamp(t[j % 5], max=1.0) <= i,
        lambda t, i, j: torch.exp(t[j % 5] * 0).ceil() == 1,
        lambda t, i, j: torch.sigmoid(t[j % 5] * 0) == 0.5,
    ],
)
def test_numbers_that_a_comparison_depends_on_are_rounded_as_torch_rounds_them(mask: Any) -> None:
    """The emitter's approximate functions are off by a unit in the last place here, too."""
    t = torch.tensor([41.0, 47.0, 55.0, 61.0, torch.nan])
    mod = trace(lambda b, h, q, k: mask(t, q, k), "mask")
    wanted = mask(t, torch.arange(ROWS)[:, None], torch.arange(COLUMNS)).expand(ROWS, COLUMNS)
    assert torch.equal(emitted(mod.expr, mod.scalars, list(mod.tensors)), wanted)


@cache
def powers() -> dict[str, Any]:
    """The names of ``powers.py``."""
    names = run_source("kernel/exp2_poly", dict(emitter("dividend")))
    names["bits"] = lambda x, kind: np.frombuffer(x.tobytes(), np.int32 if kind is Int32 else np.float32)[0]
    return names


def test_exponentials_by_multiplications() -> None:
    """Of a product within 126 to either side: 1.2e-4 of the true one, a fortieth of bfloat16's rounding."""
    names = powers()
    for x in np.linspace(-125, 125, 4001, dtype=np.float32):
        for factor in (1.0, 43.28, 0.01):
            product = np.longdouble(x / np.float32(factor)) * np.longdouble(np.float32(factor))
            for ours in (names["exp2_of_product"](x / np.float32(factor), np.float32(factor)), names["exp2"](np.float32(product))):
                assert abs(np.longdouble(ours) / np.exp2(product) - 1) < 1.2e-4
    assert names["exp2"](np.float32(-np.inf)) == 0


class Fragment:
    """A thread's scores, (rows, columns), or a number for each of its rows."""

    def __init__(self, values: Any):
        self.values = np.asarray(values, np.float32)

    def __getitem__(self, place: Any) -> Any:
        found = self.values[tuple(slice(None) if i is None else i for i in place) if isinstance(place, tuple) else place]
        return Fragment(found) if isinstance(place, tuple) and None in place else np.float32(found)

    def __setitem__(self, place: Any, value: Any) -> None:
        self.values[place] = value

    def load(self) -> Fragment:
        return self

    def reduce(self, operation: str, first: Any, _: int) -> Any:
        assert operation == "add"
        return np.float32(first) + self.values.sum()


def guesses() -> Any:
    """An object of the class in ``guesses.py``; the warp is one thread."""
    given = {**emitter("dividend"), **powers(), "Boolean": bool}
    size = lambda x, mode=None: len(x.values) if mode is None else x.values.shape[mode[0]]
    arch = SimpleNamespace(**vars(given["cute"].arch), vote_all_sync=bool)
    given["cute"] = SimpleNamespace(
        **{**vars(given["cute"]), "arch": arch}, size=size, jit=lambda f: f, ReductionOp=SimpleNamespace(ADD="add")
    )
    given |= {"rows_and_columns": lambda x: x, "const_expr": bool}
    given["sum_of"] = run_source("kernel/exp2_poly", given)["sum_of"]
    outside = (*OUTSIDE, *(f"anyattn.backends.hopper.{name}" for name in ("codegen.emit", "kernel.fragment", "kernel.exp2_poly")))
    return run_source("kernel/speculative_softmax", given, outside)["Guesses"]()


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_the_maximum_held_is_enough_until_it_is_far_below() -> None:
    random, guess = np.random.default_rng(0), guesses()
    scores = Fragment(random.normal(size=(2, 32)) * 3)
    rate, lifts = np.float32(1.3), Fragment([0.5, -2.0])
    for held, lifted in (([9.0, 4.0], None), ([9.0, 4.0], lifts), ([-1.0, 0.0], None), ([60.0, 400.0], None)):
        to, sums = Fragment(np.zeros((2, 32))), Fragment(np.zeros(2))
        assert guess._by_held(scores, lifted, to, sums, Fragment(held), rate)
        top = np.float64(held) - (0 if lifted is None else np.float64(lifts.values))
        wanted = np.exp2((np.float64(scores.values) - top[:, None]) * rate)
        wanted[wanted < 2.0**-126] = 0  # what is less need not be told from 0
        assert bool((np.abs(to.values - wanted) <= 1e-4 * wanted + 2.0**-126).all())
        assert bool((np.abs(sums.values - wanted.sum(1)) <= 1e-4 * wanted.sum(1) + 2.0**-120).all())
    for row, held, score in (
        (0, 0.0, 10.1),
        (1, 0.0, 1000.0),
        (1, -np.inf, 0.0),
        (1, -np.inf, -np.inf),
        (0, 0.0, np.nan),
        (0, 0.0, np.inf),
    ):
        tops, other = Fragment([5.0, 5.0]), Fragment(scores.values.copy())
        tops[row], other[row, 16] = held, score
        assert not guess._by_held(other, None, to, sums, tops, rate), (row, held, score)


@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")
def test_scores_far_from_their_cap() -> None:
    """The exponent is within 2.5e-4 of the true one; nearer to the cap, and for factors out of the ordinary, the guess is called wrong."""
    random, guess, reach = np.random.default_rng(1), guesses(), powers()["FAR_FROM_CAP"]
    to, sums = Fragment(np.zeros((2, 32))), Fragment(np.zeros(2))
    for cap in (50.0, 30.0, 1.0):
        rate = np.float32(cap * math.log2(math.e))
        for before in (0.0884 / cap, -0.3, 2.0**-18, 2.0**18):
            before = np.float32(before)
            scores = Fragment(random.uniform(-reach, reach, size=(2, 32)) * 0.999 / before)
            assert guess._far_from_cap(scores, to, sums, before, rate)
            exponent = np.float64(rate) * np.tanh(np.float64(scores.values) * np.float64(before))
            room = np.exp2(np.abs(exponent) * 2.5e-4) * (1 + 1e-5) - 1
            assert bool((np.abs(to.values / np.exp2(exponent) - 1) <= room).all())
            assert bool((np.abs(sums.values - np.float64(to.values).sum(1)) <= 1e-5 * sums.values).all())
            scores[1, 30] = 1.001 * reach / before
            assert not guess._far_from_cap(scores, to, sums, before, rate)
        for before in (1e9, 1e-9, np.nan, np.inf):
            assert not guess._far_from_cap(Fragment(np.zeros((2, 32))), to, sums, np.float32(before), rate)
