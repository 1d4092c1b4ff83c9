"""Plan of the torch backend: tiles, splits and the dtype of products, from the machine's cache and fast dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anyattn.backends.torch.compiled.decision import why_not, why_not_in_order
from anyattn.errors import BackendError
from anyattn.hardware import Hardware
from anyattn.plan import Backward, Plan
from anyattn.problem import Problem
from anyattn.sequences.split_kv import MOST_SPLITS

__all__ = ["TorchPlan", "plan_of"]

_SCORES_AT_ONCE = 2**21  # scores of one tile over all its heads: 8 MB in float32, which fits a CPU's last-level cache
_SPAN_SCORES_AT_ONCE = 2**22  # the same for whole rows of bfloat16 scores
_LONGEST_SPAN = 2**15
_FEW_ROWS = 16


@dataclass(frozen=True, kw_only=True)
class TorchPlan(Plan):
    """tile_n_backward: keys of a tile of the backward pass, which keeps two tiles of scores at once. pairs_at_once: number of (batch, head)
    pairs that are computed together. product_dtype: the dtype of the two matrix products. has_loops: the forward pass is computed by
    ``compiled.forward``."""

    backend: str = "torch"
    backward: str = "torch"
    tile_n_backward: int
    pairs_at_once: int
    product_dtype: torch.dtype
    has_loops: bool = False

    @property
    def tiles(self) -> str:
        return f"{super().tiles}, {self.pairs_at_once} (batch, head) pairs at once"


def plan_of(problem: Problem, hardware: Hardware, reason: str, options: dict[str, int], backward: Backward) -> TorchPlan:
    """The torch backend's plan, whose gradients are its own. options: ``validate.flex.kernel_options``. reason: for choosing torch, for
    people. Reads the row ranges of masks."""
    if problem.is_batch_invariant:
        return _in_order(_torch_plan(problem, hardware, reason), problem)
    plan = _with_options(_torch_plan(problem, hardware, reason), problem, options)
    reason_not = why_not(problem, plan.product_dtype, plan.num_splits)
    how = f"no compiled loops: {reason_not}" if reason_not else "compiled loops: each pass is one C++ function, written from the mods"
    plan = replace(plan, has_loops=reason_not is None, why=(*plan.why, how))
    if options.get("pack_gqa", problem.packs) and problem.qhead_per_kvhead > 1:
        plan = replace(plan, why=(*plan.why, "pack_gqa=True is not followed: torch multiplies the rows of all heads at once anyway"))
    return plan


def _in_order(plan: TorchPlan, problem: Problem) -> TorchPlan:
    """The plan of a call whose rows' bits must not depend on the batch."""
    if reason := why_not_in_order(problem):
        raise BackendError(
            f'deterministic="batch" cannot have this call: {reason}; on a CPU its bits come from loops that a C++ compiler makes, on a GPU '
            "from Triton's kernels; deterministic=True has every call"
        )
    how = 'compiled loops in the order of the keys\' positions: deterministic="batch"'
    return replace(plan, num_splits=1, needs_lse=True, has_loops=problem.has_pairs, product_dtype=torch.float32, why=(*plan.why, how))


def _with_options(plan: TorchPlan, problem: Problem, options: dict[str, int]) -> TorchPlan:
    """The plan with the requested tiles; a row tile must divide the block mask's, so with one the nearest smaller divisor is used."""
    if "tile_m" in options:
        tile_m = options["tile_m"]
        if problem.blocks is not None:
            tile_m = _divisor(problem.blocks.tile[0], tile_m)
        plan = replace(plan, tile_m=tile_m, why=(*plan.why, f"row tile {tile_m}: kernel_options tile_m={options['tile_m']}"))
    if "tile_n" in options:
        plan = replace(plan, tile_n=options["tile_n"], tile_n_backward=options["tile_n"])
    if options.get("num_splits", 1) > 1:
        splits, why = _bounded_splits(options["num_splits"])
        plan = replace(plan, num_splits=splits, needs_lse=True, why=(*plan.why, *why))
    return plan


def _bounded_splits(asked: int) -> tuple[int, list[str]]:
    """The number of splits, bounded so that each split is worth its partial result, and the reason for the bound."""
    if asked <= MOST_SPLITS:
        return asked, []
    return MOST_SPLITS, [f"keys in {MOST_SPLITS} pieces, not {asked}: each is a partial result to keep and to merge"]


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def _torch_plan(problem: Problem, hardware: Hardware, reason: str) -> TorchPlan:
    why = [f"torch: {reason}"]
    dtype = problem.q.dtype
    if problem.is_batch_invariant:
        dtype = torch.float32
    elif dtype not in hardware.fast_dtypes:
        why.append(f"products in float32: {hardware.device} multiplies {str(dtype).removeprefix('torch.')} slowly")
        dtype = torch.float32
    elif problem.kv_scales is not None and dtype.itemsize == 2:
        why.append("products in float32: 16 bits do not hold 8-bit keys and values times their scales")
        dtype = torch.float32
    tile_m = _tile_m(problem, dtype.itemsize == 2, why)
    is_cache = problem.sequences is not None and problem.sequences.is_cache
    # of a cache the lengths grow from call to call, and one plan is for all of them
    tile_n = 1024 if is_cache else min(1024, max(problem.seqlen_k, 1))
    limits = () if is_cache else problem.row_limits
    width = int(min([problem.seqlen_k, *(_mean_width(limit) + tile_m for limit in limits)]))
    splits, why_splits = _bounded_splits(problem.num_splits or 1)
    why += why_splits
    if problem.num_splits == 0:
        why.append("one split: torch's matrix products share every row tile among all threads already")
    whole_spans = splits == 1 and _whole_spans(problem, dtype, width)
    if whole_spans:
        why.append("whole rows of scores, not streamed: no score mod, sink, dropout or statistics ask for more")
        if problem.blocks is None and width >= 8 * tile_m and problem.seqlen_q >= 4 * tile_m:
            tile_m *= 2  # fewer gathered copies of the keys, fewer additions to their gradients
    at_once = _SPAN_SCORES_AT_ONCE if whole_spans else _SCORES_AT_ONCE
    pairs = max(1, at_once // (tile_m * max(width if whole_spans else tile_n, 1)))
    tile_n_backward = min(tile_n, 2**16 // tile_m)
    # the widths of rows may have been read from tensors that masks capture
    has_known_sizes = problem.sequences is None or (is_cache and not problem.sequences.is_unread)
    is_reusable = has_known_sizes and not any(p.tensors for p in problem.predicates)
    return TorchPlan(
        tile_m=tile_m, tile_n=tile_n, tile_n_backward=tile_n_backward, pairs_at_once=pairs, product_dtype=dtype,
        needs_lse=not whole_spans, num_splits=splits, why=tuple(why), is_reusable=is_reusable,
    )  # fmt: skip


def _whole_spans(problem: Problem, dtype: torch.dtype, width: int) -> bool:
    """Whether a row tile's scores are computed whole, for torch's fused softmax, instead of being streamed with a running maximum.

    In 16 bits this needs scores in the products' dtype, as in the plain formula: 2.6 times as fast as torch's SDPA in bfloat16 on a CPU
    with bfloat16 instructions, against 1.8 for streaming. In float32 streaming is faster, for narrow windows too.
    """
    if problem.sequences is not None and problem.sequences.is_cache:
        return False  # the choice depends on the widths in the whole batch, so one entry would change another's last bits
    if problem.seqlen_q <= _FEW_ROWS:
        return False  # gathering keys costs D / rows of the products
    plain = problem.score is None and problem.sink is None and problem.dropout is None and not (problem.wants_lse or problem.wants_max)
    ranged = all(limit is not None for limit in problem.row_limits) or problem.blocks is not None
    return plain and ranged and dtype.itemsize == 2 and width <= _LONGEST_SPAN


def _tile_m(problem: Problem, is_half: bool, why: list[str]) -> int:
    tile_m = min(256, max(problem.seqlen_q, 1))
    if problem.blocks is not None:
        block_m = problem.blocks.tile[0]
        tile_m = _divisor(block_m, 512)
        why.append(f"row tile {tile_m}: divides the block mask's {block_m}")
    elif tile_m > 128 and not is_half and problem.sequences is not None and problem.sequences.is_cache:
        tile_m = 128
        why.append("row tile 128: for a cache the batch's widths are not asked, so that one entry cannot change another's last bits")
    elif tile_m > 128 and not is_half and any(_mean_width(limit) < problem.seqlen_k for limit in problem.row_limits):
        tile_m = 128
        why.append("row tile 128: a taller one computes more of what only some of its rows see")
    return tile_m


def _mean_width(limit: tuple[Tensor, Tensor] | None) -> float:
    """The mean number of keys that a row sees, by row ranges; infinite without row ranges."""
    if limit is None or limit[0].numel() == 0:
        return math.inf
    lo, hi = limit
    return float((hi - lo).sum(0, dtype=torch.float32).mean())
