"""``BlockMask.from_topk`` and the conversions of lists by the Triton kernels, in Triton's interpreter, against torch operations.

Run by ``test_in_the_interpreter.py``: the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from anyattn import BlockMask, VarlenBlockSparseTensors
from anyattn.sparsity import chosen_blocks, compute, lists
from anyattn.sparsity.block_mask import LISTS
from anyattn.sparsity.kernels import class_grids
from tests.sparsity import test_varlen_topk as varlen
from tests.sparsity.test_topk import CASES, MASKS, Case, check
from tests.support.chosen_blocks import choice

KERNELS = [*CASES.values(), *(Case(mask=name, causal=True, seed=3) for name in MASKS), Case((1100, 1050), (16, 16), k=4, listed=(1, 1))]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU's lists are made by kernels."""
    for module in (chosen_blocks, lists, compute):
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    return None


@pytest.mark.parametrize("case", KERNELS, ids=str)
def test_lists_are_those_of_torch_operations(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, wanted, _ = case.made()
    for module in (chosen_blocks, lists, compute):
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    _, _, found, _ = case.made()
    for name in LISTS:
        ours, theirs = getattr(found, name), getattr(wanted, name)
        assert (ours is None) == (theirs is None) and (ours is None or torch.equal(ours, theirs)), name


@pytest.mark.usefixtures("by_kernels")
def test_numbers_beyond_the_keys_are_read_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chosen_blocks, "_has_readable", lambda t: False)  # as on a GPU
    indices = torch.tensor([[[[7, 1, -9, 2**40], [2, 3, 2**31, 0]]]])
    counts = torch.tensor([[[9, 2]]])
    mask = BlockMask.from_topk(indices, counts=counts, BLOCK_SIZE=16, seq_lengths=(32, 48))
    assert mask.to_dense().tolist() == [[[[0, 1, 0], [0, 0, 1]]]]


def test_classes_and_lists() -> None:
    g = torch.Generator().manual_seed(0)
    for shape in ((2, 3, 5, 9), (1, 2, 70, 3), (1, 1, 1, 1), (1, 1, 3, 80), (1, 2, 0, 4), (1, 1, 4, 0)):
        classes = torch.randint(0, 3, shape, dtype=torch.uint8, generator=g)
        for grid in (classes, classes.transpose(-1, -2), classes[..., 1:]):
            for separate in (True, False):
                pairs = zip(class_grids.lists_of_classes(grid, separate, True), lists.both_ways(grid, separate), strict=True)
                assert all((a is None) == (b is None) and (a is None or torch.equal(a, b)) for a, b in pairs)
            cnt, idx, full_cnt, full_idx = lists.lists_of_grid(grid, True)
            assert full_idx is not None
            assert torch.equal(class_grids.classes_of_lists([(cnt, idx, 1), (full_cnt, full_idx, 2)], grid.shape[-1]), grid)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(
    "name",
    ["of K/V heads, by query head", "blocks of other sizes", "rows without a block", "of each query", "of each query, by query head"],
)
def test_results(name: str) -> None:
    check(CASES[name], backend="triton")


@pytest.mark.parametrize("name", ["none", "causal"])
def test_packed_sequences(name: str) -> None:
    """Lists of each K/V head, flat and padded."""
    each, indices = varlen.chosen(2)
    for layout in ("flat", "padded"):
        lists = VarlenBlockSparseTensors.from_topk(indices, tile=varlen.TILE, **varlen.TABLES, mask_mod=varlen.MASKS[name], layout=layout)
        varlen.check(lists, varlen.MASKS[name], varlen.reading_tables(each, 2, varlen.MASKS[name]), backend="triton")


@pytest.mark.usefixtures("by_kernels")
def test_transposed_lists_of_the_mask_serve_the_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    mask = BlockMask.from_topk(choice((1, 2), (64, 80), (16, 16), 2), BLOCK_SIZE=16, seq_lengths=(64, 80), causal=True)
    from anyattn.sparsity.read_lists import read_lists

    blocks = read_lists(mask)
    kept = lists.kept_transposed(blocks)
    assert kept.mask_block_idx.data_ptr() == mask.q_indices.data_ptr()
    wanted = blocks.transposed()
    assert all(
        torch.equal(getattr(kept, n), getattr(wanted, n)) for n in ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    )
