"""A call whose mask separates documents, as launches: those of its documents as sequences, and those of its block lists.

Which of the two does the work is a number on the device, and nobody waits for it: until it has arrived on the host both are launched, and
the one that has nothing to do sees so. Both write to the same tensors, of which together they write all.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anyattn.backends.triton.codegen.programs import program_of
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
    """How a call is run by its documents, None where it is not: where no block lists follow from the mask, and where a document's own mask
    is more ranges than a kernel keeps. Holds for all calls of the same facts."""
    if problem.blocks is None or num_splits > 1 or (form := form_of(problem)) is None:
        return None
    return form if program_of(over_sequences(problem, form, NO_DOCUMENTS)).lists is None else None


def forms_of(problem: Problem, plan: Plan) -> tuple[Form, ...]:
    """The forms in which a call is launched.

    A call that would have to find its documents for itself has its lists alone, unless it is a graph's.
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
