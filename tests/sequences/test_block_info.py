"""BlockInfo against brute force over every (query, key) pair of small problems, and the published worked examples."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from anyattn.sequences.block_info import BlockInfo
from anyattn.sequences.seqlen_info import SeqlenInfoQK, SeqlenInfoQKNewK

LENGTHS = (0, 1, 2, 3, 5, 7, 8, 9, 12, 16, 17, 24)
WINDOWS = (None, 0, 1, 3, 8, 30, -1, -2, -5)


def _visible(seqlen_q: int, seqlen_k: int, info: BlockInfo) -> torch.Tensor:
    """(rows packed as the tiles pack them, keys): who sees whom, from the definition."""
    rows = torch.arange(seqlen_q * info.qhead_per_kvhead_packgqa)[:, None] // info.qhead_per_kvhead_packgqa
    keys, place = torch.arange(seqlen_k), rows + seqlen_k - seqlen_q
    seen = torch.ones(len(rows), seqlen_k, dtype=torch.bool)
    if info.is_causal:
        seen &= keys <= place
    if info.window_size_left is not None:
        seen &= keys >= place - info.window_size_left
    if info.window_size_right is not None:
        seen &= keys <= place + info.window_size_right
    return seen


def _problems(count: int) -> list[tuple[int, int, BlockInfo]]:
    rng = random.Random(7)
    found = []
    for _ in range(count):
        left, right = rng.choice(WINDOWS), rng.choice(WINDOWS)
        is_local = left is not None or right is not None
        info = BlockInfo(
            rng.choice((1, 3, 4, 8)),
            rng.choice((1, 4, 5, 8)),
            rng.random() < 0.5,
            is_local,
            False,
            left,
            right,
            rng.choice((1, 1, 2, 3, 5)),
        )
        found.append((rng.choice(LENGTHS), rng.choice(LENGTHS), info))
    return found


def _tile(seen: torch.Tensor, info: BlockInfo, m: int, n: int) -> torch.Tensor:
    return seen[m * info.tile_m : (m + 1) * info.tile_m, n * info.tile_n : (n + 1) * info.tile_n]


def _grid(seen: torch.Tensor, info: BlockInfo) -> tuple[int, int]:
    return -(-seen.shape[0] // info.tile_m), -(-seen.shape[1] // info.tile_n)


@pytest.mark.parametrize("part", range(8))
def test_ranges_are_tight_and_transposes_of_each_other(part: int) -> None:
    for seqlen_q, seqlen_k, info in _problems(4000)[part::8]:
        lengths = SeqlenInfoQK.create(0, seqlen_q, seqlen_k, tile_m=info.tile_m, tile_n=info.tile_n)
        seen = _visible(seqlen_q, seqlen_k, info)
        rows, columns = _grid(seen, info)
        needs = torch.tensor([[bool(_tile(seen, info, m, n).any()) for n in range(columns)] for m in range(rows)]).reshape(rows, columns)
        for m in range(rows):
            lo, hi = info.get_n_block_min_max(lengths, m)
            # with packed heads a tile may begin or end inside a query position, which is judged whole
            wanted = needs[m] if info.qhead_per_kvhead_packgqa == 1 else _needs_of_positions(seen, info, m, columns)
            assert [lo <= n < hi for n in range(columns)] == wanted.tolist(), (seqlen_q, seqlen_k, info, m, lo, hi)
            assert 0 <= lo <= hi <= max(columns, lo)
        for n in range(columns):
            lo, hi = info.get_m_block_min_max(lengths, n)
            assert [lo <= m < hi for m in range(rows)] == needs[:, n].tolist(), (seqlen_q, seqlen_k, info, n, lo, hi)


def _needs_of_positions(seen: torch.Tensor, info: BlockInfo, m: int, columns: int) -> torch.Tensor:
    group = info.qhead_per_kvhead_packgqa
    first, end = m * info.tile_m // group * group, -(-(m + 1) * info.tile_m // group) * group
    return torch.tensor([bool(seen[first:end, n * info.tile_n : (n + 1) * info.tile_n].any()) for n in range(columns)])


@pytest.mark.parametrize("part", range(4))
def test_masks_begin_and_end_where_elements_need_them(part: int) -> None:
    for seqlen_q, seqlen_k, info in _problems(2000)[part::4]:
        if info.qhead_per_kvhead_packgqa > 1:
            continue
        lengths = SeqlenInfoQK.create(0, seqlen_q, seqlen_k, tile_m=info.tile_m, tile_n=info.tile_n)
        for m in range(-(-seqlen_q // info.tile_m)):
            lo, hi = info.get_n_block_min_max(lengths, m)
            before = info.get_n_block_min_before_local_mask(lengths, m, lo)
            after = info.get_n_block_min_causal_local_mask(lengths, m, lo)
            places = range(m * info.tile_m, min((m + 1) * info.tile_m, seqlen_q))
            for n in range(lo, hi):
                keys = range(n * info.tile_n, (n + 1) * info.tile_n)  # the sequence's end is not this mask's business
                pairs = list(itertools.product((i + seqlen_k - seqlen_q for i in places), keys))
                left_is_free = info.window_size_left is None or all(j >= p - info.window_size_left for p, j in pairs)
                rights = [r for r in (0 if info.is_causal else None, info.window_size_right) if r is not None]
                right_is_free = all(j <= p + r for p, j in pairs for r in rights)
                assert (n >= before) == left_is_free, (seqlen_q, seqlen_k, info, m, n, before)
                assert (n < after) == right_is_free, (seqlen_q, seqlen_k, info, m, n, after)


def test_splits_partition_the_range() -> None:
    for seqlen_q, seqlen_k, info in _problems(600):
        whole = BlockInfo(info.tile_m, info.tile_n, info.is_causal, info.is_local, False, info.window_size_left, info.window_size_right)
        lengths = SeqlenInfoQK.create(0, seqlen_q, seqlen_k, tile_m=info.tile_m, tile_n=info.tile_n)
        for splits in (1, 2, 3, 7, 40):
            split = BlockInfo(
                info.tile_m, info.tile_n, info.is_causal, info.is_local, True, info.window_size_left, info.window_size_right, 1, splits
            )
            for m in range(-(-seqlen_q // info.tile_m)):
                lo, hi = whole.get_n_block_min_max(lengths, m)
                parts = [split.get_n_block_min_max(lengths, m, i) for i in range(splits)]
                assert [n for a, b in parts for n in range(a, b)] == list(range(lo, hi))


def test_new_keys_are_those_behind_the_cached_ones() -> None:
    rng = random.Random(3)
    for _ in range(2000):
        cached, new, seqlen_q = rng.choice(LENGTHS), rng.choice(LENGTHS), rng.choice((1, 2, 5, 9))
        left = rng.choice((None, 0, 4, 11))
        info = BlockInfo(4, rng.choice((1, 4, 5)), rng.random() < 0.5, left is not None, False, left, None)
        lengths = SeqlenInfoQKNewK.create(0, seqlen_q, 64, new, seqused_k=[cached])
        for m in range(-(-seqlen_q // 4)):
            lo, hi = info.get_n_block_min_max(lengths, m)
            needed = [
                j - cached for n in range(lo, hi) for j in range(n * info.tile_n, (n + 1) * info.tile_n) if cached <= j < cached + new
            ]
            a, b = info.get_n_block_k_new_min_max(lengths, m)
            assert list(range(a, b)) == sorted({j // info.tile_n for j in needed})


def test_whole_vectors_of_tiles_at_once() -> None:
    cu_q, cu_k = torch.tensor([0, 5, 5, 30, 47]), torch.tensor([0, 9, 20, 31, 31])
    info = BlockInfo(4, 8, True, True, False, 6, 3)
    batch = torch.repeat_interleave(torch.arange(4), 13)
    m_block = torch.arange(13).repeat(4)
    vector = SeqlenInfoQK.create(batch, 0, 0, cu_q, cu_k, tile_m=4, tile_n=8)
    found = [t.tolist() for t in info.get_n_block_min_max(vector, m_block)]
    found_m = [t.tolist() for t in info.get_m_block_min_max(vector, m_block)]
    for i, (b, m) in enumerate(zip(batch.tolist(), m_block.tolist())):
        one = SeqlenInfoQK.create(b, 0, 0, cu_q.tolist(), cu_k.tolist(), tile_m=4, tile_n=8)
        assert (found[0][i], found[1][i]) == info.get_n_block_min_max(one, m)
        assert (found_m[0][i], found_m[1][i]) == info.get_m_block_min_max(one, m)


def test_published_examples() -> None:
    lengths = SeqlenInfoQK.create(0, 1, 2560, tile_m=128, tile_n=128)
    split = BlockInfo(128, 128, False, is_split_kv=True, num_splits=4)
    assert [split.get_n_block_min_max(lengths, 0, i) for i in range(4)] == [(0, 5), (5, 10), (10, 15), (15, 20)]
    new = SeqlenInfoQKNewK.create(0, 10, 4096, 10, seqused_k=[1000])
    assert BlockInfo(128, 128, True).get_n_block_k_new_min_max(new, 0) == (0, 1)


def test_errors_name_the_argument() -> None:
    with pytest.raises(ValueError, match="tile_m=0"):
        BlockInfo(0, 128, True)
    with pytest.raises(ValueError, match="is_local"):
        BlockInfo(128, 128, True, window_size_left=5)
