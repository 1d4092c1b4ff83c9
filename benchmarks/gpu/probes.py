"""Probes that need a separate process: memory, first calls with a cold and a warm disk cache, numbers of compilations, compiled calls.

``python -m benchmarks.gpu.probes NAME`` prints one JSON object; ``measure(NAME)`` runs that in fresh processes. The compiled training
step has a process for each contestant (``benchmarks.gpu.gpt``).
"""

from __future__ import annotations

import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.process import CACHE_FOLDERS, probed

__all__ = ["LONGEST", "NAMES", "PROBES", "measure"]

_SHAPES = 1000


def _first_call() -> dict[str, Any]:
    """The first call of a process with a library mask, then the first with a library score mod, after CUDA and torch are initialised."""
    import torch

    import anyattn

    q, k, v = torch.randn(3, 1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16)
    (q @ q.transpose(2, 3)).sum().item()  # excludes CUDA's context and cuBLAS
    found: dict[str, Any] = {}
    alibi = anyattn.scores.alibi(anyattn.scores.alibi_slopes(8).cuda())
    for name, score in (("causal", None), ("alibi", alibi)):
        start = time.perf_counter()
        anyattn.flex_attention(q, k, v, score, mask_mod=anyattn.masks.causal())
        torch.cuda.synchronize()
        found[name] = time.perf_counter() - start
    found["backend"] = anyattn.explain(q, k, v, mask_mod=anyattn.masks.causal()).plan.backend
    return found


def _training_call() -> dict[str, Any]:
    """The first backward call of a process, and the host time of a call and its backward pass once everything is cached; the same for
    torch's SDPA, as the share of autograd itself."""
    import torch

    import anyattn

    q, k, v = (t.requires_grad_() for t in torch.randn(3, 1, 8, 1024, 128, device="cuda", dtype=torch.bfloat16).unbind())
    scores = q @ k.transpose(2, 3)
    torch.autograd.grad(scores, (q, k), torch.ones_like(scores))  # excludes context, cuBLAS, autograd's thread, imports
    gradient, mask, found = torch.randn_like(q), anyattn.masks.causal(), dict[str, Any]()
    calls: dict[str, Callable[[], Any]] = {
        "host_us": lambda: anyattn.flex_attention(q, k, v, mask_mod=mask),
        "host_us_sdpa": lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True),
    }
    out = calls["host_us"]()
    torch.cuda.synchronize()
    start = time.perf_counter()
    torch.autograd.grad(out, (q, k, v), gradient)
    torch.cuda.synchronize()
    found["causal"] = time.perf_counter() - start
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(40):
        for name, call in calls.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(10):  # fewer than a queue holds
                torch.autograd.grad(call(), (q, k, v), gradient)
            times[name].append((time.perf_counter() - start) / 10)
    found |= {name: statistics.median(seconds[10:]) * 1e6 for name, seconds in times.items()}
    found["backend"] = anyattn.explain(q, k, v, mask_mod=mask).plan.backend
    return found


def _hopper_kernels() -> Callable[[], int]:
    """The number of kernels compiled so far in this process: ``launch.compilations``, a number or a function, else the loaded kernels."""
    from anyattn.backends.hopper.compile import launch

    counter = getattr(launch, "compilations", None)
    if counter is None:
        return lambda: len(launch._kernels)
    return counter if callable(counter) else lambda: int(launch.compilations)


def _triton_kernels() -> Callable[[], int]:
    """The number of kernels that Triton compiles, or loads from its disk cache, from now on."""
    import triton

    compiled: list[Any] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **about: compiled.append(about["repr"])
    return lambda: len(compiled)


def _compilations(counter: Callable[[], Callable[[], int]], backend: str | None) -> dict[str, Any]:
    """The number of kernels for 1,000 random shapes with one mod, and how many more for the same code with other captured values."""
    import torch

    import anyattn

    def windowed(width: int) -> Callable:
        return lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx < width)

    count, pick, mask = counter(), random.Random(0), windowed(100)
    for _ in range(_SHAPES):
        ratio, heads_kv = pick.choice((1, 2, 4)), pick.randint(1, 3)
        sizes = [(heads_kv * ratio, pick.randint(1, 400)), *[(heads_kv, pick.randint(1, 400))] * 2]
        batch = pick.randint(1, 3)
        q, k, v = (torch.randn(batch, h, s, 128, device="cuda", dtype=torch.bfloat16) for h, s in sizes)
        anyattn.flex_attention(q, k, v, mask_mod=mask, enable_gqa=ratio > 1, backend=backend)
    torch.cuda.synchronize()
    after_shapes = count()
    anyattn.flex_attention(q, k, v, mask_mod=windowed(37), enable_gqa=True, backend=backend)
    torch.cuda.synchronize()
    used = anyattn.explain(q, k, v, mask_mod=mask, enable_gqa=True, backend=backend).plan.backend
    if used == "torch":  # compiles nothing: no figures for the bars
        return {"backend": used, "shapes": _SHAPES}
    return {"random_shapes": after_shapes, "new_closure": count() - after_shapes, "shapes": _SHAPES, "backend": used}


def _memory() -> dict[str, Any]:
    """The memory of 60,000 tokens by each function; for a function that fails the error replaces the figures."""
    from benchmarks.gpu.memory import FUNCTIONS, CudaMeter, long_documents

    found: dict[str, Any] = {}
    for name in FUNCTIONS:
        try:
            found.update({f"{name}_{key}": value for key, value in long_documents(name, CudaMeter()).items()})
        except Exception as error:
            found[f"{name}_error"] = f"{type(error).__name__}: {str(error)[:300]}"
    return found


def _compiled_call() -> dict[str, Any]:
    from benchmarks.gpu.compiled_call import host_times

    return host_times()


def _serving_call() -> dict[str, Any]:
    from benchmarks.host_time import serving_times

    return serving_times()


def _appending() -> dict[str, Any]:
    from benchmarks.appending import appending_times

    return appending_times()


PROBES: dict[str, Callable[[], dict[str, Any]]] = {
    "memory": _memory,
    "first-call": _first_call,
    "training-call": _training_call,
    "compilations": lambda: _compilations(_hopper_kernels, None),
    "compilations-triton": lambda: _compilations(_triton_kernels, "triton"),
    "compiled-call": _compiled_call,
    "serving-call": _serving_call,
    "appending": _appending,
}
_GPT = ("gpt-8k", "gpt-32k")
NAMES = (*PROBES, *_GPT)
LONGEST = {**dict.fromkeys(PROBES, 120.0), **dict.fromkeys(_GPT, 240.0)}  # seconds


def measure(name: str, timeout_s: float = 120, out: Path = Path("bench-out/gpu"), who: str | None = None) -> dict[str, Any]:
    """A probe's figures, or ``{"error": reason}``. out, who: as on the command line of the training step."""
    if name in _GPT:
        from benchmarks.gpu.gpt.__main__ import run
        from benchmarks.gpu.gpt.measure import Limits

        return run(name.removeprefix("gpt-"), out.with_name(f"{out.name}.{name}"), who, Limits(seconds=timeout_s))
    if name == "memory":
        return _in_process(name, dict(os.environ), timeout_s)
    with tempfile.TemporaryDirectory() as folder:
        environment = {**os.environ, **dict.fromkeys(CACHE_FOLDERS, folder)}  # empty at first, and separate from all other caches
        if name not in ("first-call", "training-call"):
            return _in_process(name, environment, timeout_s)
        cold, warm = (_in_process(name, environment, timeout_s) for _ in range(2))
    found: dict[str, Any] = {"cold": cold, "warm": warm}
    for key, figures in (("cold_s", cold), ("warm_s", warm)):
        if figures.get("backend", "torch") != "torch":  # torch operations compile nothing: no figure for the bars
            found[key] = figures["causal"]
    return found | {key: warm[key] for key in ("host_us", "host_us_sdpa") if key in warm}


def _in_process(name: str, environment: dict[str, str], timeout_s: float) -> dict[str, Any]:
    return probed("benchmarks.gpu.probes", name, timeout_s, environment)


if __name__ == "__main__":
    print(json.dumps(PROBES[sys.argv[1]]()))
