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
from anyattn.sparsity.kernels.arguments import Lists, TileSizes
from anyattn.sparsity.kernels.interval_codegen import MOST_INDEX_BITS, MOST_SCALAR_BITS, mask_source
from anyattn.sparsity.list_stacks import lists_of_memory, stack_shapes
from anyattn.triton_tools import jit_source
from anyattn.triton_tools.jit_source import group
from anyattn.triton_tools.launch import current_device, launch

__all__ = [
    "OF_HULLS",
    "OF_TILES",
    "Launches",
    "Mask",
    "as_tuple",
    "can_list",
    "compiled_for",
    "constants_of",
    "in_front",
    "launches_of",
    "list_tiles",
    "mask_of",
    "power_of_2",
    "slots_of",
    "strides_of_captured",
    "way_of",
]

_FEW, _MOST_CHUNK = 64, 1024  # tiles of a row classified at once
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
def mask_of(expr: Expr) -> Mask:
    source, deps = mask_source(expr), dependence(expr)
    scalars, ranks = slots_of(expr)
    kernels = jit_source.load("\n\n".join([source.text, *_entries(scalars, ranks)]), f"mask_{expr.key}", *MODULES)
    # a fused multiply-add rounds once where torch rounds twice, which could flip a comparison
    has_floats = any(category(node.dtype) == "float" for node in expr.nodes)
    options = {"enable_fp_fusion": False} if has_floats else {}
    sees_b, sees_h = any(d.b for d in deps), any(d.h for d in deps)
    return Mask(kernels, scalars, tuple(ranks), source.row_leaves, source.column_leaves, sees_b, sees_h, options)


MODULES = ("anyattn.sparsity.kernels.classify", "anyattn.sparsity.kernels.arguments")  # modules that the kernels' source names
OF_HULLS, OF_TILES = ("TILE_M", "TILE_N", "BLOCK"), ("TILE_M", "TILE_N", "CHUNK", "BLOCK_M", "BLOCK_N")  # constants of the kernels
_OF_LISTS = (*OF_TILES, "SEPARATE_FULL", "HAS_FULL_TAILS")
_LISTS = tuple(f"{side}_{name}" for side in ("row", "column") for name in Lists._fields)


def slots_of(expr: Expr) -> tuple[tuple[int, ...], dict[int, int]]:
    """The slots of the captured numbers that are read, ascending, and of the captured tensors, with their ranks."""
    scalars: set[Any] = {node.attr for node in expr.nodes if node.op == "scalar"}
    ranks: dict[Any, int] = {node.attr: len(node.args) for node in expr.nodes if node.op == "load"}
    return tuple(sorted(scalars)), {slot: ranks[slot] for slot in sorted(ranks)}


def _entries(scalar_slots: tuple[int, ...], ranks: dict[int, int]) -> list[str]:
    """The source of the kernels to launch. Every captured value is a separate argument: Triton recompiles for numbers inside tuples."""
    scalars = [f"s{slot}" for slot in scalar_slots]
    tensors = {f"t{slot}": [f"t{slot}_{i}" for i in range(2 * rank)] for slot, rank in ranks.items()}
    numbers = [f"{name}: tl.int64" for name in [*scalars, *(n for names in tensors.values() for n in names)]]
    captured = ", ".join([*(f"{name}: tl.int32" for name in TileSizes._fields), *numbers, *tensors])
    packed = (
        f"{as_tuple(scalars)}, {as_tuple(as_tuple([t, *names]) for t, names in tensors.items())}, {group(TileSizes, TileSizes._fields)}"
    )
    plain = [*_LISTS, "hulls", *TileSizes._fields, *scalars, *(n for names in tensors.values() for n in names), *tensors]
    head = f"_PLAIN = {plain!r}\n\n\n@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)\ndef "
    sources = [
        f"{head}store_hulls(hulls, {captured}, {constants_of(OF_HULLS)}):\n"
        f"    classify.store_hulls(hulls, {packed}, store_row_hulls, store_column_hulls, {', '.join(OF_HULLS)})\n"
    ]
    for name, verdict in (("list_tiles", "verdict"), ("list_tiles_at_once", "verdict_at_once")):
        sources.append(
            f"{head}{name}({', '.join(_LISTS)}, hulls, {captured}, {constants_of(_OF_LISTS)}):\n"
            f"    classify.list_tiles({group(Lists, _LISTS[:4])}, {group(Lists, _LISTS[4:])}, hulls, {packed}, value, {verdict}, "
            f"{', '.join(_OF_LISTS)})\n"
        )
    return sources


def as_tuple(names: Iterable[str]) -> str:
    return "(" + "".join(f"{name}, " for name in names) + ")"


def constants_of(names: Iterable[str]) -> str:
    return ", ".join(f"{name}: tl.constexpr" for name in names)


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

    shapes: of the allocations (``sparsity.list_stacks``). classes: 2 if full tiles have their own lists. hulls: int64 entries of
    scratch memory. sizes: ``TileSizes``. launches: in launch order; empty if there are no tiles.
    """

    mask: Mask
    shapes: tuple[tuple[int, ...], ...]
    classes: int
    hulls: int
    sizes: TileSizes
    launches: tuple[Launch, ...]


@lru_cache(maxsize=1024)
def launches_of(
    expr: Expr,
    lengths: tuple[int, int],
    tile: tuple[int, int],
    batch: tuple[int, int],
    *,
    wants_columns: bool,
    separate_full: bool,
    has_full_tails: bool,
    broadcasts: bool,
) -> Launches:
    """The launches for ``list_tiles``, whose arguments these are."""
    mask = mask_of(expr)
    entries, heads = batch[0] if mask.sees_b or not broadcasts else 1, batch[1] if mask.sees_h or not broadcasts else 1
    tile = (min(tile[0], 2**MOST_INDEX_BITS), min(tile[1], 2**MOST_INDEX_BITS))  # torch's "no mask" is one block of 2 ** 30
    rows, columns = ceil_div(lengths[0], tile[0]), ceil_div(lengths[1], tile[1])
    # one allocation for lists of one shape: an allocation takes about a tenth of a first call's time
    classes = 2 if separate_full else 1
    shapes = tuple([shape for pair in stack_shapes((entries, heads), (rows, columns), classes, wants_columns) for shape in pair])
    row_hulls, column_hulls = (2 * n * entries * heads for n in (mask.row_leaves * rows, mask.column_leaves * columns))
    sizes = TileSizes(*lengths, rows, columns, heads, row_hulls)
    plan = Launches(mask, shapes, classes, 0, sizes, ())
    if min(entries, heads, rows, columns) == 0:
        return plan
    # rows, heads and entries have a grid axis each: only the first axis may be longer than 65,535
    chunk, is_at_once = way_of(mask, tile, max(rows, columns))
    values = (*tile, chunk, power_of_2(tile[0], 32), power_of_2(tile[1], 128), classes == 2, has_full_tails)
    options = dict(zip(_OF_LISTS, values, strict=True)) | mask.options
    grid, kernels = (rows + (columns if wants_columns else 0), heads, entries), mask.kernels
    if is_at_once:
        return plan._replace(launches=(Launch(kernels.list_tiles_at_once, grid, options, True),))
    lists = Launch(kernels.list_tiles, grid, options, True)
    if not mask.row_leaves + mask.column_leaves:
        return plan._replace(launches=(lists,))
    options = dict(zip(OF_HULLS, (*tile, power_of_2(max(tile), 1024)), strict=True)) | mask.options
    hulls = Launch(kernels.store_hulls, (rows + columns, heads, entries), options, False)
    return plan._replace(hulls=row_hulls + column_hulls, launches=(hulls, lists))


def list_tiles(
    mod: TracedMod,
    lengths: tuple[int, int],
    tile: tuple[int, int],
    batch: tuple[int, int],
    device: torch.device,
    *,
    stacks: bool = False,
    **options: bool,
) -> list[Tensor | None]:
    """Counts and indices of the partial tiles of each row of tiles, then of the full ones, then the same four of each column if wanted.

    int32, (B, H, M) and (B, H, M, N). Ascending; 0 beyond a count. stacks: return the allocations that hold the lists instead
    (``sparsity.list_stacks``). options, all required: wants_columns. separate_full: False lists full tiles as partial ones and leaves their
    own lists None. has_full_tails: see ``classify.list_tiles``. broadcasts: B and H are 1 if the mask ignores b or h.
    """
    plan = launches_of(mod.expr, lengths, tile, batch, **options)
    memory: list[Any] = [torch.empty(shape, dtype=torch.int32, device=device) for shape in plan.shapes]
    lists = lists_of_memory(memory, plan.classes)
    if plan.launches:
        with current_device(device):
            _launch(plan, mod, lists)
    else:
        for t in memory:
            t.zero_()
    return memory if stacks else lists


def _launch(plan: Launches, mod: TracedMod, lists: list[Tensor | None]) -> None:
    first = lists[0]
    assert first is not None
    tensors = [t.detach() if t.requires_grad else t for t in (mod.tensors[slot] for slot in plan.mask.tensor_slots)]
    numbers = bits_of_numbers([mod.scalars[slot] for slot in plan.mask.scalar_slots])
    hulls = torch.empty(plan.hulls, dtype=torch.int64, device=first.device) if plan.hulls else first
    kernel_lists = in_front(lists)
    behind, known = [hulls, *plan.sizes, *numbers, *strides_of_captured(tensors), *tensors], compiled_for(tensors)
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


def way_of(mask: Mask, tile: tuple[int, int], longest: int) -> tuple[int, bool]:
    """The number of a row's tiles (at most ``longest``) that are classified at once, and whether the same kernel evaluates the leaves."""
    chunk = _FEW if longest <= _FEW else _MOST_CHUNK  # only two sizes: each size needs a compilation
    leaves = mask.row_leaves + mask.column_leaves
    return chunk, 0 < leaves <= _MOST_LEAVES and chunk * power_of_2(max(tile), 2 * _MOST_POSITIONS) <= _MOST_POSITIONS


def power_of_2(size: int, most: int) -> int:
    """The least power of two that is not less than ``size``, 16 at the least and ``most`` at the most."""
    return min(max(16, next_power_of_2(size)), most)
