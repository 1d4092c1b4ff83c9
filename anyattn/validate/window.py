"""Window mask of ``causal`` and ``window_size``: a band of keys around each query's position among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.mods import masks
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.sequences.unread_varlen import LengthTables

__all__ = ["TableOffset", "band", "sides_in_sight"]

_FAR = 2**31 - 1  # upper bound of all lengths


class TableOffset(NamedTuple):
    """The position of each sequence's first query among its keys (keys minus queries), which a kernel reads from the call's tables.

    rows_q, rows_k: a sequence's length, if no table has it.
    """

    tables: LengthTables
    rows_q: int
    rows_k: int


def sides_in_sight(causal: Any, window_size: Any, most_q: int, most_k: int) -> tuple[int | None, int | None]:
    """(left, right) of the band, None for a side that hides nothing in sequences of at most ``most_q`` queries and ``most_k`` keys."""
    if not isinstance(window_size, (tuple, list, Sequence)) or len(window_size) != 2:
        raise TypeError(f"window_size={window_size!r}; wanted a pair (left, right) of ints, -1 or None for no limit")
    for i, side in enumerate(window_size):
        if side is not None and (isinstance(side, bool) or not isinstance(side, int)):
            raise TypeError(f"window_size[{i}]={side!r} is a {type(side).__name__}; wanted an int, -1 or None for no limit")
    far = 2 ** (max(most_q, 0) + max(most_k, 0)).bit_length()  # beyond all keys: such a side hides nothing, or everything
    left, right = [None if side in (-1, None) else max(min(side, far), -far) for side in window_size]
    if causal is not None and not isinstance(causal, bool):
        raise TypeError(f"causal={causal!r} is a {type(causal).__name__}; wanted True or False")
    if causal:
        right = 0 if right is None else min(right, 0)
    left = None if left is not None and left >= most_k - 1 else left
    right = None if right is not None and right >= most_q - 1 else right  # the last query is at the last key
    return left, right


def band(causal: Any, window_size: Any, offset: int | Tensor | TableOffset, most_q: int, most_k: int, device: Any) -> TracedMod | None:
    """The band's mask; None if it hides nothing."""
    left, right = sides_in_sight(causal, window_size, most_q, most_k)
    if left is None and right is None:
        return None
    if isinstance(offset, TableOffset):
        return _read_from_tables(left, right, offset)
    return _kept_band(left, right, offset) if isinstance(offset, int) else trace(_mask(left, right, offset), "mask", device=device)


def _mask(left: int | None, right: int | None, offset: int | Tensor) -> Callable:
    return masks.causal(offset) if (left, right) == (None, 0) else masks.sliding_window(left, right, offset)


@lru_cache(maxsize=256)  # not for tensors, which it would keep alive
def _kept_band(left: int | None, right: int | None, offset: int) -> TracedMod:
    return trace(_mask(left, right, offset), "mask")


# ---- offsets read from tables

# where a sequence's length comes from: its rows in use, the difference of two ends, or a number for all
_USED, _ENDS = "used", "ends"


def _read_from_tables(left: int | None, right: int | None, offset: TableOffset) -> TracedMod:
    t = offset.tables
    sides = ((t.seqused_k, t.cu_seqlens_k, offset.rows_k), (t.seqused_q, t.cu_seqlens_q, offset.rows_q))
    given = [_USED if used is not None else _ENDS if ends is not None else rows for used, ends, rows in sides]
    tensors = [used if used is not None else ends for used, ends, _ in sides]
    template, order = _template(left, right, *given, *(None if x is None else x.dtype for x in tensors))
    return TracedMod("mask", template.expr, template.scalars, tuple(tensors[i] for i in order), template.name)  # type: ignore[misc]


@lru_cache(maxsize=256)
def _template(
    left: int | None, right: int | None, keys: str | int, queries: str | int, *dtypes: torch.dtype | None
) -> tuple[TracedMod, tuple[int, ...]]:
    """The mask traced with placeholder tables, and for each of its tensors whether it is the keys' (0) or the queries' (1) table."""
    tables = [None if dtype is None else torch.zeros(2, dtype=dtype, device="cpu") for dtype in dtypes]

    of_keys, of_queries = (_reader(kind, table) for kind, table in zip((keys, queries), tables, strict=True))

    def visible(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        place = q_idx + of_keys(b) - of_queries(b)
        if left is None:
            return place + right >= kv_idx
        from_left = kv_idx >= place - left
        return from_left if right is None else from_left & (place + right >= kv_idx)

    found = trace(visible, "mask")
    return found, tuple(next(i for i, t in enumerate(tables) if t is x) for x in found.tensors)


def _reader(kind: str | int, table: Any) -> Callable:
    """A function in the mod language that returns the length of entry b."""
    if kind == _USED:
        return lambda b: _length(table[b])
    if kind == _ENDS:
        return lambda b: _length(table[b + 1]) - _length(table[b])
    return lambda b: kind


def _length(entry: Any) -> Any:
    """An entry as int64, clamped so that sums of a few cannot wrap around, for any table contents."""
    return entry.clamp(-_FAR, _FAR) if entry.dtype is torch.int64 else entry.to(torch.int64)
