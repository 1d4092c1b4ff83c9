"""Packages of AOTInductor: exported models with attention in them run from the package as they ran in Python."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._inductor import config

import anyattn
from anyattn import masks, scores

needs_compiler = pytest.mark.skipif(shutil.which(os.environ.get("CXX", "g++")) is None, reason="AOTInductor needs a C++ compiler")

S, D = 64, 16
BIAS = torch.tensor([0.5, -1.0])
DOCUMENTS = masks.document(torch.arange(S) // 20)
CAUSAL, SOFTCAP, BIASED = masks.causal(), scores.softcap(5.0), scores.head_bias(BIAS)
OWN = anyattn.mod(lambda score, b, h, q_idx, kv_idx: score - 0.125 * (q_idx - kv_idx).abs())
RANGES = anyattn.create_block_mask(masks.causal(), 1, 1, S, S, "cpu", 16)
# the same lists, not known to follow from their mask: an exported program holds copies of its lists, and follows them likewise
LISTED = anyattn.BlockMask.from_kv_blocks(
    RANGES.kv_num_blocks, RANGES.kv_indices, RANGES.full_kv_num_blocks, RANGES.full_kv_indices, 16, masks.causal(), (S, S)
)
SIZES = (16, 16, None, None, S, S)
LISTS = anyattn.compute_block_sparsity(*SIZES, DOCUMENTS)
TILES = anyattn.create_block_mask(masks.causal() & masks.dilated(3, 2), 1, 1, S, S, "cpu", 16, separate_full_blocks=False)


def flex(q: Tensor, k: Tensor, v: Tensor, ranges: anyattn.BlockMask = RANGES) -> list[Tensor]:
    """With every choice of what is left out: each leaves other lists of the operator empty."""
    attend = anyattn.flex_attention
    return [
        attend(q, k, v, enable_gqa=True),
        *attend(q, k, v, SOFTCAP, enable_gqa=True, return_lse=True),
        attend(q, k, v, BIASED, enable_gqa=True, sink=BIAS),
        attend(q, k, v, mask_mod=DOCUMENTS, enable_gqa=True),
        attend(q, k, v, OWN, ranges, enable_gqa=True),
        attend(q, k, v, None, TILES, enable_gqa=True, mask_mod=CAUSAL),
    ]


def flash(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    ends = torch.tensor([0, 20, S], dtype=torch.int32)
    used = torch.tensor([40], dtype=torch.int32)
    return [
        anyattn.flash_attn_func(q, k, v),
        anyattn.flash_attn_func(q, k, v, causal=True, window_size=(8, 0)),
        anyattn.flash_attn_func(q, k, v, score_mod=OWN, mask_mod=DOCUMENTS),
        anyattn.flash_attn_varlen_func(q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True),
        anyattn.flash_attn_with_kvcache(q[:, :1], k, v, cache_seqlens=used),
        anyattn.flash_attn_func(q, k, v, score_mod=OWN, mask_mod=DOCUMENTS, block_sparse_tensors=LISTS),
        anyattn.flash_attn_func(q, k, v, mask_mod=DOCUMENTS, block_sparse_tensors=anyattn.compute_block_sparsity(*SIZES, DOCUMENTS)),
        anyattn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_seqlens_q=ends, cu_seqlens_k=ends, mask_mod=CAUSAL,
            block_sparse_tensors=anyattn.compute_varlen_block_sparsity(16, 16, None, CAUSAL, cu_seqlens_q=ends, cu_seqlens_k=ends),
        ),
    ]  # fmt: skip


class Model(torch.nn.Module):
    """All in one program, for each is compiled on its own."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
        return [*flex(q, k, v), *flash(q, k, v)]


@needs_compiler
def test_a_package_runs(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, S, D, generator=generator) for heads in (2, 1, 1))
    want = [*flex(q, k, v, LISTED), *flash(q, k, v)]
    with torch.no_grad():
        exported = torch.export.export(Model(), (q, k, v))
    # one program: compiling the headers beforehand takes longer than compiling them with it
    configs = {"aot_inductor.precompile_headers": False} if hasattr(config.aot_inductor, "precompile_headers") else {}
    path = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"), inductor_configs=configs)
    found = torch._inductor.aoti_load_package(path)(q, k, v)
    assert len(found) == len(want) and all(torch.equal(a, b) for a, b in zip(found, want, strict=True))
