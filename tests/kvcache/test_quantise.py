"""Quantisation for 8-bit caches against exact arithmetic, and appending to such caches in every form of their scales."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from anyattn.kvcache import quantise
from anyattn.kvcache.append import append, check_scales, check_step, slots
from anyattn.kvcache.quantise import LIMITS, SMALLEST_SCALE, Scaling, check_saturated, check_written, is_written
from anyattn.kvcache.scales import EIGHT_BITS
from tests.kvcache.test_append import CASES, random_case
from tests.support.quantised_rows import DTYPES, FORMS, descales, every_rounding


def test_every_8_bit_dtype_has_limits() -> None:
    assert tuple(LIMITS) == EIGHT_BITS


def numbers(dtype: torch.dtype) -> list[float]:
    """All finite numbers of a dtype, ascending."""
    every = torch.arange(256, dtype=torch.uint8).view(dtype).double()
    return sorted(set(every[every.isfinite()].tolist()))


def nearest(value: float, every: list[float], dtype: torch.dtype) -> float:
    """By exact arithmetic: the nearest number, of two the one whose last bit is 0."""
    if math.isinf(value) or not every[0] <= value <= every[-1]:
        return every[0] if value < 0 else every[-1]
    at = bisect.bisect_left(every, value)
    below, above = every[max(at - 1, 0)], every[at]
    gaps = Fraction(value) - Fraction(below), Fraction(above) - Fraction(value)
    if gaps[0] != gaps[1]:
        return below if gaps[0] < gaps[1] else above
    is_even = [int(torch.tensor(x).to(dtype).view(torch.uint8)) % 2 == 0 for x in (below, above)]
    return below if is_even[0] else above


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_nearest_number_ties_to_even(dtype: torch.dtype) -> None:
    every = numbers(dtype)
    values = every_rounding(dtype)
    values = values[~values.isnan()]
    found = quantise.quantised(values[None], 1.0, dtype).rows[0]
    assert found.double().tolist() == [nearest(x, every, dtype) for x in values.double().tolist()]
    if dtype.is_floating_point:
        assert torch.equal(found.float().signbit(), values.signbit()), "-0.0 too"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_saturates_is_what_rounding_leaves_out_of_range(dtype: torch.dtype) -> None:
    """The step from the greatest number to one that the dtype does not have decides."""
    values = every_rounding(dtype)
    values = values[~values.isnan()]
    every = numbers(dtype)
    longer = [every[0] - (every[1] - every[0]), *every, every[-1] + (every[-1] - every[-2])]
    for value in values.tolist():
        count = int(quantise.quantised(torch.tensor([[value]]), 1.0, dtype).saturated)
        inside = max(longer[0], min(longer[-1], value))
        tie = inside in ((longer[-1] + every[-1]) / 2, (longer[0] + every[0]) / 2)
        if not tie:
            assert count == (nearest(inside, longer, torch.float8_e5m2) not in every), value
    ties = {torch.float8_e4m3fn: (464.0, 0), torch.float8_e5m2: (61440.0, 1), torch.int8: (127.5, 1)}
    assert int(quantise.quantised(torch.tensor([[ties[dtype][0]]]), 1.0, dtype).saturated) == ties[dtype][1]


@pytest.mark.parametrize("rows_dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_torch_s_own_conversion_of_the_quotient(dtype: torch.dtype, rows_dtype: torch.dtype) -> None:
    """The quotient is rounded to float32 once: as float64 division, which is exact enough to be rounded again."""
    rows = (torch.randn(50, 3, 17) * torch.logspace(-3, 3, 50)[:, None, None]).to(rows_dtype)
    scales = torch.rand(50, 3) + 0.01
    exact = (rows.float().double() / scales.double()[..., None]).float()
    limits = LIMITS[dtype]
    clamped = exact.clamp(limits.least, limits.greatest)
    expected = (clamped if dtype.is_floating_point else clamped.round()).to(dtype)
    found = quantise.quantised(rows, scales, dtype)
    assert torch.equal(found.rows.view(torch.uint8), expected.view(torch.uint8))
    assert int(found.saturated) == int(((exact > limits.above) | (exact < limits.below)).sum())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_s_own_scale(dtype: torch.dtype) -> None:
    """It brings the greatest magnitude to the end of the range, saturates nothing, and is never 0; NaN and infinity do not decide it."""
    rows = torch.randn(1000, 16) * torch.logspace(-30, 30, 1000)[:, None]
    scales = quantise.row_scales(rows, dtype)
    assert torch.equal(scales, (rows.double().abs().amax(-1) / LIMITS[dtype].row_max).float())
    found = quantise.quantised(rows, scales, dtype)
    assert int(found.saturated) == 0
    assert bool((found.rows.float().abs().amax(-1) == LIMITS[dtype].row_max).all())
    special = torch.tensor([[0.0, -0.0], [math.nan, 2.0], [math.inf, -2.0], [math.inf, math.nan], [1e-45, 0.0]])
    scales = quantise.row_scales(special, dtype)
    two = torch.tensor(2.0) / LIMITS[dtype].row_max
    assert scales.tolist() == [SMALLEST_SCALE, two, two, SMALLEST_SCALE, SMALLEST_SCALE]
    found = quantise.quantised(special, scales, dtype)
    stored = found.rows.float()
    greatest = LIMITS[dtype].row_max
    assert stored[0].tolist() == [0, 0] and stored[1, 1] == greatest and stored[2].tolist() == [greatest, -greatest]
    assert bool(stored[1, 0].isnan()) if dtype.is_floating_point else stored[1, 0] == 0
    assert int(found.saturated) == (2 if dtype.is_floating_point else 4)


def error_bound(row: Tensor, dtype: torch.dtype) -> Tensor:
    """What a value of a row with its own scale may be off by: half a step of the dtype, and float32's rounding of scale and quotient."""
    greatest = row.double().abs().amax(-1, keepdim=True)
    if dtype is torch.int8:
        half = greatest / 127 / 2
    else:
        bits, least = (3, 2.0**-9) if dtype is torch.float8_e4m3fn else (2, 2.0**-16)
        half = torch.maximum(row.double().abs() * 2.0 ** -(bits + 1), greatest / LIMITS[dtype].greatest * least / 2)
    return half * (1 + 2.0**-20) + greatest * 2.0**-22


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_error_of_a_value(dtype: torch.dtype) -> None:
    rows = torch.randn(2000, 64) * torch.logspace(-20, 20, 2000)[:, None]
    scales = quantise.row_scales(rows, dtype)
    back = quantise.quantised(rows, scales, dtype).rows.double() * scales.double()[:, None]
    assert bool(((back - rows.double()).abs() <= error_bound(rows, dtype)).all())


# ---- appending


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_append_quantises_row_by_row(dtype: torch.dtype, form: str) -> None:
    """A row at a time, in pages and in a contiguous cache: bytes, scales, the count, and nothing else."""
    for seed, paged in CASES[::5]:
        case, g = random_case(seed, paged), torch.Generator().manual_seed(seed)
        caches = [torch.full((*case.shape, 2, 8), 0x5A, dtype=torch.uint8).view(dtype)]
        (cache,), (descale, *_) = descales(form, caches, len(case.new), g)
        rows = torch.randn(sum(case.new), 2, 8, generator=g).bfloat16() * 100
        places = case.model()
        saturated = torch.zeros(1, dtype=torch.int32)
        expected, given = cache.view(torch.uint8).clone(), descale.clone() if isinstance(descale, Tensor) else descale
        writes, count = is_written(descale, cache), 0
        assert writes is (form in ("by token", "inline") or (form == "by page" and case.page_size == 1))
        entries = [b for b, n in enumerate(case.new) for _ in range(n)]
        for row, (i, j), b in zip(rows, places, entries):
            for h in range(2):
                if writes:
                    scale = quantise.row_scales(row[h], dtype)
                    given[i, j, h] = scale  # type: ignore[index]
                elif isinstance(given, Tensor):
                    scale = given[b, h] if form == "by entry" else given.expand(*case.shape, 2)[i, j, h] if given.ndim == 3 else given[0]
                else:
                    scale = torch.tensor(1.0 if given is None else given)
                one = quantise.quantised(row[h][None], float(scale), dtype)
                expected[i, j, h], count = one.rows[0].view(torch.uint8), count + int(one.saturated)
        at = slots(*case.rows(), *case.tensors(), case.page_size)
        append(cache, rows, *at, Scaling(descale, saturated), torch.tensor(entries, dtype=torch.int64))
        assert torch.equal(cache.view(torch.uint8), expected) and int(saturated) == count
        if isinstance(descale, Tensor):
            assert torch.equal(descale.contiguous().view(torch.int32), given.contiguous().view(torch.int32))  # type: ignore[union-attr]


def test_scales_of_one_entry_and_of_one_head_are_shared() -> None:
    cache = torch.zeros(3, 4, 2, 8, dtype=torch.int8)
    rows, at = torch.full((3, 1, 2, 8), 6.0), torch.arange(3)[:, None]
    for scale, wanted in ((torch.tensor([[2.0, 3.0]]), [[3, 2]] * 3), (torch.tensor([[1.0], [2.0], [3.0]]), [[6, 6], [3, 3], [2, 2]])):
        append(cache, rows, at, at * 0 + 1, Scaling(scale), at)
        assert cache[:, 1, :, 0].tolist() == wanted


# ---- refusals


def test_scales_that_cannot_be_written() -> None:
    cache = torch.zeros(6, 4, 2, 8, dtype=torch.int8)
    for good in (None, 2.0, torch.ones(1), torch.ones(3, 2), torch.ones(6, 1, 2), torch.ones(1, 1, 1), torch.ones(6, 4, 2)):
        check_written("k_descale", good, cache)
    check_written("k_descale", torch.ones(6, 1, 2).expand(6, 4, 2), cache)
    for bad in (torch.ones(6, 4, 1), torch.ones(1, 4, 2), torch.ones(6, 4, 1).expand(6, 4, 2), torch.ones(4, 2).expand(6, 4, 2)):
        with pytest.raises(
            ValueError, match=r"^k_descale has shape .* would write scales that heads or cache rows share; wanted \(6, 4, 2\)"
        ):
            check_written("k_descale", bad, cache)


def test_scales_that_share_memory() -> None:
    k_cache, v_cache = torch.zeros(2, 6, 4, 2, 8, dtype=torch.int8)
    scales = torch.ones(2, 6, 4, 2)
    check_scales(*scales, k_cache, v_cache)
    check_scales(scales[0, 0, 0, 0], scales[0, 0, 0, 0], k_cache, v_cache)  # only read
    with pytest.raises(ValueError, match=r"k_descale and v_descale share memory .* and appending writes k_descale"):
        check_scales(scales[0], scales[0], k_cache, v_cache)
    with pytest.raises(ValueError, match=r"v_descale and k_descale share memory .* and appending writes v_descale"):
        check_scales(scales[1, 0, 0], scales[1], k_cache, v_cache)
    memory = torch.zeros(6, 4, 2, 2, 12, dtype=torch.uint8)
    caches = [memory[..., i, :8].view(torch.int8) for i in range(2)]
    inline = [memory[..., i, 8:].view(torch.float32)[..., 0] for i in range(2)]
    check_scales(*inline, *caches)
    with pytest.raises(ValueError, match="k_descale and v_cache share memory"):
        check_scales(memory[..., 1, 4:8].view(torch.float32)[..., 0], inline[1], *caches)


def test_tensors_of_other_sizes_that_share_memory() -> None:
    """16-bit rows over 8-bit caches, by bytes."""
    memory = torch.zeros(1, 16, 2, 16, dtype=torch.uint8)
    k_cache, v_cache = memory[..., :4].view(torch.int8), memory[..., 4:8].view(torch.int8)
    rows = memory.view(torch.bfloat16)
    check_step(rows[:, :1, :, 4:6], rows[:, :1, :, 4:6], rows[:, :1, :, 6:], k_cache, v_cache)
    with pytest.raises(ValueError, match="v_cache and v share memory"):
        check_step(rows[:, :1, :, 4:6], rows[:, :1, :, 4:6], rows[:, :1, :, 3:5], k_cache, v_cache)


@pytest.mark.parametrize(
    ("saturated", "error", "message"),
    [
        (0, TypeError, "saturated is a int; wanted an int64 or int32 tensor of one element: torch.zeros"),
        (torch.zeros(1), TypeError, "saturated has dtype torch.float32; wanted an int64 or int32"),
        (torch.zeros(0, dtype=torch.int64), ValueError, r"saturated has shape \(0,\); wanted one element"),
        (torch.zeros(1, dtype=torch.int64, device="meta"), ValueError, "saturated is on meta but q is on cpu"),
    ],
    ids=str,
)
def test_what_cannot_count(saturated: object, error: type[Exception], message: str) -> None:
    check_saturated(torch.zeros((), dtype=torch.int32), torch.device("cpu"))
    with pytest.raises(error, match=message):
        check_saturated(saturated, torch.device("cpu"))
