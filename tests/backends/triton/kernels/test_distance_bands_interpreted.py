"""Gradients of tables by row and distance from bands, in Triton's interpreter, against the row-wise budget.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.backends.triton import distance_bands
from tests.support import cases
from tests.support.flex_calls import judge

TILES = {"tile_m": 32, "tile_n": 32}
ROWS, KEYS = 100, 83
HEADS = 2


def table(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def disentangled(max_distance: int | None, **more: Any) -> tuple[Callable, list[Tensor]]:
    tables = [table(2, HEADS, n, 8, seed=n) for n in (ROWS, KEYS)]
    return anyattn.scores.disentangled(*tables, max_distance, **more), tables


def read(place: Callable[[Any, Any], Any], width: int, more: int = 0) -> tuple[Callable, list[Tensor]]:
    """A table by row and one by key, with ``more`` rows that no call reads, and one for each head."""
    of_row, of_key, of_head = table(2, HEADS, ROWS + more, width), table(2, HEADS, KEYS + more, width, seed=1), table(HEADS, seed=2)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        at = place(q, k)
        return s * of_head[h] + of_row[b, h, q, at] + 0.5 * of_key[b, h, k, at]

    return score, [of_row, of_key, of_head]


MODS = {
    "disentangled": disentangled(None),
    "by query": disentangled(None, p2c_by_query=True),
    "buckets": disentangled(12),
    "asymmetric": read(lambda q, k: torch.clamp(q - k, -20, 3) + 20, 24),
    "far from the diagonal": read(lambda q, k: torch.clamp(q - k - 37, -3, 3) + 3, 7),
    "rows that no pair reads": read(lambda q, k: torch.clamp(k - q, -5, 6) + 5, 12, more=9),
    "unordered": read(lambda q, k: torch.clamp((q - k) * 7, -70, 70) % 11, 11),
    "more places than a program's": read(lambda q, k: torch.clamp(q - k, -60, 70) + 60, 131),
}


def product() -> tuple[Callable, list[Tensor]]:
    """A table whose derivative is the score."""
    of_row = table(2, HEADS, ROWS, 9)
    return lambda s, b, h, q, k: s * of_row[b, h, q, torch.clamp(q - k, -4, 4) + 4], [of_row]


MODS["product"] = product()


@pytest.fixture(autouse=True)
def limits() -> Iterator[None]:
    """Every table has a band, however small the problem."""
    anyway = {"_MOST_BYTES": 1 << 30, "_MOST_NEAR": 1e9}
    with mock.patch.multiple(distance_bands, **anyway):
        yield


@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(30, 10)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_gradients(name: str, mask: Any) -> None:
    score, captured = MODS[name]
    q, k, v, _ = cases.inputs("normal", cases.Shape(2, HEADS, HEADS, ROWS, KEYS, 16, 16), torch.bfloat16, 0)
    with mock.patch.object(distance_bands.Bands, "gradient", autospec=True, side_effect=distance_bands.Bands.gradient) as summed:
        judge(q, k, v, score=score, mask=mask, captured=captured, label=name, backend="triton", kernel_options=TILES)
    assert summed.call_count == (1 if name == "product" else 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_heads_that_share_keys(dtype: torch.dtype) -> None:
    score, captured = MODS["buckets"]
    q, k, v, _ = cases.inputs("normal", cases.Shape(2, HEADS, 1, ROWS, KEYS, 32, 16), dtype, 0)
    judge(q, k, v, score=score, captured=captured, backend="triton", kernel_options={"tile_m": 16, "tile_n": 64})


def test_derivatives_below_float16() -> None:
    """No entry of a band would be a normal number."""
    of_row = table(2, HEADS, ROWS, 9)
    q, k, v, dout = cases.inputs("normal", cases.Shape(2, HEADS, HEADS, ROWS, KEYS, 16, 16), torch.float16, 0)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        return s + 2.0**-13 * of_row[b, h, q, torch.clamp(q - k, -4, 4) + 4]

    judge(q, k, v, score=score, captured=[of_row], dout=dout * 2.0**-6, backend="triton", kernel_options=TILES)
