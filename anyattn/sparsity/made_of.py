"""What a mask captured when its lists were made, to tell later whether they still follow from it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.mods.tracing.fingerprint import recognise
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.mods.tracing.weak_captures import bits_of_numbers

__all__ = ["MadeOf", "captures", "counted_anew", "follow", "made_of", "note", "note_lists", "still_holds"]

_Captures = tuple[Any, Sequence[int | float], Sequence[Tensor]]  # a mask's structure, the numbers and the tensors that it captures


_MOST_OPERANDS = 16  # remembered for each mask's lists


class MadeOf(NamedTuple):
    """structure, numbers: of the mask; the numbers as ``bits_of_numbers``. tensors, versions: those that it captured, and torch's write
    counters of them."""

    structure: Any
    numbers: tuple[int, ...]
    tensors: tuple[weakref.ref[Tensor], ...]
    versions: tuple[int, ...]

    def holds(self, now: _Captures) -> bool:
        """Whether a mask captures the same numbers and tensors now, and torch has counted no write to the tensors since."""
        structure, numbers, tensors = now
        if (
            (structure is not self.structure and structure != self.structure)
            or len(tensors) != len(self.tensors)
            or bits_of_numbers(numbers) != self.numbers
        ):
            return False
        for t, same, version in zip(tensors, self.tensors, self.versions):  # noqa: SIM110 - a generator takes longer
            if same() is not t or t._version != version:
                return False
        return True

    def holds_for(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> bool | None:
        """``holds`` for a compiled graph's operands, in the program's order: tensors may be other objects of the same memory, and numbers,
        as ``bits_of_numbers``, are those that the compiler has not made constants. None if that depends on which capture is which operand.
        """
        alive = {}
        for same, version in zip(self.tensors, self.versions):
            t = same()
            if t is None or t._version != version:
                return False
            alive[t.data_ptr()] = t
        if not all(n in self.numbers for n in numbers) or not all(t.data_ptr() in alive for t in tensors):
            return False
        is_sure = len(self.tensors) < 2 and not self.numbers and all(_layout(t) == _layout(alive[t.data_ptr()]) for t in tensors)
        return True if is_sure else None


def _layout(t: Tensor) -> tuple:
    return t.shape, t.stride(), t.dtype


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
    return MadeOf(structure, bits_of_numbers(numbers), tuple(map(weakref.ref, tensors)), tuple([t._version for t in tensors]))


def counted_anew(t: Tensor) -> Tensor:
    """A tensor of the same memory with a write counter that starts at 0; for an inference tensor, which has none, a copy."""
    with torch.inference_mode(False):
        return (t.clone() if t.is_inference() else t).data


class _Noted(NamedTuple):
    """block_masks: those that have the lists; none if a compiled graph makes them. operands: those of calls that were found to follow:
    the program, numbers, and addresses and layouts of tensors."""

    counts: weakref.ref[Tensor]
    block_masks: tuple[weakref.ref[Any], ...]
    made: MadeOf
    operands: set[tuple]

    def masks(self) -> Iterator[Any]:
        return (mask for ref in self.block_masks if (mask := ref()) is not None)

    def remember(self, operands: tuple) -> None:
        if len(self.operands) >= _MOST_OPERANDS:
            self.operands.clear()
        self.operands.add(operands)


_noted: dict[int, _Noted] = {}  # by the id of a block mask's counts; removed when these are freed


def note(block_mask: Any) -> None:
    """Records what an exact block mask was made of, for operators, which get its lists and its mask's program without it."""
    counts = block_mask.kv_num_blocks
    before = _noted_of(counts)  # of a copy, whose lists are the same objects
    others = [] if before is None else [weakref.ref(mask) for mask in before.masks() if mask is not block_mask]
    _note(counts, (weakref.ref(block_mask), *others), block_mask._made_of)


def note_lists(counts: Tensor, now: _Captures) -> None:
    """Records what lists that a compiled graph makes were made of. The tensors are those on which the graph is run: real ones, or a
    compiler's, whose writes torch counts too."""
    _note(counts, (), made_of(now))


def _note(counts: Tensor, block_masks: tuple[weakref.ref[Any], ...], captured: MadeOf | None) -> None:
    place = id(counts)

    def forget(gone: Any) -> None:
        if (entry := _noted.get(place)) is not None and entry.counts is gone:
            del _noted[place]

    if captured is not None:
        _noted[place] = _Noted(weakref.ref(counts, forget), block_masks, captured, set())


def _noted_of(counts: Tensor) -> _Noted | None:
    entry = _noted.get(id(counts))
    return entry if entry is not None and entry.counts() is counts else None


def follow(counts: Tensor, now: _Captures) -> bool:
    """Whether ``note_lists`` recorded the lists for these captures, and they have not changed since."""
    entry = _noted_of(counts)
    return entry is not None and entry.made.holds(now)


def still_holds(counts: Tensor, program: str, numbers: Sequence[int], tensors: Sequence[Tensor], is_backward: bool) -> bool | None:
    """Whether noted lists follow from their mask with these operands of its program; None for other lists.

    Which capture is which operand only the block masks know, and only in a forward pass: later a mask may capture something else, also what
    its lists were made of. A backward pass's operands must be those of a forward pass that was found to follow.
    """
    entry = _noted_of(counts)
    if entry is None:
        return None
    holds = entry.made.holds_for(numbers, tensors)
    if holds is not None or not entry.block_masks:
        return holds is not False
    operands = (program, *numbers, *((t.data_ptr(), *_layout(t)) for t in tensors))
    if operands in entry.operands:
        return True
    if is_backward or not all(mask.is_exact for mask in entry.masks()) or next(entry.masks(), None) is None:
        return False
    entry.remember(operands)
    return True
