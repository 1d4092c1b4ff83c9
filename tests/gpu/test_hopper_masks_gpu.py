"""Masks that the Hopper kernels read as words of bits, wholly or in part, on a GPU: both passes by the budget against the fp64 oracle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support.gpu import judging
from tests.support.gpu.judging import judge, qkv
from tests.support.hopper import masks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]
judging.needs_the_backend(only="hopper")

CAPTURING = {
    "random blocks": judging.Capturing(lambda to: (lambda t: lambda b, h, q, k: t[q // 128, k // 128])(to(masks.TABLE))),
    "lengths": judging.Capturing(lambda to: (lambda n: lambda b, h, q, k: (k < n[b]) & ((q < k + 5) | (q < 12)))(to(masks.LENGTHS))),
    "by distance": judging.Capturing(lambda to: (lambda t: lambda b, h, q, k: t[(q - k) // 13 % 3])(to(torch.tensor([False, True, True])))),
    "valid": judging.Capturing(lambda to: (lambda t: lambda b, h, q, k: t[k] & t[q] | (q == k))(to(masks.VALID))),
}
MASKS: dict[str, Any] = masks.MASKS | CAPTURING
IMPORTANCE = torch.tensor([0.0, 0.3, float("nan"), 0.9, 0.1, 0.7])
FLOATS: dict[str, Any] = {  # 41 * (1 / 41) is less than 1 in float32
    "quotients": judging.AsOnCpu(lambda b, h, q, k: (q / 41.0).floor() == (k / 41.0).floor()),
    "sums": lambda b, h, q, k: q * 0.3 + 0.9 > k * 0.3,
    "roots": lambda b, h, q, k: torch.sqrt(q * 1.0 + 1).floor() >= torch.sqrt(k * 1.0).floor(),
    "NaN": judging.Capturing(lambda to: (lambda t: lambda b, h, q, k: torch.maximum(t[k % 6], t[q % 6]) < 0.8)(to(IMPORTANCE))),
}


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, d: int) -> None:
    judge(qkv(2, 4, 2, sq=600, sk=700, d=d), mask=MASKS[name], backward=True)


@pytest.mark.parametrize("name", FLOATS)
def test_masks_of_floats(name: str) -> None:
    """Which pairs are visible depends on the last bit of a quotient, a product or a root."""
    judge(qkv(1, 4, 2, sq=600, sk=700), mask=FLOATS[name], backward=True)


@pytest.mark.parametrize("name", ["neighbourhood", "strided", "odd image", "random blocks"])
def test_masks_of_wide_heads(name: str) -> None:
    judge(qkv(1, 4, 2, sq=600, sk=700, d=192, dv=128), mask=MASKS[name], backward=True)


@pytest.mark.parametrize("name", ["neighbourhood", "strided", "captured image"])
def test_with_a_score_mod(name: str) -> None:
    """Then what is hidden is taken from the gradient of scores too."""
    judge(qkv(1, 4, 2, sq=300, sk=400), mask=MASKS[name], score=lambda s, b, h, q, k: 20 * torch.tanh(s / 20), backward=True)


def test_quotients_of_distances() -> None:
    """A distance is negative above the diagonal, and its quotient is rounded down, also in tiles that are not a row tile's first."""
    for n in (7, -3):

        def score(s, b, h, q, k, n=n):  # type: ignore[no-untyped-def]
            return s.masked_fill(torch.div(k - q, n, rounding_mode="floor") > 2, -2.0) + (q - k) // 5 % 4

        judge(qkv(1, 4, 2, sq=200, sk=300, d=64), score=score, mask=lambda b, h, q, k: (q - k) // 13 % 3 > 0, backward=True)


@pytest.mark.parametrize("name", ["neighbourhood", "strided"])
def test_deterministic(name: str) -> None:
    judge(qkv(1, 4, 2, sq=600, sk=700, d=64), mask=MASKS[name], backward=True, deterministic=True)


@pytest.mark.parametrize("d", [64, 128])
def test_rows_and_keys_that_do_not_fill_tiles(d: int) -> None:
    for sq, sk in ((1, 1), (65, 129), (129, 65), (257, 31)):
        judge(qkv(1, 2, 1, sq=sq, sk=sk, d=d), mask=MASKS["strided"], backward=True)
