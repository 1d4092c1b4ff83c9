"""Which keys a query of a vLLM batch sees: causality, the layer's window, prefixes of a request, and a layer's own mask.

Positions are those in the request, as in ``anyattn.flash_attn_with_kvcache``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from anyattn.mods import masks

__all__ = ["Prefix", "SharedRanges", "Visibility", "visibility"]

Mask = Callable[..., Tensor]


class Visibility(NamedTuple):
    """causal, window_size, mask_mod: of ``flash_attn_with_kvcache``, which combines them."""

    causal: bool
    window_size: tuple[int, int] = (-1, -1)
    mask_mod: Mask | None = None


class Prefix(NamedTuple):
    """Reference sliding windows: keys before ``lengths[b]`` are seen by all, others by the next ``window`` queries, themselves included."""

    lengths: Tensor
    window: int


class SharedRanges(NamedTuple):
    """Keys that the tokens of an image share in both directions.

    of_tokens: (tokens, 2), the first and the last position of the range of each packed query token; -1 for a token of no image.
    """

    of_tokens: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor


def visibility(
    causal: bool | Tensor,
    sliding_window: int | None,
    *,
    mask_mod: Mask | None = None,
    prefix: Prefix | None = None,
    shared: SharedRanges | None = None,
    clamps_shared: bool = False,
) -> Visibility:
    """causal: of the batch, or (requests,), 0 for a request that sees in both directions. sliding_window: of the layer; a query counts
    itself, and where it sees in both directions the window is as wide on the other side. mask_mod: a layer's own mask, which replaces
    causality. clamps_shared: whether the window holds for the keys before a query that ``shared`` adds."""
    reach = None if sliding_window is None else sliding_window - 1
    band = (-1, -1) if reach is None else (reach, reach)
    if shared is None and prefix is None:
        if mask_mod is not None:
            return Visibility(False, band, mask_mod)
        if isinstance(causal, Tensor):
            return Visibility(False, band, _causal_where(causal))
        return Visibility(causal, (-1 if reach is None else reach, 0) if causal else band)
    if mask_mod is None:
        mask_mod = _causal_where(causal) if isinstance(causal, Tensor) else masks.causal() if causal else masks.full()
    if shared is not None:
        mask_mod, band = _with_shared(mask_mod, reach, shared, clamps_shared), (-1, -1)
    return Visibility(False, band, mask_mod if prefix is None else _with_prefix(mask_mod, prefix))


def _causal_where(causal: Tensor) -> Mask:
    return lambda b, h, q, kv: (kv <= q) | (causal[b] == 0)


def _with_prefix(base: Mask, prefix: Prefix) -> Mask:
    lengths, window = prefix
    return lambda b, h, q, kv: base(b, h, q, kv) & ((kv < lengths[b]) | (q - kv < window))


def _with_shared(base: Mask, reach: int | None, shared: SharedRanges, clamps: bool) -> Mask:
    of_tokens, query_start_loc, seq_lens = shared
    last_token = len(of_tokens) - 1

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        token = (query_start_loc[b + 1] - seq_lens[b] + q).clamp(0, last_token)
        is_shared = (kv >= of_tokens[token, 0]) & (kv <= of_tokens[token, 1])
        seen = base(b, h, q, kv)
        if reach is None:
            return seen | is_shared
        if clamps:
            is_shared = is_shared & (q - kv <= reach)
        return (seen & (q - kv <= reach) & (kv - q <= reach)) | is_shared

    return mask_mod
