"""Score analysis: how often each node of a mod's expression is computed in a fragment, for the CuTe emitter and the choice of tiles."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from anyattn.mods.analysis.additive_bias import additive_bias
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.piecewise import Piece, pieces
from anyattn.mods.analysis.row_ranges import mask_of
from anyattn.mods.analysis.sharp import sharp
from anyattn.mods.analysis.tile_lines import LEVELS, asks_each, bits, least_divisor, split
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, Node, category
from anyattn.mods.ir.extents import Box, bits_of, exact, extents, fits, unwrapped
from anyattn.mods.tracing.weak_captures import NEAR_NUMBER

__all__ = [
    "MOST_NUMBER",
    "MOST_POSITIONS",
    "NEAR_BOX",
    "Factored",
    "bias",
    "bound",
    "caps",
    "cases",
    "divides_many",
    "factored",
    "is_even",
    "is_foreseen",
    "is_modular",
    "is_near",
    "is_special",
    "is_tanh",
    "is_wide",
    "is_words",
    "lines",
    "pair_part",
    "parts_if_wide",
    "parts_of",
    "reads",
    "reads_apart",
    "reads_straight",
    "shared",
    "stages",
    "straight",
    "work_by_pair",
    "wraps",
]  # fmt: skip

MOST_POSITIONS = 2**24  # exclusive bound of sequence lengths, batch sizes and heads
MOST_NUMBER = NEAR_NUMBER  # exclusive bound of captured integers
NEAR_BOX = Box.of_sizes(MOST_POSITIONS, MOST_NUMBER)._replace(by_zero=False)  # inputs that the kernel accepts
_MOST_STEP = 2**16  # largest slope of a straight integer: its change within a tile then fits 32 bits
_EXACT_BITS = 24  # integers of so many bits are exact in float32


_SPECIAL = frozenset(
    (
        "exp", "exp2", "log", "log2", "sqrt", "rsqrt", "sin", "cos", "tanh", "sigmoid", "reciprocal", "pow", "fmod", "tan", "atan", "atan2",
        "sinh", "cosh", "erfinv", "hypot",
    )
)  # fmt: skip


@lru_cache(maxsize=256)
def stages(expr: Expr) -> tuple[str, ...]:
    """For each node "once", "row", "col" or "tile": the positions that it depends on."""
    return tuple("tile" if d.score or (d.q and d.kv) else "row" if d.q else "col" if d.kv else "once" for d in dependence(expr))


@lru_cache(maxsize=256)
def is_wide(expr: Expr) -> tuple[bool, ...]:
    """For each node whether it is an integer that is computed in 64 bits, as in torch: it may exceed 32, and some reader needs more than
    the lower 32. The others are computed in 32.

    >>> from anyattn.mods.tracing.trace import trace
    >>> hashed = trace(lambda b, h, q, k: (q * 1103515245 + k * 12345).to(torch.int32) % 7 < 3, "mask")
    >>> any(is_wide(hashed.expr)), any(is_wide(trace(lambda b, h, q, k: (q * 1103515245) % 7 < 3, "mask").expr))
    (False, True)
    """
    is_long = [category(n.dtype) == "int" and not fits(e) for n, e in zip(expr.nodes, extents(expr, NEAR_BOX), strict=True)]
    is_whole = [False] * len(expr.nodes)  # whether a reader needs more than the lower 32 bits
    for i in expr.outputs:
        is_whole[i] = True
    for i, node in reversed(list(enumerate(expr.nodes))):
        if not (_reads_lower(node) or (is_modular(node) and not (is_long[i] and is_whole[i]))):
            for a in node.args:
                is_whole[a] = True
    return tuple(a and b for a, b in zip(is_long, is_whole, strict=True))


def is_modular(node: Node) -> bool:
    """Whether the lower bits of an integer node follow from the same bits of its arguments."""
    return node.op in ("add", "sub", "mul", "neg", "not", "and", "or", "xor") and category(node.dtype) == "int"


def _reads_lower(node: Node) -> bool:
    """Whether the node is a cast to an integer of at most 32 bits."""
    return node.op == "cast" and category(node.dtype) == "int" and node.dtype is not int and torch.iinfo(node.dtype).bits <= 32  # type: ignore[arg-type]


@lru_cache(maxsize=256)
def is_near(expr: Expr) -> tuple[bool, ...]:
    """For each node whether it is an integer of no more than 30 bits."""
    return tuple(e is not None and bits_of(e) <= 30 for e in extents(expr, NEAR_BOX))


@lru_cache(maxsize=256)
def divides_many(expr: Expr) -> tuple[bool, ...]:
    """For each node whether it divides integers of 31 bits, one for each row, key or pair, by a number that is the same for all. The
    divisor has 31 bits too, or the node is a quotient: that by a greater number is that by 2^30 + 1."""
    due, sizes = stages(expr), extents(expr, NEAR_BOX)
    return tuple(
        node.op in ("floordiv", "mod")
        and category(node.dtype) == "int"
        and due[i] != "once" == due[node.args[1]]
        and fits(sizes[node.args[0]], 31)
        and (node.op == "floordiv" or fits(sizes[node.args[1]], 31))
        for i, node in enumerate(expr.nodes)
    )


@lru_cache(maxsize=256)
def wraps(expr: Expr) -> tuple[bool, ...]:
    """For each node whether it may exceed the range of its dtype and wrap around."""
    return tuple(category(n.dtype) == "int" and not is_exact for n, is_exact in zip(expr.nodes, exact(expr, NEAR_BOX), strict=True))


@lru_cache(maxsize=256)
def straight(expr: Expr) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(float casts, loads along a last dimension) whose argument or index is an integer that is linear along the keys."""
    due, deps, plain, sizes = stages(expr), dependence(expr), unwrapped(expr, NEAR_BOX), extents(expr, NEAR_BOX)
    casts, reads = [], []
    for i, node in enumerate(expr.nodes):
        if due[i] != "tile" or not node.args:
            continue
        last = node.args[-1]
        slope, size = deps[last].slope, sizes[last]
        if due[last] != "tile" or slope is None or category(expr.nodes[last].dtype) != "int" or abs(slope[1]) > _MOST_STEP:
            continue
        if node.op == "cast" and category(node.dtype) == "float":
            if plain[last] and not (i in sharp(expr) and (size is None or bits_of(size) > _EXACT_BITS)):
                casts.append(i)
        elif node.op == "load" and all(due[a] in ("once", "row") for a in node.args[:-1]):
            reads.append(i)
    return tuple(casts), tuple(reads)


def reads_apart(expr: Expr) -> bool:
    """Whether every score loads from some tensor at an index of its own that does not run along the last dimension."""
    along = straight(expr)[1]
    if any(n.op == "tensor" for n in expr.nodes):  # a CuTe function may read it at any index
        return True
    return any(n.op == "load" and due == "tile" and i not in along for i, (n, due) in enumerate(zip(expr.nodes, stages(expr), strict=True)))


def is_special(expr: Expr) -> bool:
    """Whether every score takes a special-function operation besides its exponential."""
    return any(n.op in _SPECIAL and category(n.dtype) == "float" and due == "tile" for n, due in zip(expr.nodes, stages(expr), strict=True))


def reads_straight(expr: Expr) -> bool:
    """Whether every score loads from some tensor along its last dimension."""
    return bool(straight(expr)[1])


class Factored(NamedTuple):
    """A score mod as ``after * core(before * score)``; a factor None stands for 1. Factors are constant and cost nothing per score.

    positive: captured numbers that must be above 0, so that the largest ``core`` belongs to the largest score.
    """

    core: Expr
    before: Expr | None
    after: Expr | None
    positive: tuple[int, ...]


@lru_cache(maxsize=256)
def factored(expr: Expr) -> Factored:
    """Splits constant factors off both ends of a score mod.

    >>> from anyattn.mods.tracing.trace import trace
    >>> found = factored(trace(lambda s, b, h, q, k: 30 * torch.tanh(s / 30), "score").expr)
    >>> [n.op for n in found.core.nodes], found.positive
    (['score', 'tanh'], ())
    """
    nodes, due = expr.nodes, stages(expr)
    score = next((i for i, n in enumerate(nodes) if n.op == "score"), None)
    if score is None:
        return Factored(expr, None, None, ())
    users = [[i for i, n in enumerate(nodes) if at in n.args] for at in range(len(nodes))]
    first, last, before, after, positive = score, expr.outputs[0], [], [], []
    while len(users[first]) == 1 and first != last and (factor := _factor(nodes, users[first][0], first, due)) is not None:
        before.append((nodes[users[first][0]].op, factor))
        first = users[first][0]
    while last != first and (found := _trailing(nodes, last, due)) is not None:
        inner, factor, slot = found
        after.append((nodes[last].op, factor))
        positive += [slot] if slot is not None else []
        last = inner
    builder = Builder()
    leaf = builder.add("score", dtype=nodes[score].dtype)
    core = builder.build(builder.copy(expr, last, {first: leaf}))
    return Factored(core, _product(expr, before), _product(expr, after), tuple(positive))


def caps(expr: Expr) -> bool:
    """Whether a score mod ends with a function that is bounded by 1, times constant factors."""
    return factored(expr).core.output.op in ("tanh", "sigmoid", "erf", "sin", "cos")


def is_tanh(expr: Expr) -> bool:
    """Whether an expression is the score's tanh and nothing else."""
    return [node.op for node in expr.nodes] == ["score", "tanh"]


@lru_cache(maxsize=256)
def bound(expr: Expr, scalars: tuple[int | float, ...]) -> float | None:
    """The bound of a score's magnitude after a score mod that caps it: ``after``, since ``core`` is bounded by 1.

    >>> from anyattn.mods.tracing.trace import trace
    >>> mod = trace(lambda s, b, h, q, k: 30 * torch.tanh(s / 30), "score")
    >>> bound(mod.expr, mod.scalars)
    30.0
    """
    after = factored(expr).after
    return None if not caps(expr) else 1.0 if after is None else abs(float(run(after, {}, scalars, ())[0]))


def _factor(nodes: tuple[Node, ...], at: int, of: int, due: tuple[str, ...]) -> int | None:
    """The other operand of node ``at`` if it multiplies or divides ``of`` by a constant."""
    node = nodes[at]
    if node.op not in ("mul", "div") or node.args[0] == node.args[1] or (node.op == "div" and node.args[0] != of):
        return None
    other = node.args[1] if node.args[0] == of else node.args[0]
    return other if due[other] == "once" and category(nodes[other].dtype) == "float" else None


def _trailing(nodes: tuple[Node, ...], at: int, due: tuple[str, ...]) -> tuple[int, int, int | None] | None:
    """For ``at = x * c`` with a constant c > 0 or a captured c: (x, c, index of c among the captured numbers or None); else None."""
    for of in nodes[at].args:
        factor = _factor(nodes, at, of, due)
        if factor is not None:
            source = nodes[factor]
            while source.op == "cast":
                source = nodes[source.args[0]]
            if source.op == "scalar":
                return of, factor, int(source.attr)  # type: ignore[call-overload]
            if source.op == "const" and float(source.attr) > 0:  # type: ignore[arg-type]
                return of, factor, None
    return None


def _product(expr: Expr, factors: list[tuple[str, int]]) -> Expr | None:
    if not factors:
        return None
    builder = Builder()
    total = builder.const(1.0, torch.float32)
    for op, factor in factors:
        copied = builder.cast(builder.copy(expr, factor), torch.float32)
        total = builder.add(op, total, copied)
    return builder.build(total)


@lru_cache(maxsize=256)
def lines(expr: Expr) -> tuple[int, ...]:
    """Float nodes that are linear along the keys: straight casts, and sums and products of them with values of the row, unless they are
    sharp and must round as the user wrote them."""
    due, found = stages(expr), set(straight(expr)[0])
    for i, node in enumerate(expr.nodes):
        if i in sharp(expr):
            continue
        on_line = [a for a in node.args if a in found]
        others = [a for a in node.args if a not in found]
        if not on_line or category(node.dtype) != "float" or any(due[a] not in ("once", "row") for a in others):
            continue
        keeps = node.op in ("neg", "add", "sub") or (node.op == "mul" and len(on_line) == 1)
        if keeps or (node.op == "div" and others and node.args[0] in on_line):
            found.add(i)
    return tuple(sorted(found))


def bias(expr: Expr) -> Expr | None:
    """The term that a score mod adds to the score, if it does nothing else; None otherwise.

    The kernel adds it in units of the raw products, at most one multiply-add per score: the part that is constant along a row only shifts
    its maximum, and is added once per row.
    """
    found = additive_bias(expr)
    return found if found is not None and category(found.output.dtype) == "float" else None


@lru_cache(maxsize=256)
def is_even(expr: Expr) -> bool:
    """Whether a bias is constant along a row or linear along it (ALiBi)."""
    return expr.outputs[0] in lines(expr) or stages(expr)[expr.outputs[0]] in ("once", "row")


@lru_cache(maxsize=256)
def cases(expr: Expr) -> tuple[Piece, ...]:
    """The pieces of an expression that take less work per score than the whole, with conditions under which their loads may use literal
    offsets: no index is negative. A piece without conditions holds everywhere; if none holds, the expression itself is used.
    """
    found, work = [], _work(expr)
    for piece in pieces(expr):
        indices = [_alone(piece.expr, piece.expr.nodes[i].args[-1]) for i in straight(piece.expr)[1]]
        made = Piece(piece.expr, tuple(dict.fromkeys((*piece.conditions, *indices))))
        if not made.conditions or (not reads_apart(piece.expr) and (indices or _work(piece.expr) < work)):
            found.append(made)
    return tuple(found)


@lru_cache(maxsize=256)
def is_foreseen(expr: Expr) -> bool:
    """Whether a score mod adds a bias that is loaded along diagonals in all its cases, so that a thread can keep all of its values."""
    added = bias(expr)
    if added is None:
        return False
    each = [e for e in (added, *(case.expr for case in cases(added))) if not is_even(e)]
    return all(case.conditions for case in cases(added)) and any(map(reads, each)) and all(e.outputs[0] in shared(e) for e in each)


def reads(expr: Expr) -> bool:
    """Whether some tensor is loaded for every score."""
    return any(n.op == "load" and due == "tile" for n, due in zip(expr.nodes, stages(expr), strict=True))


@lru_cache(maxsize=256)
def work_by_pair(expr: Expr) -> int:
    """Operations that are unrolled for every (row, key) pair of a thread; its two rows share those of a column."""
    due = stages(expr)
    return due.count("tile") + due.count("col") // 2


def parts_of(expr: Expr, is_by_row: bool, along: str, extent: int) -> tuple[tuple[Expr, ...], Expr | None]:
    """(parts of a predicate that are words of bits along an index of a tile of ``extent`` positions (``tile_lines``), the part that must be
    evaluated per pair or None); all must hold. is_by_row: ``expr`` gives row ranges, of which either all are words or none."""
    if not is_by_row:
        return split(expr, along, extent, NEAR_BOX)
    mask = mask_of(expr)
    return ((mask,), None) if bits(mask, along, extent, NEAR_BOX) is not None else ((), mask)


def is_words(expr: Expr, is_by_row: bool, along: str, extent: int) -> bool:
    """Whether a whole predicate is words of bits that comparisons with limits fill: it takes hardly any registers."""
    known, rest = parts_of(expr, is_by_row, along, extent)
    trees = [bits(part, along, extent, NEAR_BOX) for part in known]
    return rest is None and not any(tree is None or asks_each(tree) for tree in trees)


def parts_if_wide(expr: Expr, along: str, extent: int, level: int) -> tuple[tuple[Expr, ...], Expr | None]:
    """``parts_of`` a mask if captured divisors are at least ``least_divisor`` of the extent and level."""
    return split(expr, along, extent, NEAR_BOX, least_divisor(extent, level))


def pair_part(expr: Expr, along: str, extent: int) -> Expr | None:
    """The part of a mask that is evaluated per pair unless captured divisors are tiny; None if all of it is words of bits."""
    rest = parts_of(expr, False, along, extent)[1]
    return None if rest is None else parts_if_wide(rest, along, extent, LEVELS[-1])[1]


def _alone(expr: Expr, node: int) -> Expr:
    builder = Builder()
    return builder.build(builder.copy(expr, node))


def _work(expr: Expr) -> int:
    """Operations per score, without integers and floats that are only linear along the keys."""
    even, deps = lines(expr), dependence(expr)
    return sum(due == "tile" and i not in even and deps[i].slope is None for i, due in enumerate(stages(expr)))


@lru_cache(maxsize=256)
def shared(expr: Expr) -> tuple[int, ...]:
    """Nodes that are constant along a diagonal and cost more than an addition: a thread's second row reuses most of its first row's."""
    deps, even = dependence(expr), lines(expr)
    return tuple(
        i
        for i, (node, due) in enumerate(zip(expr.nodes, stages(expr), strict=True))
        if due == "tile" and deps[i].diagonal and deps[i].slope is None and i not in even and category(node.dtype) != "bool"
    )
