"""Widths of tiles by head dimension, and tiles for those above 256: tables as those of ``tile_config``, which fits them to a device.

An accumulator of 64 rows and 512 columns takes half of a multiprocessor's registers, and 32 keys with their values take 64 KiB. So dk and
dv are computed by launches of their own, and columns beyond 512 are a block of their own: 576 columns are 512 and 64, not 1024. Where
values are the first columns of keys, a tile is loaded once, and twice as many keys fit. The tables were chosen by the compiler's output:
the largest tiles that spill no registers inside a loop, or next to none.

Hopper has tiles of 64 rows, for dk and dv 64 keys, where they fit: the fewest of a warp group's product. Reading operands from shared
memory takes most of the time of these products: those of dq read 0.7 MiB there for 1,024 pairs of D 512 in a tile of 32 x 32, whose
products are single warps', and 0.3 MiB in one of 64 x 16.
"""

from __future__ import annotations

from anyattn.arithmetic import next_power_of_2

__all__ = ["FEW_ROWS", "Numbers", "alike", "blocks_of", "is_divided", "is_wide", "keys_of_dv", "padded", "tiles_of", "tiles_of_few"]

_WIDE = 256
FEW_ROWS, _ROWS = 16, 64  # of a tile; products of keys with more rows than the first take as long as reading them
_WIDEST_BLOCK = 512  # columns: the next power of two would be mostly padding
_SWIZZLED = 64  # columns of 16 bits
_HOPPER = "sm_90"  # of ``tile_config.architecture``
Numbers = tuple[int, int, int, int]  # tile_m, tile_n, num_warps, num_stages

# by pass: keys and values apart, values in keys
_TILES: dict[str, tuple[Numbers, Numbers]] = {
    "forward": ((64, 32, 8, 2), (64, 32, 8, 3)),
    "dq": ((32, 32, 8, 2), (32, 32, 8, 2)),
    "dkdv": ((32, 32, 8, 2), (16, 64, 8, 2)),
}
_TILES_OF_HOPPER: dict[str, tuple[Numbers, Numbers]] = {
    "forward": ((_ROWS, 64, 8, 1), (_ROWS, 64, 8, 2)),
    "dq": ((_ROWS, 16, 8, 2), (_ROWS, 32, 8, 2)),
    "dkdv": ((32, 32, 8, 2), (32, _ROWS, 8, 2)),
}
_FLOATS: dict[str, Numbers] = {"forward": (16, 16, 8, 2), "dq": (16, 16, 8, 2), "dkdv": (16, 16, 8, 2)}
# Hopper's forward pass over few rows: of at most ``FEW_ROWS``, and of more
_FEW: tuple[tuple[Numbers, Numbers], tuple[Numbers, Numbers]] = (
    ((16, 32, 8, 3), (16, 32, 8, 4)),
    ((_ROWS, 32, 8, 2), (_ROWS, 64, 8, 2)),
)


def padded(head_dim: int) -> int:
    """The width of a tile for ``head_dim``: that of its ``blocks_of`` together."""
    return sum(blocks_of(head_dim))


def blocks_of(head_dim: int) -> tuple[int, int]:
    """The widths of the blocks of a tile for ``head_dim``, powers of two from 16 on: of the columns, and of those beyond ``_WIDEST_BLOCK``;
    0 if there are none."""
    block = max(16, next_power_of_2(min(head_dim, _WIDEST_BLOCK)))
    return block, max(16, next_power_of_2(head_dim - block)) if head_dim > block else 0


def alike(d: int, dv: int) -> tuple[int, int]:
    """The widths of tiles of keys and values, padded ``d`` and ``dv``, that Hopper's products read from one place in shared memory in turn:
    none below ``_SWIZZLED`` if the other is above.

    Up to 128 bytes the width of a row decides on its swizzle, and ptxas 12.8 loses the address of the values where two swizzles begin at
    one place that is known before the loop: it adds to a register that nothing wrote. With keys of 33 to 64 dimensions and values of 16
    or 32, in rows that are no multiples of 16 bytes, outputs were wrong on an H200, or memory beyond the tensors was read.
    """
    least = min(_SWIZZLED, max(d, dv))
    return max(d, least), max(dv, least)


def is_wide(d: int, dv: int) -> bool:
    """Whether heads of these padded dimensions have tiles of this module."""
    return max(d, dv) > _WIDE


def is_divided(name: str, has_one_kv: bool, d: int, dv: int, arch: str, rows: int, num_warps: int) -> bool:
    """Whether a pass's first products divide their columns among warp groups (``kernels.dropout.first_product``). rows: of a tile; for dk
    and dv keys. d, dv: padded. Not in a forward pass with values apart: there ptxas makes each product wait for the one before (C7515)."""
    may_be = is_wide(d, dv) and arch == _HOPPER and (name != "forward" or has_one_kv)
    return may_be and (rows, num_warps) == (_ROWS, 8)


def tiles_of(name: str, has_one_kv: bool, itemsize: int, arch: str) -> Numbers:
    """The tiles of a pass ("forward", "dq", "dkdv"). has_one_kv: values are the first columns of keys. arch: ``architecture``."""
    if itemsize != 2:
        return _FLOATS[name]
    return (_TILES_OF_HOPPER if arch == _HOPPER else _TILES)[name][has_one_kv]


def keys_of_dv(tile_n: int, arch: str) -> int:
    """Keys of a tile of dv's own launch, beside ``tile_n`` of dk's: it loads no values, and Hopper has room for twice as many keys."""
    return _ROWS if arch == _HOPPER and 2 * tile_n == _ROWS else tile_n


def tiles_of_few(rows: int, has_one_kv: bool) -> Numbers:
    """The tiles of a forward pass of 16 bits over ``rows`` query rows, heads that share a tile included."""
    return _FEW[rows > FEW_ROWS][has_one_kv]
