"""``Problem``: the validated facts of one attention call; all code after validation reads it instead of the user's arguments."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from anyattn.determinism import Determinism
from anyattn.fast_dataclass import OfFields
from anyattn.mods.analysis.row_ranges import NO_KEYS, RowRanges, limits, limits_of_rows, row_ranges
from anyattn.mods.dropout import Dropout
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import negative_zeros
from anyattn.tensors.by_contents import kept
from anyattn.tensors.strides import begins

if TYPE_CHECKING:
    from anyattn.kvcache.scales import KVScales
    from anyattn.sequences.batch import Sequences
    from anyattn.sparsity.block_sparse import BlockSparseTensors

__all__ = ["Problem", "Skip"]

_NARROW = 256  # the largest head dimension of which a warp group, or a Triton program, holds the output's columns beside the scores
_MOST_BYTES = 2**16  # of the tables of a mask whose row ranges are kept


class Skip(NamedTuple):
    """Tiles to leave out of a forward pass: those in which no row has a probability of at least ``below`` times that of its greatest score
    so far. below: float32 (Hq,), contiguous. counts: int32 (B, Hq, 2), to which the numbers of skipped and of visited tiles are added."""

    below: Tensor
    counts: Tensor | None


@dataclass(frozen=True, eq=False)
class Problem(OfFields):
    """One call: ``out = softmax(mask(score_mod(scale * q k^T)) [, sink]) v``.

    q: (B, Hq, Sq, D), k: (B, Hkv, Sk, D), v: (B, Hkv, Sk, Dv), one dtype and device, any strides; Hq is a multiple of Hkv. k and v may have
    one 8-bit dtype instead (``kvcache.scales``), without gradients.
    predicates: the element masks. With ``blocks``, the first predicate belongs to the lists: it masks inside the listed partial tiles,
    is true in listed full tiles, and unlisted tiles are invisible; the other predicates hold everywhere.
    sink: (Hq,) logits that join the softmax's denominator.
    blocks_follow: the lists follow from the first predicate, so a backend may use either alone.
    sequences: None where every batch entry fills its storage. Else the tensors are storage, whose first dimension need not be the batch
    (packed, cached, paged), and this says where each entry's rows are; storage rows that belong to no entry give 0 and -inf.
    num_splits: number of parts of each row tile's keys (split-KV), whose results are combined; 0 lets the plan choose.
    packs: whether query heads that share K and V share row tiles where a kernel supports both; None lets the plan choose.
    dropout: after the softmax each weight is 0 or multiplied by ``dropout.scale``; the log-sum-exp is the same with and without.
    wide_kv_grads: the gradients of k and v are returned in ``stat_dtype``, not rounded to theirs, for a sum with others'. No entry point
    sets it.
    skip: None if every visible tile is computed. There are no gradients then.
    kv_scales: factors of 8-bit keys and values; None if there are none, or all are 1.
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
    deterministic: Determinism = Determinism.NONE
    sequences: Sequences | None = None
    num_splits: int = 1
    blocks_follow: bool = False
    packs: bool | None = None
    dropout: Dropout | None = None
    wide_kv_grads: bool = False
    kv_scales: KVScales | None = None
    skip: Skip | None = None

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row's bits must not depend on the rest of the batch."""
        return self.deterministic is Determinism.BATCH

    @property
    def in_any_batch(self) -> Problem:
        """The problem without that demand, which only a forward pass meets."""
        return self.like(deterministic=Determinism.RERUNS) if self.is_batch_invariant else self

    @property
    def has_one_kv(self) -> bool:
        """Whether the values are the first columns of the keys, in one memory: ``v = k[..., :Dv]``."""
        return begins(self.v, self.k)

    @property
    def has_wide_heads(self) -> bool:
        """Whether a head has more dimensions than most kernels take: latent attention, and some models' heads of 512."""
        return max(self.q.shape[3], self.v.shape[3]) > _NARROW

    @property
    def batch(self) -> int:
        return self.q.shape[0] if self.sequences is None else self.sequences.batch

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
        """The greatest number of queries of a batch entry."""
        return self.q.shape[2] if self.sequences is None else self.sequences.max_seqlen_q

    @property
    def seqlen_k(self) -> int:
        """The greatest number of keys of a batch entry."""
        return self.k.shape[2] if self.sequences is None else self.sequences.max_seqlen_k

    @property
    def bound_q(self) -> int:
        """An upper bound of ``seqlen_q`` that needs no read of GPU memory."""
        return self.q.shape[2] if self.sequences is None else self.sequences.bound_q

    @property
    def bound_k(self) -> int:
        """An upper bound of ``seqlen_k`` that needs no read of GPU memory."""
        return self.k.shape[2] if self.sequences is None else self.sequences.bound_k

    def like(self, **changes: Any) -> Problem:
        """``dataclasses.replace`` for changes that do not affect predicates and lengths: cached row limits are kept."""
        assert changes.keys() <= vars(self).keys(), changes
        return self.of_fields(vars(self) | changes)

    @cached_property
    def row_ranges(self) -> tuple[RowRanges | None, ...]:
        """The row ranges of each predicate, None if it has none; reads captured tensors, as ``row_ranges.row_ranges`` does."""
        if not self.has_pairs:  # no mod may be evaluated here: a captured table may be empty
            return (NO_KEYS,) * len(self.predicates)
        return tuple([_ranges_of(p) for p in self.predicates])

    @cached_property
    def row_limits(self) -> tuple[tuple[Tensor, Tensor] | None, ...]:
        """Limits of the visible keys per row of each predicate, ``row_ranges.limits``: (lo, hi), each (n, B or 1, H or 1, Sq), or None.

        With ``sequences`` the rows of all sequences are concatenated: (n, 1, H or 1, total rows).
        """
        if not self.predicates:
            return ()
        rows = self.seqlen_q if self.sequences is None else len(self.sequences.row_entry)
        if not self.has_pairs:
            nothing = torch.zeros((1, 1, 1, rows), dtype=torch.int32, device=self.q.device)
            return ((nothing, nothing),) * len(self.predicates)
        if self.sequences is not None:
            s = self.sequences
            lengths = s.seqlens_k[s.row_entry]
            return tuple([None if r is None else limits_of_rows(r, *s.asked_rows, lengths, self.heads_q) for r in self.row_ranges])
        sizes = (rows, self.seqlen_k, self.batch, self.heads_q, self.q.device)
        return tuple([None if r is None else limits(r, *sizes) for r in self.row_ranges])

    @property
    def has_pairs(self) -> bool:
        """Whether there is at least one (query, key) pair at which a mod can be evaluated."""
        entries = self.sequences.has_pairs if self.sequences is not None else min(self.batch, self.seqlen_q, self.seqlen_k) > 0
        return entries and self.heads_q > 0

    @property
    def may_have_pairs(self) -> bool:
        """Whether ``has_pairs`` can be true, judged without reading GPU memory."""
        sizes = (self.batch, *self.q.shape, *self.k.shape)
        return min(sizes) > 0 and min(self.bound_q, self.bound_k) > 0

    @property
    def stat_dtype(self) -> torch.dtype:
        """The dtype of scores and statistics: float64 for float64 inputs, else float32."""
        return torch.float64 if self.q.dtype is torch.float64 else torch.float32

    @property
    def kv_grad_dtype(self) -> torch.dtype:
        """The dtype in which the gradients of k and v are returned."""
        return self.stat_dtype if self.wide_kv_grads else self.k.dtype

    @property
    def grad_inputs(self) -> tuple[Tensor | None, ...]:
        """The tensors that may receive gradients, in the order that a backend's backward returns them: q, k, v, sink, the score mod's."""
        return (self.q, self.k, self.v, self.sink, *(self.score.tensors if self.score else ()))

    @property
    def wanted_slots(self) -> tuple[int, ...]:
        """The slots of the score mod's tensors that get gradients."""
        return () if self.score is None else tuple([i for i, t in enumerate(self.score.tensors) if t.requires_grad])

    @property
    def needs_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        if self.q.requires_grad or self.k.requires_grad or self.v.requires_grad:
            return True
        if self.sink is None and self.score is None:
            return False
        for t in self.grad_inputs[3:]:  # noqa: SIM110 - a generator takes longer
            if t is not None and t.requires_grad:
                return True
        return False


def _ranges_of(mask: TracedMod) -> RowRanges | None:
    """``row_ranges``, which are derived once for equal contents of small tables on the CPU, from copies of them."""
    if not mask.tensors or sum(t.nbytes for t in mask.tensors) > _MOST_BYTES:
        return row_ranges(mask)
    if any(type(t) not in (Tensor, Parameter) or t.device.type != "cpu" or t.layout is not torch.strided for t in mask.tensors):
        return row_ranges(mask)
    copies = tuple([t.detach().clone() for t in mask.tensors])

    def derived() -> RowRanges | None:
        ranges = row_ranges(replace(mask, tensors=copies))
        return None if ranges is None else replace(ranges, is_constant=True)

    return kept(copies, ("row ranges", mask.expr, mask.scalars, negative_zeros(mask.scalars)), derived)
