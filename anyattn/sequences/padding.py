"""Batches without their padding: the used rows of all sequences, one after the other, and back."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["index_first_axis", "index_put_first_axis", "pad_input", "unpad_input"]


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The rows of a padded batch that a mask names, one after the other, and what the varlen functions need to know of them.

    hidden_states: (B, S, ...). attention_mask: (B, S), bool or numbers, nonzero where a row is used. unused_mask: the same, nonzero where
    a row is to have room without being used.

    Returns (rows, indices, cu_seqlens, max_seqlen, seqused): rows (total, ...) with a gradient; indices int64 (total,), the place of each
    in the flattened batch, for ``pad_input``; cu_seqlens int32 (B + 1,); max_seqlen, an int that the host waits for; seqused int32 (B,),
    the rows in use of each sequence. Raises ``ValueError`` if the masks have other shapes.

    >>> import torch
    >>> rows, indices, ends, longest, used = unpad_input(torch.arange(6).view(2, 3), torch.tensor([[1, 1, 0], [0, 1, 1]]))
    >>> rows.tolist(), ends.tolist(), longest, pad_input(rows, indices, 2, 3).tolist()
    ([0, 1, 4, 5], [0, 2, 4], 2, [[0, 1, 0], [0, 4, 5]])
    """
    for name, mask in (("attention_mask", attention_mask), ("unused_mask", unused_mask)):
        if mask is not None and mask.shape != hidden_states.shape[:2]:
            shapes = f"{tuple(mask.shape)} but hidden_states has {tuple(hidden_states.shape)}"
            raise ValueError(f"{name} has shape {shapes}; wanted the first two dimensions, (batch, length)")
    used = attention_mask != 0
    has_room = used if unused_mask is None else used | (unused_mask != 0)
    lengths = has_room.sum(-1, dtype=torch.int32)
    indices = has_room.flatten().nonzero().flatten()
    longest = int(lengths.max()) if len(lengths) else 0
    ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return index_first_axis(hidden_states.flatten(0, 1), indices), indices, ends, longest, used.sum(-1, dtype=torch.int32)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The padded batch (batch, seqlen, ...) whose rows at ``indices`` are hidden_states (total, ...), as ``unpad_input`` returns them, and
    whose others are 0. Differentiable."""
    return index_put_first_axis(hidden_states, indices, batch * seqlen).view(batch, seqlen, *hidden_states.shape[1:])


def index_first_axis(x: Tensor, indices: Tensor) -> Tensor:
    """The rows ``x[indices]``; indices: integers of one dimension, each at most once."""
    return x.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """A tensor of ``first_axis_dim`` rows, ``values`` at ``indices`` and 0 elsewhere."""
    return values.new_zeros((first_axis_dim, *values.shape[1:])).index_copy(0, indices.to(torch.int64), values)
