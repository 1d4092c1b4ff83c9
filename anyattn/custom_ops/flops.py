"""Floating-point operations of the operators, which ``torch.utils.flop_counter`` counts as those of torch's own attention.

The formulas are dense, as torch's are for SDPA and ``flex_attention``: a multiplication and an addition for each term of the two products,
whatever the mask hides; the backward pass has three products over head_dim and two over the values' head_dim. Packed, padded or paged
sequences count with their lengths. Where those have no values (fake tensors), or a CUDA graph's capture forbids to read them, each sequence
counts with the greatest length.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import mul
from typing import Any

import torch
from torch import Tensor
from torch.utils import flop_counter
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anyattn.tensors import kinds
from anyattn.validate.sequences import batch_of

__all__ = ["complete_counters", "count_operator", "decode_pairs", "flash_pairs", "flex_pairs"]

_formulas: dict[Any, Callable[..., Any]] = {}


def count_operator(operator: Any, pairs: Callable[[dict[str, Any]], Any], backward: Any = None) -> None:
    """Registers the formulas of an operator and its backward operator. pairs: the number of queries x keys, from the arguments by name."""
    for counted, is_backward in ((operator, False), (backward, True)):
        if counted is not None:
            packet = counted._overloadpacket
            _formulas[packet] = flop_counter.register_flop_formula(packet, get_raw=True)(_formula(counted, pairs, is_backward))


def _formula(operator: Any, pairs: Callable[[dict[str, Any]], Any], is_backward: bool) -> Callable[..., Any]:
    names = [argument.name for argument in operator._schema.arguments]

    def formula(*values: Any, out_val: Any = None, **named: Any) -> Any:
        by_name = dict(zip(names, values, strict=False)) | named
        of_keys, of_values = by_name["q"].shape[-1], by_name["v_cache" if "v_cache" in by_name else "v"].shape[-1]
        return 2 * pairs(by_name) * (3 * of_keys + 2 * of_values if is_backward else of_keys + of_values)

    return formula


def complete_counters() -> None:
    """Adds the formulas to active counters: each has a copy of torch's registry, perhaps from before these operators were imported."""
    for mode in _get_current_dispatch_mode_stack():
        counter = getattr(mode, "counter", None)
        if isinstance(counter, flop_counter.FlopCounterMode):
            counter.flop_registry = _formulas | counter.flop_registry


def flex_pairs(by_name: dict[str, Any]) -> Any:
    """Of ``anyattn::attend``."""
    batch, heads, queries, _ = by_name["q"].shape
    return batch * heads * queries * by_name["k"].shape[2]


def flash_pairs(by_name: dict[str, Any]) -> Any:
    """Of ``anyattn::flash``."""
    q, k, ends_q, ends_k, pages = (by_name[name] for name in ("q", "k", "cu_seqlens_q", "cu_seqlens_k", "page_table"))
    batch = batch_of(q, ends_q, ends_k, k, pages)
    queries = _lengths(by_name["seqused_q"], ends_q, by_name["max_seqlen_q"], q.shape[-3], batch)
    keys = _lengths(by_name["seqused_k"], ends_k, by_name["max_seqlen_k"], _capacity(k, pages), batch)
    return q.shape[-2] * sum(map(mul, queries, keys))


def decode_pairs(by_name: dict[str, Any]) -> Any:
    """Of ``anyattn::decode``, whose keys are those in the cache and the appended ones, without padding."""
    q, k, ends, capacity = by_name["q"], by_name["k"], by_name["cu_seqlens_q"], _capacity(by_name["k_cache"], by_name["page_table"])
    batch = q.shape[0] if ends is None else len(ends) - 1
    queries = _lengths(None, ends, by_name["max_seqlen_q"], q.shape[-3], batch)
    new = queries if k is not None and k.ndim == 3 else [0 if k is None else k.shape[1]] * batch
    cached = _lengths(by_name["cache_seqlens"], None, None, capacity, batch)
    padding = _lengths(by_name["cache_leftpad"], None, None, 0, batch)
    return q.shape[-2] * sum(a * (min(b + c, capacity) - d) for a, b, c, d in zip(queries, cached, new, padding, strict=True))


def _capacity(k: Tensor, pages: Tensor | None) -> Any:
    return k.shape[-3] * (1 if pages is None else pages.shape[1])


def _lengths(used: Tensor | None, ends: Tensor | None, most: int | None, rows: Any, batch: Any) -> list[Any]:
    """The length of each sequence; the greatest possible one, at most ``rows``, where the tables cannot be read."""
    table = ends if used is None else used
    if table is None or not _is_readable(table):
        return [rows if most is None else min(most, rows)] * batch
    return table.diff().tolist() if used is None else table.tolist()


def _is_readable(table: Tensor) -> bool:
    return kinds.has_memory(table) and not (table.is_cuda and torch.cuda.is_current_stream_capturing())
