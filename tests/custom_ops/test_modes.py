"""Dispatch modes around eager calls: they see one operator for each attention, and selective checkpointing can save it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import anyattn
from anyattn.backends import backend_module

S = 40
ENDS = torch.tensor([0, 30, 80])
ATEN = torch.ops.aten
PRODUCTS = (ATEN.mm.default, ATEN.bmm.default, ATEN.addmm.default, ATEN.baddbmm.default, ATEN.bmm.out, ATEN.baddbmm.out)


class Seen(TorchDispatchMode):
    """Lists the names of all operators."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def packed(*tensors: Tensor) -> list[Tensor]:
    return [t.transpose(1, 2).reshape(2 * S, 4, 16) for t in tensors]


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def flash(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return anyattn.flash_attn_func(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), **options)


SLOPE = torch.tensor(0.1, requires_grad=True)
CALLS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "score and mask": lambda q, k, v: anyattn.flex_attention(q, k, v, mask_mod=causal, score_mod=lambda x, b, h, i, j: x - SLOPE * (i - j)),
    "block mask": lambda q, k, v: anyattn.flex_attention(
        q, k, v, block_mask=anyattn.create_block_mask(causal, None, None, S, S, device="cpu", BLOCK_SIZE=16)
    ),
    "flash": lambda q, k, v: flash(q, k, v, window_size=(7, 0)),
    "lists": lambda q, k, v: flash(
        q, k, v, mask_mod=causal, block_sparse_tensors=anyattn.compute_block_sparsity(16, 16, 2, 4, S, S, causal, device="cpu")
    ),
    "packed": lambda q, k, v: anyattn.flash_attn_varlen_func(*packed(q, k, v), cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, causal=True),
}


def saves_own(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op.namespace == "anyattn" else CheckpointPolicy.PREFER_RECOMPUTE


def saves_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def saves_all(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("name", CALLS)
def test_a_mode_sees_one_operator_for_each_pass(name: str) -> None:
    with Seen() as seen:
        CALLS[name](*torch.randn(3, 2, 4, S, 16, requires_grad=True).unbind()).sum().backward()
    assert len([n for n in seen.names if n.startswith("anyattn")]) == 2
    assert not [n for n in seen.names if "mm" in n or "softmax" in n or "exp." in n]


def test_a_mode_sees_a_step_of_decoding() -> None:
    q, cache = torch.randn(2, 1, 4, 16), torch.zeros(2, 2, 64, 4, 16)
    with Seen() as seen:
        got = anyattn.flash_attn_with_kvcache(q, *cache.unbind(), k=q, v=q, cache_seqlens=0)
    assert [n for n in seen.names if n.startswith("anyattn")] == ["anyattn.decode.default"]
    assert torch.equal(got, q)  # of one key, its value
    assert torch.equal(cache[0, :, 0], q[:, 0])


@pytest.mark.parametrize(("policy", "forwards"), [(saves_own, 1), (saves_products, 2), (saves_all, 1)])
@pytest.mark.parametrize("name", CALLS)
def test_selective_checkpointing_saves_what_its_policy_names(
    name: str, policy: Callable[..., Any], forwards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = torch.randn(3, 2, 4, S, 16, requires_grad=True).unbind()
    want = torch.autograd.grad(CALLS[name](*inputs).square().sum(), inputs)
    repeater, runs = backend_module("torch").Repeater, []
    forward = repeater.forward
    monkeypatch.setattr(repeater, "forward", lambda *given: runs.append(1) or forward(*given))
    contexts = partial(create_selective_checkpoint_contexts, policy)
    out = checkpoint(lambda q, k, v: CALLS[name](q * 1, k * 1, v * 1).square(), *inputs, use_reentrant=False, context_fn=contexts)
    got = torch.autograd.grad(out.sum(), inputs)
    assert len(runs) == forwards
    assert all(map(torch.equal, got, want))


def test_a_policy_may_list_the_operators() -> None:
    contexts = partial(create_selective_checkpoint_contexts, [torch.ops.anyattn.flash.default])
    q = torch.randn(2, 8, 4, 16, requires_grad=True)
    with Seen() as seen:
        checkpoint(lambda x: anyattn.flash_attn_func(x, x, x), q, use_reentrant=False, context_fn=contexts).sum().backward()
    assert seen.names.count("anyattn.flash.default") == 1


def test_profilers_name_eager_calls() -> None:
    q, k, v = torch.randn(3, 2, 4, S, 16, requires_grad=True).unbind()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        anyattn.flex_attention(q, k, v).sum().backward()
    names = {event.key for event in watched.key_averages()}
    assert {"anyattn::attention (torch)", "anyattn::attention_backward (torch)"} <= names


Q = torch.randn(1, 2, 5, 16)
REFUSED: dict[str, tuple[type[Exception], str, Callable[[], Any]]] = {
    "backend": (ValueError, "backend=3 is not a backend", lambda: anyattn.flex_attention(Q, Q, Q, backend=3)),
    "backend of flash": (ValueError, "backend='cuda' is not a backend", lambda: anyattn.flash_attn_func(Q, Q, Q, backend="cuda")),
    "aux_tensors": (TypeError, "aux_tensors is a Tensor; wanted a list", lambda: anyattn.flex_attention(Q, Q, Q, aux_tensors=Q)),
    "an entry": (TypeError, r"aux_tensors\[0\] is a int", lambda: anyattn.flash_attn_func(Q, Q, Q, aux_tensors=[1])),
    "softcap": (ValueError, "softcap=10*; wanted", lambda: anyattn.flash_attn_func(Q, Q, Q, softcap=10**400)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_errors_are_those_of_other_eager_calls(name: str) -> None:
    kind, text, call = REFUSED[name]
    for mode in (nullcontext(), Seen()):
        with mode, pytest.raises(kind, match=text):
            call()
