"""Runner of one benchmark case: prepares its contestants, judges and compares their results, times those that work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from anyattn.testing.harness.case import OURS, Case, Record
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.judge import Judge, difference
from anyattn.testing.harness.peers import INSISTED, PEERS, Unavailable, backend_of
from anyattn.testing.harness.timing import Clock, CpuClock, CudaClock, HostClock, Limits, Others, measure
from anyattn.testing.harness.variants import Variant

__all__ = ["DeviceLost", "prepared", "refused", "run_case"]

_LONGEST_ON_TORCH = 4096


class DeviceLost(Exception):
    """A kernel failed on the device: this process can run nothing more."""


@dataclass
class _Run:
    """A case in progress. watch: called with the contestant before anything that may hang. judge: None if results are only compared."""

    inputs: Inputs
    record: Record
    watch: Callable[[str], None]
    judge: Judge | None = None
    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    reference: Any = None

    def failed(self, name: str, error: Exception) -> None:
        """Leaves a contestant out; raises ``DeviceLost`` if the device failed with it."""
        self.calls.pop(name, None)
        self.record.unavailable[name] = str(error) if isinstance(error, Unavailable) else _described(error)
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise DeviceLost(f"{name}: {_described(error)}; {_described(lost)}") from error

    def prepare(self, name: str) -> None:
        """Builds a contestant, calls it once and checks its result; anyattn comes first, and the others are compared with it."""
        self.watch(name)
        try:
            if self.inputs.case.device == "cuda":
                self._look_at_backend(name)
            call, layout = PEERS[name].entry(name, self.inputs)
            result = call()
            if not PEERS[name].is_other_job:
                mine = self.inputs.comparable(result, layout)
                if self.reference is None:
                    self.reference = mine
                self.record.difference[name] = difference(mine, self.reference)
                self._judge(name, mine)
            self.calls[name] = call
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            self.failed(name, error)

    def _judge(self, name: str, mine: Any) -> None:
        """On a GPU judges only anyattn, to save time: the others are compared with it. Judging may run out of memory there."""
        if self.judge is None:
            return
        if self.judge.cannot:
            self.record.extra["not_judged"] = self.judge.cannot
            return
        if self.inputs.case.device == "cpu":
            self.record.budget[name] = self.judge.share(mine)
        elif name == OURS:
            try:
                self.record.budget[name] = self.judge.share(mine)
            except Exception as error:
                self.record.extra["not_judged"] = _described(error)

    def _look_at_backend(self, name: str) -> None:
        """Records anyattn's backend, and refuses cases for which torch operations would take too long."""
        extra, case = self.record.extra, self.inputs.case
        if name in INSISTED:
            key = "" if name == OURS else f"_{name.removeprefix('anyattn-')}"
            insisted = INSISTED[name]
            backend, why = backend_of(self.inputs, case.backend if insisted == "" else insisted)
            extra[f"backend{key}"], extra[f"why_torch{key}"] = backend, why
        elif name == "anyattn-mod":
            backend, why = _explained(self.inputs), ""
            extra["backend_mod"] = backend
        elif name == "anyattn-causal":
            backend, why = extra.get("backend", ""), extra.get("why_torch", "")
        else:
            return
        if "torch" in backend and case.shape.seqlen_q > _LONGEST_ON_TORCH:
            raise Unavailable(f"its plan is {backend}, and torch is not timed beyond {_LONGEST_ON_TORCH}: {why}")


def _explained(inputs: Inputs) -> str:
    """The backend for the case's mask as a function."""
    import anyattn

    return anyattn.explain(*inputs.bhsd, inputs.mods.score, mask_mod=inputs.mods.mask).plan.backend


def run_case(
    case: Case,
    limits: Limits,
    device: str | None = None,
    clock: Clock | None = None,
    banned: Mapping[str, str] | None = None,
    watch: Callable[[str], None] = lambda name: None,
    cold: bool = True,
    variant: Variant | None = None,
) -> Record:
    """Builds, judges and times one case.

    On a CPU nothing is timed if anyattn's result fails its budget (``Record.refused``). On a GPU, since machines are scarce, it is timed,
    marked, and clears no bar. A peer whose result fails is timed all the same: we make no claim about it.

    device, clock: replace the case's. banned: contestant -> reason why it is not tried. watch: called with the next contestant.
    cold: on a GPU, overwrite the L2 cache before each sample. variant: replaces the case's one for a user's
    own mods. Raises ``DeviceLost``.
    """
    start = time.perf_counter()
    watch("")
    with torch.no_grad():
        run = prepared(case, case.contestants, device or case.device, banned or {}, watch, is_judged=True, variant=variant)
        record, limits = run.record, _limits(case, run.record, limits)
        if case.device == "cpu":
            record.refused = _refusal(case, record)
            if record.refused is not None:
                return record
            record.extra.update(_tile_share(run.inputs))
        elif case.kind in ("mask", "decode") and OURS in run.calls:
            record.extra["syncs"] = _syncs(run.calls[OURS])
        others = Others.found(limits.patience) if case.device == "cpu" else None
        record.extra["prepare_s"] = round(time.perf_counter() - start, 1)
        record.timings = measure(run.calls, clock or _clock(case, cold), limits, run.failed, watch, others, record.extra)
    record.extra["seconds"] = round(time.perf_counter() - start, 1)
    return record


def prepared(
    case: Case,
    names: Sequence[str],
    device: str,
    banned: Mapping[str, str],
    watch: Callable[[str], None] = lambda name: None,
    is_judged: bool = False,
    variant: Variant | None = None,
) -> _Run:
    """A case with those of its contestants that work here, compiled, called once and compared. Raises ``DeviceLost``."""
    record = Record.of(case)
    record.unavailable.update(banned)
    if any(name.startswith("flex") for name in names):
        torch.compiler.reset()  # each case gets a fresh, specialised compilation: the peer at its best
    inputs = Inputs(case, device, variant)
    pairs = inputs.pairs()
    record.flops, record.extra["pairs"] = case.flops(pairs), pairs
    if case.bytes:
        record.extra["bytes"] = case.bytes
    run = _Run(inputs, record, watch, Judge(inputs) if is_judged else None)
    for name in names:
        if name not in record.unavailable:
            run.prepare(name)
    run.reference = run.judge = None  # frees their tensors while others are timed
    return run


def refused(case: Case, error: Exception) -> Record:
    """The record of a case that raised; other cases still run."""
    record = Record.of(case)
    record.refused = _described(error)
    return record


def _refusal(case: Case, record: Record) -> str | None:
    """The reason not to time a judged case; None if it may be timed."""
    if OURS in record.unavailable:
        return record.unavailable[OURS]
    if record.budget[OURS] <= 1.0:
        return None
    what = "its lists differ from the mask" if case.kind == "mask" else f"it uses {record.budget[OURS]:.3g} of its error budget"
    return f"anyattn's result is wrong here ({what}); not timed"


def _limits(case: Case, record: Record, limits: Limits) -> Limits:
    """Reduces the rounds of long cases, and on a GPU of cases that torch operations compute."""
    if case.rounds is not None:
        return replace(limits, rounds=case.rounds, least=min(limits.least, case.rounds))
    if "torch" not in record.extra.get("backend", ""):
        return limits
    return Limits(limits.least, limits.seconds / 4, min(3, limits.least), limits.sample)


def _clock(case: Case, cold: bool) -> Clock:
    if case.is_host_time:
        return HostClock()
    return CpuClock() if case.device == "cpu" else CudaClock(cold, has_head_start=case.kind != "mask")


def _tile_share(inputs: Inputs) -> dict[str, float]:
    """The share of the score matrix's tiles that are listed, if there is a block mask."""
    if inputs.case.kind != "flex":
        return {}
    return {"tile_share": 1.0 if inputs.block_mask is None else float(inputs.block_mask.to_dense().double().mean())}


def _syncs(call: Callable[[], Any]) -> str:
    """torch's message about a call that synchronises; empty if it does not."""
    if not torch.cuda.is_available():
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        return _described(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return ""


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
