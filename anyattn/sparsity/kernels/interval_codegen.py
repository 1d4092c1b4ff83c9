"""Bounds of masks as generated Triton source: whether a tile is certainly or possibly visible, without evaluating its pairs.

A part of the mask that depends on one position only and has no useful bounds (a captured tensor, a remainder, a float) is a *leaf* of the
bounds (``mods/ir/bounds.py``): it is evaluated at all positions of every tile, and its least and greatest values are stored beforehand.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

from anyattn.mods.ir.bounds import bounds
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import INDICES, MIRRORED, Builder, Expr, category
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Box
from anyattn.triton_tools.emit import LEAVES, emit, function

__all__ = ["MOST_INDEX_BITS", "MOST_SCALAR_BITS", "MaskSource", "mask_source"]

MOST_SCALAR_BITS = 40  # captured integers are of magnitude less than 2 ** 40: the caller checks
_EASY = frozenset(("add", "sub", "neg", "abs", "min", "max", "and", "or", "xor", "not", "where", "cast", *MIRRORED))
_INDEX, _SIZE = {"row": "q_idx", "column": "kv_idx"}, {"row": "TILE_M", "column": "TILE_N"}


class MaskSource(NamedTuple):
    """Functions of one mask in Triton: ``value``, ``verdict``, ``verdict_at_once``, ``store_row_hulls`` and ``store_column_hulls``.

    row_leaves, column_leaves: the number of pairs of bounds that the last two store for each tile. ``verdict`` loads them;
    ``verdict_at_once``, with the same arguments, computes them itself, which for few tiles takes less time than a separate kernel.
    """

    text: str
    row_leaves: int
    column_leaves: int


@lru_cache(maxsize=1024)
def mask_source(expr: Expr) -> MaskSource:
    """The source of a mask's functions; equal masks have equal text."""
    wanted = bounds(expr, Box.of_sizes(2**MOST_INDEX_BITS, 2**MOST_SCALAR_BITS), _hard(expr))
    hulls = sorted({node.attr[0] for node in wanted.nodes if node.op == "bound" and node.attr[0] not in INDICES})  # type: ignore
    deps = dependence(expr)
    leaves = {"row": [at for at in hulls if deps[at].q], "column": [at for at in hulls if deps[at].kv]}
    parts = [
        function("value", expr),
        _verdict("verdict", wanted, *_loaded(leaves)),
        _verdict("verdict_at_once", wanted, *_evaluated(expr, leaves)),
        *(_store_hulls(f"store_{side}_hulls", _INDEX[side], expr, leaves[side]) for side in leaves),
    ]
    return MaskSource("\n\n".join(parts), len(leaves["row"]), len(leaves["column"]))


def _part(expr: Expr, node: int) -> Expr:
    builder = Builder()
    return builder.build(builder.copy(expr, node))


def _store_hulls(name: str, index: str, expr: Expr, leaves: list[int]) -> str:
    """The function that stores the least and the greatest value of every leaf over the positions first to last."""
    head = f"@triton.jit\ndef {name}(b, h, first, last, place, step, scalars, tensors, BLOCK: tl.constexpr):\n"
    if not leaves:
        return head + "    return\n"
    lines = [f"least{i} = tl.full((), {2**62}, tl.int64)\n    most{i} = tl.full((), {-(2**62)}, tl.int64)" for i in range(len(leaves))]
    lines += ["at = first", "while at <= last:", f"    {index} = tl.minimum(at + tl.arange(0, BLOCK), last)"]
    for i, leaf in enumerate(leaves):
        part_lines = emit(_part(expr, leaf), prefix=f"x{i}_")
        lines += [f"    {line}" for line in [*part_lines.all(), f"y{i} = {part_lines.outputs[0]}.to(tl.int64)"]]
        lines += [f"    least{i} = tl.minimum(least{i}, tl.min(y{i}, 0))", f"    most{i} = tl.maximum(most{i}, tl.max(y{i}, 0))"]
    lines.append("    at += BLOCK")
    for i in range(len(leaves)):
        lines += [f"tl.store(place + {2 * i} * step, least{i})", f"tl.store(place + {2 * i + 1} * step, most{i})"]
    return head + "\n".join(f"    {line}" for line in lines) + "\n"


def _hard(expr: Expr) -> frozenset[int]:
    """The nodes without useful bounds that depend on one position only."""
    deps, is_hard = dependence(expr), list[bool]()
    for node, dep in zip(expr.nodes, deps, strict=True):
        kinds = {category(dtype) for dtype in (node.dtype, *(expr.nodes[a].dtype for a in node.args[-1:]))}
        by_number = len(node.args) == 2 and not (deps[node.args[1]].q or deps[node.args[1]].kv)
        is_easy = node.op in _EASY or (node.op == "floordiv" and by_number)
        if node.op == "mul":
            is_easy = any(expr.nodes[a].op == "const" for a in node.args)
        is_plain = node.op == "index" or not (dep.q or dep.kv)
        is_hard.append(not is_plain and ("float" in kinds or not is_easy or any(is_hard[a] for a in node.args)))
    return frozenset(at for at, dep in enumerate(deps) if is_hard[at] and dep.q != dep.kv)


def _loaded(leaves: dict[str, list[int]]) -> tuple[list[str], dict[Any, str]]:
    """The bounds of the leaves as ``store_row_hulls`` and ``store_column_hulls`` store them: lines, and variables by leaf and end."""
    lines = [
        f"{('lo', 'hi')[end]}{at} = tl.load({side}_hulls + {2 * number + end} * {side}_step)"
        for side, places in leaves.items()
        for number, at in enumerate(places)
        for end in (0, 1)
    ]
    return lines, {(at, end): f"{('lo', 'hi')[end]}{at}" for places in leaves.values() for at in places for end in (0, 1)}


def _evaluated(expr: Expr, leaves: dict[str, list[int]]) -> tuple[list[str], dict[Any, str]]:
    """The bounds of the leaves' values at all positions of every tile, [tiles, positions]: as ``_loaded``."""
    lines = []
    for side, places in leaves.items():
        index, name = _INDEX[side], _INDEX[side].removesuffix("_idx")
        if places:
            inside = f"{name}_first[:, None] + tl.arange(0, triton.next_power_of_2({_SIZE[side]}))[None, :]"
            lines.append(f"{index} = tl.minimum({inside}, {name}_last[:, None])")
        for at in places:
            part = emit(_part(expr, at), prefix=f"x{at}_")
            lines += [*part.all(), f"seen{at} = {part.outputs[0]}.to(tl.int64)"]
    return lines, {(at, end): f"tl.{('min', 'max')[end]}(seen{at}, 1)" for places in leaves.values() for at in places for end in (0, 1)}


def _verdict(name: str, wanted: Expr, lines: list[str], leaves: dict[Any, str]) -> str:
    """The function that returns the mask's bounds over a tile, from the variables of its leaves, which ``lines`` compute."""
    ends: dict[Any, str] = {
        (index, end): f"{index.removesuffix('_idx')}_{('first', 'last')[end]}" for index in _INDEX.values() for end in (0, 1)
    }
    found = emit(wanted, {**LEAVES, **ends, **leaves})
    head = (
        "@triton.jit\n"
        f"def {name}(\n    b, h, q_first, q_last, kv_first, kv_last, row_hulls, row_step, column_hulls, column_step,\n"
        "    scalars, tensors, TILE_M: tl.constexpr, TILE_N: tl.constexpr,\n):\n"
    )
    return head + "\n".join(f"    {line}" for line in [*lines, *found.all(), f"return {', '.join(found.outputs)}"]) + "\n"
