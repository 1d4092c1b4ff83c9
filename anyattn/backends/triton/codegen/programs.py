"""Programs: the mods of a call as Triton functions from which a kernel is generated, and the captured values that they read.

A *part* is one expression with its captured values. It becomes two functions, so that subexpressions of the row alone are computed once,
before the loop over keys: ``NAME_rows(b, h, q_idx, scalars, tensors)`` returns a tuple, which ``NAME_value`` takes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E
from anyattn.backends.triton.codegen.assumptions import has_pairs, style_of
from anyattn.backends.triton.codegen.captured_gradients import Load, scatter_source, terms_source
from anyattn.backends.triton.codegen.row_families import Family, families
from anyattn.mask_plan import MaskAbilities, MaskPart, MaskPlan, mask_plan
from anyattn.mods.analysis import captured_loads
from anyattn.mods.analysis.captured_loads import contends, moves_along_diagonals, tells_apart
from anyattn.mods.analysis.far_sides import Side, far_sides
from anyattn.mods.analysis.row_ranges import ALL_KEYS, RowRanges, never_fall
from anyattn.mods.analysis.separated import separated
from anyattn.mods.analysis.sure_keys import sure_range
from anyattn.mods.dropout import KEPT
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Box
from anyattn.mods.ir.grad import Gradients, score_gradients
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.problem import Problem
from anyattn.triton_tools.emit import LEAVES, PLAIN, Lines, Style, emit

__all__ = [
    "CallProgram",
    "CapturedValues",
    "Part",
    "Program",
    "by_entry",
    "captured_of",
    "gradient_part",
    "masks_of",
    "program_of",
    "slots_alone",
    "slots_copied",
    "staged",
    "summed_over_entries",
]

# A kernel keeps the limits of two ranges per row. For a KV cache's few rows with more ranges, evaluating the
# mask is cheaper than listing tiles.
_ABILITIES = MaskAbilities(most_ranges=2, joins=True, lists_caches=False, lists_in_order=False)
_ANY_NUMBERS = Box.of_sizes(2**MOST_INDEX_BITS, None)
_SCALED = {**LEAVES, "score_2": "score_2"}


class Part(NamedTuple):
    """name: of its functions. kind: "score", "mask", "ranges" (row limits that replace a mask), "words" (of dropout) or "gradient" (a score
    mod's value, its derivative, and for each of ``loads`` a derivative and indices). scalars: number of captured numbers. ranks: number of
    dimensions of each captured tensor. totals: number of dimensions of each gradient sum (one more with planes or copies). style: of its
    text. is_by_entry: for a loop over batch entries; see ``by_entry``. sure: of a mask, the limits of keys that it surely
    shows, with the mask's own captured values. sides: of a score mod, the parts that replace it far from the diagonal (``far_sides``), with
    the same captured values, its queries after their keys and before them. reach: of such a part, ``far_sides.Side.reach``; side: 1, 2.
    band: of a "gradient" part, the output that is the derivative by an entry of the tables that ``kernels.bands`` sums; their band and far
    sums are the last two totals."""

    name: str
    kind: str
    expr: Expr
    scalars: int
    ranks: tuple[int, ...]
    loads: tuple[Load, ...] = ()
    totals: tuple[int, ...] = ()
    style: Style = PLAIN
    is_by_entry: bool = False
    sure: Part | None = None
    sides: tuple[Part | None, Part | None] = (None, None)
    reach: Expr | None = None
    side: int = 0
    band: int | None = None


@dataclass(frozen=True)
class Program:
    """The parts that a kernel computes with.

    ranges: the keys that each row sees, in up to two ranges; set exactly if no lists select the tiles to visit.
    listed: the mask inside listed partial tiles, None if it hides nothing. always: a mask that every tile evaluates. dropout: the words
    of the weights that are kept (``mods.dropout.KEPT``); its second number is their factor.
    """

    score: Part | None
    ranges: Part | None
    listed: Part | None
    always: Part | None
    dropout: Part | None = None

    @property
    def parts(self) -> tuple[Part, ...]:
        return tuple(p for p in (self.score, self.ranges, self.listed, self.always, self.dropout) if p is not None)

    @property
    def range_count(self) -> int:
        """The number of key ranges per row; 0 if lists select the tiles to visit."""
        return 0 if self.ranges is None else len(self.ranges.expr.outputs) // 2

    @property
    def sees_all(self) -> bool:
        """Whether every row sees all keys, as far as ranges and lists decide it."""
        return self.ranges is not None and self.ranges.expr is ALL_KEYS.expr

    @property
    def is_rising(self) -> bool:
        """Whether the least and greatest limits of a tile are those of its first and last row."""
        return self.ranges is not None and never_fall(self.ranges.expr)

    @property
    def has_band(self) -> bool:
        """Whether a row sees a band of keys with both limits depending on the row: so few keys that a program's prologue and epilogue take
        a considerable part of its time."""
        if self.ranges is None:
            return False
        expr = self.ranges.expr
        moves = [dependence(expr)[output].q for output in expr.outputs]
        return any(lo and hi for lo, hi in zip(moves[::2], moves[1::2], strict=True))

    @property
    def source(self) -> str:
        return "\n\n".join(staged(part) for part in self.parts)


class CapturedValues(NamedTuple):
    """A part's captured values in a call. even: see ``Style``; only a first launch reads it."""

    scalars: tuple[int, ...]
    tensors: tuple[Tensor, ...]
    totals: tuple[Tensor, ...] = ()
    even: tuple[int, ...] = ()


@dataclass(frozen=True)
class CallProgram:
    """The program of a call. mods: for each part of the program the mod whose values it captures. lists: None, "given" for the call's own
    lists, or the mask for which lists are made."""

    program: Program
    mods: tuple[TracedMod | RowRanges, ...]
    lists: Any


def masks_of(problem: Problem) -> MaskPlan:
    """How each mask is applied (row ranges, lists, evaluation), without reading a tensor."""
    return mask_plan(problem, _ABILITIES)


def program_of(problem: Problem) -> CallProgram:
    """The parts that a kernel computes ``problem`` with; reads no tensor."""
    plan, score = masks_of(problem), problem.score
    named = [("ranges", part) for part in plan.ranged]
    named += [("listed", part) for part in (plan.of_blocks, *plan.listed) if part is not None]
    named += [("always", part) for part in plan.always]
    parts, mods = {name: _mask_part(name, part, problem) for name, part in named}, [part.ranges or part.mask for _, part in named]
    if problem.sequences is not None and problem.sequences.is_cache and "always" in parts:
        parts["always"] = parts["always"]._replace(sure=_sure_part(plan.always[0].mask, problem))
    if not plan.has_lists and not plan.ranged:  # every tile is visited
        parts, mods = {"ranges": _ranges_part("ranges", ALL_KEYS, problem), **parts}, [ALL_KEYS, *mods]
    of_score = None if score is None else _score_part(score, problem, parts.get("ranges"))
    if (dropout := problem.dropout) is not None:
        words = TracedMod.of_fields({**vars(dropout.keep), "expr": KEPT})
        parts["dropout"] = _part("dropout", words, problem)._replace(kind="words", scalars=2)
        mods.append(TracedMod.of_fields({**vars(dropout.keep), "scalars": dropout.captured[0]}))
    program = Program(of_score, *(parts.get(name) for name in ("ranges", "listed", "always", "dropout")))
    lists = "given" if plan.uses_blocks else plan.listed[0].mask if plan.listed else None
    return CallProgram(program, (*([] if score is None else [score]), *mods), lists)


def captured_of(call_program: CallProgram) -> tuple[CapturedValues, ...]:
    """The captured values of every part, in order."""
    parts = zip(call_program.program.parts, call_program.mods, strict=True)
    return tuple(CapturedValues(bits_of_numbers(m.scalars), tuple(t.detach() for t in m.tensors), even=p.style.even) for p, m in parts)


def _part(name: str, mod: TracedMod, problem: Problem) -> Part:
    return Part(name, mod.kind, mod.expr, len(mod.scalars), tuple([t.ndim for t in mod.tensors]), style=style_of(mod, mod.expr, problem))


def _ranges_part(name: str, ranges: RowRanges, problem: Problem) -> Part:
    style = style_of(ranges, ranges.expr, problem)
    style = PLAIN._replace(is_small=style.is_small)
    return Part(name, "ranges", ranges.expr, len(ranges.scalars), tuple(t.ndim for t in ranges.tensors), style=style)


def _mask_part(name: str, part: MaskPart, problem: Problem) -> Part:
    """A part of a program: row limits if the mask has few ranges, else its expression, rewritten to be cheap per pair."""
    if part.ranges is not None:
        return _ranges_part(name, part.ranges, problem)
    expr = separated(part.mask.expr, _ANY_NUMBERS)
    return _part(name, part.mask, problem)._replace(expr=expr, style=style_of(part.mask, expr, problem))


def _sure_part(mask: TracedMod, problem: Problem) -> Part | None:
    expr = sure_range(mask)
    return None if expr is None else _ranges_part("sure", RowRanges(expr, mask.scalars, mask.tensors), problem)


def _score_part(score: TracedMod, problem: Problem, ranges: Part | None) -> Part:
    part = _part("score", score, problem)
    if not _visits_runs(problem, ranges):
        return part
    return part._replace(sides=_sides_of(part, problem, lambda side, name: part._replace(name=name, expr=side)))


def _visits_runs(problem: Problem, ranges: Part | None) -> bool:
    """Whether a kernel visits one run of full tiles, in the order of their keys or rows, which far sides divide."""
    is_cache = problem.sequences is not None and problem.sequences.is_cache
    return ranges is not None and len(ranges.expr.outputs) == 2 and not is_cache and problem.skip is None


def _sides_of(part: Part, problem: Problem, side_part: Callable[[Expr, str], Part]) -> tuple[Part | None, Part | None]:
    """``Part.sides`` of the score mod's ``part``. side_part: makes a part of a side's expression and name.

    The assumptions of ``part`` about loads hold where a side replaces it, but values per row are loaded for rows without far keys too,
    for whom the place may be beyond the tensor."""
    score = problem.score
    assert score is not None
    if not part.style.is_small:
        return None, None

    def made(side: Side | None, name: str, number: int) -> Part | None:
        if side is None:
            return None
        found = side_part(side.expr, f"{part.name}_{name}")
        is_inside = part.style.is_inside and style_of(score, found.expr, problem).is_inside
        return found._replace(style=part.style._replace(by_thread=True, is_inside=is_inside), reach=side.reach, side=number)

    after, before = far_sides(score.expr)
    return made(after, "after", 1), made(before, "before", 2)


# ---- derivatives


def gradient_part(
    problem: Problem, wanted: tuple[int, ...], exact: tuple[int, ...] = (), has_sides: bool = False, in_band: int | None = None
) -> Part:
    """The score mod with its derivatives. wanted: the slots of captured tensors that get gradients; totals are in this order.
    exact: those of them whose total is a ``deterministic_sum``. has_sides: whether the part gets ``Part.sides``. in_band: one of the slots
    for ``Part.band``."""
    score = problem.score
    assert score is not None
    is_short = problem.q.dtype.itemsize == 2
    alone, copied = frozenset(slots_alone(problem, wanted)), frozenset(_slots_copied(score.expr, is_short))
    ranks, kinds = tuple([t.ndim for t in score.tensors]), _TotalKinds(alone, frozenset(exact), copied - alone - frozenset(exact))

    def made(expr: Expr, name: str) -> Part:
        return _gradient_part(expr, len(score.scalars), ranks, wanted, kinds, is_short, in_band)._replace(name=name)

    part = made(score.expr, "score")
    part = part._replace(style=style_of(score, part.expr, problem))
    return part._replace(sides=_sides_of(part, problem, made)) if has_sides else part


class _TotalKinds(NamedTuple):
    """The slots whose gradient is stored by single pairs, is a ``deterministic_sum`` and is a ``privatized_sum``."""

    alone: frozenset[int]
    exact: frozenset[int]
    copied: frozenset[int]


def by_entry(part: Part) -> Part:
    """``part`` for a kernel that loops over batch entries: ``NAME_rows(h, q_idx, kv_idx, scalars, tensors)`` has the subexpressions,
    those of pairs too, that depend neither on b nor on the score. Of a "gradient" part, ``NAME_terms`` (``terms_source``) gives the terms
    that the loop sums, one for all loads with the same derivative."""
    factors = [part.expr.outputs[load.factor] for load in part.loads]
    numbers = {factor: i for i, factor in enumerate(dict.fromkeys(factors))}
    loads = tuple([load._replace(term=numbers[factor]) for load, factor in zip(part.loads, factors, strict=True)])
    return part._replace(is_by_entry=True, loads=loads, sides=(None, None))


def summed_over_entries(score: TracedMod, wanted: tuple[int, ...], dtype: torch.dtype) -> int | None:
    """The number of sums over batch entries, each of a tile, from which the gradients of the ``wanted`` slots follow. None if they do not:
    the indices of a load depend on the batch entry or on the score, or a loop computes them (``Load.family``)."""
    return _summed_over_entries(score.expr, len(score.scalars), wanted, dtype.itemsize == 2)


@lru_cache(maxsize=1024)
def _summed_over_entries(expr: Expr, scalars: int, wanted: tuple[int, ...], is_short: bool) -> int | None:
    gradients = score_gradients(expr, is_exact=not is_short)
    loads = tuple([load for load in gradients.loads if load.slot in wanted])
    if families(Gradients(gradients.expr, loads), scalars)[0]:
        return None
    deps, outputs = dependence(gradients.expr), gradients.expr.outputs
    if any(deps[outputs[i]].b or deps[outputs[i]].score for load in loads for i in load.indices):
        return None
    return len({outputs[load.output] for load in loads})


def slots_copied(problem: Problem, others: Collection[int]) -> tuple[int, ...]:
    """The slots of captured tensors whose totals are a ``privatized_sum``, because many pairs of one tile may add to one entry.
    others: slots to leave out, whose totals are of another kind."""
    if problem.score is None:
        return ()
    return tuple(slot for slot in _slots_copied(problem.score.expr, problem.q.dtype.itemsize == 2) if slot not in others)


@lru_cache(maxsize=1024)
def _slots_copied(expr: Expr, is_short: bool) -> tuple[int, ...]:
    gradients = score_gradients(expr, is_exact=not is_short)
    deps, slots = dependence(gradients.expr), set()
    for load in gradients.loads:
        places = [gradients.expr.outputs[i] for i in load.indices]
        if contends(gradients.expr, places, deps, is_short and moves_along_diagonals(deps, places)):
            slots.add(load.slot)
    return tuple(sorted(slots))


def slots_alone(problem: Problem, wanted: tuple[int, ...]) -> tuple[int, ...]:
    """The ``wanted`` slots whose tensor is loaded once, each entry by a single (query, key) pair: the indices are b, h, q_idx and, last,
    kv_idx, and the tensor has room for all of them."""
    score = problem.score
    if score is None or not wanted or problem.sequences is not None:
        return ()
    extents = problem.batch, problem.heads_q, problem.q.shape[2], problem.k.shape[2]
    return captured_loads.slots_alone(score.expr, wanted, extents, tuple([t.shape for t in score.tensors]))


@lru_cache(maxsize=1024)
def _gradient_part(
    expr: Expr, scalars: int, ranks: tuple[int, ...], wanted: tuple[int, ...], kinds: _TotalKinds, is_short: bool, in_band: int | None
) -> Part:
    gradients = score_gradients(expr, is_exact=not is_short)
    builder, (alone, exact, copied) = Builder(), kinds
    outputs = [_in_base_2(builder, expr, is_short and not has_pairs(expr)), builder.copy(gradients.expr, gradients.expr.outputs[0])]
    deps = dependence(gradients.expr)
    loads = []
    rows, others = families(Gradients(gradients.expr, tuple(load for load in gradients.loads if load.slot in wanted)), scalars)
    for load in others:
        places = [gradients.expr.outputs[i] for i in load.indices]
        at = len(outputs)
        outputs += [builder.copy(gradients.expr, p) for p in (gradients.expr.outputs[load.output], *places)]
        indices = tuple(range(at + 1, len(outputs)))
        by_row, by_key = not any(deps[p].kv for p in places), not any(deps[p].q for p in places)
        diagonal = None
        if is_short and moves_along_diagonals(deps, places):
            of_places = Builder()
            diagonal = of_places.build(*(of_places.copy(gradients.expr, p) for p in places))
        flags = load.slot in alone, diagonal, load.slot in exact, load.slot in copied
        may_be_one = load.slot in copied and not (by_row or by_key or any(tells_apart(gradients.expr, p, deps) for p in places))
        loads.append(Load(wanted.index(load.slot), at, indices, by_row, by_key, *flags, may_be_one))
    for family in rows:
        if family.expr.uses_score:
            outputs.append(builder.add("score", dtype=expr.output.dtype))
        loads.append(_family_load(family, wanted.index(family.slot), len(outputs) - 1, family.slot in exact, family.slot in copied))
    totals = tuple(ranks[slot] + (slot in exact or slot in copied) for slot in wanted)
    band = None
    if in_band is not None:
        band, totals = len(outputs), (*totals, 4, 4)
        load = next(load for load in gradients.loads if load.slot == in_band)
        outputs.append(builder.copy(gradients.expr, gradients.expr.outputs[load.output]))
    return Part("score", "gradient", builder.build(*outputs), scalars, ranks, tuple(loads), totals, band=band)


def _family_load(family: Family, total: int, score: int, is_exact: bool, has_copies: bool) -> Load:
    deps = dependence(family.expr)
    places = family.expr.outputs[1:]
    by_row, by_key = not any(deps[p].kv for p in places), not any(deps[p].q for p in places)
    may_be_one = has_copies and not (by_row or by_key or any(tells_apart(family.expr, p, deps) for p in places))
    return Load(total, score, (), by_row, by_key, False, None, is_exact, has_copies, may_be_one, family)


def _in_base_2(builder: Builder, expr: Expr, may_push: bool) -> int:
    """The score mod's value times log2(e), in float32. may_push: the factor is moved into the terms of a sum and into loop invariants,
    where it is multiplied least often; this changes the rounding, and the scaled incoming score is then available. It is not moved into
    values loaded per pair: a multiplication on arrival would delay the next products."""
    deps = dependence(expr)
    factor = builder.const(LOG2E, torch.float32)

    def cost(at: int) -> int:
        dep = deps[at]
        return 2 if dep.score or (dep.q and dep.kv) else int(dep.q or dep.kv)

    def pushed(at: int) -> int:
        node = expr.nodes[at]
        if node.dtype is torch.float32 and cost(at) == 2 and may_push:
            if node.op in ("add", "sub", "neg"):
                return builder.add(node.op, *(pushed(a) for a in node.args), dtype=node.dtype)
            if node.op == "mul":
                one, other = sorted(node.args, key=cost)
                return builder.add("mul", pushed(one), builder.copy(expr, other), dtype=node.dtype)
            if node.op == "where":
                return builder.add("where", builder.copy(expr, node.args[0]), *(pushed(a) for a in node.args[1:]), dtype=node.dtype)
        return builder.add("mul", builder.cast(builder.copy(expr, at), torch.float32), factor, dtype=torch.float32)

    return pushed(expr.outputs[0])


# ---- source


@lru_cache(maxsize=4096)
def staged(part: Part) -> str:
    """The two functions of a part. For a "ranges" part ``NAME_rows`` returns its limits, clipped to 32 bits."""
    lines = emit(part.expr, _SCALED if part.kind == "gradient" else LEAVES, style=part.style, is_by_entry=part.is_by_entry)
    if part.kind == "ranges":
        return _ranges_source(part.name, lines, part.expr)
    free = [*lines.once, *lines.row]
    rest = [*lines.column, *lines.tile]
    text = "\n".join([*rest, *lines.outputs])
    defined = [line.split(" = ", 1)[0] for line in free]
    kept = [name for name in defined if _reads(text, name)]
    scores = {"mask": "", "words": "x, byte, ", "gradient": "score, score_2, "}.get(part.kind, "score, ")
    arguments = f"{scores}b, h, kv_idx, rows"
    result = f"({', '.join(lines.outputs)},)" if part.kind == "gradient" else lines.outputs[0]
    if part.kind == "words":
        result = f"device_math.{'kept_nvidia' if part.style.is_nvidia else 'kept'}(x, {result}, byte)"
    head = _function(
        f"{part.name}_rows", "h, q_idx, kv_idx" if part.is_by_entry else "b, h, q_idx", [*free, f"return ({', '.join(['q_idx', *kept])},)"]
    )
    body = [*(f"{name} = rows[{i + 1}]" for i, name in enumerate(kept)), *rest, f"return {result}"]
    functions = [head, _function(f"{part.name}_value", arguments, body)]
    if part.loads:
        functions += [terms_source(part.name, part.loads)] if part.is_by_entry else []
        functions.append(scatter_source(part.name, part.loads, part.style))
    if part.band is not None:
        functions.append(f"@triton.jit\ndef {part.name}_band(ds, found):\n    return ds * found[{part.band}].to(tl.float32)\n")
    if part.reach is not None:
        reach = emit(part.reach, style=part.style)
        steps = [*reach.all(), f"return device_math.limit({reach.outputs[0]})"]
        functions.append(f"@triton.jit\ndef {part.name}_reach(scalars):\n" + "\n".join(f"    {line}" for line in steps) + "\n")
    functions += [staged(other) for other in (part.sure, *part.sides) if other is not None]
    return "\n\n".join(functions)


def _ranges_source(name: str, lines: Lines, expr: Expr) -> str:
    limits = [output if is_near else f"device_math.limit({output})" for output, is_near in zip(lines.outputs, lines.near, strict=True)]
    inside = " | ".join(
        f"(kv_idx < rows[{i + 1}])" if _is_start(expr, i) else f"device_math.between(kv_idx, rows[{i}], rows[{i + 1}])"
        for i in range(0, len(limits), 2)
    )
    head = _function(f"{name}_rows", "b, h, q_idx", [*lines.all(), f"return ({', '.join(limits)},)"])
    return head + "\n\n" + _function(f"{name}_value", "b, h, kv_idx, rows", [f"return {inside}"])


def _is_start(expr: Expr, output: int) -> bool:
    """Whether a lower limit is always 0, so that no key is below it."""
    node = expr.nodes[expr.outputs[output]]
    return node.op == "const" and node.attr == 0


def _function(name: str, arguments: str, body: list[str]) -> str:
    return f"@triton.jit\ndef {name}({arguments}, scalars, tensors):\n" + "\n".join(f"    {line}" for line in body) + "\n"


def _reads(text: str, name: str) -> bool:
    return re.search(rf"\b{name}\b", text) is not None
