"""Dropout of the weights of a tile: four pairs at a time, as one word of the hash decides them (``mods.dropout``)."""

from __future__ import annotations

import sys
from functools import cached_property

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.torch.mod_runner import Tile
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.dropout import BITS, FINE, PHASE, WORD
from anyattn.mods.ir.expr import Expr
from anyattn.problem import Problem

__all__ = ["Drops"]

_FIELDS = (2**BITS - 1) * 0x01010101
# where a word's pairs lie in memory: a row and a key, the key 8 on, then both keys of the row 8 on
_BYTES = range(4) if sys.byteorder == "little" else range(3, -1, -1)


class Drops:
    """The dropout of a call's weights.

    The mask's own expression computes a word for each pair; here every fourth pair has one, and its bytes are then put in their places.
    With 8 heads of 64 and 3,072 causal tokens in float32, on one thread of an AMD EPYC with AVX2, both passes take 1.38 instead of 1.70 s
    (0.63 without dropout).
    """

    def __init__(self, problem: Problem):
        self.dropout = problem.dropout if problem.has_pairs else None
        self._problem = problem
        self._last: tuple[Tile, Tensor] | None = None  # the backward pass needs a tile's mask twice

    def apply(self, weights: Tensor, tile: Tile) -> None:
        """Sets the dropped pairs of ``weights`` (count, stacked rows, columns) of ``tile`` to 0."""
        if self.dropout is None:
            return
        if self._last is None or self._last[0] != tile:
            self._last = tile, self.dropped(tile)
        weights.view(*tile.shape[:3], weights.shape[-1]).masked_fill_(self._last[1], 0.0)

    @cached_property
    def _entries(self) -> Tensor:
        sequences = self._problem.sequences
        return torch.arange(self._problem.batch, device=self._problem.q.device) if sequences is None else sequences.asked_entry

    def dropped(self, tile: Tile) -> Tensor:
        """(batch entries, query heads, rows, keys) of ``tile``, rows descending: the pairs that lose their weight."""
        assert self.dropout is not None
        first, last, device = tile.q_first + tile.q_lo, tile.q_first + tile.q_hi, self._entries.device
        q_idx, kv_idx = _places(first, last, device).flip(0), _places(tile.k_lo, tile.k_hi, device)
        words = self._on(tile, WORD, q_idx, kv_idx).bitwise_and_(_FIELDS)
        batch, heads, rows, keys = words.shape
        words.view(batch, heads, -1, 8, keys).add_(self._least(tile, keys))
        bytes_of = words.view(torch.int8).view(batch, heads, rows, keys, 4)
        planes = [(bytes_of[..., at] >= 0).view(torch.int64).view(batch, heads, -1, 8, keys // 8) for at in _BYTES]  # 8 keys in a number
        of_rows = [torch.stack(planes[at : at + 2], -1) for at in (2, 0)]
        whole = torch.stack(of_rows, 3).view(torch.bool).view(batch, heads, 2 * rows, 2 * keys)
        q_hi, k_lo = -last % 16, tile.k_lo % 16
        return whole[:, :, q_hi : q_hi + last - first, k_lo : k_lo + tile.k_hi - tile.k_lo]

    def _least(self, tile: Tile, keys: int) -> Tensor:
        """(batch entries, query heads, 1, 8, ``keys``): what raises the field of a pair that is kept, and of no other, to 128, in all four
        bytes of a word."""
        assert self.dropout is not None
        sixteen = torch.arange(16, device=self._entries.device)
        coarse, fine = divmod(int(self.dropout.keep.scalars[0]), 2**FINE)
        raised = self._on(tile, PHASE, sixteen.flip(0), sixteen) < fine
        batch, heads = raised.shape[:2]
        least = (2**BITS - coarse - raised.to(torch.uint8)).view(batch, heads, 2, 8, 2, 8)
        of_bytes = torch.stack([least[:, :, 1 - at // 2, :, at % 2] for at in _BYTES], -1).contiguous().view(torch.int32)
        return of_bytes.view(batch, heads, 1, 8, 8).repeat(1, 1, 1, 1, keys // 8)

    def _on(self, tile: Tile, expr: Expr, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        assert self.dropout is not None
        heads = torch.arange(tile.h_lo, tile.h_hi, device=q_idx.device)
        b, h = self._entries[tile.b_lo : tile.b_hi].view(-1, 1, 1, 1), heads.view(-1, 1, 1)
        leaves = {"b": b, "h": h, "q_idx": q_idx[:, None], "kv_idx": kv_idx, "score": None}
        (found,) = run(expr, leaves, (), self.dropout.keep.tensors)
        return found  # type: ignore[no-any-return]


def _places(first: int, last: int, device: torch.device) -> Tensor:
    """The first 8 of every 16 positions that have some from ``first`` to before ``last``."""
    sixteens = torch.arange(first // 16, ceil_div(last, 16), device=device)
    return (16 * sixteens[:, None] + torch.arange(8, device=device)).flatten()
