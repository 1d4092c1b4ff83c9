"""Every mask of the library against its definition in plain Python, pair by pair."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace

B, H, M, N = 2, 2, 13, 17
LEFT, RIGHT = (None, -1, 0, 1, 5), (None, -1, 0, 2)


def dense(mask, rows=M, cols=N):
    leaves = (torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1), torch.arange(rows).view(-1, 1), torch.arange(cols))
    return evaluate(trace(mask, "mask"), *leaves).expand(B, H, rows, cols)


def is_exactly(mask, sees, rows=M, cols=N):
    want = torch.tensor([[[[sees(b, i, j) for j in range(cols)] for i in range(rows)] for _ in range(H)] for b in range(B)])
    assert torch.equal(dense(mask, rows, cols), want)


def test_full():
    is_exactly(masks.full(), lambda b, i, j: True)


@pytest.mark.parametrize("offset", [-20, -3, 0, 4, 30])
def test_causal(offset):
    is_exactly(masks.causal(offset), lambda b, i, j: j <= i + offset)


@pytest.mark.parametrize("lengths", [(13, 17), (17, 13), (1, 17), (13, 13)])
def test_causal_bottom_right(lengths):
    rows, cols = lengths
    is_exactly(masks.causal_bottom_right(rows, cols), lambda b, i, j: cols - 1 - j >= rows - 1 - i, rows, cols)
    assert dense(masks.causal_bottom_right(rows, cols), rows, cols)[0, 0, -1].all(), "the last query sees every key"


@pytest.mark.parametrize("offset", [0, -2, 4])
@pytest.mark.parametrize("right", RIGHT)
@pytest.mark.parametrize("left", LEFT)
def test_sliding_window(left, right, offset):
    def sees(b, i, j):
        behind, ahead = i + offset - j, j - i - offset
        return (left in (None, -1) or behind <= left) and (right in (None, -1) or ahead <= right)

    is_exactly(masks.sliding_window(left, right, offset), sees)


def test_sliding_window_says_causal():
    assert torch.equal(dense(masks.sliding_window(-1, 0)), dense(masks.causal()))


@pytest.mark.parametrize("prefix", [0, 1, 5, 40])
def test_prefix_lm(prefix):
    is_exactly(masks.prefix_lm(prefix), lambda b, i, j: j < prefix or j <= i)
    lengths = torch.tensor([prefix, 3], dtype=torch.int32)
    is_exactly(masks.prefix_lm(lengths), lambda b, i, j: j < [prefix, 3][b] or j <= i)


def test_document():
    ids = [0, 0, 0, 1, 1, 2, 5, 5, 5, 5, 0, 0, 7]
    is_exactly(masks.document(torch.tensor(ids)), lambda b, i, j: ids[i] == ids[j], 13, 13)
    both = [ids, ids[::-1]]
    is_exactly(masks.document(torch.tensor(both, dtype=torch.int16)), lambda b, i, j: both[b][i] == both[b][j], 13, 13)


@pytest.mark.parametrize("cu", [[0, 13], [0, 4, 4, 9, 13], [0, 0, 1, 13, 13]])
def test_document_from_cu_seqlens(cu):
    def owner(p):
        return next(d for d in range(len(cu) - 1) if cu[d] <= p < cu[d + 1])

    is_exactly(masks.document_from_cu_seqlens(torch.tensor(cu, dtype=torch.int32)), lambda b, i, j: owner(i) == owner(j), 13, 13)


@pytest.mark.parametrize("size", [1, 4, 100])
def test_chunks_and_blocks(size):
    is_exactly(masks.chunked(size), lambda b, i, j: i // size == j // size and j <= i)
    is_exactly(masks.block_diagonal(size), lambda b, i, j: i // size == j // size)


@pytest.mark.parametrize("dilation", [1, 2, 5])
@pytest.mark.parametrize("window", [0, 1, 3])
def test_dilated(window, dilation):
    is_exactly(masks.dilated(window, dilation), lambda b, i, j: i - j in [n * dilation for n in range(window + 1)])


def test_left_padding():
    is_exactly(masks.left_padding(torch.tensor([0, 6])), lambda b, i, j: j >= [0, 6][b])


@pytest.mark.parametrize("sink", [0, 2, 30])
@pytest.mark.parametrize("window", [0, 3, 30])
def test_sink_window(sink, window):
    is_exactly(masks.sink_window(sink, window), lambda b, i, j: j <= i and (j < sink or i - j <= window))


@pytest.mark.parametrize("cols", [17, 64, 65, 130])
def test_tree(cols):
    words = (cols + 63) // 64
    bits = torch.rand(M, words * 64, generator=torch.Generator().manual_seed(cols)) < 0.5
    packed = torch.zeros(M, words, dtype=torch.int64)
    for j in range(words * 64):  # bit 63 is the sign
        packed[:, j // 64] |= bits[:, j].to(torch.int64) << (j % 64)
    is_exactly(masks.tree(packed), lambda b, i, j: bool(bits[i, j]), M, cols)
    if words == 1:
        is_exactly(masks.tree(packed[:, 0]), lambda b, i, j: bool(bits[i, j]), M, cols)


@pytest.mark.parametrize("length", [1, 3, 8, 9])
@pytest.mark.parametrize("block", [1, 2, 5, 20])
def test_block_diffusion(length, block):
    """The three parts of BD3-LM's mask: block diagonal, offset block causal, block causal."""

    def sees(b, i, j):
        (is_clean, mine), (other_is_clean, theirs) = (divmod(p, length) if p < 2 * length else (1, p - length) for p in (i, j))
        mine, theirs = mine // block, theirs // block
        diagonal = mine == theirs and is_clean == other_is_clean
        return diagonal or bool(other_is_clean and (mine >= theirs if is_clean else mine > theirs))

    is_exactly(masks.block_diffusion(length, block), sees, 2 * length, 2 * length)
    is_exactly(masks.block_diffusion(length, block), sees)


def window_of(place, size, count):
    """NATTEN's window on an axis, from its text: as many neighbours on each side as fit, and the rest on the other side."""
    size = min(size, count)
    first = place - size // 2
    while first < 0:
        first += 1
    while first + size > count:
        first -= 1
    return range(first, first + size)


def sees_a_window(places, window, counts, i, j):
    if max(i, j) >= len(places):
        return False
    return all(y in window_of(x, n, count) for x, y, n, count in zip(places[i], places[j], window, counts, strict=True))


@pytest.mark.parametrize("window", [(1, 1, 1), (3, 3, 3), (2, 4, 1), (9, 3, 2)])
@pytest.mark.parametrize("shape", [(2, 3, 5), (4, 4, 4), (5, 1, 3)])
def test_neighborhood_3d(shape, window):
    places = list(itertools.product(*map(range, shape)))
    mask, rows = masks.neighborhood_3d(shape, window), len(places)
    is_exactly(mask, lambda b, i, j: sees_a_window(places, window, shape, i, j), rows, rows + 2)
    seen = dense(mask, rows, rows)[0, 0].sum(1)
    assert seen.unique().tolist() == [math.prod(map(min, window, shape))], "every query sees as many keys"
    assert not dense(mask, rows + 3, rows)[0, 0, rows:].any(), "tokens beyond the video see nothing"


@pytest.mark.parametrize("window", [(1, 1, 1), (3, 3, 3), (2, 1, 3)])
@pytest.mark.parametrize(("shape", "tile"), [((4, 4, 6), (2, 2, 2)), ((2, 6, 4), (1, 2, 4)), ((3, 2, 8), (3, 1, 2))])
def test_sliding_tiles(shape, tile, window):
    counts = [size // each for size, each in zip(shape, tile, strict=True)]
    tiles = itertools.product(*map(range, counts))
    places = [at for at in tiles for _ in range(math.prod(tile))]  # token -> its tile
    mask, rows = masks.sliding_tiles(shape, tile, window), len(places)
    assert rows == math.prod(shape)
    is_exactly(mask, lambda b, i, j: sees_a_window(places, window, counts, i, j), rows, rows + 2)


def test_sliding_tiles_of_one_token_are_a_neighborhood():
    assert torch.equal(dense(masks.sliding_tiles((2, 3, 4), (1, 1, 1), (2, 3, 1))), dense(masks.neighborhood_3d((2, 3, 4), (2, 3, 1))))


def test_row_ranges_and_tiles_of_the_newer_masks():
    """``block_diffusion`` has two ranges a row. Blocks of a tile's tokens, and of a part of them, are whole under ``sliding_tiles``. No
    block that nobody sees is listed."""
    ranges = row_ranges(trace(masks.block_diffusion(1000, 24), "mask"))
    assert ranges is not None and ranges.count == 2
    mask, length = masks.sliding_tiles((12, 16, 24), (6, 8, 8), (1, 3, 2)), 12 * 16 * 24
    for size in (384, 128, 64):
        blocks = anyattn.create_block_mask(mask, 1, 1, length, length, device="cpu", BLOCK_SIZE=size)
        assert blocks.kv_num_blocks.sum() == 0, "a block is partial"
        assert blocks.full_kv_num_blocks.unique().tolist() == [2 * 2 * 384 // size]
    for mask in (masks.neighborhood_3d((6, 8, 10), (3, 3, 5)), masks.block_diffusion(240, 20)):
        blocks = anyattn.create_block_mask(mask, 1, 1, 480, 480, device="cpu", BLOCK_SIZE=32)
        seen = dense(mask, 480, 480)[0, 0].unflatten(0, (15, 32)).unflatten(2, (15, 32)).any(3).any(1)
        assert torch.equal(blocks.to_dense()[0, 0].bool(), seen)


BAD = [
    (lambda: masks.causal(1.5), TypeError, "offset=1.5 is a float; wanted an int"),
    (lambda: masks.causal(True), TypeError, "offset=True is a bool"),
    (lambda: masks.causal_bottom_right(-1, 4), ValueError, "seqlen_q=-1; wanted at least 0"),
    (lambda: masks.sliding_window(True, 0), TypeError, "left=True"),
    (lambda: masks.sliding_window(2, 1.0), TypeError, "right=1.0"),
    (lambda: masks.prefix_lm(-1), ValueError, "prefix_length=-1"),
    (lambda: masks.prefix_lm(torch.ones(2)), ValueError, "wanted an integer tensor of shape .B,."),
    (lambda: masks.document([0, 1]), TypeError, "ids is a list"),
    (lambda: masks.document(torch.zeros(1, 2, 3, dtype=torch.int64)), ValueError, r"ids has shape \(1, 2, 3\)"),
    (lambda: masks.document(torch.ones(3, dtype=torch.bool)), ValueError, "torch.bool"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([1, 5])), ValueError, "starts with"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([0, 5, 3])), ValueError, r"cu_seqlens\[2\]=3 is less"),
    (lambda: masks.document_from_cu_seqlens(torch.tensor([], dtype=torch.int64)), ValueError, "starts with"),
    (lambda: masks.chunked(0), ValueError, "chunk=0; wanted at least 1"),
    (lambda: masks.block_diagonal(0), ValueError, "block=0"),
    (lambda: masks.dilated(-1, 1), ValueError, "window=-1"),
    (lambda: masks.dilated(1, 0), ValueError, "dilation=0"),
    (lambda: masks.left_padding(3), TypeError, "leftpad is a int"),
    (lambda: masks.sink_window(1, -1), ValueError, "window=-1"),
    (lambda: masks.tree(torch.zeros(3, dtype=torch.int32)), ValueError, "wanted torch.int64"),
    (lambda: masks.block_diffusion(0, 4), ValueError, "length=0; wanted at least 1"),
    (lambda: masks.block_diffusion(8, 2.0), TypeError, "block=2.0 is a float"),
    (lambda: masks.neighborhood_3d((2, 3), (1, 1, 1)), TypeError, r"shape=\(2, 3\); wanted three ints"),
    (lambda: masks.neighborhood_3d((2, 3, 4), 3), TypeError, "window=3; wanted three ints"),
    (lambda: masks.neighborhood_3d((2, 3, 4), (1, 0, 1)), ValueError, r"window\[1\]=0; wanted at least 1"),
    (lambda: masks.neighborhood_3d((2, 3.0, 4), (1, 1, 1)), TypeError, r"shape\[1\]=3.0 is a float"),
    (lambda: masks.neighborhood_3d((2**11, 2**10, 2**10), (1, 1, 1)), ValueError, "2,147,483,648 positions"),
    (lambda: masks.sliding_tiles((4, 6, 8), (2, 4, 4), (1, 1, 1)), ValueError, "6 tokens on axis h; wanted a multiple of the tile's 4"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_arguments(case):
    make, error, words = BAD[case]
    with pytest.raises(error, match=words):
        make()


@pytest.mark.covering(1)
@pytest.mark.parametrize("offset", [0, 1, 10, 64, 130])
@pytest.mark.parametrize("drafts", [5, 70])
def test_tree_behind_a_cached_prefix(offset, drafts):
    """Every draft sees the prefix; where q_idx is a place among the keys, rows are counted from the first query."""
    bits = torch.rand(drafts, drafts, generator=torch.Generator().manual_seed(offset)) < 0.5
    words = torch.zeros(drafts, -(-drafts // 64), dtype=torch.int64)
    for j in range(drafts):
        words[:, j // 64] |= bits[:, j].to(torch.int64) << (j % 64)
    sees = lambda b, i, j: j < offset or bool(bits[i, j - offset])
    is_exactly(masks.tree(words, offset), sees, drafts, offset + drafts)
    batch = [offset, offset + 3]
    by_entry = masks.tree(words, torch.tensor(batch))
    is_exactly(by_entry, lambda b, i, j: j < batch[b] or (j < batch[b] + drafts and bool(bits[i, j - batch[b]])), drafts, offset + drafts)
    placed = masks.tree(words, torch.tensor(batch), torch.tensor(batch))
    q, k, v = torch.randn(2, drafts, 2, 16), *torch.randn(2, 2, offset + 3 + drafts, 2, 16)
    lengths = torch.tensor(batch) + drafts
    decoded = anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, mask_mod=placed)
    for b, n in enumerate(lengths.tolist()):
        alone = anyattn.flash_attn_func(q[b : b + 1], k[b : b + 1, :n], v[b : b + 1, :n], mask_mod=masks.tree(words, batch[b]))
        assert float((decoded[b] - alone[0]).abs().max()) <= 32 * torch.finfo(q.dtype).eps * float(v.abs().max())


def test_tree_offsets_that_cannot_be_are_refused():
    words = torch.zeros(4, dtype=torch.int64)
    for options, message in (({"offset": -1}, "offset"), ({"offset": 1.0}, "offset"), ({"first_query": torch.zeros(2)}, "first_query")):
        with pytest.raises((ValueError, TypeError), match=message):
            masks.tree(words, **options)
