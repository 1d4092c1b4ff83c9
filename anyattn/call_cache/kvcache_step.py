"""Warm calls of ``flash_attn_with_kvcache`` on a GPU, whose tables the host does not read: the signature determines all host work.

A cache that is only read may grow from call to call, as Transformers' dynamic caches do. It is planned for the capacity ``room_for`` its
rows; calls whose checks also hold for that capacity share a signature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anyattn import autograd, planner
from anyattn.call_cache import latest
from anyattn.call_cache.calls import RememberedCall, known, remember, remember_again, score_of_user
from anyattn.call_cache.replays import Replays, Results, Values
from anyattn.call_cache.signature import OPTIONS, PLAIN, Kind, Signature, fields, signature, values_of
from anyattn.kvcache import append
from anyattn.kvcache.quantise import is_written
from anyattn.kvcache.scales import kv_scales
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import CacheStep, CacheTables, StoredCache, room_for
from anyattn.tensors import kinds
from anyattn.tensors.strides import innermost
from anyattn.triton_tools.replay import Replay
from anyattn.validate import flash
from anyattn.validate.flash import Options, laid_out
from anyattn.validate.kvcache import (
    CacheArguments,
    CacheCall,
    cache_call,
    cached_rows,
    check_no_captured_gradients,
    check_no_gradients,
    heads_first,
)

__all__ = ["OPTIONS_WITHOUT_MODS", "attended", "decode", "extents_of", "named_tensors", "step_call"]

OPTIONS_WITHOUT_MODS = OPTIONS | dict.fromkeys(("score_mod", "mask_mod", "alibi_slopes", "aux_tensors"), Kind.ABSENT)
_ARGUMENTS = fields(
    CacheArguments, q=Kind.TENSOR, k_cache=Kind.TENSOR, v_cache=values_of(Kind.TENSOR, "k_cache"), k=Kind.TENSOR, v=Kind.TENSOR,
    rotary_cos=Kind.TENSOR, rotary_sin=Kind.TENSOR, cache_seqlens=Kind.ALIGNED_LENGTHS, cache_batch_idx=Kind.TENSOR,
    cache_leftpad=Kind.TENSOR, page_table=Kind.TENSOR, cu_seqlens_q=Kind.TENSOR, max_seqlen_q=Kind.INT_OR_NONE,
    rotary_interleaved=Kind.FLAG, validate=Kind.VALUE, saturated=Kind.TENSOR, rotary_last=Kind.FLAG,
)  # fmt: skip
_of_call = signature("flash_attn_with_kvcache, unread", arguments=_ARGUMENTS, options=OPTIONS, backend=Kind.VALUE)
_of_room = signature(
    "flash_attn_with_kvcache, unread and growing",
    arguments=_ARGUMENTS | {"k_cache": Kind.GROWING, "v_cache": values_of(Kind.GROWING, "k_cache")},
    options=OPTIONS | dict.fromkeys(("k_descale", "v_descale"), Kind.GROWING_DESCALE), backend=Kind.VALUE,
)  # fmt: skip


def decode(arguments: CacheArguments, options: Options, backend: str | None, is_operator: bool = False) -> Results | None:
    """out and lse of a call, laid out as q; None if an eager call must run as its operator. Raises as ``step_call``."""
    call_signature = _of_call(arguments, options, backend)
    warm = known(call_signature)
    if warm is not None and call_signature is not None:
        return _repeated(arguments, options, backend, warm, call_signature)
    if planner.misfits((arguments.q,), backend):
        return decode(arguments._replace(q=innermost(arguments.q)), options, backend, is_operator)
    is_grad_mode = torch.is_grad_enabled()
    with torch.no_grad():
        step = _step_of(arguments, options, backend, is_operator, call_signature, is_grad_mode)
        return None if step is None else attended(*step, arguments.cu_seqlens_q is not None)


def step_call(arguments: CacheArguments, options: Options, backend: str | None, is_operator: bool = False) -> tuple[CacheCall, Plan] | None:
    """The checked call and its plan; nothing is written. None if the call must run as its operator. Tensors may require grad."""
    exact = _in_mode(False, partial(_of_call, arguments, options, backend))
    return _step_of(arguments, options, backend, is_operator, exact, False)


def attended(call: Any, plan: Plan, is_packed: bool) -> Results:
    """out and lse of a checked call, laid out as its queries. call: as ``CacheCall``. Grad mode is off."""
    out, lse, _ = autograd.compute(call.prepared(plan), plan)
    return laid_out(out, lse, is_packed)


def _step_of(
    arguments: CacheArguments, options: Options, backend: str | None, is_operator: bool, exact: Signature | None, is_grad_mode: bool
) -> tuple[CacheCall, Plan] | None:
    """``step_call`` of a call with the signature ``exact``, made in this grad mode. Raises for a tensor that requires grad in grad
    mode; a signature that is known tells that none does."""
    warm = known(exact)
    if warm is not None and exact is not None:
        _check_appended(arguments, options, warm)
        return _warm_call(arguments, options, warm, exact), warm.plan
    may_grow = arguments.k is None and arguments.page_table is None
    room = _in_mode(is_grad_mode, partial(_of_room, arguments, options, backend)) if may_grow and exact is not None else None
    warm = known(room)
    if warm is not None and room is not None and exact is not None and _have_equal_rows(arguments, options):
        remember_again(exact, warm)
        return _warm_call(arguments, options, warm, room), warm.plan
    if is_grad_mode:
        check_no_gradients(arguments, options)
    if not is_operator and kinds.belong_to_operators(named_tensors(arguments, options)):
        return None
    call = cache_call(arguments, options)
    if is_grad_mode:
        check_no_captured_gradients(call.problem.score)
    larger = _with_room(call, options) if may_grow else None
    problem, signature_of, call_signature = (call.problem, _of_call, exact) if larger is None else (larger, _of_room, room)
    plan = planner.planned(problem, backend)
    if call_signature is not None:
        recompute = partial(_in_mode, is_grad_mode, partial(signature_of, arguments, options, backend))
        replays = Replays.of(call.problem, plan)
        step = call.step
        of_step: dict[str, Any] = {"extents": extents_of(arguments), "sizes": step.sizes, "follows": step.follows, "replays": replays}
        remember(call_signature, recompute, problem, plan, score_of_user(options, problem), (options.alibi_slopes,), **of_step)
    return call, plan


def _have_equal_rows(arguments: CacheArguments, options: Options) -> bool:
    """Whether both caches have equally many rows, and scales of each key too: the signature of a growing cache has no such number. If not,
    the call's checks tell what is wrong."""
    rows = arguments.k_cache.shape[1]
    if arguments.v_cache.shape[1] != rows:
        return False
    for descale in (options.k_descale, options.v_descale):
        if isinstance(descale, Tensor) and descale.ndim == 3 and descale.shape[1] not in (1, rows):
            return False
    return True


def _in_mode(is_grad_mode: bool, signature_of: Callable[[], Signature | None]) -> Signature | None:
    with torch.set_grad_enabled(is_grad_mode):
        return signature_of()


def _with_room(call: CacheCall, options: Options) -> Problem | None:
    """The call's problem with a cache of ``room_for`` its rows; None if its mods would differ there."""
    step, problem = call.step, call.problem
    sequences = StoredCache(step.tables, step.sizes._replace(capacity=room_for(step.sizes.capacity)), problem.q.device)
    enlarged = flash.problem_of(step.q, step.k_cache, step.v_cache, sequences, options._replace(reads_captured=False), 0)
    mods, others = ((p.score, *p.predicates) for p in (problem, enlarged))
    return enlarged if len(mods) == len(others) and all(map(_is_same, mods, others)) else None


def _is_same(mod: TracedMod | None, other: TracedMod | None) -> bool:
    if mod is None or other is None:
        return mod is other
    return mod.expr == other.expr and mod.scalars == other.scalars and all(map(operator.is_, mod.tensors, other.tensors))


def named_tensors(arguments: CacheArguments, options: Options) -> dict[str, Any]:
    """The tensor arguments of a call by name, including wrong values passed for them."""
    of_options = {name: getattr(options, name) for name in ("sink", "alibi_slopes", "k_descale", "v_descale")}
    return {**arguments._asdict(), **of_options}


def extents_of(arguments: CacheArguments) -> tuple[int, ...]:
    """The extents that ``append.check_step`` needs; empty if the call does not append."""
    return () if arguments.k is None else append.reaches(arguments.q, arguments.k, arguments.v, arguments.k_cache, arguments.v_cache)


# ---- a warm call


def _repeated(arguments: CacheArguments, options: Options, backend: str | None, warm: RememberedCall, call_signature: Signature) -> Results:
    """The results of a warm call, from a replay if there is one."""
    sizes, replays = warm.sizes, warm.replays
    assert sizes is not None
    is_read = type(arguments.cache_seqlens) is Tensor
    if not is_read:
        capacity = arguments.k_cache.shape[1] if sizes.page_size == 0 else sizes.capacity
        arguments = arguments._replace(cache_seqlens=cached_rows(arguments.cache_seqlens, sizes.batch, capacity, arguments.q.device))
    is_packed = arguments.cu_seqlens_q is not None
    _check_appended(arguments, options, warm)
    if replays is None:
        with torch.no_grad():
            return attended(_warm_call(arguments, options, warm, call_signature), warm.plan, is_packed)
    tensors = [x for x in (*arguments, *options) if type(x) in PLAIN]  # a signature has no others; isinstance takes longer
    values = warm.values(tensors, options.softmax_scale, call_signature, (options.alibi_slopes,))
    results = replays.results(values)
    if results is not None:
        if is_read:
            latest.decoding.note(replays.once(values, partial(_latest_call, arguments, options, backend, values, results, warm)))
        return results
    with torch.no_grad():
        return replays.made(values, lambda: attended(_warm_call(arguments, options, warm, call_signature), warm.plan, is_packed))


def _latest_call(
    arguments: CacheArguments, options: Options, backend: str | None, values: Values, results: Results, warm: RememberedCall, replay: Replay
) -> latest.LatestCall | None:
    memory = None
    if arguments.k is not None and arguments.v is not None:
        written = [arguments.k_cache, arguments.v_cache]
        scales = zip((options.k_descale, options.v_descale), (arguments.k_cache, arguments.v_cache), strict=True)
        written += [descale for descale, cache in scales if is_written(descale, cache)]
        memory = latest.Memory(
            latest.Written(values.tensors, written, (arguments.q, arguments.k, arguments.v)), partial(_check_flat, warm=warm)
        )
    return latest.LatestCall.of((*arguments, *options[:-1], backend), replay, values, results, memory)


def _check_flat(flat: Sequence[Any], warm: RememberedCall) -> None:
    count = len(CacheArguments._fields)
    _check_appended(CacheArguments(*flat[:count]), Options(*flat[count:-1]), warm)


def _check_appended(arguments: CacheArguments, options: Options, warm: RememberedCall) -> None:
    """The checks of a call that appends which depend on more than its signature."""
    if arguments.k is not None:
        append.check_step(arguments.q, arguments.k, arguments.v, arguments.k_cache, arguments.v_cache, warm.extents)
        append.check_scales(options.k_descale, options.v_descale, arguments.k_cache, arguments.v_cache)


def _warm_call(arguments: CacheArguments, options: Options, warm: RememberedCall, call_signature: Signature) -> CacheCall:
    """The call of a known signature, which passes ``_check_appended``."""
    q, sizes = arguments.q, warm.sizes
    assert sizes is not None
    rows = arguments.k_cache.shape[1]
    if sizes.page_size == 0 and sizes.capacity != rows:
        sizes = sizes._replace(capacity=rows)
    cached = cached_rows(arguments.cache_seqlens, sizes.batch, sizes.capacity, q.device)
    tables = CacheTables(cached, arguments.cache_leftpad, arguments.cache_batch_idx, arguments.cu_seqlens_q, arguments.page_table)
    k, v = arguments.k_cache.transpose(1, 2), arguments.v_cache.transpose(1, 2)
    filled = warm.filled(heads_first(q), k, v, options.sink, options.softmax_scale, call_signature, (options.alibi_slopes,))
    filled["sequences"] = StoredCache(tables, sizes, q.device)
    filled["kv_scales"] = kv_scales(options.k_descale, options.v_descale, k, sizes.batch)
    step = CacheStep(
        q, arguments.k_cache, arguments.v_cache, arguments.k, arguments.v, tables, sizes, arguments.rotary_cos, arguments.rotary_sin,
        bool(arguments.rotary_interleaved), warm.follows, options.k_descale, options.v_descale, arguments.saturated,
        bool(arguments.rotary_last),
    )  # fmt: skip
    return CacheCall(Problem.of_fields(filled), step, arguments)
