"""Packed sequences given by cumulative lengths: images of a vision tower, documents of a padding-free batch."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anyattn.flash import flash_attn_varlen_func

__all__ = ["Ends", "packed_attention"]


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
