"""``BlockInfo``: the key tiles that a tile of query rows needs under causal and window masks, and the row tiles that need a key tile.

Query row i of a sequence is at position ``i + seqlen_k - seqlen_q`` among the keys (bottom-right alignment) and sees the keys from
``window_size_left`` before that position to ``window_size_right`` after it. The methods take Python ints, tensors of tile numbers with
fields of tensors, or CuTe DSL integers, and return the same kind.

The names are those of FlashAttention (``flash_attn/cute/block_info.py``). Ranges here are tight: their first and last tile each contain a
visible pair (rows past the sequence's end do not count), and an empty range has equal ends.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from anyattn.arithmetic import ceil_div
from anyattn.sequences.integers import maximum, minimum
from anyattn.sequences.split_kv import split_range

__all__ = ["BlockInfo"]


@dataclass(frozen=True)
class BlockInfo:
    """Tile ranges of one kind of mask.

    tile_m, tile_n: rows and keys of a tile; with packed GQA a tile's rows are ``qhead_per_kvhead_packgqa`` heads for each query position.
    is_causal: no key after a row's position. is_local: ``window_size_left`` / ``window_size_right`` bound the keys, None is unbounded.
    is_split_kv: the keys of each row tile are divided among ``num_splits`` workers.

    The flags, the tiles and whether a window bound is None specialise a kernel and are known at compile time; window sizes and the number
    of splits may be run-time numbers.

    Raises ``ValueError`` for tiles or a packing below 1 and for a window without ``is_local``.

    >>> from anyattn.sequences.seqlen_info import SeqlenInfoQK
    >>> info = SeqlenInfoQK.create(0, 2560, 2560, tile_m=128, tile_n=128)
    >>> split = BlockInfo(128, 128, is_causal=False, is_split_kv=True, num_splits=4)
    >>> [split.get_n_block_min_max(info, 0, i) for i in range(4)]
    [(0, 5), (5, 10), (10, 15), (15, 20)]
    """

    tile_m: int
    tile_n: int
    is_causal: bool
    is_local: bool = False
    is_split_kv: bool = False
    window_size_left: Any = None
    window_size_right: Any = None
    qhead_per_kvhead_packgqa: int = 1
    num_splits: Any = 1

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n", "qhead_per_kvhead_packgqa"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}; wanted at least 1")
        if not self.is_local and (self.window_size_left is not None or self.window_size_right is not None):
            raise ValueError(
                f"window_size_left={self.window_size_left} and window_size_right={self.window_size_right} without is_local; pass "
                "is_local=True, or None for both"
            )

    def get_n_block_min_max(self, seqlen_info: Any, m_block: Any, split_idx: Any = 0) -> tuple[Any, Any]:
        """The first key tile that a tile of rows needs, and the end (exclusive); with split-KV, for one split."""
        first, end = self._keys_of_rows(seqlen_info, *self._rows(seqlen_info, m_block))
        n_block_min, n_block_max = _tiles(first, end, self.tile_n)
        if self.is_split_kv:
            return split_range(n_block_min, n_block_max, split_idx, self.num_splits)
        return n_block_min, n_block_max

    def get_m_block_min_max(self, seqlen_info: Any, n_block: Any) -> tuple[Any, Any]:
        """The first tile of rows that needs a tile of keys, and the end (exclusive)."""
        first_key = n_block * self.tile_n
        end_key = minimum((n_block + 1) * self.tile_n, seqlen_info.seqlen_k)
        offset = seqlen_info.seqlen_k - seqlen_info.seqlen_q
        # row i sees key j when j - right <= i + offset <= j + left
        first, end = 0, seqlen_info.seqlen_q
        right, left = self._right, self._left
        if right is not None:
            first = maximum(first_key - right - offset, 0)
        if left is not None:
            end = minimum(end, end_key + left - offset)
        if left is not None and right is not None:  # an empty band has no rows for any tile
            end = minimum(end, first_key - right - offset + (end_key - first_key) * maximum(left + right + 1, 0))
        group = self.qhead_per_kvhead_packgqa
        return _tiles(first * group, end * group, self.tile_m)

    def get_n_block_k_new_min_max(self, seqlen_info: Any, m_block: Any, split_idx: Any = 0) -> tuple[Any, Any]:
        """The tiles of *new* keys that a tile of rows needs, counted from the first new key (``SeqlenInfoQKNewK``)."""
        n_block_min, n_block_max = self.get_n_block_min_max(seqlen_info, m_block, split_idx)
        first = maximum(n_block_min * self.tile_n - seqlen_info.seqlen_k_og, 0)
        end = minimum(n_block_max * self.tile_n - seqlen_info.seqlen_k_og, seqlen_info.seqlen_k_new)
        return _tiles(first, end, self.tile_n)

    def get_n_block_min_causal_local_mask(self, seqlen_info: Any, m_block: Any, n_block_min: Any) -> Any:
        """The first key tile that needs the mask's right side; in earlier tiles every row sees the last key.

        At least ``n_block_min``. The sequence's end, which cuts the last tile only, is not considered.
        """
        if self._right is None:
            return maximum(n_block_min, ceil_div(seqlen_info.seqlen_k, self.tile_n))
        first_row, _ = self._rows(seqlen_info, m_block)
        keys = first_row + seqlen_info.seqlen_k - seqlen_info.seqlen_q + self._right + 1
        return maximum(n_block_min, maximum(keys, 0) // self.tile_n)

    def get_n_block_min_before_local_mask(self, seqlen_info: Any, m_block: Any, n_block_min: Any) -> Any:
        """The first key tile that does not need the mask's left side: in it and all later ones every row sees the first key. At least
        ``n_block_min``."""
        if self._left is None:
            return n_block_min
        _, end_row = self._rows(seqlen_info, m_block)
        first_key = end_row - 1 + seqlen_info.seqlen_k - seqlen_info.seqlen_q - self._left
        return maximum(n_block_min, ceil_div(maximum(first_key, 0), self.tile_n))

    @property
    def _left(self) -> Any:
        return self.window_size_left if self.is_local else None

    @property
    def _right(self) -> Any:
        """The number of keys that a row sees after its position: 0 if causal; negative if the window ends before the position."""
        if not self.is_causal:
            return self.window_size_right if self.is_local else None
        return 0 if not self.is_local or self.window_size_right is None else minimum(self.window_size_right, 0)

    def _rows(self, seqlen_info: Any, m_block: Any) -> tuple[Any, Any]:
        """The query positions of a tile of (packed) rows, ending at the sequence's end."""
        group = self.qhead_per_kvhead_packgqa
        first, end = m_block * self.tile_m, (m_block + 1) * self.tile_m
        if group > 1:
            first, end = first // group, ceil_div(end, group)
        return first, minimum(end, seqlen_info.seqlen_q)

    def _keys_of_rows(self, seqlen_info: Any, first_row: Any, end_row: Any) -> tuple[Any, Any]:
        """The keys that the rows see, inside the sequence; empty if end <= first."""
        offset = seqlen_info.seqlen_k - seqlen_info.seqlen_q
        first, end = 0, seqlen_info.seqlen_k
        right, left = self._right, self._left
        if left is not None:
            first = first_row + offset - left
        if right is not None:
            end = minimum(end, end_row + offset + right)
        if left is not None and right is not None:  # the union of all rows' bands; empty if the band is empty
            end = minimum(end, first + (end_row - first_row) * maximum(left + right + 1, 0))
        return maximum(first, 0), end


def _tiles(first: Any, end: Any, tile: int) -> tuple[Any, Any]:
    """The tiles that contain positions ``first <= i < end``, first >= 0; empty if end <= first."""
    n_min = first // tile
    count = maximum(end - first, 0)
    return n_min, n_min + ceil_div(minimum(count, 1) * (first - n_min * tile) + count, tile)
