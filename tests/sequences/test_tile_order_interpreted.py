"""Order of a ragged batch's tiles by the Triton kernel, in Triton's interpreter, against torch operations.

Run by ``test_in_the_interpreter.py`` in a process of its own: the interpreter is chosen before Triton is imported.
"""

import pytest
import torch

from anyattn.backends.triton import tables
from anyattn.sequences import tile_order_device
from anyattn.sequences.unread_kvcache import CacheSizes, CacheTables, StoredCache
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from tests.sparsity.kernels.test_varlen_lists_interpreted import BATCHES, ends, stored

MANY = ([(7 * i) % 50 for i in range(150)], [(11 * i) % 13 for i in range(150)])  # more than the kernel looks at at once


def both_ways(s, tile, by_key, monkeypatch):  # type: ignore[no-untyped-def]
    vars(s)["device"] = torch.device("cpu")
    rows = s.sizes.rows_k if by_key else s.sizes.rows_q
    packed = (s.tables.cu_seqlens_k if by_key else s.tables.cu_seqlens_q) is not None
    shape = (1 if packed else s.batch, 2, rows, 16)
    assert tile_order_device.can_order(s)
    by_kernel = tables._ordered(s, None, shape, (tile, 0), by_key)
    with monkeypatch.context() as patch:
        patch.setattr(tables, "can_order", lambda s: False)
        return by_kernel, tables._ordered(s, None, shape, (tile, 0), by_key)


@pytest.mark.parametrize("by_key", (False, True))
@pytest.mark.parametrize("form", ("packed", "padded"))
@pytest.mark.parametrize("tile", (16, 64))
def test_the_same_order(form, tile, by_key, monkeypatch):  # type: ignore[no-untyped-def]
    for batch in (*BATCHES, MANY):
        for slack in (0, 40):
            found, wanted = both_ways(stored(batch, form, slack), tile, by_key, monkeypatch)
            assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), (batch, found, wanted)


@pytest.mark.parametrize("by_key", (False, True))
def test_used_rows_of_packed_sequences(by_key, monkeypatch):  # type: ignore[no-untyped-def]
    used = LengthTables(ends([40, 0, 90]), ends([64, 3, 70], torch.int64), torch.tensor([33, 0, 90]), torch.tensor([64, 1, 9]))
    found, wanted = both_ways(StoredSequences(used, StoredSizes(3, 130, 137, 90, 70), None, torch.device("cpu")), 16, by_key, monkeypatch)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


CACHES = {  # of five entries, one of them without queries, and rows in use before the step
    "as many new rows as queries": ({}, None),
    "two new rows each": ({}, 2),
    "nothing new": ({}, 0),
    "padding": ({"leftpad": torch.tensor([5, 0, 90, 7, -3])}, None),
    "other rows": ({"rows": torch.tensor([4, 0, 9, -1, 2], dtype=torch.int32)}, None),
    "other rows behind padding": ({"rows": torch.tensor([4, 0, 2, 1, 3]), "leftpad": torch.tensor([5, 0, 1, 7, 200])}, 1),
}


@pytest.mark.parametrize("cached", ([40, 7, 95, 0, 3], [99, 2**30, -4, 100, 100]), ids=["tables", "nonsense"])
@pytest.mark.parametrize("name", CACHES)
def test_packed_queries_of_a_cache(name, cached, monkeypatch):  # type: ignore[no-untyped-def]
    """Tables that make no sense too: no key and no query lies outside."""
    more, new = CACHES[name]
    for ends_q in ([0, 3, 3, 20, 21, 40], [0, 3, 50, 20, -7, 40]):
        step = CacheTables(torch.tensor(cached, dtype=torch.int32), cu_seqlens_q=torch.tensor(ends_q), **more)
        s = StoredCache(step, CacheSizes(5, 40, 40, new, 100, 5), torch.device("cpu"))
        (order, entries), (wanted_order, wanted) = both_ways(s, 16, False, monkeypatch)
        # of an entry without keys it does not matter where they would be
        has_keys = wanted[:, 5:6] > 0
        columns = torch.tensor([0, 1, 2, 5, 6, 7, 8], device="cpu")
        assert torch.equal(entries[:, columns], wanted[:, columns]), (entries, wanted)
        assert torch.equal(entries[:, 3:5] * has_keys, wanted[:, 3:5] * has_keys)
        assert torch.equal(order, wanted_order)


def test_every_row_is_written_whatever_the_tables_hold():  # type: ignore[no-untyped-def]
    """More tiles than bounds allow for, and ends that fall: nothing is written outside, and nothing is left as it was."""
    for tables_of_q in ([0, 500, 900, 5000], [0, 50, 20, 10], [0, -5, 2**20, 3]):
        cu = torch.tensor(tables_of_q)
        s = StoredSequences(LengthTables(cu, cu, None, None), StoredSizes(3, 100, 100, 50, 50), None, torch.device("cpu"))
        whole = torch.full((40, 2), -77, dtype=torch.int32)
        places = iter([whole[:9], torch.empty(3, 9, dtype=torch.int32)])
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch, "empty", lambda shape, places=places, **more: next(places))
            order, _ = tile_order_device.sequences_ordered(s, 16, 9, False)
        assert order.shape == (9, 2) and bool((whole[9:] == -77).all())
        assert bool(((order[:, 0] >= 0) & (order[:, 0] < 3) & (order[:, 1] >= -1)).all()), order
