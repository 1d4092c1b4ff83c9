"""Recognition of mods that FlashAttention and SDPA have options for (full, causal, windows), by evaluating every pair of the mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.gallery import Mods
from anyattn.testing.harness.dense import entries_and_heads

__all__ = ["native_options"]

_ROWS_AT_ONCE = 1024


def native_options(mods: Mods, seqlen: int, device: str) -> dict[str, Any] | None:
    """The keywords of ``flash_attn_func`` with the same meaning over ``seqlen`` queries and keys; None if it has none.

    >>> from anyattn import masks
    >>> native_options(Mods(masks.causal()), 64, "cpu"), native_options(Mods(masks.sliding_window(8, 0)), 64, "cpu")
    ({'causal': True}, {'window_size': (8, 0)})
    """
    if mods.score is not None or any(entries_and_heads(mods)):
        return None
    if mods.mask is None:
        return {}
    first, last = (_seen(mods.mask, torch.tensor([row], device=device), seqlen)[0].nonzero() for row in (0, seqlen - 1))
    if not len(first) or not len(last):
        return None
    left, right = seqlen - 1 - int(last[0]), int(first[-1])
    for start in range(0, seqlen, _ROWS_AT_ONCE):
        rows = torch.arange(start, min(start + _ROWS_AT_ONCE, seqlen), device=device)
        distance = rows[:, None] - torch.arange(seqlen, device=device)
        if not torch.equal(_seen(mods.mask, rows, seqlen), (distance <= left) & (distance >= -right)):
            return None
    return _named(left, right, seqlen)


def _seen(mask: Any, rows: Tensor, seqlen: int) -> Tensor:
    zero, keys = torch.zeros((), dtype=torch.int64, device=rows.device), torch.arange(seqlen, device=rows.device)
    return mask(zero, zero, rows[:, None], keys).expand(len(rows), seqlen)


def _named(left: int, right: int, seqlen: int) -> dict[str, Any]:
    left, right = (-1 if side == seqlen - 1 else side for side in (left, right))
    if (left, right) == (-1, -1):
        return {}
    return {"causal": True} if (left, right) == (-1, 0) else {"window_size": (left, right)}
