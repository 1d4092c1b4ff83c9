"""Continuous batching of Transformers on anyattn: the attention function behind ``attn_implementation="paged|anyattn"``.

``model.generate_batch`` runs requests of different lengths, in prefill and in decode, as one packed sequence. The cache is Transformers'
own (``PagedAttentionCache``), and this module follows its contract: ``cache.update`` writes the step's keys and values and returns those of
each request, packed; in a pure decoding step Transformers passes a block table instead, and keys and values are appended to their pages in
place. Windows, causality, softcap and sinks are arguments of the kernel: there is no mask tensor, and no table is read on the host.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
from torch import Tensor

import anyattn
from anyattn.determinism import is_batch_invariant

__all__ = ["IMPLEMENTATION", "paged_attention", "register"]

IMPLEMENTATION = "anyattn_paged"  # the implementation of a model while a manager of continuous batching runs it

# names since Transformers 5.23, and before
_LONGEST_QUERY = ("max_length_q", "max_seqlen_q")
_LONGEST_KEY = ("max_length_k", "max_seqlen_k")
_OLD_WINDOWS = (
    "continuous batching of Transformers 4.57 reads the wrong cached keys in sliding-window layers once a request is longer than the "
    "window, with every attention implementation; use Transformers 5.17 or newer, or generate() in place of generate_batch()"
)


def register(name: str = "anyattn") -> None:
    """Lets models with the attention implementation ``name`` or ``"paged|" + name`` run in continuous batching. May be called again.

    The names are not added to ``AttentionMaskInterface``, so that Transformers makes no mask.
    """
    from transformers import AttentionInterface

    from anyattn.integrations.transformers import continuous_batching

    for each in (f"paged|{name}", IMPLEMENTATION):
        AttentionInterface.register(each, paged_attention)
    continuous_batching.accept({name, f"paged|{name}", IMPLEMENTATION}, IMPLEMENTATION)


@torch.compiler.disable  # a compiled graph would copy the cache, which is updated in place through views
def paged_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of one layer in a step of continuous batching; called by Transformers.

    query: (1, Hq, total_q, D). key, value: (1, Hkv, total_q, D), of the step's new tokens. attention_mask: not used; causality and the
    layer's window replace it. s_aux: (Hq,), a sink per head. kwargs: ``cache``, ``cu_seq_lens_q``, ``cu_seq_lens_k`` and the greatest
    lengths, and ``read_index`` and ``write_index`` or ``block_table``.

    Returns ((1, total_q, Hq, D), None). Raises ``ValueError`` outside continuous batching, for dropout, for attention that is not causal
    and for a position bias.
    """
    _check(module, dropout, is_causal, kwargs)
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    if window is not None and is_batch_invariant():
        raise ValueError(
            f"inside anyattn.batch_invariant() a layer has a window of {window} keys, outside of which continuous batching drops keys, and "
            "with them the places that the others had in tiles; wanted model.generate with past_key_values=DynamicCache(), without a config"
        )
    options: dict[str, Any] = {
        "softmax_scale": scaling,
        "causal": True,
        "window_size": (-1, -1) if window is None else (window - 1, 0),  # Transformers' window includes the query itself
        "softcap": 0.0 if softcap is None else softcap,
        "sink": s_aux,
        "num_splits": 0,  # a batch of few long sequences fills a GPU only with split-KV
    }
    if kwargs.get("block_table") is not None:
        out = _append_and_attend(module, query, key, value, options, kwargs)
    else:
        out = _update_and_attend(module, query, key, value, window is not None, options, kwargs)
    return out[None], None


def _update_and_attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, has_window: bool, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Attention of any mix of prefill and decode, (total_q, Hq, D); the cache returns the keys and values of the requests concatenated."""
    cu_seqlens_q = kwargs["cu_seq_lens_q"]
    longest_q = next((kwargs[name] for name in _LONGEST_QUERY if name in kwargs), None)
    longest_k = next((kwargs[name] for name in _LONGEST_KEY if name in kwargs), None)
    cache, layer = kwargs["cache"], module.layer_idx
    if hasattr(cache, "layer_to_allocator"):  # Transformers 5.23
        kind = cache.layer_to_allocator[layer].layer_type
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=dict(kwargs))
        key, value = key[0].transpose(0, 1), value[0].transpose(0, 1)
    else:
        kind = "sliding_attention" if has_window else "full_attention"
        key, value = cache.update(key, value, layer, **{name: kwargs[name] for name in ("read_index", "write_index")})
        if has_window and not hasattr(cache, "sentinel_index"):  # 4.57
            warnings.warn(_OLD_WINDOWS, stacklevel=2)
    cu_seqlens_k = kwargs["cu_seq_lens_k"]
    if isinstance(cu_seqlens_k, dict):
        cu_seqlens_k = cu_seqlens_k[kind]
    if isinstance(longest_k, dict):
        longest_k = longest_k[kind]
    return anyattn.flash_attn_varlen_func(
        query[0].transpose(0, 1),
        key,
        value,
        cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k=cu_seqlens_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
        **options,
    )


def _append_and_attend(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, options: dict[str, Any], kwargs: dict[str, Any]
) -> Tensor:
    """Attention of one new token per request, (requests, Hq, D); the page table says where the token is stored and which keys it sees."""
    layer: Any = module.layer_idx
    pool = _pool_of(kwargs["cache"], layer)
    requests = query.shape[2]
    ends = kwargs["cu_seq_lens_k"]
    if isinstance(ends, dict):
        ends = ends[pool.kind]
    # A compiled step or a CUDA graph is padded with requests of length 0 without pages, after all others. They append to a page that
    # Transformers reserves for this.
    held = (ends[1 : requests + 1] - ends[:requests] - 1).clamp_min(0)
    table = kwargs["block_table"][pool.row][:requests]
    pages = (table // pool.between).masked_fill(table < 0, pool.spare)
    real = requests
    if query.device.type == "cpu":  # reading costs nothing here, and two appends to one row raise
        real = int((ends[1 : requests + 1] > ends[:requests]).sum())
    q, k, v = (x[0].transpose(0, 1)[:real, None] for x in (query, key, value))
    out = anyattn.flash_attn_with_kvcache(q, pool.k, pool.v, k=k, v=v, cache_seqlens=held[:real], page_table=pages[:real], **options)
    out = out[:, 0]
    return out if real == requests else torch.nn.functional.pad(out, (0, 0, 0, 0, 0, requests - real))


class _Pool(NamedTuple):
    """The pages of one layer. k, v: (pages, page_size, Hkv, D). kind: the layer's type of attention. row: its group's row in the block
    tables, whose numbers are multiples of ``between``. spare: a page of this pool that belongs to no request."""

    k: Tensor
    v: Tensor
    kind: str
    row: int
    between: int
    spare: int


def _pool_of(cache: Any, layer: int) -> _Pool:
    if hasattr(cache, "layer_to_allocator"):  # Transformers 5.23
        allocator = cache.layer_to_allocator[layer]
        # Both views are of one buffer with the pages of all layers. The layer's own pages are those at multiples of `between`, and so are
        # the numbers in the table; -1 is no page.
        between = allocator.block_physical_stride // allocator.tokens_per_page
        k, v = (view[::between] for view in allocator.get_cache_for_block_table(layer))
        return _Pool(k, v, allocator.layer_type, allocator.index, between, allocator.blocks_per_sector)
    group, place = cache.layer_index_to_group_indices[layer]
    shape = (-1, cache.block_size, cache.num_key_value_heads, cache.head_dim)
    k, v = (storage[place].view(shape) for storage in (cache.key_cache, cache.value_cache))
    return _Pool(k, v, "full_attention", group, 1, cache.write_trash_index // cache.block_size)  # 5.17 has no block tables for windows


def _check(module: torch.nn.Module, dropout: float, is_causal: bool | None, kwargs: dict[str, Any]) -> None:
    if kwargs.get("cache") is None:
        config: Any = module.config
        raise ValueError(
            f"attn_implementation {config._attn_implementation!r} was called without a paged cache; it serves model.generate_batch "
            f'and its manager alone. For a forward pass or generate: model.set_attn_implementation("anyattn")'
        )
    if dropout:
        raise ValueError(f"dropout={dropout} in continuous batching; wanted 0: call model.eval()")
    if is_causal is False:
        raise ValueError('is_causal=False; continuous batching on anyattn is causal. For other models: attn_implementation="paged|eager"')
    if kwargs.get("position_bias") is not None:
        raise ValueError('position_bias is not supported in continuous batching on anyattn; use attn_implementation="paged|eager"')
