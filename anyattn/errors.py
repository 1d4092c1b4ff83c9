"""Exceptions of anyattn beyond Python's own.

Bad arguments raise ``ValueError`` or ``TypeError``; the classes here are for the other errors, and for mods.
"""

from __future__ import annotations

__all__ = ["BackendError", "ModError", "OutOfPagesError"]


class ModError(ValueError):
    """A ``score_mod`` or ``mask_mod`` uses something that cannot be traced or computed.

    The message quotes the source line and proposes the change that makes it legal.
    """


class BackendError(RuntimeError):
    """A backend was named explicitly and cannot run this call; the message says why and names an alternative."""


class OutOfPagesError(RuntimeError):
    """A ``PagedKVCache`` has too few free pages; the message says how many are needed and how many are free. The cache is unchanged."""
