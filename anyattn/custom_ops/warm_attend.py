"""Warm calls of ``anyattn::attend`` and its backward pass: finds the call cache's entry by the operators' own arguments.

What ``call_cache.signature`` reads of mods and a block mask is constant in a compiled graph: the programs' texts and the captured numbers.
So calls are looked up by the arguments that are not tensors and by shapes, and one comparison in C++ tells whether the tensors are like
those of an earlier call; neither mods nor block lists are decoded again. A call with other numbers is looked up in the call cache.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.backends import repeater_of
from anyattn.call_cache import attention, calls
from anyattn.call_cache.signature import Signature, bypasses_cache, identical
from anyattn.custom_ops import list_operands
from anyattn.custom_ops.direct import needs_dispatcher
from anyattn.custom_ops.list_operands import Known
from anyattn.determinism import is_batch_invariant
from anyattn.mods.float32_scores import LARGEST_SCALE
from anyattn.mods.tracing.fingerprint import Reading
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.tensors import autocast
from anyattn.tensors.comparison import comparison

__all__ = ["Reader", "direct", "is_remembered", "remember", "warm_call"]

_MOST = 16  # remembered calls of one key: they differ in strides, alignment, block lists or captured tensors
_is_grad_enabled, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype  # looked up once


class Reader(NamedTuple):
    """The source of a mod's run-time values: its numbers, and its range in the score's or the masks' captured tensors."""

    is_score: bool
    numbers: list[int | float]
    start: int
    stop: int

    def read(self, score_tensors: list[Tensor], mask_tensors: list[Tensor]) -> Reading:
        tensors = score_tensors if self.is_score else mask_tensors
        return Reading(None, self.numbers, tensors[self.start : self.stop])  # type: ignore[arg-type]  # whose pattern is in the key


@dataclass(slots=True)
class WarmCall:
    """A remembered call, and the tests by which a later call with the same constants is like it.

    remembered: the call cache's entry. readers: of its mods; none if the mods have no run-time values. nothing: the empty tensor that is
    returned without max_scores. tensor_count, are_alike: the number of the call's tensors, and the test that other tensors have the same
    types, dtypes, devices, shapes, strides, dispatch keys and requires_grad. same: ``identical`` tensors of the call, () if all differ.
    aligned: ``_alignment``. sizes, facts: of ``Known``. fields: of the problem; None if mods capture tensors or k and v are expanded.
    reads_lists, again: whether the forward pass reads block lists, and ``Repeater.again``; asked when a direct call comes again, before
    which is_new is True.
    """

    remembered: calls.RememberedCall
    readers: tuple[Reader, ...]
    nothing: Tensor
    tensor_count: int
    are_alike: Callable[..., bool]
    same: tuple[int, ...]
    aligned: tuple
    reads_lists: bool
    sizes: tuple
    facts: object
    fields: dict[str, Any] | None
    again: Callable[..., tuple | None] | None = None
    is_new: bool = True


_warm: calls.TwoGenerationCache[tuple[WarmCall, ...]] = calls.TwoGenerationCache()  # by the first part of ``_parts``


def _parts(values: tuple, is_exact: bool) -> tuple[tuple, tuple[Tensor, ...], list[Tensor]]:
    """The key of a call: all arguments that are not tensors, except exactness, and the shapes of q, k and v. Its tensors; and those of them
    that its mods capture."""
    q, k, v, sink, score, score_numbers, score_tensors, masks, mask_numbers, mask_tensors, block_lists, block_size, _, *rest = values
    captured = [*score_tensors, *mask_tensors] if score_tensors or mask_tensors else []
    constants = (
        score, *score_numbers, masks, *mask_numbers, *block_size, is_exact, *rest, sink is None, q.shape, k.shape, v.shape,
        _is_grad_enabled(), _default_dtype(), is_batch_invariant(),
    )  # fmt: skip
    return constants, (q, k, v, *captured, *block_lists) if sink is None else (q, k, v, sink, *captured, *block_lists), captured


def _alignment(values: tuple, captured: list[Tensor]) -> tuple:
    """The alignment of a call's tensors, and whether v may be a view of k, which ``are_alike`` does not compare."""
    q, k, v, sink, *_ = values
    at_k, at_v = k.data_ptr(), v.data_ptr()
    aligned = q.data_ptr() & 15, at_k & 15, at_v & 15, at_k == at_v
    if sink is None and not captured:
        return aligned
    return *aligned, *[t.data_ptr() & 15 for t in (*(() if sink is None else (sink,)), *captured)]


def _known(values: tuple, is_exact: bool, reads_lists: bool) -> tuple[WarmCall, Known | None] | None:
    """The remembered call that a call is like, and its block lists, where they are read; None if the call is not warm."""
    constants, tensors, captured = _parts(values, is_exact)
    alike = _warm.get(constants)
    if alike is None or not _is_usable(values[13]):
        return None
    for warm in alike:
        if len(tensors) != warm.tensor_count or (warm.same and identical(tensors) != warm.same):
            continue
        # first, because tensors without memory have no alignment
        if not warm.are_alike(*(_different(tensors, warm.same) if warm.same else tensors)) or _alignment(values, captured) != warm.aligned:
            continue
        if not warm.sizes:
            return warm, None
        lists = None
        if reads_lists or warm.reads_lists or not list_operands.are_counted_unwritten(values[10]):
            lists = list_operands.known_by_now(values[10], warm.sizes, is_exact)
            if lists is None or lists.facts is not warm.facts:
                continue
        return warm, lists
    return None


def warm_call(values: tuple, is_exact: bool) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a warm call, with its block lists; None if the call is not warm.

    values: the flat arguments of ``anyattn::attend``. is_exact: ``list_operands.still_follow``.
    """
    known = _known(values, is_exact, reads_lists=True)
    return None if known is None else _filled(known[0], values, known[1])


def _different(tensors: tuple[Tensor, ...], same: tuple[int, ...]) -> list[Tensor]:
    """Each tensor once. same: ``identical`` tensors."""
    return [t for i, t in enumerate(tensors) if same[i] == i]


def _filled(warm: WarmCall, values: tuple, lists: Known | None) -> tuple[Problem, Plan]:
    q, k, v, sink, scale = *values[:4], values[13]
    remembered, fields = warm.remembered, warm.fields
    if fields is not None:
        blocks = lists.read_blocks() if lists is not None and remembered.has_lists else None
        return Problem.of_fields({**fields, "q": q, "k": k, "v": v, "sink": sink, "scale": scale, "blocks": blocks}), remembered.plan
    signature = _signature(warm.readers, values)
    if lists is not None and remembered.has_lists:
        signature.blocks = lists.read_blocks()
    return attention.flex_again(remembered, q, k, v, sink, scale, signature, None if lists is None else lists.stands_for)


def _signature(readers: tuple[Reader, ...], values: tuple) -> Signature:
    signature = Signature()
    if readers:
        signature.readings = tuple([reader.read(values[6], values[9]) for reader in readers])
    return signature


def _is_usable(scale: Any) -> bool:
    return type(scale) is float and -LARGEST_SCALE <= scale <= LARGEST_SCALE


def is_remembered(values: tuple) -> bool:
    """Whether a call may be looked up and remembered."""
    return _is_usable(values[13]) and not bypasses_cache()


def remember(
    values: tuple, is_exact: bool, lists: Known | None, remembered: calls.RememberedCall, readers: tuple[Reader, ...], problem: Problem
) -> None:
    """Remembers a call that is in the call cache. lists, problem: of the call. readers: of its mods, in the order of ``FlexCall``."""
    constants, tensors, captured = _parts(values, is_exact)
    same = identical(tensors)
    are_alike = comparison(different := _different(tensors, same))
    if not are_alike(*different):  # this torch has no comparison
        return
    fields = None
    if all(m is None or m.fixed is not None for m in (remembered.score, *remembered.masks)):
        readers = ()
    if not remembered.shares_keys and all(r.start == r.stop for r in readers):  # the mods' numbers are among the constants
        fields = remembered.filled(None, None, None, None, None, _signature(readers, values))
    warm = WarmCall(
        remembered, readers, problem.q.new_empty(0, dtype=problem.stat_dtype), len(tensors), are_alike,
        same if same != tuple(range(len(tensors))) else (), _alignment(values, captured),
        remembered.has_lists, () if lists is None else lists.sizes, None if lists is None else lists.facts, fields,
    )  # fmt: skip
    _warm.put(constants, (warm, *(_warm.get(constants) or ())[: _MOST - 1]))


def direct(operator: Any) -> Callable[..., Any]:
    """The direct call of ``anyattn::attend`` (``direct.py``), which looks for a warm call first."""
    run, may_pass = operator.direct.run, operator.direct.may_pass

    def call(*values: Any) -> Any:
        if needs_dispatcher():
            return operator(*values)
        block_lists, block_size, exactness = values[10:13]
        is_exact = block_size[0] != 0 and list_operands.still_follow(exactness, block_lists, *values[7:10])
        known = _known(values, is_exact, reads_lists=False)
        if known is None:  # not below autograd: what is remembered holds for the dispatch keys of the thread
            return run(*values) if may_pass(*values) else operator(*values)
        warm, lists = known
        results = None if warm.again is None or autocast.is_on() else warm.again(*values[:4])
        if results is None:
            problem, plan = _filled(warm, values, lists)
            results = autograd.forward(problem, plan)
            if warm.is_new and warm.fields is not None and not autocast.is_on():
                repeater = repeater_of(problem, plan)
                warm.reads_lists = warm.reads_lists and repeater.reads_lists(problem)
                warm.again, warm.is_new = repeater.again(problem), False
        out, lse, highest = results
        return out, lse, warm.nothing if highest is None else highest

    call.may_pass = may_pass  # type: ignore[attr-defined]
    return call
