"""Bad input: an error of the right type that names the argument, what came, what was wanted and a way out, before any work is done."""

from __future__ import annotations

import re

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import anyattn
from anyattn import masks, scores
from anyattn.backends.torch import api

Q = torch.randn(2, 4, 16, 8)
K = torch.randn(2, 4, 24, 8)
V = torch.randn(2, 4, 24, 8)
META = torch.device("meta")


def flex(q=Q, k=K, v=V, **options):
    return anyattn.flex_attention(q, k, v, **options)


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def blocks(*lengths, heads=None, batch=None):
    return anyattn.create_block_mask(causal, batch, heads, *lengths, device="cpu")


# name: (call, error, what the message must say: the argument, what came, what was wanted, the cure)
CASES = {
    "query not a tensor": (lambda: flex(q=[1.0]), TypeError, ["query", "list", "Tensor"]),
    "query of rank 3": (lambda: flex(q=Q[0]), ValueError, ["query", r"\(4, 16, 8\)", "4 dimensions", "unsqueeze"]),
    "key of rank 5": (lambda: flex(k=K[None]), ValueError, ["key", r"\(1, 2, 4, 24, 8\)", "4 dimensions"]),
    "value of rank 2": (lambda: flex(v=V[0, 0]), ValueError, ["value", r"\(24, 8\)", "4 dimensions"]),
    "integer query": (lambda: flex(q=Q.long()), TypeError, ["query", "int64", "float32", r"\.to\("]),
    "mixed dtypes": (lambda: flex(k=K.half()), TypeError, ["key", "float16", "float32", r"\.to\("]),
    "mixed devices": (lambda: flex(k=K.to(META)), ValueError, ["key", "meta", "cpu", r"\.to\("]),
    "head_dim differs": (lambda: flex(k=K[..., :4]), ValueError, ["key", "4", "8", "same"]),
    "value's length differs": (lambda: flex(v=V[:, :, :9]), ValueError, ["value", "9", "24", "same"]),
    "value's heads differ": (lambda: flex(v=V[:, :2]), ValueError, ["value", "2", "4"]),
    "batch differs": (lambda: flex(q=torch.randn(3, 4, 16, 8)), ValueError, ["key", "batch 2", "3", "1 to share"]),
    "head_dim 0": (lambda: flex(q=Q[..., :0], k=K[..., :0]), ValueError, ["query", "head_dim 0", "at least 1"]),
    "heads without enable_gqa": (lambda: flex(k=K[:, :2], v=V[:, :2]), ValueError, ["4 heads", "2", "enable_gqa=True"]),
    "head ratio": (lambda: flex(k=K[:, :3], v=V[:, :3], enable_gqa=True), ValueError, ["4 heads", "3", "multiple"]),
    "more kv heads": (lambda: flex(q=Q[:, :2], enable_gqa=True), ValueError, ["2 heads", "4", "multiple"]),
    "scale a string": (lambda: flex(scale="big"), TypeError, ["scale", "str", "number", "None"]),
    "scale NaN": (lambda: flex(scale=float("nan")), ValueError, ["scale", "nan", "finite"]),
    "sink of wrong length": (lambda: flex(sink=torch.zeros(3)), ValueError, ["sink", r"\(3,\)", r"\(4,\)", "per query head"]),
    "sink of integers": (lambda: flex(sink=torch.zeros(4).long()), ValueError, ["sink", "int64", "float"]),
    "sink a list": (lambda: flex(sink=[0.0] * 4), TypeError, ["sink", "list", "tensor"]),
    "sink elsewhere": (lambda: flex(sink=torch.zeros(4, device=META)), ValueError, ["sink", "meta", "cpu", r"\.to\("]),
    "unknown backend": (lambda: flex(backend="cudnn"), ValueError, ["backend", "cudnn", "torch", "None"]),
    "backend not a string": (lambda: flex(backend=3), (TypeError, ValueError), ["backend", "3", "torch"]),
    "kernel_options a list": (lambda: flex(kernel_options=[1]), TypeError, ["kernel_options", "list", "dict"]),
    "kernel_options unknown": (lambda: flex(kernel_options={"tile": 3}), ValueError, ["kernel_options", "'tile'", "tile_m"]),
    "kernel_options, a backend": (lambda: flex(kernel_options={"fwd_BACKEND": "no"}), ValueError, ["fwd_BACKEND", "'no'", "'FLASH'"]),
    "kernel_options, prefixes": (lambda: flex(kernel_options={"fwd_bwd_BLOCK_M": 3}), ValueError, ["'fwd_bwd_BLOCK_M'", "prefix"]),
    "kernel_options, a prefix of ours": (lambda: flex(kernel_options={"fwd_tile_m": 3}), ValueError, ["'fwd_tile_m'"]),
    "kernel_options negative": (lambda: flex(kernel_options={"tile_m": -3}), ValueError, ["tile_m", "-3", "positive int"]),
    "both return_lse and return_aux": (
        lambda: flex(return_lse=True, return_aux=anyattn.AuxRequest(lse=True)),
        ValueError,
        ["return_lse", "return_aux", "one of them"],
    ),
    "return_aux a bool": (lambda: flex(return_aux=True), TypeError, ["return_aux", "bool", "AuxRequest"]),
    "block_mask a function": (lambda: flex(block_mask=causal), TypeError, ["block_mask", "function", "BlockMask", "mask_mod"]),
    "block_mask a tensor": (lambda: flex(block_mask=Q), TypeError, ["block_mask", "Tensor", "create_block_mask"]),
    "block_mask of other lengths": (
        lambda: flex(block_mask=blocks(128, 24)),
        ValueError,
        ["block_mask", "128, 24", "16, 24", "create_block_mask"],
    ),
    "block_mask of other heads": (lambda: flex(block_mask=blocks(16, 24, heads=3)), ValueError, ["block_mask", "3", "4", "1"]),
    "block_mask of other batch": (lambda: flex(block_mask=blocks(16, 24, batch=3)), ValueError, ["block_mask", "batch 3", "2"]),
    "score_mod a number": (lambda: flex(score_mod=1.0), TypeError, ["score_mod", "float", "function"]),
    "score_mod with four arguments": (lambda: flex(score_mod=causal), TypeError, ["score_mod", "causal", "4 arguments", "5"]),
    "mask_mod with three arguments": (lambda: flex(mask_mod=lambda b, h, q: q), TypeError, ["mask_mod", "3 arguments", "4"]),
    "mask_mod with five required": (lambda: flex(mask_mod=lambda b, h, q, k, aux: q), TypeError, ["mask_mod", "aux_tensors"]),
    "mask_mod that returns a number": (lambda: flex(mask_mod=lambda b, h, q, k: q - k), ValueError, ["mask_mod", "bool"]),
    "mask_mod that returns nothing": (lambda: flex(mask_mod=lambda b, h, q, k: None), ValueError, ["mask_mod", "nothing", "return"]),
    "score_mod that returns a bool": (lambda: flex(score_mod=lambda s, b, h, q, k: q > k), ValueError, ["score_mod", "bool", "mask_mod"]),
    "and": (lambda: flex(mask_mod=lambda b, h, q, k: q >= k and k > 3), anyattn.ModError, ["q >= k and k > 3", "&"]),
    "chained comparison": (lambda: flex(mask_mod=lambda b, h, q, k: 0 <= k <= q), anyattn.ModError, ["0 <= k <= q", "&"]),
    "if on an index": (lambda: flex(score_mod=lambda s, b, h, q, k: s if q > k else s * 2), anyattn.ModError, ["if q > k", "where"]),
    "table too short for keys": (
        lambda: flex(score_mod=lambda s, b, h, q, k: s + SHORT[k]),
        (IndexError, ValueError),
        ["score_mod", "10", "clamp"],
    ),
    "table too short for a distance": (
        lambda: flex(score_mod=lambda s, b, h, q, k: s + SHORT[abs(q - k)]),
        (IndexError, ValueError),
        ["score_mod", "10", "clamp"],
    ),
    "table indexed below its start": (
        lambda: flex(mask_mod=lambda b, h, q, k: SHORT[q - k] > 0),
        (IndexError, ValueError),
        ["mask_mod", "10", "index -11 .*kv_idx=11"],
    ),
    "table of heads too short": (
        lambda: flex(score_mod=lambda s, b, h, q, k: s + SHORT[:3][h]),
        (IndexError, ValueError),
        ["score_mod", "3"],
    ),
    "captured tensor elsewhere": (
        lambda: flex(score_mod=lambda s, b, h, q, k: s + ELSEWHERE[k]),
        ValueError,
        ["score_mod", "meta", "cpu", r"\.to\("],
    ),
    "aux_tensors a tensor": (lambda: flex(aux_tensors=Q), TypeError, ["aux_tensors", "Tensor", "list"]),
    "aux_tensors of a number": (lambda: flex(aux_tensors=[1]), TypeError, ["aux_tensors", "int", "Tensor"]),
    "causal offset a float": (lambda: masks.causal(0.5), TypeError, ["offset", "0.5", "int"]),
    "window a float": (lambda: masks.sliding_window(2.5, 0), TypeError, ["left", "2.5", "int"]),
    "window a bool": (lambda: masks.sliding_window(True, 0), TypeError, ["left", "True", "int"]),
    "chunk of 0": (lambda: masks.chunked(0), ValueError, ["chunk", "0", "at least 1"]),
    "document ids of floats": (lambda: masks.document(torch.zeros(9)), (TypeError, ValueError), ["ids", "float32", "integer"]),
    "document ids of rank 3": (lambda: masks.document(torch.zeros(1, 1, 9).long()), ValueError, ["ids", r"\(1, 1, 9\)"]),
    "slopes of integers": (lambda: scores.alibi(torch.ones(4).long()), (TypeError, ValueError), ["slopes", "int64"]),
    "softcap of 0": (lambda: scores.softcap(0.0), ValueError, ["cap", "0"]),
    "softcap negative": (lambda: scores.softcap(-3.0), ValueError, ["cap", "-3"]),
    "block size 0": (lambda: anyattn.create_block_mask(causal, 1, 1, 8, 8, BLOCK_SIZE=0), ValueError, ["BLOCK_SIZE", "0"]),
    "negative length": (lambda: anyattn.create_block_mask(causal, 1, 1, -8, 8), ValueError, ["Q_LEN", "-8"]),
    "length a float": (lambda: anyattn.create_block_mask(causal, 1, 1, 8.0, 8), TypeError, ["Q_LEN", "8.0|float", "int"]),
    "batch a string": (lambda: anyattn.create_block_mask(causal, "b", 1, 8, 8), TypeError, ["B", "str|'b'", "int"]),
}  # fmt: skip
SHORT = torch.arange(10.0)
ELSEWHERE = torch.zeros(24, device=META)


@pytest.mark.parametrize("name", CASES)
def test_message(name, monkeypatch):
    call, error, words = CASES[name]
    worked = []
    monkeypatch.setattr(api, "cover", lambda *a: worked.append(a))
    with pytest.raises(error) as caught:
        call()
    text = str(caught.value)
    missing = [w for w in words if not re.search(w, text)]
    assert not missing, f"{missing} not in: {text}"
    assert not worked, "work was begun before the error"


def test_a_missing_key_is_pythons_own_error():
    with pytest.raises(TypeError, match="missing"):
        anyattn.flex_attention(Q, K)


def test_an_index_in_range_only_where_the_mask_allows_is_in_range():
    """Mods are evaluated over whole tiles, but what a hidden pair reads never counts: one key more that is seen, and it is refused."""
    table = torch.arange(16.0)
    biased = lambda s, b, h, q, k: s + table[k]
    seen = flex(score_mod=biased, mask_mod=lambda b, h, q, k: k < 16)
    assert torch.equal(seen, flex(score_mod=lambda s, b, h, q, k: s + table[torch.clamp(k, 0, 15)], mask_mod=lambda b, h, q, k: k < 16))
    with pytest.raises(ValueError, match=r"index 16 .*clamp"):
        flex(score_mod=biased, mask_mod=lambda b, h, q, k: k < 17)


@pytest.mark.parametrize("scale", [1e300, -3.5e38, 3e38, 10**400])
def test_a_scale_that_float32_does_not_hold(scale):
    """First calls, known ones and compiled ones; inputs of float64 have scores of float64."""
    packed = [t.transpose(1, 2) for t in (Q, K, V)]
    compiled = torch.compile(lambda s: flex(scale=s), backend="eager")
    flex(scale=2.0), anyattn.flash_attn_func(*packed, softmax_scale=2.0)
    calls = [lambda: flex(scale=scale), lambda: anyattn.flash_attn_func(*packed, softmax_scale=scale)]
    for call in calls + [lambda: compiled(scale)] * isinstance(scale, float):
        with pytest.raises((ValueError, RuntimeError), match=r"scale=.*; wanted (at most 2.34e\+38|a finite number)"):
            call()
    if isinstance(scale, float):
        double = [t.double() * 1e-300 for t in (Q, K, V)]
        assert bool(anyattn.flex_attention(*double, scale=scale).isfinite().all())


def test_the_largest_scale_is_computed():
    nought = torch.zeros(1, 1, 8, 16, requires_grad=True)
    out = anyattn.flex_attention(nought, nought, nought, scale=2.3e38)
    out.sum().backward()
    assert bool(out.isfinite().all()) and bool(nought.grad.isfinite().all())


@pytest.mark.parametrize("heads", [(0, 2), (2, 0)])
def test_no_heads_beside_some(heads):
    q, k = (torch.randn(1, n, 8, 16) for n in heads)
    with pytest.raises(ValueError, match=r"query has \d heads, not a multiple of the \d of key and value"):
        anyattn.flex_attention(q, k, k, enable_gqa=True)
    q, k = q.transpose(1, 2), k.transpose(1, 2)
    with pytest.raises(ValueError, match=r"heads"):
        anyattn.flash_attn_func(q, k, k)


def test_a_softcap_that_float32_does_not_hold():
    packed = [t.transpose(1, 2) for t in (Q, K, V)]
    for softcap, wanted in (
        (1e300, r"softcap=1e[+]?300; wanted at most"),
        (1e-300, r"softcap=1e-300; wanted at least"),
        (10**400, "wanted"),
    ):
        with pytest.raises(ValueError, match=wanted):
            anyattn.flash_attn_func(*packed, softcap=softcap)
    for softcap in (1e300, 1e-300):
        assert bool(anyattn.flash_attn_func(*[t.double() for t in packed], softcap=softcap).isfinite().all())


def test_more_splits_than_are_worth_anything_are_bounded():
    """In the time of a few hundred partial results, and an explanation says so."""
    packed = [t.transpose(1, 2) for t in (Q, K, V)]
    most = anyattn.flash_attn_func(*packed, num_splits=256, causal=True)
    assert torch.equal(anyattn.flash_attn_func(*packed, num_splits=10**6, causal=True), most)
    cached = lambda n: anyattn.flash_attn_with_kvcache(packed[0], *packed[1:], num_splits=n)
    assert torch.equal(cached(10**6), cached(256))
    assert torch.equal(flex(kernel_options={"num_splits": 10**6}), flex(kernel_options={"num_splits": 256}))
    told = anyattn.explain(Q, K, V, enable_gqa=True, kernel_options={"num_splits": 10**6})
    assert told.plan.num_splits == 256 and "keys in 256 pieces, not 1000000" in str(told)


@pytest.mark.parametrize("device", ["nonsense", "cuda:x", 3.5, *([] if torch.cuda.is_available() else ["cuda", "cuda:1"])])
def test_devices_that_there_are_not(device):
    causal, ends = anyattn.masks.causal(), torch.tensor([0, 16])
    for call in (
        lambda: anyattn.create_block_mask(causal, 1, 1, 16, 16, device=device),
        lambda: anyattn.compute_block_sparsity(16, 16, 1, 1, 16, 16, causal, device=device),
        lambda: anyattn.compute_varlen_block_sparsity(16, 16, 1, causal, cu_seqlens_q=ends, cu_seqlens_k=ends, device=device),
    ):
        with pytest.raises(ValueError, match=r"device is .*; wanted"):
            call()


def test_torchs_kernel_options_are_accepted_with_its_prefixes():
    """torch.nn.attention.flex_attention.FlexKernelOptions: any option may be for one pass alone."""
    names = torch_flex.FlexKernelOptions.__annotations__
    for prefix in ("", "fwd_", "bwd_"):
        options = {prefix + name: "TRITON_DECODE" if name == "BACKEND" else 32 for name in names}
        assert torch.equal(flex(kernel_options=options), flex())
