"""``replace_flex_attention``: programs that call torch's ``flex_attention`` or ``varlen_attn`` run on anyattn without an edit.

Programs hold torch's function in many ways: imported by name, compiled when a module was imported, stored in a singleton. So the function
object stays the same, and its code is replaced by that of ``_flex``: all references run the new code, compiled callers too, because
Dynamo guards on a function's code. Undoing restores torch's code.

This module does not import torch: ``autoload`` runs at the end of ``import torch``.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from types import CodeType

from anyattn.integrations.replacement import Replacement
from anyattn.integrations.torchs_function import torchs_function

__all__ = ["Replacement", "autoload", "replace_flex_attention"]

VARIABLE, VARIABLE_OF_FLASH = "ANYATTN_REPLACE_FLEX_ATTENTION", "ANYATTN_REPLACE_FLASH_ATTENTION"


def replace_flex_attention() -> Replacement:
    """Lets anyattn compute every call of torch's ``flex_attention`` and ``varlen_attn`` in this process, eager and compiled.

    The functions are those of ``torch.nn.attention.flex_attention`` and ``torch.nn.attention.varlen`` (where torch has it). It does not
    matter how a program holds them, or whether they were compiled before. Calls that anyattn refuses run on torch's own function, with one
    warning per reason; ``replaced()`` counts both. ``kernel_options`` without a meaning here are ignored.

    The replacement holds for all threads, until ``undo()`` of the returned object or the end of its ``with`` block; if several are active,
    until the last one ends. For programs that cannot be edited, the environment variable ``ANYATTN_REPLACE_FLEX_ATTENTION=1`` does the same
    for the whole process.

    Raises ``RuntimeError`` if torch's ``flex_attention`` is not the one that this version of anyattn knows; of ``varlen_attn`` it warns.

    >>> import torch
    >>> from anyattn import replaced
    >>> from torch.nn.attention.flex_attention import flex_attention
    >>> q, before = torch.randn(1, 2, 32, 16), replaced().taken
    >>> with replace_flex_attention():
    ...     out = flex_attention(q, q, q)
    >>> replaced().taken - before
    1
    """
    return Replacement(_flex_function, _varlen_function)


class _Function:
    """One function of torch whose code is replaced. codes: the code for each number of arguments that it has in a version of torch."""

    def __init__(self, name: str, *dispatching: Callable, is_needed: bool) -> None:
        codes = [f.__code__.replace(co_name=name) for f in dispatching]  # one object each, so that Dynamo's guards recognise it
        self._codes: dict[int, CodeType] = {c.co_argcount + c.co_kwonlyargcount: c for c in codes}
        self._name, self._is_needed, self._users = name, is_needed, 0

    def enter(self) -> None:
        try:
            torchs = torchs_function(self._name)
        except ModuleNotFoundError:
            return  # torch before 2.10 has no varlen_attn
        except RuntimeError as error:
            if self._is_needed:
                raise
            return warnings.warn(f"torch's {self._name} is not replaced by anyattn's: {error}", stacklevel=5)
        if self._users == 0:
            torchs.function.__code__ = self._codes[len(torchs.arguments)]
        self._users += 1

    def leave(self) -> None:
        if self._users == 0:
            return  # it could not be replaced
        self._users -= 1
        if self._users == 0:
            torchs = torchs_function(self._name)
            torchs.function.__code__ = torchs.code


# Their code runs inside torch's functions: defaults are torch's, and globals are those of torch's modules.
def _flex(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, *, return_aux):  # type: ignore
    from anyattn.integrations.torch_flex_call import flex_attention

    return flex_attention(query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux)


def _varlen(
    query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size, enable_gqa, seqused_k, block_table, num_splits
):  # type: ignore
    from anyattn.integrations.torch_varlen_call import varlen_attn

    others = {"enable_gqa": enable_gqa, "seqused_k": seqused_k, "block_table": block_table, "num_splits": num_splits}
    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size, others)


def _varlen_of_2_11(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, return_aux, scale, window_size):  # type: ignore
    from anyattn.integrations.torch_varlen_call import varlen_attn

    return varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, return_aux, scale, window_size, {})


_flex_function = _Function("flex_attention", _flex, is_needed=True)
_varlen_function = _Function("varlen_attn", _varlen, _varlen_of_2_11, is_needed=False)


def autoload() -> None:
    """The ``torch.backends`` entry point, which torch calls at the end of ``import torch``; replaces what the variables say."""
    _autoload(VARIABLE, "torch's flex_attention", {"1": lambda: replace_flex_attention()}, "1")
    _autoload(VARIABLE_OF_FLASH, "FlashAttention", {"1": _flash(2, 3), "2": _flash(2), "3": _flash(3)}, "1 (FlashAttention 2 and 3), 2, 3")


def _flash(*versions: int) -> Callable:
    def replace() -> None:
        from anyattn.integrations.flash_attention import replace_flash_attention

        replace_flash_attention(versions)

    return replace


def _autoload(variable: str, what: str, replacements: dict[str, Callable], wanted: str) -> None:
    asked = os.environ.get(variable, "")
    if asked in ("", "0"):
        return
    try:
        if asked not in replacements:
            raise ValueError(f"{variable}={asked!r}; wanted {wanted} or 0")
        replacements[asked]()
    except Exception as error:  # an exception here would make `import torch` fail
        warnings.warn(f"{what} is not replaced by anyattn's: {error}", stacklevel=3)
