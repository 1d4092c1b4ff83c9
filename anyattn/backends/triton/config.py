"""Tile shapes, warps and pipeline stages, by head dimension and dtype, and whether they fit a device's shared memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch

__all__ = ["Tiles", "backward_tiles", "capability_of", "fitting", "forward_tiles", "needed", "padded", "shared_memory"]

# Bytes of shared memory that one block may have, by compute capability; the least of its generation where one is not listed.
_SHARED = {(8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10}
_LEAST_SHARED = 48 << 10


@dataclass(frozen=True)
class Tiles:
    """tile_m: query rows of a program; tile_n: keys of a step; num_warps, num_stages: Triton's. Powers of two but for the stages.

    Raises ``ValueError`` for tiles that are no powers of two from 16 on.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                raise ValueError(f"{name}={size}; this backend's tiles are powers of two from 16 on")


def padded(head_dim: int) -> int:
    """The width of a tile that holds ``head_dim``: a power of two, 16 at the least."""
    return max(16, 1 << (head_dim - 1).bit_length())


@lru_cache(maxsize=16)
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None of any other."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def shared_memory(capability: tuple[int, int] | None) -> int:
    """Bytes of shared memory that one block can have; of an unknown device as much as any has."""
    return _SHARED.get(capability, _SHARED.get((capability[0], 0), _LEAST_SHARED)) if capability else _SHARED[9, 0]


def needed(tiles: Tiles, d: int, dv: int, itemsize: int) -> int:
    """Bytes that the forward kernel's tiles take: the queries, and the keys and values of every stage."""
    return itemsize * (tiles.tile_m * d + tiles.num_stages * tiles.tile_n * (d + dv))


def fitting(tiles: Tiles, d: int, dv: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> Tiles:
    """``tiles`` with fewer stages, then fewer keys, then fewer rows, until they fit the device."""
    room = shared_memory(capability)
    while needed(tiles, d, dv, dtype.itemsize) > room:
        if tiles.num_stages > 1:
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif tiles.tile_n > 16:
            tiles = replace(tiles, tile_n=tiles.tile_n // 2)
        elif tiles.tile_m > 16:
            tiles = replace(tiles, tile_m=tiles.tile_m // 2)
        else:
            break
    return tiles


def forward_tiles(d: int, dv: int, dtype: torch.dtype, capability: tuple[int, int] | None, rows: int) -> Tiles:
    """The tiles of a forward pass over ``rows`` query rows (heads packed among them), for padded head dimensions."""
    widest = max(d, dv)
    if dtype.itemsize == 4:  # IEEE products of float32 are not the tensor cores'
        tiles = Tiles(64, 32, 4, 2) if widest <= 128 else Tiles(32, 32, 4, 1)
    elif capability is not None and capability[0] >= 9:
        tiles = Tiles(128, 128, 8, 3) if widest <= 64 else Tiles(128, 64, 8, 3) if widest <= 128 else Tiles(128, 64, 8, 2)
    else:
        tiles = Tiles(128, 64, 4, 3) if widest <= 64 else Tiles(128, 32, 4, 3) if widest <= 128 else Tiles(64, 32, 4, 2)
    if rows <= 64:
        few = max(16, padded(rows))
        tiles = replace(tiles, tile_m=min(tiles.tile_m, few), num_warps=4)
    return fitting(tiles, d, dv, dtype, capability)


def backward_tiles(d: int, dv: int, dtype: torch.dtype, capability: tuple[int, int] | None) -> dict[str, Tiles]:
    """The tiles of the kernels "dq" and "dkdv", for padded head dimensions."""
    widest = max(d, dv)
    if dtype.itemsize == 4:
        tiles = Tiles(32, 32, 4, 1)
    elif widest <= 64:
        tiles = Tiles(64, 128, 8, 2)
    elif widest <= 128:
        tiles = Tiles(64, 64, 4, 2)
    else:
        tiles = Tiles(32, 64, 8, 1)
    by_row = replace(tiles, tile_m=tiles.tile_n, tile_n=tiles.tile_m)
    return {"dq": fitting(by_row, d, dv, dtype, capability), "dkdv": fitting(tiles, d, dv, dtype, capability)}
