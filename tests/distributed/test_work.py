"""Attention counted by chunks from block lists is what the mask's pairs say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from anyattn.block_masks import create_block_mask
from anyattn.distributed.placement import Work, chunk_of, combined, work_of
from anyattn.distributed.placement import work as placement_work
from anyattn.mods import masks
from anyattn.sparsity import BlockMask
from tests.support.tiles import dense

MASKS: dict[str, Callable] = {
    "causal": masks.causal(),
    "window": masks.sliding_window(40, 8),
    "by head": lambda b, h, q, k: (q - k < 16 * (h + 1)) & (q >= k),
    "by entry": lambda b, h, q, k: k < 40 + 50 * b,
    "hidden": lambda b, h, q, k: q < 0,
}


def counted(seen: np.ndarray, block: tuple[int, int], chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Visited and partial tiles and needs of each pair of chunks, by looking at every pair. A tile that the sequence's end cuts is partial,
    as in block lists."""
    entries, length, _ = seen.shape
    chunks = -(-length // chunk)
    visited, partial, needs = np.zeros((chunks, chunks)), np.zeros((chunks, chunks)), np.zeros((chunks, chunks), bool)
    for i in range(0, length, block[0]):
        for j in range(0, length, block[1]):
            tile = seen[:, i : i + block[0], j : j + block[1]]
            some, every = tile.any((1, 2)), tile.all((1, 2)) & (tile.shape[1:] == block)
            at = i // chunk, j // chunk
            visited[at] += some.sum() / entries
            partial[at] += (some & ~every).sum() / entries
            needs[at] |= bool(some.any())
    return visited, partial, needs


@pytest.mark.parametrize("length", [128, 150])
@pytest.mark.parametrize("block", [(16, 16), (8, 32), (32, 8)], ids=str)
@pytest.mark.parametrize("name", MASKS)
def test_counts_are_those_of_the_pairs(name: str, block: tuple[int, int], length: int) -> None:
    batch = (2, 2) if name.startswith("by") else (1, 1)
    mask = create_block_mask(MASKS[name], *batch, length, length, "cpu", block)
    work = work_of([mask], [1.0], 32)
    seen = dense(MASKS[name], length, length, *batch).reshape(-1, length, length).numpy()
    visited, partial, needs = counted(seen, block, 32)
    assert np.array_equal(work.visited, visited) and np.array_equal(work.partial, partial) and np.array_equal(work.needs, needs)
    assert (work.chunk, work.length, work.tile, work.chunks) == (32, length, block, len(needs))


@pytest.mark.parametrize("name", MASKS)
def test_lists_on_a_gpu_are_counted_without_waiting_to_the_same_result(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the way of a GPU, here on the CPU, with garbage beyond the counts, and rows in several parts."""
    mask = create_block_mask(MASKS[name], 2, 2, 150, 150, "cpu", (8, 16))
    expected = work_of([mask], [1.0], 32)
    for side in ("kv", "full_kv"):
        cnt, idx = getattr(mask, f"{side}_num_blocks"), getattr(mask, f"{side}_indices")
        beyond = torch.arange(idx.shape[-1]) >= cnt[..., None]
        setattr(mask, f"{side}_indices", torch.where(beyond, 2**31 - 1, idx))
        setattr(mask, f"{side}_num_blocks", torch.where(cnt == 0, -3, cnt))
    monkeypatch.setattr(placement_work, "_sees_all", lambda idx: True)
    monkeypatch.setattr(placement_work, "_ENTRIES", 50)
    found = work_of([mask], [1.0], 32)
    assert all(np.array_equal(getattr(found, field), getattr(expected, field)) for field in ("visited", "partial", "needs"))


def test_masks_of_other_blocks_are_summed_in_tiles_of_the_first_one() -> None:
    length, chunk = 192, 64
    one = create_block_mask(masks.causal(), None, None, length, length, "cpu", 16)
    other = create_block_mask(masks.sliding_window(8, 8), None, None, length, length, "cpu", (64, 32))
    work = work_of([one, other, None], [3, 0.5, 2], chunk)
    first, second = (work_of([m], [1], chunk) for m in (one, other))
    assert np.array_equal(work.visited, 3 * first.visited + 0.5 * 8 * second.visited + 2 * 16)
    assert np.array_equal(work.partial, 3 * first.partial + 0.5 * 8 * second.partial)
    assert work.needs.all() and work.tile == (16, 16)
    assert np.array_equal(combined([first, second], [1, 0]).visited, first.visited)


def test_no_mask_visits_everything_and_a_short_chunk_counts_by_its_size() -> None:
    work = work_of([None], [1.0], 64, length=160)
    assert work.visited.tolist() == [[1, 1, 0.5], [1, 1, 0.5], [0.5, 0.5, 0.25]]
    assert work.needs.all() and not work.partial.any()


def test_sums_of_counts_are_exact_in_any_order() -> None:
    """Three heads and odd weights: thirds are no binary fractions."""
    mask = create_block_mask(lambda b, h, q, k: q - k >= 32 * h, 1, 3, 512, 512, "cpu", 16)
    work = work_of([mask, None], [0.1, 0.7], 32)
    for counts in (work.visited, work.partial):
        flat = counts.reshape(-1)
        shuffled = [float(np.add.reduce(np.random.default_rng(seed).permutation(flat))) for seed in range(20)]
        assert set(shuffled) == {float(sum(sorted(flat.tolist())))}


def test_lists_of_torch_and_broken_counts() -> None:
    """Counts below 0 are empty lists, what lies beyond a count is not read, and there may be no full lists and no batch."""
    cnt, idx = torch.tensor([1, -1, 2, 0], dtype=torch.int32), torch.full((4, 4), 99, dtype=torch.int32)
    idx[0, 0], idx[2, :2] = 3, torch.tensor([0, 2])
    mask = BlockMask.from_kv_blocks(cnt, idx, BLOCK_SIZE=16, compute_q_blocks=False)
    assert work_of([mask], [1.0], 32).visited.tolist() == [[0, 1], [1, 1]]
    idx[2, 0] = 7
    with pytest.raises(ValueError, match="name key tiles 2 to 7; wanted 0 to 3"):
        work_of([mask], [1.0], 32)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda m: work_of([m], [1.0], 48), "chunk=48 is not a multiple of the mask's blocks, 32 rows x 32 keys"),
        (lambda m: work_of([m], [], 64), "1 masks and 0 weights"),
        (lambda m: work_of([m], [-1.0], 64), r"weights=\[-1.0\]"),
        (lambda m: work_of([None], [1.0], 64), "wanted a length"),
        (lambda m: work_of([m, None], [1.0, 1.0], 64, length=64), r"\[64, 128\]"),
        (lambda m: combined([work_of([m], [1], 64), work_of([m], [1], 32)], [1, 1]), "wanted the same for all"),
    ],
)
def test_errors(call: Callable[[BlockMask], Work], words: str) -> None:
    mask = create_block_mask(masks.causal(), None, None, 128, 128, "cpu", 32)
    with pytest.raises(ValueError, match=words):
        call(mask)


def test_chunks_are_multiples_of_the_block_and_no_more_than_half_of_a_ranks_rows() -> None:
    for ranks in (1, 2, 3, 7, 8, 64, 100, 1024):
        for length in (1, 17, 301, 4096, 100_000, 262_144, 2**24, 2**24 - 1):
            for block in (1, 16, 128, 192):
                chunk = chunk_of(length, ranks, block)
                assert chunk % block == 0 and (chunk == block or chunk <= length / (2 * ranks))
                chunks = -(-length // chunk)
                assert chunks <= 1.6 * max(1024, min(8 * ranks, 4096))
                if length // (32 * ranks) > 4 * block and 32 * ranks <= 1024:
                    assert 20 <= chunks / ranks <= 48, (length, ranks, block)
    assert chunk_of(262_144, 2, 128) == 4096 and chunk_of(2**24, 1024, 128) == 4096
    # among chunks near the aim, one that divides the sequence evenly
    assert 98_304 % (8 * chunk_of(98_304, 8, 128)) == 0
    with pytest.raises(ValueError, match="ranks=0"):
        chunk_of(128, 0, 16)
