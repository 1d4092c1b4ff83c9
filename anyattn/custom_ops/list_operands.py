"""Block lists as an operator's operands: a stand-in for their block mask, cached while the same lists are passed again."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any
from weakref import WeakValueDictionary, ref

from torch import Tensor

from anyattn.mods.ir import codec
from anyattn.sparsity.block_mask import are_unwritten
from anyattn.sparsity.made_of import still_holds
from anyattn.sparsity.read_lists import lists_facts, read_lists

__all__ = [
    "EXACT_BY_BLOCK_MASK",
    "EXACT_IN_GRAPH",
    "INEXACT",
    "ListOperands",
    "are_counted_unwritten",
    "known",
    "known_by_now",
    "places_of",
    "stand_in",
    "still_follow",
]


class ListOperands:
    """Replaces the block mask whose lists were passed to an operator. Its tensors are views: it must not keep alive the tensors whose
    lifetime its cache entry has.

    may_share: whether kernels may read the views directly. The lists of an exact mask are ordered, and data derived from them is not used
    after a write to them.
    """

    def __init__(self, tensors: Sequence[Tensor], facts: tuple):
        views = [t.detach() for t in tensors]
        self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices = [*views, None, None][:4]
        self.BLOCK_SIZE, self.seq_lengths, self.is_exact = facts
        self.may_share = self.was_exact = self.is_exact


# Whether lists follow from their mask. INEXACT: they do not. EXACT_IN_GRAPH: the graph that made them has found that they do.
# EXACT_BY_BLOCK_MASK: their block mask was exact when the graph was captured; every call checks that it still is.
INEXACT, EXACT_IN_GRAPH, EXACT_BY_BLOCK_MASK = range(3)


def still_follow(
    exactness: int, lists: Sequence[Tensor], programs: str, numbers: Sequence[int], tensors: Sequence[Tensor], is_backward: bool = False
) -> bool:
    """Whether lists follow from the first of the programs, with its captures as they are now. numbers, tensors: of all programs.

    Copies of a block mask's lists, such as hooks of saved tensors make for a backward pass, are not known to follow.
    """
    if exactness == INEXACT:
        return False
    program, own_numbers, own_tensors = _operands_of_first(programs)
    holds = still_holds(lists[0], program, numbers[:own_numbers], tensors[:own_tensors], is_backward)
    return exactness == EXACT_IN_GRAPH if holds is None else holds


@lru_cache(maxsize=1024)
def _operands_of_first(programs: str) -> tuple[str, int, int]:
    """The first program, and how many numbers and how many tensors it captures."""
    program = codec.separated(programs)[0]
    expr = codec.decode(program)
    return program, len({node.attr for node in expr.nodes if node.op == "scalar"}), len(expr.tensor_slots)


# An entry's views keep the memory allocated, so no other tensor gets the same address. It lives as long as a counts tensor that was passed
# with it: a backward pass gets another tensor of the same memory and version.
_by_place: WeakValueDictionary[tuple, ListOperands] = WeakValueDictionary()


def stand_in(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool) -> ListOperands:
    """The same object for the same lists, since data derived from a block mask is cached with it. sizes: block size and lengths."""
    places = places_of(tensors)
    if places is None:
        return ListOperands(tensors, (*sizes, False))
    key = (*sizes, is_exact, *places)
    operands = _by_place.get(key)
    if operands is None:
        operands = _by_place[key] = ListOperands(tensors, (*sizes, is_exact and are_unwritten(*tensors)))
    _remember(tensors, sizes, is_exact, operands)
    return operands


def places_of(tensors: Sequence[Tensor]) -> tuple | None:
    """Address, layout and version of each tensor; None if there is an inference tensor, which has no version."""
    places: list[Any] = []
    for t in tensors:
        if t.is_inference():
            return None
        places += (t.data_ptr(), t._version, t.shape, t.stride(), t.dtype, t.device)
    return tuple(places)


# ---- lists that are passed again


class Known:
    """Lists that were passed before as the same tensor objects, and have not been written to since.

    sizes, is_exact: as passed to ``stand_in``. states: version, address and layout of each tensor. facts: stands for
    ``lists_facts``: equal facts have one object, which is compared by identity.
    """

    __slots__ = ("_blocks", "facts", "is_exact", "sizes", "stands_for", "states", "tensors")

    def __init__(self, tensors: tuple[ref[Tensor], ...], sizes: tuple, is_exact: bool, states: tuple, stands_for: ListOperands):
        self.tensors, self.sizes, self.is_exact, self.states, self.stands_for = tensors, sizes, is_exact, states, stands_for
        self.facts = _standing_for(lists_facts(stands_for))
        self._blocks: Any = None

    def read_blocks(self) -> Any:
        """The lists in the form that kernels read, converted once."""
        if self._blocks is None:
            self._blocks = read_lists(self.stands_for)
        return self._blocks


_by_object: dict[int, Known] = {}  # by the id of the counts tensor; removed when that tensor is freed


def known(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool) -> Known | None:
    """The ``Known`` of these tensor objects, unchanged; None unless ``stand_in`` was called with them."""
    entry = _by_object.get(id(tensors[0]))
    if entry is None or entry.is_exact is not is_exact or entry.sizes != sizes or len(entry.tensors) != len(tensors):
        return None
    for t, same in zip(tensors, entry.tensors):
        if same() is not t:
            return None
    return entry if _states(tensors) == entry.states else None


def known_by_now(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool) -> Known | None:
    """``known``, after calling ``stand_in`` if needed; None for inference tensors only."""
    entry = known(tensors, sizes, is_exact)
    if entry is None:
        stand_in(tensors, sizes, is_exact)
        entry = known(tensors, sizes, is_exact)
    return entry


def are_counted_unwritten(tensors: Sequence[Tensor]) -> bool:
    """``are_unwritten`` for lists without inference tensors."""
    for t in tensors:  # noqa: SIM110 - a generator takes longer
        if t._version:
            return False
    return True


def _states(tensors: Sequence[Tensor]) -> tuple:
    """Versions, addresses and layouts of the lists, in one tuple, since every call builds and compares it."""
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


def _remember(tensors: Sequence[Tensor], sizes: tuple, is_exact: bool, operands: ListOperands) -> None:
    place = id(tensors[0])
    first = ref(tensors[0], partial(_forget, place))
    _by_object[place] = Known((first, *map(ref, tensors[1:])), sizes, is_exact, _states(tensors), operands)


def _forget(place: int, gone: Any) -> None:
    entry = _by_object.get(place)
    if entry is not None and entry.tensors[0] is gone:
        del _by_object[place]
