"""Training by one contestant, and its measurements: times, graphs, memory, waits, losses and gradients."""

from __future__ import annotations

import time
import warnings
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._dynamo import utils as dynamo
from torch.profiler import record_function

import anyattn
from benchmarks.gpu.gpt import profile
from benchmarks.gpu.gpt.contestants import CONTESTANTS, EXACT, PLAIN, REPLACED
from benchmarks.gpu.gpt.model import GPT, Size, batches

__all__ = ["COMPARED_STEPS", "PHASES", "Training"]

COMPARED_STEPS = 3
PHASES = ("masks", "forward", "backward", "optimizer")
_POOL = 64  # steps with documents of their own; later steps reuse them from the first on
_WATCHED_STEPS = 3


class Training:
    """Ready for the first step, which compiles. Every method that trains continues where the previous one stopped.

    folder: for profiles. scratch: for results that are compared.
    """

    def __init__(self, name: str, size: Size, device: str, backend: str, folder: Path, scratch: Path):
        self.name, self._device, self._folder, self._scratch = name, device, folder, scratch
        self._is_cuda = device.startswith("cuda")
        contestant = CONTESTANTS[name](size, backend)
        self._seen = contestant.seen
        torch.manual_seed(0)
        with torch.device(device):
            model = GPT(size, contestant.attend, contestant.inside, contestant.is_reference)
        self._model = model.to(size.exact) if name == EXACT else model
        self._is_mixed = size.is_mixed and name != EXACT
        self._call: Any = torch.compile(model, fullgraph=True, backend=backend) if contestant.is_compiled else model
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        self._pool = batches(size, _POOL, device)
        self._steps = 0
        self._graphs: Counter[str] = Counter()
        self._breaks = 0
        self._watched: dict[str, Tensor] | None = None
        self._wake(name == PLAIN and self._is_cuda)

    def _wake(self, compiles: bool) -> None:
        """Creates CUDA's context and cuBLAS in advance. compiles: also compiles something small, so that
        the compilers' files are loaded."""
        x = torch.ones(64, 64, device=self._device, dtype=torch.bfloat16, requires_grad=compiles)
        (x @ x).sum().item()
        if compiles:
            torch.compile(lambda x: (x.sin() @ x).cos())(x).sum().backward()

    def step(self) -> Tensor:
        """The loss of each token (B, S) before the update."""
        batch = self._pool[self._steps % _POOL]
        self._steps += 1
        device = self._device.split(":")[0]
        with record_function("gpt.masks"):
            seen = self._seen(batch)
        with record_function("gpt.forward"), torch.autocast(device, torch.bfloat16, enabled=self._is_mixed):
            losses = self._call(batch.tokens, batch.targets, seen)
        with record_function("gpt.backward"):
            losses.mean().backward()
        if self._watched is not None:
            self._watched.update(self._gradients())
        with record_function("gpt.optimizer"):
            self._optimizer.step()
            self._optimizer.zero_grad()
        return losses.detach()

    def _gradients(self) -> dict[str, Tensor]:
        first, last = self._model.blocks[0], self._model.blocks[-1]
        weights = {"first qkv": first.qkv.weight, "last qkv": last.qkv.weight, "last down": last.down.weight}
        return {name: weight.grad.clone() for name, weight in weights.items()}

    def _counted(self, steps: int) -> list[Tensor]:
        """The losses of ``steps`` steps; also counts what Dynamo compiles meanwhile."""
        dynamo.clear_compilation_metrics()
        broken = sum(dynamo.counters["graph_break"].values())
        losses = [self.step() for _ in range(steps)]
        self._graphs.update(metric.co_name for metric in dynamo.get_compilation_metrics() if metric.co_name)
        self._breaks += sum(dynamo.counters["graph_break"].values()) - broken
        return losses

    def _synchronize(self) -> None:
        if self._is_cuda:
            torch.cuda.synchronize()

    # ---- questions to workers

    def first(self) -> dict[str, Any]:
        """The first step, compiling included, and the following ones that are compared with the reference's; keeps their losses."""
        self._watched = {}
        start = time.perf_counter()
        losses = self._counted(1)
        self._synchronize()
        seconds = time.perf_counter() - start
        kept, self._watched = self._watched, None
        losses += self._counted(COMPARED_STEPS - 1)
        kept |= {"losses of the first step": losses[0], f"losses of step {COMPARED_STEPS}": losses[-1]}
        torch.save({name: t.cpu() for name, t in kept.items()}, self._scratch / f"{self.name}.pt")
        return {"first_s": seconds, "losses": [float(t.mean()) for t in losses]}

    def memory(self) -> dict[str, Any]:
        """The peak of tensor bytes over two steps, and the bytes held between steps."""
        if not self._is_cuda:
            return {}
        self._synchronize()
        between = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self._counted(2)
        self._synchronize()
        return {"peak_bytes": torch.cuda.max_memory_allocated(), "between_bytes": between, "reserved_bytes": torch.cuda.memory_reserved()}

    def waits(self) -> dict[str, Any]:
        """How often torch synchronises in a step, and the first place that it reports."""
        if not self._is_cuda:
            return {}
        self._synchronize()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                self._counted(_WATCHED_STEPS)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        # skips the notice that this mode is a prototype, which mentions synchronizing operations too
        found = [w for w in caught if "called a synchronizing" in str(w.message)]
        where = f"{found[0].filename}:{found[0].lineno}" if found else ""
        return {"waits": len(found) / _WATCHED_STEPS, "waits_at": where}

    def times(self, warm: int, timed: int, releases: bool) -> dict[str, Any]:
        """Seconds of each of ``timed`` consecutive steps, from one step's end on the device to the next one's."""
        self._counted(warm)
        marks = [self._mark()]
        for _ in range(timed):
            self._counted(1)
            marks.append(self._mark())
        self._synchronize()
        seconds = [self._between(a, b) for a, b in pairwise(marks)]
        if releases and self._is_cuda:
            torch.cuda.empty_cache()
        return {"seconds": seconds}

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, a: Any, b: Any) -> float:
        return a.elapsed_time(b) / 1e3 if self._is_cuda else b - a

    def profile(self) -> dict[str, Any]:
        """A step by kernel families; the trace is written to the folder."""
        if not self._is_cuda:
            return {}
        self._counted(1)
        return profile.profiled(lambda: self._counted(1), self._folder / f"{self.name}.trace.json.gz")

    def graphs(self) -> dict[str, Any]:
        """How often Dynamo compiled each function in all steps so far, and the graph breaks; for replaced calls, the backends used."""
        found = {"steps": self._steps, "graphs": self._graphs.get("forward", 0), "compiled": dict(self._graphs), "breaks": self._breaks}
        return found | (vars(anyattn.replaced()) if self.name == REPLACED else {})  # type: ignore[attr-defined]
