"""Random choices of blocks (``from_topk``): what is drawn, and its lists beside the mask that reads a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from anyattn import BlockMask, VarlenBlockSparseTensors
from anyattn.arithmetic import ceil_div
from tests.support.chosen_blocks import choice, mask_of, table_of

__all__ = ["Choice", "choices"]


@dataclass(frozen=True)
class Choice:
    """One random choice; its repr is all that is needed to repeat it. of: the heads of the indices."""

    block: tuple[int, int]
    k: int
    of: str
    shares_entries: bool
    causal: bool
    has_counts: bool
    is_int32: bool
    seed: int

    def made(
        self, batch: int, heads: tuple[int, int], lengths: tuple[int, int], mask_mod: Any, device: str = "cpu"
    ) -> tuple[BlockMask, Callable]:
        """The block mask, and the mask that reads the choice from a table on the CPU. heads: query heads and K/V heads."""
        listed = {"query heads": heads[0], "K/V heads": heads[1], "all heads": 1}[self.of]
        indices = choice((1 if self.shares_entries else batch, listed), lengths, self.block, self.k, self.seed)
        counts = None
        if self.has_counts:
            counts = torch.randint(-1, self.k + 1, indices.shape[:3], generator=torch.Generator().manual_seed(self.seed))
        given = indices.to(torch.int32) if self.is_int32 else indices
        block_mask = BlockMask.from_topk(
            given.to(device), BLOCK_SIZE=self.block, seq_lengths=lengths, causal=self.causal, mask_mod=mask_mod,
            counts=None if counts is None else counts.to(device),
        )  # fmt: skip
        table = table_of(indices, ceil_div(lengths[1], self.block[1]), counts)
        return block_mask, mask_of(table.to(device), self.block, heads[0] // listed, lengths, self.causal, mask_mod)

    def made_of_sequences(
        self,
        lengths: Sequence[tuple[int, int]],
        heads: tuple[int, int],
        where: dict[str, Any],
        mask_mod: Any,
        layout: str,
        device: str = "cpu",
    ) -> tuple[VarlenBlockSparseTensors, Callable]:
        """The lists of packed sequences of these lengths of queries and keys, and the mask that reads the choices from a table. where: the
        tables of the sequences."""
        listed = {"query heads": heads[0], "K/V heads": heads[1], "all heads": 1}[self.of]
        each = [choice((1, listed), pair, self.block, self.k, self.seed + b) for b, pair in enumerate(lengths)]
        g, counts = torch.Generator().manual_seed(self.seed), [None] * len(each)
        if self.has_counts:
            counts = [torch.randint(-1, self.k + 1, indices.shape[:3], generator=g) for indices in each]
        indices, joined = torch.cat(each, 2)[0], torch.cat(counts, 2)[0] if self.has_counts else None
        given = indices.to(device, torch.int32 if self.is_int32 else torch.int64)
        lists = VarlenBlockSparseTensors.from_topk(
            given, tile=self.block, counts=None if joined is None else joined.to(device), mask_mod=mask_mod, layout=layout, **where
        )
        rows, columns = (max(ceil_div(n[side], self.block[side]) for n in lengths) for side in (0, 1))
        table = torch.zeros(len(each), listed, max(rows, 1), max(columns, 1), dtype=torch.bool)
        for b, (one, pair) in enumerate(zip(each, lengths, strict=True)):
            own = table_of(one, ceil_div(pair[1], self.block[1]), counts[b])[0]
            table[b, :, : own.shape[1], : own.shape[2]] = own
        return lists, mask_of(table.to(device), self.block, heads[0] // listed, (0, 0), mask_mod=mask_mod)


choices = st.builds(
    Choice,
    block=st.tuples(st.sampled_from((1, 16, 32, 48, 64, 128)), st.sampled_from((1, 8, 16, 32, 64, 80, 128))),
    k=st.sampled_from((0, 1, 2, 3, 5, 9)),
    of=st.sampled_from(("query heads", "K/V heads", "K/V heads", "all heads")),
    shares_entries=st.booleans(),
    causal=st.booleans(),
    has_counts=st.booleans(),
    is_int32=st.booleans(),
    seed=st.integers(0, 99),
)
