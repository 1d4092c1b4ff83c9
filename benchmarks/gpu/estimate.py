"""Estimated duration of a run, group by group, by rules of thumb."""

from __future__ import annotations

from collections.abc import Sequence

from anyattn.testing.harness.case import Case
from anyattn.testing.harness.timing import Limits
from benchmarks.bars import Found
from benchmarks.store import is_done

__all__ = ["ahead_seconds", "case_seconds", "described"]

_START = 10.0  # importing torch, initialising CUDA
_INPUTS = 0.8
_SAMPLE_HOST = 0.02
_SAMPLE = {"decode": 0.007, "mask": 0.006}  # of one contestant in one round, its head start included
_SAMPLE_OTHER, _SAMPLE_BACKWARD = 0.004, 0.012
_COMPILED, _ELSE = 3.0, 0.3  # to prepare a contestant: Inductor traces and lowers even if the kernels are cached
_COLD = {"flex": 12.0, "fa4": 5.0, "anyattn": 5.0}  # without compiling ahead
_PROBES = {
    "memory": 25.0,
    "first-call": 40.0,
    "compilations": 40.0,
    "compilations-triton": 60.0,
    "compiled-call": 60.0,
    "serving-call": 30.0,
    "gpt-8k": 200.0,
    "gpt-32k": 220.0,
}
_JOB = {"flex": 12.0, "fa4": 6.0, "anyattn": 7.0}


def _kind(name: str) -> str:
    return next((kind for kind in _COLD if name.startswith(kind)), "")


def case_seconds(case: Case, limits: Limits, is_compiled: bool) -> float:
    sample = _SAMPLE_HOST if case.is_host_time else _SAMPLE.get(case.kind, _SAMPLE_BACKWARD if case.is_backward else _SAMPLE_OTHER)
    rounds = limits.rounds * len(case.contestants) * sample
    prepare = sum(_COLD.get(_kind(n), _ELSE) if not is_compiled else _COMPILED if n.startswith("flex") else _ELSE for n in case.contestants)
    return _INPUTS + prepare + min(rounds, max(limits.seconds, limits.least * rounds / limits.rounds))


def ahead_seconds(jobs: int, flex_jobs: int, processes: int) -> float:
    """Seconds to compile ahead ``jobs`` jobs, of which ``flex_jobs`` are Inductor's."""
    return _START + (flex_jobs * _JOB["flex"] + (jobs - flex_jobs) * _JOB["anyattn"]) / max(1, min(processes, jobs)) if jobs else 0.0


def described(steps: Sequence[Case | str], limits: Limits, is_compiled: bool, found: Found, start: float = 0.0) -> list[str]:
    """One line per group: how many of its cases are left, how long they take, and when they will be done."""
    lines, total = [], start + _START
    for group in dict.fromkeys(step if isinstance(step, str) else step.group for step in steps):
        members = [step for step in steps if not isinstance(step, str) and step.group == group]
        left = [case for case in members if not is_done(found, case)]
        if members:
            what, seconds = f"{len(left):3} of {len(members):2} cases", sum(case_seconds(case, limits, is_compiled) for case in left)
        else:
            what, seconds = f"{'a probe':>15}", 0.0 if is_done(found, group) else _PROBES.get(group, 60.0)
        total += seconds
        lines.append(f"  {group:20}{what}  ~{seconds:4.0f} s, done at ~{total:4.0f} s")
    return lines
