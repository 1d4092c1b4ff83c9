"""Packed sequences given by cumulative lengths: images of a vision tower, documents of a padding-free batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anyattn.flash import flash_attn_varlen_func
from anyattn.integrations.transformers.description import Packed

__all__ = ["Ends", "packed_attention", "packed_rows"]


class Ends(NamedTuple):
    """Cumulative lengths, int (sequences + 1,), and the greatest length, of queries and of keys."""

    q: Tensor
    k: Tensor | None
    longest_q: int | Tensor | None
    longest_k: int | Tensor | None


def packed_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    ends: Ends,
    causal: bool,
    window: tuple[int, int],
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    position_bias: Tensor | None,
    dropout: float,
) -> Tensor:
    """Attention inside each sequence. query, key, value: (1, heads, total, D). Returns (1, total, heads, Dv)."""
    if query.shape[0] != 1 or key.shape[0] != 1:
        raise ValueError(f"cu_seq_lens_q is given with a batch of {query.shape[0]}; wanted the sequences packed into a batch of 1")
    if position_bias is not None:
        raise ValueError("position_bias is given beside cu_seq_lens_q; wanted one of them: use attn_implementation='eager' for this model")
    q, k, v = (t.squeeze(0).transpose(0, 1) for t in (query, key, value))
    out = flash_attn_varlen_func(
        q, k, v, cu_seqlens_q=ends.q, cu_seqlens_k=ends.q if ends.k is None else ends.k, max_seqlen_q=ends.longest_q,
        max_seqlen_k=ends.longest_k, softmax_scale=scaling, causal=causal, window_size=window, softcap=0.0 if softcap is None else softcap,
        sink=sink, dropout_p=dropout,
    )  # fmt: skip
    return out.unsqueeze(0)


def packed_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    way: Packed,
    scaling: float | None,
    softcap: float | None,
    sink: Tensor | None,
    dropout: float,
) -> Tensor:
    """``packed_attention`` of all batch entries (batch, heads, length, D), one after the other. Returns (batch, length, heads, Dv)."""
    q, k, v = (t.transpose(1, 2).flatten(0, 1).transpose(0, 1).unsqueeze(0) for t in (query, key, value))
    ends = Ends(way.ends, None, way.longest, way.longest)
    out = packed_attention(q, k, v, ends, way.causal, way.window, scaling, softcap, sink, None, dropout)
    return out.unflatten(1, (query.shape[0], query.shape[2])).squeeze(0)
