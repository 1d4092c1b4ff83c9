"""Kernel arguments common to all launches that read a problem's storage: names, strides, sizes, constants."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.backends.triton.codegen.assumptions import has_one_tile
from anyattn.backends.triton.codegen.programs import CallProgram
from anyattn.backends.triton.kernels.arguments import Sizes
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.wide_tiles import blocks_of, padded
from anyattn.problem import Problem

__all__ = ["PARTS", "constants_of", "programs_along_batch", "sizes_of"]

PARTS = (("score",), ("ranges", "listed"), ("always",), ("dropout",))  # program parts that may provide each field of ``Mods``


def programs_along_batch(problem: Problem, tables: Tables) -> int:
    """Programs along the batch axis: 1 with a table of entries, whose row tiles share one axis."""
    return 1 if tables.entries is not None else problem.batch


def sizes_of(problem: Problem, tables: Tables, splits: int = 1) -> Sizes:
    pages_each = 0 if tables.pages is None else tables.pages.stride(0)
    return Sizes(
        problem.bound_q, problem.bound_k, problem.heads_q, problem.q.shape[2], tables.row_tiles, splits, pages_each,
        problem.qhead_per_kvhead,
    )  # fmt: skip


def constants_of(problem: Problem, call_program: CallProgram, tables: Tables) -> dict[str, Any]:
    """The constants of every kernel that reads the problem's storage."""
    d, dv = problem.q.shape[3], problem.v.shape[3]
    block, tail = blocks_of(d)
    return {
        "RANGES": call_program.program.range_count, "LIST_M": tables.list_tile[0], "LIST_N": tables.list_tile[1],
        "HAS_FULL": tables.lists[2] is not None, "HEAD_DIM": min(d, block), "HEAD_DIM_V": dv, "BLOCK_D": block, "BLOCK_DV": padded(dv),
        "TAIL_DIM": max(0, d - block), "BLOCK_TAIL": tail,
        "ONE_KV": has_one_tile(problem),
        "HAS_FOURS": not any(n % 16 for n in tables.list_tile),  # lists of other sizes begin anywhere
        "HAS_ENTRIES": tables.entries is not None, "HAS_GUARD": tables.guard is not None,
        # irrelevant for 16 bits, and naming a precision that a GPU lacks (TF32 on most of AMD's) is an error
        "PRECISION": "ieee" if problem.q.dtype is torch.float32 else None,
        "JOINS": 0, "IS_DIVIDED": False,
    }  # fmt: skip
