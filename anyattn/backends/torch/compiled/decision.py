"""Decision for compiled loops: whether a call's forward pass is computed by them, and the loops of its mods."""

from __future__ import annotations

from functools import lru_cache

import torch

from anyattn.backends.torch.compiled import build
from anyattn.backends.torch.compiled.emit import MOST_POSITIONS, SCORE, Loops, NotCompiledError, Source, Table, loops_of
from anyattn.backends.torch.lower import with_choices
from anyattn.backends.torch.mod_runner import stage_of
from anyattn.mods.analysis.additive_bias import additive_bias
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem

__all__ = ["KINDS", "loops", "masks", "mods", "source_of", "why_not", "why_not_in_order"]

_LEAST_SCORES = 2**18
_LEAST_ROWS = 16
_MOST_DIM = 4096  # a thread keeps a row of q in its memory for scores
_MOST_ENTRIES = 2**31  # of a dimension of a captured tensor: indices have 32 bits
KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


def why_not(problem: Problem, product_dtype: torch.dtype, num_splits: int) -> str | None:
    """Why a call is not computed by compiled loops, for people; None if it is. Reads no tensor but the row ranges' limits."""
    return _why_not_of_sizes(problem, product_dtype, num_splits) or _why_not_of_mods(problem)


def why_not_in_order(problem: Problem) -> str | None:
    """``why_not`` for a call whose rows' bits must not depend on the batch, which has no other way of being computed: keys in pages and
    8-bit keys are copied first (``in_order``), and no size is too small."""
    q = problem.q
    if q.device.type != "cpu":
        return f"on {q.device.type} torch chooses a matrix product's kernel by its shape"
    if q.dtype not in KINDS:
        return (
            f"its loops compute float32, bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}: convert q, k and v with .float()"
        )
    if not problem.has_pairs:
        return None
    if max(problem.seqlen_q, problem.seqlen_k) >= MOST_POSITIONS:
        return "positions do not fit 28 bits"
    return _why_not_of_storage(problem) or build.reason_against() or _why_not_written(problem)


def _why_not_of_sizes(problem: Problem, product_dtype: torch.dtype, num_splits: int) -> str | None:
    q, sequences = problem.q, problem.sequences
    if q.device.type != "cpu" or q.dtype not in KINDS or product_dtype is not torch.float32:
        return f"they compute float32, and 16 bits where the CPU has no instructions for it, not {q.dtype} on {q.device.type}"
    if sequences is not None and (sequences.is_cache or sequences.page_table is not None):
        return "they read no KV cache"
    if problem.k.dtype is not q.dtype:
        return "they read no 8-bit keys"
    if problem.skip is not None:
        return "they leave out no tiles at run time, as skip_below asks"
    if problem.dropout is not None or num_splits > 1:
        return "they have no dropout and no split keys"
    if not problem.has_pairs or problem.seqlen_q < _LEAST_ROWS or _scores(problem) < _LEAST_SCORES:
        return f"the call is small: they pay from {_LEAST_SCORES} scores on"
    if max(problem.seqlen_q, problem.seqlen_k) >= MOST_POSITIONS:
        return "positions do not fit 28 bits"
    return _why_not_of_storage(problem)


def _why_not_of_storage(problem: Problem) -> str | None:
    if max(problem.q.shape[3], problem.v.shape[3]) > _MOST_DIM:
        return f"a head dimension is above {_MOST_DIM}"
    if any(n >= _MOST_ENTRIES for mod in mods(problem).values() for t in mod.tensors for n in t.shape):
        return "indices of a captured tensor do not fit 32 bits"
    return None


def _why_not_of_mods(problem: Problem) -> str | None:
    if (reason := build.reason_against()) is not None:
        return reason
    bias = None if problem.score is None else additive_bias(problem.score.expr)
    if bias is not None and stage_of(bias, problem.sequences is not None) in ("per_head", "row"):
        return "the score mod adds the same to all of a row"  # which torch keeps out of the probabilities
    return _why_not_written(problem)


def _why_not_written(problem: Problem) -> str | None:
    found = loops(problem)
    if isinstance(found, str):
        return f"such loops have no {found}"
    return None if _is_inside(problem, found) else "a captured tensor is smaller than the positions"


def _scores(problem: Problem) -> int:
    if problem.sequences is None:
        return problem.batch * problem.heads_q * problem.seqlen_q * problem.seqlen_k
    host = problem.sequences.on_host
    return problem.heads_q * sum(q * k for q, k in zip(host.seqlens_q, host.seqlens_k, strict=True))


def masks(problem: Problem) -> dict[int, TracedMod]:
    """The predicates without row ranges, by place."""
    return {at: p for at, (p, ranges) in enumerate(zip(problem.predicates, problem.row_ranges, strict=True)) if ranges is None}


def mods(problem: Problem) -> dict[int, TracedMod]:
    """The score mod at SCORE, and ``masks``."""
    return ({} if problem.score is None else {SCORE: problem.score}) | masks(problem)


def source_of(at: int, mod: TracedMod) -> Source:
    tables = tuple([Table(t.dtype, t.ndim, t.ndim > 0 and t.stride(-1) == 1) for t in mod.tensors])
    return Source(at, with_choices(mod.expr, mod.tensors).without_detach, tables)


def loops(problem: Problem) -> Loops | str:
    """The loops of a problem's mods, or what they lack."""
    sources = tuple([source_of(at, m) for at, m in mods(problem).items()])
    return _written(sources, problem.sequences is not None, problem.is_batch_invariant)


@lru_cache(maxsize=256)
def _written(sources: tuple[Source, ...], is_ragged: bool, in_order: bool) -> Loops | str:
    try:
        return loops_of(sources, is_ragged, in_order)
    except NotCompiledError as reason:
        return str(reason)


def _is_inside(problem: Problem, found: Loops) -> bool:
    """Whether b, h, q_idx and kv_idx, where they are indices of tensors that pairs load, are inside; other indices are checked as they
    occur."""
    by_place, s = mods(problem), problem.sequences
    q_first, q_end = (0, problem.seqlen_q) if s is None else s.position_bounds
    ends = {"b": problem.batch, "h": problem.heads_q, "q_idx": q_end, "kv_idx": problem.seqlen_k}
    for at, slot in found.slots:
        mod = by_place[at]
        nodes = mod.expr.nodes
        for node in nodes:
            if node.op != "load" or node.attr != slot:
                continue
            for index, size in zip([nodes[a] for a in node.args], mod.tensors[slot].shape, strict=True):
                is_before = q_first < 0 and index.attr == "q_idx"
                if size == 0 or (index.op == "index" and (is_before or size < ends[index.attr])):  # type: ignore[index]
                    return False
    return True
