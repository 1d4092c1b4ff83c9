"""Factors of the output's rows, which one warp group of a wide head's kernel computes and both apply."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from anyattn.backends.hopper.codegen.emit import select
from anyattn.backends.hopper.kernel.fragment import rows_and_columns

__all__ = ["Factors"]


class Factors:
    """The part of ``HopperWideForward`` that keeps both halves of the output in relation to one row maximum."""

    config: Any

    def factors_of(self, row_scale: Any, rescales: Any) -> Any:
        """What the earlier output's rows are multiplied by. rescales: whether they are, by ``row_scale``; None for a first tile."""
        factors = cute.make_rmem_tensor(cute.size(row_scale), Float32)
        factors.fill(1.0)
        if rescales is not None and not self.config.is_bounded:
            for r in range(cute.size(row_scale)):
                factors[r] = select(rescales, row_scale[r], Float32(1.0), "float")
        return factors

    def rescales(self, factors: Any) -> Any:
        """Whether some factor of the thread's rows is not 1."""
        found = factors[0] != 1.0
        for r in range(1, cute.size(factors)):
            found = found | (factors[r] != 1.0)
        return found

    def rescaled(self, acc: Any, factors: Any) -> None:
        """Multiplies the rows of ``acc``."""
        out = rows_and_columns(acc)
        for r in range(cute.size(factors)):
            out[r, None].store(out[r, None].load() * factors[r])
