"""Tiles that Hopper's forward kernel skips at run time: which, what is left of the results, and thresholds on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import AuxRequest, masks, oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support import skipping
from tests.support.gpu import judging
from tests.support.gpu.judging import BACKEND, DEVICE, RUNS, for_library
from tests.support.skipping import BELOW, tiered

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread"), judging.not_on_the_cpu]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

BF16, F16 = torch.bfloat16, torch.float16
SLOPES = torch.tensor([0.002, 0.004, 0.006, 0.008])
MASKS: dict[str, Any] = {
    "full": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(300, 40),
    "image": lambda b, h, i, j: (j < 200) | (j > i),
    "by head": lambda b, h, i, j: (j % 3 != h % 3) | (i == j),
}
SIZES = [(1000, 1000), (300, 333), (70, 600), (1, 700), (129, 65)]


def called(q: Tensor, k: Tensor, v: Tensor, below: Any, **more: Any) -> Any:
    """(out, AuxOutput), the same bits a second time."""
    request = AuxRequest(lse=True, max_scores=True, skipped=below is not None)
    given = {"enable_gqa": True, "backend": BACKEND, "return_aux": request, "skip_below": below} | more
    found = [anyattn.flex_attention(q, k, v, **given) for _ in range(2)]
    if RUNS:
        (out, aux), (again, aux_again) = found
        assert torch.equal(out, again) and torch.equal(aux.lse, aux_again.lse) and torch.equal(aux.max_scores, aux_again.max_scores)
        assert below is None or torch.equal(aux.skipped, aux_again.skipped)
    return found[0]


def judged(tensors: list[Tensor], mask: Any = None, below: Any = BELOW, score: Any = None, least: float = 0.05, **more: Any) -> None:
    """The share of skipped tiles is that of the reference, and out and lse are those of the pairs that it keeps. least: of the share."""
    q, k, v = (t.to(DEVICE) for t in tensors)
    below = below.to(DEVICE) if isinstance(below, Tensor) else below
    mods = {"mask_mod": mask} if "block_mask" not in more else {}
    out, aux = called(q, k, v, below, score_mod=score, **mods, **more)
    if not RUNS:
        return
    explained = {name: x for name, x in more.items() if name in ("block_mask", "sink", "kernel_options")}
    plan = anyattn.explain(q, k, v, score, enable_gqa=True, backend=BACKEND, skip_below=below, **mods, **explained).plan
    thresholds = below.cpu() if isinstance(below, Tensor) else torch.full((q.shape[1],), below)
    scale, ratio = q.shape[3] ** -0.5, q.shape[1] // k.shape[1]
    heads, rows, keys = (torch.arange(n, device=DEVICE) for n in (q.shape[1], q.shape[2], k.shape[2]))
    places = (heads[:, None, None], rows[None, :, None], keys[None, None, :])
    scores = q.double() @ k.double().repeat_interleave(ratio, 1).mT * scale
    if score is not None:
        scores = score(scores, 0, *places)
    visible = torch.ones(len(heads), len(rows), len(keys), dtype=torch.bool, device=DEVICE)
    if mask is not None:
        visible &= mask(0, *places)
    lists = "block_mask" in more or not (mask is None or mask in (MASKS["causal"], MASKS["window"]))
    tiles = plan.tile_m, plan.tile_n, plan.heads_per_tile
    kept, share = skipping.kept_pairs(scores.cpu(), thresholds, visible.cpu(), ratio, tiles, lists)
    assert torch.equal(aux.skipped.cpu(), share), (aux.skipped, share)
    assert share.max() >= least, share
    kept = kept.to(DEVICE)
    of = {"mask": lambda b, h, i, j: kept[b, h, i, j], "score": score, "sink": more.get("sink")}
    of = {name: x for name, x in of.items() if x is not None}
    exact, plain, noise = (f(q, k, v, **of) for f in (oracle.attention, oracle.same_dtype, rounding))
    for name, got in (("out", out), ("lse", aux.lse)):
        budget.check(name, got, getattr(exact, name), getattr(plain, name), getattr(noise, name))
    if score is None:  # bounded scores have a kernel of their own without a threshold, with another tanh
        assert torch.equal(aux.max_scores, called(q, k, v, None, **mods, **more)[1].max_scores)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_bands(name: str, d: int) -> None:
    for sq, sk in SIZES if name == "full" else [(n, n) for n, _ in SIZES[:2]]:
        least = 0.05 if sk >= 600 else 0.0
        judged(tiered(2, 4, 2, sq, sk, d, F16 if d == 192 else BF16, seed=sq), MASKS[name], least=least, kernel_options={"pack_gqa": False})


@pytest.mark.parametrize("name", ["image", "by head"])
def test_masks_of_lists(name: str) -> None:
    judged(tiered(1, 4, 4, 1000, 1000, 128, BF16), MASKS[name], least=0.0)


@pytest.mark.parametrize("size", [64, 128])
def test_lists(size: int) -> None:
    mask = lambda b, h, i, j: (i // size + j // size) % 3 != 1
    lists = anyattn.create_block_mask(mask, 1, 1, 1024, 1024, device=DEVICE, BLOCK_SIZE=size)
    judged(tiered(1, 4, 4, 1024, 1024, 128, BF16), mask, block_mask=lists)


def test_score_mods() -> None:
    slopes = for_library(SLOPES)
    judged(tiered(1, 4, 4, 900, 900, 128, BF16), MASKS["causal"], score=lambda s, b, h, i, j: s - slopes[h] * (i - j).abs())
    judged(tiered(1, 4, 4, 900, 900, 64, BF16), None, score=lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0))


def test_heads_that_share_row_tiles() -> None:
    below = torch.tensor([BELOW, 0.0, 1e-2, BELOW, 0.0, 0.0, 0.0, 0.0, *[1e-4] * 8])
    judged(tiered(2, 16, 2, 9, 1000, 128, BF16), None, below, kernel_options={"pack_gqa": True})
    judged(tiered(2, 12, 2, 40, 1000, 128, BF16), None, BELOW, kernel_options={"pack_gqa": True})


def test_a_threshold_of_each_head_and_a_sink() -> None:
    below, sink = torch.tensor([BELOW, 0.0, 1e-12, 1.0]), torch.linspace(-1, 3, 4, device=DEVICE)
    judged(tiered(1, 4, 4, 512, 2000, 128, BF16), None, below, sink=sink)


def test_thresholds_of_zeros_skip_nothing_and_none_has_the_bits_of_0() -> None:
    q, k, v = (t.to(DEVICE) for t in tiered(1, 4, 4, 600, 900, 128, BF16))
    judged([q, k, v], None, torch.zeros(4), least=0.0)
    plain = anyattn.flex_attention(q, k, v, backend=BACKEND)
    assert judging.same(plain, anyattn.flex_attention(q, k, v, backend=BACKEND, skip_below=0.0))


def test_rows_that_see_nothing() -> None:
    q, k, v = (t.to(DEVICE) for t in tiered(1, 4, 4, 600, 600, 128, BF16))
    out, aux = called(q, k, v, BELOW, mask_mod=lambda b, h, i, j: (i > 250) & (j < i))
    if RUNS:
        assert not out[:, :, :251].any() and (aux.lse[:, :, :251] == -torch.inf).all() and torch.isfinite(out).all()


def test_in_a_cuda_graph_thresholds_change_between_replays() -> None:
    if judging.MODE != "gpu":
        pytest.skip("captures a graph")
    q, k, v = (t.to(DEVICE) for t in tiered(1, 4, 4, 600, 2000, 128, BF16))
    below, request = torch.zeros(4, device=DEVICE), AuxRequest(lse=True, skipped=True)
    call = lambda: anyattn.flex_attention(q, k, v, skip_below=below, return_aux=request, backend=BACKEND)
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, aux = call()
    for value in (0.0, BELOW, 0.5, 0.0, 1e-2):
        below.fill_(value)
        graph.replay()
        wanted, of_wanted = call()
        assert torch.equal(out, wanted) and torch.equal(aux.lse, of_wanted.lse) and torch.equal(aux.skipped, of_wanted.skipped)
        assert bool((aux.skipped > 0).any()) is (value > 0)


def test_many_runs_of_many_tiles_have_the_same_bits() -> None:
    """A vote, a stage or an output that is used too early or too late shows in some run."""
    q, k, v = (t.to(DEVICE) for t in tiered(2, 8, 8, 2048, 4000, 128, BF16, low=0.5))
    first = called(q, k, v, BELOW)
    for _ in range(20 if RUNS else 0):
        out, aux = called(q, k, v, BELOW)
        assert torch.equal(out, first[0]) and torch.equal(aux.skipped, first[1].skipped)
