"""Gradients of the float tensors that a score mod captures, in the torch backend.

A load ``table[i, j]`` contributes dS * d(mod)/d(load) at its indices. The way to sum these depends on the indices: plain indices
(``bias[h, q_idx]``) name a slice of the tensor; for indices of q_idx - kv_idx alone, sums along the tile's diagonals come first; all other
indices go through one indexed addition.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E
from anyattn.backends.torch.coverage import Segment
from anyattn.backends.torch.lower import lowered
from anyattn.backends.torch.mod_runner import Tile, bind
from anyattn.backends.torch.tiles import Call
from anyattn.backends.torch.workspace import zeros
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.ir.grad import LoadGradient, score_gradients

__all__ = ["CapturedGradients"]

_AXES = {"b": 0, "h": 1, "q_idx": 2, "kv_idx": 3}


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
        gradients = score_gradients(score.expr)
        self.loads = tuple(g for g in gradients.loads if score.tensors[g.slot].requires_grad)
        wanted = [gradients.expr.outputs[i] for i in (0, *(g.output for g in self.loads))]
        builder = Builder()
        value = builder.copy(score.expr)
        derivatives = [builder.copy(gradients.expr, w) for w in wanted]
        # the derivatives of an additive mod do not depend on the score, and its modified score is computed elsewhere
        joint = builder.build(*derivatives[1:]) if is_additive else builder.build(value, *derivatives)
        if not is_additive:
            joint = lowered(joint, (LOG2E, *(1.0 for _ in derivatives)), is_half=call.problem.q.element_size() == 2)
        self.by_score_is_one = is_additive or _is_one(joint, joint.outputs[1])
        self.bound = bind(joint, score.scalars, score.tensors, call.problem)
        self.sums = [_Sum(call, gradients.expr, g) for g in self.loads]
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
                part = dscore * factor
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

    def __init__(self, call: Call, expr: Expr, load: LoadGradient):
        problem, score = call.problem, call.problem.score
        assert score is not None
        self.problem = problem
        self.sizes = score.tensors[load.slot].shape
        positions = [expr.outputs[i] for i in load.indices]
        nodes = [expr.nodes[p] for p in positions]
        deps = [dependence(expr)[p] for p in positions]
        names = [n.attr for n in nodes if n.op == "index"]
        self.plain: list[Any] | None = None
        if all(n.op in ("index", "const") for n in nodes) and len(set(names)) == len(names):
            self.plain = [n.attr for n in nodes]
        self.diagonal = any(d.diagonal for d in deps) and all(d.diagonal or d.per_head for d in deps)
        if problem.sequences is not None and any(d.b for d in deps):
            self.diagonal = False  # sequences have different diagonals
        builder = Builder()
        copied = builder.build(*(builder.copy(expr, p) for p in positions)) if nodes else None
        self.bound = None if copied is None else bind(copied, score.scalars, score.tensors, problem)

    def add(self, total: Tensor, part: Tensor, tile: Tile) -> None:
        if self.plain is not None:
            self._add_slice(total, part, tile)
        elif self.diagonal:
            self._add_diagonals(total, part, tile)
        else:
            assert self.bound is not None
            self._add_indexed(total, part, self.bound.on(tile))

    def _add_slice(self, total: Tensor, part: Tensor, tile: Tile) -> None:
        assert self.plain is not None
        pairs = {"b": (tile.b_lo, tile.b_hi), "h": (tile.h_lo, tile.h_hi)}
        limits = {**pairs, "q_idx": (tile.q_first + tile.q_lo, tile.q_first + tile.q_hi), "kv_idx": (tile.k_lo, tile.k_hi)}
        axes = [_AXES[p] for p in self.plain if isinstance(p, str)]
        absent = [a for a in range(4) if a not in axes]
        part = part.flip(2) if 2 in axes else part
        part = part.sum(absent) if absent else part
        part = part.permute([sorted(axes).index(a) for a in axes])
        target = total[tuple(slice(*limits[p]) if isinstance(p, str) else p for p in self.plain)]
        target += part

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
