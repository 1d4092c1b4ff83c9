"""FlashAttention's packed forms: q, k and v in one tensor, and batches without their padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyattn.flash import flash_attn_func, flash_attn_varlen_func

__all__ = [
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "index_first_axis",
    "index_put_first_axis",
    "pad_input",
    "unpad_input",
]


def flash_attn_qkvpacked_func(qkv: Tensor, *, num_heads_q: int | None = None, **options: Any) -> Any:
    """``flash_attn_func`` of q, k and v that are one tensor.

    qkv: (B, S, 3, H, D); or with num_heads_q (B, S, Hq + 2 Hkv, D), the heads of q first, then those of k, then those of v. options: of
    ``flash_attn_func``. The parts are views: nothing is copied, and the gradient is one tensor like qkv. Raises as ``flash_attn_func``.

    >>> import torch, anyattn
    >>> anyattn.flash_attn_qkvpacked_func(torch.randn(2, 100, 3, 4, 16), causal=True).shape
    torch.Size([2, 100, 4, 16])
    """
    return flash_attn_func(*_parts(qkv, num_heads_q, "(batch, length, 3, heads, head_dim)", 5), **options)


def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, **options: Any) -> Any:
    """``flash_attn_func`` of k and v that are one tensor. q: (B, Sq, Hq, D); kv: (B, Sk, 2, Hkv, D); otherwise as the function above."""
    return flash_attn_func(q, *_split("kv", kv, 2, "(batch, length, 2, heads, head_dim)", 5), **options)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int | Tensor | None = None, *, num_heads_q: int | None = None, **options: Any
) -> Any:
    """``flash_attn_varlen_func`` of q, k and v that are one tensor, and sequences that attend to themselves.

    qkv: (total, 3, H, D); or with num_heads_q (total, Hq + 2 Hkv, D). cu_seqlens, max_seqlen: of q and of k. options: of
    ``flash_attn_varlen_func``.

    >>> import torch, anyattn
    >>> anyattn.flash_attn_varlen_qkvpacked_func(torch.randn(150, 3, 4, 16), torch.tensor([0, 100, 150]), 100).shape
    torch.Size([150, 4, 16])
    """
    parts = _parts(qkv, num_heads_q, "(total, 3, heads, head_dim)", 4)
    return flash_attn_varlen_func(*parts, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int | Tensor | None = None,
    max_seqlen_k: int | Tensor | None = None,
    **options: Any,
) -> Any:
    """``flash_attn_varlen_func`` of k and v that are one tensor: kv (total_k, 2, Hkv, D)."""
    k, v = _split("kv", kv, 2, "(total, 2, heads, head_dim)", 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, **options)


def _parts(qkv: Any, num_heads_q: int | None, shape: str, rank: int) -> tuple[Tensor, ...]:
    if num_heads_q is None:
        return _split("qkv", qkv, 3, shape, rank)
    heads = qkv.shape[-2] - num_heads_q
    if qkv.ndim != rank - 1 or heads < 0 or heads % 2:
        raise ValueError(
            f"qkv has shape {tuple(qkv.shape)} with num_heads_q={num_heads_q}; wanted {shape.replace('3, heads', 'Hq + 2 Hkv')}, without "
            f"num_heads_q {shape}"
        )
    return qkv.split((num_heads_q, heads // 2, heads // 2), -2)


def _split(name: str, packed: Any, count: int, shape: str, rank: int) -> tuple[Tensor, ...]:
    if not isinstance(packed, Tensor):
        raise TypeError(f"{name} is a {type(packed).__name__}; wanted a torch.Tensor of shape {shape}")
    if packed.ndim != rank or packed.shape[-3] != count:
        raise ValueError(f"{name} has shape {tuple(packed.shape)}; wanted {shape}")
    return packed.unbind(-3)


# ---- batches without their padding


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask names, one after the other, and what the varlen functions need to know of them.

    hidden_states: (B, S, ...). attention_mask: (B, S), bool or numbers, nonzero where a row is used. unused_mask: the same, nonzero where
    a row is to have room without being used.

    Returns (rows, indices, cu_seqlens, max_seqlen, seqused): rows (total, ...) with a gradient; indices int64 (total,), the place of each
    in the flattened batch, for ``pad_input``; cu_seqlens int32 (B + 1,); max_seqlen, an int that the host waits for; seqused int32 (B,),
    the rows in use of each sequence. Raises ``ValueError`` if the masks have other shapes.

    >>> import torch
    >>> rows, indices, ends, longest, used = unpad_input(torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [0, 1, 1]]))
    >>> rows.tolist(), ends.tolist(), longest, pad_input(rows, indices, 2, 3).tolist()
    ([0, 1, 4, 5], [0, 2, 4], 2, [[0, 1, 0], [0, 4, 5]])
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            shapes = f"{tuple(mask.shape)} but hidden_states has {tuple(hidden_states.shape)}"
            raise ValueError(f"{name} has shape {shapes}; wanted the first two dimensions, (batch, length)")
    used = attention_mask != 0
    has_room = used if unused_mask is None else used | (unused_mask != 0)
    lengths = has_room.sum(-1, dtype=torch.int32)
    indices = has_room.flatten().nonzero().flatten()
    longest = int(lengths.max()) if len(lengths) else 0
    ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) whose rows at ``indices`` are hidden_states (total, ...), as ``unpad_input`` returns them, and
    whose others are 0. Differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``x[indices]``; indices: integers of one dimension, each at most once."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of ``first_axis_dim`` rows, ``values`` at ``indices`` and 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.to(torch.int64), values)
