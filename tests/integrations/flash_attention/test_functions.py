"""FlashAttention's functions while they are replaced: its options by position and by name mean what anyattn's own mean."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.integrations.flash_attention import ring, version2, version3
from anyattn.integrations.flash_attention.bert_padding import index_first_axis_residual, unpad_input_for_concatenated_sequences
from anyattn.testing import budget

torch.manual_seed(0)
Q, K, V = torch.randn(2, 40, 4, 16), torch.randn(2, 52, 2, 16), torch.randn(2, 52, 2, 16)
QKV, KV = torch.randn(2, 40, 3, 4, 16), torch.stack((K, V), 2)
ENDS, ENDS_K = torch.tensor([0, 30, 80], dtype=torch.int32), torch.tensor([0, 41, 104], dtype=torch.int32)
ROWS = [t.flatten(0, 1) for t in (Q, K, V)]
POOL = torch.randn(2, 9, 16, 2, 16)
TABLE = torch.tensor([[7, 2, 5, 0], [1, 4, 8, 3]], dtype=torch.int32)
SLOPES = torch.rand(4) / 4


def same(got, wanted) -> bool:
    if isinstance(wanted, Tensor):
        return isinstance(got, Tensor) and torch.equal(got, wanted) and got.dtype == wanted.dtype
    return len(got) == len(wanted) and all(map(same, got, wanted))


def everything(**others):
    return {"softmax_scale": 0.3, "causal": True, "window_size": (9, 0), "softcap": 5.0, "alibi_slopes": SLOPES, **others}


POSITIONAL = (0.0, 0.3, True, (9, 0), 5.0, SLOPES, True, True)  # FlashAttention 2's order, deterministic and return_attn_probs too


@pytest.mark.parametrize(
    ("got", "wanted"),
    [
        (lambda: version2.flash_attn_func(Q, K, V, *POSITIONAL), lambda o: anyattn.flash_attn_func(Q, K, V, **o)),
        (lambda: version2.flash_attn_kvpacked_func(Q, KV, *POSITIONAL), lambda o: anyattn.flash_attn_func(Q, K, V, **o)),
        (lambda: version2.flash_attn_qkvpacked_func(QKV, *POSITIONAL), lambda o: anyattn.flash_attn_func(*QKV.unbind(2), **o)),
        (
            lambda: version2.flash_attn_varlen_func(*ROWS, ENDS, ENDS_K, 50, 63, *POSITIONAL),
            lambda o: anyattn.flash_attn_varlen_func(*ROWS, ENDS, ENDS_K, **o),
        ),
        (
            lambda: version2.flash_attn_varlen_kvpacked_func(ROWS[0], torch.stack(ROWS[1:], 1), ENDS, ENDS_K, 50, 63, *POSITIONAL),
            lambda o: anyattn.flash_attn_varlen_func(*ROWS, ENDS, ENDS_K, **o),
        ),
        (
            lambda: version2.flash_attn_varlen_qkvpacked_func(QKV.flatten(0, 1), ENDS, 50, *POSITIONAL),
            lambda o: anyattn.flash_attn_varlen_func(*QKV.flatten(0, 1).unbind(1), ENDS, ENDS, **o),
        ),
        (
            lambda: version2.flash_attn_varlen_func(ROWS[0], *POOL, ENDS, ENDS_K, 50, 63, *POSITIONAL, TABLE),
            lambda o: anyattn.flash_attn_varlen_func(
                ROWS[0], *POOL, ENDS, seqused_k=ENDS_K.diff(), page_table=TABLE, **o
            ),
        ),
    ],
)  # fmt: skip
def test_version_2_by_position(got, wanted) -> None:
    out, lse, probabilities = got()
    assert same((out, lse), wanted(everything(return_lse=True, deterministic=True)))
    assert probabilities.shape == (0,) and probabilities.dtype is out.dtype


def test_version_3_by_position() -> None:
    wanted = anyattn.flash_attn_func(Q, K, V, **everything(return_lse=True, alibi_slopes=None))
    order = (0.3, True, None, None, None, None, (9, 0), 0, 5.0, 1, None, True, 0)
    assert same(version3.flash_attn_func(Q, K, V, *order, True), wanted) and same(version3.flash_attn_func(Q, K, V, *order), wanted[0])
    wanted = anyattn.flash_attn_varlen_func(*ROWS, ENDS, ENDS_K, 50, 63, seqused_k=torch.tensor([40, 60]), softmax_scale=0.3, causal=True)
    assert same(version3.flash_attn_varlen_func(*ROWS, ENDS, ENDS_K, 50, 63, None, torch.tensor([40, 60]), 0.3, True), wanted)
    heads = torch.cat((Q, K[:, :40], V[:, :40]), 2)
    assert same(
        version3.flash_attn_qkvpacked_func(heads, None, True, num_heads_q=4), anyattn.flash_attn_func(Q, K[:, :40], V[:, :40], causal=True)
    )
    partial, lse = torch.randn(3, 2, 5, 4, 16), torch.randn(3, 2, 5, 4)
    out = torch.empty(2, 5, 4, 16, dtype=torch.bfloat16)
    merged = anyattn.flash_attn_combine(partial, lse)
    assert same(version3.flash_attn_combine(partial, lse), merged)
    assert version3.flash_attn_combine(partial, lse, out, torch.bfloat16)[0] is out and same(out, merged[0].bfloat16())
    with pytest.raises(ValueError, match=r"out has shape .* and dtype torch.bfloat16; wanted .* out_dtype=torch.float32"):
        version3.flash_attn_combine(partial, lse, out)


def caches() -> list[Tensor]:
    return [POOL[0].clone(), POOL[1].clone()]


@pytest.mark.parametrize("version", [2, 3])
def test_with_kvcache(version: int) -> None:
    new = torch.randn(2, 2, 3, 2, 16)
    angle = torch.outer(torch.arange(80.0), torch.rand(4))
    lengths, q = torch.tensor([5, 40], dtype=torch.int32), Q[:, :3]
    mine, theirs = caches(), caches()
    options = {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "cache_seqlens": lengths, "rotary_interleaved": False, "causal": True}
    wanted = anyattn.flash_attn_with_kvcache(q, *mine, *new, page_table=TABLE, window_size=(20, 0), return_lse=True, **options)
    if version == 2:
        got = version2.flash_attn_with_kvcache(
            q, *theirs, *new, angle.cos(), angle.sin(), lengths, None, None, TABLE, None, True, (20, 0), 0.0, False, None, 0, True
        )
    else:
        schedule = version3.get_scheduler_metadata(2, 3, 64, 4, 2, 16, lengths, page_size=16)
        got = version3.flash_attn_with_kvcache(
            q, *theirs, *new, page_table=TABLE, window_size=(20, 0), return_softmax_lse=True, scheduler_metadata=schedule, **options
        )
        assert all(t.numel() == 0 and t.dtype is torch.float32 for t in got[2:]) and len(got) == 4
    assert same(got[:2], wanted) and same(theirs, mine)


@pytest.mark.parametrize("version", [version2, version3])
def test_a_cache_takes_tensors_that_require_grad_and_refuses_backward(version) -> None:
    q = Q[:, :1].clone().requires_grad_()
    out, lse, *_ = version.flash_attn_with_kvcache(q, K, V, return_softmax_lse=True)
    assert same((out.detach(), lse.detach()), anyattn.flash_attn_with_kvcache(q.detach(), K, V, return_lse=True))
    with pytest.raises(RuntimeError, match="flash_attn_with_kvcache has no gradients; wanted flash_attn_varlen_func"):
        out.sum().backward()
    assert not version.flash_attn_with_kvcache(Q[:, :1], K, V).requires_grad


def test_sides_and_caps_below_0_mean_none() -> None:
    wanted = anyattn.flash_attn_func(Q, K, V, window_size=(-1, 4))
    assert same(version2.flash_attn_func(Q, K, V, window_size=[-7, 4], softcap=-1.0), wanted)
    assert same(version3.flash_attn_func(Q, K, V, window_size=[-7, 4], causal=None), wanted)


@pytest.mark.parametrize(
    ("option", "cure"),
    [
        ({"qv": Q}, r"torch\.cat\(\(q, qv\), -1\)"),
        ({"k_descale": torch.ones(2, 2)}, "8-bit keys and values are for flash_attn_varlen_func"),
        ({"attention_chunk": 16}, r"mask_mod=anyattn\.masks\.chunked"),
        ({"sm_margin": 8}, "leave it out"),
    ],
)
def test_options_without_a_meaning_are_refused_with_a_cure_and_counted(option, cure) -> None:
    before = anyattn.replaced()
    with pytest.raises(ValueError, match=f"{next(iter(option))} is .*; wanted None, 0 or False: .*{cure}"):
        version3.flash_attn_func(Q, K, V, **option)
    after = anyattn.replaced()
    assert (after.taken, after.refused, after.passed_on) == (before.taken, before.refused + 1, before.passed_on)
    assert any(next(iter(option)) in reason for reason in after.reasons)


def test_what_a_cache_refuses() -> None:
    with pytest.raises(TypeError, match="scheduler_metadata=7; wanted None or what get_scheduler_metadata returns"):
        version3.flash_attn_with_kvcache(Q[:, :1], K, V, scheduler_metadata=7)
    for name in ("cu_seqlens_k_new", "rotary_seqlens"):
        with pytest.raises(ValueError, match=f"{name} is a Tensor; wanted None"):
            version3.flash_attn_with_kvcache(Q[:, :1], K, V, **{name: ENDS})
    with pytest.raises(ValueError, match="return_attn_probs=True is given with dropout_p above 0"):
        version2.flash_attn_func(Q, K, V, 0.1, return_attn_probs=True)


@pytest.mark.parametrize("is_varlen", [False, True])
def test_ring_attention(is_varlen: bool) -> None:
    """The keys in two parts, merged by log-sum-exp; each part's backward pass takes the merged results."""
    q, k, v, dout = (t.double() for t in (Q, K, V, torch.randn(Q.shape)))

    def gradients(dtype):
        leaves = [t.to(dtype).requires_grad_() for t in (q.clone(), k.clone(), v.clone())]
        scores = torch.einsum("bqhd,bkhd->bhqk", leaves[0], leaves[1].repeat_interleave(2, 2)) / 4
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), leaves[2].repeat_interleave(2, 2))
        return out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))

    wanted, plain = gradients(torch.float64), gradients(torch.float32)
    parts = [(k[:, :26], v[:, :26]), (k[:, 26:], v[:, 26:])]
    places, options = (), (0.0, 0.25, False, -1, -1, 0.0, None)
    forward, backward = ring.forward, ring.backward
    rows = [q, dout]
    if is_varlen:
        rows, parts = [t.flatten(0, 1) for t in rows], [tuple(t.flatten(0, 1) for t in part) for part in parts]
        ends = [torch.tensor([0, n, 2 * n], dtype=torch.int32) for n in (40, 26)]
        places, forward, backward = (*ends, 40, 26), ring.varlen_forward, ring.varlen_backward
    results = [forward(rows[0], *part, *places, *options, False)[:2] for part in parts]
    out, lse = anyattn.flash_attn_combine(*(torch.stack(t) for t in zip(*((o, s.transpose(-1, -2)) for o, s in results), strict=True)))
    lse, dq, found = lse.transpose(-1, -2).contiguous(), torch.zeros_like(rows[0]), []
    for part in parts:
        buffers = [torch.full_like(t, torch.nan) for t in (rows[0], *part)]
        backward(rows[1], rows[0], *part, out, lse, *buffers, *places, *options, True)
        dq += buffers[0]
        found.append([t.view(2, -1, *t.shape[-2:]) for t in buffers[1:]])
    dk, dv = (torch.cat(t, 1) for t in zip(*found, strict=True))
    for name, got, *others in zip(("out", "dq", "dk", "dv"), (out, dq, dk, dv), wanted, plain, strict=True):
        budget.check(name, got.view(others[0].shape).float(), *others)
    with pytest.raises(ValueError, match=r"dropout_p=0\.1; wanted 0\.0"):
        forward(rows[0], *parts[0], *places, 0.1, *options[1:], False)


def test_the_rest_of_bert_padding() -> None:
    x = torch.randn(2, 6, 3)
    rows, residual = index_first_axis_residual(x[0], torch.tensor([1, 4]))
    assert same(rows, x[0, [1, 4]]) and residual is not None and same(residual, x[0])
    lengths = torch.tensor([[2, 3, 0, 0, 0, 0], [4, 0, 0, 0, 0, 0]])
    rows, indices, ends, longest = unpad_input_for_concatenated_sequences(x, lengths)
    assert same(rows, torch.cat((x[0, :5], x[1, :4]))) and ends.tolist() == [0, 2, 5, 9] and longest == 4
    assert indices.tolist() == [0, 1, 2, 3, 4, 6, 7, 8, 9]
