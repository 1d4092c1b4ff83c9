"""Validation of sequence tables: every user error in cu_seqlens, seqused, page tables and greatest lengths."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.validate.window import TableOffset

__all__ = [
    "batch_of",
    "batch_of_ends",
    "bound",
    "check_device",
    "check_max",
    "check_pages_of",
    "check_table",
    "check_used",
    "ends",
    "not_negative",
    "offset_unread",
    "pages",
    "skips_device_reads",
    "unread_sequences",
]


def skips_device_reads(device: torch.device, validate: bool | None) -> bool:
    """Whether the tables' contents are used without being checked: reading them would synchronise, which a CUDA graph does not allow."""
    return device.type == "cuda" and validate is not True


def unread_sequences(q: Tensor, k: Tensor, tables: LengthTables, lengths: tuple[Any, Any], page_table: Any) -> StoredSequences:
    """The sequences, whose fields are computed from the tables later. Checks all properties that need no read of the tables."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = tables
    batch = batch_of(q, cu_seqlens_q, cu_seqlens_k, k, page_table)
    if page_table is not None and seqused_k is None:
        raise ValueError(
            "seqused_k is None with a page_table; wanted the number of keys of each sequence, (batch,) integers, or cu_seqlens_k"
        )
    for name, given in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        check_device(name, given, q.device)
    for name, given in (("seqused_q", seqused_q), ("seqused_k", seqused_k)):
        check_table(name, given, batch, q.device)
    table = None if page_table is None else pages(page_table, batch, k)
    rows_q = q.shape[0] if cu_seqlens_q is not None else q.shape[1]
    rows_k = k.shape[0] if cu_seqlens_k is not None else k.shape[1] * (1 if table is None else table.shape[1])
    bound_q, bound_k = bound("max_seqlen_q", lengths[0], rows_q), bound("max_seqlen_k", lengths[1], rows_k)
    sizes = StoredSizes(batch, rows_q, rows_k, bound_q, bound_k, k.shape[1] if table is not None else 0)
    return StoredSequences(tables, sizes, table, q.device)


def bound(name: str, given: Any, rows: int) -> int:
    """The upper bound ``given``, checked, on the length of a sequence; at most ``rows``."""
    if given is None or (isinstance(given, Tensor) and given.ndim == 0 and given.is_cuda):
        return rows
    most = _max_of(name, given)
    if most < 0:
        raise ValueError(f"{name}={most}; wanted at least 0, or None")
    return min(most, rows)


def offset_unread(s: StoredSequences, is_for_later: bool) -> int | Tensor | TableOffset:
    """The offset of each sequence's queries among its keys. is_for_later: compute it now, since the tables may change before it is used."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k = s.tables
    is_told = cu_seqlens_q is not None or seqused_q is not None
    if cu_seqlens_q is cu_seqlens_k and seqused_q is seqused_k and (is_told or s.sizes.rows_q == s.sizes.rows_k):
        return 0
    return s.seqlens_k - s.seqlens_q if is_for_later else TableOffset(s.tables, s.sizes.rows_q, s.sizes.rows_k)


# ---- one table at a time


def batch_of(q: Tensor, cu_seqlens_q: Any, cu_seqlens_k: Any, k: Tensor, page_table: Any) -> int:
    counts = {
        "cu_seqlens_q": None if cu_seqlens_q is None else batch_of_ends("cu_seqlens_q", cu_seqlens_q),
        "cu_seqlens_k": None if cu_seqlens_k is None else batch_of_ends("cu_seqlens_k", cu_seqlens_k),
        "q": None if cu_seqlens_q is not None else q.shape[0],
        "k": None if cu_seqlens_k is not None or page_table is not None else k.shape[0],
    }
    found = {name: count for name, count in counts.items() if count is not None}
    first = next(iter(found))
    for name, count in found.items():
        if count != found[first]:
            raise ValueError(f"{name} means a batch of {count} but {first} one of {found[first]}; wanted the same number of sequences")
    return found[first]


def batch_of_ends(name: str, given: Any) -> int:
    """The number of sequences of a cu_seqlens tensor."""
    _integers(name, given, 1, "(batch + 1,)")
    if len(given) == 0:
        raise ValueError(f"{name} is empty; wanted batch + 1 entries, the first 0")
    return len(given) - 1


def ends(name: str, given: Any, packed: Tensor, validate: bool | None) -> Tensor | None:
    """cu_seqlens as int64, checked: begins with 0, never decreases, never exceeds the packed rows; with ``validate`` it ends exactly there.

    validate None: on the CPU, where reading costs nothing, checks all but the exact end; elsewhere nothing, since reading synchronises.
    """
    if given is None:
        return None
    check_device(name, given, packed.device)
    found = given.to(torch.int64)
    if validate is False or (validate is None and packed.device.type != "cpu"):
        return found
    total = packed.shape[0]
    listed = found.tolist()
    if listed[0] != 0:
        raise ValueError(f"{name}[0]={listed[0]}; wanted 0, then each sequence's end")
    for i, (a, b) in enumerate(pairwise(listed)):
        if b < a:
            raise ValueError(f"{name}[{i + 1}]={b} is less than {name}[{i}]={a}; wanted non-decreasing entries")
        if b > total:
            raise ValueError(f"{name}[{i + 1}]={b} is past the {total} rows of the packed tensor; wanted at most {total}")
    if validate and listed[-1] != total:
        raise ValueError(f"{name}[{len(listed) - 1}]={listed[-1]} ends before the {total} rows of the packed tensor; wanted {total}")
    return found


def not_negative(name: str, table: Tensor | None) -> Any:
    """The table as int64, checked to have no entry below 0."""
    if table is None:
        return None
    if len(table) and int(table.min()) < 0:
        at = int(table.argmin())
        raise ValueError(f"{name}[{at}]={int(table[at])}; wanted 0 or more")
    return table.to(torch.int64)


def check_table(name: str, given: Any, batch: int, device: torch.device) -> None:
    """Raises unless the table, if there is one, is (batch,) integers on the device; does not read them."""
    if given is None:
        return
    _integers(name, given, 1, f"({batch},)")
    if len(given) != batch:
        raise ValueError(f"{name} has {len(given)} entries; wanted {batch}, one per sequence")
    check_device(name, given, device)


def check_device(name: str, given: Tensor | None, device: torch.device) -> None:
    if given is not None and given.device != device:
        raise ValueError(f"{name} is on {given.device} but q is on {device}; move it with .to()")


def _integers(name: str, given: Any, rank: int, shape: str) -> None:
    if not isinstance(given, Tensor):
        raise TypeError(f"{name} is a {type(given).__name__}; wanted an int32 or int64 tensor of shape {shape}")
    if given.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {given.dtype}; wanted int32 or int64: convert it with .to(torch.int32)")
    if given.ndim != rank:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; wanted {shape}")


def check_used(sequences: Sequences, ends: Any, name: str, capacity: int | None) -> None:
    """Raises if a sequence uses more rows than it has."""
    host = sequences.on_host
    used = host.seqlens_q if name == "seqused_q" else host.seqlens_k
    room = [capacity] * len(used) if capacity is not None else ends.diff().tolist()
    for i, (n, most) in enumerate(zip(used, room, strict=True)):
        if n > most:
            raise ValueError(f"{name}[{i}]={n} but sequence {i} has room for {most}; wanted at most {most}")


def check_max(name: str, given: Any, have: int) -> None:
    if given is None:
        return
    given = _max_of(name, given)
    if given < have:
        raise ValueError(f"{name}={given} but the longest sequence has {have}; wanted at least {have}, or None")


def _max_of(name: str, given: Any) -> int:
    if isinstance(given, Tensor) and given.ndim == 0:
        given = given.item()
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"{name} is a {type(given).__name__}; wanted an int, a tensor of no dimensions, or None")
    return given


def pages(page_table: Any, batch: int, pool: Tensor) -> Tensor:
    check_pages_of(f"({batch}, pages)", page_table, pool)
    if page_table.shape[0] != batch:
        raise ValueError(f"page_table has {page_table.shape[0]} rows; wanted {batch}, one per sequence")
    return page_table


def check_pages_of(shape: str, page_table: Any, pool: Tensor) -> None:
    """The checks of a page table that do not depend on the batch."""
    _integers("page_table", page_table, 2, shape)
    if page_table.device != pool.device:
        raise ValueError(f"page_table is on {page_table.device} but the pages are on {pool.device}; move it with .to()")
    if pool.shape[1] == 0:
        raise ValueError(f"the pages have shape {tuple(pool.shape)} with page_size 0; wanted at least 1")
