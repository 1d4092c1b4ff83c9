"""The Triton kernels compiled ahead of time for GPUs that are not there: within their shared memory, and what does not fit in registers.

A few kernels of each generation; ``make test-long`` compiles those of every head dimension, dtype and pass.
"""

from __future__ import annotations

import importlib.util
import itertools

import pytest
import torch

from tests.support import cases
from tests.support.covering import few
from tests.support.triton.pinned import judged_with_the_pinned_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

GENERATIONS = [(8, 0), (9, 0), (10, 0)]
SMALL_ONES = [(8, 6), (8, 9)]  # of the same generations with less shared memory
NAMES = {"ids": lambda x: str(x).removeprefix("torch.")}


def checked(capability: tuple[int, int], d: int, dv: int, dtype: torch.dtype, variant: str, **options: int) -> None:
    from tests.support.triton import ahead

    made = ahead.call(capability, d, dv, dtype, variant, **options)
    assert {m.kernel for m in made} >= {"forward_tile", "prepare_tile", "dq_tile", "dkdv_tile"}
    for one in made:
        print(capability, *one)
    ahead.judge(made, capability, f"{capability} {d} {dv} {dtype} {variant}")


@judged_with_the_pinned_triton
@pytest.mark.parametrize("capability", few(GENERATIONS, (9, 0)), ids=str)
def test_compiles(capability: tuple[int, int]) -> None:
    checked(capability, 128, 128, torch.bfloat16, "causal")


SHORT, LONG = torch.arange(256, dtype=torch.int8), torch.arange(256) << 53
WHOLE_NUMBERS = {
    "narrow": lambda b, h, q, k: (
        (((q * 0x9E3779B97F4A7C15 + k * 2654435761).to(torch.int32) >> 3) % 7 < 3)
        & (((SHORT[q] * SHORT[k] << 2) ^ (k.to(torch.uint8) - 5)) // 3 > (q.to(torch.uint8) >> 9))
    ),
    "wide": lambda b, h, q, k: (
        ((LONG[q] >> (k % 70)) - (-(2**63)) + torch.fmod(q << 40, 77) > (k.to(torch.uint32).long() & 0xFFFFFFFFF))
        | ((k - q <= LONG[b]) & ((q - k).abs() < 2**63 - 1))
    ),
}


@pytest.mark.parametrize("name", WHOLE_NUMBERS)
def test_whole_numbers(name: str) -> None:
    """Of every width, with literals at the ends of 64 bits."""
    from tests.support.triton import ahead

    launches = ahead.launches(ahead.problem_of(mask_mod=WHOLE_NUMBERS[name], dim=64), (9, 0))
    assert launches and all(ahead.compiled(launch, (9, 0), "ptx").asm["ptx"] for launch in launches)


@pytest.mark.slow
@pytest.mark.parametrize("capability", [*GENERATIONS, *SMALL_ONES], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], **NAMES)
@pytest.mark.parametrize(("d", "dv"), [(16, 16), (32, 32), (64, 64), (72, 72), (128, 128), (192, 128), (256, 256), (512, 512)])
def test_every_head_dim(d: int, dv: int, dtype: torch.dtype, capability: tuple[int, int]) -> None:
    checked(capability, d, dv, dtype, "causal")


@pytest.mark.slow
@pytest.mark.parametrize("capability", GENERATIONS, ids=str)
@pytest.mark.parametrize("variant", cases.VARIANTS)
def test_every_variant(variant: str, capability: tuple[int, int]) -> None:
    checked(capability, 64, 64, torch.bfloat16, variant)


def test_many_values_leave_registers_to_spare() -> None:
    """Whose loops spilled in the tables' tiles has others; of what was measured on a GPU every tile is the table's."""
    from anyattn.backends.triton.tile_config import Shape, Tiles, backward_tiles, forward_tiles

    bf16 = torch.bfloat16
    gated, softcap, listed = Shape(64, 64, bf16, True, 1, has_pairs=True), Shape(64, 64, bf16, True), Shape(64, 64, bf16, asks=True)
    assert forward_tiles(gated, (8, 0), 4096, False) == Tiles(128, 64, 8, 3)
    assert forward_tiles(gated, (10, 0), 4096, False) == forward_tiles(listed, (10, 0), 4096, False) == Tiles(128, 64, 8, 3)
    assert backward_tiles(gated, (9, 0))["dkdv"] == backward_tiles(softcap, (9, 0))["dkdv"] == Tiles(64, 64, 8, 3)
    for d, columns, has_pairs in itertools.product((64, 128), (0, 1), (False, True)):
        with_score, plain = Shape(d, d, bf16, True, columns, has_pairs=has_pairs), Shape(d, d, bf16)
        kept = [
            forward_tiles(with_score, (9, 0), 4096, False),
            backward_tiles(with_score, (9, 0))["dq"],
            *backward_tiles(plain, (9, 0)).values(),
        ]
        kept += [backward_tiles(with_score, (9, 0))["dkdv"]] * (d == 128)
        assert (
            kept
            == {
                64: [Tiles(64, 128, 4, 2), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 3), Tiles(64, 64, 4, 4)],
                128: [Tiles(64, 64, 4, 3), Tiles(128, 64, 8, 3), Tiles(128, 64, 8, 3), Tiles(64, 128, 8, 3), Tiles(64, 128, 8, 3)],
            }[d]
        )


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 17, 64])
def test_few_rows(rows: int) -> None:
    for capability in GENERATIONS:
        checked(capability, 128, 128, torch.bfloat16, "full", rows=rows)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], **NAMES)
@pytest.mark.parametrize("capability", [(7, 5), *GENERATIONS, *SMALL_ONES, (12, 0), (99, 9), None], ids=str)
def test_tiles_fit_every_device(capability: tuple[int, int] | None, dtype: torch.dtype) -> None:
    """By the configurations' own account, for every head dimension."""
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.wide_tiles import padded

    widths = sorted({padded(d) for d in range(1, 577)})
    for d, dv, has_score in itertools.product(widths, widths[:-1], (False, True)):
        shape = tile_config.Shape(d, dv, dtype, has_score)
        # what is too wide for a small device, the backend says it does not support
        room = tile_config.shared_memory(capability)
        is_wide, is_narrow = max(d, dv) > 256, max(d, dv) <= 128
        is_too_wide = room <= 64 << 10 and (is_wide or (dtype.itemsize == 4 and not is_narrow))
        is_too_wide |= is_wide and dtype.itemsize == 4 and room < 200 << 10
        for rows in (1, 16, 64, 65, 10_000):
            tiles = tile_config.forward_tiles(shape, capability, rows, rows <= 64)
            assert (is_wide and is_too_wide) or tile_config.fits("forward", tiles, shape, capability), (shape, rows)
        for name, tiles in tile_config.backward_tiles(shape, capability).items():
            assert is_too_wide or tile_config.fits(name, tiles, shape, capability), (shape, name)
            assert tile_config.reason_against(name, tiles, shape, capability) is None or is_too_wide
