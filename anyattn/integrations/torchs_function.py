"""torch's own ``flex_attention`` and ``varlen_attn``: the function object, its original code, and a function that always runs that code."""

from __future__ import annotations

import importlib
import threading
import types
from typing import Any

__all__ = ["TorchsFunction", "torchs_function"]

_VARLEN = ("query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k", "return_aux", "scale", "window_size")
_KNOWN: dict[str, tuple[str, list[tuple[str, ...]]]] = {  # by name: the module, and the arguments in each version of torch
    "flex_attention": (
        "torch.nn.attention.flex_attention",
        [("query", "key", "value", "score_mod", "block_mask", "scale", "enable_gqa", "return_lse", "kernel_options", "return_aux")],
    ),
    "varlen_attn": ("torch.nn.attention.varlen", [(*_VARLEN, "enable_gqa", "seqused_k", "block_table", "num_splits"), _VARLEN]),
}
_lock = threading.Lock()


class TorchsFunction:
    """function: the object that programs hold. code: torch's code. own: another function that always runs it. arguments: their names.

    Raises ``RuntimeError`` if torch's module holds another function than one that this version of anyattn knows.
    """

    def __init__(self, name: str) -> None:
        home, known = _KNOWN[name]
        module = importlib.import_module(home)
        self.function = function = getattr(module, name)
        if type(function) is not types.FunctionType or function.__globals__ is not vars(module):
            raise RuntimeError(f"{home}.{name} is {function!r}, which is not torch's function: something else has replaced it")
        self.code = code = function.__code__
        self.arguments = found = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        if found not in known or function.__closure__:
            raise RuntimeError(
                f"torch's {name} takes ({', '.join(found)}); wanted ({', '.join(known[0])}): this torch cannot be replaced, call "
                "anyattn's own"
            )
        self.own: Any = types.FunctionType(code, function.__globals__, function.__name__, function.__defaults__)
        for attribute in ("__kwdefaults__", "__module__", "__doc__", "__annotations__"):
            setattr(self.own, attribute, getattr(function, attribute))


_found: dict[str, TorchsFunction] = {}


def torchs_function(name: str = "flex_attention") -> TorchsFunction:
    """One object for the process, made before torch's code is first replaced. Raises as ``TorchsFunction``."""
    with _lock:
        if name not in _found:
            _found[name] = TorchsFunction(name)
        return _found[name]
