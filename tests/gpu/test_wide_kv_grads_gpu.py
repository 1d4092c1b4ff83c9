"""Gradients of k and v in float32, for a sum with others', in turns with 16-bit ones: by the Hopper kernels and, by
``ANYATTN_GPU_BACKEND=triton``, by Triton's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.call_cache import calls
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import BACKEND, DEVICE, RUNS, Capturing, both, qkv, random
from tests.support.wide_gradients import Both, in_turns

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend()

IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 300, 128, 171]))
MASKS: dict[str, Any] = {
    "none": None,
    "causal": masks.causal(),
    "window": masks.sliding_window(100, 7),
    "lists": lambda b, h, i, j: (i >= j) & (i % 5 != 0),
}


@pytest.fixture(params=[1, 6], ids=["whole", "parts"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """Of a K/V head's six query heads, where Hopper's kernels compute."""
    if BACKEND == "hopper":
        from anyattn.backends.hopper import make_backward_config

        monkeypatch.setattr(make_backward_config, "parts_for", lambda ratio, *sizes: request.param if ratio % request.param == 0 else 1)
    elif request.param > 1:
        pytest.skip("about the hopper backend")
    calls.clear()
    yield request.param
    calls.clear()


def gradients(given: list[Tensor], dtype: torch.dtype, score: Any = None, backend: str = BACKEND, **options: Any) -> list[Tensor]:
    leaves = [t.to(dtype).requires_grad_() for t in given]
    out = anyattn.flex_attention(*leaves, score, enable_gqa=True, backend=backend, **options)
    dout = random(*out.shape, seed=1).to(given[0].dtype).to(DEVICE, dtype)
    return list(torch.autograd.grad(out, leaves, dout))


def check(given: list[Tensor], *, is_ordered: bool = False, **call: Any) -> None:
    """That a wide gradient, rounded, is the narrow one, and that it is closer to the one that torch computes in float32. is_ordered: sums
    of dq have a fixed order."""
    with in_turns(RUNS) as found:
        gradients(given, given[0].dtype, **call)
    if not RUNS:
        return
    (one,) = found
    call.pop("deterministic", None)
    exact = gradients(given, torch.float32, **call, backend="torch")
    for (narrow, wide), own in zip(one.of_keys, exact[1:], strict=True):
        assert distance(wide, own) < distance(narrow, own)
    rounded(one)
    assert not is_ordered or torch.equal(*[t for t in (one.narrow[0], one.wide[0]) if t is not None])


def rounded(one: Both) -> None:
    if BACKEND != "torch":  # whose 16-bit products become products in float32
        assert all(torch.equal(wide.to(narrow.dtype), narrow) for narrow, wide in one.of_keys)


def distance(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm())


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (128, 128), (192, 192), (256, 256), (192, 128), (40, 72)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_dense(name: str, d: int, dv: int, parts: int) -> None:
    check(qkv(1, 6, 1, sq=600, sk=600, d=d, dv=dv), mask_mod=MASKS[name])


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", ["none", "causal", "lists"])
def test_deterministic(name: str, d: int, parts: int) -> None:
    given = qkv(1, 6, 1, sq=600, sk=600, d=d, dtype=torch.float16)
    check(given, mask_mod=MASKS[name], deterministic=True, is_ordered=True)


@pytest.mark.parametrize("d", [64, 128, 192, 256])
def test_heads_of_their_own_keys(d: int) -> None:
    check(qkv(2, 3, 3, sq=300, sk=333, d=d), mask_mod=masks.causal(33))


@pytest.mark.parametrize("sk", [60, 128])
def test_keys_of_one_tile(sk: int, parts: int) -> None:
    """Small ones with heads of their own keys are the kernel of pairs' by Triton, if 16 bits are wanted."""
    check(qkv(2, 6, 1, sq=333, sk=sk, d=64), mask_mod=masks.causal(sk - 333))


@pytest.mark.parametrize("d", [64, 128])
def test_documents(d: int, parts: int) -> None:
    """As sequences or, while it is not known whether they are, in both forms."""
    given = qkv(2, 6, 1, sq=600, sk=600, d=d)
    mask = masks.document(IDS.to(DEVICE)) & masks.causal()
    check(given, block_mask=anyattn.create_block_mask(mask, None, None, 600, 600, device=DEVICE))


def test_score_mods(parts: int) -> None:
    slopes = random(6)
    make = Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s - t[h].abs() * (i - j).abs() * 0.01)(to(slopes)))
    check(qkv(1, 6, 1, sq=600, sk=600, d=128), score=both(make)[0])


@pytest.mark.parametrize("form", ["packed", "partly used", "padded", "tail"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (90, 20), "deterministic": True}], ids=str)
def test_sequences(form: str, options: dict[str, Any], parts: int) -> None:
    """Rows of no sequence are zeros, in float32 too."""
    batch = ragged.drawn(([0, 1, 129, 700], [130, 0, 200, 700]), heads=6, kv_heads=1, d=128)
    with in_turns(RUNS) as found:
        ragged.judge_gradients(batch, ragged.FORMS[form](batch), options, f"{form}, {options}, {parts} parts", {})
    for one in found if RUNS else ():
        rounded(one)
