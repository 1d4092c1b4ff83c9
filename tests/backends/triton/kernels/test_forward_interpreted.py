"""Loop variants of the Triton forward kernel, and scales of either sign, in Triton's interpreter.

Run by ``test_in_the_interpreter.py`` in a process of its own.
"""

import pytest
import torch

import anyattn
from anyattn import oracle
from anyattn.backends.triton import launch_cache, tile_config
from anyattn.backends.triton.tile_config import PipelineOptions, TmaUse
from anyattn.call_cache import attention
from anyattn.testing import budget
from anyattn.testing.rounding import rounding

BIAS, IDS = torch.tensor([0.5, -1.0, 0.25, 2.0]), torch.arange(70) // 13
MASKS = {
    "full": None,
    "causal": lambda b, h, q, k: q >= k,
    "sink and window": lambda b, h, q, k: ((k < 5) | (q - k < 20)) & (q >= k),
    "documents": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k),
    "nothing": lambda b, h, q, k: q < -1,
    "falling": lambda b, h, q, k: (k < 60 - q) & (k > 9 - q),
    "by head": lambda b, h, q, k: k < 9 + 13 * h,
}
SCORES = {"plain": None, "alibi": lambda s, b, h, q, k: s + BIAS[h] * (q - k)}


def seen(launched, score, mask, scale, splits=1, width=24, rows=50, batch=1):  # type: ignore[no-untyped-def]
    torch.manual_seed(0)
    q, k, v = torch.randn(batch, 4, rows, width), torch.randn(batch, 2, 70, width), torch.randn(batch, 2, 70, 40)
    options = {"tile_m": 16, "tile_n": 16, "num_splits": splits}
    out, lse = anyattn.flex_attention(
        q, k, v, score, mask_mod=mask, scale=scale, enable_gqa=True, return_lse=True, backend="triton", kernel_options=options
    )
    given = {"score": score, "mask": mask, "scale": scale}
    right, plain, noise = oracle.attention(q, k, v, **given), oracle.same_dtype(q, k, v, **given), rounding(q, k, v, **given)
    budget.check("out", out, right.out, plain.out, noise.out)
    assert torch.equal(lse.isinf(), right.lse.isinf())
    if not right.lse.isinf().any():
        budget.check("lse", lse, right.lse, plain.lse, noise.lse)
    return launched[-1]


@pytest.fixture
def launched(monkeypatch):  # type: ignore[no-untyped-def]
    """The constants of every launch."""
    found, real = [], launch_cache.run_entry

    def noted(kernel, grid, values, captured, device, options):  # type: ignore[no-untyped-def]
        found.append({**options, "grid": grid})
        real(kernel, grid, values, captured, device, options)

    monkeypatch.setattr(launch_cache, "run_entry", noted)
    attention.clear()
    yield found
    attention.clear()


PIPELINES = {
    "late": (True, TmaUse.NONE), "described": (False, TmaUse.KV_IN_KERNEL), "both": (True, TmaUse.KV_IN_KERNEL),
    "joined": (False, TmaUse.KV, True), "output": (False, TmaUse.KV_OUT), "all": (True, TmaUse.ALL, True, True),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("pipeline", PIPELINES.values(), ids=list(PIPELINES))
@pytest.mark.parametrize("name", MASKS)
def test_pipelines(name, pipeline, launched, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(tile_config, "pipeline_of", lambda *about: PipelineOptions(*pipeline))
    score = SCORES["alibi" if name in ("causal", "by head", "documents") else "plain"]
    # of few rows heads share a tile, which no descriptor is for
    options = seen(launched, score, MASKS[name], None, rows=65 if pipeline[1] > TmaUse.KV else 50)
    assert (options["IS_LATE"], options["IS_DESCRIBED"]) == pipeline[:2] and options["IS_RAW"]
    assert options["IS_JOINED"] is (len(pipeline) > 2 and name != "documents")  # whose tiles are listed
    assert seen(launched, None, MASKS[name], None, splits=3)["IS_DESCRIBED"] == min(pipeline[1], TmaUse.KV), "parts are written row by row"


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("together", [1, 2, 4])
def test_heads_a_few_at_a_time(together, name, launched, monkeypatch):  # type: ignore[no-untyped-def]
    """Where no tile holds rows of two heads."""
    monkeypatch.setattr(tile_config, "pipeline_of", lambda *about: PipelineOptions(False, TmaUse.NONE, is_grouped=True))
    monkeypatch.setattr(tile_config, "heads_together", lambda heads, head_bytes: together)
    grid = seen(launched, None, MASKS[name], None, rows=70, batch=2)["grid"]
    assert grid[::2] == (together, 8 // together) and grid[1] >= 5  # lists are of other tiles


def test_rows_without_a_place_of_their_own(monkeypatch):  # type: ignore[no-untyped-def]
    """Keys that all heads share, by a stride of 0, and outputs of one row are described by the programs, or not at all."""
    monkeypatch.setattr(tile_config, "pipeline_of", lambda *about: PipelineOptions(False, TmaUse.ALL))
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 40, 16), torch.randn(2, 1, 40, 16).expand(2, 4, 40, 16), torch.randn(2, 40, 4, 16).transpose(1, 2)
    for tensors in ((q, k, v), (q, v, k), (v, q, q), (q[:, :, :1].expand(2, 4, 40, 16), q, v)):
        out = anyattn.flex_attention(*tensors, backend="triton")
        right, plain, noise = oracle.attention(*tensors), oracle.same_dtype(*tensors), rounding(*tensors)
        budget.check("out", out, right.out, plain.out, noise.out)


@pytest.mark.parametrize("scale", [1e-3, 3.0, -0.2, 0.0, 1e-35])
def test_scales(scale, launched):  # type: ignore[no-untyped-def]
    """A product's maximum is a score's only where the scale is positive."""
    for name in ("causal", "nothing"):
        assert seen(launched, None, MASKS[name], scale)["IS_RAW"] is (scale >= 1e-3)


def test_what_cannot_be_described(launched, monkeypatch):  # type: ignore[no-untyped-def]
    """Rows that do not begin at multiples of 16 bytes."""
    monkeypatch.setattr(tile_config, "pipeline_of", lambda *about: PipelineOptions(False, TmaUse.ALL))
    assert not seen(launched, None, None, None, width=25)["IS_DESCRIBED"]
