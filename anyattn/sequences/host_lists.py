"""Varlen batches whose lengths and offsets are Python lists on the host, as for tensors on a CPU."""

from __future__ import annotations

from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from anyattn.sequences.batch import OnHost, Sequences

__all__ = ["ListedSequences", "bases"]


def bases(lengths: list[int]) -> list[int]:
    """Start offsets of ranges of these lengths when concatenated.

    >>> bases([3, 0, 2])
    [0, 3, 3]
    """
    return list(accumulate(lengths, initial=0))[:-1]


def _vector(name: str) -> cached_property[Tensor]:
    return cached_property(lambda self: torch.tensor(getattr(self.on_host, name), dtype=torch.int64, device=self.device))


class ListedSequences(Sequences):
    """``Sequences`` whose vectors are created when first read: a decode step mostly needs the lists only.

    >>> numbers = OnHost([1, 1], [5, 9], [0, 1], [0, 0], [0, 1], [0, 0], [4, 8], bases([1, 1]), bases([5, 9]))
    >>> s = ListedSequences(numbers, torch.device("cpu"))
    >>> s.max_seqlen_k, s.q_first.tolist()
    (9, [4, 8])
    """

    def __init__(
        self,
        numbers: OnHost,
        device: torch.device,
        page_table: Tensor | None = None,
        page_size: int = 0,
        is_cache: bool = False,
        most_q: int = 0,
    ):
        # the dataclass is frozen, and its fields are properties here
        own = {"on_host": numbers, "device": device, "page_table": page_table, "page_size": page_size, "is_cache": is_cache}
        vars(self).update(own | {"most_q": most_q})

    device: torch.device

    def of_pages(self, page_table: Tensor) -> ListedSequences:
        """The same sequences with another page table; what has been computed of their lengths is kept."""
        made = object.__new__(ListedSequences)
        vars(made).update(vars(self) | {"page_table": page_table})
        return made

    @property
    def batch(self) -> int:
        return len(self.on_host.seqlens_q)

    def kept(self) -> Sequences:
        if self.page_table is None:
            return self
        return ListedSequences(self.on_host, self.device, self.page_table.clone(), self.page_size, self.is_cache, self.most_q)

    seqlens_q = _vector("seqlens_q")  # type: ignore[assignment]
    seqlens_k = _vector("seqlens_k")  # type: ignore[assignment]
    q_row = _vector("q_row")  # type: ignore[assignment]
    q_start = _vector("q_start")  # type: ignore[assignment]
    k_row = _vector("k_row")  # type: ignore[assignment]
    k_start = _vector("k_start")  # type: ignore[assignment]
    q_first = _vector("q_first")  # type: ignore[assignment]
    row_base = _vector("row_base")  # type: ignore[assignment]
    key_base = _vector("key_base")  # type: ignore[assignment]
