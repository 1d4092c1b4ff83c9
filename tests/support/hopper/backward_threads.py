"""Single threads of the Hopper backward kernels on the CPU: the rows that a warp group clears, and the row tile of a row kernel's block."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.hopper.backward_roles import MODULES, compiled

__all__ = ["rows_kernel", "wiped_by_a_group"]


def _names(cute: Any, *modules: str) -> dict[str, Any]:
    """What the text of these modules defines."""
    cutlass = SimpleNamespace(range=lambda *n, **_: range(*n), Constexpr=None)
    names: dict[str, Any] = {"cute": cute, "cutlass": cutlass, "const_expr": bool, "Int32": int, "BFloat16": None, "Float16": None}
    for module in modules:
        exec(compiled()[0][MODULES.index(module)], names)
    return names


def wiped_by_a_group(rows: int, head_dim: int, room: int) -> list[tuple[int, int]]:
    """(row, column) of each number that the 128 threads of a warp group wipe in a tile of which ``room`` rows exist."""
    found: list[tuple[int, int]] = []

    def tile_of(_: Any, shape: tuple[int, int], at: tuple[int, int]) -> dict[tuple, None]:
        found.extend((at[0] * shape[0] + i, at[1] * shape[1] + j) for i in range(shape[0]) for j in range(shape[1]))
        return {(0, None): None}

    cute = SimpleNamespace(
        local_tile=tile_of, autovec_copy=lambda *_: None, make_rmem_tensor=lambda *_: SimpleNamespace(fill=lambda _: None)
    )
    kernel = _names(cute, "backward/packed")["Packed"]()
    kernel.dtype = "dtype"
    for thread in range(128, 256):
        kernel._wiped("tile", room, rows, head_dim, thread)
    return found


def rows_kernel(tile_m: int) -> tuple[Any, Any]:
    """A row kernel for tiles of so many rows, and ``first_tile``."""
    names = _names(None, "backward/packed", "backward/rows")
    about = SimpleNamespace(head_dim=64, head_dim_v=64, is_bf16=True, tile_m=tile_m)
    return names["RowsAfter"](about), names["first_tile"]
