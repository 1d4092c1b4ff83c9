"""Planner: pure functions from ``Problem`` and ``Hardware`` to a ``Plan``. It chooses the backend, which then makes its own plan."""

from __future__ import annotations

import importlib
import importlib.util
import warnings
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn import hardware as machines
from anyattn.errors import BackendError
from anyattn.hardware import Hardware
from anyattn.mods.tracing.cute_mod import has_native
from anyattn.plan import BACKENDS, Backward, Plan
from anyattn.problem import Problem
from anyattn.tensors.tested_versions import warn_of_newer_torch

__all__ = ["appender", "available", "check_backend", "choose", "combiner", "for_backward", "misfits", "planned"]

_WIDEST, _WIDEST_V = 576, 512  # head dimensions of q and k, and of v, of the GPU backends' kernels
_warned: set[str] = set()  # kinds of calls without kernels that have been warned about


def available(hardware: Hardware) -> dict[str, str | None]:
    """For each backend None if it can run on this hardware, else the reason against it."""
    return {"torch": None, "triton": _reason_against_triton(hardware), "hopper": _reason_against_hopper(hardware)}


@lru_cache(maxsize=16)
def _reason_against_triton(hardware: Hardware) -> str | None:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed: pip install 'anyattn[triton]'"
    if hardware.device != "cuda":
        from anyattn.triton_tools.interpreter import is_interpreting

        if hardware.device == "cpu" and is_interpreting():
            return None
        return f"it needs a GPU, and the tensors are on {hardware.device} (for tests TRITON_INTERPRET=1 runs its kernels on a CPU)"
    if hardware.capability is not None and hardware.capability < (8, 0):
        return f"it needs compute capability 8.0 or newer, and {hardware.name} has {'.'.join(map(str, hardware.capability))}"
    return None


@lru_cache(maxsize=16)  # find_spec costs 10 us
def _reason_against_hopper(hardware: Hardware) -> str | None:
    if hardware.device != "cuda" or hardware.capability is None:
        return f"it needs an NVIDIA GPU, and the tensors are on {hardware.device}"
    if torch.version.hip is not None:  # some AMD GPUs report 9.0 too
        return f"it needs an NVIDIA GPU, and {hardware.name} is AMD's"
    if hardware.capability != (9, 0):
        return f"it needs compute capability 9.0 (H100, H200), and {hardware.name} has {'.'.join(map(str, hardware.capability))}"
    if importlib.util.find_spec("cutlass") is None:
        return "nvidia-cutlass-dsl is not installed: pip install 'anyattn[cute]'"
    return None


def check_backend(backend: Any) -> None:
    """Raises ``ValueError`` for an unknown backend."""
    if backend is not None and backend not in BACKENDS:
        raise ValueError(f"backend={backend!r} is not a backend; wanted None (choose for me) or one of {', '.join(map(repr, BACKENDS))}")


def choose(problem: Problem, hardware: Hardware, backend: str | None = None, options: dict[str, int] | None = None) -> Plan:
    """The plan for ``problem`` on ``hardware``. backend: run on this one or raise. options: numbers of ``validate.flex.kernel_options``.

    Raises ``ValueError`` for an unknown backend and ``BackendError`` for a backend that cannot run this problem.
    """
    warn_of_newer_torch()
    check_backend(backend)
    possible = available(hardware)
    if problem.is_batch_invariant:
        _check_batch_invariant(problem, options or {})
    _check_native(problem, backend, possible["hopper"])
    if backend is not None:
        reason = possible[backend]
        if reason is not None:
            raise BackendError(f"backend={backend!r} cannot run here: {reason}; pass backend=None to let anyattn choose")
        against = _reason_against_problem(backend, problem)
        if against and backend == "hopper":
            over = _over_gathered_keys(problem, hardware, "asked for", options or {}, True)
            if isinstance(over, Plan):
                return over
            against = _beside(against, problem, over)
        if against:
            raise BackendError(f"backend={backend!r} cannot run this call: {against}; pass backend=None to let anyattn choose")
        return _plan_of(backend, problem, hardware, "asked for", options or {})
    reasons, may_hopper = [], False
    for name in ("hopper", "triton"):
        against = possible[name] or _reason_against_problem(name, problem)
        if not against and hardware.device == "cpu":
            against = "its interpreter is for tests"
        if against and name == "hopper" and not possible[name]:
            over = _over_gathered_keys(problem, hardware, f"{hardware.name} has it", options or {})
            if isinstance(over, Plan):
                return over
            against = _beside(against, problem, over)
        may_hopper |= name == "hopper" and not (possible[name] or _reason_against_problem(name, problem.in_any_batch))
        if not against and name == "hopper" and not possible["triton"]:
            against = _slower(problem, hardware)
        if not against:
            reasons.append(f"{hardware.name} has it, and the call is of its kind")
            return _plan_of(name, problem, hardware, "; ".join(reasons), options or {}, may_hopper)
        reasons.append(f"for {name}, {against}")
    if problem.is_batch_invariant and hardware.device != "cpu":
        why = "; ".join((*reasons, f"for torch, its products on {hardware.device} depend on their shapes"))
        raise BackendError(f'deterministic="batch" cannot have this call: {why}; deterministic=True has it')
    return _plan_of("torch", problem, hardware, "; ".join(reasons), options or {})


def _check_batch_invariant(problem: Problem, options: dict[str, int]) -> None:
    """Raises ``ValueError`` for what a call cannot have whose rows' bits must not depend on the batch."""
    asked = [name for name in ("tile_m", "tile_n", "autotune") if options.get(name)]
    splits = max(problem.num_splits, options.get("num_splits", 1))
    refused = (
        (problem.dropout is not None, "dropout_p above 0, which drops weights by b, an entry's place in the batch", "dropout_p=0"),
        (problem.skip is not None, "skip_below, which leaves out tiles by what all of their rows see", "no skip_below"),
        (splits > 1, f"num_splits={splits}, whose parts move with the number of keys", "num_splits left out, 0 or 1"),
        (bool(asked), f"kernel_options {', '.join(asked)}, and has tiles of its own", "kernel_options without them"),
    )
    for is_given, what, cure in refused:
        if is_given:
            raise ValueError(f'deterministic="batch" is given beside {what}; wanted {cure}, or deterministic=True')


def _over_gathered_keys(problem: Problem, hardware: Hardware, reason: str, options: dict[str, int], is_asked: bool = False) -> Plan | str:
    """Hopper's plan for a call whose keys its kernel cannot read, once Triton has gathered them; if that is impossible or does not pay, the
    reason. The hardware has Hopper's kernel. is_asked: it need not pay."""
    if against := _reason_against_triton(hardware):
        return against
    if problem.is_batch_invariant:  # keys of 8 bits would be rounded on the way
        return 'with deterministic="batch" Triton\'s kernel reads them'
    from anyattn.backends.triton.gathered_keys import described, reason_against

    if against := reason_against(problem, is_asked):
        return against
    over, copied = described(problem)
    if against := _reason_against_problem("hopper", over) or (None if is_asked else _slower(over, hardware)):
        return against
    made, lines = _plan_of("hopper", over, hardware, reason, options), []
    if copied:
        what = "gathered" if problem.k.dtype is problem.q.dtype else f"converted to {str(over.k.dtype).removeprefix('torch.')}"
        lines = [f"keys and values are {what} first, by triton: at most {max(1, copied >> 20)} MiB"]
    others = (why for why in made.why[1:] if not why.startswith("backward:"))  # there are no gradients
    return replace(made, gathers=True, why=(made.why[0], *lines, *others))


def _beside(against: str, problem: Problem, reason: str) -> str:
    """A reason against Hopper, with that against gathering keys of 8 bits first, or against reading those of wide heads in the cache."""
    if problem.k.dtype is not problem.q.dtype:
        return f"{against}; they are not converted first: {reason}"
    return f"{against}; as sequences of their present lengths they are not read: {reason}" if problem.has_wide_heads else against


def _slower(problem: Problem, hardware: Hardware) -> str | None:
    """The reason why Triton takes less time than Hopper for a forward pass that both have; None if none is known."""
    from anyattn.backends.hopper.slower import slower_forward

    reason = slower_forward(problem, hardware)
    return reason if reason and not _reason_against_problem("triton", problem) else None


def misfits(tensors: tuple[Any, ...], backend: str | None) -> bool:
    """Whether one of a call's q, k, v has a last dimension that is not innermost, and a GPU's kernels may compute the call: they read rows,
    and a copy costs a small part of what torch operations cost. False for wrong arguments, which are refused later."""
    for t in tensors:
        if isinstance(t, Tensor) and t.layout is torch.strided and not t.is_nested and t.ndim > 2 and t.stride(-1) != 1 and t.shape[-1] > 1:
            return backend in ("triton", "hopper") or (backend is None and machines.of(t.device.type).device == "cuda")
    return False


def planned(problem: Problem, backend: str | None, options: dict[str, int] | None = None) -> Plan:
    """``choose`` for the machine that the problem's tensors are on; warns if a call on a GPU leaves the kernels, once for each kind."""
    machine = machines.of(problem.q.device.type)
    plan = choose(problem, machine, backend, options)
    if machine.device == "cuda" and backend is None and "torch" in (plan.backend, plan.backward):
        _warn_of_torch(problem, plan)
    return plan


def _warn_of_torch(problem: Problem, plan: Plan) -> None:
    if not problem.may_have_pairs or (plan.backend != "torch" and not problem.needs_grad):
        return
    kind, cure = "", "change that, or name a backend to get an error instead"
    if problem.q.dtype is torch.float64:
        kind, cure = "dtype", "convert q, k and v with .float() or .bfloat16() if their precision is enough"
    elif problem.q.shape[3] > _WIDEST or problem.v.shape[3] > _WIDEST_V:
        kind, cure = "head_dim", f"use more heads of at most {_WIDEST} dimensions, {_WIDEST_V} of them for v"
    elif any(t.stride(3) != 1 and t.shape[3] > 1 for t in (problem.q, problem.k, problem.v)):
        kind, cure = (
            "strides",
            "make the cache with its head dimension innermost, as torch.zeros(shape) does: it is not copied at every call",
        )
    what = "" if plan.backend == "torch" else "the backward pass of "
    why = next(line for line in plan.why if line.startswith("torch:" if plan.backend == "torch" else "backward:"))
    kind = what + (kind or why)
    if kind not in _warned:
        _warned.add(kind)
        text = f"{what}this attention call runs as torch operations on the GPU, many times slower than a kernel. {why}. Cure: {cure}"
        warnings.warn(f"{text}. (warned once for calls of this kind; anyattn.explain says it of any call)", stacklevel=4)


def _plan_of(name: str, problem: Problem, hardware: Hardware, reason: str, options: dict[str, int], may_hopper: bool | None = None) -> Plan:
    """The plan that backend ``name`` makes. may_hopper: see ``_backward_of``."""
    module = importlib.import_module(f"anyattn.backends.{name}.plan")
    made: Plan = module.plan_of(problem, hardware, reason, options, _backward_of(name, problem, hardware, may_hopper))
    if not options.get("autotune") or name == "triton":
        return made
    return replace(made, is_tuned=True, why=(*made.why, f"autotune: {name} itself has no tiles to measure"))


def _check_native(problem: Problem, backend: str | None, against: str | None) -> None:
    """Raises ``BackendError`` where a mod is a CuTe function and the Hopper kernel cannot run the call."""
    native = has_native((problem.score, *problem.predicates))
    if native is None:
        return
    named = f"backend={backend!r} is named; pass backend='hopper'" if backend in ("torch", "triton") else None
    reason = named or against or _reason_against_problem("hopper", problem)
    if reason and problem.has_pairs:  # has_pairs last: on a GPU it may synchronise
        raise BackendError(f"only the Hopper kernel can run {native}, a CuTe function: {reason}; or write it as plain Python")


def for_backward(plan: Plan, problem: Problem, hardware: Hardware) -> Plan:
    """The plan of the backward pass after ``plan``'s forward pass, which another backend computes."""
    options = {"autotune": 1} if plan.is_tuned else None
    # packed row tiles are a choice of the forward pass alone
    return choose(problem.in_any_batch.like(packs=None), hardware, plan.backward, options)


def _backward_of(name: str, problem: Problem, hardware: Hardware, may_hopper: bool | None) -> Backward:
    """The backend of the backward pass of a call whose forward pass is ``name``'s: that one if it can, else Triton, else torch. If no
    backend is named, Hopper's or Triton's, as ``slower_backward`` says.

    may_hopper: whether Hopper has a forward pass for the call; None if a backend is named.
    """
    if name == "torch":
        return Backward("torch")
    why = ""
    problem = problem.in_any_batch
    if name == "hopper" if may_hopper is None else may_hopper:
        from anyattn.backends.hopper.make_backward_config import reason_against_backward as reason_against_hopper
        from anyattn.backends.hopper.slower import slower_backward

        against = reason_against_hopper(problem)
        if against is None and may_hopper and (slower := slower_backward(problem, hardware)):
            against = None if _against_triton_backward(problem, hardware) else slower
        if against is None:
            return Backward("hopper", ("backward: hopper",))
        why = f", for hopper, {against}"
    if against := _against_triton_backward(problem, hardware):
        return Backward("torch", (f"backward: torch{why}; for triton, {against}",))
    from anyattn.backends.triton.plan import why_deterministic

    return Backward("triton", ((f"backward: triton{why}",) if why else ()) + why_deterministic(problem))


def _against_triton_backward(problem: Problem, hardware: Hardware) -> str | None:
    from anyattn.backends.triton.plan import reason_against_backward

    return _reason_against_triton(hardware) or reason_against_backward(problem)


def _reason_against_problem(name: str, problem: Problem) -> str | None:
    if name == "torch":
        return None
    found: str | None = importlib.import_module(f"anyattn.backends.{name}.plan").reason_against(problem)
    return found


def appender(plan: Plan, hardware: Hardware) -> str | None:
    """The backend whose kernel appends and rotates before the attention of ``plan``; None if torch operations do it."""
    has_kernel = plan.backend != "torch" and _reason_against_triton(hardware) is None
    return "triton" if has_kernel else None


def combiner(hardware: Hardware, dtype: torch.dtype, needs_grad: bool) -> str:
    """The backend that merges partial results; torch's version also has derivatives and takes float64."""
    has_kernel = hardware.device == "cuda" and dtype is torch.float32 and not needs_grad
    return "triton" if has_kernel and _reason_against_triton(hardware) is None else "torch"
