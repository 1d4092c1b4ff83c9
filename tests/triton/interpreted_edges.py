"""Edge cases that have a form of their own here, by Triton's interpreter: garbage that nothing may read, captured values, threads.

Those that are small enough as they are come from ``end_to_end/test_edge_cases.py``; numbers are those of its list. Run by
``test_interpreted.py`` in a process of its own.
"""

from __future__ import annotations

import concurrent.futures
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "end_to_end"))

import flash_calls as calls
import seeing
import test_flash_cache as cache_tests
import test_flash_packed as packed_tests
from calls import judge
from flash_calls import RECIPES

import anyattn
from anyattn import masks
from anyattn.testing import budget, cases

FILLS = (0.0, math.nan, math.inf, -math.inf)


def qkv(*shape: int) -> tuple[torch.Tensor, ...]:
    return cases.inputs("normal", cases.Shape(*shape), torch.float32, 0)[:3]


# ---- 12. garbage: in padding rows, forward and backward; in pages and rows of a cache that are not in use


@pytest.mark.parametrize("form", ["tail", "partly used", "padded", "pages of 3", "pages of 16"])
def test_12_garbage_in_padding_and_unused_pages(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k, v, dout and dlse of rows that belong to no sequence; sequences end inside of tiles and pages."""
    found = []
    for fill in FILLS:
        monkeypatch.setattr(calls, "NAN", fill)
        made = calls.ragged([5, 0, 37], [9, 3, 35], (1, 1), (16, 8))
        stored = packed_tests.FORMS[form](made)
        assert fill == 0 or not all(t.isfinite().all() for t in (*stored.qkv, stored.dout)), "nothing is filled"
        # pages get their gradients from another backend
        found.append(packed_tests.judged(made, stored, RECIPES["everything"], backward=not form.startswith("pages")))
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


def allowed(b: Any, h: Any, i: Any, j: Any) -> Any:
    return (i + 2 * j) % 3 < 2


ISLANDS = lambda b, h, i, j: (i // 32 == j // 32) & ((i + j) % 5 != 0)
# masks: by one range of keys a row or two, by lists that are made or given, asked in every tile beside lists that are given
MASKS: dict[str, Any] = {
    "causal": masks.causal(),
    "window": masks.sliding_window(19, 0),
    "sink and window": masks.sink_window(4, 19),
    "elements": allowed,
    "islands": ISLANDS,
}
PLANTS = {"keys": seeing.keys, "queries": seeing.queries}


def spoilt(*shape: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    return cases.inputs("normal", cases.Shape(*shape), dtype, 0)[:4]


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("name", MASKS)
def test_12_what_is_not_finite_meets_only_those_that_see_it(name: str, plant: str) -> None:
    """Forward and backward, of every way in which a mask reaches the kernels."""
    options: dict[str, Any] = {"kernel_options": {"tile_m": 32, "tile_n": 16}}
    if name == "islands":
        options["block_mask"] = anyattn.create_block_mask(ISLANDS, None, None, 56, 56, "cpu", 32)
    seeing.judge(spoilt(1, 2, 1, 56, 56, 16, 16), PLANTS[plant], MASKS[name], label=f"{name} {plant}", **options)


@pytest.mark.parametrize("plant", PLANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_12_in_16_bits_and_of_other_shapes(dtype: torch.dtype, plant: str) -> None:
    """Columns that fill no whole piece, rows and keys that fill no tile, a score mod, a sink, a head of keys for each of queries."""
    inputs = spoilt(1, 2, 2, 45, 51, 40, 24, dtype=dtype)
    bias = lambda h, i, j: (j - i) * 0.05
    sink = torch.tensor([0.5, -1.0], dtype=dtype)
    mask = lambda b, h, i, j: (j <= i + 3 + h) & (j % 7 != 2)
    seeing.judge(inputs, PLANTS[plant], mask, bias=bias, sink=sink, kernel_options={"tile_m": 64, "tile_n": 32})


def test_12_lists_that_hide_and_a_mask_beside_them() -> None:
    """The mask in the lists, another one in every tile, full ones too."""
    lists, beside = lambda b, h, i, j: j < i // 32 * 32 + 32, lambda b, h, i, j: (i - j) % 3 != 1
    both = lambda b, h, i, j: lists(b, h, i, j) & beside(b, h, i, j)
    made = anyattn.create_block_mask(lists, None, None, 56, 56, "cpu", 32)
    for plant in (seeing.keys, seeing.queries):
        seeing.judge(spoilt(1, 2, 1, 56, 56, 16, 16), plant, both, block_mask=made, **{"mask_mod": beside})


def test_12_in_splits_and_of_heads_that_share_a_tile() -> None:
    """What a split meets is its own; the query heads of a group lie side by side."""
    for splits in (1, 3):
        options = {"kernel_options": {"num_splits": splits}}
        seeing.judge(spoilt(1, 6, 2, 3, 60, 16, 16), seeing.keys, masks.causal(54), label=f"{splits} splits", **options)


def test_12_rows_that_see_the_sink_alone() -> None:
    """Whatever such a row's query and gradient hold, all gradients are the same, to the bit: none of it is looked at."""
    q, k, v, dout = spoilt(1, 2, 1, 40, 40, 16, 16)
    found = []
    for fill in FILLS:
        leaves = [t.clone() for t in (q, k, v)]
        leaves[0][:, :, :16], seen_by = fill, dout.clone()
        seen_by[:, :, :16] = fill
        leaves = [t.requires_grad_() for t in (*leaves, torch.tensor([0.5, -1.0]))]
        out = anyattn.flex_attention(*leaves[:3], mask_mod=lambda b, h, i, j: (j <= i) & (i >= 16), sink=leaves[3], enable_gqa=True)
        found.append([out.detach(), *torch.autograd.grad(out, leaves, seen_by)])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_12_documents_as_sequences() -> None:
    """Keys of another document lie beside a document's own; ids that come back are run by lists."""
    from anyattn import check

    ids = torch.repeat_interleave(torch.tensor([4, 1, 3]), torch.tensor([20, 21, 15]))
    for one in (ids, torch.where(torch.arange(56) < 50, ids, 4)):
        mask = lambda b, h, i, j, one=one: (one[i] == one[j]) & (i >= j)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(check, "row_ranges", lambda _: None)
            lists = anyattn.create_block_mask(mask, None, None, 56, 56, device="cpu", BLOCK_SIZE=16)
            for plant in (seeing.keys, seeing.queries):
                seeing.judge(spoilt(1, 2, 1, 56, 56, 16, 16), plant, mask, block_mask=lists)


@pytest.mark.parametrize("page_size", [0, 8, 16])
def test_12_in_a_cache_before_the_window(page_size: int) -> None:
    """Keys that are in the cache's length and before the window of every row, in pages too."""
    q, k, v = (torch.randn(2, n, h, 16, generator=torch.Generator().manual_seed(n + h)) for n, h in ((3, 4), (64, 2), (64, 1)))
    v = v.expand(2, 64, 2, 16).contiguous()
    spoiled = [t.clone() for t in (k, v)]
    for t in spoiled:
        t[:, :20] = math.nan
    lengths, table = torch.tensor([41, 57], dtype=torch.int32), None
    stored = [(k.double(), v.double()), (k, v), tuple(spoiled)]
    options: dict[str, Any] = {"cache_seqlens": lengths, "causal": True, "window_size": (12, 0)}
    want = [anyattn.flash_attn_with_kvcache(q.to(kv[0]), *kv, backend="torch", **options) for kv in stored[:2]]
    if page_size:
        table = torch.randperm(2 * 64 // page_size, generator=torch.Generator().manual_seed(1)).view(2, -1).int()
        pools = [torch.empty(2 * 64 // page_size, page_size, 2, 16) for _ in spoiled]
        for pool, t in zip(pools, spoiled, strict=True):
            pool[table.flatten().long()] = t.view(-1, page_size, 2, 16)
        spoiled = pools
    for splits in (1, 3):
        got = anyattn.flash_attn_with_kvcache(q, *spoiled, num_splits=splits, page_table=table, **options)
        budget.check(f"{splits} splits", got, *want)


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
        together = list(pool.map(call, range(12)))
    for at, got in enumerate(together):
        assert all(torch.equal(a, b) for a, b in zip(got, call(at), strict=True)), at
