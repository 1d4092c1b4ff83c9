"""Runs one case: prepares its contestants, compares what they compute, times those that work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.case import OURS, Record
from benchmarks.gpu.cases import GpuCase
from benchmarks.gpu.inputs import Inputs
from benchmarks.gpu.peers import CONTESTANTS, INSISTED, OTHER_JOBS, backend_of, backward_of
from benchmarks.gpu.timing import Clock, CudaClock, HostClock, Limits, measure
from benchmarks.peers import Unavailable

__all__ = ["LARGEST_DIFFERENCE", "DeviceLost", "GpuRecord", "difference", "is_wrong", "prepared", "run_case"]

LARGEST_DIFFERENCE = 2e-2  # relative RMS between two bfloat16 results that are taken for the same computation
_LONGEST_ON_TORCH = 4096


class DeviceLost(Exception):
    """Nothing more can run in this process: a kernel failed on the device."""


@dataclass
class GpuRecord(Record):
    """budget: here the relative RMS difference of each contestant's result from anyattn's. extra: backend, why_torch, pairs, syncs, ..."""

    def ratio(self, peer: str) -> float:
        """How many times as fast as ``peer`` anyattn was: the median over rounds of the ratio within the round."""
        return self.ratio_of(OURS, peer)

    def ratio_of(self, mine: str, peer: str) -> float:
        rounds = zip(self.timings[mine].seconds, self.timings[peer].seconds)
        ratios = sorted(theirs / ours for ours, theirs in rounds)
        half = len(ratios) // 2
        return ratios[half] if len(ratios) % 2 else (ratios[half - 1] + ratios[half]) / 2


@dataclass
class _Run:
    """A case on its way. watch: told (contestant) before anything that may hang."""

    inputs: Inputs
    record: GpuRecord
    watch: Callable[[str], None]
    calls: dict[str, Callable[[], Any]] = field(default_factory=dict)
    reference: Any = None

    def failed(self, name: str, error: Exception) -> None:
        """Leaves a contestant out; raises ``DeviceLost`` if it took the device with it."""
        self.calls.pop(name, None)
        self.record.unavailable[name] = str(error) if isinstance(error, Unavailable) else _described(error)
        if torch.cuda.is_available():
            try:
                torch.cuda.synchronize()
            except Exception as lost:
                raise DeviceLost(f"{name}: {_described(error)}; {_described(lost)}") from error

    def prepare(self, name: str) -> None:
        """Builds a contestant, calls it once and compares its result; anyattn comes first, and the others are compared with it."""
        self.watch(name)
        try:
            self._look_at_backend(name)
            entry = CONTESTANTS[name](self.inputs)
            call, layout = backward_of(entry, self.inputs) if self.inputs.case.is_backward else entry
            result = call()
            if name not in OTHER_JOBS:
                mine = self.inputs.comparable(result, layout)
                if self.reference is None:
                    self.reference = mine
                self.record.budget[name] = difference(mine, self.reference)
            self.calls[name] = call
            if torch.cuda.is_available():
                torch.cuda.synchronize()
        except Exception as error:
            self.failed(name, error)

    def _look_at_backend(self, name: str) -> None:
        """Notes it, and refuses what torch's operations would take too long for."""
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
    """The backend of the case with the mask as a function."""
    import anyattn

    return anyattn.explain(*inputs.bhsd, inputs.mods.score, mask_mod=inputs.mods.mask).plan.backend


def run_case(
    case: GpuCase,
    limits: Limits,
    device: str = "cuda",
    clocks: Mapping[str, Clock] | None = None,
    banned: Mapping[str, str] | None = None,
    watch: Callable[[str], None] = lambda name: None,
    cold: bool = True,
) -> GpuRecord:
    """banned: contestant -> why it is not even tried. clocks: by kind of door, instead of the device's. Raises ``DeviceLost``."""
    start = time.perf_counter()
    watch("")
    with torch.no_grad():
        run = prepared(case, case.contestants, device, banned or {}, watch)
        record, limits = run.record, _limits(run.record, limits)
        if case.door in ("mask", "decode") and OURS in run.calls:
            record.extra["syncs"] = _syncs(run.calls[OURS])
        clock = (clocks or {}).get(case.door) or _clock(case.door, cold)
        record.extra["prepare_s"] = round(time.perf_counter() - start, 1)
        record.timings = measure(run.calls, clock, limits, run.failed, watch)
    record.extra["seconds"] = round(time.perf_counter() - start, 1)
    return record


def prepared(
    case: GpuCase, names: Sequence[str], device: str, banned: Mapping[str, str], watch: Callable[[str], None] = lambda name: None
) -> _Run:
    """A case with those of its contestants that work here, compiled, called once and compared. Raises ``DeviceLost``."""
    record = GpuRecord(case.name, case.group, case.door, case.variant, "bfloat16" if case.products else "", str(case.shape))
    record.unavailable.update(banned)
    if any(name.startswith("flex") for name in names):
        torch.compiler.reset()  # a fresh, specialised compilation for every case: the peer at its best
    inputs = Inputs(case, device)
    pairs = inputs.pairs()
    record.flops, record.extra["pairs"] = case.flops(pairs), pairs
    if case.bytes:
        record.extra["bytes"] = case.bytes
    run = _Run(inputs, record, watch)
    for name in names:
        if name not in record.unavailable:
            run.prepare(name)
    run.reference = None
    return run


def _limits(record: GpuRecord, limits: Limits) -> Limits:
    """Fewer rounds of what torch's operations compute."""
    if "torch" not in record.extra.get("backend", ""):
        return limits
    return Limits(limits.least, limits.seconds / 4, min(3, limits.least), limits.sample)


def _clock(door: str, cold: bool) -> Clock:
    return HostClock() if door == "host" else CudaClock(cold, has_head_start=door != "mask")


def _syncs(call: Callable[[], Any]) -> str:
    """What torch says of a call that waits for the device; empty if it does not."""
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


def difference(mine: Any, reference: Any) -> float:
    """Relative root mean square between results, of several the largest; of block masks 0 if they list the same tiles in the same
    classes, else inf."""
    if isinstance(mine, tuple):
        return max(difference(a, b) for a, b in zip(mine, reference, strict=True))
    if not isinstance(mine, torch.Tensor):
        return 0.0 if _same_tiles(mine, reference) else float("inf")
    if mine.shape != reference.shape:
        return float("inf")
    total, wrong = reference.float().square().mean().sqrt(), (mine.float() - reference.float()).square().mean().sqrt()
    return float(wrong / total)


def _same_tiles(mine: Any, other: Any) -> bool:
    if not torch.equal(mine.to_dense(), other.to_dense()):
        return False
    return all(torch.equal(_counts(mine, which), _counts(other, which)) for which in ("kv_num_blocks", "full_kv_num_blocks"))


def _counts(block_mask: Any, which: str) -> torch.Tensor:
    counts = getattr(block_mask, which)
    return torch.zeros_like(block_mask.kv_num_blocks) if counts is None else counts


def is_wrong(record: Record, name: str) -> bool:
    """Whether a contestant computed something else than anyattn."""
    return name in record.budget and not record.budget[name] <= LARGEST_DIFFERENCE


def _described(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"
