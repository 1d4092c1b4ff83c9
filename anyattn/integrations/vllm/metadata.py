"""Attention metadata of a vLLM step: what the layers of one KV cache group share, and the builder that vLLM makes it with."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport, AttentionMetadata, AttentionMetadataBuilder, CommonAttentionMetadata

from anyattn.arithmetic import ceil_div
from anyattn.integrations.vllm.visibility import Prefix, SharedRanges, visibility

__all__ = ["AnyAttentionMetadata", "AnyAttentionMetadataBuilder"]

_FEWEST_PAGES = 16


@dataclass
class AnyAttentionMetadata(AttentionMetadata):
    """A batch of requests whose queries are packed: those of request b are rows ``query_start_loc[b]`` to ``query_start_loc[b + 1]``.

    seq_lens: int32 (requests,), keys of each request, this step's included. block_table: int32 (requests, pages). slot_mapping: int64
    (tokens,), where this step's keys go. causal: bool, or (requests,). max_query_len, max_seq_len: bounds. num_actual_tokens: rows of
    the queries that count, of which those behind the last request's are padding.
    """

    num_actual_tokens: int
    max_query_len: int
    query_start_loc: Tensor
    max_seq_len: int
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    causal: bool | Tensor = True
    prefix: Prefix | None = None
    shared: SharedRanges | None = None
    known: dict[tuple, dict[str, Any]] = field(default_factory=dict)

    def visible(self, sliding_window: int | None, mask_mod: Callable | None, clamps_shared: bool) -> dict[str, Any]:
        """``visibility`` for a layer, by the names of arguments; layers that have the same window and mask get the same object."""
        key = sliding_window, mask_mod, clamps_shared
        if key not in self.known:
            self.known[key] = visibility(
                self.causal, sliding_window, mask_mod=mask_mod, prefix=self.prefix, shared=self.shared, clamps_shared=clamps_shared
            )._asdict()
        return self.known[key]


class AnyAttentionMetadataBuilder(AttentionMetadataBuilder[AnyAttentionMetadata]):
    """Makes no copies: the tensors of a step are vLLM's own buffers, so that a captured CUDA graph sees what the next step writes there.

    On a GPU attention reads lengths, pages and starts on the device alone, and the bounds decide the size of the launch. A graph of any
    batch may therefore be replayed for any other batch of as many tokens and requests.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.ALWAYS
    supports_update_block_table = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        config = vllm_config.model_config
        self.prefix: Prefix | None = None
        if config.rswa_window is not None:
            lengths = torch.zeros(vllm_config.scheduler_config.max_num_seqs, dtype=torch.int32, device=device)
            self.prefix = Prefix(lengths, config.rswa_window)
        # the prefixes' lengths are copied to the device by `build`, which a captured graph of draft steps does not call
        self.supports_draft_decode_metadata_update = self.prefix is None
        self._has_all_pages = False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """Images seen in both directions make the mask of a prefill another one; decoding steps have none of their tokens."""
        return AttentionCGSupport.UNIFORM_BATCH if vllm_config.model_config.is_mm_prefix_lm else cls._cudagraph_support

    def build(
        self, common_prefix_len: int, common_attn_metadata: CommonAttentionMetadata, fast_build: bool = False
    ) -> AnyAttentionMetadata:
        common = common_attn_metadata
        table = common.block_table_tensor
        return AnyAttentionMetadata(
            num_actual_tokens=common.num_actual_tokens,
            max_query_len=int(common.max_query_len),  # a number of numpy's in vLLM's chunked local attention
            query_start_loc=common.query_start_loc,
            max_seq_len=int(common.max_seq_len),
            seq_lens=common.seq_lens,
            block_table=table if self._has_all_pages else self._used(table, int(common.max_seq_len)),
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            prefix=self._prefix_of(common),
            shared=_shared_of(common),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> AnyAttentionMetadata:
        """A graph is replayed for longer requests, so that its block table keeps all columns."""
        self._has_all_pages = True
        try:
            return self.build(0, common_attn_metadata)
        finally:
            self._has_all_pages = False

    def update_block_table(self, metadata: AnyAttentionMetadata, blk_table: Tensor, slot_mapping: Tensor) -> AnyAttentionMetadata:
        """The same batch in another group of layers, whose pages are as large: its table has the same columns in use."""
        updated = copy.copy(metadata)
        updated.block_table, updated.slot_mapping = blk_table[:, : metadata.block_table.shape[1]], slot_mapping
        return updated

    def update_draft_decode_metadata(self, metadata: AnyAttentionMetadata) -> None:
        """Nothing to do: the metadata refers to buffers that are up to date."""

    def _used(self, table: Tensor, max_seq_len: int) -> Tensor:
        """The columns that requests use, rounded up to a power of two: few launches are prepared, and keys are divided among programs by
        the length that they have instead of the model's greatest."""
        pages = ceil_div(max(max_seq_len, 1), self.kv_cache_spec.block_size)
        columns = max(_FEWEST_PAGES, 1 << (pages - 1).bit_length())
        return table[:, :columns] if columns < table.shape[1] else table

    def _prefix_of(self, common: CommonAttentionMetadata) -> Prefix | None:
        if self.prefix is None or common.rswa_prefix_lens is None:
            return None
        lengths = self.prefix.lengths[: common.num_reqs]
        lengths.copy_(common.rswa_prefix_lens[: common.num_reqs], non_blocking=True)
        return self.prefix._replace(lengths=lengths)


def _shared_of(common: CommonAttentionMetadata) -> SharedRanges | None:
    """None if no query token of the batch is in a range."""
    if not common.mm_req_doc_ranges:
        return None
    starts = common.query_start_loc_cpu.tolist()
    lengths = common.seq_lens_cpu_upper_bound.tolist()  # exact for a prefill, and only prompts have ranges
    found = torch.full((max(common.num_actual_tokens, 1), 2), -1, dtype=torch.int32, device="cpu")
    for request, ranges in common.mm_req_doc_ranges.items():
        if request >= common.num_reqs:
            continue
        start, end = starts[request : request + 2]
        past = lengths[request] - (end - start)  # positions before the first of these tokens
        for first, last in ranges:
            rows = slice(start + max(first - past, 0), min(start + last - past + 1, end))
            if rows.start < rows.stop:
                found[rows] = torch.tensor((first, last), dtype=torch.int32, device="cpu")
    if int(found.max()) < 0:
        return None
    device = common.seq_lens.device
    of_tokens = found if device.type == "cpu" else found.pin_memory().to(device, non_blocking=True)
    return SharedRanges(of_tokens, common.query_start_loc, common.seq_lens)
