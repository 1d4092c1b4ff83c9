"""``active``: the plan of the models that this thread calls, for libraries that make their masks inside the model."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyattn.distributed.context_plan import ContextPlan

__all__ = ["active", "active_plan"]


class _Active(threading.local):
    plan: ContextPlan | None = None


_active = _Active()


@contextmanager
def active(plan: ContextPlan) -> Iterator[ContextPlan]:
    """Inside, models of Transformers with ``attn_implementation="anyattn"`` take the masks of ``plan`` instead of making their own, which
    would be masks of this rank's rows alone. Of this thread; the backward pass may run outside.

    plan: of masks by the kinds of the model's layers, as ``transformers_masks`` makes them; with a group. The model is called with
        ``plan.shard_batch(batch)``.

    Raises ``TypeError`` for another object, ``ValueError`` for a plan without a group; and the model does, ``ValueError``, where it is
    called with other rows than this rank's, or asks for a mask that the plan does not have.

    >>> from anyattn import distributed as ad
    >>> with ad.active(ad.plan(None, ranks=1, S=64, device="cpu")) as plan:
    ...     plan.length
    64
    """
    from anyattn.distributed.context_plan import ContextPlan

    if not isinstance(plan, ContextPlan):
        raise TypeError(f"plan is a {type(plan).__name__}; wanted the result of anyattn.distributed.plan")
    if plan.ranks > 1:
        _ = plan.channel  # raises without a group
    before, _active.plan = _active.plan, plan
    try:
        yield plan
    finally:
        _active.plan = before


def active_plan() -> Any:
    """The plan of the innermost ``active`` of this thread; None outside."""
    return _active.plan
