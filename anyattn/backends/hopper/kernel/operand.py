"""The first operand of a product in registers, read from a tile in shared memory."""

from typing import Any

import cutlass.cute as cute
from cutlass.cute.nvgpu import warp

__all__ = ["to_registers"]


def to_registers(mma: Any, target: Any, tile: Any, thread: Any, dtype: Any, columns: int | None = None) -> None:
    """Reads a thread's part of ``tile``, in the order of the first operand of ``mma``, a product that has it in registers. columns: the
    number of the tile's first columns that are read; None: all."""
    copy = cute.make_tiled_copy_A(cute.make_copy_atom(warp.LdMatrix8x8x16bOp(False, 4), dtype), mma)
    mine = copy.get_slice(thread)
    source, to = mine.partition_S(tile), mine.retile(target)
    if columns is None:
        cute.copy(copy, source, to)
    else:
        for i in range(columns // 16):  # of an instruction
            cute.copy(copy, source[None, None, i], to[None, None, i])
