"""Whole numbers in mods are torch's: of so many bits, and wrapping around, for whoever reads a mod."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import Tensor

from anyattn import flex_attention
from anyattn.errors import ModError
from anyattn.mods import masks
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import limits, limits_of_rows, never_fall, ranges_unread, row_ranges
from anyattn.mods.analysis.tile_classes import FULL, classify
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.extents import Box, Extent, extents, unwrapped
from anyattn.mods.tracing.trace import trace

Q, K = 24, 40
MOST = sys.maxsize
INT64 = torch.iinfo(torch.int64)
T = -7


def grid(q: int = 0, k: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return torch.tensor([[1]]), torch.tensor([[0]]), q + torch.arange(Q)[:, None], k + torch.arange(K)[None]


def wanted(mod, q: int = 0, k: int = 0) -> Tensor:  # type: ignore[no-untyped-def]
    """What the user's own function makes of torch's tensors."""
    return torch.as_tensor(mod(*grid(q, k))).expand(Q, K)


def assert_reads(mod, has_ranges: bool | None = None, longest: int = 2**30) -> None:  # type: ignore[no-untyped-def]
    """Evaluation, row ranges near and far, and classes of tiles are the function's."""
    traced = trace(mod, "mask")
    assert torch.equal(evaluate(traced, *grid()).expand(Q, K), wanted(mod))
    if has_ranges is not None:
        assert (row_ranges(traced) is not None) == has_ranges, row_ranges(traced)
    found = limits(traced, Q, K, 2, 1)
    if found is not None:
        lo, hi = (t.expand(t.shape[0], 2, 1, Q)[:, 1, 0, :, None] for t in found)
        assert torch.equal(((lo <= torch.arange(K)) & (torch.arange(K) < hi)).any(0), wanted(mod))
        far = longest // 2 + torch.arange(Q)
        lo, hi = (t[:, 0, 0, :, None] for t in limits_of_rows(traced, torch.ones_like(far), far, torch.full_like(far, longest), 1))  # type: ignore
        for k in {0, longest // 2 - 20, longest // 2, longest - K} if longest > 2 * K else {0}:
            kv = k + torch.arange(K)
            assert torch.equal(((lo <= kv) & (kv < hi)).any(0), wanted(mod, longest // 2, k))
    classes = classify(traced, Q, K, 8, 8, 2, 1)
    tiles = wanted(mod).unflatten(1, (-1, 8)).unflatten(0, (-1, 8)).transpose(1, 2)
    theirs = tiles.flatten(2).any(-1).to(torch.uint8) + tiles.flatten(2).all(-1).to(torch.uint8)
    assert torch.equal(classes[-1, 0], theirs)


NARROWED = {
    "hash": lambda b, h, q, k: (q * 1103515245 + k * 12345).to(torch.int32) > T,
    "hash of both": lambda b, h, q, k: ((q * 40 + k) * 1103515245).int() > 0,
    "moved": lambda b, h, q, k: (k + 0xDEADBEEF).to(torch.int32) < 0,
    "a byte": lambda b, h, q, k: (q - k).to(torch.int8) >= 0,
    "without a sign": lambda b, h, q, k: (k - 3).to(torch.uint8) < 30,
    "there and back": lambda b, h, q, k: (k * 2**33).to(torch.int32).to(torch.int64) == 0,
}


@pytest.mark.parametrize("name", NARROWED)
def test_a_narrowing_cast_is_no_identity(name: str) -> None:
    assert_reads(NARROWED[name], has_ranges=False)


def test_a_cast_that_fits_is_looked_through() -> None:
    for mod in (
        lambda b, h, q, k: (q - k).to(torch.int32) >= 0,
        lambda b, h, q, k: (k // 2**20).to(torch.int16) == (q // 2**20).to(torch.int32),
        lambda b, h, q, k: (k > q).to(torch.int8) == 0,
    ):
        assert_reads(mod, has_ranges=True)


LO, HI = torch.tensor([0, INT64.min]), torch.tensor([9, INT64.max])
SENTINELS = torch.tensor([3, INT64.max])
SHORT = torch.tensor([3, 2**31 - 1], dtype=torch.int32)
FAR = {
    "distance": lambda b, h, q, k: (q - k).abs() <= sys.maxsize,
    "literal": lambda b, h, q, k: k - q < INT64.max,
    "captured": lambda b, h, q, k: k - q < MOST,
    "captured, at most": lambda b, h, q, k: k - q <= MOST,
    "captured, at least": lambda b, h, q, k: k - q >= MOST - 3,
    "table": lambda b, h, q, k: k - q < SENTINELS[b],
    "table at most": lambda b, h, q, k: k - q <= SENTINELS[b],
    "narrow table": lambda b, h, q, k: k - q <= SHORT[b],
    "two tables": lambda b, h, q, k: (k - q >= LO[b]) & (k - q <= HI[b]),
    "scaled": lambda b, h, q, k: 3 * k - q < MOST,
    "blocks": lambda b, h, q, k: k // 5 <= MOST,
    "unequal": lambda b, h, q, k: k - q != MOST,
    "captured ends": lambda b, h, q, k: (k - q > -MOST - 1) & (k - q < MOST),
    "near table": lambda b, h, q, k: abs(q - k) <= HI[b],
}


@pytest.mark.parametrize("name", FAR)
def test_limits_do_not_overflow_where_the_mask_does_not(name: str) -> None:
    assert_reads(FAR[name], has_ranges=True)
    assert ranges_unread(trace(FAR[name], "mask")) is not None


ENDS = torch.tensor([0, INT64.max])
WRAPS = {
    "row": lambda b, h, q, k: q + ENDS[b] >= k,
    "key": lambda b, h, q, k: k + ENDS[b] >= q,
    "captured": lambda b, h, q, k: q + MOST >= k,
    "captured key": lambda b, h, q, k: k + MOST >= q,
    "both": lambda b, h, q, k: q + MOST >= k + MOST,
    "product": lambda b, h, q, k: q * 2**62 >= k * 2**62,
    "sign": lambda b, h, q, k: (q * 0x9E3779B97F4A7C15 + k) < 0,
    "least": lambda b, h, q, k: abs(k + INT64.min) >= q,
    "negated": lambda b, h, q, k: -(k + INT64.min) <= q,
}


@pytest.mark.parametrize("name", WRAPS)
def test_what_wraps_around_in_torch_does_so_here(name: str) -> None:
    assert_reads(WRAPS[name])


def test_an_int64_table_that_kv_idx_is_added_to_is_looked_at_or_left_alone() -> None:
    near = torch.tensor([0, 5])
    mod = lambda b, h, q, k: k + near[b] >= q
    assert_reads(mod, has_ranges=True)
    assert ranges_unread(trace(mod, "mask")) is None
    near[1] = INT64.max
    assert_reads(mod, has_ranges=False)


@pytest.mark.parametrize("offset", [MOST - 10, MOST, -MOST, 2**70, -(2**70), 2**31, -(2**31), 5])
def test_causal_of_any_offset(offset: int) -> None:
    assert_library(masks.causal(offset), lambda q, k: k - q <= offset)


@pytest.mark.parametrize(
    "left,right,offset",
    [
        (MOST, MOST, 0),
        (MOST, 3, 0),
        (3, MOST, 0),
        (-MOST, 3, 0),
        (3, -MOST, 0),
        (2**70, 5, 2**70 - 3),
        (4, 2, -(2**70)),
        (2**40 + 6, 2**40, -(2**40)),
    ],
    ids=str,
)
def test_windows_of_any_size(left: int, right: int, offset: int) -> None:
    assert_library(masks.sliding_window(left, right, offset), lambda q, k: q + offset - left <= k <= q + offset + right)


def assert_library(mask, rule) -> None:  # type: ignore[no-untyped-def]
    """rule: on Python's numbers, which have no end."""
    want = torch.tensor([[rule(q, k) for k in range(K)] for q in range(Q)])
    assert torch.equal(wanted(mask), want)
    assert_reads(mask, has_ranges=True)


def test_windows_with_sentinels_for_offsets() -> None:
    for places in (torch.tensor([0, 2**61]), torch.tensor([0, -(2**61)]), torch.tensor([0, 7])):
        at = int(places[1])
        assert_library(masks.causal(places), lambda q, k, at=at: k <= q + at)
        for left, right in ((MOST, MOST), (3, MOST), (-MOST, 2), (3, 2)):
            rule = lambda q, k, at=at, left=left, right=right: q + at - min(left, 2**40) <= k <= q + at + min(right, 2**40)
            assert_library(masks.sliding_window(left, right, places), rule)
    assert_library(masks.causal(SENTINELS), lambda q, k: True)


def test_other_masks_of_any_size() -> None:
    always, never = (lambda q, k: True), (lambda q, k: False)
    assert_library(masks.prefix_lm(MOST), always)
    assert_library(masks.block_diagonal(2**70), always)
    assert_library(masks.chunked(2**70), lambda q, k: q >= k)
    assert_library(masks.block_diffusion(2**70, 2**70), lambda q, k: True)
    assert_library(masks.block_diffusion(2, MOST), lambda q, k: (k < 2) == (q < 2))
    assert_library(masks.sink_window(2**70, 2**70), lambda q, k: q >= k)
    assert_library(masks.sliding_window(-MOST, -MOST), never)
    assert torch.equal(wanted(masks.dilated(MOST, MOST)), torch.arange(Q)[:, None] == torch.arange(K))


N = 300


def test_numbers_wrap_around_in_narrow_dtypes() -> None:
    """As torch has it: a number that meets a tensor takes its dtype."""
    for mod in (
        lambda b, h, q, k: (k % 256).to(torch.uint8) + 300 > 50,
        lambda b, h, q, k: (k % 256).to(torch.uint8) + N > 50,
        lambda b, h, q, k: (k % 256).to(torch.uint8) < 300,
        lambda b, h, q, k: (k % 256).to(torch.uint8) < N,
        lambda b, h, q, k: (k.to(torch.int8) & 0x181) == 1,
        lambda b, h, q, k: (k.to(torch.int16) * 2**33 + (q.to(torch.int8) << 9)) == 0,
        lambda b, h, q, k: 300 - k.to(torch.uint8) == N - q.to(torch.uint8),
        lambda b, h, q, k: k.to(torch.int32) > 2**31,
        lambda b, h, q, k: k * 2**63 + q >= 0,
    ):
        assert_reads(mod)


def test_functions_that_refuse_a_number_in_torch_refuse_it_here() -> None:
    for mod in (
        lambda b, h, q, k: k.to(torch.uint8).clamp(min=300) > 3,
        lambda b, h, q, k: torch.where(k > 3, k.to(torch.int8), 300) > 3,
        lambda b, h, q, k: k.to(torch.uint8).masked_fill(k > 3, 300) > 3,
        lambda b, h, q, k: k + torch.full_like(k, 300, dtype=torch.uint8) > 3,
    ):
        with pytest.raises(RuntimeError, match=r"overflow|representable range"):
            wanted(mod)
        with pytest.raises(ModError, match="300"):
            trace(mod, "mask")


def test_more_than_64_bits_is_a_clear_error() -> None:
    far = 2**70
    for mod in (lambda b, h, q, k: k < 2**70, lambda b, h, q, k: k < far, lambda b, h, q, k: q - 2**64 < k):
        with pytest.raises(ModError, match="64 bits") as error:
            trace(mod, "mask")
        assert "lambda b, h, q, k" in str(error.value)


def seeded(n: int, m: int = 3):  # type: ignore[no-untyped-def]
    return lambda b, h, q, k: (q * 5 + k + n * m % 1000003) % 7 < 3


def test_arithmetic_of_captured_numbers_is_pythons() -> None:
    """It has no end, for a program traced before as well."""
    for n, m in ((5, 3), (2**40, 2**40), (2**62, 9), (-(2**63), -(2**63)), (2**70, 2**70), (2**63 + 5, 1), (7, 4)):
        assert_reads(seeded(n, m))
    assert len({trace(seeded(n), "mask").expr.key for n in (5, 6, 2**30, 2**50)}) == 1
    for n in (7, 0, 9):
        shifted = lambda b, h, q, k, n=n: k < (1 << (n * 10)) % 37
        assert_reads(shifted)


def test_what_torch_refuses_is_refused_where_no_result_needs_it() -> None:
    """Whatever a number was before: another call of the same code, warm or not, is asked anew."""

    def mask(n: int):  # type: ignore[no-untyped-def]
        def fn(b, h, q, k):  # type: ignore[no-untyped-def]
            unused = (-(2**32) * n) * q
            return torch.where(unused == 0, k, k) >= q

        return fn

    query = torch.randn(1, 1, 16, 8)
    for n in (3, 2**40, 3, 2**62, 5):
        if n < 2**31:
            assert_reads(mask(n))
            flex_attention(query, query, query, mask_mod=mask(n))
            continue
        with pytest.raises(OverflowError):
            wanted(mask(n))
        for refused in (lambda n=n: trace(mask(n), "mask"), lambda n=n: flex_attention(query, query, query, mask_mod=mask(n))):
            with pytest.raises(ModError, match="more than the 64 bits") as error:
                refused()
            assert "unused" in str(error.value)


def test_arithmetic_that_meets_no_tensor_has_no_end() -> None:
    def mask(n: int):  # type: ignore[no-untyped-def]
        return lambda b, h, q, k: (n**5 > 0) & (q - n % 7 >= k)

    for n in (3, 2**62, 2**62 + 1, 4):
        assert_reads(mask(n))


def test_powers_of_two_are_shifts() -> None:
    """Of captured numbers, which compile nothing anew, and of positions; by Python's rules among numbers, by torch's with a tensor."""
    power = lambda n: lambda b, h, q, k: (q - k) % 2**n < 4 ** (n // 2)
    for n in (0, 1, 3, 5, 62):
        assert_reads(power(n))
    assert len({trace(power(n), "mask").expr.key for n in (1, 3, 5, 62)}) == 1
    two, base, less = 2, 3, -2
    for mod in (
        lambda b, h, q, k: 2**k > q,
        lambda b, h, q, k: two ** (k * 2) % 7 > q % 5,
        lambda b, h, q, k: 8 ** (k - q) % 7 > 2,
        lambda b, h, q, k: torch.pow(2, k.to(torch.uint8)) > q,
        lambda b, h, q, k: q**two >= k + base**base - 2**less * 4 * 27,
        lambda b, h, q, k: 2.0**q >= k,
    ):
        assert_reads(mod)
    with pytest.raises(ModError, match="64 bits"):
        trace(lambda b, h, q, k, n=64: q < 2**n, "mask")
    for mod in (lambda b, h, q, k: base**k > q, lambda b, h, q, k: q**k > 3, lambda b, h, q, k: q**less > 3):
        with pytest.raises(ModError, match=r"(?s)raised to a power that is not a literal.*3\.0 \*\* n, or use powers of two") as error:
            trace(mod, "mask")
        assert "lambda b, h, q, k" in str(error.value)


def test_numbers_python_cannot_divide_by_are_its_own_error() -> None:
    def mod(n):  # type: ignore[no-untyped-def]
        return lambda b, h, q, k: k < 100 // n

    assert_reads(mod(7))
    with pytest.raises(ModError, match="ZeroDivisionError"):
        trace(mod(0), "mask")


def test_dtypes_that_torch_does_not_compute_in_are_refused() -> None:
    table = torch.arange(50).to(torch.uint16)
    assert_reads(lambda b, h, q, k: table[k].to(torch.int64) > 7, has_ranges=True, longest=50)
    assert_reads(lambda b, h, q, k: (k - 5).to(torch.uint32).long() > 7)
    with pytest.raises(ModError, match="uint16"):
        trace(lambda b, h, q, k: table[k] > table[q], "mask")
    with pytest.raises(ModError, match="uint64"):
        trace(lambda b, h, q, k: k.to(torch.uint64) > 3, "mask")
    wide = torch.arange(50).to(torch.uint64)
    with pytest.raises(ModError, match="uint64"):
        trace(lambda b, h, q, k: wide[k].to(torch.int64) > 3, "mask")


def test_division_towards_zero_of_the_least_number() -> None:
    least = torch.tensor([INT64.min, INT64.min + 1, INT64.max, -7] * 10)
    for by in (3, 10, -10, 2**40):
        assert_reads(
            lambda b, h, q, k, by=by: torch.div(least[k], by, rounding_mode="trunc") == torch.div(least[q], by, rounding_mode="trunc")
        )


def test_a_sum_that_may_wrap_is_no_function_of_the_distance() -> None:
    near, far = (trace(lambda b, h, q, k, n=n: q + n >= k, "mask").expr for n in (3, MOST))
    assert dependence(near)[near.outputs[0]].diagonal and not dependence(far)[far.outputs[0]].diagonal
    product = trace(lambda b, h, q, k: q * 2**61 >= k * 2**61, "mask").expr
    assert not dependence(product)[product.outputs[0]].diagonal


def test_limits_that_wrap_around_are_no_straight_lines() -> None:
    for mod, rises in (
        (lambda b, h, q, k: k <= q + 3, True),
        (lambda b, h, q, k: k <= q + ENDS[b], False),
        (lambda b, h, q, k: k <= q * 2**60, False),
    ):
        ranges = ranges_unread(trace(mod, "mask"))
        assert ranges is not None and never_fall(ranges.expr) == rises


def test_what_extents_know() -> None:
    expr = trace(lambda b, h, q, k: ((k & 0xFF) << 3) - (q * 2**40 & 7) > (k * 2**40).to(torch.int32), "mask").expr
    box = Box.of_sizes(2**30, None)
    found = {(node.op, node.dtype): extent for node, extent in zip(expr.nodes, extents(expr, box), strict=True)}
    assert found["shl", torch.int64] == Extent(0, 255 * 8) and found["sub", torch.int64] == Extent(-7, 255 * 8)
    plain = {(node.op, node.dtype): p for node, p in zip(expr.nodes, unwrapped(expr, box), strict=True)}
    assert plain["shl", torch.int64] and not plain["sub", torch.int64] and not plain["cast", torch.int32]


def test_classes_of_full_tiles_with_sentinels() -> None:
    assert bool((classify(trace(masks.sliding_window(MOST, MOST), "mask"), 100, 100, 32, 32) == FULL).all())
