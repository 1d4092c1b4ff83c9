"""torch's own ``flex_attention``: the function object, its original code, and a function that always runs that code."""

from __future__ import annotations

import importlib
import threading
import types
from typing import Any

__all__ = ["TorchsFunction", "torchs_function"]

_MODULE = "torch.nn.attention.flex_attention"
_ARGUMENTS = (
    "query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options", "return_aux",
)  # fmt: skip
_lock = threading.Lock()


class TorchsFunction:
    """function: the object that programs hold. code: torch's code. own: another function that always runs it.

    Raises ``RuntimeError`` if torch's module holds another function than the one that this version of anyattn knows.
    """

    def __init__(self) -> None:
        module = importlib.import_module(_MODULE)
        self.function = function = module.flex_attention
        if type(function) is not types.FunctionType or function.__globals__ is not vars(module):
            raise RuntimeError(f"{_MODULE}.flex_attention is {function!r}, which is not torch's function: something else has replaced it")
        self.code = code = function.__code__
        found = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if found != _ARGUMENTS or function.__closure__:
            raise RuntimeError(
                f"torch's flex_attention takes ({', '.join(found)}); wanted ({', '.join(_ARGUMENTS)}): this torch cannot be replaced, call "
                "anyattn's own"
            )
        self.own: Any = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        for name in ("__kwdefaults__", "__module__", "__doc__", "__annotations__"):
            setattr(self.own, name, getattr(function, name))


_found: TorchsFunction | None = None


def torchs_function() -> TorchsFunction:
    """One object for the process, made before torch's code is first replaced. Raises as ``TorchsFunction``."""
    global _found
    with _lock:
        if _found is None:
            _found = TorchsFunction()
        return _found
