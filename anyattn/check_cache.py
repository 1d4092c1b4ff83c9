"""Every user error of ``flash_attn_with_kvcache``, and what a call is to append, settled before anything is written."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyattn import check_flash
from anyattn.check_flash import Options
from anyattn.geometry.seqlen_info import SeqlenInfoQKNewK
from anyattn.geometry.sequences import Sequences, end_to_end
from anyattn.kvcache import append, rotary
from anyattn.problem import Problem

__all__ = ["CacheCall", "cache_call"]


@dataclass(frozen=True, eq=False)
class CacheCall:
    """The attention of one call, and what comes before it: rotating queries and new keys, and writing the new rows.

    problem.q: the queries as given.
    """

    problem: Problem
    k_cache: Tensor
    v_cache: Tensor
    new: _NewRows | None
    turn: _Turn | None

    def prepared(self) -> Problem:
        """Appends to the caches and returns the attention over what they then hold."""
        problem, new, turn = self.problem, self.new, self.turn
        if new is None:
            return problem
        new_k = new.k
        if turn is not None:
            new_k = turn.applied(new_k, turn.k_positions)
            batch, heads, seqlen, width = problem.q.shape
            rows = turn.applied(problem.q.transpose(1, 2).reshape(batch * seqlen, heads, width), turn.q_positions)
            problem = problem.like(q=rows.view(batch, seqlen, heads, width).transpose(1, 2))
        append.append(self.k_cache, new_k, new.first, new.second)
        append.append(self.v_cache, new.v, new.first, new.second)
        return problem


@dataclass(frozen=True, eq=False)
class _NewRows:
    """k, v: (total_new, Hkv, D or Dv). first, second: int64 (total_new,), where each goes, the caches' two leading indices."""

    k: Tensor
    v: Tensor
    first: Tensor
    second: Tensor


@dataclass(frozen=True, eq=False)
class _Turn:
    """Rotary tables and the position of every row of the queries' storage and of every new key."""

    cos: Tensor
    sin: Tensor
    interleaved: bool
    q_positions: Tensor
    k_positions: Tensor

    def applied(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotary.apply_rotary(x, self.cos, self.sin, positions, self.interleaved)


def cache_call(
    q: Any,
    k_cache: Any,
    v_cache: Any,
    k: Any,
    v: Any,
    rotary_cos: Any,
    rotary_sin: Any,
    cache_seqlens: Any,
    cache_batch_idx: Any,
    cache_leftpad: Any,
    page_table: Any,
    cu_seqlens_q: Any,
    max_seqlen_q: Any,
    interleaved: bool,
    options: Options,
) -> CacheCall:
    """One call, checked; nothing is written."""
    _check_storage(q, k_cache, v_cache, k, v, cu_seqlens_q, page_table)
    batch = q.shape[0] if cu_seqlens_q is None else check_flash.batch_of_ends("cu_seqlens_q", cu_seqlens_q)
    ends = check_flash.ends("cu_seqlens_q", cu_seqlens_q, q, None)
    table = None if page_table is None else check_flash.pages(page_table, batch, k_cache)
    cached = _cached(cache_seqlens, batch, k_cache.shape[1] if table is None else table.shape[1] * k_cache.shape[1], q.device)
    leftpad = check_flash.sequence_lengths("cache_leftpad", cache_leftpad, batch, q.device)
    _check_leftpad(cached, leftpad)
    rows = _cache_rows(cache_batch_idx, batch, k_cache, table, q.device)
    number = torch.arange(batch, device=q.device)
    zero = torch.zeros_like(number)
    per_entry, packed = (0 if k is None or k.ndim == 3 else k.shape[1]), (ends if k is not None and k.ndim == 3 else None)
    seqlen_q = q.shape[1] if ends is None else None
    info = _as_vectors(SeqlenInfoQKNewK.create(number, seqlen_q, None, per_entry, ends, None, packed, None, cached, leftpad), zero)
    sequences = Sequences(
        seqlens_q=info.seqlen_q,
        seqlens_k=info.seqlen_k,
        q_row=number if ends is None else zero,
        q_start=info.offset_q,
        k_row=rows,
        k_start=info.offset_k,
        q_first=info.seqlen_k - info.seqlen_q,
        page_table=table,
        page_size=k_cache.shape[1] if table is not None else 0,
        is_cache=True,
    )
    check_flash.check_max("max_seqlen_q", max_seqlen_q, sequences.max_seqlen_q)
    new = None if k is None else _new_rows(k, v, k_cache, v_cache, info, rows, cache_batch_idx is not None, table)
    if new is None and table is not None:
        append.check_pages(table, sequences.k_start, sequences.k_start + sequences.seqlens_k, sequences.page_size, k_cache.shape[0])
    problem = check_flash.problem_of(q, k_cache, v_cache, sequences, options, 0)  # before the rotary part, which reads the options too
    return CacheCall(problem, k_cache, v_cache, new, _turn(q, k, info, sequences, rotary_cos, rotary_sin, bool(interleaved), options))


def _new_rows(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, info: SeqlenInfoQKNewK, rows: Tensor, chosen: bool, table: Tensor | None
) -> _NewRows:
    """The rows to append and their places. chosen: the user named the cache rows, which may then not differ."""
    append.check_append(info, rows if chosen else None, table, k_cache.shape[1], k_cache.shape[0])
    append.check_apart("k_cache", k_cache)
    append.check_apart("v_cache", v_cache)
    if k_cache.data_ptr() == v_cache.data_ptr() and k_cache.numel() > 0:
        raise ValueError("k_cache and v_cache begin in the same memory, so v would be written over k; wanted a cache for each")
    places = append.slots(info, rows, table, k_cache.shape[1])
    return _NewRows(k.reshape(-1, *k.shape[-2:]), v.reshape(-1, *v.shape[-2:]), *places)


def _as_vectors(info: SeqlenInfoQKNewK, zero: Tensor) -> SeqlenInfoQKNewK:
    """Every field as one number per entry."""
    return SeqlenInfoQKNewK(*(f if isinstance(f, Tensor) else zero + f if f else zero for f in vars(info).values()))


def _check_storage(q: Any, k_cache: Any, v_cache: Any, k: Any, v: Any, cu_seqlens_q: Any, page_table: Any) -> None:
    q_shape = "(batch, length, heads, head_dim)" if cu_seqlens_q is None else "(total, heads, head_dim)"
    check_flash.storage({"q": q}, q_shape, 4 if cu_seqlens_q is None else 3)
    kind = "(cache batch, capacity, heads, head_dim)" if page_table is None else "(pages, page_size, heads, head_dim)"
    check_flash.storage({"q": q, "k_cache": k_cache, "v_cache": v_cache}, kind, 4, skip="q")
    if k_cache.shape[:3] != v_cache.shape[:3]:
        shapes = f"v_cache has shape {tuple(v_cache.shape)} but k_cache has {tuple(k_cache.shape)}"
        raise ValueError(f"{shapes}; wanted the same but for head_dim")
    if (k is None) != (v is None):
        raise ValueError(f"{'k' if k is None else 'v'} is None but {'v' if k is None else 'k'} is given; pass both or neither")
    if k is None:
        return
    rank = k.ndim if isinstance(k, Tensor) and cu_seqlens_q is not None and k.ndim == 3 else 4
    new = "(batch, new, heads, head_dim)" if rank == 4 else "(total, heads, head_dim), laid out as q is"
    check_flash.storage({"q": q, "k": k, "v": v}, new, rank, skip="q")
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        if rows.shape[-2:] != cache.shape[-2:]:
            raise ValueError(f"{name} has (heads, head_dim) {tuple(rows.shape[-2:])} but {name}_cache has {tuple(cache.shape[-2:])}")
    if k.shape[:-2] != v.shape[:-2]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; wanted the same but for head_dim")
    batch = q.shape[0] if cu_seqlens_q is None else len(cu_seqlens_q) - 1
    if rank == 4 and k.shape[0] != batch:
        raise ValueError(f"k has batch {k.shape[0]} but q has {batch}; wanted the same")
    if rank == 3 and k.shape[0] != q.shape[0]:
        raise ValueError(f"k has {k.shape[0]} rows but q has {q.shape[0]}; packed new keys are laid out as q is, by cu_seqlens_q")


def _cached(given: Any, batch: int, capacity: int, device: torch.device) -> Tensor:
    """Rows of each entry's cache in use, padding included."""
    if given is None:
        given = capacity
    if isinstance(given, int) and not isinstance(given, bool):
        given = torch.full((batch,), given, dtype=torch.int64, device=device)
    cached = check_flash.sequence_lengths("cache_seqlens", given, batch, device)
    assert cached is not None
    if len(cached) and int(cached.max()) > capacity:
        at = int(cached.argmax())
        raise ValueError(f"cache_seqlens[{at}]={int(cached[at])} but the cache has room for {capacity} rows; wanted at most {capacity}")
    return cached


def _check_leftpad(cached: Tensor, leftpad: Tensor | None) -> None:
    if leftpad is not None and bool((leftpad > cached).any()):
        at = int((leftpad > cached).nonzero()[0])
        raise ValueError(f"cache_leftpad[{at}]={int(leftpad[at])} but cache_seqlens[{at}]={int(cached[at])}; wanted at most that")


def _cache_rows(given: Any, batch: int, k_cache: Tensor, table: Tensor | None, device: torch.device) -> Tensor:
    """The row of the cache of each batch entry."""
    if given is not None and table is not None:
        raise ValueError("cache_batch_idx and page_table are both given; wanted one: a page table already says where each entry's rows are")
    if given is None:
        if table is None and k_cache.shape[0] < batch:
            raise ValueError(f"k_cache has batch {k_cache.shape[0]} but q has {batch}; wanted at least as many, or cache_batch_idx")
        return torch.arange(batch, device=device)
    rows = check_flash.sequence_lengths("cache_batch_idx", given, batch, device)
    assert rows is not None
    if len(rows) and int(rows.max()) >= k_cache.shape[0]:
        at = int(rows.argmax())
        have = k_cache.shape[0]
        raise ValueError(f"cache_batch_idx[{at}]={int(rows[at])} but k_cache has {have} rows; wanted 0 to {have - 1}")
    return rows


def _turn(
    q: Tensor, k: Tensor | None, info: SeqlenInfoQKNewK, s: Sequences, cos: Any, sin: Any, interleaved: bool, options: Options
) -> _Turn | None:
    """The rotary part of the call: new key j at ``seqlen_rotary + j``, query i likewise if causal or windowed, else at seqlen_rotary."""
    if cos is None and sin is None:
        return None
    if k is None:
        raise ValueError("rotary_cos is given without k and v; wanted the new keys too: what is cached is turned already, and so must q be")
    k_positions = end_to_end(info.seqlen_rotary, info.seqlen_k_new)[1]
    moves = options.causal or any(side not in (None, -1) for side in options.window_size)
    used = end_to_end(info.seqlen_rotary, s.seqlens_q)[1] if moves else info.seqlen_rotary[s.row_entry]
    q_positions = torch.zeros(q.shape[:-2].numel(), dtype=torch.int64, device=q.device)
    per_row = q.shape[1] if q.ndim == 4 else 0
    q_positions[end_to_end(s.q_row * per_row + s.q_start, s.seqlens_q)[1]] = used
    last = max((int(p.max()) for p in (k_positions, used) if len(p)), default=-1)
    rotary.check_rotary(cos, sin, q.shape[-1], last, q.device)
    return _Turn(cos, sin, interleaved, q_positions, k_positions)
