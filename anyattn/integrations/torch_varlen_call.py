"""Calls of torch's ``varlen_attn`` while it is replaced: anyattn computes them or passes them on to torch's own function."""

from __future__ import annotations

from typing import Any

from torch import Tensor, are_deterministic_algorithms_enabled

from anyattn import flash
from anyattn.custom_ops import entry_point
from anyattn.integrations.torch_flex_call import computed
from anyattn.integrations.torchs_function import torchs_function

__all__ = ["varlen_attn"]

_torchs, _anyattns = torchs_function("varlen_attn").own, flash.flash_attn_varlen_func


@entry_point
def varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    return_aux: Any,
    scale: Any,
    window_size: Any,
    others: dict[str, Any],
) -> Any:
    """As ``torch_flex_call.flex_attention``. others: the arguments that torch has from 2.12 on."""
    given = (query, key, value, cu_seq_q, cu_seq_k, max_q, max_k)
    return computed(_varlen, _torchs, given, {"scale": scale, "window_size": window_size, **others}, return_aux)


def _varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any,
    scale: Any,
    window_size: Any,
    enable_gqa: bool = True,  # torch 2.11 has no such argument and allows it
    seqused_k: Tensor | None = None,
    block_table: Tensor | None = None,
    num_splits: int | None = None,
) -> Any:
    if not enable_gqa and query.shape[-2] != key.shape[-2]:
        raise ValueError(f"query has {query.shape[-2]} heads but key has {key.shape[-2]}; wanted the same, or enable_gqa=True")
    if num_splits is None:
        num_splits = 1 if block_table is None else 0
    return _anyattns(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, seqused_k=seqused_k, page_table=block_table, softmax_scale=scale,
        window_size=(max(window_size[0], -1), max(window_size[1], -1)), num_splits=num_splits,
        return_lse=return_aux is not None and return_aux.lse, deterministic=are_deterministic_algorithms_enabled(),
    )  # fmt: skip
