"""Order of a batch's tiles by torch operations, against a sort of Python tuples.

Kernels are compared with these operations in ``test_tile_order_interpreted.py`` and in ``test_tables.py`` of the Hopper backend; the order
of documents in tests/documents.
"""

from __future__ import annotations

import random

import pytest
import torch

from anyattn.arithmetic import ceil_div
from anyattn.sequences.tile_order import counted, keys_up_to, longest_first, most_tiles, most_visits_first, of_all_heads
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes

BATCHES = [([30, 0, 97, 1, 16], [50, 31, 110, 0, 1]), ([5], [64]), ([0, 0, 33], [7, 0, 64]), ([48, 48], [33, 33]), ([0, 0], [0, 9])]


def stored(lengths: tuple[list[int], list[int]]) -> StoredSequences:
    ends = [torch.tensor([0, *n]).cumsum(0) for n in lengths]
    rows = [sum(n) + 3 for n in lengths]
    return StoredSequences(LengthTables(*ends, None, None), StoredSizes(len(lengths[0]), *rows, *map(max, lengths)))


def keys_seen(m_block: int, tile: int, queries: int, keys: int) -> int:
    """By the last of all positions that the tile covers, also where the sequence ends before it; the last row sees all keys."""
    last = (m_block + 1) * tile - 1
    return sum(kv <= last + keys - queries for kv in range(keys))


@pytest.mark.parametrize("tile", [16, 33])
def test_keys_up_to_a_row_tile_s_end(tile: int) -> None:
    for queries, keys in ((100, 100), (100, 40), (10, 130), (70, 0), (1, 1)):
        tiles = range(ceil_div(queries, tile))
        wanted = [keys_seen(m, tile, queries, keys) for m in tiles]
        assert [max(0, keys_up_to(m, tile, queries, keys)) for m in tiles] == wanted
        of_all = keys_up_to(torch.arange(len(tiles)), tile, torch.tensor(queries), torch.tensor(keys))
        assert of_all.clamp(min=0).tolist() == wanted


@pytest.mark.parametrize("list_tile", [0, 32, 40])
@pytest.mark.parametrize(("by_key", "ends_with_row"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("lengths", BATCHES, ids=str)
def test_longest_first(lengths: tuple[list[int], list[int]], by_key: bool, ends_with_row: bool, list_tile: int) -> None:
    tile, s = 16, stored(lengths)
    own, others = lengths[::-1] if by_key else lengths
    tiles = [ceil_div(n, list_tile) * ceil_div(list_tile, tile) if list_tile else ceil_div(n, tile) for n in own]
    cost = lambda b, m: keys_seen(m, tile, own[b], others[b]) if ends_with_row else others[b]
    wanted = sorted(((-cost(b, m), b, m) for b, n in enumerate(tiles) for m in range(n)))
    found = longest_first(s, tile, sum(tiles) + 5, by_key=by_key, ends_with_row=ends_with_row, list_tile=list_tile)
    assert found.dtype is torch.int32 and found.tolist() == [[b, m] for _, b, m in wanted] + [[len(own) - 1, -1]] * 5
    with_heads = counted(of_all_heads(found), torch.tensor(len(wanted)))
    assert with_heads.dtype is torch.int32 and with_heads.tolist() == [[m, 0, b] for b, m in found.tolist()] + [[len(wanted), 0, 0]]


def test_there_are_never_more_tiles() -> None:
    """Nor is the bound above what a batch of equal lengths, or of lengths just above whole tiles, can take."""
    draw = random.Random(0)
    for _ in range(300):
        batch, tile, bound = draw.randint(1, 9), draw.choice((1, 16, 33)), draw.randint(1, 120)
        lengths = [draw.randint(0, bound) for _ in range(batch)]
        assert sum(ceil_div(n, tile) for n in lengths) <= most_tiles(batch, bound, sum(lengths) + draw.choice((0, 40)), tile)
        assert most_tiles(batch, bound, batch * bound, tile) == batch * ceil_div(bound, tile)
    assert most_tiles(3, 1000, 3, 16) == 3


def test_most_visits_first() -> None:
    """Of lists whose row tiles are two of the kernel's, of which the last list's has one."""
    visited = torch.tensor([[[3, 1], [0, 2]], [[1, 4], [2, 2]]])
    wanted = sorted((-int(visited[b, h, m // 2]), b, h, m) for b in range(2) for h in range(2) for m in range(3))
    assert most_visits_first(visited, 2, 3).tolist() == [[m, h, b] for _, b, h, m in wanted]
