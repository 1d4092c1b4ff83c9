"""Capture of calls with mods by ``torch.compile``: a higher-order operator that takes a call's tensors and its mods as functions or graphs.

Dynamo turns each mod into a graph, and the mod's captured values into operands of that graph (``dynamo.py``). The operator's body is plain
Python: wherever it runs (fake tensor propagation, AOTAutograd, export, the eager backend), it traces the graphs into the IR and calls the
operators of ``flex.py`` and ``flash.py``. Only those are left below Dynamo's graph; they have the autograd formulas.

Outside Dynamo (``torch.export`` with ``strict=False``, ``make_fx``) mods are passed as the user's functions and traced as in eager calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import HigherOrderOperator

from anyattn.errors import BackendError, ModError
from anyattn.mods.algebra import Mask, Score
from anyattn.mods.tracing.graph import trace_graph
from anyattn.mods.tracing.trace import TracedMod, is_native, trace
from anyattn.tensors import kinds as tensor_kinds

__all__ = ["NO_MODS", "CallWithMods", "bound", "call_with_mods"]

_ARITY = {"mask": 4, "score": 5}
NO_MODS: tuple = ()


class CallWithMods(HigherOrderOperator):
    """``call_with_mods(entry, like, operands, kinds, mods)``: calls the function of ``entry`` with (*operands, *traced mods).

    like: a tensor on the call's device; scores are float64 if it is, else float32. kinds: per mod its kind (``"mask"``, ``"score"``) and
    its name in messages, and per graph which of its captured tensors have dimensions of a rank's rows (``marked_by_program``). mods:
    functions, or graphs from Dynamo; None for no mod. captured: per graph its inputs after score and indices; empty for functions.
    """

    refusal: Exception | None = None  # the last exception of the body; Dynamo raises it in its own way

    def __init__(self) -> None:
        super().__init__("anyattn_call_with_mods")

    def __call__(  # type: ignore[override]
        self, entry: str, like: Tensor, operands: tuple, kinds: tuple, mods: tuple, captured: tuple = NO_MODS
    ) -> Any:
        try:
            return _run(entry, like, operands, kinds, mods, captured)
        except (ValueError, TypeError, BackendError) as error:  # ModError is a ValueError
            self.refusal = error
            raise


def _run(entry: str, like: Tensor, operands: tuple, kinds: tuple, mods: tuple, captured: tuple) -> Any:
    score_dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
    traced = [
        _traced(mod, kind, name, captured[i] if captured else (), local, score_dtype, like.device)
        for i, ((kind, name, *local), mod) in enumerate(zip(kinds, mods, strict=True))
    ]
    return _entries()[entry](*operands, *traced)


@cache
def _entries() -> dict[str, Callable]:
    """Each entry point's call with traced mods. Imported by the first call: their operators take longer to define than all else."""
    from anyattn.custom_ops import block_lists, flash, flex, reductions, skipping

    return {
        "sharded": _sharded_with_mods,
        "flex": flex.flex_with_mods,
        "reductions": reductions.reductions_with_mods,
        "skipping": skipping.skipping_with_mods,
        "flash": flash.flash_with_mods,
        "decode": flash.decode_with_mods,
        "block_mask": block_lists.lists_with_mods,
        "tile_lists": block_lists.tile_lists_with_mods,
        "topk_lists": block_lists.topk_lists_with_mods,
        "varlen_tile_lists": block_lists.varlen_lists_with_mods,
    }


def _sharded_with_mods(*operands: Any) -> Any:
    from anyattn.custom_ops import sharded  # loads torch.distributed

    return sharded.sharded_with_mods(*operands)


def _traced(
    mod: Any, kind: str, name: str, captured: tuple, local: Sequence, score_dtype: torch.dtype, device: torch.device
) -> TracedMod | None:
    if mod is None:
        return None
    if isinstance(mod, torch.fx.GraphModule):
        traced = trace_graph(mod, kind, captured, name=name, score_dtype=score_dtype, device=device)
        dims = [(slot, dim) for place, dim in local for slot, t in enumerate(traced.tensors) if t is captured[place]]
        return TracedMod.of_fields({**vars(traced), "local_dims": tuple(dims)}) if dims else traced
    if is_native(mod):
        raise ModError(
            f"{name} is a CuTe function, which torch.compile, torch.func and dispatch modes (FlopCounterMode) cannot take; wanted a "
            "function of plain Python"
        )
    traced = trace(mod, kind, score_dtype=score_dtype, device=device)
    for t in traced.tensors:
        tensor_kinds.refuse(f"a tensor that {name} {traced.name!r} captures", t)
    return traced


call_with_mods = CallWithMods()


def bound(fn: Any, kind: str, aux_tensors: Any) -> Callable | None:
    """``fn`` with aux_tensors bound as its last argument if it takes them; written in the subset of Python that Dynamo traces."""
    if fn is None or aux_tensors is None or not _takes_aux(fn, kind):
        return fn
    return lambda *args: fn(*args, aux_tensors)


def _takes_aux(fn: Any, kind: str) -> bool:
    inner = fn.fn if type(fn) is Mask or type(fn) is Score else fn
    method = getattr(inner, "__func__", None)
    code = getattr(method or inner, "__code__", None)
    if code is None:
        return False
    return code.co_argcount - (method is not None) > _ARITY[kind]
