"""The one runner: judge, then time all contenders of a case in interleaved rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from typing import Any

import psutil

from benchmarks.case import OTHER_JOB, OURS, Case, Record, Timing
from benchmarks.judge import judge
from benchmarks.peers import PEERS, Inputs, Unavailable
from benchmarks.sequences import Decode, Documents
from benchmarks.variants import visible_pairs

__all__ = ["Others", "clock", "geometric_mean", "interleave", "run_case"]

_DISTURBED = 0.15  # cores that other processes may use during a round without its being repeated
_SEQUENCES: dict[str, Any] = {"documents": Documents, "decode": Decode}
_SAMPLE = 0.02  # seconds: shorter calls are repeated within a sample, so that the clock and a scheduler's tick matter little


def clock(device: str) -> Callable[[Callable[[], Any], int], float]:
    """(call, times) -> seconds per call, as that device must be timed."""
    if device == "cpu":
        return _cpu_seconds
    raise NotImplementedError(f"no clock for device {device!r} yet")


def _cpu_seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


class Others:
    """How many cores other processes kept busy since the last look: two OpenMP programs on the same cores slow one another tenfold."""

    def __init__(self) -> None:
        self._last = self._look()

    def _look(self) -> tuple[float, float]:
        whole, mine = psutil.cpu_times(), psutil.Process().cpu_times()
        busy = sum(getattr(whole, kind, 0.0) for kind in ("user", "nice", "system", "irq", "softirq", "steal"))
        return busy - mine.user - mine.system, time.perf_counter()

    def cores(self) -> float:
        (busy, at), self._last = self._last, self._look()
        tick = 0.02  # the kernel counts in hundredths of a second
        return max(0.0, self._last[0] - busy - tick) / max(self._last[1] - at, tick)

    def wait(self, patience_s: float) -> float:
        """Sleeps until half a second went by quietly, at most about ``patience_s``; the seconds that took."""
        start = time.perf_counter()
        while time.perf_counter() - start < patience_s:
            time.sleep(0.5)
            if self.cores() <= _DISTURBED:
                break
        return time.perf_counter() - start


def interleave(
    calls: dict[str, Callable[[], Any]], rounds: int, seconds: Callable, budget_s: float, patience_s: float = 0.0
) -> tuple[dict[str, Timing], dict[str, Any]]:
    """Every round times every call once, beginning with another one each time, until ``budget_s`` is spent but at least 3 times.

    Rounds during which other processes were busy are repeated when they no longer are, for which ``patience_s`` in all are spent, and
    count only if fewer than 3 quiet ones came about. Returns the timings, how many rounds were disturbed and whether those had to be used.
    """
    repeats = {}
    for name, call in calls.items():
        call()
        repeats[name] = max(1, math.ceil(_SAMPLE / seconds(call, 1)))
    quiet: list[dict[str, float]] = []
    disturbed: list[dict[str, float]] = []
    names, start, others = list(calls), time.perf_counter(), Others()
    while len(quiet) < rounds:
        tried = len(quiet) + len(disturbed)
        turn = tried % len(names)
        others.cores()
        sample = {name: seconds(calls[name], repeats[name]) for name in names[turn:] + names[:turn]}
        is_quiet = others.cores() <= _DISTURBED
        (quiet if is_quiet else disturbed).append(sample)
        if not is_quiet:
            waited = others.wait(patience_s)
            start, patience_s = start + waited, patience_s - waited  # waiting is not on the case's budget
        if tried >= 2 and time.perf_counter() - start > budget_s:
            break
    used = quiet if len(quiet) >= 3 else quiet + disturbed
    about = {"disturbed_rounds": len(disturbed), "disturbed_used": used is not quiet}
    return {name: Timing(tuple(sample[name] for sample in used)) for name in names}, about


def run_case(case: Case, rounds: int, budget_s: float, patience_s: float = 0.0) -> Record:
    """Builds, judges and times one case. Nothing is timed if anyattn's result fails its budget (``Record.refused``).

    A peer whose result fails is timed all the same, with its share in the record: it is no claim of ours.
    """
    if case.kind in _SEQUENCES:
        return _run_sequences(case, rounds, budget_s, patience_s)
    record, inputs = Record.of(case), Inputs.of(case)
    calls: dict[str, Callable[[], Any]] = {}
    for name in (OURS, *case.peers):
        peer = PEERS[name]
        try:
            if case.device not in peer.devices:
                raise Unavailable(f"{name} does not run on {case.device}")
            calls[name] = peer.prepare(inputs)
        except Unavailable as reason:
            record.unavailable[name] = str(reason)
    record.extra.update(_facts(inputs))
    record.flops = case.flops(record.extra.get("pairs", 0))
    record.budget = judge(inputs, {name: call() for name, call in calls.items() if name not in OTHER_JOB})
    if not record.budget[OURS] <= 1.0:
        what = "its lists differ from the mask" if case.kind == "mask" else f"it uses {record.budget[OURS]:.3g} of its error budget"
        record.refused = f"anyattn's result is wrong here ({what}); not timed"
        return record
    record.timings, about = interleave(calls, case.rounds or rounds, clock(case.device), budget_s, patience_s)
    record.extra.update(about)
    return record


def _run_sequences(case: Case, rounds: int, budget_s: float, patience_s: float) -> Record:
    record, job = Record.of(case), _SEQUENCES[case.kind](case)
    calls = job.calls()
    record.extra.update(job.facts())
    record.flops = case.flops(record.extra["pairs"])
    record.budget = job.judge({name: call() for name, call in calls.items()})
    if not record.budget[OURS] <= 1.0:
        record.refused = f"anyattn's result is wrong here (it uses {record.budget[OURS]:.3g} of its error budget); not timed"
        return record
    record.timings, about = interleave(calls, case.rounds or rounds, clock(case.device), budget_s, patience_s)
    record.extra.update(about)
    return record


def _facts(inputs: Inputs) -> dict[str, Any]:
    """Unmasked pairs over all batch entries and heads, and the share of the score matrix's tiles that are listed."""
    case, facts = inputs.case, dict[str, Any]()
    if case.kind != "mask":
        shape = case.shape
        pairs = visible_pairs(inputs.variant.mask, shape.seqlen_q, shape.seqlen_k, case.device)
        facts["pairs"] = pairs * shape.batch * shape.heads_q
        block_mask = inputs.block_masks.get(OURS)
        facts["tile_share"] = 1.0 if block_mask is None else float(block_mask.to_dense().double().mean())
    return facts


def geometric_mean(values: Iterable[float]) -> float:
    """nan of nothing."""
    logs = [math.log(v) for v in values]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan
