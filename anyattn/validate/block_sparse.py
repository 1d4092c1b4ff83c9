"""Validation of ``block_sparse_tensors``: checks block lists against the lengths, heads and device of the call that takes them."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import StoredSequences
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.lists import kept_for_call
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors
from anyattn.tensors.kinds import refuse_hidden

__all__ = ["blocks_of", "check_class", "check_dense", "check_varlen", "parts_of_blocks"]


def blocks_of(given: Any, problem: Problem) -> Any:
    """The lists in the form that kernels read, checked against the problem."""
    check_class(given, problem.sequences is not None)
    if problem.sequences is not None:
        check_varlen(given, problem.q, problem.heads_q, problem.heads_kv)
        _check_memory(given)
        _check_built_for(given, problem.sequences)
        return given
    lengths = (problem.seqlen_q, problem.seqlen_k)
    check_dense(given, problem.q, lengths, (problem.batch, problem.heads_q), problem.heads_kv)
    _check_memory(given)
    return kept_for_call(given, lengths)


def parts_of_blocks(given: Any, is_varlen: bool) -> tuple:
    """``block_sparse_tensors`` as tuples that Dynamo can trace: lists, tables, tile, lengths. Raises ``TypeError`` for other objects."""
    # ``check_class`` inlined: another call would be another guard of every compiled call
    if not isinstance(given, VarlenBlockSparseTensors if is_varlen else BlockSparseTensors):
        _refuse_class(given, is_varlen)
    made: Any = given
    lists = (made.mask_block_cnt, made.mask_block_idx, made.full_block_cnt, made.full_block_idx)
    if is_varlen:
        return lists, (made.cu_block_cnt, made.cu_block_idx, made.seqlens_q, made.seqlens_k), made.tile, None
    return lists, (), made.tile, made.lengths


def check_class(given: Any, is_varlen: bool) -> None:
    """Raises ``TypeError`` unless ``given`` has the class that the entry point takes."""
    if not isinstance(given, VarlenBlockSparseTensors if is_varlen else BlockSparseTensors):
        _refuse_class(given, is_varlen)


def _refuse_class(given: Any, is_varlen: bool) -> NoReturn:
    wanted, maker = "BlockSparseTensors", "compute_block_sparsity"
    if is_varlen:
        wanted, maker = "VarlenBlockSparseTensors", "compute_varlen_block_sparsity"
    raise TypeError(f"block_sparse_tensors is a {type(given).__name__}; wanted {wanted}: make it with anyattn.{maker}")


def check_dense(given: BlockSparseTensors, q: Tensor, lengths: tuple[int, int], heads: tuple[int, int], heads_kv: int) -> None:
    """Raises ``ValueError`` unless the lists are on q's device and have these lengths, this batch, and the query heads or the K/V heads."""
    _check_device(given, q)
    tiles = tuple(ceil_div(n, t) for n, t in zip(lengths, given.tile, strict=True))
    # lists without lengths may be compact
    fits = given.grid == tiles if given.lengths is not None else given.grid[0] == tiles[0] and given.grid[1] <= tiles[1]
    if not fits or (given.lengths is not None and given.lengths != lengths):
        raise ValueError(
            f"block_sparse_tensors has {given.grid[0]} x {given.grid[1]} tiles of {given.tile} for lengths {given.lengths}, but q and k "
            f"have lengths {lengths}, {tiles[0]} x {tiles[1]} tiles; build it for these"
        )
    for got, size, axis in zip(given.mask_block_cnt.shape[:2], heads, ("batch", "heads"), strict=True):
        if got not in (1, size, *((heads_kv,) if axis == "heads" else ())):
            wanted = _wanted_heads(size, heads_kv) if axis == "heads" else f"1 (shared) or {size}"
            raise ValueError(f"block_sparse_tensors has {axis} {got} but q has {size}; wanted {wanted}")


def check_varlen(given: VarlenBlockSparseTensors, q: Tensor, heads: int, heads_kv: int) -> None:
    """Raises ``ValueError`` unless the lists are on q's device and have the query heads or the K/V heads; their lengths are not read."""
    _check_device(given, q)
    listed = given.mask_block_cnt.shape[0]
    if listed not in (1, heads, heads_kv):
        raise ValueError(f"block_sparse_tensors has {listed} heads but q has {heads}; wanted {_wanted_heads(heads, heads_kv)}")


def _wanted_heads(heads: int, heads_kv: int) -> str:
    return "1 (shared)" + (f", {heads_kv} (one for each K/V head)" if heads_kv not in (1, heads) else "") + f" or {heads}"


def _check_memory(given: BlockSparseTensors | VarlenBlockSparseTensors) -> None:
    refuse_hidden("block_sparse_tensors.mask_block_cnt", given.mask_block_cnt)


def _check_device(given: BlockSparseTensors | VarlenBlockSparseTensors, q: Tensor) -> None:
    if given.device != q.device:
        raise ValueError(f"block_sparse_tensors is on {given.device} but q is on {q.device}; move it with .to()")


def _check_built_for(lists: VarlenBlockSparseTensors, sequences: Sequences) -> None:
    """Raises if varlen lists were built for other sequences or, for tables that are not read, for another number of sequences."""
    if isinstance(sequences, StoredSequences):
        if len(lists.seqlens_q) != sequences.batch:
            have = f"{len(lists.seqlens_q)} sequences but the call has {sequences.batch}"
            raise ValueError(f"block_sparse_tensors was built for {have}; build it for these")
        return
    for name in ("seqlens_q", "seqlens_k"):
        listed, have = getattr(lists, name), getattr(sequences, name)
        if not torch.equal(listed.to(torch.int64), have):
            what = f"{name} {_short(listed)} but the call has {_short(have)}"
            raise ValueError(f"block_sparse_tensors was built for {what}; build it for these")


def _short(x: Tensor) -> str:
    listed = x[:8].tolist()
    return f"{listed}" if len(x) <= 8 else f"{str(listed)[:-1]}, ...]"
