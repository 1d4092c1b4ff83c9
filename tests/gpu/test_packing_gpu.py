"""Query heads that share row tiles (packed GQA) on a GPU: judged like all results, and compared with heads apart.

Heads apart give the same bits where no row maximum is guessed for the rows of a warp together: each row meets its keys in the same tiles
and order, independently of its neighbours in a tile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, scores
from tests.support.gpu import judging, ragged
from tests.support.gpu.judging import DEVICE, KINDS, Capturing, for_library, judge, qkv, random, same, surrounded
from tests.support.gpu.ragged import FORMS, drawn

pytestmark = pytest.mark.gpu
judging.needs_the_backend("hopper")

GROUPS = [(4, 2), (6, 2), (8, 2), (10, 2), (16, 2), (16, 1), (71, 1)]  # heads of q and k; not all fill the tiles that they share
SK = 333
SHARE, APART = ({"kernel_options": {"pack_gqa": packs}} for packs in (True, False))
TABLE, SLOPES = random(71, 500), torch.rand(71, generator=torch.Generator().manual_seed(8)) * 0.1
IDS = (torch.rand(500, generator=torch.Generator().manual_seed(9)) < 0.02).long().cumsum(0)
SINKS = torch.linspace(-2, 3, 71)


def judge_packed(given: list[torch.Tensor], **options: Any) -> None:
    """Heads that share tiles, judged; asking for the highest scores changes no bit of the output."""
    packed = judge(given, **options, **SHARE)
    if options.pop("has_max", False):
        assert same(packed, judge(given, **options, **SHARE)), options.get("label")


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("sq", [1, 5, 16, 100, 129])
def test_any_ratio(groups: tuple[int, int], sq: int) -> None:
    for kind in KINDS:
        for has_max in (False, True):
            judge_packed(qkv(2, *groups, sq, SK, kind=kind), mask=masks.causal(SK - sq), has_max=has_max, label=f"{groups} {sq} {kind}")
    judge_packed(qkv(2, *groups, sq, SK), label=f"{groups} {sq} full")


@pytest.mark.parametrize("groups", GROUPS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_same_bits_as_apart(groups: tuple[int, int], kind: str) -> None:
    """Where row maxima are not speculative, as under a score mod with a branch, sharing tiles changes no bit."""

    def far_is_halved(s: torch.Tensor, b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return torch.where(i - j > 20, s * 0.5, s)

    given = qkv(2, *groups, 129, SK, kind=kind)
    options: dict[str, Any] = {"mask": masks.causal(SK - 129), "score": far_is_halved, "label": f"{groups} {kind}"}
    assert same(judge(given, **options, **SHARE), judge(given, **options, **APART))


@pytest.mark.parametrize("d,dv", [(64, 64), (96, 96), (192, 128), (256, 256), (40, 40)])
def test_other_head_dims(d: int, dv: int) -> None:
    for groups, sq in (((8, 1), 7), ((10, 2), 60), ((16, 2), 200)):
        judge_packed(qkv(2, *groups, sq, SK, d, dv), mask=masks.causal(SK - sq), label=f"{groups} {sq}")


def test_half_precision() -> None:
    for groups, sq in (((6, 2), 60), ((16, 2), 20)):
        judge_packed(qkv(2, *groups, sq, SK, dtype=torch.float16), mask=masks.causal(SK - sq), label=f"{groups} {sq}")


@pytest.mark.parametrize("sq,sk", [(1, 1), (1, 4000), (100, 1), (40, 64), (129, 5), (17, 16), (300, 300)])
def test_lengths(sq: int, sk: int) -> None:
    """One key, fewer keys than queries, whole tiles: rows that see nothing give 0 and -inf, tiles that visit nothing too."""
    judge_packed(qkv(2, 8, 1, sq, sk), mask=masks.causal(sk - sq))
    judge_packed(qkv(2, 6, 2, sq, sk), mask=masks.sliding_window(3, -9), sink=SINKS[:6])
    judge_packed(qkv(2, 16, 2, sq, sk))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [(100, 0), (50, 20), (None, -30), (3, -9)], ids=str)
def test_windows(window: tuple[int | None, int], kind: str) -> None:
    for groups, sq in (((16, 2), 33), ((6, 2), 100)):
        judge_packed(qkv(2, *groups, sq, 120, kind=kind), mask=masks.sliding_window(*window), has_max=kind == "normal")


SCORES: dict[str, Any] = {
    "softcap": scores.softcap(5.0),
    "alibi": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s - t[h] * (i + 300 - j).abs())(to(SLOPES))),
    "by head and key": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, j])(to(TABLE))),
    "by head": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s * t[h, 0])(to(TABLE))),
    "by head and entry": lambda s, b, h, i, j: s + 0.1 * h - b,
    "by distance": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, (i - j).abs()])(to(TABLE))),
    "straight": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j + 350])(to(TABLE))),
    "capped by head": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: 8 * torch.tanh(s * t[h, 2]))(to(TABLE))),
    "tanh by head": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: t[h, 1] * torch.tanh(s + t[h, i]))(to(TABLE))),
}


@pytest.mark.parametrize("groups", [(6, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_score_mods_see_their_head(name: str, groups: tuple[int, int]) -> None:
    for sq in (5, 100):
        judge_packed(qkv(2, *groups, sq, SK), score=SCORES[name], mask=masks.causal(SK - sq), label=f"{sq}")


MASKS: dict[str, Any] = {
    "prefix": masks.prefix_lm(60),
    "sinks": masks.sink_window(4, 40),
    "document": Capturing(lambda to: masks.document(to(IDS))),
    "dilated": masks.dilated(3, 20),
    "chunked": masks.chunked(50),
}


@pytest.mark.parametrize("groups", [(6, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_masks_with_lists(name: str, groups: tuple[int, int]) -> None:
    """A list's row tile is many of the kernel's."""
    for sq in (9, 150, 300):
        judge_packed(qkv(2, *groups, sq, SK), mask=MASKS[name], sink=SINKS[: groups[0]], label=f"{sq}")


def test_lists_that_the_call_brings() -> None:
    mask = masks.prefix_lm(60)
    for batch in (None, 2):
        lists = anyattn.create_block_mask(mask, batch, None, 150, SK, device=DEVICE)
        judge_packed(qkv(2, 16, 2, 150, SK), mask=mask, block_mask=lists)


def test_heads_that_see_other_keys_stay_apart() -> None:
    mask = lambda b, h, i, j: (j <= i + 10 * h) & (j > i - 90)
    for preferred in ({}, SHARE, APART):
        judge(qkv(2, 16, 2, 9, SK), mask=mask, **preferred)


def test_what_lies_around_is_not_read() -> None:
    for groups in ((6, 2), (16, 1)):
        given = qkv(2, *groups, 21, 140)
        judge_packed([surrounded(t) for t in given], mask=masks.causal(119))
        expanded = [given[0][:1].expand(2, -1, -1, -1), *given[1:]]
        judge_packed(expanded, mask=masks.causal(119))


def test_the_plan_packs_by_itself_and_reruns_are_equal() -> None:
    for groups, sq in (((4, 1), 9), ((8, 1), 64), ((6, 2), 33)):
        given = qkv(3, *groups, sq, 1000)
        first = judge(given, mask=masks.causal(1000 - sq))
        assert all(same(first, judge(given, mask=masks.causal(1000 - sq))) for _ in range(3))
        assert same(first, judge(given, mask=masks.causal(1000 - sq), **SHARE))


MIXED = ([1, 5, 0, 100, 16, 1, 63, 300, 128, 2], [50, 5, 9, 333, 200, 1, 64, 300, 700, 0])
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window and sink": {"window_size": (70, 5), "sink": SINKS},
    "softcap and alibi": {"causal": True, "softcap": 5.0, "alibi_slopes": SLOPES},
    "document": {"causal": True, "mask_mod": Capturing(lambda to: masks.document(to(torch.cat((IDS, IDS)))))},
}


OTHER_FORMS = ("tail", "partly used", "padded", "packed q, padded k", "pages of 48", "pages of 128")


@pytest.mark.parametrize("groups", [(6, 2), (16, 2), (71, 1)], ids=str)
@pytest.mark.parametrize("name,form", [*((name, "packed") for name in OPTIONS), *(("causal", form) for form in OTHER_FORMS)])
def test_sequences(name: str, form: str, groups: tuple[int, int]) -> None:
    """Rows that a sequence's end cuts are written one by one, others by the copy engine: what follows is another sequence's."""
    options, exact = dict(OPTIONS[name]), {}
    for key, value in options.items():
        if isinstance(value, torch.Tensor):
            options[key] = for_library(value[: groups[0]])
        elif isinstance(value, Capturing):
            options[key], exact[key] = judging.both(value)
    batch = drawn(MIXED, *groups)
    ragged.judge(batch, FORMS[form](batch), options | {"pack_gqa": True}, f"{name}, {form}", exact)
