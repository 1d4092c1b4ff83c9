"""A rank's rows as one local call whose sequences are pieces of documents, where the mask is one of documents or of distances.

One GPU runs documents as sequences (``documents``); a rank that ran its segments by lists took 1.1 times as long, and each segment is a
launch, whose results are copied into one. Here the pieces of documents that a rank owns are the sequences of one call: their keys, each
document's own ones, lie one behind the other. Under a mask of distances, such as a window, the whole sequence is one document.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch

from anyattn.distributed.layout import Interval, Layout, length_of
from anyattn.distributed.placed_mods import reads
from anyattn.distributed.placement.prefetched import is_asynchronous, keep_ids, on_host
from anyattn.distributed.row_moves import Uploaded
from anyattn.mods.analysis.document_masks import document_form, ignores_origin, rest_of
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.trace import TracedMod, compact, trace
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import LengthTables, StoredSequences, StoredSizes
from anyattn.sparsity.block_mask import BlockMask

__all__ = ["DocumentRows", "documents_of", "prefetch_ids", "runs_documents"]

_MOST_KEYS = 1.1  # of the keys that several pieces of one document see together, since those of each piece are copied
_MEAN, _FEWEST = 128, 8  # rows of a document on average, at least, and documents of any length: ``documents.sequences.places_of``


class _Pieces(NamedTuple):
    """rows, keys: global intervals of each sequence. is_local: all keys that a row sees are the rank's own."""

    rows: tuple[Interval, ...]
    keys: tuple[Interval, ...]
    is_local: bool


class DocumentRows:
    """The rows of a rank as sequences. rest: the mask inside a document, None if it hides nothing.

    The attributes of ``layout.Segment`` that moves read are here: first, length, spans, is_local.
    """

    first = 0

    def __init__(self, pieces: _Pieces, rest: TracedMod | None, device: torch.device):
        self.spans, self.is_local = pieces.keys, pieces.is_local
        self.length = length_of(pieces.rows)
        lengths = [[stop - start for start, stop in intervals] for intervals in (pieces.rows, pieces.keys)]
        first = [rows[0] - keys[0] for rows, keys in zip(pieces.rows, pieces.keys, strict=True)]
        ends = [[0, *np.cumsum(n).tolist()] for n in lengths]
        self._uploaded = Uploaded(torch.tensor([*ends, [*first, 0]], dtype=torch.int32, device="cpu"), device)
        tables = self._uploaded.there()
        sizes = StoredSizes(len(first), self.length, ends[1][-1], max(lengths[0]), max(lengths[1]))
        stored = StoredSequences(LengthTables(tables[0], tables[1], None, None), sizes, device=device)
        self.sequences: Sequences = stored if device.type == "cuda" else stored.read()
        self._firsts = tables[2] if any(first) else None
        self.rest = None if rest is None else self.inside(rest)

    @property
    def key_length(self) -> int:
        return length_of(self.spans)

    def wait(self) -> None:
        """Before a call: makes its stream wait for the tables of the sequences, if another one has copied them."""
        self._uploaded.there()

    def inside(self, mod: TracedMod) -> TracedMod:
        """A mod that depends on distances alone, for positions that count from a piece's first row and key."""
        if self._firsts is None:
            return mod
        expr, scalars, slots = _shifted(mod.expr, len(mod.tensors))
        tensors = (*mod.tensors, self._firsts)
        return TracedMod(mod.kind, expr, tuple([mod.scalars[s] for s in scalars]), tuple([tensors[s] for s in slots]), mod.name, None)

    def slots(self, mod: TracedMod, tensors: int) -> list[int]:
        """Which of the ``tensors`` that a mod captures each tensor of ``inside(mod)`` is; a number beyond them for the table of rows."""
        return _shifted(mod.expr, tensors)[2] if self._firsts is not None else list(range(tensors))


@lru_cache(maxsize=256)
def _shifted(expr: Expr, tensors: int) -> tuple[Expr, list[int], list[int]]:
    """A program whose q_idx is behind its own by the entry of the last table at b. Also which of the mod's numbers and tensors, followed by
    that table, are its own, in order."""
    builder = Builder()
    by = builder.cast(builder.add("load", builder.add("index", dtype=torch.int64, attr="b"), dtype=torch.int32, attr=tensors), torch.int64)
    row = builder.add("add", builder.add("index", dtype=torch.int64, attr="q_idx"), by)
    replaced = {at: row for at, node in enumerate(expr.nodes) if node.op == "index" and node.attr == "q_idx"}
    copied = builder.build(builder.copy(expr, replace=replaced))
    return compact(copied, range(tensors + 1))  # type: ignore[arg-type, return-value]


def runs_documents(score: TracedMod | None, heads: int, first_head: int) -> bool:
    """Whether a score mod may run over pieces of documents: it depends on distances alone, and reads tensors by the head alone, which is
    that of the call. heads: of the call; first_head: the global one of its first."""
    if score is None:
        return True
    if first_head and reads(score.expr, "h"):
        return False
    for node in score.expr.nodes:
        if node.op in ("tensor", "native"):
            return False
        if node.op == "load":
            indices = [score.expr.nodes[a] for a in node.args]
            if [(n.op, n.attr) for n in indices] != [("index", "h")] or score.tensors[node.attr].shape[0] < heads:  # type: ignore[call-overload]
                return False
    return ignores_origin(score.expr)


def documents_of(traced: TracedMod, layout: Layout, visits: np.ndarray, rank: int, device: torch.device) -> DocumentRows | None:
    """The rows of a rank as sequences; None if the mask is of another kind, if an id has several runs, if there are many documents, or if
    segments are as good: for one piece of a sequence without documents, and for pieces that see the same keys.

    traced: the mask. visits: bool (chunks, chunks), which chunks of keys a chunk of rows sees. device: of the ids, which are read.
    """
    form = document_form(traced.expr)
    rest = traced if form is None else rest_of(traced, form)
    if rest is not None and (rest.tensors or not ignores_origin(rest.expr) or ranges_unread(rest) is None):
        return None
    if form is None:
        pieces = _pieces(np.zeros(layout.length, np.int8), layout, visits, rank)
        if pieces is None or len(pieces.rows) < 2 or length_of(pieces.keys) > _MOST_KEYS * _covered(pieces.keys):
            return None
        return DocumentRows(pieces, rest, device)
    ids = traced.tensors[form.ids]
    if ids.ndim > 2 or (ids.ndim == 2 and ids.shape[0] != 1) or ids.shape[-1] < layout.length:
        return None
    found = _pieces(on_host(ids).reshape(-1)[: layout.length].numpy(), layout, visits, rank)
    return None if found is None else DocumentRows(found, rest, device)


def prefetch_ids(mask: BlockMask) -> None:
    """Starts to copy the ids that ``documents_of`` will read, if they are on a GPU."""
    if not is_asynchronous(mask.kv_indices) or not mask.is_exact:
        return
    traced = trace(mask.mask_mod, "mask", device=mask.kv_indices.device)
    form = document_form(traced.expr)
    if form is not None:
        keep_ids(traced.tensors[form.ids])


def _covered(intervals: Sequence[Interval]) -> int:
    """The number of positions in any of the intervals."""
    found, end = 0, 0
    for start, stop in sorted(intervals):
        found += max(stop - max(start, end), 0)
        end = max(end, stop)
    return found


def _pieces(ids: np.ndarray, layout: Layout, visits: np.ndarray, rank: int) -> _Pieces | None:
    begins = np.concatenate(([0], np.flatnonzero(ids[1:] != ids[:-1]) + 1))
    if len(np.unique(ids[begins])) < len(begins):
        return None
    edges = [*begins.tolist(), layout.length]
    mine = np.flatnonzero(layout.owner == rank)
    visits, place = visits[mine], {chunk: at for at, chunk in enumerate(mine.tolist())}
    # the hull of the keys that each chunk of rows sees; of none, an empty one that changes no other
    sees, last = visits.any(1), visits.shape[1]
    low = (np.where(sees, visits.argmax(1), last) * layout.chunk).tolist()
    high = (np.where(sees, last - visits[:, ::-1].argmax(1), 0) * layout.chunk).tolist()
    others = np.pad(np.cumsum(visits & (layout.owner != rank), 1), ((0, 0), (1, 0)))  # seen chunks of other ranks, before each chunk
    own = layout.rows_of(rank)
    rows, keys, is_local = [], [], True
    for start, stop in own:
        at = int(np.searchsorted(begins, start, side="right")) - 1
        while at < len(begins) and edges[at] < stop:
            row = (max(start, edges[at]), min(stop, edges[at + 1]))
            seen = slice(place[row[0] // layout.chunk], place[(row[1] - 1) // layout.chunk] + 1)
            key = (max(edges[at], min(low[seen])), min(edges[at + 1], max(high[seen])))
            if key[0] >= key[1]:
                return None
            rows.append(row)
            keys.append(key)
            first, end = key[0] // layout.chunk, (key[1] - 1) // layout.chunk + 1
            is_local = is_local and not (others[seen, end] - others[seen, first]).any()
            at += 1
    if not rows or len(rows) > max(_FEWEST, length_of(own) // _MEAN):
        return None
    return _Pieces(tuple(rows), tuple(keys), is_local)
