"""``SeqlenInfo``, ``SeqlenInfoQK``, ``SeqlenInfoQKNewK``: offsets and lengths of a batch entry in packed, padded and cached tensors.

They are computed once per batch entry: ``create`` takes a batch index and the tables (cu_seqlens, seqused, ...) and returns a frozen object
of plain numbers. It accepts a Python int and Python lists, a tensor of batch indices and tensors (then every field is a vector over the
batch), or CuTe DSL integers and tensors inside a kernel: the formulas are the same.

The names are those of FlashAttention (``flash_attn/cute/seqlen_info.py``, ``hopper/seqlen.h``).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from anyattn.arithmetic import ceil_div

__all__ = ["SeqlenInfo", "SeqlenInfoQK", "SeqlenInfoQKNewK", "aligned_offset", "offset_batch"]


def aligned_offset(offset: Any, batch_idx: Any, tile: int) -> Any:
    """The first row of a sequence in a buffer of whole tiles per sequence: ``offset + batch_idx * tile`` rounded up to a tile.

    Sequences never overlap there: each start is moved by one more tile than the previous one, so it is at least ``seqlen`` rows after it.

    >>> aligned_offset(150, 2, 128)
    512
    """
    return ceil_div(offset + batch_idx * tile, tile) * tile


def offset_batch(tensor: Any, batch_idx: Any, dim: int, offset: Any, seqlen: Any, is_packed: bool, multiple: int, ragged: bool) -> Any:
    """A batch entry's rows: entry ``batch_idx`` of dimension ``dim``, or rows from ``offset * multiple`` of dimension 0 where packed.

    ragged: also end the rows after ``seqlen * multiple``. Otherwise packed rows reach to the tensor's end, as with a shifted pointer, and
    the reader must stop at ``seqlen``.
    """
    if not isinstance(tensor, Tensor):
        return _offset_batch_cute(tensor, batch_idx, dim, offset, seqlen, is_packed, multiple, ragged)
    rows = tensor if is_packed else tensor.select(dim, int(batch_idx))
    start = int(offset) * multiple if is_packed else 0
    stop = start + int(seqlen) * multiple if ragged else rows.shape[0]
    return rows[start:stop]


def _offset_batch_cute(
    tensor: Any, batch_idx: Any, dim: int, offset: Any, seqlen: Any, is_packed: bool, multiple: int, ragged: bool
) -> Any:
    import cutlass.cute as cute

    rank = cute.rank(tensor)
    if not is_packed:
        return tensor[(None,) * dim + (batch_idx,) + (None,) * (rank - 1 - dim)]
    rows = cute.domain_offset((offset * multiple,) + (0,) * (rank - 1), tensor)
    if not ragged:
        return rows
    shape = (seqlen * multiple, *rows.layout.shape[1:])
    return cute.make_tensor(rows.iterator, cute.make_layout(shape, stride=rows.layout.stride))


@dataclass(frozen=True)
class SeqlenInfo:
    """One side of one batch entry.

    offset: first row in a packed tensor (0 without cu_seqlens). offset_padded: first row in a buffer of whole tiles (``aligned_offset``).
    seqlen: rows in use. has_cu_seqlens: whether the tensor is packed.

    >>> SeqlenInfo.create(1, 350, cu_seqlens=[0, 100, 150, 350], tile=128)
    SeqlenInfo(offset=100, offset_padded=256, seqlen=50, has_cu_seqlens=True)
    """

    offset: Any
    offset_padded: Any
    seqlen: Any
    has_cu_seqlens: bool

    @staticmethod
    def create(batch_idx: Any, seqlen_static: Any, cu_seqlens: Any = None, seqused: Any = None, *, tile: int) -> SeqlenInfo:
        """seqlen_static: the length without tables. cu_seqlens: (batch + 1,) ends, from 0.
        seqused: (batch,) lengths, which take precedence."""
        packed = cu_seqlens is not None
        offset = cu_seqlens[batch_idx] if packed else 0
        offset_padded = aligned_offset(offset, batch_idx, tile) if packed else 0
        return SeqlenInfo(offset, offset_padded, _seqlen(batch_idx, seqlen_static, cu_seqlens, seqused), packed)

    def offset_batch(self, tensor: Any, batch_idx: Any, dim: int, padded: bool = False, multiple: int = 1, ragged: bool = False) -> Any:
        """This entry's rows of ``tensor``: rows of its first dimension if packed, else entry ``batch_idx`` of dimension ``dim``.

        padded: the tensor is a buffer of whole tiles. multiple: its rows per row of the sequence. ragged: end at seqlen.

        >>> import torch
        >>> info = SeqlenInfo.create(1, 5, cu_seqlens=[0, 2, 5], tile=4)
        >>> info.offset_batch(torch.arange(6), 1, 0, ragged=True).tolist()
        [2, 3, 4]
        """
        offset = self.offset_padded if padded else self.offset
        return offset_batch(tensor, batch_idx, dim, offset, self.seqlen, self.has_cu_seqlens, multiple, ragged)


@dataclass(frozen=True)
class SeqlenInfoQK:
    """Both sides of one batch entry, and the begin of its block-sparse lists.

    offset_q, offset_k: first rows in packed tensors. padded_offset_q, padded_offset_k: the same in buffers of whole tiles.
    seqlen_q, seqlen_k: rows in use. block_offset: its first m-block in the numbering of all sequences (``cu_block_cnt[b]``).
    num_n_blocks: its tiles of keys. block_idx_offset: its first entry in flat index lists, [num_m_blocks, num_n_blocks] row by row.

    >>> SeqlenInfoQK.create(2, 0, 0, [0, 100, 150, 350], [0, 100, 150, 350], tile_m=64, tile_n=128).num_n_blocks
    2
    """

    offset_q: Any
    offset_k: Any
    padded_offset_q: Any
    padded_offset_k: Any
    seqlen_q: Any
    seqlen_k: Any
    block_offset: Any
    block_idx_offset: Any
    num_n_blocks: Any
    has_cu_seqlens_q: bool
    has_cu_seqlens_k: bool
    has_seqused_q: bool
    has_seqused_k: bool

    @staticmethod
    def create(
        batch_idx: Any,
        seqlen_q_static: Any,
        seqlen_k_static: Any,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        cu_block_cnt: Any = None,
        cu_block_idx: Any = None,
        *,
        tile_m: int,
        tile_n: int,
    ) -> SeqlenInfoQK:
        """cu_block_cnt: (batch + 1,) first m-block of each sequence. cu_block_idx: (batch + 1,) first entry of each sequence in flat lists.

        Without cu_block_idx every row of the flat lists is assumed to have equally many key tiles: block_offset * num_n_blocks.
        """
        q = SeqlenInfo.create(batch_idx, seqlen_q_static, cu_seqlens_q, seqused_q, tile=tile_m)
        k = SeqlenInfo.create(batch_idx, seqlen_k_static, cu_seqlens_k, seqused_k, tile=tile_n)
        num_n_blocks = ceil_div(k.seqlen, tile_n)
        block_offset = 0 if cu_block_cnt is None else cu_block_cnt[batch_idx]
        block_idx_offset = block_offset * num_n_blocks if cu_block_idx is None else cu_block_idx[batch_idx]
        return SeqlenInfoQK(
            q.offset,
            k.offset,
            q.offset_padded,
            k.offset_padded,
            q.seqlen,
            k.seqlen,
            block_offset,
            block_idx_offset,
            num_n_blocks,
            has_cu_seqlens_q=cu_seqlens_q is not None,
            has_cu_seqlens_k=cu_seqlens_k is not None,
            has_seqused_q=seqused_q is not None,
            has_seqused_k=seqused_k is not None,
        )

    def offset_batch_Q(self, tensor: Any, batch_idx: Any, dim: int, padded: bool = False, multiple: int = 1, ragged: bool = False) -> Any:
        """This entry's query rows, as ``SeqlenInfo.offset_batch``."""
        offset = self.padded_offset_q if padded else self.offset_q
        return offset_batch(tensor, batch_idx, dim, offset, self.seqlen_q, self.has_cu_seqlens_q, multiple, ragged)

    def offset_batch_K(self, tensor: Any, batch_idx: Any, dim: int, padded: bool = False, multiple: int = 1, ragged: bool = False) -> Any:
        """This entry's key rows, as ``SeqlenInfo.offset_batch``."""
        offset = self.padded_offset_k if padded else self.offset_k
        return offset_batch(tensor, batch_idx, dim, offset, self.seqlen_k, self.has_cu_seqlens_k, multiple, ragged)


@dataclass(frozen=True)
class SeqlenInfoQKNewK:
    """One batch entry of a KV cache with new rows to append.

    leftpad_k: padding rows at the cache's beginning. offset_q, offset_k, offset_k_new: first rows of queries, of cached keys (after the
    padding) and of new keys. seqlen_q: queries. seqlen_k_og: cached keys without padding. seqlen_k_new: keys to append. seqlen_k: keys
    after appending. seqlen_rotary: the rotary position of the first new key, which counts the padding.

    >>> SeqlenInfoQKNewK.create(0, 10, 2048, 10, seqused_k=[1000], leftpad_k=[50])
    SeqlenInfoQKNewK(leftpad_k=50, offset_q=0, offset_k=50, offset_k_new=0, seqlen_q=10, seqlen_k_og=950, seqlen_k_new=10, \
seqlen_k=960, seqlen_rotary=1000)
    """

    leftpad_k: Any
    offset_q: Any
    offset_k: Any
    offset_k_new: Any
    seqlen_q: Any
    seqlen_k_og: Any
    seqlen_k_new: Any
    seqlen_k: Any
    seqlen_rotary: Any

    @staticmethod
    def create(
        batch_idx: Any,
        seqlen_q_static: Any,
        seqlen_k_static: Any,
        seqlen_k_new_static: Any,
        cu_seqlens_q: Any = None,
        cu_seqlens_k: Any = None,
        cu_seqlens_k_new: Any = None,
        seqused_q: Any = None,
        seqused_k: Any = None,
        leftpad_k: Any = None,
        seqlens_rotary: Any = None,
    ) -> SeqlenInfoQKNewK:
        """seqused_k: (batch,) cached rows, padding included (``cache_seqlens``). seqlen_k_new_static: keys to append to every entry (0:
        none), without cu_seqlens_k_new (batch + 1,). leftpad_k: (batch,). seqlens_rotary: (batch,), replaces seqlen_rotary."""
        leftpad = 0 if leftpad_k is None else leftpad_k[batch_idx]
        offset_q = 0 if cu_seqlens_q is None else cu_seqlens_q[batch_idx]
        offset_k = (0 if cu_seqlens_k is None else cu_seqlens_k[batch_idx]) + leftpad
        offset_k_new = 0 if cu_seqlens_k_new is None else cu_seqlens_k_new[batch_idx]
        seqlen_k_og = _seqlen(batch_idx, seqlen_k_static, cu_seqlens_k, seqused_k) - leftpad
        seqlen_k_new = _seqlen(batch_idx, seqlen_k_new_static, cu_seqlens_k_new, None)
        seqlen_rotary = seqlen_k_og + leftpad if seqlens_rotary is None else seqlens_rotary[batch_idx]
        return SeqlenInfoQKNewK(
            leftpad,
            offset_q,
            offset_k,
            offset_k_new,
            _seqlen(batch_idx, seqlen_q_static, cu_seqlens_q, seqused_q),
            seqlen_k_og,
            seqlen_k_new,
            seqlen_k_og + seqlen_k_new,
            seqlen_rotary,
        )


def _seqlen(batch_idx: Any, static: Any, cu_seqlens: Any, seqused: Any) -> Any:
    if seqused is not None:
        return seqused[batch_idx]
    if cu_seqlens is not None:
        return cu_seqlens[batch_idx + 1] - cu_seqlens[batch_idx]
    return static
