"""Placements: every chunk has one owner, rows are equal, load is even, few keys travel, and every process finds the same."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.block_masks import create_block_mask
from anyattn.distributed.placement import CostModel, Placement, Work, bound_of, chunk_of, chunks_of, digest_of, load_of, place, work_of
from anyattn.distributed.placement.bisected import bisected, seams
from anyattn.distributed.placement.candidates import contiguous, fold
from anyattn.distributed.placement.chunks import packed, popcount, windows
from anyattn.distributed.placement.evened import evened
from anyattn.mods import masks
from tests.support.processes import python, result_of

PARTIAL = CostModel().partial


def documents(length: int, number: int, seed: int) -> Callable:
    """Causal attention in ``number`` documents with random edges."""
    edges = torch.sort(torch.randperm(length - 1, generator=torch.Generator().manual_seed(seed))[: number - 1] + 1)[0]
    return masks.causal() & masks.document(torch.searchsorted(edges, torch.arange(length), right=True).to(torch.int32))


MASKS: dict[str, Callable[[int], Callable | None]] = {
    "none": lambda length: None,
    "causal": lambda length: masks.causal(),
    "window": lambda length: masks.sliding_window(length // 40 + 1, 0),
    "prefix": lambda length: masks.causal() | (lambda b, h, q, k: k < length // 4),
    "documents": lambda length: documents(length, min(7, length), length),
    "dilated": lambda length: lambda b, h, q, k: (q - k) % 37 == 0,
    "one long row": lambda length: lambda b, h, q, k: (q == 0) | (q == k),
    "hidden": lambda length: lambda b, h, q, k: q < 0,
}


def work(mask: Callable | None, length: int, ranks: int, block: int) -> Work:
    lists = None if mask is None else create_block_mask(mask, None, None, length, length, "cpu", block)
    return work_of([lists], [1.0], chunk_of(length, ranks, block), length)


def travels(made: Placement, counted: Work) -> np.ndarray:
    """bool (ranks, chunks): which chunks of keys a rank receives."""
    ranks = made.stats.ranks
    needs = np.array([counted.needs[made.owner == rank].any(0) for rank in range(ranks)])
    return needs & (made.owner != np.arange(ranks)[:, None])


def check(made: Placement, counted: Work, ranks: int) -> None:
    """What every placement satisfies, computed from its owners alone."""
    stats, chunks = made.stats, counted.chunks
    assert made.owner.shape == (chunks,) and made.owner.dtype == np.int32 and made.owner.min() >= 0 and made.owner.max() < ranks
    numbers = np.bincount(made.owner, minlength=ranks)
    assert numbers.max() - numbers.min() <= 1
    keys = np.minimum(counted.chunk, counted.length - counted.chunk * np.arange(chunks))
    assert stats.rows == tuple(np.bincount(made.owner, keys, ranks).astype(int)) and sum(stats.rows) == counted.length
    received = travels(made, counted) @ keys
    assert stats.received == tuple(received)
    assert stats.received_share == received.sum() / max((ranks - 1) * counted.length, 1)
    cost = counted.visited.sum(1) + PARTIAL * counted.partial.sum(1)
    loads = np.bincount(made.owner, cost, ranks) / (cost.sum() / ranks) if cost.sum() else np.ones(ranks)
    assert np.abs(loads - stats.loads).max() < 1e-6 and stats.load == max(stats.loads)
    assert stats.pieces == tuple(int((np.diff(np.flatnonzero(made.owner == rank), prepend=-2) > 1).sum()) for rank in range(ranks))
    assert stats.bound <= stats.received_share
    assert 0 < stats.efficiency <= 1 and f"{ranks} rank" in stats.table()


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(sorted(MASKS)),
    length=st.integers(1, 700),
    ranks=st.integers(1, 17),
    block=st.sampled_from([1, 8, 16, 48]),
)
def test_every_chunk_has_one_owner_and_rows_are_equal(name: str, length: int, ranks: int, block: int) -> None:
    counted = work(MASKS[name](length), length, ranks, block)
    check(place(counted, ranks), counted, ranks)


@pytest.mark.parametrize("ranks", [64, 100, 1000, 1024])
def test_many_ranks(ranks: int) -> None:
    counted = work(MASKS["documents"](4096), 4096, ranks, 2)
    check(place(counted, ranks), counted, ranks)


@settings(max_examples=40, deadline=None)
@given(data=st.data(), ranks=st.integers(1, 9), chunks=st.integers(1, 40))
def test_every_candidate_is_legal_for_any_counts(data: st.DataObject, ranks: int, chunks: int) -> None:
    """Counts that no mask of a few ranges has, and loads far apart."""
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    visited = np.floor(rng.random((chunks, chunks)) ** 8 * 4 ** rng.integers(0, 9))
    counted = Work(visited, np.minimum(visited, 1), visited > 0, 16, 16 * chunks - 5, (16, 16))
    whole = chunks_of(counted, PARTIAL)
    halved = bisected(whole, ranks, 0.03, 2**14)
    for owner in (contiguous(whole, ranks), fold(whole, ranks), halved, evened(whole, halved, ranks, 1.0)):
        numbers = np.bincount(owner, minlength=ranks)
        assert len(owner) == chunks and numbers.max() - numbers.min() <= 1
        load = load_of(whole, owner, ranks, CostModel())
        assert bound_of(whole, ranks, load.balance) <= load.received.sum()
    check(place(counted, ranks), counted, ranks)


def every_placement(chunks: int, ranks: int) -> list[np.ndarray]:
    """All owners with equal numbers of chunks, but for which rank is which."""
    owners = [np.array((0, *rest)) for rest in np.ndindex(*[ranks] * (chunks - 1))]
    return [o for o in owners if (np.bincount(o, minlength=ranks) == chunks // ranks).all()]


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_is_below_every_placement_as_even_as_it_asks(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = np.tri(8, dtype=bool) if seed == 0 else rng.random((8, 8)) < 0.2 + 0.1 * seed
    visited = shape * rng.integers(1, 3, (8, 8)).astype(float) if seed else shape * 1.0
    whole = chunks_of(Work(visited, 0 * visited, shape, 16, 128, (16, 16)), PARTIAL)
    for ranks in (2, 4):
        loads = [load_of(whole, owner, ranks, CostModel()) for owner in every_placement(8, ranks)]
        for most in (1.0, 1.05, 1.3):
            fewest = min((int(load.received.sum()) for load in loads if load.balance <= most), default=None)
            assert fewest is None or bound_of(whole, ranks, most) <= fewest


@pytest.mark.parametrize("ranks", [2, 4, 8, 64])
def test_causal_attention_receives_three_quarters_of_an_all_gather(ranks: int) -> None:
    """Fewer is impossible for equal loads, and the bound says so."""
    counted = work(masks.causal(), 256 * ranks, ranks, 16)
    stats = place(counted, ranks).stats
    assert stats.load <= 1.01 and abs(stats.received_share - 0.75) <= 0.01 and stats.received_share - stats.bound <= 0.02
    assert set(stats.pieces) <= {1, 2}


@pytest.mark.parametrize("ranks", [2, 8, 64])
def test_a_window_receives_its_neighbours_keys(ranks: int) -> None:
    counted = work(masks.sliding_window(4096, 0), 2**18, ranks, 256)
    stats = place(counted, ranks).stats
    assert stats.load <= 1.02 and stats.received_share <= 0.07


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_twelve_documents_are_balanced_and_few_of_their_keys_travel(ranks: int) -> None:
    """20 sets. The bound ignores that placements are windows of whole chunks."""
    found = []
    for seed in range(20):
        counted = work(documents(2**16, 12, seed), 2**16, ranks, 64)
        stats = place(counted, ranks).stats
        assert stats.load <= 1.05, seed
        least = bound_of(chunks_of(counted, PARTIAL), ranks, 1.05) / ((ranks - 1) * 2**16)
        found.append((stats.received_share, least))
    share, least = np.mean(found, axis=0)
    assert share <= 2 * least + 0.05, (share, least)


def test_swaps_even_what_bisection_leaves() -> None:
    """64 ranks of 16 chunks, in documents."""
    whole = chunks_of(work(documents(2**16, 12, 3), 2**16, 64, 64), PARTIAL)
    halved = bisected(whole, 64, 0.03, 2**14)
    even = evened(whole, halved, 64, 1.03)
    before, after = (load_of(whole, owner, 64, CostModel()).balance for owner in (halved, even))
    assert before > 1.06 and after <= 1.04
    assert evened(whole, even, 64, after) is even and np.array_equal(np.bincount(even), np.bincount(halved))


def test_edges_of_documents_are_found_in_the_counts() -> None:
    edges = [16 * n for n in (5, 9, 24, 33)]
    ids = torch.searchsorted(torch.tensor(edges), torch.arange(640), right=True)
    for mask in (masks.document(ids.to(torch.int32)), masks.causal() & masks.document(ids.to(torch.int32))):
        lists = create_block_mask(mask, None, None, 640, 640, "cpu", 16)
        assert np.flatnonzero(seams(chunks_of(work_of([lists], [1.0], 16), PARTIAL))).tolist() == [5, 9, 24, 33]


def test_masks_of_several_layers_are_balanced_by_their_weights() -> None:
    length, ranks = 4096, 4
    chunk = chunk_of(length, ranks, 16)
    both = [create_block_mask(m, None, None, length, length, "cpu", 16) for m in (masks.causal(), masks.sliding_window(64, 0))]
    for weights in ([1, 5], [5, 1], [1, 0]):
        made = place(work_of(both, weights, chunk), ranks)
        assert made.stats.load <= 1.05, weights


DIGEST = 1580806282741902445  # of (1, [0, 1, 2]), in every version of Python and NumPy
DIGESTS = """
import torch
from tests.distributed.test_placement import MASKS, digest_of, place, work
owners = [place(work(MASKS[name](length), length, ranks, 16), ranks).owner
          for name in sorted(MASKS) for length, ranks in ((640, 2), (4001, 5), (4096, 8))]
print(digest_of(*owners))
"""


def test_a_fresh_process_with_other_hashes_and_threads_finds_the_same() -> None:
    runs = [python("-c", DIGESTS, PYTHONHASHSEED=seed, OMP_NUM_THREADS=threads) for seed, threads in (("1", "1"), ("77", "2"))]
    assert len({result_of(run) for run in runs}) == 1


def test_a_digest_is_of_numbers_shapes_and_order() -> None:
    assert digest_of(1, np.arange(3, dtype=np.int32)) == digest_of(1, [0, 1, 2]) == DIGEST
    different = [digest_of(), digest_of(0), digest_of(0, 0), digest_of([0, 0]), digest_of([[0, 0]]), digest_of(0, 1), digest_of(1, 0)]
    assert len(set(different)) == len(different) and all(0 <= d < 2**63 for d in different)
    for wrong in (0.5, "text", np.ones(2)):
        with pytest.raises(TypeError, match="wanted whole numbers"):
            digest_of(wrong)


def test_numbers_of_ranks_below_one_are_refused() -> None:
    with pytest.raises(ValueError, match="ranks=0"):
        place(work(None, 64, 1, 16), 0)


def test_windows_on_a_circle_and_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = np.random.default_rng(0).random((2, 9, 130)) < 0.1
    for length in (1, 2, 5, 9):
        union = np.stack([flags[:, (x + np.arange(length)) % 9].any(1) for x in range(9)], 1)
        assert np.array_equal(popcount(windows(packed(flags), length)), union.sum(-1))
    monkeypatch.delattr(np, "bitwise_count", raising=False)  # NumPy 1
    assert np.array_equal(popcount(packed(flags)), flags.sum(-1))


def test_costs_follow_heads_and_ranks() -> None:
    near, far = CostModel.of((16, 4), 128, 8), CostModel.of((32, 8), 64, 16)
    assert near == CostModel() and far.bandwidth < near.bandwidth
    assert far.pair_seconds == near.pair_seconds and far.key_bytes == near.key_bytes
    nodes = CostModel.of((32, 8), 64, 16, node_size=8)
    assert nodes.bandwidth == near.bandwidth and nodes.network == far.bandwidth
    inside, across = nodes.message_seconds(np.array([1000, 0]), np.array([0, 1000]))
    assert (inside, across) == (1000 * (nodes.key_bytes / near.bandwidth), 1000 * (nodes.key_bytes / far.bandwidth))
    for size in (0, 3, 32):
        with pytest.raises(ValueError, match=f"node_size={size} and 16 ranks; wanted a divisor"):
            CostModel.of(ranks=16, node_size=size)


def test_one_node_costs_what_no_nodes_do_and_several_cost_less_than_none() -> None:
    whole = chunks_of(work(masks.causal(), 2**14, 16, 64), PARTIAL)
    owner = fold(whole, 16)
    slow, one, two = (load_of(whole, owner, 16, CostModel.of(ranks=16, node_size=size)) for size in (None, 16, 8))
    fast = load_of(whole, owner, 16, CostModel())
    assert all(np.array_equal(a, b) for a, b in zip(one, fast, strict=True))
    assert fast.attention.max() < two.attention.max() < slow.attention.max() and (fast.exchanges, two.exchanges) == (1, 2)
