"""The Triton backward pass in three launches: row statistics; dq with the captured tensors' gradients; dk and dv.

Small problems have one, see ``pair_tiles``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div, next_power_of_2
from anyattn.backends.sink_gradient import delta_of_rows, sink_gradient
from anyattn.backends.triton import autotune, deterministic_sum, tile_config
from anyattn.backends.triton.codegen import assumptions
from anyattn.backends.triton.codegen.assumptions import shape_of
from anyattn.backends.triton.codegen.entry import Group, Signature
from anyattn.backends.triton.codegen.programs import (
    CallProgram,
    CapturedValues,
    Program,
    captured_of,
    gradient_part,
    program_of,
    slots_alone,
    slots_copied,
)
from anyattn.backends.triton.distance_bands import Bands, bands_of, tiles_of_bands
from anyattn.backends.triton.documents import Form
from anyattn.backends.triton.kernel_arguments import PARTS, constants_of, programs_along_batch, sizes_of
from anyattn.backends.triton.kernels.arguments import (
    BackwardSizes,
    BackwardStrides,
    BackwardTensors,
    DkdvConstants,
    DqConstants,
    Lists,
    ListSpans,
    PrepareConstants,
    PrepareSpans,
    PrepareStrides,
    PrepareTensors,
)
from anyattn.backends.triton.launch_cache import LaunchCache, LaunchSpec, launch_cached, launch_key
from anyattn.backends.triton.launch_shape import (
    grid_of,
    head_rows,
    joined_tiles,
    limits_of_tiles,
    listed_tile,
    stages_of_gathered,
)
from anyattn.backends.triton.paged_gradients import add_to_pages, brought_together
from anyattn.backends.triton.pair_tiles import launch_pairs, pair_tiles_of, pairs_for
from anyattn.backends.triton.plan import TritonPlan
from anyattn.backends.triton.single_queries import gathers_queries, tables_of_queries, tiles_of_queries, with_whole_queries
from anyattn.backends.triton.tables import Tables, key_tables_of, tables_of
from anyattn.backends.triton.tile_config import Tiles, backward_tiles, fitting, heads_in_turn
from anyattn.backends.triton.wide_tiles import is_divided, is_wide, keys_of_dv, padded
from anyattn.problem import Problem
from anyattn.tensors import privatized_sum
from anyattn.tensors.strides import empty_in_order
from anyattn.triton_tools.launch import strides_of

__all__ = ["Passes", "backward", "log_sums_by_tiles", "over_pages", "passes_of", "slots_per_head"]

_REST = Group("int", BackwardSizes), Group("pointer", Lists), Group("float", "scale")


_GROUPS = Group("pointer", BackwardTensors), Group("stride", BackwardStrides), Group("long", ListSpans), *_REST
_DQ = Signature("backward.dq_tile", _GROUPS, PARTS, DqConstants)
_DKDV = Signature("backward.dkdv_tile", _GROUPS, PARTS, DkdvConstants)
_DKDV_OF_QUERIES = Signature("chosen.key_gradients.dkdv_of_queries", _GROUPS, PARTS, DkdvConstants)
_PREPARE = Signature(
    "backward.prepare_tile",
    (Group("pointer", PrepareTensors), Group("stride", PrepareStrides), Group("long", PrepareSpans), *_REST),
    PARTS,
    PrepareConstants,
)


class _Results(NamedTuple):
    """Results of the forward pass, and their gradients. dout: its last dimension is contiguous."""

    out: Tensor
    lse: Tensor
    dout: Tensor
    dlse: Tensor | None


def backward(
    problem: Problem, passes: Sequence[FormPasses], out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Gradients of ``problem.grad_inputs`` in that order, None for those that are not needed. dout: any strides."""
    dout = dout if dout.stride(3) == 1 or dout.shape[3] == 1 else dout.contiguous()
    return _gradients(problem, passes, _Results(out, lse, dout, dlse))


class Passes(NamedTuple):
    """Properties that the calls of a plan share in one form. tiles: of "dq" and "dkdv", and perhaps of "dv" alone. range_count:
    ``Program.range_count``. launches: the prepared launches of each kernel. pairs: ``pair_tiles_of``. head_rows, gathers_queries: the
    functions' results."""

    tiles: dict[str, Tiles]
    range_count: int
    launches: dict[str, LaunchCache]
    pairs: Tiles | None
    head_rows: int
    gathers_queries: bool

    @classmethod
    def of(cls, problem: Problem, tiles: dict[str, Tiles], pairs: Tiles | None) -> Passes:
        launches = {name: LaunchCache() for name in ("prepare", "dq", "dkdv", "pairs", "bands")}
        count = program_of(problem).program.range_count
        return cls(tiles, count, launches, pairs, head_rows(problem), gathers_queries(problem))


FormPasses = tuple[Form, Passes]


def passes_of(problem: Problem, plan: TritonPlan, *results: Any) -> Passes:
    """The passes of a problem's calls. results: out, lse, dout and dlse of one, by which tiles are measured if the plan asks for that."""
    tiles = _tiles(problem, plan)
    pairs = pair_tiles_of(problem, tiles["dq"] if plan.has_asked_tiles else None)
    is_tuned = plan.is_tuned and pairs_for(problem, pairs) is None
    tiles = _tuned(problem, tiles, results) if is_tuned else tiles
    return Passes.of(problem, tiles if plan.has_asked_tiles else _with_dv(problem, tiles), pairs)


def over_pages(problem: Problem, run: Callable[[Problem], tuple[Tensor | None, ...]]) -> tuple[Tensor | None, ...]:
    """The gradients of a problem with keys in pages. run: gives those of one with its keys brought together."""
    assert problem.sequences is not None
    dq, dk, dv, *others = run(brought_together(problem))
    of_pools = [
        add_to_pages(d, pool, problem.sequences) if d is not None and pool.requires_grad else None
        for d, pool in ((dk, problem.k), (dv, problem.v))
    ]
    return dq, *of_pools, *others


def _tuned(problem: Problem, tiles: dict[str, Tiles], results: tuple[Any, ...]) -> dict[str, Tiles]:
    """The fastest tiles of each kernel, measured one kernel after the other."""
    program, device = program_of(problem).program, problem.q.device

    def measure(name: str, other: Tiles) -> float:
        passes = [(Form(problem), Passes.of(problem, _with_dv(problem, {**tiles, name: other}), None))]
        return autotune.seconds(lambda: backward(problem, passes, *results), device)

    follow = {"dq": head_rows(problem) > 0, "dkdv": gathers_queries(problem)}  # whose tiles follow from the heads
    for name in _kernels_of(problem):  # for a kernel that is not launched all tiles would take the same time
        if follow.get(name):
            continue
        question = autotune.backward_question(name, problem, program, _words_of(name, problem))
        tiles = {**tiles, name: autotune.best(question, device, partial(measure, name))}
    return tiles


def _words_of(name: str, problem: Problem) -> list[str]:
    """Properties besides mask and mods that select a kernel."""
    if name == "dkdv":
        absent = [f"without {d}" for d, t in (("dk", problem.k), ("dv", problem.v)) if not t.requires_grad]
        return ["keys of several heads"] * (problem.qhead_per_kvhead > 1) + absent + ["wide gradients"] * problem.wide_kv_grads
    wanted = problem.wanted_slots
    captured = [f"gradients of captured {', '.join(map(str, wanted))}"] if wanted else []
    return (
        captured
        + ["deterministic"] * bool(deterministic_sum.additions_of(problem, wanted))
        + ["without dq"] * (not problem.q.requires_grad)
    )


class _Shared(NamedTuple):
    """The tensors that all launches share. dq, dk, dv: None if not needed."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor
    dq: Tensor | None
    dk: Tensor | None
    dv: Tensor | None

    @property
    def filled(self) -> tuple[Tensor, ...]:
        """The gradients; those that are not needed, which no kernel writes, are replaced by any tensor of the right shape."""
        q, k, v, dout, *gradients = self
        return (q, k, v, dout, *[own if d is None else d for d, own in zip(gradients, (q, k, v), strict=True)])


class _RowStatistics(NamedTuple):
    """The outputs of ``kernels.backward.prepare_tile``. lse, delta, spans: by row tiles of ``tile_m`` positions."""

    lse: Tensor
    delta: Tensor
    spans: Tensor
    tile_m: int


def _gradients(problem: Problem, forms: Sequence[FormPasses], results: _Results) -> tuple[Tensor | None, ...]:
    """forms: the forms in which the call is launched, each with its passes."""
    score, operands, bands = problem.score, (problem.q, problem.k, problem.v), _bands(problem, forms)
    summed = _summed(problem, bands)
    totals = _totals(problem, summed)
    dtypes = problem.q.dtype, problem.kv_grad_dtype, problem.kv_grad_dtype
    gradients = tuple([empty_in_order(t, dtype=d) if t.requires_grad else None for t, d in zip(operands, dtypes, strict=True)])
    if problem.sequences is not None:  # no program visits rows of no sequence
        for gradient in gradients:
            if gradient is not None:
                gradient.zero_()
    shared = _Shared(*operands, results.dout, *gradients)
    delta = delta_of_rows(problem)
    for form, passes in forms:
        pairs = pairs_for(form.problem, passes.pairs) if form.guard is None else None
        if pairs is not None:
            tensors = *operands, results.dout, results.lse, results.dlse, delta, *gradients  # ``PairTensors``
            launch_pairs(passes.launches["pairs"], form.problem, pairs, tensors, shared.filled, totals)
            continue
        statistics = _row_statistics(form, passes, results, delta)
        for name in _kernels_of(problem, bands):
            for part in _parts(name, shared):
                _launch(name, form, passes, part, statistics, totals if name == "dq" else (), bands)
    captured: list[Tensor | None] = [None] * len(score.tensors) if score else []
    for slot, total in zip(summed, totals, strict=True):
        own = score.tensors[slot]  # type: ignore
        captured[slot] = _gradient_of_captured(total, own)
    for table in () if bands is None else bands.tables:
        captured[table.slot] = bands.gradient(problem, table, forms[0][1].launches["bands"])  # type: ignore[union-attr]
    return *gradients, sink_gradient(problem, results.lse, delta), *captured


def _bands(problem: Problem, forms: Sequence[FormPasses]) -> Bands | None:
    (form, passes), *others = forms
    if others or form.guard is not None or not problem.wanted_slots or pairs_for(form.problem, passes.pairs) is not None:
        return None
    return bands_of(problem, passes.tiles)


def _summed(problem: Problem, bands: Bands | None) -> tuple[int, ...]:
    """The slots of captured tensors to whose gradients dq's kernel adds."""
    return tuple([slot for slot in problem.wanted_slots if bands is None or slot not in bands.slots])


def _kernels_of(problem: Problem, bands: Bands | None = None) -> tuple[str, ...]:
    """The kernels of the needed gradients, in launch order. dq's kernel also adds to captured tensors' gradients."""
    has_dq = problem.q.requires_grad or bool(problem.wanted_slots)
    has_dkdv = problem.k.requires_grad or problem.v.requires_grad or (bands is not None and True in bands.totals)
    return ("dq",) * has_dq + ("dkdv",) * has_dkdv


def _parts(name: str, shared: _Shared) -> tuple[_Shared, ...]:
    """The launches of a kernel, each with the gradients that it computes: for wide heads a multiprocessor has no registers for dk and dv
    together, and the scores are computed for each of them."""
    if name != "dkdv" or shared.dk is None or shared.dv is None or not is_wide(padded(shared.k.shape[3]), padded(shared.v.shape[3])):
        return (shared,)
    return shared._replace(dv=None), shared._replace(dk=None)


def _gradient_of_captured(total: Tensor, own: Tensor) -> Tensor:
    """The gradient of a captured tensor ``own`` from its sum."""
    if deterministic_sum.is_exact(total):
        return deterministic_sum.read(total, own.dtype)
    return (privatized_sum.read(total) if total.ndim > own.ndim else total).to(own.dtype)


def _totals(problem: Problem, wanted: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Buffers for the gradients of ``wanted`` captured tensors: single values in the tensors' own dtype; sums, which may have a million
    terms, in a more precise dtype, privatized (``privatized_sum``) where many pairs add to few entries; or those of
    ``deterministic_sum``."""
    score, device = problem.score, problem.q.device
    if score is None:
        return ()
    alone, additions = slots_alone(problem, wanted), deterministic_sum.additions_of(problem, wanted)
    sums = torch.float64 if problem.q.dtype is torch.float32 else torch.float32
    copied = slots_copied(problem, (*alone, *additions))

    def total(slot: int) -> Tensor:
        shape = score.tensors[slot].shape
        if slot in additions:
            return deterministic_sum.zeros(shape, additions[slot], device)
        if slot in copied:
            return privatized_sum.zeros(shape, sums, device)
        return torch.zeros(shape, dtype=score.tensors[slot].dtype if slot in alone else sums, device=device)

    return tuple(total(slot) for slot in wanted)


def _tiles(problem: Problem, plan: TritonPlan) -> dict[str, Tiles]:
    shape, capability = (
        replace(shape_of(problem), is_band=program_of(problem).program.has_band, listed=listed_tile(problem)),
        tile_config.capability_of(problem.q.device),
    )
    tiles = tiles_of_bands(problem, backward_tiles(shape, capability), shape, capability)
    if not problem.wanted_slots:
        tiles["dq"] = backward_tiles(replace(shape, listed=limits_of_tiles(problem)), capability)["dq"]
    if gathers_queries(problem):
        tiles["dkdv"] = tiles_of_queries(problem, tiles["dkdv"], shape, capability)
    if group := head_rows(problem):
        tiles["dq"] = replace(tiles["dq"], tile_m=max(group * next_power_of_2(shape.listed[0]), 16), num_warps=4)
    if plan.has_asked_tiles and not group:
        wanted = {name: replace(t, tile_m=plan.tile_m, tile_n=plan.tile_n) for name, t in tiles.items()}
        tiles = {name: fitting(name, t, shape, capability) for name, t in wanted.items()}
        if gathers_queries(problem):
            tiles["dkdv"] = with_whole_queries(problem, tiles["dkdv"])
    return tiles


def _with_dv(problem: Problem, tiles: dict[str, Tiles]) -> dict[str, Tiles]:
    """``tiles``, for wide heads with those of launches of dv alone (``_parts``), of the same rows."""
    if gathers_queries(problem) or not is_wide(padded(problem.k.shape[3]), padded(problem.v.shape[3])):
        return tiles
    of_both, most = tiles["dkdv"], listed_tile(problem)[1]
    keys = keys_of_dv(of_both.tile_n, tile_config.architecture(tile_config.capability_of(problem.q.device)))
    return {**tiles, "dv": of_both if 0 < most < keys else replace(of_both, tile_n=keys)}


def log_sums_by_tiles(problem: Problem, passes: Passes, lse: Tensor) -> tuple[Tensor, Tensor]:
    """lse and spans of ``prepare_tile`` from a contiguous log-sum-exp (B, Hq, Sq) alone, by the row tiles of ``passes.tiles["dkdv"]``."""
    statistics = _row_statistics(Form(problem), passes, _Results(problem.q, lse, problem.q, None), None, has_delta=False)
    return statistics.lse, statistics.spans


def _row_statistics(form: Form, passes: Passes, results: _Results, delta: Tensor | None, has_delta: bool = True) -> _RowStatistics:
    """Launches ``prepare_tile``; its results are stored by the row tiles that the dk and dv kernel visits. has_delta: see there."""
    problem, guard, (out, lse, dout, dlse) = form.problem, form.guard, results
    launches, tile_m, count = passes.launches["prepare"], passes.tiles["dkdv"].tile_m, passes.range_count
    of_head, device = slots_per_head(problem, tile_m), out.device
    slots = problem.heads_q * of_head
    # one more tile: a row tile that begins inside a slot, because of the lists' tiles, is read past the slot's end
    of_lse, of_delta = (torch.empty(((slots + 1) * tile_m,), dtype=torch.float32, device=device) for _ in range(2))
    spans = torch.empty((slots, max(4 * count, 1)), dtype=torch.int32, device=device)
    tables = tables_of(problem, None, tile_m, form.documents)
    tensors = (out, dout, lse, dlse, of_lse, spans, tables.entries, tables.order, guard, of_delta, delta)  # ``PrepareTensors``
    key = (*launch_key(problem, tables, out, dout), None if dlse is None else dlse.stride(), delta is None, guard is None, tile_m)
    launch_cached(launches, key, problem, tensors, _NO_LISTS, _prepare_spec, (form, tables, tensors, of_head, tile_m, has_delta))
    return _RowStatistics(of_lse, of_delta, spans, tile_m)


_NO_LISTS = Lists(None, None, None, None)


def _prepare_spec(form: Form, tables: Tables, tensors: tuple[Tensor | None, ...], of_head: int, tile_m: int, has_delta: bool) -> LaunchSpec:
    named = PrepareTensors(*tensors)
    problem, (out, dout, dlse) = form.problem, (named.out, named.dout, named.dlse)
    assert out is not None and dout is not None
    call_program = replace(program_of(problem), lists=None)
    ranges, count = call_program.program.ranges, call_program.program.range_count
    aligned, strides = strides_of(out, dout)
    of_dlse = (0, 0, 0) if dlse is None else dlse.stride()
    program = Program(None, ranges, None, None)
    captured = [values for values, part in zip(captured_of(call_program), call_program.program.parts, strict=True) if part is ranges]
    constants = {
        "RANGES": 0 if call_program.program.sees_all else count, "TILE_M": tile_m,
        "HEAD_DIM_V": out.shape[3], "BLOCK_DV": padded(out.shape[3]),
        "HAS_ENTRIES": problem.sequences is not None, "HAS_DLSE": dlse is not None, "HAS_GUARD": form.guard is not None,
        "HAS_SINK": named.natural_delta is not None, "HAS_DELTA": has_delta,
    }  # fmt: skip
    numbers = (*strides, *of_dlse, *tables.strides, *sizes_of(problem, tables), of_head, 1)
    grid = grid_of(tables.row_tiles, problem.heads_q, programs_along_batch(problem, tables))
    options = {**constants, "num_warps": 4, "num_stages": 1}
    return LaunchSpec(_PREPARE, call_program, program, captured, aligned, grid, numbers, options)


def _together(problem: Problem, program: Program, by_key: bool) -> int:
    """The number of heads that programs process at a time; see ``kernels.addressing.place_of_program``."""
    q, k, ratio = problem.q, problem.k, problem.qhead_per_kvhead
    is_ragged = problem.sequences is not None  # its programs process all entries of a head
    heads = (problem.heads_kv if by_key or head_rows(problem) else problem.heads_q) * (1 if is_ragged else problem.batch)
    rows = q.shape[2] * ratio if by_key else k.shape[2] // ratio
    head_bytes = rows * (k.shape[3] + problem.v.shape[3]) * q.element_size() * (q.shape[0] if is_ragged else 1)
    return heads_in_turn("dkdv" if by_key else "dq", heads, head_bytes, program.range_count > 1)


def slots_per_head(problem: Problem, tile_m: int) -> int:
    """The number of slots for row tiles of one head; see ``kernels.addressing.slot_of``."""
    return problem.q.shape[0] * ceil_div(problem.q.shape[2], tile_m) + problem.batch


def _launch(
    name: str,
    form: Form,
    passes: Passes,
    shared: _Shared,
    statistics: _RowStatistics,
    totals: tuple[Tensor, ...],
    bands: Bands | None,
) -> None:
    """Launches one kernel: "dq", which also computes ``totals``, or "dkdv"; each keeps the band of its rows."""
    problem, by_key, launches, (q, k, v, dout, dq, dk, dv) = form.problem, name != "dq", passes.launches[name], shared
    tiles = passes.tiles["dv" if by_key and dk is None and "dv" in passes.tiles else name]
    make_tables, tile = (key_tables_of, tiles.tile_n) if by_key else (tables_of, tiles.tile_m // (passes.head_rows or 1))
    if by_key and passes.gathers_queries:
        make_tables = tables_of_queries
    call_program = None if launches.knows_lists else program_of(problem)
    tables = make_tables(problem, launches.lists if call_program is None else call_program.lists, tile, form.documents)
    if form.guard is not None:
        tables = tables._replace(guard=form.guard)
    # ``BackwardTensors``
    tensors = (q, k, v, dout, statistics.lse, dq, dk, dv, tables.entries, tables.order, statistics.spans, tables.guard, statistics.delta)
    gradients = (dk is None, dv is None, problem.kv_grad_dtype) if by_key else (dq is None, *problem.wanted_slots)
    if bands is not None and by_key in bands.totals:
        totals, gradients = (*totals, *bands.totals[by_key]), (*gradients, bands.reach, *bands.slots)
    key = (*launch_key(problem, tables, *shared.filled[3:]), tiles, statistics.tile_m, *[t.dtype for t in totals], gradients)
    spec_arguments = (problem, call_program, tables, tiles, statistics.tile_m), by_key, shared, totals, bands
    launch_cached(launches, key, problem, tensors, tables.lists, _gradient_spec, spec_arguments, totals)


_Call = tuple[Problem, "CallProgram | None", Tables, Tiles, int]


def _gradient_spec(call: _Call, by_key: bool, shared: _Shared, totals: tuple[Tensor, ...], bands: Bands | None) -> LaunchSpec:
    (problem, call_program, tables, tiles, slot_m), (q, k, v, dout, dq, dk, dv) = call, shared
    call_program = program_of(problem) if call_program is None else call_program
    aligned, strides = strides_of(*shared.filled)
    program, captured = call_program.program, list(captured_of(call_program))
    if problem.score is not None:
        wanted = () if by_key else _summed(problem, bands)
        are_exact = tuple(s for s, total in zip(wanted, totals, strict=False) if deterministic_sum.is_exact(total))
        in_band = None if bands is None else bands.slot_of(by_key)
        part = gradient_part(problem, wanted, are_exact, program.score is not None and any(program.score.sides), in_band)
        program = replace(program, score=part)
        captured[0] = CapturedValues(*captured[0][:2], totals, part.style.even)
    constants: dict[str, Any] = {**constants_of(problem, call_program, tables), "TILE_M": tiles.tile_m, "TILE_N": tiles.tile_n}
    constants["IS_NEAR"] = all((t.stride(2) + 1) * t.shape[2] < 2**31 for t in (q, k, v, dout))
    group, gathers = head_rows(problem), by_key and gathers_queries(problem)
    if by_key:
        constants["GROUP"] = next_power_of_2(problem.qhead_per_kvhead) if gathers else 0
        constants |= {"IS_GROUPED": problem.qhead_per_kvhead > 1, "IS_NVIDIA": assumptions.is_nvidia(q.device.type)}
        # a band has few tiles and many of them are partial, so the prologues of two loops cost too much
        constants["IS_JOINED"] = program.has_band and not any((program.score, program.always, program.dropout))
        constants["SEES_ALL"] = program.sees_all
        constants |= {"HAS_DK": dk is not None, "HAS_DV": dv is not None}
    else:
        constants |= {"SLOT_M": slot_m, "HAS_DQ": dq is not None, "GROUP": group}
        constants["JOINS"] = 0 if problem.wanted_slots else joined_tiles(problem, tables.list_tile[1], tiles.tile_n)
    arch, rows = tile_config.architecture(tile_config.capability_of(q.device)), tiles.tile_n if by_key else tiles.tile_m
    widths = constants["BLOCK_D"], constants["BLOCK_DV"]
    constants["IS_DIVIDED"] = is_divided("dkdv" if by_key else "dq", False, *widths, arch, rows, tiles.num_warps)
    num_stages = stages_of_gathered(tiles.num_stages) if gathers or constants["JOINS"] else tiles.num_stages
    options = constants | {"num_warps": tiles.num_warps, "num_stages": num_stages}
    heads = problem.heads_kv if by_key or group else problem.heads_q
    grid = grid_of(tables.row_tiles, heads, programs_along_batch(problem, tables))
    sizes = (*sizes_of(problem, tables), slots_per_head(problem, slot_m), _together(problem, program, by_key))
    numbers = (*strides, *tables.strides, *sizes)
    signature = _DQ if not by_key else _DKDV_OF_QUERIES if gathers else _DKDV
    return LaunchSpec(signature, call_program, program, captured, aligned, grid, numbers, options)
