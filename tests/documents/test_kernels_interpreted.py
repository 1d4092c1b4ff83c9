"""Document tables by the Triton kernels, in Triton's interpreter, against those of torch operations.

Run by ``test_in_the_interpreter.py`` in a process of its own: the interpreter is chosen before Triton is imported.
"""

import random

import pytest
import torch

from anyattn.documents import device as kernels
from anyattn.documents.sequences import document_sequences, documents_in_order


@pytest.fixture(autouse=True, params=["small blocks", "as they are"])
def _blocks(request, monkeypatch):  # type: ignore[no-untyped-def]
    """Small inputs then need several rounds of every loop."""
    if request.param == "small blocks":
        for name, size in (("_BLOCK", 8), ("_PAIRS", 2), ("_CHUNK", 4), ("_TILES", 4), ("_ENTRIES", 4)):
            monkeypatch.setattr(kernels, name, size)


def assert_same(ids, rows, places):  # type: ignore[no-untyped-def]
    """Whether they are documents."""
    found, holds = kernels.documents_found(ids, rows, places)
    wanted, held = document_sequences(ids, rows, places)
    assert holds.dtype is held.dtype and holds.tolist() == held.tolist()
    assert found.sizes == wanted.sizes and found.seqlens_q.tolist() == wanted.seqlens_q.tolist()
    if held.item():
        assert found.q_start.tolist() == wanted.q_start.tolist()
    for tile_m, ends_with_row in ((4, False), (3, True)):
        for mine, its in zip(*(f(wanted, tile_m, ends_with_row) for f in (kernels.documents_ordered, documents_in_order)), strict=True):
            assert mine.dtype is its.dtype and mine.tolist() == its.tolist(), (wanted.seqlens_q, tile_m, ends_with_row)
    return bool(held.item())


def test_random_ids():
    rng, held = random.Random(1), 0
    for _ in range(30):
        length, rows, places = rng.choice((1, 7, 8, 9, 16, 33)), rng.choice((1, 1, 2, 3)), rng.choice((1, 3, 4, 9))
        dtype = rng.choice((torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64))
        few = rng.choice((1, 2, 4, 12))
        ids = [sorted(rng.choices(range(few), k=length)) for _ in range(rows)]
        if rng.random() < 0.5:
            ids = [[5 - x if dtype.is_signed else x for x in row] for row in ids]
        for row in ids:
            if rng.random() < 0.2:
                at = rng.randrange(length)
                row[at:] = row[at:][::-1]
        given = torch.tensor(ids, dtype=dtype) if rng.random() < 0.7 else torch.tensor(ids[0], dtype=dtype)
        held += assert_same(given, rows, places)
    assert 6 < held < 27


def test_as_many_documents_as_there_are_places_and_one_more():
    ids = torch.arange(40) // 5
    assert assert_same(ids, 2, 8) and not assert_same(ids, 2, 7)


def test_the_last_run_has_the_first_id():
    ids = torch.arange(40) // 5
    ids[35:] = 0
    assert not assert_same(ids, 1, 8) and not assert_same(torch.stack([torch.arange(40) // 5, ids]), 2, 8)


def test_strided_ids():
    wide = torch.arange(80).view(2, 40) // 7
    for ids in (wide[:, ::2], wide.T.contiguous().T, wide[1:].expand(3, -1), wide[0, 4:30]):
        assert assert_same(ids, ids.shape[0] if ids.ndim == 2 else 2, 8)


def test_documents_of_equal_length():
    for ends_with_row in (False, True):
        s, _ = document_sequences(torch.arange(48) // 12, 2, 5)
        mine, its = (f(s, 4, ends_with_row)[0].tolist() for f in (kernels.documents_ordered, documents_in_order))
        assert mine == its and mine[-1] == [24, 0, 0]
