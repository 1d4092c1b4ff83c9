"""The kernel that makes a ragged batch's tables, its own text run as Python, against the torch operations that stay its reference."""

from __future__ import annotations

import importlib.util
import itertools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.compile import build, launch
from anyattn.backends.hopper.tables_config import TablesConfig
from anyattn.sequences.tile_order import longest_first, of_all_heads
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.sequences.varlen_tables import entries_table

if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)

from anyattn.backends.hopper.kernel.tile_order import SequenceTables
from tests.support.hopper import kernel_in_python as python

THREADS = 64
TILE = 16  # row tiles of a batch that Python gets through


def stored(lengths: dict[str, Any], rows_q: int, rows_k: int, dtype: torch.dtype = torch.int32) -> StoredSequences:
    found = LengthTables(*(None if lengths.get(n) is None else torch.tensor(lengths[n], dtype=dtype) for n in LengthTables._fields))
    batch = next(len(t) - n.startswith("cu") for n, t in zip(LengthTables._fields, found, strict=True) if t is not None)
    return StoredSequences(found, StoredSizes(batch, rows_q, rows_k, rows_q, rows_k))


def has_gaps(s: StoredSequences) -> bool:
    """Whether the host asks for wiping at all."""
    return s.tables.cu_seqlens_q is not None or s.tables.seqused_q is not None


def run_kernel(s: StoredSequences, config: TablesConfig, results: tuple[Any, ...], bins: int, grid: tuple[int, int]) -> None:
    """results: entries and order, then the tensors to clear where no sequence is, of queries and of keys; None: not wanted."""
    kernel = python.runnable(SequenceTables, THREADS=THREADS)(config)
    kernel.shared = lambda: {"ends": 2048, "chosen": 2048, "counts": THREADS, "sums": 32}
    memory = lambda x: None if x is None else python.Memory(x)
    given = (*(memory(None if t is None else t.numpy()) for t in s.tables), s.batch, s.sizes.rows_q, s.sizes.rows_k)
    entries, order, *of_queries, of_keys = map(memory, results)
    for place in itertools.product(range(grid[0]), range(grid[1])):
        python.run_block(lambda: kernel.kernel(given, entries, order, (*of_queries, None), of_keys, bins), THREADS, place, grid)


def room_for(s: StoredSequences) -> tuple[int, int]:
    """Rows of storage, and row tiles."""
    storage = 1 if s.tables.cu_seqlens_q is not None else s.batch
    return storage, min(s.batch * ceil_div(s.sizes.rows_q, TILE), storage * s.sizes.rows_q // TILE + s.batch)


def made(s: StoredSequences, heads: int, ends_with_row: bool) -> tuple[np.ndarray, ...]:
    """(entries, order, out, lse, bin_keys): by the kernel; out and lse are poisoned before."""
    storage, most = room_for(s)
    entries, order = np.full((s.batch, 9), -7, np.int32), np.full((most, 3), -7, np.int32)
    out, lse = (np.full((storage, heads, s.sizes.rows_q, *more), np.nan, np.float32) for more in ((8,), ()))
    bins = ceil_div(s.bound_k + 1, THREADS)
    wiped = (out, lse) if has_gaps(s) else (None, None)
    run_kernel(s, TablesConfig(TILE, ends_with_row, 2048), (entries, order, *wiped, None), bins, (3 if has_gaps(s) else 1, heads))
    return entries, order, out, lse, np.array(bins)


def cost(row: np.ndarray, entries: np.ndarray, ends_with_row: bool) -> int:
    m_block, _, b = row.tolist()
    seqlen_q, seqlen_k = entries[b, 2], entries[b, 5]
    return int(min(seqlen_k, (m_block + 1) * TILE + seqlen_k - seqlen_q)) if ends_with_row else int(seqlen_k)


MANY = np.cumsum([0, *(i * 7 % 19 for i in range(66))]).tolist()  # a round of all threads, and two more entries
CASES: dict[str, tuple[dict[str, Any], int, int]] = {
    "packed": ({"cu_seqlens_q": [0, 30, 30, 31, 90], "cu_seqlens_k": [0, 12, 40, 40, 333]}, 95, 340),
    "one": ({"cu_seqlens_q": [0, 70], "cu_seqlens_k": [0, 70]}, 70, 70),
    "used": ({"cu_seqlens_q": [0, 30, 33, 60], "cu_seqlens_k": [0, 30, 33, 60], "seqused_q": [17, 3, 0], "seqused_k": [30, 0, 5]}, 64, 60),
    "padded": ({"seqused_q": [5, 20, 0], "seqused_k": [33, 0, 40]}, 20, 40),
    "keys used": ({"cu_seqlens_q": [0, 1, 2, 3], "seqused_k": [33, 1, 40]}, 3, 48),
    "queries padded": ({"cu_seqlens_k": [0, 12, 40]}, 20, 40),
    "all empty": ({"cu_seqlens_q": [0, 0, 0], "cu_seqlens_k": [0, 0, 9]}, 5, 9),
    "from 3": ({"cu_seqlens_q": [3, 8, 9], "cu_seqlens_k": [0, 5, 6]}, 12, 6),
    "more entries than threads": (dict.fromkeys(("cu_seqlens_q", "cu_seqlens_k"), MANY), 620, 620),
}  # fmt: skip


# of many entries, for which Python takes seconds, ``make test`` runs the quick way
BOTH_WAYS = [
    pytest.param(name, way, marks=[pytest.mark.slow] * (way and name.startswith("more"))) for name in CASES for way in (False, True)
]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "ends_with_row"), BOTH_WAYS)
def test_the_kernel_makes_the_reference_s_tables(name: str, ends_with_row: bool) -> None:
    lengths, rows_q, rows_k = CASES[name]
    s = stored(lengths, rows_q, rows_k, torch.int64 if ends_with_row else torch.int32)
    heads = 1 if s.batch > THREADS else 2
    entries, order, out, lse, bin_keys = made(s, heads, ends_with_row)
    assert entries.tolist() == entries_table(s).tolist()
    reference = of_all_heads(longest_first(s, TILE, len(order), ends_with_row=ends_with_row))
    exists = order[:, 0] >= 0
    assert sorted(map(tuple, order[exists].tolist())) == sorted(tuple(r) for r in reference.tolist() if r[0] >= 0)
    count = int(exists.sum())
    assert exists[:count].all() and (order[count:] == [-1, 0, 0]).all()
    costs = [max(0, cost(row, entries, ends_with_row)) // int(bin_keys) for row in order[:count]]
    assert all(a >= b for a, b in pairwise(costs))
    check_gaps(s, out, lse)


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", CASES)
def test_tables_of_tiles_of_keys(name: str) -> None:
    """Those of a backward pass: queries and keys have changed places, dk, dv and dq are cleared together, and the tiles are counted."""
    lengths, rows_q, rows_k = CASES[name]
    s = stored(lengths, rows_q, rows_k).turned()
    assert isinstance(s, StoredSequences)
    turned, (storage, most), rows = s.turned(), room_for(s), s.sizes.rows_q
    assert isinstance(turned, StoredSequences)
    entries, order = np.full((s.batch, 9), -7, np.int32), np.full((most + 1, 3), -7, np.int32)
    dk, dv = (np.full((storage, 1, rows, 8), np.nan, np.float32) for _ in range(2))
    dq = np.full((room_for(turned)[0], 2, turned.sizes.rows_q, 8), np.nan, np.float32)
    bin_rows = ceil_div(s.bound_k + 1, THREADS)
    wiped = (*((dk, dv) if has_gaps(s) else (None, None)), dq if has_gaps(turned) else None)
    run_kernel(s, TablesConfig(TILE, False, 2048, by_key=True), (entries, order, *wiped), bin_rows, (3, 1))
    assert entries.tolist() == entries_table(s).tolist()
    count = int(order[most, 0])
    assert (order[count:most] == [-1, 0, 0]).all() and (order[:count, 0] >= 0).all()
    found = [(b, n) for n, _, b in order[:count].tolist()]
    wanted = [(b, n) for b, length in enumerate(s.seqlens_q.tolist()) for n in range(ceil_div(length, TILE))]
    assert sorted(found) == wanted
    assert all(n == (before + 1 if b == of else 0) for (of, before), (b, n) in pairwise([(-1, -1), *found])), (
        "a sequence's tiles do not follow one another"
    )
    rows = [int(entries[b, 5]) // bin_rows for b, _ in found]
    assert all(x >= y for x, y in pairwise(rows))
    for gradient, of in ((dk, s), (dv, s), (dq, turned)):
        assert_cleared(gradient, of)


def used_rows(s: StoredSequences, storage: int, rows: int) -> np.ndarray:
    used = np.zeros((storage, rows), dtype=bool)
    for row, start, n in zip(s.q_row.tolist(), s.q_start.tolist(), s.seqlens_q.tolist(), strict=True):
        used[row, start : start + n] = True
    return used


def assert_cleared(x: np.ndarray, s: StoredSequences, value: float = 0.0) -> None:
    """What no sequence uses has ``value``, and nothing else is touched."""
    used = used_rows(s, x.shape[0], x.shape[2])
    for head in range(x.shape[1]):
        assert np.isnan(x[:, head][used]).all() and (not has_gaps(s) or (x[:, head][~used] == value).all())


def check_gaps(s: StoredSequences, out: np.ndarray, lse: np.ndarray) -> None:
    assert_cleared(out, s)
    assert_cleared(lse, s, -math.inf)


@pytest.mark.parametrize(
    "lengths",
    [
        {"cu_seqlens_q": [0, 50, 20, 900], "cu_seqlens_k": [-5, 7, 2**31 - 1, 12]},
        {"cu_seqlens_q": [7, 7, 40], "cu_seqlens_k": [0, 3, 4], "seqused_q": [-3, 99], "seqused_k": [2**30, -1]},
    ],
)
def test_wrong_tables_write_nothing_outside(lengths: dict[str, Any]) -> None:
    """They are not read on the host, so the kernel keeps what it makes of them inside storage (``Memory`` refuses the rest)."""
    s = stored(lengths, 40, 12)
    entries, order, _, _, _ = made(s, 1, True)
    for start, n, rows in ((entries[:, 1], entries[:, 2], 40), (entries[:, 4], entries[:, 5], 12)):
        assert (start >= 0).all() and (n >= 0).all() and (start + n <= rows).all()
    assert ((order[:, 0] >= -1) & (order[:, 0] < 40) & (order[:, 2] >= 0) & (order[:, 2] < s.batch)).all()


SLOW = [pytest.param(True, False, marks=pytest.mark.slow), pytest.param(False, True, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("has_tables", "has_results"), [(True, True), *SLOW])
def test_it_compiles(has_tables: bool, has_results: bool) -> None:
    ends, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    made = (torch.zeros(2, 9, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)) if has_tables else (None, None)
    results = (torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 8), None) if has_results else (None, None, None)
    kinds, _ = launch.kinds_of((ends, None, used, used, *made, *results, None, 2, 8, 8, 1, 2, 1))
    assert build.compiled_object(TablesConfig(128, True, 16384), kinds)


def test_the_backward_s_compiles() -> None:
    ends, used = torch.zeros(3, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    dk, dv, dq = (torch.zeros(1, 2, 8, 64, dtype=torch.bfloat16) for _ in range(3))
    made = torch.zeros(2, 9, dtype=torch.int32), torch.zeros(4, 3, dtype=torch.int32)
    kinds, _ = launch.kinds_of((ends, None, used, used, *made, dk, dv, None, dq, 2, 8, 8, 1, 2, 1))
    assert build.compiled_object(TablesConfig(128, False, 16384, by_key=True), kinds)
