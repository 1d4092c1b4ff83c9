"""Producer role of a kernel that skips: bare tiles go from the first to the last, so that what draws most weight is seen early."""

from typing import Any, NamedTuple

import cutlass.cute as cute

from anyattn.backends.hopper.kernel.producer import Loads

__all__ = ["LoadsSkipping"]


class _Turned(NamedTuple):
    """plan: of ``Loads``. Visits ``first`` to ``last`` are traversed the other way round."""

    plan: Any
    first: Any
    last: Any


class LoadsSkipping(Loads):
    """The loading role of ``HopperSkippingForward``: a row tile's last key tile, other masked tiles at its right end, then bare ones."""

    def planned(self, plan: Any, masked: Any, bare: Any) -> Any:
        return _Turned(plan, masked + 1, masked + bare)

    @cute.jit
    def _visit(self, i, turned):
        at = i
        if (i >= turned.first) & (i <= turned.last):
            at = turned.first + turned.last - i
        return Loads._visit(self, at, turned.plan)
