"""Block lists of ragged batches by the Triton kernels, in Triton's interpreter, against those of torch operations.

Run by ``test_in_the_interpreter.py``: the interpreter is chosen before Triton is imported.
"""

import pytest
import torch

from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.tracing.trace import trace
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.sparsity import varlen_lists as ragged
from anyattn.sparsity.kernels import block_lists
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors
from tests.sparsity.kernels.test_block_lists_interpreted import in_ways
from tests.support.covering import few
from tests.support.tiles import library_masks, random_mask

LONGEST = (97, 110)
BATCHES = [  # (queries, keys) of each sequence
    ([30, 0, 97, 1, 16], [50, 31, 110, 0, 1]),
    ([5], [64]),
    ([0, 0, 33], [7, 0, 64]),
    ([48, 48], [33, 33]),
]
PAIRS = [([30, 97], [50, 110]), ([0, 33], [7, 64]), ([48, 48], [33, 33]), ([5, 1], [64, 0])]  # as many as random masks have entries


def ends(lengths, dtype=torch.int32):  # type: ignore[no-untyped-def]
    return torch.tensor([0, *lengths]).cumsum(0).to(dtype)


def stored(batch, form="packed", slack=0):  # type: ignore[no-untyped-def]
    """slack: rows of storage behind the sequences, and by so much a bound is above the longest."""
    of_q, of_k = batch
    rows = (sum(of_q) + slack, sum(of_k) + slack)
    bounds = (max(of_q) + slack, max(of_k) + slack)
    if form == "packed":
        tables = LengthTables(ends(of_q), ends(of_k, torch.int64), None, None)
    else:
        tables, rows = LengthTables(None, None, torch.tensor(of_q), torch.tensor(of_k, dtype=torch.int32)), bounds
    return StoredSequences(tables, StoredSizes(len(of_q), *rows, *(min(b, r) for b, r in zip(bounds, rows, strict=True))))


def assert_ragged(mod, s, tile, heads=2):  # type: ignore[no-untyped-def]
    traced = trace(mod, "mask")
    found = ragged._on_device(traced, s, tile, heads)
    lengths = (s.seqlens_q, s.seqlens_k)
    wanted = VarlenBlockSparseTensors.from_classes(classify_ragged(traced, *lengths, *tile, heads, s.q_first), tile, *lengths)
    assert found is not None and found.mask_block_cnt.shape[0] == wanted.mask_block_cnt.shape[0]
    assert torch.equal(found.seqlens_q, s.seqlens_q) and torch.equal(found.seqlens_k, s.seqlens_k)
    known = torch.zeros(found.mask_block_cnt.shape[1], dtype=torch.bool)
    for b, (sq, sk) in enumerate(zip(*(t.tolist() for t in lengths), strict=True)):
        columns = -(-sk // tile[1])
        for m in range(-(-sq // tile[0])):
            row, at = int(found.first_row[b]) + m, int(found.first_entry[b]) + m * columns
            assert not known[row]
            known[row] = True
            for h in range(found.mask_block_cnt.shape[0]):
                parts = ((found.mask_block_cnt, found.mask_block_idx), (found.full_block_cnt, found.full_block_idx))
                for (count, index), theirs in zip(parts, wanted.lists(b, h, m), strict=True):
                    assert count.dtype is index.dtype is torch.int32
                    mine = index[h, at : at + columns]
                    assert int(count[h, row]) == len(theirs) and torch.equal(mine[: len(theirs)], theirs), (b, h, m)
                    assert not mine[len(theirs) :].any()
    for count in (found.mask_block_cnt, found.full_block_cnt):
        assert not count[:, ~known].any()


way = in_ways("at once", "two kernels", "many chunks")
LIBRARY = list(library_masks(*LONGEST))


@pytest.mark.parametrize("name", few(LIBRARY, *LIBRARY[::2]))
def test_library_masks(name):  # type: ignore[no-untyped-def]
    mod = library_masks(*LONGEST, B=5)[name]
    assert_ragged(mod, stored(BATCHES[0]), (16, 32))


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["document_causal", "tree", "causal", "dilated"])
def test_several_ways(name, way):  # type: ignore[no-untyped-def]
    mod = library_masks(*LONGEST, B=5)[name]
    for at, batch in enumerate(BATCHES):
        assert_ragged(mod, stored(batch, slack=13 * (at % 2)), (20, 12), 1 + at % 2)
    assert_ragged(mod, stored(BATCHES[0], "padded", 4), (16, 32))


@pytest.mark.parametrize("seed", few(range(12), *range(6)))
def test_random_masks(seed):  # type: ignore[no-untyped-def]
    batch = PAIRS[seed % len(PAIRS)]
    assert_ragged(random_mask(2000 + seed, max(LONGEST)), stored(batch, "packed" if seed % 3 else "padded", seed % 5), (16, 48))


def by_entry_and_head(ids, offsets):  # type: ignore[no-untyped-def]
    return lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (k <= q + offsets[h])


def test_tables_of_entries_and_heads(way):  # type: ignore[no-untyped-def]
    """What is looked at beforehand differs from entry to entry and head to head; a sequence that has no pairs is never asked about."""
    g = torch.Generator().manual_seed(0)
    ids = (torch.rand(5, 110, generator=g) < 0.08).long().cumsum(1)
    assert_ragged(by_entry_and_head(ids, torch.tensor([0, 20])), stored(BATCHES[0]), (16, 16))
    assert_ragged(lambda b, h, q, k: (q * 7 + k * 3 + b + h) % 11 != 4, stored(BATCHES[0]), (16, 16))


def test_positions_that_begin_elsewhere():  # type: ignore[no-untyped-def]
    """Sequences that the host knows, whose first queries have positions of their own."""
    of_q, of_k = (torch.tensor(t) for t in ([5, 40, 0], [70, 45, 10]))
    zero = torch.zeros_like(of_q)
    s = Sequences(of_q, of_k, zero, of_q.cumsum(0) - of_q, zero, of_k.cumsum(0) - of_k, torch.tensor([60, 5, 3]))
    for mod in (lambda b, h, q, k: q >= k, lambda b, h, q, k: (q - k) % 9 < 4):
        assert_ragged(mod, s, (16, 16))


@pytest.mark.parametrize("count", [4, 13])
def test_many_sequences(count, monkeypatch):  # type: ignore[no-untyped-def]
    """More than one step of the table of sequences."""
    monkeypatch.setattr(block_lists, "_PLACES_CHUNK", 4)
    g = torch.Generator().manual_seed(1)
    of_q, of_k = (torch.randint(0, 5, (count,), generator=g).tolist() for _ in range(2))
    assert_ragged(lambda b, h, q, k: q >= k, stored((of_q, of_k)), (2, 2), 1)


def test_tables_that_are_wrong_stay_inside_the_lists():  # type: ignore[no-untyped-def]
    tables = LengthTables(torch.tensor([0, 90, -20, 4000]), torch.tensor([5, -7, 2**31 - 1, 12]), None, None)
    s = StoredSequences(tables, StoredSizes(3, 40, 64, 33, 50))
    found = ragged._on_device(trace(lambda b, h, q, k: q >= k, "mask"), s, (16, 16), 1)
    assert found is not None and found.seqlens_q is not None and found.seqlens_k is not None
    rows, columns = -(-found.seqlens_q // 16), -(-found.seqlens_k // 16)
    assert bool((found.first_row >= 0).all() & (found.first_row + rows <= found.mask_block_cnt.shape[1]).all())
    assert bool((found.first_entry + rows * columns <= found.mask_block_idx.shape[1]).all())
    assert bool((found.mask_block_cnt >= 0).all() & (found.mask_block_cnt <= 4).all())


def test_what_the_kernels_cannot_list():  # type: ignore[no-untyped-def]
    far = 2**40
    assert ragged._on_device(trace(lambda b, h, q, k: q + far >= k, "mask"), stored(BATCHES[0]), (16, 16), 1) is None
    assert ragged._on_device(trace(lambda b, h, q, k: q >= k, "mask"), stored(([3], [0])), (16, 16), 1) is None
