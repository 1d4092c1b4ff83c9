"""Operators that ``torch.compile`` and ``torch.export`` record where a program makes block masks or block lists."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.custom_ops.flex import mods_of_operands, operands_of
from anyattn.custom_ops.graph_nodes import captures_in_graph
from anyattn.custom_ops.operators import called, operator
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity import varlen_checks
from anyattn.sparsity.arguments import check_tables, device_of, length, pair, positions
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.chosen_blocks import Chosen, check_chosen, check_contents, deciding, form_of_chosen, grid_of_chosen, lists_of_chosen
from anyattn.sparsity.compute import lists_of_mask
from anyattn.sparsity.grid import BLOCK_MASK, BLOCK_SPARSE, ListForm, TileGrid, lists_of_stacks
from anyattn.sparsity.made_of import note_lists
from anyattn.sparsity.varlen_block_sparse import varlen_lists_of_mask

__all__ = [
    "block_lists",
    "lists_with_mods",
    "tile_lists",
    "tile_lists_with_mods",
    "topk_lists",
    "topk_lists_with_mods",
    "varlen_lists_with_mods",
    "varlen_tile_lists",
]


class BlockLists(NamedTuple):
    """The arguments of ``anyattn::block_lists`` and ``anyattn::tile_lists``: those of ``create_block_mask``, or of
    ``compute_block_sparsity``. like: any tensor on the lists' device."""

    like: Tensor
    program: str
    numbers: list[int]
    tensors: list[Tensor]
    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    separate_full: bool


def _fake(operands: BlockLists, form: ListForm) -> list[Tensor]:
    shape = (ceil_div(operands.q_len, operands.block_m), ceil_div(operands.kv_len, operands.block_n))
    shapes = form._replace(separate_full=operands.separate_full).stack_shapes((operands.batch, operands.heads), shape)
    return [operands.like.new_empty(one, dtype=torch.int32) for one in shapes]


def _stacks(operands: BlockLists, form: ListForm) -> list[Tensor]:
    like, program, numbers, tensors, batch, heads, q_len, kv_len, block_m, block_n, separate_full = operands
    (mask,) = mods_of_operands("mask", program, numbers, tensors)
    grid = TileGrid((q_len, kv_len), (block_m, block_n), (batch, heads))
    return lists_of_mask(mask, grid, like.device, form._replace(separate_full=separate_full), stacks=True)


@operator(BlockLists, fake=partial(_fake, form=BLOCK_MASK))
def block_lists(operands: BlockLists) -> list[Tensor]:
    """The lists of ``create_block_mask``, int32, as stacks (``sparsity.grid``)."""
    # .data resets the version counter: a list is exact only while it counts no write
    return [t.data for t in _stacks(operands, BLOCK_MASK)]


def lists_with_mods(
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int,
    device: Any,
    block_size: Any,
    separate_full: bool,
    mask: TracedMod,
) -> list[Tensor]:
    """A block mask's lists, made by the operator: eight, or four without separate full blocks. Raises as the eager call does."""
    lengths, counts = _lengths(Q_LEN=q_len, KV_LEN=kv_len), _counts(B=batch, H=heads)
    lists = _called(block_lists, mask, device, (*counts, *lengths, *pair("BLOCK_SIZE", block_size)), separate_full)
    note_lists(lists[0], captures_in_graph(mask))
    return lists


def _called(lists_operator: Any, mask: TracedMod, device: Any, sizes: tuple, separate_full: bool) -> list[Tensor]:
    """The lists that one of the operators makes; those of full tiles if they are separate. sizes: ``BlockLists.batch`` to ``block_n``."""
    like = torch.empty(0, device=device_of(device, mask))
    stacks = called(lists_operator, BlockLists._make((like, *operands_of(like, mask), *sizes, separate_full)))
    return [t for t in lists_of_stacks(stacks, 1 + separate_full) if t is not None]


def _lengths(**lengths: Any) -> list[Any]:
    return [n if isinstance(n, torch.SymInt) else positions(name, n) for name, n in lengths.items()]


def _counts(**counts: Any) -> list[Any]:
    return [1 if n is None else n if isinstance(n, torch.SymInt) else length(name, n) for name, n in counts.items()]


# ---- compute_block_sparsity


@operator(BlockLists, fake=partial(_fake, form=BLOCK_SPARSE))
def tile_lists(operands: BlockLists) -> list[Tensor]:
    """The lists of ``compute_block_sparsity``, int32, as two stacks (``sparsity.grid``)."""
    return _stacks(operands, BLOCK_SPARSE)


def tile_lists_with_mods(sizes: tuple, tile: tuple, device: Any, separate_full: bool, mask: TracedMod) -> list[Tensor]:
    """The lists of ``compute_block_sparsity``, made by the operator: four, or two without full tiles. sizes: batch_size, num_heads,
    seqlen_q, seqlen_k. Raises as the eager call does."""
    batch, heads, seqlen_q, seqlen_k = sizes
    tile_m, tile_n = _tile(tile)
    lengths, counts = _lengths(seqlen_q=seqlen_q, seqlen_k=seqlen_k), _counts(batch_size=batch, num_heads=heads)
    return _called(tile_lists, mask, device, (*counts, *lengths, tile_m, tile_n), separate_full)


def _tile(tile: tuple) -> tuple[int, int]:
    return length("tile_m", tile[0], 1), length("tile_n", tile[1], 1)


# ---- BlockMask.from_topk


class TopkLists(NamedTuple):
    """The arguments of ``anyattn::topk_lists``: those of ``BlockMask.from_topk``. The program is empty without a mask."""

    indices: Tensor
    counts: Tensor | None
    program: str
    numbers: list[int]
    tensors: list[Tensor]
    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    wants_columns: bool


def _parts_of_topk(operands: TopkLists) -> tuple[Chosen, TracedMod | None, TileGrid]:
    indices, counts, program, numbers, tensors, q_len, kv_len, block_m, block_n, _ = operands
    mask = next(iter(mods_of_operands("mask", program, numbers, tensors)), None)
    chosen = Chosen(indices, counts)
    return chosen, mask, grid_of_chosen(chosen, (q_len, kv_len), (block_m, block_n))


def _fake_topk_lists(operands: TopkLists) -> list[Tensor]:
    # shapes depend on the mask's program alone: its numbers may be symbols of a graph of dynamic shapes
    (indices, _), mask, grid = _parts_of_topk(operands._replace(numbers=[0] * len(operands.numbers)))
    shapes = form_of_chosen(mask, grid, indices.shape[3], operands.wants_columns).stack_shapes(grid.batch, grid.shape)
    return [indices.new_empty(one, dtype=torch.int32) for one in shapes]


@operator(TopkLists, fake=_fake_topk_lists)
def topk_lists(operands: TopkLists) -> list[Tensor]:
    """The lists of ``BlockMask.from_topk``, int32, as stacks (``sparsity.grid``)."""
    chosen, mask, grid = _parts_of_topk(operands)
    check_chosen(*chosen, grid.lengths, grid.tile)  # reads the counts
    check_contents(chosen, grid.shape[1])
    return lists_of_chosen(chosen, mask, grid, operands.wants_columns, stacks=True)


def topk_lists_with_mods(chosen: tuple, block_size: Any, lengths: Any, wants_columns: bool, mask: TracedMod | None) -> list[Tensor]:
    """The lists of ``BlockMask.from_topk``, made by the operator: of full blocks too if they are separate. Raises as the eager call."""
    (q_len, kv_len), tile = _lengths(**{f"seq_lengths[{i}]": n for i, n in enumerate(lengths)}), pair("BLOCK_SIZE", block_size)
    indices, counts = check_chosen(chosen[0], chosen[1], (q_len, kv_len), tile)
    if mask is not None:
        device_of(indices.device, mask)
    # one empty tensor, as for the operators of attention, if a graph is exported
    mods = operands_of(indices.new_empty(0), mask)
    stacks = called(topk_lists, TopkLists(indices, counts, *mods, q_len, kv_len, *tile, wants_columns))
    separate = deciding(mask, indices.shape[0] == 1)[1]
    return [t for t in lists_of_stacks(stacks, 1 + separate) if t is not None]


# ---- compute_varlen_block_sparsity


class VarlenTileLists(NamedTuple):
    """The arguments of ``anyattn::varlen_tile_lists``: those of ``compute_varlen_block_sparsity``. like: a tensor on the lists' device."""

    like: Tensor
    program: str
    numbers: list[int]
    tensors: list[Tensor]
    cu_seqlens_q: Tensor | None
    cu_seqlens_k: Tensor | None
    seqused_q: Tensor | None
    seqused_k: Tensor | None
    heads: int | None
    tile_m: int
    tile_n: int
    separate_full: bool
    layout: str


def _fake_varlen_tile_lists(operands: VarlenTileLists) -> list[Tensor]:
    like, heads = operands.like, 1 if operands.heads is None else operands.heads
    used, ends = operands.seqused_q, operands.cu_seqlens_q
    batch = len(used) if used is not None else len(ends) - 1  # type: ignore[arg-type]
    # not ctx.new_dynamic_size, see document_ids
    shapes = torch.library.get_ctx()._shape_env
    sizes = [shapes.create_unbacked_symint() for _ in range(2)]
    for n in sizes:
        torch._check(n >= 0)
    rows, width = (heads, sizes[0]), (heads, sizes[1]) if operands.layout == "flat" else (heads, sizes[0], sizes[1])
    lists = [like.new_empty(shape, dtype=torch.int32) for shape in (rows, width) * (1 + operands.separate_full)]
    dtypes = (torch.int32, torch.int64)
    return [*lists, *(like.new_empty(batch + 1, dtype=d) for d in dtypes), *(like.new_empty(batch, dtype=torch.int64) for _ in dtypes)]


@operator(VarlenTileLists, fake=_fake_varlen_tile_lists)
def varlen_tile_lists(operands: VarlenTileLists) -> list[Tensor]:
    """The lists of ``compute_varlen_block_sparsity``, then its tables cu_block_cnt, cu_block_idx, seqlens_q and seqlens_k."""
    (mask,) = mods_of_operands("mask", operands.program, operands.numbers, operands.tensors)
    tables, options = operands[4:8], (operands.like.device, operands.separate_full, operands.layout)
    block_sparse = varlen_lists_of_mask(mask, (operands.tile_m, operands.tile_n), operands.heads, tables, *options)
    lists = [t for t in tensors_of(block_sparse) if t is not None]
    # the lengths may be arguments
    return [*lists, block_sparse.cu_block_cnt, block_sparse.cu_block_idx, block_sparse.seqlens_q.clone(), block_sparse.seqlens_k.clone()]


def varlen_lists_with_mods(
    tables: tuple, heads: int | None, tile: tuple, device: Any, separate_full: bool, layout: str, mask: TracedMod
) -> list[Tensor]:
    """The lists and the tables of ``compute_varlen_block_sparsity``, made by the operator. Raises as the eager call does."""
    tile_m, tile_n = _tile(tile)
    varlen_checks.check_layout(layout)
    named = dict(zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), tables, strict=True))
    for side in ("q", "k"):
        check_tables(side, named[f"cu_seqlens_{side}"], named[f"seqused_{side}"])
    first = next(t for t in tables if t is not None)
    like = torch.empty(0, device=device_of(first.device if device is None and not mask.tensors else device, mask))
    counts = None if heads is None else _counts(num_heads=heads)[0]
    of_sequences = named["cu_seqlens_q"], named["cu_seqlens_k"], named["seqused_q"], named["seqused_k"]
    operands = VarlenTileLists(like, *operands_of(like, mask), *of_sequences, counts, tile_m, tile_n, separate_full, layout)
    return called(varlen_tile_lists, operands)  # type: ignore[no-any-return]
