"""Contestants of the training step: how each makes the mask of a step's documents, and attends. All have the same plain mask function."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from anyattn.testing.harness.peers import Unavailable, module
from benchmarks.gpu.gpt.model import Attend, Batch, Size

__all__ = ["CONTESTANTS", "EXACT", "PLAIN", "REFERENCES", "REPLACED", "Contestant"]

EXACT, PLAIN = "torch-exact", "torch-plain"
REPLACED = "anyattn-replaced"
REFERENCES = (EXACT, PLAIN)  # not timed: the reference of results, and the usual rounding in their dtype


@dataclass(frozen=True)
class Contestant:
    """seen: makes the model's argument besides tokens. inside: makes a mask of the ids in forward. is_reference: eager, checkpointed."""

    attend: Attend
    seen: Callable[[Batch], Any]
    inside: Callable[[Tensor], Any] | None = None
    is_compiled: bool = True
    is_reference: bool = False


def _masks(create: Callable[..., Any], size: Size) -> Callable[[Tensor], Any]:
    """Makes the causal block mask of documents by one library's ``create_block_mask``."""

    def make(ids: Tensor) -> Any:
        def mask(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
            return (q_idx >= kv_idx) & (ids[b, q_idx] == ids[b, kv_idx])

        return create(mask, size.batch, None, size.seqlen, size.seqlen, device=ids.device)

    return make


def _of_ids(make: Callable[[Tensor], Any]) -> Callable[[Batch], Any]:
    return lambda batch: make(batch.ids)


def _anyattn_attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
    import anyattn

    return anyattn.flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True)


def _anyattn(size: Size, backend: str) -> Contestant:
    import anyattn

    return Contestant(_anyattn_attend, _of_ids(_masks(anyattn.create_block_mask, size)))


def _anyattn_forward(size: Size, backend: str) -> Contestant:
    """anyattn with the mask made inside the compiled model."""
    import anyattn

    return Contestant(_anyattn_attend, lambda batch: batch.ids, _masks(anyattn.create_block_mask, size))


def _anyattn_eager(size: Size, backend: str) -> Contestant:
    import anyattn

    return Contestant(_anyattn_attend, _of_ids(_masks(anyattn.create_block_mask, size)), is_compiled=False)


def _flex(kernels: str | None) -> Callable[[Size, str], Contestant]:
    """torch's flex attention with the given kernels, and its compiled ``create_block_mask``."""

    def prepare(size: Size, backend: str) -> Contestant:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        if kernels == "FLASH":
            module("flash_attn.cute")
        options: Any = None if kernels is None else {"BACKEND": kernels}

        def attend(q: Tensor, k: Tensor, v: Tensor, block_mask: Any) -> Tensor:
            out = flex_attention(q, k, v, block_mask=block_mask, enable_gqa=True, kernel_options=options)
            assert isinstance(out, Tensor)
            return out

        compiled = torch.compile(create_block_mask, backend=backend)
        return Contestant(attend, _of_ids(_masks(compiled, size)))

    return prepare


def _anyattn_replaced(size: Size, backend: str) -> Contestant:
    """The flex program, with torch's function replaced by anyattn's for the rest of the process."""
    import anyattn

    replace = getattr(anyattn, "replace_flex_attention", None)
    if replace is None:
        raise Unavailable("this anyattn has no replace_flex_attention")
    replace()
    return _flex("TRITON")(size, backend)


def _by_document(q: Tensor, k: Tensor, v: Tensor, lengths: list[list[int]]) -> Tensor:
    """torch's SDPA, one document after the other."""
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    rows = []
    for row, documents in enumerate(lengths):
        parts = zip(*(t[row : row + 1].split(documents, 2) for t in (q, k, v)))
        rows.append(torch.cat([F.scaled_dot_product_attention(*part, is_causal=True) for part in parts], 2))
    return torch.cat(rows)


def _reference(size: Size, backend: str) -> Contestant:
    return Contestant(_by_document, lambda batch: batch.lengths, is_compiled=False, is_reference=True)


CONTESTANTS: dict[str, Callable[[Size, str], Contestant]] = {
    "anyattn": _anyattn,
    "flex-triton": _flex("TRITON"),
    "anyattn-forward": _anyattn_forward,
    "flex-flash": _flex("FLASH"),
    REPLACED: _anyattn_replaced,
    "anyattn-eager": _anyattn_eager,
    **dict.fromkeys(REFERENCES, _reference),
}
