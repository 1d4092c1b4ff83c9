"""Runs a mod on one tile of scores at a time, with everything hoisted that does not change from tile to tile.

Each node of the expression belongs to one stage, by what it depends on:

=========  ===========================  ==================================================
stage      computed                     kept as
=========  ===========================  ==================================================
per_head   once a call                  (B or 1, H or 1, 1, 1)
row        once a call                  (B or 1, H or 1, Sq, 1), a tile takes its rows
col        once a call                  (B or 1, H or 1, 1, Sk), a tile takes its columns
diagonal   once a call                  (B or 1, H or 1, Sq + Sk - 1), a tile is a sheared view
tile       for every tile               (b, h, rows, columns), in place where the operand is not needed again
=========  ===========================  ==================================================

The rows of a tile stand in descending order of q_idx. Then a step down a column and a step along a row both lower q_idx - kv_idx by one,
and a diagonal vector is read in place through strides (1, 1): a bias by distance costs one addition and no memory traffic of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.dependence import dependence
from anyattn.mods.evaluate import TORCH_OPS, apply, run
from anyattn.mods.ir import Builder, Expr
from anyattn.problem import Problem

__all__ = ["Bound", "Tile", "bind"]

_IN_PLACE = frozenset(TORCH_OPS) - {"where", "eq", "ne", "lt", "le", "gt", "ge"}


@dataclass(frozen=True)
class Tile:
    """Where a tile lies: batch entries, query heads, query rows and keys, as half-open ranges."""

    b_lo: int
    b_hi: int
    h_lo: int
    h_hi: int
    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.b_hi - self.b_lo, self.h_hi - self.h_lo, self.q_hi - self.q_lo, self.k_hi - self.k_lo)

    def columns(self, lo: int, hi: int) -> Tile:
        return replace(self, k_lo=lo, k_hi=hi)


@dataclass(frozen=True)
class _Staging:
    """An expression cut in stages: each node's stage, the hoisted nodes that tiles read, and each tile node's last reader."""

    stage: tuple[str, ...]
    boundary: tuple[int, ...]
    schedule: tuple[int, ...]
    last_use: tuple[int, ...]


@lru_cache(maxsize=1024)
def _staging(expr: Expr) -> _Staging:
    deps = dependence(expr)
    stage = []
    for d in deps:
        if d.score:
            stage.append("tile")
        elif d.per_head:
            stage.append("per_head")
        elif d.diagonal:
            stage.append("diagonal")
        elif d.q and d.kv:
            stage.append("tile")
        else:
            stage.append("row" if d.q else "col")
    schedule = tuple(i for i, s in enumerate(stage) if s == "tile" and expr.nodes[i].op != "score")
    read = {a for i in schedule for a in expr.nodes[i].args} | set(expr.outputs)
    last_use = [-1] * len(expr.nodes)
    for i in schedule:
        for a in expr.nodes[i].args:
            last_use[a] = i
    for o in expr.outputs:
        last_use[o] = len(expr.nodes)
    return _Staging(tuple(stage), tuple(i for i in sorted(read) if stage[i] != "tile"), schedule, tuple(last_use))


class Bound:
    """An expression with its captured values and lengths: ``on(tile, score)`` gives its outputs there."""

    def __init__(
        self, expr: Expr, scalars: Sequence, tensors: Sequence[Tensor], batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device
    ):
        self.expr, self.tensors = expr, tensors
        self.staging = _staging(expr)
        self.seqlen_q, self.seqlen_k = seqlen_q, seqlen_k
        self.hoisted: dict[int, Any] = {}
        self._scalars = scalars
        b = torch.arange(batch, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads, device=device).view(-1, 1, 1)
        whole = torch.arange(seqlen_q, device=device).view(-1, 1), torch.arange(seqlen_k, device=device)
        # entry y of a diagonal vector holds the value at q - kv = Sq - 1 - y
        along = torch.arange(-seqlen_q + 1, max(seqlen_k, 1), device=device).neg_(), torch.zeros((), dtype=torch.int64, device=device)
        for stages, (q_idx, kv_idx) in ((("per_head", "row", "col"), whole), (("diagonal",), along)):
            wanted = [i for i in self.staging.boundary if self.staging.stage[i] in stages]
            leaves = {"b": b, "h": h, "q_idx": q_idx, "kv_idx": kv_idx, "score": None}
            if wanted and min(seqlen_q, seqlen_k) > 0:
                self.hoisted.update(zip(wanted, run(_only(expr, tuple(wanted)), leaves, scalars, tensors), strict=True))

    @property
    def stage(self) -> str:
        """The stage of the only output."""
        return self.staging.stage[self.expr.outputs[0]]

    def part(self, node: int, tile: Tile) -> Any:
        """A hoisted node's value on a tile, as a view that broadcasts to the tile's shape."""
        value = self.hoisted[node]
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        stage = self.staging.stage[node]
        value = self._at_heads(value, tile)
        if stage == "row":
            return value[:, :, tile.q_lo : tile.q_hi].flip(2)
        if stage == "col":
            return value[:, :, :, tile.k_lo : tile.k_hi]
        return self._sheared(value[:, :, 0], tile) if stage == "diagonal" else value

    @staticmethod
    def _at_heads(value: Tensor, tile: Tile) -> Tensor:
        value = value[(None,) * (4 - value.ndim)] if value.ndim < 4 else value
        value = value if value.shape[0] == 1 else value[tile.b_lo : tile.b_hi]
        return value if value.shape[1] == 1 else value[:, tile.h_lo : tile.h_hi]

    def _sheared(self, vector: Tensor, tile: Tile) -> Tensor:
        """(b, h, rows, columns) from (b, h, Sq + Sk - 1): row r (descending), column c reads entry r + c of the tile's window."""
        return self._window(vector, tile).unfold(2, tile.k_hi - tile.k_lo, 1)

    def _window(self, vector: Tensor, tile: Tile) -> Tensor:
        start = self.seqlen_q - tile.q_hi + tile.k_lo
        return vector[:, :, start : start + tile.q_hi - tile.q_lo + tile.k_hi - tile.k_lo - 1]

    def along_diagonals(self, tile: Tile) -> list[Any]:
        """The outputs, all of stage per_head or diagonal, on the diagonals of ``tile``: (b, h, 1, rows + columns - 1)."""
        found = []
        for o in self.expr.outputs:
            value = self.part(o, tile) if self.staging.stage[o] != "diagonal" else self._window(self._at_heads(self.hoisted[o], tile)[:, :, 0], tile)[:, :, None]
            found.append(value)
        return found

    def on(self, tile: Tile, score: Tensor | None = None, owns_score: bool = False) -> list[Any]:
        """The outputs on ``tile``; with ``owns_score`` the score's memory may be overwritten."""
        nodes, last_use = self.expr.nodes, self.staging.last_use
        values: dict[int, Any] = {i: self.part(i, tile) for i in self.staging.boundary}
        mine: set[int] = set()
        for i, node in enumerate(nodes):
            if node.op == "score":
                values[i] = score
                if owns_score:
                    mine.add(i)
        for i in self.staging.schedule:
            node = nodes[i]
            args = [values[a] for a in node.args]
            target = next((a for a in node.args if a in mine and last_use[a] == i and nodes[a].dtype == node.dtype), None)
            if target is not None and node.op in _IN_PLACE and _fits(values[target], args):
                values[i] = TORCH_OPS[node.op](*_operands(args, values[target]), out=values[target])
                mine.discard(target)
                mine.add(i)
            else:
                values[i] = apply(node, args, self.tensors)
                if isinstance(values[i], Tensor) and values[i].shape == tile.shape and node.op not in ("load", "cast"):
                    mine.add(i)
        return [values[o] for o in self.expr.outputs]


def _fits(target: Tensor, args: list[Any]) -> bool:
    return all(not isinstance(a, Tensor) or a is target or a.ndim <= target.ndim for a in args)


def _operands(args: list[Any], like: Tensor) -> list[Any]:
    return [a if isinstance(a, Tensor) else torch.full((), a, dtype=like.dtype, device=like.device) for a in args]


@lru_cache(maxsize=1024)
def _only(expr: Expr, outputs: tuple[int, ...]) -> Expr:
    builder = Builder()
    return builder.build(*(builder.copy(expr, o) for o in outputs))


def bind(expr: Expr, scalars: Sequence, tensors: Sequence[Tensor], problem: Problem) -> Bound:
    """``expr`` made ready for the tiles of ``problem``."""
    return Bound(
        expr, scalars, tensors, problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k, problem.q.device
    )
