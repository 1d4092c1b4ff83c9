"""``TablesConfig``: what the kernel that makes a varlen batch's tables is specialised for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_ENTRIES", "THREADS", "TablesConfig"]

THREADS = 1024  # of a block, and bins of costs
MOST_ENTRIES = (2048, 16384)  # four bytes each in shared memory


@dataclass(frozen=True)
class TablesConfig:
    """tile_m: query rows of the big kernel's tiles. ends_with_row: a row sees keys up to its own place. most_entries: of a batch.

    by_key: the tiles are of keys, which the kernel is given as queries, and the order has one more row, which says how many there are.
    is_sorted: the costliest tiles come first; else all tiles are in the order of their sequences, each one's from the first on.
    """

    tile_m: int
    ends_with_row: bool
    most_entries: int
    by_key: bool = False
    is_sorted: bool = True

    def __post_init__(self) -> None:
        if self.most_entries not in MOST_ENTRIES:
            raise ValueError(f"most_entries={self.most_entries}; wanted one of {MOST_ENTRIES}")
