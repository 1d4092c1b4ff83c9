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
import test_flash_cache as cache_tests
import test_flash_packed as packed_tests
from calls import judge
from flash_calls import RECIPES

import anyattn
from anyattn import masks
from anyattn.testing import cases

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


@pytest.mark.parametrize("name", ["ranges", "lists"])
def test_12_garbage_that_a_mask_hides_stays_with_the_tiles_that_meet_it(name: str) -> None:
    """What docs/triton.md says: it may reach rows whose tile meets its own, and no others, forward and backward."""
    q, k, v = qkv(1, 2, 1, 160, 160, 16, 16)
    mask = {"ranges": masks.sliding_window(19, 0), "lists": lambda b, h, i, j: (i // 32 == j // 32) & ((i + j) % 5 != 0)}[name]
    dout, found = torch.ones(1, 2, 160, 16), []
    for fill in FILLS:
        leaves = [q.clone(), *(torch.cat([torch.full_like(t[:, :, :16], fill), t[:, :, 16:]], 2) for t in (k, v))]
        leaves = [t.requires_grad_() for t in leaves]
        options = {"kernel_options": {"tile_m": 32, "tile_n": 16}}
        if name == "lists":
            options["block_mask"] = anyattn.create_block_mask(mask, None, None, 160, 160, "cpu", 32)
        else:
            options["mask_mod"] = mask
        out, lse = anyattn.flex_attention(*leaves, enable_gqa=True, return_lse=True, **options)
        found.append([out.detach(), lse.detach(), *torch.autograd.grad(out, leaves, dout)])
    far = slice(64, None)  # row tiles that visit no key below 32, and the keys that no other row tile visits
    for other in found[1:]:
        assert all(torch.equal(a[:, :, far], b[:, :, far]) for a, b in zip(found[0], other, strict=True))


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
