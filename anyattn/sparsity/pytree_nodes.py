"""Pytree registration of block lists: ``torch.export`` and ``torch.func`` flatten and unflatten them, and exported programs save them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

__all__ = ["register", "unchecked"]


def unchecked(cls: Any, names: tuple[str, ...], values: tuple) -> Any:
    """An object of a frozen dataclass with these fields, made without the checks of ``__post_init__``; Dynamo can trace it."""
    instance = object.__new__(cls)
    for name, value in zip(names, values):
        object.__setattr__(instance, name, value)
    return instance


def register(cls: type, tensors: tuple[str, ...], constants: tuple[str, ...]) -> None:
    """Registers a dataclass. tensors: the fields that are leaves. constants: the fields that are pairs of numbers or None.

    Unflattening checks nothing: a leaf may be any placeholder, and the tensors were checked when the lists were made.
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
    torch.serialization.add_safe_globals([cls])  # torch.export saves a program's example inputs; only tensors and known classes are loaded
