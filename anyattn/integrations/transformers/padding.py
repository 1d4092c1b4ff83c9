"""Padding of a batch: turns Transformers' 2-D attention mask into rows that a call skips."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from anyattn.sequences.unread_kvcache import room_for

__all__ = ["NO_PADDING", "Padding", "padding_of", "padding_read"]


class Padding(NamedTuple):
    """The keys of a batch that are hidden as padding.

    leftpad: integers (B,), rows before the first visible key, None for 0. visible: bool (B, positions), set unless leftpad is known to
    describe the whole padding; in global positions, up to the end of the keys. positions: the same, set whenever there is padding.
    """

    leftpad: Tensor | None
    visible: Tensor | None
    positions: Tensor


NO_PADDING = Padding(None, None, torch.empty(0, 0, dtype=torch.bool, device="cpu"))


def padding_of(attention_mask: Tensor, kv_offset: int, kv_length: int) -> Padding:
    """Padding whose contents are not read: leftpad is computed on the device, and the mask itself hides all other padding.

    Outside compiled graphs the mask's shape is the same for several decoding steps, which then share their mods.
    """
    end = kv_offset + kv_length
    if not torch.compiler.is_compiling():
        end = room_for(max(end, attention_mask.shape[1]))
    positions = _reaching(attention_mask, end)
    first = positions[:, kv_offset : kv_offset + kv_length].view(torch.uint8).argmax(dim=1)
    return Padding(first, positions, positions)


def padding_read(attention_mask: Tensor, kv_offset: int, end: int, kv_length: int) -> Padding:
    """Padding from its contents; keys from row ``end`` on are ignored."""
    seen = _reaching(attention_mask, kv_offset + end)[:, kv_offset : kv_offset + end]
    if bool(seen.all()):
        if kv_offset == 0 or bool(attention_mask.all()):
            return NO_PADDING
        # the window has passed the padding: the same form as before, so that a compiled step is not recompiled
        return Padding(seen.new_zeros(seen.shape[0], dtype=torch.int32), None, seen)
    positions = _reaching(attention_mask, kv_offset + kv_length)
    first = seen.to(torch.int32).argmax(dim=1).to(torch.int32)
    is_left = bool((seen.sum(dim=1) == end - first).all())
    return Padding(first, None, positions) if is_left else Padding(None, positions, positions)


def _reaching(attention_mask: Tensor, end: int) -> Tensor:
    """The mask over at least ``end`` positions; positions beyond it are hidden, as in Transformers."""
    mask = attention_mask if attention_mask.dtype is torch.bool else attention_mask.to(torch.bool)
    missing = end - mask.shape[1]
    return torch.nn.functional.pad(mask, (0, missing)) if missing > 0 else mask
