"""Exceptions of anyattn beyond Python's own.

Bad arguments raise ``ValueError`` or ``TypeError``; the classes here add what those two cannot say.
"""

from __future__ import annotations

__all__ = ["BackendError", "ModError", "OutOfPagesError"]


class ModError(ValueError):
    """A ``score_mod`` or ``mask_mod`` uses something that cannot be traced or computed.

    The message quotes the source line and proposes the change that makes it legal.
    """


class BackendError(RuntimeError):
    """A backend was named explicitly and cannot run this call; the message says why and what could."""


class OutOfPagesError(RuntimeError):
    """A ``PagedKVCache`` has too few free pages; the message says how many are needed and free. The cache is as it was."""
