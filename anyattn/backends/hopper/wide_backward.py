"""The backward pass of heads above 256: configs of its kernels, and their launches: rows' statistics, dq, dk, dv, and dk and dv from parts.

dk and dv of 512 dimensions fill the registers of a multiprocessor each, so each gradient has a kernel, which computes the scores again.
Sums are made in registers, in the same order in every run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E, ceil_div
from anyattn.backends.hopper.api import counter_of, multiprocessors, processors_of, section_of
from anyattn.backends.hopper.backward_config import RowsConfig
from anyattn.backends.hopper.backward_launches import Gradients, Results, Tables, numbers_of_keys
from anyattn.backends.hopper.backward_parts import parts_for
from anyattn.backends.hopper.captured_sums import with_derivatives
from anyattn.backends.hopper.compile.launch import launch
from anyattn.backends.hopper.config import HEAD_DIMS, TILE_M, padded
from anyattn.backends.hopper.make_config import captured_by, forward_storage, mods_of, tile_of
from anyattn.backends.hopper.tables import visits_of
from anyattn.backends.hopper.wide_backward_config import HELD, WideBackwardConfig, wide_tiles_for
from anyattn.problem import Problem
from anyattn.tensors.strides import Allocator, contiguous_strides

__all__ = ["OneGradient", "WideBackwardSpec", "is_wide", "launch_wide", "list_tile_of", "wide_spec"]

_FLOAT = torch.float32


class OneGradient(NamedTuple):
    """One kernel's config and, as in ``ForwardSpec``, where its captured values and lists come from."""

    config: WideBackwardConfig
    sources: tuple[tuple[int, int, int], ...]
    listed: int | None
    list_tile: tuple[int, int] | None


@dataclass(frozen=True)
class WideBackwardSpec:
    """What calls of the same signature share. parts: of each K/V head's query heads (``backward_parts``). before, after: the configs of the
    kernels of rows' statistics, without and with a gradient of lse, and of dk and dv from parts."""

    dq: OneGradient
    dk: OneGradient
    dv: OneGradient
    parts: int
    before: tuple[RowsConfig, RowsConfig]
    after: RowsConfig
    listed: int | None


def is_wide(problem: Problem) -> bool:
    """Whether the heads of ``problem`` are wider than those of the other backward kernels."""
    return max(problem.q.shape[3], problem.v.shape[3]) > HEAD_DIMS[-1]


def wide_spec(problem: Problem) -> WideBackwardSpec:
    """The spec of a ``problem`` that ``reason_against_backward`` accepts; reads no tensor."""
    d, dv = padded(problem.q.shape[3], problem.v.shape[3])
    parts = _parts_of(problem)
    of_q, of_k, of_v = (_gradient(problem, of, (d, dv), parts) for of in ("dq", "dk", "dv"))
    common = d, dv, problem.q.dtype is torch.bfloat16, HELD
    before = RowsConfig(*common, False), RowsConfig(*common, False, True)
    after = RowsConfig(*common, True, divides_heads=True)
    return WideBackwardSpec(of_q, of_k, of_v, parts, before, after, of_q.listed)


def list_tile_of(problem: Problem) -> tuple[int, int]:
    """The tile of the lists that the kernels read: that of the call's lists, joined to multiples of 64 rows and 64 keys."""
    if problem.blocks is None:
        return TILE_M, TILE_M
    rows, keys = (ceil_div(n, HELD) * HELD for n in tile_of(problem.blocks))
    return rows, keys


def _gradient(problem: Problem, of: str, dims: tuple[int, int], parts: int) -> OneGradient:
    score = None if problem.score is None else problem.score.expr
    if score is not None and of != "dv":
        score, _ = with_derivatives(score)
    sources, listed, fields = mods_of(problem, score)
    has_one_kv = of != "dv" and problem.has_one_kv
    tiles, list_tile = wide_tiles_for(of, *dims, has_one_kv), None
    if listed is not None:
        list_tile = list_tile_of(problem)
        storage = forward_storage(problem, True)
        names = ("per_entry", "per_head", "by_kv_head", *(("has_order", "spread") if of == "dq" else ()))
        fields |= {"lists": "dense", "list_cut": (list_tile[0] // tiles.tile_m, list_tile[1] // tiles.tile_n)}
        fields |= {name: storage[name] for name in names}
    is_bf16, is_float = problem.q.dtype is torch.bfloat16, of != "dq" and (parts > 1 or problem.wide_kv_grads)
    config = WideBackwardConfig(of, *dims, is_bf16, tiles, score, **fields, has_one_kv=has_one_kv, stores_float32=is_float)
    return OneGradient(config, sources, listed, list_tile)


def _parts_of(problem: Problem) -> int:
    """``parts_for`` this problem."""
    if (ratio := problem.qhead_per_kvhead) == 1:
        return 1
    key_tiles, row_tiles = ceil_div(problem.k.shape[2], HELD), ceil_div(problem.q.shape[2], HELD)
    processors = processors_of(problem.q.device)
    return parts_for(ratio, problem.heads_kv * problem.batch, key_tiles, row_tiles, bool(problem.predicates), processors)


def launch_wide(
    problem: Problem, spec: WideBackwardSpec, tables: Tables | None, results: Results, gradients: Gradients, empty: Allocator
) -> None:
    """Writes the gradients of a call that are needed. tables: the row tiles of each key tile, and their order; None without lists."""
    q, k = problem.q, problem.k
    out, lse, dout, dlse, delta = results
    tiles = ceil_div(q.shape[2], HELD)
    shape = (*q.shape[:2], tiles, HELD)
    own = [empty(shape, contiguous_strides(shape), _FLOAT) for _ in range(2)]
    launch(spec.before[dlse is not None], (out, dout, lse, dlse, delta, None, *own, None))
    dq, dk, dv = gradients
    if q.requires_grad:
        _launch_queries(problem, spec.dq, dout, own, dq)
    if not (k.requires_grad or problem.v.requires_grad):
        return
    if spec.parts == 1:
        targets = dk, dv
    else:
        shapes = [(k.shape[0], k.shape[1] * spec.parts, *x.shape[2:]) for x in (dk, dv)]
        targets = tuple([empty(s, contiguous_strides(s), _FLOAT) for s in shapes])  # type: ignore[assignment]
    for gradient, target in zip((spec.dk, spec.dv), targets, strict=True):
        if spec.parts > 1 or (k if gradient is spec.dk else problem.v).requires_grad:
            _launch_keys(problem, gradient, spec.parts, tables, dout, own, target)
    if spec.parts > 1:
        launch(spec.after, (None, None, None, None, problem.scale, *targets, dk, dv))


def _launch_queries(problem: Problem, gradient: OneGradient, dout: Tensor, statistics: list[Tensor], dq: Tensor) -> None:
    q, config = problem.q, gradient.config
    visits = visits_of(problem, gradient)  # type: ignore[arg-type]
    rows = ceil_div(q.shape[2], HELD) if visits.order is None else len(visits.order)
    spread = {"all": problem.batch * problem.heads_q, "heads": problem.heads_q, "none": 1}[config.spread]
    section = section_of(problem, problem.qhead_per_kvhead)
    numbers = rows, spread, min(spread, section), max(1, min(rows * spread, multiprocessors(q.device)))
    v = None if config.streams_one else problem.v
    _launch(problem, gradient, v, dout, dq, statistics, visits[:5], numbers)


def _launch_keys(
    problem: Problem,
    gradient: OneGradient,
    parts: int,
    tables: Tables | None,
    dout: Tensor,
    statistics: list[Tensor],
    target: Tensor,
) -> None:
    q, k, config = problem.q, problem.k, gradient.config
    rows = config.tiles.tile_m
    statistics = [x.view(*x.shape[:2], -1, rows) for x in statistics]
    key_tiles, ratio = ceil_div(k.shape[2], HELD), problem.qhead_per_kvhead // parts
    size = q.shape[2] * ratio * (q.shape[3] + dout.shape[3]) * q.element_size()
    spread = problem.heads_kv * parts * problem.batch
    numbers = numbers_of_keys(config, key_tiles, spread, ratio, size, multiprocessors(q.device))
    v = None if config.keeps_one else problem.v
    _launch(
        problem, gradient, v, dout, target, statistics, (None,) * 5 if tables is None else (*tables.lists[:4], tables.order.order), numbers
    )


def _launch(
    problem: Problem,
    gradient: OneGradient,
    v: Tensor | None,
    dout: Tensor,
    target: Tensor,
    statistics: list[Tensor],
    tables: tuple[Any, ...],
    numbers: tuple[int, ...],
) -> None:
    values, tensors = captured_by(gradient.sources, problem)
    q, k, scale = problem.q, problem.k, problem.scale
    launch(
        gradient.config,
        (
            q, k, v, dout, target, *statistics, *tables, counter_of(q.device), scale, scale * LOG2E, *numbers, tuple(values),
            tuple([t.detach() for t in tensors]),
        ),
    )  # fmt: skip
