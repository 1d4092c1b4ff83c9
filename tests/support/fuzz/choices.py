"""Random choices of blocks (``BlockMask.from_topk``): what is drawn, and its block mask beside the mask that reads a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

from anyattn import BlockMask
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
        return block_mask, mask_of(table, self.block, heads[0] // listed, lengths, self.causal, mask_mod)


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
