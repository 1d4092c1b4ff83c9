"""Kernels for Hopper in which ptxas loses the address of a matrix product's operand, and the widths of tiles that keep it from that."""

from __future__ import annotations

import importlib.util
from typing import Any
from unittest import mock

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.triton import api
from anyattn.backends.triton.wide_tiles import alike
from tests.support.triton.pinned import judged_with_the_pinned_triton
from tests.support.triton.uniform_registers import unwritten

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# What each loop of ``LOOP`` does before its product reads UR14 and UR15.
WRITTEN = "/*0010*/ UMOV UR14, 0x20 ;\n/*0020*/ UMOV UR15, 0x40000040 ;"
LOOP = """
/*0000*/ ULDC.64 UR12, c[0x0][0x208] ;
{before}
.L_x_1:
/*0030*/ @!P0 BRA `(.L_x_2) ;
/*0040*/ LDG.E R2, desc[UR12][R4.64] ;
/*0050*/ UIADD3 UR14, UP0, UR14, 0x20, URZ ;
/*0060*/ HGMMA.64x16x16.F32.BF16 R56, R24, gdesc[UR12].tnspB, R56, gsb0 ;
/*0070*/ BRA `(.L_x_1) ;
.L_x_2:
/*0080*/ EXIT ;
"""


@pytest.mark.parametrize(
    ("before", "lost"),
    [
        (WRITTEN, []),
        ("", [14, 15]),
        (WRITTEN.replace("UR14", "UR16"), [14]),
        ("/*0010*/ UIADD3.64 UR14, UR12, 0x2, URZ ;", []),
        ("/*0010*/ UIADD3.64 UR14, UR16, 0x2, URZ ;", [16, 17]),
        ("/*0010*/ UISETP.GE.AND UP0, UPT, UR14, 0x1, UPT ;\n" + WRITTEN, [14]),
        (f"/*0008*/ @P1 BRA `(.L_x_1) ;\n{WRITTEN}", [14, 15]),
    ],
)
def test_what_is_read_before_it_is_written(before: str, lost: list[int]) -> None:
    assert unwritten(LOOP.format(before=before)) == lost


def test_products_of_two_tiles_in_shared_memory_read_four_registers() -> None:
    both = LOOP.replace("R56, R24, gdesc", "R56, gdesc").replace("ULDC.64 UR12", "ULDC.64 UR20")
    assert unwritten(both.format(before=WRITTEN)) == [12, 13]


@pytest.mark.parametrize(
    ("widths", "wanted"),
    [
        ((64, 16), (64, 64)),
        ((16, 64), (64, 64)),
        ((32, 16), (32, 32)),
        ((128, 32), (128, 64)),
        ((128, 64), (128, 64)),
        ((16, 16), (16, 16)),
    ],
)
def test_widths_of_one_swizzle(widths: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert alike(*widths) == wanted


def kernels(d: int, dv: int, stored: torch.dtype | None = None) -> list[Any]:
    """The forward passes, default and of every batch, dq, and dk and dv, of rows that are no multiples of 16 bytes."""
    from tests.support.triton import ahead

    q, k, v = (torch.zeros(1, 300, h, n, dtype=torch.bfloat16, requires_grad=True) for h, n in ((4, d), (2, d), (2, dv)))
    with ahead.on((9, 0)) as launches:
        if stored is not None:
            k, v = (t.detach().to(stored) for t in (k, v))
            lengths = torch.full((1,), 300, dtype=torch.int32)
            with torch.no_grad():
                anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True, backend="triton")
        else:
            for deterministic in (False, "batch"):
                out = anyattn.flash_attn_func(q, k, v, causal=True, backend="triton", deterministic=deterministic)
            torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    return [launch for launch in launches if "TILE_N" in launch.options]


@judged_with_the_pinned_triton
@pytest.mark.parametrize(
    ("d", "dv", "stored"),
    [(33, 16, None), (20, 33, None), (100, 17, None), (20, 16, None), (33, 16, torch.float8_e5m2), (40, 24, torch.int8)],
)
def test_no_kernel_loses_an_address(d: int, dv: int, stored: torch.dtype | None) -> None:
    from tests.support.triton import ahead

    for launch in kernels(d, dv, stored):
        ahead.compiled(launch, (9, 0))  # which asserts it


@judged_with_the_pinned_triton
def test_other_widths_do() -> None:
    from tests.support.triton import ahead

    with mock.patch.object(api, "alike", lambda d, dv: (d, dv)), pytest.raises(AssertionError, match="uniform registers"):
        ahead.compiled(kernels(33, 16)[0], (9, 0))


def test_rows_of_16_bytes_have_widths_of_their_own() -> None:
    from tests.support.triton import ahead

    q, k, v = (torch.zeros(1, 4, 300, n, dtype=torch.bfloat16) for n in (40, 40, 16))
    with ahead.on((9, 0)) as launches:
        anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), backend="triton")
    assert [(o["BLOCK_D"], o["BLOCK_DV"]) for o in (x.options for x in launches) if "HAS_LSE" in o] == [(64, 16)]
