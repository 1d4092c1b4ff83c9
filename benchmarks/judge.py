"""Judges a result before it may be timed: attention by ``anyattn.testing.budget`` against float64, block masks tile by tile."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from benchmarks.case import Case
from benchmarks.peers import Inputs

__all__ = ["judge"]

_ROWS = 128  # query rows of a forward that are compared with the oracle: the first and last ones and random others
_TILES = 400  # tiles of a block mask that are compared with the mask itself


def judge(inputs: Inputs, results: dict[str, Any]) -> dict[str, float]:
    """For each contender the share of the budget that its result uses; at most 1 passes. For block masks 0 (right) or inf."""
    kind = inputs.case.kind
    if kind == "mask":
        return _judge_masks(inputs, results)
    return _judge_forward(inputs, results) if kind == "forward" else _judge_backward(inputs, results)


def _some(total: int, wanted: int) -> Tensor:
    """Positions spread over ``range(total)``: the two ends and random ones, ascending."""
    if total <= wanted:
        return torch.arange(total)
    ends = torch.cat([torch.arange(8), torch.arange(total - 8, total)])
    random = torch.randperm(total, generator=torch.Generator().manual_seed(7))[: wanted - 16]
    return torch.cat([ends, random]).unique()


class _Part:
    """Some rows and heads of a case, and its mods as functions of places inside that part."""

    def __init__(self, inputs: Inputs, kv_heads: Tensor, rows: Tensor):
        shape = inputs.case.shape
        ratio = shape.heads_q // shape.heads_kv
        self.kv_heads, self.rows = kv_heads, rows
        self.q_heads = (kv_heads[:, None] * ratio + torch.arange(ratio)).flatten()
        q, k, v = (t.detach() for t in (inputs.q, inputs.k, inputs.v))  # type: ignore[union-attr]
        self.qkv = (self.of_queries(q), k[:, kv_heads], v[:, kv_heads])
        self.mods: dict[str, Any] = {}
        mask, score = inputs.variant.mask, inputs.variant.score
        if mask is not None:
            self.mods["mask"] = lambda b, h, q_idx, kv_idx: mask(b, self.q_heads[h], rows[q_idx], kv_idx)
        if score is not None:
            self.mods["score"] = lambda s, b, h, q_idx, kv_idx: score(s, b, self.q_heads[h], rows[q_idx], kv_idx)

    def of_queries(self, tensor: Tensor) -> Tensor:
        return tensor[:, self.q_heads][:, :, self.rows]


def _judge_forward(inputs: Inputs, results: dict[str, Any]) -> dict[str, float]:
    shape = inputs.case.shape
    part = _Part(inputs, torch.tensor([0, shape.heads_kv - 1]).unique(), _some(shape.seqlen_q, _ROWS))
    fp64 = oracle.attention(*part.qkv, **part.mods).out
    plain = oracle.same_dtype(*part.qkv, **part.mods).out
    noise = rounding(*part.qkv, **part.mods).out
    return {name: budget.share(part.of_queries(out), fp64, plain, noise) for name, out in results.items()}


def _judge_backward(inputs: Inputs, results: dict[str, Any]) -> dict[str, float]:
    """One K/V head whole, since dk and dv are sums over all queries."""
    shape = inputs.case.shape
    part = _Part(inputs, torch.tensor([shape.heads_kv - 1]), torch.arange(shape.seqlen_q))
    assert inputs.dout is not None
    dout = part.of_queries(inputs.dout)
    fp64 = oracle.gradients(*part.qkv, dout, **part.mods)
    plain = oracle.same_dtype_gradients(*part.qkv, dout, **part.mods)
    noises = rounding(*part.qkv, dout, **part.mods)
    shares = {}
    for name, (dq, dk, dv) in results.items():
        mine = (part.of_queries(dq), dk[:, part.kv_heads], dv[:, part.kv_heads])
        compared = zip(mine, fp64[:3], plain[:3], (noises.dq, noises.dk, noises.dv))
        shares[name] = max(budget.share(*figures) for figures in compared)
    return shares


def _judge_masks(inputs: Inputs, results: dict[str, Any]) -> dict[str, float]:
    return {name: 0.0 if _tiles_agree(inputs.case, inputs, mask) else float("inf") for name, mask in results.items()}


def _tiles_agree(case: Case, inputs: Inputs, block_mask: Any) -> bool:
    """Whether random tiles, and those at the diagonal's ends, have the class that evaluating the mask in them gives."""
    tile_m, tile_n = block_mask.BLOCK_SIZE
    rows, columns = -(-case.shape.seqlen_q // tile_m), -(-case.shape.seqlen_k // tile_n)
    random = torch.Generator().manual_seed(5)
    some = [(int(i), int(j)) for i, j in torch.randint(0, min(rows, columns), (_TILES, 2), generator=random)]
    near = [(i, max(0, i - int(d))) for (i, _), d in zip(some, torch.randint(0, 3, (_TILES,), generator=random))]
    partial, full = (_listed(block_mask, prefix) for prefix in ("kv", "full_kv"))
    zero = torch.zeros((), dtype=torch.int64)
    for i, j in {*some, *near, (0, 0), (rows - 1, columns - 1)}:
        q_idx = torch.arange(i * tile_m, min((i + 1) * tile_m, case.shape.seqlen_q))[:, None]
        kv_idx = torch.arange(j * tile_n, min((j + 1) * tile_n, case.shape.seqlen_k))
        seen = inputs.variant.mask(zero, zero, q_idx, kv_idx).expand(len(q_idx), len(kv_idx))  # type: ignore[misc]
        wanted = "full" if bool(seen.all()) else "partial" if bool(seen.any()) else "empty"
        if wanted != ("full" if j in full(i) else "partial" if j in partial(i) else "empty"):
            return False
    return True


def _listed(block_mask: Any, prefix: str) -> Callable[[int], set[int]]:
    counts, indices = getattr(block_mask, f"{prefix}_num_blocks"), getattr(block_mask, f"{prefix}_indices")
    if counts is None:
        return lambda row: set()
    return lambda row: set(indices[0, 0, row, : int(counts[0, 0, row])].tolist())
