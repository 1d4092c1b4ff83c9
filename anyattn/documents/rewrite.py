"""Rewriting of calls with a document mask: each document becomes a sequence of a varlen call with the same results.

With block lists a document mask is evaluated in every tile that a document's edge crosses, because row tiles are not aligned with
documents; with sequences, tiles begin where documents begin. The device finds out whether
every document is one run: ``documents.dispatch``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.documents.sequences import DocumentSequences, document_sequences, documents_in_order, places_of
from anyattn.mods.analysis.document_masks import DocumentForm, document_form, ignores_origin, rest_of
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.compose import anded
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sparsity.compute import runs_kernels
from anyattn.sparsity.derived import derived

__all__ = ["DocumentTables", "form_of", "over_sequences", "tables_are_cached", "tables_of"]


class DocumentTables:
    """The documents given by some ids.

    sequences: the documents; all empty if ``holds`` is 0. holds: int32 (1,) on the device, 1 if every document is one run of positions and
    the tables have room for it, so that the sequences are equivalent to the mask; else 0. prepared: a cache of the backends that lives as
    long as the tables. count: the number of documents, 0 if ``holds`` is 0; None while ``answer`` is None.
    """

    def __init__(self, ids: Tensor, rows: int, length: int, *, is_kept: bool):
        ids = ids[:rows, :length] if ids.ndim == 2 else ids[:length]
        self._has_kernels = runs_kernels(ids.device)
        if self._has_kernels:
            from anyattn.documents.device import documents_found

            self.sequences, self.holds = documents_found(ids, rows, places_of(length))
        else:
            self.sequences, self.holds = document_sequences(ids, rows, places_of(length))
        self.prepared: dict[Any, Any] = {}
        self.count: int | None = None
        self._told: Tensor | None = None
        lengths = self.sequences.seqlens_q
        if ids.device.type == "cpu":
            self.count = int((lengths > 0).sum())
        elif is_kept:
            self._told = torch.full(lengths.shape, _UNTOLD, dtype=lengths.dtype, pin_memory=ids.device.type == "cuda", device="cpu")
            self._told.copy_(lengths, non_blocking=True)

    def answer(self) -> bool | None:
        """Whether ``holds`` is 1; None while the host does not know it yet. Does not synchronise."""
        told = self._told  # pinned host memory that the device copies to; another thread may release it
        if self.count is None and told is not None:
            lengths = told.tolist()
            if _UNTOLD not in lengths:
                self.count, self._told = sum(n > 0 for n in lengths), None
        return None if self.count is None else self.count > 0

    def in_order(self, tile_m: int, ends_with_row: bool) -> tuple[Tensor, Tensor]:
        """``documents.sequences.documents_in_order``, cached."""
        key = ("in order", tile_m, ends_with_row)
        known: tuple[Tensor, Tensor] | None = self.prepared.get(key)
        if known is None:
            if self._has_kernels:
                from anyattn.documents.device import documents_ordered

                known = documents_ordered(self.sequences, tile_m, ends_with_row)
            else:
                known = documents_in_order(self.sequences, tile_m, ends_with_row)
            self.prepared[key] = known
        return known


_UNTOLD = -1


def form_of(problem: Problem) -> DocumentForm | None:
    """The document mask that a problem's predicates form together; None if the call cannot be rewritten. Reads no tensor.

    The result is the same for all calls with equal programs, sizes and numbers of the masks.
    """
    q, k = problem.q, problem.k
    if problem.dropout is not None:  # its pairs are those of the whole rows
        return None
    if problem.sequences is not None or not problem.predicates or (problem.blocks is not None and not problem.blocks_follow):
        return None
    if q.shape[2] != k.shape[2] or not problem.may_have_pairs:
        return None
    if problem.score is not None and not ignores_origin(problem.score.expr):
        return None
    mask = _joint(problem)
    form = document_form(mask.expr)
    if form is None or (form.rest is not None and ranges_unread(rest_of(mask, form)) is None):  # type: ignore[arg-type]
        return None
    return form


def over_sequences(problem: Problem, form: DocumentForm, sequences: DocumentSequences) -> Problem:
    """The problem over ``sequences``, with the part of the mask that applies inside a document. form: ``form_of(problem)``.

    >>> import anyattn
    >>> from anyattn.validate.flex import traced
    >>> q, mask = torch.randn(1, 1, 6, 8), anyattn.masks.document(torch.tensor([3, 3, 3, 5, 5, 4]))
    >>> problem = Problem(q, q, q, 1.0, predicates=(traced(mask, "mask", q, None),))
    >>> tables = tables_of(problem, form_of(problem))
    >>> found = over_sequences(problem, form_of(problem), tables.sequences)
    >>> found.sequences.seqlens_q[:4].tolist(), found.predicates, tables.answer()
    ([3, 2, 1, 0], (), True)
    """
    rest = rest_of(_joint(problem), form)
    changes = {"sequences": sequences, "predicates": () if rest is None else (rest,), "blocks": None, "blocks_follow": False}
    fields = vars(problem) | changes
    for name in ("row_ranges", "row_limits"):  # cached for the dense call
        fields.pop(name, None)
    return Problem.of_fields(fields)


def _joint(problem: Problem) -> TracedMod:
    found = problem.predicates[0] if len(problem.predicates) == 1 else anded(problem.predicates)
    assert found is not None
    return found


def tables_are_cached(problem: Problem, form: DocumentForm) -> bool:
    """Whether ``tables_of`` caches the tables of such calls, or a CUDA graph is being captured, whose replays recompute them on the device.
    Otherwise each call computes its own."""
    ids = _joint(problem).tensors[form.ids]
    return problem.blocks is not None and (_are_followed(ids) or _is_capturing(ids))


def tables_of(problem: Problem, form: DocumentForm) -> DocumentTables:
    """The documents of a call. form: ``form_of(problem)``.

    The tables are cached with the call's block lists, for the same ids tensor and version counter, and for the stream that computes them,
    since no other stream waits for it. The ids alone are not a key: torch does not count every write (graph replays, kernels of other
    libraries), and a new block mask after such a write must get new tables. Without lists, and while a CUDA graph is captured, they are
    computed anew.
    """
    ids = _joint(problem).tensors[form.ids]
    rows, _, length, _ = problem.q.shape
    if problem.blocks is None or not _are_followed(ids):
        return DocumentTables(ids, rows, length, is_kept=False)
    of_lists = derived(problem.blocks)
    key = ("documents", rows, length, torch._C._cuda_getCurrentRawStream(ids.device.index) if ids.is_cuda else 0)
    known = of_lists.get(key)
    if known is None or known[0] is not ids or known[1] != ids._version:
        known = of_lists[key] = ids, ids._version, DocumentTables(ids, rows, length, is_kept=True)
    return known[2]


def _are_followed(ids: Tensor) -> bool:
    """Whether ids' version counter records writes: it does not for inference tensors, nor for writes by a graph's replay."""
    return not (ids.is_inference() or _is_capturing(ids))


def _is_capturing(ids: Tensor) -> bool:
    return ids.device.type == "cuda" and torch._C._cuda_isCurrentStreamCapturing()
