"""Call cache of ``flash_attn_with_kvcache`` on a GPU, whose tables the host does not read: the signature alone decides.

The signature is shapes, strides, dtypes, devices, alignment and options. A call with mods or ALiBi is not cached.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import hardware, planner
from anyattn.call_cache import attention
from anyattn.kvcache import append
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import CacheSizes, CacheStep, CacheTables, StoredCache
from anyattn.tensors import kinds
from anyattn.validate import sequences
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheCall, Given, cache_call, cached_rows, heads_first

__all__ = ["asks_mods", "facts_of_options", "named_tensors", "seen", "step_call"]


class _Remembered(NamedTuple):
    """fields: the problem's, but for its tensors and sequences. reach: the caches', see ``append.reach``."""

    plan: Plan
    fields: dict[str, Any]
    sizes: CacheSizes
    follows: bool
    reach: tuple[int, int]


def step_call(given: Given, options: Options, backend: str | None, is_operator: bool = False) -> tuple[CacheCall, Plan] | None:
    """The call, checked, and its plan; nothing is written. None where the tables have to be looked at, or an operator takes the call."""
    if not isinstance(given.q, Tensor) or not sequences.takes_their_word(given.q.device, given.validate):
        return None
    facts = None if attention.is_listened_to() else _facts(given, options, backend)
    known = None if facts is None else attention.remembered(facts)
    if known is not None:
        return _known_call(given, options, known), known.plan
    if not is_operator and kinds.belong_to_operators(named_tensors(given, options)):
        return None
    call = cache_call(given, options)
    chosen = planner.choose(call.problem, hardware.of(given.q.device.type), backend)
    if facts is not None and chosen.is_reusable:
        mods = (call.problem.score, *call.problem.predicates)
        if not any(mod is not None and mod.tensors for mod in mods):
            fields = attention.fields_of(call.problem) | {"score": call.problem.score, "predicates": call.problem.predicates}
            reach = (append.reach(given.k_cache), append.reach(given.v_cache))
            attention.remember(facts, _Remembered(chosen, fields, call.step.sizes, call.step.follows, reach))
    return call, chosen


def _facts(given: Given, options: Options, backend: str | None) -> tuple | None:
    """None for a call that is not remembered, such as one with a wrong argument."""
    if asks_mods(options):
        return None
    try:
        most_q = given.max_seqlen_q
        if most_q is not None and type(most_q) is not int:
            return None
        flags = (facts_of_options(options, given.validate, most_q), bool(given.rotary_interleaved), backend)
        rows = tuple([_seen(x) for x in (given.q, given.k_cache, given.v_cache, given.k, given.v, options.sink)])
        turns = _seen(given.rotary_cos), _seen(given.rotary_sin)
        lengths = type(given.cache_seqlens) if type(given.cache_seqlens) in (int, type(None)) else _seen(given.cache_seqlens)
        others = (given.cache_batch_idx, given.cache_leftpad, given.page_table, given.cu_seqlens_q)
        return ("step", rows, turns, lengths, tuple([_seen(x) for x in others]), flags)
    except (attention.Unfit, *attention.UNREADABLE):
        return None


def seen(x: Any) -> tuple | None:
    """The facts of a tensor, but for how it is aligned; gradients are no matter of this door."""
    if x is None:
        return None
    if type(x) not in attention.PLAIN:
        raise attention.Unfit
    return x.shape, x.stride(), x.dtype, x.device, x.is_neg()


def _seen(x: Any) -> tuple | None:
    found = seen(x)
    return None if found is None else (*found, x.data_ptr() & 15)


def named_tensors(given: Given, options: Options) -> dict[str, Any]:
    """The tensors of a call by name, and whatever else stands where a tensor may."""
    return {**given._asdict(), "sink": options.sink, "alibi_slopes": options.alibi_slopes}


def asks_mods(options: Options) -> bool:
    """Whether something in the options has to be traced or read on every call."""
    o = options
    return o.score_mod is not None or o.mask_mod is not None or o.alibi_slopes is not None or o.aux_tensors is not None


def facts_of_options(options: Options, *others: Any) -> tuple:
    """others: more numbers; of all of them the types count too."""
    window = options.window_size
    numbers = (options.causal, *window, options.softcap, options.num_splits, options.pack_gqa, *others)
    types, scale = tuple([type(n) for n in numbers]), attention.scale_fact(options.softmax_scale)
    return numbers, types, type(window), bool(options.return_lse), scale, torch.get_default_dtype()


def _known_call(given: Given, options: Options, known: _Remembered) -> CacheCall:
    q, sizes = given.q, known.sizes
    if given.k is not None:
        append.check_disjoint(given.k_cache, given.v_cache, known.reach)
    cached = cached_rows(given.cache_seqlens, sizes.batch, sizes.capacity, q.device)
    tables = CacheTables(cached, given.cache_leftpad, given.cache_batch_idx, given.cu_seqlens_q, given.page_table)
    fields = dict(known.fields)
    fields["q"], fields["k"], fields["v"] = heads_first(q), given.k_cache.transpose(1, 2), given.v_cache.transpose(1, 2)
    fields["sink"], fields["sequences"] = options.sink, StoredCache(tables, sizes, q.device)
    if options.softmax_scale is not None:
        fields["scale"] = float(options.softmax_scale)
    step = CacheStep(
        q, given.k_cache, given.v_cache, given.k, given.v, tables, sizes, given.rotary_cos, given.rotary_sin,
        bool(given.rotary_interleaved), known.follows,
    )  # fmt: skip
    return CacheCall(Problem.of_fields(fields), step, given, None, None)
