"""Hopper backward pass on the host: the gradients of a problem's inputs, from its plan, its results and their gradients."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.backward_launches import NO_LISTS, Gradients, Results, Tables, launch_all
from anyattn.backends.hopper.backward_tables import (
    KeyOrder,
    key_order,
    key_order_of_documents,
    order_of_lists,
    order_where,
    ragged_lists_by_key,
)
from anyattn.backends.hopper.compile.launch import is_compiling, kinds_of
from anyattn.backends.hopper.make_backward_config import BackwardDispatch, BackwardSpec, backward_dispatch
from anyattn.backends.hopper.make_config import tile_of
from anyattn.backends.hopper.tables import made_lists
from anyattn.backends.hopper.wide_backward import OneGradient, WideBackwardSpec, is_wide, launch_wide, wide_spec
from anyattn.backends.sink_gradient import delta_of_rows, sink_gradient
from anyattn.documents.dispatch import dispatched
from anyattn.problem import Problem
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.derived import derived
from anyattn.sparsity.lists import both_ways, kept_transposed
from anyattn.sparsity.ranked_lists import ranked
from anyattn.tensors import privatized_sum
from anyattn.tensors.strides import Allocator, Layout, allocator, dense_layout

__all__ = ["BackwardLaunches"]

_NO_TABLES = Tables()
_count_modes = torch._C._len_torch_dispatch_stack  # type: ignore[attr-defined]


class BackwardLaunches:
    """The backward launches of calls that share a plan, compute gradients of the same captured tensors, and return those of k and v in one
    dtype.

    dense: for the latest call without sequences, the strides of q, k, v, out and dout (the latter two after ``_readable``), and the layouts
    of dq, dk and dv. The plan's signature determines the sizes, but hooks of saved tensors may change strides, and dout may have any
    strides.
    """

    def __init__(self, problem: Problem) -> None:
        self.dispatch = wide_spec(problem) if is_wide(problem) else backward_dispatch(problem)
        self.empty = allocator(problem.q.device)
        self.dense: tuple[tuple, tuple[Layout, ...]] = ((), ())

    def run(self, problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients of ``problem.grad_inputs`` in that order, None for those that are not needed. dout: any strides."""
        dispatch, q, k, v, (strides, layouts) = self.dispatch, problem.q, problem.k, problem.v, self.dense
        if strides != (q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()) or (out.data_ptr() | dout.data_ptr()) & 15:
            out, dout = _readable(out), _readable(dout)
            strides = q.stride(), k.stride(), v.stride(), out.stride(), dout.stride()
            layouts = dense_layout(q.shape, strides[0]), dense_layout(k.shape, strides[1]), dense_layout(v.shape, strides[2])
            if problem.sequences is None:
                self.dense = strides, layouts
        empty = allocator(q.device, passes_dispatcher=False) if _count_modes() else self.empty
        of_keys, (of_q, of_k, of_v) = problem.kv_grad_dtype, layouts
        dq, dk, dv = gradients = empty(*of_q, q.dtype), empty(*of_k, of_keys), empty(*of_v, of_keys)
        results = out, lse, dout, dlse, None if problem.sink is None else delta_of_rows(problem)
        of_captured: list[Tensor | None] = [None] * (0 if problem.score is None else len(problem.score.tensors))
        if isinstance(dispatch, WideBackwardSpec):
            tables = None if dispatch.listed is None else _tables_of_lists(problem, dispatch.dk)
            launch_wide(problem, dispatch, tables, results, gradients, empty)
        elif dispatch.form is None or dispatch.sequences_spec is None:
            spec = dispatch.spec
            totals = _totals(problem, spec) if problem.score is not None and spec.wanted else ()
            launch_all(problem, spec, _tables(problem, spec, gradients), results, gradients, empty, totals)
            of_captured = _of_captured(problem, spec, totals)
        else:
            _by_documents(problem, dispatch, results, gradients, empty)
        needed = dq if q.requires_grad else None, dk if k.requires_grad else None, dv if v.requires_grad else None
        if problem.sink is None and problem.score is None:
            return *needed, None
        return *needed, sink_gradient(problem, lse, results[-1]), *of_captured


def _by_documents(problem: Problem, dispatch: BackwardDispatch, results: Results, gradients: Gradients, empty: Allocator) -> None:
    """Makes the launches that ``documents.dispatch`` chooses, which write to the same gradients."""
    assert dispatch.form is not None and dispatch.sequences_spec is not None
    call = dispatched(problem, dispatch.form, needs_cache=False, needs_both=is_compiling())
    assert call is not None
    if call.by_sequences:
        order = key_order_of_documents(call.tables, dispatch.sequences_spec.config)
        tables = Tables(NO_LISTS, order, kinds_of(order)[0])
        launch_all(call.over_sequences(), dispatch.sequences_spec, tables, results, gradients, empty)
    if call.by_lists:
        tables = _tables_of_lists(problem, dispatch.spec)
        if (guard := call.guard) is not None:
            order = order_where(tables.order, ceil_div(problem.k.shape[2], dispatch.spec.config.tiles.tile_n), guard)
            tables = Tables(tables.lists, order, kinds_of((tables.lists, order, guard))[0], guard)
        launch_all(problem, dispatch.spec, tables, results, gradients, empty)


def _tables(problem: Problem, spec: BackwardSpec, gradients: Gradients) -> Tables:
    """The tables of a call that does not run as document sequences. Also clears rows of the gradients that belong to no sequence."""
    if problem.sequences is None:
        if spec.listed is None:
            return _NO_TABLES
        return _tables_of_lists(problem, spec)
    order = key_order(problem, spec.config, *gradients)
    if spec.listed is None:
        return Tables(NO_LISTS, order, kinds_of(order)[0])
    by_key, entries = ragged_lists_by_key(problem, spec.listed)
    lists, order = (*by_key, None), order._replace(entries=entries)
    return Tables(lists, order, kinds_of((lists, order))[0])


def _totals(problem: Problem, spec: BackwardSpec) -> tuple[Tensor, ...]:
    """Zeros for the gradients of captured tensors: float32, or a tensor's own 16-bit dtype if its entries are stored, not summed."""
    found = []
    for i, slot in enumerate(spec.wanted):
        assert problem.score is not None
        own, sums = problem.score.tensors[slot], [s for s in spec.config.sums if s.total == i]
        shape, is_alone = own.shape or (1,), any(s.kind == "alone" for s in sums)
        if any(s.has_copies for s in sums):
            found.append(privatized_sum.zeros(shape, torch.float32, own.device))
        else:
            dtype = own.dtype if is_alone and own.dtype.itemsize == 2 else torch.float32
            found.append(torch.zeros(shape, dtype=dtype, device=own.device))
    return tuple(found)


def _of_captured(problem: Problem, spec: BackwardSpec, totals: tuple[Tensor, ...]) -> list[Tensor | None]:
    """The gradients of the score mod's tensors."""
    tensors = () if problem.score is None else problem.score.tensors
    found: list[Tensor | None] = [None] * len(tensors)
    for i, (slot, total) in enumerate(zip(spec.wanted, totals, strict=True)):
        has_copies = any(s.has_copies for s in spec.config.sums if s.total == i)
        own = tensors[slot]
        found[slot] = (privatized_sum.read(total) if has_copies else total).reshape(own.shape).to(own.dtype)
    return found


def _readable(t: Tensor) -> Tensor:
    """``t``, copied unless TMA can read it: the address and all strides multiples of 16 bytes, except the last stride, which is 1."""
    if t.data_ptr() % 16 == 0 and _are_readable(t.shape, t.stride(), t.element_size()):
        return t
    return t.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=1024)
def _are_readable(shape: tuple[int, ...], strides: tuple[int, ...], size: int) -> bool:
    return strides[3] == 1 and not any(s * size % 16 for s, n in zip(strides[:3], shape[:3], strict=True) if n > 1)


def _tables_of_lists(problem: Problem, spec: BackwardSpec | OneGradient) -> Tables:
    """The lists and ranks of ``backward.scheduler.KeyTables``; cached with block lists, and then with an order, if the call has some."""
    blocks, config = problem.blocks, spec.config
    assert spec.listed is not None
    if blocks is None:
        mask = problem.predicates[spec.listed]
        by_row, by_key = made_lists(problem, mask, config.per_entry, config.per_head, both_ways=True)
        lists = _ranked(tensors_of(by_row), tensors_of(by_key)) if config.has_ranks else _tensors(by_key)
        return Tables(lists, kinds=kinds_of(lists)[0])
    assert spec.list_tile is not None
    known = derived(blocks)
    key: tuple = ("hopper backward", spec.list_tile, config.tiles.tile_n, problem.q.shape[1:3], problem.k.shape[2], config.has_ranks)
    tables: Tables | None = known.get(key)
    if tables is None:
        fits = spec.list_tile == tile_of(blocks)
        listed = blocks if fits else blocks.retile(*spec.list_tile)
        if config.has_ranks:  # key tiles wait for those before them
            sorted_lists, order = both_ways(listed.classes(), True), KeyOrder()
            lists = _ranked(sorted_lists[:4], sorted_lists[4:])
        else:
            lists = _tensors(kept_transposed(listed))
            order = order_of_lists(lists, config.list_cut[1], ceil_div(problem.k.shape[2], config.tiles.tile_n))
        tables = known[key] = Tables(lists, order, kinds_of((lists, order))[0])
    return tables


def _tensors(by_key: Any) -> tuple[Tensor | None, ...]:
    return *(None if t is None else t.contiguous() for t in tensors_of(by_key)), None


def _ranked(by_row: Any, by_key: Any) -> tuple[Tensor | None, ...]:
    counts, tiles, ranks = ranked(by_row, by_key)
    return counts, tiles, None, None, ranks
