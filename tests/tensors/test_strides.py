"""Results are laid out as the inputs are: out and dq as q, dk as k, dv as v, without gaps and without a copy."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.tensors.strides import allocator, contiguous_strides, dense_layout, dense_strides, empty_in_order, in_order
from tests.support.strided import EACH, LAYOUTS, inputs, nesting

B, H, S, D = 2, 4, 24, 8


def nested(x: Tensor, order: tuple[int, ...]) -> bool:
    return x.permute(order).is_contiguous()


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_dense_tensors_keep_their_strides(order: tuple[int, ...]) -> None:
    x = torch.empty([(2, 3, 5)[i] for i in order] + [7]).permute([*(order.index(i) for i in range(3)), 3])
    assert x.shape == (2, 3, 5, 7) and dense_strides(x) == x.stride() == empty_in_order(x).stride()
    assert in_order(x, x) is x
    padded = torch.empty([2 * (2, 3, 5)[i] for i in order] + [9])[: (2, 3, 5)[order[0]], : (2, 3, 5)[order[1]], : (2, 3, 5)[order[2]], :7]
    padded = padded.permute([*(order.index(i) for i in range(3)), 3])
    assert dense_strides(padded) == x.stride()
    for passes_dispatcher in (False, True):
        made = allocator(x.device, passes_dispatcher)(*dense_layout(padded.shape, padded.stride()), torch.bfloat16)
        assert (made.shape, made.stride(), made.dtype) == (x.shape, x.stride(), torch.bfloat16)


@pytest.mark.parametrize("shape", [s for n in range(5) for s in itertools.product((0, 1, 3), repeat=n)], ids=str)
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape, device="meta").stride()


def test_memory_is_on_the_device_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The way past the dispatcher allocates on the current device alone."""
    asked: list[Any] = []
    monkeypatch.setattr(torch._C._dynamo.guards, "_empty_strided_cuda", lambda *given: asked.append("current"), raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 1, raising=False)
    monkeypatch.setattr(torch, "empty_strided", lambda *given, dtype, device: asked.append(device))
    for index in (0, 1, 0):
        for passes_dispatcher in (True, False):
            allocator.__wrapped__(torch.device("cuda", index), passes_dispatcher)((2,), (1,), torch.float32)
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert asked == [first, first, "current", second, first, first]
    assert allocator(torch.device("cpu")) is not allocator(torch.device("cpu"), passes_dispatcher=False)


def test_dimensions_that_say_nothing_stand_where_a_contiguous_tensor_has_them() -> None:
    rows = torch.empty(1, 5, 3, 4).transpose(1, 2)
    assert dense_strides(rows.expand(2, 3, 5, 4)) == (60, 4, 12, 1)
    assert dense_strides(torch.empty(2, 1, 5, 4).expand(2, 3, 5, 4)) == (60, 20, 4, 1)
    assert dense_strides(torch.empty(1, 1, 1, 4).expand(2, 3, 5, 4)) == (60, 20, 4, 1)
    odd = torch.empty(100).as_strided((2, 1, 5, 4), (20, 1, 4, 1))  # a single entry's stride may be anything
    assert dense_strides(odd) == (20, 20, 4, 1)


def test_the_last_dimension_is_contiguous_and_may_have_another_size() -> None:
    x = torch.empty(2, 3, 7, 5).transpose(2, 3)
    assert x.shape == (2, 3, 5, 7) and dense_strides(x) == (105, 35, 7, 1) and dense_strides(x, 2) == (30, 10, 2, 1)
    assert dense_strides(torch.empty(2, 5, 3, 7).transpose(1, 2), 2) == (30, 2, 6, 1)
    for shape in ((0, 3, 5, 7), (2, 0, 5, 7), (2, 3, 0, 7)):
        assert dense_strides(torch.empty(shape)) == torch.empty(shape).stride()


def test_sizes_of_a_trace_give_the_strides_that_the_run_has() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(shape_env=ShapeEnv())
    for name in LAYOUTS:
        for x in inputs(name, name, name):
            with mode:
                fake = mode.from_tensor(x)
                assert tuple(map(int, dense_strides(fake, 6))) == dense_strides(x, 6)
                assert tuple(map(int, empty_in_order(fake).stride())) == dense_strides(x)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "options", [{}, {"return_lse": True}, {"score_mod": anyattn.scores.softcap(3.0)}, {"kernel_options": {"num_splits": 2}}], ids=str
)
@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_flex(layouts: tuple[str, str, str], options: dict[str, Any]) -> None:
    for heads_kv in (H, 2):
        x = [t.requires_grad_() for t in inputs(*layouts, heads_kv=heads_kv)]
        found = anyattn.flex_attention(*x, mask_mod=anyattn.masks.causal(), enable_gqa=True, **options)
        out = found[0] if isinstance(found, tuple) else found
        assert nested(out, nesting(layouts[0]))
        assert not out._is_view() and out.storage_offset() == 0
        grads = torch.autograd.grad(out.sum(), x)
        assert all(nested(g, nesting(name)) for g, name in zip(grads, layouts, strict=True))
        if options.get("return_lse"):
            assert found[1].is_contiguous()


def test_a_transposed_output_is_flattened_without_a_copy() -> None:
    x = torch.randn(B, S, 3, H, D, requires_grad=True)
    q, k, v = (t.transpose(1, 2) for t in x.unbind(2))
    out = anyattn.flex_attention(q, k, v)
    flat = out.transpose(1, 2).view(B, S, H * D)
    assert flat.data_ptr() == out.data_ptr() and flat.is_contiguous()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_order_is_that_of_torchs_flex_attention(name: str, dtype: torch.dtype) -> None:
    from torch.nn.attention.flex_attention import flex_attention

    x = inputs(name, name, name, dtype=dtype)
    assert anyattn.flex_attention(*x).stride() == flex_attention(*x).stride()


def tokens(layouts: tuple[str, str, str], **more: Any) -> list[Tensor]:
    """(B, S, H, D), as FlashAttention's entry points take them."""
    return [t.transpose(1, 2) for t in inputs(*layouts, **more)]


def by_token(order: tuple[int, ...]) -> tuple[int, ...]:
    """The nesting of ``x.transpose(1, 2)``."""
    return tuple({1: 2, 2: 1}.get(i, i) for i in order)


@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_flash(layouts: tuple[str, str, str]) -> None:
    x = [t.requires_grad_() for t in tokens(layouts, heads_kv=2)]
    for options in ({}, {"num_splits": 2}, {"causal": True, "return_lse": True}):
        found = anyattn.flash_attn_func(*x, **options)
        out = found[0] if isinstance(found, tuple) else found
        assert nested(out, by_token(nesting(layouts[0])))
        grads = torch.autograd.grad(out.sum(), x)
        assert all(nested(g, by_token(nesting(name))) for g, name in zip(grads, layouts, strict=True))


@pytest.mark.parametrize("used", [False, True], ids=["all", "used"])
def test_packed_rows(used: bool) -> None:
    ends = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
    x = torch.randn(40, 3, H, D)
    more = {"seqused_q": torch.tensor([5, 0, 30]), "seqused_k": torch.tensor([9, 0, 31])} if used else {}
    for q, k, v in (x.unbind(1), x.permute(1, 2, 0, 3).contiguous().transpose(1, 2)):
        leaves = [t.detach().requires_grad_() for t in (q, k, v)]
        out = anyattn.flash_attn_varlen_func(*leaves, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, **more)
        wanted = dense_strides(q[None].transpose(1, 2))
        for t in (out, *torch.autograd.grad(out.sum(), leaves)):
            assert t[None].transpose(1, 2).stride()[1:] == wanted[1:]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_pages(order: tuple[int, ...]) -> None:
    back = [order.index(i) for i in range(4)]
    pools = [torch.randn(10, 4, 2, D).permute(order).contiguous().permute(back).requires_grad_() for _ in range(2)]
    q, table, lengths = torch.randn(B, S, H, D, requires_grad=True), torch.randperm(10).view(B, 5), torch.tensor([20, 7])
    out = anyattn.flash_attn_varlen_func(q, *pools, seqused_k=lengths, page_table=table)
    dq, dk, dv = torch.autograd.grad(out.sum(), [q, *pools])
    assert out.is_contiguous() and dq.is_contiguous() and nested(dk, order) and nested(dv, order)


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_decoding(name: str, turned: bool) -> None:
    q, k, v = tokens((name, "transposed", "transposed"), heads_kv=2, shape=(B, H, 3, D))
    caches = torch.randn(2, B, 32, 2, D)
    more: dict[str, Any] = {"k": k, "v": v, "cache_seqlens": torch.tensor([4, 20]), "causal": True}
    if turned:
        more |= {"rotary_cos": torch.rand(32, D // 2), "rotary_sin": torch.rand(32, D // 2)}
    out = anyattn.flash_attn_with_kvcache(q, *caches, **more)
    assert nested(out, by_token(nesting(name)))


@pytest.mark.parametrize("name", ["transposed", "sliced", "contiguous"])
def test_calls_that_are_remembered_lay_out_as_the_first(name: str) -> None:
    """The launch of a later call of the same facts allocates by itself."""
    for _ in range(3):
        x = [t.requires_grad_() for t in inputs(name, name, name)]
        out = anyattn.flex_attention(*x)
        assert all(nested(t, nesting(name)) for t in (out, *torch.autograd.grad(out.sum(), x)))
