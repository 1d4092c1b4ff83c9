"""Lists of ragged batches made on a CUDA device by the Triton kernels: those of the CPU, without a wait for the device."""

from __future__ import annotations

import pytest
import torch

from anyattn.mods.tracing.trace import trace
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.sparsity.block_sparse import LISTS
from anyattn.sparsity.varlen_lists import RaggedLists, ragged_lists
from tests.gpu.test_block_mask_gpu import HAS_TRITON, on_gpu
from tests.support.gpu.waiting import no_waiting
from tests.support.tiles import library_masks, random_mask

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="needs a CUDA device and triton")]

SIZES = (2100, 2300)
BATCHES = {
    "two": ([700, 1400], [2300, 0]),
    "short": ([1, 0, 129, 128], [5, 7, 300, 127]),
    "one": ([2100], [2300]),
    "many": ([n % 37 for n in range(1500)], [n % 53 for n in range(1500)]),
}


def stored(batch: tuple[list[int], list[int]], device: str, slack: int = 0) -> StoredSequences:
    ends = [torch.tensor([0, *n]).cumsum(0).to(torch.int32).to(device) for n in batch]
    rows = [sum(n) + slack for n in batch]
    bounds = [min(max(n) + slack, r) for n, r in zip(batch, rows, strict=True)]
    return StoredSequences(LengthTables(*ends, None, None), StoredSizes(len(batch[0]), *rows, *bounds), device=torch.device(device))


def assert_same(ours: RaggedLists, theirs: RaggedLists, s: StoredSequences, tile: tuple[int, int], label: str) -> None:
    """Row of tiles by row of tiles: on the device there is room between them."""
    first_row, first_entry = ours.first_row.tolist(), ours.first_entry.tolist()
    on_host = {name: getattr(ours, name).cpu() for name in LISTS}
    at_row, at_entry = 0, 0
    for b, (sq, sk) in enumerate(zip(s.seqlens_q.tolist(), s.seqlens_k.tolist(), strict=True)):
        rows, columns = -(-sq // tile[0]), -(-sk // tile[1])
        for name in LISTS:
            begin, mine, size = (first_row[b], at_row, rows) if name.endswith("cnt") else (first_entry[b], at_entry, rows * columns)
            a, c = on_host[name][:, begin : begin + size], getattr(theirs, name)[:, mine : mine + size]
            assert torch.equal(a, c), (label, b, name)
        at_row, at_entry = at_row + rows, at_entry + rows * columns


@pytest.mark.parametrize("tile", [(128, 128), (64, 48)], ids=str)
@pytest.mark.parametrize("batch", BATCHES)
def test_library_masks(batch: str, tile: tuple[int, int]) -> None:
    here, there = stored(BATCHES[batch], "cpu"), stored(BATCHES[batch], "cuda", slack=100)
    for name, mod in library_masks(*SIZES, B=len(BATCHES[batch][0])).items():
        traced = trace(mod, "mask")
        on_device = on_gpu(traced)
        with no_waiting():
            ours = ragged_lists(on_device, there, tile, 2)
        assert_same(ours, ragged_lists(traced, here, tile, 2), here, tile, name)


@pytest.mark.parametrize("seed", range(20))
def test_random_masks(seed: int) -> None:
    traced = trace(random_mask(seed, max(SIZES)), "mask")
    here, there = stored(BATCHES["two"], "cpu"), stored(BATCHES["two"], "cuda", slack=seed)
    assert_same(ragged_lists(on_gpu(traced), there, (128, 128), 2), ragged_lists(traced, here, (128, 128), 2), here, (128, 128), str(seed))


def test_long_sequences() -> None:
    """More key tiles than are judged at once, and so what a table holds is looked at beforehand."""
    batch = ([20000, 3, 9000], [20000, 500, 9000])
    ids = (torch.rand(3, 20000, generator=torch.Generator().manual_seed(0)) < 0.001).long().cumsum(1)
    traced = trace(lambda b, h, q, k: (ids[b, q] == ids[b, k]) & (q >= k), "mask")
    here, there = stored(batch, "cpu"), stored(batch, "cuda")
    assert_same(ragged_lists(on_gpu(traced), there, (128, 128), 1), ragged_lists(traced, here, (128, 128), 1), here, (128, 128), "long")
