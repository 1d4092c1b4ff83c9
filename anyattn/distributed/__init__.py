"""Context parallelism: a sequence over several ranks, for any mask and any score mod (``from anyattn import distributed as ad``).

``plan(mask, mesh["cp"])`` distributes the rows; ``ContextPlan.shard`` cuts the tokens; a model that calls
``flex_attention(q, k, v, score_mod, block_mask=plan.mask)`` runs as it is. Names are loaded when first used: a torch without distributed
support can import what does not need it.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from anyattn.distributed.active_plan import active
    from anyattn.distributed.batches import transformers_masks
    from anyattn.distributed.context_plan import ContextPlan, plan, reduced
    from anyattn.distributed.early_keys import start
    from anyattn.distributed.sharded_mask import ShardedMask

_HOME = {
    "ContextPlan": "context_plan",
    "ShardedMask": "sharded_mask",
    "active": "active_plan",
    "plan": "context_plan",
    "reduced": "context_plan",
    "start": "early_keys",
    "transformers_masks": "batches",
}

__all__ = ["ContextPlan", "ShardedMask", "active", "plan", "reduced", "start", "transformers_masks"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'anyattn.distributed' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"anyattn.distributed.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
