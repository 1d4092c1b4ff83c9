"""The backend's door: a problem and its plan in, results out."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.backends.triton import tables, tuning
from anyattn.backends.triton.config import Tiles
from anyattn.backends.triton.launch import Signature, entry_of, entry_source, run_entry, strides_of
from anyattn.backends.triton.programs import Chosen, captured_of, program_of
from anyattn.backends.triton.shared import SIZES, STRIDE_NAMES, constants_of, sizes_of
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["Result", "forward", "source_of"]


class Result(NamedTuple):
    """out: (B, Hq, Sq, Dv) in the inputs' dtype. lse, max_scores: (B, Hq, Sq) float32, or None where not wanted; lse in nats."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


_STRIDES = tuple(tuple(f"{t}_{s}" for s in STRIDE_NAMES) for t in ("q", "k", "v", "out"))
_FORWARD = Signature(
    "forward_kernel.forward_tile",
    (
        ("pointer", ("q", "k", "v", "out", "lse", "highest", "sink", "entries", "order", "pages")),
        ("stride", _STRIDES),
        ("long", (("part_statistics", "part_out"), ("lists_entry", "lists_head", "lists_row", "lists_flat"))),
        ("int", SIZES),
        ("pointer", ("partial_count", "partial_index", "full_count", "full_index")),
        ("float", "scale"),
    ),
    (("score",), ("ranges", "listed"), ("always",)),
    (
        "RANGES", "TILE_M", "TILE_N", "LIST_M", "LIST_N", "HAS_FULL", "HEAD_DIM", "HEAD_DIM_V", "BLOCK_D", "BLOCK_DV", "GROUP",
        "HAS_ENTRIES", "PAGE_SIZE", "HAS_SINK", "HAS_LSE", "HAS_MAX", "PRECISION",
    ),
)  # fmt: skip


def forward(problem: Problem, plan: Plan) -> Result:
    """out and the statistics of a problem that ``supports.reason_against`` has nothing against."""
    q, v = problem.q, problem.v
    chosen = program_of(problem)
    plan = _tuned(problem, plan, chosen) if plan.is_tuned else plan
    found = tables.tables_of(problem, chosen, plan.tile_m)
    fill = problem.sequences is not None  # rows that belong to no sequence are 0 and -inf; no program comes by them
    out = (torch.zeros if fill else torch.empty)((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse, highest = (_statistic(problem, fill) if wanted else None for wanted in (problem.wants_lse, problem.wants_max))
    _launch(problem, plan, chosen, found, (out, lse, highest), (1, 0, 0))
    return Result(out, lse, highest)


def _tuned(problem: Problem, plan: Plan, chosen: Chosen) -> Plan:
    """The plan with the fastest tiles."""

    def planned(tiles: Tiles) -> Plan:
        return replace(
            plan, tile_m=tiles.tile_m, tile_n=tiles.tile_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages, is_tuned=False
        )  # fmt: skip

    question = tuning.question_of("forward", problem, chosen.program)
    return planned(tuning.best(question, problem, lambda t: tuning.seconds(lambda: forward(problem, planned(t)), problem.q.device)))


def source_of(problem: Problem) -> str:
    """The kernel that is written for a problem, to read: what is generated, which calls what these modules hold."""
    q, v = problem.q, problem.v
    out = torch.empty(1, dtype=q.dtype, device=q.device).expand(*q.shape[:3], v.shape[3])
    return entry_source(_FORWARD, program_of(problem).program, strides_of(q, problem.k, v, out)[0])


def _launch(
    problem: Problem,
    plan: Plan,
    chosen: Chosen,
    found: tables.Tables,
    results: tuple[Tensor, Tensor | None, Tensor | None],
    splits: tuple[int, int, int],
) -> None:
    """One launch. splits: how many, and from one's statistics and output to the next's."""
    q, k, v, sink = problem.q, problem.k, problem.v, problem.sink
    out, lse, highest = results
    absent = q  # any pointer
    logits = None if sink is None else sink.detach().contiguous()
    tensors = (q, k, v, out, lse, highest, logits, found.entries, found.order, found.pages)
    is_aligned, strides = strides_of(q, k, v, out)
    pointers = [absent if t is None else t for t in tensors]
    lists = [absent if t is None else t for t in found.lists]
    constants = {
        **constants_of(problem, chosen, found), "TILE_M": plan.tile_m, "TILE_N": plan.tile_n, "GROUP": 1,
        "HAS_SINK": sink is not None and splits[0] == 1, "HAS_LSE": lse is not None, "HAS_MAX": highest is not None,
    }  # fmt: skip
    kernel = entry_of(_FORWARD, chosen.program, is_aligned)
    batch = 1 if problem.sequences is not None else problem.batch
    run_entry(
        kernel, (found.row_tiles, problem.heads_q, batch * splits[0]),
        (*pointers, *strides, *splits[1:], *found.strides, *sizes_of(problem, found, splits[0]), *lists, problem.scale),
        captured_of(chosen), q.device, {**constants, "num_warps": plan.num_warps, "num_stages": plan.num_stages},
    )  # fmt: skip


def _statistic(problem: Problem, fill: bool) -> Tensor:
    shape, device = problem.q.shape[:3], problem.q.device
    return torch.full(shape, -torch.inf, device=device) if fill else torch.empty(shape, dtype=torch.float32, device=device)
