"""Conversion of 8-bit numbers by Triton's interpreter: every number that there is, alone and in pairs."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from anyattn.backends.triton.kernels.eight_bits import halved, unpacked, widened
from tests.support.eight_bits import DTYPES

WIDE = (torch.bfloat16, torch.float16, torch.float32)


@triton.jit
def widen(stored, out, IS_NVIDIA: tl.constexpr, COUNT: tl.constexpr):
    lane = tl.arange(0, COUNT)
    tl.store(out + lane, widened(tl.load(stored + lane), out.dtype.element_ty, IS_NVIDIA))


@triton.jit
def unpack(stored, even, odd, IS_NVIDIA: tl.constexpr, COUNT: tl.constexpr):
    lane = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    pairs = tl.load(stored.to(tl.pointer_type(tl.int16)) + lane)
    low, high = unpacked(pairs, stored.dtype.element_ty, even.dtype.element_ty, IS_NVIDIA)
    tl.store(even + lane, low)
    tl.store(odd + lane, high)


def all_pairs(dtype: torch.dtype, device: str = "cpu") -> torch.Tensor:
    """(65536, 2)."""
    return torch.cartesian_prod(*[torch.arange(256, dtype=torch.uint8, device=device)] * 2).view(dtype)


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return bool(((found == wanted) | (found.isnan() & wanted.isnan())).all())


@pytest.mark.parametrize("wide", WIDE)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_converted_exactly(dtype: torch.dtype, wide: torch.dtype) -> None:
    stored, out = torch.arange(256, dtype=torch.uint8).view(dtype), torch.empty(256, dtype=wide)
    widen[(1,)](stored, out, False, 256)
    assert same(out, stored.to(wide))


@pytest.mark.parametrize("wide", WIDE[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pair_is_unpacked(dtype: torch.dtype, wide: torch.dtype) -> None:
    pairs = all_pairs(dtype)
    even, odd = torch.empty(2, len(pairs), dtype=wide)
    unpack[(64,)](pairs, even, odd, False, len(pairs) // 64)
    assert same(even, pairs[:, 0].to(wide)) and same(odd, pairs[:, 1].to(wide))


@triton.jit
def halve(q, out, powers, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    row, lane = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    found, power = halved(tl.load(q + row * WIDTH + lane), 0)
    tl.store(out + row * WIDTH + lane, found)
    tl.store(powers + row, power)


def test_queries_become_float16_by_powers_of_two() -> None:
    q = torch.randn(16, 64).bfloat16() * torch.logspace(-34, 38, 16)[:, None].bfloat16()
    q[3], q[4, 5], q[5, 6] = 0.0, torch.inf, torch.nan
    out, powers = torch.empty(16, 64, dtype=torch.float16), torch.empty(16, 1)
    halve[(1,)](q, out, powers, 16, 64)
    assert torch.equal(powers.frexp().mantissa, torch.full((16, 1), 0.5))
    found = out.double() * powers.double()
    assert same(found[:4], q[:4].double()) and same(found[6:], q[6:].double())
    assert found[4, 5] == torch.inf and found[5, 6].isnan()
