"""``deterministic="batch"`` and ``batch_invariant`` in compiled graphs: the bits of eager calls, without being compiled anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import anyattn
from anyattn.determinism import backend_and_mode, backend_text, is_batch_invariant
from tests.support import batches

MODE: dict[str, Any] = {"deterministic": "batch"}


def _flex(s: batches.Sequence, **more: Any) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (s.q, s.k, s.v))
    return anyattn.flex_attention(q, k, v, mask_mod=anyattn.masks.sliding_window(100, 0), enable_gqa=True, **more)


def _flash(s: batches.Sequence, **more: Any) -> torch.Tensor:
    return anyattn.flash_attn_func(s.q, s.k, s.v, causal=True, window_size=(100, 0), **more)


def _decode(s: batches.Sequence, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return anyattn.flash_attn_with_kvcache(s.q[:, -1:], s.k, s.v, cache_seqlens=torch.tensor([s.length]), causal=True, **more)


@pytest.fixture(scope="module")
def own() -> batches.Sequence:
    return batches.draw(torch.Generator().manual_seed(0), 600, (4, 2), (32, 32), torch.float32)


@pytest.mark.parametrize("call", [_flex, _flash, _decode], ids=lambda f: f.__name__)
def test_the_argument(call: Any, own: batches.Sequence) -> None:
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    expected = call(own, **MODE)
    assert torch.equal(compiled(own, **MODE), expected)
    assert not torch.equal(compiled(own), expected)


@pytest.mark.parametrize("call", [_flex, _flash, _decode], ids=lambda f: f.__name__)
def test_the_context_when_a_graph_runs(call: Any, own: batches.Sequence) -> None:
    counter = CompileCounterWithBackend("inductor")
    compiled = torch.compile(call, fullgraph=True, backend=counter)
    expected, default = call(own, **MODE), call(own)
    for _ in range(2):
        assert torch.equal(compiled(own), default)
        with anyattn.batch_invariant():
            assert torch.equal(compiled(own), expected)
    assert counter.frame_count == 1


def test_a_graph_does_not_enter_the_context(own: batches.Sequence) -> None:
    """A graph has no such state: one graph is refused by an error that says what to do, and otherwise the function runs as it is."""

    def inside(s: batches.Sequence) -> torch.Tensor:
        with anyattn.batch_invariant():
            return _flash(s)

    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"batch_invariant\(\) is entered inside.* around the call"):
        torch.compile(inside, fullgraph=True, backend="eager")(own)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(inside, backend="eager")(own), _flash(own, **MODE)) and not is_batch_invariant()


def test_gradients(own: batches.Sequence) -> None:
    expected = _flash(own, **MODE)
    leaves = [x.clone().requires_grad_() for x in (own.q, own.k, own.v)]
    out = torch.compile(_flash, fullgraph=True, backend="aot_eager")(batches.Sequence(*leaves), **MODE)
    assert torch.equal(out, expected)
    gradients = torch.autograd.grad(out.sum(), leaves)
    eager = torch.autograd.grad(_flash(batches.Sequence(*leaves), **MODE).sum(), leaves)
    assert all(torch.equal(a, b) for a, b in zip(gradients, eager, strict=True))


@pytest.mark.parametrize("backend", [None, "triton"])
@pytest.mark.parametrize("deterministic", [False, True, "batch"])
def test_operands_keep_backend_and_mode(backend: str | None, deterministic: bool | str) -> None:
    assert backend_and_mode(backend_text(backend, deterministic), bool(deterministic)) == (backend, deterministic)
