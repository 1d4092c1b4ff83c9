"""Warm calls of ``anyattn::attend`` and its backward pass: the call cache's answer, found by the operators' own arguments.

The key holds what ``call_cache.signature`` reads of the ``FlexCall`` that the arguments stand for, but the programs' texts in place of
mods; so a second call neither decodes mods nor reads a block mask. It holds all captured numbers: a call with other ones is found in the
call cache.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache import attention, calls
from anyattn.call_cache.signature import PLAIN, Kind, NotCacheable, Signature, identical, is_listened_to, tensor_key
from anyattn.custom_ops import list_operands
from anyattn.custom_ops.direct import needs_dispatcher
from anyattn.custom_ops.list_operands import Known
from anyattn.mods.ir import codec
from anyattn.mods.tracing.fingerprint import Reading
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.validate.flex import LARGEST_SCALE

__all__ = ["Reader", "direct", "found", "key_of", "remember"]


class Reader(NamedTuple):
    """Where one of the mods has its run-time values: its numbers, and which of the score's or of the masks' tensors it captures."""

    is_score: bool
    numbers: list[int | float]
    start: int
    stop: int

    def read(self, score_tensors: list[Tensor], mask_tensors: list[Tensor]) -> Reading:
        tensors = score_tensors if self.is_score else mask_tensors
        return Reading(None, self.numbers, tensors[self.start : self.stop])  # type: ignore[arg-type]  # whose pattern is in the key


class WarmCall(NamedTuple):
    """remembered: the call cache's. readers: of its mods, none if those have no run-time values."""

    remembered: calls.RememberedCall
    readers: tuple[Reader, ...]


_warm: calls.TwoGenerationCache[WarmCall] = calls.TwoGenerationCache()
# Calls that may skip the dispatcher, each with the empty tensor that it returns where max_scores is not wanted.
_direct: calls.TwoGenerationCache[tuple[WarmCall, Tensor]] = calls.TwoGenerationCache()


def _mods_key(programs: str, numbers: list[int], tensors: list[Tensor]) -> tuple:
    count = _tensors_of(programs)
    if not count:
        return programs, *numbers
    captured = tensors[:count]
    return programs, *numbers, tuple([tensor_key(t) for t in captured]), identical(captured)


@lru_cache(maxsize=1024)
def _tensors_of(programs: str) -> int:
    return sum(len(codec.decode(program).tensor_slots) for program in programs.splitlines())


def _refuse() -> Any:
    raise NotCacheable


_KEY = f"""(
    _is_grad_enabled(), _default_dtype(), {", ".join([Kind.TENSOR.format(x=name) for name in ("q", "k", "v", "sink")])},
    _mods_key(score_program, score_numbers, score_tensors) if score_program else None,
    _mods_key(mask_programs, mask_numbers, mask_tensors) if mask_programs else None,
    None if lists is None else lists.facts, wants_max, deterministic, options, backend,
)"""
_NAMES = (
    "q, k, v, sink, score_program, score_numbers, score_tensors, mask_programs, mask_numbers, mask_tensors, block_lists, block_size, "
    "is_exact, scale, wants_max, deterministic, options, backend"
)
_scope = {
    "PLAIN": PLAIN, "_refuse": _refuse, "_is_grad_enabled": torch.is_grad_enabled, "_default_dtype": torch.get_default_dtype,
    "_mods_key": _mods_key,
}  # fmt: skip
_key: Callable[..., tuple] = eval(f"lambda {_NAMES}, lists: {_KEY}", _scope)


def key_of(given: Any, lists: Known | None) -> tuple | None:
    """The key of an operator's call, given as ``Attend``; None for one that is not remembered. lists: its block lists, if it has any."""
    if not _is_usable(given.scale) or is_listened_to():
        return None
    try:
        return _key(*given[:4], *given.score, *given.masks, *given[6:], lists)
    except NotCacheable:
        return None


def _is_usable(scale: Any) -> bool:
    return type(scale) is float and -LARGEST_SCALE <= scale <= LARGEST_SCALE


def found(key: tuple, given: Any, lists: Known | None) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a warm call; None for one that is not."""
    warm = _warm.get(key)
    if warm is None:
        return None
    q, k, v, sink = given[:4]
    return _filled(warm, q, k, v, sink, given.score.score_tensors, given.masks.mask_tensors, given.scale, lists)  # type: ignore[no-any-return]


def _filled(warm: WarmCall, q: Tensor, k: Tensor, v: Tensor, sink: Any, score: Any, mask: Any, scale: float, lists: Any) -> Any:
    remembered, readers = warm
    signature = Signature()
    if readers:
        signature.readings = tuple([reader.read(score, mask) for reader in readers])
    if lists is None:
        return attention.flex_again(remembered, q, k, v, sink, scale, signature, None)
    signature.blocks = lists.blocks
    return attention.flex_again(remembered, q, k, v, sink, scale, signature, lists.stands_for)


def remember(key: tuple, remembered: calls.RememberedCall, readers: tuple[Reader, ...]) -> None:
    """Remembers a call that the call cache knows. readers: of its mods, in the order of ``FlexCall``."""
    is_fixed = all(m is None or m.fixed is not None for m in (remembered.score, *remembered.masks))
    _warm.put(key, WarmCall(remembered, () if is_fixed else readers))


def direct(operator: Any) -> Callable[..., Any]:
    """The direct call of ``anyattn::attend`` (``direct.py``), with a short way for what came here before."""
    source = f"""
def call({_NAMES}):
    if not (type(scale) is float and -LARGEST_SCALE <= scale <= LARGEST_SCALE) or needs_dispatcher():
        return first({_NAMES})
    lists = None
    if block_size[0]:
        lists = known_lists(block_lists, (tuple(block_size), (q.shape[2], k.shape[2])), is_exact)
        if lists is None:
            return first({_NAMES})
    try:
        key = {_KEY}
    except NotCacheable:
        return first({_NAMES})
    again = get(key)
    if again is None:
        return first_call(first, ({_NAMES}), key)
    warm, nothing = again
    problem, plan = filled(warm, q, k, v, sink, score_tensors, mask_tensors, scale, lists)
    result = forward(problem, plan)
    return result.out, result.lse, result.max_scores if wants_max else nothing
"""
    scope = {
        **_scope, "LARGEST_SCALE": LARGEST_SCALE, "NotCacheable": NotCacheable, "needs_dispatcher": needs_dispatcher, "filled": _filled,
        "known_lists": list_operands.known, "get": _direct.get, "first": operator.direct, "first_call": _first_call,
        "forward": autograd.forward,
    }  # fmt: skip
    exec(compile(source, "<direct call of attend>", "exec"), scope)
    return scope["call"]  # type: ignore[no-any-return]


def _first_call(first: Callable[..., Any], given: tuple, key: tuple) -> Any:
    """A call that is remembered if the next one may pass by the dispatcher, and if the call cache knows it."""
    results = first(*given)
    # the key holds whether tensors are negated, and which require gradients, as far as it matters
    if (warm := _warm.get(key)) is not None and first.may_pass(*given):  # type: ignore[attr-defined]
        _direct.put(key, (warm, results[1].new_empty(0)))
    return results
