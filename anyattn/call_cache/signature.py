"""Signatures: the key of a warm call, made of its arguments by the kinds that its entry point declares for them.

``signature`` takes the declaration and returns the function that makes the key. A kind is the Python expression for what an argument adds
to the key: everything that the checks and the plan look at. Numbers and tensors that mods capture are read for every call; the key holds
only those on which the checks or the plan depend.

A call has no signature, and is not remembered, where something listens to torch's operations (function transforms, dispatch modes,
tracing), where a tensor is of a subclass, where a mod can be understood only by tracing it, and where an argument is not of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyattn.mods.float32_scores import LARGEST_SCALE
from anyattn.mods.tracing.cute_mod import native_reading
from anyattn.mods.tracing.fingerprint import Reading, recognise
from anyattn.mods.tracing.trace import TracedMod, is_native
from anyattn.mods.tracing.weak_captures import NEAR_NUMBER
from anyattn.sequences.unread_kvcache import room_for
from anyattn.tensors.comparison import comparison
from anyattn.validate import flex
from anyattn.validate.flash import Options

__all__ = [
    "CANNOT_READ",
    "OPTIONS",
    "PLAIN",
    "Kind",
    "NotCacheable",
    "Signature",
    "fields",
    "identical",
    "is_listened_to",
    "signature",
    "tensor_key",
]


class NotCacheable(Exception):
    """This call cannot be remembered."""


class Signature:
    """The key of a call, and what was read to make it.

    readings: of the mods, in the order of the arguments. aux: the tensors passed along for them. blocks: the block lists, if they were
    read before. sizes: of sequences, which may be no part of the key.
    """

    key: tuple
    readings: tuple[Reading, ...] = ()
    aux: tuple[Tensor, ...] = ()
    blocks: Any = None
    sizes: Any = None


PLAIN = frozenset((Tensor, torch.nn.Parameter))  # a subclass may mean anything by an operation
CANNOT_READ = (NotCacheable, AttributeError, TypeError, ValueError, RuntimeError)  # what reading a wrong argument can raise

# looked up once: every call asks all of them
_are_transforms_active, _count_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack  # type: ignore
_included_keys, _excluded_keys = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set  # type: ignore
_is_traced, _is_grad_enabled, _default_dtype = torch._C._is_tracing, torch.is_grad_enabled, torch.get_default_dtype  # type: ignore


# ---- kinds


def _tensor(size: str, *more: str, strides: str = "{x}.stride()") -> str:
    """is_neg: the sign may be one that memory does not have."""
    properties = ", ".join((size, strides, "{x}.dtype", "{x}.device", "{x}.is_neg()", *more))
    return f"(None if {{x}} is None else ({properties}) if type({{x}}) in PLAIN else _refuse())"


class Kind:
    """What an argument x adds to the key: an expression."""

    ALIGNMENT = "{x}.data_ptr() & 15"
    STORAGE = _tensor("{x}.shape")  # a tensor, or None, that torch's operations read, outside autograd
    ALIGNED = _tensor("{x}.shape", ALIGNMENT)  # and kernels
    TENSOR = _tensor("{x}.shape", ALIGNMENT, "{x}.requires_grad")  # and gradients flow to
    OPERANDS = "_operands({x})"  # the names of three tensors, all of this entry point's, each as TENSOR
    # the number of packed rows is not in the key; whether there are several is, because the stride of a single row is not used
    PACKED_ROWS = _tensor("(s[0] > 1, s[1:]) if len(s := {x}.shape) == 3 else s", ALIGNMENT, "{x}.requires_grad")
    # room for a number of rows instead of the number, and of strides what plans look at
    GROWING = _tensor("_room({x})", ALIGNMENT, strides="_parts_of_strides({x})")
    TENSORS = "(None if {x} is None else _tensors({x}, found))"
    LENGTHS = f"(int if type({{x}}) is int else {STORAGE})"  # a number that is read for every call, or a tensor
    ALIGNED_LENGTHS = f"(int if type({{x}}) is int else {ALIGNED})"
    INT_OR_NONE = "({x} if {x} is None or type({x}) is int else _refuse())"
    VALUE = "{x}, type({x})"  # Python takes 1, 1.0 and True for the same
    VALUES = "(*{x}, *map(type, {x}), type({x}))"
    NAMED_VALUES = "(None if {x} is None else tuple([(n, type(v), v) for n, v in {x}.items()]))"
    FLAG = "(True if {x} else False)"  # whatever Python takes for true
    SCALE = "(None if {x} is None else _usable_number({x}))"  # its value is read for every call
    SCORE_MOD = "(None if {x} is None else _mod({x}, False, found))"
    MASK_MOD = "(None if {x} is None else _mod({x}, True, found))"
    BLOCK_MASK = "(None if {x} is None else _block_mask({x}, listed, found))"  # listed: another argument, see ``FlexCall``
    ABSENT = "(None if {x} is None else _refuse())"
    ELSEWHERE = ""  # read with another argument, or without a bearing on what is remembered


def fields(of: Any, **kinds: str) -> dict[str, str]:
    """The kind of each field of a NamedTuple class; all must be there, so that no argument is left out of a key."""
    assert tuple(kinds) == of._fields, f"{of.__name__}: kinds of {tuple(kinds)} for the fields {of._fields}"
    return kinds


OPTIONS = fields(
    Options, softmax_scale=Kind.SCALE, causal=Kind.VALUE, window_size=Kind.VALUES, softcap=Kind.VALUE, alibi_slopes=Kind.TENSOR,
    sink=Kind.TENSOR, score_mod=Kind.SCORE_MOD, mask_mod=Kind.MASK_MOD, block_sparse_tensors=Kind.ABSENT, aux_tensors=Kind.TENSORS,
    deterministic=Kind.FLAG, return_lse=Kind.FLAG, num_splits=Kind.VALUE, pack_gqa=Kind.VALUE, reads_captured=Kind.ELSEWHERE,
)  # fmt: skip


def signature(entry_point: str, **arguments: str | dict[str, str]) -> Callable[..., Signature | None]:
    """The function of these arguments, by position, that makes the signature of a call; it returns None for a call that has none.

    arguments: the kind of each, or of a NamedTuple the kinds of its ``fields``.

    >>> made = signature("example", x=Kind.TENSOR, causal=Kind.VALUE, scale=Kind.SCALE)
    >>> made(torch.zeros(2, 3), True, 0.1).key == made(torch.ones(2, 3), True, 0.2).key
    True
    >>> made(torch.zeros(2, 3), True, 0.1).key == made(torch.zeros(2, 3), 1, 0.1).key
    False
    """
    unpacked, kinds = [], {}
    for name, kind in arguments.items():
        if isinstance(kind, str):
            kinds[name] = kind
            continue
        assert kinds.keys().isdisjoint(kind), entry_point
        kinds |= kind
        unpacked.append(f"{', '.join(kind)}, = {name}")
    parts = [kind.format(x=name) for name, kind in kinds.items() if kind]
    source = f"""
def signature_of_call({", ".join(arguments)}):
    if is_listened_to():
        return None
    found = Signature()
    try:
        {"; ".join(unpacked) or "pass"}
        found.key = ({entry_point!r}, _is_grad_enabled(), _default_dtype(), {", ".join(parts)})
    except CANNOT_READ:
        return None
    return found
"""
    scope: dict[str, Any] = {}
    exec(compile(source, f"<signature of {entry_point}>", "exec"), globals(), scope)
    return scope["signature_of_call"]  # type: ignore[no-any-return]


def is_listened_to() -> bool:
    """Whether something sees torch's operations before they run; then they are all made, as on a first call."""
    return bool(_are_transforms_active() or _count_modes() or forward_ad._current_level >= 0 or _is_traced())


# ---- what the expressions of the kinds call


def _refuse() -> NoReturn:
    raise NotCacheable


def _room(cache: Tensor) -> tuple:
    entries, rows, heads, width = cache.shape
    return entries, rows and room_for(rows), heads, width  # of no rows there is nothing to multiply


def _parts_of_strides(cache: Tensor) -> tuple:
    """The last one, and whether steps along the others keep 16 bytes aligned."""
    *strides, last = cache.stride()
    size = cache.element_size()
    return last, *[s * size & 15 for s in strides]


def _usable_number(x: Any) -> bool:
    if type(x) not in (float, int) or not abs(x) <= LARGEST_SCALE:
        raise NotCacheable
    return True


def _tensors(given: Any, found: Signature) -> tuple:
    if type(given) not in (list, tuple):
        raise NotCacheable
    found.aux = tuple(given)
    return (*map(tensor_key, given), identical(given))


tensor_key: Callable[[Any], tuple | None] = eval(f"lambda x: {Kind.TENSOR.format(x='x')}")


class _Operands:
    """What the key of a call holds of query, key and value: one object for all of the same properties, as long as any key holds it.

    alignment: the part of ``Kind.TENSOR`` that ``comparison`` leaves out. comparisons: with these tensors, by the dispatch keys that the
    thread adds and leaves out: inference mode has others.
    """

    __slots__ = ("__weakref__", "alignment", "comparisons")

    def __init__(self, alignment: tuple[int, ...]) -> None:
        self.alignment = alignment
        self.comparisons: dict[tuple, Callable[..., bool]] = {}


_operands_by_properties: WeakValueDictionary[tuple, _Operands] = WeakValueDictionary()
_latest_operands: tuple[tuple[Callable[..., bool], tuple, _Operands], ...] = ()  # two: a model's attention may be to itself and to others


def _operands(q: Tensor, k: Tensor, v: Tensor) -> _Operands:
    """All properties at once where they are those of one of the latest two; else one by one, which takes three times as long."""
    global _latest_operands
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or q.is_nested or k.is_nested or v.is_nested:
        raise NotCacheable
    places = q.data_ptr() & 15, k.data_ptr() & 15, v.data_ptr() & 15  # raises for tensors without memory, such as sparse ones
    for are_alike, alignment, latest in _latest_operands:
        if places == alignment and are_alike(q, k, v):
            return latest
    properties = (tensor_key(q), tensor_key(k), tensor_key(v))
    found = _operands_by_properties.get(properties)
    if found is None:  # the first call, and perhaps the only one
        return _operands_by_properties.setdefault(properties, _Operands(places))
    if q is not k and k is not v and v is not q:
        of_thread = (_included_keys().raw_repr(), _excluded_keys().raw_repr())
        are_alike = found.comparisons.get(of_thread) or found.comparisons.setdefault(of_thread, comparison((q, k, v)))
        _latest_operands = ((are_alike, found.alignment, found), *_latest_operands[:1])
    return found


def identical(tensors: Any) -> tuple[int, ...]:
    """Which of the tensors are the same one."""
    return tuple([next(j for j, u in enumerate(tensors) if u is t) for t in tensors]) if len(tensors) > 1 else ()


def _mod(mod: Any, is_mask: bool, found: Signature) -> tuple:
    reading = _reading(mod)
    found.readings += (reading,)
    return _mod_key(reading, is_mask)


def _reading(mod: Any) -> Reading:
    if type(mod) is TracedMod:
        if mod.source is None:
            raise NotCacheable
        return Reading(mod.source.pattern, list(mod.scalars), list(mod.tensors))
    reading = native_reading(mod) if is_native(mod) else recognise(mod)
    if reading is None:
        raise NotCacheable
    return reading


def _mod_key(reading: Reading, is_mask: bool) -> tuple:
    """A mask's numbers decide which keys are seen, so they belong to the key; of a score mod's those that its pattern names. Whether one is
    far away does too: not every backend has room for it."""
    pattern, numbers, tensors = reading
    if is_mask:
        settled: tuple = tuple(numbers)
    else:
        settled = tuple([numbers[s] for s in pattern.fixed]) if pattern.fixed else ()
        for number in numbers:
            if type(number) is int and not -NEAR_NUMBER < number < NEAR_NUMBER:
                settled = (*settled, "far")
                break
    if not tensors:
        return pattern, settled
    return pattern, settled, tuple([tensor_key(t) for t in tensors]), identical(tensors)


def _block_mask(block_mask: Any, listed: TracedMod | None, found: Signature) -> tuple:
    """listed: the mask of a block mask that is given as lists alone."""
    kept = flex.kept_lists(block_mask)
    if kept is None:
        key = flex.lists_facts(block_mask)
    else:
        key, found.blocks = kept.facts, kept.blocks
    return key, _mod(listed or block_mask.mask_mod, True, found)
