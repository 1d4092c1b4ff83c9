"""``HopperHalvedBackward``: the backward kernel for wide heads whose dK and dV leave room for S and half of dP in registers."""

from typing import Any

import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode

from anyattn.backends.hopper.kernel.backward.backward import HopperBackward
from anyattn.backends.hopper.kernel.backward.halved_mma import MultipliesHalves

__all__ = ["HopperHalvedBackward"]


class HopperHalvedBackward(MultipliesHalves, HopperBackward):
    """Attention backward for one ``BackwardConfig`` whose tiles have two ``dp_steps``."""

    def _products(self) -> tuple[Any, ...]:
        """As in ``HopperBackward``, but dS^T is an operand of dK from shared memory."""
        to_scores, to_v, _, to_q = HopperBackward._products(self)
        along, across = OperandMajorMode.K, OperandMajorMode.MN
        to_k = self._by_keys(along, across, self.config.head_dim)
        return to_scores, to_v, to_k, to_q

    def half_of_dp(self) -> Any:
        """The tiled MMA of dP^T for half a tile's rows."""
        return self._by_keys(OperandMajorMode.K, OperandMajorMode.K, self.config.tiles.tile_m // 2)

    def _by_keys(self, first: Any, second: Any, columns: int) -> Any:
        """A tiled MMA whose operands are in shared memory and whose rows are keys, 64 of each warp group."""
        shape = (64, columns)
        return helpers.make_trivial_tiled_mma(self.dtype, self.dtype, first, second, Float32, (self.config.tiles.warp_groups, 1, 1), shape)
