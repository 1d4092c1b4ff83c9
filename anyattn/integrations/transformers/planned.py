"""Masks of a plan of context parallelism in place of those that Transformers asks for, and the refusal of a shard without its plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from anyattn.distributed.active_plan import active_plan
from anyattn.distributed.batches import is_of_shard
from anyattn.distributed.layout import length_of
from anyattn.integrations.transformers import forward_passes
from anyattn.integrations.transformers.description import Listed, MaskDescription, Unplanned
from anyattn.integrations.transformers.mask_functions import kind_of

__all__ = ["planned_mask", "refuse_bias", "refuse_unplanned"]


def planned_mask(batch: int, lengths: tuple[int, int], offset: int | Tensor, mask_function: Callable) -> MaskDescription | None:
    """The mask of the active plan for the layers that ask for ``mask_function``; None outside of ``anyattn.distributed.active``, and for
    layers without causality of other lengths than the shard's, such as those of a vision tower.

    lengths: of queries and keys. offset: the position of the first query.

    Raises ``ValueError`` for the rows of a shard without a plan, for other rows than the plan's, and for a mask that no plan has.
    """
    plan = active_plan()
    if plan is None:
        if is_of_shard(forward_passes.positions_of_call()):
            raise ValueError(
                "position_ids are the rows of one rank (ContextPlan.shard_batch), but no plan is active, and attention would stay among "
                "these rows; wanted the model inside `with anyattn.distributed.active(plan):`, of anyattn.distributed.plan"
            )
        return None
    if torch.compiler.is_compiling():
        raise ValueError(
            "a compiled model makes its masks inside anyattn.distributed.active; wanted the masks as its argument: "
            "model(**plan.shard_batch(batch), attention_mask=plan.mask), or plan.mask['full_attention'] where all layers are of one kind"
        )
    kind, is_causal = kind_of(mask_function)
    rows = length_of(plan.rows_of(plan.rank))
    if not is_causal and lengths != (rows, rows):
        return None
    if lengths != (rows, rows) or (not isinstance(offset, Tensor) and offset != 0):
        raise ValueError(
            f"a model has {lengths[0]} queries and {lengths[1]} keys, but this rank has {rows} of the {plan.length} rows of the active "
            "plan; wanted model(**plan.shard_batch(batch)), without attention_mask and without a cache, or this model outside of "
            "anyattn.distributed.active"
        )
    if kind is None or not is_causal:
        what = "a mask of its own" if is_causal else "a mask without causality"
        raise ValueError(
            f"a model adds {what} to causality and windows, which the masks of the active plan do not have; wanted it in the plan's masks, "
            "passed to the model: model(**plan.shard_batch(batch), attention_mask=plan.mask)"
        )
    found = plan.mask if isinstance(plan.mask, dict) else {"full_attention": plan.mask}
    way: Any = Listed(found[kind]) if kind in found else Unplanned(kind, tuple(found))
    description = MaskDescription(batch, lengths, way, None, None)
    description.has_documents = True  # those of the plan's mask
    return description


def refuse_unplanned(what: str) -> None:
    """Raises ``ValueError`` inside ``anyattn.distributed.active``, for a causal layer that gets another mask than the plan's."""
    if not torch.compiler.is_compiling() and active_plan() is not None:
        raise ValueError(
            f"a causal layer has {what} inside anyattn.distributed.active, and would attend to the rows of this rank alone; wanted the "
            "mask in anyattn.distributed.plan, and a model that makes its masks by Transformers' functions"
        )


def refuse_bias(mask: Any, bias: Tensor | None) -> None:
    """Raises ``ValueError`` for a bias of each pair of rows beside a plan's mask, whose rows are not all of the sequence."""
    if bias is not None and getattr(mask, "plan", None) is not None:
        raise ValueError(
            f"position_bias of shape {tuple(bias.shape)} is given beside the mask of a plan, on whose ranks rows are not consecutive; "
            "wanted a model without it"
        )
