"""Producer role of the kernel in the order of keys: key tiles go from the first to the last."""

from typing import Any

import cutlass.cute as cute
from cutlass import Int32

from anyattn.backends.hopper.kernel.producer import Loads

__all__ = ["LoadsInOrder"]


class LoadsInOrder(Loads):
    """The loading role of ``HopperInOrderForward``."""

    def planned(self, plan: Any, visits: Any, masked: Any, bare: Any) -> Any:
        return plan - (visits - 1)  # the row tile's first key tile

    @cute.jit
    def _visit(self, i, plan):
        return plan + i, Int32(1)
