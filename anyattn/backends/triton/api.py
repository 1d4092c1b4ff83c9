"""The Triton backend's forward pass: one launch for each form of a call, or split-KV."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.backends.result import Result
from anyattn.backends.triton import autotune, tile_config
from anyattn.backends.triton.codegen import assumptions
from anyattn.backends.triton.codegen.entry import Group, Signature, entry_source
from anyattn.backends.triton.codegen.programs import CallProgram, captured_of, program_of
from anyattn.backends.triton.combine import merge, merge_sections, merge_shares
from anyattn.backends.triton.documents import Form
from anyattn.backends.triton.kernel_arguments import PARTS, constants_of, programs_along_batch, sizes_of
from anyattn.backends.triton.kernels.arguments import (
    NO_FACTOR,
    OF_HEAD,
    OF_KEY,
    CacheSizes,
    ForwardConstants,
    ForwardSpans,
    ForwardStrides,
    ForwardTensors,
    HeadGroups,
    Lists,
    Shares,
    Sizes,
)
from anyattn.backends.triton.launch_cache import LaunchCache, LaunchSpec, launch_cached, launch_key
from anyattn.backends.triton.launch_shape import (
    MOST_BLOCKS,
    EvenShares,
    forward_shape,
    grid_of,
    has_few_rows,
    joined_tiles,
    padded_group,
    positions_per_tile,
    rows_of,
    stages_of_gathered,
    tiles_per_group,
)
from anyattn.backends.triton.plan import TritonPlan
from anyattn.backends.triton.tables import Tables, may_be_padded, tables_of
from anyattn.backends.triton.tile_config import Tiles, TmaUse
from anyattn.backends.triton.wide_tiles import alike, is_divided, padded
from anyattn.mods.float32_scores import is_ordinary_scale
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import StoredCache
from anyattn.tensors.strides import empty_in_order
from anyattn.triton_tools.launch import row_bytes, strides_of

__all__ = ["FormPlan", "forward", "plan_of_documents", "source_of"]


_FORWARD = Signature(
    "forward.forward_tile",
    (
        Group("pointer", ForwardTensors), Group("stride", ForwardStrides), Group("long", ForwardSpans),
        Group("int", CacheSizes, "cache_"), Group("int", HeadGroups), Group("int", Sizes), Group("int", Shares), Group("pointer", Lists),
        Group("float", "scale"),
    ),
    PARTS,
    ForwardConstants,
)  # fmt: skip


class _Target(NamedTuple):
    """The output tensors of one launch. parts: number of splits, then the strides from one split's statistics and outputs to the next's.
    shared: the last of ``ForwardTensors``, for even shares."""

    out: Tensor
    lse: Tensor | None
    highest: Tensor | None
    parts: tuple[int, int, int] = (1, 0, 0)
    shared: tuple[Tensor | None, Tensor | None, Tensor | None] = (None, None, None)


class FormPlan(NamedTuple):
    """A form in which a call is launched, with its plan and the prepared launches of its kernel."""

    form: Form
    plan: TritonPlan
    launches: LaunchCache


def forward(problem: Problem, forms: Sequence[FormPlan]) -> Result:
    """out and the statistics of a problem that ``plan.reason_against`` accepts."""
    # rows of no sequence are 0 and -inf; no program visits them
    fill = problem.sequences is not None and not problem.sequences.uses_all_rows
    if forms[0].plan.num_splits > 1:
        return (_forward_by_sections if forms[0].plan.section else _forward_by_splits)(problem, forms[0], fill)
    out = empty_in_order(problem.q, last=problem.v.shape[3])
    if fill:
        out.zero_()
    rest = -torch.inf if fill else None
    lse, highest = (_statistic(problem, (), rest) if wanted else None for wanted in (problem.wants_lse, problem.wants_max))
    if forms[0].plan.shares is not None:
        _forward_by_shares(problem, forms[0], forms[0].plan.shares, out, lse)
    else:
        for form in forms:
            _launch(form, _Target(out, lse, highest))
    return Result(out, lse, highest)


def plan_of_documents(problem: Problem, plan: TritonPlan) -> TritonPlan:
    """The plan for ``problem``, which is over the documents of one with ``plan``."""
    shape, capability, packed = forward_shape(problem), tile_config.capability_of(problem.q.device), plan.heads_per_tile
    tiles = tile_config.forward_tiles(shape, capability, rows_of(problem, packed), has_few_rows(problem, capability))
    if plan.has_asked_tiles:
        tiles = tile_config.fitting("forward", replace(tiles, tile_m=plan.tile_m, tile_n=plan.tile_n), shape, capability)
    return _with(plan, tiles)


def _with(plan: TritonPlan, tiles: Tiles) -> TritonPlan:
    return replace(plan, tile_m=tiles.tile_m, tile_n=tiles.tile_n, num_warps=tiles.num_warps, num_stages=tiles.num_stages)


def _tuned(problem: Problem, plan: TritonPlan, call_program: CallProgram) -> TritonPlan:
    """The plan with the fastest measured tiles."""
    plan = replace(plan, is_tuned=False)
    if problem.skip is not None:  # trials count nothing
        problem = problem.like(skip=problem.skip._replace(counts=None))
    question = autotune.forward_question(problem, call_program.program, plan.heads_per_tile, plan.num_splits)

    def measure(tiles: Tiles) -> float:
        form = FormPlan(Form(problem), _with(plan, tiles), LaunchCache())
        return autotune.seconds(lambda: forward(problem, [form]), problem.q.device)

    return _with(plan, autotune.best(question, problem.q.device, measure))


def source_of(problem: Problem) -> str:
    """The generated source for a problem, for people to read; it calls functions of the kernel modules."""
    q, v = problem.q, problem.v
    out = torch.empty(1, dtype=q.dtype, device=q.device).expand(*q.shape[:3], v.shape[3])
    return entry_source(_FORWARD, program_of(problem).program, strides_of(q, problem.k, v, out)[0])


def _forward_by_splits(problem: Problem, form: FormPlan, fill: bool) -> Result:
    """Forward pass with split-KV: each split writes its part of every row, in float32; the sink is added when they are combined."""
    q, count = problem.q, form.plan.num_splits
    shape = _out_shape(problem)
    outs = torch.empty((count, *shape), dtype=torch.float32, device=q.device)
    lses = _statistic(problem, (count,), torch.inf if fill else None)  # +inf, which no split can compute, marks rows of no sequence
    highest = _statistic(problem, (count,), -torch.inf if fill else None) if problem.wants_max else None
    _launch(form, _Target(outs[0], lses, highest, (count, lses.stride(0), outs.stride(0))))
    out = empty_in_order(q, last=shape[3])
    lse = _statistic(problem, (), None) if problem.wants_lse else None
    sink = None if problem.sink is None else problem.sink.detach()[None, :, None].expand(shape[:3])
    merge(outs, lses, sink, out, lse, fill)
    return Result(out, lse, None if highest is None else highest.amax(0))


def _forward_by_sections(problem: Problem, form: FormPlan, fill: bool) -> Result:
    """Forward pass with a program for each section of a row tile's keys: each writes its sums of every row, in float32."""
    q, count, shape = problem.q, form.plan.num_splits, _out_shape(problem)
    outs = torch.empty((count, *shape), dtype=torch.float32, device=q.device)
    statistics = torch.empty((count, 3 if problem.wants_max else 2, *shape[:3]), dtype=torch.float32, device=q.device)
    if fill:
        statistics.fill_(-1.0)  # a sum that no program writes
    _launch(form, _Target(outs[0], statistics[0, 0], statistics[0, 1], (count, statistics.stride(0), outs.stride(0))))
    out = empty_in_order(q, last=shape[3])
    lse, highest = (_statistic(problem, (), None) if wanted else None for wanted in (problem.wants_lse, problem.wants_max))
    merge_sections(outs, statistics, _contiguous(problem.sink), out, lse, highest)
    return Result(out, lse, highest)


def _forward_by_shares(problem: Problem, form: FormPlan, shares: EvenShares, out: Tensor, lse: Tensor | None) -> None:
    """Forward pass with even shares: row tiles whose keys several programs visited are written when their parts are combined."""
    device, rows = problem.q.device, (shares.programs, 2, form.plan.tile_m)
    parts, sums = (torch.empty((*rows, n), dtype=torch.float32, device=device) for n in (padded(out.shape[3]), 2))
    shared = parts, sums, torch.empty((rows[0], rows[2] + 1), dtype=torch.int64, device=device)
    _launch(form, _Target(out, lse, None, shared=shared))
    used = min(rows[2], problem.bound_q * padded_group(form.plan.heads_per_tile))
    merge_shares(*shared, used, _contiguous(problem.sink), out, lse)


def _launch(form_plan: FormPlan, target: _Target) -> None:
    form, plan, launches = form_plan
    problem = form.problem
    call_program = None if launches.knows_lists else program_of(problem)
    if call_program is not None and plan.is_tuned:
        plan = _tuned(problem, plan, call_program)
    lists = launches.lists if call_program is None else call_program.lists
    tile_n = plan.tile_n if plan.section else 1
    tables = tables_of(problem, lists, positions_per_tile(plan.tile_m, plan.heads_per_tile), form.documents, tile_n)
    if form.guard is not None:
        tables = tables._replace(guard=form.guard)
    cache = tables.cache
    cache_tables = (None, None, None) if cache is None else tuple(map(_contiguous, cache.tables[:3]))
    factors = problem.kv_scales or (None, None)
    tensors = (  # ``ForwardTensors``
        problem.q, problem.k, problem.v, *target[:3], _contiguous(problem.sink), tables.entries, tables.order, tables.pages, *cache_tables,
        tables.guard, *factors, *target.shared, *(problem.skip or (None, None)),
    )  # fmt: skip
    key = (
        *launch_key(problem, tables, target.out),
        target.lse is None,
        problem.wants_max,
        is_raw := _is_raw(problem),
        _skips(problem),
    )
    if problem.k.dtype is not problem.q.dtype:
        key += (
            problem.k.dtype,
            row_bytes(problem.q),
            row_bytes(problem.k, problem.v),
            *[None if t is None else t.stride() for t in factors],
        )
    launch_cached(launches, key, problem, tensors, tables.lists, _launch_spec, (form, plan, target, call_program, tables, is_raw))


class _Call(NamedTuple):
    form: Form
    plan: TritonPlan
    target: _Target
    call_program: CallProgram
    tables: Tables
    is_raw: bool


def _launch_spec(
    form: Form, plan: TritonPlan, target: _Target, call_program: CallProgram | None, tables: Tables, is_raw: bool
) -> LaunchSpec:
    problem, packed = form.problem, plan.heads_per_tile
    call_program = program_of(problem) if call_program is None else call_program
    call = _Call(form, plan, target, call_program, tables, is_raw)
    q, k, v = problem.q, problem.k, problem.v
    splits, part_statistics, part_out = target.parts
    is_aligned, strides = strides_of(q, k, v, target.out, more=(part_out,))
    constants = _constants(call, is_aligned)
    uses = (
        ("q", TmaUse.ALL, plan.tile_m),
        ("k", TmaUse.KV, plan.tile_n),
        ("v", TmaUse.KV, plan.tile_n),
        ("out", TmaUse.KV_OUT, plan.tile_m),
    )
    described = tuple((ForwardTensors._fields.index(name), rows) for name, least, rows in uses if constants["IS_DESCRIBED"] >= least)
    grid = (
        tables.row_tiles,
        problem.heads_kv * (tiles_each := tiles_per_group(problem, packed)),
        programs_along_batch(problem, tables) * splits,
    )
    together, groups = _groups(grid, call)
    usual, grid = grid, grid_of(*grid)
    if together:
        grid = (together, usual[0], groups * usual[2])
    elif grid != usual:
        together = -1
    shares = Shares(*(0,) * len(Shares._fields))
    if plan.shares is not None:
        grid, shares = (plan.shares.programs, 1, 1), Shares(tables.row_tiles * programs_along_batch(problem, tables), *plan.shares[1:])
    numbers = (
        *strides, part_statistics, *tables.strides, *_strides_of_factors(problem), *_cache_sizes(problem, tables.cache),
        packed, padded_group(packed), together, groups, tiles_each, *sizes_of(problem, tables, splits), *shares,
    )  # fmt: skip
    num_stages = stages_of_gathered(plan.num_stages) if constants["JOINS"] else plan.num_stages
    options = constants | {"num_warps": plan.num_warps, "num_stages": num_stages}
    if plan.section:
        options["enable_fp_fusion"] = False  # which products become part of an fma would depend on the code around them
    captured = captured_of(call_program)
    return LaunchSpec(_FORWARD, call_program, call_program.program, captured, is_aligned, grid, numbers, options, described)


def _constants(call: _Call, is_aligned: bool) -> dict[str, Any]:
    form, plan, target, call_program, tables, is_raw = call
    problem, cache, program = form.problem, tables.cache, call_program.program
    splits = target.parts[0]
    capability = tile_config.capability_of(problem.q.device)
    has_few = has_few_rows(problem, capability)
    pipeline = tile_config.pipeline_of(forward_shape(problem), capability, has_few)
    is_packed = plan.heads_per_tile > 1 or has_few
    page, list_n, is_padded = (
        0 if tables.pages is None else problem.k.shape[2],
        tables.list_tile[1],
        may_be_padded(problem.sequences, cache),
    )
    # tiles begin at multiples of their size, and so do pages
    fits = page > 0 and not is_padded and list_n % plan.tile_n == 0 and (plan.tile_n % page == 0 or page % plan.tile_n == 0)
    tma = _tma_use(min(pipeline.tma, TmaUse.KV) if is_packed else pipeline.tma, form, plan, tables, target) if is_aligned else TmaUse.NONE
    has_own_loops = problem.skip is None and not plan.section  # for whole tiles, or for all of them
    is_late = pipeline.is_late and tables.pages is None and has_own_loops
    is_joined = pipeline.is_joined and tma >= TmaUse.KV and program.range_count > 0 and has_own_loops
    of_problem = constants_of(problem, call_program, tables)
    of_problem["ONE_KV"] &= not (is_late or is_joined)  # these loops load values later than keys
    widths, arch = (of_problem["BLOCK_D"], of_problem["BLOCK_DV"]), tile_config.architecture(capability)
    if arch == "sm_90" and tma is TmaUse.NONE and plan.tile_m > tile_config.FEW and problem.q.dtype.itemsize == 2:
        of_problem["BLOCK_D"], of_problem["BLOCK_DV"] = widths = alike(*widths)
    is_one = bool(of_problem["ONE_KV"] and not plan.section)  # in the order of the keys, where values are changes no instruction
    of_problem["IS_DIVIDED"] = is_divided("forward", is_one, *widths, arch, plan.tile_m, plan.num_warps)
    return {
        **of_problem, "TILE_M": plan.tile_m, "TILE_N": plan.tile_n,
        "PAGE_SIZE": page, "PAGES_FIT": fits, "IS_PACKED": is_packed, "IS_CACHE": cache is not None, "HAS_LEFTPAD": is_padded,
        "HAS_ROWS": cache is not None and cache.tables.rows is not None, "HAS_SINK": problem.sink is not None and splits == 1,
        "HAS_LSE": target.lse is not None, "HAS_MAX": problem.wants_max, "IS_RAW": is_raw,
        "SECTION": plan.section, "IS_PART": plan.section > 0 and splits > 1,
        "HAS_SKIP": problem.skip is not None, "COUNTS_SKIPS": _skips(problem) is True,
        "IS_LATE": is_late, "IS_DESCRIBED": int(tma), "IS_JOINED": is_joined, "JOINS": joined_tiles(problem, list_n, plan.tile_n),
        "IS_RISING": program.is_rising, "IS_SHARED": plan.shares is not None,
        "SUMS": tile_config.row_sums(plan.tile_m, plan.tile_n, problem.q.dtype), **_constants_of_8_bits(problem, plan.tile_m),
    }  # fmt: skip


_OF_8_BITS = ("K_SCALE", "V_SCALE", "Q_BYTES", "KV_BYTES", "HAS_PAIRS", "IS_HALVED", "IS_NVIDIA", "WRAP")


def _constants_of_8_bits(problem: Problem, tile_m: int) -> dict[str, int]:
    q, k, v = problem.q, problem.k, problem.v
    if k.dtype is q.dtype:
        return dict.fromkeys(_OF_8_BITS, 0)
    of_k, of_v = ((NO_FACTOR if t is None else OF_HEAD if t.ndim == 2 else OF_KEY) for t in problem.kv_scales or (None, None))
    kv_bytes = row_bytes(k, v)
    # a warp group's products take values from shared memory in 16 bits, whatever they were loaded as
    has_pairs = kv_bytes > 1 and v.shape[3] % 2 == 0 and tile_m <= tile_config.FEW and q.dtype is not torch.float32
    is_halved, is_nvidia = q.dtype is torch.bfloat16, assumptions.is_nvidia(q.device.type)
    wrap = assumptions.shape_of(problem).wrap if tile_m <= tile_config.FEW else 0
    return dict(zip(_OF_8_BITS, (of_k, of_v, row_bytes(q), kv_bytes, has_pairs, is_halved, is_nvidia, wrap), strict=True))


def _strides_of_factors(problem: Problem) -> list[int]:
    """Of the keys' factors, then of the values': rows or batch entries, head, position."""
    strides: list[int] = []
    for t in problem.kv_scales or (None, None):
        strides += (0, 0, 0) if t is None else t.stride() if t.ndim == 3 else (*t.stride(), 0)
    return strides


def _is_raw(problem: Problem) -> bool:
    scales = problem.kv_scales
    if scales is not None and scales.v is not None and scales.v.ndim == 3 and problem.q.dtype is torch.float16:
        return False  # ``forward.scaled_weights_of``
    return problem.score is not None or is_ordinary_scale(problem.scale)


def _skips(problem: Problem) -> bool | None:
    """Whether skipped tiles are counted; None if none are skipped."""
    return None if problem.skip is None else problem.skip.counts is not None


def _groups(grid: tuple[int, int, int], call: _Call) -> tuple[int, int]:
    """L2 grouping of heads: the number of heads that programs compute at a time, and of such groups per entry; (0, 1) without grouping.
    grid: row tiles; heads, or groups that share tiles; entries times splits."""
    problem, capability = call.form.problem, tile_config.capability_of(call.form.problem.q.device)
    has_few = has_few_rows(problem, capability)
    if has_few or call.plan.heads_per_tile > 1 or call.plan.divides_keys or call.tables.entries is not None:
        return 0, 1
    if not tile_config.pipeline_of(forward_shape(problem), capability, has_few).is_grouped:
        return 0, 1
    k = problem.k
    head_bytes = k.shape[2] * (k.shape[3] + problem.v.shape[3]) * k.element_size() // problem.qhead_per_kvhead
    together = tile_config.heads_together(grid[1], head_bytes)
    groups = grid[1] // together
    return (together, groups) if max(grid[0], groups * grid[2]) <= MOST_BLOCKS else (0, 1)


def _tma_use(most: TmaUse, form: Form, plan: TritonPlan, tables: Tables, target: _Target) -> TmaUse:
    """The greatest value up to ``most`` whose conditions a call meets; its addresses and strides are multiples of 16 bytes."""
    problem, is_dense = form.problem, tables.entries is None
    k, v = problem.k, problem.v
    if most == TmaUse.NONE or tables.pages is not None or tables.cache is not None or tables.list_tile[1] % plan.tile_n:
        return TmaUse.NONE
    if not all(t.stride(2) > 0 and t.stride(2) * t.element_size() % 16 == 0 for t in (k, v)):  # a single row may have any stride
        return TmaUse.NONE
    if not (is_dense or form.documents is not None) or not (_has_distinct_rows(k) and _has_distinct_rows(v)):
        return TmaUse.KV_IN_KERNEL
    if not is_dense or target.parts[0] > 1 or tables.list_tile[0] % plan.tile_m or not _has_distinct_rows(target.out):
        return min(most, TmaUse.KV)
    return min(most, TmaUse.ALL if _has_distinct_rows(problem.q) else TmaUse.KV_OUT)


def _has_distinct_rows(x: Tensor) -> bool:
    """Whether all rows of x are distinct in memory and at multiples of 16 bytes."""
    return x.numel() > 0 and all(
        s > 0 and s * x.element_size() % 16 == 0 for s, n in zip(x.stride()[:3], x.shape[:3], strict=True) if n > 1
    )


def _cache_sizes(problem: Problem, cache: StoredCache | None) -> tuple[int, int, int, int]:
    last_page = problem.k.shape[0] - 1
    if cache is None:
        return 0, 0, 0, last_page
    sizes = cache.sizes
    return sizes.rows_q if sizes.new is None else sizes.new, sizes.capacity, sizes.storage, last_page


def _contiguous(x: Tensor | None) -> Tensor | None:
    return x if x is None or x.is_contiguous() else x.detach().contiguous()


def _out_shape(problem: Problem) -> tuple[int, ...]:
    return (*problem.q.shape[:3], problem.v.shape[3])


def _statistic(problem: Problem, lead: tuple[int, ...], fill: float | None) -> Tensor:
    shape, device = (*lead, *problem.q.shape[:3]), problem.q.device
    return torch.empty(shape, dtype=torch.float32, device=device) if fill is None else torch.full(shape, fill, device=device)
