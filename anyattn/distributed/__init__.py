"""Context parallelism: a sequence over several ranks, for any mask and any score mod (``from anyattn import distributed as ad``).

``plan(mask, mesh["cp"])`` distributes the rows; ``ContextPlan.shard`` cuts the tokens; a model that calls
``flex_attention(q, k, v, score_mod, block_mask=plan.mask)`` runs as it is.
"""

from __future__ import annotations

from anyattn.distributed.active_plan import active
from anyattn.distributed.batches import transformers_masks
from anyattn.distributed.context_plan import ContextPlan, plan, reduced
from anyattn.distributed.sharded_mask import ShardedMask

__all__ = ["ContextPlan", "ShardedMask", "active", "plan", "reduced", "transformers_masks"]
