"""ATen's flash-attention CPU kernel for unmasked rectangles of (rows x keys), large ones, or any with a captured bias.

In float32 without a score mod that kernel runs at the speed of the matrix product: full attention reaches 0.97 of SDPA's speed, and 0.88 if
all tiles are streamed through torch operations. It adds a dense bias as it goes, so that a bias in memory is read once. It returns output
and log-sum-exp, so a rectangle's result is the initial state of a row tile's online softmax; its backward pass takes the whole row's output
and log-sum-exp, so the gradients of the parts add up.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E
from anyattn.backends.torch.coverage import Group, RowTile, Segment
from anyattn.backends.torch.kv_matrices import KeyRows
from anyattn.backends.torch.mod_runner import Bound
from anyattn.backends.torch.tiles import Call, Chunk, Heads

__all__ = ["Rectangle", "RowBlock", "blocks", "few_rows", "has_few_rows"]

_FORWARD, _BACKWARD = "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"
_ROWS = 1024  # the kernel needs tall rectangles: from here on 0.98 of its speed, at 256 rows 0.93
_FEW_ROWS_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_LEAST, _LEAST_BIASED = 512, 16  # a separate call does not pay for fewer rows or keys


@dataclass(frozen=True)
class Rectangle:
    """Query rows ``q_lo:q_hi`` that all see the keys ``lo:hi``."""

    q_lo: int
    q_hi: int
    lo: int
    hi: int
    bias: Bound | None = None  # added to the scores

    def rows_of(self, x: Tensor, row_tile: RowTile, heads: Heads) -> Tensor:
        """The part of ``x`` (count, stacked rows, n) that belongs to a row tile; both have the order of ``Call.descends``."""
        stacked = x.view(heads.count, -1, self.q_hi - self.q_lo, x.shape[-1])
        before = self.q_hi - row_tile.q_hi if heads.descends else row_tile.q_lo - self.q_lo
        part = stacked[:, :, before : before + row_tile.q_hi - row_tile.q_lo]
        return part.reshape(heads.count, -1, x.shape[-1])

    def forward(self, call: Call, heads: Heads, keys: KeyRows, values: KeyRows) -> tuple[Tensor, Tensor]:
        """Normalised output (count, stacked rows, Dv) and base-2 log-sum-exp (count, stacked rows, 1)."""
        q = heads.rows(call.problem.q, self.q_lo, self.q_hi, "block q", is_only_read=True)
        bias = self._bias(heads)
        q, k, v = (heads.by_entry(t) for t in (q, *(t.run(self.lo, self.hi) for t in (keys, values))))
        out, lse = getattr(torch.ops.aten, _FORWARD)(q, k, v, attn_mask=bias, scale=call.problem.scale)
        if bias is not None and bool((lse == 0).any()):  # the kernel's statistic of a row without visible keys
            lse = torch.where((lse == 0) & torch.isneginf(bias).all(-1), -math.inf, lse)
        out, lse = out.contiguous().flatten(0, 1), (lse.contiguous().flatten(0, 1).to(call.problem.stat_dtype) * LOG2E)[..., None]
        if bias is not None and bool((is_hidden := lse <= torch.finfo(lse.dtype).min / 2).any()):  # as where scores are streamed
            out, lse = out.masked_fill(is_hidden, 0.0), lse.masked_fill(is_hidden, -math.inf)
        return out, lse

    def backward(
        self, call: Call, heads: Heads, keys: Tensor, values: Tensor, q: Tensor, rows: tuple[Tensor, Tensor, Tensor]
    ) -> tuple[Tensor, ...]:
        """dq (count, stacked rows, D), dk and dv (count, hi - lo, ...); ``q``, ``rows`` (dout, out, natural lse): (B, Hq, Sq, ...)."""
        dout, out, lse = (
            heads.by_entry(heads.rows(x if x.ndim == 4 else x[..., None], self.q_lo, self.q_hi, f"block {name}", x.dtype))
            for name, x in zip(("dout", "out", "lse"), rows, strict=True)
        )
        k, v = (heads.by_entry(t[:, self.lo : self.hi]) for t in (keys, values))
        q = heads.by_entry(heads.rows(q, self.q_lo, self.q_hi, "block q"))
        lse, bias = lse[..., 0].contiguous(), self._bias(heads)
        grads = getattr(torch.ops.aten, _BACKWARD)(dout, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=call.problem.scale)
        return tuple(g.flatten(0, 1) for g in grads)

    def _bias(self, heads: Heads) -> Tensor | None:
        """(batch entries, heads, rows, keys)."""
        if self.bias is None:
            return None
        tile = heads.tile(RowTile(self.q_lo, self.q_hi, ()), Chunk(self.lo, self.hi, ()))
        return self.bias.on(tile)[0].expand(tile.shape)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class RowBlock:
    """Adjacent row tiles and the rectangle that they share, if any; the segments of the row tiles then exclude its keys."""

    row_tiles: tuple[RowTile, ...]
    rectangle: Rectangle | None


def blocks(call: Call, group: Group, bias: Bound | None = None) -> Iterator[RowBlock]:
    """The row tiles of ``group`` in blocks, each with a rectangle where ATen's kernel can be used. bias: all that the score mod adds, in
    captured memory."""
    least = _LEAST if bias is None else _LEAST_BIASED
    if not group.row_tiles or group.row_tiles[-1].q_hi < least or not _is_served(call, bias):
        yield RowBlock(group.row_tiles, None)
        return
    per_block = max(1, _ROWS // call.plan.tile_m)
    for start in range(0, len(group.row_tiles), per_block):
        tiles = group.row_tiles[start : start + per_block]
        rectangle = _shared(tiles, least, bias)
        if rectangle is not None:
            tiles = tuple(replace(t, segments=_without(t.segments, rectangle)) for t in tiles)
        yield RowBlock(tiles, rectangle)


def _is_served(call: Call, bias: Bound | None) -> bool:
    problem = call.problem
    same_width = problem.q.shape[3] == problem.v.shape[3]
    plain = (problem.score is None or bias is not None) and not problem.wants_max and problem.dropout is None and problem.skip is None
    exact = call.dtype == problem.q.dtype and call.dtype in (torch.float32, torch.float64)
    has_kernels = problem.q.device.type == "cpu" and all(hasattr(torch.ops.aten, n) for n in (_FORWARD, _BACKWARD))
    return plain and exact and same_width and has_kernels


def _shared(tiles: tuple[RowTile, ...], least: int, bias: Bound | None) -> Rectangle | None:
    """The widest range of keys that all rows of ``tiles`` see completely."""
    common = [(s.lo, s.hi) for s in tiles[0].segments if not s.predicates]
    for tile in tiles[1:]:
        seen = [(s.lo, s.hi) for s in tile.segments if not s.predicates]
        common = [(max(a, lo), min(b, hi)) for a, b in common for lo, hi in seen if max(a, lo) < min(b, hi)]
    lo, hi = max(common, key=lambda r: r[1] - r[0], default=(0, 0))
    q_lo, q_hi = tiles[0].q_lo, tiles[-1].q_hi
    return Rectangle(q_lo, q_hi, lo, hi, bias) if min(hi - lo, q_hi - q_lo) >= least else None


def _without(segments: tuple[Segment, ...], rectangle: Rectangle) -> tuple[Segment, ...]:
    kept = []
    for s in segments:
        for lo, hi in ((s.lo, min(s.hi, rectangle.lo)), (max(s.lo, rectangle.hi), s.hi)):
            if lo < hi:
                kept.append(replace(s, lo=lo, hi=hi))
    return tuple(kept)


def has_few_rows(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Whether ``few_rows`` supports such tensors, which have one dtype and head_dim."""
    if q.device.type != "cpu" or q.dtype not in _FEW_ROWS_DTYPES or not hasattr(torch, _FORWARD):
        return False
    return q.stride(3) == k.stride(3) == v.stride(3) == 1


def few_rows(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of a few rows in one call of the kernel, without gradients.

    q: (B, H, rows, D); k, v: (B, H, keys, D), with a contiguous last dimension. bias: (B, 1, 1, keys) in q's dtype, 0 or -inf. is_causal:
    row i sees only keys up to i. Returns out (B, H, rows, D) and the natural log-sum-exp (B, H, rows); in a row without visible keys out
    is 0 and the log-sum-exp is meaningless.
    """
    return getattr(torch, _FORWARD)(q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale)
