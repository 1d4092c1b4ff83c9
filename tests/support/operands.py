"""Operands of the operators for calls with mods, a sink and captured tensors on q's device; and the check of their results."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_map_only

from anyattn import masks, scores
from anyattn.custom_ops.flex import operands_of
from anyattn.mods.tracing.trace import trace
from tests.support.strided import inputs

__all__ = ["as_its_fake", "decode_operands", "flash_operands", "flex_operands"]


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


def decode_operands(
    layout: str, is_rotary: bool, head_dim: int = 8, dtype: torch.dtype = torch.float32, device: str = "cpu", backend: str = ""
) -> tuple:
    """Three new tokens for each of two sequences, beside caches of 32 keys. layout: of q and of the new k and v (``strided``)."""
    x = inputs(layout, layout, layout, shape=(2, 4, 3, head_dim), heads_kv=2, dtype=dtype, device=device)
    q, k, v = (t.transpose(1, 2) for t in x)
    caches = [torch.randn(2, 2, 32, head_dim, device=device).to(dtype).transpose(1, 2) for _ in range(2)]
    tables = [torch.rand(32, head_dim // 2, device=device).to(dtype) if is_rotary else None for _ in range(2)]
    given = (k, v, *tables, torch.tensor([4, 20], device=device), None, None, None, None, None, None)
    return (q, *caches, *given, *operands_of(q), *operands_of(q), None, 0.0, True, [-1, -1], 0, None, True, None, None, backend)
