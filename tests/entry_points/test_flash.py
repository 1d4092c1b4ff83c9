"""``flash_attn_func``: every option against the oracle, forward and backward; what must be exact; what must be refused."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import flash_attn_func
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.flash_calls import RECIPES

# (heads, kv heads), (D, Dv), (Sq, Sk): ratios 1, 3, 4; D not a multiple of 8; more queries than keys and fewer
SHAPES = [
    ((4, 4), (16, 16), (33, 33)),
    ((3, 1), (20, 8), (40, 21)),
    ((4, 1), (33, 48), (17, 70)),
    ((6, 2), (8, 33), (65, 64)),
    ((4, 1), (64, 64), (1, 50)),
    ((3, 3), (1, 4), (50, 1)),
]
DTYPES = (torch.bfloat16, torch.float64, torch.float16)
MATRIX = [(name, SHAPES[(i + j) % 6], d, k) for i, name in enumerate(RECIPES) for j, (d, k) in enumerate(
    ((torch.float32, "normal"), (DTYPES[i % 3], ("peaky", "coded", "normal")[i // 3 % 3])))]  # fmt: skip


def judged(recipe, heads, dims, lengths, dtype, kind="normal", batch=2, with_lse=True, **more):  # type: ignore[no-untyped-def]
    """One call on random tensors, forward and backward, judged; its results."""
    made = calls.ragged([lengths[0]] * batch, [lengths[1]] * batch, heads, dims, dtype, kind)
    q, k, v, dout, dlse = (torch.stack(part) for part in (made.q, made.k, made.v, made.dout, made.dlse))
    dlse = dlse.transpose(1, 2) if with_lse else None
    tensors = recipe.draw(heads[0], batch, max(lengths), dtype)
    got = calls.call(flash_attn_func, (q, k, v), tensors, recipe.options(tensors) | more, dout, dlse, with_lse)
    assert got["out"].dtype == dtype and got["out"].shape == (batch, lengths[0], heads[0], dims[1])
    reference.judge(reference.dense(q, k, v), got, recipe.options, tensors, dout, dlse)
    return got


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "shape", "dtype", "kind"), MATRIX, ids=lambda x: str(x).removeprefix("torch."))
def test_options(name, shape, dtype, kind):
    judged(RECIPES[name], *shape, dtype, kind)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["full", "causal", "window", "shifted", "empty_band", "mask", "sink"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_lse(name, dtype):
    """Asked for the output alone, a backend may go another way."""
    judged(RECIPES[name], (6, 2), (24, 40), (70, 90), dtype, with_lse=False)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", [(0, 5), (5, 0), (0, 0), (1, 1), (2, 300), (300, 2)])
@pytest.mark.parametrize("name", ["full", "causal", "alibi", "sink", "everything"])
def test_short_and_empty(name, lengths):
    judged(RECIPES[name], (3, 1), (16, 8), lengths, torch.float32)


@pytest.mark.parametrize("name", ["full", "sink"])
def test_no_batch(name):
    recipe = RECIPES[name]
    tensors = recipe.draw(4, 1, 1, torch.float32)
    q, k = torch.randn(0, 5, 4, 8, requires_grad=True), torch.randn(0, 5, 2, 8)
    out, lse = flash_attn_func(q, k, k, return_lse=True, **recipe.options(tensors))
    assert out.shape == (0, 5, 4, 8) and lse.shape == (0, 4, 5)
    out.sum().backward()


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["causal", "window", "bias_key"])
def test_long(name, dtype):
    """Above 512 rows and 1,024 keys other ways are taken."""
    judged(RECIPES[name], (2, 1), (16, 16), (1100, 1300), dtype, batch=1, with_lse=dtype is torch.float32)


@pytest.mark.parametrize("how", ["transposed", "offset", "expanded", "reversed_batch"])
def test_strides(how):
    made = calls.ragged([20, 20], [30, 30], (4, 2), (16, 12))
    recipe = RECIPES["causal"]
    q, k, v, dout = (torch.stack(part) for part in (made.q, made.k, made.v, made.dout))

    def laid_out(x):  # type: ignore[no-untyped-def]
        if how == "transposed":
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        if how == "offset":
            return torch.nn.functional.pad(x, (3, 5), value=calls.NAN)[..., 3:-5]
        if how == "expanded":
            return x[:1].expand(x.shape)
        return torch.stack([x[1], x[0]])[torch.tensor([1, 0])]

    q, k, v, dout = map(laid_out, (q, k, v, dout))
    got = calls.call(flash_attn_func, (q, k, v), {}, recipe.options({}), dout)
    reference.judge(reference.dense(q, k, v), got, recipe.options, {}, dout)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", [(16, 8), (64, 32), (128, 128)])
@pytest.mark.parametrize("compute_full", [True, False])
def test_block_lists(tile, compute_full):
    """Lists leave the result what the mask says, alone and beside causal and a window."""
    mask = lambda b, h, i, j: ((i // 9 + j // 5 + h) % 3 != 0) & (j > b)
    lists = anyattn.compute_block_sparsity(*tile, 2, 4, 70, 90, mask, device="cpu", compute_full_blocks=compute_full)
    for more in ({}, {"causal": True, "window_size": (30, 0), "softcap": 3.0}):
        recipe = calls.Recipe(lambda t, more=more: {"mask_mod": mask, **more})
        judged(recipe, (4, 2), (16, 16), (70, 90), torch.float32, block_sparse_tensors=lists)


def test_a_table_in_16_bits():
    """A captured tensor keeps its own dtype: its gradient comes back in it."""
    made = calls.ragged([30, 30], [30, 30])
    q, k, v, dout = (torch.stack(part) for part in (made.q, made.k, made.v, made.dout))
    table = torch.randn(4, 30).bfloat16().requires_grad_()
    out = flash_attn_func(q, k, v, score_mod=lambda s, b, h, i, j: s + table[h, j])
    (grad,) = torch.autograd.grad(out, table, dout)
    assert grad.dtype == torch.bfloat16
    recipe = calls.RECIPES["bias_key"]
    reference.judge(reference.dense(q, k, v), {"out": out}, recipe.options, {"table": table}, dout)


# ---- exact


def outputs(made, order=None, **options):  # type: ignore[no-untyped-def]
    made = made if order is None else made.permuted(order)
    q, k, v, dout = (torch.stack(part) for part in (made.q, made.k, made.v, made.dout))
    return calls.call(flash_attn_func, (q, k, v), {}, options, dout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_batch_permuted_is_output_permuted(dtype):
    """Bit by bit only where that is asked for: on some CPUs torch's products round by an entry's place in memory."""
    made, order = calls.ragged([50] * 4, [60] * 4, dtype=dtype), [2, 0, 3, 1]
    for options in ({"causal": True}, {"window_size": (9, 2)}, {"softcap": 2.0}):
        one, other = (outputs(made, way, deterministic="batch", **options) for way in (None, order))
        assert all(calls.same_bits(one[n][order], other[n]) for n in ("out", "lse")), options


def test_equal_names_are_equal_bits():
    made = calls.ragged([50] * 2, [60] * 2)
    full, causal = outputs(made), outputs(made, causal=True)
    pairs = [
        (full, {"window_size": (None, None)}),
        (full, {"window_size": (59, 49)}),  # every key is that near
        (full, {"softcap": 0.0}),
        (causal, {"window_size": (-1, 0)}),
        (causal, {"window_size": (None, 0)}),
        (causal, {"causal": True, "window_size": (-1, 7)}),
        (causal, {"causal": True, "window_size": (100, -1)}),
        (causal, {"causal": True, "deterministic": True}),
        (causal, {"causal": True, "backend": "torch"}),
    ]
    for want, options in pairs:
        got = outputs(made, **options)
        assert all(calls.same_bits(want[n], got[n]) for n in want), options


def test_inputs_are_left_alone():
    made = calls.ragged([20], [20])
    before = [torch.stack(part) for part in (made.q, made.k, made.v)]
    tensors = [t.clone() for t in before]
    flash_attn_func(*tensors, causal=True)
    assert all(calls.same_bits(a, b) for a, b in zip(before, tensors))


# ---- refused

Q, K, V = torch.randn(2, 16, 4, 8), torch.randn(2, 24, 2, 8), torch.randn(2, 24, 2, 8)
META = torch.device("meta")


def lists(*lengths, heads=1, batch=1):  # type: ignore[no-untyped-def]
    mask = lambda b, h, i, j: i >= j
    return anyattn.compute_block_sparsity(16, 16, batch, heads, *lengths, mask, device="cpu")


def flash(q=Q, k=K, v=V, **options):  # type: ignore[no-untyped-def]
    return flash_attn_func(q, k, v, **options)


BAD = {
    "q a list": (lambda: flash(q=[1.0]), TypeError, r"^q .*list.*Tensor"),
    "q of rank 3": (lambda: flash(q=Q[0]), ValueError, r"^q .*\(16, 4, 8\).*4 dim"),
    "integer q": (lambda: flash(q=Q.long()), TypeError, r"^q .*int64.*float32"),
    "k of another dtype": (lambda: flash(k=K.half()), TypeError, r"^k .*float16.*float32.*\.to"),
    "v elsewhere": (lambda: flash(v=V.to(META)), ValueError, r"^v .*meta.*cpu.*\.to"),
    "k of another head_dim": (lambda: flash(k=K[..., :4]), ValueError, r"^k .*head_dim 4.*8"),
    "v of another length": (lambda: flash(v=V[:, :9]), ValueError, r"^v .*9.*24"),
    "v of other heads": (lambda: flash(v=V[:, :, :1]), ValueError, r"^v .*1 heads.*2"),
    "k of another batch": (lambda: flash(k=K[:1], v=V[:1]), ValueError, r"^k .*batch 1.*2"),
    "head ratio": (lambda: flash(q=Q[:, :, :3]), ValueError, r"q has 3 heads.*2.*k"),
    "head_dim 0": (lambda: flash(q=Q[..., :0], k=K[..., :0]), ValueError, r"^q .*head_dim 0"),
    "window a number": (lambda: flash(window_size=3), TypeError, r"window_size=3.*pair"),
    "window of three": (lambda: flash(window_size=(1, 2, 3)), (TypeError, ValueError), r"window_size=\(1, 2, 3\).*pair"),
    "window of floats": (lambda: flash(window_size=(1.5, 0)), TypeError, r"window_size.*1\.5.*int"),
    "window of bools": (lambda: flash(window_size=(True, 0)), TypeError, r"window_size.*True.*int"),
    "softcap negative": (lambda: flash(softcap=-1.0), ValueError, r"softcap=-1\.0"),
    "softcap NaN": (lambda: flash(softcap=float("nan")), ValueError, r"softcap=nan"),
    "softcap a string": (lambda: flash(softcap="2"), (TypeError, ValueError), r"softcap='2'"),
    "scale a string": (lambda: flash(softmax_scale="big"), TypeError, r"softmax_scale.*str"),
    "scale infinite": (lambda: flash(softmax_scale=float("inf")), ValueError, r"softmax_scale.*inf.*finite"),
    "slopes of wrong heads": (lambda: flash(alibi_slopes=torch.ones(3)), ValueError, r"alibi_slopes.*\(3,\).*\(4,\)"),
    "slopes of wrong batch": (lambda: flash(alibi_slopes=torch.ones(3, 4)), ValueError, r"alibi_slopes.*\(3, 4\).*\(2, 4\)"),
    "slopes a list": (lambda: flash(alibi_slopes=[1.0] * 4), (TypeError, ValueError), r"alibi_slopes.*list"),
    "slopes of integers": (lambda: flash(alibi_slopes=torch.ones(4).long()), (TypeError, ValueError), r"alibi_slopes.*int64"),
    "slopes elsewhere": (lambda: flash(alibi_slopes=torch.ones(4, device=META)), ValueError, r"alibi_slopes.*meta"),
    "sink of wrong heads": (lambda: flash(sink=torch.zeros(2)), ValueError, r"sink.*\(2,\).*\(4,\)"),
    "splits a float": (lambda: flash(num_splits=1.5), TypeError, r"num_splits=1\.5.*int"),
    "splits negative": (lambda: flash(num_splits=-1), ValueError, r"num_splits=-1"),
    "splits a bool": (lambda: flash(num_splits=True), TypeError, r"num_splits=True"),
    "causal a string": (lambda: flash(causal="no"), TypeError, r"causal.*'no'|causal.*str"),
    "unknown backend": (lambda: flash(backend="cudnn"), ValueError, r"backend='cudnn'.*torch"),
    "aux a tensor": (lambda: flash(aux_tensors=Q), TypeError, r"aux_tensors.*Tensor.*list"),
    "mask with three arguments": (lambda: flash(mask_mod=lambda b, h, i: i > 0), TypeError, r"mask_mod.*3 arguments"),
    "score that returns a bool": (lambda: flash(score_mod=lambda s, b, h, i, j: i > j), ValueError, r"score_mod.*bool"),
    "score_mod a number": (lambda: flash(score_mod=2.0), TypeError, r"score_mod.*float"),
    "table too short": (lambda: flash(score_mod=lambda s, b, h, i, j: s + SHORT[j]), (IndexError, ValueError), r"score_mod.*10"),
    "block lists a mask": (lambda: flash(block_sparse_tensors=lambda b, h, i, j: i > j), TypeError, r"block_sparse_tensors.*function"),
    "block lists of other lengths": (lambda: flash(block_sparse_tensors=lists(64, 24)), ValueError, r"block_sparse_tensors.*64.*16"),
    "block lists of a shorter k": (lambda: flash(block_sparse_tensors=lists(16, 20)), ValueError, r"block_sparse_tensors.*20.*24"),
    "block lists, heads": (lambda: flash(block_sparse_tensors=lists(16, 24, heads=3)), ValueError, r"block_sparse_tensors.*heads 3"),
    "block lists, batch": (lambda: flash(block_sparse_tensors=lists(16, 24, batch=3)), ValueError, r"block_sparse_tensors.*batch 3"),
}  # fmt: skip
SHORT = torch.arange(10.0)


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    bad, error, words = BAD[name]
    with pytest.raises(error, match=words):
        bad()


@pytest.mark.parametrize("is_compiled", [False, True])
def test_what_all_flash_attentions_order_alike_is_taken_by_position(is_compiled):
    """Also by warm calls, and inside of torch.compile."""

    def varlen(q, k, ends_q, ends_k):
        return anyattn.flash_attn_varlen_func(q, k, k, ends_q, ends_k, 16, 24, causal=True)

    def decode(q, k_cache, v_cache, k):
        return anyattn.flash_attn_with_kvcache(q, k_cache, v_cache, k, k, cache_seqlens=7)

    if is_compiled:
        varlen, decode = (torch.compile(f, backend="aot_eager") for f in (varlen, decode))
    q, k, ends_q, ends_k = torch.randn(20, 4, 8), torch.randn(30, 2, 8), torch.tensor([0, 4, 20]), torch.tensor([0, 24, 30])
    named = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k, "max_seqlen_q": 16, "max_seqlen_k": 24}
    cache, new = torch.randn(2, 12, 2, 8), torch.randn(2, 1, 2, 8)
    queries = torch.randn(2, 1, 4, 8)
    for _ in range(2):
        assert torch.equal(varlen(q, k, ends_q, ends_k), anyattn.flash_attn_varlen_func(q, k, k, causal=True, **named))
        copies = [cache.clone() for _ in range(4)]
        out = decode(queries, *copies[:2], new)
        assert torch.equal(out, anyattn.flash_attn_with_kvcache(queries, *copies[2:], k=new, v=new, cache_seqlens=7))
        assert all(torch.equal(x, y) for x, y in zip(copies[:2], copies[2:], strict=True)) and not torch.equal(copies[0], cache)


BEYOND = {
    "varlen": (lambda: anyattn.flash_attn_varlen_func(Q[0], K[0], V[0], *(None,) * 4, 0.0, 0.5), r"given 9 .*at most 7 .*max_seqlen_k\)"),
    "kvcache": (lambda: anyattn.flash_attn_with_kvcache(Q, K, V, None, None, None), r"given 6 .*at most 5 .*\(rotary_cos=, rotary_sin=,"),
}


@pytest.mark.parametrize("name", BEYOND)
def test_what_they_order_differently_is_taken_by_keyword(name):
    call, words = BEYOND[name]
    for f in (call, torch.compile(call, backend="aot_eager")):
        with pytest.raises(TypeError, match=words):
            f()


def test_options_are_keywords_only():
    with pytest.raises(TypeError, match=r"given 4 positional.*at most 3 \(q, k, v\).*by keyword \(softmax_scale=, causal=") as error:
        flash_attn_func(Q, K, V, 0.5)
    assert "beyond" not in str(error.value)
