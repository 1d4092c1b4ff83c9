"""Cases of sequences and caches: documents of mixed lengths in one call, and decoding from a cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from benchmarks.case import OURS, Case

__all__ = ["Decode", "Documents", "document_lengths"]

_DOCUMENTS = 64
_JUDGED = 4  # documents, or batch entries, that are compared with the oracle: the longest, the shortest and some others


def document_lengths(total: int, count: int = _DOCUMENTS) -> list[int]:
    """Lengths spread evenly over their logarithm from 12 to about 1,800, in random order, ``total`` in all."""
    random = torch.Generator().manual_seed(0)
    spread = torch.exp(torch.linspace(2.5, 7.5, count, dtype=torch.float64))[torch.randperm(count, generator=random)]
    lengths = (spread / spread.sum() * total).round().long().clamp(min=1)
    lengths[lengths.argmax()] += total - lengths.sum()
    return lengths.tolist()


@dataclass
class Documents:
    """Causal attention inside each of 64 documents, packed: against SDPA on the padded batch, and against one call a document."""

    case: Case

    def __post_init__(self) -> None:
        shape, random = self.case.shape, torch.Generator().manual_seed(0)
        self.lengths = document_lengths(shape.seqlen_q)
        size = (shape.seqlen_q, shape.heads_q, shape.head_dim)
        self.q, self.k, self.v = (torch.randn(size, generator=random).to(self.case.torch_dtype) for _ in range(3))
        self.ends = F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0))

    def calls(self) -> dict[str, Callable[[], Any]]:
        import anyattn

        ends, parts = self.ends, list(pairwise(self.ends.tolist()))
        longest = max(self.lengths)
        rows = [[F.pad(x[a:b], (0, 0, 0, 0, 0, longest - b + a)) for a, b in parts] for x in self.qkv]
        padded = [torch.stack(documents).transpose(1, 2).contiguous() for documents in rows]
        options = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "causal": True}
        one_by_one = [[x[None, a:b] for x in self.qkv] for a, b in parts]
        return {
            OURS: lambda: anyattn.flash_attn_varlen_func(*self.qkv, **options),
            "sdpa-padded": lambda: F.scaled_dot_product_attention(*padded, is_causal=True),
            "per-document": lambda: [anyattn.flash_attn_func(*one, causal=True) for one in one_by_one],
        }

    @property
    def qkv(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.q, self.k, self.v

    def facts(self) -> dict[str, Any]:
        pairs = sum(n * (n + 1) // 2 for n in self.lengths) * self.case.shape.heads_q
        return {"pairs": pairs, "longest": max(self.lengths), "shortest": min(self.lengths)}

    def judge(self, results: dict[str, Any]) -> dict[str, float]:
        order = sorted(range(len(self.lengths)), key=lambda i: self.lengths[i])
        judged = [order[0], order[-1], *order[10 : 10 + 5 * (_JUDGED - 2) : 5]]
        ends = self.ends.tolist()
        shares = dict.fromkeys(results, 0.0)
        for i in judged:
            own = {
                OURS: lambda out, i=i: out[ends[i] : ends[i + 1]].transpose(0, 1)[None],
                "sdpa-padded": lambda out, i=i: out[i, None, :, : self.lengths[i]],
                "per-document": lambda outs, i=i: outs[i].transpose(1, 2),
            }
            one = [x[ends[i] : ends[i + 1]].transpose(0, 1)[None] for x in self.qkv]
            for name, share in _shares(one, {n: own[n](r) for n, r in results.items()}, causal=True).items():
                shares[name] = max(shares[name], share)
        return shares


@dataclass
class Decode:
    """One new query per sequence over a full cache: contiguous, in shuffled pages, and SDPA with ``enable_gqa``."""

    case: Case

    def __post_init__(self) -> None:
        shape, random = self.case.shape, torch.Generator().manual_seed(0)
        sizes = [(shape.seqlen_q, shape.heads_q), (shape.seqlen_k, shape.heads_kv), (shape.seqlen_k, shape.heads_kv)]
        made = (torch.randn(shape.batch, *size, shape.head_dim, generator=random).to(self.case.torch_dtype) for size in sizes)
        self.q, self.k, self.v = made

    def calls(self) -> dict[str, Callable[[], Any]]:
        import anyattn

        lengths = torch.full((self.case.shape.batch,), self.case.shape.seqlen_k, dtype=torch.int32)
        q, k, v = self.q, self.k, self.v
        sdpa = [t.transpose(1, 2) for t in (q, k, v)]
        calls = {
            OURS: lambda: anyattn.flash_attn_with_kvcache(q, k, v, cache_seqlens=lengths, causal=True),
            "sdpa-gqa": lambda: F.scaled_dot_product_attention(*sdpa, enable_gqa=True),
        }
        for page_size in (128, 16):
            calls[f"paged-{page_size}"] = self._paged(page_size, lengths)
        return {name: call for name, call in calls.items() if name in (OURS, *self.case.peers)}

    def _paged(self, page_size: int, lengths: Tensor) -> Callable[[], Any]:
        import anyattn

        shape = self.case.shape
        count = shape.batch * shape.seqlen_k // page_size
        order = torch.randperm(count, generator=torch.Generator().manual_seed(1))
        pools = [t.view(count, page_size, shape.heads_kv, shape.head_dim)[order] for t in (self.k, self.v)]
        table = torch.argsort(order).view(shape.batch, -1).to(torch.int32)
        return lambda: anyattn.flash_attn_with_kvcache(self.q, *pools, cache_seqlens=lengths, page_table=table, causal=True)

    def facts(self) -> dict[str, Any]:
        shape = self.case.shape
        size = 2 * shape.batch * shape.seqlen_k * shape.heads_kv * shape.head_dim * self.k.element_size()
        return {"pairs": shape.batch * shape.heads_q * shape.seqlen_q * shape.seqlen_k, "cache_gb": size / 1e9}

    def judge(self, results: dict[str, Any]) -> dict[str, float]:
        entries = torch.linspace(0, self.case.shape.batch - 1, _JUDGED).long()
        one = [t[entries].transpose(1, 2) for t in (self.q, self.k, self.v)]
        heads_first = {n: (r if n == "sdpa-gqa" else r.transpose(1, 2))[entries] for n, r in results.items()}
        return _shares(one, heads_first, causal=False)


def _shares(qkv: list[Tensor], results: dict[str, Tensor], causal: bool) -> dict[str, float]:
    mods: dict[str, Any] = {"mask": (lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)} if causal else {}
    references = (oracle.attention(*qkv, **mods).out, oracle.same_dtype(*qkv, **mods).out, rounding(*qkv, **mods).out)
    return {name: budget.share(out, *references) for name, out in results.items()}
