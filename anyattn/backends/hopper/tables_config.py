"""``TablesConfig``: the properties that the kernel for a varlen batch's tables is specialised for."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["MOST_ENTRIES", "THREADS", "TablesConfig"]

THREADS = 1024  # per block; also the number of cost bins
MOST_ENTRIES = (2048, 16384)  # largest batches of the two variants; four bytes per entry in shared memory, eight with ``by_key``


@dataclass(frozen=True)
class TablesConfig:
    """tile_m: query rows of the attention kernel's tiles. ends_with_row: a row sees keys up to its own position; False with ``by_key``.
    most_entries: largest batch.

    by_key: the tiles are key tiles, keys are passed as queries, and the order has one row more, which holds the number of tiles. Sequences
    with most rows come first, all tiles of each one after another; otherwise the most expensive tiles of all sequences come first.
    """

    tile_m: int
    ends_with_row: bool
    most_entries: int
    by_key: bool = False

    def __post_init__(self) -> None:
        if self.most_entries not in MOST_ENTRIES:
            raise ValueError(f"most_entries={self.most_entries}; wanted one of {MOST_ENTRIES}")
        if self.by_key and self.ends_with_row:
            raise ValueError("ends_with_row with by_key; wanted False: sequences are ordered by their rows, whatever these see")
