"""``BlockMask.from_topk`` and the conversions of lists by the Triton kernels, in Triton's interpreter, against torch operations.

Run by ``test_in_the_interpreter.py``: the interpreter is chosen before Triton is imported.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

import anyattn
from anyattn import BlockMask, VarlenBlockSparseTensors
from anyattn.backends.triton import autotune
from anyattn.backends.triton.single_queries import queries_of_keys
from anyattn.backends.triton.tile_config import Tiles, candidates
from anyattn.documents.rewrite import DocumentTables
from anyattn.sparsity import block_sparse, chosen_blocks, compute, lists
from anyattn.sparsity import read_lists as read_lists_module
from anyattn.sparsity.block_mask import LISTS
from anyattn.sparsity.block_sparse import BlockSparseTensors, tensors_of
from anyattn.sparsity.kernels import class_grids
from anyattn.sparsity.ranked_lists import ranked
from anyattn.sparsity.read_lists import read_lists
from tests.sparsity import test_varlen_topk as varlen
from tests.sparsity.test_topk import CASES, MASKS, Case, check
from tests.support.chosen_blocks import choice
from tests.support.flex_calls import judge

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


def test_ranked_lists() -> None:
    """Shorter and longer than the 128 tiles that a program lists at a time."""
    g = torch.Generator().manual_seed(0)
    for shape in ((2, 3, 5, 9), (1, 1, 1, 1), (1, 1, 3, 140), (1, 2, 130, 2), (1, 2, 0, 4), (1, 1, 4, 0)):
        classes = torch.randint(0, 3, shape, dtype=torch.uint8, generator=g)
        for grid in (classes, classes.transpose(-1, -2)):
            both: Any = lists.both_ways(grid, True)
            counts, tiles, ranks = class_grids.ranked_lists(both[:4], both[4:])
            wanted_counts, wanted_tiles, wanted_ranks = ranked(both[:4], both[4:])
            is_listed, is_tile = grid.transpose(-1, -2) != 0, torch.arange(grid.shape[-2], device="cpu") < counts[..., None]
            assert torch.equal(counts, wanted_counts) and torch.equal(tiles[is_tile], wanted_tiles[is_tile])
            assert torch.equal(ranks[is_listed], wanted_ranks[is_listed])


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize(
    "name",
    [
        "of K/V heads, by query head",
        "blocks of other sizes",
        "rows without a block",
        "small blocks",
        *(n for n in CASES if "each query" in n),
    ],
)
def test_results(name: str) -> None:
    check(CASES[name], backend="triton")


@pytest.mark.usefixtures("by_kernels")
def test_single_queries_need_no_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of classes, for lists and gradients: a byte for each pair of a query and a key block."""
    monkeypatch.setattr(class_grids, "classes_of_lists", lambda *about: pytest.fail("a grid of classes"))
    monkeypatch.setattr(lists, "grid_of_lists", lambda *about: pytest.fail("a grid of classes"))
    monkeypatch.setattr(block_sparse, "grid_of_lists", lambda *about: pytest.fail("a grid of classes"))
    case = Case((40, 250), (1, 16), k=3, causal=True, group=2)
    block_mask = case.made()[2]
    assert block_mask.kv_indices.shape == block_mask.full_kv_indices.shape == (2, 2, 40, 3) and block_mask.q_indices is None
    q, k, v = (t.requires_grad_() for t in case.rows())
    anyattn.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, backend="triton").sum().backward()


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("wants_grad", [False, True])
def test_scores_of_single_queries(wants_grad: bool) -> None:
    """With gradients of what a score mod captures heads have tiles of their own; a mask beside the lists decides in every tile."""
    case = Case((20, 100), (1, 16), k=4, group=2, causal=True)
    _, _, block_mask, mask = case.made()
    bias = torch.linspace(-1, 1, 4 * 20, dtype=torch.float64).reshape(4, 20)
    score = lambda s, b, h, i, j: s * 1.5 + bias[h, i] * (j % 3)
    beside = lambda b, h, i, j: (i + 2 * j + h) % 4 != 0
    both = lambda b, h, i, j: mask(b, h, i, j) & beside(b, h, i, j)
    options = {"captured": [bias]} if wants_grad else {}
    judge(*case.rows(), score=score, mask=both, block_mask=block_mask, mask_mod=beside, backend="triton", **options)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("wants_grad", [False, True])
def test_asked_tiles_have_whole_queries(wants_grad: bool) -> None:
    """Of 17 heads, 32 rows of a tile; asked are 16."""
    case = Case((5, 60), (1, 16), k=3, group=17, causal=True)
    _, _, block_mask, mask = case.made()
    bias = torch.linspace(-1, 1, 34, dtype=torch.float64)
    options: dict[str, Any] = {"score": lambda s, b, h, i, j: s + bias[h], "captured": [bias]} if wants_grad else {}
    asked = {"kernel_options": {"tile_m": 16, "tile_n": 32}}
    judge(*case.rows(), mask=mask, block_mask=block_mask, backend="triton", **asked, **options)


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("dims", [(512, 512), (576, 512)], ids=str)
def test_wide_heads_of_single_queries(dims: tuple[int, int]) -> None:
    """Columns of q and k beyond 512 are a block of their own."""
    case, g = Case((6, 60), (1, 16), k=3, group=2, causal=True), torch.Generator().manual_seed(0)
    _, _, block_mask, mask = case.made()
    shapes = [(*t.shape[:-1], n) for t, n in zip(case.rows(), (dims[0], *dims), strict=True)]
    q, k, v = (torch.randn(shape, generator=g, dtype=torch.bfloat16, device="cpu") for shape in shapes)
    judge(q, k, v, mask=mask, block_mask=block_mask, backend="triton")


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("tile", [(1, 16), (16, 16)], ids=str)
def test_values_in_keys(tile: tuple[int, int]) -> None:
    case, g = Case((6, 60), tile, k=3, group=2, causal=True), torch.Generator().manual_seed(0)
    _, _, block_mask, mask = case.made()
    q, k = (torch.randn((*t.shape[:-1], 576), generator=g, dtype=torch.bfloat16, device="cpu") for t in case.rows()[:2])
    judge(q, k, k[..., :512], mask=mask, block_mask=block_mask, backend="triton")


@pytest.mark.usefixtures("by_kernels")
@pytest.mark.parametrize("tile", [(1, 64), (16, 64), (64, 64)], ids=str)
def test_in_every_batch(tile: tuple[int, int]) -> None:
    """Lists with room for k blocks, joined to one line in the order of keys."""
    case = Case((40, 300), tile, k=3, group=2, causal=True)
    _, _, block_mask, mask = case.made()
    judge(*case.rows(), mask=mask, block_mask=block_mask, deterministic="batch", backend="triton")


@pytest.mark.parametrize("group", [1, 3])
def test_tiles_that_follow_from_the_heads_are_not_timed(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def best(question: autotune.Question, device: torch.device, measure: Any) -> Tiles:
        asked.append(question.pass_name)
        return candidates(question.pass_name, question.shape, None, *question.rows)[0]

    monkeypatch.setattr(autotune, "best", best)
    case = Case((5, 60), (1, 16), k=3, group=group, causal=True)
    q, k, v = (t.requires_grad_() for t in case.rows())
    options: dict[str, Any] = {"backend": "triton", "kernel_options": {"autotune": True}, "enable_gqa": True}
    anyattn.flex_attention(q, k, v, block_mask=case.made()[2], **options).sum().backward()
    assert asked == (["forward", "dq"] if group == 1 else ["forward"])


@pytest.mark.parametrize("is_documents", [True, False])
def test_documents_under_lists_of_single_queries(is_documents: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that does not know yet whether ids are documents launches both forms: the one by lists is off where they are."""
    monkeypatch.setattr(read_lists_module, "row_ranges", lambda mask: None)
    monkeypatch.setattr(DocumentTables, "answer", lambda tables: None)
    ids = torch.arange(40) // 13 if is_documents else torch.arange(40) // 5 % 3
    mask = lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j)
    block_mask = anyattn.create_block_mask(mask, None, None, 40, 40, device="cpu", BLOCK_SIZE=(1, 32))
    judge(*Case((40, 40), group=2).rows(), mask=mask, block_mask=block_mask, backend="triton")


def test_the_queries_of_each_key_block() -> None:
    for case in (Case((30, 70), (1, 16), causal=True), Case((30, 70), (1, 16), k=0), Case((9, 40), (1, 8), mask="by head", listed=(1, 2))):
        blocks = read_lists(case.made()[2])
        begins, queries = queries_of_keys(blocks)
        wanted = blocks.transposed()
        lines = [
            sorted(2 * row + is_full for is_full, (cnt, idx) in enumerate(of_class) for row in idx[place][: cnt[place]].tolist())
            for place in np.ndindex(*wanted.mask_block_cnt.shape)
            for of_class in [[(c, i) for c, i in _pairs(wanted)]]
        ]
        found = [queries[a:b].tolist() for a, b in pairwise(begins.tolist())]
        assert found == lines


def _pairs(blocks: BlockSparseTensors) -> list[tuple[Any, Any]]:
    cnt, idx, full_cnt, full_idx = tensors_of(blocks)
    return [(cnt, idx)] if full_cnt is None else [(cnt, idx), (full_cnt, full_idx)]


@pytest.mark.parametrize("name", ["none", "causal"])
def test_packed_sequences(name: str) -> None:
    """Lists of each K/V head, flat and padded."""
    each, indices = varlen.chosen(2)
    for layout in ("flat", "padded"):
        lists = VarlenBlockSparseTensors.from_topk(indices, tile=varlen.TILE, **varlen.TABLES, mask_mod=varlen.MASKS[name], layout=layout)
        varlen.check(lists, varlen.MASKS[name], varlen.reading_tables(each, 2, varlen.MASKS[name]), backend="triton")


@pytest.mark.parametrize("tile", [(1, 16), (1, 64)], ids=str)
def test_single_queries_of_packed_sequences(tile: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of a K/V head share tiles there too, and small tiles of keys are gathered."""
    monkeypatch.setattr(varlen, "TILE", tile)
    each, indices = varlen.chosen(2)
    mask = varlen.MASKS["causal"]
    lists = VarlenBlockSparseTensors.from_topk(indices, tile=tile, **varlen.TABLES, mask_mod=mask, layout="padded")
    varlen.check(lists, mask, varlen.reading_tables(each, 2, mask), backend="triton")


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
