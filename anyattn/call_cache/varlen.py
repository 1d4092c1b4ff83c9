"""Signatures of ``flash_attn_varlen_func`` calls whose length tables the host does not read: a key that contains few of the lengths, by
which calls are planned, and an exact one, by which launches are replayed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.call_cache.signature import CANNOT_READ, OPTIONS, PLAIN, Kind, Signature, fields, signature, values_of
from anyattn.determinism import Determinism, mode_of
from anyattn.kvcache.gathered import gathering, line_of
from anyattn.sequences.unread_varlen import StoredSizes, queries_each
from anyattn.validate import sequences
from anyattn.validate.flash import Options
from anyattn.validate.window import sides_in_sight

__all__ = ["Places", "exact_signature", "key_of_places", "signature_of_varlen"]

_FEW = 128  # queries: up to this number a plan depends on their exact number (thread blocks of wide heads form pairs up to 128 rows)
_INTEGERS = (torch.int32, torch.int64)
_GREATEST = (int, type(None))


class Places(NamedTuple):
    """The arguments that locate a call's sequences.

    tables: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and page_table. most: max_seqlen_q and max_seqlen_k.
    """

    tables: tuple[Any, Any, Any, Any, Any]
    most: tuple[Any, Any]
    validate: bool | None


_signature = signature(
    "flash_attn_varlen_func", q=Kind.PACKED_ROWS, k=Kind.PACKED_ROWS, v=values_of(Kind.PACKED_ROWS, "k"), of_places=Kind.VALUE,
    options=OPTIONS, backend=Kind.VALUE,
)  # fmt: skip
_PLACES = fields(
    Places, tables=", ".join((*(Kind.TENSOR.format(x=f"{{x}}[{i}]") for i in range(5)), "{x}[0] is {x}[1]", "{x}[2] is {x}[3]")),
    most=", ".join(Kind.INT_OR_NONE.format(x=f"{{x}}[{i}]") for i in range(2)), validate=Kind.VALUE,
)  # fmt: skip
_exact = signature(
    "flash_attn_varlen_func, exact", q=Kind.TENSOR, k=Kind.TENSOR, v=values_of(Kind.TENSOR, "k"), places=_PLACES, options=OPTIONS,
    backend=Kind.VALUE,
)  # fmt: skip


def exact_signature(q: Any, k: Any, v: Any, places: Places, options: Options, backend: str | None) -> Signature | None:
    """A signature with all sizes, which determine the launches; None also for a call whose tables are read, or that wants gradients."""
    if not isinstance(q, Tensor) or not sequences.skips_device_reads(q.device, places.validate):
        return None
    if q.requires_grad and torch.is_grad_enabled():
        return None
    return _exact(q, k, v, places, options, backend)


def signature_of_varlen(q: Any, k: Any, v: Any, places: Places, options: Options, backend: str | None) -> Signature | None:
    """The call's signature; None also for a call whose tables are read."""
    if type(q) not in PLAIN or type(k) not in PLAIN or type(v) not in PLAIN:
        return None
    try:
        of_places = key_of_places(q, k, v, places, options)
    except CANNOT_READ:
        return None
    call_signature = None if of_places is None else _signature(q, k, v, of_places[0], options, backend)
    if of_places is not None and call_signature is not None:
        call_signature.sizes = of_places[1]
    return call_signature


def key_of_places(q: Tensor, k: Tensor, v: Tensor, places: Places, options: Options) -> tuple[tuple, StoredSizes] | None:
    """(part of the key, this call's sizes); None if the tables are read, or an argument is wrong."""
    (cu_q, cu_k, used_q, used_k, pages), (most_q, most_k) = places.tables, places.most
    if not sequences.skips_device_reads(q.device, places.validate):
        return None
    if q.ndim != (4 if cu_q is None else 3) or k.ndim != (4 if cu_k is None else 3) or k.shape[:-1] != v.shape[:-1]:
        return None
    if pages is not None and (cu_k is not None or used_k is None):
        return None
    counts: list[int] = []
    kinds: list[Any] = []
    present: list[Tensor] = []
    for i, t in enumerate(places.tables):
        if t is None:
            kinds.append(None)
            continue
        # a subclass may redefine any operation
        if type(t) is not Tensor or t.dtype not in _INTEGERS or t.device != q.device or t.ndim != (2 if i == 4 else 1):
            return None
        kinds.append((t.dtype, t.stride()))
        present.append(t)
        counts.append(t.shape[0] - (i < 2))
    counts += [t.shape[0] for t, is_padded in ((q, cu_q is None), (k, cu_k is None and pages is None)) if is_padded]
    if min(counts) != max(counts):
        return None
    rows_q = q.shape[0] if cu_q is not None else q.shape[1]
    rows_k = k.shape[0] if cu_k is not None else k.shape[1] * (1 if pages is None else pages.shape[1])
    if type(most_q) not in _GREATEST or type(most_k) not in _GREATEST:
        return None
    bound_q, bound_k = rows_q if most_q is None else min(most_q, rows_q), rows_k if most_k is None else min(most_k, rows_k)
    sizes = StoredSizes(counts[0], rows_q, rows_k, bound_q, bound_k, 0 if pages is None else k.shape[1])
    if min(sizes[:5]) <= 0:
        return None
    identical = (cu_q is cu_k, used_q is used_k, len({id(t) for t in present}))
    in_sight = sides_in_sight(options.causal, options.window_size, bound_q, bound_k)
    slopes = options.alibi_slopes
    # where mods read tensors, the checks depend on the greatest positions
    reads = options.score_mod is not None or options.mask_mod is not None or (slopes is not None and slopes.ndim > 1)
    # the tile height depends on the number of queries if they are few, packing on the queries per entry, and split-KV on all sizes
    stored = rows_q if cu_q is not None else rows_q * counts[0]
    # with the same bits in every batch the backend and the tile height depend on the number of row tiles
    in_any_batch = mode_of(options.deterministic) is Determinism.BATCH
    each = (in_any_batch or q.shape[-2] != k.shape[-2]) and queries_each(stored, counts[0], bound_q)
    planned: tuple = min(bound_q, _FEW + 1), each, in_any_batch and stored.bit_length()
    if k.dtype is not q.dtype:
        lines, line = 1 if cu_k is not None else counts[0], line_of(rows_k, bound_k, sizes.page_size)
        copied = lines * line * k.shape[-2] * (k.shape[-1] + v.shape[-1]) * q.element_size()
        planned += (gathering(stored, q.shape[-2], counts[0], bound_k, copied),)
    return (tuple(kinds), identical, in_sight, planned, sizes if reads or options.num_splits == 0 else None), sizes
