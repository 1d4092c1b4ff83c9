"""Backward pass by compiled loops: its decision, the arguments of the C++ function, and its call."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.torch import workspace
from anyattn.backends.torch.compiled import build
from anyattn.backends.torch.compiled.arguments import LANES, LINE, ROOM, Arguments
from anyattn.backends.torch.compiled.decision import KINDS, masks, source_of
from anyattn.backends.torch.compiled.emit import CAPTURED, SCORE, Load, Loops, NotCompiledError, Source, backward_loops_of
from anyattn.backends.torch.compiled.work import Work
from anyattn.backends.torch.lower import with_choices
from anyattn.backends.torch.mod_runner import Bound, bind
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.grad import score_gradients
from anyattn.problem import Problem

__all__ = ["Gradients", "backward"]

_ITEMS, _LEAST_KEYS = 32, 256  # calls with fewer items divide their keys, into parts of at least so many
_MOST_SUMS = 2**22  # numbers in all items' sums for captured tensors
_MOST_PARTS = 2**23  # numbers in all parts of dQ


@dataclass(frozen=True)
class Gradients:
    """Of q, k, v and, by slot, of captured tensors."""

    q: Tensor
    k: Tensor
    v: Tensor
    captured: dict[int, Tensor]


@dataclass(frozen=True)
class _Program:
    loops: Loops
    sources: tuple[Source, ...]
    loads: tuple[Load, ...]


def backward(
    problem: Problem, work: Work, q: Tensor, dout: Tensor, lse: Tensor, net: Tensor, grads: tuple[Tensor, Tensor, Tensor]
) -> Gradients | None:
    """The gradients; None where torch computes them. q, dout: without values that must not matter. lse: in base 2, inf in rows that see no
    key. net: what is added to dP, both (B, Hq, Sq, 1). grads: memory for the gradients of q, k and v, 0 in unused storage."""
    program = _program_of(problem)
    if program is None or (function := build.function_of(program.loops.text)) is None:
        return None
    splits, split_keys = _splits(problem)
    sums = _sums(problem, program.loads, splits)
    if sums is None:
        return None
    bounds = {s.mod: _bound(problem, s) for s in program.sources}
    arguments = Arguments(problem, work, q)
    _add_backward(arguments, problem, work, (dout, lse, net), grads, (splits, split_keys))
    dq, dk, dv = grads
    parts = dq if splits == 1 else workspace.zeros((splits, *dq.shape), torch.float32, dq.device)
    arguments.tensor("grad_q", parts if splits == 1 else parts[0])
    arguments.numbers["grad_q_split"] = 0 if splits == 1 else parts.stride(0)
    arguments.tensor("grad_k", dk)
    arguments.tensor("grad_v", dv)
    arguments.values(program.loops, bounds)
    arguments.array("sums", [n for total in sums for n in _sum_numbers(total)])
    is_outside = function(arguments.address())
    del arguments  # and with them the copies
    if is_outside:
        return None
    if splits > 1 and dq.dtype is torch.float32:
        torch.sum(parts, 0, out=dq)
    elif splits > 1:
        dq.copy_(parts.sum(0))
    return Gradients(dq, dk, dv, _captured(problem, program.loads, sums))


def _splits(problem: Problem) -> tuple[int, int]:
    """The number of parts of the keys of each K/V head, and their keys: by the sizes of the call, so that every machine adds alike."""
    wanted = ceil_div(_ITEMS, problem.batch * problem.heads_kv)
    keys = max(problem.seqlen_k, 1)
    splits = max(1, min(wanted, keys // _LEAST_KEYS, _MOST_PARTS // max(problem.q.numel(), 1)))
    split_keys = ceil_div(ceil_div(keys, splits), 128) * 128
    return ceil_div(keys, split_keys), split_keys


def _program_of(problem: Problem) -> _Program | None:
    others = tuple([source_of(at, m) for at, m in masks(problem).items()])
    score, is_ragged = problem.score, problem.sequences is not None
    if score is None:
        return _written(others, None, (), (), is_ragged)
    own = source_of(SCORE, score)._replace(expr=with_choices(score.expr, score.tensors))
    shared = problem.batch == 1, problem.heads_q == 1
    return _written(others, own, problem.wanted_slots, shared, is_ragged)


@lru_cache(maxsize=256)
def _written(
    masks: tuple[Source, ...], score: Source | None, slots: tuple[int, ...], shared: tuple[bool, ...], is_ragged: bool
) -> _Program | None:
    """shared: whether there is one batch entry, and one head; none without a score mod."""
    sources, captured = masks, None
    loads: tuple[Load, ...] = ()
    if score is not None:
        own, derivatives, loads = _differentiated(score.expr, slots, shared)
        sources = (score._replace(expr=own), *masks)
        captured = None if derivatives is None else score._replace(mod=CAPTURED, expr=derivatives)
    try:
        loops = backward_loops_of(sources, captured, loads, is_ragged)
    except NotCompiledError:
        return None
    return _Program(loops, sources if captured is None else (*sources, captured), loads)


def _differentiated(expr: Expr, slots: tuple[int, ...], shared: tuple[bool, ...]) -> tuple[Expr, Expr | None, tuple[Load, ...]]:
    """The mod's value and its derivative by the score; the derivatives by loads of ``slots``, with the indices; and where these are."""
    gradients = score_gradients(expr)
    builder = Builder()
    own = builder.build(builder.copy(expr.without_detach), builder.copy(gradients.expr, gradients.expr.outputs[0]))
    wanted = [g for g in gradients.loads if g.slot in slots]
    if not wanted:
        return own, None, ()
    builder = Builder()
    outputs: list[int] = []
    loads: list[Load] = []
    for g in wanted:
        indices = [gradients.expr.outputs[i] for i in g.indices]
        nodes = [gradients.expr.nodes[i] for i in indices]
        places = tuple(range(len(outputs) + 1, len(outputs) + 1 + len(indices)))
        by_key = bool(nodes) and nodes[-1].op == "index" and nodes[-1].attr == "kv_idx"
        by_head = any(n.op == "index" and n.attr == "h" for n in nodes)
        loads.append(Load(g.slot, len(outputs), places, by_key, by_head, by_key and _is_alone(nodes, shared)))
        outputs += [builder.copy(gradients.expr, gradients.expr.outputs[g.output]), *(builder.copy(gradients.expr, i) for i in indices)]
    return own, builder.build(*outputs), tuple(loads)


def _is_alone(nodes: list, shared: tuple[bool, ...]) -> bool:
    """Whether every pair of the call has an index of its own."""
    names = [n.attr for n in nodes if n.op == "index"]
    has_all = {"q_idx", "kv_idx"} <= set(names) and ("b" in names or shared[0]) and ("h" in names or shared[1])
    return has_all and all(n.op in ("index", "const") for n in nodes)


def _bound(problem: Problem, source: Source) -> Bound:
    mod = problem.score if source.mod < 0 else problem.predicates[source.mod]
    assert mod is not None
    return bind(source.expr, mod.scalars, mod.tensors, problem)


def _sums(problem: Problem, loads: tuple[Load, ...], splits: int) -> list[Tensor] | None:
    """Memory of each load's sums, (B or 1, Hkv or 1, splits or 1, ...): for each item that may add to the same value as others a copy of
    its own. None if it is too much."""
    found: list[Tensor] = []
    for load in loads:
        assert problem.score is not None
        shape = tuple(problem.score.tensors[load.slot].shape)
        copies = (problem.batch, 1 if load.by_head else problem.heads_kv, 1 if load.by_key else splits)
        copies = (1, 1, 1) if load.is_alone else copies
        if not load.is_alone and math.prod((*copies, *shape)) > _MOST_SUMS:
            return None
        found.append(workspace.zeros((*copies, *shape), torch.float32, problem.q.device))
    return found


def _sum_numbers(total: Tensor) -> tuple[int, ...]:
    copies = (0 if size == 1 else step for size, step in zip(total.shape[:3], total.stride()[:3], strict=True))
    return total.data_ptr(), *copies, *(n for pair in zip(total.stride()[3:], total.shape[3:], strict=True) for n in pair)


def _captured(problem: Problem, loads: tuple[Load, ...], sums: list[Tensor]) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    for load, total in zip(loads, sums, strict=True):
        parts = total.flatten(0, 2)
        part = parts[0] if len(parts) == 1 else parts.sum(0)
        found[load.slot] = found[load.slot] + part if load.slot in found else part
    return found


def _has_whole_rows(t: Tensor) -> bool:
    """Whether the rows of ``t`` (..., n) are vectors on any CPU."""
    return t.dtype is torch.float32 and t.stride(-1) == 1 and t.shape[-1] % (2 * LANES) == 0


def _add_backward(
    arguments: Arguments,
    problem: Problem,
    work: Work,
    rows: tuple[Tensor, Tensor, Tensor],
    grads: tuple[Tensor, Tensor, Tensor],
    divided: tuple[int, int],
) -> None:
    splits, split_keys = divided
    d, dv, wide, wide_v = problem.q.shape[3], problem.v.shape[3], arguments.wide, arguments.wide_v
    keys, items = work.packed_keys * problem.heads_kv, problem.batch * problem.heads_kv * splits
    each = ROOM * (d + 2 * wide + dv + wide_v + 3 * LINE + 2)
    arguments.numbers |= {
        "items": items, "splits": splits, "split_keys": split_keys, "group_count": work.group_count, "scratch_size": each,
        "grad_kind": KINDS[grads[1].dtype],
        "packed_k": arguments.floats(keys * d), "packed_v": arguments.floats(keys * dv),
        "key_rows": 0 if _has_whole_rows(problem.k) else arguments.floats(keys * wide),
        "total_k": 0 if _has_whole_rows(grads[1]) else arguments.floats(keys * wide),
        "total_v": 0 if _has_whole_rows(grads[2]) else arguments.floats(keys * wide_v),
        "scratch": arguments.floats(arguments.numbers["threads"] * each),
    }  # fmt: skip
    dout, lse, net = rows[0], *(t.contiguous() for t in rows[1:])
    arguments.tensor("dout", dout)
    for name, t in (("row_lse", lse), ("net", net)):
        arguments.numbers[name] = arguments.keep(t).data_ptr()
    arguments.numbers["stat_b"], arguments.numbers["stat_h"] = lse.stride()[:2]
    arguments.point("groups", work.groups)
