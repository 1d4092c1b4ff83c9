"""Warm calls of ``anyattn::attend`` and its backward pass: finds the call cache's entry by the operators' own arguments.

The key contains what ``call_cache.signature`` reads of the corresponding ``FlexCall``, but the programs' texts instead of mods; so a second
call neither decodes mods nor reads a block mask. It contains all captured numbers:
a call with other numbers is looked up in the call cache.

A direct call is first compared with the latest one of the same constants (``Repeated``), which takes one comparison of all tensors instead
of a key built from their properties.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache import attention, calls
from anyattn.call_cache.signature import PLAIN, Kind, NotCacheable, Signature, bypasses_cache, identical, tensor_key
from anyattn.custom_ops import list_operands
from anyattn.custom_ops.direct import needs_dispatcher
from anyattn.custom_ops.list_operands import Known
from anyattn.mods.float32_scores import LARGEST_SCALE
from anyattn.mods.ir import codec
from anyattn.mods.tracing.fingerprint import Reading
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.tensors import autocast
from anyattn.tensors.comparison import comparison

__all__ = ["Reader", "direct", "key_of", "remember", "warm_call"]


class Reader(NamedTuple):
    """The source of a mod's run-time values: its numbers, and its range in the score's or the masks' captured tensors."""

    is_score: bool
    numbers: list[int | float]
    start: int
    stop: int

    def read(self, score_tensors: list[Tensor], mask_tensors: list[Tensor]) -> Reading:
        tensors = score_tensors if self.is_score else mask_tensors
        return Reading(None, self.numbers, tensors[self.start : self.stop])  # type: ignore[arg-type]  # whose pattern is in the key


class WarmCall(NamedTuple):
    """remembered: the call cache's entry. readers: of its mods; none if the mods have no run-time values."""

    remembered: calls.RememberedCall
    readers: tuple[Reader, ...]


class Repeated(NamedTuple):
    """A call that may skip the dispatcher, and the tests by which a later call with the same constants has the same key.

    nothing: the empty tensor that is returned without max_scores. tensor_count, are_alike: the number of the call's tensors, and the test
    that other tensors have the same types, dtypes, devices, shapes, strides, dispatch keys and requires_grad. captured: ``_captured`` of
    the tensors besides q, k and v, None if there are none. reads_lists: whether the forward pass reads block lists. sizes, facts: of
    ``Known``. launch: a backend's ``repeater``. fields: of the problem. launch and fields are None if mods capture tensors or k and v are
    expanded.
    """

    warm: WarmCall
    nothing: Tensor
    tensor_count: int
    are_alike: Callable[..., bool]
    captured: tuple | None
    reads_lists: bool
    sizes: tuple
    facts: object
    launch: Callable[..., tuple | None] | None
    fields: dict[str, Any] | None
    plan: Plan
    backend: Any


_warm: calls.TwoGenerationCache[WarmCall] = calls.TwoGenerationCache()
_direct: calls.TwoGenerationCache[Repeated] = calls.TwoGenerationCache()
_latest: calls.TwoGenerationCache[Repeated] = calls.TwoGenerationCache()  # by all arguments that are not tensors


def _mods_key(programs: str, numbers: list[int], tensors: list[Tensor]) -> tuple:
    count = _tensors_of(programs)
    if not count:
        return programs, *numbers
    captured = tensors[:count]
    return programs, *numbers, tuple([tensor_key(t) for t in captured]), identical(captured)


@lru_cache(maxsize=1024)
def _tensors_of(programs: str) -> int:
    return sum(len(codec.decode(program).tensor_slots) for program in codec.separated(programs))


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
    "exactness, scale, wants_max, deterministic, options, backend"
)
_scope = {
    "PLAIN": PLAIN, "_refuse": _refuse, "_is_grad_enabled": torch.is_grad_enabled, "_default_dtype": torch.get_default_dtype,
    "_mods_key": _mods_key,
}  # fmt: skip
_key: Callable[..., tuple] = eval(f"lambda {_NAMES}, lists: {_KEY}", _scope)


def key_of(operands: Any, lists: Known | None) -> tuple | None:
    """The key of an operator's call, whose operands are an ``Attend``; None if it is not remembered. lists: its block lists."""
    if not _is_usable(operands.scale) or bypasses_cache():
        return None
    try:
        return _key(*operands[:4], *operands.score, *operands.masks, *operands[6:], lists)
    except NotCacheable:
        return None


def _is_usable(scale: Any) -> bool:
    return type(scale) is float and -LARGEST_SCALE <= scale <= LARGEST_SCALE


def warm_call(key: tuple, operands: Any, lists: Known | None) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a warm call; None if the call is not warm."""
    warm = _warm.get(key)
    if warm is None:
        return None
    q, k, v, sink = operands[:4]
    return _filled(warm, q, k, v, sink, operands.score.score_tensors, operands.masks.mask_tensors, operands.scale, lists)  # type: ignore[no-any-return]


def _filled(warm: WarmCall, q: Tensor, k: Tensor, v: Tensor, sink: Any, score: Any, mask: Any, scale: float, lists: Any) -> Any:
    remembered, readers = warm
    signature = _signature(readers, score, mask)
    if lists is None:
        return attention.flex_again(remembered, q, k, v, sink, scale, signature, None)
    if remembered.has_lists:
        signature.blocks = lists.read_blocks()
    return attention.flex_again(remembered, q, k, v, sink, scale, signature, lists.stands_for)


def _signature(readers: tuple[Reader, ...], score: list[Tensor], mask: list[Tensor]) -> Signature:
    signature = Signature()
    if readers:
        signature.readings = tuple([reader.read(score, mask) for reader in readers])
    return signature


def remember(key: tuple, remembered: calls.RememberedCall, readers: tuple[Reader, ...]) -> None:
    """Remembers a call that is in the call cache. readers: of its mods, in the order of ``FlexCall``."""
    is_fixed = all(m is None or m.fixed is not None for m in (remembered.score, *remembered.masks))
    _warm.put(key, WarmCall(remembered, () if is_fixed else readers))


_CONSTANTS = """(
    score_program, *score_numbers, mask_programs, *mask_numbers, *block_size, is_exact, scale, wants_max, deterministic, options, backend,
    sink is None, _is_grad_enabled(), _default_dtype(),
)"""
_TENSORS = "(q, k, v, *(() if sink is None else (sink,)), *score_tensors, *mask_tensors, *block_lists)"


def direct(operator: Any) -> Callable[..., Any]:
    """The direct call of ``anyattn::attend`` (``direct.py``), with a fast path for repeated calls."""
    source = f"""
def call({_NAMES}):
    if not (type(scale) is float and -LARGEST_SCALE <= scale <= LARGEST_SCALE) or needs_dispatcher():
        return first({_NAMES})
    is_exact = block_size[0] != 0 and still_follow(exactness, block_lists, mask_programs, mask_tensors)
    constants, tensors, lists = {_CONSTANTS}, {_TENSORS}, None
    repeated = latest(constants)
    if (
        repeated is None or len(tensors) != repeated.tensor_count or not repeated.are_alike(*tensors)
        or (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15
        or (repeated.captured is not None and repeated.captured != captured(sink, score_tensors, mask_tensors))
        or (block_lists and not repeated.reads_lists and not are_counted_unwritten(block_lists))
    ):
        repeated = None
    if block_size[0] and (repeated is None or repeated.reads_lists):
        sizes = (tuple(block_size), (q.shape[2], k.shape[2])) if repeated is None else repeated.sizes
        lists = known_lists(block_lists, sizes, is_exact)
        if lists is None:
            return first({_NAMES})
        if repeated is not None and lists.facts is not repeated.facts:
            repeated = None
    if repeated is None:
        try:
            key = {_KEY}
        except NotCacheable:
            return first({_NAMES})
        repeated = get(key)
        if repeated is None:
            return first_call(first, ({_NAMES}), key, lists, constants, tensors)
        put_latest(constants, repeated)
    if repeated.launch is not None and not is_autocast():
        results = repeated.launch(q, k, v, sink)
        if results is not None:
            return results if wants_max else (results[0], results[1], repeated.nothing)
    if repeated.fields is None:
        problem, plan = filled(repeated.warm, q, k, v, sink, score_tensors, mask_tensors, scale, lists)
    else:
        plan = repeated.plan
        problem = problem_of({{
            **repeated.fields, "q": q, "k": k, "v": v, "sink": sink, "scale": scale,
            "blocks": lists.read_blocks() if repeated.reads_lists else None,
        }})
    result = forward(problem, plan) if is_autocast() else repeated.backend.forward(problem, plan)
    return result.out, result.lse, result.max_scores if wants_max else repeated.nothing
"""
    scope = {
        **_scope, "LARGEST_SCALE": LARGEST_SCALE, "NotCacheable": NotCacheable, "needs_dispatcher": needs_dispatcher, "filled": _filled,
        "known_lists": list_operands.known_by_now, "get": _direct.get, "first": operator.direct, "first_call": _first_call,
        "forward": autograd.forward, "latest": _latest.get, "put_latest": _latest.put, "captured": _captured, "is_autocast": autocast.is_on,
        "are_counted_unwritten": list_operands.are_counted_unwritten, "problem_of": Problem.of_fields,
        "still_follow": list_operands.still_follow,
    }  # fmt: skip
    exec(compile(source, "<direct call of attend>", "exec"), scope)
    return scope["call"]  # type: ignore[no-any-return]


def _captured(sink: Tensor | None, *of_mods: list[Tensor]) -> tuple:
    """The properties of a call's other tensors that ``are_alike`` does not compare: alignment, and which of them are the same object."""
    aligned = [t.data_ptr() & 15 for tensors in of_mods for t in tensors]
    return sink is not None and sink.data_ptr() & 15, *aligned, *map(identical, of_mods)


def _first_call(first: Callable[..., Any], values: tuple, key: tuple, lists: Known | None, constants: tuple, tensors: tuple) -> Any:
    """Runs a call, and remembers it if the next one may skip the dispatcher and the call cache has its entry."""
    results = first(*values)
    # the key contains the negative bits, and requires_grad as far as it matters
    if (warm := _warm.get(key)) is not None and first.may_pass(*values):  # type: ignore[attr-defined]
        repeated = _repeated(warm, values, lists, tensors, results[1].new_empty(0))
        _direct.put(key, repeated)
        _latest.put(constants, repeated)
    return results


def _repeated(warm: WarmCall, values: tuple, lists: Known | None, tensors: tuple, nothing: Tensor) -> Repeated:
    q, k, v, sink, score_tensors, mask_tensors, scale = *values[:4], values[6], values[9], values[13]
    remembered, readers = warm
    backend = autograd.backend_of(remembered.plan)
    problem, plan = _filled(warm, q, k, v, sink, score_tensors, mask_tensors, scale, lists)
    captured = None if sink is None and not score_tensors and not mask_tensors else _captured(sink, score_tensors, mask_tensors)
    fields = repeater = None
    if not remembered.shares_keys and all(r.start == r.stop for r in readers):  # the mods' numbers are among the constants
        fields = remembered.filled(None, None, None, None, None, _signature(readers, score_tensors, mask_tensors))
        repeater = getattr(backend, "repeater", None)
    reads_lists = remembered.has_lists and (fields is None or backend.reads_lists(problem, plan))
    return Repeated(
        warm, nothing, len(tensors), comparison(tensors), captured, reads_lists, () if lists is None else lists.sizes,
        None if lists is None else lists.facts, None if repeater is None else repeater(problem, plan), fields, plan, backend,
    )  # fmt: skip
