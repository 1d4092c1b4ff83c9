"""FlashAttention's modules by definition: plain torch, one sequence after the other, in the inputs' dtype, independent of the library."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor


def one(q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, window: tuple[int, int]) -> Tensor:
    """One sequence: q (Sq, H, D), k and v (Sk, Hkv, D)."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.transpose(0, 1), k.repeat_interleave(group, 1).transpose(0, 1), v.repeat_interleave(group, 1).transpose(0, 1)
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    distance = torch.arange(k.shape[1]) - torch.arange(q.shape[1])[:, None] - (k.shape[1] - q.shape[1])
    seen = torch.ones_like(distance, dtype=torch.bool)
    if window[0] >= 0:
        seen &= distance >= -window[0]
    if causal or window[1] >= 0:
        seen &= distance <= (0 if causal else window[1])
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    return (weights @ v).transpose(0, 1)


def flash_attn_varlen_func(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
    dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    block_table: Tensor | None = None, **neutral: Any,
) -> Tensor:  # fmt: skip
    found = []
    for b in range(len(cu_seqlens_q) - 1):
        start, end = int(cu_seqlens_k[b]), int(cu_seqlens_k[b + 1])
        keys, values = (x[start:end] if block_table is None else paged(x, block_table[b], end - start) for x in (k, v))
        found.append(one(q[int(cu_seqlens_q[b]) : int(cu_seqlens_q[b + 1])], keys, values, softmax_scale, causal, window_size))
    return torch.cat(found)


def paged(pool: Tensor, table: Tensor, length: int) -> Tensor:
    return torch.cat([pool[int(table[i // pool.shape[1]])][i % pool.shape[1]][None] for i in range(length)])


def flash_attn_varlen_qkvpacked_func(qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, *others: Any, **options: Any) -> Tensor:
    return flash_attn_varlen_func(*qkv.unbind(1), cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *others, **options)


def flash_attn_varlen_kvpacked_func(q: Tensor, kv: Tensor, *others: Any, **options: Any) -> Tensor:
    return flash_attn_varlen_func(q, *kv.unbind(1), *others, **options)


def flash_attn_with_kvcache(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, *, cache_seqlens: Tensor, block_table: Tensor, softmax_scale: float, causal: bool
) -> Tensor:
    caches = (k_cache, v_cache)
    rows = [[paged(x, table, int(n)) for x in caches] for table, n in zip(block_table, cache_seqlens, strict=True)]
    return torch.stack([one(q[b], *kv, softmax_scale, causal, (-1, -1)) for b, kv in enumerate(rows)])


def unpad_input(x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    places = [b * x.shape[1] + i for b in range(len(x)) for i in range(x.shape[1]) if mask[b, i]]
    lengths = [int(row.sum()) for row in mask]
    ends = torch.tensor([sum(lengths[:b]) for b in range(len(x) + 1)], dtype=torch.int32)
    return torch.stack([x[p // x.shape[1], p % x.shape[1]] for p in places]), torch.tensor(places), ends, max(lengths)


def pad_input(rows: Tensor, indices: Tensor, batch: int, length: int) -> Tensor:
    found = {int(p): row for p, row in zip(indices, rows, strict=True)}
    return torch.stack([found.get(p, torch.zeros_like(rows[0])) for p in range(batch * length)]).view(batch, length, *rows.shape[1:])


def apply_rotary_emb(x: Tensor, cos: Tensor, sin: Tensor, *, cu_seqlens: Tensor, max_seqlen: int) -> Tensor:
    at = torch.cat([torch.arange(int(n)) for n in cu_seqlens.diff()])
    half, (c, s) = cos.shape[1], (t[at][:, None] for t in (cos, sin))
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat((a * c - b * s, a * s + b * c, rest), -1)


@contextlib.contextmanager
def provided() -> Iterator[None]:
    """These functions as the modules of FlashAttention 2."""
    names = {
        "flash_attn": (flash_attn_varlen_func, flash_attn_varlen_qkvpacked_func, flash_attn_varlen_kvpacked_func, flash_attn_with_kvcache),
        "flash_attn.bert_padding": (unpad_input, pad_input),
        "flash_attn.layers": (),
        "flash_attn.layers.rotary": (apply_rotary_emb,),
    }
    modules = {name: ModuleType(name) for name in names}
    for name, functions in names.items():
        vars(modules[name]).update({f.__name__: f for f in functions})
    modules["flash_attn.bert_padding"].index_first_axis = lambda x, at: x[at]  # type: ignore[attr-defined]
    with mock.patch.dict(sys.modules, modules):
        yield
