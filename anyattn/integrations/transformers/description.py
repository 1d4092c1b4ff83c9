"""``MaskDescription``: what the layers of one type see in one forward pass, and by which call each of them attends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex

from anyattn.sparsity.block_mask import BlockMask

__all__ = ["Aligned", "Cached", "FewRows", "Listed", "MaskDescription", "Masked", "Way"]


class Aligned(NamedTuple):
    """The last query sees the last key: ``flash_attn_func`` with causality and a window."""

    causal: bool
    window: tuple[int, int]


class Cached(NamedTuple):
    """Queries at the end of the rows in use: ``flash_attn_with_kvcache``.

    lengths: int32 (B,), rows of the keys in use, padding included; None is all. leftpad: integers (B,), padding rows before. mask_mod:
    a further mask over that call's positions.
    """

    lengths: Tensor | None
    leftpad: Tensor | None
    causal: bool
    window: tuple[int, int]
    mask_mod: Callable | None


class Listed(NamedTuple):
    """Block lists, made once for all layers: ``flex_attention``."""

    block_mask: BlockMask


class Masked(NamedTuple):
    """A mask mod over query and key rows, inside a compiled graph: ``flex_attention``, which finds the tiles itself."""

    mask_mod: Callable


Way = Aligned | Cached | Listed | Masked


class FewRows(NamedTuple):
    """A few query rows on a CPU: they see the keys ``lo <= kv < hi``, each up to its own row if ``is_causal``, but for those hidden.

    hidden: (B, hi - lo), None where no entry hides any of them.
    """

    lo: int
    hi: int
    hidden: Tensor | None
    is_causal: bool


class MaskDescription(torch_flex.BlockMask):
    """A mask that says what is visible instead of listing it. Light: made once a forward pass for each type of layer.

    It is a torch ``BlockMask`` by class because Transformers hands on, untouched, what is one and has four dimensions.
    """

    def __init__(self, batch: int, lengths: tuple[int, int], way: Way, rows: FewRows | None, listed: Callable[[], Listed] | None):
        """lengths: of queries and keys. rows: set where the layers have few rows on a CPU. listed: the same mask by lists, for a way that
        has no gradients."""
        self.batch = batch
        self.seq_lengths = lengths
        self.way = way
        self.rows = rows
        self.is_decoding = False  # one row on a CPU by ``way`` alone, as a graph sees it
        self.has_documents = False
        self._listed = listed
        self._biases: dict[torch.dtype, Tensor] = {}

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.batch, 1, *self.seq_lengths)

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> MaskDescription:
        """Itself: ``generate`` asks every mask for it."""
        return self

    def to(self, device: Any) -> MaskDescription:  # type: ignore[override]
        """The same on another device, for models spread over several; block lists are moved, mods read their tensors where they lie."""
        way = self.way
        if isinstance(way, Listed):
            way = Listed(way.block_mask.to(device))
        elif isinstance(way, Cached):
            moved = [None if t is None else t.to(device) for t in (way.lengths, way.leftpad)]
            way = Cached(moved[0], moved[1], *way[2:])
        other = MaskDescription(self.batch, self.seq_lengths, way, self.rows, self._listed)
        other.is_decoding, other.has_documents = self.is_decoding, self.has_documents
        return other

    def with_gradients(self) -> Way:
        """A way that has gradients."""
        if isinstance(self.way, Cached) and self._listed is not None:
            self.way, self._listed = self._listed(), None
        return self.way

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """What ``rows`` adds to scores, (B, 1, 1, hi - lo), 0 or -inf; made at the first layer."""
        rows = self.rows
        if rows is None or rows.hidden is None:
            return None
        found = self._biases.get(dtype)
        if found is None:
            found = torch.zeros(rows.hidden.shape, dtype=dtype).masked_fill_(rows.hidden, float("-inf"))[:, None, None]
            self._biases[dtype] = found
        return found

    def __repr__(self) -> str:
        return f"MaskDescription(shape={self.shape}, {self.way!r})"

    __str__ = __repr__

    def __getitem__(self, index: Any) -> MaskDescription:
        raise TypeError(
            f"the mask of attn_implementation='anyattn' is indexed by {index!r}; it lists no elements: this model edits its mask, which "
            "wants attn_implementation='sdpa' or 'eager'"
        )
