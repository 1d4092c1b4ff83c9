"""``flex_attention`` with the mask of a plan: checks, and the node of autograd's graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache.attention import FlexCall
from anyattn.determinism import Determinism, mode_of
from anyattn.distributed import by_heads, local_attention
from anyattn.distributed.by_documents import runs_documents
from anyattn.distributed.early_keys import ending_on_error, taken
from anyattn.distributed.exchange import Pending
from anyattn.distributed.head_share import CallShare, HeadShare
from anyattn.distributed.local_attention import Gradients, Inputs, Results, ShardedCall
from anyattn.distributed.placed_mods import reads
from anyattn.distributed.rows import padding
from anyattn.distributed.rows.local_captures import with_local_dims
from anyattn.distributed.share import LocalCalls, MaskShare, Share
from anyattn.mods.dropout import Seeded
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.made_of import captures
from anyattn.tensors import kinds
from anyattn.tensors.strides import innermost
from anyattn.validate import flex

__all__ = ["attend", "backward", "checked", "forward", "refuse_batch_invariance", "refuse_dropout"]


def attend(call: FlexCall, backend: str | None, options: Any) -> tuple[Tensor, Tensor, Tensor | None] | None:
    """(out, lse, max_scores) of the rows of this rank; None if the call must run as its operator (``tensors.kinds``).

    call: its ``block_mask`` is a ``ShardedMask``. Raises as ``checked``; an error of one rank is reported on the ranks that wait for it.
    """
    plan, share = call.block_mask.plan, call.block_mask.share
    channel = plan.channel
    messages = 0 if share is None else max(share.messages - (channel.started is not None), 0)  # one has begun
    with channel.reporting_failure(messages, plan.asks_first):
        if kinds.belong_to_operators({"query": call.query, "key": call.key, "value": call.value, "sink": call.sink}):
            return None
        early = taken(call.key, call.value, share, channel)
        with ending_on_error(early, channel):
            sharded, inputs = checked(call, backend, options, early is not None)
        if _wants_gradients(inputs):
            out, lse, highest = _Sharded.apply(sharded, early, *inputs[:4], *inputs.captured)  # type: ignore[no-untyped-call]
            return out, lse, highest
        with torch.no_grad():
            return forward(sharded._replace(keeps_keys=False), inputs, early)[:3]


def forward(call: ShardedCall, inputs: Inputs, early: Pending | None = None) -> Results:
    """The attention of this rank's rows, by what travels in the plan, with the inputs' padding. Every rank runs it. early: the exchange of
    keys, if it was started before."""
    more = () if early is None else (early,)
    found = _transport(call).forward(call, padding.cut_inputs(inputs, call.share.length), *more)
    return padding.padded_results(found, inputs)


def backward(call: ShardedCall, inputs: Inputs, results: Results, dout: Tensor, dlse: Tensor | None) -> Gradients:
    """Gradients of ``inputs``, which require grad where one is wanted. Every rank runs it."""
    rows = call.share.length
    out, lse, dout, dlse = (padding.cut(t, rows) for t in (results.out, results.lse, dout, dlse))
    of_rows = Results(out, lse, None, results.message)
    found = _transport(call).backward(call, padding.cut_inputs(inputs, rows), of_rows, dout, dlse)
    return padding.padded_gradients(found, inputs)


def _transport(call: ShardedCall) -> Any:
    """The module that runs a call."""
    return by_heads if isinstance(call.share, CallShare) else local_attention


def checked(call: FlexCall, backend: str | None, options: Any, is_started: bool = False) -> tuple[ShardedCall, Inputs]:
    """The call on this rank's shard and its tensors.

    Raises ``ValueError`` or ``TypeError`` for tensors that are not the rows of this rank, for a plan without a group, and as the local
    calls do; on all ranks if what the tensors have in common differs between them. is_started: its exchange of keys has begun.
    """
    mask, query = call.block_mask, call.query
    plan, share = mask.plan, mask.share
    key, value = flex.tensors(query, call.key, call.value, call.enable_gqa)
    if is_started and key.shape[0] != call.key.shape[0]:
        raise ValueError(
            f"key has batch 1 but query has {key.shape[0]}, and anyattn.distributed.start has sent one entry; wanted start and call of "
            f"key.expand({key.shape[0]}, -1, -1, -1), and of value"
        )
    _check_shard(share, query, key)
    flex.check_shared(mask._lists_4d()["kv_num_blocks"], query)
    refuse_dropout(call.dropout)
    refuse_batch_invariance(call.deterministic)
    query, key, value = innermost(query), innermost(key), innermost(value)  # rows of which are moved
    if not share.is_unwritten:
        raise ValueError(
            "the block mask's lists were written to after anyattn.distributed.plan had read them; wanted a new plan of the changed mask"
        )
    aux = flex.aux_list(call.aux_tensors, query.device)
    score = None if call.score_mod is None else flex.traced(call.score_mod, "score", query, aux)
    extra = None if call.mask_mod is None else flex.traced(call.mask_mod, "mask", query, aux)
    sink = flex.sink_logits(call.sink, query)
    score, extra = (with_local_dims(mod, share.rows, share.padded, isinstance(share, HeadShare)) for mod in (score, extra))
    inputs = Inputs(query, key, value, sink, () if score is None else score.tensors)
    bare = None if score is None else TracedMod.of_fields({**vars(score), "tensors": ()})
    facts: tuple = (score is None, extra is None, call.scale, bool(call.deterministic), is_started, _wants_gradients(inputs))
    if isinstance(share, HeadShare):  # messages have these results and their gradients
        facts = (*facts, call.wants_lse, call.wants_max)
    plan.agree_on_call(query, key, value, facts)
    keeps = plan.keeps_keys(share)
    share = share.for_heads(query.shape[1], key.shape[1])
    calls = _calls(call, share, score, extra, backend, options)
    masks = share.block_masks(calls)
    sharded = ShardedCall(
        share, plan.channel, calls, masks, bare, extra, call.scale, call.wants_lse, call.wants_max, bool(call.deterministic), backend,
        options, keeps, plan.wire,
    )  # fmt: skip
    return sharded, inputs


def _wants_gradients(inputs: Inputs) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*inputs[:4], *inputs.captured))


def _calls(
    call: FlexCall, share: Share | CallShare, score: TracedMod | None, mask: TracedMod | None, backend: str | None, options: Any
) -> LocalCalls:
    """How this rank's rows are put together for a call."""
    if mask is None and backend is None and not options and not call.wants_max and call.query.shape[0] == 1:
        documents = share.by_documents
        if documents is not None and runs_documents(score, call.query.shape[1], share.first_head):
            return documents
    return share.by_pieces if score is not None and reads(score.expr, "q_idx") else share.by_lists


def refuse_batch_invariance(deterministic: Any) -> None:
    """Raises for the mode: ranks' parts of a row's keys are merged in an order that depends on their number."""
    if mode_of(deterministic) is Determinism.BATCH:
        raise ValueError(
            'deterministic="batch" is asked for, and block_mask is sharded over ranks, whose parts of a row are merged in an order that '
            "depends on their number; wanted a block mask without a plan, or deterministic=True"
        )


def refuse_dropout(dropout: Seeded | None) -> None:
    if dropout is not None:
        raise NotImplementedError(
            "dropout_p is above 0 with the mask of a plan, whose ranks would have to agree on what is dropped; wanted dropout_p=0"
        )


def _check_shard(share: MaskShare, query: Tensor, key: Tensor) -> None:
    wanted = share.padded if query.shape[2] == share.padded else share.length
    for name, t in (("query", query), ("key", key)):
        if t.shape[2] == wanted:
            continue
        whole = share.layout.length
        cure = "shard the inputs of the model: plan.shard(tokens)" if t.shape[2] == whole else "pass what plan.shard returned on this rank"
        raise ValueError(
            f"{name} has {t.shape[2]} rows, but of the {whole} positions of the plan rank {share.rank} has {share.length}; wanted these: "
            f"{cure}"
        )
    if query.device != share.device:
        raise ValueError(
            f"query is on {query.device}, but the plan's mask is on {share.device}; wanted a plan of mask.to('{query.device}')"
        )


class _Sharded(torch.autograd.Function):
    """The node of the autograd graph for one call on a shard."""

    @staticmethod
    @without_default_device
    def forward(ctx: Any, call: ShardedCall, early: Pending | None, *tensors: Any) -> Any:  # type: ignore[override]
        q, k, v, sink, *captured = tensors
        inputs = Inputs(q, k, v, sink, tuple(captured))
        out, lse, highest, message = forward(call, inputs, early)
        ctx.call = call
        # the backward pass reads the masks' tensors again; saved, they are checked for writes
        masks: list[Any] = [*(m.mask_mod for m in call.block_masks), call.mask]
        of_masks = [t for m in masks for t in getattr(m, "tensors", ())]
        if not call.block_masks:
            of_masks += captures(call.share.mask.mask_mod)[2]
        ctx.inputs = len(tensors)
        ctx.save_for_backward(*tensors, out, lse, message, *[t for t in of_masks if not t.is_inference()])
        ctx.set_materialize_grads(False)
        if highest is not None:
            ctx.mark_non_differentiable(highest)
        return out, lse, highest

    @staticmethod
    @without_default_device
    def backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None = None, _: Any = None) -> Any:  # type: ignore[override]
        saved = ctx.saved_tensors
        tensors, (out, lse, message) = saved[: ctx.inputs], saved[ctx.inputs : ctx.inputs + 3]
        is_graph_wanted = torch.is_grad_enabled()
        needed = ctx.needs_input_grad[2:]
        messages = ctx.call.share.messages_back(message is not None)
        with ctx.call.channel.reporting_failure(messages, False), torch.no_grad():
            wanting: Any = [autograd.requiring_grad(t, n) for t, n in zip(tensors, needed, strict=True)]
            q, k, v, sink, *captured = wanting
            inputs = Inputs(q, k, v, sink, tuple(captured))
            dout, dlse = autograd.in_memory(dout), autograd.in_memory(dlse)
            of_out = torch.zeros_like(out) if dout is None else dout
            found = backward(ctx.call, inputs, Results(out, lse, None, message), of_out, dlse)
        grads = [g if n else None for g, n in zip((*found[:4], *found.captured), needed, strict=True)]
        if is_graph_wanted:
            return None, None, *autograd.differentiable_once(grads, (*tensors, dout, dlse))
        return None, None, *grads
