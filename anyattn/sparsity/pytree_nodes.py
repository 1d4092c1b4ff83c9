"""Block lists to torch: pytree nodes, which ``torch.export`` and ``torch.func`` take apart and put together, and which are saved."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["register", "unchecked"]


def unchecked(cls: Any, names: tuple[str, ...], values: tuple) -> Any:
    """An object of a frozen dataclass with these fields, without the checks of its making; also for Dynamo to trace."""
    made = object.__new__(cls)
    for name, value in zip(names, values):
        object.__setattr__(made, name, value)
    return made


def register(cls: type, tensors: tuple[str, ...], constants: tuple[str, ...]) -> None:
    """Registers a dataclass. tensors: its fields that are leaves. constants: those that are (pairs of) numbers or None.

    What is put together again is not checked: its tensors may stand for anything, and were checked when the lists were made.
    """

    def flatten(lists: Any) -> tuple[list[Any], tuple]:
        return [getattr(lists, name) for name in tensors], tuple(getattr(lists, name) for name in constants)

    def flatten_with_keys(lists: Any) -> tuple[list[tuple[Any, Any]], tuple]:
        leaves, context = flatten(lists)
        return [(pytree.GetAttrKey(name), leaf) for name, leaf in zip(tensors, leaves, strict=True)], context

    def unflatten(leaves: Any, context: Any) -> Any:
        return unchecked(cls, (*tensors, *constants), (*leaves, *context))

    pytree.register_pytree_node(
        cls,
        flatten,
        unflatten,
        serialized_type_name=f"anyattn.{cls.__name__}",
        to_dumpable_context=lambda context: [None if x is None else list(x) for x in context],
        from_dumpable_context=lambda context: tuple(None if x is None else tuple(x) for x in context),
        flatten_with_keys_fn=flatten_with_keys,
    )
    torch.serialization.add_safe_globals([cls])  # torch.export saves a program's example inputs, and loads tensors and known classes alone
