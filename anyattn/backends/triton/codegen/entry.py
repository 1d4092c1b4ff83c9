"""Entries of the Triton kernels: generated functions that take a call's captured values and call a kernel's body with the mods' functions.

An entry has every value as a separate parameter (Triton recompiles for numbers inside tuples), and packs them into the groups that the body
takes. Lengths, strides, scales and captured values are run-time arguments.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

import torch
from torch import Tensor

from anyattn.backends.triton.codegen.programs import CapturedValues, Part, Program
from anyattn.backends.triton.kernels.arguments import Mod, Mods
from anyattn.mods.analysis.captured_loads import loads_even_tiles
from anyattn.triton_tools import jit_source
from anyattn.triton_tools.fast_launch import Handle
from anyattn.triton_tools.launch import UNIT, current_device, launch

__all__ = ["Group", "Signature", "entry_of", "entry_source", "run_entry", "sizes_of_captured"]

_TYPES = {"pointer": "", "stride": ": tl.int64", "long": ": tl.int64", "int": ": tl.int32", "float": ": tl.float32"}
_KERNELS = "anyattn.backends.triton.kernels"


class Group(NamedTuple):
    """One of a body's first arguments.

    kind: of all its values, one of ``_TYPES``; strides of aligned rows are passed in units of 8 elements, so that Triton knows that they
    are multiples. fields: a class of ``kernels.arguments``, or the name of a single value. prefix: of the values' names in the entry, if
    another group has the same field names.
    """

    kind: str
    fields: Any
    prefix: str = ""


class Signature(NamedTuple):
    """A body's arguments.

    body: ``module.function`` of ``backends/triton/kernels``, or ``folder.module.function``. groups: its first arguments, whose values a
    launch passes in order; after them come ``Mods`` and the constants. parts: for each field of ``Mods`` the names of the program parts
    that may provide it. constants: a class of ``kernels.arguments``.
    """

    body: str
    groups: tuple[Group, ...]
    parts: tuple[tuple[str, ...], ...]
    constants: Any


def _names(fields: Any, prefix: str) -> Iterator[str]:
    """The names of a group's values; those of nested groups follow the field's name."""
    if isinstance(fields, str):
        yield fields
        return
    for name, kind in get_type_hints(fields).items():
        if hasattr(kind, "_fields"):
            yield from _names(kind, f"{prefix}{name}_")
        else:
            yield prefix + name


def _group_source(fields: Any, prefix: str) -> str:
    """Source that constructs a group from its values."""
    if isinstance(fields, str):
        return fields
    kinds = get_type_hints(fields).items()
    values = [_group_source(kind, f"{prefix}{name}_") if hasattr(kind, "_fields") else prefix + name for name, kind in kinds]
    return jit_source.group(fields, values)


def _tuple(values: Sequence[str]) -> str:
    """Source of a tuple, which has at least one item: Triton has no empty tuple."""
    return "(" + "".join(f"{value}, " for value in values or ["0"]) + ")"


def _captured(slot: int, part: Part | None) -> tuple[list[str], list[list[str]], list[list[str]]]:
    """Names of a part's numbers, and per tensor and per total its name, strides and sizes."""
    if part is None:
        return [], [], []
    tensors, totals = (
        [[f"{letter}{slot}_{i}", *(f"{letter}{slot}_{i}_{n}" for n in range(2 * rank))] for i, rank in enumerate(ranks)]
        for letter, ranks in (("t", part.ranks), ("g", part.totals))
    )
    return [f"s{slot}_{i}" for i in range(part.scalars)], tensors, totals


@lru_cache(maxsize=4096)
def entry_source(signature: Signature, program: Program, is_aligned: bool) -> str:
    """The source of the entry and of the functions that it passes to the body."""
    slots = [next((p for p in program.parts if p.name in names), None) for names in signature.parts]
    plain = [(name, g.kind) for g in signature.groups for name in _names(g.fields, g.prefix)]
    mods: list[str] = []
    captured_names: list[tuple[str, str]] = []
    strides = [name for name, kind in plain if kind == "stride" and is_aligned]
    # the interpreter needs the cast: it takes a small number as 32 bits regardless of the annotation
    units = [f"{n} = tl.cast({n}, tl.int64) * {UNIT}" for n in strides]
    evens: set[str] = set()  # captured tensors with even rows
    for slot, part in enumerate(slots):
        numbers, tensors, totals = _captured(slot, part)
        for name, *sizes in [tensors[i] for i in part.style.even] if part is not None else []:
            evens.add(name)
            units += [f"{n} = tl.cast({n}, tl.int64) * {UNIT}" for n in sizes[:-2:2]]
        captured_names += [(n, "long") for n in numbers]
        captured_names += [(n, "long") for t in tensors + totals for n in t[1:]] + [(t[0], "pointer") for t in tensors + totals]
        captured = [_tuple(numbers), *(_tuple([_tuple(names) for names in ts]) for ts in (tensors, totals))]
        mods.append(_mod_source(part, captured))
    arguments = [f"{name}{_TYPES[kind]}" for name, kind in [*plain, *captured_names]]
    # Triton specialises on whether the address of a tensor with rows is a multiple of 16, which ``strides_of`` has checked for all of them
    # and ``Style.even`` for captured ones.
    # It specialises on no other argument.
    with_rows = {name.split("_")[0] for name in strides} | evens
    unspecialised = [name for name, _ in [*plain, *captured_names] if name not in with_rows]
    groups = [_group_source(g.fields, g.prefix) for g in signature.groups]
    constants = jit_source.group(signature.constants, signature.constants._fields)
    call = [*groups, jit_source.group(Mods, mods), constants]
    lines = [*units, f"{'.'.join(signature.body.split('.')[-2:])}({', '.join(call)})"]
    head = f"_PLAIN = {unspecialised!r}\n\n\n@triton.jit(do_not_specialize=_PLAIN, do_not_specialize_on_alignment=_PLAIN)\n"
    arguments += [f"{name}: tl.constexpr" for name in signature.constants._fields]
    head += f"def entry({', '.join(arguments)}):\n" + "\n".join(f"    {line}" for line in lines) + "\n"
    return "\n\n".join([program.source, head])


def _mod_source(part: Part | None, captured: list[str]) -> str:
    """Source that constructs the ``Mod`` of a part. captured: its last fields, which the part's sides share."""
    sides = ["None" if side is None else _mod_source(side, captured) for side in (part.sides if part is not None else (None, None))]
    has_sides = [str(side != "None") for side in sides]
    return jit_source.group(Mod, [*_functions(part), *has_sides, *sides, *captured])


def _functions(part: Part | None) -> tuple[str, ...]:
    """The first fields of a ``Mod``."""
    if part is None:
        return "False", "None", "None", "None", "None", "False", "None", "None", "None", "0"
    terms = f"{part.name}_terms" if part.loads and part.is_by_entry else "None"
    scatter = f"{part.name}_scatter" if part.loads else "None"
    is_padded, sure = str(loads_even_tiles(part.expr, part.style.even)), "None" if part.sure is None else f"{part.sure.name}_rows"
    reach = "None" if part.reach is None else f"{part.name}_reach"
    band = "None" if part.band is None else f"{part.name}_band"
    return "True", f"{part.name}_rows", f"{part.name}_value", terms, scatter, is_padded, sure, reach, band, str(part.side)


@lru_cache(maxsize=4096)
def entry_of(signature: Signature, program: Program, is_aligned: bool) -> Any:
    """The generated kernel; equal programs share it."""
    source = entry_source(signature, program, is_aligned)
    module, body = signature.body.rsplit(".", 1)
    return jit_source.load(source, f"{body}_{jit_source.digest(source)}", f"{_KERNELS}.{module}", f"{_KERNELS}.arguments").entry


def run_entry(
    kernel: Any,
    grid: Sequence[int],
    values: Sequence[Any],
    captured: Sequence[CapturedValues],
    device: torch.device,
    options: dict[str, Any],
) -> Handle | None:
    """Launches an entry. values: of the groups, in order. captured: of the parts that the body calls, in
    order. options: constants and warps.

    Returns a handle for launches with the same sizes, strides, options, dtypes and alignment.
    """
    arguments = list(values)
    for part in captured:
        arguments += part.scalars
        arguments += sizes_of_captured(part)
        arguments += part.tensors
        arguments += part.totals
    # launches of one entry differ only in dtypes and in row alignment, and the entry itself states the alignment
    dtypes = tuple([x.dtype if isinstance(x, Tensor) else x.base.dtype for x in arguments if not isinstance(x, (int, float))])
    with current_device(device):
        return launch(kernel, tuple(grid), arguments, device, options, dtypes)


def sizes_of_captured(part: CapturedValues) -> tuple[int, ...]:
    """An entry's arguments after a part's numbers: strides and sizes of the captured tensors and of the totals."""
    sizes: list[int] = []
    for i, t in enumerate((*part.tensors, *part.totals)):
        unit = UNIT if i in part.even else 1  # of all strides but the last
        sizes += [
            n for d, pair in enumerate(zip(t.stride(), t.shape, strict=True), 1) for n in (pair[0] // (unit if d < t.ndim else 1), pair[1])
        ]
    return tuple(sizes)
