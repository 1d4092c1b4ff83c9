"""Classes of ragged batches equal brute force over every pair and the classes of each sequence alone; their cost follows the tiles."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from anyattn.mods import masks
from anyattn.mods.analysis import row_ranges as rows
from anyattn.mods.analysis import tile_classes, tile_classes_varlen
from anyattn.mods.analysis.load_bounds import check_loads_ragged
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, classify
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged, refine_ragged
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.mods.tracing.trace import trace
from tests.support.counting import Work
from tests.support.covering import few
from tests.support.tiles import brute_classes_ragged, library_masks, random_lengths, random_mask

TILES = [(16, 16), (8, 32), (5, 7), (1, 1), (64, 128)]


def check(mod: Any, seqlens_q: Tensor, seqlens_k: Tensor, tile: tuple[int, int], H: int, q_first: Tensor | None = None) -> None:
    wanted = brute_classes_ragged(mod, seqlens_q, seqlens_k, tile, H, q_first)
    traced = trace(mod, "mask")
    got = classify_ragged(traced, seqlens_q, seqlens_k, *tile, H, q_first)
    assert got.dtype is torch.uint8 and len(got) in (1, H)
    assert torch.equal(got.expand(H, -1), wanted)
    if wanted.numel():  # without the shortcut of row ranges
        starts = torch.zeros_like(seqlens_q) if q_first is None else q_first
        assert torch.equal(refine_ragged(traced, RaggedTiles(seqlens_q, seqlens_k, tile), H, starts), wanted)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_library_equals_brute_force(seed: int, tile: tuple[int, int]) -> None:
    seqlens_q, seqlens_k = random_lengths(seed, tile, 7)
    longest = int(seqlens_q.max()), int(seqlens_k.max())
    for mod in library_masks(*longest, B=7, seed=seed).values():
        check(mod, seqlens_q, seqlens_k, tile, 2)


@given(st.integers(0, 2**32), st.sampled_from([(1, 1), (4, 4), (3, 8), (8, 5), (16, 16)]))
@settings(max_examples=200, deadline=None)
def test_random_trees_equal_brute_force(seed: int, tile: tuple[int, int]) -> None:
    seqlens_q, seqlens_k = random_lengths(seed, tile, 4, most=24)
    check(random_mask(seed, 24, B=4), seqlens_q, seqlens_k, tile, 2)


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_first_rows(seed: int, tile: tuple[int, int]) -> None:
    """Rows that begin at a place of their own, as in a cache; before 0 where there are more rows than keys."""
    seqlens_q, seqlens_k = random_lengths(seed + 50, tile, 6)
    for q_first in (seqlens_k - seqlens_q, torch.arange(6) * 7):
        most = int((seqlens_q + q_first).max()) + 1
        for mod in (masks.causal(), masks.sliding_window(5, 2), masks.sink_window(2, 9), masks.dilated(4, 3), masks.chunked(10)):
            check(mod, seqlens_q, seqlens_k, tile, 1, q_first)
        ids = torch.arange(max(most, int(seqlens_k.max()), 200)) // 13
        check(masks.document(ids) & masks.causal(), seqlens_q, seqlens_k, tile, 1, q_first)


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_equals_each_sequence_alone(tile: tuple[int, int]) -> None:
    seqlens_q, seqlens_k = random_lengths(3, tile, 9)
    longest = max(int(seqlens_q.max()), int(seqlens_k.max()))
    for name, mod in library_masks(longest, longest, B=9).items():
        traced = trace(mod, "mask")
        alone = []
        for b, (m, n) in enumerate(zip(seqlens_q.tolist(), seqlens_k.tolist())):
            of_all = classify(traced, m, n, *tile, 9, 1)
            alone.append(of_all[min(b, len(of_all) - 1), 0].reshape(-1))
        assert torch.equal(classify_ragged(traced, seqlens_q, seqlens_k, *tile, 1)[0], torch.cat(alone)), name


def test_heads() -> None:
    seqlens = torch.tensor([5, 0, 40])
    plain, per_head, odd = (
        lambda b, h, q, k: q >= k,
        lambda b, h, q, k: q + 3 * h >= k,
        lambda b, h, q, k: (q + k + h * b) % 3 == 0,
    )
    assert classify_ragged(trace(plain, "mask"), seqlens, seqlens, 8, 8, 5).shape == (1, 26)
    for mod in (per_head, odd):
        assert classify_ragged(trace(mod, "mask"), seqlens, seqlens, 8, 8, 5).shape == (5, 26)
        check(mod, seqlens, seqlens, (8, 8), 5)
    assert classify_ragged(trace(per_head, "mask"), seqlens, seqlens, 8, 8, 0).shape == (0, 26)


def test_rows_that_jump() -> None:
    """One range per row that leaves tiles out between one row and the next: going right, going left, to and fro."""
    seqlens_q, seqlens_k = torch.tensor([12, 5, 20]), torch.tensor([120, 70, 200])
    to_and_fro = torch.tensor([0, 90, 10, 60, 50, 8, 70, 33]).repeat(3)
    for mod in (
        lambda b, h, q, k: (k >= 10 * q) & (k < 10 * q + 2),
        lambda b, h, q, k: (k >= 110 - 10 * q) & (k < 114 - 10 * q),
        lambda b, h, q, k: (k >= to_and_fro[q]) & (k < to_and_fro[q] + 9),
    ):
        assert row_ranges(trace(mod, "mask")).count == 1  # type: ignore[union-attr]
        for tile in [(8, 4), (3, 4), (32, 8)]:
            check(mod, seqlens_q, seqlens_k, tile, 1)


def test_packed_tables() -> None:
    """The natural document mask of a packed batch: one table over all tokens, found through the ends of the sequences."""
    seqlens = torch.tensor([37, 0, 1, 64, 100])
    ends = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0))
    document = torch.arange(int(ends[-1])) // 9
    mod = lambda b, h, q, k: (document[ends[b] + q] == document[ends[b] + k]) & (q >= k)
    check_loads_ragged(trace(mod, "mask"), 1, seqlens, seqlens)
    for tile in TILES:
        check(mod, seqlens, seqlens, tile, 1)


@pytest.mark.parametrize("lengths", [([], []), ([0], [0]), ([0, 0], [5, 9]), ([5, 9], [0, 0]), ([0, 3, 0], [4, 0, 0])], ids=str)
def test_nothing_to_classify(lengths: tuple[list[int], list[int]]) -> None:
    seqlens = [torch.tensor(n, dtype=torch.int64) for n in lengths]
    for mod in (masks.causal(), masks.dilated(3, 2)):
        assert classify_ragged(trace(mod, "mask"), *seqlens, 4, 4, 3).shape == (1, 0)


def test_small_windows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows and tiles are taken in batches; where one ends has no meaning."""
    from anyattn.mods.analysis import varlen_grid

    seqlens_q, seqlens_k = random_lengths(11, (8, 8), 12)
    longest = int(seqlens_q.max()), int(seqlens_k.max())
    for budget in (1, 13, 100):
        monkeypatch.setattr(tile_classes_varlen, "_BATCH_ROWS", budget)
        monkeypatch.setattr(varlen_grid, "_BATCH_TILES", budget)
        monkeypatch.setattr(tile_classes, "_COARSE", 1)  # several levels of squares
        for name in ("causal", "sink_window", "document_per_batch", "prefix_or_document", "dilated"):
            mod = library_masks(*longest, B=12)[name]
            check(mod, seqlens_q, seqlens_k, (8, 8), 2)


def test_never_outside_a_sequence(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever evaluates the mask, or bounds it, asks about places of the sequence that b names, and of no other."""
    seqlens_q, seqlens_k = random_lengths(21, (16, 16), 8)
    q_first = torch.arange(8) * 5
    asked = []

    def watch(leaves: Any) -> None:
        asked.append(1)
        b, h = leaves["b"], leaves["h"]
        pairs = {"b": b, "h": h, "q_idx": leaves["q_idx"], "kv_idx": leaves.get("kv_idx", torch.zeros((), dtype=torch.int64))}
        b, h, q, kv = torch.broadcast_tensors(*pairs.values())
        assert bool(((q >= q_first[b]) & (q < q_first[b] + seqlens_q[b]) & (h >= 0) & (h < 2)).all())
        assert bool(((kv >= 0) & (kv < seqlens_k[b])).all())

    def watched_run(original: Any) -> Any:
        return lambda expr, leaves, *rest: (watch(leaves), original(expr, leaves, *rest))[1]

    spans = tile_classes.spans
    monkeypatch.setattr(tile_classes, "run", watched_run(tile_classes.run))
    monkeypatch.setattr(rows, "run", watched_run(rows.run))

    def watched_spans(expr: Any, box: Any, *rest: Any) -> Any:
        for side in (0, 1):
            watch({name: edges[side] for name, edges in box.items()})
        return spans(expr, box, *rest)

    monkeypatch.setattr(tile_classes, "spans", watched_spans)
    for mod in (masks.causal(), masks.sink_window(2, 9), masks.dilated(4, 3), lambda b, h, q, k: (q * k + h) % 5 == 0):
        asked.clear()
        classify_ragged(trace(mod, "mask"), seqlens_q, seqlens_k, 16, 16, 2, q_first)
        assert asked


# ---- cost


def thousand() -> tuple[Tensor, Tensor]:
    seqlens = torch.randint(1, 4097, (1000,), generator=torch.Generator().manual_seed(0))
    return seqlens, (torch.rand(1000, 4096, generator=torch.Generator().manual_seed(1)) < 1 / 500).cumsum(1)


@pytest.mark.parametrize(
    "name", few(["causal", "document", "document_causal", "packed_document", "without_ranges"], "document_causal", "without_ranges")
)
def test_a_thousand_sequences(name: str) -> None:
    """1,000 sequences of 1 to 4,096 tokens: no operation for each tile, work that follows the 352,473 tiles and 2 million rows."""
    seqlens, ids = thousand()
    ends = torch.nn.functional.pad(seqlens.cumsum(0), (1, 0))
    packed = torch.arange(int(ends[-1])) // 700
    mod = {
        "causal": masks.causal(),
        "document": masks.document(ids),
        "document_causal": masks.document(ids) & masks.causal(),
        "packed_document": lambda b, h, q, k: packed[ends[b] + q] == packed[ends[b] + k],
        "without_ranges": lambda b, h, q, k: (q >= k) & ((q - k) % 3 == 0),
    }[name]
    traced = trace(mod, "mask")
    assert (row_ranges(traced) is None) == (name in ("packed_document", "without_ranges"))
    with Work() as work:
        classes = classify_ragged(traced, seqlens, seqlens, 128, 128, 1)
    tiles, total = classes.shape[1], int(seqlens.sum())
    assert tiles == 352473 and torch.equal(classify_ragged(traced, seqlens, seqlens, 128, 128, 1), classes)
    # without ranges, documents that go on from one sequence to the next are taken apart batch by batch
    assert work.operations <= (15_000 if name == "packed_document" else 700)
    assert work.results <= 100 * 8 * (tiles + total)  # a hundred int64 values for each row and tile, over all operations
    # a few int64 values per row or tile, or a bounded batch; the pairs are 4e12 and even those within sequences 5e9
    assert work.largest <= 64 * 2**20 and work.largest < total**2 // 10000
    assert int((classes != EMPTY).sum()) and int((classes == FULL).sum())


def test_memory_does_not_follow_the_length_of_the_batch() -> None:
    """Twice and four times the sequences: the largest tensor stays a batch, until the classes themselves are larger."""
    largest = []
    for times in (1, 2, 4):
        seqlens = torch.full((500 * times,), 2048)
        with Work() as sizes:
            classify_ragged(trace(masks.causal(), "mask"), seqlens, seqlens, 128, 128, 1)
        largest.append(sizes.largest)
    assert largest[2] < 1.1 * largest[0]


# ---- indices into captured tensors

lengths_q, lengths_k = torch.tensor([3, 0, 9]), torch.tensor([4, 50, 8])
ends_q = torch.tensor([0, 3, 3, 12])
table = torch.arange(12)


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: table[ends_q[b] + q] > k,
        lambda b, h, q, k: table[q + k - 5] > 3,  # counts from the end where negative
        lambda b, h, q, k: table[k] == table[q],  # the 50 keys of sequence 1 meet no row
        lambda b, h, q, k: table[torch.where(q * k < 12, q * k, 0)] > 3,
    ],
)
def test_loads_in_range(mod: Any) -> None:
    check_loads_ragged(trace(mod, "mask"), 2, lengths_q, lengths_k)


@pytest.mark.parametrize(
    ("mod", "where"),
    [
        (lambda b, h, q, k: table[ends_q[b] + q + 1] > k, "index 12 .at b=2, h=0, q_idx=8, kv_idx=0"),
        (lambda b, h, q, k: table[ends_q[b] + q + h] > k, "index 12 .at b=2, h=1, q_idx=8, kv_idx=0"),
        (lambda b, h, q, k: table[q + k] > 3, "index 12 .at b=2, h=0, q_idx=5, kv_idx=7"),
        (lambda b, h, q, k: table[table[ends_q[b] + q] * k] > 3, "index 12 .at b=2, h=0, q_idx=0, kv_idx=4"),
        (lambda b, h, q, k: ends_q[b * 2] > 3, "index 4 .at b=2"),
    ],
)
def test_loads_out_of_range(mod: Any, where: str) -> None:
    with pytest.raises(ValueError, match=where):
        check_loads_ragged(trace(mod, "mask"), 2, lengths_q, lengths_k)


def test_loads_of_later_rows_and_of_scores() -> None:
    plain = trace(lambda b, h, q, k: table[q] > 3, "mask")
    check_loads_ragged(plain, 1, lengths_q, lengths_k, torch.tensor([9, 50, 3]))
    with pytest.raises(ValueError, match=r"index 12 .at b=0, h=0, q_idx=12, kv_idx=0"):
        check_loads_ragged(plain, 1, lengths_q, lengths_k, torch.tensor([10, 50, 3]))
    check_loads_ragged(plain, 1, lengths_q, lengths_k, torch.tensor([-12, 50, 3]))
    with pytest.raises(ValueError, match=r"index -13 .at b=0, h=0, q_idx=-13"):
        check_loads_ragged(plain, 1, lengths_q, lengths_k, torch.tensor([-13, 50, 3]))
    check_loads_ragged(trace(lambda s, b, h, q, k: s + table[q], "score"), 1, lengths_q, lengths_k)
    with pytest.raises(ValueError, match="computed from the score"):
        check_loads_ragged(trace(lambda s, b, h, q, k: s + table[s.to(torch.int64)], "score"), 1, lengths_q, lengths_k)


# ---- where tiles lie


def test_places_and_pieces() -> None:
    rng = random.Random(0)
    for seed in range(50):
        tile = rng.choice(TILES)
        seqlens_q, seqlens_k = random_lengths(seed, tile, 6)
        tiles = RaggedTiles(seqlens_q, seqlens_k, tile)
        places = [(b, m, n) for b in range(6) for m in range(int(tiles.num_m[b])) for n in range(int(tiles.num_n[b]))]
        assert tiles.total_n == len(places)
        found = torch.stack(tiles.locate(torch.arange(len(places)))).T.tolist()
        assert list(map(tuple, found)) == places
        assert tiles.place(*tiles.locate(torch.arange(len(places)))).tolist() == list(range(len(places)))
        for budget in (1, 7, 1000):
            windows = list(tiles.windows(budget, per_row=1))
            edges = [(0, 0), *((w.rows.stop, w.tiles.stop) for w in windows)]
            assert [(w.rows.start, w.tiles.start) for w in windows] == edges[:-1] and edges[-1] == (tiles.total_m, tiles.total_n)
            widest = max(1, int(tiles.num_n.max())) + 1
            assert all(w.rows.stop - w.rows.start + w.tiles.stop - w.tiles.start <= budget + 2 * widest for w in windows)
