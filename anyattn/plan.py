"""``Plan``: how a problem is computed. The planner makes it, backends read it, ``explain`` prints it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

__all__ = ["BACKENDS", "BY_DOCUMENT", "Backward", "Plan"]

BACKENDS = ("torch", "triton", "hopper")
BY_DOCUMENT = "documents: each is run as a sequence of its own; by block lists where one id is at several places, or many are short"


class Backward(NamedTuple):
    """The backend of the backward pass of a GPU forward pass. against: the reason against Triton, for people; empty if there is none."""

    backend: str
    against: str = ""
    why: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """The decision for one call. backend: of the forward pass; backward: backend of the backward pass, empty if the same.

    tile_m, tile_n: query rows and keys of one tile (torch's backward pass keeps two tiles of scores at once and takes narrower ones).
    pairs_at_once: number of (batch, head) pairs that torch's passes compute together.

    num_splits: number of parts of each row tile's keys (split-KV). product_dtype: the dtype of the two matrix products.
    needs_lse: the backward pass reads the forward pass's log-sum-exp. why: one line per decision, for people.
    is_reusable: valid for every call of the same signature (shapes, strides, programs, masks' numbers), for any contents of its tensors.
    has_asked_tiles: kernel_options set the tiles, for both passes. is_tuned: kernel_options ask for measured tiles (Triton).
    heads_per_tile: query heads that share a row tile. num_warps, num_stages: of a Triton kernel's programs.
    prepared: the backend's cache for the calls that share this plan; its contents must depend on that signature alone.
    """

    backend: str
    tile_m: int
    tile_n: int
    tile_n_backward: int
    pairs_at_once: int
    product_dtype: torch.dtype
    needs_lse: bool = True
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
