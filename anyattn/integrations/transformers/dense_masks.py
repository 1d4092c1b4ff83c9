"""Dense masks and biases as mods: tensors of the user's with one element per (query, key) pair."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["fitted", "mask_of", "score_of"]


def fitted(name: str, given: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """``given`` as (B, H, Sq, Sk), without a copy; keys beyond the layer's are cut off, as in Transformers' eager attention."""
    batch, heads, rows = query.shape[:3]
    keys = key.shape[2]
    wanted = f"wanted ({batch} or 1, {heads} or 1, {rows} or 1, at least {keys})"
    if given.ndim != 4 or given.shape[3] < keys:
        raise ValueError(f"{name} has shape {tuple(given.shape)}; {wanted}")
    for size, whole in zip(given.shape[:3], (batch, heads, rows), strict=True):
        if size not in (1, whole):
            raise ValueError(f"{name} has shape {tuple(given.shape)}; {wanted}")
    if given.dtype is not torch.bool and not given.is_floating_point():
        raise TypeError(
            f"{name} has dtype {given.dtype}; wanted torch.bool, True where a key is visible, or a float dtype, added to scores"
        )
    if name == "position_bias" and given.dtype is torch.bool:
        raise TypeError(f"{name} has dtype torch.bool; wanted a float dtype, it is added to scores")
    return given[..., :keys].expand(batch, heads, rows, keys)


def mask_of(visible: Tensor) -> Callable:
    """A mask mod that reads ``visible``, bool (B, H, Sq, Sk)."""
    return lambda b, h, q_idx, kv_idx: visible[b, h, q_idx, kv_idx]


def score_of(softcap: float | None, *added: Tensor | None) -> Callable | None:
    """A score mod: first the cap ``softcap * tanh(score / softcap)``, then each tensor (B, H, Sq,
    Sk) is added; None if there is nothing to do."""
    terms = [t for t in added if t is not None]
    if softcap is None and not terms:
        return None
    if len(terms) == 2:
        first, second = terms
        if softcap is None:
            return lambda score, b, h, q, kv: score + first[b, h, q, kv] + second[b, h, q, kv]
        return lambda score, b, h, q, kv: softcap * torch.tanh(score / softcap) + first[b, h, q, kv] + second[b, h, q, kv]
    if len(terms) == 1:
        (only,) = terms
        if softcap is None:
            return lambda score, b, h, q, kv: score + only[b, h, q, kv]
        return lambda score, b, h, q, kv: softcap * torch.tanh(score / softcap) + only[b, h, q, kv]
    return lambda score, b, h, q, kv: softcap * torch.tanh(score / softcap)  # type: ignore[operator]
