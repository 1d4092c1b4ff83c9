"""``AnyAttentionBackend``: what vLLM asks before it gives a layer to anyattn, and what anyattn answers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionType, MultipleOf
from vllm.v1.kv_cache_interface import KVQuantMode

from anyattn.integrations.vllm.cache import FORMATS, SCALE_BYTES
from anyattn.integrations.vllm.implementation import AnyAttentionImpl
from anyattn.integrations.vllm.metadata import AnyAttentionMetadataBuilder

__all__ = ["AnyAttentionBackend"]

_GREATEST_HEAD_SIZE = 512
_LEAST_FOR_E4M3 = (8, 9)
_INLINE_SCALES = (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


class AnyAttentionBackend(AttentionBackend):
    """vLLM's attention back end ``CUSTOM`` (``--attention-backend CUSTOM``).

    The base class refuses what is not said here to be supported: MLA, sparse attention, context parallelism of one request, and formats of
    the KV cache that are not listed. Any layout of the cache is read.
    """

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = list(FORMATS)
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True  # a decoder's forward reads keys and values from the cache only

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[AnyAttentionImpl]:
        return AnyAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[AnyAttentionMetadataBuilder]:
        return AnyAttentionMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int | MultipleOf]:
        """Sizes that vLLM chooses are multiples of this, as for its own back ends. Pages of any size are read."""
        return [MultipleOf(16)]

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Adds room for the scales behind the heads' numbers, where the format has them."""
        if spec.state_content_bytes is not None or spec.kv_quant_mode not in _INLINE_SCALES:
            return spec
        numbers = (spec.head_size + spec.head_size_v) * spec.dtype.itemsize
        return replace(spec, state_content_bytes=numbers + 2 * SCALE_BYTES)

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 0 < head_size <= _GREATEST_HEAD_SIZE

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type in (AttentionType.DECODER, AttentionType.ENCODER, AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER)

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    @classmethod
    def supports_batch_invariance(cls) -> bool:
        """With ``VLLM_BATCH_INVARIANT=1`` layers pass ``deterministic="batch"``."""
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_rswa(cls) -> bool:
        return True

    @classmethod
    def supports_mm_prefix(cls) -> bool:
        return True

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_per_head_quant_scales(cls) -> bool:
        return True

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: Any,
    ) -> str | None:
        """The reason against a combination of properties that are supported one by one."""
        if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
            return f"a KV cache of {kv_cache_dtype} for a model of {dtype} not supported: --kv-cache-dtype auto"
        stored = FORMATS[kv_cache_dtype].dtype if kv_cache_dtype in FORMATS else None
        if stored is torch.float8_e4m3fn and (device_capability.major, device_capability.minor) < _LEAST_FOR_E4M3:
            return f"a KV cache of {kv_cache_dtype} needs compute capability 8.9: --kv-cache-dtype fp8_e5m2"
        return None
