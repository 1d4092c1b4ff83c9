"""Tensors that are no plain memory: fake and meta ones give fake results, torch.func.grad works, others are refused with a way out."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.fx.experimental.proxy_tensor import make_fx

import anyattn
from anyattn import planner
from anyattn.call_cache import attention
from anyattn.custom_ops.flex import operands_of
from tests.support.strided import inputs

B, H, S, D = 2, 4, 24, 8
ENDS = torch.tensor([0, 9, 24], dtype=torch.int32)


def causal(b: Any, h: Any, i: Any, j: Any) -> Any:
    return i >= j


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyattn.flex_attention(q, k, v, mask_mod=causal)


def flex_with_everything(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    blocks = anyattn.create_block_mask(causal, B, H, S, S, device=q.device, BLOCK_SIZE=16)
    bias = torch.zeros(H, device=q.device)
    wanted = anyattn.AuxRequest(lse=True, max_scores=True)
    out, aux = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], blocks, return_aux=wanted, sink=bias)
    return out, aux.lse, aux.max_scores


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)


def varlen(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    ends = torch.empty(3, dtype=torch.int32, device=q.device)
    if type(q) is Tensor and not q.is_meta:
        ends = ENDS
    rows = (t.select(0, 0).transpose(0, 1) for t in (q, k, v))
    return anyattn.flash_attn_varlen_func(*rows, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, return_lse=True)


def decode(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    caches = (torch.zeros(B, 2 * S, H, D, device=q.device) for _ in range(2))
    new = (t.transpose(1, 2) for t in (k, v))
    return anyattn.flash_attn_with_kvcache(q.transpose(1, 2), *caches, **dict(zip("kv", new)), cache_seqlens=5, causal=True)


def combine(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return anyattn.flash_attn_combine(torch.stack([q, k]), torch.stack([q, k]).sum(-1))


ENTRY_POINTS: dict[str, Callable[..., Any]] = {
    "flex": flex, "flex with everything": flex_with_everything, "flash": flash, "varlen": varlen, "decode": decode, "combine": combine,
}  # fmt: skip
ATTENTION = [n for n in ENTRY_POINTS if n != "combine"]


def described(results: Any) -> list[tuple]:
    return [(t.shape, t.dtype, t.stride()) for t in (results if isinstance(results, tuple) else (results,))]


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call that plans would launch a kernel."""

    def refused(*_: Any) -> Any:
        raise AssertionError("a plan was asked for")

    monkeypatch.setattr(planner, "choose", refused)


# ---- fake and meta


@pytest.mark.parametrize("layout", ["contiguous", "projected"])
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_fake_tensors_give_fake_results(name: str, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = inputs(layout, layout, layout)
    real = ENTRY_POINTS[name](*x)
    monkeypatch.setattr(planner, "choose", None)
    for device in ("cpu", *(["cuda"] if name != "combine" else [])):  # which needs a torch that knows CUDA
        with FakeTensorMode() as mode:
            fakes = [torch.empty_strided(t.shape, t.stride(), device=device) for t in x]
            found = ENTRY_POINTS[name](*fakes)
        assert described(found) == described(real)
        results = found if isinstance(found, tuple) else (found,)
        assert all(isinstance(t, FakeTensor) and t.device.type == device and t.fake_mode is mode for t in results)


@pytest.mark.usefixtures("nothing_runs")
def test_fake_gradients() -> None:
    with FakeTensorMode() as mode:
        q, k, v = (t.requires_grad_() for t in (torch.randn(B, H, S, D), torch.randn(B, 2, S, D), torch.randn(B, 2, S, 16)))
        bias, sink = torch.randn(H, requires_grad=True), torch.randn(H, requires_grad=True)
    for inside in (contextlib.nullcontext(), mode):
        with inside:
            out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h], mask_mod=causal, enable_gqa=True, sink=sink)
            grads = torch.autograd.grad(out.sum(), (q, k, v, bias, sink))
            found = anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), window_size=(3, 0), alibi_slopes=sink)
            of_flash = torch.autograd.grad(found.sum(), (q, k, v, sink))
        assert [g.shape for g in grads] == [t.shape for t in (q, k, v, bias, sink)]
        assert [g.shape for g in of_flash] == [t.shape for t in (q, k, v, sink)]
        assert all(isinstance(g, FakeTensor) for g in (*grads, *of_flash))


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", ENTRY_POINTS)
def test_meta_tensors_give_meta_results(name: str) -> None:
    x = [torch.empty_strided(t.shape, t.stride(), device="meta") for t in inputs("projected", "projected", "projected")]
    for t in found if isinstance(found := ENTRY_POINTS[name](*x), tuple) else (found,):
        assert t.is_meta
    leaves = [t.requires_grad_() for t in x]
    assert all(
        (g.is_meta and g.stride() == t.stride()) or not t.is_contiguous()
        for g, t in zip(torch.autograd.grad(flex(*leaves).sum(), leaves), x)
    )


@pytest.mark.usefixtures("nothing_runs")
def test_wrong_arguments_are_refused_of_fake_tensors_too() -> None:
    with FakeTensorMode():
        q, k = torch.randn(B, H, S, D), torch.randn(B, H, S, D + 1)
        with pytest.raises(ValueError, match="key has head_dim 9"):
            anyattn.flex_attention(q, k, k)
        with pytest.raises(ValueError, match="k has head_dim 9"):
            anyattn.flash_attn_func(q, k, k)
        with pytest.raises(ValueError, match="k has head_dim 9"):
            anyattn.flash_attn_varlen_func(q[0], k[0], k[0], cu_seqlens_q=torch.zeros(3), cu_seqlens_k=torch.zeros(3))
        with pytest.raises(ValueError, match="k_cache has head_dim 9"):
            anyattn.flash_attn_with_kvcache(q, k, k)
    q, elsewhere = torch.randn(B, S, H, D), torch.zeros(H, device="meta")
    for name in ("sink", "alibi_slopes"):
        with pytest.raises(ValueError, match=f"{name} is on meta but q"):
            anyattn.flash_attn_func(q, q, q, **{name: elsewhere})
        with pytest.raises(ValueError, match=f"{name} is on meta but q"):
            anyattn.flash_attn_with_kvcache(q, q, q, **{name: elsewhere})
    with pytest.raises(ValueError, match="sink is on meta but query"):
        anyattn.flex_attention(q, q, q, sink=torch.zeros(S, device="meta"))
    with pytest.raises(ValueError, match="seqused_k is on meta but q"):
        anyattn.flash_attn_varlen_func(q, q, q, seqused_k=torch.zeros(B, dtype=torch.int32, device="meta"))


@pytest.mark.parametrize("tracing", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("name", ["flex", "flash"])
def test_a_traced_graph_has_the_operator(name: str, tracing: str) -> None:
    operator = {"flex": "anyattn.attend.default", "flash": "anyattn.flash.default"}[name]
    graph = make_fx(ENTRY_POINTS[name], tracing_mode=tracing)(*inputs("contiguous", "contiguous", "contiguous"))
    assert [str(n.target) for n in graph.graph.nodes].count(operator) == 1


def test_lists_of_fake_masks() -> None:
    real = anyattn.create_block_mask(causal, B, H, S, S, device="cpu", BLOCK_SIZE=16)
    lists = anyattn.compute_block_sparsity(16, 8, B, H, S, S, causal, device="cpu")
    for device in ("cpu", "cuda"):
        with FakeTensorMode():
            fake = anyattn.create_block_mask(causal, B, H, S, S, device=device, BLOCK_SIZE=16)
            fake_lists = anyattn.compute_block_sparsity(16, 8, B, H, S, S, causal, device=device)
        names = ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices", "q_num_blocks", "q_indices", "full_q_num_blocks")
        for made, wanted, fields in (
            (fake, real, (*names, "full_q_indices")),
            (fake_lists, lists, ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")),
        ):
            for field in fields:
                a, b = getattr(made, field), getattr(wanted, field)
                assert isinstance(a, FakeTensor) and a.device.type == device and (a.shape, a.dtype) == (b.shape, b.dtype)
    assert anyattn.create_block_mask(causal, 1, 1, S, S, device="meta").kv_indices.is_meta
    with FakeTensorMode(), pytest.raises(TypeError, match="cu_seqlens_q is a FakeTensor, which has no memory"):
        anyattn.compute_varlen_block_sparsity(16, 16, None, causal, cu_seqlens_q=torch.zeros(3), cu_seqlens_k=torch.zeros(3))


# ---- what is refused


def vmapped(f: Callable[..., Any], x: list[Tensor]) -> Any:
    return torch.vmap(f)(*(torch.stack([t, t]) for t in x))


def dual(f: Callable[..., Any], x: list[Tensor]) -> Any:
    with forward_ad.dual_level():
        return f(forward_ad.make_dual(x[0], torch.ones_like(x[0])), *x[1:])


def of_device_mesh(x: Tensor) -> Any:
    tensor = pytest.importorskip("torch.distributed.tensor")
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if not torch.distributed.is_initialized():
        torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    return tensor.DTensor.from_local(x, torch.distributed.init_device_mesh("cpu", (1,)), [tensor.Replicate()])


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "nested": (lambda f, x: f(*(torch.nested.nested_tensor(list(t), layout=torch.jagged) for t in x)), r"\.values\(\).*offsets\(\)"),
    "strided nested": (lambda f, x: f(*(torch.nested.nested_tensor(list(t)) for t in x)), r"\.values\(\).*offsets\(\)"),
    "sparse": (lambda f, x: f(*(t.to_sparse() for t in x)), r"to_dense\(\)"),
    "vmap": (vmapped, "fold the mapped dimension into the batch"),
    "vmap of grad": (lambda f, x: vmapped(torch.func.grad(lambda *y: f(*y).sum()), x), "fold the mapped dimension into the batch"),
    "jacrev": (lambda f, x: torch.func.jacrev(lambda q: f(q, *x[1:]))(x[0]), "fold the mapped dimension into the batch"),
    "jvp": (lambda f, x: torch.func.jvp(f, tuple(x), tuple(x)), "no forward-mode derivative"),
    "jvp of one": (lambda f, x: torch.func.jvp(lambda v: f(*x[:2], v), (x[2],), (x[2],)), "no forward-mode derivative"),
    "jacfwd": (lambda f, x: torch.func.jacfwd(lambda q: f(q, *x[1:]))(x[0]), "no forward-mode derivative"),
    "hessian": (lambda f, x: torch.func.hessian(lambda q: f(q, *x[1:]).sum())(x[0]), "no forward-mode derivative"),
    "dual": (dual, "no forward-mode derivative"),
    "dual that requires grad": (lambda f, x: dual(f, [t.requires_grad_() for t in x]), "no forward-mode derivative"),
    "negated view": (lambda f, x: f(torch.complex(x[0], x[0]).conj().imag, *x[1:]), r"resolve_neg\(\)"),
    "DTensor": (lambda f, x: f(*map(of_device_mesh, x)), r"to_local\(\)"),
}


def only(f: Callable[..., Any]) -> Callable[..., Tensor]:
    def first(*x: Tensor) -> Tensor:
        found = f(*x)
        return found[0] if isinstance(found, tuple) else found

    return first


@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("name", ATTENTION)
def test_refused(name: str, kind: str) -> None:
    """After a plain call of the same facts, which a warm call must not be taken for."""
    make, wanted = REFUSED[kind]
    f = ENTRY_POINTS[name]
    x = inputs("contiguous", "contiguous", "contiguous")
    if name == "decode" and kind in ("vmap of grad", "jacrev", "hessian"):
        wanted = "no gradients|fold the mapped|no forward-mode"
    if "nested" in kind or kind == "sparse":  # which have no transpose
        bare = {"flash": anyattn.flash_attn_func, "decode": anyattn.flash_attn_with_kvcache, "varlen": anyattn.flash_attn_varlen_func}
        f = bare.get(name, flex)
    else:
        attention.clear()
        f(*x)
        f(*x)
    if name == "decode" and kind == "dual that requires grad":
        wanted = "no gradients"
    with pytest.raises((TypeError, NotImplementedError, *([ValueError] if name == "decode" else [])), match=wanted):
        make(only(f), x)


IRREGULAR: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "nested": (lambda t: torch.nested.nested_tensor([t, t], layout=torch.jagged), r"a nested tensor; .*\.values\(\).*offsets\(\)"),
    "strided nested": (lambda t: torch.nested.nested_tensor([t, t]), r"a nested tensor; .*\.values\(\).*offsets\(\)"),
    "sparse": (lambda t: t.to_sparse(), r"a tensor of layout sparse_coo; .*to_dense\(\)"),
}


def packed(x: list[Tensor]) -> list[Tensor]:
    return [t.select(0, 0).transpose(0, 1) for t in x]


# by the name in the error: a tensor, and a call that gets it among tensors of plain memory
PLACES: dict[str, tuple[Tensor, Callable[[list[Tensor], Tensor], Any]]] = {
    "query": (torch.zeros(B, H, S, D), lambda x, t: anyattn.explain(t, *x[1:])),
    "value": (torch.zeros(B, H, S, D), lambda x, t: anyattn.explain(*x[:2], t)),
    "sink": (torch.zeros(H), lambda x, t: anyattn.flex_attention(*x, sink=t)),
    "alibi_slopes": (torch.zeros(H), lambda x, t: anyattn.flash_attn_func(*(y.transpose(1, 2) for y in x), alibi_slopes=t)),
    "cu_seqlens_q": (ENDS, lambda x, t: anyattn.flash_attn_varlen_func(*packed(x), cu_seqlens_q=t, cu_seqlens_k=ENDS)),
    "cu_seqlens_k": (ENDS, lambda x, t: anyattn.flash_attn_varlen_func(*packed(x), cu_seqlens_q=ENDS, cu_seqlens_k=t)),
    "out_partial": (torch.zeros(2, B, H, S, D), lambda x, t: anyattn.flash_attn_combine(t, torch.zeros(2, B, H, S))),
    "lse_partial": (torch.zeros(2, B, H, S), lambda x, t: anyattn.flash_attn_combine(torch.zeros(2, B, H, S, D), t)),
    "a tensor that score_mod '<lambda>' captures": (
        torch.zeros(S, S), lambda x, t: anyattn.flex_attention(*x, lambda s, b, h, i, j: s + t[i, j]),
    ),
    "a tensor that mask_mod '<lambda>' captures": (
        torch.zeros(S, S), lambda x, t: anyattn.create_block_mask(lambda b, h, i, j: t[i, j] == 0, 1, 1, S, S, device="cpu"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", IRREGULAR)
@pytest.mark.parametrize("name", PLACES)
def test_one_tensor_without_dense_memory_is_refused(name: str, kind: str) -> None:
    """After a call of plain tensors, which a warm call must not be taken for."""
    (make, wanted), (tensor, call) = IRREGULAR[kind], PLACES[name]
    x = inputs("contiguous", "contiguous", "contiguous")
    call(x, tensor)
    error, words = TypeError, f"{name} is {wanted}"
    if "captures" in name and "nested" in kind:  # which the mod itself cannot index
        error, words = anyattn.ModError, r"a captured tensor is nested\n(.*\n)*.*capture a dense tensor"
    with pytest.raises(error, match=words):
        call(x, make(tensor))


MIXED = {n: given for n, given in PLACES.items() if not n.startswith("a tensor")} | {
    "q": (torch.zeros(B, S, H, D), lambda x, t: anyattn.flash_attn_func(t, *(y.transpose(1, 2) for y in x[1:]))),
    "k_cache": (torch.zeros(B, S, H, D), lambda x, t: anyattn.flash_attn_with_kvcache(x[0].transpose(1, 2), t, x[2].transpose(1, 2))),
    "cache_seqlens": (
        torch.zeros(B, dtype=torch.int32), lambda x, t: anyattn.flash_attn_with_kvcache(*(y.transpose(1, 2) for y in x), cache_seqlens=t),
    ),
    "key": (torch.zeros(B, H, S, D), lambda x, t: flex(x[0], t, x[2])),
}  # fmt: skip
del MIXED["query"], MIXED["value"]  # explain computes nothing, and takes none


@pytest.mark.usefixtures("nothing_runs")
@pytest.mark.parametrize("name", MIXED)
def test_a_fake_tensor_beside_real_ones_is_refused(name: str) -> None:
    tensor, call = MIXED[name]
    x = inputs("contiguous", "contiguous", "contiguous")
    mode = FakeTensorMode()
    with pytest.raises(TypeError, match=rf"(is a real tensor, but {name} is a FakeTensor|{name} is a real tensor).*from_tensor.* or none"):
        call(x, mode.from_tensor(tensor))


def test_fake_tensors_beside_others() -> None:
    """Real ones beside fake ones, of two modes, in an active mode, below torch.func; a mode may take real ones."""
    x = inputs("contiguous", "contiguous", "contiguous")
    one, other, mixing = FakeTensorMode(), FakeTensorMode(), FakeTensorMode(allow_non_fake_inputs=True)
    fakes = [one.from_tensor(t) for t in x]
    with pytest.raises(TypeError, match=r"value is a real tensor, but query is a FakeTensor; .*from_tensor\(value\)"):
        flex(*fakes[:2], x[2])
    with pytest.raises(TypeError, match="value is a meta tensor, but query is a FakeTensor"):
        flex(*fakes[:2], x[2].to("meta"))
    with pytest.raises(TypeError, match="value is a FakeTensor of another mode, but query is a FakeTensor; wanted one FakeTensorMode"):
        flex(*fakes[:2], other.from_tensor(x[2]))
    with one, pytest.raises(TypeError, match="query is a real tensor, but a FakeTensorMode is active"):
        flex(*x)
    with pytest.raises(TypeError, match="query is a real tensor, but key is a FakeTensor"):
        torch.func.grad(lambda q: flex(q, *fakes[1:]).sum())(x[0])
    assert isinstance(flex(mixing.from_tensor(x[0]), *x[1:]), FakeTensor)


def test_what_a_mod_captures_is_guarded() -> None:
    q, k, v = inputs("contiguous", "contiguous", "contiguous")
    with FakeTensorMode():
        table = torch.zeros(S)
    score, mask = (lambda s, b, h, i, j: s + table[j]), (lambda b, h, i, j: table[j] == 0)
    for call in (
        lambda: anyattn.flex_attention(q, k, v, score),
        lambda: anyattn.flex_attention(q, k, v, mask_mod=mask),
        lambda: anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), score_mod=score),
    ):
        with pytest.raises(TypeError, match=r"a tensor that \w+ '<lambda>' captures is a FakeTensor, which has no memory"):
            call()
    with pytest.raises(TypeError, match=r"captures is a tensor of torch\.vmap"):
        torch.vmap(lambda t: anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + t[j]))(torch.zeros(2, S))
    with pytest.raises(TypeError, match=r"captures is a tensor of torch\.vmap"):
        torch.vmap(lambda t: anyattn.create_block_mask(lambda b, h, i, j: t[j] == 0, 1, 1, S, S, device="cpu").kv_indices)(
            torch.zeros(2, S)
        )
    with pytest.raises(TypeError, match="captures is a dual tensor"):
        torch.func.jvp(lambda t: anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + t[j]), (torch.zeros(S),), (torch.ones(S),))
    with FakeTensorMode():
        blocks = anyattn.create_block_mask(causal, 1, 1, S, S, device="cpu")
    with pytest.raises(TypeError, match=r"block_mask\.kv_num_blocks is a FakeTensor"):
        anyattn.flex_attention(q, k, v, block_mask=blocks)


def test_a_subclass_that_only_names_itself_is_memory() -> None:
    class Named(torch.Tensor):
        pass

    x = inputs("contiguous", "contiguous", "contiguous")
    assert torch.equal(flex(*(t.as_subclass(Named) for t in x)).as_subclass(Tensor), flex(*x))


def test_a_subclass_that_dispatches_gets_the_operator() -> None:
    from torch.testing._internal.two_tensor import TwoTensor

    x = inputs("contiguous", "contiguous", "contiguous")
    found = flex(*(TwoTensor(t, 2 * t) for t in x))
    assert isinstance(found, TwoTensor) and torch.equal(found.a, flex(*x)) and torch.equal(found.b, flex(*(2 * t for t in x)))


def test_merging_goes_through_every_transform() -> None:
    x = inputs("contiguous", "contiguous", "contiguous")
    once = combine(*x)[0]
    assert torch.equal(torch.vmap(lambda *y: combine(*y)[0])(*(torch.stack([t, t]) for t in x)), torch.stack([once, once]))
    tangents = torch.func.jvp(lambda q: combine(q, *x[1:])[0], (x[0],), (x[0],))[1]
    assert torch.isfinite(tangents).all() and bool(tangents.any())


# ---- derivatives


@pytest.mark.parametrize("name", ["flex", "flash", "varlen"])
def test_gradients_by_torch_func_are_those_of_autograd(name: str) -> None:
    f = only(ENTRY_POINTS[name])
    x = inputs("projected", "contiguous", "transposed")
    leaves = [t.clone().requires_grad_() for t in x]
    wanted = torch.autograd.grad(f(*leaves).sin().sum(), leaves)
    found = torch.func.grad(lambda *y: f(*y).sin().sum(), argnums=(0, 1, 2))(*x)
    assert all(map(near, found, wanted))
    out, pull = torch.func.vjp(f, *x)
    assert all(map(near, pull(out.cos()), wanted))
    assert near(torch.func.grad(lambda k: f(x[0], k, x[2]).sin().sum())(x[1]), wanted[1])


def near(a: Tensor, b: Tensor) -> bool:
    """The operator keeps the log-sum-exp, which is another way: a few roundings of the greatest element."""
    return float((a - b).abs().max()) <= 32 * torch.finfo(a.dtype).eps * float(b.abs().max())


def test_gradients_by_torch_func_of_what_mods_capture() -> None:
    q, k, v = inputs("contiguous", "contiguous", "contiguous")
    blocks = anyattn.create_block_mask(causal, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)

    def loss(bias: Tensor, sink: Tensor) -> Tensor:
        out, lse = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[h, j], blocks, sink=sink, return_lse=True)
        return (out.sin().sum() + lse.cos().sum()) * 1.0

    given = torch.randn(H, S), torch.randn(H)
    leaves = [t.clone().requires_grad_() for t in given]
    assert all(map(near, torch.func.grad(loss, argnums=(0, 1))(*given), torch.autograd.grad(loss(*leaves), leaves)))
    value = torch.func.grad(lambda t: anyattn.flex_attention(q, k, v, lambda s, b, h, i, j, aux: s * aux[0], aux_tensors=[t]).sum())
    assert value(torch.tensor(1.0)).shape == ()


def test_functionalized_calls() -> None:
    x = inputs("contiguous", "contiguous", "contiguous")
    assert near(torch.func.functionalize(flex)(*x), flex(*x))


def derivative(f: Callable[..., Tensor], x: list[Tensor]) -> Tensor:
    return torch.autograd.grad(f(*x).sin().sum(), x[0], create_graph=True)[0]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "operator"])
@pytest.mark.parametrize("name", ["flex", "flash"])
def test_a_second_derivative_is_refused(name: str, is_compiled: bool) -> None:
    """Also where another way leads to the same tensor, so that a constant would be a wrong gradient without a word."""
    f = ENTRY_POINTS[name]
    x = [t.requires_grad_() for t in inputs("contiguous", "contiguous", "contiguous")]
    if is_compiled:
        mask = anyattn.masks.causal()
        f = {"flex": lambda *y: anyattn.flex_attention(*y, mask_mod=mask), "flash": f}[name]
        torch._dynamo.reset()
        f = torch.compile(f, backend="eager", fullgraph=True)
    found = derivative(f, x)
    assert near(found.detach(), torch.autograd.grad(ENTRY_POINTS[name](*x).sin().sum(), x[0])[0])
    for origins in ([], [x[0]], [x[1]]):
        penalty = derivative(f, x).pow(2).sum() + x[0].sum()
        with pytest.raises(NotImplementedError, match="attention has no second derivative"):
            torch.autograd.grad(penalty, origins) if origins else penalty.backward()
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        torch.func.grad(lambda q: torch.func.grad(lambda q: flex(q, *x[1:]).sin().sum())(q).sum())(x[0].detach())


def test_gradients_of_a_batch_of_gradients_are_refused() -> None:
    x = [t.requires_grad_() for t in inputs("contiguous", "contiguous", "contiguous")]
    for f in (flex, flash):
        out = f(*x)
        with pytest.raises(TypeError, match=r"a gradient that backward was given is a tensor of torch\.vmap"):
            torch.autograd.grad(out, x, torch.stack([out.detach()] * 2), is_grads_batched=True)


def test_tensors_of_another_level_are_refused() -> None:
    x = [t.requires_grad_() for t in inputs("contiguous", "contiguous", "contiguous")]
    with pytest.raises(TypeError, match=r"inside torch\.func\.vmap with plain tensors that require grad outside of it"):
        torch.vmap(lambda y: y * flex(*x).sum())(torch.ones(3))
    plain = [t.detach() for t in x]
    assert torch.equal(torch.vmap(lambda y: y * flex(*plain).sum())(torch.ones(3)), torch.ones(3) * flex(*plain).sum())


@pytest.mark.parametrize("transform", ["jvp", "vmap", "grad"])
def test_transforms_inside_of_compiled_functions(transform: str) -> None:
    """A graph's operator would drop tangents."""
    x = inputs("contiguous", "contiguous", "contiguous")
    mask = anyattn.masks.causal()
    for f in (lambda *y: anyattn.flex_attention(*y, mask_mod=mask), lambda *y: anyattn.flash_attn_func(*y, causal=True)):
        calls = {
            "jvp": lambda f=f: torch.func.jvp(f, tuple(x), tuple(x)),
            "vmap": lambda f=f: torch.vmap(f)(*(torch.stack([t, t]) for t in x)),
            "grad": lambda f=f: torch.func.grad(lambda q: f(q, *x[1:]).sum())(x[0]),
        }
        torch._dynamo.reset()
        with pytest.raises(Exception, match=rf"attention is inside torch.func.{transform} inside torch.compile"):
            torch.compile(calls[transform], backend="eager", fullgraph=True)()
    nothing = operands_of(x[0])
    operands = (*(None,) * 7, *nothing, *nothing, None, 0.0, False, [-1, -1], 1, None, False, None, None, None, "")
    with pytest.raises(NotImplementedError, match="no forward-mode derivative"):
        torch.func.jvp(lambda *y: torch.ops.anyattn.flash(*y, *operands), tuple(x), tuple(x))
