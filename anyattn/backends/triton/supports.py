"""Which problems this backend computes, and why not the others."""

from __future__ import annotations

from types import NoneType

import torch

from anyattn.backends.triton import config, exact, families
from anyattn.backends.triton.layout import MOST_BLOCKS
from anyattn.backends.triton.programs import program_of
from anyattn.backends.triton.styles import shape_of
from anyattn.mods.native import has_native
from anyattn.problem import Problem

__all__ = ["reason_against", "reason_against_backward"]

_WIDEST = 256
_MANY = 4096  # rows


def reason_against(problem: Problem) -> str | None:
    """None if the kernels can run ``problem``, else why not, for people."""
    q, v = problem.q, problem.v
    if q.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        return f"it multiplies float32, bfloat16 and float16, not {str(q.dtype).removeprefix('torch.')}"
    if max(q.shape[3], v.shape[3]) > _WIDEST:
        return f"head_dim is {q.shape[3]} and v's {v.shape[3]}; it has kernels up to {_WIDEST}"
    if has_native((problem.score, *problem.predicates)):
        return "a CuTe function is only for the Hopper kernel"
    for name, t in (("q", q), ("k", problem.k), ("v", v)):
        if t.shape[3] > 1 and t.stride(3) != 1:
            return f"{name}'s last dimension has stride {t.stride(3)}; wanted 1, as {name}.contiguous() has"
    if not problem.may_have_pairs:
        return f"q has shape {tuple(q.shape)} and k {tuple(problem.k.shape)}, of which there is nothing to multiply"
    # (whose tiles the mask's own lists name, which are made for all entries at once)
    is_listed = problem.batch > MOST_BLOCKS and problem.sequences is None and not isinstance(program_of(problem).lists, (str, NoneType))
    for what, count in (("batch entries with tiles to list", problem.batch if is_listed else 1), ("query heads", problem.heads_q)):
        if count > MOST_BLOCKS:
            return f"there are {count} {what}; a launch has room for {MOST_BLOCKS}: call it on parts of them"
    shape, capability = shape_of(problem), config.capability_of(q.device)
    # of few rows the tiles are no larger
    return config.reason_against("forward", config.forward_tiles(shape, capability, _MANY, False), shape, capability)


def reason_against_backward(problem: Problem) -> str | None:
    """The same of the gradients of a problem whose forward pass may be any backend's."""
    if (reason := exact.reason_against(problem) or families.reason_against(problem)) is not None:
        return reason
    shape, capability = shape_of(problem), config.capability_of(problem.q.device)
    tiles = config.backward_tiles(shape, capability)
    found = (config.reason_against(name, t, shape, capability) for name, t in tiles.items())
    return reason_against(problem) or next((r for r in found if r is not None), None)
