"""The torch backend's paths on every CPU that there may be, whichever runs the test."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from tests.support.covering import few
from tests.support.flex_calls import judge
from tests.support.machines import CPUS, WITH_BF16, planned_for


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("cpu", CPUS)
def test_every_path_runs_on_every_cpu(cpu: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole spans where the CPU multiplies 16 bits fast, in both passes; streaming everywhere else, and where statistics are asked for."""
    took = []
    for name in ("forward", "unstreamed"):
        module = importlib.import_module(f"anyattn.backends.torch.{name}")
        monkeypatch.setattr(module, "forward", lambda *a, name=name, compute=module.forward: (took.append(name), compute(*a))[1])
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, n, 8, generator=g).to(dtype) for heads, n in ((2, 90), (1, 100), (1, 100)))
    with planned_for(CPUS[cpu]):
        judge(q, k, v, mask=lambda b, h, i, j: (j < 5) | ((j <= i) & (i - j < 20)))
    spans = dtype != torch.float32 and dtype in CPUS[cpu].fast_dtypes
    assert took == ["forward", "unstreamed" if spans else "forward"]


@pytest.mark.parametrize("threads", few([1, 2, 3, 64], 1, 3))
def test_any_number_of_cores(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More threads than there are cores run one after the other: the same products in other pieces. Compiled loops need the number for the
    threads' memory (``test_compiled_forward`` compares their bits)."""
    before = torch.get_num_threads()
    monkeypatch.setenv("ANYATTN_COMPILED_LOOPS", "0")
    monkeypatch.setattr(torch, "get_num_threads", lambda: pytest.fail("how much is computed at once hangs on the number of threads"))
    g = torch.Generator().manual_seed(0)
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            q, k, v = (torch.randn(2, heads, n, 16, generator=g).to(dtype) for heads, n in ((4, 300), (2, 310), (2, 310)))
            with planned_for(replace(WITH_BF16, threads=threads)):
                judge(q, k, v, score=lambda s, b, h, i, j: s - 0.05 * (i - j), mask=lambda b, h, i, j: (j <= i + 10) & (i - j < 90))
    finally:
        torch.set_num_threads(before)
