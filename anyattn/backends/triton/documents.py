"""Forms in which Triton launches a call: unchanged, over its documents as sequences, or both (``documents.dispatch``)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from anyattn.backends.triton.codegen.programs import masks_of
from anyattn.documents.dispatch import dispatched, over_unknown_documents
from anyattn.documents.rewrite import DocumentTables
from anyattn.mods.analysis.document_masks import DocumentForm
from anyattn.problem import Problem

__all__ = ["Form", "form_of_documents", "forms_of"]


class Form(NamedTuple):
    """problem: of this form's launches. guard: ``tables.Tables.guard``. documents: those whose sequences the problem is over; None for the
    call itself."""

    problem: Problem
    guard: Tensor | None = None
    documents: DocumentTables | None = None


def form_of_documents(problem: Problem, divides_keys: bool) -> DocumentForm | None:
    """The document form with which a call is run; None if it is not: if tiles are skipped, if several programs visit a row tile's keys,
    if a document's own mask has more ranges than a kernel keeps, and if keys must keep their places in tiles. The result is the same for
    all calls of one signature."""
    if (
        divides_keys
        or problem.skip is not None
        or problem.is_batch_invariant
        or (form_and_problem := over_unknown_documents(problem)) is None
    ):
        return None
    form, over_documents = form_and_problem
    return None if masks_of(over_documents).has_lists else form


def forms_of(problem: Problem, form: DocumentForm | None) -> tuple[Form, ...]:
    """The forms in which a call is launched; all write to the same tensors. form: ``form_of_documents``."""
    dispatch = None if form is None else dispatched(problem, form, needs_cache=True)
    if dispatch is None:
        return (Form(problem),)
    by_sequences = (Form(dispatch.over_sequences(), None, dispatch.tables),) if dispatch.by_sequences else ()
    return (*by_sequences, Form(problem, dispatch.guard)) if dispatch.by_lists else by_sequences
