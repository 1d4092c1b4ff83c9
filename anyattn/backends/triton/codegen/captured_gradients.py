"""Generated code that adds a tile's derivatives to the gradients of a score mod's captured tensors.

The indices of a load decide whether and how a tile's pairs are summed first. Device functions: ``triton_tools.device_math``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from anyattn.backends.triton.codegen.row_families import Family
from anyattn.mods.ir.expr import Expr
from anyattn.triton_tools.emit import LEAVES, Style, emit

__all__ = ["Load", "scatter_source", "terms_source"]


class Load(NamedTuple):
    """A load whose tensor gets a gradient. total: the place of its sum among the part's totals. factor, indices: the outputs that are its
    derivative and its indices. by_row, by_key: all keys of a row, or all rows of a key, share an entry and are summed first. is_alone: no
    two pairs share an entry, so it is stored instead of added. diagonal: the indices as an expression if they depend on q_idx and kv_idx
    only by their difference, so that a tile's diagonals are summed first; else None, and in float32, whose products are slow.
    is_exact: the total is a ``deterministic_sum``. has_copies: it is a ``privatized_sum``.
    may_be_one: all pairs of a tile may share an entry, although the indices do not show it. family: a loop over the elements of a row
    replaces the outputs for derivative and indices; factor is then the output that is the score, if the family reads it.
    term: the place, among the sums of ``terms_source`` over batch entries, of the sum that is added; None if one tile is added."""

    total: int
    factor: int
    indices: tuple[int, ...]
    by_row: bool
    by_key: bool
    is_alone: bool = False
    diagonal: Expr | None = None
    is_exact: bool = False
    has_copies: bool = False
    may_be_one: bool = False
    family: Family | None = None
    term: int | None = None


def terms_source(name: str, loads: Sequence[Load]) -> str:
    """Source of ``NAME_terms(ds, seen, found)``: the modified score's derivative times the derivative by each ``Load.term``, 0 where
    hidden. seen: None if no pair is hidden."""
    factors = {load.term: load.factor for load in reversed(loads)}
    lines = [f"term{i} = ds * found[{factors[i]}].to(tl.float32)" for i in range(len(factors))]
    lines += ["if seen is not None:", *(f"    term{i} = tl.where(seen, term{i}, 0.0)" for i in range(len(factors)))]
    lines.append(f"return ({''.join(f'term{i}, ' for i in range(len(factors)))})")
    return f"@triton.jit\ndef {name}_terms(ds, seen, found):\n" + "\n".join(f"    {x}" for x in lines) + "\n"


def scatter_source(name: str, loads: Sequence[Load], style: Style) -> str:
    """Source of ``NAME_scatter(ds, seen, is_row, is_key, found, at, scalars, tensors, totals, IS_FULL, DTYPE)``, which multiplies the
    modified score's derivative by each load's derivative and adds it to the load's total, which is contiguous. IS_FULL: all pairs are
    visible except those of rows beyond the end, which add 0 to the last row's entries, so that no addition needs a mask. at:
    ``TileOfScores``. DTYPE: of products. ds: with ``Load.term`` the sums instead, of which zeros are not added."""
    lines, before = [], []
    if any(load.family is not None for load in loads):
        lines.append("q_idx = at.q_first + tl.minimum(tl.arange(0, ds.shape[0]), at.rows - 1)[:, None]")
        lines.append("kv_idx = at.k_first + tl.minimum(tl.arange(0, ds.shape[1]), at.keys - 1)[None, :]")
    for i, load in enumerate(loads):
        slot = f"totals[{load.total}]"
        if load.family is not None:
            before.append(_family_source(f"{name}_family{i}", load.family, style))
            lines += _family_lines(f"{name}_family{i}", load, slot, i, style)
            continue
        own = f"tl.where(seen, ds * found[{load.factor}].to(tl.float32), 0.0)" if load.term is None else f"ds[{load.term}]"
        lines.append(f"part{i} = {own}")
        lines.append(f"at{i} = {_place([f'found[{at}]' for at in load.indices], slot, load, style)}")
        if load.is_alone:
            lines.append(f"tl.store({slot}[0] + at{i}, part{i}.to({slot}[0].dtype.element_ty), mask=seen)")
            continue
        if load.diagonal is not None:
            before.append(_places_source(f"{name}_places{i}", load, style))
            lines.append(f"if part{i}.shape[0] * part{i}.shape[1] >= 1024:  # a product sums 16 terms or more")
            flags = f"{load.is_exact}, {load.has_copies}, {load.may_be_one}"
            lines.append(f"    device_math.send_diagonals(part{i}, at, scalars, tensors, {slot}, {name}_places{i}, DTYPE, {flags})")
            lines.append("else:")
        lines += ["    " * (load.diagonal is not None) + line for line in _additions(load, slot, i)]
    arguments = "ds, seen, is_row, is_key, found, at, scalars, tensors, totals, IS_FULL: tl.constexpr, DTYPE: tl.constexpr"
    head = f"@triton.jit\ndef {name}_scatter({arguments}):\n"
    return "\n\n".join([*before, head + "\n".join(f"    {x}" for x in lines) + "\n"])


def _place(places: list[str], slot: str, load: Load, style: Style) -> str:
    """The offset in a total of the entry at these indices. The last dimension's stride is 1, or that of the copies."""
    if not style.is_inside:
        places = [f"device_math.inside({place}, {slot}[{2 + 2 * d}])" for d, place in enumerate(places)]
    strides = [f" * {slot}[{1 + 2 * d}]" if d + 1 < len(places) or load.has_copies else "" for d in range(len(places))]
    return " + ".join(f"{place}.to(tl.int64){stride}" for place, stride in zip(places, strides, strict=True)) or "0"


def _additions(load: Load, slot: str, i: int) -> list[str]:
    """The lines that sum the pairs that share an entry, by row, by key or in the whole tile, and add the sums to the total."""
    pairs = "seen" if load.term is None else f"seen & (part{i} != 0.0)"
    mask = {(False, False): pairs, (True, False): "is_row", (False, True): "is_key", (True, True): None}[load.by_row, load.by_key]
    sums = [f"part{i} = tl.sum(part{i}, {axis}, keep_dims=True)" for axis, is_summed in ((1, load.by_row), (0, load.by_key)) if is_summed]
    if mask is None:  # a scalar: one lane adds it
        one = f"part{i}, at{i} = tl.sum(tl.sum(part{i}, 1), 0), device_math.only(at{i})"
        return [*sums, one, _addition(load, slot, i, "None")]
    spread = [f"at{i} += device_math.zeros_like(part{i})", f"mask{i} = None if IS_FULL else {mask}"]
    return [*sums, *spread, _addition(load, slot, i, f"mask{i}")]


def _addition(load: Load, slot: str, i: int, mask: str) -> str:
    """The line that adds ``part{i}`` to the total of a load."""
    if load.is_exact:
        return f"device_math.send_exact({slot}, at{i}, part{i}, {mask})"
    if load.has_copies and mask != "None":
        return f"device_math.send_copies({slot}, at{i}, part{i}, {mask}, {load.may_be_one})"
    more = "" if mask == "None" else f", mask={mask}"
    return f"tl.atomic_add({slot}[0] + at{i}, part{i}.to({slot}[0].dtype.element_ty){more}, sem='relaxed')"


def _places_source(name: str, load: Load, style: Style) -> str:
    """Source of ``NAME(b, h, q_idx, kv_idx, scalars, tensors, total)``: offsets in a load's total for sums of
    diagonals, given one pair each."""
    assert load.diagonal is not None
    lines = emit(load.diagonal, style=style)
    body = [*lines.all(), f"return {_place(list(lines.outputs), 'total', load, style)}"]
    return f"@triton.jit\ndef {name}(b, h, q_idx, kv_idx, scalars, tensors, total):\n" + "\n".join(f"    {x}" for x in body) + "\n"


def _family_source(name: str, family: Family, style: Style) -> str:
    """Source of ``NAME(b, h, q_idx, kv_idx, score, element, scalars, tensors)``: a family's outputs. style: of
    the part, with the same loads."""
    lines = emit(family.expr, LEAVES, style=style)
    body = [*lines.all(), f"return ({', '.join(lines.outputs)},)"]
    text = "\n".join(f"    {line}" for line in body).replace(f"scalars[{family.element}]", "element")
    return f"@triton.jit\ndef {name}(b, h, q_idx, kv_idx, score, element, scalars, tensors):\n{text}\n"


def _family_lines(name: str, load: Load, slot: str, i: int, style: Style) -> list[str]:
    """The lines that add the derivatives by all elements of a family, one after the other."""
    assert load.family is not None
    elements, rank = load.family.elements, len(load.family.expr.outputs) - 1
    score = f"found[{load.factor}]" if load.family.expr.uses_score else "0.0"
    inside = [
        f"of{i} = {name}(at.b, at.h, q_idx, kv_idx, {score}, element{i}, scalars, tensors)",
        f"part{i} = tl.where(seen, ds * of{i}[0].to(tl.float32), 0.0)",
        f"at{i} = {_place([f'of{i}[{1 + d}]' for d in range(rank)], slot, load, style)}",
        *_additions(load, slot, i),
    ]
    head = f"for element{i} in tl.range({elements.start}, {elements.stop}, {elements.step}, num_stages=1):"
    return [head, *(f"    {line}" for line in inside)]
