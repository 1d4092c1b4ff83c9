"""On a Hopper GPU: prefill from 8-bit caches and from pages over gathered keys, against the oracle, and by bits; graphs; no waits."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention
from tests.support import eight_bits
from tests.support import sequences as seq
from tests.support.eight_bits import DTYPES, FORMS, PLAIN_ON_GPU, Case
from tests.support.gpu.graphs import captured
from tests.support.gpu.waiting import no_waiting
from tests.support.sequences import Meaning

if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0) or importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs a Hopper GPU, triton and nvidia-cutlass-dsl", allow_module_level=True)
pytestmark = pytest.mark.gpu

MANY = replace(PLAIN_ON_GPU, cached=(700, 333, 260, 300), queries=200, d=128, dv=128, page_size=16)
SETTINGS = {
    "pages of 16": MANY,
    "pages of 3": replace(MANY, page_size=3),
    "rows": replace(MANY, page_size=0),
    "other rows": replace(MANY, page_size=0, shuffled_rows=True),
    "padding": replace(MANY, leftpad=(5, 0, 33, 1)),
    "narrow": replace(MANY, d=64, dv=64),
    "odd": replace(MANY, d=72, dv=40, heads=10),
    "wide": replace(MANY, d=256, dv=256, queries=130),
    "no keys": replace(MANY, cached=(700, 0, 64, 300)),
}
MEANINGS = (
    Meaning(causal=True),
    Meaning(window_size=(90, 0)),
    Meaning(causal=True, softcap=5.0),
    Meaning(causal=True, score_mod=lambda s, b, h, i, j: s + 0.01 * (i - j) * (h % 3)),
    Meaning(mask_mod=lambda b, h, i, j: (i - j) % 7 != 3),
)
MATRIX = [
    (name, MEANINGS[(i + i // 7) % len(MEANINGS)], form, FORMS[(3 * i + 2) % 7], DTYPES[(i + i // 3) % 3])
    for i, (name, form) in enumerate((name, form) for name in SETTINGS for form in FORMS)
]


def call(case: Case, **options) -> tuple[Tensor, Tensor]:
    return anyattn.flash_attn_with_kvcache(*case.args, return_lse=True, backend="hopper", **{**case.options, **options})


@pytest.mark.parametrize("i", range(len(MATRIX)))
def test_against_the_oracle(i: int) -> None:
    name, meaning, k_form, v_form, dtype = MATRIX[i]
    s = replace(SETTINGS[name], k_form=k_form, v_form=v_form, dtype=dtype, seed=i)
    case = eight_bits.made(s, meaning, "cuda")
    for _ in range(2):
        out, lse = (t.cpu() for t in call(case))
        seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=str(MATRIX[i]))


@pytest.mark.parametrize("q_dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bits_of_the_widened_cache(dtype: torch.dtype, q_dtype: torch.dtype) -> None:
    """Of the same kernel over a contiguous cache; the bytes are all that there are, NaN and infinities left out."""
    memory = torch.randint(0, 256, (2, 4 * 32, 16, 2, 128), dtype=torch.uint8, device="cuda")
    if dtype is not torch.int8:
        memory[~memory.view(dtype).float().isfinite()] = 5
    k, v = memory.view(dtype)
    table = torch.randperm(128, device="cuda").int().view(4, 32)
    used = torch.tensor([512, 300, 1, 77], dtype=torch.int32, device="cuda")
    q = torch.randn(4, 200, 8, 128, device="cuda").to(q_dtype) * (1e-3 if dtype is torch.float8_e5m2 else 0.02)
    options = {"causal": True, "backend": "hopper", "return_lse": True, "seqused_k": used}
    narrow = anyattn.flash_attn_varlen_func(q, k, v, page_table=table, **options)
    rows = [t[table.flatten()].view(4, 512, 2, 128) for t in (k.to(q_dtype), v.to(q_dtype))]
    wide = anyattn.flash_attn_varlen_func(q, *rows, **options)
    assert all(torch.equal(a, b) for a, b in zip(narrow, wide, strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_graph_reads_tables_and_scales_anew(form: str) -> None:
    s = replace(MANY, k_form=form, v_form=form)
    case, other = (eight_bits.made(replace(s, seed=seed), Meaning(causal=True), "cuda") for seed in (0, 1))
    wanted = [call(c) for c in (other, case)]
    with no_waiting():
        call(case)
    graph, found = captured(lambda: call(case))
    case.copy_(other)
    graph.replay()
    assert all(map(torch.equal, found, wanted[0]))


@pytest.mark.parametrize("form", ["none", "head", "key"])
def test_replays_of_varlen_calls(form: str) -> None:
    attention.clear()
    s = replace(MANY, k_form=form, v_form=form, queries=256, heads=20)  # chosen for as many rows
    for seed in range(10):  # all warm calls but the first few are replays, of tensors at other addresses
        case = eight_bits.made(replace(s, seed=seed), Meaning(causal=True), "cuda")
        options = dict(case.options)
        options["seqused_k"] = options.pop("cache_seqlens")
        found = anyattn.flash_attn_varlen_func(*case.args, return_lse=True, **options)
        attention_alone = anyattn.flash_attn_varlen_func(*case.args, return_lse=True, backend="hopper", **options)
        assert all(map(torch.equal, found, attention_alone))
    out, lse = (t.cpu() for t in found)
    seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, Meaning(causal=True))


def test_pages_of_16_bits() -> None:
    case = eight_bits.made(replace(MANY, k_form="none", v_form="none"), Meaning(causal=True), "cuda")
    wide = eight_bits.widened(case, torch.bfloat16)
    assert all(map(torch.equal, call(case), call(wide)))


def test_appending_comes_first() -> None:
    """The new rows are quantised into the pages that the same call then gathers, as by a call that does not gather."""
    case = eight_bits.made(replace(MANY, k_form="key", v_form="key", queries=130), Meaning(causal=True), "cuda")
    g = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(4, 130, 2, 128, generator=g, device="cuda").bfloat16() for _ in range(2))
    apart = [t.clone() if t.element_size() > 1 else t.view(torch.uint8).clone().view(t.dtype) for t in case.args]
    scales = {n: case.options[n].clone() for n in ("k_descale", "v_descale")}
    together = call(case, k=k, v=v)
    later = case.options["cache_seqlens"] + 130
    anyattn.flash_attn_with_kvcache(*apart, k=k, v=v, backend="triton", **{**case.options, **scales})
    again = call(case, cache_seqlens=later)
    assert all(map(torch.equal, together, again))
    for mine, theirs in zip(case.args[1:], apart[1:], strict=True):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
