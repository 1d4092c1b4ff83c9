"""A rank's share of one mask: its local attention calls, their block masks and the places of mods in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import noop_mask

from anyattn.distributed.by_documents import DocumentRows, documents_of
from anyattn.distributed.layout import Interval, Layout, Segment, Source, hull_of, length_of, segments_of
from anyattn.distributed.placed_mods import Place, placed, reads
from anyattn.distributed.relay import arrivals_of, route_of
from anyattn.distributed.rows.local_captures import check_mask
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.mods.tracing.weak_captures import negative_zeros
from anyattn.sparsity.block_mask import LISTS, BlockMask, block_mask_of_lists, marked
from anyattn.sparsity.lists import both_ways, grid_of_lists
from anyattn.sparsity.made_of import captures

__all__ = ["LocalCalls", "MaskShare", "Share", "is_interval"]


_MOST_KEPT = 256  # moves and plans of a share
RUN_DOCUMENTS = ["cuda"]  # devices on which one process runs documents as sequences too


class LocalCalls(NamedTuple):
    """The local attention calls of a rank. name: of the way in which rows are put together. places: of the segments' mods; none of
    documents. hulls: for each, the interval of own rows that are its keys, or the sources of its keys. order: in which they run, those
    without remote keys first."""

    name: str
    segments: tuple[Segment | DocumentRows, ...]
    places: tuple[Place, ...]
    hulls: tuple[Interval | tuple[Source, ...], ...]
    order: tuple[int, ...]


class MaskShare:
    """What a rank computes under one mask of a plan, whatever travels.

    mask: the global block mask. layout: who owns which rows. first_head: the global query head of local head 0.

    rows: the rank's own; length: their number. padded: with those of a padded shard.
    """

    def __init__(self, mask: BlockMask, layout: Layout, rank: int, first_head: int):
        self.mask, self.layout, self.rank, self.first_head = mask, layout, rank, first_head
        self.rows = layout.rows_of(rank)
        self.length, self.padded = length_of(self.rows), layout.padded_rows
        self.kept: dict[tuple, Any] = {}  # moves and plans of calls, by properties of their tensors
        self._versions = _versions(mask)
        # by the calls' name: what the mask captured, those tensors (their ids are not used again while they are kept), and the masks
        self._parts: dict[str, tuple[tuple, tuple[Tensor, ...], tuple[BlockMask, ...]]] = {}

    def keep(self, key: tuple, value: Any) -> Any:
        """``value``, which ``kept`` has now; without the others if they are many, since a score mod's numbers may differ at every call."""
        if len(self.kept) >= _MOST_KEPT:
            self.kept.clear()
        self.kept[key] = value
        return value

    @property
    def device(self) -> torch.device:
        return self.mask.kv_indices.device

    @property
    def is_unwritten(self) -> bool:
        """Whether torch has counted no write to the global mask's lists since the plan was made of them."""
        return _versions(self.mask) == self._versions

    def block_masks(self, calls: LocalCalls) -> tuple[BlockMask, ...]:
        """The block mask of each local call: its part of the global lists, and the mask by global positions and heads, with its captures
        as they are now. None for documents, which need none."""
        if calls.name == "documents":
            return ()
        structure, numbers, tensors = captures(self.mask.mask_mod)
        now = (structure, tuple(numbers), tuple(map(type, numbers)), negative_zeros(tuple(numbers)), tuple(map(id, tensors)))
        known = self._parts.get(calls.name)
        if known is None or known[0] != now:
            traced = trace(self.mask.mask_mod, "mask", device=self.device)
            check_mask(traced)
            known = self._parts[calls.name] = now, tuple(tensors), self._cut_lists(calls, traced)
        return known[2]

    def _cut_lists(self, calls: LocalCalls, traced: TracedMod) -> tuple[BlockMask, ...]:
        """The block masks of the calls. traced: the global mask."""
        raise NotImplementedError


class Share(MaskShare):
    """What a rank computes where keys travel.

    layout: who needs which keys, too. visits: bool (chunks, chunks), which chunks of keys a chunk of rows sees. overlaps: of
    ``segments_of``.

    most_received: keys, by the rank that receives most, with those that it passes on. by_lists: its local calls. by_pieces: those of which
    each has one interval of rows, for scores that read q_idx: an offset that depends on the row costs them a third of the time (ALiBi, S
    64k, an H200: 17.0 and 12.9 ms).
    """

    def __init__(self, mask: BlockMask, layout: Layout, visits: np.ndarray, rank: int, first_head: int, overlaps: bool):
        super().__init__(mask, layout, rank, first_head)
        self.route = route_of(layout, rank)
        inside, across, _ = arrivals_of(layout)
        self.most_received = int((inside + across).max())
        self.by_lists = self.by_pieces = self._calls("lists", segments_of(layout, visits, rank, overlaps))
        if any(len(s.rows) > 1 for s in self.segments):
            self.by_pieces = self._calls("pieces", segments_of(layout, visits, rank, overlaps, joins=False))
        self._by_documents = self._calls_by_documents(visits)

    @property
    def messages(self) -> int:
        """Of a forward pass; the same on every rank."""
        return len(self.route.sent)

    def messages_back(self, is_kept: bool) -> int:
        """Of a backward pass. is_kept: the forward pass has kept what it received."""
        return self.messages * (1 + int(not is_kept))

    def for_heads(self, queries: int, keys: int) -> Share:
        """The share of calls with these heads."""
        return self

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.by_lists.segments  # type: ignore[return-value]

    @property
    def by_documents(self) -> LocalCalls | None:
        """One call whose sequences are pieces of documents, if the mask is one of documents or distances, and has not changed since."""
        return self._by_documents if self._by_documents is not None and self.mask.is_exact else None

    def _calls(self, name: str, segments: Sequence[Segment | DocumentRows]) -> LocalCalls:
        hulls = tuple([hull_of(self.rows, self.route.keys, s.spans) for s in segments])
        places = tuple([Place(s.rows, s.keys, self.first_head, self.device, s.first) for s in segments if isinstance(s, Segment)])
        return LocalCalls(name, tuple(segments), places, hulls, tuple(sorted(range(len(segments)), key=lambda i: not segments[i].is_local)))

    def _calls_by_documents(self, visits: np.ndarray) -> LocalCalls | None:
        if self.device.type not in RUN_DOCUMENTS or not self.length or not self.mask.is_exact:
            return None
        traced = trace(self.mask.mask_mod, "mask", device=self.device)
        if self.first_head and reads(traced.expr, "h"):
            return None
        found = documents_of(traced, self.layout, visits, self.rank, self.device)
        return None if found is None else self._calls("documents", [found])

    def _cut_lists(self, calls: LocalCalls, traced: TracedMod) -> tuple[BlockMask, ...]:
        lists: Any = self.mask._lists_4d().values()
        classes = grid_of_lists(*lists)
        return tuple([self._part(classes, traced, *of) for of in zip(calls.segments, calls.places, strict=True)])  # type: ignore[arg-type]

    def _part(self, classes: Tensor, traced: TracedMod, segment: Segment, place: Place) -> BlockMask:
        tile_m, tile_n = self.mask.BLOCK_SIZE
        low, high = _blocks(segment.keys, tile_n)
        cut = torch.cat([classes[..., slice(*_blocks(rows, tile_m)), low:high] for rows in segment.rows], -2)
        lengths = (segment.length, segment.key_length)
        separate = self.mask.full_kv_num_blocks is not None
        mod: Any = noop_mask if self.mask.mask_mod is noop_mask else placed(traced, place)
        # full tails stay full: the global lists decide
        part = block_mask_of_lists(both_ways(cut, separate, False), mod, lengths, (tile_m, tile_n))
        part._told_apart = getattr(self.mask, "_told_apart", ())
        return marked(part, self.mask.is_exact)


def is_interval(hull: Interval | tuple[Source, ...]) -> bool:
    """Whether a segment's keys are a view of the rank's own."""
    return len(hull) == 2 and isinstance(hull[0], int)


def _blocks(interval: Interval, tile: int) -> Interval:
    """The blocks of an interval of positions that starts at a block's start."""
    return interval[0] // tile, -(-interval[1] // tile)


def _versions(mask: BlockMask) -> tuple[int, ...]:
    lists = [getattr(mask, name) for name in LISTS[:4]]
    return tuple([-1 if t.is_inference() else t._version for t in lists if t is not None])
