"""Decoding on a CPU: results against the oracle, bits that do not depend on the batch, and the number of operations of a warm call."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.mods.analysis.row_ranges import has_range_on_host, limits, range_on_host, row_ranges
from anyattn.mods.tracing.trace import trace
from tests.entry_points.test_kvcache import Meaning, Setting, call, check, made
from tests.support.flex_calls import judge
from tests.support.tiles import library_masks

LENGTHS = (40, 7, 300, 40)
SINK = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.25])
SETTINGS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head": {"heads": 1, "kv_heads": 1},
    "one K/V head": {"kv_heads": 1},
    "as many K/V heads": {"kv_heads": 6},
    "pages of 3": {"page_size": 3},
    "pages of 16 behind padding": {"page_size": 16, "leftpad": (5, 0, 33, 5)},
    "other rows": {"shuffled_rows": True},
    "left padding": {"leftpad": (5, 0, 33, 5)},
    "alike": {"cached": (40, 40, 40, 40)},
    "empty": {"cached": (0, 7, 0, 0), "new": 0},
    "16 bits": {"dtype": torch.bfloat16, "page_size": 16},
    "64 bits": {"dtype": torch.float64},
}


def setting(name: str) -> Setting:
    return Setting(
        **{"cached": LENGTHS, "queries": 1, "new": 1, "capacity": 340, "heads": 6, "kv_heads": 2, "d": 24, "dv": 24, **SETTINGS[name]}
    )


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("meaning", [Meaning(causal=True), Meaning(window_size=(9, 0)), Meaning(window_size=(20, -5))])
def test_against_the_oracle(name: str, meaning: Meaning) -> None:
    check(setting(name), meaning)
    check(setting(name), replace(meaning, sink=SINK[: setting(name).heads]))


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("name", SETTINGS)
def test_an_entry_has_the_same_bits_in_any_batch(name: str) -> None:
    """Alone, and beside longer and shorter ones, on whichever thread."""
    case = made(setting(name), Meaning(causal=True))
    out, lse = call(made(setting(name), Meaning(causal=True)))
    per_entry = ("k", "v", "cache_seqlens", "cache_leftpad", "cache_batch_idx", "page_table")
    for b in range(4):
        options = {n: t[b : b + 1] if n in per_entry else t for n, t in case.options.items()}
        q, *caches = (t.clone() for t in case.args)
        has_rows = "page_table" in options or "cache_batch_idx" in options
        caches = caches if has_rows else [c[b : b + 1] for c in caches]
        alone = anyattn.flash_attn_with_kvcache(q[b : b + 1], *caches, return_lse=True, **options)
        assert torch.equal(alone[0][0], out[b]) and torch.equal(alone[1][0], lse[b]), b


def test_an_entry_of_one_query_has_the_same_bits_beside_entries_of_several() -> None:
    g = torch.Generator().manual_seed(0)
    q, caches = torch.randn(5, 6, 32, generator=g), torch.randn(2, 3, 400, 2, 32, generator=g)
    options: dict[str, Any] = {"causal": True, "window_size": (100, 0), "return_lse": True, "max_seqlen_q": 3}
    lengths, ends = torch.tensor([300, 20, 77]), torch.tensor([0, 1, 4, 5], dtype=torch.int32)
    out, lse = anyattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, cu_seqlens_q=ends, **options)
    for b, row in ((0, 0), (2, 4)):
        alone, alone_lse = anyattn.flash_attn_with_kvcache(
            q[None, row : row + 1], *caches[:, b : b + 1], cache_seqlens=lengths[b : b + 1], **{**options, "max_seqlen_q": None}
        )
        assert torch.equal(alone[0, 0], out[row]) and torch.equal(alone_lse[0, :, 0], lse[:, row])


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_one_row_of_flex_attention_and_its_gradients(heads: tuple[int, int]) -> None:
    """Where a mask has one range, several, reads a tensor, differs by head, or hides all keys."""
    g = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(2, h, n, 16, generator=g, dtype=torch.float64).float() for h, n in zip((heads[0], heads[1], heads[1]), (1, 90, 90))
    )
    last = torch.tensor(60)
    for mask in (
        None, lambda b, h, i, j: j <= i + 50, lambda b, h, i, j: (j < 10) | (j > 70), lambda b, h, i, j: j <= i + last,
        lambda b, h, i, j: j <= 20 * h + b, lambda b, h, i, j: j < i, lambda b, h, i, j: (i + 80 - j) % 3 == 0,
    ):  # fmt: skip
        judge(q, k, v, mask=mask)


def test_rows_that_overlap_and_last_dimensions_apart() -> None:
    g = torch.Generator().manual_seed(2)
    base = torch.randn(2, 2, 16 * 50 + 16, generator=g)
    sliding = base.as_strided((2, 2, 50, 16), (*base.stride()[:2], 8, 1))
    same = base[:, :, None, :16].expand(2, 2, 50, 16)
    apart = torch.randn(2, 2, 16, 50, generator=g).transpose(2, 3)
    q = torch.randn(2, 4, 1, 16, generator=g)
    for x in (sliding, same, apart):
        judge(q, x, x.flip(2) if x is not same else x)
        judge(q.transpose(1, 3).contiguous().transpose(1, 3), x, x)


def test_the_range_of_a_row_in_numbers_is_that_of_its_tensors() -> None:
    judged = 0
    for seqlen_q, seqlen_k in ((33, 33), (5, 40), (40, 5)):
        every = library_masks(seqlen_q, seqlen_k) | {"window": masks.sliding_window(7, 2, offset=11), "far": masks.causal(2**40)}
        for name, mask in every.items():
            ranges = row_ranges(trace(mask, "mask"))
            if ranges is None or not has_range_on_host(ranges):
                continue
            judged += 1
            (lo,), (hi,) = (x[:, 0, 0].tolist() for x in limits(ranges, seqlen_q, seqlen_k))  # type: ignore[union-attr]
            for i in range(seqlen_q):
                found = [min(max(n, 0), seqlen_k) for n in range_on_host(ranges, i)]
                assert range(*found) == range(lo[i], hi[i]), (name, i)
    assert judged >= 10


def operations(given: dict[str, Any]) -> int:
    """Of a warm call."""

    def run() -> Tensor:
        return anyattn.flash_attn_with_kvcache(**given)  # type: ignore[no-any-return]

    with torch.no_grad():
        for _ in range(2):
            run()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as found:
            run()
    kernel = "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert any(e.name == kernel for e in found.events()), "the call is not ATen's"
    return sum(e.name.startswith("aten::") and e.cpu_parent is None for e in found.events())


@pytest.mark.parametrize("window", [-1, 20])
def test_a_warm_step_is_few_operations(window: int) -> None:
    """Two writes, a kernel, and views; another entry adds its two views, its call and its copy."""
    counts = []
    for batch in (1, 4):
        kept = torch.zeros(2, batch, 80, 2, 16)
        given = {"q": torch.randn(batch, 1, 4, 16), "k_cache": kept[0], "v_cache": kept[1], "causal": True, "window_size": (window, 0)}
        given |= {"k": torch.randn(batch, 1, 2, 16), "v": torch.randn(batch, 1, 2, 16)}
        counts.append(operations(given | {"cache_seqlens": torch.tensor([50, 50, 9, 30])[:batch]}))
    assert counts[0] <= 18 and counts[1] <= counts[0] + 3 * 5, counts
