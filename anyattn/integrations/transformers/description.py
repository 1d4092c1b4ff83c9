"""``MaskDescription``: the mask of all layers of one type in one forward pass, and the anyattn call that each of them makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from anyattn.sparsity.block_mask import BlockMask

__all__ = ["Aligned", "Cached", "FewRows", "Listed", "MaskDescription", "Masked", "Way"]


class Aligned(NamedTuple):
    """``flash_attn_func`` with causality and a window: the last query sees the last key."""

    causal: bool
    window: tuple[int, int]


class Cached(NamedTuple):
    """``flash_attn_with_kvcache``: the queries are the last of the rows in use.

    lengths: int32 (B,), key rows in use, padding included; None is all rows. leftpad: integers (B,), padding rows at the beginning.
    mask_mod: an additional mask, over the positions of that call.
    """

    lengths: Tensor | None
    leftpad: Tensor | None
    causal: bool
    window: tuple[int, int]
    mask_mod: Callable | None


class Listed(NamedTuple):
    """``flex_attention`` with block lists, which are made once for all layers."""

    block_mask: BlockMask

    def to(self, device: Any) -> Listed:
        return Listed(self.block_mask.to(device))


class Masked(NamedTuple):
    """``flex_attention`` with a mask mod over query and key rows, inside a compiled graph; that call finds the tiles itself."""

    mask_mod: Callable


Way = Aligned | Cached | Listed | Masked


class FewRows(NamedTuple):
    """A few query rows on a CPU, which see the keys ``lo <= kv < hi``, each up to its own row if ``is_causal``, except hidden ones.

    hidden: (B, hi - lo), None if no key is hidden.
    """

    lo: int
    hi: int
    hidden: Tensor | None
    is_causal: bool


class MaskDescription(torch_flex.BlockMask):
    """A mask as a description instead of a tensor or lists. It is cheap: one is made per forward pass for each type of layer.

    It subclasses torch's ``BlockMask`` because Transformers passes such masks on unchanged if they have four dimensions.
    """

    def __init__(self, batch: int, lengths: tuple[int, int], way: Way, rows: FewRows | None, listed: Callable[[], Listed] | None):
        """lengths: of queries and keys. rows: set if the layers have few rows on a CPU. listed: makes the same mask as lists, for a way
        without gradients."""
        self.batch = batch
        self.seq_lengths = lengths
        self.way = way
        self.rows = rows
        self.is_decoding = False  # one row on a CPU, determined by ``way`` alone, as in a graph
        self.has_documents = False
        self._listed = listed
        self._biases: dict[torch.dtype, Tensor] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, 1, *self.seq_lengths)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> MaskDescription:
        """The mask itself; ``generate`` calls this on every mask."""
        return self

    def to(self, device: Any) -> MaskDescription:  # type: ignore[override]
        """A copy for another device, for models spread over several; block lists are moved, also those that are made later, but tensors
        that mods read are not. Numbers about few rows belong to a CPU and are left out elsewhere."""
        way, listed = self.way, self._listed
        if isinstance(way, Listed):
            way = way.to(device)
        elif isinstance(way, Cached):
            moved = [None if t is None else t.to(device) for t in (way.lengths, way.leftpad)]
            way = Cached(moved[0], moved[1], *way[2:])
        stays_on_cpu = torch.device(device).type == "cpu"
        later = None if listed is None else lambda: listed().to(device)
        other = MaskDescription(self.batch, self.seq_lengths, way, self.rows if stays_on_cpu else None, later)
        other.is_decoding, other.has_documents = self.is_decoding and stays_on_cpu, self.has_documents
        return other

    def with_gradients(self) -> Way:
        """The call of the layers, replaced by one with gradients if it has none."""
        if isinstance(self.way, Cached) and self._listed is not None:
            self.way, self._listed = self._listed(), None
        return self.way

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias of ``rows`` on scores, (B, 1, 1, hi - lo), 0 or -inf; computed at the first layer."""
        rows = self.rows
        if rows is None or rows.hidden is None:
            return None
        found = self._biases.get(dtype)
        if found is None:
            found = torch.zeros_like(rows.hidden, dtype=dtype).masked_fill_(rows.hidden, float("-inf"))[:, None, None]
            self._biases[dtype] = found
        return found

    def __repr__(self) -> str:
        return f"MaskDescription(shape={self.shape}, {self.way!r})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> MaskDescription:
        raise TypeError(
            f"the mask of attn_implementation='anyattn' is indexed by {index!r}, but has no elements; wanted a model that does not edit "
            "its mask: use attn_implementation='sdpa' or 'eager' for this one"
        )
