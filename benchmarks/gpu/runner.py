"""Runs one case: prepares its contestants, compares what they compute, times those that work."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.case import OURS, Record
from benchmarks.gpu.cases import GpuCase
from benchmarks.gpu.inputs import Inputs
from benchmarks.gpu.peers import CONTESTANTS, backend_of
from benchmarks.gpu.timing import Clock, CudaClock, HostClock, Limits, measure
from benchmarks.peers import Unavailable

__all__ = ["LARGEST_DIFFERENCE", "DeviceLost", "GpuRecord", "difference", "is_wrong", "run_case"]

LARGEST_DIFFERENCE = 2e-2  # relative RMS between two bfloat16 results that are taken for the same computation
_LONGEST_ON_TORCH = 4096
_OTHER = "other"
_OURS = (OURS, "anyattn-mod", "anyattn-causal")  # what stands or falls with anyattn's backend for long sequences


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
            if name in _OURS:
                self._look_at_backend(name)
            call, layout = CONTESTANTS[name](self.inputs)
            result = call()
            if layout != _OTHER:
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
        extra = self.record.extra
        if name == OURS:
            extra["backend"], extra["why_torch"] = backend_of(self.inputs)
        elif name == "anyattn-mod":
            extra["backend_mod"] = _explained(self.inputs)
        backend = extra.get("backend_mod" if name == "anyattn-mod" else "backend", "")
        if backend == "torch" and self.inputs.case.shape.seqlen_q > _LONGEST_ON_TORCH:
            raise Unavailable(f"its plan is torch, which is not timed beyond {_LONGEST_ON_TORCH}: {extra.get('why_torch', '')}")


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
    record = GpuRecord(case.name, case.group, case.door, case.variant, "bfloat16" if case.products else "", str(case.shape))
    record.unavailable.update(banned or {})
    watch("")
    if any(name.startswith("flex") for name in case.peers):
        torch.compiler.reset()  # a fresh, specialised compilation for every case: the peer at its best
    with torch.no_grad():
        inputs = Inputs(case, device)
        pairs = inputs.pairs()
        record.flops, record.extra["pairs"] = case.flops(pairs), pairs
        run = _Run(inputs, record, watch)
        for name in (OURS, *case.peers):
            if name not in record.unavailable:
                run.prepare(name)
        run.reference = None
        if case.door == "mask" and OURS in run.calls:
            record.extra["syncs"] = _syncs(run.calls[OURS])
        clock = (clocks or {}).get(case.door) or _clock(case.door, cold)
        if record.extra.get("backend") == "torch":
            limits = Limits(limits.least, limits.seconds / 4, min(3, limits.least), limits.sample)
        record.timings = measure(run.calls, clock, limits, run.failed, watch)
    record.extra["seconds"] = round(time.perf_counter() - start, 1)
    return record


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
    """Relative root mean square between results; of block masks 0 if they list the same tiles in the same classes, else inf."""
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
