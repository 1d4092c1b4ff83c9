"""Masks that are, wholly or in part, words of bits along a tile, and some that are not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyattn import masks

__all__ = ["DIVISORS", "MASKS", "WHOLE", "WIDTHS"]

LENGTHS, TABLE, VALID = (
    torch.tensor([70, 130]),
    torch.rand(8, 8, generator=torch.Generator().manual_seed(0)) < 0.5,
    torch.arange(999) % 3 > 0,
)


def _image(width: int, reach: int) -> Callable[..., Any]:
    """Of captured numbers, which are known when the kernel runs."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q // width - k // width).abs() <= reach) & ((q % width - k % width).abs() <= reach)

    return mask


def _video(rows: int, columns: int, near: tuple[int, int, int]) -> Callable[..., Any]:
    """Of captured numbers: pixels of frames in raster order."""

    def mask(b: Any, h: Any, q: Any, k: Any) -> Any:
        frames = (q // (rows * columns) - k // (rows * columns)).abs()
        down, right = (q // columns % rows - k // columns % rows).abs(), (q % columns - k % columns).abs()
        return (frames <= near[0]) & (down <= near[1]) & (right <= near[2])

    return mask


# those of which every part is known as bits along both indices of an aligned tile of 64 or 128 positions
WHOLE: dict[str, Callable[..., Any]] = {
    "causal": masks.causal(),
    "window": masks.sliding_window(70, 9),
    "neighbourhood": lambda b, h, q, k: ((q // 128 - k // 128).abs() <= 6) & ((q % 128 - k % 128).abs() <= 6),
    "wide image": lambda b, h, q, k: ((q // 256 - k // 256).abs() <= 0) & ((q % 256 - k % 256).abs() <= 40),
    "strided": lambda b, h, q, k: (q >= k) & ((q - k < 90) | (k % 64 == 63)),
    "random blocks": lambda b, h, q, k: TABLE[q // 128, k // 128],
    "shifts": lambda b, h, q, k: ((q >> 7) == (k >> 7)) ^ ((q & 127) < (k & 127)),
    "sinks": masks.sink_window(4, 70),
    "lengths": lambda b, h, q, k: (k < LENGTHS[b]) & ((q < k + 5) | (q < 12)),
    "valid": lambda b, h, q, k: VALID[k] & VALID[q] | (q == k),
    "not equal": lambda b, h, q, k: (q != k + 3) & ~(k - 7 == q),
    "larger of two": lambda b, h, q, k: torch.maximum((q - k).abs(), (q // 128 - k // 128).abs()) < 20,
    "smaller of two": lambda b, h, q, k: torch.minimum(q + 9, torch.minimum(k * 0 + 150, k + 300)) > k,
    "chosen": lambda b, h, q, k: torch.where(q % 2 == 0, q >= k, k >= q),
    "by head": lambda b, h, q, k: (q >= k + 40 * h) == (k % 5 != 0),
    "nothing": lambda b, h, q, k: (q >= 0) & (k < 0),
    "all": lambda b, h, q, k: (q >= 0) | (k > q),
}
MASKS: dict[str, Callable[..., Any]] = WHOLE | {
    "odd image": _image(12, 3),
    "tiny image": _image(7, 2),
    "captured image": _image(128, 6),
    "image of 100": _image(100, 3),
    "image of 50": _image(50, 6),
    "video": _video(4, 32, (1, 2, 6)),
    "video of 24": _video(3, 24, (0, 1, 9)),
    "video of 9": _video(2, 9, (0, 1, 3)),
    "windows of a video": masks.neighborhood_3d((6, 4, 32), (3, 2, 13)),
    "windows of a small video": masks.neighborhood_3d((20, 5, 9), (3, 3, 4)),
    "tiles of a video": masks.sliding_tiles((8, 8, 16), (4, 4, 4), (1, 1, 3)),
    "noisy and clean": masks.block_diffusion(300, 20),
    "literal image": lambda b, h, q, k: ((q // 75 - k // 75).abs() <= 1) & ((q % 75 - k % 75).abs() <= 9) & (k % 90 < 70),
    "distances in pieces": lambda b, h, q, k: ((q - k) % 100 < 20) & ((q - k) // 100 > -2),
    "hashed": lambda b, h, q, k: ((q * 77 + k * 13) % 7 < 3) & (q >= k),
    "twice": lambda b, h, q, k: (2 * k <= q + 50) & (k < q + 9),
    "shifted image": lambda b, h, q, k: ((q + 3) // 128 == (k + 3) // 128) & (k <= q),
    "between": lambda b, h, q, k: torch.maximum(-(q - k).abs(), k - k - 200) + 60 <= 30,
    "wrapping": lambda b, h, q, k: (q * 2**40 - k).to(torch.int32) + k.to(torch.int32) > 4,
    "floats": lambda b, h, q, k: (q - k) * 0.5 < 9.25,
}
# the least captured divisor of masks that are words if it leaves few pieces of a tile
WIDTHS = {
    "odd image": 12, "tiny image": 7, "captured image": 128, "image of 100": 100, "image of 50": 50, "video": 32, "video of 24": 24,
    "video of 9": 9,
}  # fmt: skip
# the same of masks of which some parts are
DIVISORS = WIDTHS | {"windows of a video": 32, "windows of a small video": 9}
