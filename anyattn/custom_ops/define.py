"""Definition of custom operators as by ``torch.library.custom_op``, without the checks that it repeats at every call.

Those checks take longer than a warm call of attention. What they would find (results that share memory with arguments or with one another)
is tested instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._C._dynamo import eval_frame

__all__ = ["opaque", "operator"]

_library = torch.library.Library("anyattn", "FRAGMENT")


def operator(fn: Callable[..., Any]) -> Any:
    """Decorates the implementation of ``anyattn::NAME``, on every device, NAME being the function's; the operator takes its place.

    It changes none of its arguments, and its results are new memory.
    """
    name = fn.__name__
    _library.define(name + torch.library.infer_schema(fn, mutates_args=()), tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, opaque(fn), "CompositeExplicitAutograd")
    return getattr(torch.ops.anyattn, name).default


def opaque(fn: Callable[..., Any]) -> Callable[..., Any]:
    """``fn``, which Dynamo passes over with all that it calls, where it is called and not inlined."""
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return fn
