"""Document block masks on the Hopper backend, as far as it goes without a GPU: which launches there are, and what their tables say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores
from anyattn.backends.hopper import api
from anyattn.backends.hopper.compile import launch
from anyattn.documents import rewrite
from anyattn.documents.rewrite import DocumentTables
from tests.support.hopper.pretended import Launch

S = 700
IDS = torch.repeat_interleave(torch.tensor([4, 9, -1, 0]), torch.tensor([1, 300, 128, 271]))
ENTRIES = torch.stack([IDS, IDS.flip(0)])
INTERLEAVED = torch.arange(S) // 50 % 2


def qkv(batch: int = 2, heads: int = 2) -> list[Tensor]:
    return [torch.zeros(batch, heads, S, 128, dtype=torch.bfloat16) for _ in range(3)]


def lists_of(mask: Any) -> Any:
    return anyattn.create_block_mask(mask, 2, None, S, S, device="cpu")


def call(mask: Any, lists: Any = None, **options: Any) -> Any:
    return anyattn.flex_attention(*qkv(), block_mask=lists_of(mask) if lists is None else lists, **options)


def order_of(one: Launch) -> list[tuple[int, int]]:
    """(row tile, entry) of those that a launch has to do."""
    config, arguments = one
    order, rows = arguments[11].tolist(), arguments[16]
    assert config.has_count and len(order) == rows + 1
    return [(m, b) for m, _, b in order[: order[rows][0]]]


def tiles(*lengths: int) -> list[tuple[int, int]]:
    return sorted((m, b) for b, n in enumerate(lengths) for m in range(-(-n // 128)))


def test_documents_are_one_launch_over_sequences(launched: list[Launch]) -> None:
    call(masks.document(ENTRIES) & masks.causal())
    ((config, arguments),) = launched
    assert config.has_entries and config.lists is None and config.has_right and config.spread == "heads" and not config.always
    places, entries = 8, arguments[12].tolist()
    wanted = [(b, s, n) for b, row in enumerate(((1, 300, 128, 271), (271, 128, 300, 1))) for s, n in zip(starts(row), row, strict=True)]
    used = [e for e in entries if e[2]]
    assert [(e[0], e[1], e[2]) for e in used] == [(e[3], e[4], e[5]) for e in used] == wanted
    assert len(entries) == 2 * places and all(e[6:] == [0, 0, 0] for e in entries)
    found = order_of(launched[0])
    assert sorted(found) == tiles(*[n for _, _, n in wanted[:4]], 0, 0, 0, 0, *[n for _, _, n in wanted[4:]])
    seen = [min(entries[b][2], (m + 1) * 128) for m, b in found]
    assert seen == sorted(seen, reverse=True)
    assert arguments[3].shape == (2, 2, S, 128) and arguments[10] is None


def starts(lengths: Any) -> list[int]:
    return [sum(lengths[:i]) for i in range(len(lengths))]


def test_others_are_one_launch_by_lists(launched: list[Launch]) -> None:
    call(masks.document(INTERLEAVED))
    ((config, arguments),) = launched
    assert config.lists == "dense" and not config.has_entries and isinstance(arguments[7], Tensor)
    assert sorted(order_of(launched[0])) == tiles(S, S)


@pytest.mark.parametrize("ids,held", [(ENTRIES, True), (torch.stack([IDS, INTERLEAVED]), False)], ids=["documents", "others"])
def test_both_are_launched_until_it_is_known(ids: Tensor, held: bool, launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of which one has nothing to do; to the same results."""
    with monkeypatch.context() as patch:
        patch.setattr(DocumentTables, "answer", lambda self: None)
        mask = masks.document(ids) & masks.causal()
        lists = lists_of(mask)
        for _ in range(3):
            call(mask, lists, return_lse=True)
    assert len(launched) == 6 and [c.has_entries for c, _ in launched] == [True, False] * 3
    within, listed = launched[:2]
    assert [bool(order_of(x)) for x in (within, listed)] == [held, not held]
    assert all(a is b for a, b in zip(within[1][3:6], listed[1][3:6], strict=True))
    assert within[1][14].shape == listed[1][14].shape == (2,)
    call(mask, lists, return_lse=True)
    assert len(launched) == 7 and launched[-1][0] == launched[0 if held else 1][0]


def test_what_was_found_once_is_launched_again(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """With other tensors and numbers, and nothing is derived, described or looked for."""
    mask = masks.document(ENTRIES) & masks.causal()
    lists = lists_of(mask)
    cap = lambda c: scores.softcap(c).fn
    anyattn.flex_attention(*qkv(), cap(3.0), lists, scale=0.5)
    with monkeypatch.context() as patch:
        patch.setattr(api, "launch", None)
        patch.setattr(api, "kinds_of", None)
        patch.setattr(rewrite, "DocumentTables", None)
        given = qkv()
        anyattn.flex_attention(*given, cap(5.0), lists, scale=0.25)
    (_, first), (_, second) = launched
    assert all(x is y for x, y in zip(second[:3], given, strict=True)) and second[3] is not first[3]
    assert second[11] is first[11] and second[12] is first[12] and second[16:20] == first[16:20]
    assert (first[20][0], second[20][0]) == (3.0, 5.0) and second[15] == first[15] / 2


def test_other_ids_are_other_tables(launched: list[Launch]) -> None:
    ids = ENTRIES.clone()
    mask = masks.document(ids)
    lists = lists_of(mask)
    for _ in range(2):
        call(mask, lists)
    ids[:, 600:] = 77
    call(mask, lists)  # lists of the ids before hold
    assert launched.pop()[0].lists == "dense"
    call(mask, lists_of(mask))
    ids.copy_(INTERLEAVED.expand(2, -1))
    call(mask, lists_of(mask))
    assert launched[0][1][11] is launched[1][1][11]
    counts = [len(order_of(x)) for x in launched]
    assert counts == [16, 16, 15, 12] and [c.has_entries for c, _ in launched] == [True, True, True, False]


CALLS: dict[str, Callable[[], Any]] = {
    "no block mask": lambda: anyattn.flex_attention(*qkv(), mask_mod=masks.document(IDS)),
    "a bias by position": lambda: call(masks.document(IDS), score_mod=lambda s, b, h, i, j: s + i),
    "two kinds of rest": lambda: call(lambda b, h, i, j: (IDS[i] == IDS[j]) & ((i - j) % 2 == 0)),
    "several ranges": lambda: call(lambda b, h, i, j: (IDS[i] == IDS[j]) & ((i - j > 9) | (j - i > 9))),
    "lists of another mask": lambda: call(None, beside(masks.document(IDS))),
    "causal": lambda: call(masks.causal()),
}


def beside(mask: Any) -> Any:
    lists = lists_of(mask)
    lists.kv_indices = lists.kv_indices.clone()  # nobody knows any more that they follow from the mask
    return lists


@pytest.mark.parametrize("name", CALLS)
def test_other_calls_are_as_they_were(name: str, launched: list[Launch]) -> None:
    CALLS[name]()
    assert len(launched) == 1 and not launched[0][0].has_count and not launched[0][0].has_entries


def test_ahead_of_time_both_kernels_are_compiled(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Any] = []
    monkeypatch.setattr(launch, "warm", lambda config, kinds: found.append(config))
    with launch.compiling_only():
        call(masks.document(IDS))
        call(masks.document(INTERLEAVED))
    assert [(c.has_entries, c.has_count) for c in found] == [(True, True), (False, True)] * 2 and not launched
