"""Edge cases of the Triton kernels, in Triton's interpreter: memory that must not be read, captures, threads, packed and cached rows.

Cases of ``tests/entry_points/test_edge_cases.py`` that are small enough are run as they are, under the numbers of that file's list; the
others have a form of their own here. ``docs/edge-cases.md`` says which test stands for which case. Run by ``test_in_the_interpreter.py`` in
a process of its own.
"""

from __future__ import annotations

import concurrent.futures
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from tests.entry_points import test_flash_cache as cache_tests
from tests.entry_points import test_flash_packed as packed_tests
from tests.entry_points import test_flash_varlen as varlen_tests
from tests.entry_points.test_flash_cache import Setting
from tests.support import cases, chosen_blocks
from tests.support import flash_calls as calls
from tests.support import sequences as seq
from tests.support.covering import few
from tests.support.flash_calls import RECIPES, Recipe
from tests.support.flex_calls import judge
from tests.support.sequences import Meaning

FILLS = (0.0, math.nan, math.inf, -math.inf)


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return cases.inputs("normal", cases.Shape(*shape), torch.float32, 0)[:3]


def packed(meaning: Meaning, lengths: tuple = ((5, 0, 19, 33), (5, 3, 30, 17)), call: Any = varlen_tests.packed_call, **more: Any) -> dict:
    """A call on packed sequences, forward and backward, judged; its results."""
    batch = seq.ragged(*lengths, more.pop("heads", 2), more.pop("kv_heads", 1), more.pop("d", 16), more.pop("dv", None))
    got, shared = varlen_tests.results(batch, meaning, call, **more)
    seq.judge(got, batch, meaning, shared=shared)
    return got


def equal(one: dict, two: dict) -> bool:
    return all(torch.equal(a, b) for name in one for a, b in zip(one[name], two[name], strict=True))


FEW_KEYS = Setting(cached=(17, 5, 0, 33), queries=(2,) * 4, capacity=40)


# ---- 4. windows wider than every sequence are none, to the bit


def test_04_wide_windows_of_packed_sequences() -> None:
    for wide, none in (
        (Meaning(window_size=(50, 50)), Meaning()),
        (Meaning(causal=True, window_size=(1000, 5)), Meaning(causal=True)),
    ):
        assert equal(packed(wide), packed(none)), wide


def test_04_wide_windows_of_a_cache() -> None:
    wide, none = (Recipe(lambda t, more=more: {"causal": True, **more}) for more in ({"window_size": (100, -1)}, {}))
    for splits in (1, 3):
        found = [cache_tests.check(FEW_KEYS, recipe, num_splits=splits) for recipe in (wide, none)]
        assert all(calls.same_bits(a, b) for a, b in zip(*found, strict=True)), splits


# ---- 6. strides: queries, keys and values of one projection; a cache whose heads come before its rows


def test_06_packed_sequences_in_one_tensor() -> None:
    def sliced(q: Any, k: Any, v: Any, **options: Any) -> Any:
        lengths = [t.shape[1] for t in q]
        both = torch.stack([seq.packed(part) for part in (q, k, v)], 1)
        assert not both.unbind(1)[0].is_contiguous()
        tables = {"cu_seqlens_q": seq.ends(lengths), "cu_seqlens_k": seq.ends(lengths)}
        out, lse = anyattn.flash_attn_varlen_func(*both.unbind(1), **tables, return_lse=True, **options)
        return seq.unpacked(out, lengths), list(lse.split(lengths, 1))

    lengths, meaning = ((5, 0, 19, 33),) * 2, Meaning(causal=True, window_size=(20, 0))
    assert equal(packed(meaning, lengths, sliced, heads=2, kv_heads=2), packed(meaning, lengths, heads=2, kv_heads=2))


def test_06_caches_of_any_strides() -> None:
    given = cache_tests.arguments(FEW_KEYS)
    heads_first = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_cache", "v_cache")}
    wide = {n: torch.cat([given[n], given[n] * math.nan], 3)[..., :16] for n in ("k_cache", "v_cache")}
    found = []
    for caches in ({n: given[n].clone() for n in wide}, heads_first, wide):
        out = anyattn.flash_attn_with_kvcache(**(given | caches), causal=True, return_lse=True, num_splits=2)
        found.append([*out, *caches.values()])
    for other in found[1:]:
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(found[0], other, strict=True))


# ---- 7. head dimensions that are no multiples of 8


@pytest.mark.parametrize(("d", "dv"), [(1, 1), pytest.param(3, 8, marks=pytest.mark.slow), (7, 13), (33, 20)])
def test_07_head_dims(d: int, dv: int) -> None:
    judge(*qkv(1, 2, 1, 20, 35, d, dv), mask=masks.causal(5))
    packed(Meaning(causal=True), ((3, 18), (9, 20)), d=d, dv=dv)
    cache_tests.check(Setting(cached=(17, 5), queries=(2,) * 2, capacity=40, dims=(d, dv)), RECIPES["causal"], num_splits=2)


# ---- 8. ratios of heads, and a mod that asks the query head


@pytest.mark.parametrize("ratio", few([6, 7, 12], 7))
def test_08_grouped_heads(ratio: int) -> None:
    q, k, v = qkv(1, ratio, 1, 18, 24, 8, 8)
    bias = torch.linspace(-1, 1, ratio, dtype=torch.float64)
    mask, score = (lambda b, h, i, j: (i - j) % 2 <= h % 2), (lambda s, b, h, i, j: s + bias[h] * j * 0.1)
    judge(q, k, v, mask=mask, score=score, captured=[bias])
    packed(Meaning(mask_mod=mask, score_mod=score, captured=[bias]), ((3, 18), (9, 20)), heads=ratio, kv_heads=1, d=8)
    recipe = Recipe(
        lambda t: {"causal": True, "score_mod": lambda s, b, h, i, j: s + t["bias"][h] * j * 0.1}, lambda h, b, n: {"bias": (h,)}
    )
    cache_tests.check(Setting(cached=(17, 5), queries=(1,) * 2, capacity=40, heads=(ratio, 1), dims=(8, 8)), recipe, num_splits=2)


# ---- 11. tables that end where the longest sequence does


def test_11_tables_of_exactly_the_lengths() -> None:
    by_key, by_row = (torch.randn(2, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in (30, 33))
    packed(Meaning(score_mod=lambda s, b, h, i, j: s + by_key[h, j] * by_row[h, i], captured=[by_key, by_row]))
    of_cache = torch.randn(4, 35, generator=torch.Generator().manual_seed(1))
    recipe = Recipe(lambda t: {"causal": True, "score_mod": lambda s, b, h, i, j: s + of_cache[h, j]})
    for page_size in (0, 16):
        cache_tests.check(replace(FEW_KEYS, page_size=page_size), recipe, num_splits=2)


# ---- 12. garbage: in padding rows, forward and backward; in pages and rows of a cache that are not in use


@pytest.mark.parametrize("form", few(["tail", "partly used", "padded", "pages of 3", "pages of 16"], "pages of 3"))
def test_12_garbage_in_padding_and_unused_pages(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v, dout and dlse of rows that belong to no sequence; sequences end inside of tiles and pages."""
    found = []
    for fill in FILLS:
        monkeypatch.setattr(calls, "NAN", fill)
        made = calls.ragged([5, 0, 37], [9, 3, 35], (1, 1), (16, 8))
        stored = packed_tests.FORMS[form](made)
        assert fill == 0 or not all(t.isfinite().all() for t in (*stored.qkv, stored.dout)), "nothing is filled"
        found.append(packed_tests.judged(made, stored, RECIPES["everything"], backward=True))
    for other in found[1:]:
        # what comes of a row of padding is 0 and -inf, whatever it holds
        assert all(calls.same_bits(found[0][name], other[name]) for name in found[0])


@pytest.mark.parametrize("name", ["padding", "padding, pages of 16", "other rows, turned, behind padding", "whole cache, nothing new"])
def test_12_garbage_in_the_tail_of_a_cache(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s, found = cache_tests.SETTINGS[name], []
    for fill in FILLS:
        monkeypatch.setattr(calls, "NAN", fill)
        found.append(cache_tests.check(s, RECIPES["window"], num_splits=2))
    for other in found[1:]:
        assert all(calls.same_bits(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.covering(1)
@pytest.mark.parametrize("fill", FILLS[1:])
@pytest.mark.parametrize("form", ["ranges", "lists"])
def test_12_what_no_row_tile_visits(form: str, fill: float) -> None:
    """Where only a mask hides a key, what it holds stays within the tiles that meet it: rows whose tiles are far from it get the same bits,
    and so do gradients. In tiles of 32 rows and 16 keys the rows from 64 on see keys from 45 on."""
    options: dict[str, Any] = {"mask_mod": masks.sliding_window(19, 0)}
    if form == "lists":
        listed = lambda b, h, i, j: (i >= j) & (i - j <= 19) & ((i + j) % 7 != 3)
        options = {"block_mask": anyattn.create_block_mask(listed, None, None, 96, 96, "cpu", 16)}
    inputs = cases.inputs("normal", cases.Shape(1, 2, 1, 96, 96, 16, 16), torch.float32, 0)[:4]

    def results(value: float | None) -> list[torch.Tensor]:
        q, k, v, dout = (t.clone() for t in inputs)
        if value is not None:
            k[:, :, :32], v[:, :, :32] = value, value
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = anyattn.flex_attention(*leaves, enable_gqa=True, kernel_options={"tile_m": 32, "tile_n": 16}, **options)
        return [t[:, :, 64:] for t in (out.detach(), *torch.autograd.grad(out, leaves, dout))]

    for name, clean, got in zip(("out", "dq", "dk", "dv"), results(None), results(fill), strict=True):
        assert torch.equal(clean, got), name


# ---- 13. more splits than tiles, of which some see nothing


def test_13_splits_that_see_nothing() -> None:
    """Of 35 keys at most, in tiles of 16; a score mod hides the first of every entry, so that its first splits merge with weight 0."""
    late = Recipe(lambda t: {"score_mod": lambda s, b, h, i, j: torch.where(j >= 20, s, -math.inf)})
    few = Setting(cached=(5, 0, 33), queries=(2,) * 3, capacity=40)
    for recipe, page_size in ((late, 0), (RECIPES["sink_empty_band"], 0), (RECIPES["causal"], 3)):
        cache_tests.check(replace(few, page_size=page_size), recipe, num_splits=5)


# ---- 14. tables of int64, and longest lengths as tensors of no dimension


def test_14_tables_of_64_bits() -> None:
    most = {"max_seqlen_q": torch.tensor(33), "max_seqlen_k": torch.tensor(30)}
    assert equal(packed(Meaning(causal=True), int_type=torch.int64, **most), packed(Meaning(causal=True)))


# ---- 16. scores of minus infinity, and huge ones


@pytest.mark.parametrize("size", few([-math.inf, 1e4, -1e30], -math.inf, 1e4))
def test_16_packed_sequences_with_infinite_and_huge_scores(size: float) -> None:
    if size == -math.inf:
        score = lambda s, b, h, i, j: torch.where((i >= j) & (i % 9 != 4), s, -math.inf)
    else:
        score = lambda s, b, h, i, j: s + torch.where(j == 3, size, 0.0)
    packed(Meaning(score_mod=score), ((5, 19, 33), (5, 30, 17)))


# ---- 17. captured values of other kinds, by the same function: the text of its kernel depends on some of what is captured


def test_17_tables_that_lie_otherwise() -> None:
    q, k, v = qkv(1, 2, 1, 20, 43, 16, 16)
    wide = torch.randn(2, 43, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(5))

    def biased(table: torch.Tensor) -> Any:
        return lambda s, b, h, i, j: s + table[h, j]

    plain = wide[:, :, 0].clone()
    for name, table in {
        "rows": plain,
        "another table": -plain,
        "every seventh": wide[:, :, 3],
        "longer, from inside": torch.cat([wide[:, :5, 1], plain, wide[:, :9, 2]], 1)[:, 5:-5],
        "turned": plain.T.contiguous().T,
        "one row for all": plain[:1].expand(2, 43),
        "one number for all": plain[:1, :1].expand(2, 43),
    }.items():
        judge(q, k, v, score=biased(table), mask=masks.causal(4), captured=[table], label=name)
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        table = (wide[:, :, 0] * 2).to(dtype)
        judge(q, k, v, score=biased(table.double() if dtype is not torch.int64 else table), mask=masks.causal(4), label=str(dtype))


def test_17_numbers_of_any_size() -> None:
    """Small whole numbers are computed with in 32 bits; a float where a whole number was is another program."""
    q, k, v = qkv(1, 2, 1, 37, 43, 16, 16)

    def far(offset: Any, factor: Any) -> Any:
        return lambda b, h, i, j: (i + offset) * factor >= j + offset * factor

    for offset, factor in ((3, 1), (2**28 - 40, 2), (2**28, 1), (2**40, 3), (-(2**33), 1), (-3, 2), (0.5, 1), (3, 1.5)):
        judge(q, k, v, mask=far(offset, factor), label=f"{offset} {factor}")


def test_17_a_window_that_grows_through_every_form() -> None:
    """From a band that is empty over one narrower than a tile to one that sees all: one program, other tiles visited."""
    q, k, v = qkv(1, 1, 1, 70, 70, 16, 16)
    for left, right in ((-1, -1), (0, 0), (3, -2), (15, 0), (16, 16), (33, -17), (200, 5), (200, 200)):
        judge(q, k, v, mask=lambda b, h, i, j: (i - j <= left) & (j - i <= right), label=f"{left} {right}")  # noqa: B023


def test_17_packed_sequences_by_equal_code() -> None:
    table = torch.zeros(33, dtype=torch.float64)
    for left in (3, 20):
        table.data[:left] = float(left)
        mask, score = (lambda b, h, i, j: i - j <= left), (lambda s, b, h, i, j: s + table[i])  # noqa: B023
        packed(Meaning(mask_mod=mask, score_mod=score, captured=[table]), ((3, 19), (9, 17)))


# ---- 20. threads


def test_20_threads_calling_at_once() -> None:
    """Mods that are new to all threads at once, of equal code and other values, forward and backward; the bits of one thread alone."""
    q, k, v = qkv(1, 2, 1, 20, 20, 16, 16)
    dout = torch.ones(1, 2, 20, 16)

    def call(at: int) -> list[torch.Tensor]:
        left, kind = 2 + 3 * (at % 4), at % 3
        slopes = torch.full((2,), 0.1 * (at % 5), requires_grad=True)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        mask = (
            lambda b, h, i, j: (i >= j) & (i - j < left), lambda b, h, i, j: (i * 3 + j * 5) % left != 1,
            lambda b, h, i, j: (j < left) | (i >= j),
        )[kind]  # fmt: skip
        score = None if kind == 2 else lambda s, b, h, i, j: s - slopes[h] * abs(i - j)
        out, lse = anyattn.flex_attention(*leaves, score, mask_mod=mask, enable_gqa=True, return_lse=True)
        wanted = leaves if score is None else [*leaves, slopes]
        return [out.detach(), lse.detach(), *torch.autograd.grad(out, wanted, dout)]

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        together = list(pool.map(call, range(6)))
    for at, got in enumerate(together):
        assert all(torch.equal(a, b) for a, b in zip(got, call(at), strict=True)), at


def test_20_threads_with_packed_sequences_and_caches() -> None:
    lengths, given = [5, 0, 19], cache_tests.arguments(replace(FEW_KEYS, page_size=16))
    q, k, v = (torch.randn(24, h, 16, generator=torch.Generator().manual_seed(h)) for h in (2, 1, 3))
    v = v[:, :1]

    def call(at: int) -> list[torch.Tensor]:
        if at % 2:
            caches = {n: given[n].clone() for n in ("k_cache", "v_cache")}
            out = anyattn.flash_attn_with_kvcache(**(given | caches), window_size=(3 + at % 3 * 9, 0), return_lse=True, num_splits=2)
            return [*out, *caches.values()]
        leaves, ends = [t.clone().requires_grad_() for t in (q, k, v)], seq.ends(lengths)
        more = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "softcap": float(at % 3), "causal": True, "return_lse": True}
        out, lse = anyattn.flash_attn_varlen_func(*leaves, **more)
        return [out.detach(), lse.detach(), *torch.autograd.grad(out.square().sum(), leaves)]

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        together = list(pool.map(call, range(6)))
    for at, got in enumerate(together):
        assert all(calls.same_bits(a, b) for a, b in zip(got, call(at), strict=True)), at


@pytest.mark.parametrize("layout", ["flat", "padded"])
def test_21_chosen_blocks_of_packed_sequences(layout: str) -> None:
    """Each sequence is an edge case; two have no queries, or no keys."""
    named = [chosen_blocks.edge(name, 16) for name in chosen_blocks.EDGES]
    most = max(indices.shape[3] for _, indices in named)
    each = [torch.nn.functional.pad(indices[0], (0, most - indices.shape[3]), value=-1) for _, indices in named]
    lengths = [*(pair for pair, _ in named), (0, 20), (20, 0)]
    each += [torch.zeros(1, 0, most, dtype=torch.int64), torch.full((1, 2, most), -1)]
    made = calls.ragged(*zip(*lengths, strict=True), seed=3)  # type: ignore[arg-type]
    stored = packed_tests.packed(made)
    lists = anyattn.VarlenBlockSparseTensors.from_topk(torch.cat(each, 1), tile=(16, 16), layout=layout, **stored.where)
    table = torch.zeros(len(each), 1, 4, 4, dtype=torch.bool)
    for b, ((_, keys), indices) in enumerate(zip(lengths, each, strict=True)):
        own = chosen_blocks.table_of(indices[None], -(-keys // 16))
        table[b, :, : own.shape[2], : own.shape[3]] = own[0]
    whole = chosen_blocks.mask_of(table, (16, 16), 4, (0, 0))
    packed_tests.judged(made, stored, Recipe(lambda t: {"mask_mod": whole}), mask_mod=None, block_sparse_tensors=lists)
