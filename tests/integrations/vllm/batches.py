"""Batches as vLLM runs them: requests at different lengths, packed queries, shuffled pages in any layout, padding and garbage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn.integrations.vllm import cache_update
from anyattn.integrations.vllm.cache import FORMATS, SCALE_BYTES, cache_views
from tests.support import sequences
from tests.support.sequences import Meaning, Ragged

HEADS, KV_HEADS, HEAD_SIZE = 4, 2, 32
MIXED = ((7, 7), (1, 33), (4, 50), (1, 1), (20, 64), (0, 0))
"""(queries, keys): a whole prompt, decoding, drafts, a first token, a chunk of a prompt, a request of nothing."""


@dataclass
class Batch:
    """tokens, requests: with padding. key, value: of the step's tokens. before: keys, values and slots that earlier steps have written."""

    parts: Ragged
    tokens: int
    common: Any
    query: Tensor
    key: Tensor
    value: Tensor
    before: tuple[Tensor, Tensor, Tensor]
    num_pages: int

    @property
    def positions(self) -> list[int]:
        """Of the first query of each request."""
        return [k - q for q, k in zip(*self.parts.lengths, strict=True)]


def batch_of(
    vllm: Any,
    lengths: Sequence[tuple[int, int]] = MIXED,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
    padding: tuple[int, int] = (5, 2),
    seed: int = 0,
    heads: tuple[int, int] = (HEADS, KV_HEADS),
    head_size: int = HEAD_SIZE,
    left_over: int = 2**30,
    **common: Any,
) -> Batch:
    """padding: tokens and requests behind those of ``lengths``. left_over: what is in the block table where no page is in use. common:
    other fields of the metadata that vLLM gives a builder."""
    counts, totals = [q for q, _ in lengths], [k for _, k in lengths]
    parts = sequences.ragged(counts, totals, *heads, d=head_size, dtype=dtype, seed=seed)
    g = torch.Generator().manual_seed(seed + 1)
    each = max(-(-max(totals) // page_size), 1)
    requests = len(lengths) + padding[1]
    num_pages = requests * each + 3
    order = torch.randperm(num_pages - 1, generator=g) + 1  # vLLM keeps page 0 for padding
    table = order[: requests * each].view(requests, each).to(torch.int32)
    slots = [table[b, torch.arange(n) // page_size].long() * page_size + torch.arange(n) % page_size for b, n in enumerate(totals)]
    for b in range(requests):  # vLLM does not clear what a request before has left
        table[b, -(-(totals[b] if b < len(totals) else 0) // page_size) :] = left_over
    past = [k - q for q, k in lengths]
    ends = torch.cat((sequences.ends(counts), torch.full((padding[1],), sum(counts), dtype=torch.int32)))
    made = vllm.api.CommonAttentionMetadata(
        query_start_loc=ends,
        query_start_loc_cpu=ends.clone(),
        seq_lens=torch.tensor(totals + [0] * padding[1], dtype=torch.int32),
        seq_lens_cpu_upper_bound=torch.tensor(totals + [0] * padding[1], dtype=torch.int32),
        num_reqs=requests,
        num_actual_tokens=sum(counts) + min(padding[0], 2),
        max_query_len=max(counts),
        max_seq_len=max(totals),
        block_table_tensor=table,
        slot_mapping=torch.cat([*(s[n:] for s, n in zip(slots, past, strict=True)), torch.full((min(padding[0], 2),), -1)]),
        **common,
    )
    k, v = ([x.transpose(0, 1) for x in of] for of in (parts.k, parts.v))
    new = [_padded([x[n:] for x, n in zip(of, past, strict=True)], padding[0]) for of in (k, v)]
    before = [torch.cat([x[:n] for x, n in zip(of, past, strict=True)]) for of in (k, v, slots)]
    # queries are a part of the projection's output, whose rows are longer
    rows = torch.randn(sum(counts) + padding[0], heads[0] + 3, head_size, generator=g).to(dtype)
    query = rows[:, 1 : 1 + heads[0]]
    query[: sum(counts)] = sequences.packed(parts.q)
    return Batch(parts, sum(counts) + padding[0], made, query, *new, (before[0], before[1], before[2]), num_pages)


def on_device(batch: Batch, device: str) -> Batch:
    """The batch with its tensors on a device; the sequences that it is judged by stay."""
    common = replace(batch.common)
    for name in ("query_start_loc", "seq_lens", "block_table_tensor", "slot_mapping", "causal"):
        value = getattr(common, name)
        setattr(common, name, value.to(device) if isinstance(value, Tensor) else value)
    query, key, value = (x.to(device) for x in (batch.query, batch.key, batch.value))
    k, v, slots = (x.to(device) for x in batch.before)
    return replace(batch, common=common, query=query, key=key, value=value, before=(k, v, slots))


def _padded(rows: list[Tensor], count: int) -> Tensor:
    return torch.cat([*rows, torch.full((count, *rows[0].shape[1:]), sequences.NAN, dtype=rows[0].dtype)])


def empty_cache(vllm: Any, batch: Batch, layout: str, stored: torch.dtype, content: int, page_size: int = 16) -> Tensor:
    """The second layer of two, (pages, Hkv, page_size, content) in a layout of vLLM; every byte is 255, which is NaN in float formats."""
    order = vllm.cache.KVCacheLayout[layout].value
    logical = (2, batch.num_pages, batch.key.shape[1], page_size, content * stored.itemsize)
    memory = torch.full([logical[axis] for axis in order], 255, dtype=torch.uint8, device=batch.key.device)
    return memory.permute([order.index(axis) for axis in range(5)])[1].view(stored)


def cache_of(vllm: Any, batch: Batch, layout: str, name: str, page_size: int = 16) -> Tensor:
    """``empty_cache`` in the format ``name``."""
    stored, size = FORMATS[name], batch.key.shape[2]
    content = 2 * size + 2 * SCALE_BYTES * stored.has_inline_scales
    dtype = batch.key.dtype if stored.dtype is None else torch.int8 if stored.dtype is torch.int8 else torch.uint8
    return empty_cache(vllm, batch, layout, dtype, content, page_size)


def held_by(batch: Batch, kv_cache: Tensor, layer: Any, name: str) -> Batch:
    """The batch with the keys and values that a quantised cache holds, in float64."""
    kv_cache = kv_cache.cpu()
    views = cache_views(kv_cache, batch.key.shape[2], FORMATS[name])
    page_size, table = views.k.shape[1], batch.common.block_table_tensor.cpu()
    held = []
    for cells, inline, scale in ((views.k, views.k_scale, layer._k_scale), (views.v, views.v_scale, layer._v_scale)):
        wide = cells.double() * (scale.cpu().double().reshape(-1, 1) if inline is None else inline.double()[..., None])
        rows = [torch.arange(k.shape[1]) for k in batch.parts.k]
        held.append([wide[table[b, at // page_size].long(), at % page_size].transpose(0, 1) for b, at in enumerate(rows)])
    return replace(batch, parts=replace(batch.parts, k=held[0], v=held[1]))


def config(rswa_window: int | None = None, is_mm_prefix_lm: bool = False) -> Any:
    model = SimpleNamespace(rswa_window=rswa_window, is_mm_prefix_lm=is_mm_prefix_lm)
    return SimpleNamespace(model_config=model, scheduler_config=SimpleNamespace(max_num_seqs=16))


def builder_of(vllm: Any, page_size: int = 16, device: str = "cpu", **model: Any) -> Any:
    make = vllm.backend.AnyAttentionBackend.get_builder_cls()
    return make(SimpleNamespace(block_size=page_size), ["layer"], config(**model), torch.device(device))


def layer_of(k_scale: float | Tensor = 1.0, v_scale: float | Tensor = 1.0, device: str = "cpu", **attributes: Any) -> Any:
    scales = {"_k_scale": torch.as_tensor(k_scale, device=device), "_v_scale": torch.as_tensor(v_scale, device=device)}
    return SimpleNamespace(**scales, **attributes)


def writes_by_torch(vllm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU too, where vLLM's operations write, which the stand-in does not have."""

    def update(views: Any, stored: Any, kv_cache_dtype: str, *rest: Any) -> None:
        cache_update._update_by_torch(views, stored, *rest)

    if not vllm.is_real:
        monkeypatch.setattr(vllm.implementation, "update_cache", update)


def step(impl: Any, layer: Any, batch: Batch, kv_cache: Tensor, metadata: Any) -> Tensor:
    """One step as vLLM's layer runs it: the cache is written, then read. Returns the output of the whole padded buffer."""
    output = torch.full(batch.query.shape, sequences.NAN, dtype=batch.query.dtype, device=batch.query.device)
    with torch.inference_mode():
        write(impl, layer, batch, kv_cache)
        result = impl.forward(layer, batch.query, batch.key, batch.value, kv_cache, metadata, output)
    assert result is output
    return output


def write(impl: Any, layer: Any, batch: Batch, kv_cache: Tensor) -> None:
    """The keys of the steps before, and of this one."""
    impl.do_kv_cache_update(layer, batch.before[0], batch.before[1], kv_cache, batch.before[2])
    impl.do_kv_cache_update(layer, batch.key, batch.value, kv_cache, batch.common.slot_mapping)


def judge(output: Tensor, batch: Batch, meaning: Meaning, label: str = "") -> None:
    """By the budget; the padding that counts as tokens is 0, the padding behind it is not written."""
    output = output.cpu()
    got = sequences.unpacked(output, batch.parts.lengths[0])
    sequences.judge({"out": got}, batch.parts, meaning, firsts=batch.positions, label=label)
    written = batch.common.num_actual_tokens
    assert not output[sum(batch.parts.lengths[0]) : written].any()
    assert output[written:].isnan().all()
