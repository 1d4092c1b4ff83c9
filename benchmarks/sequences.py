"""Ragged batches and decoding: what is timed, against whom, and how the results are judged. The runner takes these cases by their kind.

varlen: documents of mixed lengths, causal, packed end to end; ``seqlen_q`` is the number of tokens in all, one document per 256.
decode: one new token per sequence over a long cache, the new key and value appended; ``seqlen_k`` keys in all.
Results: (total, H, D), (B, H, longest, D) or a list of documents (S, H, D) for varlen, (B, 1, H, D) or (B, H, 1, D) for decode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from benchmarks.case import OURS, Case, Shape

__all__ = ["CASES", "KINDS", "PEERS", "Decode", "Varlen", "document_lengths", "prepare"]

KINDS = ("varlen", "decode")
_TOKENS_PER_DOCUMENT = 256
_SPREAD = 0.8  # of the logarithm of a document's length: the longest of 64 is three times the mean, as short documents are many


def document_lengths(total: int) -> list[int]:
    """Lengths of documents that sum to ``total``, drawn log-normally: none is empty."""
    count = max(1, total // _TOKENS_PER_DOCUMENT)
    weights = torch.exp(_SPREAD * torch.randn(count, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    ends = (weights.cumsum(0) / weights.sum() * (total - count)).round().long() + torch.arange(1, count + 1)
    return torch.diff(ends, prepend=torch.zeros(1, dtype=torch.int64)).tolist()


@dataclass(frozen=True)
class Varlen:
    """The inputs of a varlen case: q (total, Hq, D), k and v (total, Hkv, D)."""

    case: Case
    lengths: list[int]
    q: Tensor
    k: Tensor
    v: Tensor

    @classmethod
    def of(cls, case: Case) -> Varlen:
        shape, g = case.shape, torch.Generator().manual_seed(0)
        heads = (shape.heads_q, shape.heads_kv, shape.heads_kv)
        qkv = (torch.randn(shape.seqlen_q, h, shape.head_dim, generator=g).to(case.device, case.torch_dtype) for h in heads)
        return cls(case, document_lengths(shape.seqlen_q), *qkv)

    @property
    def ends(self) -> Tensor:
        lengths = torch.tensor([0, *self.lengths], device=self.q.device)
        return lengths.cumsum(0).to(torch.int32)

    def facts(self) -> dict[str, Any]:
        pairs = sum(n * (n + 1) // 2 for n in self.lengths)
        return {"pairs": pairs * self.case.shape.heads_q, "documents": len(self.lengths), "longest": max(self.lengths)}

    def documents(self, result: Any) -> list[Tensor]:
        """(S, H, D) each, of a result in any of its forms."""
        if isinstance(result, list):
            return result
        if result.ndim == 4:
            return [result[b, :, :n].transpose(0, 1) for b, n in enumerate(self.lengths)]
        return list(result.split(self.lengths))

    def judge(self, results: dict[str, Any]) -> dict[str, float]:
        """The first, last, shortest and longest documents, on the first and last K/V head."""
        order = sorted(range(len(self.lengths)), key=lambda b: self.lengths[b])
        shares = dict.fromkeys(results, 0.0)
        for b in {0, len(order) - 1, order[0], order[-1]}:
            q, k, v = (x.split(self.lengths)[b].transpose(0, 1)[None] for x in (self.q, self.k, self.v))
            part = {name: self.documents(r)[b].transpose(0, 1)[None] for name, r in results.items()}
            for name, share in _judged(q, k, v, part, lambda b, h, i, j: i >= j).items():
                shares[name] = max(shares[name], share)
        return shares


@dataclass(frozen=True)
class Decode:
    """The inputs of a decode case: q (B, 1, Hq, D); caches (B, keys, Hkv, D), whose last row is appended anew by every call."""

    case: Case
    q: Tensor
    k_cache: Tensor
    v_cache: Tensor

    @classmethod
    def of(cls, case: Case) -> Decode:
        s, g = case.shape, torch.Generator().manual_seed(0)
        sizes = [(s.batch, 1, s.heads_q, s.head_dim), *[(s.batch, s.seqlen_k, s.heads_kv, s.head_dim)] * 2]
        return cls(case, *(torch.randn(size, generator=g).to(case.device, case.torch_dtype) for size in sizes))

    def facts(self) -> dict[str, Any]:
        s = self.case.shape
        return {"pairs": s.batch * s.heads_q * s.seqlen_k}

    def call(self, k_cache: Tensor, v_cache: Tensor, page_table: Tensor | None) -> Callable[[], Any]:
        """One step of decoding over these caches; calling it again changes nothing."""
        import anyattn

        new_k, new_v = (t[:, -1:].clone() for t in (self.k_cache, self.v_cache))
        cached = torch.full((len(self.q),), self.case.shape.seqlen_k - 1, dtype=torch.int32, device=self.q.device)
        options = {"k": new_k, "v": new_v, "cache_seqlens": cached, "page_table": page_table, "causal": True}
        return lambda: anyattn.flash_attn_with_kvcache(self.q, k_cache, v_cache, **options)

    def judge(self, results: dict[str, Any]) -> dict[str, float]:
        """The first and last sequences, on the first and last K/V head."""
        shares = dict.fromkeys(results, 0.0)
        for b in {0, len(self.q) - 1}:
            q, k, v = (t[b : b + 1].transpose(1, 2) for t in (self.q, self.k_cache, self.v_cache))
            part = {name: (r if r.shape[1] != 1 else r.transpose(1, 2))[b : b + 1] for name, r in results.items()}
            for name, share in _judged(q, k, v, part, None).items():
                shares[name] = max(shares[name], share)
        return shares


def _judged(q: Tensor, k: Tensor, v: Tensor, results: dict[str, Tensor], mask: Callable | None) -> dict[str, float]:
    """Shares of the budget on the first and last K/V head of tensors (1, H, S, D)."""
    kv_heads = torch.tensor([0, k.shape[1] - 1]).unique()
    ratio = q.shape[1] // k.shape[1]
    heads = (kv_heads[:, None] * ratio + torch.arange(ratio)).flatten()
    qkv = (q[:, heads], k[:, kv_heads], v[:, kv_heads])
    wanted = (oracle.attention(*qkv, mask=mask).out, oracle.same_dtype(*qkv, mask=mask).out, rounding(*qkv, mask=mask).out)
    return {name: budget.share(result[:, heads], *wanted) for name, result in results.items()}


def prepare(case: Case) -> Varlen | Decode:
    return Varlen.of(case) if case.kind == "varlen" else Decode.of(case)


# ---- contenders: inputs -> what is timed


def _anyattn(inputs: Varlen | Decode) -> Callable[[], Any]:
    import anyattn

    if isinstance(inputs, Decode):
        return inputs.call(inputs.k_cache.clone(), inputs.v_cache.clone(), None)
    ends, longest = inputs.ends, max(inputs.lengths)
    where = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": longest, "max_seqlen_k": longest}
    return lambda: anyattn.flash_attn_varlen_func(inputs.q, inputs.k, inputs.v, causal=True, **where)


def _each(inputs: Varlen) -> Callable[[], Any]:
    """One call per document."""
    import anyattn

    documents = [tuple(t[None] for t in parts) for parts in zip(*(x.split(inputs.lengths) for x in (inputs.q, inputs.k, inputs.v)))]
    return lambda: [anyattn.flash_attn_func(*qkv, causal=True)[0] for qkv in documents]


def _sdpa(inputs: Varlen | Decode) -> Callable[[], Any]:
    """On the padded batch, where the keys behind a document are hidden by causality; decoding on (B, H, S, D), attention alone."""
    if isinstance(inputs, Decode):
        qkv = [t.transpose(1, 2).contiguous() for t in (inputs.q, inputs.k_cache, inputs.v_cache)]
        return lambda: F.scaled_dot_product_attention(*qkv, enable_gqa=True)
    padded = []
    for x in (inputs.q, inputs.k, inputs.v):
        room = x.new_zeros(len(inputs.lengths), x.shape[1], max(inputs.lengths), x.shape[2])
        for b, part in enumerate(x.split(inputs.lengths)):
            room[b, :, : len(part)] = part.transpose(0, 1)
        padded.append(room)
    is_gqa = inputs.q.shape[1] != inputs.k.shape[1]
    return lambda: F.scaled_dot_product_attention(*padded, is_causal=True, enable_gqa=is_gqa)


def _paged(page_size: int) -> Callable[[Decode], Callable[[], Any]]:
    def prepare(inputs: Decode) -> Callable[[], Any]:
        batch, keys = inputs.k_cache.shape[:2]
        each = -(-keys // page_size)
        order = torch.randperm(batch * each, generator=torch.Generator().manual_seed(1))
        pools = []
        for cache in (inputs.k_cache, inputs.v_cache):
            rows = F.pad(cache, (0, 0, 0, 0, 0, each * page_size - keys))
            pool = torch.empty_like(rows.view(batch * each, page_size, *cache.shape[2:]))
            pool[order] = rows.view_as(pool)
            pools.append(pool)
        return inputs.call(*pools, order.view(batch, each).to(torch.int32))

    return prepare


PEERS: dict[str, Callable[[Any], Callable[[], Any]]] = {
    OURS: _anyattn,
    "anyattn-each": _each,
    "sdpa": _sdpa,
    "anyattn-pages-128": _paged(128),
    "anyattn-pages-16": _paged(16),
}
_DECODE = Shape(batch=16, heads_q=32, heads_kv=8, seqlen_q=1, seqlen_k=8192, head_dim=128)
_DTYPES = ("float32", "bfloat16")
CASES = [
    *(Case("sequences", "varlen", "documents", ("sdpa", "anyattn-each"), Shape.square(16_384), d) for d in _DTYPES),
    *(Case("sequences", "decode", "decode", ("sdpa",), _DECODE, d) for d in _DTYPES),
    # a case of its own: five copies of this cache at once would be 5 GiB
    *(Case("sequences", "decode", "decode-pages", ("anyattn-pages-128", "anyattn-pages-16"), _DECODE, d) for d in _DTYPES),
]
