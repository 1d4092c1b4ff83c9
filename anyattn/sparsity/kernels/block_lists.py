"""Block lists of a mask on a CUDA device: launches the kernels of ``classify`` without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
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
    "Mask",
    "as_tuple",
    "can_list",
    "constants_of",
    "list_tiles",
    "mask_of",
    "power_of_2",
    "slots_of",
    "way_of",
]

_FEW, _MOST_CHUNK = 64, 1024  # tiles of a row classified at once
# Where one kernel does all: the positions of all tiles of a row together, and how many leaves have to be evaluated at them.
_MOST_POSITIONS, _MOST_LEAVES = 2**14, 4


class Mask(NamedTuple):
    """A mask's kernels, and what its lists depend on."""

    kernels: Any
    scalar_slots: tuple[int, ...]
    tensor_slots: tuple[int, ...]
    row_leaves: int
    column_leaves: int
    sees_b: bool
    sees_h: bool
    options: dict[str, Any]  # what the kernels are compiled with


@lru_cache(maxsize=1024)
def mask_of(expr: Expr) -> Mask:
    source, deps = mask_source(expr), dependence(expr)
    scalars, ranks = slots_of(expr)
    kernels = jit_source.load("\n\n".join([source.text, *_entries(scalars, ranks)]), f"mask_{expr.key}", *MODULES)
    # a fused multiply-add rounds once and could flip a comparison that torch rounds twice
    has_floats = any(category(node.dtype) == "float" for node in expr.nodes)
    options = {"enable_fp_fusion": False} if has_floats else {}
    sees_b, sees_h = any(d.b for d in deps), any(d.h for d in deps)
    return Mask(kernels, scalars, tuple(ranks), source.row_leaves, source.column_leaves, sees_b, sees_h, options)


MODULES = ("anyattn.sparsity.kernels.classify", "anyattn.sparsity.kernels.arguments")  # what the texts of kernels name
OF_HULLS, OF_TILES = ("TILE_M", "TILE_N", "BLOCK"), ("TILE_M", "TILE_N", "CHUNK", "BLOCK_M", "BLOCK_N")  # constants of the kernels
_OF_LISTS = (*OF_TILES, "SEPARATE_FULL", "HAS_FULL_TAILS")
_LISTS = tuple(f"{side}_{name}" for side in ("row", "column") for name in Lists._fields)


def slots_of(expr: Expr) -> tuple[tuple[int, ...], dict[int, int]]:
    """The captured numbers that are read, ascending, and the captured tensors with their ranks."""
    scalars: set[Any] = {node.attr for node in expr.nodes if node.op == "scalar"}
    ranks: dict[Any, int] = {node.attr: len(node.args) for node in expr.nodes if node.op == "load"}
    return tuple(sorted(scalars)), {slot: ranks[slot] for slot in sorted(ranks)}


def _entries(scalar_slots: tuple[int, ...], ranks: dict[int, int]) -> list[str]:
    """The kernels to launch. Every captured value is an argument of its own: Triton recompiles for numbers inside tuples."""
    scalars = [f"s{slot}" for slot in scalar_slots]
    tensors = {f"t{slot}": [f"t{slot}_{i}" for i in range(2 * rank)] for slot, rank in ranks.items()}
    numbers = [f"{name}: tl.int64" for name in [*scalars, *(n for names in tensors.values() for n in names)]]
    captured = ", ".join([*(f"{name}: tl.int32" for name in TileSizes._fields), *numbers, *tensors])
    packed = (
        f"{as_tuple(scalars)}, {as_tuple(as_tuple([t, *names]) for t, names in tensors.items())}, {group(TileSizes, TileSizes._fields)}"
    )
    plain = [*_LISTS, "hulls", *TileSizes._fields, *scalars, *(n for names in tensors.values() for n in names), *tensors]
    head = f"_PLAIN = {plain!r}\n\n\n@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)\ndef "
    made = [
        f"{head}store_hulls(hulls, {captured}, {constants_of(OF_HULLS)}):\n"
        f"    classify.store_hulls(hulls, {packed}, store_row_hulls, store_column_hulls, {', '.join(OF_HULLS)})\n"
    ]
    for name, verdict in (("list_tiles", "verdict"), ("list_tiles_at_once", "verdict_at_once")):
        made.append(
            f"{head}{name}({', '.join(_LISTS)}, hulls, {captured}, {constants_of(_OF_LISTS)}):\n"
            f"    classify.list_tiles({group(Lists, _LISTS[:4])}, {group(Lists, _LISTS[4:])}, hulls, {packed}, value, {verdict}, "
            f"{', '.join(_OF_LISTS)})\n"
        )
    return made


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


def list_tiles(
    mod: TracedMod,
    lengths: tuple[int, int],
    tile: tuple[int, int],
    batch: tuple[int, int],
    device: torch.device,
    *,
    wants_columns: bool,
    separate_full: bool,
    has_full_tails: bool,
    broadcasts: bool,
    stacks: bool = False,
) -> list[Tensor | None]:
    """Counts and indices of the partial tiles of each row of tiles, then of the full ones, then the same four of each column if wanted.

    int32, (B, H, M) and (B, H, M, N). Ascending; 0 beyond a count. separate_full: False lists full tiles as partial ones and leaves their
    own lists None. has_full_tails: see ``classify.list_tiles``. broadcasts: B and H are 1 where the mask ignores b or h.
    stacks: the allocations that hold them instead, see ``sparsity.list_stacks``.
    """
    mask = mask_of(mod.expr)
    sizes = (batch[0] if mask.sees_b or not broadcasts else 1, batch[1] if mask.sees_h or not broadcasts else 1)
    tile = (min(tile[0], 2**MOST_INDEX_BITS), min(tile[1], 2**MOST_INDEX_BITS))  # torch's "no mask" is one block of 2 ** 30
    rows, columns = ceil_div(lengths[0], tile[0]), ceil_div(lengths[1], tile[1])
    classes = 2 if separate_full else 1
    # one allocation for lists of one shape: each takes about a tenth of the call's time
    shapes = stack_shapes(sizes, (rows, columns), classes, wants_columns)
    memory: list[Any] = [torch.empty(shape, dtype=torch.int32, device=device) for pair in shapes for shape in pair]
    if min(*sizes, rows, columns) == 0:
        for t in memory:
            t.zero_()
    found = lists_of_memory(memory, classes)
    if min(*sizes, rows, columns) > 0:
        with current_device(device):
            _launch(mask, mod, found, lengths, tile, sizes, (rows, columns), has_full_tails)
    return memory if stacks else found


def _launch(
    mask: Mask,
    mod: TracedMod,
    found: list[Tensor | None],
    lengths: tuple[int, int],
    tile: tuple[int, int],
    sizes: tuple[int, int],
    grid: tuple[int, int],
    has_full_tails: bool,
) -> None:
    (rows, columns), count, first = grid, sizes[0] * sizes[1], found[0]
    assert first is not None
    tensors = [t.detach() if t.requires_grad else t for t in (mod.tensors[slot] for slot in mask.tensor_slots)]
    strides = [n for t in tensors for pair in zip(t.stride(), t.shape, strict=True) for n in pair]
    numbers = (*lengths, rows, columns, sizes[1], 2 * mask.row_leaves * count * rows)
    captured = (*numbers, *bits_of_numbers([mod.scalars[slot] for slot in mask.scalar_slots]), *strides, *tensors)
    known = tuple([t.dtype for t in tensors])  # Triton specialises on no number and on no alignment
    kernel, hulls = mask.kernels.list_tiles, first
    chunk, is_at_once = way_of(mask, tile, max(rows, columns))
    if is_at_once:
        kernel = mask.kernels.list_tiles_at_once
    elif mask.row_leaves + mask.column_leaves:
        size = numbers[-1] + 2 * mask.column_leaves * count * columns
        hulls = torch.empty(size, dtype=torch.int64, device=first.device)
        constants = dict(zip(OF_HULLS, (*tile, power_of_2(max(tile), 1024)), strict=True)) | mask.options
        launch(mask.kernels.store_hulls, (rows + columns, sizes[1], sizes[0]), [hulls, *captured], first.device, constants, known)
    lists = [t if t is not None else first for t in found]
    programs = rows + (columns if len(lists) > 4 else 0)
    values = (*tile, chunk, power_of_2(tile[0], 32), power_of_2(tile[1], 128), found[2] is not None, has_full_tails)
    constants = dict(zip(_OF_LISTS, values, strict=True)) | mask.options
    # (an axis for each: beyond the first none is longer than 65,535)
    launch(kernel, (programs, sizes[1], sizes[0]), [*lists[:4], *lists[-4:], hulls, *captured], first.device, constants, known)


def way_of(mask: Mask, tile: tuple[int, int], longest: int) -> tuple[int, bool]:
    """How many tiles of a row are classified at once, of at most ``longest``, and whether the same kernel evaluates the leaves."""
    chunk = _FEW if longest <= _FEW else _MOST_CHUNK  # few sizes: each is a compilation
    leaves = mask.row_leaves + mask.column_leaves
    return chunk, 0 < leaves <= _MOST_LEAVES and chunk * power_of_2(max(tile), 2 * _MOST_POSITIONS) <= _MOST_POSITIONS


def power_of_2(size: int, most: int) -> int:
    """The least power of two that is not less than ``size``, 16 at the least and ``most`` at the most."""
    return min(max(16, next_power_of_2(size)), most)
