"""Content keys of expressions: equal for mods that are the same program.

A key covers structure, dtypes and the ranks of captured tensors (the number of a load's indices), never values, shapes or object
identities; it is the same in every process, so that it can name files in a cache.
"""

from __future__ import annotations

import hashlib

import torch

__all__ = ["content_key"]


def _text(item: object) -> str:
    if isinstance(item, tuple):
        return "(" + ",".join(map(_text, item)) + ")"
    if isinstance(item, type):
        return item.__name__
    if isinstance(item, (torch.dtype, str, int, float)) or item is None:
        return repr(item)
    raise AssertionError(f"{type(item).__name__} has no place in a content key")


def content_key(*parts: object) -> str:
    """32 hexadecimal digits that name ``parts`` (tuples of dtypes, strings, numbers, None) by their content.

    >>> content_key("a", 1) == content_key("a", 1), content_key("a", 1) == content_key("a", 1.0)
    (True, False)
    """
    return hashlib.sha256(_text(parts).encode()).hexdigest()[:32]
