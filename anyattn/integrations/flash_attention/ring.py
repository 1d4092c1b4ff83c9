"""FlashAttention 2's forward and backward passes apart, which ring attention calls: it merges partial results and gradients of its own.

The backward pass takes the out and lse of all keys, and gives the gradients of the keys at hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn import flash
from anyattn.custom_ops import flash as operators
from anyattn.custom_ops.arguments import Results
from anyattn.integrations.flash_attention.call import common, computed
from anyattn.validate.flash import Options

__all__ = ["backward", "forward", "varlen_backward", "varlen_forward"]


def forward(
    q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax
):  # fmt: skip
    """(out, softmax_lse, S_dmask, rng_state) of ``flash_attn_func``, the last two empty; no gradients."""
    return _forward(
        flash.flash_attn_func, (q, k, v), dropout_p, softmax_scale, causal, (window_size_left, window_size_right), softcap, alibi_slopes,
    )  # fmt: skip


def varlen_forward(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left=-1,
    window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None,
    zero_tensors=False, num_splits=0,
):  # fmt: skip
    """As ``forward``, of ``flash_attn_varlen_func``."""
    if leftpad_k is not None:
        raise ValueError("leftpad_k is a tensor; wanted None: pass flash_attn_with_kvcache(cache_leftpad=...)")
    return _forward(
        flash.flash_attn_varlen_func, (q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal,
        (window_size_left, window_size_right), softcap, alibi_slopes, page_table=block_table, seqused_k=seqused_k,
    )  # fmt: skip


def backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):  # fmt: skip
    """Writes the gradients to dq, dk and dv, if these are tensors. Returns softmax_d, float32 (B, H, Sq): sums of dout * out."""
    window = (window_size_left, window_size_right)
    tables = (None,) * 5
    return _backward(
        (dout, out, softmax_lse), (q, k, v), (dq, dk, dv), tables, (None, None), dropout_p, softmax_scale, causal, window, softcap,
        alibi_slopes, deterministic,
    )  # fmt: skip


def varlen_backward(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
    window_size_left, window_size_right, softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
):  # fmt: skip
    """As ``backward``; softmax_d is (H, total_q)."""
    window = (window_size_left, window_size_right)
    tables = (cu_seqlens_q, cu_seqlens_k, None, None, None)
    return _backward(
        (dout, out, softmax_lse), (q, k, v), (dq, dk, dv), tables, (max_seqlen_q, max_seqlen_k), dropout_p, softmax_scale, causal, window,
        softcap, alibi_slopes, deterministic,
    )  # fmt: skip


def _forward(
    function: Any,
    arguments: tuple,
    dropout_p: float,
    softmax_scale: Any,
    causal: Any,
    window: tuple,
    softcap: Any,
    slopes: Any,
    **others: Any,
) -> tuple[Tensor, ...]:
    _refuse_dropout(dropout_p)
    with torch.no_grad():
        options = common(causal, window, softcap) | others
        out, lse = computed(function, *arguments, softmax_scale=softmax_scale, alibi_slopes=slopes, return_lse=True, **options)
    return out, lse, torch.empty(0, dtype=out.dtype, device=out.device), torch.empty(0, dtype=torch.int64, device=out.device)


@torch.no_grad()
def _backward(
    results: tuple, inputs: tuple, gradients: tuple, tables: tuple, longest: tuple, dropout_p: float, softmax_scale: Any, causal: Any,
    window: tuple, softcap: Any, slopes: Any, deterministic: Any,
) -> Tensor:  # fmt: skip
    _refuse_dropout(dropout_p)
    (dout, out, lse), (q, k, v) = results, inputs
    options = Options(softmax_scale=softmax_scale, alibi_slopes=slopes, **common(causal, window, softcap))
    shared = operators.shared_options(q, options, None, None)
    given = operators.Flash(q, k, v, operators.Tables(*tables), shared, bool(deterministic), longest[0], longest[1], None, "")
    found = computed(operators.called, operators.flash_backward, given, Results(out, lse, dout, None, [True, True, True, False, False]))
    for target, gradient in zip(gradients, found):
        if target is not None:
            target.copy_(gradient)
    return (dout.float() * out.float()).sum(-1).transpose(-1, -2)


def _refuse_dropout(dropout_p: float) -> None:
    if dropout_p:
        raise ValueError(f"dropout_p={dropout_p!r}; wanted 0.0: with dropout use flash_attn_func or flash_attn_varlen_func")
