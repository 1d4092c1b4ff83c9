"""Every mask of the library against its definition in plain Python, pair by pair."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.mods.analysis.evaluate import evaluate
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
