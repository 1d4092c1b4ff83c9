"""Profile of a step by torch's profiler: device time by kernel families, idle time, copies, and the host's waits.

A kernel belongs to the family of the operator that launched it if this is more specific than its own name (``anyattn::attend``), and to
the step and phase in which the host launched it. The profiler slows the host down: idle time is an upper bound.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["FAMILIES", "profiled", "summary"]

_STEPS = 3  # recorded steps; the last is evaluated, when the host is ahead of the device
_GAP_US = 5.0
_STEP = "gpt.step"

FAMILIES = (
    "attention forward",
    "attention backward",
    "beside attention",
    "masks",
    "matrix products",
    "elementwise, norms, loss",
    "copies",
    "optimizer",
    "memcpy, memset",
)
_MATRIX = re.compile(r"nvjet|gemm|xmma|cublas|splitK|cutlass_\d|triton_tem_fused\w*mm", re.I)
_FLEX = re.compile(r"flex_attention|flash|fmha|FlashAttention", re.I)
_OURS = re.compile(r"anyattn|^entry$|^\w+_again$|documents$|^order_sequences|^read_sums|^combine", re.I)  # kernels that eager calls launch
_AROUND = re.compile(r"^triton_(poi|red|per)_fused\w*(flex_attention|anyattn|attend)")
_VIEWS = (
    "clone|copy|contiguous|view|unsafe_view|reshape|transpose|permute|expand|slice|split|split_with_sizes|cat|select|as_strided|squeeze"
    "|unsqueeze"
)
_COPY = re.compile(rf"^triton_poi_fused_+((?:{_VIEWS})_*)+\d*$|direct_copy_kernel|CatArray|copy_device_to_device", re.I)
_BACKWARD = re.compile(r"backward|bwd", re.I)
_WAIT = re.compile(r"Synchronize|EventQuery|cudaMalloc|cudaFree|cudaHostAlloc|cudaMemcpy(?!.*Async)")


@dataclass(frozen=True)
class _Span:
    start: float  # microseconds
    end: float
    name: str
    thread: Any = None


def profiled(step: Callable[[], Any], path: Path) -> dict[str, Any]:
    """A step's summary; the trace is written to ``path`` (chrome://tracing)."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=activities) as record:
        for _ in range(_STEPS):
            with torch.profiler.record_function(_STEP):
                step()
        torch.cuda.synchronize()
    record.export_chrome_trace(str(path))
    with gzip.open(path, "rt") as text:
        return summary(json.load(text)["traceEvents"])


def summary(events: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """The last step of a chrome trace. families: milliseconds, launches. waits: calls that may wait, number and milliseconds."""
    whole = [event for event in events if event.get("ph") == "X"]
    steps = sorted((s for s in _spans(whole, "user_annotation") if s.name == _STEP), key=lambda s: s.start)
    last = steps[-1]
    launches = {
        event["args"]["correlation"]: event
        for event in whole
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    device = sorted((e for e in whole if e.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")), key=lambda e: e["ts"])
    looked = _Looked(whole, last)
    mine, before = [], 0.0
    for event in device:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if launch is None:
            continue
        if last.start <= launch["ts"] <= last.end:
            mine.append((event, launch))
        elif launch["ts"] < last.start:
            before = max(before, event["ts"] + event["dur"])
    families: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
    kernels: dict[tuple[str, str], list[float]] = defaultdict(lambda: [0.0, 0])
    for event, launch in mine:
        family = looked.family(event, launch)
        for total in (families[family], kernels[family, event["name"][:120]]):
            total[0] += event["dur"] / 1e3
            total[1] += 1
    return {
        "families": {name: families[name] for name in FAMILIES if name in families},
        **_idle([event for event, _ in mine], before),
        "host_ms": (last.end - last.start) / 1e3,
        "waits": _waits(whole, last),
        "kernels": [[*key, *total] for key, total in sorted(kernels.items(), key=lambda item: -item[1][0])],
    }


def _spans(events: Iterable[dict[str, Any]], category: str) -> list[_Span]:
    found = (e for e in events if e.get("cat") == category)
    return [_Span(e["ts"], e["ts"] + e["dur"], e["name"], e.get("tid")) for e in found]


class _Looked:
    """The context of a launch: the phase of the step, and the enclosing operator of anyattn."""

    def __init__(self, events: list[dict[str, Any]], step: _Span):
        inside = [s for s in _spans(events, "user_annotation") if step.start <= s.start <= step.end]
        self._phases = sorted((s for s in inside if s.name.startswith("gpt.") and s.name != _STEP), key=lambda s: s.start)
        self._operators: dict[Any, list[_Span]] = defaultdict(list)
        for span in sorted(_spans(events, "cpu_op"), key=lambda s: s.start):
            if span.name.startswith("anyattn::"):
                self._operators[span.thread].append(span)
        self._starts = {thread: [s.start for s in spans] for thread, spans in self._operators.items()}

    def family(self, event: dict[str, Any], launch: dict[str, Any]) -> str:
        if event["cat"] != "kernel":
            return "memcpy, memset"
        name, phase, operator = event["name"], self._phase(launch["ts"]), self._operator(launch)
        if operator.endswith("::block_lists") or phase == "masks":
            return "masks"
        if phase == "optimizer":
            return "optimizer"
        is_backward = phase == "backward"
        if operator:
            is_backward = "backward" in operator
        elif _AROUND.search(name):
            return "beside attention"
        elif _FLEX.search(name):
            is_backward = is_backward or bool(_BACKWARD.search(name))
        elif not _OURS.search(name):
            return _other(name)
        return "attention backward" if is_backward else "attention forward"

    def _phase(self, at: float) -> str:
        return next((s.name.removeprefix("gpt.") for s in self._phases if s.start <= at <= s.end), "")

    def _operator(self, launch: dict[str, Any]) -> str:
        """The last of anyattn's operators that began before the launch on its thread and had not ended, or an empty string."""
        spans = self._operators.get(launch.get("tid"), [])
        place = bisect_right(self._starts.get(launch.get("tid"), []), launch["ts"]) - 1
        return spans[place].name if place >= 0 and spans[place].end >= launch["ts"] else ""


def _other(name: str) -> str:
    if _MATRIX.search(name):
        return "matrix products"
    return "copies" if _COPY.search(name) else "elementwise, norms, loss"


def _idle(events: list[dict[str, Any]], before: float) -> dict[str, Any]:
    """Busy and idle time of the device in the step, counted from the end of the step before."""
    if not events:
        return {}
    end = before or events[0]["ts"]
    start, gaps, busy = end, list[float](), 0.0
    for event in events:
        if event["ts"] > end:
            gaps.append(event["ts"] - end)
        busy += max(0.0, event["ts"] + event["dur"] - max(end, event["ts"]))
        end = max(end, event["ts"] + event["dur"])
    long = [gap for gap in gaps if gap > _GAP_US]
    return {
        "span_ms": (end - start) / 1e3,
        "busy_ms": busy / 1e3,
        "idle_ms": sum(gaps) / 1e3,
        "gaps": len(long),
        "longest_gap_us": max(gaps, default=0.0),
    }


def _waits(events: list[dict[str, Any]], step: _Span) -> dict[str, list[float]]:
    found: dict[str, list[float]] = defaultdict(lambda: [0, 0.0])
    for event in events:
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and step.start <= event["ts"] <= step.end and _WAIT.search(event["name"]):
            found[event["name"]][0] += 1
            found[event["name"]][1] += event["dur"] / 1e3
    return dict(found)
