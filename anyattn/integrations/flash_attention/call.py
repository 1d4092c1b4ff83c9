"""Calls of FlashAttention's functions while they are replaced."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from anyattn.integrations.replaced_calls import count_refused, count_taken

__all__ = ["common", "computed", "computed_with_cache"]


def computed(function: Any, *arguments: Any, **options: Any) -> Any:
    """The result of a function of anyattn, counted."""
    if is_compiling():
        result = function(*arguments, **options)
        count_taken()
        return result
    try:
        result = function(*arguments, **options)
    except Exception as error:
        count_refused(f"{type(error).__name__}: {error}")
        raise
    count_taken()
    return result


def computed_with_cache(function: Any, *arguments: Any, **options: Any) -> Any:
    """(out, lse) of ``flash_attn_with_kvcache``, which takes tensors that require grad as FlashAttention does; backward() raises."""
    if is_compiling() or not torch.is_grad_enabled():
        return computed(function, *arguments, **options, return_lse=True)
    with torch.no_grad():
        out, lse = computed(function, *arguments, **options, return_lse=True)
    if any(isinstance(t, Tensor) and t.requires_grad for t in (*arguments, *options.values())):
        text = b"flash_attn_with_kvcache has no gradients; wanted flash_attn_varlen_func to train"
        refuse_backward = torch._C._functions.DelayedError(text, 2)  # type: ignore[attr-defined]
        out, lse = refuse_backward(out.requires_grad_(), lse.requires_grad_())
    return out, lse


def common(causal: Any, window_size: Any, softcap: Any, dropout_p: float = 0.0) -> dict[str, Any]:
    """anyattn's options for FlashAttention's: there a side of the window below 0 and a softcap of 0 or less mean none."""
    window = [-1 if side is None or side < 0 else side for side in window_size]
    options = {"causal": bool(causal), "window_size": window, "softcap": softcap if softcap > 0 else 0}
    return options | {"dropout_p": dropout_p} if dropout_p else options
