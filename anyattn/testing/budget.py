"""Error budget: the rule by which all results are judged, row by row against float64, in units of the plain formula's error.

For every row (last dimension: a query row of out and dq, a key row of dk and dv; of LSE, all queries of a head)

    rms(got - fp64) <= 2 rms(same_dtype - fp64) + eps/2 rms(fp64 row) [+ 4 rms(row_sigma)]

and overall

    max|got - fp64| <= 2 max|same_dtype - fp64| + eps max|fp64| [+ 4 max sigma]

all finite, -inf exactly where fp64 has it. eps is that of ``same_dtype``'s dtype. ``same_dtype`` is one sample of the rounding errors; the
bracket adds the noise that one sample misses in rows with few errors (``anyattn.testing.rounding``), and is 0 unless ``noise`` is passed.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from anyattn.testing.rounding import Noise

__all__ = ["check", "share"]

_SHORTEST_ROW = 16  # shorter rows are judged together with their neighbours: one error is no statistic
_SIGMAS = 4.0


def check(name: str, got: Tensor, fp64: Tensor, same_dtype: Tensor, noise: Noise | Callable[[], Noise | None] | None = None) -> float:
    """Raises ``AssertionError`` naming the worst row and its share if ``got`` exceeds its budget, returns the share otherwise.

    got: the result under test. fp64: the oracle's. same_dtype: the plain formula's, in the dtype that sets eps. All of one shape.
    noise: the rounding noise, or a function that computes it, which is called only if ``got`` exceeds the budget without it: noise can
    only enlarge a budget, and costs as much as the rest of the oracle.
    """
    assert got.shape == fp64.shape == same_dtype.shape, f"{name}: shapes {tuple(got.shape)}, {tuple(fp64.shape)}, {tuple(same_dtype.shape)}"
    worst, where = _worst(got, fp64, same_dtype, None if callable(noise) else noise)
    if callable(noise) and worst > 1.0:
        worst, where = _worst(got, fp64, same_dtype, noise())
    assert worst <= 1.0, f"{name}: {where} uses {worst:.3g} of its budget ({tuple(got.shape)} {got.dtype})"
    return worst


def share(got: Tensor, fp64: Tensor, same_dtype: Tensor, noise: Noise | None = None) -> float:
    """The largest share of its budget that any row or the largest error uses; at most 1 passes, inf means not finite."""
    return _worst(got, fp64, same_dtype, noise)[0]


def _worst(got: Tensor, fp64: Tensor, same_dtype: Tensor, noise: Noise | None) -> tuple[float, str]:
    if got.numel() == 0:
        return 0.0, "nothing"
    eps = torch.finfo(same_dtype.dtype).eps
    device = fp64.device  # the device on which the oracle computed
    result, expected, plain = (t.detach().to(device, torch.float64) for t in (got, fp64, same_dtype))
    minus = None  # where lse is -inf
    if not bool(torch.isfinite(expected).all()):
        minus = expected == -math.inf
        if bool((~torch.isfinite(expected) & ~minus).any()):
            raise ValueError("the oracle's result is not finite: this case has no defined answer")
    is_minus = result == -math.inf
    differs = is_minus if minus is None else is_minus != minus
    if bool(differs.any()):
        return math.inf, f"{_place(differs)} is -inf on one side only,"
    if minus is not None:
        result, expected, plain = (torch.where(minus, 0.0, t) for t in (result, expected, plain))
    for tensor, whose in ((result, "got"), (plain, "same_dtype")):
        if not bool(torch.isfinite(tensor).all()):
            return math.inf, f"{_place(~torch.isfinite(tensor))} of {whose} is not finite,"
    error, yardstick = result - expected, plain - expected
    rows, top = zip(*(_row_rms(t) for t in (error, yardstick, expected)))
    allowed, most = 2 * rows[1] + eps / 2 * rows[2], 2 * top[1] + eps * top[2]
    if noise is not None:
        sigma, slack = (t.to(device) if minus is None else torch.where(minus, 0.0, t.to(device)) for t in noise)
        allowed, most = allowed + _row_rms(_SIGMAS * slack)[0], most + _SIGMAS * float(sigma.abs().max())
    by_row = _ratio(rows[0], allowed)
    overall = float(_ratio(torch.tensor(top[0], device="cpu"), torch.tensor(most, device="cpu")))
    if overall > float(by_row.max()):
        return overall, f"the greatest error, at {_place(error.abs() == error.abs().max())},"
    return float(by_row.max()), f"row {_row_name(by_row, expected)}"


def _as_rows(tensor: Tensor) -> Tensor:
    """(rows, elements): rows along the last dimension, merged with their neighbours while they are short."""
    start = max(0, tensor.ndim - 1)
    while start > 0 and math.prod(tensor.shape[start:]) < _SHORTEST_ROW:
        start -= 1
    return tensor.reshape(-1, max(1, math.prod(tensor.shape[start:])))


def _row_rms(tensor: Tensor) -> tuple[Tensor, float]:
    """(rms of each row, largest absolute value of all)."""
    rows = _as_rows(tensor)
    top = rows.abs().amax(-1)
    unit = torch.where(top > 0, top, 1.0)[:, None]  # scaling keeps squares of tiny numbers above 0
    return (rows / unit).square().mean(-1).sqrt() * top, float(top.max())


def _ratio(error: Tensor, budget: Tensor) -> Tensor:
    return torch.where(error == 0, 0.0, error / budget)


def _place(where: Tensor) -> str:
    return str(tuple(where.nonzero()[0].tolist()))


def _row_name(by_row: Tensor, like: Tensor) -> str:
    row = int(by_row.argmax()) * (like.numel() // by_row.numel())
    position = [int(i) for i in torch.unravel_index(torch.tensor(row, device="cpu"), like.shape)] if like.ndim else []
    return f"starting at {tuple(position)} of {by_row.numel()}"
