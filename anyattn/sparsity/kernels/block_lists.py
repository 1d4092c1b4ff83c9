"""Block lists of a mask on a CUDA device: launches the kernels of ``classify`` without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr, category
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.sparsity.grid import BLOCK_SPARSE, ListForm, TileGrid, lists_of_memory
from anyattn.sparsity.kernels.arguments import Lists, SequenceTables, TileSizes
from anyattn.sparsity.kernels.interval_codegen import MOST_INDEX_BITS, MOST_SCALAR_BITS, mask_source
from anyattn.triton_tools import jit_source
from anyattn.triton_tools.jit_source import group
from anyattn.triton_tools.launch import current_device, launch

__all__ = [
    "Launches",
    "Mask",
    "can_list",
    "compiled_for",
    "in_front",
    "launches_of",
    "list_ragged",
    "list_tiles",
    "mask_of",
    "strides_of_captured",
]

_FEW, _MOST_CHUNK = 64, 1024
# Limits of the single kernel: the positions of all tiles that it classifies at once, and the number of leaves evaluated at them.
_MOST_POSITIONS, _MOST_LEAVES = 2**14, 4


class Mask(NamedTuple):
    """A mask's kernels, the captured values that they read, and whether its lists depend on b and h."""

    kernels: Any
    scalar_slots: tuple[int, ...]
    tensor_slots: tuple[int, ...]
    row_leaves: int
    column_leaves: int
    sees_b: bool
    sees_h: bool
    options: dict[str, Any]  # compile options of the kernels


@lru_cache(maxsize=1024)
def mask_of(expr: Expr, is_ragged: bool = False, has_given: bool = False, has_choice: bool = False) -> Mask:
    """The kernels of a mask for sequences of equal lengths, or for varlen batches. has_given: they read a class for each tile. has_choice:
    they classify listed tiles alone."""
    source, deps = mask_source(expr), dependence(expr)
    scalars = tuple(sorted({node.attr for node in expr.nodes if node.op == "scalar"}))  # type: ignore[type-var]
    ranks: dict[Any, int] = {node.attr: len(node.args) for node in expr.nodes if node.op == "load"}
    ranks = {slot: ranks[slot] for slot in sorted(ranks)}
    name = f"{'ragged_' * is_ragged}{'chosen_' * has_given}{'listed_' * has_choice}mask_{expr.key}"
    text = "\n\n".join([source.text, *_entries(scalars, ranks, is_ragged, has_given, has_choice)])  # type: ignore[arg-type]
    kernels = jit_source.load(text, name, *_MODULES)
    # a fused multiply-add rounds once where torch rounds twice, which could flip a comparison
    has_floats = any(category(node.dtype) == "float" for node in expr.nodes)
    options = {"enable_fp_fusion": False} if has_floats else {}
    sees_b, sees_h = any(d.b for d in deps), any(d.h for d in deps)
    return Mask(kernels, scalars, tuple(ranks), source.row_leaves, source.column_leaves, sees_b, sees_h, options)  # type: ignore[arg-type]


_MODULES = ("anyattn.sparsity.kernels.classify", "anyattn.sparsity.kernels.arguments")  # modules that the kernels' source names
_OF_HULLS = ("TILE_M", "TILE_N", "BLOCK")  # constants of the kernels
_OF_LISTS = ("TILE_M", "TILE_N", "CHUNK", "BLOCK_M", "BLOCK_N", "SEPARATE_FULL", "HAS_FULL_TAILS")
_OF_PLACES = ("TILE_M", "TILE_N", "CHUNK")
_PLACES_CHUNK = 1024  # sequences that ``store_places`` handles at once
_LISTS = tuple(f"{side}_{name}" for side in ("row", "column") for name in Lists._fields)


def _entries(scalar_slots: tuple[int, ...], ranks: dict[int, int], is_ragged: bool, has_given: bool, has_choice: bool) -> list[str]:
    """The source of the kernels to launch. Every captured value is a separate argument: Triton recompiles for numbers inside tuples."""
    scalars = [f"s{slot}" for slot in scalar_slots]
    tensors = {f"t{slot}": [f"t{slot}_{i}" for i in range(2 * rank)] for slot, rank in ranks.items()}
    strides = [name for names in tensors.values() for name in names]
    lists, tables = (_LISTS[:4], ["places", "batch: tl.int32"]) if is_ragged else (_LISTS, [])
    given = ["given", "given_rows: tl.int64", "given_columns: tl.int64", "room: tl.int32"] if has_given else []
    given += ["chosen_count", "chosen_index", "room: tl.int32"] if has_choice else []
    numbers = [*(f"{name}: tl.int32" for name in TileSizes._fields), *(f"{name}: tl.int64" for name in (*scalars, *strides))]
    names = ["hulls", *tables, *given, *numbers, *tensors]
    captured = f"{_as_tuple(scalars)}, {_as_tuple(_as_tuple([t, *names]) for t, names in tensors.items())}"
    packed = f"{captured}, {group(TileSizes, TileSizes._fields)}, {'(places, batch)' if is_ragged else None}"
    both = f"{group(Lists, lists[:4])}, {group(Lists, lists[-4:])}"
    of_tiles = "(given, given_rows, given_columns, room)" if has_given else None
    behind = f"{packed}, {of_tiles}, {'(chosen_count, chosen_index, room)' if has_choice else None}, value"
    return [
        _entry("store_hulls", names, _OF_HULLS, f"store_hulls(hulls, {packed}, store_row_hulls, store_column_hulls"),
        _entry("list_tiles", [*lists, *names], _OF_LISTS, f"list_tiles({both}, hulls, {behind}, verdict"),
        _entry("list_tiles_at_once", [*lists, *names], _OF_LISTS, f"list_tiles({both}, hulls, {behind}, verdict_at_once"),
    ]


def _entry(name: str, arguments: list[str], constants: tuple[str, ...], call: str) -> str:
    """The source of a kernel that is compiled once for all values of its arguments."""
    plain = [argument.partition(":")[0] for argument in arguments]
    return (
        f"_PLAIN = {plain!r}\n\n\n@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)\n"
        f"def {name}({', '.join([*arguments, *(f'{constant}: tl.constexpr' for constant in constants)])}):\n"
        f"    classify.{call}, {', '.join(constants)})\n"
    )


@lru_cache(maxsize=1)
def _store_places() -> Any:
    names = ["places", "seqlens_q", "seqlens_k", "q_first", "batch", "most_rows", "width", "bound_q", "bound_k"]
    arguments = [*names[:4], *(f"{name}: tl.int32" for name in names[4:])]
    return jit_source.load(
        _entry("store_places", arguments, _OF_PLACES, f"store_places({', '.join(names)}"), "places", *_MODULES
    ).store_places


def _as_tuple(names: Iterable[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"


def can_list(mod: TracedMod, lengths: tuple[int, int]) -> bool:
    """Whether the call's numbers are within the sizes that the kernels' interval arithmetic assumes, and no captured tensor is empty."""
    limit = 2**MOST_SCALAR_BITS
    if not all(t.numel() for t in mod.tensors):
        return False
    return max(lengths) < 2**MOST_INDEX_BITS and all(not isinstance(s, int) or -limit < s < limit for s in mod.scalars)


class Launch(NamedTuple):
    """One kernel, its grid, and its options: constants and compile options. takes_lists: its arguments begin with the lists."""

    kernel: Any
    grid: tuple[int, int, int]
    options: dict[str, Any]
    takes_lists: bool


class Launches(NamedTuple):
    """The launches that make the lists of a mask for two lengths, without addresses and captured values.

    shapes: of the allocations (``sparsity.grid``). classes: 2 if full tiles have their own lists. hulls: int64 entries of
    scratch memory. sizes: ``TileSizes``. launches: in launch order; empty if there are no tiles.
    """

    mask: Mask
    shapes: tuple[tuple[int, ...], ...]
    classes: int
    hulls: int
    sizes: TileSizes
    launches: tuple[Launch, ...]


@lru_cache(maxsize=1024)
def launches_of(expr: Expr, grid: TileGrid, form: ListForm, has_given: bool = False, has_choice: bool = False) -> Launches:
    """The launches for ``list_tiles``, whose arguments these are."""
    mask, lengths = mask_of(expr, has_given=has_given, has_choice=has_choice), grid.lengths
    entries, heads = grid.batch[0] if mask.sees_b or not form.broadcasts else 1, grid.batch[1] if mask.sees_h or not form.broadcasts else 1
    rows, columns = grid.shape
    # one allocation for lists of one shape: an allocation takes about a tenth of a first call's time
    shapes = form.stack_shapes((entries, heads), (rows, columns))
    sizes = TileSizes(*lengths, rows, columns, heads, 2 * mask.row_leaves * rows * entries * heads)
    # rows, heads and entries have a grid axis each: only the first axis may be longer than 65,535
    programs = (rows + (columns if form.wants_columns else 0), heads, entries)
    longest = max(rows, columns) if form.room is None or not has_choice else form.room
    return _launches(mask, shapes, sizes, grid.tile, programs, _chunk(longest, has_given or has_choice), form)


def _chunk(longest: int, has_given: bool = False) -> int:
    """The tiles of a row that are classified at once. longest: the most of a row or column. Few sizes: each needs a compilation. has_given:
    lists are made anew at every step, where tiles that do not exist take the time of others."""
    sizes = (_FEW, 256, 512) if has_given else (_FEW,)
    return next((n for n in sizes if longest <= n), _MOST_CHUNK)


def _launches(
    mask: Mask,
    shapes: tuple[tuple[int, ...], ...],
    sizes: TileSizes,
    tile: tuple[int, int],
    grid: tuple[int, int, int],
    chunk: int,
    form: ListForm,
) -> Launches:
    """grid: of the kernel that lists tiles. chunk: see ``_chunk``."""
    tile = (min(tile[0], 2**MOST_INDEX_BITS), min(tile[1], 2**MOST_INDEX_BITS))  # torch's "no mask" is one block of 2 ** 30
    plan = Launches(mask, shapes, 1 + form.separate_full, 0, sizes, ())
    if min(sizes.rows, sizes.columns, *grid) == 0:
        return plan
    values = (*tile, chunk, _power_of_2(tile[0], 32), _power_of_2(tile[1], 128), form.separate_full, form.has_full_tails)
    options, kernels = dict(zip(_OF_LISTS, values, strict=True)) | mask.options, mask.kernels
    leaves = mask.row_leaves + mask.column_leaves
    if 0 < leaves <= _MOST_LEAVES and chunk * _power_of_2(max(tile), 2 * _MOST_POSITIONS) <= _MOST_POSITIONS:
        return plan._replace(launches=(Launch(kernels.list_tiles_at_once, grid, options, True),))
    lists = Launch(kernels.list_tiles, grid, options, True)
    if not leaves:
        return plan._replace(launches=(lists,))
    options = dict(zip(_OF_HULLS, (*tile, _power_of_2(max(tile), 1024)), strict=True)) | mask.options
    hulls = Launch(kernels.store_hulls, (sizes.rows + sizes.columns, *grid[1:]), options, False)
    column_hulls = 2 * mask.column_leaves * sizes.columns * grid[1] * grid[2]
    return plan._replace(hulls=sizes.column_hulls_at + column_hulls, launches=(hulls, lists))


def list_tiles(
    mod: TracedMod,
    grid: TileGrid,
    device: torch.device,
    form: ListForm,
    stacks: bool = False,
    given: Tensor | None = None,
    choice: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor | None]:
    """Counts and indices of the partial tiles of each row of tiles, then of the full ones, then the same four of each column if wanted.

    int32, (B, H, M) and (B, H, M, N), or as many entries as the form has room for. Ascending; 0 beyond a count. stacks: return the
    allocations that hold the lists instead (``sparsity.grid``). given: uint8 (B, H, M, N), contiguous or the transpose of a contiguous
    grid: the most that a tile's class can be. choice: counts (B, H, M) and ascending indices (B, H, M, room), contiguous, of the tiles that
    are classified; all others are empty, and columns are not listed.
    """
    plan = launches_of(mod.expr, grid, form, given is not None, choice is not None)
    memory: list[Any] = [torch.empty(shape, dtype=torch.int32, device=device) for shape in plan.shapes]
    lists = lists_of_memory(memory, plan.classes)
    if plan.launches:
        with current_device(device):
            room = grid.shape[1] if form.room is None else form.room
            of_tiles = () if given is None else (given, *given.stride()[-2:], room)
            _launch(plan, mod, lists, given=of_tiles if choice is None else (*choice, room))
    else:
        for t in memory:
            t.zero_()
    return memory if stacks else lists


def list_ragged(
    mod: TracedMod,
    seqlens: tuple[Tensor, Tensor, Tensor],
    bounds: tuple[int, int],
    most: tuple[int, int],
    tile: tuple[int, int],
    heads: int,
) -> tuple[SequenceTables, Lists]:
    """The tables of a varlen batch, and counts and indices of the partial and of the full tiles of each row of tiles of each sequence.

    int32, (H, most rows) and (H, most rows * width): see ``classify.list_tiles``. seqlens: integers (B,) each, queries, keys and the
    first query's position; B is at least 1. bounds: on a sequence's queries and keys. most: bounds on the row tiles and on the key tiles of
    all sequences, at least one each. heads: 1 if the mask ignores h. The caller has checked ``can_list``, and that there are less than
    2 ** 31 indices.
    """
    mask, batch, device, width = mask_of(mod.expr, is_ragged=True), len(seqlens[0]), seqlens[0].device, ceil_div(bounds[1], tile[1])
    sizes = TileSizes(*bounds, *most, heads, 2 * mask.row_leaves * heads * most[0])
    shapes = ((2, heads, most[0]), (2, heads, most[0] * width))
    plan = _launches(mask, shapes, sizes, tile, (most[0], heads, 1), _chunk(width), BLOCK_SPARSE)
    tables = torch.empty((len(SequenceTables._fields), batch), dtype=torch.int64, device=device)
    lists = lists_of_memory([torch.empty(shape, dtype=torch.int32, device=device) for shape in shapes], 2)
    with current_device(device):
        constants = dict(zip(_OF_PLACES, (*tile, _PLACES_CHUNK), strict=True))
        arguments = [tables, *seqlens, batch, most[0], width, *bounds]
        launch(_store_places(), (1, 1, 1), arguments, device, constants, compiled_for(seqlens))
        _launch(plan, mod, lists, (tables, batch))
    return SequenceTables(*tables.unbind(0)), Lists(*lists)


def _launch(plan: Launches, mod: TracedMod, lists: list[Tensor | None], tables: tuple = (), given: tuple = ()) -> None:
    """tables: of a varlen batch, and its number of sequences. given: a class for each tile, its steps between rows and columns, and the
    room of rows; or counts, indices and room of a choice."""
    first = lists[0]
    assert first is not None
    tensors = [t.detach() if t.requires_grad else t for t in (mod.tensors[slot] for slot in plan.mask.tensor_slots)]
    numbers = bits_of_numbers([mod.scalars[slot] for slot in plan.mask.scalar_slots])
    hulls = torch.empty(plan.hulls, dtype=torch.int64, device=first.device) if plan.hulls else first
    kernel_lists = lists if tables else in_front(lists)
    behind, known = [hulls, *tables, *given, *plan.sizes, *numbers, *strides_of_captured(tensors), *tensors], compiled_for(tensors)
    for kernel, grid, options, takes_lists in plan.launches:
        launch(kernel, grid, [*kernel_lists, *behind] if takes_lists else behind, first.device, options, known)


def in_front(lists: Sequence[Any]) -> list[Any]:
    """The eight lists that a kernel takes, or their addresses. If the columns have no lists, the rows' are passed twice; the first list
    stands in for a list that is None."""
    return [lists[0] if t is None else t for t in (*lists[:4], *lists[-4:])]


def strides_of_captured(tensors: Sequence[Tensor]) -> list[int]:
    """The stride and the size of each dimension of each captured tensor, as kernels take them."""
    return [n for t in tensors for pair in zip(t.stride(), t.shape, strict=True) for n in pair]


def compiled_for(tensors: Sequence[Tensor]) -> tuple[torch.dtype, ...]:
    """The properties of arguments that Triton compiles for, besides a launch's options: dtypes, but no values and no alignment."""
    return tuple([t.dtype for t in tensors])


def _power_of_2(size: int, most: int) -> int:
    """The least power of two that is not less than ``size``, 16 at the least and ``most`` at the most."""
    return min(max(16, next_power_of_2(size)), most)
