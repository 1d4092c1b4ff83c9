"""FlashAttention's doors inside ``torch.compile``: one operator each, and what an eager call gives."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.custom_ops.flash import decode, flash
from anyattn.custom_ops.flex import operands_of
from anyattn.mods.tracing.trace import trace
from tests.support.compiling import fresh

H, D = 4, 8
ENDS = torch.tensor([0, 9, 9, 40], dtype=torch.int32)


def compiled(call):
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, backend="aot_eager")


def packed(requires_grad: bool = True) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    return [torch.randn(40, n, D, generator=g).requires_grad_(requires_grad) for n in (H, 2, 2)]


def same(call, tensors, wanted=None) -> None:
    """Outputs and gradients to a few roundings of the greatest element: the operator always keeps the LSE, which is another way."""
    found = []
    for f in (call, compiled(call)):
        outs = f(*tensors)
        outs = outs if isinstance(outs, tuple) else (outs,)
        total = sum((o * torch.linspace(0.5, 1.5, o.numel()).view(o.shape)).where(torch.isfinite(o), 0.0).sum() for o in outs)
        found.append([*outs, *torch.autograd.grad(total, wanted or tensors)])
    for a, b in zip(*found):
        assert a.shape == b.shape and a.dtype == b.dtype
        assert torch.equal(torch.isfinite(a), torch.isfinite(b))
        a, b, finite = a.detach(), b.detach(), torch.isfinite(a)
        assert float((a - b)[finite].abs().max()) <= 32 * torch.finfo(a.dtype).eps * float(a.detach()[finite].abs().max())


def test_packed() -> None:
    options = {"cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS, "causal": True, "return_lse": True}
    same(lambda q, k, v: anyattn.flash_attn_varlen_func(q, k, v, **options), packed())


def test_options_mods_and_their_gradients() -> None:
    table, slopes, sink = torch.randn(H, 40, requires_grad=True), torch.rand(H, requires_grad=True), torch.randn(H, requires_grad=True)
    score, mask = anyattn.mod(lambda s, b, h, i, j: s + table[h, j] * (b + 1)), anyattn.mod(lambda b, h, i, j: (i + j) % 5 != 0)
    tensors = packed()

    def call(q, k, v):  # type: ignore[no-untyped-def]
        return anyattn.flash_attn_varlen_func(
            q, k, v, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, window_size=(20, None), softcap=4.0, alibi_slopes=slopes, sink=sink,
            score_mod=score, mask_mod=mask, softmax_scale=0.5, num_splits=2, pack_gqa=False,
        )  # fmt: skip

    same(call, tensors, [*tensors, table, slopes, sink])


def test_dense_used_and_paged() -> None:
    g = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(2, 20, n, D, generator=g, requires_grad=True) for n in (H, 2, 2))
    used = torch.tensor([20, 7])
    same(lambda q, k, v: anyattn.flash_attn_func(q, k, v, causal=True), [q, k, v])
    same(lambda q, k, v: anyattn.flash_attn_varlen_func(q, k, v, seqused_q=used, seqused_k=used, causal=True), [q, k, v])
    pools = [t.detach().reshape(10, 4, 2, D).clone().requires_grad_() for t in (k, v)]
    table = torch.randperm(10, generator=g).view(2, 5)
    same(lambda q, k, v: anyattn.flash_attn_varlen_func(q, k, v, seqused_k=used, page_table=table), [q, *pools])


def test_decoding_writes_the_same_cache() -> None:
    g = torch.Generator().manual_seed(2)
    q, k, v, cos = (torch.randn(2, 1, n, D, generator=g) for n in (H, 2, 2, 1))
    cos = cos[0, 0].expand(50, D)[:, : D // 2].contiguous()
    score = anyattn.mod(lambda s, b, h, i, j: s - 0.1 * (i - j))
    lengths, pad, table = torch.tensor([9, 30], dtype=torch.int32), torch.tensor([2, 0]), torch.randperm(12, generator=g).view(2, 6)
    pools = [torch.randn(12, 8, 2, D, generator=g) for _ in range(2)]
    places = {"cache_seqlens": lengths, "cache_leftpad": pad, "page_table": table}
    options = {**places, "rotary_cos": cos, "rotary_sin": cos, "causal": True}
    found = []
    for make in (lambda f: f, compiled):
        caches = [p.clone() for p in pools]
        call = make(
            lambda q, kc, vc, k, v: anyattn.flash_attn_with_kvcache(q, kc, vc, k=k, v=v, **options, score_mod=score, return_lse=True)
        )
        found.append([*call(q, *caches, k, v), *caches])
    assert all(torch.equal(a, b) for a, b in zip(*found))
    cache = torch.zeros(2, 2, 16, 2, D)
    step = compiled(lambda q, kc, vc: anyattn.flash_attn_with_kvcache(q, kc, vc, cache_seqlens=5))
    assert step(q, *cache).shape == q.shape


@pytest.mark.parametrize("which", ["q", "k_cache", "sink", "a score mod's"])
def test_decoding_what_requires_grad_is_refused_where_autograd_records(which: str) -> None:
    tensors = {"q": torch.randn(2, 1, H, D), "k_cache": torch.randn(2, 16, 2, D), "sink": torch.randn(H), "a score mod's": torch.randn(H)}
    bias = tensors[which].requires_grad_() if which == "a score mod's" else tensors["a score mod's"]
    score = anyattn.mod(lambda s, b, h, i, j: s + bias[h])
    tensors[which].requires_grad_()

    def call(q, k_cache, sink):
        return anyattn.flash_attn_with_kvcache(q, k_cache, k_cache, cache_seqlens=5, sink=sink, score_mod=score)

    given = [tensors[n] for n in ("q", "k_cache", "sink")]
    with pytest.raises(Exception, match="requires grad"):
        compiled(call)(*given)
    with torch.no_grad():
        assert torch.equal(compiled(call)(*given), call(*given))


def test_opcheck() -> None:
    q, k, v = packed()
    bias = torch.randn(H, requires_grad=True)
    of_mods = (*operands_of(q, trace(lambda s, b, h, i, j: s * 2.0 + bias[h], "score")), *operands_of(q))
    args = (q, k, v, ENDS, ENDS, None, None, None, None, None, *of_mods, None, 0.0, True, [-1, -1], 1, None, False, None, None, None, "")
    torch.library.opcheck(flash, args)
    cache = torch.randn(2, 16, 2, D)
    new = torch.randn(2, 1, 2, D)
    given = (new, new, None, None, torch.tensor([3, 5]), None, None, None, None, None, None)
    options = (None, 0.0, True, [-1, -1], 0, False, True, None, None, "")
    args = (torch.randn(2, 1, H, D), cache, cache.clone(), *given, *operands_of(q), *operands_of(q), *options)
    torch.library.opcheck(decode, args)


def test_open_sizes_are_compiled_once() -> None:
    """Dynamo makes inputs of numbers that are left open, of floats with a second compilation."""

    def dense(q, k, v, cu):
        return anyattn.flash_attn_func(q, k, v, causal=True)

    def varlen(q, k, v, cu):
        return anyattn.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=cu, cu_seqlens_k=cu, causal=True)

    def step(q, k, v, cu):
        with torch.no_grad():
            return anyattn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=cu[1:])

    for call in (dense, varlen, step):
        graph, graphs = fresh(call, dynamic=True)
        for length in (20, 37):
            given = [torch.randn(2, length, n, D, requires_grad=True) for n in (H, 2, 2)]
            ends = torch.tensor([0, 9, length])
            out = graph(*given, ends)
            assert torch.equal(out, call(*given, ends))
            if call is not step:
                out.sum().backward()
        assert graphs.frame_count == 1, call


@pytest.mark.parametrize("call", [
    lambda q, x: anyattn.flex_attention(q, q, q, scale=x),
    lambda q, x: anyattn.flash_attn_func(q, q, q, softmax_scale=x),
    lambda q, x: anyattn.flash_attn_func(q, q, q, softcap=x),
], ids=["scale", "softmax_scale", "softcap"])  # fmt: skip
def test_numbers_that_are_left_open(call) -> None:
    graph, _ = fresh(call, dynamic=True)
    q = torch.randn(2, 20, H, D)
    for x in (0.5, 0.7):
        assert torch.equal(graph(q, x), call(q, x))
