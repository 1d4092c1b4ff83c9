"""The functions of ``flash_attn.bert_padding``: batches without their padding."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from anyattn.sequences.padding import index_first_axis, index_put_first_axis, pad_input, unpad_input

__all__ = ["index_first_axis", "index_first_axis_residual", "index_put_first_axis", "pad_input", "unpad_input",
    "unpad_input_for_concatenated_sequences"]  # fmt: skip


def index_first_axis_residual(input: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """The rows of ``input`` at ``indices``, and ``input``."""
    return index_first_axis(input, indices), input


def unpad_input_for_concatenated_sequences(hidden_states: Tensor, attention_mask_in_length: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
    """(rows, indices, cu_seqlens, max_seqlen) of batch rows that hold several sequences each.

    hidden_states: (B, S, ...). attention_mask_in_length: integers (B, S), in each row the lengths of its sequences, then zeros.
    """
    filled = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[1], device=filled.device)
    rows, indices, *_ = unpad_input(hidden_states, place < filled)
    lengths = attention_mask_in_length[attention_mask_in_length != 0]
    ends = pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
    return rows, indices, ends, int(lengths.max()) if len(lengths) else 0
