"""Producer role of a kernel that skips: bare tiles go from the first to the last, so that what draws most weight is seen early."""

from typing import Any, NamedTuple

import cutlass.cute as cute

from anyattn.backends.hopper.kernel.producer import Loads

__all__ = ["LoadsSkipping"]


class _Reversed(NamedTuple):
    """plan: of ``Loads``. Visits ``first`` to ``last`` are made in the reverse order."""

    plan: Any
    first: Any
    last: Any


class LoadsSkipping(Loads):
    """The loading role of ``HopperSkippingForward``: a row tile's last key tile, other masked tiles at its right end, then bare ones."""

    def planned(self, plan: Any, visits: Any, masked: Any, bare: Any) -> Any:
        return _Reversed(plan, masked + 1, masked + bare)

    @cute.jit
    def _visit(self, i, part):
        at = i
        if (i >= part.first) & (i <= part.last):
            at = part.first + part.last - i
        return Loads._visit(self, at, part.plan)
