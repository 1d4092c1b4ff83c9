"""Probes of ragged batches and caches, each in its own process: the host's part of a decode call, lists of a large ragged batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

__all__ = ["PROBES"]


def _decode_host(calls: int = 300) -> dict[str, Any]:
    """One step of decoding over a cache too small to matter: what Python, checks and planning take. Microseconds, medians."""
    import torch

    import anyattn

    found: dict[str, Any] = {}
    for batch in (1, 16):
        for name, page_size in (("contiguous", 0), ("paged", 16)):
            q, k, v = torch.randn(batch, 1, 4, 16), torch.randn(batch, 1, 2, 16), torch.randn(batch, 1, 2, 16)
            size = (batch * 2, page_size, 2, 16) if page_size else (batch, 32, 2, 16)
            caches = torch.randn(size), torch.randn(size)
            table = torch.randperm(batch * 2).view(batch, 2).to(torch.int32) if page_size else None
            options = {"k": k, "v": v, "cache_seqlens": torch.full((batch,), 8), "page_table": table, "causal": True}
            seconds = []
            for i in range(calls + 20):
                start = time.perf_counter()
                anyattn.flash_attn_with_kvcache(q, *caches, **options)
                if i >= 20:  # the first ones trace the mask and warm up
                    seconds.append(time.perf_counter() - start)
            found[f"batch_{batch}_{name}_us"] = statistics.median(seconds) * 1e6
    for batch in (1, 16):
        found[f"batch_{batch}_us"] = max(found[f"batch_{batch}_{name}_us"] for name in ("contiguous", "paged"))
    return found


def _ragged_lists(sequences: int = 1000, longest: int = 4096, repeats: int = 5) -> dict[str, Any]:
    """Block lists of many sequences of 1 to ``longest`` tokens, tiles of 128: seconds, the best of a few, and the lists' size in MiB."""
    import torch

    import anyattn

    lengths = torch.randint(1, longest + 1, (sequences,), generator=torch.Generator().manual_seed(0))
    ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    masks: dict[str, Callable] = {
        "causal": lambda b, h, q_idx, kv_idx: q_idx >= kv_idx,
        "window-512": lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < 512),
    }
    found: dict[str, Any] = {"sequences": sequences, "tokens": int(ends[-1])}
    for name, mask in masks.items():
        seconds = []
        for _ in range(repeats):
            start = time.perf_counter()
            lists = anyattn.compute_varlen_block_sparsity(128, 128, None, mask, cu_seqlens_q=ends, cu_seqlens_k=ends)
            seconds.append(time.perf_counter() - start)
        held = (lists.mask_block_cnt, lists.mask_block_idx, lists.full_block_cnt, lists.full_block_idx)
        size = sum(t.numel() * t.element_size() for t in held if t is not None) / 2**20
        found[name] = {"seconds": statistics.median(seconds), "first_seconds": seconds[0], "lists_mib": size}
    return found


PROBES: dict[str, Callable[[], dict[str, Any]]] = {"decode-host": _decode_host, "ragged-lists": _ragged_lists}
