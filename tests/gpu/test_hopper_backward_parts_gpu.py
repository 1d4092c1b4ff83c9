"""The Hopper backward kernel with the query heads of a K/V head divided into parts, and undivided, whatever the shape would choose."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.hopper import make_backward_config
from anyattn.call_cache import calls
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import Capturing, judge, qkv, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

SLOPES = random(6)
IDS = torch.repeat_interleave(torch.arange(4), torch.tensor([1, 300, 128, 171]))
CASES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.causal()},
    "causal, deterministic": {"mask": masks.causal(), "deterministic": True},
    "window, deterministic": {"mask": masks.sliding_window(100, 7), "deterministic": True},
    "lists": {"mask": lambda b, h, i, j: (i >= j) & (i % 5 != 0)},
    "lists by head, deterministic": {"mask": lambda b, h, i, j: (i // 40 + j // 50 + h) % 3 > 0, "deterministic": True},
    "documents": {"mask": Capturing(lambda to: masks.document(to(IDS)))},
    "alibi": {"score": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s - t[h].abs() * (i - j).abs() * 0.01)(to(SLOPES)))},
    "dropout": {"mask": masks.causal(), "dropout_p": 0.2},
}


@pytest.fixture(params=[1, 2, 3, 6])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    monkeypatch.setattr(make_backward_config, "parts_for", lambda ratio, *sizes: request.param if ratio % request.param == 0 else 1)
    calls.clear()
    yield request.param
    calls.clear()
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("name", CASES)
def test_dense(name: str, d: int, parts: int) -> None:
    judge(qkv(2, 6, 1, sq=300, sk=600, d=d), backward=True, **CASES[name])


@pytest.mark.parametrize(("d", "dv"), [(40, 72), (96, 96), (192, 128), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_head_dims(dtype: torch.dtype, d: int, dv: int, parts: int) -> None:
    judge(qkv(1, 12, 2, sq=200, sk=333, d=d, dv=dv, dtype=dtype), backward=True, mask=masks.causal(133))


@pytest.mark.parametrize("sk", [60, 128])
def test_keys_of_one_tile(sk: int, parts: int) -> None:
    judge(qkv(2, 6, 1, sq=333, sk=sk, d=64), backward=True, mask=masks.causal(sk - 333))


@pytest.mark.parametrize("form", ["packed", "partly used", "padded", "tail"])
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (90, 20), "deterministic": True}], ids=str)
def test_sequences(form: str, options: dict[str, Any], parts: int) -> None:
    batch = ragged.drawn(([0, 1, 129, 700], [130, 0, 200, 700]), heads=6, kv_heads=1, d=128)
    ragged.judge_gradients(batch, ragged.FORMS[form](batch), options, f"{form}, {options}, {parts} parts", {})


@judging.on_the_gpu_alone
@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_gradients_of_keys_are_the_same_in_every_run(mask: Any, parts: int) -> None:
    leaves = [t.detach().requires_grad_() for t in qkv(1, 12, 2, sq=1000, sk=1000, d=128)]
    out = anyattn.flex_attention(*leaves, mask_mod=mask, enable_gqa=True, backend="hopper")
    dout = random(*out.shape, seed=1).to(out)
    first = torch.autograd.grad(out, leaves[1:], dout, retain_graph=True)
    for _ in range(50):
        assert all(map(torch.equal, first, torch.autograd.grad(out, leaves[1:], dout, retain_graph=True)))
