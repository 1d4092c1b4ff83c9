"""``out=``: the caller's memory for a call's result, in first calls, replays and compiled code."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention, latest
from tests.support.pretended_launches import batch, described, noted_by_address, step

HAS_TRITON = importlib.util.find_spec("triton") is not None
CALLS: dict[str, Callable[[int], dict[str, Any]]] = {
    "decode": lambda seed: step(seed, False, False),
    "pages": lambda seed: step(seed, True, False),
    "appends": lambda seed: step(seed, False, True),
    "varlen": batch,
}


def call(given: dict[str, Any], **more: Any) -> Any:
    function = anyattn.flash_attn_varlen_func if "cu_seqlens_q" in given else anyattn.flash_attn_with_kvcache
    return function(**{n: x.clone() if n.endswith("_cache") else x for n, x in given.items()}, **more)


def odd(x: Tensor) -> Tensor:
    """Memory like x that no kernel takes for a new result's."""
    return torch.empty(*x.shape[:-1], x.shape[-1] + 3, dtype=x.dtype)[..., 3:]


def reversed_dimensions(x: Tensor) -> Tensor:
    return torch.empty(x.shape[::-1], dtype=x.dtype).permute(*range(x.ndim - 1, -1, -1))


@pytest.mark.parametrize("memory", [torch.empty_like, odd, reversed_dimensions])
@pytest.mark.parametrize("name", CALLS)
def test_the_result_is_in_out(name: str, memory: Callable[[Tensor], Tensor]) -> None:
    for seed in range(3):
        given = CALLS[name](seed)
        wanted, lse = call(given, return_lse=True)
        out = memory(given["q"]).fill_(float("nan"))
        found, found_lse = call(given, return_lse=True, out=out)
        assert found is out and torch.equal(out, wanted) and torch.equal(lse, found_lse)
        assert call(given, out=out.fill_(0)) is out and torch.equal(out, call(given))


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_a_replay_writes_to_out(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It launches what a replay without it launches, and allocates no result."""
    function = anyattn.flash_attn_varlen_func if name == "varlen" else anyattn.flash_attn_with_kvcache
    with noted_by_address(monkeypatch) as launched:

        def launches(seed: int, **more: Any) -> tuple[Any, Any]:
            given, before = CALLS[name](seed), len(launched)
            results = function(**given, **more, return_lse=True, backend="triton")
            assert isinstance(results, tuple)
            return described(launched[before:], given, results), results

        for seed in range(10):
            launches(seed, out=torch.empty_like(CALLS[name](0)["q"]))
        taken: list[bool] = []
        own = latest.LatestCall._takes
        monkeypatch.setattr(latest.LatestCall, "_takes", lambda *given: (taken.append(own(*given)), taken[-1])[1])
        out = torch.empty_like(CALLS[name](0)["q"])
        version = out._version
        found, results = launches(11, out=out)
        assert taken == [True] and results[0] is out and found == launches(11)[0] and out._version > version
        for other in (odd(out), torch.empty(out.numel() + 1, dtype=out.dtype)[1:].view(out.shape), out.clone().as_subclass(Other)):
            assert launches(11, out=other)[1][0] is other
        assert taken == [True, False, False, False]
        attention.clear()
        assert found == launches(11)[0]


class Other(Tensor):
    pass


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.skipif(not HAS_TRITON, reason="needs triton")
def test_wrong_memory_is_refused(name: str, is_warm: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    function = anyattn.flash_attn_varlen_func if name == "varlen" else anyattn.flash_attn_with_kvcache
    given = CALLS[name](0)
    q = given["q"]
    k_name = "k" if name == "varlen" else "k_cache"
    inside = given[k_name].view(-1)[: q.numel()].view(q.shape) if given[k_name].numel() >= q.numel() else q.view(q.shape)
    wrong: list[tuple[Any, type, str]] = [
        (7, TypeError, "out is a int"),
        (torch.empty(*q.shape[:-1], 8).bfloat16(), ValueError, "out has shape"),
        (torch.empty(q.shape), ValueError, "out is torch.float32"),
        (torch.empty_like(q, device="meta"), ValueError, "out is .* on meta"),
        (torch.empty_like(q).requires_grad_(), ValueError, "out requires grad"),
        (torch.inference_mode()(torch.empty_like)(q), ValueError, "out was made in torch.inference_mode"),
        (q[..., :1].expand(q.shape), ValueError, "is expanded"),
        (q, ValueError, "out and q share memory"),
        (q.view(q.shape), ValueError, "out and q share memory"),
        (inside, ValueError, "out and . share memory|out and k_cache share memory"),
    ]
    with noted_by_address(monkeypatch) as launched:
        for _ in range(12 if is_warm else 0):
            function(**given, backend="triton", out=torch.empty_like(q))
        before = len(launched)
        for out, error, text in wrong:
            with pytest.raises(error, match=text):
                function(**given, backend="triton", out=out)
        assert len(launched) == before  # nothing was appended


def test_calls_with_gradients_are_refused() -> None:
    given = batch(0)
    for name in "qkv":
        with pytest.raises(ValueError, match="out is given, but the call has gradients"):
            call(given | {name: given[name].clone().requires_grad_()}, out=torch.empty_like(given["q"]))
    bias = torch.zeros(4, requires_grad=True)
    with pytest.raises(ValueError, match="out is given, but the call has gradients"):
        call(given, score_mod=lambda s, b, h, i, j: s + bias[h], out=torch.empty_like(given["q"]))
    with torch.no_grad():
        out = torch.empty_like(given["q"])
        assert call(given | {"q": given["q"].clone().requires_grad_()}, out=out) is out


@pytest.mark.parametrize("name", ["decode", "varlen"])
def test_compiled_calls(name: str) -> None:
    given = CALLS[name](0)
    out = torch.empty_like(given["q"])
    found = torch.compile(lambda out: call(given, out=out) * 2, backend="aot_eager", fullgraph=True)(out)
    assert torch.equal(out, call(given, return_lse=True)[0]) and torch.equal(found, out * 2)
    with pytest.raises(Exception, match="out has shape"):
        torch.compile(lambda out: call(given, out=out), backend="aot_eager", fullgraph=True)(out[..., :8])


@pytest.mark.parametrize("name", ["decode", "varlen"])
def test_autocast(name: str) -> None:
    """The result has autocast's dtype where it has without out, compiled or not."""
    given = CALLS[name](0)
    given |= {n: given[n].float() for n in ("q", "k", "v") if n in given}
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        for one in (call, compiled):
            wanted = one(given)
            assert wanted.dtype is torch.bfloat16
            out = torch.empty_like(wanted)
            assert one(given, out=out) is out and torch.equal(out, wanted)
            with pytest.raises(Exception, match=r"out is torch\.float32"):
                one(given, out=out.float())


def test_inference_mode() -> None:
    with torch.inference_mode():
        for name in ("decode", "varlen"):
            given = CALLS[name](0)
            out = torch.empty_like(given["q"])
            assert call(given, out=out) is out and torch.equal(out, call(given))
