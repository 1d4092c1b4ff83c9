"""Appending to 8-bit caches: bytes, scales and the count in every form, attention over what was appended, and errors before writing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention
from anyattn.kvcache.quantise import is_written, quantised, row_scales
from anyattn.kvcache.rotary import apply_rotary
from tests.support import poison
from tests.support import sequences as seq
from tests.support.eight_bits import DTYPES, FORMS, Q_DTYPES, SETTINGS, Case, Setting, made
from tests.support.sequences import Meaning

LOUD = 100.0  # of new values: out of range for given scales, unless the dtype is float8_e5m2


def new_rows(s: Setting, new: int, seed: int = 1) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(seed)
    shape = (len(s.cached), new, s.kv_heads)
    return {"k": torch.randn(*shape, s.d, generator=g).to(s.q_dtype), "v": (LOUD * torch.randn(*shape, s.dv, generator=g)).to(s.q_dtype)}


def tables(s: Setting, half: int) -> dict[str, Any]:
    angle = torch.rand(s.capacity + s.queries, half, generator=torch.Generator().manual_seed(2)) * 6.3
    return {"rotary_cos": angle.cos(), "rotary_sin": angle.sin(), "rotary_interleaved": False}


def as_given(case: Case) -> Case:
    """The case with a scale for every page, also for those that only the new rows are on."""
    for name, cache in zip(("k_descale", "v_descale"), case.args[1:]):
        descale = case.options.get(name)
        if isinstance(descale, Tensor) and not is_written(descale, cache):
            case.options[name] = descale.nan_to_num(0.02)
    return case


def place(case: Case, b: int, row: int) -> tuple[int, int]:
    """The two leading indices into the cache of an entry's storage row."""
    table, rows = case.options.get("page_table"), case.options.get("cache_batch_idx")
    if table is not None:
        size = case.args[1].shape[1]
        return int(table[b, row // size]), row % size
    return b if rows is None else int(rows[b]), row


def expected_memory(case: Case, rows: dict[str, Tensor], counts: list[int], rotary: dict[str, Any]) -> tuple[list[Tensor], int]:
    """The bytes of both caches and of their scales after appending row by row, and the number of saturated values."""
    saturated, found = 0, []
    for name, cache in zip("kv", case.args[1:]):
        descale, whole = case.options.get(f"{name}_descale"), cache.clone()
        scales = descale.clone() if isinstance(descale, Tensor) else descale
        at = 0
        for b, count in enumerate(counts):
            for j in range(count):
                row = rows[name][b, j] if rows[name].ndim == 4 else rows[name][at]
                at += 1
                position = int(case.options["cache_seqlens"][b]) + j
                exact = row.float()[None]
                if name == "k" and rotary:
                    exact = apply_rotary(exact, rotary["rotary_cos"], rotary["rotary_sin"], torch.tensor([position]), False)
                first, second = place(case, b, position)
                if is_written(descale, cache):
                    scale: Any = row_scales(exact, cache.dtype)
                    scales[first, second] = scale[0]  # type: ignore[index]
                elif isinstance(descale, Tensor) and descale.ndim == 3:
                    scale = descale.expand(cache.shape[:3])[first, second]
                else:
                    scale = descale[b] if isinstance(descale, Tensor) and descale.numel() > 1 else 1.0 if descale is None else descale
                one = quantised(exact, scale, cache.dtype)
                whole.view(torch.uint8)[first, second] = one.rows[0].view(torch.uint8)
                saturated += int(one.saturated)
        found += [whole, scales] if isinstance(scales, Tensor) else [whole]
    return found, saturated


def written_memory(case: Case) -> list[Tensor]:
    pairs = [(cache, case.options.get(f"{name}_descale")) for name, cache in zip("kv", case.args[1:])]
    return [t for pair in pairs for t in pair if isinstance(t, Tensor)]


def same_bits(found: list[Tensor], expected: list[Tensor]) -> bool:
    kinds = {1: torch.uint8, 4: torch.int32}
    return len(found) == len(expected) and all(
        torch.equal(a.contiguous().view(kinds[a.element_size()]), b.contiguous().view(kinds[b.element_size()]))
        for a, b in zip(found, expected)
    )


def check(s: Setting, meaning: Meaning, new: int, half: int = 0) -> None:
    """A first call and a warm one: what is written, and the output, which is bit for bit that of reading what was written."""
    attention.clear()
    for seed in (1, 2):
        case = as_given(made(s, meaning))
        rows, rotary = new_rows(s, new, seed), tables(s, half) if half else {}
        expected, count = expected_memory(case, rows, [new] * len(s.cached), rotary)
        saturated = torch.full((1,), 7, dtype=torch.int64)
        with poison.enabled():
            out, lse = anyattn.flash_attn_with_kvcache(*case.args, return_lse=True, **rows, **rotary, **case.options, saturated=saturated)
        assert same_bits(written_memory(case), expected)
        assert int(saturated) == 7 + count
        q, longer = case.args[0], case.options | {"cache_seqlens": case.options["cache_seqlens"] + new}
        if half:
            start = case.options["cache_seqlens"].long()[:, None]
            follows = meaning.causal or any(side not in (None, -1) for side in meaning.window_size)
            at = (start + torch.arange(q.shape[1]) * follows).expand(q.shape[:2])
            q = apply_rotary(q.flatten(0, 1), rotary["rotary_cos"], rotary["rotary_sin"], at.flatten(), False).view(q.shape)
        again = anyattn.flash_attn_with_kvcache(q, *case.args[1:], return_lse=True, **longer)
        assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.covering(2)
@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [0, 6])
@pytest.mark.parametrize("forms", [*((form, form) for form in FORMS), ("key", "number"), ("page", "inline")], ids=" and ".join)
@pytest.mark.parametrize("meaning", [Meaning(causal=True), Meaning()], ids=("causal", "full"))
@pytest.mark.parametrize("name", SETTINGS)
def test_written_and_attended(name, meaning, forms, half, dtype, q_dtype) -> None:
    s = replace(SETTINGS[name], k_form=forms[0], v_form=forms[1], dtype=dtype, q_dtype=q_dtype)
    check(s, meaning, s.queries, half)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["none", "head", "page", "key", "inline"])
@pytest.mark.parametrize("page_size", [0, 16])
def test_packed_rows(page_size, form, dtype) -> None:
    cached, counts = (20, 7, 33), [3, 0, 6]
    s = Setting(cached=cached, k_form=form, v_form=form, page_size=page_size, dtype=dtype)
    case, rotary = made(s), tables(s, 8)
    g = torch.Generator().manual_seed(3)
    rows = {"k": torch.randn(9, 2, 16, generator=g).bfloat16(), "v": 100 * torch.randn(9, 2, 16, generator=g).bfloat16()}
    expected, count = expected_memory(case, rows, counts, rotary)
    saturated = torch.zeros((), dtype=torch.int32)
    q = torch.randn(9, 4, 16, generator=g).bfloat16()
    options = case.options | {"cu_seqlens_q": seq.ends(counts), "causal": True, "saturated": saturated}
    anyattn.flash_attn_with_kvcache(q, *case.args[1:], **rows, **rotary, **options)
    assert same_bits(written_memory(case), expected) and int(saturated) == count


@pytest.mark.parametrize("q_dtype", Q_DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("page_size", [0, 1, 16])
def test_against_the_oracle_over_the_dequantised_cache(page_size, dtype, q_dtype) -> None:
    """A cache that only ever was appended to, a few rows at a time."""
    s = Setting(cached=(0, 0, 0), k_form="key", v_form="key", page_size=page_size, dtype=dtype, q_dtype=q_dtype, queries=5)
    case, k_parts, v_parts = made(s), [], []
    lengths = case.options.pop("cache_seqlens")
    for step in range(4):
        rows = new_rows(s, 5, step)
        rows["v"] = rows["v"] / LOUD
        options = case.options | {"cache_seqlens": lengths + 5 * step, "causal": True, "return_lse": True}
        out, lse = anyattn.flash_attn_with_kvcache(*case.args, **rows, **options)
        k_parts.append(rows["k"])
        v_parts.append(rows["v"])
    wide = []
    for name, cache in zip("kv", case.args[1:]):
        stored = cache.double() * case.options[f"{name}_descale"].double()[..., None]
        places = [[place(case, b, j) for j in range(20)] for b in range(3)]
        wide.append([torch.stack([stored[at] for at in entry]).transpose(0, 1) for entry in places])
    batch = seq.Ragged(case.batch.q, wide[0], wide[1], case.batch.dout)
    seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, batch, Meaning(causal=True), [15] * 3)
    exact = torch.cat(k_parts, 1).double().transpose(1, 2)
    off = (torch.stack(wide[0]) - exact).abs().amax() / exact.abs().amax()
    assert 0 < off < {torch.float8_e4m3fn: 2.0**-4, torch.float8_e5m2: 2.0**-3, torch.int8: 2.0**-7}[dtype]


def test_values_out_of_range_are_counted_and_stay_in_range() -> None:
    q = torch.randn(1, 2, 2, 16)
    caches = [torch.zeros(1, 8, 1, 16, dtype=torch.int8) for _ in range(2)]
    k = torch.full((1, 2, 1, 16), 5.0)
    k[0, 0, 0, :4], k[0, 1, 0, 0] = torch.tensor([128.0, -129.0, math.inf, math.nan]), 127.4
    saturated = torch.zeros(1, dtype=torch.int64)
    for call in range(3):
        anyattn.flash_attn_with_kvcache(q, *caches, k=k, v=-k, cache_seqlens=2 * call, saturated=saturated)
        assert int(saturated) == (call + 1) * (4 + 3), "-128 is in range"
    assert caches[0][0, 0, 0, :5].tolist() == [127, -128, 127, 0, 5] and caches[1][0, 0, 0, :5].tolist() == [-128, 127, -128, 0, -5]
    anyattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=4, saturated=saturated)
    wide = [torch.zeros(1, 8, 1, 16) for _ in range(2)]
    anyattn.flash_attn_with_kvcache(q, *wide, k=k, v=k, cache_seqlens=4, saturated=saturated)
    assert int(saturated) == 21, "reading counts nothing, nor does a cache of the rows' dtype"


def test_a_row_of_zeros_and_one_of_nan() -> None:
    """A row of zeros has a scale that is a number; NaN is loud in float8, and does not spread to the row's other values."""
    q, v = torch.randn(1, 2, 2, 16), torch.randn(1, 2, 1, 16)
    v[0, 0], v[0, 1, 0, 3] = 0.0, math.nan
    for dtype in DTYPES:
        caches = [torch.zeros(1, 8, 1, 16, dtype=torch.uint8).view(dtype) for _ in range(2)]
        scales = [torch.full((1, 8, 1), math.nan) for _ in range(2)]
        given = {"k_descale": scales[0], "v_descale": scales[1]}
        anyattn.flash_attn_with_kvcache(q, *caches, k=torch.ones_like(v), v=v, cache_seqlens=0, **given)
        assert bool((scales[1][0, :2] > 0).all()) and bool(scales[1][0, 2:].isnan().all())
        of_zeros = anyattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=1, **given)
        of_nan = anyattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=2, cache_leftpad=torch.tensor([1]), **given)
        assert not bool(of_zeros.any())
        assert of_nan[0, 0, 0].isnan().nonzero().flatten().tolist() == ([3] if dtype.is_floating_point else [])


# ---- errors


def wrong(case: Case, **change: Any) -> dict[str, Any]:
    return {**case.options, **change}


def a_case() -> Case:
    return made(Setting(page_size=16, k_form="key", v_form="key", queries=2))


_SHARED = torch.ones(20, 16, 2)
ERRORS: dict[str, tuple[Any, type[Exception], str]] = {
    "one tensor for both": (
        lambda c: {"k_descale": c.options["k_descale"], "v_descale": c.options["k_descale"]},
        ValueError,
        "k_descale and v_descale share memory .* appending writes k_descale; wanted memory of its own",
    ),
    "scales of several heads": (
        lambda c: {"v_descale": c.options["v_descale"][..., :1].nan_to_num(1.0)},
        ValueError,
        "v_descale has shape .* appending would write scales that heads or cache rows share",
    ),
    "a scale of 0 that is read": (lambda c: {"k_descale": torch.zeros(3, 2)}, ValueError, "k_descale is 0.0 for batch entry 0"),
    "a scale of a cached key": (
        lambda c: {"k_descale": c.options["k_descale"] * 0},
        ValueError,
        "k_descale is 0.0 for batch entry 0, K/V head 0, key 0; wanted a finite number above 0",
    ),
    "saturated": (lambda c: {"saturated": torch.zeros(2)}, TypeError, "saturated has dtype torch.float32; wanted an int64 or int32"),
    "too many rows": (lambda c: {"cache_seqlens": torch.tensor([200, 7, 63])}, ValueError, "cache_seqlens|append"),
    "a page of two": (
        lambda c: {"page_table": c.options["page_table"][[0, 0, 2]], "cache_seqlens": torch.tensor([20, 20, 63], dtype=torch.int32)},
        ValueError,
        "are both page",
    ),
}


@pytest.mark.parametrize("is_warm", [False, True])
@pytest.mark.parametrize("name", ERRORS)
def test_nothing_is_written_when_an_error_is_raised(name: str, is_warm: bool) -> None:
    change, error, message = ERRORS[name]
    attention.clear()
    case = a_case()
    rows = new_rows(Setting(), 2)
    if is_warm:
        anyattn.flash_attn_with_kvcache(*case.args, **rows, **case.options)
        case = a_case()
    given = {**case.options, "saturated": torch.zeros(1, dtype=torch.int64), **change(case)}
    memory = [*written_memory(case), given["saturated"]]
    before = [t.contiguous().view(torch.uint8).clone() for t in memory]
    with pytest.raises(error, match=message):
        anyattn.flash_attn_with_kvcache(*case.args, **rows, **given)
    assert all(torch.equal(t.contiguous().view(torch.uint8), b) for t, b in zip(memory, before))


# ---- under torch.compile


def step(case_args: Any, options: Any, rows: Any, saturated: Tensor) -> Tensor:
    out = anyattn.flash_attn_with_kvcache(*case_args, **rows, **options, saturated=saturated)
    return out * 2 + saturated


def test_compiled_calls_cannot_write_scales_between_a_cache_s_bytes() -> None:
    """A limit of torch.compile, on which vLLM's layout depends: vLLM calls attention in operators of its own."""
    case = made(replace(SETTINGS["pages of 16"], k_form="inline", v_form="inline"))
    torch._dynamo.reset()
    with pytest.raises(Exception, match="input mutations on views with different dtypes"):
        torch.compile(step, backend="aot_eager")(case.args, case.options, new_rows(Setting(), 1), torch.zeros(1, dtype=torch.int64))


@pytest.mark.parametrize("form", ["none", "number", "head", "page", "key"])
def test_compiled_calls(form: str) -> None:
    """A function that appends in a graph, as a layer does: the same bytes, scales and count."""
    s = replace(SETTINGS["pages of 16"], k_form=form, v_form=form, queries=2)
    torch._dynamo.reset()
    found = []
    for function in (step, torch.compile(step, backend="aot_eager", fullgraph=True)):
        case, saturated = as_given(made(s, Meaning(causal=True))), torch.zeros(1, dtype=torch.int64)
        out = [function(case.args, case.options, new_rows(s, 2, seed), saturated) for seed in (1, 2)]
        found.append([*out, *written_memory(case), saturated])
    assert all(torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8)) for a, b in zip(*found))
