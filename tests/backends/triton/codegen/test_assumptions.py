"""How large a mod's whole numbers can be, and what that makes of its text: 32 bits where they suffice, no clamps where nothing leaves."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.ir.expr import Expr, category
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from tests.support.tiles import library_masks, random_mask

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
SIZE = 24


def problem_of(length: int = SIZE, dtype: torch.dtype = torch.float32) -> Problem:
    x = torch.zeros(1, dtype=dtype).expand(2, 2, length, 16)
    return Problem(x, x, x, 1.0)


def assert_sound(mod, length: int = SIZE) -> None:  # type: ignore[no-untyped-def]
    """Every value of every node lies in its extent, over a whole grid."""
    from anyattn.mods.ir.extents import Box, Extent, extents

    traced = trace(mod, "mask")
    place = [Extent(0, n - 1) for n in (2, 2, length, length)]
    found = extents(traced.expr, Box(*place, tuple(Extent(int(s), int(s)) for s in traced.scalars) or None))  # type: ignore[call-arg]
    everything = Expr(traced.expr.nodes, tuple(range(len(traced.expr.nodes))))
    b, h, q, kv = (torch.arange(e.hi + 1) for e in place)
    leaves = {"b": b[:, None, None, None], "h": h[:, None, None], "q_idx": q[:, None], "kv_idx": kv}
    values = run(everything, leaves, traced.scalars, traced.tensors)
    for node, extent, value in zip(traced.expr.nodes, found, values, strict=True):
        assert (extent is None) == (category(node.dtype) == "float")
        if extent is not None:
            seen = torch.as_tensor(value).to(torch.int64)
            assert extent.lo <= int(seen.min()) and int(seen.max()) <= extent.hi, (str(traced.expr), node, extent)


@pytest.mark.parametrize("name", library_masks(SIZE, SIZE))
def test_the_library(name: str) -> None:
    assert_sound(library_masks(SIZE, SIZE)[name])


@pytest.mark.parametrize("seed", range(60))
def test_random_masks(seed: int) -> None:
    assert_sound(random_mask(seed, SIZE))


BYTES, SHORTS = torch.tensor([0, 127, -128, 3] * 6, dtype=torch.int8), torch.tensor([0, 255, 3, 9] * 6, dtype=torch.uint8)
WRAPS = torch.tensor([0, 2**31 - 1, -(2**31), 7] * 6, dtype=torch.int32)
ODD = {
    "int8 wraps": lambda b, h, q, k: (BYTES[q] + BYTES[k] > 0) & (-BYTES[k] < 100),
    "uint8 wraps": lambda b, h, q, k: SHORTS[q] - SHORTS[k] < 7,
    "int32 wraps": lambda b, h, q, k: WRAPS[q] + 5 > WRAPS[k] * 3,
    "rests": lambda b, h, q, k: ((q - k) % 5 < 3) & ((k - 7) % -4 > q // -3) & (torch.fmod(q - 9, 4) < 2) & (q // 4 > (k - 3) // 2),
    "bits": lambda b, h, q, k: (((q - 3) ^ k) & 6 | (q >> 1)) > ~k,
    "not": lambda b, h, q, k: ~(q - k) > 3,
    "sizes": lambda b, h, q, k: (q - 9).abs() * (k - 11) - torch.where(q > k, q * 3, -k).clamp(-4, 40) > torch.sign(q - k),
    "shifts": lambda b, h, q, k: (q << 3) >> 2 > (k - 5) >> 1,
}


@pytest.mark.parametrize("name", ODD)
def test_odd_arithmetic(name: str) -> None:
    assert_sound(ODD[name])


def text_of(mod, kind: str = "score", length: int = SIZE, **style: object) -> str:  # type: ignore[no-untyped-def]
    from anyattn.backends.triton.codegen.assumptions import style_of
    from anyattn.triton_tools.emit import emit

    traced = trace(mod, kind)
    found = style_of(traced, traced.expr, problem_of(length))
    return "\n".join(emit(traced.expr, style=found._replace(**style)).tile)


def test_what_is_computed_in_64_bits() -> None:
    far, near, table = 2**33, 40, torch.zeros(3, 100)
    assert "int64" not in text_of(lambda b, h, q, k: q - k <= near, "mask")
    assert "int64" in text_of(lambda b, h, q, k: q - k <= far, "mask")
    assert "int64" not in text_of(lambda s, b, h, q, k: s + table[h, q - k + near])
    assert "int64" in text_of(lambda s, b, h, q, k: s + table[h, q - k + near] + q * k)
    assert "int64" in text_of(lambda b, h, q, k: q - k <= near, "mask", 2**29)


def test_what_is_kept_inside() -> None:
    """Clamps where the sizes of a call do not show that an index is inside, and none where they do."""
    shift, table, ids = 40, torch.zeros(3, 100), torch.zeros(SIZE, dtype=torch.int64)
    assert "inside" not in text_of(lambda s, b, h, q, k: s + table[h, q - k + shift])
    assert "inside" in text_of(lambda s, b, h, q, k: s + table[h, q - k])  # from the end where it is negative
    assert "below" in text_of(lambda s, b, h, q, k: s + table[h, (q - k).abs() * 5])
    assert "inside" in text_of(lambda s, b, h, q, k: s + table[h, ids[q] + k])  # whatever ids hold


def test_strides_of_1() -> None:
    table = torch.zeros(3, 100)
    mod = lambda wide: lambda s, b, h, q, k: s + wide[h, (q - k).abs()]
    assert "* tensors" not in text_of(mod(table)) and "* tensors" in text_of(mod(table.T.contiguous().T))


def test_fast_functions_keep_out_of_what_is_cut() -> None:
    """Where a last bit can decide, as between the buckets of T5's bias, functions stay exact."""
    smooth = text_of(lambda s, b, h, q, k: torch.tanh(s / (q + 1)), functions="fast")
    assert "tanh_fast" in smooth and "divide" not in smooth
    table = torch.zeros(40)
    bucketed = lambda s, b, h, q, k: s + table[(torch.log((q - k).abs() + 1.0) / (h + 1.0)).to(torch.int64)]
    bucket = text_of(bucketed, functions="fast")
    assert "divide" in bucket and "turned" not in bucket
    step = text_of(lambda s, b, h, q, k: torch.where(torch.tanh(s) > 0.5, s, 0.0), functions="coarse", is_nvidia=True)
    assert "device_math.tanh(" in step


def test_styles_change_with_sizes_only() -> None:
    """Closures over other values share a text."""
    texts = {
        text_of(lambda s, b, h, q, k, c=c: torch.tanh(s / c) * c + (q - k) * c, functions="coarse", is_nvidia=True)
        for c in (3.5, 7.25, -1e9)
    }
    assert len(texts) == 1
    texts = {text_of(lambda b, h, q, k, c=c: q - k <= c, "mask", n) for c in (0, 3, -(2**20)) for n in (1, 100, 2**20)}
    assert len(texts) == 1
