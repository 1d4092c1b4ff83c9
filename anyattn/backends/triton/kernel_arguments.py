"""Kernel arguments common to all launches that read a problem's storage: names, strides, sizes, constants."""

from __future__ import annotations

from typing import Any

import torch

from anyattn.backends.triton.codegen.programs import Chosen
from anyattn.backends.triton.tables import Tables
from anyattn.backends.triton.tile_config import padded
from anyattn.problem import Problem

__all__ = ["COUNTS", "FUNCTIONS", "LISTS", "SIZES", "constants_of", "programs_along_batch", "sizes_of", "strides_named"]

SIZES = ("seqlen_q", "seqlen_k", "heads", "positions", "row_tiles", "splits", "pages_each", "ratio")
LISTS = (("part_statistics", "part_out"), ("lists_entry", "lists_head", "lists_row", "lists_flat"))
COUNTS = ("partial_count", "partial_index", "full_count", "full_index")
_WIDE = 128
FUNCTIONS = (("score",), ("ranges", "listed"), ("always",))  # the parts whose functions a kernel calls


def strides_named(*names: str) -> tuple[tuple[str, ...], ...]:
    """The names of each tensor's strides."""
    return tuple(tuple(f"{t}_{s}" for s in ("rows", "head", "position")) for t in names)


def programs_along_batch(problem: Problem, found: Tables) -> int:
    """Programs along the batch axis: 1 with a table of entries, whose row tiles share one axis."""
    return 1 if found.entries is not None else problem.batch


def sizes_of(problem: Problem, found: Tables, splits: int = 1) -> tuple[int, ...]:
    """The numbers that ``SIZES`` names; see ``kernels.forward``."""
    pages_each = 0 if found.pages is None else found.pages.stride(0)
    lengths = (problem.bound_q, problem.bound_k)
    return (*lengths, problem.heads_q, problem.q.shape[2], found.row_tiles, splits, pages_each, problem.qhead_per_kvhead)


def constants_of(problem: Problem, chosen: Chosen, found: Tables) -> dict[str, Any]:
    """What specialises every kernel that reads the problem's storage."""
    d, dv = problem.q.shape[3], problem.v.shape[3]
    return {
        "RANGES": chosen.program.range_count, "LIST_M": found.list_tile[0], "LIST_N": found.list_tile[1],
        "HAS_FULL": found.lists[2] is not None, "HEAD_DIM": d, "HEAD_DIM_V": dv, "BLOCK_D": padded(d), "BLOCK_DV": padded(dv),
        "HAS_ENTRIES": found.entries is not None, "HAS_GUARD": found.guard is not None,
        # float32 of wide heads: with what would compute a tile again the compiler has no registers left for the loops
        "HIDES": chosen.program.hides and not (problem.q.dtype is torch.float32 and max(d, dv) > _WIDE),
        # of 16 bits there is nothing to choose, and to name what a GPU does not have (TF32, on most of AMD's) is an error
        "PRECISION": "ieee" if problem.q.dtype is torch.float32 else None,
    }  # fmt: skip
