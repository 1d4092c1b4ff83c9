"""Heads of more than 256 dimensions: the forward kernel with two warp groups for 64 rows, alone and in clusters of two thread blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.backends.hopper import make_config
from tests.gpu import test_hopper_short_tiles_gpu as short
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import Capturing, judge, qkv

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

# head dimensions, and whether values are the first columns of keys
HEADS = {"512": (512, 512, False), "512, K = V": (512, 512, True), "576": (576, 512, False), "576, one": (576, 512, True)}
MASKS = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(70, 0),
    "prefix": masks.prefix_lm(100),
    "by head": lambda b, h, i, j: (j % 3 != h % 3) | (i == j),
}
SLOPES = torch.tensor([0.02, 0.04, 0.06, 0.08])
SCORES = {
    "softcap": lambda s, b, h, i, j: 20.0 * torch.tanh(s / 20.0),
    "alibi": Capturing(lambda to: (lambda slopes: lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())(to(SLOPES))),
}
LENGTHS = ([150, 17, 300, 64, 1, 70], [160, 300, 290, 64, 65, 0])


def inputs(dims: str, **sizes: Any) -> list[Tensor]:
    d, dv, one = HEADS[dims]
    q, k, v = qkv(d=d, dv=dv, **sizes)
    return [q, k, k[..., :dv] if one else v]


@pytest.fixture(params=[True, False], ids=["pairs", "alone"])
def _shared(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Thread blocks that share keys where there are rows for both, and none that do."""
    if not request.param:
        monkeypatch.setattr(make_config, "_pairs", lambda *_: False)
        anyattn.call_cache.attention.clear()
    yield
    anyattn.call_cache.attention.clear()


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_masks_of_bands(name: str, heads: str) -> None:
    judge(inputs(heads), mask=MASKS[name], sink=torch.linspace(-1, 3, 4) if name == "window" else None, has_max=name == "full")


@pytest.mark.parametrize("name", ["prefix", "by head"])
def test_masks_with_lists(name: str) -> None:
    judge(inputs("512"), mask=MASKS[name])
    judge(inputs("576, one"), mask=MASKS[name])


def test_lists_of_64_rows() -> None:
    table = short.chosen()
    judge(inputs("512", batch=1, sq=short.SQ, sk=short.SK), mask=short.mask_of(table), block_mask=short.lists(table))


@pytest.mark.parametrize("name", SCORES)
def test_score_mods(name: str) -> None:
    judge(inputs("512", kind="peaky"), score=SCORES[name], mask=MASKS["causal"])


@pytest.mark.usefixtures("_shared")
@pytest.mark.parametrize("heads", ["512", "576, one"])
@pytest.mark.parametrize("lengths", [(1, 1), (64, 64), (65, 63), (129, 641), (1100, 1000)], ids=str)
def test_lengths(lengths: tuple[int, int], heads: str) -> None:
    for name in ("full", "causal"):
        judge(inputs(heads, batch=1, sq=lengths[0], sk=lengths[1], dtype=torch.float16), mask=MASKS[name])


@pytest.mark.parametrize("dims", [(520, 504), (456, 456), (264, 512), (320, 64), (64, 320)], ids=str)
def test_head_dimensions_that_are_padded(dims: tuple[int, int]) -> None:
    judge(qkv(d=dims[0], dv=dims[1]), mask=MASKS["causal"])
    if dims[0] >= dims[1]:
        q, k, _ = qkv(d=dims[0], dv=dims[1])
        judge([q, k, k[..., : dims[1]]], mask=MASKS["causal"])


def test_heads_that_share_rows() -> None:
    judge(inputs("576, one", heads=8, kv_heads=1, sq=33), mask=MASKS["causal"])


def test_a_falling_row_maximum_and_dropout() -> None:
    q, k, v = inputs("512")
    rising = torch.linspace(12.0, 0.5, k.shape[2], device=k.device)[:, None].to(k.dtype)
    judge([q, k * rising, v])
    judge([q, k, v], mask=MASKS["causal"], dropout_p=0.2)


@pytest.mark.parametrize("one", [False, True], ids=["apart", "one"])
@pytest.mark.parametrize("form", ["packed", "partly used", 2, 16, 64, 256], ids=str)
def test_sequences_and_pages(form: str | int, one: bool) -> None:
    batch = ragged.drawn(LENGTHS, heads=4, kv_heads=1, d=576, dv=512)
    batch = [[q, k, k[..., :512] if one else v] for q, k, v in batch]
    made = {"packed": ragged.packed, "partly used": ragged.partly_used}
    stored = ragged.paged(batch, form) if isinstance(form, int) else made[form](batch)
    stored = stored._replace(v=stored.k[..., :512]) if one else stored
    ragged.judge(batch, stored, {"causal": True}, f"{form}")


@judging.on_the_gpu_alone
@pytest.mark.parametrize("heads", ["512", "576, one"])
def test_reruns_agree_bitwise(heads: str) -> None:
    q, k, v = inputs(heads, batch=2, heads=16, kv_heads=2, sq=2000, sk=2000)
    call = lambda: anyattn.flex_attention(q, k, v, mask_mod=MASKS["causal"], enable_gqa=True, backend="hopper")
    first = call()
    assert all(torch.equal(first, call()) for _ in range(30))
