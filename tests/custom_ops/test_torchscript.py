"""TorchScript: every entry point refuses ``torch.jit.trace``, ``torch.jit.script`` and ONNX's exporter that traces, with the way out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
WAY_OUT = "anyattn is called inside torch.jit.{}.*wanted torch.export.export.*or torch.compile"
LISTED = anyattn.create_block_mask(lambda b, h, q, k: q >= k, None, None, 40, 40, device="cpu")
ENDS = torch.tensor([0, 10, 40])
CACHE = torch.zeros(2, 64, 40, 16)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "flex_attention": lambda q: anyattn.flex_attention(q, q, q, mask_mod=causal),
    "block mask": lambda q: anyattn.flex_attention(q, q, q, block_mask=LISTED),
    "flash_attn_func": lambda q: anyattn.flash_attn_func(q, q, q, causal=True),
    "flash_attn_varlen_func": lambda q: anyattn.flash_attn_varlen_func(q[0], q[0], q[0], cu_seqlens_q=ENDS, cu_seqlens_k=ENDS),
    "flash_attn_with_kvcache": lambda q: anyattn.flash_attn_with_kvcache(q, CACHE, CACHE.clone(), k=q, v=q, cache_seqlens=3),
    "flash_attn_combine": lambda q: anyattn.flash_attn_combine(q[None], q[None, ..., 0])[0],
    "create_block_mask": lambda q: anyattn.create_block_mask(causal, 1, 1, q.shape[1], q.shape[1], device="cpu").kv_num_blocks,
    "compute_block_sparsity": lambda q: anyattn.compute_block_sparsity(16, 16, 1, 1, 40, 40, causal, device="cpu").mask_block_cnt,
    "compute_varlen_block_sparsity": lambda q: (
        anyattn.compute_varlen_block_sparsity(16, 16, None, causal, cu_seqlens_q=ENDS, cu_seqlens_k=ENDS).mask_block_cnt
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_traces_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=WAY_OUT.format("trace")):
        torch.jit.trace(CALLS[name], (torch.randn(2, 40, 40, 16),))


@pytest.mark.parametrize("name", [name for name in CALLS if " " not in name])
def test_scripts_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match=WAY_OUT.format("script")):
        torch.jit.script(getattr(anyattn, name))


class Layer(torch.nn.Module):
    def forward(self, q: Tensor) -> Tensor:
        return anyattn.flex_attention(q, q, q)


def test_a_module_that_calls_attention_is_refused_too() -> None:
    with pytest.raises(NotImplementedError, match=WAY_OUT.format("script")):
        torch.jit.script(Layer())


def test_the_exporter_that_traces_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match=r"torch\.onnx\.export with dynamo=False"):
        torch.onnx.export(Layer().eval(), (torch.randn(1, 2, 8, 16),), str(tmp_path / "layer.onnx"), dynamo=False)
