"""Gradients that do not depend on the order in which programs run, by Triton's interpreter: sums of whole numbers, and keys in pages.

The interpreter runs programs one after the other, so another order is one that these tests make. Run by ``test_in_the_interpreter.py`` in a
process of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from triton.runtime import interpreter

import anyattn
from anyattn import masks, oracle
from anyattn.backends.triton import backward_pass, deterministic_sum
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from anyattn.triton_tools import device_math
from anyattn.validate import flex
from tests.support import cases
from tests.support.covering import few

INF, NAN = math.inf, math.nan
BLOCK, LENGTH = 32, 40


@triton.jit
def send(numbers, places, sums, stride: tl.int64, planes: tl.int64, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x, place = tl.load(numbers + at, mask=at < count, other=0.0), tl.load(places + at, mask=at < count, other=0)
    device_math.send_exact((sums, stride, planes), place, x, at < count)


def summed(
    numbers: torch.Tensor, places: torch.Tensor, entries: int, additions: int | None = None, dtype: Any = torch.float64
) -> torch.Tensor:
    """The sums of the float32 ``numbers`` of each of ``entries``. additions: that an entry may have."""
    sums = deterministic_sum.zeros((entries,), additions or len(numbers), torch.device("cpu"))
    send[(-(-len(numbers) // BLOCK),)](numbers, places, sums, *sums.stride()[-1:], sums.shape[-1], len(numbers), BLOCK=BLOCK)
    return deterministic_sum.read(sums, dtype)


def magnitudes(count: int, seed: int = 0) -> torch.Tensor:
    """Random numbers of every size that float32 has, subnormal ones too, short of sums that overflow."""
    g = torch.Generator().manual_seed(seed)
    bits = torch.randint(-(2**31), 2**31, (count,), generator=g, dtype=torch.int64).to(torch.int32)
    x = bits.view(torch.float32)
    return torch.where(x.abs() < 2.0**115, x, x.sign() * 2.0**-140)


def test_sums_are_those_of_the_exact_numbers() -> None:
    numbers, places = magnitudes(600), torch.randint(7, (600,), generator=torch.Generator().manual_seed(1))
    found = summed(numbers, places, 7)
    for entry in range(7):
        of_entry = sorted(map(Fraction, numbers[places == entry].tolist()), key=abs)
        true, got = sum(of_entry), Fraction(float(found[entry]))
        assert abs(got - true) <= abs(of_entry[-1]) / 2**45  # planes are added in float64, of numbers of no more than 2^9 terms


def test_the_order_of_terms_changes_no_bit() -> None:
    numbers, places = magnitudes(500), torch.randint(3, (500,), generator=torch.Generator().manual_seed(1))
    first = summed(numbers, places, 3, dtype=torch.float32)
    for seed in range(3):
        order = torch.randperm(500, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(first, summed(numbers[order], places[order], 3, dtype=torch.float32))


def test_what_cancels_leaves_the_rest() -> None:
    numbers = torch.tensor([1e30, 1.0, -1e30, 1e-40, 2.0**-149, -(2.0**-149)])
    entry = torch.tensor([0, 0, 0, 1, 1, 1])
    assert summed(numbers, entry, 2).tolist() == [1.0, float(numbers[3])]


@pytest.mark.parametrize("additions", [1, 2, 3, 64, 65])
def test_as_many_terms_as_were_announced_find_room(additions: int) -> None:
    """All of them as great as a plane takes, of both ends of every plane: an entry for each."""
    width = math.ceil(254 / (deterministic_sum.planes_for(additions) - 3))
    exponents = sorted({e for plane in range(0, 240, width) for e in (plane, plane + width - 1)})
    greatest = torch.tensor([sign * (2.0**24 - 1) * 2.0 ** (e - 149) for e in exponents for sign in (1, -1)])
    terms = greatest.float().repeat(additions)
    assert torch.equal(
        summed(terms, torch.arange(len(greatest)).repeat(additions), len(greatest), additions), greatest.double() * additions
    )


def test_every_power_of_two_has_its_plane() -> None:
    for additions in (1, 2**10, 2**26, 2**37, 2**38):
        numbers = torch.tensor([2.0**e for e in range(-149, 128)])
        assert torch.equal(summed(numbers, torch.arange(len(numbers)), len(numbers), additions), numbers.double())


def test_terms_that_are_not_finite() -> None:
    terms = {(INF,): INF, (-INF, 3.0): -INF, (INF, -INF): NAN, (NAN,): NAN, (INF, NAN): NAN, (1.0, INF, INF): INF, (2.0, 0.0): 2.0}
    for order in (1, -1):
        numbers = torch.tensor([x for some in terms for x in some[::order]])
        places = torch.tensor([i for i, some in enumerate(terms) for _ in some])
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            assert str(summed(numbers, places, len(terms), dtype=dtype).tolist()) == str(list(terms.values()))


# ---- whole backward passes


@pytest.fixture
def turned(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Makes the programs of every later launch run in the opposite order."""

    def turn() -> None:
        builder = interpreter.InterpreterBuilder
        there = builder.set_grid_idx
        monkeypatch.setattr(
            builder, "set_grid_idx", lambda self, *at: there(self, *(n - 1 - i for n, i in zip(self.grid_dim, at, strict=True)))
        )

    return turn


SHAPE = cases.Shape(2, 2, 1, LENGTH, LENGTH, 16, 16)
IDS = torch.arange(LENGTH) * 5 % 7


def _t5(table: torch.Tensor) -> Any:
    return anyattn.scores.t5_bias(table)


def _nested(gate: torch.Tensor, table: torch.Tensor, ids: torch.Tensor = IDS) -> Any:
    return lambda s, b, h, i, j: s * torch.sigmoid(gate[h]) + table[h, ids[i], ids[j]]


# what is captured, and the mod
MODS: dict[str, tuple[list[tuple[int, ...]], Callable[..., Any]]] = {
    "head": ([(2,)], lambda t: lambda s, b, h, i, j: s + t[h]),
    "relative": ([(2, 2 * LENGTH)], lambda t: lambda s, b, h, i, j: s + t[h, i - j + LENGTH]),
    "pairs": ([(2, 2, LENGTH, LENGTH)], lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    "pairs of all entries": ([(2, LENGTH, LENGTH)], lambda t: lambda s, b, h, i, j: s + t[h, i, j]),
    "t5": ([(32, 2)], _t5),
    "nested": ([(2,), (2, 7, 7)], _nested),
    "temperature": ([()], lambda t: lambda s, b, h, i, j: s * (1 + t)),
    "rows": ([(LENGTH,)], lambda t: lambda s, b, h, i, j: s + t[i] * s),
}


CALLS = [(name, torch.bfloat16) for name in MODS] + [(name, torch.float32) for name in ("relative", "nested", "temperature")]


def drawn(name: str, dtype: torch.dtype) -> tuple[tuple[torch.Tensor, ...], list[torch.Tensor]]:
    """q, k, v, dout, whose first head's gradients are a million times smaller than the others', and what the mod captures."""
    q, k, v, dout = cases.inputs("normal", SHAPE, dtype, 3)
    dout[:, 0] *= 2.0**-20
    g = torch.Generator().manual_seed(4)
    return (q, k, v, dout), [torch.randn(size, generator=g) * 0.5 for size in MODS[name][0]]


def gradients(name: str, dtype: torch.dtype, deterministic: bool = True, **options: Any) -> list[torch.Tensor]:
    (q, k, v, dout), tensors = drawn(name, dtype)
    leaves = [t.requires_grad_() for t in (q, k, v, *tensors)]
    out = anyattn.flex_attention(
        *leaves[:3], score_mod=MODS[name][1](*leaves[3:]), mask_mod=masks.causal(), enable_gqa=True, deterministic=deterministic,
        backend="triton", kernel_options={"tile_m": 32, "tile_n": 32}, **options,
    )  # fmt: skip
    return list(torch.autograd.grad(out, leaves, dout))


def judge(name: str, dtype: torch.dtype, found: list[torch.Tensor]) -> None:
    """By the budget, and the head whose gradients are small by itself."""
    (q, k, v, dout), tensors = drawn(name, dtype)

    def call(precision: torch.dtype) -> dict[str, Any]:
        own = [t.to(precision).requires_grad_() for t in tensors]
        return {"score": MODS[name][1](*own), "mask": masks.causal(), "captured": own}

    given = (q, k, v, dout)
    true, hand = oracle.gradients(*given, **call(torch.float64)), oracle.same_dtype_gradients(*given, **call(torch.float32))
    noise = rounding(*given, **call(torch.float64))
    rows = [(g.dq, g.dk, g.dv, *g.captured) for g in (true, hand, noise)]
    for at, (got, *judged) in enumerate(zip(found, *rows, strict=True)):
        budget.check(f"{name} {at}", got, *judged)
        if at >= 3 and got.ndim > 1 and got.shape[0] == 2:  # a row for each head
            of_noise = type(judged[2])(*(n[:1] for n in judged[2]))
            budget.check(f"{name} {at}, first head", got[:1], judged[0][:1], judged[1][:1], of_noise)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many sums of whole numbers were read."""
    read, found = deterministic_sum.read, [0]

    def reading(*given: Any) -> torch.Tensor:
        found[0] += 1
        return read(*given)

    monkeypatch.setattr(deterministic_sum, "read", reading)
    assert backward_pass.deterministic_sum is deterministic_sum
    yield found


IN_TURN = (("t5", torch.bfloat16), ("pairs", torch.bfloat16), ("rows", torch.bfloat16), ("nested", torch.float32))


@pytest.mark.parametrize(("name", "dtype"), few([pytest.param(*c) for c in CALLS], *(pytest.param(*c) for c in IN_TURN)), ids=str)
def test_programs_in_another_order_give_the_same_bits(name: str, dtype: torch.dtype, turned: Any, counted: list[int]) -> None:
    first = gradients(name, dtype)
    judge(name, dtype, first)
    assert bool(counted[0]) is (name != "pairs")  # of pairs each entry has one term
    turned()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(name, dtype), strict=True))


def test_the_other_order_is_another(turned: Any) -> None:
    """Sums of floats differ by it, so that the test before this one can fail."""
    first = gradients("head", torch.bfloat16, deterministic=False)
    turned()
    assert not torch.equal(first[3], gradients("head", torch.bfloat16, deterministic=False)[3])


def test_documents_run_as_sequences(turned: Any, counted: list[int]) -> None:
    """Both forms of the call, until it is known which does the work, and the one alone."""
    ids = torch.tensor([0] * 9 + [1] * 14 + [2] * 17)
    g = torch.Generator().manual_seed(0)
    q, k, v, dout = cases.inputs("normal", SHAPE, torch.bfloat16, 3)
    table = torch.randn(2, 2 * LENGTH, generator=g).requires_grad_()
    leaves = [t.requires_grad_() for t in (q, k, v, table)]
    blocks = anyattn.create_block_mask(lambda b, h, i, j: ids[i] == ids[j], None, None, LENGTH, LENGTH, "cpu", 32)

    def call() -> list[torch.Tensor]:
        out = anyattn.flex_attention(
            *leaves[:3], score_mod=MODS["relative"][1](table), block_mask=blocks, enable_gqa=True, deterministic=True, backend="triton"
        )  # fmt: skip
        return list(torch.autograd.grad(out, leaves, dout))

    first = call()
    assert counted[0] == 1
    turned()
    assert all(torch.equal(a, b) for a, b in zip(first, call(), strict=True))


@pytest.mark.parametrize("fill", few([INF, -INF, NAN], -INF))
def test_terms_that_are_not_finite_stay_with_their_entries(fill: float) -> None:
    """Of one row's gradient: what is asked by row alone tells which, and no other entry hears of it."""
    (q, k, v, dout), (table,) = drawn("rows", torch.float32)
    dout[1, 1, 30, 3] = fill
    found = []
    for deterministic in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in (q, k, v, table)]
        out = anyattn.flex_attention(
            *leaves[:3], score_mod=MODS["rows"][1](leaves[3]), enable_gqa=True, deterministic=deterministic, backend="triton"
        )
        found.append(torch.autograd.grad(out, leaves, dout)[3])
    assert torch.equal(~found[0].isfinite(), torch.arange(LENGTH) == 30)
    assert torch.equal(found[0].isnan(), found[1].isnan()) and torch.equal(found[0].isinf(), found[1].isinf())


def test_how_many_terms_an_entry_may_have() -> None:
    """Indices that tell pairs apart divide them; what is computed from them does not."""
    shape = (3, 5, 7, 11)  # entries, heads, queries, keys
    pairs = math.prod(shape)
    for size, score, terms in (
        ((5,), lambda t: lambda s, b, h, i, j: s + t[h], pairs // 5),
        ((4,), lambda t: lambda s, b, h, i, j: s + t[h % 4], pairs),
        ((7, 11), lambda t: lambda s, b, h, i, j: s + t[i, j], 15),
        ((7, 11), lambda t: lambda s, b, h, i, j: s + t[i, j] * t[0, j], 15 + 15 * 7),
        ((3, 5, 7, 11), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j] + t[b, h, i, j] * s, None),
        ((5, 20), lambda t: lambda s, b, h, i, j: s + t[h, i - j + 10], pairs // 5),
        ((5, 5), lambda t: lambda s, b, h, i, j: s + t[h, h], pairs // 5),
        ((), lambda t: lambda s, b, h, i, j: s * t, pairs),
    ):  # fmt: skip
        table = torch.zeros(size).requires_grad_()
        q, k = torch.zeros(*shape[:3], 8), torch.zeros(3, 5, 11, 8)
        problem = flex.flex_problem(q, k, k, score(table), None, None, None, None, False, None, False, False, True)
        found = deterministic_sum.additions_of(problem, [0]).get(0)
        assert found == terms or (terms is None and found in (None, 2)), (size, found)
        assert not deterministic_sum.additions_of(problem.like(deterministic=False), [0])


def test_what_finds_no_room_is_anothers() -> None:
    """2 ** 28 entries of 11 planes: said, not silent, and a plain call keeps its backward."""
    table = torch.zeros(()).expand(4, 2**13, 2**13).requires_grad_()
    for deterministic in (True, False):
        found = anyattn.explain(
            *(torch.zeros(3, 4, 2**13, 8) for _ in range(3)), score_mod=lambda s, b, h, i, j: s + table[h, i, j],
            deterministic=deterministic, backend="triton",
        )  # fmt: skip
        assert ("take 20.0 GiB, more than 4.0" in str(found)) is deterministic
        assert (found.plan.backward == "torch") is deterministic


def test_explain_says_how() -> None:
    table = torch.zeros(4, 140).requires_grad_()
    mod = lambda s, b, h, i, j: s + table[h, i - j + 70]
    for wants in (True, False):
        q = torch.zeros(2, 4, 70, 16)
        found = str(anyattn.explain(q, q, q, score_mod=mod, deterministic=wants, backend="triton"))
        assert ("deterministic: gradients of captured tensors are added up as whole numbers, in 1 MiB" in found) is wants
