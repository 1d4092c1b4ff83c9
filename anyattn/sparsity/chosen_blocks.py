"""Block lists of chosen blocks: per row of query blocks the numbers of k key blocks, as a top-k selection gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from anyattn.arithmetic import ceil_div
from anyattn.mods.algebra import Mask
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, classify
from anyattn.mods.analysis.visible_loads import Dense, check_call
from anyattn.mods.compose import anded, conjuncts
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.masks import causal_bottom_right
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.sparsity.arguments import check_many, device_of, pair, positions, runs_kernels, without_transforms
from anyattn.sparsity.compute import held_for_kernels
from anyattn.sparsity.grid import BLOCK_MASK, ListForm, TileGrid, lists_of_memory, stacked
from anyattn.sparsity.lists import both_ways, with_partial_tails
from anyattn.tensors import kinds
from anyattn.tensors.dynamo import opaque

__all__ = [
    "Chosen",
    "check_chosen",
    "check_contents",
    "check_numbers",
    "deciding",
    "form_of_chosen",
    "grid_of_chosen",
    "has_columns",
    "is_within_counts",
    "lists_from_topk",
    "lists_of_chosen",
    "mask_inside",
]

_DTYPES = (torch.int32, torch.int64)
MOST_SORTED = 4096  # numbers of a single query's row that a kernel sorts


class Chosen(NamedTuple):
    """indices: integers (B, H, M, k), block numbers in any order; what is below 0 or not below the number of blocks is read as nothing.
    counts: integers (B, H, M), how many of a row's entries are read; None reads all."""

    indices: Tensor
    counts: Tensor | None


@opaque
@without_default_device
def lists_from_topk(
    chosen: tuple[Any, Any], block_size: Any, seq_lengths: Any, causal: Any, mask_mod: Callable | None, wants_columns: bool
) -> tuple[list[Any], Callable, tuple[int, int], tuple[int, int]]:
    """``BlockMask.from_topk`` outside compiled code: the checks, then the lists, the mask inside the blocks, lengths, tile."""
    kinds.refuse_torchscript()
    tile, lengths = pair("BLOCK_SIZE", block_size), lengths_of_chosen(seq_lengths)
    blocks = check_chosen(*chosen, lengths, tile)
    if not kinds.are_fake((blocks.indices,)):  # of those the lists are fake too
        blocks = Chosen(*(None if t is None else _plain(name, t) for name, t in zip(blocks._fields, blocks, strict=True)))  # type: ignore
    check_contents(blocks, ceil_div(lengths[1], tile[1]))
    inner = mask_inside(causal, mask_mod, lengths)
    traced, wants_columns = None if inner is None else trace(inner, "mask"), wants_columns and has_columns(tile)
    device = blocks.indices.device
    context = kinds.outside_transforms() if traced is None else without_transforms(traced, device_of(device, traced))
    # torch counts no writes to inference tensors, so calls would copy such lists
    with torch.inference_mode(False), context:
        lists = lists_of_chosen(blocks, traced, grid_of_chosen(blocks, lengths, tile), wants_columns)
    # .data resets the write counters: kernels may read lists directly only while no write is counted
    return [None if t is None else t.data for t in lists], noop_mask if inner is None else inner, lengths, tile


def _plain(name: str, t: Tensor) -> Tensor:
    """Integers without the wrapper of ``torch.func.grad``, which they have no gradient through; raises ``TypeError`` for other wrappers."""
    kinds.refuse(name, t)
    t = kinds.unwrapped(t)
    kinds.refuse_hidden(name, t)
    return t


def check_chosen(indices: Any, counts: Any, lengths: tuple[int, int], tile: tuple[int, int]) -> Chosen:
    """Raises ``TypeError`` or ``ValueError`` for arguments that no contents make right; reads no contents but counts on a CPU."""
    check_numbers(indices, counts, ("B", "H", "query blocks"))
    rows = ceil_div(lengths[0], tile[0])
    if indices.shape[2] != rows:
        raise ValueError(
            f"indices has {indices.shape[2]} query blocks, but {lengths[0]} queries in blocks of {tile[0]} make {rows}; wanted one row of "
            "indices for each query block: pass the BLOCK_SIZE and the seq_lengths that the blocks were chosen for"
        )
    return Chosen(indices, counts)


def check_numbers(indices: Any, counts: Any, axes: tuple[str, ...]) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless indices are integers of shape (*axes, k), and counts, if there are some, of (*axes).

    Counts above k raise on a CPU; elsewhere reading them waits."""
    shape = ", ".join(axes)
    form = f"block numbers ({shape}, k)"
    if not isinstance(indices, Tensor):
        raise TypeError(f"indices is a {type(indices).__name__}; wanted an int32 or int64 tensor of {form}")
    if indices.dtype not in _DTYPES:
        cure = "such as scores.topk(k).indices" if indices.is_floating_point() else "as indices.to(torch.int32)"
        raise TypeError(f"indices is {indices.dtype}; wanted int32 or int64 {form}, {cure}")
    if indices.ndim != len(axes) + 1:
        raise ValueError(
            f"indices has shape {tuple(indices.shape)}; wanted {len(axes) + 1} dimensions, {form}, with sizes of 1 to share them"
        )
    if counts is None:
        return
    if not isinstance(counts, Tensor):
        raise TypeError(f"counts is a {type(counts).__name__}; wanted an int32 or int64 tensor ({shape}), or None")
    if counts.dtype not in _DTYPES:
        raise TypeError(f"counts is {counts.dtype}; wanted int32 or int64, as counts.to(torch.int32)")
    if counts.shape != indices.shape[:-1]:
        wanted = tuple(indices.shape[:-1])
        raise ValueError(f"counts has shape {tuple(counts.shape)}; wanted {wanted}, one number for each row of indices")
    if counts.device != indices.device:
        raise ValueError(f"counts is on {counts.device} and indices on {indices.device}; move one of them with .to()")
    k = indices.shape[-1]
    if _has_readable(counts) and bool((above := counts > k).any()):
        at = above.nonzero()[0].tolist()
        raise ValueError(f"counts{at} is {int(counts[tuple(at)])}, but indices has {k} entries for each row; wanted at most {k}")


def _has_readable(t: Tensor) -> bool:
    """Whether a tensor's contents can be read without waiting."""
    return t.device.type == "cpu" and not torch.compiler.is_compiling() and kinds.has_memory(t) and not kinds.are_fake((t,))


def lengths_of_chosen(seq_lengths: Any) -> tuple[int, int]:
    """seq_lengths as two ints; raises ``TypeError`` or ``ValueError``."""
    if not isinstance(seq_lengths, (tuple, list, torch.Size)) or len(seq_lengths) != 2:
        raise TypeError(f"seq_lengths is {seq_lengths!r}; wanted (queries, keys), such as (query.shape[-2], key.shape[-2])")
    return positions("seq_lengths[0]", seq_lengths[0]), positions("seq_lengths[1]", seq_lengths[1])


def check_contents(chosen: Chosen, columns: int) -> None:
    """Raises ``ValueError`` for an index beyond the keys, naming the first, on a CPU; elsewhere a check waits."""
    indices, counts = chosen
    if not _has_readable(indices):
        return
    beyond = indices >= columns
    if counts is not None:
        beyond &= is_within_counts(counts, indices.shape[3])
    if bool(beyond.any()):
        at = beyond.nonzero()[0].tolist()
        raise ValueError(
            f"indices{at} is {int(indices[tuple(at)])}, but there are {columns} key blocks; wanted 0 to {columns - 1}, or -1 for no block"
        )


def mask_inside(is_causal: Any, mask_mod: Callable | None, lengths: tuple[int, int]) -> Callable | None:
    """The mask inside chosen blocks: causal, the last query sees the last key, and ``mask_mod``; None if both are left out."""
    if not isinstance(is_causal, bool):
        raise TypeError(
            f"causal is {is_causal!r}; wanted True or False; another alignment goes to mask_mod, as anyattn.masks.causal(offset)"
        )
    if not is_causal:
        return mask_mod
    causal = _causal_of_graph(lengths[1] - lengths[0]) if torch.compiler.is_compiling() else causal_bottom_right(*lengths)
    return causal if mask_mod is None else causal & mask_mod


def _causal_of_graph(offset: int) -> Mask:
    """``masks.causal`` without its name and checks, which a graph of dynamic shapes would be compiled anew for."""
    return Mask(lambda b, h, q_idx, kv_idx: kv_idx - q_idx <= offset, "causal")


def lists_of_chosen(chosen: Chosen, mask: TracedMod | None, grid: TileGrid, wants_columns: bool, stacks: bool = False) -> list[Any]:
    """The lists of a block mask: of each row of blocks, then of each column if wanted. Does not wait for a GPU with Triton.

    mask: inside the blocks. A chosen block is left out if the mask is known to hide it, and full if the mask shows all of it; the last
    blocks of sequences that they do not fill are partial, as in ``create_block_mask``. Parts of the mask that depend on the head, or on a
    batch entry that all share, decide inside blocks only: the heads of a call are not those of the lists. Then no block is full.
    stacks: return the lists as stacks (``sparsity.grid``), which share no memory.
    """
    device, k = chosen.indices.device, chosen.indices.shape[3]
    named = grid.shape if _needs_grid(chosen, grid) else (grid.shape[0], torch.sym_min(k, grid.shape[1]))
    check_many(TileGrid(named, (1, 1), grid.batch))
    decides, form = deciding(mask, grid.batch[0] == 1)[0], form_of_chosen(mask, grid, k, wants_columns)
    if device.type == "meta" or kinds.are_fake((chosen.indices,)):
        memory: Any = [torch.empty(s, dtype=torch.int32, device=device) for s in form.stack_shapes(grid.batch, grid.shape)]
        return memory if stacks else lists_of_memory(memory, 1 + form.separate_full)
    lists = _lists_by_kernels(chosen, decides, grid, form, stacks)
    if lists is not None:
        return lists
    check_many(grid)
    classes = with_partial_tails(classes_of_chosen(chosen, decides, grid), grid.lengths, grid.tile)
    listed = both_ways(classes, form.separate_full, wants_columns)
    listed[1:4:2] = [None if t is None else t[..., : form.room].contiguous() for t in listed[1:4:2]]
    return stacked(listed, form, grid) if stacks else listed


def _needs_grid(chosen: Chosen, grid: TileGrid) -> bool:
    """Whether lists are made of a grid with a class for each tile, as all are but those of single queries by kernels."""
    return grid.tile[0] != 1 or chosen.indices.shape[3] > MOST_SORTED or not runs_kernels(chosen.indices.device)


def grid_of_chosen(chosen: Chosen, lengths: tuple[int, int], tile: tuple[int, int]) -> TileGrid:
    return TileGrid(lengths, tile, (chosen.indices.shape[0], chosen.indices.shape[1]))


def form_of_chosen(mask: TracedMod | None, grid: TileGrid, k: int, wants_columns: bool) -> ListForm:
    """The lists that ``lists_of_chosen`` makes of k numbers in each row; they have room for these, but at most for all key blocks."""
    room = torch.sym_min(max(k, 1), grid.shape[1])  # an open length gets no guard
    return BLOCK_MASK._replace(separate_full=deciding(mask, grid.batch[0] == 1)[1], wants_columns=wants_columns, room=room)


def has_columns(block_size: Any) -> bool:
    """Whether chosen blocks of this size have lists of key blocks. Those of single queries would have an entry for each pair of a query and
    a key block; the backward pass makes compact ones."""
    return (block_size[0] if isinstance(block_size, (tuple, list)) else block_size) != 1


def deciding(mask: TracedMod | None, shares_entries: bool) -> tuple[TracedMod | None, bool]:
    """The part of a mask that decides the classes of blocks, None if there is none; and whether that is the whole mask.

    It is the conjuncts that are the same for all heads, and for all batch entries if they share lists."""
    if mask is None:
        return None, True
    parts = conjuncts(mask)
    shared = [part for part in parts if not any(d.h or (d.b and shares_entries) for d in dependence(part.expr))]
    return (mask, True) if len(shared) == len(parts) else (anded(shared), False)


def _lists_by_kernels(chosen: Chosen, mask: TracedMod | None, grid: TileGrid, form: ListForm, stacks: bool) -> list[Any] | None:
    device = chosen.indices.device
    if not runs_kernels(device):
        return None
    from anyattn.sparsity.kernels.block_lists import list_tiles
    from anyattn.sparsity.kernels.class_grids import EVERYTHING, classes_of_lists, sorted_choice

    held = EVERYTHING if mask is None else held_for_kernels(mask, grid, device)
    if held is None:
        return None
    if not _needs_grid(chosen, grid):
        assert form.room is not None
        choice = sorted_choice(chosen.indices, chosen.counts, grid.shape[1], form.room)
        return list_tiles(held, grid, device, form, stacks, choice=choice)
    return list_tiles(held, grid, device, form, stacks, classes_of_lists([(chosen.counts, chosen.indices, FULL)], grid.shape[1]))


def classes_of_chosen(chosen: Chosen, mask: TracedMod | None, grid: TileGrid) -> Tensor:
    """uint8 (B, H, M, N): the class of each tile under the mask, EMPTY where it is not chosen."""
    indices, counts = chosen
    is_chosen = _map_of(indices, counts, grid.shape[1])
    if mask is None:
        return torch.where(is_chosen, FULL, EMPTY).to(torch.uint8)
    with torch.no_grad():  # a mask may compare learned parameters; tile classes have no gradient
        ((mask,), _) = check_call(Dense(*grid.batch, *grid.lengths), [mask])
        classes = classify(mask, *grid.lengths, *grid.tile, *grid.batch, indices.device, among=is_chosen)
    return torch.where(is_chosen, classes, EMPTY).to(torch.uint8)


def _map_of(indices: Tensor, counts: Tensor | None, columns: int) -> Tensor:
    """bool (B, H, M, columns): the blocks that are listed."""
    is_listed = (indices >= 0) & (indices < columns)
    if counts is not None:
        is_listed &= is_within_counts(counts, indices.shape[3])
    goal = torch.where(is_listed, indices, columns).to(torch.int64)
    marked = torch.zeros((*indices.shape[:3], columns + 1), dtype=torch.bool, device=indices.device)
    return marked.scatter_(-1, goal, True)[..., :columns]


def is_within_counts(counts: Tensor, k: int) -> Tensor:
    """bool (..., k): the entries of each row that its count says to read."""
    return torch.arange(k, device=counts.device) < counts[..., None]
