"""Functions that Dynamo skips: the eager path of the entry points, which a compiled program may reach after a graph break."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["opaque"]

_Function = TypeVar("_Function", bound=Callable)


def opaque(fn: _Function) -> _Function:
    """``fn``, marked so that Dynamo skips it and everything that it calls, unless it is inlined.

    If Dynamo gives up on a frame (for example inside ``torch.func.grad``, or at a recompile limit) it still compiles each function that the
    frame calls.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return fn
