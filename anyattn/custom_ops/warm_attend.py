"""Warm calls of ``anyattn::attend`` and its backward pass: the call cache's answer, found by the operator's own arguments.

The key holds what ``call_cache.signature`` reads of the ``FlexCall`` that the arguments stand for, but the programs' texts in place of mods;
so a second call neither decodes mods nor reads a block mask. It holds all captured numbers: a call with other ones is found in the call
cache.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.call_cache import attention, calls
from anyattn.call_cache.signature import NotCacheable, Signature, identical, is_listened_to, tensor_key
from anyattn.custom_ops.list_operands import Known
from anyattn.mods.ir import codec
from anyattn.mods.tracing.fingerprint import Reading
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.validate.flex import FLOAT32_MAX

__all__ = ["Reader", "found", "key_of", "remember"]

_is_grad_enabled, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype


class Reader(NamedTuple):
    """Where one of the mods has its run-time values: its numbers, and which of the score's or of the masks' tensors it captures."""

    is_score: bool
    numbers: list[int | float]
    start: int
    stop: int

    def read(self, given: Any) -> Reading:
        tensors = given.score.score_tensors if self.is_score else given.masks.mask_tensors
        return Reading(None, self.numbers, tensors[self.start : self.stop])  # type: ignore[arg-type]  # whose pattern is in the key


class WarmCall(NamedTuple):
    """remembered: the call cache's. readers: of its mods, none if those have no run-time values."""

    remembered: calls.RememberedCall
    readers: tuple[Reader, ...]


_warm: calls.TwoGenerationCache[WarmCall] = calls.TwoGenerationCache()


def key_of(given: Any, lists: Known | None) -> tuple | None:
    """The key of an operator's call, given as ``Attend``; None for one that is not remembered. lists: its block lists, if it has any."""
    q, k, v, sink, of_score, of_masks, _, _, _, scale, wants_max, deterministic, options, backend = given
    if type(scale) is not float or not -FLOAT32_MAX <= scale <= FLOAT32_MAX or is_listened_to():
        return None
    try:
        return (
            _is_grad_enabled(), _default_dtype(), tensor_key(q), tensor_key(k), tensor_key(v), tensor_key(sink),
            _mods_key(*of_score) if of_score[0] else None, _mods_key(*of_masks) if of_masks[0] else None,
            None if lists is None else lists.facts, wants_max, deterministic, options, backend,
        )  # fmt: skip
    except NotCacheable:
        return None


def _mods_key(programs: str, numbers: list[int], tensors: list[Tensor]) -> tuple:
    count = _tensors_of(programs)
    if not count:
        return programs, *numbers
    captured = tensors[:count]
    return programs, *numbers, tuple([tensor_key(t) for t in captured]), identical(captured)


@lru_cache(maxsize=1024)
def _tensors_of(programs: str) -> int:
    return sum(len(codec.decode(program).tensor_slots) for program in programs.splitlines())


def found(key: tuple, given: Any, lists: Known | None) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a warm call; None for one that is not."""
    warm = _warm.get(key)
    if warm is None:
        return None
    signature = Signature()
    if warm.readers:
        signature.readings = tuple([reader.read(given) for reader in warm.readers])
    if lists is None:
        return attention.flex_again(warm.remembered, *given[:4], given.scale, signature, None)
    signature.blocks = lists.blocks
    return attention.flex_again(warm.remembered, *given[:4], given.scale, signature, lists.stands_for)


def remember(key: tuple, remembered: calls.RememberedCall, readers: tuple[Reader, ...]) -> None:
    """Remembers a call that the call cache knows. readers: of its mods, in the order of ``FlexCall``."""
    is_fixed = all(m is None or m.fixed is not None for m in (remembered.score, *remembered.masks))
    _warm.put(key, WarmCall(remembered, () if is_fixed else readers))
