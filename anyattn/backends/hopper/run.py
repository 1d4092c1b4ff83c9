"""The backend's door: a problem and its plan in, results out. The backward pass is another backend's (``Plan.backward``)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.backends.hopper import tables
from anyattn.backends.hopper.config import TILE_M, Config
from anyattn.backends.hopper.launch import launch
from anyattn.backends.hopper.specialise import Parts, list_tile_misfit, specialised, split
from anyattn.backends.hopper.tables import Lists
from anyattn.geometry.integers import ceil_div
from anyattn.mods.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["Result", "config_of", "forward"]

_CACHE_FOR_KEYS = 32 * 2**20  # bytes of the 50 MB L2 cache that K and V of the heads computed side by side may take


class Result(NamedTuple):
    """out: (B, Hq, Sq, Dv) in the inputs' dtype. lse, max_scores: (B, Hq, Sq) float32, or None where not wanted; lse in nats."""

    out: Tensor
    lse: Tensor | None
    max_scores: Tensor | None


class _Call(NamedTuple):
    config: Config
    numbers: tuple
    captured: tuple
    lists: Lists | None
    order: Tensor | None
    entries: Tensor | None
    rows: int
    spread: int


def forward(problem: Problem, plan: Plan) -> Result:
    """out and the statistics of a problem that ``supports.reason_against`` has nothing against."""
    problem = _gathered(problem)
    call = _call(problem)
    q, v = problem.q, problem.v
    make = torch.empty if problem.sequences is None else torch.zeros  # rows that belong to no sequence
    out = make((*q.shape[:3], v.shape[3]), dtype=q.dtype, device=q.device)
    lse, highest = (_statistic(problem) if wanted else None for wanted in (problem.wants_lse, problem.wants_max))
    sink = None if problem.sink is None else problem.sink.detach().float().contiguous()
    lists = (None,) * 4 if call.lists is None else call.lists.tensors
    pages = None if not call.config.is_paged else problem.sequences.page_table.to(torch.int32)  # type: ignore[union-attr]
    section = _section(problem, call)
    total = call.rows * call.spread
    workers = max(1, min(total, _multiprocessors(q.device)))
    launch(
        call.config,
        (
            q, problem.k, v, out, lse, highest, sink, *lists, call.order, call.entries, pages, _counter(q.device),
            problem.scale * math.log2(math.e), call.rows, call.spread, section, workers, call.numbers, call.captured,
        ),
    )  # fmt: skip
    return Result(out, lse, highest)


def config_of(problem: Problem) -> Config:
    """What the kernel for ``problem`` is specialised for, but for how its lists are stored; asks nothing of any tensor."""
    parts = split(problem)
    if parts.listed is None:
        return specialised(problem, parts, None)[0]
    tile = (TILE_M, TILE_M) if problem.blocks is None else problem.blocks.tile
    return specialised(problem, parts, _fitting(tile), lists="dense")[0]


def _fitting(tile: tuple[int, int]) -> tuple[int, int]:
    """The tile in which lists in tiles of ``tile`` are read."""
    return (-(-tile[0] // TILE_M) * TILE_M, -(-tile[1] // TILE_M) * TILE_M) if list_tile_misfit(tile) else tile


def _call(problem: Problem) -> _Call:
    parts = split(problem)
    flags: dict[str, Any] = {}
    if problem.sequences is not None:
        flags = {"has_entries": True, "has_order": True, "spread": "heads", "is_paged": problem.sequences.page_table is not None}
    if parts.listed is None:
        return _placed(problem, *specialised(problem, parts, None, **flags))
    if problem.sequences is not None:
        return _ragged(problem, parts, flags)
    lists = _lists(problem, parts.listed)
    flags = {"lists": "dense", "per_entry": lists.partial_count.shape[0] > 1, "per_head": lists.partial_count.shape[1] > 1}
    rows = ceil_div(problem.q.shape[2], TILE_M)
    known = (lists.partial_count,) if lists.full_count is None else (lists.partial_count, lists.full_count)
    order, spread = tables.remembered(known, ("order", rows), lambda: tables.order_of_lists(lists, lists.tile[0] // TILE_M, rows))
    config, numbers, captured = specialised(problem, parts, lists.tile, has_order=True, spread=spread, **flags)
    shared = {"all": problem.batch * problem.heads_q, "heads": problem.heads_q, "none": 1}[spread]
    return _Call(config, numbers, captured, lists, order, None, len(order), shared)


def _lists(problem: Problem, listed: TracedMod) -> Lists:
    """Lists of a dense batch in tiles of whole row tiles: those given, or made here."""
    from anyattn.sparsity.block_sparse import BlockSparseTensors
    from anyattn.sparsity.compute import classes_of_mask

    blocks = problem.blocks
    if blocks is None:
        lengths = (problem.q.shape[2], problem.k.shape[2])
        classes = classes_of_mask(listed, lengths, (TILE_M, TILE_M), (problem.batch, problem.heads_q), problem.q.device)
        blocks = BlockSparseTensors.from_classes(classes, (TILE_M, TILE_M), lengths)
    else:
        blocks = blocks.retile(*_fitting(blocks.tile))
    return Lists("dense", blocks.tile, blocks.mask_block_cnt, blocks.mask_block_idx, blocks.full_block_cnt, blocks.full_block_idx)


def _ragged(problem: Problem, parts: Parts, flags: dict[str, Any]) -> _Call:
    """Lists of a ragged batch."""
    blocks, sequences = problem.blocks, problem.sequences
    assert sequences is not None and parts.listed is not None
    if blocks is None:
        from anyattn.mods.ragged import classify_ragged
        from anyattn.sparsity.varlen import VarlenBlockSparseTensors

        lengths = (sequences.seqlens_q, sequences.seqlens_k)
        classes = classify_ragged(parts.listed, *lengths, TILE_M, TILE_M, problem.heads_q)
        blocks = VarlenBlockSparseTensors.from_classes(classes, (TILE_M, TILE_M), *lengths)
    layout = "flat" if blocks.layout == "flat" else "ragged"
    lists = Lists(layout, blocks.tile, blocks.mask_block_cnt, blocks.mask_block_idx, blocks.full_block_cnt, blocks.full_block_idx)
    flags |= {"lists": layout, "per_head": blocks.mask_block_cnt.shape[0] > 1}
    config, numbers, captured = specialised(problem, parts, lists.tile, **flags)
    places = (blocks.cu_block_cnt[:-1], blocks.cu_block_idx[:-1])
    rows = _most_row_tiles(problem, TILE_M)
    order = tables.order_of_entries(sequences, TILE_M, rows, False)
    return _Call(config, numbers, captured, lists, order, tables.table_of(sequences, places), rows, problem.heads_q)


def _placed(problem: Problem, config: Config, numbers: tuple, captured: tuple) -> _Call:
    """The call of a problem without lists."""
    tile_m, sequences = config.tiles.tile_m, problem.sequences
    if sequences is None:
        return _Call(config, numbers, captured, None, None, None, ceil_div(problem.q.shape[2], tile_m), problem.batch * problem.heads_q)
    rows = _most_row_tiles(problem, tile_m)
    order = tables.order_of_entries(sequences, tile_m, rows, config.has_right)
    return _Call(config, numbers, captured, None, order, tables.table_of(sequences), rows, problem.heads_q)


def _most_row_tiles(problem: Problem, tile_m: int) -> int:
    """At least as many row tiles as a ragged batch has, without asking it."""
    entries, length = problem.q.shape[0], problem.q.shape[2]
    return min(problem.batch * ceil_div(length, tile_m), entries * length // tile_m + problem.batch)


def _section(problem: Problem, call: _Call) -> int:
    """How many heads go side by side: those whose keys and values fit the cache together."""
    row = problem.k.shape[2] * (problem.q.shape[3] + problem.v.shape[3]) * problem.q.element_size()
    return min(call.spread, max(1, _CACHE_FOR_KEYS // max(row, 1)) * problem.qhead_per_kvhead)


def _statistic(problem: Problem) -> Tensor:
    shape, device = problem.q.shape[:3], problem.q.device
    if problem.sequences is None:
        return torch.empty(shape, dtype=torch.float32, device=device)
    return torch.full(shape, -math.inf, dtype=torch.float32, device=device)


_counters: dict[tuple[torch.device, int], Tensor] = {}


def _counter(device: torch.device) -> Tensor:
    """Two zeros from which a kernel's blocks draw their work, and which it leaves as zeros.

    Kernels of one stream follow one another and share them. A graph may run beside anything and gets its own.
    """
    if torch.cuda.is_current_stream_capturing():
        return torch.zeros(2, dtype=torch.int32, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream)
    if key not in _counters:
        _counters[key] = torch.zeros(2, dtype=torch.int32, device=device)
    return _counters[key]


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _gathered(problem: Problem) -> Problem:
    return problem
