"""What a mask captured when its lists were made, to tell later whether they still follow from it."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.mods.tracing.fingerprint import recognise
from anyattn.mods.tracing.trace import TracedMod, trace

__all__ = ["MadeOf", "captures", "counted_anew", "follow", "made_of", "note", "note_lists", "still_holds"]

_Captures = tuple[Any, Sequence[int | float], Sequence[Tensor]]  # a mask's structure, the numbers and the tensors that it captures


class MadeOf(NamedTuple):
    """structure, numbers: of the mask. tensors, versions: those that it captured, and torch's write counters of them."""

    structure: Any
    numbers: tuple[int | float, ...]
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]

    def holds(self, now: _Captures) -> bool:
        """Whether a mask captures the same numbers and tensors now, and torch has counted no write to the tensors since."""
        structure, numbers, tensors = now
        if (
            (structure is not self.structure and structure != self.structure)
            or len(tensors) != len(self.tensors)
            or tuple(numbers) != self.numbers
        ):
            return False
        for t, same, version in zip(tensors, self.tensors, self.versions):  # noqa: SIM110 - a generator takes longer
            if same() is not t or t._version != version:
                return False
        return True

    def holds_for(self, tensors: Sequence[Tensor]) -> bool:
        """``holds`` for a compiled graph's operands, which may be other tensor objects of the same memory; their order is the program's."""
        alive = {}
        for same, version in zip(self.tensors, self.versions):
            t = same()
            if t is None or t._version != version:
                return False
            alive[t.data_ptr()] = t
        return all(t.data_ptr() in alive for t in tensors)


def captures(mask: Any) -> _Captures:
    """The structure, numbers and tensors of a mask as they are now."""
    reading = None if type(mask) is TracedMod else recognise(mask)
    if reading is not None:
        return reading
    traced = mask if type(mask) is TracedMod else trace(mask, "mask")
    return traced.expr, traced.scalars, traced.tensors


def made_of(now: _Captures) -> MadeOf | None:
    """None if a tensor is an inference tensor, to which torch counts no writes."""
    structure, numbers, tensors = now
    if any(t.is_inference() for t in tensors):
        return None
    return MadeOf(structure, tuple(numbers), tuple(map(weakref.ref, tensors)), tuple([t._version for t in tensors]))


def counted_anew(t: Tensor) -> Tensor:
    """A tensor of the same memory with a write counter that starts at 0; for an inference tensor, which has none, a copy."""
    with torch.inference_mode(False):
        return (t.clone() if t.is_inference() else t).data


class _Noted(NamedTuple):
    """block_mask: of the lists; None for lists that a compiled graph makes."""

    counts: weakref.ref[Tensor]
    block_mask: weakref.ref[Any] | None
    made: MadeOf


_noted: dict[int, _Noted] = {}  # by the id of a block mask's counts; removed when these are freed


def note(block_mask: Any) -> None:
    """Records what an exact block mask was made of, for operators, which get its lists and its mask's program without it."""
    _note(block_mask.kv_num_blocks, weakref.ref(block_mask), block_mask._made_of)


def note_lists(counts: Tensor, now: _Captures) -> None:
    """Records what lists that a compiled graph makes were made of. The tensors are those on which the graph is run: real ones, or a
    compiler's, whose writes torch counts too."""
    _note(counts, None, made_of(now))


def _note(counts: Tensor, block_mask: weakref.ref[Any] | None, captured: MadeOf | None) -> None:
    place = id(counts)

    def forget(gone: Any) -> None:
        if (entry := _noted.get(place)) is not None and entry.counts is gone:
            del _noted[place]

    if captured is not None:
        _noted[place] = _Noted(weakref.ref(counts, forget), block_mask, captured)


def _noted_of(counts: Tensor) -> _Noted | None:
    entry = _noted.get(id(counts))
    return entry if entry is not None and entry.counts() is counts else None


def follow(counts: Tensor, now: _Captures) -> bool:
    """Whether ``note_lists`` recorded the lists for these captures, and they have not changed since."""
    entry = _noted_of(counts)
    return entry is not None and entry.made.holds(now)


def still_holds(counts: Tensor, tensors: Sequence[Tensor]) -> bool | None:
    """Whether noted lists still follow from their mask, whose tensors an operator gets as ``tensors``; None for other lists.

    The numbers in an operator's program are those that the mask captures now: the compiler guards them.
    """
    entry = _noted_of(counts)
    if entry is None:
        return None
    if not entry.made.holds_for(tensors):
        return False
    block_mask = entry.block_mask() if entry.block_mask is not None and entry.made.numbers else None
    return block_mask is None or bool(block_mask.is_exact)
