"""Calls of native CuTe mods inside the kernel, with scores and positions as one-element TensorSSA vectors."""

from typing import Any

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from anyattn.mods.ir.expr import INDICES, Node, category
from anyattn.mods.tracing.cute_mod import NativeFunction

__all__ = ["call_native"]


def call_native(node: Node, args: list[Any]) -> Any:
    """The function's value for one score: Float32, or Boolean for a mask.

    args: the arguments of a ``native`` node: the score of a score mod, b, h, q_idx, kv_idx, then the tensors, which are passed as a tuple.
    Raises ``TypeError`` while the kernel is built if the function returns something else.
    """
    assert isinstance(node.attr, NativeFunction)
    is_mask, function = category(node.dtype) == "bool", node.attr.function
    inputs = [] if is_mask else [_vector(args[0], Float32)]
    places = args[len(inputs) :][: len(INDICES)]
    inputs += [_vector(place, Int32) for place in places]
    found = function(*inputs, tuple(args[len(inputs) :]))
    return _value(found, Boolean if is_mask else Float32, f"{'mask' if is_mask else 'score'}_mod {function.__name__!r}")


def _vector(value: Any, dtype: Any) -> Any:
    return cute.full((1,), dtype(value), dtype)


def _value(found: Any, dtype: Any, name: str) -> Any:
    """The single element of a vector, or a scalar itself, as ``dtype``."""
    if isinstance(found, cute.TensorSSA):
        if cute.size(found.shape) != 1:
            raise TypeError(f"{name} returned a TensorSSA of shape {found.shape}; wanted that of its arguments, (1,)")
        found = found[0]
    made = getattr(found, "dtype", type(found))
    is_right = made in (Boolean, bool) if dtype is Boolean else made is float or getattr(made, "is_float", False)
    if not is_right:
        wanted = "Boolean, as comparisons give" if dtype is Boolean else "the score's, Float32: convert with .to(cutlass.Float32)"
        raise TypeError(f"{name} returned {getattr(made, '__name__', made)}; wanted {wanted}")
    return found if isinstance(found, bool) else dtype(found)
