"""Routes of keys over nodes: each needed key arrives once, and into a node at most once."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed.channel import node_size_of
from anyattn.distributed.layout import Layout
from anyattn.distributed.placement import CostModel, Work, place
from anyattn.distributed.relay import Route, arrivals_of, exchanges_of, route_of
from tests.distributed.test_placement import MASKS, work

NODES = ((1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (3, 2), (2, 3), (4, 4), (1, 6))  # nodes, ranks of each


def positions(intervals: Iterable[tuple[int, int]]) -> list[int]:
    return [n for start, stop in intervals for n in range(start, stop)]


def delivered(layout: Layout) -> list[Route]:
    """The routes of all ranks, whose exchanges have been played and checked."""
    ranks, size = range(layout.ranks), layout.node_size
    routes = [route_of(layout, rank) for rank in ranks]
    number = len(exchanges_of(layout))
    came: list[list[int]] = [[] for _ in ranks]  # global positions of received keys
    crossed: set[tuple[int, int]] = set()
    for at in range(number):
        messages = []
        for rank, route in enumerate(routes):
            own = positions(layout.rows_of(rank))
            if at == 0:
                sent = [own[n] for n in positions(route.rows)]
            else:
                sent = positions(route.passed)
                assert set(sent) <= set(came[rank])
            messages.append(np.split(sent, np.cumsum(route.sent[at])[:-1]))
            assert len(route.sent) == len(route.received) == number and len(sent) == sum(route.sent[at])
        for rank in ranks:
            assert routes[rank].sent[at][rank] == 0
            assert routes[rank].received[at] == tuple(len(messages[r][rank]) for r in ranks)
            for source in ranks:
                came[rank] += messages[source][rank].tolist()
                if source // size != rank // size:
                    keys = [(rank // size, key) for key in messages[source][rank].tolist()]
                    assert not keys or at == 0
                    assert not crossed & set(keys) and len(set(keys)) == len(keys)
                    crossed |= set(keys)
    for rank, route in enumerate(routes):
        assert came[rank] == positions(route.keys)
        assert len(set(came[rank])) == len(came[rank])
        needed = set(positions(layout.intervals(layout.needs[rank] & (layout.owner != rank))))
        assert needed <= set(came[rank]) <= needed | set(positions(route.passed))
        assert all(any(a <= start and stop <= b for a, b in route.arriving[0]) for start, stop in route.passed)
        assert layout.received(rank) == len(needed)
    inside, across, exchanges = arrivals_of(layout)
    assert exchanges == number and (inside + across).tolist() == [len(keys) for keys in came]
    assert int(across.sum()) == len(crossed)
    return routes


def layout_of(counted: Work, owner: np.ndarray, ranks: int, size: int) -> Layout:
    needs = np.stack([counted.needs[owner == rank].any(0) for rank in range(ranks)])
    return Layout(counted.length, counted.chunk, owner, needs, size)


@settings(max_examples=80, deadline=None)
@given(name=st.sampled_from(sorted(MASKS)), length=st.integers(1, 400), nodes=st.sampled_from(NODES), block=st.sampled_from([1, 8, 16]))
def test_a_needed_key_arrives_once_and_crosses_into_a_node_at_most_once(name: str, length: int, nodes: tuple[int, int], block: int) -> None:
    ranks, size = nodes[0] * nodes[1], nodes[1]
    counted = work(MASKS[name](length), length, ranks, block)
    made = place(counted, ranks, CostModel.of(ranks=ranks, node_size=size))
    layout = layout_of(counted, made.owner, ranks, size)
    delivered(layout)
    assert made.stats.node_size == size and made.stats.across == tuple(arrivals_of(layout).across)
    assert made.stats.across_share <= made.stats.received_share


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.sampled_from(NODES), chunks=st.integers(1, 24))
def test_any_owners_and_needs_are_served(seed: int, nodes: tuple[int, int], chunks: int) -> None:
    """Owners that change from chunk to chunk, and needs that no mask has; the last chunk is short."""
    rng = np.random.default_rng(seed)
    ranks = nodes[0] * nodes[1]
    owner = rng.integers(0, ranks, chunks).astype(np.int32)
    needs = rng.random((ranks, chunks)) < rng.random()
    delivered(Layout(4 * chunks - 1, 4, owner, needs, nodes[1]))


def test_one_node_and_nodes_of_one_rank_have_one_exchange() -> None:
    counted = work(masks.causal(), 512, 8, 8)
    owner = place(counted, 8).owner
    one, alone, four = (layout_of(counted, owner, 8, size) for size in (8, 1, 2))
    assert [len(exchanges_of(layout)) for layout in (one, alone, four)] == [1, 1, 2]
    assert [route_of(one, rank) for rank in range(8)] == [route_of(alone, rank) for rank in range(8)]
    assert int(arrivals_of(one).across.sum()) == 0 and int(arrivals_of(alone).inside.sum()) == 0


def test_a_key_that_one_rank_of_another_node_needs_goes_straight_to_it() -> None:
    counted = work(masks.sliding_window(32, 0), 512, 8, 8)
    layout = layout_of(counted, place(counted, 8, CostModel.of(ranks=8, node_size=2)).owner, 8, 2)
    assert len(exchanges_of(layout)) == 1 and int(arrivals_of(layout).across.sum()) == 3 * 32


def test_causal_attention_over_eight_nodes_loads_their_network_cards_alike() -> None:
    """A node receives each key once, and its ranks receive as many of these; so do they send."""
    counted = work(masks.causal(), 64 * 64, 64, 16)
    made = place(counted, 64, CostModel.of(ranks=64, node_size=8))
    layout = layout_of(counted, made.owner, 64, 8)
    (direct, _) = exchanges_of(layout)
    crosses = direct.arrives & (direct.senders // 8 != np.arange(64)[:, None] // 8)
    received = crosses.sum(1).reshape(8, 8)
    sent = np.bincount(layout.owner, crosses.sum(0), 64).reshape(8, 8)
    for numbers in (received, sent):
        assert (numbers.max(1) - numbers.min(1) <= numbers.max() / 8).all()
    seen = layout.needs.reshape(8, 8, -1).any(1) & (layout.owner // 8 != np.arange(8)[:, None])
    assert made.stats.across_share * 63 * 64 * 64 == int(crosses.sum()) * counted.chunk == int(seen.sum()) * counted.chunk
    assert 6.5 * made.stats.across_share <= made.stats.received_share


@pytest.mark.parametrize(
    ("ranks", "local_sizes", "size"),
    [
        (range(4), "2222", 2),
        (range(8, 16), "8" * 8, 8),  # one node
        ((0, 8, 16), "888", 1),  # cp over nodes, tp inside
        (range(0, 16, 2), "8" * 8, 4),  # cp before tp
        ((1, 0, 3, 2), "2222", 2),
        ((0, 2, 1, 3), "2222", None),  # ranks of a node are not neighbours
        ((0, 2, 3, 1), "2222", None),
        (range(3), "222", None),  # a node has fewer
        (range(6), "224444", None),
        (range(2), ("", ""), None),  # no torchrun
        (range(2), ("2", ""), None),
        (range(2), "00", None),
    ],
    ids=str,
)
def test_nodes_are_torchruns_if_even_and_in_order(ranks: Sequence[int], local_sizes: Sequence[str], size: int | None) -> None:
    assert node_size_of(ranks, local_sizes) == size


@pytest.mark.parametrize("node_size", [0, 3, 16, True, 2.0, "2"])
def test_a_size_of_nodes_that_does_not_divide_the_ranks_is_refused(node_size: object) -> None:
    with pytest.raises(ValueError, match=r"node_size=.*; wanted a divisor of the 8 ranks"):
        ad.plan(masks.causal(), S=256, ranks=8, node_size=node_size, device="cpu")  # type: ignore[arg-type]


def test_a_plan_names_what_crosses_nodes() -> None:
    made = ad.plan(masks.causal(), S=2048, ranks=8, node_size=4, device="cpu")
    assert made.node_size == 4 and "from other nodes, 2 of 4" in str(made.stats)
    assert f"keys received from other nodes by rank, some to pass them on: {', '.join(map(str, made.stats.across))}" in made.explain()
    digests = {ad.plan(masks.causal(), S=2048, ranks=8, node_size=size, device="cpu").digest for size in (1, 2, 4, 8, None)}
    assert len(digests) == 4  # none is one node
    assert "nodes" not in ad.plan(masks.causal(), S=2048, ranks=8, device="cpu").explain()
