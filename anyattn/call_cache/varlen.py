"""Signature of a ``flash_attn_varlen_func`` call whose tables the host does not read; most do not depend on the sequences' lengths."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.sequences.unread_varlen import StoredSizes, queries_each
from anyattn.validate import sequences
from anyattn.validate.flash import Options
from anyattn.validate.window import sides_in_sight

__all__ = ["Places", "facts_of_places", "seen_rows"]

_FEW = 64  # queries, up to which a plan looks at how many there are
_INTEGERS = (torch.int32, torch.int64)


class Places(NamedTuple):
    """What says where a call's sequences are.

    tables: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k and page_table. most: max_seqlen_q and max_seqlen_k.
    """

    tables: tuple[Any, Any, Any, Any, Any]
    most: tuple[Any, Any]
    validate: bool | None


def seen_rows(x: Tensor) -> tuple:
    """The facts of q, k or v. Of packed rows their number is none, but for one row, whose stride nobody uses."""
    shape, where = x.shape, (x.dtype, x.device, x.data_ptr() & 15, x.requires_grad, x.is_neg())
    return (shape[0] > 1, shape[1:], x.stride(), *where) if len(shape) == 3 else (shape, x.stride(), *where)


def facts_of_places(q: Tensor, k: Tensor, v: Tensor, places: Places, given: Options) -> tuple[tuple, StoredSizes] | None:
    """(what is the same for all calls of one kind, this call's sizes); None where the tables are looked at, or something is amiss."""
    (cu_q, cu_k, used_q, used_k, pages), (most_q, most_k) = places.tables, places.most
    if not sequences.takes_their_word(q.device, places.validate):
        return None
    if q.ndim != (4 if cu_q is None else 3) or k.ndim != (4 if cu_k is None else 3) or k.shape[:-1] != v.shape[:-1]:
        return None
    if pages is not None and (cu_k is not None or used_k is None):
        return None
    counts: list[int] = []
    seen: list[Any] = []
    present: list[Tensor] = []
    for i, t in enumerate(places.tables):
        if t is None:
            seen.append(None)
            continue
        # a subclass may mean anything by an operation
        if type(t) is not Tensor or t.dtype not in _INTEGERS or t.device != q.device or t.ndim != (2 if i == 4 else 1):
            return None
        seen.append((t.dtype, t.stride()))
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
    in_sight = sides_in_sight(given.causal, given.window_size, bound_q, bound_k)
    slopes = given.alibi_slopes
    # where mods read tables of their own, the checks hang on how far positions go
    reads = given.score_mod is not None or given.mask_mod is not None or (slopes is not None and slopes.ndim > 1)
    # tiles for few queries are made to measure, whose heads may share them, and the number of splits is chosen from all sizes
    stored = rows_q if cu_q is not None else rows_q * counts[0]
    planned = min(bound_q, _FEW + 1), q.shape[-2] != k.shape[-2] and queries_each(stored, counts[0], bound_q)
    return (tuple(seen), identical, in_sight, planned, sizes if reads or given.num_splits == 0 else None), sizes


_GREATEST = (int, type(None))
