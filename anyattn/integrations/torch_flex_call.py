"""Calls of torch's ``flex_attention`` while it is replaced: anyattn computes them or passes them on to torch's own function."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.compiler import is_compiling, is_dynamo_compiling

from anyattn import flex
from anyattn.custom_ops import entry_point
from anyattn.integrations.replaced_calls import count_passed_on, count_taken
from anyattn.integrations.torchs_function import torchs_function

__all__ = ["computed", "flex_attention"]

_OWN_OPTIONS = frozenset(("tile_m", "tile_n", "num_splits", "autotune", "pack_gqa"))
_PLAIN = (Tensor, torch.nn.Parameter)
_torchs, _anyattns = torchs_function().own, flex.flex_attention  # not through modules: Dynamo guards each module on the path to a function


@entry_point
def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: Any,
    enable_gqa: bool,
    return_lse: bool,
    kernel_options: Any,
    return_aux: Any,
) -> Any:
    """The result of torch's function for these arguments, computed by anyattn unless it refuses. Dynamo traces this function too."""
    given = (query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
    return computed(_flex, _torchs, given, {}, return_aux)


def _flex(*given: Any, return_aux: Any) -> Any:
    options = given[8] and {name: value for name, value in given[8].items() if name in _OWN_OPTIONS}
    others: Any = {"kernel_options": options or None, "deterministic": are_deterministic_algorithms_enabled()}
    return _anyattns(*given[:8], return_aux=return_aux, **others)


def computed(anyattns: Any, torchs: Any, given: tuple, options: dict[str, Any], return_aux: Any) -> Any:
    """The result of a call of torch's function, by anyattn's function of these arguments unless it refuses. Dynamo traces this one too."""
    is_traced = is_dynamo_compiling()
    refusal = None if is_compiling() else _reason_against(*given[:3])
    if refusal is None:
        try:
            result = anyattns(*given, return_aux=return_aux, **options)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            refusal = None if is_traced else _told(error)  # Dynamo cannot trace str(error)
        else:
            count_taken()
            return result
    if is_traced:
        result = torchs(*given, return_aux=return_aux, **options)
        _count_traced()
        return result
    try:
        result = torchs(*given, return_aux=return_aux, **options)
    except Exception as error:  # torch refuses too: raise its error, with anyattn's refusal as the cause
        error.__cause__ = error.__cause__ or RuntimeError(f"anyattn refused the call before: {refusal}")
        raise
    count_passed_on(torchs.__name__, str(refusal))
    return result


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _count_traced() -> None:
    """Counts a call that Dynamo passes on to torch's own; the operator has stored the refusal."""
    from anyattn.custom_ops.capture import call_with_mods

    error, call_with_mods.refusal = call_with_mods.refusal, None
    count_passed_on("function", "an argument is refused while Dynamo traces the call" if error is None else _told(error))


def _reason_against(*tensors: Any) -> str | None:
    """The reason why an eager call of these tensors is passed on at once; None if anyattn should try it."""
    for x in tensors:
        if type(x) not in _PLAIN:
            return f"a {type(x).__name__} comes as query, key or value; anyattn computes plain tensors"
    if torch._C._are_functorch_transforms_active():
        return "a torch.func transform (grad, vmap, jvp) is active"
    return None


_count_traced._dynamo_marked_constant = True  # type: ignore[attr-defined] # as ``count_taken``
