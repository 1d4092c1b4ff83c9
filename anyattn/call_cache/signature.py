"""Signatures: keys of warm calls, built from the arguments by the kinds that an entry point declares for them.

``signature`` takes the declaration and returns the function that builds the key. A kind is the Python expression for an argument's part of
the key: every property that checks and plan depend on. Numbers and tensors that mods capture are read at every call; the key contains only
those on which the checks or the plan depend.

A call has no signature, and is not remembered, if torch's operations are intercepted (function transforms, dispatch modes, tracing), if a
tensor is of a subclass, if a mod can only be understood by tracing it, or if an argument is not of its kind.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from anyattn.determinism import OPEN, mode_of
from anyattn.mods.dropout import Seeded
from anyattn.mods.float32_scores import LARGEST_SCALE, is_ordinary_scale
from anyattn.mods.tracing.cute_mod import native_reading
from anyattn.mods.tracing.fingerprint import Reading, recognise
from anyattn.mods.tracing.trace import TracedMod, is_native
from anyattn.mods.tracing.weak_captures import NEAR_NUMBER, negative_zeros
from anyattn.sequences.unread_kvcache import room_for
from anyattn.sparsity.read_lists import kept_lists, lists_facts
from anyattn.tensors.comparison import comparison
from anyattn.tensors.strides import begins
from anyattn.validate.flash import Options

__all__ = [
    "CANNOT_READ",
    "OPTIONS",
    "PLAIN",
    "Kind",
    "NotCacheable",
    "Signature",
    "bypasses_cache",
    "fields",
    "identical",
    "signature",
    "tensor_key",
    "values_of",
]


class NotCacheable(Exception):
    """This call cannot be remembered."""


class Signature:
    """The key of a call, and the values read while building it.

    readings: of the mods, in the order of the arguments. aux: aux_tensors. blocks: the block lists, if they have been read. sizes: of the
    sequences, which need not be part of the key. dropout: of the call; only its presence is part of the key.
    """

    key: tuple
    readings: tuple[Reading, ...] = ()
    aux: tuple[Tensor, ...] = ()
    blocks: Any = None
    sizes: Any = None
    dropout: Seeded | None = None


PLAIN = frozenset((Tensor, torch.nn.Parameter))  # a subclass may redefine any operation
CANNOT_READ = (NotCacheable, AttributeError, TypeError, ValueError, RuntimeError)  # the exceptions that reading a wrong argument may raise

# looked up once: every call uses all of them
_are_transforms_active, _count_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack  # type: ignore
_included_keys, _excluded_keys = torch._C._dispatch_tls_local_include_set, torch._C._dispatch_tls_local_exclude_set  # type: ignore
_is_traced, _is_grad_enabled, _default_dtype = torch._C._is_tracing, torch.is_grad_enabled, torch.get_default_dtype  # type: ignore


# ---- kinds


def _tensor(size: str, *more: str, strides: str = "{x}.stride()") -> str:
    """The expression of a tensor kind. is_neg: torch may store a sign outside of memory (negative bit)."""
    properties = ", ".join((size, strides, "{x}.dtype", "{x}.device", "{x}.is_neg()", *more))
    return f"(None if {{x}} is None else ({properties}) if type({{x}}) in PLAIN else _refuse())"


class Kind:
    """The part of the key of an argument x, as an expression."""

    ALIGNMENT = "{x}.data_ptr() & 15"
    STORAGE = _tensor("{x}.shape")  # a tensor, or None, that torch operations read, outside autograd
    TENSOR = _tensor("{x}.shape", ALIGNMENT, "{x}.requires_grad")  # the same, but kernels read it, and it may receive or refuse a gradient
    OPERANDS = "_operands({x})"  # x: the names of three arguments, each of the kind TENSOR
    # the number of packed rows is not in the key, only whether there are several, because the stride of a single row is not used
    PACKED_ROWS = _tensor("(s[0] > 1, s[1:]) if len(s := {x}.shape) == 3 else s", ALIGNMENT, "{x}.requires_grad")
    # the capacity planned for the rows instead of their number, and only the properties of strides that plans use
    GROWING = _tensor("_room({x})", ALIGNMENT, "{x}.requires_grad", strides="_parts_of_strides({x})")
    # a number, or factors that kernels read
    DESCALE = f"(None if {{x}} is None else {{x}} if type({{x}}) is float or type({{x}}) is int else {TENSOR})"
    # the same of a cache that grows, whose factors of each key grow with it
    GROWING_DESCALE = f"({{x}} if type({{x}}) is float or type({{x}}) is int else {_tensor('_keyless({x})', strides='0')})"
    TENSORS = "(None if {x} is None else _tensors({x}, signature))"
    LENGTHS = f"(int if type({{x}}) is int else {STORAGE})"  # a number whose value is read at every call, or a tensor
    ALIGNED_LENGTHS = f"(int if type({{x}}) is int else {TENSOR})"
    INTS = "({x} if type({x}) is int else _ints({x}))"  # an int, or a tuple or list of ints
    INT_OR_NONE = "({x} if {x} is None or type({x}) is int else _refuse())"
    VALUE = "{x}, type({x})"  # the type too: 1, 1.0 and True are equal
    VALUES = "(*{x}, *map(type, {x}), type({x}))"
    NAMED_VALUES = "(None if {x} is None else tuple([(n, type(v), v) for n, v in {x}.items()]))"
    DEVICE = "{x}, type({x}), _current_device()"  # a name without an index means the current device
    FLAG = "(True if {x} else False)"  # the truth value of any object
    DETERMINISTIC = f"(0 if {{x}} is False and {OPEN.__name__}.count == 0 else {mode_of.__name__}({{x}}))"  # False is most calls' mode
    SCALE = "(None if {x} is None else _kind_of_scale({x}))"  # the value is read at every call
    SCORE_MOD = "(None if {x} is None else _mod({x}, False, signature))"
    LISTED_MASK = "_mod({x}, False, signature)"  # a mask whose numbers are read at every call, to make its lists
    MASK_MOD = "(None if {x} is None else _mod({x}, True, signature))"
    BLOCK_MASK = "(None if {x} is None else _block_mask({x}, listed, signature))"  # listed: another argument, see ``FlexCall``
    DROPOUT = "(None if {x} is None else _dropout({x}, signature))"
    SKIP = "(None if {x} is None else {x}.counts is not None)"  # ``problem.Skip``, whose tensors are of one kind
    ABSENT = "(None if {x} is None else _refuse())"
    BEGINS = f"{begins.__name__}({{x}}, {{keys}})"  # of values, which may be the first columns of keys (``Problem.has_one_kv``)
    BEGINS_AT = "{x}.data_ptr() == {keys}.data_ptr()"  # the same of those whose strides are in the key
    ELSEWHERE = ""  # read with another argument, or not relevant to the remembered call


def fields(of: Any, **kinds: str) -> dict[str, str]:
    """The kind of each field of a NamedTuple class; all fields are required, so that no argument is missing from a key."""
    assert tuple(kinds) == of._fields, f"{of.__name__}: kinds of {tuple(kinds)} for the fields {of._fields}"
    return kinds


OPTIONS = fields(
    Options, softmax_scale=Kind.SCALE, causal=Kind.VALUE, window_size=Kind.VALUES, softcap=Kind.VALUE, alibi_slopes=Kind.TENSOR,
    sink=Kind.TENSOR, score_mod=Kind.SCORE_MOD, mask_mod=Kind.MASK_MOD, block_sparse_tensors=Kind.ABSENT, aux_tensors=Kind.TENSORS,
    deterministic=Kind.DETERMINISTIC, return_lse=Kind.FLAG, num_splits=Kind.VALUE, pack_gqa=Kind.VALUE, dropout=Kind.DROPOUT,
    k_descale=Kind.DESCALE, v_descale=Kind.DESCALE, reads_captured=Kind.ELSEWHERE,
)  # fmt: skip


def signature(entry_point: str, **arguments: str | dict[str, str]) -> Callable[..., Signature | None]:
    """A function of these arguments, by position, that returns the signature of a call, or None if it has none.

    arguments: the kind of each argument, or for a NamedTuple the kinds of its ``fields``. The function is generated, because a function for
    each argument takes longer: 10.6 instead of 8.7 us for those of ``flex_attention`` on an EPYC, of a warm call's 11 on that machine.

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
    if bypasses_cache():
        return None
    signature = Signature()
    try:
        {"; ".join(unpacked) or "pass"}
        signature.key = ({entry_point!r}, _is_grad_enabled(), _default_dtype(), {", ".join(parts)})
    except CANNOT_READ:
        return None
    return signature
"""
    scope: dict[str, Any] = {}
    exec(compile(source, f"<signature of {entry_point}>", "exec"), globals(), scope)
    return scope["signature_of_call"]  # type: ignore[no-any-return]


def bypasses_cache() -> bool:
    """Whether torch's operations are intercepted, by modes, transforms or a trace: such calls bypass the cache."""
    return bool(_are_transforms_active() or _count_modes() or forward_ad._current_level >= 0 or _is_traced())


# ---- functions used in the expressions of kinds


def _current_device() -> int:
    """The current CUDA device; -1 before CUDA is used, and so for a build for CUDA on a machine without a driver, where asking raises."""
    return torch.cuda.current_device() if torch.cuda.is_initialized() else -1


def _refuse() -> NoReturn:
    raise NotCacheable


def _dropout(dropout: Seeded, signature: Signature) -> bool:
    signature.dropout = dropout
    return True


def _room(cache: Tensor) -> tuple:
    entries, rows, heads, width = cache.shape
    return entries, rows and room_for(rows), heads, width  # 0 rows stay 0: such a call computes nothing


def _keyless(descale: Tensor) -> tuple:
    """A descale's shape, without the number of keys."""
    shape = tuple(descale.shape)
    return (shape[0], shape[1] > 1, shape[2]) if len(shape) == 3 else shape


def _parts_of_strides(cache: Tensor) -> tuple:
    """The last stride, and each of the others in bytes modulo 16, which determines whether steps keep 16-byte alignment."""
    *strides, last = cache.stride()
    size = cache.element_size()
    return last, *[s * size & 15 for s in strides]


def _ints(numbers: Any) -> tuple[int, ...]:
    if type(numbers) not in (tuple, list):
        raise NotCacheable
    for n in numbers:
        if type(n) is not int:
            raise NotCacheable
    return tuple(numbers)


def _kind_of_scale(x: Any) -> bool:
    """Whether a scale is ordinary: some kernels are for no others."""
    if type(x) not in (float, int) or not abs(x) <= LARGEST_SCALE:
        raise NotCacheable
    return is_ordinary_scale(x)


def _tensors(tensors: Any, signature: Signature) -> tuple:
    if type(tensors) not in (list, tuple):
        raise NotCacheable
    signature.aux = tuple(tensors)
    return (*map(tensor_key, tensors), identical(tensors))


tensor_key: Callable[[Any], tuple | None] = eval(f"lambda x: {Kind.TENSOR.format(x='x')}")


class _Operands:
    """The part of a call's key that stands for query, key and value: one object for all calls with the same properties of the three.

    alignment: the properties that ``comparison`` does not compare, of ``Kind.TENSOR`` and ``Kind.BEGINS_AT``. comparisons: the
    ``comparison`` functions of such tensors, by the dispatch keys that the thread includes and excludes, which differ in inference mode.
    """

    __slots__ = ("__weakref__", "alignment", "comparisons")

    def __init__(self, alignment: tuple[int, ...]) -> None:
        self.alignment = alignment
        self.comparisons: dict[tuple, Callable[..., bool]] = {}


_operands_by_properties: WeakValueDictionary[tuple, _Operands] = WeakValueDictionary()
# of the latest two signatures: a model may alternate between self-attention and cross-attention
_latest_operands: tuple[tuple[Callable[..., bool], tuple, _Operands], ...] = ()


def values_of(kind: str, keys: str) -> str:
    """The kind of an argument of values, by that of its memory. keys: the name of the argument of keys."""
    return f"{kind}, {Kind.BEGINS if kind == Kind.GROWING else Kind.BEGINS_AT}".replace("{keys}", keys)


def _operands(q: Tensor, k: Tensor, v: Tensor) -> _Operands:
    """The object that stands for the properties of q, k and v.

    If one of the latest two calls had the same properties, one comparison in C++ finds its object; reading the properties takes three times
    as long. Raises as reading the key does, and also for tensors that ``comparison`` does not accept.
    """
    global _latest_operands
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN or q.is_nested or k.is_nested or v.is_nested:
        raise NotCacheable
    at_k, at_v = k.data_ptr(), v.data_ptr()  # raises for tensors without memory, such as sparse ones
    places = q.data_ptr() & 15, at_k & 15, at_v & 15, at_k == at_v
    for are_alike, alignment, latest in _latest_operands:
        if places == alignment and are_alike(q, k, v):
            return latest
    properties = (tensor_key(q), tensor_key(k), tensor_key(v), at_k == at_v)
    operands = _operands_by_properties.get(properties)
    if operands is None:  # the first call with these properties; a comparison is made at the second one
        return _operands_by_properties.setdefault(properties, _Operands(places))
    if q is not k and k is not v and v is not q:
        of_thread = (_included_keys().raw_repr(), _excluded_keys().raw_repr())
        are_alike = operands.comparisons.get(of_thread) or operands.comparisons.setdefault(of_thread, comparison((q, k, v)))
        _latest_operands = ((are_alike, operands.alignment, operands), *_latest_operands[:1])
    return operands


def identical(tensors: Any) -> tuple[int, ...]:
    """For each tensor the place of the first tensor that is the same object; () for at most one tensor."""
    return tuple([next(j for j, u in enumerate(tensors) if u is t) for t in tensors]) if len(tensors) > 1 else ()


def _mod(mod: Any, is_mask: bool, signature: Signature) -> tuple:
    reading = _reading(mod)
    signature.readings += (reading,)
    return _mod_key(reading, is_mask)


def _reading(mod: Any) -> Reading:
    if type(mod) is TracedMod:
        return _traced_reading(mod)
    reading = native_reading(mod) if is_native(mod) else recognise(mod)
    if reading is None:
        raise NotCacheable
    return reading


def _traced_reading(mod: TracedMod) -> Reading:
    """The reading of a mod that is traced already. Its values are in its program's order, which must be the order of its pattern."""
    if mod.source is None:
        raise NotCacheable
    pattern, scalars, tensors = mod.source
    are_all = len(mod.scalars) > pattern.fixed[-1] if pattern.fixed else True
    if not are_all or scalars != tuple(range(len(mod.scalars))) or tensors != tuple(range(len(mod.tensors))):
        raise NotCacheable
    return Reading(pattern, list(mod.scalars), list(mod.tensors))


def _mod_key(reading: Reading, is_mask: bool) -> tuple:
    """The key of a mod: for a mask all its numbers, since they decide which keys are visible; for other mods the numbers that their pattern
    fixes, and whether any integer has a magnitude of ``NEAR_NUMBER`` or more, which not every backend supports."""
    pattern, numbers, tensors = reading
    if is_mask:
        settled: tuple = tuple(numbers)
    else:
        settled = tuple([numbers[s] for s in pattern.fixed]) if pattern.fixed else ()
        for number in numbers:
            if type(number) is int and not -NEAR_NUMBER < number < NEAR_NUMBER:
                settled = (*settled, "far")
                break
    if 0.0 in settled:
        settled = (settled, negative_zeros(settled))
    if not tensors:
        return pattern, settled
    return pattern, settled, tuple([tensor_key(t) for t in tensors]), identical(tensors)


def _block_mask(block_mask: Any, listed: TracedMod | None, signature: Signature) -> tuple:
    """The key of a block mask. listed: the mask of a block mask that is passed as lists only."""
    kept = kept_lists(block_mask)
    if kept is None:
        key = lists_facts(block_mask)
    else:
        key, signature.blocks = kept.facts, kept.blocks
    mask = _mod(listed or block_mask.mask_mod, True, signature)
    provenance = getattr(block_mask, "_made_of", None)
    # whether the lists still follow from what the mask captures; operators have found out before
    return key, mask, listed is not None or (provenance is not None and provenance.holds(signature.readings[-1]))
