"""Split-KV of the Hopper forward kernel for wide heads: which calls can have it, and the number of splits."""

from __future__ import annotations

import importlib.util

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.config import HEAD_DIMS, Config
from anyattn.backends.hopper.make_config import mods_of
from anyattn.backends.hopper.pack_gqa import groups_of_entry
from anyattn.hardware import Hardware
from anyattn.problem import Problem
from anyattn.sequences.split_kv import MOST_SPLITS, num_splits

__all__ = ["reason_against_splits", "splits_of"]

_KEYS_OF_COSTS = 64  # the tile in which ``num_splits`` counts what a split costs
_MOST_PARTIAL = 2**29  # float32 numbers of the splits' outputs: 2 GiB


def reason_against_splits(problem: Problem) -> str | None:
    """Why the keys of a call cannot be split, None if they can."""
    if not problem.has_wide_heads:
        return f"split keys are in its kernel for heads above {HEAD_DIMS[-1]} only"
    if importlib.util.find_spec("triton") is None:
        return "split keys are combined by Triton, which is not installed"
    if problem.sequences is None:
        return "split keys are for sequences that have tables of their lengths"
    if problem.wants_max or problem.dropout is not None:
        return "split keys are not combined with highest scores or dropout"
    if mods_of(problem, None if problem.score is None else problem.score.expr)[1] is not None:
        return "split keys are not for masks by lists of tiles"
    return None


def splits_of(problem: Problem, config: Config, hardware: Hardware) -> int:
    """The number of splits that a call asks for, or if it leaves the choice that with which its work items end soonest, by sizes that the
    host knows. Rows of a window see few keys, which are not split."""
    if problem.num_splits == 1 or reason_against_splits(problem):
        return 1
    most = min(MOST_SPLITS, max(1, _MOST_PARTIAL // (problem.q.shape[:3].numel() * problem.v.shape[3])))
    if problem.num_splits > 1:
        return min(problem.num_splits, most)
    if config.has_left:
        return 1
    row_tiles, batch = ceil_div(problem.bound_q, config.tile_q), problem.batch
    rows, _, length, _ = problem.q.shape
    if rows != batch:  # packed one after another: their total rows bound the row tiles
        row_tiles, batch = min(batch * row_tiles, rows * length // config.tile_q + batch), 1
    heads = groups_of_entry(problem, config)
    workers = max(1, hardware.sm_count // config.cluster)
    return num_splits(row_tiles, ceil_div(problem.bound_k, _KEYS_OF_COSTS), heads, batch, workers, most)
