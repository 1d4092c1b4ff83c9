"""Dispatch of calls with a document mask: launches over documents as sequences, and launches over block lists.

A number on the device says which of the two applies. Until it has arrived on the host both are launched, and each kernel reads the number
and does nothing where the other launch applies. Both write to the same tensors.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anyattn.backends.triton.codegen.programs import masks_of
from anyattn.documents.rewrite import DocumentTables, documents_of, form_of, keeps_tables, over_sequences
from anyattn.documents.sequences import NO_DOCUMENTS
from anyattn.mods.analysis.document_masks import DocumentForm
from anyattn.plan import Plan
from anyattn.problem import Problem

__all__ = ["Form", "form_of_documents", "forms_of"]


class Form(NamedTuple):
    """problem: as these launches see it. guard: ``tables.Tables.guard``. documents: whose sequences the problem is over, None where it is
    the call itself."""

    problem: Problem
    guard: Tensor | None = None
    documents: DocumentTables | None = None


def form_of_documents(problem: Problem, num_splits: int) -> DocumentForm | None:
    """The document form by which a call is run, None where it is not run so: without block lists, and where a document's own mask has more
    ranges than a kernel keeps. The same for all calls of one signature."""
    if problem.blocks is None or num_splits > 1 or (form := form_of(problem)) is None:
        return None
    return None if masks_of(over_sequences(problem, form, NO_DOCUMENTS)).has_lists else form


def forms_of(problem: Problem, plan: Plan) -> tuple[Form, ...]:
    """The forms in which a call is launched.

    A call whose document tables cannot be cached uses its lists alone, unless a CUDA graph captures it.
    """
    if problem.blocks is None:
        return (Form(problem),)
    if "document form" not in plan.prepared:
        plan.prepared["document form"] = form_of_documents(problem, plan.num_splits)
    of_documents = plan.prepared["document form"]
    if of_documents is None or not keeps_tables(problem, of_documents):
        return (Form(problem),)
    documents = documents_of(problem, of_documents)
    assert documents is not None
    answer = documents.tables.answer()
    by_sequences = Form(documents.problem, None, documents.tables)
    if answer is None:
        return by_sequences, Form(problem, documents.holds)
    return (by_sequences,) if answer else (Form(problem),)
