"""Deterministic sums of float32 terms that threads add atomically in any order: exact sums in integer accumulators.

A float32 is an integer of 24 bits times a power of two. Each of an entry's *planes* is an int64 that sums the terms of ``width``
neighbouring powers of two, shifted to the least of them. A term is one addition to one plane, and no term is rounded, however large the
others are. An int64 needs spare bits for carries, as many as the number of terms has; this determines how many powers of two a plane
covers. Three more planes count the terms that are +inf, -inf and NaN. (An accumulator for all exponents is Kulisch's idea; binning
exponents and adding the bins in hardware is that of Demmel and Hida, SIAM J. Sci. Comput. 25(4), 2004.)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from anyattn.backends.triton.codegen.programs import slots_alone
from anyattn.mods.ir.expr import Expr
from anyattn.mods.ir.grad import score_gradients
from anyattn.problem import Problem
from anyattn.triton_tools.launch import run_plain

__all__ = ["additions_of", "describe", "is_exact", "planes_for", "read", "reason_against", "zeros"]

_POWERS = 254  # number of powers of two in float32
_OTHERS = 3
_MOST_ADDITIONS = 2**38
_LEAST_ROOM = 4 << 30  # bytes
_SHARE = 8  # of the device's memory, if that is more
_BLOCK = 256


def planes_for(additions: int) -> int:
    """The number of planes for an entry with at most ``additions`` terms.

    >>> planes_for(1), planes_for(2**26)
    (10, 23)
    """
    assert 0 < additions <= _MOST_ADDITIONS
    width = 63 - 24 - (additions - 1).bit_length()
    return math.ceil(_POWERS / width) + _OTHERS


def zeros(shape: Sequence[int], additions: int, device: torch.device) -> Tensor:
    """Zero sums: int64, of ``shape`` and a last dimension of planes; each plane is contiguous."""
    return torch.zeros((planes_for(additions), *shape), dtype=torch.int64, device=device).movedim(0, -1)


def is_exact(total: Tensor) -> bool:
    """Whether the ``total`` of a tensor's gradient is a deterministic sum rather than a float tensor."""
    return total.dtype is torch.int64


def read(sums: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of the terms, rounded once; with non-finite terms the result of float additions."""
    from anyattn.backends.triton.kernels.deterministic_sum import read_sums

    totals = torch.empty(sums.shape[:-1], dtype=torch.float64 if dtype is torch.float64 else torch.float32, device=sums.device)
    count = totals.numel()
    if count:
        arguments = (sums.movedim(-1, 0), totals, count, sums.shape[-1])
        run_plain(read_sums, math.ceil(count / _BLOCK), arguments, (), sums.device, {"BLOCK": _BLOCK, "num_warps": 4, "num_stages": 1})
    return totals.to(dtype)


def additions_of(problem: Problem, wanted: Sequence[int]) -> dict[int, int]:
    """The ``wanted`` slots whose gradients are summed this way, with the greatest number of terms of an entry: those with entries of
    several terms, if the call is deterministic."""
    score = problem.score
    if not problem.deterministic or score is None or not wanted:
        return {}
    alone = slots_alone(problem, tuple(wanted))
    additions = {slot: _additions(problem, slot) for slot in wanted if slot not in alone}
    return {slot: n for slot, n in additions.items() if n > 1}


def _additions(problem: Problem, slot: int) -> int:
    """An upper bound on the terms of an entry of a captured tensor's gradient: for each load the pairs that
    its indices do not distinguish."""
    assert problem.score is not None
    extents = [("b", problem.batch), ("h", problem.heads_q)]
    if problem.sequences is None:
        extents += [("q_idx", problem.q.shape[2]), ("kv_idx", problem.k.shape[2])]
    pairs = problem.batch * problem.heads_q * problem.bound_q * problem.bound_k
    return _terms(problem.score.expr, slot, tuple(problem.score.tensors[slot].shape), tuple(extents), pairs)


@lru_cache(maxsize=1024)
def _terms(expr: Expr, slot: int, sizes: tuple[int, ...], extents: tuple[tuple[str, int], ...], pairs: int) -> int:
    gradients, total = score_gradients(expr), 0
    for load in gradients.loads:
        if load.slot == slot:
            nodes = [gradients.expr.nodes[gradients.expr.outputs[i]] for i in load.indices]
            named = {str(n.attr): size for n, size in zip(nodes, sizes, strict=True) if n.op == "index"}
            total += pairs // math.prod(n for name, n in extents if named.get(name, 0) >= n)
    return max(total, 1)


def _additions_of_all(problem: Problem) -> dict[int, int]:
    score = problem.score
    return additions_of(problem, [i for i, t in enumerate(score.tensors) if t.requires_grad]) if score is not None else {}


def _bytes(problem: Problem, additions: dict[int, int]) -> int:
    tensors = problem.score.tensors if problem.score is not None else ()
    return sum(8 * planes_for(n) * tensors[slot].numel() for slot, n in additions.items())


def reason_against(problem: Problem) -> str | None:
    """None if there is memory for the sums of a call, else the reason against it."""
    additions = _additions_of_all(problem)
    if max(additions.values(), default=0) > _MOST_ADDITIONS:
        return f"with deterministic=True it adds up no more than 2^{_MOST_ADDITIONS.bit_length() - 1} terms of a captured tensor's gradient"
    if (need := _bytes(problem, additions)) > (room := _room(problem.q.device)):
        return f"with deterministic=True its sums for captured tensors' gradients take {need / 2**30:.1f} GiB, more than {room / 2**30:.1f}"
    return None


@lru_cache(maxsize=64)
def _room(device: torch.device) -> int:
    """The bytes that the sums of a call may take."""
    if device.type != "cuda":
        return _LEAST_ROOM
    return max(_LEAST_ROOM, torch.cuda.get_device_properties(device).total_memory // _SHARE)


def describe(problem: Problem) -> str | None:
    """For ``explain``: how the gradients of captured tensors are made deterministic; None if nothing is needed."""
    if not (need := _bytes(problem, _additions_of_all(problem))):
        return None
    return f"deterministic: gradients of captured tensors are added up as whole numbers, in {math.ceil(need / 2**20)} MiB"
