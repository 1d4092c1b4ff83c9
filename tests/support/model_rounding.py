"""Models in float64 as an oracle, and the rounding noise of their float32 results by Monte Carlo arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn.testing.rounding import DRAWS, Noise, Rounded
from tests.support.inside import InsideMode

_aten = torch.ops.aten
# results that hold elements of the operands, or their negatives: nothing is rounded
_EXACT = {
    _aten._to_copy, _aten._unsafe_view, _aten.abs, _aten.cat, _aten.clamp, _aten.clone, _aten.embedding, _aten.gather, _aten.index,
    _aten.index_select, _aten.masked_fill, _aten.neg, _aten.relu, _aten.scatter, _aten.select_backward, _aten.slice_backward,
    _aten.stack, _aten.threshold_backward, _aten.topk, _aten.where,
}  # fmt: skip


_PRODUCTS = {_aten.addmm.default, _aten.baddbmm.default, _aten.bmm.default, _aten.mm.default}  # they take one dtype


class KeepsFloat64(InsideMode):
    """Leaves float64 what a model casts from float64 to float32, as for its norms and softmax: such casts make float64 no oracle.

    What it casts from other dtypes to float32, as positions, is widened where a product multiplies it by float64.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False, so that torch does not import Dynamo to protect ``__torch_dispatch__`` from it, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is _aten._to_copy.default and args[0].dtype is torch.float64 and kwargs.get("dtype") is torch.float32:
            kwargs["dtype"] = torch.float64
        if func in _PRODUCTS and any(x.dtype is torch.float64 for x in args):
            args = tuple(x.double() for x in args)
        return func(*args, **kwargs)


class _RoundedModel(Rounded):
    """One rounding of every float64 result that is computed, those of matrix products and reductions included; data are left alone."""

    def rounds(self, func: Any, found: Tensor) -> bool:
        return found.dtype is torch.float64 and not func.is_view and func.overloadpacket not in _EXACT


def sampled(run: Callable[[], dict[str, Tensor]], exact: dict[str, Tensor]) -> dict[str, Noise]:
    """The rounding noise of float32 results, each judged as one row, from perturbed runs in float64.

    run: a computation in float64. exact: its results without perturbations.

    The sampled standard deviation is 1.0 to 1.4 times the rms error of float32 evaluations that sum in other orders, for longer sums 0.7 to
    1.8 times (``tests/integrations/transformers/test_judge.py`` compares them): the unit eps/2 is the largest error of one rounding, which
    makes up for the roundings within a product that are not counted.
    """
    random, unit = torch.Generator().manual_seed(0), torch.finfo(torch.float32).eps / 2
    squares: dict[str, list[Tensor]] = {name: [] for name in exact}
    for _ in range(DRAWS):
        with _RoundedModel(unit, random):
            drawn = run()
        for name, right in exact.items():
            squares[name].append((drawn[name] - right).square())
    return {name: _noise(torch.stack(parts)) for name, parts in squares.items()}


def _noise(squares: Tensor) -> Noise:
    """squares: (draws, elements), of errors. A mean square of dof equal independent errors has a variance of 2 / dof times its square."""
    sigma, row = squares.mean(0).sqrt(), squares.mean(1)
    dof = (2 * row.mean().square() / row.var().clamp_min(1e-300)).clamp_min(1.0)
    return Noise(sigma[None], (row.mean() / dof).sqrt().expand_as(sigma)[None])
