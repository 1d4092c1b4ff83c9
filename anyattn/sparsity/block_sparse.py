"""``BlockSparseTensors``: lists of a mask's partial and full tiles, the form in which kernels read block sparsity."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.mods.analysis.tile_classes import FULL, PARTIAL
from anyattn.sparsity.arguments import length, pair
from anyattn.sparsity.lists import check_counts, grid_of_lists, joined, lists_of_grid
from anyattn.sparsity.pytree_nodes import register

__all__ = ["LISTS", "BlockSparseTensors", "tensors_of"]

LISTS = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")


def tensors_of(lists: Any) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """The four tensors of dense or ragged lists: counts and indices of partial tiles, then of full ones."""
    return lists.mask_block_cnt, lists.mask_block_idx, lists.full_block_cnt, lists.full_block_idx


@dataclass(frozen=True, eq=False)
class BlockSparseTensors:
    """Per tile of query rows, the key tiles to visit: partial ones (the mask is evaluated) and full ones (it is not).

    mask_block_cnt: int32 (B, H, M), number of partial tiles of each row of tiles; B and H may be 1, which broadcasts.
    mask_block_idx: int32 (B, H, M, N), their columns, strictly increasing; the tail is 0. Compact lists (B, H, M, most) have room only for
    the tiles of the longest list; the number of key tiles then comes from ``lengths``, or from the call that takes the lists.
    full_block_cnt, full_block_idx: the same for full tiles, or None: then every visited tile is in the mask list.
    tile: (tile_m, tile_n), the query rows and keys of a tile. There is no default: both sides must agree on it.
    lengths: (seqlen_q, seqlen_k) that the lists were built for, if known.

    Raises ``TypeError`` or ``ValueError`` for tensors that cannot be such lists, on the CPU also for impossible counts; ``validate()``
    reads the lists' contents too.

    >>> import anyattn
    >>> lists = anyattn.compute_block_sparsity(128, 128, 1, 1, 256, 256, lambda b, h, q, k: q >= k, device="cpu")
    >>> lists.mask_block_cnt.tolist(), lists.full_block_cnt.tolist()
    ([[[1, 1]]], [[[0, 1]]])

    The layout is FlashAttention's (``BlockSparseTensorsTorch`` in flash_attn/cute).
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    tile: tuple[int, int] = None  # type: ignore[assignment]  # required; checked below, after the optional lists
    lengths: tuple[int, int] | None = None
    block_mask_of_classes: ClassVar[Callable[..., Any]]  # set by ``block_mask``, which this package imports first

    def __post_init__(self) -> None:
        if self.tile is None:
            raise TypeError("BlockSparseTensors needs tile=(tile_m, tile_n), the tile that its lists were built for")
        object.__setattr__(self, "tile", pair("tile", self.tile))
        if self.lengths is not None:
            q, kv = self.lengths
            object.__setattr__(self, "lengths", (length("lengths[0]", q), length("lengths[1]", kv)))
        if (self.full_block_cnt is None) != (self.full_block_idx is None):
            raise ValueError("full_block_cnt and full_block_idx: one is given, the other is None; pass both or neither")
        _check_shapes("mask", self.mask_block_cnt, self.mask_block_idx)
        if self.full_block_cnt is not None and self.full_block_idx is not None:
            _check_shapes("full", self.full_block_cnt, self.full_block_idx)
            if self.full_block_idx.shape[:3] != self.mask_block_idx.shape[:3]:
                raise ValueError(
                    f"full_block_idx has shape {tuple(self.full_block_idx.shape)}, mask_block_idx {tuple(self.mask_block_idx.shape)}; "
                    "wanted the same (B, H, M)"
                )
            if self.full_block_idx.device != self.mask_block_idx.device:
                raise ValueError(f"full_block_idx is on {self.full_block_idx.device}, mask_block_idx on {self.mask_block_idx.device}")
        if self.lengths is not None:
            wanted = self.grid
            if self.mask_block_idx.shape[-2] != wanted[0] or self._room > wanted[1]:
                raise ValueError(
                    f"the lists have {self.mask_block_idx.shape[-2]} x {self._room} tiles, but lengths {self.lengths} in tiles of "
                    f"{self.tile} make {wanted[0]} x {wanted[1]}; pass the tile and the lengths that the lists were built for"
                )

    @property
    def grid(self) -> tuple[int, int]:
        """(M, N): tiles along the query rows and along the keys; without lengths, N is the number of tiles that a list has room for."""
        if self.lengths is None:
            return self.mask_block_idx.shape[-2], self._room
        rows, columns = (ceil_div(n, t) for n, t in zip(self.lengths, self.tile, strict=True))
        return rows, columns

    @property
    def _room(self) -> int:
        """The number of tiles that the wider of a row's two lists has room for."""
        full = 0 if self.full_block_idx is None else self.full_block_idx.shape[-1]
        return max(self.mask_block_idx.shape[-1], full)

    def widened(self, lengths: tuple[int, int]) -> BlockSparseTensors:
        """The same lists for sequences of these lengths, with room for every tile: the form that kernels read."""
        cropped = replace(self, lengths=lengths)

        def wide(idx: Tensor | None) -> Tensor | None:
            missing = 0 if idx is None else cropped.grid[1] - idx.shape[-1]
            return torch.nn.functional.pad(idx, (0, missing)) if idx is not None and missing else idx

        return replace(cropped, mask_block_idx=wide(self.mask_block_idx), full_block_idx=wide(self.full_block_idx))  # type: ignore[arg-type]

    @property
    def device(self) -> torch.device:
        return self.mask_block_cnt.device

    @classmethod
    def from_classes(
        cls, classes: Tensor, tile: tuple[int, int], lengths: tuple[int, int] | None = None, separate_full: bool = True
    ) -> BlockSparseTensors:
        """Lists of a grid of classes, uint8 (B, H, M, N), as ``tile_classes.classify`` returns it."""
        return cls(*lists_of_grid(classes, separate_full), tile=tile, lengths=lengths)

    def classes(self) -> Tensor:
        """The grid of classes, uint8 (B, H, M, N): 0 empty, 1 partial, 2 full."""
        return grid_of_lists(*tensors_of(self), self.grid[1])

    def of_heads(self, heads: int) -> BlockSparseTensors:
        """The lists of ``heads`` query heads: lists per K/V head are copied for each of its query heads, shared lists stay."""
        each = heads // self.mask_block_cnt.shape[1] if self.mask_block_cnt.shape[1] > 1 else 1
        repeated: Any = {n: t.repeat_interleave(each, 1) for n in LISTS if (t := getattr(self, n)) is not None}
        return self if each == 1 else replace(self, **repeated)

    def visited(self) -> Tensor:
        """int32 (B, H, M): how many tiles each row of tiles visits."""
        return self.mask_block_cnt if self.full_block_cnt is None else self.mask_block_cnt + self.full_block_cnt

    def transposed(self) -> BlockSparseTensors:
        """Per key tile, the row tiles that visit it (the backward pass of dk and dv reads these); ``tile`` is then (keys, rows)."""
        lengths = None if self.lengths is None else self.lengths[::-1]
        return self.from_classes(self.classes().transpose(-1, -2), self.tile[::-1], lengths, self.full_block_cnt is not None)

    def retile(self, tile_m: int, tile_n: int) -> BlockSparseTensors:
        """The same sparsity in tiles of (tile_m, tile_n), of any size.

        A tile is full if all present tiles that it overlaps are full, empty if all are empty, else partial: the mask is evaluated in it.
        Where its size divides the present one, full and empty stay exact.

        Raises ``ValueError`` for lists of unknown lengths if a size is no multiple of the present one.
        """
        wanted = pair("tile", (tile_m, tile_n))
        if wanted == self.tile:
            return self
        if self.lengths is None and any(new % old for new, old in zip(wanted, self.tile, strict=True)):
            raise ValueError(
                f"these block lists in tiles of {self.tile} do not know their sequence lengths, so they cannot be cut into tiles of "
                f"{wanted}; pass lengths=(seqlen_q, seqlen_k)"
            )
        classes = self.classes()
        for dim in (-2, -1):
            seqlen = classes.shape[dim] * self.tile[dim] if self.lengths is None else self.lengths[dim]
            classes = _retiled(classes, dim, self.tile[dim], wanted[dim], seqlen)
        return self.from_classes(classes, wanted, self.lengths, self.full_block_cnt is not None)

    def validate(self) -> BlockSparseTensors:
        """Raises ``ValueError`` unless counts are in range, lists strictly increasing with a tail of 0, and partial and full disjoint.

        Reads all lists, O(tiles). Returns itself. Lists without lengths are assumed to have room for every tile.
        """
        _check_contents("mask", self.mask_block_cnt, self.mask_block_idx, self.grid[1])
        if self.full_block_cnt is not None and self.full_block_idx is not None:
            _check_contents("full", self.full_block_cnt, self.full_block_idx, self.grid[1])
            as_mask = grid_of_lists(self.mask_block_cnt, self.mask_block_idx, None, None, self.grid[1]) == PARTIAL
            both = as_mask & (self.classes() == FULL)
            if bool(both.any()):
                b, h, m, n = both.nonzero()[0].tolist()
                raise ValueError(f"tile {n} of row {m} (b={b}, h={h}) is listed as mask block and as full block; list it once")
        return self

    def to(self, device: torch.device | str) -> BlockSparseTensors:
        """The same lists on another device."""
        moved: Any = {n: t.to(device) for n in LISTS if (t := getattr(self, n)) is not None}
        return replace(self, **moved)

    @classmethod
    def from_block_mask(cls, block_mask: Any) -> BlockSparseTensors:
        """Lists of a block mask, torch's or ours, of any block size; torch's lists may be unsorted and have arbitrary tails."""
        fields = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        missing = (1,) * (4 - block_mask.kv_indices.ndim)  # slices of older torch drop batch and head
        reshaped: Any = (None if t is None else t.reshape(*missing, *t.shape) for t in fields)
        cnt, idx, full_cnt, full_idx = reshaped
        lengths = tuple(block_mask.seq_lengths)
        # torch's "no mask" is one block of 2^30 x 2^30
        tile = tuple(min(size, max(n, 1)) for size, n in zip(block_mask.BLOCK_SIZE, lengths, strict=True))
        rows, columns = (ceil_div(n, t) for n, t in zip(lengths, tile, strict=True))
        classes = grid_of_lists(cnt, idx, full_cnt, full_idx, columns=max(columns, idx.shape[-1]))[..., :rows, :columns]
        return cls.from_classes(classes, tile, lengths, full_cnt is not None)  # type: ignore[arg-type]

    @classmethod
    def from_ordered_lists(cls, block_mask: Any, by_key: bool = False) -> BlockSparseTensors | None:
        """Lists of a block mask that are known to be ascending with 0 in their tails, as anyattn builds them; memory that kernels can read
        is shared, not copied. None if a list is not int32, a length is 0, or the lists have another number of rows than the lengths have
        row tiles, or room for more tiles than there are.

        by_key: the lists of each key tile, as ``transposed`` makes them."""
        lengths, tile = tuple(block_mask.seq_lengths), tuple(block_mask.BLOCK_SIZE)
        fields = (block_mask.kv_num_blocks, block_mask.kv_indices, block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
        if by_key:
            lengths, tile = lengths[::-1], tile[::-1]
            fields = (block_mask.q_num_blocks, block_mask.q_indices, block_mask.full_q_num_blocks, block_mask.full_q_indices)
        grid = tuple(map(ceil_div, lengths, tile))
        fits = fields[1].shape[2] == grid[0] and fields[1].shape[3] <= grid[1]
        if any(t is not None and t.dtype is not torch.int32 for t in fields) or not fits or min(lengths) < 1:
            return None
        cnt, idx, full_cnt, full_idx = map(_readable, fields)
        return cls(cnt, idx, full_cnt, full_idx, tuple(map(min, tile, lengths)), lengths)  # type: ignore[arg-type]

    def to_block_mask(self, mask_mod: Any = None, lengths: tuple[int, int] | None = None) -> Any:
        """The ``anyattn.BlockMask`` of these lists. mask_mod: the mask inside partial tiles; None: all pairs are visible."""
        lengths = lengths if lengths is not None else self.lengths
        if lengths is None:
            lengths = (self.grid[0] * self.tile[0], self.grid[1] * self.tile[1])
        classes = (self if self.lengths is not None else replace(self, lengths=lengths)).classes()
        return self.block_mask_of_classes(classes, mask_mod, lengths, self.tile, self.full_block_cnt is not None)

    def __repr__(self) -> str:
        full = 0 if self.full_block_cnt is None else int(self.full_block_cnt.sum())
        mask, (m, n) = int(self.mask_block_cnt.sum()), self.grid
        total = self.mask_block_cnt.shape[0] * self.mask_block_cnt.shape[1] * m * n
        return (
            f"BlockSparseTensors({m} x {n} tiles of {self.tile[0]} x {self.tile[1]}, {tuple(self.mask_block_cnt.shape[:2])} "
            f"batches x heads: {mask} mask, {full} full, {total - mask - full} skipped)"
        )


def _readable(t: Tensor | None) -> Tensor | None:
    """The tensor, copied unless kernels can read it: contiguous, at an address that is a multiple of 16 bytes."""
    return t if t is None or (t.is_contiguous() and not t.data_ptr() & 15) else t.clone(memory_format=torch.contiguous_format)


def _retiled(classes: Tensor, dim: int, old: int, new: int, seqlen: int) -> Tensor:
    """Classes in tiles of ``new`` positions along one side, from those in tiles of ``old``; a sequence's last tile may be shorter."""
    if old == new:
        return classes
    most = new // old if new % old == 0 else 1 if old % new == 0 else (new - 1) // old + 2  # tiles that a new one overlaps
    begin = torch.arange(0, seqlen, new, device=classes.device)
    first, last = begin // old, ((begin + new).clamp(max=seqlen) - 1) // old
    parts = torch.minimum(first[:, None] + torch.arange(most, device=classes.device), last[:, None])
    overlapped = classes.index_select(dim, parts.flatten()).unflatten(dim, parts.shape)
    return joined(overlapped.amin(dim), overlapped.amax(dim))


def _check_shapes(name: str, cnt: Any, idx: Any) -> None:
    for what, tensor, rank, dims in ((f"{name}_block_cnt", cnt, 3, "(B, H, M)"), (f"{name}_block_idx", idx, 4, "(B, H, M, N)")):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{what} is a {type(tensor).__name__}; wanted an int32 tensor {dims}")
        if tensor.dtype is not torch.int32:
            raise TypeError(f"{what} is {tensor.dtype}; wanted torch.int32, as tensor.to(torch.int32)")
        if tensor.ndim != rank:
            raise ValueError(f"{what} has shape {tuple(tensor.shape)}; wanted {rank} dimensions {dims}, with B = H = 1 to broadcast")
    if cnt.shape != idx.shape[:3]:
        shapes = f"{name}_block_cnt has shape {tuple(cnt.shape)} and {name}_block_idx {tuple(idx.shape)}"
        raise ValueError(f"{shapes}; wanted (B, H, M) and (B, H, M, N)")
    if cnt.device != idx.device:
        raise ValueError(f"{name}_block_cnt is on {cnt.device} and {name}_block_idx on {idx.device}; wanted one device")
    check_counts(f"{name}_block_cnt", cnt, idx, least=0)


def _check_contents(name: str, cnt: Tensor, idx: Tensor, columns: int) -> None:
    room = idx.shape[-1]
    if bool(((cnt < 0) | (cnt > room)).any()):
        raise ValueError(f"{name}_block_cnt holds {int(cnt.min())} to {int(cnt.max())}; wanted 0 to {room}, the number of key tiles")
    listed = torch.arange(room, device=idx.device) < cnt[..., None]
    if bool((listed & ((idx < 0) | (idx >= columns))).any()):
        raise ValueError(f"{name}_block_idx lists a tile outside 0 to {columns - 1}")
    if bool((listed[..., 1:] & (idx[..., 1:] <= idx[..., :-1])).any()):
        raise ValueError(f"{name}_block_idx is not strictly increasing within its counts; sort each row and list every tile once")
    if bool((~listed & (idx != 0)).any()):
        raise ValueError(f"{name}_block_idx is not 0 after the listed tiles; fill the tail with 0")


register(BlockSparseTensors, LISTS, ("tile", "lengths"))
