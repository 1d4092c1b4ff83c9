"""A rank's share of one mask where heads travel: all rows of some query heads, and the K/V heads that these see."""

from __future__ import annotations

from typing import Any

from torch.nn.attention.flex_attention import noop_mask

from anyattn.distributed.layout import Layout, length_of
from anyattn.distributed.placed_mods import Place, placed, reads
from anyattn.distributed.share import LocalCalls, MaskShare
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.block_mask import BlockMask, block_mask_of_lists, marked

__all__ = ["CallShare", "HeadShare", "are_divided"]


def are_divided(queries: int, keys: int, ranks: int) -> bool:
    """Whether so many query and K/V heads can be divided over ranks: each has as many of both as the others, or one K/V head is on several.

    >>> [are_divided(8, keys, 4) for keys in (8, 4, 2, 1)], are_divided(6, 3, 2), are_divided(6, 2, 4)
    ([True, True, True, True], False, False)
    """
    return queries > 0 and keys > 0 and queries % ranks == 0 and (keys % ranks == 0 or ranks % keys == 0)


class _ByHeads(MaskShare):
    messages = 2  # heads come, and results go back

    def messages_back(self, is_kept: bool) -> int:
        """Of a backward pass."""
        return 2


class HeadShare(_ByHeads):
    """What a rank has under one mask of a plan before a call names its heads. most_received: by a rank, in positions of all heads."""

    def __init__(self, mask: BlockMask, layout: Layout, rank: int, first_head: int):
        super().__init__(mask, layout, rank, first_head)
        self.most_received = -(-layout.length // layout.ranks)
        self._of_heads: dict[tuple[int, int], CallShare] = {}

    def for_heads(self, queries: int, keys: int) -> CallShare:
        """The share of calls with these heads. Raises ``ValueError`` if the ranks cannot divide them."""
        found = self._of_heads.get((queries, keys))
        if found is None:
            ranks = self.layout.ranks
            if not are_divided(queries, keys, ranks):
                raise ValueError(
                    f"query has {queries} heads and key {keys}, which a plan that sends heads cannot divide over {ranks} ranks; wanted a "
                    f"multiple of {ranks} query heads, and K/V heads that are a multiple or a divisor of {ranks}; or a plan that sends "
                    "keys: anyattn.distributed.plan(..., transport='keys')"
                )
            found = self._of_heads[queries, keys] = CallShare(self, queries, keys)
        return found


class CallShare(_ByHeads):
    """What a rank computes in calls with some number of heads: one local call over the whole sequence.

    heads, key_heads: of this rank. copies: ranks that have the same K/V head. first: the rank's first query head among the call's.
    lengths: rows of each rank.
    """

    by_lists = by_pieces = LocalCalls("heads", (), (), (), ())  # it has no segments
    by_documents = None

    def __init__(self, share: HeadShare, queries: int, keys: int):
        super().__init__(share.mask, share.layout, share.rank, share.first_head)
        ranks = self.layout.ranks
        self.heads, self.key_heads, self.copies = queries // ranks, max(keys // ranks, 1), max(ranks // keys, 1)
        self.first = self.rank * self.heads
        self.lengths = tuple([length_of(self.layout.rows_of(r)) for r in range(ranks)])

    def place(self, mod: TracedMod) -> Place:
        """Where the local call lies for a mod: that of one process, unless the mod reads h."""
        every = (0, self.layout.length)
        return Place((every,), every, self.first_head + self.first if reads(mod.expr, "h") else 0, self.device, 0)

    def _cut_lists(self, calls: LocalCalls, traced: TracedMod) -> tuple[BlockMask, ...]:
        mask = self.mask
        lists: Any = list(mask._lists_4d().values())
        if lists[0].shape[1] > 1:
            lists = [None if t is None else t[:, self.first : self.first + self.heads].contiguous() for t in lists]
        mod: Any = noop_mask if mask.mask_mod is noop_mask else placed(traced, self.place(traced))
        part = block_mask_of_lists(lists, mod, mask.seq_lengths, mask.BLOCK_SIZE)
        part._told_apart = getattr(mask, "_told_apart", ())
        return (marked(part, mask.is_exact),)
