"""Determinism of a call: nothing asked, equal bits over reruns, or equal bits whatever else is in the batch."""

from __future__ import annotations

import threading
from contextlib import ContextDecorator
from enum import IntEnum
from typing import Any

from torch.compiler import is_compiling

from anyattn.tensors.dynamo import opaque

__all__ = ["OPEN", "Determinism", "backend_and_mode", "backend_text", "batch_invariant", "is_batch_invariant", "mode_of"]

BATCH = "batch"


class Determinism(IntEnum):
    """What a call's ``deterministic`` asks for. Each value includes those before it.

    RERUNS: bitwise equal results over reruns. BATCH: the bits of a row of the output and its statistics are a function of its query, the
    keys and values that it sees at their positions, its mask and score mod, and of nothing else in the call.
    """

    NONE = 0
    RERUNS = 1
    BATCH = 2


class OPEN:
    """The number of open ``batch_invariant`` contexts of this process."""

    count = 0
    lock = threading.Lock()


class batch_invariant(ContextDecorator):
    """Inside, all attention of this process is computed as with ``deterministic="batch"``, so that models need no edit.

    Compiled graphs follow it when they run, not when they are traced, without being compiled anew. The backward pass is deterministic where
    it runs inside too. Of the whole process and not of a thread, because autograd runs backward passes in threads of its own; contexts may
    be nested, used again, and left in any order, and one may decorate a function.

    Raises ``RuntimeError`` if it is entered inside a graph that is compiled: a graph has no such state. Raises in the calls: ``ValueError``
    for what cannot be invariant, ``BackendError`` where no backend has the mode (docs/invariance.md).

    >>> import torch, anyattn
    >>> q, k, v = torch.randn(3, 2, 4, 40, 16)
    >>> with anyattn.batch_invariant():
    ...     both = anyattn.flex_attention(q, k, v, mask_mod=anyattn.masks.causal())
    ...     alone = anyattn.flex_attention(q[:1], k[:1], v[:1], mask_mod=anyattn.masks.causal())
    >>> torch.equal(both[:1], alone)
    True
    """

    @opaque
    def __enter__(self) -> None:
        if is_compiling():
            raise RuntimeError(
                "batch_invariant() is entered inside a function that torch.compile or torch.export captures; wanted it around the call of "
                'the compiled function, which follows it, or deterministic="batch" in the calls inside'
            )
        with OPEN.lock:
            OPEN.count += 1

    @opaque
    def __exit__(self, *error: Any) -> None:
        with OPEN.lock:
            OPEN.count -= 1


def is_batch_invariant() -> bool:
    """Whether a ``batch_invariant`` context is open."""
    return OPEN.count > 0


def mode_of(deterministic: Any) -> Determinism:
    """The mode of a call: that of its argument, a truth value or "batch", or of an open ``batch_invariant``.

    Raises ``ValueError`` for another string.

    >>> mode_of("batch"), mode_of(1), mode_of(None)
    (<Determinism.BATCH: 2>, <Determinism.RERUNS: 1>, <Determinism.NONE: 0>)
    """
    if OPEN.count > 0 or deterministic is Determinism.BATCH:
        return Determinism.BATCH
    if isinstance(deterministic, str):
        if deterministic != BATCH:
            raise ValueError(
                f"deterministic={deterministic!r}; wanted True, False or {BATCH!r} (a row's bits do not depend on the rest of the batch)"
            )
        return Determinism.BATCH
    return Determinism.RERUNS if deterministic else Determinism.NONE


# ---- operands of operators


def backend_text(backend: str | None, deterministic: Any) -> str:
    """The operand ``backend`` of an operator: the backend's name, or nothing, and behind a space "batch" for that mode. The operators that
    have an operand ``deterministic`` have a truth value there, which exported programs contain.

    >>> backend_text(None, True), backend_text("triton", "batch")
    ('', 'triton batch')
    """
    if isinstance(deterministic, str) and mode_of(deterministic) is Determinism.BATCH:
        return f"{backend or ''} {BATCH}"
    return backend or ""


def backend_and_mode(text: str, deterministic: bool = False) -> tuple[str | None, bool | str]:
    """The backend and ``deterministic`` of operands, as a call has them.

    >>> backend_and_mode("triton batch"), backend_and_mode("", True)
    (('triton', 'batch'), (None, True))
    """
    backend, space, _ = text.partition(" ")
    return backend or None, BATCH if space else deterministic
