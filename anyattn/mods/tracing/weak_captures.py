"""Captured numbers for which a traced program's arithmetic differs from Python's; a new trace makes them constants.

In the user's function, arithmetic among captured numbers is Python's: unbounded, with Python's exceptions. A traced mod computes it in 64
bits, as torch does. If a call's numbers leave that range, or Python raises (a division by zero) or has no real result, the function is
traced again with them as Python numbers: then it raises the user's exception, or its results meet tensors as in torch. The same holds for
numbers so near the ends of 64 bits that sums with positions wrap around, which the analyses assume not to happen, and for numbers that do
not fit a dtype to which torch converts them with a check.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from anyattn.mods.ir.dependence import FAR_NUMBER, relies_on_near_numbers
from anyattn.mods.ir.expr import OPS, Expr, Node, category, is_weak, overflows
from anyattn.mods.tracing.diagnostics import note_raised

__all__ = [
    "HAS_FAR_BOUNDS",
    "NEAR_NUMBER",
    "NeedsNumber",
    "ask_for_truths",
    "bits_of_numbers",
    "negative_zeros",
    "numbers_of_bits",
    "overflowing_slots",
    "scalar_slots",
    "slots_in_question",
    "unfit",
    "weak_arithmetic",
]

NEAR_NUMBER = 2**29  # sums of a few captured integers below it, and of positions, fit in 32 bits
HAS_FAR_BOUNDS = torch.__version__ >= "2.15"  # torch.clamp takes bounds outside of an integer dtype
_MOST_SHIFT = 64  # larger shifts are not evaluated: the result has n more bits
_RAISING = ("div", "floordiv", "mod", "pow")  # operations that raise in Python for some floats


class NeedsNumber(Exception):
    """The mod's body needs these captured numbers as Python numbers (``range(n)``): trace again with them as constants."""

    def __init__(self, slots: frozenset[int]):
        self.slots = slots
        note_raised(self)


def ask_for_truths(nodes: Sequence[Node], op: str, *args: int) -> None:
    """Requests the captured numbers of comparisons that are used in arithmetic: in Python True + True is 2, in torch it is True."""
    truths = [a for a in args if nodes[a].dtype is torch.bool]
    if not truths or OPS[op].result == "bool" or (op in ("and", "or", "xor") and len(truths) == len(args)):
        return
    slots = [scalar_slots(nodes, a) for a in args]
    if None not in slots and any(slots):
        raise NeedsNumber(frozenset().union(*slots))  # type: ignore[arg-type]


def weak_arithmetic(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The positions of nodes that are computed from captured numbers alone and may differ from Python's result."""
    return tuple(
        i
        for i, node in enumerate(nodes)
        if (node.dtype is int and node.op not in ("const", "scalar")) or (node.dtype is float and node.op in _RAISING) or _is_checked(node)
    )


def _is_checked(node: Node) -> bool:
    """Whether torch raises for a number that does not fit the node's dtype: ``arguments.fitting``."""
    return node.op == "cast" and node.attr is not None and category(node.dtype) == "int"


def _misses(node: Node, number: Any) -> bool:
    """Whether torch refuses a number that it converts to the node's dtype, or takes a far bound of clamp for none."""
    wraps = number < 0 and node.attr == "clamp" and HAS_FAR_BOUNDS and torch.iinfo(node.dtype).min == 0  # type: ignore[arg-type]
    return wraps or overflows(number, node.dtype)  # type: ignore[arg-type]


def unfit(expr: Expr, numbers: Sequence[int | float]) -> tuple[str, int, Any] | None:
    """(torch's function, the number, the dtype that does not hold it) of the first such use of captured numbers."""
    values = _weak_values(expr, numbers)
    uses = ((n, values[n.args[0]]) for n in expr.nodes if _is_checked(n))
    return next(((str(n.attr), value, n.dtype) for n, value in uses if value is not None and _misses(n, value)), None)  # type: ignore


def overflowing_slots(expr: Expr, numbers: Sequence[int | float]) -> frozenset[int]:
    """The slots of captured numbers for which ``expr`` differs from the user's function. numbers: by slot.

    >>> from anyattn.mods.tracing.trace import trace
    >>> expr = trace(lambda b, h, q, k, n=3: q * (n * n) >= k, "mask").expr
    >>> [sorted(overflowing_slots(expr, (n,))) for n in (7, 2**32)]
    [[], [0]]
    """
    if not slots_in_question(expr):
        return frozenset()
    found: frozenset[int] = frozenset()
    if relies_on_near_numbers(expr):
        found = frozenset(s for s in _whole_slots(expr) if not -FAR_NUMBER < numbers[s] < FAR_NUMBER)
    values = _weak_values(expr, numbers)
    for at in weak_arithmetic(expr.nodes):
        node = expr.nodes[at]
        value = values[node.args[0] if _is_checked(node) else at]
        if value is None or (_is_checked(node) and _misses(node, value)):
            found |= _slots_below(expr, at)
    return found


def _weak_values(expr: Expr, numbers: Sequence[int | float]) -> dict[int, int | float | None]:
    """Python's results of the nodes that are computed from captured numbers alone, as far as ``weak_arithmetic`` needs them."""
    values: dict[int, int | float | None] = {}
    for at, node in enumerate(expr.nodes[: max(weak_arithmetic(expr.nodes), default=-1) + 1]):
        if is_weak(node.dtype):
            values[at] = _computed(node, [values.get(a) for a in node.args], numbers)
    return values


@lru_cache(maxsize=4096)
def slots_in_question(expr: Expr) -> frozenset[int]:
    """The slots of the numbers whose values decide ``overflowing_slots``."""
    found = _whole_slots(expr) if relies_on_near_numbers(expr) else frozenset()
    return found.union(*(_slots_below(expr, at) for at in weak_arithmetic(expr.nodes)))


def _whole_slots(expr: Expr) -> frozenset[int]:
    return frozenset(int(node.attr) for node in expr.nodes if node.op == "scalar" and node.dtype is int)  # type: ignore[call-overload]


def _computed(node: Node, args: list[Any], numbers: Sequence[int | float]) -> int | float | None:
    """Python's result of a node; None for an exception, for a result of another type, and for an int beyond 64 bits."""
    if node.op in ("const", "scalar"):
        return numbers[node.attr] if node.op == "scalar" else node.attr  # type: ignore[call-overload, return-value]
    if None in args or (node.op == "shl" and args[1] > _MOST_SHIFT):
        return None
    try:
        value = node.dtype(args[0]) if node.op == "cast" else OPS[node.op].on_host(*args)  # type: ignore[misc, operator]
    except (ArithmeticError, ValueError, TypeError):
        return None
    return value if isinstance(value, node.dtype) and (node.dtype is float or -(2**63) <= value < 2**63) else None  # type: ignore


def _slots_below(expr: Expr, at: int) -> frozenset[int]:
    """The slots of the captured numbers that a node is computed from."""
    slots, stack = set(), [at]
    while stack:
        node = expr.nodes[stack.pop()]
        if node.op == "scalar":
            slots.add(int(node.attr))  # type: ignore[call-overload]
        stack.extend(node.args)
    return frozenset(slots)


def scalar_slots(nodes: Sequence[Node], at: int) -> frozenset[int] | None:
    """The slots of the captured numbers that the node ``at`` is computed from; None if it depends on anything else."""
    slots, stack = set(), [at]
    while stack:
        node = nodes[stack.pop()]
        if node.op in ("index", "score", "load"):
            return None
        if node.op == "scalar":
            slots.add(int(node.attr))  # type: ignore[call-overload]
        stack.extend(node.args)
    return frozenset(slots)


def negative_zeros(numbers: Sequence[Any]) -> tuple[int, ...]:
    """The places of -0.0, which equals 0.0 and is another divisor: no memo may take one for the other.

    >>> negative_zeros((1, -0.0, 0.0, 0))
    (1,)
    """
    if 0.0 not in numbers:
        return ()
    return tuple([i for i, n in enumerate(numbers) if type(n) is float and n == 0.0 and math.copysign(1.0, n) < 0.0])


# ---- captured numbers as bits


def bits_of_numbers(numbers: Sequence[int | float]) -> tuple[int, ...]:
    """Captured numbers as 64-bit integers, floats by their bits, so that nothing is rounded.

    >>> numbers_of_bits(bits_of_numbers((2**53 + 1, 0.1)), (int, float))
    (9007199254740993, 0.1)
    """
    # an int may also be a compiler's symbolic int
    return tuple(struct.unpack("<q", struct.pack("<d", n))[0] if isinstance(n, float) else n for n in numbers)


def numbers_of_bits(bits: Sequence[int], kinds: Sequence[type]) -> tuple[int | float, ...]:
    """The inverse of ``bits_of_numbers``."""
    return tuple(x if kind is int else struct.unpack("<d", struct.pack("<q", x))[0] for x, kind in zip(bits, kinds, strict=True))
