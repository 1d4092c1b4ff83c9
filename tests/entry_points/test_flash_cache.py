"""``flash_attn_with_kvcache`` against a reference that unpacks, turns and appends by itself; what must be exact or stay as it is.

``test_kvcache.py`` lists settings one by one; here everything that an entry of the batch has differs from its neighbour's, and whatever
no entry uses is NaN, or a page number that does not exist.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.testing import budget
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support import poison
from tests.support.flash_calls import RECIPES

# it has no gradients, and refuses the tensors of other calls' recipes, which want some
flash_attn_with_kvcache = torch.no_grad()(anyattn.flash_attn_with_kvcache)


@dataclass(frozen=True)
class Setting:
    """One call. cached: rows in use before, padding included. queries, new: rows of each entry; new None appends nothing, () as queries.

    packed: queries (and new rows, where they are as many) end to end by cu_seqlens_q. page_size 0: a contiguous cache. rows: the cache row
    of each entry.
    """

    cached: tuple[int, ...] = (40, 7, 63, 12)
    queries: tuple[int, ...] = (1, 1, 1, 1)
    new: tuple[int, ...] | None = ()
    packed: bool = False
    leftpad: tuple[int, ...] | None = None
    page_size: int = 0
    page_seed: int | None = 1
    rows: tuple[int, ...] | None = None
    rotary_dim: int = 0
    interleaved: bool = True
    capacity: int = 72
    heads: tuple[int, int] = (4, 2)
    dims: tuple[int, int] = (16, 16)
    dtype: torch.dtype = torch.float32
    seed: int = 0

    @property
    def appended(self) -> tuple[int, ...]:
        return (0,) * len(self.cached) if self.new is None else self.new or self.queries


def arguments(s: Setting) -> dict[str, Any]:
    """What the door is given, the mods and masks excepted."""
    batch, pads = len(s.cached), s.leftpad or (0,) * len(s.cached)
    old = calls.ragged(s.queries, [c - p for c, p in zip(s.cached, pads)], s.heads, s.dims, s.dtype, seed=s.seed)
    new = calls.ragged([0] * batch, s.appended, s.heads, s.dims, s.dtype, seed=s.seed + 1)
    lay_out = calls.in_a_row if s.packed else torch.stack
    given: dict[str, Any] = {"q": lay_out(old.q), "cache_seqlens": torch.tensor(s.cached, dtype=(torch.int32, torch.int64)[s.seed % 2])}
    if s.packed:
        given["cu_seqlens_q"] = calls.ends(s.queries, (torch.int64, torch.int32)[s.seed % 2])
    if s.new is not None:
        together = calls.in_a_row if s.packed and s.appended == s.queries else torch.stack
        given |= {"k": together(new.k), "v": together(new.v)}
    if s.leftpad is not None:
        given["cache_leftpad"] = torch.tensor(s.leftpad)
    if s.rotary_dim:
        g = torch.Generator().manual_seed(s.seed + 2)
        angles = torch.rand(s.capacity + max(s.queries, default=0), s.rotary_dim // 2, generator=g) * 6.3
        given |= {"rotary_cos": angles.cos().to(s.dtype), "rotary_sin": angles.sin().to(s.dtype), "rotary_interleaved": s.interleaved}
    if s.page_size:
        table, count = calls.pages_of(batch, -(-s.capacity // s.page_size), s.page_seed)
        caches = [calls.in_pages(part, table, count, s.page_size, pads) for part in (old.k, old.v)]
        for b, (n, more, pad) in enumerate(zip(s.cached, s.appended, pads)):
            first, last = (0, 0) if n + more == pad else (pad // s.page_size, -(-(n + more) // s.page_size))
            table[b, :first], table[b, last:] = 10**6, -7
        given["page_table"] = table
    else:
        rows = None if s.rows is None else list(s.rows)
        caches = [calls.side_by_side(part, s.capacity, rows, batch + 3 if rows else batch, pads) for part in (old.k, old.v)]
        if rows is not None:
            given["cache_batch_idx"] = torch.tensor(rows)
    return given | {"k_cache": caches[0], "v_cache": caches[1]}


def check(s: Setting, recipe: calls.Recipe, **more: Any) -> tuple[Tensor, Tensor]:
    """One call: its results by the budget, the appended rows, and that no other element of the caches changed."""
    given = arguments(s)
    tensors = recipe.draw(s.heads[0], len(s.cached), s.capacity + 8, s.dtype, s.seed)
    options = recipe.options(tensors)
    want = reference.cached(**given, **{n: v for n, v in options.items() if n in ("causal", "window_size")})
    before = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    with poison.enabled():
        out, lse = flash_attn_with_kvcache(**given, **options, **more, return_lse=True)
    assert not out.requires_grad and out.dtype == s.dtype
    reference.judge(want.sequences, {"out": out, "lse": lse}, recipe.options, tensors, label=str(s))
    for b, at in enumerate(want.at):
        assert calls.same_bits(given["v_cache"][at], want.values[b]), f"values of entry {b}"
        if s.rotary_dim:
            budget.check(f"keys of entry {b}", given["k_cache"][at], want.keys[b], want.plain_keys[b])
        else:
            assert calls.same_bits(given["k_cache"][at], want.keys[b].to(s.dtype)), f"keys of entry {b}"
        for name in before:
            before[name][at] = given[name][at]
    assert all(calls.same_bits(before[n], given[n]) for n in before), "a row that was not appended has changed"
    return out, lse


SETTINGS = {
    "one each": Setting(),
    "whole cache, nothing new": Setting(cached=(72,) * 3, queries=(2,) * 3, new=None),
    "more queries than new": Setting(queries=(5,) * 4, new=(2,) * 4),
    "more new than queries": Setting(queries=(2,) * 4, new=(6,) * 4, dims=(20, 12)),
    "more queries than keys": Setting(cached=(3, 0, 40, 1), queries=(6,) * 4, new=(1,) * 4),
    "packed": Setting(queries=(3, 0, 8, 1), packed=True),
    "packed queries, equal new": Setting(queries=(3, 0, 8, 1), new=(2,) * 4, packed=True, heads=(3, 1)),
    "packed in pages behind padding": Setting(queries=(3, 0, 8, 1), packed=True, page_size=3, leftpad=(39, 7, 4, 0)),
    "padding": Setting(leftpad=(40, 0, 33, 5), queries=(4,) * 4, heads=(4, 1)),
    "padding, pages of 1": Setting(leftpad=(11, 7, 33, 0), queries=(2,) * 4, page_size=1),
    "padding, pages of 16": Setting(leftpad=(17, 0, 32, 12), queries=(4,) * 4, page_size=16, dims=(33, 40)),
    "pages of 64": Setting(cached=(64, 63, 0, 66), queries=(3,) * 4, page_size=64, heads=(12, 4)),
    "other rows": Setting(rows=(5, 0, 6, 2), queries=(3,) * 4, heads=(3, 3)),
    "other rows, turned, behind padding": Setting(rows=(5, 0, 6, 2), queries=(3,) * 4, rotary_dim=10, leftpad=(40, 0, 33, 5)),
    "turned": Setting(queries=(4,) * 4, rotary_dim=16),
    "turned by halves, in part, in pages": Setting(queries=(4,) * 4, rotary_dim=6, interleaved=False, page_size=3),
    "turned by halves": Setting(queries=(4,) * 4, new=(1,) * 4, rotary_dim=20, interleaved=False, dims=(20, 8), heads=(3, 1)),
    "turned, packed, in pages behind padding": Setting(
        queries=(3, 0, 8, 1), packed=True, page_size=16, leftpad=(39, 7, 4, 0), rotary_dim=12
    ),
    "empty": Setting(cached=(0, 0, 0, 0), queries=(5,) * 4),
    "empty and nothing new": Setting(cached=(0, 0, 9, 0), queries=(2,) * 4, new=None),
    "no queries": Setting(queries=(0,) * 4, new=(2,) * 4),
    "all alike": Setting(cached=(30,) * 4, queries=(2,) * 4, page_size=16),
}  # fmt: skip
NEVER_BEFORE_KEY_0 = ("bias_row", "product", "gate_entry_row", "distance")  # recipes with tables that have no row -1
ALWAYS = ("causal", "everything", "window")
MATRIX = [
    (name, setting, (i + j) % 5)
    for i, setting in enumerate(SETTINGS)
    for j, name in enumerate(dict.fromkeys((*ALWAYS, *(list(RECIPES)[(5 * i + n) % len(RECIPES)] for n in range(5)))))
    if not (name in NEVER_BEFORE_KEY_0 and (setting.startswith(("more queries than", "empty and", "padding"))))
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "setting", "turn"), MATRIX, ids=str)
def test_against_the_reference(name, setting, turn):
    dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float16, torch.float64)[turn]
    check(replace(SETTINGS[setting], dtype=dtype, seed=turn), RECIPES[name], num_splits=(0, 1, 2, 3, 80)[turn])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("page_size", [0, 128])
def test_long_caches(dtype, page_size):
    """Above 1,024 keys they are read in several goes, and splits hold more than one of them."""
    s = Setting((3000, 1030, 0, 5), (1,) * 4, page_size=page_size, capacity=3100, heads=(4, 1), dtype=dtype)
    for splits in (0, 1, 2, 4):
        check(s, RECIPES["causal"], num_splits=splits)
    check(replace(s, queries=(40,) * 4, leftpad=(1500, 3, 0, 1)), RECIPES["window"])


def test_one_length_for_all_and_rows_counted_once():
    """cache_seqlens may be an int, or left out where nothing is appended."""
    s = Setting(cached=(40,) * 3, queries=(2,) * 3)
    for length in (40, torch.tensor([40] * 3)):
        given = arguments(s)
        given["cache_seqlens"] = length
        want = reference.cached(**given, causal=True)
        out, lse = flash_attn_with_kvcache(**given, causal=True, return_lse=True)
        reference.judge(want.sequences, {"out": out, "lse": lse}, RECIPES["causal"].options)
    given = arguments(replace(s, cached=(72,) * 3, new=None))
    del given["cache_seqlens"]
    want = reference.cached(**given)
    out, lse = flash_attn_with_kvcache(**given, return_lse=True)
    reference.judge(want.sequences, {"out": out, "lse": lse}, RECIPES["full"].options)


# ---- exact

EXACT = [
    (name, splits)
    for name, splits in (("causal", 0), ("causal", 3), ("window", 1), ("everything", 2), ("full", 5), ("bias_key", 0))
]  # fmt: skip
PER_ENTRY = ("cached", "queries", "new", "leftpad", "rows")


def outcome(s: Setting, name: str, splits: int, entries: list[int] | None = None) -> tuple[list[Tensor], dict[str, Any]]:
    """out and lse of each entry, all in one call or ``entries`` of it, from the same tensors; and the arguments after it."""
    given = arguments(s)
    recipe = RECIPES[name]
    tensors = recipe.draw(s.heads[0], len(s.cached), s.capacity + 8, s.dtype)
    options = recipe.options(tensors)
    if entries is not None:
        for n in ("q", "k", "v", "cache_seqlens", "cache_leftpad", "page_table", "cache_batch_idx"):
            if n in given:
                given[n] = given[n][entries]
        if "page_table" not in given and "cache_batch_idx" not in given:
            given["cache_batch_idx"] = torch.tensor(entries)
        mod = options.get("mask_mod")
        if mod is not None:  # the mods and slopes of an entry go with it
            names = torch.tensor(entries)
            options["mask_mod"] = lambda b, h, i, j: mod(names[b], h, i, j)
        if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
            options["alibi_slopes"] = options["alibi_slopes"][entries]
    out, lse = flash_attn_with_kvcache(**given, **options, num_splits=splits, return_lse=True)
    return [out, lse], given


STORED = {
    # neighbours of one length are computed together; widths that do not fill a vector register round as they would alone
    "alike": Setting((20,) * 4, queries=(3,) * 4, heads=(6, 2), dims=(24, 8)),
    "some alike": Setting((700, 20, 20, 700), queries=(1,) * 4, heads=(6, 2), dims=(24, 8), capacity=711, page_size=16),
    "contiguous": Setting(queries=(3,) * 4, rotary_dim=8),
    "pages": Setting(queries=(3,) * 4, page_size=16, leftpad=(5, 0, 33, 12)),
    "long": Setting((1500, 20, 700, 700), queries=(2,) * 4, page_size=64, capacity=1600),
    "half": Setting((1500, 20, 700, 700), queries=(1,) * 4, capacity=1600, dtype=torch.bfloat16, rows=(4, 2, 0, 6)),
}  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("stored", STORED)
@pytest.mark.parametrize(("name", "splits"), EXACT, ids=str)
def test_an_entry_does_not_depend_on_its_batch(name, splits, stored):
    """Permuted batches give permuted results, and an entry alone what it gives among others; and so the caches, bit for bit."""
    whole, after = outcome(STORED[stored], name, splits)
    for entries in ([2, 0, 3, 1], [0], [1], [2], [3, 1]):
        part, part_after = outcome(STORED[stored], name, splits, entries)
        assert all(calls.same_bits(x[entries], y) for x, y in zip(whole, part)), entries
        if len(entries) == 4:
            assert all(calls.same_bits(after[n], part_after[n]) for n in ("k_cache", "v_cache"))


@pytest.mark.covering(2)
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("name", "splits"), EXACT, ids=str)
def test_where_pages_lie_changes_no_bit(name, splits, dtype, page_size):
    """Pages in order, shuffled, of whatever size, and no pages at all."""
    s = Setting(queries=(3,) * 4, leftpad=(5, 0, 33, 12), dtype=dtype, page_size=page_size, page_seed=None)
    want, _ = outcome(s, name, splits)
    for other in (replace(s, page_seed=3), replace(s, page_seed=4), replace(s, page_size=0)):
        assert all(calls.same_bits(a, b) for a, b in zip(want, outcome(other, name, splits)[0])), other


def test_step_by_step_is_all_at_once():
    """Appending rows one call at a time leaves the cache that one call with all of them leaves, turned keys included."""
    s = Setting(cached=(5, 0, 17), queries=(6,) * 3, rotary_dim=16, page_size=3)
    whole = arguments(s)
    flash_attn_with_kvcache(**whole, causal=True)
    steps = arguments(s)
    q, k, v, start = (steps.pop(n) for n in ("q", "k", "v", "cache_seqlens"))
    for t in range(6):
        now = slice(t, t + 1)
        flash_attn_with_kvcache(q=q[:, now], k=k[:, now], v=v[:, now], cache_seqlens=start + t, causal=True, **steps)
    assert all(calls.same_bits(whole[n], steps[n]) for n in ("k_cache", "v_cache"))


# ---- refused, and nothing written

GOOD = Setting(queries=(2,) * 4)
PAGED = replace(GOOD, page_size=16)


def _int(*listed: int) -> Tensor:
    return torch.tensor(listed, dtype=torch.int32)


def _table(at: tuple[int, int], page: int) -> Tensor:
    table = arguments(PAGED)["page_table"].clone()
    table[at] = page
    return table


COS = torch.ones(90, 8)
BAD: dict[str, tuple[Setting, dict[str, Any], type | tuple[type, ...], str]] = {
    "rows beyond the capacity": (GOOD, {"cache_seqlens": _int(40, 71, 3, 4)}, ValueError, r"entry 1.*cache_seqlens\[1\].*72"),
    "rows beyond the pages": (PAGED, {"cache_seqlens": _int(40, 7, 79, 4)}, ValueError, r"entry 2.*80"),
    "length beyond the capacity": (GOOD, {"cache_seqlens": _int(40, 73, 3, 4)}, ValueError, r"cache_seqlens\[1\]=73.*72"),
    "length negative": (GOOD, {"cache_seqlens": _int(40, 7, -2, 4)}, ValueError, r"cache_seqlens\[2\]=-2"),
    "lengths a list": (GOOD, {"cache_seqlens": [40, 7, 3, 4]}, TypeError, r"cache_seqlens.*list"),
    "length a float": (GOOD, {"cache_seqlens": 4.0}, TypeError, r"cache_seqlens.*float"),
    "nothing left out but appended to": (GOOD, {"cache_seqlens": None}, ValueError, r"72"),
    "a row twice": (GOOD, {"cache_batch_idx": _int(0, 2, 1, 2)}, ValueError, r"cache_batch_idx\[1\].*cache_batch_idx\[3\].*2"),
    "a row outside": (GOOD, {"cache_batch_idx": _int(0, 2, 1, 4)}, ValueError, r"cache_batch_idx\[3\]=4"),
    "a row negative": (GOOD, {"cache_batch_idx": _int(0, -2, 1, 3)}, ValueError, r"cache_batch_idx\[1\]=-2"),
    "rows of another batch": (GOOD, {"cache_batch_idx": _int(0, 1)}, ValueError, r"cache_batch_idx.*2 entries.*4"),
    "rows of floats": (GOOD, {"cache_batch_idx": torch.ones(4)}, TypeError, r"cache_batch_idx.*float32"),
    "padding beyond the length": (GOOD, {"cache_leftpad": _int(0, 8, 0, 0)}, ValueError, r"cache_leftpad\[1\]=8.*7"),
    "padding negative": (GOOD, {"cache_leftpad": _int(0, -1, 0, 0)}, ValueError, r"cache_leftpad\[1\]=-1"),
    "a page outside": (PAGED, {"page_table": _table((2, 1), 99)}, ValueError, r"page_table\[2, 1\]=99"),
    "a page negative": (PAGED, {"page_table": _table((0, 2), -1)}, ValueError, r"page_table\[0, 2\]=-1"),
    "a page appended to twice": (PAGED, {"page_table": torch.zeros(4, 5, dtype=torch.int32)}, ValueError, r"page_table.*page 0"),
    "a row past the page table": (PAGED, {"cache_batch_idx": _int(0, 1, 4, 3)}, ValueError, r"cache_batch_idx\[2\]=4.*page_table.*4"),
    "page table of another batch": (PAGED, {"page_table": _table((0, 0), 1)[:3]}, ValueError, r"page_table.*3.*4"),
    "tables too short": (GOOD, {"rotary_cos": COS[:64], "rotary_sin": COS[:64]}, ValueError, r"rotary_cos.*64"),
    "tables too wide": (GOOD, {"rotary_cos": torch.ones(90, 9), "rotary_sin": torch.ones(90, 9)}, ValueError, r"rotary.*9.*16"),
    "tables of two shapes": (GOOD, {"rotary_cos": COS, "rotary_sin": COS[:, :4]}, ValueError, r"rotary_cos.*rotary_sin"),
    "one table": (GOOD, {"rotary_sin": COS}, ValueError, r"rotary_sin.*rotary_cos"),
    "tables of integers": (GOOD, {"rotary_cos": COS.long(), "rotary_sin": COS.long()}, TypeError, r"rotary_cos.*int64"),
    "tables without new keys": (GOOD, {"rotary_cos": COS, "rotary_sin": COS, "k": None, "v": None}, ValueError, r"rotary_cos"),
    "k without v": (GOOD, {"v": None}, ValueError, r"^v is None.*k"),
    "k of another head_dim": (GOOD, {"k": torch.ones(4, 2, 2, 8)}, ValueError, r"^k .*8.*16"),
    "k of another dtype": (GOOD, {"k": torch.ones(4, 2, 2, 16).half()}, TypeError, r"^k .*float16"),
    "v of another length": (GOOD, {"v": torch.ones(4, 1, 2, 16)}, ValueError, r"^v .*"),
    "k of another batch": (GOOD, {"k": torch.ones(3, 2, 2, 16), "v": torch.ones(3, 2, 2, 16)}, ValueError, r"^k .*3.*4"),
    "ends that fall": (replace(GOOD, packed=True), {"cu_seqlens_q": _int(0, 5, 4, 6, 8)}, ValueError, r"cu_seqlens_q\[2\]=4.*5"),
    "ends past the rows": (replace(GOOD, packed=True), {"cu_seqlens_q": _int(0, 5, 6, 7, 9)}, ValueError, r"cu_seqlens_q\[4\]=9.*8"),
    "max_seqlen_q too short": (replace(GOOD, packed=True), {"max_seqlen_q": 1}, ValueError, r"max_seqlen_q=1.*2"),
    "splits negative": (GOOD, {"num_splits": -2}, ValueError, r"num_splits=-2"),
    "softcap negative": (GOOD, {"softcap": -2.0}, ValueError, r"softcap=-2"),
    "window of floats": (GOOD, {"window_size": (1.0, 0)}, TypeError, r"window_size"),
    "sink of other heads": (GOOD, {"sink": torch.zeros(3)}, ValueError, r"sink.*\(3,\).*\(4,\)"),
    "slopes of other heads": (GOOD, {"alibi_slopes": torch.zeros(3)}, ValueError, r"alibi_slopes.*\(3,\).*\(4,\)"),
    "unknown backend": (GOOD, {"backend": "cudnn"}, ValueError, r"backend='cudnn'"),
    "mask that returns a number": (GOOD, {"mask_mod": lambda b, h, i, j: i - j}, ValueError, r"mask_mod.*bool"),
    "score of too few arguments": (GOOD, {"score_mod": lambda s, b, h, i: s}, TypeError, r"score_mod.*4 arguments"),
    "table of places too short": (GOOD, {"score_mod": lambda s, b, h, i, j: s + SHORT[j]}, (IndexError, ValueError), r"score_mod.*60"),
    "aux_tensors a tensor": (GOOD, {"aux_tensors": COS}, TypeError, r"aux_tensors.*Tensor"),
}  # fmt: skip
SHORT = torch.zeros(60)


@pytest.mark.parametrize("name", BAD)
def test_bad_input_writes_nothing(name):
    s, changes, error, words = BAD[name]
    given = arguments(s) | changes
    before = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    with pytest.raises(error, match=words):
        flash_attn_with_kvcache(**given)
    assert all(calls.same_bits(before[n], given[n]) for n in before)
