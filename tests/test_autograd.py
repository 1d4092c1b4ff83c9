"""What the node of the autograd graph holds, and what it returns."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import autograd, masks


def qkv() -> list[Tensor]:
    return [torch.randn(1, 2, 32, 16).requires_grad_() for _ in range(3)]


def table_mod(table: Tensor) -> Any:
    return lambda s, b, h, i, j: s + table[h, j]


def test_a_node_holds_its_tensors_as_saved_ones_alone() -> None:
    """Hooks that store them elsewhere free their memory, also after a pass for which the graph is kept."""
    q, k, v, table = *qkv(), torch.randn(2, 32).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach().clone(), lambda t: t):
        own = k * 1.0
        out = anyattn.flex_attention(q, own, v, score_mod=table_mod(bias := table * 1.0), mask_mod=masks.causal())
    dropped = [weakref.ref(own), weakref.ref(bias)]
    del own, bias
    for _ in range(2):
        found = torch.autograd.grad(out, (q, k, v, table), torch.ones_like(out), retain_graph=True)
        assert all(bool(g.any()) for g in found) and all(t() is None for t in dropped)
        fields: Any = out.grad_fn.call[0]  # type: ignore[union-attr]
        assert all(fields[name] is None for name in ("q", "k", "v", "sink")) and fields["score"].tensors == ()


def test_passes_over_a_kept_graph_give_the_same() -> None:
    inputs = qkv()
    out, lse = anyattn.flex_attention(*inputs, mask_mod=masks.causal(), return_lse=True)

    def of(*outs: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(outs, inputs[:2], [torch.ones_like(t) for t in outs], retain_graph=True)

    first = of(out), of(lse), of(out, lse)
    assert all(
        torch.equal(a, b)
        for one, other in zip(first, (of(out), of(lse), of(out, lse)), strict=True)
        for a, b in zip(one, other, strict=True)
    )
    assert not torch.equal(first[0][1], first[2][1]) and not torch.equal(first[1][1], first[2][1])


@pytest.mark.parametrize("request_", [None, anyattn.AuxRequest(lse=True), anyattn.AuxRequest(max_scores=True)], ids=str)
def test_a_node_returns_what_is_wanted(request_: Any) -> None:
    inputs = qkv()
    found = anyattn.flex_attention(*inputs, return_aux=request_)
    out = found if request_ is None else found[0]
    plain = anyattn.flex_attention(*[t.detach() for t in inputs])
    assert out.requires_grad and torch.equal(out, plain)
    if request_ is not None:
        lse, highest = found[1]
        assert (lse is not None and lse.requires_grad) is request_.lse
        assert (highest is not None and not highest.requires_grad) is request_.max_scores
    assert len(torch.autograd.grad(out, inputs, torch.ones_like(out))) == 3


def test_a_leaf_that_wants_no_gradient_any_more_still_gets_the_graphs() -> None:
    """The graph was made when it wanted one."""
    q, k, v = qkv()
    out = anyattn.flex_attention(q, k, v)
    reference = torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    q.requires_grad_(False)
    (of_k,) = torch.autograd.grad(out, (k,), torch.ones_like(out), retain_graph=True)
    out.backward(torch.ones_like(out))
    assert torch.equal(of_k, reference[1]) and v.grad is not None and torch.equal(v.grad, reference[2])


def test_a_tensor_that_outlived_its_transform_is_taken_as_what_it_wraps() -> None:
    q, k, v = qkv()
    left: list[Tensor] = []
    torch.func.grad(lambda x: (left.append(x), x.sum())[1])(q.detach())
    for _ in range(2):
        out = anyattn.flex_attention(left[0], k, v)
        assert torch.equal(out, anyattn.flex_attention(q.detach(), k, v)) and out.requires_grad


def conjugated(t: Tensor) -> Tensor:
    """Minus ``t``, as a view whose sign is not applied yet."""
    found = torch.complex(torch.zeros_like(t), t).conj().imag
    assert found.is_neg()
    return found


def test_a_backend_reads_given_gradients_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The derivative of ``torch.complex`` is a view whose sign is not applied yet if the product of it was conjugated."""
    inputs = qkv()
    out, lse = anyattn.flex_attention(*inputs, return_lse=True)
    zeros, given = torch._efficientzerotensor(out.shape), torch.randn(out.shape)
    backward, seen = autograd.backward, []

    def noting(problem: Any, plan: Any, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Any:
        seen.extend([dout, *([] if dlse is None else [dlse])])
        return backward(problem, plan, out, lse, dout, dlse)

    def found(*grads: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((out, lse)[: len(grads)], inputs, grads, retain_graph=True)

    monkeypatch.setattr(autograd, "backward", noting)
    turned = torch.complex(torch.zeros_like(lse), lse).conj()
    of_lse = torch.autograd.grad((turned * torch.ones_like(turned)).imag.sum(), inputs, retain_graph=True)
    pairs = [
        (of_lse, found(torch.zeros_like(out), -torch.ones_like(lse))),
        (found(conjugated(given), conjugated(lse.detach())), found(-given, -lse.detach())),
        (found(zeros, lse.detach()), found(torch.zeros_like(out), lse.detach())),
    ]
    assert all(torch.equal(a, b) for one, other in pairs for a, b in zip(one, other, strict=True))
    assert not any(t.is_neg() or t._is_zerotensor() or t.data_ptr() == 0 for t in seen)  # type: ignore[attr-defined]


class Wrapper(Tensor):
    """A tensor that has no memory and claims to be on a GPU. awaited: what its copy is, by default another one."""

    awaited: Any

    @staticmethod
    def __new__(cls, awaited: Any = None) -> Any:
        made = Tensor._make_wrapper_subclass(cls, (2, 3), device="cuda")  # type: ignore[attr-defined]
        made.awaited = awaited
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is torch.ops.aten.clone.default
        return Wrapper() if args[0].awaited is None else args[0].awaited


def test_a_given_gradient_of_a_subclass_is_awaited_or_refused() -> None:
    plain = torch.randn(2, 3)
    assert autograd.in_memory(Wrapper(plain)) is plain
    with pytest.raises(TypeError, match="a gradient that backward was given is a Wrapper, which has no memory"):
        autograd.in_memory(Wrapper())


def dense_lists() -> tuple[Any, tuple[Tensor, ...]]:
    q, k, v = (torch.randn(1, 256, 2, 16).requires_grad_() for _ in range(3))
    lists = anyattn.compute_block_sparsity(128, 128, 1, 1, 256, 256, masks.causal(), device="cpu")
    return lists, (q, k, v, anyattn.flash_attn_func(q, k, v, mask_mod=masks.causal(), block_sparse_tensors=lists))


def packed_lists() -> tuple[Any, tuple[Tensor, ...]]:
    q, k, v = (torch.randn(300, 2, 16).requires_grad_() for _ in range(3))
    ends = torch.tensor([0, 200, 300], dtype=torch.int32)
    lists = anyattn.compute_varlen_block_sparsity(128, 128, 1, masks.causal(), cu_seqlens_q=ends, cu_seqlens_k=ends)
    places = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": 200, "max_seqlen_k": 200}
    return lists, (q, k, v, anyattn.flash_attn_varlen_func(q, k, v, **places, mask_mod=masks.causal(), block_sparse_tensors=lists))


@pytest.mark.parametrize("name", ["mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx"])
@pytest.mark.parametrize("made", [dense_lists, packed_lists])
def test_lists_that_were_written_to_after_the_call_are_refused(made: Any, name: str) -> None:
    """A backward pass over other tiles than the forward pass's would give gradients of another mask."""
    lists, (q, k, v, out) = made()
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out), retain_graph=True)
    getattr(lists, name).zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
