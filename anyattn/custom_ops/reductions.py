"""The operator of ``AuxRequest``'s reductions: sums of the probabilities and maxima of the scores, from a call's log-sum-exp."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.custom_ops.flex import Attend, call_of, never_empty, operands_of_call
from anyattn.custom_ops.operators import called, operator
from anyattn.mods.tracing.trace import TracedMod
from anyattn.reductions import compute
from anyattn.reductions.request import Reductions

__all__ = ["reductions", "reductions_with_mods"]


class Wanted(NamedTuple):
    """The arguments of ``anyattn::reductions`` besides those of ``anyattn::attend``. row_lse: a result of that. sizes: the numbers of
    ``Reductions``, pairs as two. indices: none or one tensor."""

    row_lse: Tensor
    sizes: list[int]
    indices: list[Tensor]

    @classmethod
    def of(cls, lse: Tensor, wanted: Reductions) -> Wanted:
        sizes = [int(wanted.key_sums), wanted.last, wanted.key_block, *wanted.sum_block, *wanted.max_block, *wanted.list_block]
        return cls(lse, sizes, never_empty([] if wanted.indices is None else [wanted.indices], lse.new_empty(0)))

    @property
    def reductions(self) -> Reductions:
        key_sums, last, key_block, *pairs = self.sizes
        indices = self.indices[0] if pairs[4] > 0 else None  # an exported graph may have a placeholder in the list
        return Reductions(bool(key_sums), last, key_block, (pairs[0], pairs[1]), (pairs[2], pairs[3]), (pairs[4], pairs[5]), indices)


def _fake(operands: Attend, wanted: Wanted) -> list[Tensor]:
    shapes = wanted.reductions.shapes(operands.q, operands.k.shape[2])
    return [operands.q.new_empty(shape, dtype=wanted.row_lse.dtype) for shape in shapes]


@operator(Attend, Wanted, fake=_fake)
def reductions(operands: Attend, wanted: Wanted) -> list[Tensor]:
    """The tensors that are asked for, in the order of ``AuxOutput``; they have no gradients."""
    problem, chosen = call_of(operands)
    return compute.results(problem, chosen, wanted.row_lse, wanted.reductions)


def reductions_with_mods(
    call: tuple,
    lists: tuple[Tensor | None, ...],
    listing: tuple | None,
    backend: str | None,
    options: dict[str, Any] | None,
    lse: Tensor,
    wanted: tuple,
    score: TracedMod | None,
    listed: TracedMod | None,
    mask: TracedMod | None,
) -> list[Tensor]:
    """One operator call with traced mods; the first arguments and the last are those of ``flex_with_mods``. wanted: a ``Reductions``."""
    with torch.no_grad():
        operands = operands_of_call(call, lists, listing, backend, options, score, listed, mask)
        q, k, v = (t.detach() for t in operands[:3])
        sink = None if operands.sink is None else operands.sink.detach()
        of_score = operands.score._replace(score_tensors=[t.detach() for t in operands.score.score_tensors])
        operands = operands._replace(q=q, k=k, v=v, sink=sink, score=of_score)
        return called(reductions, operands, Wanted.of(lse.detach(), Reductions(*wanted)))  # type: ignore[no-any-return]
