"""Cases of document masks, and what ranks run that take documents as sequences on a CPU too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import anyattn
from anyattn import distributed as ad
from anyattn import masks
from anyattn.distributed import share
from tests.distributed import uses as programs
from tests.distributed.programs import attention
from tests.support.cases import Case, Shape, Variant

__all__ = ["DOCUMENTS", "DocumentCase", "head_offsets", "run", "uses"]


def _ids(shape: Shape, g: torch.Generator) -> tuple[Tensor, ...]:
    """Documents of 1 to some 80 positions, whose ids are in no order; and a bias for each head."""
    runs = (torch.rand(shape.seqlen_q, generator=g, device="cpu") < 6 / shape.seqlen_q).long().cumsum(0)
    bias = torch.rand(shape.heads_q, generator=g, dtype=torch.float64, device="cpu")
    return torch.randperm(shape.seqlen_q, generator=g, device="cpu")[runs], bias


def _only_ids(shape: Shape, g: torch.Generator) -> tuple[Tensor, ...]:
    return _ids(shape, g)[:1]


def _same(shape: Shape, ids: Tensor, *_: Tensor) -> Callable:
    return lambda b, h, q, k: ids[q] == ids[k]


def _causal(shape: Shape, ids: Tensor, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def _window(shape: Shape, ids: Tensor, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q - k <= 30) & (k - q <= 7)


def _alibi(shape: Shape, ids: Tensor, slopes: Tensor, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: s - slopes[h] * abs(q - k)


def _distance(shape: Shape, *_: Tensor) -> Callable:
    return lambda b, h, q, k: (q - k <= 9 + h) & (k - q <= 4)


def _positions(shape: Shape, ids: Tensor, *_: Tensor) -> Callable:
    return lambda s, b, h, q, k: s * torch.where(q % 3 == 1, 0.5, 1.0) + 0.01 * k


DOCUMENTS = {
    v.name: v
    for v in (
        Variant("documents", _same, make=_only_ids),
        Variant("causal", _causal, make=_only_ids, has_sink=True),
        Variant("window", _window, make=_only_ids),
        Variant("alibi", _causal, _alibi, _ids),
        Variant("alibi_window", _window, _alibi, _ids, has_sink=True),
        Variant("distance", _distance, make=_only_ids),
        Variant("distance_alibi", _distance, _alibi, _ids, has_sink=True),
        Variant("positions", _causal, _positions, _only_ids),  # a score of positions is not for documents as sequences
    )
}


class DocumentCase(Case):
    @property
    def recipe(self) -> Variant:
        return DOCUMENTS[self.variant]


def run(mesh: Any, *arguments: Any) -> dict[str, Tensor]:
    """``programs.attention``, with documents as sequences."""
    share.RUN_DOCUMENTS.append("cpu")
    try:
        return attention(mesh, *arguments)
    finally:
        share.RUN_DOCUMENTS.remove("cpu")


def uses(mesh: Any) -> list[bool]:
    """Whether rows are sequences: for a causal mask, for a window in pieces, for documents, and after their ids are written to; whether the
    new ids count then; and for ids with two runs each."""
    share.RUN_DOCUMENTS.append("cpu")
    try:
        ids = torch.arange(300, device="cpu") // 70
        sizes: dict[str, Any] = {"device": "cpu", "BLOCK_SIZE": 16}
        causal, window = (
            anyattn.create_block_mask(m, None, None, 300, 300, **sizes) for m in (masks.causal(), masks.sliding_window(20, 0))
        )
        plan = ad.plan(causal, mesh)
        found = [m.share.by_documents is not None for m in (plan.mask, plan.also(window))]  # type: ignore[attr-defined]
        for given in (ids, ids % 2):
            mask = anyattn.create_block_mask(masks.document(given) & masks.causal(), None, None, 300, 300, **sizes)
            made = ad.plan(mask, mesh)
            found.append(made.mask.share.by_documents is not None)
            if given is ids:
                whole = torch.randn(1, 2, 300, 16, generator=torch.Generator().manual_seed(0), device="cpu")
                local = made.shard(whole, dim=2)
                out = anyattn.flex_attention(local, local, local, block_mask=made.mask)
                given[:] = torch.arange(300, device="cpu") // 100
                found.append(made.mask.share.by_documents is not None)
                found.append(torch.equal(anyattn.flex_attention(local, local, local, block_mask=made.mask), out))
        return found
    finally:
        share.RUN_DOCUMENTS.remove("cpu")


def head_offsets(mesh: Any) -> list[Any]:
    """With the upper half of the heads: whether rows are sequences and results are those of one process, for documents, and for a distance
    that depends on the head."""
    share.RUN_DOCUMENTS.append("cpu")
    try:
        q, k, v = programs.tensors()
        ids = torch.arange(programs.S, device="cpu") // 37
        causal = ad.plan(programs.mask_of(masks.causal()), mesh, head_offset=programs.HEADS // 2)
        found: list[Any] = []
        for mod in (masks.causal() & masks.document(ids), lambda b, h, i, j: (i - j <= 5 * h + 3) & (j <= i)):
            mask = programs.mask_of(mod)
            shard = causal.also(mask)
            found.append(shard.share.by_documents is not None)  # type: ignore[attr-defined]
            half = [t[:, t.shape[1] // 2 :] for t in (q, k, v)]
            got = programs.whole(causal, programs.run(*causal.shard(*half, dim=2), shard))
            want = programs.run(q, k, v, mask)
            found += [programs._close(a, b[:, -a.shape[1] :]) for a, b in zip(got, want, strict=True)]
        return found
    finally:
        share.RUN_DOCUMENTS.remove("cpu")
