"""Layouts in shared memory of one tile of K and of V for wide heads; prints "K's, transposed and cut to V's columns | V's" for each size.

Runs in a separate process: the architecture is an environment variable that CuTe DSL reads once.
"""

from __future__ import annotations

import cutlass.cute as cute
import cutlass.utils.hopper_helpers as helpers
from cutlass import BFloat16
from cutlass.tensor_utils import LayoutEnum


@cute.jit
def show() -> None:
    for head_dim, tile_n in ((576, 64), (512, 64), (576, 48), (576, 32), (512, 32)):
        k = helpers.make_smem_layout_b(LayoutEnum.ROW_MAJOR, (64, tile_n, head_dim), BFloat16, 1)
        v = helpers.make_smem_layout_b(LayoutEnum.COL_MAJOR, (64, 512, tile_n), BFloat16, 1)
        (keys, (inner, _), _), (to_key, to_column, _) = k.outer.shape, k.outer.stride
        turned = cute.make_layout(((inner, 512 // inner), keys), stride=(to_column, to_key))
        print(f"{k.inner} {turned} | {v.inner} {cute.slice_(v.outer, (None, None, 0))}")


if __name__ == "__main__":
    show()
