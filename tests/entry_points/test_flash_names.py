"""FlashAttention's names at anyattn's own functions: other names, neutral values, and the way out for values that mean something else."""

from __future__ import annotations

import pytest
import torch

import anyattn

torch.manual_seed(0)
Q, K, V = torch.randn(80, 4, 16), torch.randn(104, 2, 16), torch.randn(104, 2, 16)
POOL = torch.randn(2, 9, 16, 2, 16)
ENDS, ENDS_K = torch.tensor([0, 30, 80], dtype=torch.int32), torch.tensor([0, 41, 104], dtype=torch.int32)
TABLE = torch.tensor([[7, 2, 5, -1], [1, 4, 8, 3]], dtype=torch.int32)
DENSE, ONE = [t[None] for t in (Q[:40], K[:52], V[:52])], Q[:2].unsqueeze(1)
LENGTHS = torch.tensor([40, 61], dtype=torch.int32)
NEUTRAL = {"return_attn_probs": False, "qv": None, "q_descale": None, "attention_chunk": 0, "sm_margin": 0, "return_softmax_lse": False}
OF_CACHE = {"scheduler_metadata": None, "cu_seqlens_k_new": None, "rotary_seqlens": None}


def dense(**options):
    return anyattn.flash_attn_func(*DENSE, **options)


def varlen(**options):
    return anyattn.flash_attn_varlen_func(Q, K, V, ENDS, ENDS_K, 50, 63, **options)


def paged(**options):
    return anyattn.flash_attn_varlen_func(Q, *POOL, ENDS, **options)


def cached(**options):
    return anyattn.flash_attn_with_kvcache(ONE, *POOL, cache_seqlens=LENGTHS, **options)


def compiled(call):
    torch._dynamo.reset()
    return torch.compile(call, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("through", [lambda call: call, pytest.param(compiled, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_other_names_and_neutral_values(through):
    for call in (dense, varlen):
        assert torch.equal(through(call)(causal=None, window_size=[8, 8], **NEUTRAL), call(window_size=(8, 8)))
        assert torch.equal(through(call)(return_softmax_lse=True)[1], call(return_lse=True)[1])
    assert torch.equal(through(varlen)(block_table=None), varlen())
    wanted = cached(page_table=TABLE, return_lse=True)
    got = through(cached)(**NEUTRAL | OF_CACHE | {"return_softmax_lse": True}, block_table=TABLE)
    assert all(map(torch.equal, got, wanted))


@pytest.mark.parametrize("through", [lambda call: call, pytest.param(compiled, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_pages_with_cu_seqlens_k(through):
    wanted = paged(page_table=TABLE, seqused_k=ENDS_K.diff(), causal=True, return_lse=True)
    for names in ({"page_table": TABLE}, {"block_table": TABLE}):
        got = through(paged)(cu_seqlens_k=ENDS_K, max_seqlen_k=63, causal=True, return_lse=True, **names)
        assert all(map(torch.equal, got, wanted))
    both = through(paged)(cu_seqlens_k=ENDS_K, page_table=TABLE, seqused_k=LENGTHS)  # the rows in use count
    assert torch.equal(both, paged(page_table=TABLE, seqused_k=LENGTHS))


def test_pages_with_cu_seqlens_k_have_gradients():
    found = []
    for lengths in ({"cu_seqlens_k": ENDS_K}, {"seqused_k": ENDS_K.diff()}):
        pool = POOL.clone().requires_grad_()
        found.append(torch.autograd.grad(anyattn.flash_attn_varlen_func(Q, *pool, ENDS, page_table=TABLE, **lengths).sum(), pool)[0])
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("call", "options", "error", "text"),
    [
        (dense, {"return_attn_probs": True}, ValueError, r"return_attn_probs is True; wanted None, 0 or False: return_lse=True returns"),
        (dense, {"qv": Q}, ValueError, r"qv is a Tensor; wanted None, 0 or False: torch\.cat\(\(q, qv\), -1\) as q"),
        (varlen, {"sm_margin": 4}, ValueError, r"sm_margin is 4; wanted None, 0 or False: leave it out"),
        (cached, {"scheduler_metadata": Q, "page_table": TABLE}, ValueError, r"scheduler_metadata is a Tensor; .*: leave it out"),
        (varlen, {"return_aux": anyattn.AuxRequest(key_sums=True)}, ValueError, r"AuxRequest.*flex_attention returns sums .*one row"),
        (dense, {"skip_below": 0.1}, ValueError, r"skip_below is 0\.1; .*flex_attention leaves tiles out .*document_from_cu_seqlens"),
        (cached, {"skip_below": Q}, ValueError, r"skip_below is a Tensor; .*flex_attention"),
        (dense, {"block_table": None}, TypeError, r"flash_attn_func\(\) got an unexpected keyword argument 'block_table'"),
        (varlen, {"scheduler_metadata": None}, TypeError, r"flash_attn_varlen_func\(\) got an unexpected .* 'scheduler_metadata'"),
        (dense, {"sofmax_scale": 1.0}, TypeError, r"flash_attn_func\(\) got an unexpected keyword argument 'sofmax_scale'"),
        (cached, {"block_table": TABLE, "page_table": TABLE}, TypeError, r"page_table and block_table, which are one argument"),
        (dense, {"causal": 1}, TypeError, r"causal=1 is a int; wanted True or False"),
        (paged, {"page_table": TABLE}, ValueError, r"seqused_k is None with a page_table; wanted .*or cu_seqlens_k"),
        (paged, {"page_table": TABLE, "cu_seqlens_k": 5}, TypeError, r"cu_seqlens_k is a int; wanted an int32 or int64 tensor"),
        (paged, {"page_table": TABLE, "cu_seqlens_k": ENDS_K[:2]}, ValueError, r"seqused_k has 1 entries; wanted 2"),
        (
            paged, {"page_table": TABLE, "cu_seqlens_k": ENDS_K, "seqused_k": LENGTHS[:1]}, ValueError,
            r"cu_seqlens_k means a batch of 2 but seqused_k one of 1",
        ),
    ],
)  # fmt: skip
def test_refusals(call, options, error, text):
    with pytest.raises(error, match=text):
        call(**options)


def test_the_neutral_names_are_flash_attentions_own():
    """Positions beyond those that all versions share stay refused: FlashAttention 2 and 3 order them differently."""
    with pytest.raises(TypeError, match="for versions of FlashAttention order the others differently: pass them by keyword"):
        anyattn.flash_attn_func(*DENSE, 0.0, 0.25, True)
