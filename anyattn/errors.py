"""The exceptions that anyattn raises beyond Python's own.

Bad arguments raise ``ValueError`` or ``TypeError``; the classes here add what those two cannot say.
"""

from __future__ import annotations

__all__ = ["BackendError", "ModError"]


class ModError(ValueError):
    """A ``score_mod`` or ``mask_mod`` says something that no backend could run.

    The message quotes the source line and proposes the change that makes it legal.
    """


class BackendError(RuntimeError):
    """A backend was named explicitly and cannot run this call; the message says why and what could."""
