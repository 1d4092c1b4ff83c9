"""Probes that need a separate process: peak memory, first calls, import time. Each prints one JSON object.

``python -m benchmarks.probes NAME`` runs one in this process; ``measure(NAME)`` runs it in a fresh one.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil

from benchmarks.process import probed

__all__ = ["PROBES", "measure"]

_MIB = 2**20
_BUSY_COUNTS, _BUSY_ROUNDS, _BUSY_SAMPLE = (0, 1, 2), 7, 0.25  # processes, rounds, least idle seconds of a sample


class Peak:
    """The peak resident set from here on, minus the resident set now."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):  # Linux: resets the high-water mark
            Path("/proc/self/clear_refs").write_text("5")
        self._before = psutil.Process().memory_info().rss

    def mib(self) -> float:
        return (_high_water_bytes() - self._before) / _MIB


def _high_water_bytes() -> int:
    status = Path("/proc/self/status")
    if status.exists():  # not getrusage: its figure includes the peak of the forking process
        found = [line.split() for line in status.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(found[0][1]) * 1024
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # bytes on macOS


def _memory() -> dict[str, Any]:
    """Forward and backward pass of one head, length 65,536, window 512: the peak above the inputs, outputs and gradients included."""
    import torch

    import anyattn

    window = 512

    def mask(b, h, q_idx, kv_idx):
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    def train(seqlen: int) -> tuple[float, float]:
        q, k, v = (torch.randn(1, 1, seqlen, 64, requires_grad=True) for _ in range(3))
        dout = torch.randn(1, 1, seqlen, 64)
        peak, start = Peak(), time.perf_counter()
        block_mask = anyattn.create_block_mask(mask, 1, 1, seqlen, seqlen, device="cpu")
        anyattn.flex_attention(q, k, v, block_mask=block_mask).backward(dout)
        return peak.mib(), time.perf_counter() - start

    train(4096)  # the libraries' own memory: code pages, threads, oneDNN's kernels
    extra, seconds = train(65_536)
    return {"seqlen": 65_536, "peak_extra_mib": extra, "seconds": seconds}


def _long_masks() -> dict[str, Any]:
    """``create_block_mask`` at length 1,048,576: seconds, and peak memory above that before."""
    import torch

    import anyattn
    from anyattn.testing.harness.variants import VARIANTS, Setting

    torch.manual_seed(0)
    found: dict[str, Any] = {"seqlen": 2**20}
    for name in ("causal", "document-causal"):
        small, mask = (VARIANTS["cpu"][name].mods(Setting(seqlen, 1)).mask for seqlen in (4096, 2**20))
        assert small is not None and mask is not None
        anyattn.create_block_mask(small, 1, 1, 4096, 4096, device="cpu")
        peak, start = Peak(), time.perf_counter()
        made = anyattn.create_block_mask(mask, 1, 1, 2**20, 2**20, device="cpu")
        found[name] = {"seconds": time.perf_counter() - start, "peak_extra_mib": peak.mib()}
        del made
    return found


def _first_call() -> dict[str, Any]:
    """The first call with each gallery variant in one process, from plain functions on: mask, trace, plan, result."""
    import torch

    import anyattn
    from anyattn.testing.harness.variants import VARIANTS, Setting
    from benchmarks.cpu.cases import GALLERY

    q, k, v = torch.randn(3, 1, 2, 256, 64)
    start = time.perf_counter()
    anyattn.flex_attention(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: q_idx * 2 > kv_idx)
    found = {"very first": time.perf_counter() - start}
    for name in GALLERY:
        mods = VARIANTS["cpu"][name].mods(Setting(256, 2))
        start = time.perf_counter()
        anyattn.flex_attention(q, k, v, mods.score, mask_mod=mods.mask)
        found[name] = time.perf_counter() - start
    inductor = "torch._inductor.compile_fx" in sys.modules
    return {"seconds": found, "worst": max(list(found.values())[1:]), "very_first": found["very first"], "inductor": inductor}


def _closure() -> dict[str, Any]:
    """A new closure over known code, against the same closure again: extra host time, and whether anything was compiled."""
    import torch

    import anyattn

    def make(width: int, slope: float) -> tuple[Callable, Callable]:
        table = torch.full((2,), slope)

        def mask(b, h, q_idx, kv_idx):
            return (q_idx >= kv_idx) & (q_idx - kv_idx < width)

        def score(score, b, h, q_idx, kv_idx):
            return score - table[h] * (q_idx - kv_idx)

        return mask, score

    q, k, v = torch.randn(3, 1, 2, 64, 16)

    def call(mods: tuple[Callable, Callable]) -> float:
        mask, score = mods
        start = time.perf_counter()
        anyattn.flex_attention(q, k, v, score, mask_mod=mask)
        return time.perf_counter() - start

    old = make(8, 0.5)
    for _ in range(20):
        call(old)
    again, fresh = [], []
    for i in range(200):
        again.append(call(old))
        fresh.append(call(make(9 + i % 50, 0.01 * i)))
    same, new = statistics.median(again), statistics.median(fresh)
    return {"same_closure_ms": same * 1e3, "new_closure_ms": new * 1e3, "extra_ms": (new - same) * 1e3}


def _import_time() -> dict[str, Any]:
    """Importing ``anyattn`` and accessing ``flex_attention``, after torch is imported."""
    import torch  # noqa: F401

    start = time.perf_counter()
    import anyattn

    package = time.perf_counter() - start
    anyattn.flex_attention  # noqa: B018
    return {"package_s": package, "with_flex_attention_s": time.perf_counter() - start}


def _decode_host() -> dict[str, Any]:
    """A causal decode call that appends to caches of two keys, on one thread: microseconds, nearly all of them overhead."""
    import torch

    import anyattn

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for batch in (1, 16):
        q, k, v = (torch.randn(batch, 1, heads, 128) for heads in (32, 8, 8))
        caches = [torch.randn(batch, 64, 8, 128) for _ in range(2)]
        pools = [torch.randn(batch * 4, 16, 8, 128) for _ in range(2)]
        table = torch.randperm(batch * 4).view(batch, 4).to(torch.int32)
        alike, mixed = torch.full((batch,), 1, dtype=torch.int32), (torch.arange(batch) % 3).to(torch.int32)
        for name, given, options in (
            ("contiguous", caches, {"cache_seqlens": alike}),
            ("paged", pools, {"cache_seqlens": alike, "page_table": table}),
            ("of several lengths", caches, {"cache_seqlens": mixed}),
        ):
            times = []
            for _ in range(400):
                start = time.perf_counter()
                anyattn.flash_attn_with_kvcache(q, *given, k=k, v=v, causal=True, **options)
                times.append((time.perf_counter() - start) * 1e6)
            found[f"batch {batch}, {name}"] = statistics.median(times[50:])
    return found


def _decode_step() -> dict[str, Any]:
    """Warm calls of one query row over 512 keys of 64, on one thread: microseconds, and those of SDPA over a slice of the same cache, which
    take turns."""
    import torch

    import anyattn
    from anyattn import masks

    torch.set_num_threads(1)
    keys, found = 512, {}
    attend = torch.nn.functional.scaled_dot_product_attention
    for batch, heads in ((1, 8), (1, 2), (16, 2)):
        q, new = torch.randn(batch, 1, 8, 64), torch.randn(batch, 1, heads, 64)
        k_cache, v_cache = torch.randn(2, batch, keys + 64, heads, 64)
        lengths, table = torch.full((batch,), keys, dtype=torch.int32), torch.arange(batch * 36).view(batch, 36).flip(1).to(torch.int32)
        pools = [torch.randn(batch * 36, 16, heads, 64) for _ in range(2)]
        of_row = anyattn.create_block_mask(masks.causal(keys), None, None, 1, keys + 1, device="cpu")
        for name, window, given, options in (
            ("append", -1, (k_cache, v_cache), {}),
            ("window 128", 128, (k_cache, v_cache), {}),
            ("pages of 16", -1, pools, {"page_table": table}),
        ):

            def ours(window=window, given=given, options=options, q=q, new=new, lengths=lengths):
                anyattn.flash_attn_with_kvcache(
                    q, *given, k=new, v=new, cache_seqlens=lengths, causal=True, window_size=(window, 0), **options
                )

            def sliced(window=window, q=q, new=new, caches=(k_cache, v_cache)):
                for cache in caches:
                    cache[:, keys : keys + 1] = new
                seen = slice(0 if window < 0 else keys - window, keys + 1)
                attend(*(x.transpose(1, 2) for x in (q, *(c[:, seen] for c in caches))), enable_gqa=True)

            found[f"batch {batch}, 8/{heads} heads, {name}"] = _in_turns(ours, sliced)
        k, v = (c[:, : keys + 1].transpose(1, 2).contiguous() for c in (k_cache, v_cache))

        row = q.transpose(1, 2)

        def flex(q=row, k=k, v=v, of_row=of_row):
            anyattn.flex_attention(q, k, v, block_mask=of_row, enable_gqa=True)

        def whole(q=row, k=k, v=v):
            attend(q, k, v, enable_gqa=True)

        found[f"batch {batch}, 8/{heads} heads, flex_attention"] = _in_turns(flex, whole)
    return found


def _in_turns(ours: Callable[[], None], peer: Callable[[], None]) -> dict[str, float]:
    """The median microseconds of both, and their ratio."""
    import torch

    times: tuple[list[float], list[float]] = ([], [])
    with torch.no_grad():
        for _ in range(400):
            for call, spent in zip((ours, peer), times, strict=True):
                start = time.perf_counter()
                call()
                spent.append((time.perf_counter() - start) * 1e6)
    mine, its = (statistics.median(spent[50:]) for spent in times)
    return {"us": mine, "sdpa_us": its, "over_sdpa": mine / its}


def _decode_pages() -> dict[str, Any]:
    """CPU time of a decode call over 8,192 keys of 4 sequences in shuffled pages, relative to the same call without pages: one thread, the
    smallest of 10, which is stable beside other processes too."""
    from dataclasses import replace

    import torch

    from anyattn.testing.harness.case import OURS
    from anyattn.testing.harness.inputs import Inputs
    from anyattn.testing.harness.peers import PEERS
    from benchmarks.cpu.cases import CASES

    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for case in (c for c in CASES if c.kind == "decode"):
        inputs = Inputs(replace(case, shape=replace(case.shape, batch=4)))
        ours = {name: PEERS[name].entry(name, inputs)[0] for name in case.contestants if name == OURS or name.startswith("paged")}
        least = dict.fromkeys(ours, float("inf"))
        for _ in range(10):
            for name, call in ours.items():
                start = time.thread_time()
                call()
                least[name] = min(least[name], time.thread_time() - start)
        found[case.dtype] = {name: time / least[OURS] for name, time in least.items() if name != OURS}
    return found


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Context in which ``count`` other processes of one thread each compute without a pause. They end with it, or with this process."""
    work = f"import os\nwhile os.getppid() == {os.getpid()}:\n for _ in range(10**6): pass"
    started: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(count):
            started.append(subprocess.Popen([sys.executable, "-S", "-c", work]))
        time.sleep(0.3 if count else 0.0)  # until they compute
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _busy() -> dict[str, Any]:
    """Calls beside busy processes and without, in turns: each contestant's time over its own idle one, and anyattn's such factor over
    SDPA's. Raises ``RuntimeError`` if a result is wrong, or if others were busy during most of the idle ones."""
    from anyattn.testing.harness.case import OURS
    from anyattn.testing.harness.runner import prepared
    from anyattn.testing.harness.timing import CpuClock, Limits, Others
    from benchmarks.cpu.cases import BUSY

    found: dict[str, Any] = {}
    clock, others = CpuClock(), Others()
    for case in BUSY:
        run = prepared(case, case.contestants, case.device, {}, is_judged=True)
        wrong = [name for name in case.contestants if not run.record.budget.get(name, float("inf")) <= 1.0]
        if wrong:
            raise RuntimeError(f"{case.name}: no result within its budget by {', '.join(wrong)} {run.record.unavailable or ''}")
        plans = {name: clock.times(call, Limits(sample=_BUSY_SAMPLE)) for name, call in run.calls.items()}
        seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
        are_quiet = []
        for _ in range(_BUSY_ROUNDS):
            for count in _BUSY_COUNTS:
                with _busy_processes(count):
                    others.cores()
                    for name, call in run.calls.items():
                        seconds[name, count].append(clock.sample(call, *plans[name]))
                    are_quiet += [others.are_quiet()] if not count else []
        if sum(are_quiet) * 2 < len(are_quiet):
            raise RuntimeError(f"{case.name}: other processes were busy")
        for count in _BUSY_COUNTS[1:]:
            factors = {
                name: statistics.median(b / idle for b, idle in zip(seconds[name, count], seconds[name, 0], strict=True))
                for name in run.calls
            }
            found[f"{case.name}, {count} busy"] = {**factors, "over_sdpa": factors[OURS] / factors[case.peers[0]]}
    return found


def _ragged_lists() -> dict[str, Any]:
    """Block lists of 1,000 sequences of 1 to 4,096 tokens, forward and transposed, by mask: seconds of the third run."""
    import torch

    import anyattn
    from anyattn import masks

    lengths = torch.randint(1, 4097, (1000,), generator=torch.Generator().manual_seed(0))
    ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    found: dict[str, Any] = {"tokens": int(ends[-1])}
    for mask in (masks.causal(), masks.sink_window(4, 512), masks.dilated(64, 4)):
        for _ in range(3):
            start = time.perf_counter()
            lists = anyattn.compute_varlen_block_sparsity(128, 128, None, mask, cu_seqlens_q=ends, cu_seqlens_k=ends)
            made = time.perf_counter()
            lists.transposed()
            found[mask.name] = {"lists_s": made - start, "transposed_s": time.perf_counter() - made}
    return found


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "memory": _memory,
    "long-masks": _long_masks,
    "first-call": _first_call,
    "closure": _closure,
    "import": _import_time,
    "decode-host": _decode_host,
    "decode-step": _decode_step,
    "decode-pages": _decode_pages,
    "ragged-lists": _ragged_lists,
    "busy": _busy,
}


def measure(name: str, timeout_s: float = 600) -> dict[str, Any]:
    """The probe's figures from a fresh process, or ``{"error": reason}``."""
    return probed("benchmarks.probes", name, timeout_s)


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
