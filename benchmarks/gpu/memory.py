"""Memory that a forward and backward pass over a long batch of documents allocates: 60,000 tokens with causal document masks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from anyattn.testing.harness.variants import VARIANTS, Setting, document_lengths

__all__ = ["FUNCTIONS", "CudaMeter", "Meter", "long_documents"]

_TOKENS, _HEADS, _WIDTH = 60_000, 16, 128
_STATISTIC = 4  # bytes of a float32


class Meter(Protocol):
    """Tracks allocations from ``start`` on. largest: bytes of the largest one. peak: most bytes allocated at once."""

    def start(self) -> None: ...

    def stop(self) -> tuple[int, int]:
        """(largest, peak)"""


class CudaMeter:
    """A meter that reads the record of torch's allocator."""

    def start(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        self._before = torch.cuda.memory_allocated()
        torch.cuda.memory._record_memory_history(enabled="all", context=None, max_entries=100_000)

    def stop(self) -> tuple[int, int]:
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - self._before
        traces = torch.cuda.memory._snapshot()["device_traces"]
        torch.cuda.memory._record_memory_history(enabled=None)
        return max((event["size"] for trace in traces for event in trace if event["action"] == "alloc"), default=0), peak


def _flex(qkv: tuple[Tensor, ...], mask: Callable | None, lengths: list[int], backend: str | None) -> Tensor:
    import anyattn

    assert mask is not None
    q, k, v = (t.transpose(0, 1)[None] for t in qkv)  # (1, heads, tokens, head dim), as views
    block_mask = anyattn.create_block_mask(mask, 1, 1, q.shape[2], q.shape[2], device=q.device)
    # squeezed, not indexed: the derivative of [0] would copy the gradient into zeros, an allocation of the caller's and not of ours
    return anyattn.flex_attention(q, k, v, None, block_mask, backend=backend).squeeze(0).transpose(0, 1)


def _varlen(qkv: tuple[Tensor, ...], mask: Callable | None, lengths: list[int], backend: str | None) -> Tensor:
    import anyattn

    ends = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=qkv[0].device)
    given: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_k": ends, "max_seqlen_q": max(lengths), "max_seqlen_k": max(lengths)}
    return anyattn.flash_attn_varlen_func(*qkv, **given, causal=True, validate=False, backend=backend)


FUNCTIONS: dict[str, Callable[..., Tensor]] = {"flex": _flex, "varlen": _varlen}


def _pass(
    function: str, qkv: tuple[Tensor, ...], gradient: Tensor, mask: Any, lengths: list[int], backend: str | None
) -> tuple[Tensor, ...]:
    out = FUNCTIONS[function](qkv, mask, lengths, backend)
    return out, *torch.autograd.grad(out, qkv, gradient)


def long_documents(
    function: str, meter: Meter, device: str = "cuda", backend: str | None = "triton", tokens: int = _TOKENS, heads: int = _HEADS
) -> dict[str, Any]:
    """Runs both passes once, for the first time. Building the block mask counts too.

    largest: the largest allocation, relative to one gradient. peak: the most allocated at once, relative to the output, the three
    gradients and two statistics per row. sums: of the absolute values of out, dq, dk and dv, on which both functions must agree.
    """
    random = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(tokens, heads, _WIDTH, generator=random, device=device, dtype=torch.bfloat16) for _ in range(4)]
    gradient, qkv = drawn[3], tuple(t.requires_grad_() for t in drawn[:3])
    mask, lengths = VARIANTS["cuda"]["document-causal"].mods(Setting(tokens, heads, device)).mask, document_lengths(tokens)
    meter.start()
    results = _pass(function, qkv, gradient, mask, lengths, backend)
    largest, peak = meter.stop()
    one = gradient.nbytes
    return {
        "largest": largest / one,
        "peak": peak / (4 * one + 2 * tokens * heads * _STATISTIC),
        "largest_bytes": largest,
        "peak_bytes": peak,
        "sums": [float(t.detach().abs().sum(dtype=torch.float64)) for t in results],
    }
