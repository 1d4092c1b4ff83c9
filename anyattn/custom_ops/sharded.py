"""The operator of ``flex_attention`` with the mask of a plan, for compiled graphs and dispatch modes.

A graph holds no plan: it gets the ``handle`` of the plan's mask, a tensor on the CPU, as an input. So a graph serves all plans, and what
depends on the documents of a step, such as the sizes of messages, is no constant of it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from anyattn.call_cache.attention import FlexCall
from anyattn.custom_ops.arguments import Masks, Results, Score
from anyattn.custom_ops.flex import (
    fake_gradients,
    fake_results,
    mods_of_operands,
    operands_of,
    options_of,
    options_text,
    requiring,
    sources_of,
)
from anyattn.custom_ops.flops import count_operator
from anyattn.custom_ops.operators import called, differentiable, operator, returned
from anyattn.distributed import attention, local_attention
from anyattn.distributed.local_attention import Inputs, ShardedCall
from anyattn.distributed.rows.local_captures import dims_of_text, text_of_dims
from anyattn.distributed.sharded_mask import mask_of_handle
from anyattn.mods.tracing.trace import TracedMod
from anyattn.planner import check_backend
from anyattn.tensors import autocast
from anyattn.validate import flex

__all__ = ["attend_sharded", "sharded_with_mods"]


class AttendSharded(NamedTuple):
    """The arguments of ``anyattn::attend_sharded``. masks: the call's ``mask_mod``, if it has one; that of the plan is not among them.
    handle: of the plan's mask. options: ``options_text``. backend: empty for none. local_dims: of score and mask, ``text_of_dims``."""

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    score: Score
    masks: Masks
    handle: Tensor
    scale: float
    wants_max: bool
    deterministic: bool
    options: str
    backend: str
    local_dims: str


def _call(operands: AttendSharded) -> tuple[ShardedCall, Inputs]:
    q, k, v, sink, of_score, of_masks, handle, scale, wants_max, deterministic, options, backend, local_dims = operands
    score = next(iter(mods_of_operands("score", *of_score)), None)
    mask = next(iter(mods_of_operands("mask", *of_masks)), None)
    score, mask = dims_of_text(local_dims, (score, mask))
    call = FlexCall(q, k, v, score, mask_of_handle(handle), mask, None, scale, True, sink, True, wants_max, deterministic)
    return attention.checked(call, backend or None, options_of(options))


@operator(AttendSharded, fake=fake_results)
def attend_sharded(operands: AttendSharded) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of this rank's rows; max_scores is empty unless wanted. Every rank runs it."""
    mask = mask_of_handle(operands.handle)
    with mask.plan.channel.reporting_failure(mask.share.messages, mask.plan.asks_first):  # type: ignore[union-attr]
        call, inputs = _call(operands)
        found = attention.forward(call._replace(keeps_keys=False), inputs)
    return found.out, found.lse, found.lse.new_empty(0) if found.max_scores is None else found.max_scores


@operator(AttendSharded, Results, fake=fake_gradients, left_out={"wants_max": False})
def attend_sharded_backward(operands: AttendSharded, results: Results) -> list[Tensor]:
    """Gradients of q, k, v, sink and each score tensor; empty where ``wants`` is False. Every rank runs it; what was received is
    sent again."""
    wants = results.wants
    mask = mask_of_handle(operands.handle)
    with mask.plan.channel.reporting_failure(mask.share.messages_back(False), False):  # type: ignore[union-attr]
        call, inputs = _call(requiring(operands, wants))
        of_forward = local_attention.Results(results.out, results.lse, None, None)
        found = attention.backward(call, inputs, of_forward, results.dout, results.dlse)
    grads = [*found[:4], *found.captured]
    return returned(grads + [None] * (len(wants) - len(grads)), wants, sources_of(operands), operands.q)


differentiable(attend_sharded, attend_sharded_backward, ("q", "k", "v", "sink", "score_tensors"), constant=(2,))


def _pairs(by_name: dict[str, Any]) -> Any:
    """The queries of this rank x the keys of the whole sequence."""
    batch, heads, queries, _ = by_name["q"].shape
    return batch * heads * queries * mask_of_handle(by_name["handle"]).seq_lengths[1]


count_operator(attend_sharded, _pairs, attend_sharded_backward)


def sharded_with_mods(
    call: tuple, handle: Tensor, backend: str | None, options: dict[str, Any] | None, score: TracedMod | None, mask: TracedMod | None
) -> tuple[Tensor, Tensor, Tensor]:
    """``flex_attention`` with a plan's mask as one operator call with traced mods. call: a ``FlexCall`` without them.

    Raises as the eager call for wrong shapes, dtypes and devices; what depends on the plan is checked when the operator runs.
    """
    check_backend(backend)
    flex_call = FlexCall(*call)
    query, key, value = autocast.arguments(flex_call.query, flex_call.key, flex_call.value)
    key, value = flex.tensors(query, key, value, bool(flex_call.enable_gqa))
    attention.refuse_dropout(flex_call.dropout)
    attention.refuse_batch_invariance(flex_call.deterministic)
    sink = flex.sink_logits(flex_call.sink, query)
    for mod in (score, mask):
        if mod is not None:
            flex.captured_devices(mod, query.device)
    nothing = query.new_empty(0)
    operands = AttendSharded(
        query, key, value, sink, Score(*operands_of(nothing, score)), Masks(*operands_of(nothing, mask)), handle,
        flex.scale_of("scale", flex_call.scale, query.shape[3], query.dtype), flex_call.wants_max, bool(flex_call.deterministic),
        options_text(options), backend or "", text_of_dims(score, mask),
    )  # fmt: skip
    return called(attend_sharded, operands)  # type: ignore[no-any-return]
