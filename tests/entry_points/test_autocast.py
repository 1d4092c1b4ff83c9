"""Under ``torch.autocast`` a call is the call with q, k and v cast, forward and backward, eager and compiled, first and warm."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.call_cache import attention

HALF = torch.bfloat16
BIAS, SINK = torch.randn(4, 40, requires_grad=True), torch.randn(4, requires_grad=True)
ENDS = torch.tensor([0, 15, 40])


@pytest.fixture(autouse=True)
def _forgotten():
    attention.clear()
    yield
    attention.clear()


def inputs(*dtypes):
    g = torch.Generator().manual_seed(0)
    return [torch.randn(1, 40, h, 16, generator=g).to(d).requires_grad_() for h, d in zip((4, 2, 2), dtypes, strict=True)]


SCORE = anyattn.mod(lambda s, b, h, i, j: s + BIAS[h, j])
WINDOW = masks.sliding_window(9, 0)
LISTED = anyattn.create_block_mask(WINDOW, 1, 1, 40, 40, device="cpu", BLOCK_SIZE=16)


def flex(q, k, v, **options):
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return anyattn.flex_attention(q, k, v, score_mod=SCORE, enable_gqa=True, sink=SINK, return_lse=True, **options)


CALLS = {
    "flex": lambda q, k, v: flex(q, k, v, mask_mod=WINDOW),
    "flex with lists": lambda q, k, v: flex(q, k, v, block_mask=LISTED),
    "flash": lambda q, k, v: anyattn.flash_attn_func(q, k, v, causal=True, score_mod=SCORE, sink=SINK, return_lse=True),
    "varlen": lambda q, k, v: anyattn.flash_attn_varlen_func(
        q[0], k[0], v[0], cu_seqlens_q=ENDS, cu_seqlens_k=ENDS, causal=True, score_mod=SCORE, sink=SINK, return_lse=True
    ),
}


def results(call, tensors, is_inside):
    """out, lse and gradients. is_inside: the backward pass is asked for under autocast too."""
    out, lse = call(*tensors)
    weight = torch.linspace(0.5, 1.5, out.numel(), dtype=torch.float32).view(out.shape)
    total = (out.float() * weight).sum() + lse.sum()
    with torch.autocast("cpu", HALF, enabled=is_inside):
        return [out, lse, *torch.autograd.grad(total, [*tensors, BIAS, SINK])]


EAGER = [(name, kind, None, inside) for name in CALLS for kind in ("float32", "mixed") for inside in (False, True)]
COMPILED = [(name, "float32", "aot_eager", True) for name in CALLS] + [(name, "mixed", "eager", True) for name in ("flex", "flash")]
DTYPES = {"float32": (torch.float32,) * 3, "mixed": (torch.float32, torch.float16, HALF)}


@pytest.mark.covering(2)
@pytest.mark.parametrize(("name", "kind", "compiler", "is_inside"), EAGER + COMPILED)
def test_a_call_is_the_one_with_q_k_and_v_cast(name, kind, compiler, is_inside):
    call, tensors = CALLS[name], inputs(*DTYPES[kind])
    by_hand = lambda q, k, v: call(q.to(HALF), k.to(HALF), v.to(HALF))
    if compiler is not None:
        torch._dynamo.reset()
        by_hand = torch.compile(by_hand, backend=compiler, fullgraph=True)
    wanted = results(by_hand, tensors, False)
    if compiler is not None:
        call = torch.compile(CALLS[name], backend=compiler, fullgraph=True)
    for _ in range(2):
        with torch.autocast("cpu", HALF):
            found = [t.detach() for t in call(*tensors)]
        assert found[0].dtype is HALF and found[1].dtype is torch.float32
        assert all(torch.equal(a, b) for a, b in zip(found, wanted[:2], strict=True))

    def under_autocast(*given):
        with torch.autocast("cpu", HALF):
            return call(*given)

    for a, b in zip(results(under_autocast, tensors, is_inside), wanted, strict=True):
        assert a.dtype is b.dtype and torch.equal(a, b)


def test_what_is_not_cast():
    q, k, v = (t.detach().transpose(1, 2) for t in inputs(*(torch.float64,) * 3))
    with torch.autocast("cpu", HALF):
        assert anyattn.flex_attention(q, k, v, enable_gqa=True).dtype is torch.float64
        with torch.autocast("cpu", enabled=False):
            assert anyattn.flex_attention(q.float(), k.float(), v.float(), enable_gqa=True).dtype is torch.float32
    with torch.autocast("cuda", HALF) if torch.cuda.is_available() else torch.autocast("cpu", HALF, enabled=False):
        assert anyattn.flex_attention(q.float(), k.float(), v.float(), enable_gqa=True).dtype is torch.float32


def test_float32_products_stay_float32_where_only_another_dtype_is_asked_for_outside():
    """A call of known facts under autocast does not stand for one outside, nor the other way round."""
    q, k, v = (t.detach().transpose(1, 2) for t in inputs(*(torch.float32,) * 3))
    call = lambda: anyattn.flex_attention(q, k, v, enable_gqa=True, mask_mod=WINDOW)
    plain = call()
    for _ in range(2):
        with torch.autocast("cpu", HALF):
            assert call().dtype is HALF
        assert torch.equal(call(), plain)


@pytest.mark.parametrize("dtype", [torch.float32, HALF])
def test_beside_a_cache_of_another_dtype_nothing_is_cast(dtype):
    q, k, v = (t.detach()[:, :1] for t in inputs(*(torch.float32,) * 3))
    caches = torch.zeros(2, 1, 8, 2, 16, dtype=dtype)
    kept = caches.clone()
    with torch.autocast("cpu", HALF):
        out = anyattn.flash_attn_with_kvcache(q, *caches, k=k, v=v, cache_seqlens=3)
    wanted = anyattn.flash_attn_with_kvcache(q.to(dtype), *kept, k=k.to(dtype), v=v.to(dtype), cache_seqlens=3)
    assert out.dtype is dtype and torch.equal(out, wanted) and torch.equal(caches, kept)


def test_an_explanation_is_of_the_cast_call():
    q, k, v = (t.detach().transpose(1, 2) for t in inputs(*(torch.float32,) * 3))
    with torch.autocast("cpu", HALF):
        under = anyattn.explain(q, k, v, enable_gqa=True).plan
    assert under == anyattn.explain(q.to(HALF), k.to(HALF), v.to(HALF), enable_gqa=True).plan
