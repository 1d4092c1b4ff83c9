"""Gradients of the float tensors that a score mod captures, in the torch backend.

A load ``table[i, j]`` contributes dS * d(mod)/d(load) at its indices. The way to sum these depends on the indices: plain indices
(``bias[h, q_idx]``) name a slice of the tensor; for indices of q_idx - kv_idx alone, sums along the tile's diagonals come first; all other
indices go through one indexed addition.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E
from anyattn.backends.torch.coverage import Segment
from anyattn.backends.torch.lower import lowered, with_choices
from anyattn.backends.torch.mod_runner import Bound, Tile, bind
from anyattn.backends.torch.tiles import Call
from anyattn.backends.torch.workspace import zeros
from anyattn.mods.analysis.evaluate import slice_at
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.grad import LoadGradient, score_gradients

__all__ = ["CapturedGradients"]


@dataclass(frozen=True)
class _Programs:
    """values: the derivative by each of ``loads``; unless the mod is additive, the mod's value and its derivative by the score come first.
    indices: of each load; None for a tensor without dimensions."""

    values: Expr
    loads: tuple[LoadGradient, ...]
    indices: tuple[Expr | None, ...]


@lru_cache(maxsize=1024)
def programs(expr: Expr, slots: tuple[int, ...], is_additive: bool, is_half: bool) -> _Programs:
    """The programs for the gradients of the captured tensors ``slots`` of a score mod."""
    gradients = score_gradients(expr)
    loads = tuple(g for g in gradients.loads if g.slot in slots)
    builder = Builder()
    value = builder.copy(expr)
    derivatives = [builder.copy(gradients.expr, gradients.expr.outputs[i]) for i in (0, *(g.output for g in loads))]
    # the derivatives of an additive mod do not depend on the score, and its modified score is computed elsewhere
    values = builder.build(*derivatives[1:]) if is_additive else builder.build(value, *derivatives)
    if not is_additive:
        values = lowered(values, (LOG2E, *(1.0 for _ in derivatives)), is_half=is_half)
    indices = [tuple(gradients.expr.outputs[i] for i in g.indices) for g in loads]
    return _Programs(values, loads, tuple(_part(gradients.expr, positions) for positions in indices))


def _part(expr: Expr, positions: tuple[int, ...]) -> Expr | None:
    builder = Builder()
    return builder.build(*(builder.copy(expr, p) for p in positions)) if positions else None


class CapturedGradients:
    """The modified score and its derivatives on a tile, and the gradient sum of each captured tensor."""

    def __init__(self, call: Call, is_additive: bool):
        self.call = call
        self.totals: dict[int, Tensor] = {}
        self.loads: tuple[LoadGradient, ...] = ()
        self._by_load: list[Any] | None = None
        score = call.problem.score
        if score is None:
            return
        slots = tuple(slot for slot, tensor in enumerate(score.tensors) if tensor.requires_grad)
        made = programs(with_choices(score.expr, score.tensors), slots, is_additive, is_half=call.problem.q.element_size() == 2)
        self.loads = made.loads
        self.by_score_is_one = is_additive or _is_one(made.values, made.values.outputs[1])
        if self.loads or not is_additive:
            self.bound = bind(made.values, score.scalars, score.tensors, call.problem)
        self.sums = [_Sum(call, indices, g) for indices, g in zip(made.indices, self.loads, strict=True)]
        for g in self.loads:
            tensor = score.tensors[g.slot]
            if g.slot not in self.totals:
                self.totals[g.slot] = zeros(tuple(tensor.shape), call.problem.stat_dtype, tensor.device)

    def modified(self, score: Tensor, tile: Tile) -> tuple[Tensor, Tensor | None]:
        """The mod's value in base 2 on a tile of scores, and its derivative by the score (None if that is 1)."""
        value, by_score, *self._by_load = self.bound.on(tile, score)
        modified = self.call.workspace.take("modified", tile.shape, score.dtype)
        value = modified.copy_(value) if isinstance(value, Tensor) else modified.fill_(value)
        return value, None if self.by_score_is_one else by_score

    def add(self, dscore: Tensor, tile: Tile, asked: tuple[Segment, ...]) -> None:
        """Adds the contributions of ``dscore`` (b, h, rows, columns), the derivative by the modified
        score, to each captured tensor's gradient."""
        if not self.loads:
            return
        by_load = self._by_load if self._by_load is not None else self.bound.on(tile)
        for load, total, factor in zip(self.loads, self.sums, by_load, strict=True):
            part = dscore
            if isinstance(factor, Tensor) or factor != 1:
                part = torch.mul(dscore, factor, out=self.call.workspace.take("dscore by load", tuple(dscore.shape), dscore.dtype))
                self.call.masks.zero(part, tile, asked)  # the derivative at a hidden score is arbitrary
            total.add(self.totals[load.slot], part, tile)

    def results(self) -> tuple[Tensor | None, ...]:
        score = self.call.problem.score
        if score is None:
            return ()
        return tuple(self.totals[i].to(t.dtype) if i in self.totals else None for i, t in enumerate(score.tensors))


def _is_one(expr: Expr, position: int) -> bool:
    node = expr.nodes[position]
    return node.op == "const" and node.attr == 1


class _Sum:
    """The summation of one load's contributions into its tensor's gradient."""

    def __init__(self, call: Call, indices: Expr | None, load: LoadGradient):
        problem, score = call.problem, call.problem.score
        assert score is not None
        self.problem = problem
        self.sizes = score.tensors[load.slot].shape
        self.bound: Bound | None = None
        self.diagonal = self.is_plain = False
        if indices is None:
            return
        self.bound = bind(indices, score.scalars, score.tensors, problem)
        self.is_plain = all(indices.nodes[o].op in ("index", "const") for o in indices.outputs)
        deps = [dependence(indices)[o] for o in indices.outputs]
        self.diagonal = any(d.diagonal for d in deps) and all(d.diagonal or d.per_head for d in deps)
        if problem.sequences is not None and any(d.b for d in deps):
            self.diagonal = False  # sequences have different diagonals

    def add(self, total: Tensor, part: Tensor, tile: Tile) -> None:
        target = self._slice(total, tile)
        if target is not None:
            absent = [d for d in range(4) if target.shape[d] < part.shape[d]]
            part = part.sum(absent, keepdim=True) if absent else part
            target += part.flip(2) if target.shape[2] > 1 and tile.descends else part
        elif self.diagonal:
            self._add_diagonals(total, part, tile)
        else:
            assert self.bound is not None
            self._add_indexed(total, part, self.bound.on(tile))

    def _slice(self, total: Tensor, tile: Tile) -> Tensor | None:
        """The view (b, h, rows, columns) of ``total``, its rows in ascending order, that the tile's plain indices name; None for others."""
        if self.bound is None:
            return total.view(1, 1, 1, 1)
        return slice_at(total, [self.bound.place(o, tile) for o in self.bound.expr.outputs]) if self.is_plain else None

    def _add_diagonals(self, total: Tensor, part: Tensor, tile: Tile) -> None:
        """Entry y of a tile's diagonal sums covers the scores with q - kv = q_hi - 1 - k_lo - y, as in ``Bound.diagonal``."""
        assert self.bound is not None
        batch, heads, rows, columns = part.shape
        width = rows + columns - 1
        sheared = torch.zeros((batch, heads, rows * width), dtype=part.dtype, device=part.device)
        row_r_shifted_by_r = sheared.as_strided(part.shape, (heads * rows * width, rows * width, width + 1, 1))
        row_r_shifted_by_r.copy_(part)
        sums = sheared.view(batch, heads, rows, width).sum(2, keepdim=True)  # (b, h, 1, width)
        self._add_indexed(total, sums, self.bound.along_diagonals(tile))

    def _add_indexed(self, total: Tensor, part: Tensor, indices: list[Any]) -> None:
        flat: Tensor = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device=part.device)
        for index, size, stride in zip(indices, self.sizes, total.stride(), strict=True):
            index = index if isinstance(index, Tensor) else torch.tensor(index, device=part.device)
            flat = flat + torch.where(index < 0, index + size, index) * stride
        shared = [d for d in range(4) if flat.shape[d] == 1 and part.shape[d] != 1]
        part = part.sum(shared, keepdim=True) if shared else part
        flat, part = flat.expand(part.shape).reshape(-1), part.reshape(-1)
        if self.problem.deterministic and part.is_cuda:
            total.view(-1).index_put_((flat,), part, accumulate=True)  # sorts first; the order of index_add_'s additions depends on threads
        else:
            total.view(-1).index_add_(0, flat, part)
