"""Gradients of heads above 256 by the Hopper kernels: one kernel for each gradient, two warp groups with half of its columns each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.hopper import wide_backward
from tests.gpu import test_hopper_short_tiles_gpu as short
from tests.gpu.test_hopper_wide_gpu import HEADS, MASKS, SCORES, inputs
from tests.support.gpu import judging
from tests.support.gpu.judging import judge, qkv

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

RERUNS = 50 if judging.MODE == "gpu" else 2
BANDS: dict[str, Any] = {"full": None, "causal": masks.causal(), "window": masks.sliding_window(70, 20), "offset": masks.causal(33)}


@pytest.fixture(autouse=True)
def _finished() -> Iterator[None]:
    yield
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


def backed(*given: Any, **options: Any) -> None:
    judge(*given, backward=True, **options)


def test_first_one_tile() -> None:
    """The smallest case, to be run before all others: one tile of keys, one of rows."""
    backed(qkv(1, 1, 1, sq=64, sk=64, d=512))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("kind", judging.KINDS)
@pytest.mark.parametrize("name", BANDS)
def test_masks_of_bands(name: str, kind: str, heads: str) -> None:
    backed(inputs(heads, kind=kind), mask=BANDS[name])


@pytest.mark.parametrize("heads", ["512", "576, one"])
@pytest.mark.parametrize("lengths", [(1, 1), (1, 200), (64, 64), (65, 63), (129, 641), (1100, 1000)], ids=str)
def test_lengths(lengths: tuple[int, int], heads: str) -> None:
    for name in ("full", "causal"):
        backed(inputs(heads, batch=1, sq=lengths[0], sk=lengths[1], dtype=torch.float16), mask=BANDS[name])


@pytest.mark.parametrize("dims", [(520, 504), (456, 456), (264, 512)], ids=str)
def test_head_dimensions_that_are_padded(dims: tuple[int, int]) -> None:
    backed(qkv(d=dims[0], dv=dims[1]), mask=BANDS["causal"])


@pytest.mark.parametrize("name", ["prefix", "by head"])
def test_masks_with_lists(name: str) -> None:
    for heads in ("512", "576, one"):
        backed(inputs(heads), mask=MASKS[name])


def test_lists_of_64_rows() -> None:
    table = short.chosen()
    backed(inputs("512", batch=1, sq=short.SQ, sk=short.SK), mask=short.mask_of(table), block_mask=short.lists(table))


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str) -> None:
    for heads in ("512", "576, one"):
        backed(inputs(heads, kind="peaky"), score=SCORES[name], mask=BANDS["causal"])


def test_sinks_and_negative_scales() -> None:
    backed(inputs("512"), mask=BANDS["window"], sink=torch.linspace(-1, 3, 4))
    backed(inputs("512"), mask=BANDS["causal"], scale=-0.04)


@pytest.mark.parametrize("parts", [1, 4, 8])
@pytest.mark.parametrize("heads", ["512", "576, one"])
def test_heads_that_share_keys(heads: str, parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight heads of one K/V head, in parts that are added at the end."""
    monkeypatch.setattr(wide_backward, "parts_for", lambda *_: parts)
    anyattn.call_cache.attention.clear()
    for name in ("full", "causal"):
        backed(inputs(heads, heads=8, kv_heads=1), mask=BANDS[name])
    anyattn.call_cache.attention.clear()


@judging.where_calls_run
@pytest.mark.parametrize("wanted", ["q", "k", "v", "qk", "kv"])
def test_gradients_that_are_not_wanted_are_not_computed(wanted: str) -> None:
    given = inputs("512")
    whole = [t.detach().requires_grad_() for t in given]
    some = [t.detach().requires_grad_(name in wanted) for t, name in zip(given, "qkv", strict=True)]
    call = lambda own: anyattn.flex_attention(*own, mask_mod=BANDS["causal"], enable_gqa=True, backend=judging.BACKEND)
    outs = [call(own) for own in (whole, some)]
    dout = torch.ones_like(outs[0])
    first = torch.autograd.grad(outs[0], [t for t, name in zip(whole, "qkv", strict=True) if name in wanted], dout)
    second = torch.autograd.grad(outs[1], [t for t in some if t.requires_grad], dout)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("heads", HEADS)
def test_reruns_agree_bitwise(heads: str) -> None:
    own = [t.detach().requires_grad_() for t in inputs(heads, batch=2, heads=16, kv_heads=2, sq=2000, sk=2000)]
    out = anyattn.flex_attention(*own, mask_mod=BANDS["causal"], enable_gqa=True, backend="hopper")
    back = lambda: torch.autograd.grad(out, own, torch.ones_like(out), retain_graph=True)
    first = back()
    assert all(torch.equal(a, b) for _ in range(RERUNS) for a, b in zip(first, back(), strict=True))
