"""Calls of one Triton plan: their forms, and the launches that they repeat."""

from __future__ import annotations

from torch import Tensor

from anyattn import plan
from anyattn.backends.result import Result
from anyattn.backends.triton import backward_pass, reductions
from anyattn.backends.triton.api import FormPlan, forward, plan_of_documents
from anyattn.backends.triton.backward_pass import Passes
from anyattn.backends.triton.codegen.programs import masks_of
from anyattn.backends.triton.documents import Form, form_of_documents, forms_of
from anyattn.backends.triton.launch_cache import LaunchCache
from anyattn.backends.triton.plan import TritonPlan
from anyattn.problem import Problem

__all__ = ["Repeater"]


class Repeater(plan.Repeater):
    """Computes the calls of one plan. An autotuned launch is looked up at every call."""

    reports_launches = reports_numbers = True

    def __init__(self, problem: Problem, plan: TritonPlan) -> None:
        self.plan = plan
        self._document_form = None if problem.blocks is None else form_of_documents(problem, plan.divides_keys)
        self._launches = LaunchCache()
        self._over_documents: dict[int, tuple[TritonPlan, LaunchCache]] = {}  # by number of batch entries
        self._reductions: Passes | None = None
        self._passes: dict[tuple[bool, ...], Passes] = {}  # of the backward pass

    def reads_lists(self, problem: Problem) -> bool:
        return self._document_form is not None or masks_of(problem).uses_blocks

    def forward(self, problem: Problem) -> Result:
        return forward(problem, [self._planned(form) for form in forms_of(problem, self._document_form)])

    def _planned(self, form: Form) -> FormPlan:
        plan, launches = self.plan, self._launches
        if form.documents is not None:
            batch = form.problem.batch
            if batch not in self._over_documents:
                self._over_documents[batch] = plan_of_documents(form.problem, plan), LaunchCache()
            plan, launches = self._over_documents[batch]
        return FormPlan(form, plan, LaunchCache() if plan.is_tuned else launches)

    def backward(self, problem: Problem, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        if problem.sequences is not None and problem.sequences.page_table is not None:
            return backward_pass.over_pages(problem, lambda together: self.backward(together, out, lse, dout, dlse))
        results = out, lse, dout, dlse
        forms = forms_of(problem, self._document_form)
        return backward_pass.backward(problem, [(form, self._passes_of(form, *results)) for form in forms], *results)

    def key_sums(self, problem: Problem, lse: Tensor, first: int) -> Tensor:
        problem = problem.in_any_batch
        return reductions.key_sums(problem, self._reductions_of(problem), lse, first)

    def block_reductions(
        self, problem: Problem, lse: Tensor, block: tuple[int, int], wants_sums: bool, wants_max: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        problem = problem.in_any_batch
        return reductions.block_reductions(problem, self._reductions_of(problem), lse, block, wants_sums, wants_max)

    def _reductions_of(self, problem: Problem) -> Passes:
        if self._reductions is None:
            self._reductions = reductions.passes_of(problem, self.plan)
        return self._reductions

    def _passes_of(self, form: Form, *results: Tensor | None) -> Passes:
        if self.plan.is_tuned:
            return backward_pass.passes_of(form.problem, self.plan, *results)
        # saved values may be restored elsewhere than in the keys
        key = form.documents is not None, form.problem.wide_kv_grads, form.problem.has_one_kv
        passes = self._passes.get(key)
        if passes is None:
            passes = self._passes[key] = backward_pass.passes_of(form.problem, self.plan, *results)
        return passes
