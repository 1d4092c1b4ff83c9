"""``Plan``: how a problem is computed; the printable decision that the planner makes and backends read."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["BACKENDS", "BY_DOCUMENT", "Backward", "Plan"]

BACKENDS = ("torch", "triton", "hopper")
BY_DOCUMENT = "documents: each is run as a sequence of its own; by block lists where one id is at several places, or many are short"


class Backward(NamedTuple):
    """Which backend computes the backward pass of a GPU backend's forward pass. against: why Triton cannot, for people; else empty."""

    backend: str
    against: str = ""
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The decision for one call. backend: computes the forward pass; backward: the backend of the backward pass, if another.

    tile_m, tile_n: query rows and keys of one tile (torch's backward pass keeps two tiles of scores at once and takes narrower ones).
    pairs_at_once: (batch, head) pairs that torch's passes compute together.

    num_splits: the keys of each row tile are divided among so many partial results. product_dtype: the dtype of the two matrix products.
    whole_spans: a row tile's visible scores are computed whole, not streamed. why: one line per decision, for people.
    is_reusable: the plan holds for every call of the same signature (shapes, strides, programs, masks' numbers), whatever tensors hold.
    has_asked_tiles: kernel_options set the tiles, for both passes. is_tuned: kernel_options ask for measured tiles (Triton).
    heads_per_tile: query heads that share a row tile. num_warps, num_stages: of a Triton kernel's programs.
    prepared: what the backend keeps for the calls that share this plan; it must depend on that signature alone.
    """

    backend: str
    tile_m: int
    tile_n: int
    tile_n_backward: int
    pairs_at_once: int
    product_dtype: torch.dtype
    whole_spans: bool = False
    num_splits: int = 1
    backward: str = ""
    why: tuple[str, ...] = ()
    is_reusable: bool = True
    has_asked_tiles: bool = False
    is_tuned: bool = False
    heads_per_tile: int = 1
    num_warps: int = 4
    num_stages: int = 2
    prepared: dict[Any, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
        for name in ("tile_m", "tile_n", "tile_n_backward", "pairs_at_once", "num_splits"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
