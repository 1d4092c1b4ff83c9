"""Fingerprints of mods: recognises a mod whose structure is known, and reads its current captures.

``closure.walk`` describes a mod's structure, which is too slow for a warm call. A ``Pattern`` stores one such structure: matching a later
function against it visits the same places, compares the parts that must be equal, and collects this call's numbers and tensors. Every
capture is read again: a rebound cell, global or attribute either gives its new value or makes the match fail, and then ``closure.walk``
describes the mod again.

Patterns hold code, constants and objects of libraries, never a user's tensor or function object.
"""

from __future__ import annotations

import functools
import types
from typing import Any, NamedTuple

import torch

from anyattn.mods.tracing.closure import is_number, walk

__all__ = ["Pattern", "Reading", "recognise"]

_MOST_PATTERNS = 64  # per code object: all masks made by ``a & b`` share one code object
_MOST_CODE = 1024
_MISSING = object()
_FUNCTION, _PARTIAL = types.FunctionType, functools.partial


class Pattern:
    """A structure seen before. Patterns are compared by identity, not by equality, and are keys of the memos.

    fixed: slots of a score mod's numbers that affect more than the mod's result; caches use their values as keys.
    takes_aux: whether the trailing argument is passed, by (kind, whether the call has aux_tensors), where that is known.
    """

    __slots__ = ("fixed", "structure", "takes_aux")

    def __init__(self, structure: tuple):
        self.structure = structure
        self.fixed: tuple[int, ...] = ()
        self.takes_aux: dict[tuple[str, bool], bool] = {}

    def fix(self, slots: tuple[int, ...]) -> None:
        self.fixed = tuple(sorted({*self.fixed, *slots}))


class Reading(NamedTuple):
    """A pattern, and the values that this call's mod captures, in visiting order."""

    pattern: Pattern
    numbers: list[int | float]
    tensors: list[torch.Tensor]


_patterns: dict[Any, list[Pattern]] = {}


def recognise(fn: Any) -> Reading | None:
    """The pattern of ``fn`` and its captures; None where ``closure.walk`` returns None.

    >>> def window(width):
    ...     return lambda b, h, q_idx, kv_idx: q_idx - kv_idx < width
    >>> recognise(window(3)).numbers
    [3]
    """
    code = fn
    while (kind := type(code)) is not _FUNCTION:
        if kind is _PARTIAL:
            code = code.func
        elif kind.__module__ == "anyattn.mods.algebra":
            code = code.fn
        else:
            return None
    anchor = code.__code__
    patterns = _patterns.get(anchor)
    if patterns is not None:
        for at, pattern in enumerate(patterns):
            numbers: list[int | float] = []
            tensors: list[torch.Tensor] = []
            if _fits(pattern.structure, fn, numbers, tensors, []):
                if at > 0:  # most recent first; a new list, because another thread may be iterating over this one
                    _patterns[anchor] = [pattern, *(p for p in patterns if p is not pattern)]
                return Reading(pattern, numbers, tensors)
    return _described(fn, anchor, patterns or [])


def _described(fn: Any, anchor: Any, patterns: list[Pattern]) -> Reading | None:
    found = walk(fn)
    if found is None:
        return None
    pattern = next((p for p in patterns if p.structure == found.structure), None)
    if pattern is None:
        pattern = Pattern(found.structure)
        if len(_patterns) >= _MOST_CODE:
            _patterns.clear()
        _patterns[anchor] = [pattern, *patterns[: _MOST_PATTERNS - 1]]
    return Reading(pattern, list(found.numbers), list(found.tensors))


def _fits(node: tuple, item: Any, numbers: list, tensors: list, seen: list) -> bool:
    """Whether ``closure.walk`` would describe ``item`` as ``node``; collects numbers and tensors in visiting order."""
    tag = node[0]
    if tag == "number":
        numbers.append(item)
        return type(item) is node[1] and is_number(item)
    if tag == "tensor":
        tensors.append(item)
        return type(item) is node[1]
    if tag == "constant":
        return type(item) is node[1] and item == node[2]
    if tag == "again":
        return seen[node[1]] is item
    if tag == "sequence":
        return type(item) is node[1] and len(item) == len(node[2]) and _all_fit(node[2], item, numbers, tensors, seen)
    seen.append(item)
    if tag == "same":
        return item is node[1]
    if tag == "function":
        return _function_fits(node, item, numbers, tensors, seen)
    if tag == "wrapped":
        return type(item) is node[1] and _fits(node[2], item.fn, numbers, tensors, seen)
    return (
        type(item) is _PARTIAL
        and tuple(item.keywords) == node[1]
        and len(item.args) + len(item.keywords) + 1 == len(node[2])
        and _all_fit(node[2], (item.func, *item.args, *item.keywords.values()), numbers, tensors, seen)
    )


def _all_fit(nodes: tuple, items: Any, numbers: list, tensors: list, seen: list) -> bool:
    for node, item in zip(nodes, items):  # noqa: SIM110 - a generator takes longer; of one length, as the callers have seen
        if not _fits(node, item, numbers, tensors, seen):
            return False
    return True


def _function_fits(node: tuple, fn: Any, numbers: list, tensors: list, seen: list) -> bool:
    if type(fn) is not _FUNCTION or fn.__dict__:
        return False
    _, code, module, cells, names, defaults, keywords = node
    if not (fn.__code__ is code or fn.__code__ == code) or fn.__module__ != module:
        return False
    if cells:
        for cell_node, cell in zip(cells, fn.__closure__ or ()):  # equal code has equally many cells
            try:
                contents = cell.cell_contents
            except ValueError:  # an empty cell
                contents = _MISSING
            tag = cell_node[0]
            if tag == "tensor" and type(contents) is cell_node[1]:  # the test of ``_fits`` without its two calls
                tensors.append(contents)
            elif tag == "number" and type(contents) is cell_node[1] and is_number(contents):
                numbers.append(contents)
            elif not _place_fits(cell_node, contents, numbers, tensors, seen):
                return False
    if names:
        known = fn.__globals__
        for name, name_node in names:
            if not _place_fits(name_node, known.get(name, _MISSING), numbers, tensors, seen):
                return False
    if defaults or fn.__defaults__:
        given = fn.__defaults__ or ()
        if len(given) != len(defaults) or not _all_fit(defaults, given, numbers, tensors, seen):
            return False
    if keywords or fn.__kwdefaults__:
        named = fn.__kwdefaults__ or {}
        if tuple(named) != tuple(k for k, _ in keywords):
            return False
        return _all_fit(tuple(n for _, n in keywords), named.values(), numbers, tensors, seen)
    return True


def _place_fits(node: tuple, contents: Any, numbers: list, tensors: list, seen: list) -> bool:
    """``_fits`` for the contents of a cell or of a global name; an empty place matches only an empty one."""
    if node[0] == "empty" or contents is _MISSING:
        return node[0] == "empty" and contents is _MISSING
    return _fits(node, contents, numbers, tensors, seen)
