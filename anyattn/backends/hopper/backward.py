"""The Hopper backward pass in three launches: rows' statistics; dk, dv and the sums of dq; dq from its sums."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E, ceil_div
from anyattn.backends.hopper.api import CACHE_FOR_KEYS, counter_of, multiprocessors
from anyattn.backends.hopper.backward_config import BackwardConfig, RowsConfig
from anyattn.backends.hopper.backward_tables import KeyOrder, key_order, key_order_of_documents, order_where, ragged_lists_by_key, row_tiles
from anyattn.backends.hopper.compile.launch import is_compiling, launch
from anyattn.backends.hopper.make_backward_config import BackwardSpecial, BackwardWays, backward_ways
from anyattn.backends.hopper.make_config import tile_of
from anyattn.backends.hopper.tables import made_lists
from anyattn.documents.dispatch import dispatched
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.l2_groups import heads_side_by_side
from anyattn.sparsity.lists import ordered
from anyattn.tensors import privatized_sum
from anyattn.tensors.strides import empty_in_order

__all__ = ["backward"]

_ROUNDS = 2  # tiles of keys for each multiprocessor among which the longest go first
_MANY_ROUNDS = 24  # of them in all: one that is begun late adds no more than 4 %
_of_lists: WeakKeyDictionary[Any, dict[tuple, tuple[Tensor | None, ...]]] = WeakKeyDictionary()


class _Rows(NamedTuple):
    """lse, in base 2, and delta: (B, Hq, M, tile_m); sums: (B, Hq, M, tile_m * head_dim); float32. Over sequences B is 1, and M counts the
    row tiles of all."""

    lse: Tensor
    delta: Tensor
    sums: Tensor


class _Results(NamedTuple):
    """Of the forward pass, and their gradients. delta: (B, Hq, Sq) float32, to be written where somebody wants it."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None
    delta: Tensor | None


_rows_configs: dict[tuple, RowsConfig] = {}
_NO_LISTS: tuple[Tensor | None, ...] = (None,) * 5
_Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv


def backward(problem: Problem, plan: Plan, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    """Gradients of ``problem.grad_inputs`` in that order, None where none is needed. dout: any strides."""
    wanted = problem.wanted_slots  # of the inputs whose gradients the forward pass promised a backward pass may want some
    key = f"hopper backward {wanted}" if wanted else "hopper backward"
    ways: BackwardWays | None = plan.prepared.get(key)
    if ways is None:
        ways = plan.prepared[key] = backward_ways(problem)
    operands = (problem.q, problem.k, problem.v)
    results = _Results(_readable(out), lse, _readable(dout), dlse, _delta_of_rows(problem))
    gradients = empty_in_order(problem.q), empty_in_order(problem.k), empty_in_order(problem.v)
    totals = _totals(problem, ways.special)
    if ways.form is None or ways.within is None:
        order = KeyOrder() if problem.sequences is None else key_order(problem, ways.special.config, *gradients)
        _launch_all(problem, ways.special, order, results, gradients, totals=totals)
    else:
        _by_documents(problem, ways, results, gradients)
    found = [d if t.requires_grad else None for d, t in zip(gradients, operands, strict=True)]
    return *found, _of_sink(problem, results), *_of_captured(problem, ways.special, totals)


def _by_documents(problem: Problem, ways: BackwardWays, results: _Results, gradients: _Gradients) -> None:
    """The launches of ``documents.dispatch``, which write to the same gradients."""
    assert ways.form is not None and ways.within is not None
    call = dispatched(problem, ways.form, needs_cache=False, needs_both=is_compiling())
    assert call is not None
    if call.by_sequences:
        order = key_order_of_documents(call.tables, ways.within.config)
        _launch_all(call.over_sequences(), ways.within, order, results, gradients)
    if call.by_lists:
        guard = call.guard
        key_tiles = ceil_div(problem.k.shape[2], ways.special.config.tiles.tile_n)
        order = KeyOrder() if guard is None else order_where(key_tiles, guard)
        _launch_all(problem, ways.special, order, results, gradients, guard)


def _launch_all(
    problem: Problem,
    special: BackwardSpecial,
    order: KeyOrder,
    results: _Results,
    gradients: _Gradients,
    guard: Tensor | None = None,
    totals: tuple[Tensor, ...] = (),
) -> None:
    """guard: int32 (1,), with 1 in it no gradient is written, and ``order`` has no tiles."""
    config, (dq, dk, dv) = special.config, gradients
    rows, lists = _rows_of(problem, special), _NO_LISTS
    if special.listed is not None and problem.sequences is not None:
        found, entries = ragged_lists_by_key(problem, special.listed)
        lists = (*found, None)
        order = order._replace(entries=entries)
    elif special.listed is not None:
        lists = _lists_of(problem, special)
    out, lse, dout, dlse, delta = results
    launch(_rows_config(config, False, dlse is not None), (out, dout, lse, dlse, delta, order.entries, *rows))
    key_tiles = order.tiles(problem.k.shape[2], config.tiles.tile_n)
    _launch_products(problem, special, (*lists, *order), key_tiles, dout, dk, dv, rows, totals)
    if problem.q.requires_grad:
        launch(_rows_config(config, True, False), (rows.sums, dq, order.entries, guard, problem.scale))


def _totals(problem: Problem, special: BackwardSpecial) -> tuple[Tensor, ...]:
    """Zeros for the gradients of captured tensors: float32, or the tensor's own dtype where nothing is summed."""
    found = []
    for i, slot in enumerate(special.wanted):
        assert problem.score is not None
        own, sums = problem.score.tensors[slot], [s for s in special.config.sums if s.total == i]
        shape, is_alone = own.shape or (1,), any(s.kind == "alone" for s in sums)
        if any(s.has_copies for s in sums):
            found.append(privatized_sum.zeros(shape, torch.float32, own.device))
        else:
            dtype = own.dtype if is_alone and own.dtype.itemsize == 2 else torch.float32
            found.append(torch.zeros(shape, dtype=dtype, device=own.device))
    return tuple(found)


def _of_captured(problem: Problem, special: BackwardSpecial, totals: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradients of the score mod's tensors."""
    tensors = () if problem.score is None else problem.score.tensors
    found: list[Tensor | None] = [None] * len(tensors)
    for i, (slot, total) in enumerate(zip(special.wanted, totals, strict=True)):
        has_copies = any(s.has_copies for s in special.config.sums if s.total == i)
        own = tensors[slot]
        found[slot] = (privatized_sum.read(total) if has_copies else total).reshape(own.shape).to(own.dtype)
    return found


def _readable(t: Tensor) -> Tensor:
    """``t`` as the copy engine reads it: strides and address multiples of 16 bytes, the last stride 1."""
    size = t.element_size()
    is_so = t.stride(3) == 1 and t.data_ptr() % 16 == 0 and not any(s * size % 16 for s, n in zip(t.stride()[:3], t.shape[:3]) if n > 1)
    return t if is_so else t.clone(memory_format=torch.contiguous_format)


def _rows_config(config: BackwardConfig, is_after: bool, has_dlse: bool) -> RowsConfig:
    """One object for all calls: kernels are kept with it."""
    key = config.head_dim, config.head_dim_v, config.is_bf16, config.tiles.tile_m, is_after, has_dlse, config.has_entries
    return _rows_configs.get(key) or _rows_configs.setdefault(key, RowsConfig(*key))


def _rows_of(problem: Problem, special: BackwardSpecial) -> _Rows:
    config, q = special.config, problem.q
    if config.has_entries:
        shape = (1, q.shape[1], row_tiles(problem, config.tiles.tile_m))
    else:
        shape = (*q.shape[:2], ceil_div(q.shape[2], config.tiles.tile_m))

    def empty(width: int) -> Tensor:
        return torch.empty((*shape, width), dtype=torch.float32, device=q.device)

    return _Rows(empty(config.tiles.tile_m), empty(config.tiles.tile_m), empty(config.tiles.tile_m * config.head_dim))


def _launch_products(
    problem: Problem,
    special: BackwardSpecial,
    tables: tuple,
    key_tiles: int,
    dout: Tensor,
    dk: Tensor,
    dv: Tensor,
    rows: _Rows,
    totals: tuple[Tensor, ...],
) -> None:
    """tables: ``backward.scheduler.KeyTables``. key_tiles: that there is room for."""
    config, q, k = special.config, problem.q, problem.k
    spread = problem.heads_kv * (1 if config.has_entries else problem.batch)
    turns = torch.zeros(rows.lse.shape[:3], dtype=torch.int32, device=q.device) if config.is_deterministic else None
    # what the thread blocks of one head read and add to again and again: Q, dO and dQ's sums
    size = q.shape[2] * problem.qhead_per_kvhead * (2 * (q.shape[3] + dout.shape[3]) + 4 * config.head_dim)
    together = heads_side_by_side(size, 1, CACHE_FOR_KEYS)
    processors = multiprocessors(q.device)
    if config.lists is not None or config.has_left != config.has_right:
        together = _heads_of_uneven_tiles(together, spread, key_tiles, processors)
    section = min(spread, together)
    workers = max(1, min(key_tiles * spread, processors))
    launch(
        config,
        (
            q, k, problem.v, dout, dk, dv, *rows, turns, *tables, counter_of(q.device), problem.scale,
            problem.scale * LOG2E, key_tiles, spread, section, workers, *special.captured(problem), totals,
        ),
    )  # fmt: skip


@lru_cache(maxsize=1024)
def _heads_of_uneven_tiles(together: int, heads: int, key_tiles: int, processors: int) -> int:
    """How many heads go side by side where tiles of keys are seen by more rows than others, which then come first: so many that none of the
    long ones is begun alone in the end, unless there is so much else to do that it makes no difference.

    together: heads whose rows the L2 cache has room for.

    >>> _heads_of_uneven_tiles(3, 32, 64, 132), _heads_of_uneven_tiles(61, 1024, 4, 132)
    (8, 64)
    """
    rounds = 1 if key_tiles * heads >= _MANY_ROUNDS * processors else _ROUNDS
    least = max(together, ceil_div(rounds * processors, key_tiles))
    return min(range(least, 2 * least), key=lambda n: -heads % n)  # the last group is to be as large as the others


def _lists_of(problem: Problem, special: BackwardSpecial) -> tuple[Tensor | None, ...]:
    """The lists and ranks of ``backward.scheduler.KeyTables``. Of block lists they are kept with these."""
    blocks, config = problem.blocks, special.config
    assert special.listed is not None
    if blocks is None:
        return _tensors(made_lists(problem, problem.predicates[special.listed], config.per_entry, config.per_head), config.has_ranks)
    assert special.list_tile is not None
    known = _of_lists.setdefault(blocks, {})
    key = (special.list_tile, problem.q.shape[2], problem.k.shape[2], config.has_ranks)
    if key not in known:
        fits = special.list_tile == tile_of(blocks)
        known[key] = _tensors(blocks if fits else blocks.retile(*special.list_tile), config.has_ranks)
    return known[key]


def _tensors(lists: Any, is_ranked: bool) -> tuple[Tensor | None, ...]:
    transposed = lists.transposed()
    if is_ranked:
        return ranked(transposed.classes())
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    return *(None if (t := getattr(transposed, name)) is None else t.contiguous() for name in names), None


def ranked(classes: Tensor) -> tuple[Tensor | None, ...]:
    """The lists and ranks of ``backward.scheduler.KeyTables`` for deterministic sums.

    classes: uint8 (B, H, N, M), of the tiles of each tile of keys, whose class says whether it is partial.

    >>> counts, rows, _, _, ranks = ranked(torch.tensor([[[[1, 0, 2], [1, 2, 2]]]], dtype=torch.uint8))
    >>> counts.tolist(), rows.tolist(), ranks.tolist()
    ([[[2, 3]]], [[[[4, 1, 0], [4, 2, 1]]]], [[[[0, 0, 0], [1, 0, 1]]]])
    """
    is_listed, tiles = classes != EMPTY, classes.shape[-1]
    counts, backwards = ordered(classes.flip(-1), (PARTIAL, FULL))
    row = tiles - 1 - backwards
    is_partial = classes.gather(-1, row.long()) == PARTIAL
    is_one = torch.arange(tiles, device=classes.device) < counts[..., None]
    ranks = is_listed.cumsum(-2, dtype=torch.int32) - is_listed.to(torch.int32)
    return counts, torch.where(is_one, 2 * row + is_partial, 0).to(torch.int32), None, None, ranks


def _delta_of_rows(problem: Problem) -> Tensor | None:
    """(B, Hq, Sq) zeros, where a sink wants it."""
    sink, q = problem.sink, problem.q
    return torch.zeros(q.shape[:3], dtype=torch.float32, device=q.device) if sink is not None and sink.requires_grad else None


def _of_sink(problem: Problem, results: _Results) -> Tensor | None:
    """The gradient of the sink's logits: minus the sink's probability times delta of each row, summed per head."""
    sink, lse, delta = problem.sink, results.lse, results.delta
    if sink is None or delta is None:
        return None
    share = torch.exp(sink.detach().float()[:, None] - lse)
    return -(share * delta).masked_fill(torch.isneginf(lse), 0.0).sum((0, 2)).to(sink.dtype)
