"""Warm calls of ``flash_attn_with_kvcache`` on a GPU, whose tables the host does not read: the signature determines all host work.

A cache that is only read may grow from call to call, as Transformers' dynamic caches do. It is planned for the capacity ``room_for`` its
rows; calls whose checks also hold for that capacity share a signature.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from functools import partial
from typing import Any

from anyattn import planner
from anyattn.call_cache.calls import RememberedCall, known, remember, score_of_user
from anyattn.call_cache.signature import OPTIONS, Kind, Signature, fields, signature
from anyattn.kvcache import append
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import CacheStep, CacheTables, StoredCache, room_for
from anyattn.tensors import kinds
from anyattn.validate import flash
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheCall, Given, cache_call, cached_rows, heads_first

__all__ = ["OPTIONS_WITHOUT_MODS", "extents_of", "named_tensors", "step_call"]

OPTIONS_WITHOUT_MODS = OPTIONS | dict.fromkeys(("score_mod", "mask_mod", "alibi_slopes", "aux_tensors"), Kind.ABSENT)
_GIVEN = fields(
    Given, q=Kind.ALIGNED, k_cache=Kind.ALIGNED, v_cache=Kind.ALIGNED, k=Kind.ALIGNED, v=Kind.ALIGNED, rotary_cos=Kind.ALIGNED,
    rotary_sin=Kind.ALIGNED, cache_seqlens=Kind.ALIGNED_LENGTHS, cache_batch_idx=Kind.ALIGNED, cache_leftpad=Kind.ALIGNED,
    page_table=Kind.ALIGNED, cu_seqlens_q=Kind.ALIGNED, max_seqlen_q=Kind.INT_OR_NONE, rotary_interleaved=Kind.FLAG, validate=Kind.VALUE,
)  # fmt: skip
_of_call = signature("flash_attn_with_kvcache, unread", given=_GIVEN, options=OPTIONS, backend=Kind.VALUE)
_of_room = signature(
    "flash_attn_with_kvcache, unread and growing", given=_GIVEN | dict.fromkeys(("k_cache", "v_cache"), Kind.GROWING), options=OPTIONS,
    backend=Kind.VALUE,
)  # fmt: skip


def step_call(given: Given, options: Options, backend: str | None, is_operator: bool = False) -> tuple[CacheCall, Plan] | None:
    """The checked call and its plan; nothing is written. None if the call must run as its operator."""
    may_grow = given.k is None and given.page_table is None
    signed: dict[Callable, Signature | None] = {}
    for made in (_of_room, _of_call) if may_grow else (_of_call,):
        found = signed[made] = made(given, options, backend)
        warm = known(found)
        if warm is not None and found is not None:
            return _warm_call(given, options, warm, found), warm.plan
    if not is_operator and kinds.belong_to_operators(named_tensors(given, options)):
        return None
    call = cache_call(given, options)
    larger = _with_room(call, options) if may_grow else None
    problem, made = (call.problem, _of_call) if larger is None else (larger, _of_room)
    plan = planner.planned(problem, backend)
    found = signed[made]
    if found is not None:
        again = partial(made, given, options, backend)
        of_step = {"extents": extents_of(given), "sizes": call.step.sizes, "follows": call.step.follows}
        remember(found, again, problem, plan, score_of_user(options, problem), (options.alibi_slopes,), **of_step)
    return call, plan


def _with_room(call: CacheCall, options: Options) -> Problem | None:
    """The call's problem with a cache of ``room_for`` its rows; None if its mods would differ there."""
    step, problem = call.step, call.problem
    sequences = StoredCache(step.tables, step.sizes._replace(capacity=room_for(step.sizes.capacity)), problem.q.device)
    found = flash.problem_of(step.q, step.k_cache, step.v_cache, sequences, options._replace(reads_captured=False), 0)
    mods, others = ((p.score, *p.predicates) for p in (problem, found))
    return found if len(mods) == len(others) and all(map(_is_same, mods, others)) else None


def _is_same(mod: TracedMod | None, other: TracedMod | None) -> bool:
    if mod is None or other is None:
        return mod is other
    return mod.expr == other.expr and mod.scalars == other.scalars and all(map(operator.is_, mod.tensors, other.tensors))


def named_tensors(given: Given, options: Options) -> dict[str, Any]:
    """The tensor arguments of a call by name, including wrong values passed for them."""
    return {**given._asdict(), "sink": options.sink, "alibi_slopes": options.alibi_slopes}


def extents_of(given: Given) -> tuple[int, ...]:
    """The extents that ``append.check_step`` needs; empty if the call does not append."""
    return () if given.k is None else append.reaches(given.q, given.k, given.v, given.k_cache, given.v_cache)


def _warm_call(given: Given, options: Options, warm: RememberedCall, found: Signature) -> CacheCall:
    q, sizes = given.q, warm.sizes
    assert sizes is not None
    if given.k is not None:
        append.check_step(q, given.k, given.v, given.k_cache, given.v_cache, warm.extents)
    rows = given.k_cache.shape[1]
    if sizes.page_size == 0 and sizes.capacity != rows:
        sizes = sizes._replace(capacity=rows)
    cached = cached_rows(given.cache_seqlens, sizes.batch, sizes.capacity, q.device)
    tables = CacheTables(cached, given.cache_leftpad, given.cache_batch_idx, given.cu_seqlens_q, given.page_table)
    k, v = given.k_cache.transpose(1, 2), given.v_cache.transpose(1, 2)
    filled = warm.filled(heads_first(q), k, v, options.sink, options.softmax_scale, found, (options.alibi_slopes,))
    filled["sequences"] = StoredCache(tables, sizes, q.device)
    step = CacheStep(
        q, given.k_cache, given.v_cache, given.k, given.v, tables, sizes, given.rotary_cos, given.rotary_sin,
        bool(given.rotary_interleaved), warm.follows,
    )  # fmt: skip
    return CacheCall(Problem.of_fields(filled), step, given, None, None)
