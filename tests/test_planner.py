"""Calls whose tensors no kernel reads as they are: copied, or run as torch operations with a warning. A GPU is pretended, so that calls are
planned and not run."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import hardware, planner
from anyattn.backends.triton import deterministic_sum
from anyattn.call_cache import attention
from anyattn.call_cache.attention import FlexCall, Places
from anyattn.call_cache.kvcache import decode_call
from anyattn.tensors.strides import dense_strides
from anyattn.validate import sequences
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments
from tests.support.hopper.pretended import H200

if importlib.util.find_spec("triton") is None:
    pytest.skip("needs Triton", allow_module_level=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Calls on the CPU are planned for a GPU, and warnings have not been shown yet."""
    monkeypatch.setattr(hardware, "of", lambda *_: H200)
    monkeypatch.setattr(planner, "_warned", set())
    monkeypatch.setattr(sequences, "skips_device_reads", lambda *_: True)
    attention.clear()
    yield
    attention.clear()


def of_convolution(*shape: int, dtype: torch.dtype = torch.bfloat16, wants: bool = True) -> Tensor:
    """(B, H, S, D) of a tensor (B, H, D, S), or (total, H, D) of one (H, D, total)."""
    stored = torch.randn(*shape[:-2], shape[-1], shape[-2]) if len(shape) == 4 else torch.randn(shape[1], shape[2], shape[0])
    x = stored.to(dtype).requires_grad_(wants)
    return x.transpose(-1, -2) if len(shape) == 4 else x.permute(2, 0, 1)


def flex_call(q: Tensor, k: Tensor, v: Tensor, backend: str | None = None) -> FlexCall:
    return FlexCall(q, k, v, None, None, anyattn.masks.causal(), None, None, False, None, False, False, False)


def test_a_head_dimension_that_is_not_innermost_is_copied(gpu: None) -> None:
    q, k, v = (of_convolution(2, 4, 64, 64) for _ in range(3))
    for _ in range(2):  # a first call and a warm one
        problem, plan = attention.flex_call(flex_call(q, k, v), None, None)  # type: ignore[misc]
        assert plan.backend != "torch" and plan.backward != "torch"
        for t, given in ((problem.q, q), (problem.k, k), (problem.v, v)):
            assert t.stride() == dense_strides(given) and t.stride(3) == 1 and torch.equal(t, given) and t.requires_grad
    explained = anyattn.explain(q, k, v.contiguous(), mask_mod=anyattn.masks.causal())
    assert explained.plan.backend == plan.backend and "query and key copied at every call" in str(explained)
    (grad,) = torch.autograd.grad(problem.q.sum(), q)
    assert grad.shape == q.shape
    plain, _ = attention.flex_call(flex_call(*(t.contiguous() for t in (q, k, v))), None, None)  # type: ignore[misc]
    assert plain.q.data_ptr() % 16 == 0
    untouched = q.contiguous()
    assert attention.flex_call(flex_call(untouched, untouched, untouched), None, None)[0].q is untouched  # type: ignore[index]


def test_flash_calls_are_copied_too(gpu: None) -> None:
    q = of_convolution(2, 4, 64, 64).transpose(1, 2)
    problem, plan = attention.flash_call(q, q, q, Options(), None)  # type: ignore[misc]
    assert plan.backend != "torch" and problem.q.stride(3) == 1 and torch.equal(problem.q, q.transpose(1, 2))
    packed, ends = of_convolution(64, 4, 64), torch.tensor([0, 30, 64], dtype=torch.int32)
    places = Places((ends, ends, None, None, None), (34, 34), None)
    problem, plan = attention.varlen_call(packed, packed, packed, places, Options(), None)  # type: ignore[misc]
    assert plan.backend != "torch" and problem.q.stride(3) == 1


def test_queries_of_a_cache_are_copied_and_the_cache_is_not(gpu: None) -> None:
    q, good = of_convolution(2, 1, 4, 64, wants=False), torch.zeros(2, 32, 4, 64, dtype=torch.bfloat16)
    call, plan = decode_call(CacheArguments(q, good, good.clone(), cache_seqlens=5), Options(), None)  # type: ignore[misc]
    assert plan.backend == "triton" and call.problem.q.stride(3) == 1
    bad = of_convolution(2, 32, 4, 64, wants=False)
    with pytest.warns(UserWarning, match="torch operations on the GPU.*last dimension has stride.*Cure: make the cache"):
        call, plan = decode_call(CacheArguments(q, bad, bad, cache_seqlens=5), Options(), None)  # type: ignore[misc]
    assert plan.backend == "torch" and call.step.k_cache is bad


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((1, 2, 32, 64), torch.float64, ["float64", "Cure: convert q, k and v"]),
        ((1, 2, 32, 584), torch.bfloat16, ["head_dim is 584", "Cure: use more heads"]),
    ],
    ids=["float64", "wide heads"],
)
def test_a_call_that_leaves_the_kernels_warns_once_and_names_the_cure(shape, dtype, words, gpu: None) -> None:  # type: ignore[no-untyped-def]
    q = torch.randn(shape).to(dtype)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        for rows in (32, 30, 28):  # three first calls
            _, plan = attention.flex_call(flex_call(*(q[:, :, :rows].contiguous(),) * 3), None, None)  # type: ignore[misc]
            assert plan.backend == "torch"
        attention.flex_call(flex_call(*(q[:, :, :0],) * 3), None, None)  # which has nothing to compute
        planner.planned(attention.flex_call(flex_call(q, q, q), "torch", None)[0], "torch")  # type: ignore[index]
    assert len(shown) == 1 and all(word in str(shown[0].message) for word in words), [str(w.message) for w in shown]
    assert all(word in str(anyattn.explain(q, q, q)) for word in words[:1])


def test_a_backward_pass_that_leaves_the_kernels_warns(gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deterministic_sum, "reason_against", lambda problem: "it has no room")
    q, table = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True), torch.zeros(2, 64, requires_grad=True)
    call = flex_call(q, q, q)._replace(score_mod=lambda s, b, h, i, j: s + table[h, (i * 7 + j) % 64], deterministic=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        attention.flex_call(call, None, None)
    with pytest.warns(UserWarning, match="^the backward pass of this attention call runs as torch operations.*it has no room"):
        _, plan = attention.flex_call(call, None, None)  # type: ignore[misc]
    assert plan.backend != "torch" and plan.backward == "torch"


def test_a_cpu_alone_does_not_warn_and_copies_nothing() -> None:
    attention.clear()
    q = of_convolution(1, 2, 32, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        problem, plan = attention.flex_call(flex_call(q, q, q.contiguous()), None, None)  # type: ignore[misc]
        anyattn.flex_attention(*(torch.randn(1, 1, 8, 300, dtype=torch.float64),) * 3)
    assert plan.backend == "torch" and problem.q is q
