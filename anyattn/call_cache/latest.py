"""The latest replayed calls of an entry point, found again by one comparison of a call's tensors in C++.

A signature is read property by property: 5 to 7 us for a decoding step, half of what the host does for it besides launches. Calls mostly
repeat one of the latest two, as the layers of a model do; whatever differs from them is looked up by its signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations
from operator import attrgetter, itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.call_cache.calls import emptied_with_calls
from anyattn.call_cache.replays import Results, Values, are_watched
from anyattn.call_cache.signature import bypasses_cache
from anyattn.determinism import is_batch_invariant
from anyattn.kvcache.append import reaches
from anyattn.mods.tracing.weak_captures import bits_of_numbers
from anyattn.tensors.comparison import comparison
from anyattn.triton_tools.replay import Replay

__all__ = ["LatestCall", "LatestCalls", "Memory", "Written", "decoding", "varlen"]

_MOST = 2  # a model may have two kinds of layers
_MOST_GAPS = 64
_NUMBERS = frozenset((bool, int, float, str))
_has_function_modes = torch._C._is_torch_function_mode_enabled  # type: ignore[attr-defined]
_is_grad_enabled, _default_dtype = torch.is_grad_enabled, torch.get_default_dtype
_is_nested = attrgetter("is_nested")


class Written:
    """Whether the tensors that a call writes share no memory with its other tensors; layouts are fixed, addresses are each call's.

    pairs: two places of tensors and their ``append.reaches``. gaps: distances between tensors that reach into one another and were found to
    share no element, such as keys and values that alternate in one pool.
    """

    def __init__(self, tensors: Sequence[Tensor], written: Sequence[Tensor], read: Sequence[Tensor]) -> None:
        places = {id(t): i for i, t in enumerate(tensors)}
        both = [*combinations(written, 2), *((w, r) for w in written for r in read)]
        self._pairs = [(places[id(a)], places[id(b)], *reaches(a, b)) for a, b in both]
        self._gaps: set[tuple] = set()

    def check(self, addresses: Sequence[int], check: Callable[[], None]) -> None:
        """check: raises for tensors that share elements. It is called unless addresses alone show that there are none."""
        close = [
            (i, j, addresses[j] - addresses[i])
            for i, j, of_i, of_j in self._pairs
            if addresses[i] < addresses[j] + of_j and addresses[j] < addresses[i] + of_i
        ]
        if close and (gaps := tuple(close)) not in self._gaps:
            check()
            if len(self._gaps) >= _MOST_GAPS:
                self._gaps.clear()
            self._gaps.add(gaps)


class Memory(NamedTuple):
    """written: of a call that writes arguments. check: raises, given the call's arguments, if they share elements."""

    written: Written
    check: Callable[[Sequence[Any]], None]


class _Out:
    """The properties of a result, in place of which a call may be given memory."""

    def __init__(self, result: Tensor) -> None:
        (self.reach,), self._shape, self._strides = reaches(result), result.shape, result.stride()
        self._dtype, self._device, self._is_known = result.dtype, result.device, comparison((result,))

    def is_like(self, out: Tensor) -> bool:
        """Whether ``out`` is laid out as the result; strides of dimensions of one entry may be any."""
        if self._is_known(out):
            return True
        if out.shape != self._shape or out.dtype is not self._dtype or out.device != self._device or out.is_neg() or out.requires_grad:
            return False
        if out.is_inference() and not torch.is_inference_mode_enabled():  # refused by ``check_out``
            return False
        if any(n > 1 and a != b for n, a, b in zip(out.shape, out.stride(), self._strides, strict=True)):
            return False
        self._is_known = comparison((out,))
        return True


class LatestCall:
    """A replay and all properties of the calls that it stands for, of which it keeps no tensor. Arguments are flat: no tuple has tensors.

    others: the arguments that are no tensors, each None, a number, a string, or a tuple of these.
    """

    def __init__(self, arguments: Sequence[Any], replay: Replay, values: Values, result: Tensor, memory: Memory | None) -> None:
        tensors = {i: x for i, x in enumerate(arguments) if isinstance(x, Tensor)}
        firsts = {id(x): i for i, x in reversed(tensors.items())}  # where an object is passed first
        unique = [x for i, x in tensors.items() if firsts[id(x)] == i]
        self._select_tensors = _selection([*tensors])
        self._select_unique = _selection([firsts[id(x)] for x in unique])
        self._select_others = _selection([i for i in range(len(arguments)) if i not in tensors])
        self._others = self._select_others(arguments)
        self._pairs = tuple((i, firsts[id(x)]) for i, x in tensors.items() if firsts[id(x)] != i)
        self._types = tuple(map(type, unique))
        addresses = [x.data_ptr() for x in tensors.values()]
        self._alignments, self._distinct = [x & 15 for x in addresses], len({*addresses})
        self._are_alike = comparison(unique)
        self._reaches, self._out = reaches(*tensors.values()), _Out(result)
        self._mode = _mode()
        self._replay, self._scale, self._numbers, self._memory = replay, values.scale, bits_of_numbers(values.numbers), memory

    @classmethod
    def of(
        cls, arguments: Sequence[Any], replay: Replay, values: Values, results: Results, memory: Memory | None = None
    ) -> LatestCall | None:
        """None for a call that has other arguments, such as mods. values: what the replay has been given for it. results: of that."""
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        has_others = any(not _is_number(x) for x in arguments if not isinstance(x, Tensor))
        result, are_its = results[0], [*map(id, tensors)] == [*map(id, values.tensors)]
        if result is None or has_others or not are_its:
            return None
        return cls(arguments, replay, values, result, memory)

    def results(self, arguments: Sequence[Any], out: Tensor | None = None) -> Results | None:
        """The results of a call; None if it is another one, or no replay. Raises as the check of its memory. out: for the first result;
        None too if it would have to be copied."""
        for x, other in zip(self._select_others(arguments), self._others, strict=True):
            if x is not other and not _are_equal(x, other):
                return None
        unique = self._select_unique(arguments)
        if tuple(map(type, unique)) != self._types or self._mode != _mode():
            return None
        for i, j in self._pairs:
            if arguments[i] is not arguments[j]:
                return None
        if any(map(_is_nested, unique)):
            return None
        try:
            tensors = self._select_tensors(arguments)
            addresses = [x.data_ptr() for x in tensors]
            is_taken = out is None or self._takes(out, addresses)
        except RuntimeError:  # of tensors without memory, such as sparse ones
            return None
        if not is_taken or [x & 15 for x in addresses] != self._alignments or not self._are_alike(*unique):
            return None
        if len({*addresses}) != self._distinct:  # of values that lie in keys another kernel loads half as much
            return None
        if self._memory is not None:
            written, check = self._memory
            written.check(addresses, lambda: check(arguments))
        return self._replay.run(tensors, self._scale, self._numbers, addresses, out)

    def _takes(self, out: Tensor, addresses: Sequence[int]) -> bool:
        """Whether kernels may write to ``out`` in place of a new result."""
        if type(out) is not Tensor or out.is_nested:
            return False
        start = out.data_ptr()
        end = start + self._out.reach
        if start & 15 or not self._out.is_like(out):
            return False
        return all(x + reach <= start or end <= x for x, reach in zip(addresses, self._reaches, strict=True))


class LatestCalls:
    """The latest calls of one entry point."""

    def __init__(self) -> None:
        self._calls: tuple[LatestCall, ...] = ()
        emptied_with_calls.add(self)

    def clear(self) -> None:
        self._calls = ()

    def note(self, call: LatestCall | None) -> None:
        if call is not None and call not in self._calls:
            self._calls = (call, *self._calls[: _MOST - 1])

    def results(self, arguments: Sequence[Any], out: Tensor | None = None) -> Results | None:
        """The results of a call that repeats a latest one; None for any other. Raises as ``LatestCall.results``."""
        if not self._calls or _has_function_modes() or bypasses_cache() or are_watched():
            return None
        for call in self._calls:
            results = call.results(arguments, out)
            if results is not None:
                return results
        return None


decoding, varlen = LatestCalls(), LatestCalls()


def _mode() -> tuple:
    return _is_grad_enabled(), _default_dtype(), is_batch_invariant()


def _is_number(x: Any) -> bool:
    return x is None or type(x) in _NUMBERS or (type(x) is tuple and all(map(_is_number, x)))


def _are_equal(x: Any, y: Any) -> bool:
    """Whether two arguments are equal numbers of one type: 1, 1.0 and True are not equal here. y: as ``_is_number`` accepts."""
    if type(x) is not type(y) or y is None:
        return False
    if type(y) is tuple:
        return len(x) == len(y) and all(a is b or _are_equal(a, b) for a, b in zip(x, y, strict=True))
    return bool(x == y)


def _selection(places: list[int]) -> Callable[[Sequence[Any]], tuple]:
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[i] for i in places])
