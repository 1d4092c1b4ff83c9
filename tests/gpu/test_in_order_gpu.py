"""``deterministic="batch"`` by Hopper's kernel in the order of keys: the same bits as Triton's kernel, to which other rows may go."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.backends.hopper import make_config
from anyattn.backends.hopper.make_config import TILES_IN_ORDER
from anyattn.call_cache import attention
from tests.support.gpu import judging

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

BANDS: dict[str, Any] = {
    "full": None, "causal": masks.causal(), "window": masks.sliding_window(900, 0), "both sides": masks.sliding_window(70, 130),
    "offset": masks.causal(-33), "far": masks.sliding_window(2500, -1500),
}  # fmt: skip
LENGTHS = ((1, 1), (1, 1100), (64, 64), (63, 65), (300, 300), (1023, 1025), (129, 2049), (2100, 1000), (3000, 5000))

# head dimensions, and the rows of a tile where there are two kinds
DIMS = (*((dims, 0) for dims in TILES_IN_ORDER if dims != (64, 64)), ((64, 64), 256), ((64, 64), 192))


WITH_HIGHEST = True


@pytest.fixture
def dims(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[int, int]]:
    found, rows = request.param
    if rows:
        monkeypatch.setattr(make_config, "tiles_in_order", lambda problem, dims: replace(TILES_IN_ORDER[dims], tile_m=rows))
        monkeypatch.setattr(sys.modules[__name__], "WITH_HIGHEST", rows < 256)  # which no kernel of 256 rows has
    attention.clear()
    yield found
    attention.clear()


def qkv(
    sizes: tuple[int, int], dtype: torch.dtype, heads: tuple[int, int] = (4, 2), peak: float = 1.0, dims: tuple[int, int] = (128, 128)
) -> list[Tensor]:
    generator = torch.Generator(judging.DEVICE).manual_seed(sum(sizes))
    shapes = (2, heads[0], sizes[0], dims[0]), *((2, heads[1], sizes[1], dim) for dim in dims)
    found = [torch.randn(s, device=judging.DEVICE, generator=generator) for s in shapes]
    return [(peak * found[0]).to(dtype), *(x.to(dtype) for x in found[1:])]


def both(run: Any) -> None:
    """run(backend) -> tensors, of each backend, which are equal."""
    by_hopper, by_triton = (run(backend) for backend in ("hopper", "triton"))
    for a, b in zip(by_hopper, by_triton, strict=True):
        assert torch.equal(a, b), f"{(a != b).sum().item()} of {a.numel()} numbers differ, by up to {(a.float() - b.float()).abs().max()}"


def attended(given: list[Tensor], mask: Any = None, **options: Any) -> Any:
    def run(backend: str) -> tuple[Tensor, ...]:
        aux = anyattn.AuxRequest(lse=True, max_scores=WITH_HIGHEST)
        out, found = anyattn.flex_attention(
            *given, mask_mod=mask, enable_gqa=True, return_aux=aux, deterministic="batch", backend=backend, **options
        )
        return (out, found.lse, found.max_scores) if WITH_HIGHEST else (out, found.lse)

    return run


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
@pytest.mark.parametrize("name", BANDS)
def test_bands(name: str, dims: tuple[int, int]) -> None:
    for i, sizes in enumerate(LENGTHS):
        both(attended(qkv(sizes, (torch.bfloat16, torch.float16)[i % 2], dims=dims), BANDS[name]))


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
def test_peaks_scales_and_sinks(dims: tuple[int, int]) -> None:
    for peak in (0.0, 1e-3, 8.0, 60.0):
        both(attended(qkv((700, 2500), torch.bfloat16, peak=peak, dims=dims), BANDS["causal"]))
    sink = torch.linspace(-3, 9, 4, device=judging.DEVICE)
    for scale in (0.37, 1.0, 3.1e-3):
        for name in ("causal", "far"):
            both(attended(qkv((1500, 1500), torch.bfloat16, dims=dims), BANDS[name], scale=scale, sink=sink))


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
def test_rising_scores(dims: tuple[int, int]) -> None:
    """Maxima that rise by less and by more than they may lag behind, in some rows of a warp and in none; and sums of weights near the
    bound below which no maximum can have moved. The highest scores are exact, though what is subtracted is not."""
    for sizes in ((300, 3000), (1500, 1500)):
        for most in (2.0, 6.0, 20.0, 60.0):
            q, k, v = qkv(sizes, torch.bfloat16, dims=dims)
            rise = torch.linspace(0, most / dims[0], sizes[1], device=judging.DEVICE)[:, None] * q[:, ::2, :1].float().sign()
            k = (k.float() * 0.3 + rise * torch.linspace(0, 2, sizes[1], device=judging.DEVICE)[:, None].round()).to(k.dtype)
            q = (q.float().abs() + 1).to(q.dtype)
            for name in ("full", "causal", "window"):
                both(attended([q, k, v], BANDS[name]))
                if not WITH_HIGHEST:
                    continue
                found, exact = (
                    anyattn.flex_attention(
                        q, k, v, mask_mod=BANDS[name], enable_gqa=True, return_aux=anyattn.AuxRequest(max_scores=True), **options
                    )[1].max_scores
                    for options in ({"deterministic": "batch"}, {"backend": "triton"})
                )  # fmt: skip
                assert torch.equal(found.isinf(), exact.isinf())
                near = (found - exact).abs() <= 2.0**-20 * exact.abs() + 2.0**-20
                assert bool((near | exact.isinf()).all())


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
def test_maxima_that_move_in_one_warp(dims: tuple[int, int]) -> None:
    """At every tile, or every other one, in 16 of a warp group's 64 rows, whose guesses fail while those of the other warps are right."""
    q, k, v = qkv((1300, 2100), torch.bfloat16, dims=dims)
    warps, tiles = (torch.arange(n, device=judging.DEVICE) // of for n, of in ((1300, 16), (2100, 64)))
    q, k[..., 0] = q * 0.1, tiles
    for warp in range(4):
        for rise in (4, 8):
            q[..., 0] = rise * (warps % 4 == warp)
            for name in ("full", "causal", "window"):
                both(attended([q, k, v], BANDS[name], scale=1.0))


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
@pytest.mark.parametrize("large", [1 << 8, 1 << 12, 1 << 13])
def test_scores_whose_roundings_are_large(large: int, dims: tuple[int, int]) -> None:
    """The exponents of 2 of scores of 2^16 to 2^26 are rounded by up to several units: a guess and the rule round them alike, in rows
    beside others that move at every tile."""
    for sizes in ((300, 2000), (1300, 1300)):
        q, k, v = qkv(sizes, torch.bfloat16, dims=dims)
        steps = torch.arange(sizes[1], device=judging.DEVICE) // 64 % 7
        q, k = torch.zeros_like(q), torch.zeros_like(k)
        q[..., 0], k[..., 0], k[..., 1] = large + large // 8, large, steps
        q[..., 1] = torch.arange(sizes[0], device=judging.DEVICE) % 5 * 2
        k[..., 2], q[..., 2] = torch.arange(sizes[1], device=judging.DEVICE) % 3, 1
        for name in ("full", "causal"):
            both(attended([q, k, v], BANDS[name], scale=1.0))


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
@pytest.mark.parametrize("heads", [(8, 8), (8, 1), (6, 2)], ids=str)
def test_heads(heads: tuple[int, int], dims: tuple[int, int]) -> None:
    """Also of several heads in a row tile, each with its own sink."""
    sink = torch.linspace(-3, 9, heads[0], device=judging.DEVICE)
    for sizes in ((2, 3000), (40, 1500), (1300, 1300)):
        for name in ("causal", "window", "far"):
            both(attended(qkv(sizes, torch.bfloat16, heads, dims=dims), BANDS[name], sink=sink))


def test_views() -> None:
    """One key head for all, values that are the keys, rows of another layout, and inputs that want gradients."""
    q, k, v = qkv((700, 1700), torch.float16)
    apart = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    wanting = [x.clone().requires_grad_() for x in (q, k, v)]
    for given in ([q, k[:, :1].expand_as(k), v], [q, k, k], apart, wanting):
        both(attended(given, BANDS["causal"]))


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
def test_packed_sequences_of_any_content_behind_them(dims: tuple[int, int]) -> None:
    """Keys behind a sequence's last are NaN."""
    lengths = [1, 1500, 64, 0, 2049, 333]
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=judging.DEVICE)
    used = torch.tensor([1, 1400, 64, 0, 2000, 300], dtype=torch.int32, device=judging.DEVICE)
    fewer = torch.tensor([1, 1500, 0, 0, 1999, 130], dtype=torch.int32, device=judging.DEVICE)
    sink = torch.linspace(-3, 9, 4, device=judging.DEVICE)
    q, k, v = (x[0].transpose(0, 1).contiguous() for x in qkv((sum(lengths),) * 2, torch.bfloat16, dims=dims))
    for i, n in enumerate(used.tolist()):
        k[ends[i] + n : ends[i + 1]], v[ends[i] + n : ends[i + 1]] = float("nan"), float("nan")
    kinds: tuple[dict[str, Any], ...] = (
        {"causal": True}, {"window_size": (700, 10)}, {}, {"causal": True, "sink": sink}, {"window_size": (90, -40), "seqused_q": fewer},
    )  # fmt: skip
    for options in kinds:

        def run(backend: str, options: dict[str, Any] = options) -> tuple[Tensor, ...]:
            return anyattn.flash_attn_varlen_func(
                q, k, v, ends, ends, 2049, 2049, seqused_k=used, return_lse=True, deterministic="batch", backend=backend, **options
            )  # fmt: skip

        both(run)


@pytest.mark.parametrize("dims", DIMS, ids=str, indirect=True)
def test_a_row_alone_is_the_same(dims: tuple[int, int]) -> None:
    """A decoded row, which is Triton's, and the row in a prefill, which is Hopper's."""
    q, k, v = qkv((5000, 5000), torch.bfloat16, (32, 8), dims=dims)
    whole = anyattn.flex_attention(q, k, v, mask_mod=masks.causal(), enable_gqa=True, deterministic="batch")
    assert anyattn.explain(q, k, v, mask_mod=masks.causal(), enable_gqa=True, deterministic="batch").plan.backend == "hopper"
    keys, values = (x.transpose(1, 2).contiguous() for x in (k, v))
    for place in (0, 63, 1023, 1024, 3333, 4999):
        seqlens = torch.full((2,), place + 1, dtype=torch.int32, device=q.device)
        row = q[:, :, place : place + 1].transpose(1, 2)
        alone = anyattn.flash_attn_with_kvcache(row, keys, values, cache_seqlens=seqlens, causal=True, deterministic="batch")
        assert torch.equal(alone[:, 0], whole[:, :, place])
