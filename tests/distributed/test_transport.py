"""The choice between keys and heads as what travels: predicted times, statistics, and what a plan tells."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed.head_share import are_divided

S, RANKS = 2**16, 4


def mask_of(mod: Callable, heads: int | None = None) -> Any:
    return anyattn.create_block_mask(mod, None, heads, S, S, device="cpu", BLOCK_SIZE=1024)


def planned(heads: tuple[int, int] | None, ranks: int = RANKS, **options: Any) -> Any:
    return ad.plan(mask_of(masks.causal()), ranks=ranks, heads=heads, **options)


def bytes_of(heads: tuple[int, int], ranks: int) -> float:
    """What a rank receives for q, k, v and out of even rows, in 16 bits and heads of 128."""
    queries, keys = (max(n, ranks) for n in heads)
    return (2 * queries + 2 * keys) * 128 * 2 * (ranks - 1) * S / ranks**2


@pytest.mark.parametrize(("heads", "ranks"), [((16, 16), 4), ((16, 4), 2), ((16, 2), 8), ((8, 1), 8)])
def test_what_heads_receive(heads: tuple[int, int], ranks: int) -> None:
    stats = planned(heads, ranks, transport="heads").stats
    assert stats.transport == stats.placement == "heads" and stats.load == 1.0 and set(stats.pieces) == {1}
    assert stats.bound == stats.received_share
    for received in stats.received:
        assert 0 <= received * 2 * heads[1] * 128 * 2 - bytes_of(heads, ranks) < 2 * heads[1] * 128 * 2


def test_auto_takes_heads_where_they_are_fewer_bytes_and_the_user_names_them() -> None:
    """Multi-head attention on many ranks: all keys of an all-gather against a part of everything."""
    assert planned((16, 16), 8).transport == "heads"
    assert planned((16, 16), 8, transport="keys").transport == "keys"
    assert planned(None, 8).transport == "keys"  # calls may have any heads
    assert planned((12, 12), 8).transport == "keys"  # which cannot be divided
    assert planned((16, 2), 2).transport == "keys"  # few K/V heads: keys are less
    assert planned((16, 16), 1).transport == "keys"
    window = ad.plan(mask_of(masks.sliding_window(64, 0)), ranks=8, heads=(16, 16))
    assert window.transport == "keys"  # few keys travel


def test_auto_weighs_the_masks_of_a_model_by_their_layers() -> None:
    both = {"full": mask_of(masks.causal()), "window": mask_of(masks.sliding_window(64, 0))}
    found = [ad.plan(both, ranks=8, heads=(16, 16), weights={"full": n, "window": 20 - n}).transport for n in (1, 19)]
    assert found == ["keys", "heads"]


def test_heads_of_uneven_masks_are_uneven_load() -> None:
    """Heads of the second rank see a window; no head sees anything."""
    narrow = mask_of(lambda b, h, q, k: (q >= k) & ((h < 2) | (q - k < 64)), 4)
    stats = ad.plan(narrow, ranks=2, heads=(4, 4), transport="heads").stats
    assert stats.load > 1.5 and stats.loads[0] == stats.load and sum(stats.loads) == 2
    hidden = mask_of(lambda b, h, q, k: h > 7, 4)
    assert ad.plan(hidden, ranks=2, heads=(4, 4), transport="heads").stats.loads == (1.0, 1.0)


def test_a_plan_names_what_travels() -> None:
    by_heads, by_keys = (planned((4, 4), transport=t) for t in ("heads", "keys"))
    for plan, word in ((by_heads, "heads"), (by_keys, "keys")):
        assert plan.transport == word and ("heads" in repr(plan)) == (word == "heads")
        assert f"transport: {word}" in plan.explain() and f"{word} received" in str(plan.stats)
        assert pickle.loads(pickle.dumps(plan)).transport == word
    assert by_heads.digest != by_keys.digest
    assert "rows of rank 3: 49152:65536" in by_heads.explain()
    window = mask_of(masks.sliding_window(64, 0))
    same = [ad.plan(window, ranks=RANKS, transport=t) for t in ("heads", "keys")]
    assert same[0].rows_of(1) == same[1].rows_of(1) and same[0].digest != same[1].digest


def test_which_heads_ranks_divide() -> None:
    divided = {(q, k) for q in range(1, 13) for k in range(1, q + 1) if q % k == 0 and are_divided(q, k, 4)}
    assert divided == {(4, 1), (4, 2), (4, 4), (8, 1), (8, 2), (8, 4), (8, 8), (12, 1), (12, 2), (12, 4), (12, 12)}
