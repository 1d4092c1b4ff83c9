"""Tiles of 80 rows of the Hopper backward kernel, of calls without score mod, list or predicate; judged by the budget."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import anyattn
from anyattn.backends.hopper import make_backward_config
from tests.gpu import test_hopper_backward_gpu as dense
from tests.gpu import test_hopper_backward_packed_gpu as packed
from tests.support.gpu import judging
from tests.support.gpu.judging import judge, qkv, random

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120, method="thread")]  # a kernel that hangs is a failure
judging.needs_the_backend(only="hopper")

BANDS = ["full", "causal", "offset", "window", "left"]


@pytest.fixture(autouse=True)
def _tall(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever the lengths; no shape here occurs in other tests, whose calls this process has planned."""
    asked = []
    monkeypatch.setattr(make_backward_config, "_pays", lambda *given: asked.append(given) or True)  # type: ignore[func-returns-value]
    yield
    assert asked or judging.MODE == "cpu"  # where another backend is at work
    if judging.MODE == "gpu":
        torch.cuda.synchronize()


@pytest.mark.parametrize("d", [128, 104])
@pytest.mark.parametrize("name", BANDS)
def test_gradients(name: str, d: int) -> None:
    judge(qkv(2, 4, 2, sq=613, sk=735, d=d), mask=dense.MASKS[name], backward=True)


@pytest.mark.parametrize("kind", judging.KINDS)
def test_float16(kind: str) -> None:
    rows = 401 + judging.KINDS.index(kind)
    judge(qkv(1, 3, 1, sq=rows, sk=333, dtype=torch.float16, kind=kind), mask=dense.MASKS["causal"], backward=True)


@pytest.mark.parametrize("lengths", [(1, 131), (79, 256), (80, 129), (81, 497), (161, 255), (2411, 2411)], ids=str)
def test_lengths(lengths: tuple[int, int]) -> None:
    for name in ("full", "causal"):
        judge(qkv(1, 2, 2, sq=lengths[0], sk=lengths[1]), mask=dense.MASKS[name], backward=True)


@pytest.mark.parametrize("form", ["packed", "partly used", "padded"])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_sequences(name: str, form: str) -> None:
    packed.judged(name, form, ([83, 0, 161, 80, 1], [83, 5, 301, 80, 0]))


@judging.on_the_gpu_alone
@pytest.mark.parametrize("sizes", [(2, 8, 4, 1027), (2, 16, 16, 8000)], ids=["few tiles", "many tiles"])
@pytest.mark.parametrize("name", ["full", "causal", "window"])
def test_deterministic_reruns_agree_bitwise(name: str, sizes: tuple[int, int, int, int]) -> None:
    batch, heads, kv_heads, rows = sizes
    leaves = [t.detach().requires_grad_() for t in qkv(batch, heads, kv_heads, sq=rows, sk=rows)]
    dout = random(batch, heads, rows, 128, seed=1).to(leaves[0])
    options: dict[str, Any] = {"backend": "hopper", "deterministic": True, "enable_gqa": True, "mask_mod": dense.MASKS[name]}
    out = anyattn.flex_attention(*leaves, **options)
    first = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    for _ in range(dense.RERUNS // 3):
        again = torch.autograd.grad(out, leaves, dout, retain_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@judging.on_the_gpu_alone
def test_surroundings_are_neither_read_nor_written() -> None:
    tensors = [judging.surrounded(t) for t in qkv(1, 4, 2, sq=133, sk=157)]
    judge(tensors, meant=[t.clone() for t in tensors], mask=dense.MASKS["causal"], backward=True)
