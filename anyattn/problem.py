"""The validated facts of one attention call: what every later room reads instead of the user's arguments."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from anyattn.mods.rows import limits
from anyattn.mods.trace import TracedMod

if TYPE_CHECKING:
    from anyattn.sparsity.block_sparse import BlockSparseTensors

__all__ = ["Problem"]


@dataclass(frozen=True, eq=False)
class Problem:
    """One call: ``out = softmax(mask(score_mod(scale * q k^T)) [, sink]) v``.

    q: (B, Hq, Sq, D), k: (B, Hkv, Sk, D), v: (B, Hkv, Sk, Dv), one dtype and device, any strides; Hq is a multiple of Hkv.
    predicates: the element masks. With ``blocks``, the first predicate belongs to the lists: it decides inside the listed partial tiles,
    listed full tiles need no asking, unlisted tiles are invisible; the other predicates hold everywhere.
    sink: (Hq,) logits that join the softmax's denominator.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    score: TracedMod | None = None
    predicates: tuple[TracedMod, ...] = ()
    blocks: BlockSparseTensors | None = None
    sink: Tensor | None = None
    wants_lse: bool = False
    wants_max: bool = False
    deterministic: bool = False

    @property
    def batch(self) -> int:
        return self.q.shape[0]

    @property
    def heads_q(self) -> int:
        return self.q.shape[1]

    @property
    def heads_kv(self) -> int:
        return self.k.shape[1]

    @property
    def qhead_per_kvhead(self) -> int:
        return self.heads_q // self.heads_kv if self.heads_kv else 1

    @property
    def seqlen_q(self) -> int:
        return self.q.shape[2]

    @property
    def seqlen_k(self) -> int:
        return self.k.shape[2]

    @cached_property
    def row_limits(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """For each predicate its ranges of visible keys per row, ``rows.limits``: (lo, hi), each (n, B or 1, H or 1, Sq); None if it has none."""
        lengths = (self.seqlen_q, self.seqlen_k, self.batch, self.heads_q)
        return tuple(limits(p, *lengths, self.q.device) for p in self.predicates)

    @property
    def stat_dtype(self) -> torch.dtype:
        """The dtype of scores and statistics: float64 for float64 inputs, else float32."""
        return torch.float64 if self.q.dtype is torch.float64 else torch.float32

    @property
    def grad_inputs(self) -> tuple[Tensor | None, ...]:
        """What may receive gradients, in the order that a backend's backward returns them: q, k, v, sink, the score mod's tensors."""
        return (self.q, self.k, self.v, self.sink, *(self.score.tensors if self.score else ()))

    @property
    def needs_grad(self) -> bool:
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in self.grad_inputs)
