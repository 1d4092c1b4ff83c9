"""``HopperWideBackward``: the backward kernel for heads so wide, or with such mods, that no warp group can hold dK and dV of 64 keys."""

from typing import Any

import cutlass.utils.hopper_helpers as helpers
from cutlass import Float32
from cutlass.cute.nvgpu import OperandMajorMode, warpgroup

from anyattn.backends.hopper.kernel.backward.backward import HopperBackward
from anyattn.backends.hopper.kernel.backward.wide_mma import MultipliesWide

__all__ = ["HopperWideBackward"]


class HopperWideBackward(MultipliesWide, HopperBackward):
    """Attention backward for one ``BackwardConfig`` whose tiles have ``shares_keys``."""

    def scores_from_registers(self) -> Any:
        """The tiled MMA of S^T and dP^T for the columns of K and V that are held in registers; warp groups divide the rows of the tile."""
        along, groups, rows = OperandMajorMode.K, self.config.tiles.warp_groups, self.config.tiles.tile_m
        shape, source = (64, rows // groups), warpgroup.OperandSource.RMEM
        return helpers.make_trivial_tiled_mma(self.dtype, self.dtype, along, along, Float32, (1, groups, 1), shape, source)

    def _products(self) -> tuple[Any, ...]:
        """As in ``HopperBackward``, but P^T and dS^T are operands from shared memory, and warp groups divide all products by columns."""
        tiles, d, dv, dtype = self.config.tiles, self.config.head_dim, self.config.head_dim_v, self.dtype
        along, across, groups = OperandMajorMode.K, OperandMajorMode.MN, tiles.warp_groups
        divided = (
            (along, along, tiles.tile_m),
            (along, across, dv),
            (along, across, d),
            (across, across, d),
        )
        return tuple(
            helpers.make_trivial_tiled_mma(dtype, dtype, first, second, Float32, (1, groups, 1), (64, columns // groups))
            for first, second, columns in divided
        )
