"""Entry point with PyTorch's names: ``flex_attention``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.compiler import is_compiling

from anyattn import autograd
from anyattn.call_cache import attention
from anyattn.call_cache.attention import FlexCall
from anyattn.custom_ops import entry_point
from anyattn.mods.dropout import seeded
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.reductions.request import NO_GRADIENTS, AuxOutput, Reductions, Sums, named, requested, share_of, skip_of
from anyattn.tensors import autocast
from anyattn.tensors.dynamo import opaque
from anyattn.validate.flex import is_no_mask, wanted

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

    from anyattn.reductions.request import AuxRequest

__all__ = ["flex_attention"]

_NO_SUMS = (None, None, None, None)


@entry_point
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
    mask_mod: Callable | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    sink: Tensor | None = None,
    deterministic: bool | str = False,
    skip_below: float | Tensor | None = None,
    dropout_p: float = 0,  # an int: torch.compile(dynamic=True) makes 0.0 a symbolic float and compiles twice
    backend: str | None = None,
) -> Any:
    """Attention whose scores and mask are a few lines of Python: ``softmax(mask(score_mod(scale * q k^T)) [, sink]) v``.

    query: (B, Hq, Sq, D); key: (B, Hkv, Sk, D); value: (B, Hkv, Sk, Dv); of one dtype (float64, float32, bfloat16, float16) and one device,
    with any strides. With ``enable_gqa`` Hq may be a multiple of Hkv. A batch of 1 in key and value is shared by every query batch entry.
    score_mod: ``(score, b, h, q_idx, kv_idx) -> score``; the score is already scaled, in float32 (float64 for float64 inputs).
    block_mask: anyattn's or torch's ``BlockMask``, also torch's empty one. mask_mod: ``(b, h, q_idx, kv_idx) -> bool``; where both are
        given, a key must be visible by both.
        On Hopper score_mod and mask_mod may each be a CuTe function instead, without gradients: docs/cute.md.
    scale: default 1 / sqrt(D). aux_tensors: the value of a mod's trailing argument. sink: (Hq,), one logit per head in the denominator.
    return_lse, return_aux: also return the natural log-sum-exp and the greatest score per row, (B, Hq, Sq), float32 (float64).
    ``anyattn.AuxRequest`` also asks for sums of the probabilities and maxima of the scores by keys and blocks: docs/reductions.md.
    kernel_options: ``{"tile_m": int, "tile_n": int, "num_splits": int}`` override the plan; ``{"autotune": True}`` times a few tile sizes
    of the Triton kernel and remembers the fastest; ``{"pack_gqa": bool}`` says whether query heads that share K and V share row tiles on a
    GPU, where possible (by default the plan decides). torch's option names are accepted, and ignored where they have no meaning here.
    dropout_p: each weight of the softmax is dropped with this probability, from 0 up to but not including 1, and else divided by
    ``1 - dropout_p``; lse and scores stay as they are. Which weights is a function of b, h, q_idx, kv_idx and of a seed that the call draws
    from torch's generator of query's device: ``torch.manual_seed`` repeats it, and every backend drops the same. Probabilities are rounded
    to multiples of 2^-14. As in ``scaled_dot_product_attention`` the caller passes 0 outside of training.
    skip_below: a threshold t, or one for each query head, float32 (Hq,): a tile of keys is left out where in every row of the tile all
    probabilities are below t times that of the row's greatest score so far; docs/reductions.md. None and 0 skip nothing. No gradients.
    deterministic: True: bitwise equal results over reruns (always so on the CPU). "batch", or a call inside ``anyattn.batch_invariant()``:
    also bitwise equal whatever else is in the batch, docs/invariance.md. backend: one of ``anyattn.plan.BACKENDS``, which must then run the
    call.

    The contents of captured tensors that an index is computed from (``table[ids[q_idx]]``) are checked; on a GPU the host waits for that
    once per tensor and write to it, not while a CUDA graph is captured, and the index is clamped too.

    Returns out (B, Hq, Sq, Dv), or ``(out, lse)``, or ``(out, AuxOutput)``. Gradients flow to query, key, value, sink, the score mod's
    captured float tensors, and through lse. A row without visible keys has out 0 and lse -inf. Under ``torch.autocast`` query, key and
    value are cast as ``scaled_dot_product_attention`` casts them; captured tensors, sink and masks are not cast.

    Raises ``TypeError``/``ValueError`` naming the argument, ``ModError`` for a mod that cannot be expressed, ``BackendError`` for a named
    backend that cannot run this.

    >>> import torch, anyattn
    >>> q, k, v = torch.randn(3, 1, 2, 100, 16)
    >>> window = 8
    >>> out = anyattn.flex_attention(q, k, v, mask_mod=lambda b, h, q, k: (q >= k) & (q - k < window))
    >>> out.shape
    torch.Size([1, 2, 100, 16])

    Source: FlexAttention (Dong et al., arXiv:2412.05496).
    """
    wants_lse, wants_max = wanted(return_lse, return_aux)
    reductions = None if return_aux is None else requested(return_aux, query, key)
    wants_lse = wants_lse or reductions is not None
    skip = None if skip_below is None and return_aux is None else skip_of(skip_below, return_aux, query)
    if getattr(block_mask, "seq_lengths", None) == (1, 1) and is_no_mask(block_mask):
        block_mask = None
    arguments = (
        query, key, value, score_mod, block_mask, mask_mod, aux_tensors, scale, enable_gqa, sink, wants_lse, wants_max, deterministic,
        None if dropout_p == 0.0 else seeded(dropout_p, query),
    )  # fmt: skip
    if is_compiling():
        from anyattn.custom_ops.entry_points import flex as compiled
        from anyattn.custom_ops.entry_points import reductions as reduced

        if reductions is not None or skip is not None:
            _refuse_plan(block_mask)
        more = skipped = None
        if skip is None:
            out, lse, max_scores = compiled(arguments, backend, kernel_options)
        else:
            from anyattn.custom_ops.entry_points import skipping

            out, lse, max_scores, skipped = skipping(arguments, backend, kernel_options, skip.below, skip.counts is not None)
            skipped = None if skip.counts is None else skipped
        if reductions is not None:
            more = named(reductions, reduced((*arguments[:13], None), backend, kernel_options, lse, reductions))
        return _returned(out, lse, max_scores if wants_max else None, return_lse, return_aux, more, skipped)
    return _called(FlexCall(*arguments, skip=skip), backend, kernel_options, return_lse, return_aux, reductions)


@opaque
@without_default_device
def _called(
    call: FlexCall, backend: str | None, kernel_options: Any, return_lse: bool, return_aux: AuxRequest | None, reductions: Reductions | None
) -> Any:
    """Eager calls of ``flex_attention``."""
    if autocast.is_on():
        query, key, value = autocast.arguments(call.query, call.key, call.value)
        call = call._replace(query=query, key=key, value=value)
    if reductions is not None or call.skip is not None:
        _refuse_plan(call.block_mask)
    if getattr(call.block_mask, "plan", None) is not None:
        from anyattn.distributed import attention as sharded

        results = sharded.attend(call, backend, kernel_options)
        if results is not None:
            return _returned(*results, return_lse, return_aux)
        found = None
    else:
        found = attention.flex_call(call, backend, kernel_options)
    if found is None:
        from anyattn.custom_ops import eager_calls

        more = skipped = None
        if call.skip is None:
            out, lse, max_scores = eager_calls.flex(call, backend, kernel_options)
        else:
            out, lse, max_scores, skipped = eager_calls.skipping(call, backend, kernel_options)
            skipped = None if call.skip.counts is None else skipped
        if reductions is not None:
            more = named(reductions, eager_calls.reductions(call, backend, kernel_options, lse, reductions))
        return _returned(out, lse, max_scores if call.wants_max else None, return_lse, return_aux, more, skipped)
    if call.skip is not None and found[0].needs_grad:
        raise ValueError(NO_GRADIENTS)
    out, row_lse, highest = autograd.compute(*found)
    more = None
    if reductions is not None:
        from anyattn.reductions import compute

        assert row_lse is not None
        more = named(reductions, compute.results(*found, row_lse, reductions))
    return _returned(out, row_lse, highest, return_lse, return_aux, more, None if call.skip is None else share_of(call.skip))


def _refuse_plan(block_mask: Any) -> None:
    if getattr(block_mask, "plan", None) is not None or getattr(block_mask, "handle", None) is not None:
        raise TypeError(
            "return_aux asks for sums of the probabilities or maxima by blocks, or skip_below is given, and block_mask is sharded over "
            "ranks, where no rank has all queries and keys; wanted a block mask without a plan, or only AuxRequest(lse=..., max_scores=...)"
        )


def _returned(
    out: Tensor, lse: Tensor | None, max_scores: Tensor | None, return_lse: bool, return_aux: AuxRequest | None,
    more: Sums | None = None, skipped: Tensor | None = None,
) -> Any:  # fmt: skip
    """What ``flex_attention`` returns. more, skipped: the further fields of anyattn's ``AuxOutput``; torch's is returned without them."""
    if return_aux is not None and (more is not None or skipped is not None):
        return out, AuxOutput(lse if return_aux.lse else None, max_scores, *(more or _NO_SUMS), skipped)
    if return_aux is not None:
        from torch.nn.attention import flex_attention as torchs

        return out, torchs.AuxOutput(lse=lse if return_aux.lse else None, max_scores=max_scores)
    return (out, lse) if return_lse else out
