"""Checks of ``out=``: memory of the caller's for a call's first result."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from anyattn.kvcache.append import reaches, shared
from anyattn.tensors.kinds import has_memory

__all__ = ["check_out", "check_out_memory", "write_out"]

_NO_TENSORS = frozenset((type(None), bool, int, float, str, tuple))  # isinstance takes half a microsecond to say no


def check_out(out: Any, q: Any, v: Any) -> None:
    """Raises ``TypeError`` or ``ValueError`` for an ``out`` that is not as the result of queries q and values v.

    >>> check_out(torch.empty(5, 2, 8), torch.empty(5, 2, 16), torch.empty(9, 2, 16))
    Traceback (most recent call last):
    ValueError: out has shape (5, 2, 8); wanted (5, 2, 16), that of q with the head dimension of v
    """
    if not isinstance(q, Tensor) or not isinstance(v, Tensor):
        return  # refused by the call's own checks
    if not isinstance(out, Tensor):
        raise TypeError(f"out is a {type(out).__name__}; wanted a torch.Tensor, or None for a new one")
    wanted = (*q.shape[:-1], *v.shape[-1:])
    if out.shape != wanted:
        raise ValueError(f"out has shape {tuple(out.shape)}; wanted {tuple(wanted)}, that of q with the head dimension of v")
    if out.dtype != q.dtype or out.device != q.device:
        raise ValueError(
            f"out is {out.dtype} on {out.device}; wanted {q.dtype} on {q.device}, as q: pass "
            f"out=torch.empty_like(out, dtype={q.dtype}, device={str(q.device)!r}), or copy the result"
        )
    if out.requires_grad and torch.is_grad_enabled():
        raise ValueError("out requires grad, but a call that is given out has no gradients: pass a tensor that requires none")
    if not torch.compiler.is_compiling() and out.is_inference() and not torch.is_inference_mode_enabled():
        raise ValueError("out was made in torch.inference_mode(), and outside it torch writes to no such tensor: pass out=out.clone()")


def check_out_memory(out: Tensor, tensors: Iterable[tuple[str, Any]]) -> None:
    """Raises ``ValueError`` for an ``out`` some of whose elements are one, or that shares an element with one of the call's tensors.

    >>> q = torch.zeros(5, 2, 16)
    >>> check_out_memory(q, [("q", q)])
    Traceback (most recent call last):
    ValueError: out and q share memory (shapes (5, 2, 16) and (5, 2, 16), strides (32, 16, 1) and (32, 16, 1), q 0 bytes behind out), and \
out is written while q is read; wanted memory of its own: out=torch.empty_like(out)
    """
    if any(size > 1 and stride == 0 for size, stride in zip(out.shape, out.stride(), strict=True)):
        raise ValueError(f"out has shape {tuple(out.shape)} and strides {out.stride()}: a dimension is expanded; wanted memory of its own")
    if not has_memory(out):
        return
    start, (reach,) = out.data_ptr(), reaches(out)
    for name, x in tensors:
        if type(x) not in _NO_TENSORS and isinstance(x, Tensor) and _reaches_into(x, start, start + reach):
            text = shared("out", out, name, x)
            if text is not None:
                raise ValueError(f"{text}, and out is written while {name} is read; wanted memory of its own: out=torch.empty_like(out)")


def _reaches_into(x: Tensor, start: int, end: int) -> bool:
    """Whether a tensor has memory between two addresses, itself or between its elements."""
    try:
        address = x.data_ptr()
    except RuntimeError:  # of a tensor without memory
        return False
    return address < end and start < address + reaches(x)[0]


def write_out(out: Tensor, result: Tensor) -> Tensor:
    """``out`` with the result; raises ``ValueError`` for a result with gradients."""
    if result.requires_grad:
        raise ValueError("out is given, but the call has gradients; wanted torch.no_grad() around the call, or out=None")
    return out.copy_(result)
