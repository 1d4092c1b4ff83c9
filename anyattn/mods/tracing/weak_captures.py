"""Captured numbers for which a traced program's arithmetic is not Python's, and which become constants of another trace.

Arithmetic among captured numbers is Python's in the user's function: unbounded, with errors of its own. A traced mod computes it in 64
bits, as torch does; where a call's numbers leave that range, or Python raises an exception (a division by zero) or finds no real number,
the function is traced again with them as Python numbers: it raises the user's exception, or the results meet tensors as in torch. So is a
function whose numbers are so close to the ends of 64 bits that sums with positions wrap around, which the analyses assume they do not.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch

from anyattn.mods.ir.dependence import FAR_NUMBER, relies_on_near_numbers
from anyattn.mods.ir.expr import OPS, Expr, Node, is_weak
from anyattn.mods.tracing.diagnostics import note_raised

__all__ = [
    "NEAR_NUMBER",
    "NeedsNumber",
    "ask_for_truths",
    "bits_of_numbers",
    "numbers_of_bits",
    "scalar_slots",
    "slots_in_question",
    "strayed",
    "weak_arithmetic",
]

NEAR_NUMBER = 2**29  # captured whole numbers below it leave room in 32 bits for a sum of few, and for positions
_MOST_SHIFT = 64  # 1 << n is as long as n says
_RAISING = ("div", "floordiv", "mod", "pow")  # what Python refuses to do with some floats


class NeedsNumber(Exception):
    """The mod's body needs these captured numbers as Python numbers (``range(n)``): trace again with them as constants."""

    def __init__(self, slots: frozenset[int]):
        self.slots = slots
        note_raised(self)


def ask_for_truths(nodes: Sequence[Node], op: str, *args: int) -> None:
    """Requests the captured numbers of comparisons with which Python counts: True + True is 2, the sum of two bool tensors True."""
    truths = [a for a in args if nodes[a].dtype is torch.bool]
    if not truths or OPS[op].result == "bool" or (op in ("and", "or", "xor") and len(truths) == len(args)):
        return
    slots = [scalar_slots(nodes, a) for a in args]
    if None not in slots and any(slots):
        raise NeedsNumber(frozenset().union(*slots))  # type: ignore[arg-type]


def weak_arithmetic(nodes: Sequence[Node]) -> tuple[int, ...]:
    """The positions of what is computed from captured numbers alone and may not be what Python computes."""
    return tuple(
        i
        for i, node in enumerate(nodes)
        if (node.dtype is int and node.op not in ("const", "scalar")) or (node.dtype is float and node.op in _RAISING)
    )


def strayed(expr: Expr, numbers: Sequence[int | float]) -> frozenset[int]:
    """The slots of captured numbers with which ``expr`` is not what the user wrote; ``numbers`` by slot.

    >>> from anyattn.mods.tracing.trace import trace
    >>> expr = trace(lambda b, h, q, k, n=3: q * (n * n) >= k, "mask").expr
    >>> [sorted(strayed(expr, (n,))) for n in (7, 2**32)]
    [[], [0]]
    """
    if not slots_in_question(expr):
        return frozenset()
    found: frozenset[int] = frozenset()
    if relies_on_near_numbers(expr):
        found = frozenset(s for s in _whole_slots(expr) if not -FAR_NUMBER < numbers[s] < FAR_NUMBER)
    values: dict[int, int | float | None] = {}
    in_question = weak_arithmetic(expr.nodes)
    for at, node in enumerate(expr.nodes[: in_question[-1] + 1] if in_question else ()):
        if is_weak(node.dtype):
            values[at] = _computed(node, [values.get(a) for a in node.args], numbers)
            if values[at] is None and at in in_question:
                found |= _slots_below(expr, at)
    return found


@lru_cache(maxsize=4096)
def slots_in_question(expr: Expr) -> frozenset[int]:
    """The slots of the numbers on whose values ``strayed`` depends."""
    found = _whole_slots(expr) if relies_on_near_numbers(expr) else frozenset()
    return found.union(*(_slots_below(expr, at) for at in weak_arithmetic(expr.nodes)))


def _whole_slots(expr: Expr) -> frozenset[int]:
    return frozenset(int(node.attr) for node in expr.nodes if node.op == "scalar" and node.dtype is int)  # type: ignore[call-overload]


def _computed(node: Node, args: list[Any], numbers: Sequence[int | float]) -> int | float | None:
    """What Python computes, None where that is an exception, or no number of the node's kind and of 64 bits."""
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
    """The captured numbers that a node is computed from."""
    slots, stack = set(), [at]
    while stack:
        node = expr.nodes[stack.pop()]
        if node.op == "scalar":
            slots.add(int(node.attr))  # type: ignore[call-overload]
        stack.extend(node.args)
    return frozenset(slots)


def scalar_slots(nodes: Sequence[Node], at: int) -> frozenset[int] | None:
    """The slots of the captured numbers that the node ``at`` is computed from, None if it depends on anything else."""
    slots, stack = set(), [at]
    while stack:
        node = nodes[stack.pop()]
        if node.op in ("index", "score", "load"):
            return None
        if node.op == "scalar":
            slots.add(int(node.attr))  # type: ignore[call-overload]
        stack.extend(node.args)
    return frozenset(slots)


# ---- captured numbers as bits


def bits_of_numbers(numbers: Sequence[int | float]) -> tuple[int, ...]:
    """Captured numbers as integers of 64 bits, a float as its own: nothing is rounded on the way.

    >>> numbers_of_bits(bits_of_numbers((2**53 + 1, 0.1)), (int, float))
    (9007199254740993, 0.1)
    """
    # (an int, or a compiler's stand-in for one)
    return tuple(struct.unpack("<q", struct.pack("<d", n))[0] if isinstance(n, float) else n for n in numbers)


def numbers_of_bits(bits: Sequence[int], kinds: Sequence[type]) -> tuple[int | float, ...]:
    """What ``bits_of_numbers`` was given."""
    return tuple(x if kind is int else struct.unpack("<d", struct.pack("<q", x))[0] for x, kind in zip(bits, kinds, strict=True))
