"""Direct calls: what Inductor writes in an operator's place gives the operator's results, and asks the dispatcher where that is needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._inductor.codegen import custom_extern_kernel_codegen as table
from torch._inductor.utils import run_and_get_code
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import anyattn
from anyattn import masks, scores
from anyattn.custom_ops import direct
from anyattn.custom_ops.flash import decode, flash
from anyattn.custom_ops.flex import attend, attend_backward
from tests.support.compiling import same
from tests.support.operands import flash_operands, flex_operands

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="Inductor needs a C++ compiler")
S, H = 48, 4


def made(*shape: int, grad: bool = False) -> Tensor:
    return torch.randn(*(shape or (2, H, S, 16))).requires_grad_(grad)


def with_code(step: Callable[[], Any]) -> tuple[Any, str]:
    """What a step returns, and the code that Inductor makes for it."""
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        found, codes = run_and_get_code(step)
    return found, "\n".join(codes)


def flex_calls() -> dict[str, tuple[Callable[..., Any], tuple]]:
    sink, table_of_bias, ids = made(H), made(H, 2 * S), torch.arange(S) // 9
    listed = anyattn.create_block_mask(lambda b, h, q, k: q >= k, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    odd = anyattn.create_block_mask(lambda b, h, q, k: (q - k) % 3 != 1, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    flex = anyattn.flex_attention
    return {
        "plain": (lambda q, k, v: flex(q, k, v), ()),
        "score and sink": (
            lambda q, k, v, t, s: flex(q, k, v, score_mod=lambda x, b, h, i, j: x + t[h, i - j + S], sink=s),
            (table_of_bias, sink),
        ),
        "documents": (lambda q, k, v, d: flex(q, k, v, mask_mod=lambda b, h, i, j: d[i] == d[j]), (ids,)),
        "exact block mask": (lambda q, k, v, m: flex(q, k, v, block_mask=m), (listed,)),
        "block mask": (lambda q, k, v, m: flex(q, k, v, block_mask=m, score_mod=scores.softcap(2.0)), (odd,)),
        "two results": (lambda q, k, v: flex(q, k, v, mask_mod=masks.causal(), return_lse=True), ()),
    }  # fmt: skip


@needs_compiler
@pytest.mark.parametrize("name", flex_calls())
def test_compiled_calls_are_direct(name: str) -> None:
    """Forward and backward, with eager's bits, also when the call comes again with other tensors."""
    torch._dynamo.reset()
    call, more = flex_calls()[name]
    compiled = torch.compile(call, fullgraph=True)
    x = [made(grad=True) for _ in range(3)]
    leaves = [t.requires_grad_() for t in more if isinstance(t, Tensor) and t.is_floating_point()]

    def step() -> Any:
        out = compiled(*x, *more)
        return torch.autograd.grad((out[0] if isinstance(out, tuple) else out).sum(), [*x, *leaves])

    _, text = with_code(step)
    assert " = anyattn_attend(" in text and " = anyattn_attend_backward(" in text
    assert " = torch.ops.anyattn" not in text
    for _ in range(4):
        x = [made(grad=True) for _ in range(3)]
        assert same(compiled, call, (*x, *more), [*x, *leaves])
        with torch.no_grad():
            assert same(compiled, call, (*x, *more))


def flash_calls() -> dict[str, tuple[Callable[..., Any], tuple]]:
    rows = tuple(made(2, S, H, 16) for _ in range(3))
    return {
        "flash": (lambda q, k, v: anyattn.flash_attn_func(q, k, v, causal=True), rows),
        "decode": (lambda q, k, v: anyattn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=5, k=q[:, 1:2], v=q[:, 2:3]), rows),
        "block_lists": (
            lambda q, k, v: anyattn.create_block_mask(lambda b, h, i, j: i >= j, 1, 1, S, S, device="cpu").kv_indices + 1,
            rows,
        ),
    }


@needs_compiler
@pytest.mark.parametrize("name", flash_calls())
def test_other_operators_are_direct(name: str) -> None:
    torch._dynamo.reset()
    call, given = flash_calls()[name]
    compiled = torch.compile(call, fullgraph=True)
    mine, theirs = ([t.clone() for t in given] for _ in range(2))
    found, text = with_code(lambda: compiled(*mine))
    assert f" = anyattn_{name}(" in text
    assert torch.equal(found, call(*theirs))
    for a, b in zip(mine, theirs, strict=True):  # also what decode has written
        assert torch.equal(a, b)
    if name == "decode":
        assert not torch.equal(mine[1], given[1])


@needs_compiler
def test_calls_in_regions_that_are_compiled_once() -> None:
    """Whose code is a function of its own in the graph's."""
    torch._dynamo.reset()
    region = torch.compiler.nested_compile_region(lambda q, k, v: anyattn.flex_attention(q, k, v, mask_mod=masks.causal()))
    call = lambda q, k, v: region(region(q, k, v), k, v)
    x = [made() for _ in range(3)]
    with torch.no_grad():
        found, text = with_code(lambda: torch.compile(call, fullgraph=True)(*x))
        assert torch.equal(found, call(*x))
    assert " = anyattn_attend(" in text


class Seen(TorchDispatchMode):
    """The operators that the dispatcher comes by."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(fn))
        return fn(*args, **(kwargs or {}))


class Asked(TorchFunctionMode):
    """The functions that torch's Python interface is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.functions: list[Any] = []

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.functions.append(fn)
        return fn(*args, **(kwargs or {}))


def forward_operands() -> tuple:
    args = flex_operands(*(made() for _ in range(3)), made(H))
    return tuple([t.detach() for t in a] if isinstance(a, list) and a and isinstance(a[0], Tensor) else a for a in args)


def warm(args: tuple) -> Any:
    """The results of a call that came before."""
    with torch.no_grad():
        for _ in range(3):
            found = attend.direct(*args)
    return found


def test_modes_and_profilers_see_the_operator() -> None:
    args = forward_operands()
    wanted = warm(args)
    with torch.no_grad():
        with Seen() as seen:
            found = [attend.direct(*args)]
        assert "anyattn.attend.default" in seen.names
        with Asked() as asked:
            found.append(attend.direct(*args))
        assert attend in asked.functions
        with profile(activities=[ProfilerActivity.CPU]) as recorded:
            found.append(attend.direct(*args))
        assert "anyattn::attend" in {event.name for event in recorded.events()}
    for results in found:
        assert all(torch.equal(a, b) for a, b in zip(results, wanted, strict=True))


def test_gradients_are_recorded_where_there_are_any() -> None:
    args = forward_operands()
    warm(args)
    assert not attend.direct(*args)[0].requires_grad
    q = args[0].clone().requires_grad_()
    for _ in range(3):
        out = attend.direct(q, *args[1:])[0]
        (found,) = torch.autograd.grad(out.sum(), q)
        (wanted,) = torch.autograd.grad(attend(q, *args[1:])[0].sum(), q)
        assert torch.equal(found, wanted)
        with torch.no_grad():
            assert not attend.direct(q, *args[1:])[0].requires_grad


def test_tensors_that_are_not_plain_memory() -> None:
    args = forward_operands()
    wanted = warm(args)
    negated = torch._neg_view(-args[0])
    assert negated.is_neg()
    with torch.no_grad():
        for _ in range(3):
            for a, b in zip(attend.direct(negated, *args[1:]), wanted, strict=True):
                assert torch.equal(a, b)
        seen = torch.empty_like(args[0], device="meta")
        metas = (seen, seen, seen, args[3].to("meta"), "", [0], [], "", [0], [], *args[10:])
        assert attend.direct(*metas)[0].is_meta
    with forward_ad.dual_level(), pytest.raises(NotImplementedError):
        attend.direct(forward_ad.make_dual(args[0], args[0]), *args[1:])
    with pytest.raises(RuntimeError, match="Batching rule"):
        torch.func.vmap(lambda q: attend.direct(q, *args[1:])[0])(torch.stack([args[0]] * 2))


class Wrapped(Tensor):
    """A subclass that dispatches."""

    calls: ClassVar[list[str]] = []
    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        made = Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        cls.calls.append(str(fn))
        args, kwargs = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner, (args, kwargs or {}))
        return fn(*args, **kwargs)


def test_subclasses_are_asked() -> None:
    args = forward_operands()
    wanted = warm(args)
    with torch.no_grad():
        found = attend.direct(Wrapped(args[0]), *args[1:])
    assert Wrapped.calls == ["anyattn.attend.default"]
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_gradients_of_zeros_that_are_no_memory() -> None:
    """As autograd hands over for an output that took no part."""
    args = forward_operands()
    out, lse, _ = warm(args)
    rest = (*args[:14], *args[15:], out, lse)
    zeros = torch._efficientzerotensor(out.shape)
    assert zeros._is_zerotensor()
    with torch.no_grad():
        found = attend_backward.direct(*rest, zeros, None, [True] * 5)
    assert all(not t.any() for t in found)


def test_writes_are_counted() -> None:
    """At least once, as the operator's; torch's own writes inside may count, too."""
    q, new, lengths = made(2, 1, H, 16), made(2, 1, H, 16), torch.full((2,), 5, dtype=torch.int32)
    shared = (None, None, "", [0], [], "", [0], [], None, 0.0, True, [-1, -1], 1, None)
    caches = [[made(2, S, H, 16) for _ in range(2)]]
    caches.append([t.clone() for t in caches[0]])
    found = []
    with torch.no_grad():
        for call, pair in zip((decode, decode.direct), caches, strict=True):
            versions = [t._version for t in pair]
            found.append(call(q, *pair, new, new, None, None, lengths, None, None, None, None, *shared, True, None, None, ""))
            assert all(t._version > n for t, n in zip(pair, versions, strict=True))
    for a, b in zip((*found[0], *caches[0]), (*found[1], *caches[1]), strict=True):
        assert torch.equal(a, b)


def test_flash_is_the_operators() -> None:
    args = flash_operands(*(made(2, S, H, 16) for _ in range(3)))
    with torch.no_grad():
        for a, b in zip(flash.direct(*args), flash(*args), strict=True):
            assert torch.equal(a, b)


def test_without_the_table_nothing_is_direct(monkeypatch: pytest.MonkeyPatch) -> None:
    assert direct.install(attend, "anyattn.custom_ops.flex")
    monkeypatch.delattr(table, "CUSTOM_EXTERN_KERNEL_CODEGEN")
    assert not direct.install(attend, "anyattn.custom_ops.flex")
