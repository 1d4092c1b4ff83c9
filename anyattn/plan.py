"""Chooses how a problem is computed: pure functions from ``Problem`` and ``Hardware`` to a printable ``Plan``."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from anyattn.errors import BackendError
from anyattn.hardware import Hardware
from anyattn.problem import Problem

__all__ = ["BACKENDS", "Plan", "available", "choose"]

BACKENDS = ("torch",)
_SCORES_AT_ONCE = 2**21  # scores of one tile over all its heads: 8 MB in float32, which stays in a CPU's last-level cache


@dataclass(frozen=True)
class Plan:
    """backend: who computes. tile_m, tile_n: query rows and keys of one tile (the backward pass keeps two tiles of scores at once and takes
    narrower ones). pairs_at_once: (batch, head) pairs computed together.

    product_dtype: the dtype of the two matrix products. why: one line per decision, for people.
    """

    backend: str
    tile_m: int
    tile_n: int
    tile_n_backward: int
    pairs_at_once: int
    product_dtype: torch.dtype
    why: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.backend not in BACKENDS:
            raise ValueError(f"backend={self.backend!r} is not one of {', '.join(map(repr, BACKENDS))}")
        for name in ("tile_m", "tile_n", "tile_n_backward", "pairs_at_once"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")


def available(hardware: Hardware) -> dict[str, str | None]:
    """For each backend None if it can run here, else why not."""
    return {"torch": None}


def choose(problem: Problem, hardware: Hardware, backend: str | None = None, options: dict[str, int] | None = None) -> Plan:
    """The plan for ``problem`` on ``hardware``; ``backend`` insists on one, ``options`` (tile_m, tile_n) on tiles.

    Raises ``ValueError`` for a name that is no backend and ``BackendError`` for one that cannot run this problem.
    """
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not a backend; wanted None (choose for me) or one of {', '.join(map(repr, BACKENDS))}")
    reason = available(hardware).get(backend or "torch")
    if reason is not None:
        raise BackendError(f"backend={backend!r} cannot run here: {reason}; pass backend=None to let anyattn choose")
    plan = _torch_plan(problem, hardware, asked=backend is not None)
    return replace(plan, **options) if options else plan  # type: ignore[arg-type]


def _torch_plan(problem: Problem, hardware: Hardware, asked: bool) -> Plan:
    why = [f"torch: {'asked for' if asked else 'the only backend for ' + hardware.device}"]
    dtype = problem.q.dtype
    if dtype not in hardware.fast_dtypes:
        why.append(f"products in float32: {hardware.device} multiplies {dtype} slowly")
        dtype = torch.float32
    tile_m = _tile_m(problem, why)
    tile_n = min(1024, max(problem.seqlen_k, 1))
    pairs = max(1, _SCORES_AT_ONCE // (tile_m * tile_n))
    if pairs * tile_m < 1024:  # few heads: taller tiles keep the products large
        why.append(f"tiles of {tile_m} x {tile_n} scores, {pairs} heads at once")
    return Plan("torch", tile_m, tile_n, max(1, tile_n // 4), pairs, dtype, tuple(why))


def _tile_m(problem: Problem, why: list[str]) -> int:
    tile_m = min(256, max(problem.seqlen_q, 1))
    if problem.blocks is not None:
        block_m = problem.blocks.tile[0]
        tile_m = next(t for t in range(min(block_m, 512), 0, -1) if block_m % t == 0)
        why.append(f"row tile {tile_m}: divides the block mask's {block_m}")
    return tile_m
