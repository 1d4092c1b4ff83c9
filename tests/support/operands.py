"""What the operators take, for calls with mods, a sink and captured tensors of q's device; and the check of what they return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from anyattn import masks, scores
from anyattn.custom_ops.flex import operands_of
from anyattn.mods.tracing.trace import trace

__all__ = ["as_its_fake", "flash_operands", "flex_operands"]


def _metadata(x: Any) -> Any:
    return [_metadata(t) for t in x] if isinstance(x, (tuple, list)) else (x.shape, x.dtype, x.stride(), x.device, x.storage_offset())


def _tensors(x: Any) -> list[Tensor]:
    return [t for one in x for t in _tensors(one)] if isinstance(x, (tuple, list)) else [x] if isinstance(x, Tensor) else []


def as_its_fake(operator: Any, args: tuple) -> Any:
    """The operator's results, shown to be laid out as the fake kernel's and to share no memory."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes = tree_map_only(Tensor, mode.from_tensor, args)
    with torch.no_grad():
        found = operator(*args)
        with mode:
            said = operator(*fakes)
    assert _metadata(found) == _metadata(said)
    memory = [t.untyped_storage().data_ptr() for t in _tensors(found) if t.numel()]
    assert len(set(memory)) == len(memory) and not set(memory) & {t.untyped_storage().data_ptr() for t in _tensors(args)}
    return found


def flex_operands(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None, *, wants_max: bool = False, backend: str = "") -> tuple:
    slopes = torch.rand(2 * q.shape[1], device=q.device)[::2].requires_grad_()
    of_mods = (*operands_of(q, trace(scores.alibi(slopes), "score")), *operands_of(q, trace(masks.causal(), "mask")))
    return (q, k, v, sink, *of_mods, [], [0, 0], False, 0.25, wants_max, False, "", backend)


def flash_operands(q: Tensor, k: Tensor, v: Tensor, *tables: Any, splits: int = 1, backend: str = "") -> tuple:
    slopes, sink, bias = (torch.rand(q.shape[-2], device=q.device, requires_grad=True) for _ in range(3))
    of_mods = (*operands_of(q, trace(scores.head_bias(bias), "score")), *operands_of(q))
    options = (None, 0.0, True, [-1, -1], splits, None, False, None, None, None, backend)
    return (q, k, v, *(tables or (None,) * 5), slopes, sink, *of_mods, *options)
