"""Explanations as text: a mod's traced program and structure, and the plan of a call with its reasons."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from anyattn import hardware, planner
from anyattn.mods.analysis.additive_bias import additive_bias
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.dropout import seeded
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.trace import TracedMod
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.reductions.request import skip_of
from anyattn.tensors import autocast, kinds
from anyattn.tensors.strides import innermost
from anyattn.validate import flex

__all__ = ["Explanation", "ModExplanation", "explain", "triton_source"]


@dataclass(frozen=True)
class ModExplanation:
    """One mod as traced: the program with what each line depends on, its row ranges (masks), captures and key."""

    mod: TracedMod

    def __str__(self) -> str:
        mod = self.mod
        lines = [f"{mod.kind}_mod {mod.name}", f"  key       {mod.key}", "  program   (value, dtype, operation, what it depends on)"]
        lines += [f"    {line}" for line in _annotated(mod.expr)]
        lines += self._captures()
        lines += self._structure()
        return "\n".join(lines)

    def _captures(self) -> list[str]:
        if not self.mod.scalars and not self.mod.tensors:
            return ["  captures  nothing"]
        numbers = [f"scalar {i} = {s}" for i, s in enumerate(self.mod.scalars)]
        tensors = [
            f"tensor {i}: {str(t.dtype).removeprefix('torch.')} {tuple(t.shape)} on {t.device}"
            f"{', receives a gradient' if t.requires_grad else ''}"
            for i, t in enumerate(self.mod.tensors)
        ]
        return ["  captures  (run-time inputs: other values compile nothing)", *(f"    {line}" for line in (*numbers, *tensors))]

    def _structure(self) -> list[str]:
        if self.mod.kind == "score":
            bias = additive_bias(self.mod.expr)
            return [
                "  form      score + bias: the bias is added, never recomputed"
                if bias
                else "  form      general: evaluated on every visible score"
            ]
        ranges = row_ranges(self.mod)
        if ranges is None:
            return ["  ranges    none: the mask is evaluated inside partial tiles"]
        found = [f"  ranges    {ranges.count} per query row: lo <= kv_idx < hi, with (lo, hi) outputs of"]
        return [*found, *(f"    {line}" for line in _annotated(ranges.expr))]


def _annotated(expr: Expr) -> list[str]:
    deps = dependence(expr)
    *nodes, outputs = str(expr).splitlines()
    width = max((len(n) for n in nodes), default=0)
    return [*(f"{n:<{width}}   # {d}" for n, d in zip(nodes, deps, strict=True)), outputs]


@dataclass(frozen=True)
class Explanation:
    """How one call would be computed: the mods, the plan with a reason for each decision, and the backends that could run it.

    source: of the kernel that Triton would compile for the call, "" for other backends.
    """

    mods: tuple[ModExplanation, ...]
    plan: Plan
    backends: dict[str, str | None]
    source: str = ""
    dropout_p: float = 0.0

    def __str__(self) -> str:
        lines = [str(m) for m in self.mods]
        p = self.plan
        lines.append(f"plan      backend {p.backend}, {p.tiles}")
        lines += [f"    {why}" for why in p.why]
        if self.dropout_p:
            lines.append(f"    dropout {self.dropout_p}: by a hash of a seed, b, h, q_idx and kv_idx; no mask is stored")
        lines.append("backends")
        lines += [f"    {name}: {'available' if why is None else 'not here: ' + why}" for name, why in self.backends.items()]
        if self.source:
            lines += ["source    written for this call", *(f"    {line}".rstrip() for line in self.source.splitlines())]
        return "\n".join(lines)


def explain(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    mask_mod: Callable | None = None,
    aux_tensors: list[Tensor] | None = None,
    sink: Tensor | None = None,
    deterministic: bool | str = False,
    skip_below: float | Tensor | None = None,
    dropout_p: float = 0.0,
    kernel_options: dict[str, Any] | None = None,
    backend: str | None = None,
) -> Explanation:
    """How ``flex_attention`` would compute a call with these arguments; nothing is computed. ``print`` the result.

    Arguments and errors are those of ``flex_attention``.

    >>> import torch
    >>> q = torch.randn(1, 2, 64, 16)
    >>> explain(q, q, q, mask_mod=lambda b, h, q_idx, kv_idx: q_idx >= kv_idx).plan.backend
    'torch'
    """
    for name, t in (("query", query), ("key", key), ("value", value), ("sink", sink)):
        kinds.refuse_hidden(name, t)
    query, key, value = autocast.arguments(query, key, value)
    copied = [n for n, t in (("query", query), ("key", key), ("value", value)) if planner.misfits((t,), backend)]
    query, key, value = (innermost(t) if n in copied else t for n, t in (("query", query), ("key", key), ("value", value)))
    problem = flex.flex_problem(
        query, key, value, score_mod, block_mask, mask_mod, aux_tensors, scale, enable_gqa, sink, False, False, deterministic,
        seeded(dropout_p, query, is_run=False), skip=skip_of(skip_below, None, query),
    )  # fmt: skip
    machine = hardware.of(query.device.type)
    chosen = planner.choose(problem, machine, backend, flex.kernel_options(kernel_options))
    if copied:
        why = f"{' and '.join(copied)} copied at every call: the kernels read rows, and the last dimension is not innermost"
        chosen = replace(chosen, why=(*chosen.why, why))
    traced = [problem.score, *problem.predicates]
    source = triton_source(problem) if chosen.backend == "triton" else ""
    return Explanation(tuple(ModExplanation(m) for m in traced if m is not None), chosen, planner.available(machine), source, dropout_p)


def triton_source(problem: Problem) -> str:
    """Triton source of a problem's forward kernel; needs Triton, but no GPU."""
    found: str = importlib.import_module("anyattn.backends.triton.api").source_of(problem)
    return found
