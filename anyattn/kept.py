"""Results kept for tensors as long as they live and nobody writes into them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["kept"]

_MOST = 64
_results: OrderedDict[tuple, tuple] = OrderedDict()


def kept(tensors: tuple[Tensor | None, ...], facts: Hashable, make: Callable[[], Any]) -> Any:
    """``make()``, which depends on what ``tensors`` hold and on ``facts``; made once, until one of them dies or is written to.

    Only writes that torch counts are noticed. Nothing is kept for inference tensors, which count none, nor while a CUDA graph is captured,
    whose replays read what the tensors hold by then. At most 64 results are kept.

    >>> a = torch.zeros(2)
    >>> first = kept((a,), "sum", lambda: a.sum())
    >>> kept((a,), "sum", lambda: a.sum()) is first, kept((a.add_(1),), "sum", lambda: a.sum()) is first
    (True, False)
    """
    given = [t for t in tensors if t is not None]
    is_captured = any(t.is_cuda for t in given) and torch.cuda.is_current_stream_capturing()
    if is_captured or any(t.is_inference() for t in given):
        return make()
    key = (facts, *(None if t is None else id(t) for t in tensors))
    versions = [t._version for t in given]
    known = _results.get(key)
    if known is not None and known[1] == versions and all(ref() is t for ref, t in zip(known[0], given, strict=True)):
        _results.move_to_end(key)
        return known[2]
    value = make()
    _results[key] = ([weakref.ref(t) for t in given], versions, value)
    _results.move_to_end(key)
    while len(_results) > _MOST:
        _results.popitem(last=False)
    return value
