"""8-bit keys and values: every form of scales against the oracle, the bits of the widened cache, and errors."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import anyattn
from anyattn import oracle, planner
from anyattn.call_cache import attention
from anyattn.testing import budget
from anyattn.validate import flash
from tests.support import poison
from tests.support import sequences as seq
from tests.support.compiling import fresh
from tests.support.eight_bits import DTYPES, FORMS, Q_DTYPES, SETTINGS, Case, Setting, made, widened
from tests.support.sequences import Meaning

TABLE = torch.linspace(-1.5, 1.5, 4 * 120, dtype=torch.float64).view(4, 120)
MEANINGS = {
    "full": Meaning(),
    "causal": Meaning(causal=True),
    "window": Meaning(window_size=(9, 0)),
    "alibi": Meaning(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "sink and softcap": Meaning(causal=True, softcap=3.0, sink=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "mods": Meaning(score_mod=lambda s, b, h, i, j: s + TABLE[h, i] * (b + 1) - TABLE[h, j], mask_mod=lambda b, h, i, j: (i - j) % 7 != 3),
}


def call(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    with poison.enabled():
        return anyattn.flash_attn_with_kvcache(*case.args, return_lse=True, **{**case.options, **options})


def check(s: Setting, meaning: Meaning, **options: Any) -> None:
    case = made(s, meaning)
    for _ in range(2):  # a first call, and a warm one
        out, lse = call(case, **options)
        seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=str(s))


def formed(s: Setting, k_form: str, v_form: str) -> Setting:
    return replace(s, k_form=k_form, v_form=v_form)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("dtype", "q_dtype"), [(DTYPES[i % 3], Q_DTYPES[(i + i // 3) % 3]) for i in range(6)])
@pytest.mark.parametrize(("k_form", "v_form"), [(form, FORMS[(3 * i + 2) % 7]) for i, form in enumerate(FORMS)])
@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("name", SETTINGS)
def test_against_the_oracle(name, meaning, k_form, v_form, dtype, q_dtype) -> None:
    check(replace(formed(SETTINGS[name], k_form, v_form), dtype=dtype, q_dtype=q_dtype), MEANINGS[meaning])


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("form", ["none", "head", "key", "inline"])
def test_long_caches_splits_and_scales_far_apart(form, q_dtype) -> None:
    s = replace(formed(Setting(cached=(600, 1100, 3), capacity=1150, queries=2, spread=24.0), form, form), q_dtype=q_dtype)
    for page_size in (0, 64):
        for splits in (1, 3):
            check(replace(s, page_size=page_size), Meaning(causal=True), num_splits=splits)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("meaning", MEANINGS)
def test_without_scales_bits_are_those_of_the_widened_cache(meaning, q_dtype, dtype) -> None:
    for name in ("plain", "pages of 16", "left padding", "several queries"):
        case = made(replace(formed(SETTINGS[name], "none", "none"), dtype=dtype, q_dtype=q_dtype), MEANINGS[meaning])
        wide = call(widened(case, q_dtype))
        for scales in ({}, {"k_descale": 1.0, "v_descale": 1}):
            assert all(map(torch.equal, call(case, **scales), wide))


def test_packed_queries() -> None:
    cached, counts = (20, 7, 33), [3, 0, 6]
    case = made(Setting(cached=cached, k_form="key", v_form="page"))
    queries = seq.ragged(counts, cached, 4, 2, 16, 16, torch.bfloat16)
    options = case.options | {"cu_seqlens_q": seq.ends(counts), "causal": True, "return_lse": True}
    out, lse = anyattn.flash_attn_with_kvcache(seq.packed(queries.q), *case.args[1:], **options)
    batch = seq.Ragged(queries.q, case.batch.k, case.batch.v, queries.dout)
    firsts = [n - m for n, m in zip(cached, counts, strict=True)]
    seq.judge({"out": seq.unpacked(out, counts), "lse": list(lse.split(counts, 1))}, batch, Meaning(causal=True), firsts)


def varlen(case: Case, s: Setting) -> tuple[tuple, dict[str, Any]]:
    """The same sequences for ``flash_attn_varlen_func``."""
    options = dict(case.options)
    used = options.pop("cache_seqlens")
    return case.args, options | {"seqused_k": used}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("form", FORMS)
def test_varlen_from_pages_and_padded_rows(form, page_size, dtype) -> None:
    for meaning in (Meaning(causal=True), Meaning(window_size=(30, 0), softcap=4.0)):
        s = replace(formed(Setting(page_size=page_size, queries=5, dtype=dtype), form, form), cached=(40, 9, 63))
        case = made(s, meaning)
        args, options = varlen(case, s)
        with torch.no_grad(), poison.enabled():
            out, lse = anyattn.flash_attn_varlen_func(*args, return_lse=True, **options)
        seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning)


def test_varlen_packed_keys() -> None:
    counts_q, counts_k = [3, 17, 5], [9, 40, 5]
    g = torch.Generator().manual_seed(0)
    batch = seq.ragged(counts_q, counts_k, 4, 2, 16, 16, torch.bfloat16)
    k, v = (seq.packed(part).to(torch.float8_e4m3fn) for part in (batch.k, batch.v))
    of_keys, of_entries = torch.rand(1, len(k), 2, generator=g), torch.rand(3, 2, generator=g)
    for k_descale, v_descale in ((of_keys, of_entries), (of_entries, of_keys)):
        ends = seq.ends(counts_q), seq.ends(counts_k)
        wide = []
        for stored, descale in ((k, k_descale), (v, v_descale)):
            parts = [t.double() for t in seq.unpacked(stored, counts_k)]
            factors = [t.T for t in descale[0].split(counts_k)] if descale.ndim == 3 else list(descale[..., None])
            wide.append([p * f.double()[..., None] for p, f in zip(parts, factors, strict=True)])
        out = anyattn.flash_attn_varlen_func(seq.packed(batch.q), k, v, *ends, causal=True, k_descale=k_descale, v_descale=v_descale)
        whole = seq.Ragged(batch.q, *wide, batch.dout)
        seq.judge({"out": seq.unpacked(out, counts_q)}, whole, Meaning(causal=True))


def test_block_lists() -> None:
    ends_q, ends_k = seq.ends([40, 35]), seq.ends([60, 50])
    mask = lambda b, h, i, j: (i + j) % 3 != 0
    tables = {"cu_seqlens_q": ends_q, "cu_seqlens_k": ends_k}
    lists = anyattn.compute_varlen_block_sparsity(16, 16, 4, mask_mod=mask, **tables)
    batch = seq.ragged([40, 35], [60, 50], 4, 2, 16, 16, torch.bfloat16)
    k, v = (seq.packed(part).to(torch.float8_e4m3fn) for part in (batch.k, batch.v))
    factors = torch.rand(1, len(k), 2) + 0.5
    options = {"mask_mod": mask, "block_sparse_tensors": lists, "k_descale": factors, "v_descale": factors, **tables}
    wide = [seq.unpacked(t.double() * factors[0, ..., None].double(), [60, 50]) for t in (k, v)]
    whole = seq.Ragged(batch.q, *wide, batch.dout)
    out = anyattn.flash_attn_varlen_func(seq.packed(batch.q), k, v, **options)
    seq.judge({"out": seq.unpacked(out, [40, 35])}, whole, Meaning(mask_mod=mask))
    call, _ = fresh(lambda q, k, v: anyattn.flash_attn_varlen_func(q, k, v, **options))
    assert torch.equal(call(seq.packed(batch.q), k, v), out)


def test_scales_of_what_no_query_reads_never_matter() -> None:
    """NaN behind the sequences' ends, in padding and in unused pages is in every case of this file; here entries have no keys at all."""
    q, cache = torch.randn(2, 1, 2, 16), torch.randn(2, 8, 2, 16).to(torch.float8_e5m2)
    scales = torch.tensor([[math.nan, math.nan], [1.5, 0.5]])
    lengths = torch.tensor([0, 8])
    out, lse = anyattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=lengths, k_descale=scales, v_descale=scales, return_lse=True)
    assert not out[0].any() and bool((lse[0] == -math.inf).all()) and bool(out[1].isfinite().all())


def test_the_batch_changes_no_bit_of_an_entry() -> None:
    for form in ("head", "key"):
        case = made(formed(Setting(cached=(40, 7, 63), queries=2), form, form), Meaning(causal=True))
        out, lse = call(case)
        for b in range(3):
            alone = {n: t[b : b + 1] if isinstance(t, Tensor) else t for n, t in case.options.items()}
            one = call(Case(tuple(t[b : b + 1] for t in case.args), alone, case.batch))  # type: ignore[arg-type]
            assert torch.equal(one[0][0], out[b]) and torch.equal(one[1][0], lse[b])


def test_warm_calls_read_other_scales() -> None:
    case = made(formed(SETTINGS["pages of 16"], "key", "head"), Meaning(causal=True))
    first = call(case)
    size = attention.size()
    doubled = call(case, v_descale=case.options["v_descale"] * 2)
    assert torch.equal(doubled[0], first[0] * 2) and torch.equal(doubled[1], first[1])
    assert attention.size() == size
    numbers = [call(case, v_descale=number)[0] for number in (0.5, 2.0, 0.5)]
    assert torch.equal(numbers[0] * 4, numbers[1]) and torch.equal(numbers[0], numbers[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_oracle_dequantises(dtype) -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 1, 5, 8)
    stored, descale = (k * 20).to(dtype), torch.rand(1, 1, 5)
    found = oracle.attention(q, stored, stored, k_descale=descale, v_descale=descale)
    wide = stored.double() * descale.double()[..., None]
    assert torch.equal(found.out, oracle.attention(q, wide, wide).out)
    plain = oracle.same_dtype(q, stored, stored, k_descale=descale, v_descale=descale)
    assert plain.out.dtype is torch.float32
    budget.check("the plain formula", plain.out, found.out, oracle.same_dtype(q, wide.float(), wide.float()).out)


# ---- errors


def given(**changes: Any) -> dict[str, Any]:
    cache = torch.zeros(2, 8, 2, 16, dtype=torch.float8_e4m3fn)
    return {"q": torch.randn(2, 1, 4, 16), "k_cache": cache, "v_cache": cache, "cache_seqlens": torch.tensor([8, 5])} | changes


_BYTES, _WIDE = torch.zeros(2, 8, 2, 16, dtype=torch.uint8), torch.zeros(2, 8, 2, 16)
_HOLE = torch.ones(2, 8, 2)
_HOLE[1, 4, 1] = math.nan
WRONG = {
    "bytes": (given(k_cache=_BYTES, v_cache=_BYTES), TypeError, r"k_cache has dtype torch.uint8.*k_cache.view\(torch.float8_e4m3fn\)"),
    "two dtypes": (given(v_cache=torch.zeros(2, 8, 2, 16, dtype=torch.int8)), TypeError, "v_cache has dtype torch.int8 but k_cache has"),
    "one of 8 bits": (given(v_cache=_WIDE), TypeError, "v_cache has dtype torch.float32 but k_cache has torch.float8_e4m3fn"),
    "fnuz": (given(**dict.fromkeys(("k_cache", "v_cache"), _BYTES.view(torch.float8_e4m3fnuz))), TypeError, "fnuz; of 8 bits wanted"),
    "a string": (given(k_descale="1"), TypeError, "k_descale is a str; wanted None, a number or a float32 tensor"),
    "a bool": (given(v_descale=True), TypeError, "v_descale is a bool"),
    "zero": (given(v_descale=0.0), ValueError, "v_descale=0.0; wanted a normal float32 number above 0"),
    "negative": (given(k_descale=-1.0), ValueError, "k_descale=-1.0; wanted"),
    "nan": (given(k_descale=math.nan), ValueError, "k_descale=nan; wanted"),
    "inf": (given(k_descale=math.inf), ValueError, "k_descale=inf; wanted"),
    "double": (given(k_descale=torch.ones(1, dtype=torch.float64)), TypeError, "k_descale has dtype torch.float64; wanted torch.float32"),
    "shape": (given(k_descale=torch.ones(3, 2)), ValueError, r"k_descale has shape \(3, 2\); wanted one element, \(2, 2\)"),
    "rank": (given(v_descale=torch.ones(2, 8, 2, 1)), ValueError, r"v_descale has shape \(2, 8, 2, 1\); wanted one element"),
    "heads first": (given(v_descale=torch.ones(2, 2, 8)), ValueError, r"wanted one element, .* or \(2, 8, 2\)"),
    "device": (given(k_descale=torch.ones(1, device="meta")), ValueError, "k_descale is on meta but k is on cpu"),
    "hole": (given(k_descale=_HOLE), ValueError, "k_descale is nan for batch entry 1, K/V head 1, key 4; wanted a finite number above 0"),
    "zero of a head": (given(v_descale=torch.tensor([[1.0, 0], [1, 1]])), ValueError, "v_descale is 0.0 for batch entry 0, K/V head 1;"),
    "wide cache": (given(k_cache=_WIDE, v_cache=_WIDE, k_descale=2.0), ValueError, "k_descale is given for keys of torch.float32"),
    "wide cache, tensor": (given(k_cache=_WIDE, v_cache=_WIDE, v_descale=torch.ones(2, 2)), ValueError, "multiply the output"),
    "q_descale": (given(q_descale=torch.ones(2, 2)), ValueError, "q_descale is a Tensor; wanted None"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name) -> None:
    arguments, error, message = WRONG[name]
    with pytest.raises(error, match=message):
        anyattn.flash_attn_with_kvcache(**arguments)


def test_a_warm_call_finds_bad_scales() -> None:
    scales = torch.ones(2, 8, 2)
    anyattn.flash_attn_with_kvcache(**given(k_descale=scales))
    anyattn.flash_attn_with_kvcache(**given(k_descale=scales))
    with pytest.raises(ValueError, match="k_descale is nan for batch entry 1"):
        anyattn.flash_attn_with_kvcache(**given(k_descale=_HOLE))


def test_neutral_scales_of_wide_caches_are_accepted() -> None:
    wanted = anyattn.flash_attn_with_kvcache(**given(k_cache=_WIDE, v_cache=_WIDE))
    assert torch.equal(anyattn.flash_attn_with_kvcache(**given(k_cache=_WIDE, v_cache=_WIDE, k_descale=1.0, v_descale=1)), wanted)


def test_there_are_no_gradients() -> None:
    q, k = torch.randn(2, 3, 4, 16), torch.zeros(2, 8, 2, 16, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k and v are torch.int8 and an argument requires grad.*torch.no_grad\(\)"):
        anyattn.flash_attn_varlen_func(q.requires_grad_(), k, k)
    with pytest.raises(ValueError, match="k_descale requires grad"):
        anyattn.flash_attn_varlen_func(q.detach(), k, k, k_descale=torch.ones(1, requires_grad=True))
    with pytest.raises(ValueError, match="v_descale requires grad"):
        anyattn.flash_attn_with_kvcache(**given(v_descale=torch.ones(1, requires_grad=True)))
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(q, k, k)


def test_autocast_does_not_widen_a_cache() -> None:
    q, k, v, used = given().values()
    with torch.autocast("cpu", torch.bfloat16):
        assert anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=used).dtype is torch.bfloat16
        assert anyattn.flash_attn_varlen_func(q, k, v, seqused_k=used).dtype is torch.bfloat16


def test_other_functions_refuse_8_bits() -> None:
    q, k = torch.randn(2, 8, 2, 16), torch.zeros(2, 8, 2, 16, dtype=torch.float8_e4m3fn)
    with pytest.raises(TypeError, match=r"k has dtype torch\.float8_e4m3fn; wanted"):
        anyattn.flash_attn_func(q, k, k)


# ---- under torch.compile


@pytest.mark.parametrize("form", ["none", "number", "head", "inline"])
def test_compiled_calls(form) -> None:
    meaning = Meaning(window_size=(30, 0), score_mod=lambda s, b, h, i, j: s + 0.01 * j)
    case = made(formed(SETTINGS["pages of 16"], form, form), meaning)
    torch._dynamo.reset()
    step = torch.compile(anyattn.flash_attn_with_kvcache, backend="aot_eager", fullgraph=True)
    assert torch.equal(step(*case.args, **case.options), anyattn.flash_attn_with_kvcache(*case.args, **case.options))
    args, options = varlen(case, SETTINGS["pages of 16"])
    packed = torch.compile(anyattn.flash_attn_varlen_func, backend="aot_eager", fullgraph=True)
    assert torch.equal(packed(*args, **options), anyattn.flash_attn_varlen_func(*args, **options))
    with pytest.raises(Exception, match="8-bit keys and values have no gradients"):
        packed(args[0].detach().requires_grad_(), *args[1:], **options)


def test_compiled_numbers_and_modes() -> None:
    """Also of a call without tables; a number is symbolic where shapes are."""
    q, k = torch.randn(2, 8, 4, 16), torch.randn(2, 8, 2, 16).to(torch.float8_e4m3fn)
    wanted = anyattn.flash_attn_varlen_func(q, k, k, k_descale=0.5, v_descale=2.0)
    torch._dynamo.reset()
    call = torch.compile(anyattn.flash_attn_varlen_func, backend="aot_eager", fullgraph=True, dynamic=True)
    assert torch.equal(call(q, k, k, k_descale=0.5, v_descale=2.0), wanted)
    with FlopCounterMode(display=False) as counter:
        assert torch.equal(anyattn.flash_attn_varlen_func(q, k, k, k_descale=0.5, v_descale=2.0), wanted)
    assert counter.get_total_flops() == 2 * 2 * 4 * 8 * 8 * (16 + 16)


def test_hopper_leaves_8_bits_to_triton() -> None:
    q, k = torch.randn(2, 8, 4, 16).bfloat16(), torch.zeros(2, 8, 2, 16, dtype=torch.int8)
    problem = flash.varlen_problem(q, k, k, None, None, None, None, None, None, None, None, flash.Options())
    assert "k and v have 8 bits" in str(planner._reason_against_problem("hopper", problem))
    assert planner._reason_against_problem("triton", problem) is None


def test_numbers_as_scales_after_a_fake_call() -> None:
    """What is kept of a number is no tensor of a fake mode, in which a program asked for shapes before."""
    number = 0.3437

    def of_ones(scale: Any) -> Tensor:
        q, cache = torch.ones(1, 1, 2, 8), torch.ones(1, 4, 2, 8, dtype=torch.int8)
        return anyattn.flash_attn_with_kvcache(q, cache, cache, cache_seqlens=3, k_descale=scale, v_descale=scale)

    with FakeTensorMode():
        assert of_ones(number).shape == (1, 1, 2, 8)
    assert torch.equal(of_ones(number), of_ones(torch.tensor([number])))
