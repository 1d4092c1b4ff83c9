"""Captured tensors that hold this rank's rows alone: their mark, and where a mod may index them.

A mod sees global positions, so the tensors that it captures are indexed by these. ``ContextPlan.rows`` marks a dimension that has this
rank's rows instead: indexed by ``q_idx`` itself it is read at the row's place among them. A tensor without a mark is global; one that has
only a rank's rows then ends before the positions do, which the check of every call's loads refuses.

The mark is an attribute of the tensor. A compiled graph passes no attributes, so there Dynamo sees the calls of ``marked`` themselves, and
the capture of a call's mods finds which of their tensors come from one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from anyattn.errors import ModError
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["check_mask", "dims_of_text", "marked", "marked_by_program", "text_of_dims", "with_local_dims"]

_MARK = "_anyattn_rows"  # ((dimension, the rank's rows or None), ...)

Intervals = tuple[tuple[int, int], ...]


def marked(t: Tensor, dim: int, rows: Intervals | None) -> Tensor:
    """``t`` as a tensor whose dimension ``dim``, at least 0, holds this rank's ``rows``; None inside of compiled code, whose graph is for
    any rows."""
    made = t.view_as(t)
    setattr(made, _MARK, (*getattr(t, _MARK, ()), (dim, rows)))
    return made


def with_local_dims(mod: TracedMod | None, rows: Intervals, padded: int, sends_heads: bool) -> TracedMod | None:
    """The mod with its ``local_dims``, those of marked tensors among them. rows: of this rank, global intervals. padded: their number in a
    padded shard.

    Raises ``ModError`` if one is not indexed by ``q_idx`` itself, or if heads travel, so that the mod runs for all ranks' rows;
    ``ValueError`` for other rows than this rank's.
    """
    if mod is None or not (mod.local_dims or any(hasattr(t, _MARK) for t in mod.tensors)):
        return mod
    marks = [(slot, dim, of) for slot, t in enumerate(mod.tensors) for dim, of in getattr(t, _MARK, ())]
    dims = tuple(dict.fromkeys((*mod.local_dims, *[(slot, dim) for slot, dim, _ in marks])))
    if sends_heads:
        raise ModError(
            f"{_name(mod)} captures a tensor of plan.rows, but the plan sends heads: a rank computes the rows of all ranks; wanted "
            "plan.gather(t, dim), or anyattn.distributed.plan(..., transport='keys')"
        )
    length = sum(stop - start for start, stop in rows)
    for slot, dim in dims:
        others = [of for s, d, of in marks if (s, d) == (slot, dim) and of not in (None, rows)]
        shape = tuple(mod.tensors[slot].shape)
        if others or shape[dim] not in (length, padded):
            raise ValueError(
                f"{_name(mod)} captures a tensor of shape {shape} marked by plan.rows(t, dim={dim}) of rows {others or shape[dim]}, but "
                f"the rank of this call's plan has {length}, {list(rows)}; wanted rows of the same plan"
            )
    _check_indices(mod, dims)
    return TracedMod.of_fields({**vars(mod), "local_dims": dims})


def _check_indices(mod: TracedMod, dims: Sequence[tuple[int, int]]) -> None:
    nodes = mod.expr.nodes
    for node in nodes:
        for slot, dim in dims if node.op in ("load", "tensor") else ():
            if slot == node.attr and not (node.op == "load" and nodes[node.args[dim]].attr == "q_idx"):
                raise ModError(
                    f"{_name(mod)} indexes dimension {dim} of a captured tensor of shape {tuple(mod.tensors[slot].shape)}, which "
                    f"plan.rows(t, dim={dim}) marks as this rank's rows, by something else than q_idx itself; wanted q_idx there, or "
                    f"plan.gather(t, dim={dim}), which has every rank's rows, by global positions"
                )


def check_mask(mod: TracedMod) -> None:
    """Raises ``ModError`` for a plan's mask with marked tensors: it is of all ranks' rows."""
    if any(hasattr(t, _MARK) for t in mod.tensors):
        raise ModError(
            f"{_name(mod)} of a plan's mask captures a tensor of plan.rows, but a block mask is of every rank's rows; wanted plan.gather "
            "before the mask is made, or mask_mod= of flex_attention beside the plan's mask"
        )


def _name(mod: TracedMod) -> str:
    return f"{mod.kind}_mod {mod.name!r}"


# ---- compiled code


def marked_by_program(captured: Sequence[Any]) -> tuple[tuple[int, int], ...]:
    """(place in ``captured``, dimension) of what ``marked`` has made in the graph that Dynamo traces. captured: proxies of a mod's captured
    values."""
    found = []
    for place, proxy in enumerate(captured):
        node = getattr(proxy, "node", None)
        while node is not None and node.op == "call_function" and node.target is marked:
            found.append((place, node.args[1]))
            node = node.args[0]
    return tuple(found)


def text_of_dims(*mods: TracedMod | None) -> str:
    """The ``local_dims`` of mods as an operator's argument; of marked tensors among their captures too."""
    texts = []
    for mod in mods:
        dims = () if mod is None else (*mod.local_dims, *[(s, d) for s, t in enumerate(mod.tensors) for d, _ in getattr(t, _MARK, ())])
        texts.append(",".join(f"{slot}:{dim}" for slot, dim in dims))
    return ";".join(texts) if any(texts) else ""


def dims_of_text(text: str, mods: Sequence[TracedMod | None]) -> list[TracedMod | None]:
    """The inverse of ``text_of_dims``: the mods with their ``local_dims``."""
    if not text:
        return list(mods)
    made: list[TracedMod | None] = []
    for part, mod in zip(text.split(";"), mods, strict=True):
        dims = tuple([(int(slot), int(dim)) for slot, dim in (pair.split(":") for pair in part.split(",") if pair)])
        made.append(mod if mod is None or not dims else TracedMod.of_fields({**vars(mod), "local_dims": dims}))
    return made
