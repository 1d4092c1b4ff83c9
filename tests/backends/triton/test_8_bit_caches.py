"""8-bit keys and values in the Triton backend, without a GPU: kernels compiled ahead of time, and calls in which nothing waits."""

from __future__ import annotations

import importlib.util
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.backends.triton import tile_config
from anyattn.call_cache import attention
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments, cache_call
from tests.support.no_reading import no_reading, noted_launches
from tests.support.triton import ahead

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

HOPPER = (9, 0)


def arguments(
    dtype: torch.dtype, form: str, q_dtype: torch.dtype = torch.bfloat16, page_size: int = 0, d: int = 128
) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
    """One query of 32 heads for each of 4 sequences of 8 K/V heads. form: of the scales."""
    rows, positions = (40, page_size) if page_size else (4, 1024)
    behind = 4 if form == "inline" else 0
    memory = torch.ones(2, rows, positions, 8, d + behind, dtype=torch.uint8)
    k, v = memory[..., :d].view(dtype)
    options: dict[str, Any] = {"cache_seqlens": torch.ones(4, dtype=torch.int32), "causal": True, "backend": "triton"}
    if page_size:
        options["page_table"] = torch.zeros(4, 9, dtype=torch.int32)
    made = {
        "none": None,
        "number": 0.5,
        "head": torch.ones(4, 8),
        "page": torch.ones(rows, 1, 8),
        "key": torch.ones(rows, positions, 8),
        "inline": memory[0, ..., d:].view(torch.float32)[..., 0].fill_(1.0) if behind else None,
    }
    options |= dict.fromkeys(("k_descale", "v_descale"), made[form])
    return (torch.zeros(4, 1, 32, d, dtype=q_dtype), k, v), options


def loops_of(dtype: torch.dtype, form: str, **more: Any) -> tuple[list[list[str]], ahead.Resources, int]:
    """The machine's operations in the loops over keys, what the kernel takes, and the bytes of keys and values in a step of a thread."""
    given, options = arguments(dtype, form, **more)
    with ahead.on(HOPPER) as launches:
        anyattn.flash_attn_with_kvcache(*given, **options, validate=False)
    (launch,) = [one for one in launches if "TILE_N" in one.options]
    kernel = ahead.compiled(launch, HOPPER)
    loops = [loop for loop in ahead.machine_loops(kernel.asm["cubin"]) if any("MMA" in op for op in loop)]
    rows = launch.options["TILE_N"] * 2 * given[1].shape[3] // (32 * launch.options["num_warps"])
    return loops, ahead.resources(kernel), rows


@pytest.mark.parametrize("d", [64, 128, 256])
def test_shared_memory_of_wrapped_rows(d: int) -> None:
    given, options = arguments(torch.float8_e4m3fn, "inline", d=d)
    for tile_n, warps, stages in ((128, 4, 3), (128, 8, 4), (64, 8, 2)):
        tiles = tile_config.Tiles(16, tile_n, warps, stages)
        with ahead.on(HOPPER) as launches, mock.patch.dict(tile_config._SHORT_WRAPPED, {"sm_90": (tuple(vars(tiles).values()),) * 3}):
            anyattn.flash_attn_with_kvcache(*given, **options, validate=False)
        (launch,) = [one for one in launches if "TILE_N" in one.options]
        shape = tile_config.Shape(d, d, torch.bfloat16, has_8_bits=True, wrap=launch.options["WRAP"])
        tiles = tile_config.Tiles(16, launch.options["TILE_N"], launch.options["num_warps"], launch.options["num_stages"])
        assert ahead.resources(ahead.compiled(launch, HOPPER)).shared <= tile_config.needed("forward", tiles, shape, HOPPER)


CASES: dict[str, dict[str, Any]] = {
    "e4m3": {"dtype": torch.float8_e4m3fn, "form": "key"},
    "e4m3, pages": {"dtype": torch.float8_e4m3fn, "form": "page", "page_size": 16},
    "e4m3, float16": {"dtype": torch.float8_e4m3fn, "form": "key", "q_dtype": torch.float16},
    "e5m2, narrow heads": {"dtype": torch.float8_e5m2, "form": "head", "d": 64},
    "int8": {"dtype": torch.int8, "form": "none"},
    "wide heads": {"dtype": torch.float8_e4m3fn, "form": "head", "d": 256},
    "scales behind the bytes": {"dtype": torch.float8_e4m3fn, "form": "inline"},
    "scales behind the bytes, pages": {"dtype": torch.float8_e4m3fn, "form": "inline", "page_size": 16},
    "scales behind the bytes, int8 and float16": {"dtype": torch.int8, "form": "inline", "q_dtype": torch.float16},
    "scales behind the bytes, narrow heads": {"dtype": torch.float8_e5m2, "form": "inline", "d": 64},
    "scales behind the bytes, wide heads": {"dtype": torch.float8_e4m3fn, "form": "inline", "d": 256},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CASES)
def test_loops_load_ahead_and_convert_in_registers(name: str) -> None:
    loops, found, rows = loops_of(**CASES[name])
    assert found.stack == 0 and found.shared <= 227 << 10
    for loop in loops:
        names = {op.partition(".")[0] for op in loop}
        assert "F2F" not in names and "I2F" not in names, "conversions of a sixteenth of the usual rate"
        assert not any(op.startswith("LDS.U8") for op in loop), "values are transposed byte by byte"
        piece = ".64" if name == "scales behind the bytes, narrow heads" else ".128"  # rows of 68 bytes: measured to be faster by 8
        copies = [op for op in loop if op.startswith("LDGSTS")]
        assert sum(piece in op for op in copies) >= rows // 16, "rows are copied in short pieces"
        assert not any(op.startswith("LDG.") for op in loop) or "pages" in name, "waits for what it loads"


GATHERED: dict[str, dict[str, Any]] = {
    "e4m3": {"dtype": torch.float8_e4m3fn, "form": "none", "page_size": 16},
    "e4m3, scales of keys": {"dtype": torch.float8_e4m3fn, "form": "key", "page_size": 16},
    "e5m2, float16": {"dtype": torch.float8_e5m2, "form": "none", "q_dtype": torch.float16},
    "int8, narrow heads": {"dtype": torch.int8, "form": "head", "d": 64},
    "wide heads": {"dtype": torch.float8_e4m3fn, "form": "page", "d": 256, "page_size": 64},
    "scales behind the bytes": {"dtype": torch.float8_e4m3fn, "form": "inline", "page_size": 16},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", GATHERED)
def test_gathering_reads_and_writes_16_bytes_at_a_time(name: str) -> None:
    from anyattn.backends.triton.gathered_keys import gathered

    (q, k, v), options = arguments(**GATHERED[name])
    places = {name: options.pop(name) for name in ("cache_seqlens", "page_table") if name in options}
    del options["backend"]
    call = cache_call(CacheArguments(q, k, v, validate=False, **places), Options(**options))
    with ahead.caught(HOPPER) as launches:
        gathered(call.problem)
    kernel = ahead.compiled(launches[-1], HOPPER)
    found, text = ahead.resources(kernel), kernel.asm["ptx"]
    assert found.stack == 0 and found.registers <= 168  # three programs of 128 threads fit on a multiprocessor
    stores, loads = (re.findall(rf"{op}\.global[.a-z]*\.(v\d\.)?b(\d+)", text) for op in ("st", "ld"))
    wide = [x for x in stores if x == ("v4.", "32")]
    assert len(wide) >= len(stores) - 2  # but lengths, and factors of keys
    assert name == "scales behind the bytes" or ("v4.", "32") in loads


# ---- nothing waits


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    attention.clear()
    yield noted_launches(monkeypatch, HOPPER)
    attention.clear()


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("form", ["none", "number", "head", "page", "key", "inline"])
def test_a_step_reads_nothing(form: str, page_size: int, launches: Any) -> None:
    given, options = arguments(torch.float8_e4m3fn, form, page_size=page_size)
    with no_reading():
        anyattn.flash_attn_with_kvcache(*given, **options)
    anyattn.flash_attn_with_kvcache(*given, **options)
    with no_reading(through_dispatch=False):
        anyattn.flash_attn_with_kvcache(*given, **options)
    first, second, third = [(grid, constants) for _, grid, *_, constants in launches.made]
    assert first == second == third
    scale = {"none": 0, "number": 1, "head": 1}.get(form, 2)
    assert (first[1]["K_SCALE"], first[1]["V_SCALE"]) == (scale, scale)
    assert (first[1]["KV_BYTES"], first[1]["WRAP"]) == ((4, 32) if form == "inline" else (16, 0))


def test_a_cache_that_grows_is_planned_once(launches: Any) -> None:
    q, memory, scales = torch.zeros(2, 1, 4, 64), torch.zeros(2, 300, 2, 64, dtype=torch.int8), torch.ones(2, 300, 2)
    for rows in range(270, 290):
        cache = memory[:, :rows]
        anyattn.flash_attn_with_kvcache(
            q.bfloat16(), cache, cache, k_descale=scales[:, :rows], v_descale=scales[:, :rows], backend="triton"
        )
    assert attention.size() == 1


def test_older_gpus_leave_e4m3_to_others(launches: Any) -> None:
    given, options = arguments(torch.float8_e4m3fn, "head")
    launches.capability = (8, 0)
    from anyattn.backends.triton import tile_config

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_config, "capability_of", lambda device: (8, 0))
        with pytest.raises(anyattn.BackendError, match=r"it reads float8_e4m3fn from compute capability 8\.9 on, and this is 8\.0"):
            anyattn.flash_attn_with_kvcache(*given, **options)
