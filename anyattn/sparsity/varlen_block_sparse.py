"""``VarlenBlockSparseTensors``: lists of partial and full tiles of a varlen batch, all sequences packed into one set of lists."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.tile_classes import FULL, PARTIAL
from anyattn.mods.analysis.tile_classes_varlen import classify_ragged
from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.mods.analysis.visible_loads import Ragged, check_call
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.sequences.seqlen_info import SeqlenInfoQK
from anyattn.sparsity import captured, varlen_checks
from anyattn.sparsity.arguments import device_of, length, pair, ragged_lengths
from anyattn.sparsity.block_sparse import LISTS, BlockSparseTensors
from anyattn.sparsity.lists import classes_of_ragged, joined, ordered_ragged
from anyattn.sparsity.pytree_nodes import register, unchecked
from anyattn.sparsity.varlen_chosen_blocks import classes_of_choice
from anyattn.tensors.dynamo import opaque
from anyattn.tensors.kinds import not_scriptable, outside_transforms, refuse_hidden, refuse_hidden_captures, refuse_torchscript

__all__ = ["VarlenBlockSparseTensors", "compute_varlen_block_sparsity"]

_TABLES = ("cu_block_cnt", "cu_block_idx", "seqlens_q", "seqlens_k")


@dataclass(frozen=True, eq=False)
class VarlenBlockSparseTensors:
    """Per tile of query rows of every sequence, the key tiles to visit: partial ones (the mask is evaluated) and full ones (it is not).

    Sequence b has num_m(b) = ceil(seqlens_q[b] / tile_m) row tiles and num_n(b) = ceil(seqlens_k[b] / tile_n) key tiles. total_m is the sum
    of num_m(b), total_n the sum of num_m(b) * num_n(b), max_n the greatest num_n(b). Heads H may be 1, which broadcasts.

    mask_block_cnt: int32 (H, total_m), number of partial tiles of each row of tiles.
    mask_block_idx: their key tiles, counted inside the sequence, strictly increasing; the tail is 0. int32, in one of two layouts:
    "padded" (H, total_m, max_n), or "flat" (H, total_n), where each row of tiles owns num_n(b) entries.
    full_block_cnt, full_block_idx: the same for full tiles, or None: then every visited tile is in the mask list.
    cu_block_cnt: int32 (B + 1,), first row tile of each sequence. cu_block_idx: int64 (B + 1,), its first entry in the flat lists. Both end
    with the totals; if left out, they are computed from the lengths.
    tile: (tile_m, tile_n). There is no default: both sides must agree on it.
    seqlens_q, seqlens_k: int64 (B,), the lengths that the lists were built for; 0 is legal.

    Raises ``TypeError`` or ``ValueError`` for tensors that cannot be such lists; ``validate()`` also reads the lists' contents.

    >>> import anyattn, torch
    >>> ends = torch.tensor([0, 200, 200, 500])
    >>> causal = lambda b, h, q, k: q >= k
    >>> anyattn.compute_varlen_block_sparsity(128, 128, None, causal, cu_seqlens_q=ends, cu_seqlens_k=ends)
    VarlenBlockSparseTensors(3 sequences, 5 row tiles, tiles of 128 x 128, heads: 1, flat: 5 mask, 4 full, 4 skipped)
    """

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    cu_block_cnt: Tensor = None  # type: ignore[assignment]  # made below
    cu_block_idx: Tensor = None  # type: ignore[assignment]
    tile: tuple[int, int] = None  # type: ignore[assignment]  # required; checked below, after the optional lists
    seqlens_q: Tensor = None  # type: ignore[assignment]
    seqlens_k: Tensor = None  # type: ignore[assignment]

    def __post_init__(self) -> None:
        for name, what in (("tile", "(tile_m, tile_n)"), ("seqlens_q", "the rows (B,)"), ("seqlens_k", "the keys (B,)")):
            if getattr(self, name) is None:
                raise TypeError(f"VarlenBlockSparseTensors needs {name}, {what} that its lists were built for")
        object.__setattr__(self, "tile", pair("tile", self.tile))
        varlen_checks.check_lengths(self.seqlens_q, self.seqlens_k)
        tables = {"cu_block_cnt": self.tiles.first_row.to(torch.int32), "cu_block_idx": self.tiles.first_tile}
        for name, table in tables.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, table)
            else:
                varlen_checks.check_table(name, getattr(self, name), table)
        if (self.full_block_cnt is None) != (self.full_block_idx is None):
            raise ValueError("full_block_cnt and full_block_idx: one is given, the other is None; pass both or neither")
        varlen_checks.check_shapes("mask", self.mask_block_cnt, self.mask_block_idx, self.tiles)
        if self.full_block_cnt is not None and self.full_block_idx is not None:
            varlen_checks.check_shapes("full", self.full_block_cnt, self.full_block_idx, self.tiles)
            if self.full_block_idx.shape != self.mask_block_idx.shape:
                raise ValueError(
                    f"full_block_idx has shape {tuple(self.full_block_idx.shape)}, mask_block_idx {tuple(self.mask_block_idx.shape)}; "
                    "wanted the same heads and the same layout"
                )

    @cached_property
    def tiles(self) -> RaggedTiles:
        """The places of each sequence's tiles in the flat order."""
        return RaggedTiles(self.seqlens_q, self.seqlens_k, self.tile)

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*LISTS, *_TABLES, "tile")}

    @property
    def layout(self) -> str:
        """ "padded" or "flat": the form of the index lists."""
        return "padded" if self.mask_block_idx.ndim == 3 else "flat"

    @property
    def device(self) -> torch.device:
        return self.mask_block_cnt.device

    @classmethod
    def from_classes(
        cls,
        classes: Tensor,
        tile: tuple[int, int],
        seqlens_q: Tensor,
        seqlens_k: Tensor,
        separate_full: bool = True,
        layout: str = "flat",
    ) -> VarlenBlockSparseTensors:
        """Lists of the classes of every tile, uint8 (H, total_n), as ``tile_classes_varlen.classify_ragged`` returns them."""
        varlen_checks.check_layout(layout)
        varlen_checks.check_lengths(seqlens_q, seqlens_k)
        tiles = RaggedTiles(seqlens_q, seqlens_k, pair("tile", tile))
        varlen_checks.check_classes(classes, tiles)
        return cls._of_classes(classes, tiles, separate_full, layout)

    @classmethod
    def from_topk(
        cls,
        indices: Tensor,
        *,
        tile: tuple[int, int],
        cu_seqlens_q: Tensor | None = None,
        cu_seqlens_k: Tensor | None = None,
        seqused_q: Tensor | None = None,
        seqused_k: Tensor | None = None,
        counts: Tensor | None = None,
        mask_mod: Callable | None = None,
        layout: str = "flat",
    ) -> VarlenBlockSparseTensors:
        """Lists of chosen tiles: each row tile of every sequence visits the key tiles that ``indices`` names.

        indices: int32 or int64 (H, total_m, k), the row tiles of all sequences one after another: numbers of key tiles inside the sequence,
        in any order; a repeated number is read once, and a negative one as no tile. H is 1, the number of query heads, or the number of K/V
        heads. counts: integers (H, total_m), how many of a row's numbers are read; by default all k. tile: (tile_m, tile_n).
        cu_seqlens_*, seqused_*: as in ``compute_varlen_block_sparsity``, by which the lengths are read on the host.
        mask_mod: the mask that the call gets too: a tile that it hides whole is left out, and one that it shows whole needs no mask. Parts
        of it that depend on the head decide inside tiles only.

        Raises ``TypeError`` or ``ValueError`` naming the argument; on a CPU also for a number beyond its sequence's keys, which is
        otherwise read as no tile, and for a count above k. Not inside ``torch.compile``: the number of tiles follows from the lengths.

        >>> ends = torch.tensor([0, 128, 320])
        >>> chosen = torch.tensor([[[0, 1], [1, 0], [2, 1], [-1, 0], [2, 2]]])
        >>> lists = VarlenBlockSparseTensors.from_topk(chosen, tile=(64, 64), cu_seqlens_q=ends, cu_seqlens_k=ends)
        >>> lists.full_block_cnt.tolist(), lists.full_block_idx.tolist()
        ([[2, 2, 2, 1, 1]], [[0, 1, 0, 1, 1, 2, 0, 0, 0, 0, 2, 0, 0]])
        """
        if torch.compiler.is_compiling():
            raise TypeError("VarlenBlockSparseTensors.from_topk is called inside torch.compile; wanted a call outside: pass the lists in")
        return _from_topk(cls, (indices, counts), tile, (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k), mask_mod, layout)

    @classmethod
    def _of_classes(cls, classes: Tensor, tiles: RaggedTiles, separate_full: bool, layout: str) -> VarlenBlockSparseTensors:
        cnt, idx = ordered_ragged(classes, tiles, (PARTIAL,) if separate_full else (PARTIAL, FULL))
        full_cnt, full_idx = ordered_ragged(classes, tiles, (FULL,)) if separate_full else (None, None)
        lists = cls._of_lists((cnt, idx, full_cnt, full_idx), tiles)
        return lists if layout == "flat" else lists.to_padded()

    @classmethod
    def _of_lists(cls, lists: tuple[Tensor, Tensor, Tensor | None, Tensor | None], tiles: RaggedTiles) -> VarlenBlockSparseTensors:
        """An object of lists that were made for these tiles; unchecked, since a check would wait for a GPU."""
        instance = object.__new__(cls)
        of_tiles = (tiles.first_row.to(torch.int32), tiles.first_tile, tiles.seqlens_q, tiles.seqlens_k)
        vars(instance).update(zip(LISTS, lists, strict=True))
        vars(instance).update(zip(_TABLES, of_tiles, strict=True))
        vars(instance).update(tile=tiles.tile, tiles=tiles)
        return instance

    @classmethod
    def from_block_sparse(cls, lists: BlockSparseTensors, batch: int | None = None, layout: str = "flat") -> VarlenBlockSparseTensors:
        """The lists of a batch of sequences of equal lengths. batch: the number of sequences, if all share the lists of one entry."""
        if not isinstance(lists, BlockSparseTensors):
            raise TypeError(f"lists is a {type(lists).__name__}; wanted BlockSparseTensors")
        if lists.lengths is None:
            raise ValueError("these block lists do not know their sequence lengths; build them with lengths=(seqlen_q, seqlen_k)")
        classes = lists.classes()  # (B, H, M, N)
        batch = len(classes) if batch is None else length("batch", batch)
        if len(classes) not in (1, batch):
            raise ValueError(f"batch is {batch}, but the block lists are for {len(classes)} batch entries; leave it out, or pass theirs")
        flat = classes.expand(batch, -1, -1, -1).transpose(0, 1).reshape(classes.shape[1], -1)
        seqlens_q, seqlens_k = (torch.full((batch,), n, dtype=torch.int64, device=lists.device) for n in lists.lengths)
        return cls.from_classes(flat, lists.tile, seqlens_q, seqlens_k, lists.full_block_cnt is not None, layout)

    def classes(self) -> Tensor:
        """The class of every tile, uint8 (H, total_n), flat in the order [sequence][row tile][key tile]: 0 empty, 1 partial, 2 full."""
        flat = self.to_flat()
        lists = [(flat.mask_block_cnt, flat.mask_block_idx, PARTIAL)]
        if flat.full_block_cnt is not None and flat.full_block_idx is not None:
            lists.append((flat.full_block_cnt, flat.full_block_idx, FULL))
        return classes_of_ragged(self.tiles, lists)

    def visited(self) -> Tensor:
        """int32 (H, total_m): how many tiles each row of tiles visits."""
        return self.mask_block_cnt if self.full_block_cnt is None else self.mask_block_cnt + self.full_block_cnt

    def lists(self, b: int, h: int, m: int) -> tuple[Tensor, Tensor]:
        """The partial and the full key tiles, int32, of row tile m of sequence b for head h; an empty tensor if none is listed.

        Raises ``ValueError`` for b, h or m out of range.
        """
        heads = self.mask_block_cnt.shape[0]
        varlen_checks.check_place("b", b, self.tiles.batch, "sequences")
        if heads == 1:  # all heads share one head's lists
            length("h", h)
        else:
            varlen_checks.check_place("h", h, heads, "heads")
        info = SeqlenInfoQK.create(
            b,
            0,
            0,
            seqused_q=self.seqlens_q,
            seqused_k=self.seqlens_k,
            cu_block_cnt=self.cu_block_cnt,
            cu_block_idx=self.cu_block_idx,
            tile_m=self.tile[0],
            tile_n=self.tile[1],
        )
        varlen_checks.check_place("m", m, int(self.tiles.num_m[b]), f"row tiles in sequence {b}")
        head, row = min(h, heads - 1), int(info.block_offset) + m

        def listed(cnt: Tensor | None, idx: Tensor | None) -> Tensor:
            if cnt is None or idx is None:
                return torch.zeros(0, dtype=torch.int32, device=self.device)
            count = int(cnt[head, row])
            if idx.ndim == 3:
                return idx[head, row, :count]
            first = int(info.block_idx_offset) + m * int(info.num_n_blocks)
            return idx[head, first : first + count]

        return listed(self.mask_block_cnt, self.mask_block_idx), listed(self.full_block_cnt, self.full_block_idx)

    # ---- conversions

    def to_flat(self) -> VarlenBlockSparseTensors:
        """The same lists in the flat layout."""
        return self if self.layout == "flat" else self._in_other_layout()

    def to_padded(self) -> VarlenBlockSparseTensors:
        """The same lists in the padded layout, which takes total_m * max_n entries: many more than flat if lengths differ much."""
        return self if self.layout == "padded" else self._in_other_layout()

    def _in_other_layout(self) -> VarlenBlockSparseTensors:
        is_flat, old = self.layout == "flat", (self.mask_block_idx, self.full_block_idx)
        sizes = (self.tiles.total_m, self.tiles.max_n) if is_flat else (self.tiles.total_n,)
        new = [None if t is None else t.new_zeros(len(t), *sizes) for t in old]
        for piece, (b, m, n) in self.tiles.pieces():
            flat, padded = (slice(None), piece), (slice(None), self.tiles.first_row[b] + m, n)
            for source, target in zip(old, new, strict=True):
                if source is not None and target is not None:
                    target[padded if is_flat else flat] = source[flat if is_flat else padded]
        return self._of_lists((self.mask_block_cnt, new[0], self.full_block_cnt, new[1]), self.tiles)  # type: ignore[arg-type]

    def of_heads(self, heads: int) -> VarlenBlockSparseTensors:
        """The lists of ``heads`` query heads: those of one head, or of a K/V head, are copied for each query head."""
        if len(self.mask_block_cnt) == heads:
            return self
        each = heads // len(self.mask_block_cnt)
        lists = [None if (t := getattr(self, name)) is None else t.repeat_interleave(each, 0) for name in LISTS]
        return self._of_lists(tuple(lists), self.tiles)  # type: ignore[arg-type]

    def _made_of(self, classes: Tensor, tiles: RaggedTiles) -> VarlenBlockSparseTensors:
        separate = self.full_block_cnt is not None
        return self._of_classes(classes, tiles, separate, self.layout)

    def transposed(self) -> VarlenBlockSparseTensors:
        """Per key tile, the row tiles that visit it (the backward pass of dk and dv reads these); ``tile`` is then (keys, rows).

        Does not wait for a GPU."""
        return self._made_of(self.tiles.turn(self.classes()), self.tiles.turned())

    def retile(self, tile_m: int, tile_n: int) -> VarlenBlockSparseTensors:
        """The same sparsity in tiles of (tile_m, tile_n), of any size; see ``BlockSparseTensors.retile``.

        In between, memory is proportional to the tiles of the sizes' greatest common divisors.
        """
        wanted = pair("tile", (tile_m, tile_n))
        if wanted == self.tile:
            return self
        common = math.gcd(self.tile[0], wanted[0]), math.gcd(self.tile[1], wanted[1])
        parts, target = self.tiles.with_tile(common), self.tiles.with_tile(wanted)
        classes = parts.cut(self.classes(), self.tiles)
        return self._made_of(joined(*target.least_and_most(classes, parts)), target)

    def validate(self) -> VarlenBlockSparseTensors:
        """Raises ``ValueError`` unless counts are in range, lists strictly increasing with a tail of 0, and partial and full disjoint.

        Names the first bad place. Reads all lists, O(entries). Returns itself.
        """
        varlen_checks.check_contents("mask", self.mask_block_cnt, self.mask_block_idx, self.tiles)
        if self.full_block_cnt is not None and self.full_block_idx is not None:
            varlen_checks.check_contents("full", self.full_block_cnt, self.full_block_idx, self.tiles)
            as_mask = replace(self, full_block_cnt=None, full_block_idx=None).classes() == PARTIAL
            varlen_checks.check_disjoint(as_mask & (self.classes() == FULL), self.tiles)
        return self

    def to(self, device: torch.device | str) -> VarlenBlockSparseTensors:
        """The same lists on another device."""
        moved: Any = {n: t.to(device) for n in (*LISTS, *_TABLES) if (t := getattr(self, n)) is not None}
        return replace(self, **moved)

    def __repr__(self) -> str:
        full = 0 if self.full_block_cnt is None else int(self.full_block_cnt.sum())
        mask, heads = int(self.mask_block_cnt.sum()), len(self.mask_block_cnt)
        return (
            f"VarlenBlockSparseTensors({self.tiles.batch} sequences, {self.tiles.total_m} row tiles, tiles of {self.tile[0]} x "
            f"{self.tile[1]}, heads: {heads}, {self.layout}: {mask} mask, {full} full, {heads * self.tiles.total_n - mask - full} skipped)"
        )


@opaque
@without_default_device
def _from_topk(
    cls: type[VarlenBlockSparseTensors], chosen: tuple, tile: Any, tables: tuple, mask_mod: Callable | None, layout: str
) -> VarlenBlockSparseTensors:
    """``VarlenBlockSparseTensors.from_topk``: its arguments are checked here. tables: as in ``varlen_lists_of_mask``."""
    refuse_torchscript()
    size = pair("tile", tile)
    varlen_checks.check_layout(layout)
    traced = None if mask_mod is None else trace(mask_mod, "mask")
    if traced is not None:
        refuse_hidden_captures(traced)
    with outside_transforms():  # transforms would wrap the lengths, which the host reads
        seqlens = ragged_lengths("q", tables[0], tables[2]), ragged_lengths("k", tables[1], tables[3])
        varlen_checks.check_batch(*seqlens)
        tiles = RaggedTiles(*seqlens, size)
        classes, is_whole = classes_of_choice(chosen[0], chosen[1], tiles, traced)
        return cls._of_classes(classes, tiles, is_whole, layout)


register(VarlenBlockSparseTensors, (*LISTS, *_TABLES), ("tile",))


@not_scriptable
def compute_varlen_block_sparsity(
    tile_m: int,
    tile_n: int,
    num_heads: int | None,
    mask_mod: Callable,
    *,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    aux_tensors: Sequence[Tensor] | None = None,
    device: torch.device | str | None = None,
    compute_full_blocks: bool = True,
    layout: str = "flat",
) -> VarlenBlockSparseTensors:
    """The partial and full tiles of a mask over a varlen batch, in time and memory proportional to rows and tiles, never to all pairs.

    tile_m, tile_n: query rows and keys of a tile. num_heads: None if the mask ignores heads: all heads then share one head's lists.
    mask_mod: a function of ``(b, h, q_idx, kv_idx)``, with a trailing ``aux_tensors`` if they are given; b is the sequence, q_idx and
    kv_idx count inside it, and the mask is never evaluated at an index outside it.
    cu_seqlens_q, cu_seqlens_k: int32 or int64 (B + 1,), the ends of the packed sequences, from 0; may be None if seqused is given.
    seqused_q, seqused_k: int32 or int64 (B,), the rows and keys in use of each sequence, if fewer than it has room for.
    device: by default that of the mask's captured tensors, else that of the lengths.
    compute_full_blocks: False lists full tiles as mask blocks and leaves ``full_block_*`` None. layout: "flat" or "padded".

    A tail tile is full if all its pairs *inside the sequence* are visible.

    Raises ``TypeError`` or ``ValueError`` for bad sizes and lengths, ``ModError`` for a mask that cannot be expressed, ``ValueError`` for a
    mask that would read a captured tensor out of range.

    >>> ends = torch.tensor([0, 100, 400])
    >>> lists = compute_varlen_block_sparsity(128, 128, None, lambda b, h, q, k: q >= k, cu_seqlens_q=ends, cu_seqlens_k=ends)
    >>> lists.mask_block_cnt.tolist(), lists.full_block_cnt.tolist()
    ([[1, 1, 1, 1]], [[0, 0, 1, 2]])
    """
    tables = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
    if torch.compiler.is_compiling():
        options = (num_heads, (tile_m, tile_n), device, compute_full_blocks, layout)
        tensors = captured.entry_points.varlen_tile_lists(mask_mod, aux_tensors, tables, *options)
        return unchecked(VarlenBlockSparseTensors, (*LISTS, *_TABLES, "tile"), (*tensors, (tile_m, tile_n)))
    return _computed((tile_m, tile_n), num_heads, mask_mod, aux_tensors, tables, device, compute_full_blocks, layout)


@opaque
@without_default_device
def _computed(
    tile: tuple[int, int],
    num_heads: int | None,
    mask_mod: Callable,
    aux_tensors: Sequence[Tensor] | None,
    tables: tuple[Tensor | None, ...],
    device: torch.device | str | None,
    separate_full: bool,
    layout: str,
) -> VarlenBlockSparseTensors:
    """``compute_varlen_block_sparsity`` outside compiled code: its arguments are checked here. tables: as in ``varlen_lists_of_mask``."""
    tile = (length("tile_m", tile[0], 1), length("tile_n", tile[1], 1))
    varlen_checks.check_layout(layout)
    for name, table in zip(("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k"), tables, strict=True):
        refuse_hidden(name, table)
    traced = trace(mask_mod, "mask", aux_tensors=aux_tensors)
    refuse_hidden_captures(traced)
    with outside_transforms():  # transforms would wrap the lengths, which the host reads
        return varlen_lists_of_mask(traced, tile, num_heads, tables, device, separate_full, layout)


def varlen_lists_of_mask(
    mask: TracedMod,
    tile: tuple[int, int],
    num_heads: int | None,
    tables: tuple[Tensor | None, ...],
    device: Any,
    separate_full: bool,
    layout: str,
) -> VarlenBlockSparseTensors:
    """``compute_varlen_block_sparsity`` of a traced mask. tables: cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k."""
    refuse_torchscript()
    seqlens = [ragged_lengths("q", tables[0], tables[2]), ragged_lengths("k", tables[1], tables[3])]
    varlen_checks.check_batch(*seqlens)
    if num_heads is None and any(d.h for d in dependence(mask.expr)):
        raise ValueError("num_heads is None, but mask_mod uses h; pass the number of query heads")
    heads = 1 if num_heads is None else length("num_heads", num_heads)
    where = device_of(seqlens[0].device if device is None and not mask.tensors else device, mask)
    seqlens_q, seqlens_k = (t.to(where) for t in seqlens)
    with torch.no_grad():  # a mask may compare learned parameters; tile classes have no gradient
        ((mask,), _) = check_call(Ragged(heads, seqlens_q, seqlens_k, torch.zeros_like(seqlens_q)), [mask])
        classes = classify_ragged(mask, seqlens_q, seqlens_k, *tile, heads)
    return VarlenBlockSparseTensors.from_classes(classes, tile, seqlens_q, seqlens_k, separate_full, layout).of_heads(heads)
