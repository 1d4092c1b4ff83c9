"""Far sides of score mods in Triton's interpreter: tiles in which clamped distances are constants, against the row-wise budget.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.backends.triton.codegen import programs
from anyattn.call_cache import attention
from anyattn.mods.analysis import far_sides
from tests.entry_points import test_flash_varlen as varlen
from tests.support import cases
from tests.support import sequences as seq
from tests.support.flex_calls import judge
from tests.support.sequences import Meaning

TILES = {"tile_m": 16, "tile_n": 16}
SHAPE = (1, 2, 1, 100, 83, 16, 16)
STEP = 3


def table(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def disentangled(max_distance: int | None) -> tuple[Callable, list[Tensor]]:
    tables = [table(1, 2, 128, 8, seed=n) for n in range(2)]
    return anyattn.scores.disentangled(*tables, max_distance), tables


def looked_up(place: Callable[[Any, Any], Any], size: int) -> tuple[Callable, list[Tensor]]:
    """A table per row, key and head at a place that depends on the positions."""
    of_row, of_key, of_head = table(128, size), table(size, 128, seed=1), table(2, size, seed=2)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        at = place(q, k)
        return s * (1 + 0.1 * of_row[q, at]) + of_key[at, k] + of_head[h, at]

    return score, [of_row, of_key, of_head]


def clamped(lo: int, hi: int, offset: int = 0) -> tuple[Callable, list[Tensor]]:
    return looked_up(lambda q, k: torch.clamp(q - k + offset, lo, hi) - lo, hi - lo + 1)


MODS = {
    "disentangled": disentangled(None),
    "buckets": disentangled(12),
    "symmetric": clamped(-7, 7),
    "asymmetric": clamped(-20, 3),
    "beyond all distances": clamped(-200, 190),
    "beyond one side": clamped(-200, 5),
    "a bound beyond the table": looked_up(lambda q, k: torch.clamp(q - k + 82, 0, 10**8), 182),
    "one place": clamped(4, 4),
    "far from the diagonal": clamped(-3, 3, offset=-37),
    "falling, by 3": looked_up(lambda q, k: torch.clamp((q - k) * -3 + 5, -40, 41) + 40, 82),
    "by a captured step": looked_up(lambda q, k: torch.clamp((q - k) * STEP, -4, 4) + 4, 9),
    "absolute": looked_up(lambda q, k: torch.clamp((q - k).abs(), max=9), 10),
    "nested": looked_up(lambda q, k: torch.clamp(torch.clamp(q - k, -20, 20) // 1 + torch.clamp(k - q, -4, 6) + 26, 0, 40), 41),
    "of one clamped": looked_up(lambda q, k: torch.clamp(30 - torch.clamp(q - k, min=-6), min=5, max=33) - 5, 29),
    "compared": looked_up(lambda q, k: torch.where(q - k > 11, 0, torch.where(k - q >= 6, 1, (q + k) % 3 + 2)), 5),
    "wrapped": looked_up(lambda q, k: torch.clamp(q - k, -8, -1), 8),
    "32 bits": looked_up(lambda q, k: torch.clamp(q.to(torch.int32) - k.to(torch.int32), -5, 6) + 5, 12),
    "of other positions": looked_up(lambda q, k: torch.clamp(2 * q - k, 0, 12), 13),
}
WITHOUT_SIDES = ("of other positions", "by a captured step")


@pytest.mark.covering(1)
@pytest.mark.parametrize("mask", [None, masks.causal(), masks.sliding_window(60, 10)], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_forward_and_all_gradients(name: str, mask: Any) -> None:
    score, captured = MODS[name]
    q, k, v, _ = cases.inputs("normal", cases.Shape(*SHAPE), torch.float32, 0)
    with mock.patch.object(programs, "far_sides", wraps=far_sides.far_sides) as asked:
        attention.clear()
        judge(q, k, v, score=score, mask=mask, captured=captured, label=name, backend="triton", kernel_options=TILES)
    sides = [side for call in asked.call_args_list for side in far_sides.far_sides(*call.args)]
    assert any(sides) == (name not in WITHOUT_SIDES)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["disentangled", "symmetric"])
def test_16_bits(name: str, dtype: torch.dtype) -> None:
    score, captured = MODS[name]
    q, k, v, _ = cases.inputs("normal", cases.Shape(*SHAPE), dtype, 0)
    judge(q, k, v, score=score, captured=captured, label=name, backend="triton", kernel_options={"tile_m": 32, "tile_n": 32})


def test_the_same_bits_as_without_sides() -> None:
    """In float32 a far tile's additions are those of a near tile."""
    score, _ = MODS["disentangled"]
    q, k, v, _ = cases.inputs("normal", cases.Shape(*SHAPE), torch.float32, 0)
    got = []
    for sides in (far_sides.far_sides, lambda expr: (None, None)):
        with mock.patch.object(programs, "far_sides", sides):
            attention.clear()
            got.append(anyattn.flex_attention(q, k, v, score, enable_gqa=True, backend="triton", kernel_options=TILES))
    attention.clear()
    assert torch.equal(*got)


@pytest.mark.parametrize("shift", [-25, 0, 9])
def test_a_captured_number_moves_the_sides(shift: int) -> None:
    """One program for all numbers."""
    of_row = table(128, 15)
    score = lambda s, b, h, q, k: s + of_row[q, torch.clamp(q - k + shift, -7, 7) + 7]
    q, k, v, _ = cases.inputs("normal", cases.Shape(*SHAPE), torch.float32, 0)
    judge(q, k, v, score=score, captured=[of_row], label=str(shift), backend="triton", kernel_options=TILES)


def test_numbers_that_may_wrap_around_have_no_sides() -> None:
    huge = 2**62
    of_head = table(2, 3)
    score = lambda s, b, h, q, k: s + of_head[h, torch.clamp(q - k + huge - huge, -1, 1) + 1]
    q, k, v, _ = cases.inputs("normal", cases.Shape(*SHAPE), torch.float32, 0)
    with mock.patch.object(programs, "far_sides", side_effect=AssertionError("asked")):
        attention.clear()
        judge(q, k, v, score=score, captured=[of_head], backend="triton", kernel_options=TILES)


@pytest.mark.parametrize("causal", [False, True])
def test_packed_sequences(causal: bool) -> None:
    batch = seq.ragged([20, 3, 67], [30, 71, 58])
    of_row, of_key = table(128, 11), table(128, 11, seed=1)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        at = torch.clamp(q - k, -5, 5) + 5
        return s + of_row[q, at] + of_key[k, at]

    meaning = Meaning(causal=causal, score_mod=score, captured=[of_row, of_key])
    got, shared = varlen.results(batch, meaning, varlen.packed_call)
    seq.judge(got, batch, meaning, shared=shared)


@pytest.mark.parametrize("rows", [1, 3, 20])
def test_heads_of_a_group_in_one_tile(rows: int) -> None:
    """Few rows: the heads that share keys are rows of one tile."""
    of_head, of_row = table(6, 13), table(6, 32, 13, seed=1)

    def score(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
        at = torch.clamp(q - k + 60, -6, 6) + 6
        return s + of_head[h, at] + of_row[h, q, at]

    q, k, v, _ = cases.inputs("normal", cases.Shape(1, 6, 2, rows, 150, 16, 16), torch.float32, 0)
    judge(q, k, v, score=score, captured=[of_head, of_row], label=str(rows), backend="triton")


def test_deterministic_sums() -> None:
    score, captured = MODS["symmetric"]
    q, k, v, _ = cases.inputs("normal", cases.Shape(*SHAPE), torch.float32, 0)
    judge(q, k, v, score=score, captured=captured, backend="triton", kernel_options=TILES, deterministic=True)


@pytest.mark.parametrize("options", [{}, {"deterministic": "batch"}], ids=["default", "in every batch"])
@pytest.mark.parametrize("has_one_kv", [False, True])
def test_wide_heads(has_one_kv: bool, options: dict[str, Any]) -> None:
    """Columns beyond 512 and values in keys, in tiles that are far and near, which the mode computes alike."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(1, h, n, d, generator=g, dtype=torch.bfloat16, device="cpu") for h, n, d in ((2, 90, 576), (1, 96, 576), (1, 96, 512))
    )
    score = MODS["asymmetric"][0]
    judge(q, k, k[..., :512] if has_one_kv else v, score=score, mask=masks.causal(40), backend="triton", **options)
