"""Block lists as an operator's operands: what stands for the block mask that they are of, kept as long as the same lists come again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor

from anyattn.sparsity.block_mask import are_unwritten
from anyattn.validate import flex

__all__ = ["ListOperands", "are_counted_unwritten", "known", "known_by_now", "places_of", "stand_in"]


class ListOperands:
    """Stands for the block mask whose lists an operator was given. Its tensors are views: it must not keep alive what it is kept by.

    may_share: whether kernels may read the views as they are. The lists of an exact mask are ordered, and no operator reads what was made
    of them once they are written to.
    """

    def __init__(self, tensors: Sequence[Tensor], facts: tuple):
        views = [t.detach() for t in tensors]
        self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices = [*views, None, None][:4]
        self.BLOCK_SIZE, self.seq_lengths, self.is_exact = facts
        self.may_share = self.is_exact


# An entry keeps the memory that it views allocated, so that no other tensor gets the same address. It lives as long as a tensor of counts
# that it came with: a backward pass gets another one of the same memory, with the same count of writes.
_by_place: WeakValueDictionary[tuple, ListOperands] = WeakValueDictionary()


def stand_in(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool) -> ListOperands:
    """The same one for the same lists: what is found out of a block mask is kept with it. sizes: block size and lengths."""
    places = places_of(tensors)
    if places is None:
        return ListOperands(tensors, (*sizes, False))
    key = (*sizes, is_exact, *places)
    found = _by_place.get(key)
    if found is None:
        found = _by_place[key] = ListOperands(tensors, (*sizes, is_exact and are_unwritten(*tensors)))
    _remember(tensors, sizes, is_exact, found)
    return found


def places_of(tensors: Sequence[Tensor]) -> tuple | None:
    """Where tensors are in memory, how they lie there, and how often they were written to, which inference tensors do not count: None."""
    places: list[Any] = []
    for t in tensors:
        if t.is_inference():
            return None
        places += (t.data_ptr(), t._version, t.shape, t.stride(), t.dtype, t.device)
    return tuple(places)


# ---- the same tensors once more


class Known:
    """Lists that came before as the same tensors, and were not written to.

    sizes, is_exact: as ``stand_in`` was asked. states: of each tensor how often it was written to, and where its memory is. facts: stands
    for ``flex.lists_facts``.
    """

    __slots__ = ("_blocks", "facts", "is_exact", "sizes", "stands_for", "states", "tensors")

    def __init__(self, tensors: tuple[ref[Tensor], ...], sizes: tuple, is_exact: bool, states: tuple, stands_for: ListOperands):
        self.tensors, self.sizes, self.is_exact, self.states, self.stands_for = tensors, sizes, is_exact, states, stands_for
        self.facts = _standing_for(flex.lists_facts(stands_for))
        self._blocks: Any = None

    def read_blocks(self) -> Any:
        """The lists as kernels read them, which are read once."""
        if self._blocks is None:
            self._blocks = flex.read_lists(self.stands_for)
        return self._blocks


_by_object: dict[int, Known] = {}  # by the id of the counts, which is removed with them


def known(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool) -> Known | None:
    """What is known of these very tensors, unchanged; None unless ``stand_in`` was asked for them."""
    found = _by_object.get(id(tensors[0]))
    if found is None or found.is_exact is not is_exact or found.sizes != sizes or len(found.tensors) != len(tensors):
        return None
    for t, same in zip(tensors, found.tensors):
        if same() is not t:
            return None
    return found if _states(tensors) == found.states else None


def known_by_now(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool) -> Known | None:
    """``known``, of lists that come for the first time too; None for inference tensors alone."""
    found = known(tensors, sizes, is_exact)
    if found is None:
        stand_in(tensors, sizes, is_exact)
        found = known(tensors, sizes, is_exact)
    return found


def are_counted_unwritten(tensors: Sequence[Tensor]) -> bool:
    """``are_unwritten`` of lists that are no inference tensors."""
    for t in tensors:  # noqa: SIM110 - a generator takes longer
        if t._version:
            return False
    return True


def _states(tensors: Sequence[Tensor]) -> tuple:
    """In one tuple, since every call makes and compares it."""
    if len(tensors) == 2:
        a, b = tensors
        return a._version, b._version, a.data_ptr(), b.data_ptr(), a.shape, b.shape, a.stride(), b.stride()
    a, b, c, d = tensors
    return (
        a._version, b._version, c._version, d._version, a.data_ptr(), b.data_ptr(), c.data_ptr(), d.data_ptr(),
        a.shape, b.shape, c.shape, d.shape, a.stride(), b.stride(), c.stride(), d.stride(),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _standing_for(facts: tuple) -> object:
    return object()


def _remember(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool, found: ListOperands) -> None:
    place = id(tensors[0])
    first = ref(tensors[0], partial(_forget, place))
    _by_object[place] = Known((first, *map(ref, tensors[1:])), sizes, is_exact, _states(tensors), found)


def _forget(place: int, gone: Any) -> None:
    found = _by_object.get(place)
    if found is not None and found.tensors[0] is gone:
        del _by_object[place]
