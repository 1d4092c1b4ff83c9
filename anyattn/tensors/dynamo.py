"""Functions that Dynamo passes over: the eager path of the entry points, which a compiled program may reach where a graph breaks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch._C._dynamo import eval_frame

__all__ = ["opaque"]

_Function = TypeVar("_Function", bound=Callable)


def opaque(fn: _Function) -> _Function:
    """``fn``, which Dynamo passes over with all that it calls, where it is called and not inlined.

    Where Dynamo gives up a frame (inside of ``torch.func.grad``, say, or at a recompile limit) it still compiles each function that the
    frame calls.
    """
    skip = eval_frame._FrameAction.SKIP
    eval_frame.set_code_exec_strategy(fn.__code__, eval_frame._FrameExecStrategy(skip, skip))
    return fn
