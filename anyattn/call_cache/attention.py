"""Warm calls of ``flex_attention``, ``flash_attn_func`` and ``flash_attn_varlen_func``: reuse of an earlier call's checks and plan.

Each function returns the problem and the plan of a call. The slow path (checks, then the planner) is a separate function; its result is
remembered under the call's signature. A warm call skips it: its own tensors, scale and captured values replace those of the problem.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd, planner
from anyattn.call_cache import latest
from anyattn.call_cache.calls import RememberedCall, clear, known, known_plan, remember, remember_again, score_of_user, size
from anyattn.call_cache.replays import Replays, Results
from anyattn.call_cache.signature import OPTIONS, PLAIN, Kind, Signature, fields, signature
from anyattn.call_cache.varlen import Places, exact_signature, signature_of_varlen
from anyattn.kvcache.scales import kv_scales
from anyattn.mods.dropout import Seeded
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem, Skip
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences
from anyattn.sparsity.read_lists import read_lists
from anyattn.tensors import kinds
from anyattn.tensors.dynamo import opaque
from anyattn.tensors.strides import innermost
from anyattn.validate import flash, flex
from anyattn.validate.flash import Options, laid_out

__all__ = ["FlexCall", "Places", "clear", "flash_call", "flex_again", "flex_call", "known_flex", "size", "varlen", "varlen_call"]


class FlexCall(NamedTuple):
    """The arguments of a ``flex_attention`` call; wants_lse and wants_max combine torch's two ways to request them."""

    query: Any
    key: Any
    value: Any
    score_mod: Any
    block_mask: Any
    mask_mod: Any
    aux_tensors: Any
    scale: Any
    enable_gqa: Any
    sink: Any
    wants_lse: bool
    wants_max: bool
    deterministic: Any
    dropout: Seeded | None = None
    listed: TracedMod | None = None  # the mask of a block mask that is passed as lists only
    skip: Skip | None = None


_FLEX = fields(
    FlexCall, query=Kind.OPERANDS.format(x="query, key, value"), key=Kind.ELSEWHERE, value=Kind.ELSEWHERE, score_mod=Kind.SCORE_MOD,
    block_mask=Kind.BLOCK_MASK, mask_mod=Kind.MASK_MOD, aux_tensors=Kind.TENSORS, scale=Kind.SCALE, enable_gqa=Kind.FLAG,
    sink=Kind.TENSOR, wants_lse=Kind.FLAG, wants_max=Kind.FLAG, deterministic=Kind.DETERMINISTIC, dropout=Kind.DROPOUT,
    listed=Kind.ELSEWHERE, skip=Kind.SKIP,
)  # fmt: skip
_signature_of_flex = signature("flex_attention", call=_FLEX, backend=Kind.VALUE, kernel_options=Kind.NAMED_VALUES)
_signature_of_flash = signature(
    "flash_attn_func", q=Kind.OPERANDS.format(x="q, k, v"), k=Kind.ELSEWHERE, v=Kind.ELSEWHERE, options=OPTIONS, backend=Kind.VALUE
)
_MANY_UNKNOWN = 16


# ---- flex_attention


@opaque
def flex_call(call: FlexCall, backend: str | None, options: Any, is_operator: bool = False) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a ``flex_attention`` call; None if the call must run as its operator (``tensors.kinds``).

    options: ``kernel_options``. Raises as ``validate.flex.flex_problem`` and the planner.
    """
    signature, reads_captured = _signature_of_flex(call, backend, options), not (is_operator and call.query.is_cuda)
    warm = known(signature, reads_captured)
    if warm is None or signature is None:
        if planner.misfits(call[:3], backend):
            copied: dict[str, Any] = dict(zip(call._fields, map(innermost, call[:3])))
            return flex_call(call._replace(**copied), backend, options, is_operator)
        named = {"query": call.query, "key": call.key, "value": call.value, "sink": call.sink}
        if not is_operator and kinds.belong_to_operators(named):
            return None
        problem = flex.flex_problem(*call, reads_captured)
        score, recompute = None if call.score_mod is None else problem.score, partial(_signature_of_flex, call, backend, options)
        if (plan := known_plan(signature, recompute, problem, score, (), reads_captured)) is not None:
            return problem, plan
        plan = planner.planned(problem, backend, flex.kernel_options(options))
        if signature is not None:
            shares_keys = call.key.shape[0] != call.query.shape[0]
            more = {"has_lists": problem.blocks is not None, "shares_keys": shares_keys}
            remember(signature, recompute, problem, plan, score, (), reads_captured, **more)
        return problem, plan
    return flex_again(warm, call.query, call.key, call.value, call.sink, call.scale, signature, call.block_mask, call.skip)


def flex_again(
    warm: RememberedCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    sink: Tensor | None,
    scale: float,
    signature: Signature,
    block_mask: Any,
    skip: Skip | None = None,
) -> tuple[Problem, Plan]:
    """The problem and the plan of a warm ``flex_attention`` call."""
    if warm.shares_keys:
        key, value = (t.expand(query.shape[0], *t.shape[1:]) for t in (key, value))
    filled = warm.filled(query, key, value, sink, scale, signature)
    if warm.has_lists:
        filled["blocks"] = read_lists(block_mask) if signature.blocks is None else signature.blocks
    if skip is not None:
        filled["skip"] = skip
    return Problem.of_fields(filled), warm.plan


def known_flex(call: FlexCall, backend: str | None, options: Any) -> RememberedCall | None:
    """The remembered ``flex_attention`` call with the signature of this call of an operator, if there is one."""
    return known(_signature_of_flex(call, backend, options), not call.query.is_cuda)


# ---- flash_attn_func


@opaque
def flash_call(q: Any, k: Any, v: Any, options: Options, backend: str | None, is_operator: bool = False) -> tuple[Problem, Plan] | None:
    """The problem and the plan of a ``flash_attn_func`` call; None as in ``flex_call``. Raises as the checks and the planner."""
    signature, reads_captured = _signature_of_flash(q, k, v, options, backend), options.reads_captured
    warm = known(signature, reads_captured)
    arguments = (options.alibi_slopes,)
    if warm is None or signature is None:
        if planner.misfits((q, k, v), backend):
            return flash_call(innermost(q), innermost(k), innermost(v), options, backend, is_operator)
        if not is_operator and kinds.belong_to_operators(_named(q, k, v, options)):
            return None
        problem = flash.dense_problem(q, k, v, options)
        score, recompute = score_of_user(options, problem), partial(_signature_of_flash, q, k, v, options, backend)
        if (plan := known_plan(signature, recompute, problem, score, arguments, reads_captured)) is not None:
            return problem, plan
        plan = planner.planned(problem, backend)
        if signature is not None:
            remember(signature, recompute, problem, plan, score, arguments, reads_captured)
        return problem, plan
    q, k, v = torch.transpose(q, 1, 2), torch.transpose(k, 1, 2), torch.transpose(v, 1, 2)
    return Problem.of_fields(warm.filled(q, k, v, options.sink, options.softmax_scale, signature, arguments)), warm.plan


def _named(q: Any, k: Any, v: Any, options: Options) -> dict[str, Any]:
    of_options = {name: getattr(options, name) for name in ("sink", "alibi_slopes", "k_descale", "v_descale")}
    return {"q": q, "k": k, "v": v, **of_options}


# ---- flash_attn_varlen_func


@opaque
def varlen(q: Any, k: Any, v: Any, places: Places, options: Options, backend: str | None) -> Results | None:
    """out and lse of an eager ``flash_attn_varlen_func`` call, laid out as q; None and raises as ``varlen_call``."""
    exact = exact_signature(q, k, v, places, options, backend) if _sizes.recur else None
    warm = known(exact)
    if warm is not None and exact is not None and warm.replays is not None:
        _sizes.unknown = 0
        tensors = [x for x in (q, k, v, *places.tables, *options) if type(x) in PLAIN]  # a signature has no others
        values = warm.values(tensors, options.softmax_scale, exact, (options.alibi_slopes, *places.tables))
        results = warm.replays.results(values)
        if results is not None:
            flat = q, k, v, *places.tables, *places.most, places.validate, *options[:-1], backend
            latest.varlen.note(warm.replays.once(values, lambda replay: latest.LatestCall.of(flat, replay, values, results)))
            return results
        call = varlen_call(q, k, v, places, options, backend)
        return None if call is None else warm.replays.made(values, partial(_attended, *call, places))
    signature = signature_of_varlen(q, k, v, places, options, backend)
    warm = known(signature)
    call = varlen_call(q, k, v, places, options, backend, False, signature)
    if warm is not None and exact is not None:
        _sizes.unknown += 1
        remember_again(exact, warm)
    elif warm is not None and signature is not None and warm.replays is not None and warm.replays.comes_again(signature.sizes):
        _sizes.unknown = 0
    return None if call is None else _attended(*call, places)


class _Sizes:
    """unknown: the number of warm calls in a row whose exact signature was not known; after many of them, as where each batch has another
    number of rows and is passed to one call, none is made until two calls in a row have equal sizes: it takes 6 us."""

    unknown = 0

    @property
    def recur(self) -> bool:
        return self.unknown < _MANY_UNKNOWN


_sizes = _Sizes()


def _attended(problem: Problem, plan: Plan, places: Places) -> Results:
    out, lse, _ = autograd.compute(problem, plan)
    return laid_out(out, lse, places.tables[0] is not None)


_UNREAD: Any = object()


@opaque
def varlen_call(
    q: Any, k: Any, v: Any, places: Places, options: Options, backend: str | None, is_operator: bool = False, signature: Any = _UNREAD
) -> tuple[Problem, Plan] | None:
    """``flash_call`` for ``flash_attn_varlen_func``. Raises as ``validate.flash.varlen_problem`` and the planner."""
    if signature is _UNREAD:
        signature = signature_of_varlen(q, k, v, places, options, backend)
    warm = known(signature)
    arguments = (options.alibi_slopes, *places.tables)
    if warm is None or signature is None:
        has_pages = places.tables[4] is not None  # a pool of pages is not copied at every call
        if planner.misfits((q,) if has_pages else (q, k, v), backend):
            k, v = (k, v) if has_pages else (innermost(k), innermost(v))
            return varlen_call(innermost(q), k, v, places, options, backend, is_operator)
        tables = zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table"), places.tables, strict=True)
        if not is_operator and kinds.belong_to_operators(_named(q, k, v, options) | dict(tables)):
            return None
        problem, plan = _planned_varlen(q, k, v, places, options, backend)
        if signature is not None:
            recompute = partial(signature_of_varlen, q, k, v, places, options, backend)
            score, replays = score_of_user(options, problem), Replays.of(problem, plan)
            remember(signature, recompute, problem, plan, score, arguments, replays=replays)
        return problem, plan
    k4 = _heads_first(k)
    filled = warm.filled(_heads_first(q), k4, _heads_first(v), options.sink, options.softmax_scale, signature, arguments)
    filled["kv_scales"] = kv_scales(options.k_descale, options.v_descale, k4, signature.sizes.batch)
    filled["sequences"] = StoredSequences(LengthTables(*places.tables[:4]), signature.sizes, places.tables[4], q.device)
    return Problem.of_fields(filled), warm.plan


def _planned_varlen(q: Any, k: Any, v: Any, places: Places, options: Options, backend: str | None) -> tuple[Problem, Plan]:
    problem = flash.varlen_problem(q, k, v, *places.tables[:2], *places.most, *places.tables[2:], places.validate, options)
    return problem, planner.planned(problem, backend)


def _heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) or packed (total, H, D) as (B or 1, H, S, D), a view."""
    return torch.transpose(x if x.ndim == 4 else x.unsqueeze(0), 1, 2)
