"""Chooses how a problem is computed: pure functions from ``Problem`` and ``Hardware`` to a printable ``Plan``."""

from __future__ import annotations

import importlib
import importlib.util
import math
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.errors import BackendError
from anyattn.geometry.splits import MOST_SPLITS
from anyattn.hardware import Hardware
from anyattn.mods.native import has_native
from anyattn.problem import Problem

__all__ = ["BACKENDS", "Plan", "appender", "available", "choose", "combiner", "for_backward"]

BACKENDS = ("torch", "triton", "hopper")
_SCORES_AT_ONCE = 2**21  # scores of one tile over all its heads: 8 MB in float32, which stays in a CPU's last-level cache
_SPAN_SCORES_AT_ONCE = 2**22  # the same for whole rows of bfloat16 scores
_LONGEST_SPAN = 2**15
_FEW_ROWS = 16
_BY_DOCUMENT = "documents: each is run as a sequence of its own; by block lists where one id is at several places, or many are short"


@dataclass(frozen=True)
class Plan:
    """backend: who computes the forward pass; backward: the backward pass, if another.

    tile_m, tile_n: query rows and keys of one tile (torch's backward pass keeps two tiles of scores at once and takes narrower ones).
    pairs_at_once: (batch, head) pairs that torch's passes compute together.

    num_splits: the keys of each row tile are divided among so many partial results. product_dtype: the dtype of the two matrix products.
    whole_spans: a row tile's visible scores are computed whole, not streamed. why: one line per decision, for people.
    is_reusable: the plan holds for every call of the same facts (shapes, strides, programs, masks' numbers), whatever tensors hold.
    has_asked_tiles: the tiles are kernel_options', for both passes. is_tuned: Triton's are measured, as kernel_options ask.
    heads_per_tile: query heads that share a row tile. num_warps, num_stages: of a Triton kernel's programs.
    prepared: what the backend keeps for the calls that share this plan; it must follow from those facts alone.
    """

    backend: str
    tile_m: int
    tile_n: int
    tile_n_backward: int
    pairs_at_once: int
    product_dtype: torch.dtype
    whole_spans: bool = False
    num_splits: int = 1
    backward: str = ""
    why: tuple[str, ...] = ()
    is_reusable: bool = True
    has_asked_tiles: bool = False
    is_tuned: bool = False
    heads_per_tile: int = 1
    num_warps: int = 4
    num_stages: int = 2
    prepared: dict[str, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
        for name in ("tile_m", "tile_n", "tile_n_backward", "pairs_at_once", "num_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def available(hardware: Hardware) -> dict[str, str | None]:
    """For each backend None if it can run here, else why not."""
    return {"torch": None, "triton": _reason_against_triton(hardware), "hopper": _reason_against_hopper(hardware)}


@lru_cache(maxsize=16)
def _reason_against_triton(hardware: Hardware) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'anyattn[triton]'"
    if hardware.device != "cuda":
        from anyattn.backends.triton.interpreter import is_interpreting

        if hardware.device == "cpu" and is_interpreting():
            return None
        return f"it needs a GPU, and the tensors are on {hardware.device} (for tests TRITON_INTERPRET=1 runs its kernels on a CPU)"
    if hardware.capability is not None and hardware.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, and {hardware.name} has {'.'.join(map(str, hardware.capability))}"
    return None


@lru_cache(maxsize=16)  # looking for a package costs 10 us
def _reason_against_hopper(hardware: Hardware) -> str | None:
    if hardware.device != "cuda" or hardware.capability is None:
        return f"it needs an NVIDIA GPU, and the tensors are on {hardware.device}"
    if torch.version.hip is not None:  # some of AMD's GPUs say 9.0 too
        return f"it needs an NVIDIA GPU, and {hardware.name} is AMD's"
    if hardware.capability != (9, 0):
        return f"it needs compute capability 9.0 (H100, H200), and {hardware.name} has {'.'.join(map(str, hardware.capability))}"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed: pip install 'anyattn[cute]'"
    return None


def choose(problem: Problem, hardware: Hardware, backend: str | None = None, options: dict[str, int] | None = None) -> Plan:
    """The plan for ``problem`` on ``hardware``; ``backend`` insists on one, ``options`` (``check.kernel_options``) on numbers.

    Raises ``ValueError`` for a name that is no backend and ``BackendError`` for one that cannot run this problem.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not a backend; wanted None (choose for me) or one of {', '.join(map(repr, BACKENDS))}")
    possible = available(hardware)
    _check_native(problem, backend, possible["hopper"])
    if backend is not None:
        reason = possible[backend]
        if reason is not None:
            raise BackendError(f"backend={backend!r} cannot run here: {reason}; pass backend=None to let anyattn choose")
        against = _reason_against_problem(backend, problem)
        if against:
            raise BackendError(f"backend={backend!r} cannot run this call: {against}; pass backend=None to let anyattn choose")
        return _plan_of(backend, problem, hardware, "asked for", options or {})
    reasons = []
    for name in ("hopper", "triton"):
        against = possible[name] or _reason_against_problem(name, problem)
        if not against and hardware.device == "cpu":
            against = "its interpreter is for tests"
        if not against:
            reasons.append(f"{hardware.name} has it, and the call is of its kind")
            return _plan_of(name, problem, hardware, "; ".join(reasons), options or {})
        reasons.append(f"for {name}, {against}")
    return _plan_of("torch", problem, hardware, "; ".join(reasons), options or {})


def _plan_of(name: str, problem: Problem, hardware: Hardware, reason: str, options: dict[str, int]) -> Plan:
    if name == "triton":
        return _triton_plan(problem, hardware, reason, options)
    plan = (
        _with_options(_torch_plan(problem, hardware, reason), problem, options)
        if name == "torch"
        else _hopper_plan(problem, hardware, reason, options)
    )
    if name == "torch" and options.get("pack_gqa", problem.packs) and problem.qhead_per_kvhead > 1:
        plan = replace(plan, why=(*plan.why, "pack_gqa=True is not followed: torch multiplies the rows of all heads at once anyway"))
    if not options.get("autotune"):
        return plan
    return replace(plan, is_tuned=True, why=(*plan.why, f"autotune: {name} itself has no tiles to measure"))


def _check_native(problem: Problem, backend: str | None, against: str | None) -> None:
    """Raises ``BackendError`` where a CuTe function would have to be asked by anything but the Hopper kernel."""
    native = has_native((problem.score, *problem.predicates))
    if native is None:
        return
    named = f"backend={backend!r} is named; pass backend='hopper'" if backend in ("torch", "triton") else None
    reason = named or against or _reason_against_problem("hopper", problem)
    if reason and problem.has_pairs:  # asked last: on a GPU it may wait
        raise BackendError(f"only the Hopper kernel can run {native}, a CuTe function: {reason}; or write it as plain Python")


def for_backward(plan: Plan, problem: Problem, hardware: Hardware) -> Plan:
    """The plan for the backward pass of what ``plan`` computed forward, with the log-sum-exp kept where it is another backend's."""
    if not plan.backward:
        return plan
    options = {"autotune": 1} if plan.is_tuned else None
    # how rows were dealt to tiles is the forward pass's own
    return replace(choose(problem.like(packs=None), hardware, plan.backward, options), whole_spans=False)


def _hopper_plan(problem: Problem, hardware: Hardware, reason: str, options: dict[str, int]) -> Plan:
    """Asks nothing of the mask's rows: on a GPU that would wait for them."""
    from anyattn.backends.hopper.packing import why_apart
    from anyattn.backends.hopper.run import config_of, runs_documents

    backward, why_backward = _backward_by_triton(problem, hardware)
    packs = bool(options["pack_gqa"]) if "pack_gqa" in options else problem.packs
    config = config_of(problem, packs)
    tiles, packed = config.tiles, config.heads_per_tile
    why = [f"hopper: {reason}", f"backward: {backward}, for hopper has none yet{why_backward}"]
    if packed == 1 and runs_documents(problem):
        why.append(_BY_DOCUMENT)
    why += _why_deterministic(problem, backward)
    if packed > 1:
        why.append(f"up to {packed} of the {problem.qhead_per_kvhead} query heads that share K and V share a row tile")
    elif packs and (against := why_apart(config, problem.qhead_per_kvhead)):
        why.append(f"pack_gqa=True is not followed: {against}")
    return Plan(
        "hopper", tiles.tile_m, tiles.tile_n, tiles.tile_n, 1, problem.q.dtype, backward=backward, why=tuple(why), heads_per_tile=packed
    )


def _triton_plan(problem: Problem, hardware: Hardware, reason: str, options: dict[str, int]) -> Plan:
    """Asks nothing of what tensors hold."""
    from anyattn.backends.triton.forms import form_of_documents
    from anyattn.backends.triton.layout import layout_of

    tiles, packed, splits, reasons = layout_of(problem, hardware, options)
    why = [f"triton: {reason}", *reasons]
    if form_of_documents(problem, splits) is not None:
        why.append(_BY_DOCUMENT)
    is_tuned = bool(options.get("autotune"))
    if is_tuned:
        why.append("autotune: the first call of a kind measures a handful of tiles; its winner is used instead of these")
    backward, why_backward = _backward_by_triton(problem, hardware)
    why += _why_deterministic(problem, backward) if backward == "triton" else [f"backward: {backward}{why_backward}"]
    return Plan(
        "triton", tiles.tile_m, tiles.tile_n, tiles.tile_n, 1, problem.q.dtype, num_splits=splits,
        backward="" if backward == "triton" else backward, why=tuple(why), has_asked_tiles="tile_m" in options or "tile_n" in options,
        heads_per_tile=packed, is_tuned=is_tuned, num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip


def _backward_by_triton(problem: Problem, hardware: Hardware) -> tuple[str, str]:
    """Triton if it can, else torch; and what is against Triton."""
    from anyattn.backends.triton.supports import reason_against_backward

    against = _reason_against_triton(hardware) or reason_against_backward(problem)
    return ("torch", f"; for triton, {against}") if against else ("triton", "")


def _why_deterministic(problem: Problem, backward: str) -> list[str]:
    """What Triton's gradients do for ``deterministic``, where that is anything."""
    if backward != "triton" or not problem.deterministic:
        return []
    from anyattn.backends.triton.exact import describe

    found = describe(problem)
    return [] if found is None else [found]


def _reason_against_problem(name: str, problem: Problem) -> str | None:
    if name == "torch":
        return None
    found: str | None = importlib.import_module(f"anyattn.backends.{name}.supports").reason_against(problem)
    return found


def appender(plan: Plan, hardware: Hardware) -> str | None:
    """The backend whose kernel takes a decoder's step before the attention of ``plan``; None where torch operations do."""
    has_kernel = plan.backend != "torch" and _reason_against_triton(hardware) is None
    return "triton" if has_kernel else None


def combiner(hardware: Hardware, dtype: torch.dtype, needs_grad: bool) -> str:
    """The backend that merges partial results; torch's merging has derivatives, and float64."""
    has_kernel = hardware.device == "cuda" and dtype is torch.float32 and not needs_grad
    return "triton" if has_kernel and _reason_against_triton(hardware) is None else "torch"


def _with_options(plan: Plan, problem: Problem, options: dict[str, int]) -> Plan:
    """The plan with the tiles asked for; a row tile must divide the block mask's, so there the nearest one below that does is taken."""
    if "tile_m" in options:
        tile_m = options["tile_m"]
        if problem.blocks is not None:
            tile_m = _divisor(problem.blocks.tile[0], tile_m)
        plan = replace(plan, tile_m=tile_m, why=(*plan.why, f"row tile {tile_m}: kernel_options tile_m={options['tile_m']}"))
    if "tile_n" in options:
        plan = replace(plan, tile_n=options["tile_n"], tile_n_backward=options["tile_n"])
    if options.get("num_splits", 1) > 1:
        splits, why = _bounded_splits(options["num_splits"])
        plan = replace(plan, num_splits=splits, whole_spans=False, why=(*plan.why, *why))
    return plan


def _bounded_splits(asked: int) -> tuple[int, list[str]]:
    """As many splits as are worth a partial result each, and why not more."""
    if asked <= MOST_SPLITS:
        return asked, []
    return MOST_SPLITS, [f"keys in {MOST_SPLITS} pieces, not {asked}: each is a partial result to keep and to merge"]


def _divisor(number: int, most: int) -> int:
    """The largest divisor of ``number`` that is at most ``most``."""
    return next(d for d in range(min(number, most), 0, -1) if number % d == 0)


def _torch_plan(problem: Problem, hardware: Hardware, reason: str) -> Plan:
    why = [f"torch: {reason}"]
    dtype = problem.q.dtype
    if dtype not in hardware.fast_dtypes:
        why.append(f"products in float32: {hardware.device} multiplies {str(dtype).removeprefix('torch.')} slowly")
        dtype = torch.float32
    tile_m = _tile_m(problem, dtype.itemsize == 2, why)
    tile_n = min(1024, max(problem.seqlen_k, 1))
    width = int(min([problem.seqlen_k, *(_mean_width(limit) + tile_m for limit in problem.row_limits)]))
    splits, why_splits = _bounded_splits(problem.num_splits or 1)
    why += why_splits
    if problem.num_splits == 0:
        why.append("one split: torch's matrix products share every row tile among all threads already")
    whole_spans = splits == 1 and _whole_spans(problem, dtype, width)
    if whole_spans:
        why.append("whole rows of scores, not streamed: no score mod, sink or statistics ask for more")
        if problem.blocks is None and width >= 8 * tile_m and problem.seqlen_q >= 4 * tile_m:
            tile_m *= 2  # fewer copies of the keys side by side, fewer additions to their gradients
    at_once = _SPAN_SCORES_AT_ONCE if whole_spans else _SCORES_AT_ONCE
    pairs = max(1, at_once // (tile_m * max(width if whole_spans else tile_n, 1)))
    tile_n_backward = min(tile_n, 2**16 // tile_m)
    # the rows' widths were read from what the masks capture
    is_reusable = problem.sequences is None and not any(p.tensors for p in problem.predicates)
    return Plan("torch", tile_m, tile_n, tile_n_backward, pairs, dtype, whole_spans, splits, why=tuple(why), is_reusable=is_reusable)


def _whole_spans(problem: Problem, dtype: torch.dtype, width: int) -> bool:
    """Whether a row tile's scores are kept whole, for torch's fused softmax, instead of being streamed with a running maximum.

    In 16 bits that takes the scores in the products' dtype, which is what the plain formula does too: 2.6 times as fast as torch's SDPA in
    bfloat16 on a CPU with bfloat16 instructions, against 1.8 for streaming. In float32 streaming wins, for narrow windows too.
    """
    if problem.sequences is not None and problem.sequences.is_cache:
        return False  # a choice by the widths of the batch would let one entry change another's last bits
    if problem.seqlen_q <= _FEW_ROWS:
        return False  # laying keys side by side costs D / rows of the products
    plain = problem.score is None and problem.sink is None and not (problem.wants_lse or problem.wants_max)
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
    """Keys that a row sees on average, by row ranges; infinite where there are none."""
    if limit is None or limit[0].numel() == 0:
        return math.inf
    lo, hi = limit
    return float((hi - lo).sum(0, dtype=torch.float32).mean())
