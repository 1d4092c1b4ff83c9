"""Appending to 8-bit caches in the Triton backend, without a GPU: one launch before attention, in which nothing waits."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.triton import append_rotary
from anyattn.call_cache import attention
from tests.backends.triton.test_8_bit_caches import HOPPER, arguments
from tests.support.no_reading import no_reading, noted_launches
from tests.support.quantised_rows import DTYPES
from tests.support.triton import ahead

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

SCALES = {"none": 0, "number": 0, "head": 1, "page": 2, "key": 3, "inline": 3}  # ``ScaleForm``


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    attention.clear()
    found = noted_launches(monkeypatch, HOPPER)
    found.steps = []
    monkeypatch.setattr(append_rotary, "run_plain", lambda *given: found.steps.append(given))
    yield found
    attention.clear()


def with_scales(dtype: torch.dtype, form: str, **more: Any) -> tuple[tuple[torch.Tensor, ...], dict[str, Any]]:
    """``arguments`` with scales of the values' own."""
    given, options = arguments(dtype, form, **more)
    if form == "key":
        options["v_descale"] = options["v_descale"].clone()
    if form == "inline":
        of_k, v = options["k_descale"], given[2]
        half = v.untyped_storage().nbytes() // 8  # in float32
        options["v_descale"] = torch.as_strided(of_k, of_k.shape, of_k.stride(), of_k.storage_offset() + half).fill_(1.0)
    return given, options


def appended(**more: Any) -> dict[str, Any]:
    rows = {name: torch.zeros(4, 1, 8, 128, dtype=torch.bfloat16) for name in "kv"}
    angles = torch.zeros(2048, 64)
    return {**rows, "rotary_cos": angles, "rotary_sin": angles, "saturated": torch.zeros(1, dtype=torch.int64), **more}


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("form", SCALES)
def test_a_step_is_two_launches_and_reads_nothing(form: str, page_size: int, launches: SimpleNamespace) -> None:
    """As in a CUDA graph: a first call, and warm ones, whose tensors are their own."""
    counters = []
    for call in range(3):
        given, options = with_scales(torch.float8_e4m3fn, form, page_size=page_size)
        new = appended()
        counters.append(new["saturated"])
        with no_reading(through_dispatch=call == 0):
            anyattn.flash_attn_with_kvcache(*given, **new, **options)
        assert len(launches.made) == len(launches.steps) == call + 1
        tensors = [t for t in launches.steps[-1][2] if isinstance(t, torch.Tensor)]
        assert any(t.data_ptr() == counters[-1].data_ptr() for t in tensors)
        for name, cache in zip(("k_descale", "v_descale"), given[1:]):
            assert any(t.data_ptr() == cache.data_ptr() and t.dtype is torch.uint8 for t in tensors)
            if isinstance(options[name], torch.Tensor):
                assert any(t.data_ptr() == options[name].data_ptr() and t.dtype is torch.float32 for t in tensors)
    assert attention.size() == 1
    constants = launches.steps[0][-1]
    assert constants["FORMAT"] == 1 and constants["COUNTS"] is True and constants["K_SCALES"] == constants["V_SCALES"] == SCALES[form]
    assert (constants["UNIT"], constants["TABLE_UNIT"], constants["CACHE_UNIT"]) == (8, 8, 4 if form == "inline" else 8)
    assert all(step[-1] == constants for step in launches.steps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_compiled_depends_on_the_dtype(dtype: torch.dtype, launches: SimpleNamespace) -> None:
    given, options = arguments(dtype, "number")
    anyattn.flash_attn_with_kvcache(*given, **appended(saturated=None), **options)
    constants = launches.steps[0][-1]
    assert constants["FORMAT"] == 1 + DTYPES.index(dtype) and constants["COUNTS"] is False
    assert launches.steps[0][2][-2:] == (0.5, 0.5), "numbers are arguments"


@pytest.mark.parametrize(("of_k", "of_v"), [("number", "head"), ("head", "none"), ("key", "number"), ("none", "key")])
def test_scales_of_two_forms_are_compiled(of_k: str, of_v: str) -> None:
    """Triton's interpreter knows no types: a number's pointer is to something else."""
    attention.clear()
    given, options = arguments(torch.int8, of_k)
    options["v_descale"] = arguments(torch.int8, of_v)[1]["v_descale"]
    with ahead.on(HOPPER) as made:
        anyattn.flash_attn_with_kvcache(*given, **appended(), **options, validate=False)
    (step,) = [launch for launch in made if launch.kernel.fn.__name__ == "cache_step"]
    assert step.options["K_SCALES"] == SCALES[of_k] and step.options["V_SCALES"] == SCALES[of_v]
    ahead.compiled(step, HOPPER, "ptx")


def test_wider_caches_are_not_quantised(launches: SimpleNamespace) -> None:
    given, options = arguments(torch.int8, "none")
    given = (given[0], *(cache.bfloat16() for cache in given[1:]))
    anyattn.flash_attn_with_kvcache(*given, **appended(), **options)
    constants = launches.steps[0][-1]
    assert constants["FORMAT"] == 0 and constants["COUNTS"] is False and (constants["K_SCALES"], constants["V_SCALES"]) == (0, 0)


def test_warm_calls_check_what_is_written(launches: SimpleNamespace) -> None:
    given, options = with_scales(torch.int8, "key")
    anyattn.flash_attn_with_kvcache(*given, **appended(), **options)
    options["v_descale"] = options["k_descale"]
    for _ in range(2):
        with pytest.raises(ValueError, match="k_descale and v_descale share memory"):
            anyattn.flash_attn_with_kvcache(*given, **appended(), **options)
    assert len(launches.steps) == 1
