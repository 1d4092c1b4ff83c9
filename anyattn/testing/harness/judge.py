"""Judge of results before timing: attention by ``anyattn.testing.budget`` against float64, block masks tile by tile.

``Judge.share`` checks a part of a case, on the case's device: some rows and heads of a forward pass, one K/V head of a backward pass.
``difference`` compares whole results of two contestants, to show that they computed the same thing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.rounding import rounding

__all__ = ["Judge", "difference"]

_ROWS = 128  # query rows of a forward pass compared with the oracle: the first, the last and random ones
_BATCHES = 4
_MOST_PAIRS = 2**25  # a dozen float64 matrices of this size take 3 GiB
_TILES = 400  # tiles of a block mask compared with the mask


class Judge:
    """Judges the results of one case in the form of ``Inputs.comparable``; the float64 reference is computed once."""

    def __init__(self, inputs: Inputs):
        self._inputs = inputs

    @property
    def cannot(self) -> str:
        """The reason if this case is not judged against float64, else empty."""
        shape = self._inputs.case.shape
        pairs = shape.seqlen_q * shape.seqlen_k * (shape.heads_q // shape.heads_kv)
        if self._inputs.case.is_backward and self._inputs.case.device == "cuda" and pairs > _MOST_PAIRS:
            return f"float64 matrices of one K/V head's {pairs:,} pairs are gigabytes; at most {_MOST_PAIRS:,} are judged"
        return ""

    def share(self, result: Any) -> float:
        """The share of its budget that a result uses; at most 1 passes. For block masks 0 (right) or inf."""
        if self._inputs.case.kind == "mask":
            return 0.0 if _tiles_agree(self._inputs, result) else float("inf")
        if self._inputs.case.is_backward:
            dq, dk, dv = result
            mine: tuple[Tensor, ...] = (self._part.of_queries(dq), self._part.of_keys(dk), self._part.of_keys(dv))
        else:
            mine = (self._part.of_queries(result),)
        return max(budget.share(*figures) for figures in zip(mine, *self._references, strict=True))

    @cached_property
    def _part(self) -> _Part:
        """The judged part; of a backward pass one whole K/V head, since dk and dv are sums over all queries."""
        shape, heads = self._inputs.case.shape, self._inputs.case.shape.heads_kv
        if self._inputs.case.is_backward:
            return _Part(self._inputs, [heads - 1], torch.arange(shape.seqlen_q, device="cpu"))
        return _Part(self._inputs, sorted({0, heads - 1}), _some_rows(self._inputs))

    @cached_property
    @torch.enable_grad()
    def _references(self) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], tuple[Any, ...]]:
        """(float64, the plain formula in the case's dtype, rounding noise) of the results that ``share`` compares."""
        qkv, mods = self._part.qkv, self._part.mods
        if not self._inputs.case.is_backward:
            exact, plain, noise = oracle.attention(*qkv, **mods), oracle.same_dtype(*qkv, **mods), rounding(*qkv, **mods)
            return (exact.out,), (plain.out,), (noise.out,)
        dout = self._part.of_queries(self._inputs.gradient("bshd"))
        noises = rounding(*qkv, dout, **mods)
        gradients = oracle.gradients(*qkv, dout, **mods)[:3], oracle.same_dtype_gradients(*qkv, dout, **mods)[:3]
        return *gradients, (noises.dq, noises.dk, noises.dv)


class _Part:
    """Some batch entries, heads and rows of a case, heads first, and its mods as functions of positions in that part."""

    def __init__(self, inputs: Inputs, kv_heads: list[int], rows: Tensor):
        shape, device = inputs.case.shape, inputs.device
        ratio = shape.heads_q // shape.heads_kv
        self._batches = torch.linspace(0, shape.batch - 1, min(_BATCHES, shape.batch), device="cpu").long().to(device)
        self._kv_heads, self._rows = torch.tensor(kv_heads, device=device), rows.to(device)
        self._q_heads = (self._kv_heads[:, None] * ratio + torch.arange(ratio, device=device)).flatten()
        q, k, v = (t.detach() for t in inputs.bshd)
        self.qkv = (self.of_queries(q), self.of_keys(k), self.of_keys(v))
        self.mods: dict[str, Any] = {}
        mask, score = inputs.mods.mask, inputs.mods.score
        # with fewer queries than keys a decoding kernel gives the queries the last positions
        batches, heads, at = self._batches, self._q_heads, self._rows + (shape.seqlen_k - shape.seqlen_q)
        if mask is not None:
            self.mods["mask"] = lambda b, h, q_idx, kv_idx: mask(batches[b], heads[h], at[q_idx], kv_idx)
        if score is not None:
            self.mods["score"] = lambda s, b, h, q_idx, kv_idx: score(s, batches[b], heads[h], at[q_idx], kv_idx)

    def of_queries(self, tensor: Tensor) -> Tensor:
        """(batch, length, heads, head dim) to heads first, restricted to the part."""
        return tensor[self._batches][:, self._rows][:, :, self._q_heads].transpose(1, 2)

    def of_keys(self, tensor: Tensor) -> Tensor:
        return tensor[self._batches][:, :, self._kv_heads].transpose(1, 2)


def _some_rows(inputs: Inputs) -> Tensor:
    """Query rows: the first and last, random ones, and the first and last of each document."""
    rows = _some(inputs.case.shape.seqlen_q, _ROWS)
    if inputs.variant.documents is None:
        return rows
    ends = torch.tensor(inputs.variant.documents(inputs.case.shape.seqlen_q), device="cpu").cumsum(0)
    return torch.cat([rows, ends - 1, ends[:-1]]).unique()


def _some(total: int, wanted: int) -> Tensor:
    """Positions in ``range(total)``: the first and last and random ones, ascending."""
    if total <= wanted:
        return torch.arange(total, device="cpu")
    ends = torch.cat([torch.arange(8, device="cpu"), torch.arange(total - 8, total, device="cpu")])
    random = torch.randperm(total, generator=torch.Generator().manual_seed(7), device="cpu")[: wanted - 16]
    return torch.cat([ends, random]).unique()


def _tiles_agree(inputs: Inputs, block_mask: Any) -> bool:
    """Whether random tiles, and those at the ends of the diagonal, have the class found by evaluating the mask in them."""
    shape, mask, device = inputs.case.shape, inputs.mods.mask, inputs.device
    assert mask is not None
    tile_m, tile_n = block_mask.BLOCK_SIZE
    rows, columns = -(-shape.seqlen_q // tile_m), -(-shape.seqlen_k // tile_n)
    random = torch.Generator().manual_seed(5)
    some = [(int(i), int(j)) for i, j in torch.randint(0, min(rows, columns), (_TILES, 2), generator=random, device="cpu")]
    near = [(i, max(0, i - int(d))) for (i, _), d in zip(some, torch.randint(0, 3, (_TILES,), generator=random, device="cpu"))]
    partial, full = (_listed(block_mask, prefix) for prefix in ("kv", "full_kv"))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    for i, j in {*some, *near, (0, 0), (rows - 1, columns - 1)}:
        q_idx = torch.arange(i * tile_m, min((i + 1) * tile_m, shape.seqlen_q), device=device)[:, None]
        kv_idx = torch.arange(j * tile_n, min((j + 1) * tile_n, shape.seqlen_k), device=device)
        seen = mask(zero, zero, q_idx, kv_idx).expand(len(q_idx), len(kv_idx))
        wanted = "full" if bool(seen.all()) else "partial" if bool(seen.any()) else "empty"
        if wanted != ("full" if j in full(i) else "partial" if j in partial(i) else "empty"):
            return False
    return True


def _listed(block_mask: Any, prefix: str) -> Callable[[int], set[int]]:
    counts, indices = getattr(block_mask, f"{prefix}_num_blocks"), getattr(block_mask, f"{prefix}_indices")
    if counts is None:
        return lambda row: set()
    return lambda row: set(indices[0, 0, row, : int(counts[0, 0, row])].tolist())


def difference(mine: Any, reference: Any) -> float:
    """Relative root mean square between results, the largest of several; for block masks 0 if they list the same tiles in the same
    classes, else inf."""
    if isinstance(mine, tuple):
        return max(difference(a, b) for a, b in zip(mine, reference, strict=True))
    if not isinstance(mine, torch.Tensor):
        return 0.0 if _same_tiles(mine, reference) else float("inf")
    if mine.shape != reference.shape:
        return float("inf")
    total, wrong = reference.float().square().mean().sqrt(), (mine.float() - reference.float()).square().mean().sqrt()
    return float(wrong / total)


def _same_tiles(mine: Any, other: Any) -> bool:
    if not torch.equal(mine.to_dense(), other.to_dense()):
        return False
    return all(torch.equal(_counts(mine, which), _counts(other, which)) for which in ("kv_num_blocks", "full_kv_num_blocks"))


def _counts(block_mask: Any, which: str) -> torch.Tensor:
    counts = getattr(block_mask, which)
    return torch.zeros_like(block_mask.kv_num_blocks) if counts is None else counts
