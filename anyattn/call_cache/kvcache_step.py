"""Warm calls of ``flash_attn_with_kvcache`` whose tables the host does not read, on a GPU: the signature decides all that is done."""

from __future__ import annotations

from functools import partial
from typing import Any

from anyattn import hardware, planner
from anyattn.call_cache.calls import RememberedCall, known, remember, score_of_user
from anyattn.call_cache.signature import OPTIONS, Kind, Signature, fields, signature
from anyattn.kvcache import append
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import CacheStep, CacheTables, StoredCache
from anyattn.tensors import kinds
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheCall, Given, cache_call, cached_rows, heads_first

__all__ = ["OPTIONS_WITHOUT_MODS", "named_tensors", "step_call"]

OPTIONS_WITHOUT_MODS = OPTIONS | dict.fromkeys(("score_mod", "mask_mod", "alibi_slopes", "aux_tensors"), Kind.ABSENT)
_GIVEN = fields(
    Given, q=Kind.ALIGNED, k_cache=Kind.ALIGNED, v_cache=Kind.ALIGNED, k=Kind.ALIGNED, v=Kind.ALIGNED, rotary_cos=Kind.ALIGNED,
    rotary_sin=Kind.ALIGNED, cache_seqlens=Kind.ALIGNED_LENGTHS, cache_batch_idx=Kind.ALIGNED, cache_leftpad=Kind.ALIGNED,
    page_table=Kind.ALIGNED, cu_seqlens_q=Kind.ALIGNED, max_seqlen_q=Kind.INT_OR_NONE, rotary_interleaved=Kind.FLAG, validate=Kind.VALUE,
)  # fmt: skip
_signature = signature("flash_attn_with_kvcache, unread", given=_GIVEN, options=OPTIONS, backend=Kind.VALUE)


def step_call(given: Given, options: Options, backend: str | None, is_operator: bool = False) -> tuple[CacheCall, Plan] | None:
    """The call, checked, and its plan; nothing is written. None where an operator takes the call."""
    found = _signature(given, options, backend)
    warm = known(found)
    if warm is not None and found is not None:
        return _warm_call(given, options, warm, found), warm.plan
    if not is_operator and kinds.belong_to_operators(named_tensors(given, options)):
        return None
    call = cache_call(given, options)
    plan = planner.choose(call.problem, hardware.of(given.q.device.type), backend)
    if found is not None:
        reach = append.reach(given.k_cache), append.reach(given.v_cache)
        again = partial(_signature, given, options, backend)
        of_step = {"reach": reach, "sizes": call.step.sizes, "follows": call.step.follows}
        remember(found, again, call.problem, plan, score_of_user(options, call.problem), (options.alibi_slopes,), **of_step)
    return call, plan


def named_tensors(given: Given, options: Options) -> dict[str, Any]:
    """The tensors of a call by name, and whatever else stands where a tensor may."""
    return {**given._asdict(), "sink": options.sink, "alibi_slopes": options.alibi_slopes}


def _warm_call(given: Given, options: Options, warm: RememberedCall, found: Signature) -> CacheCall:
    q, sizes = given.q, warm.sizes
    assert sizes is not None
    if given.k is not None:
        append.check_disjoint(given.k_cache, given.v_cache, warm.reach)
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
