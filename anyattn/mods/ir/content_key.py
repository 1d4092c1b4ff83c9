"""Content keys of expressions: hashes that are equal for mods with equal programs.

A key covers structure, dtypes and the ranks of captured tensors (the number of a load's indices), never values, shapes or object
identities. It is the same in every process, so it can name files in a cache.
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
    """A hash of ``parts`` (tuples of dtypes, strings, numbers, None), 32 hexadecimal digits.

    >>> content_key("a", 1) == content_key("a", 1), content_key("a", 1) == content_key("a", 1.0)
    (True, False)
    """
    return hashlib.sha256(_text(parts).encode()).hexdigest()[:32]
