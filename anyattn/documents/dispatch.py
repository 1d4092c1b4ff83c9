"""Dispatch of calls with a document mask: launches over documents as sequences, and launches over block lists.

A number on the device says which of the two applies (``DocumentTables.holds``). Until it has arrived on the host both are launched, and
each kernel reads the number and does nothing where the other launch applies. Both write to the same tensors. A backend decides which calls
its kernels run so, and launches.
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
    """Which launches a call with a document mask makes: at least one.

    problem: the call. form: of its mask. tables: its documents. answer: ``DocumentTables.answer``, asked once. by_sequences: one over the
    documents as sequences. by_lists: one over the call's block lists.
    """

    problem: Problem
    form: DocumentForm
    tables: DocumentTables
    answer: bool | None
    by_sequences: bool
    by_lists: bool

    def over_sequences(self) -> Problem:
        """The call over its documents, with results in the same places."""
        return over_sequences(self.problem, self.form, self.tables.sequences)

    @property
    def guard(self) -> Tensor | None:
        """int32 (1,) on the device: the launch over lists does nothing where it is 1. None where that launch alone is made."""
        return self.tables.holds if self.by_sequences else None


def over_unknown_documents(problem: Problem) -> tuple[DocumentForm, Problem] | None:
    """The form by which a call can be run, and the call over documents that are not known yet; None where it is run as it is.

    A backend asks of the second whether its kernels run it; the answer is the same for all calls of one signature. Reads no tensor.
    Without block lists there is nothing to cache the tables with, and finding the documents for every call costs what it saves.
    """
    if problem.blocks is None or (form := form_of(problem)) is None:
        return None
    return form, over_sequences(problem, form, NO_DOCUMENTS)


def dispatched(problem: Problem, form: DocumentForm, *, needs_cache: bool, needs_both: bool = False) -> Dispatch | None:
    """The launches of a call; never waits for the device. form: ``over_unknown_documents`` of it, or of one of the same signature.

    needs_cache: give None, for the call as it is, where the tables can be neither cached nor made anew by a CUDA graph's replays.
    needs_both: make both launches whatever is known, as when kernels are compiled ahead of time.
    """
    if needs_cache and not tables_are_cached(problem, form):
        return None
    tables = tables_of(problem, form)
    answer = tables.answer()
    return Dispatch(problem, form, tables, answer, by_sequences=answer is not False or needs_both, by_lists=not answer or needs_both)
