"""Dispatch of calls with a document mask: launches over documents as sequences, and launches over block lists.

A number on the device decides which of the two is valid (``DocumentTables.holds``). Until the host knows it both are launched; each kernel
reads the number and returns at once if the other launch is the valid one. Both write to the same tensors. A backend decides which calls its
kernels can run in this way, and launches them.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anyattn.documents.rewrite import DocumentTables, form_of, over_sequences, tables_are_cached, tables_of
from anyattn.documents.sequences import NO_DOCUMENTS
from anyattn.mods.analysis.document_masks import DocumentForm
from anyattn.problem import Problem

__all__ = ["Dispatch", "dispatched", "over_unknown_documents"]


class Dispatch(NamedTuple):
    """The launches of a call with a document mask, at least one.

    problem: the call. form: of its mask. tables: its documents. answer: the result of ``DocumentTables.answer``. by_sequences: launch over
    the documents as sequences. by_lists: launch over the call's block lists.
    """

    problem: Problem
    form: DocumentForm
    tables: DocumentTables
    answer: bool | None
    by_sequences: bool
    by_lists: bool

    def over_sequences(self) -> Problem:
        """The varlen call over the documents, with the same result tensors."""
        return over_sequences(self.problem, self.form, self.tables.sequences)

    @property
    def guard(self) -> Tensor | None:
        """int32 (1,) on the device: the launch over lists returns at once if it is 1. None if only that launch is made."""
        return self.tables.holds if self.by_sequences else None


def over_unknown_documents(problem: Problem) -> tuple[DocumentForm, Problem] | None:
    """The form of a call's document mask, and the call over documents that are not known yet; None if documents cannot be run as sequences.

    A backend checks whether its kernels can run the second; the result is the same for all calls of one signature. Reads no tensor. Without
    block lists there is no object to cache the tables with, and finding the documents at every call costs what it saves.
    """
    if problem.blocks is None or (form := form_of(problem)) is None:
        return None
    return form, over_sequences(problem, form, NO_DOCUMENTS)


def dispatched(problem: Problem, form: DocumentForm, *, needs_cache: bool, needs_both: bool = False) -> Dispatch | None:
    """The launches of a call; does not synchronise. form: from ``over_unknown_documents`` of this call or of one with the same signature.

    needs_cache: return None, so that the call runs unchanged, if the tables can neither be cached nor be recomputed by a CUDA graph's
    replays. needs_both: make both launches even if the answer is known, as when kernels are compiled ahead of time.
    """
    if needs_cache and not tables_are_cached(problem, form):
        return None
    tables = tables_of(problem, form)
    answer = tables.answer()
    return Dispatch(problem, form, tables, answer, by_sequences=answer is not False or needs_both, by_lists=not answer or needs_both)
