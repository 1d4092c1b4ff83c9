"""On a GPU: 8-bit caches by the Triton backend against the oracle, and by bits against the widened cache; in CUDA graphs; no waits."""

from __future__ import annotations

import importlib.util
import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.backends.triton import launch_shape, tile_config
from anyattn.call_cache import attention
from tests.support import eight_bits
from tests.support import sequences as seq
from tests.support.eight_bits import DTYPES, FORMS, ON_GPU, PLAIN_ON_GPU, Q_DTYPES, Case
from tests.support.gpu.graphs import captured
from tests.support.gpu.waiting import no_waiting
from tests.support.sequences import Meaning

if not torch.cuda.is_available() or importlib.util.find_spec("triton") is None:
    pytest.skip("needs a GPU and triton", allow_module_level=True)
pytestmark = pytest.mark.gpu

SETTINGS = ON_GPU | {
    "no pairs": replace(PLAIN_ON_GPU, d=33, dv=33),
    "many queries": replace(PLAIN_ON_GPU, cached=(700, 333, 260, 300), queries=200, d=128, dv=128),
}
MEANINGS = (
    Meaning(causal=True),
    Meaning(window_size=(90, 0), sink=torch.linspace(-1, 1, 8)),
    Meaning(causal=True, softcap=5.0),
    Meaning(causal=True, score_mod=lambda s, b, h, i, j: s + 0.01 * (i - j) * (h % 3)),
    Meaning(mask_mod=lambda b, h, i, j: (i - j) % 7 != 3),
)
MATRIX = [
    (name, MEANINGS[i % len(MEANINGS)], FORMS[i % 7], FORMS[(3 * i + i // 7) % 7], DTYPES[i % 3], Q_DTYPES[(i // 3) % 3], (0, 1, 3)[i % 3])
    for i, name in enumerate(itertools.islice(itertools.cycle(SETTINGS), 66))
]


def call(case: Case, **options) -> tuple[Tensor, Tensor]:
    return anyattn.flash_attn_with_kvcache(*case.args, return_lse=True, backend="triton", **{**case.options, **options})


# rows of a head at the same distance from a multiple of 32, 16 or 8 bytes, and behind them their scale
INLINE = {
    "32": replace(PLAIN_ON_GPU, d=128, dv=128, heads=16, kv_heads=8),
    "32, pages": replace(PLAIN_ON_GPU, d=128, dv=128, heads=16, kv_heads=8, page_size=16),
    "32, pages of 3": replace(PLAIN_ON_GPU, d=128, dv=128, heads=16, kv_heads=8, page_size=3, queries=3),
    "32, widest": replace(PLAIN_ON_GPU, d=256, dv=256, heads=16, kv_heads=8, leftpad=(5, 0, 133, 1)),
    "16": replace(PLAIN_ON_GPU, heads=16, kv_heads=4, d=80, dv=96, shuffled_rows=True),
    "16, narrow": replace(PLAIN_ON_GPU, heads=16, kv_heads=4, d=16, dv=64),
    "8": replace(PLAIN_ON_GPU, heads=16, kv_heads=2, d=128, dv=256, queries=2),
    "4": replace(PLAIN_ON_GPU, heads=8, kv_heads=1, d=128, dv=128),
}


@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "i"), [(name, i) for i, name in enumerate(INLINE)])
def test_rows_behind_which_scales_stand(name: str, i: int, dtype: torch.dtype, splits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if i % 2:  # even shares even of so few keys
        monkeypatch.setattr(launch_shape, "_LEAST_SHARED", 0)
    s = replace(INLINE[name], k_form="inline", v_form="inline", dtype=dtype, q_dtype=Q_DTYPES[(i + splits) % 3], seed=i)
    meaning = MEANINGS[(i + splits) % len(MEANINGS)]
    if meaning.sink is not None:
        meaning = replace(meaning, sink=torch.linspace(-1, 1, s.heads))
    attention.clear()
    case = eight_bits.made(s, meaning, "cuda")
    for _ in range(2):
        out, lse = (t.cpu() for t in call(case, num_splits=splits))
        seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=name)
    attention.clear()


@pytest.mark.parametrize("i", range(len(MATRIX)))
def test_against_the_oracle(i: int) -> None:
    name, meaning, k_form, v_form, dtype, q_dtype, splits = MATRIX[i]
    s = replace(SETTINGS[name], k_form=k_form, v_form=v_form, dtype=dtype, q_dtype=q_dtype, seed=i)
    if meaning.sink is not None:
        meaning = replace(meaning, sink=torch.linspace(-1, 1, s.heads))
    case = eight_bits.made(s, meaning, "cuda")
    for _ in range(2):
        out, lse = (t.cpu() for t in call(case, num_splits=splits))
        seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=str(MATRIX[i]))


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("form", ["head", "key", "inline"])
def test_scales_far_apart(form: str, q_dtype: torch.dtype) -> None:
    s = replace(PLAIN_ON_GPU, k_form=form, v_form=form, q_dtype=q_dtype, spread=16.0)
    case = eight_bits.made(s, Meaning(causal=True), "cuda")
    out, lse = (t.cpu() for t in call(case))
    seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, Meaning(causal=True), case.firsts, label=str(s))


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_widened_cache(dtype: torch.dtype, q_dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the same tiles; the bytes are all that there are, NaN and infinities left out. A query has one number that is not 0: the products
    of one query and key are added in another order if keys are loaded as 8 bits."""
    monkeypatch.setattr(tile_config, "_SHORT_8_BITS", tile_config._SHORT)
    attention.clear()
    memory = torch.randint(0, 256, (2, 4, 512, 2, 128), dtype=torch.uint8, device="cuda")
    if dtype is not torch.int8:
        memory[~memory.view(dtype).float().isfinite()] = 5
    k, v = memory.view(dtype)
    q = torch.randn(4, 2, 8, 128, device="cuda").to(q_dtype) * (1e-3 if dtype is torch.float8_e5m2 else 0.02)
    q *= torch.nn.functional.one_hot(torch.randint(0, 128, q.shape[:3], device="cuda"), 128).to(q_dtype)
    options = {"causal": True, "num_splits": 2, "backend": "triton", "return_lse": True}
    narrow = anyattn.flash_attn_with_kvcache(q, k, v, **options)
    wide = anyattn.flash_attn_with_kvcache(q, k.to(q_dtype), v.to(q_dtype), **options)
    attention.clear()
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("wide", Q_DTYPES[:2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_number_is_converted(dtype: torch.dtype, wide: torch.dtype) -> None:
    """By NVIDIA's instructions, which the interpreter does not have."""
    from tests.backends.triton.kernels.test_eight_bits_interpreted import all_pairs, same, unpack, widen

    stored, out = torch.arange(256, dtype=torch.uint8, device="cuda").view(dtype), torch.empty(256, dtype=wide, device="cuda")
    widen[(1,)](stored, out, True, 256)
    assert same(out, stored.to(wide))
    pairs = all_pairs(dtype, "cuda")
    even, odd = torch.empty(2, len(pairs), dtype=wide, device="cuda")
    unpack[(64,)](pairs, even, odd, True, len(pairs) // 64)
    assert same(even, pairs[:, 0].to(wide)) and same(odd, pairs[:, 1].to(wide))


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_reads_the_scales_anew(form: str) -> None:
    s = replace(PLAIN_ON_GPU, page_size=16, k_form=form, v_form=form)
    case, other = (eight_bits.made(replace(s, seed=seed), Meaning(causal=True), "cuda") for seed in (0, 1))
    wanted = [call(c) for c in (other, case)]
    with no_waiting():
        call(case)
    graph, found = captured(lambda: call(case))
    case.copy_(other)
    graph.replay()
    assert all(map(torch.equal, found, wanted[0]))


def test_hidden_and_unread_scales_never_matter() -> None:
    q, cache = torch.randn(2, 1, 4, 64, device="cuda").half(), torch.randn(2, 512, 2, 64, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.ones(2, 512, 2, device="cuda")
    options = {"cache_seqlens": torch.tensor([300, 17], dtype=torch.int32, device="cuda"), "window_size": (40, 0), "backend": "triton"}
    for dtype in (torch.float16, torch.bfloat16):
        wanted = anyattn.flash_attn_with_kvcache(q.to(dtype), cache, cache, k_descale=scales, v_descale=scales, **options)
        for wrong in (math.nan, math.inf, -1.0, 0.0):
            holes = scales.clone()
            holes[0, :250], holes[:, 310:], holes[1, 17:] = wrong, wrong, wrong
            found = anyattn.flash_attn_with_kvcache(q.to(dtype), cache, cache, k_descale=holes, v_descale=holes, **options)
            assert torch.equal(found, wanted), wrong


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("page_size", [0, 16])
def test_varlen(page_size: int, form: str) -> None:
    s = replace(PLAIN_ON_GPU, cached=(700, 533, 260, 301), queries=150, page_size=page_size, k_form=form, v_form=form, d=128, dv=128)
    meaning = Meaning(causal=True, softcap=8.0)
    case = eight_bits.made(s, meaning, "cuda")
    options = dict(case.options)
    used = options.pop("cache_seqlens")
    for backend in ("triton", None):
        out, lse = anyattn.flash_attn_varlen_func(*case.args, seqused_k=used, return_lse=True, backend=backend, **options)
        seq.judge({"out": list(out.cpu().transpose(1, 2)), "lse": list(lse.cpu())}, case.batch, meaning, label=str(s))


@pytest.mark.parametrize("form", ["number", "head", "key"])
def test_compiled(form: str) -> None:
    case = eight_bits.made(replace(PLAIN_ON_GPU, page_size=16, k_form=form, v_form=form), Meaning(causal=True), "cuda")
    torch._dynamo.reset()
    step = torch.compile(anyattn.flash_attn_with_kvcache, fullgraph=True)
    assert torch.equal(step(*case.args, **case.options), anyattn.flash_attn_with_kvcache(*case.args, **case.options))
