"""Plan of the Triton backend: the problems that it can compute, the reasons against others, and the plan itself."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from anyattn.backends.triton import deterministic_sum, tile_config
from anyattn.backends.triton.codegen import row_families
from anyattn.backends.triton.codegen.assumptions import shape_of
from anyattn.backends.triton.codegen.programs import masks_of
from anyattn.backends.triton.documents import form_of_documents
from anyattn.backends.triton.launch_shape import MOST_BLOCKS, EvenShares, forward_shape, layout_of, listed_tile, tiles_in_order
from anyattn.hardware import Hardware
from anyattn.mods.tracing.cute_mod import has_native
from anyattn.plan import BY_DOCUMENT, Backward, Plan
from anyattn.problem import Problem

__all__ = ["TritonPlan", "plan_of", "reason_against", "reason_against_backward", "why_deterministic"]

_WIDEST, _WIDEST_V = 576, 512  # head dimensions of q and k, and of v
_MANY = 4096  # rows


def reason_against(problem: Problem) -> str | None:
    """None if the kernels can run ``problem``, else the reason against it, for people."""
    q, v = problem.q, problem.v
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it multiplies float32, bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if q.shape[3] > _WIDEST or v.shape[3] > _WIDEST_V:
        return f"head_dim is {q.shape[3]} and v's {v.shape[3]}; it has kernels up to {_WIDEST}, and up to {_WIDEST_V} for v"
    if has_native((problem.score, *problem.predicates)):
        return "a CuTe function is only for the Hopper kernel"
    if problem.k.dtype is not q.dtype and (reason := _reason_against_8_bits(problem.k)):
        return reason
    for name, t in (("q", q), ("k", problem.k), ("v", v)):
        if t.shape[3] > 1 and t.stride(3) != 1:
            return f"{name}'s last dimension has stride {t.stride(3)}; wanted 1, as {name}.contiguous() has"
    if not problem.may_have_pairs:
        shapes = f"q has shape {tuple(q.shape)} and k {tuple(problem.k.shape)}"
        return f"{shapes}, and no entry has both queries and keys, so there is nothing to multiply"
    # with more entries than a grid axis, lists can only be given: making them covers all entries in one launch
    is_listed = problem.batch > MOST_BLOCKS and problem.sequences is None and bool(masks_of(problem).listed)
    for what, count in (("batch entries with tiles to list", problem.batch if is_listed else 1), ("query heads", problem.heads_q)):
        if count > MOST_BLOCKS:
            return f"there are {count} {what}; a launch has room for {MOST_BLOCKS}: call it on parts of them"
    shape, capability = shape_of(problem), tile_config.capability_of(q.device)
    if problem.is_batch_invariant:
        return _reason_against_order(problem, capability)
    # tiles for few rows are not larger
    return tile_config.reason_against("forward", tile_config.forward_tiles(shape, capability, _MANY, False), shape, capability)


def _reason_against_order(problem: Problem, capability: tuple[int, int] | None) -> str | None:
    """The reason against visiting a call's tiles in the order of the keys, at multiples of one number of them."""
    shape, keys = forward_shape(problem), listed_tile(problem)[1]
    tiles = tiles_in_order(shape, capability)
    if keys and problem.sequences is not None:
        return "lists of a varlen batch are not in the order of the keys: pass the mask as mask_mod alone"
    if keys % tiles.tile_n and keys < problem.k.shape[2]:
        return f"its tiles have {tiles.tile_n} keys, and the block lists' have {keys}: make them with blocks of a multiple, such as 128"
    return tile_config.reason_against("forward", tiles, shape, capability)


def _reason_against_8_bits(k: torch.Tensor) -> str | None:
    capability = tile_config.capability_of(k.device)
    if torch.version.hip is not None:
        return "its kernels for 8-bit keys and values are not for AMD's GPUs"
    if k.dtype is torch.float8_e4m3fn and capability is not None and capability < (8, 9):
        return f"it reads float8_e4m3fn from compute capability 8.9 on, and this is {'.'.join(map(str, capability))}"
    return None


def reason_against_backward(problem: Problem) -> str | None:
    """``reason_against`` for the gradients of a problem whose forward pass may be any backend's."""
    if (reason := deterministic_sum.reason_against(problem) or row_families.reason_against(problem)) is not None:
        return reason
    shape, capability = shape_of(problem), tile_config.capability_of(problem.q.device)
    tiles = tile_config.backward_tiles(shape, capability)
    reasons = (tile_config.reason_against(name, t, shape, capability) for name, t in tiles.items())
    return reason_against(problem) or next((r for r in reasons if r is not None), None)


@dataclass(frozen=True, kw_only=True)
class TritonPlan(Plan):
    """has_asked_tiles: kernel_options set the tiles, for both passes. num_warps, num_stages: of the forward kernel's programs. shares: see
    ``Layout``. section: the same."""

    backend: str = "triton"
    has_asked_tiles: bool
    num_warps: int
    num_stages: int
    shares: EvenShares | None = None
    section: int = 0

    @property
    def divides_keys(self) -> bool:
        """Whether several programs may visit the keys of a row tile."""
        return self.num_splits > 1 or self.shares is not None


def plan_of(problem: Problem, hardware: Hardware, reason: str, options: dict[str, int], backward: Backward) -> TritonPlan:
    """The plan; reads no tensor. options: ``validate.flex.kernel_options``. reason: for choosing Triton, for people."""
    tiles, packed, splits, shares, reasons, section = layout_of(problem, hardware, options)
    why = [f"triton: {reason}", *reasons]
    if form_of_documents(problem, splits > 1 or shares is not None) is not None:
        why.append(BY_DOCUMENT)
    is_tuned = bool(options.get("autotune"))
    if is_tuned:
        why.append("autotune: the first call of a kind measures a handful of tiles; its winner is used instead of these")
    return TritonPlan(
        tile_m=tiles.tile_m, tile_n=tiles.tile_n, num_splits=splits, backward=backward.backend,
        why=(*why, *backward.why), has_asked_tiles="tile_m" in options or "tile_n" in options, heads_per_tile=packed, is_tuned=is_tuned,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages, shares=shares, section=section,
    )  # fmt: skip


def why_deterministic(problem: Problem) -> tuple[str, ...]:
    """How gradients are made deterministic, for people; empty if nothing is needed."""
    line = deterministic_sum.describe(problem) if problem.deterministic else None
    return () if line is None else (line,)
