"""Stand-in: base classes of a back end, of its metadata and of its layers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, ClassVar, Generic, TypeVar

import torch


class AttentionType(str, Enum):
    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


@dataclass(frozen=True)
class MultipleOf:
    base: int


class AttentionBackend:
    supported_dtypes: ClassVar[Any] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[Any] = ["auto", "float16", "bfloat16"]
    forward_includes_kv_cache_update = True
    supports_kv_cache_update_bypass = False

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec=None):
        return [MultipleOf(1)]

    @classmethod
    def customize_spec(cls, spec):
        return spec

    @classmethod
    def supports_head_size(cls, head_size):
        return True

    @classmethod
    def supports_block_size(cls, block_size):
        return block_size is None or any(block_size % size.base == 0 for size in cls.get_supported_kernel_block_sizes())

    @classmethod
    def supports_sink(cls):
        return False

    @classmethod
    def supports_mm_prefix(cls):
        return False

    @classmethod
    def supports_per_head_quant_scales(cls):
        return False

    @classmethod
    def supports_sliding_window(cls):
        return False

    @classmethod
    def supports_rswa(cls):
        return False

    @classmethod
    def supports_non_causal(cls):
        return False

    @classmethod
    def supports_batch_invariance(cls):
        return False

    @classmethod
    def supports_attn_type(cls, attn_type):
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_combination(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability
    ):
        return None

    @classmethod
    def validate_configuration(
        cls, head_size, dtype, kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, use_per_head_quant_scales,
        device_capability, attn_type, has_sliding_window=False, use_non_causal=False, use_batch_invariant=False, use_kv_connector=False,
        use_pcp=False, use_adaptive_verification=False, use_dcp=False, use_rswa=False,
    ):  # fmt: skip
        kinds = (kv_cache_dtype, block_size, use_mla, has_sink, use_sparse, use_mm_prefix, device_capability)
        refused = {
            "head_size not supported": not cls.supports_head_size(head_size),
            "dtype not supported": dtype not in cls.supported_dtypes,
            "kv_cache_dtype not supported": kv_cache_dtype is not None and kv_cache_dtype not in cls.supported_kv_cache_dtypes,
            "block_size not supported": not cls.supports_block_size(block_size),
            "partial multimodal token full attention not supported": use_mm_prefix and not cls.supports_mm_prefix(),
            "MLA not supported": use_mla,
            "attention sinks not supported": has_sink and not cls.supports_sink(),
            "sparse not supported": use_sparse,
            "per-head quant scales not supported": use_per_head_quant_scales and not cls.supports_per_head_quant_scales(),
            f"attention type {attn_type} not supported": not cls.supports_attn_type(attn_type),
            "sliding window not supported": has_sliding_window and not cls.supports_sliding_window(),
            "R-SWA not supported": use_rswa and not cls.supports_rswa(),
            "non-causal attention not supported": use_non_causal and not cls.supports_non_causal(),
            "batch invariance not supported": use_batch_invariant and not cls.supports_batch_invariance(),
            "PCP not supported": use_pcp,
            "DCP not supported": use_dcp,
        }
        reason = cls.supports_combination(head_size, dtype, *kinds)
        return [name for name, holds in refused.items() if holds] + [reason] * (reason is not None)

    @classmethod
    def supported_kv_cache_layouts(cls):
        return None


class AttentionMetadata:
    pass


@dataclass
class CommonAttentionMetadata:
    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: Any = True
    seq_lens_cpu_upper_bound: Any = None
    mm_req_doc_ranges: Any = None
    rswa_prefix_lens: Any = None


class AttentionCGSupport(Enum):
    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


M = TypeVar("M")


class AttentionMetadataBuilder(Generic[M]):
    _cudagraph_support = AttentionCGSupport.NEVER
    supports_update_block_table = False
    supports_draft_decode_metadata_update = False

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec, self.layer_names, self.vllm_config, self.device = kv_cache_spec, layer_names, vllm_config, device

    @classmethod
    def get_cudagraph_support(cls, vllm_config, kv_cache_spec):
        return cls._cudagraph_support

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError

    def update_block_table(self, metadata, blk_table, slot_mapping):
        raise NotImplementedError

    def build_for_cudagraph_capture(self, common_attn_metadata):
        return self.build(0, common_attn_metadata)

    def update_draft_decode_metadata(self, metadata):
        raise NotImplementedError


T = TypeVar("T")


class AttentionImpl(Generic[T]):
    def __init__(
        self, num_heads, head_size, scale, num_kv_heads=None, alibi_slopes=None, sliding_window=None, kv_cache_dtype="auto",
        logits_soft_cap=None, attn_type=AttentionType.DECODER, kv_sharing_target_layer_name=None,
    ):  # fmt: skip
        raise NotImplementedError

    def forward(
        self, layer, query, key, value, kv_cache, attn_metadata, output, output_scale=None, output_block_scale=None
    ):  # fmt: skip
        raise NotImplementedError
