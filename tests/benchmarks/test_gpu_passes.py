"""The GPU benchmark's backward, decoding, memory and compiling ahead, without a GPU: small shapes on the CPU, processes that pretend."""

from __future__ import annotations

import importlib
import json
import math
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from anyattn.testing.harness.case import LARGEST_DIFFERENCE, OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.judge import Judge, difference
from anyattn.testing.harness.peers import PEERS
from anyattn.testing.harness.runner import run_case
from anyattn.testing.harness.timing import Limits
from benchmarks.bars import Found, versus
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import ahead, memory
from benchmarks.gpu.ahead import Job, compile_ahead
from benchmarks.gpu.cases import BACKWARD, CASES, DECODE, FA2, GRADIENTS
from benchmarks.store import State, Store, is_done
from tests.benchmarks.test_gpu_benchmarks import CLOCK
from tests.support.limits import HANG

LIMITS = Limits(rounds=2, seconds=math.inf, least=2)
HERE = ("anyattn", "splits-", "copy", "fa2")  # contestants that need no GPU


def small(case: Case) -> Case:
    ratio = case.shape.heads_q // case.shape.heads_kv
    shape = Shape(2, 2 * ratio, 2, 1, 128, 16) if case.kind == "decode" else Shape(2, 2 * ratio, 2, 48, 48, 16)
    return replace(case, shape=shape, backend=None, peers=tuple(p for p in case.peers if p.startswith(HERE)))


def ratios(case: str, seconds: dict[str, float]) -> Found:
    record = Record(case, "", "", "", "", "", {name: Timing((s,) * 3) for name, s in seconds.items()})
    return Found({case: record}, {})


# ---- what is computed


@pytest.mark.parametrize("case", [*BACKWARD, *GRADIENTS, FA2[0], FA2[-1], *DECODE[2:]], ids=lambda case: case.name)
def test_every_contestant_of_ours_computes_the_case(case: Case) -> None:
    insists = "anyattn-triton"
    record = run_case(small(case), LIMITS, "cpu", CLOCK)
    wanted = {OURS, *(p for p in small(case).peers if p != insists)}
    assert set(record.timings) == wanted, record.unavailable
    assert set(record.difference) == {name for name in wanted if not PEERS[name].is_other_job}
    assert all(d <= LARGEST_DIFFERENCE for d in record.difference.values()), record.difference
    assert set(record.budget) == {OURS} and record.budget[OURS] <= 1.0 and "not_judged" not in record.extra


def test_a_long_backward_pass_on_a_gpu_is_not_judged_and_says_so() -> None:
    assert "67,108,864 pairs are gigabytes" in Judge(Long(BACKWARD[0])).cannot
    assert not Judge(Long(small(BACKWARD[0]))).cannot


class Long:
    """Inputs of which only the case is looked at."""

    def __init__(self, case: Case):
        self.case = case


def test_a_backward_pass_gives_the_gradients_of_q_k_v_and_of_what_is_learnt() -> None:
    case = small(next(c for c in GRADIENTS if c.variant == "head_bias"))
    inputs = Inputs(case, "cpu")
    with torch.no_grad():
        call, layout = PEERS[OURS].entry(OURS, inputs)
        found, again = call(), call()
        frozen = PEERS["anyattn-frozen"].entry("anyattn-frozen", inputs)[0]()
    (bias,) = inputs.captured
    assert layout == "bhsd" and [g.shape for g in found] == [*(t.shape for t in inputs.bhsd), bias.shape]
    assert difference(tuple(again[:3]), tuple(found[:3])) == 0 and float(found[3].abs().max()) > 0
    assert frozen[3] is None and difference(tuple(frozen[:3]), tuple(found[:3])) < 1e-2
    wrong = (found[0], found[1] * 1.5, found[2])
    assert difference(wrong, tuple(found[:3])) == pytest.approx(0.5, rel=0.02)  # the worst of the three


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize(
    "name", ["backward/t5_bias/d128/8192", "backward/causal-gqa/d128/8192", "gradients/pair_bias/d128/4096", "gqa/causal/d128/8192"]
)
def test_flex_computes_the_same(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uncompiled, for there is no compiled backward on a CPU (and against torch's advice); with kernel_options, as it is on a GPU."""
    monkeypatch.setattr(torch, "compile", lambda fn, **options: fn)
    monkeypatch.setattr(importlib.import_module("torch.nn.attention.flex_attention"), "_validate_device", lambda *tensors: None)
    (case,) = [c for c in CASES if c.name == name]
    config: Any = importlib.import_module("torch._functorch.config")
    with config.patch(donated_buffer=True):
        record = run_case(replace(small(case), peers=("flex-triton",)), LIMITS, "cpu", CLOCK)
        assert not config.donated_buffer  # else its backward pass runs only once
    assert set(record.timings) == {OURS, "flex-triton"}, record.unavailable
    assert record.difference["flex-triton"] <= LARGEST_DIFFERENCE


# ---- bars


def test_a_contestant_of_ours_that_differs_clears_no_bar() -> None:
    found = ratios(DECODE[0].name, {OURS: 1.0, "anyattn-paged-16": 0.5})
    assert versus(found, DECODE[0].name, [OURS], "anyattn-paged-16") == 2.0
    found.records[DECODE[0].name].difference["anyattn-paged-16"] = 0.3
    with pytest.raises(KeyError):
        versus(found, DECODE[0].name, [OURS], "anyattn-paged-16")


# ---- memory


class Meter:
    def start(self) -> None:
        self.started = True

    def stop(self) -> tuple[int, int]:
        return 64 * 2 * 128 * 2, 10_000_000


def test_memory_is_told_in_multiples_of_what_has_to_be_there() -> None:
    meter, found = Meter(), {}
    for name in memory.FUNCTIONS:
        found[name] = memory.long_documents(name, meter, "cpu", None, tokens=64, heads=2)
        assert meter.started and found[name]["largest"] == 1.0
        assert found[name]["peak"] == 10_000_000 / (4 * 64 * 2 * 128 * 2 + 2 * 64 * 2 * 4)
    flex, varlen = (found[name]["sums"] for name in ("flex", "varlen"))
    assert len(flex) == 4 and all(abs(a / b - 1) < 1e-2 for a, b in zip(flex, varlen, strict=True))


def test_the_allocators_record_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    events = [{"action": "alloc", "size": 300}, {"action": "free_completed", "size": 900}, {"action": "alloc", "size": 500}]
    calls: list[Any] = []
    for name, value in {
        "synchronize": None, "reset_peak_memory_stats": None, "memory_allocated": 100, "max_memory_allocated": 1000
    }.items():  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: calls.append(name) or value)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **options: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [events, []]})
    meter = memory.CudaMeter()
    meter.start()
    assert meter.stop() == (500, 900)  # the largest allocation, and the peak above what was there
    assert calls.index("reset_peak_memory_stats") < calls.index("all") < calls.index("max_memory_allocated") and calls[-1] is None


# ---- compiling ahead


PRETENDER = f"""
    import json, os, sys, time
    print("a compiler says hello", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        if job["case"] == "dies":
            os._exit(3)
        if job["case"] == "hangs":
            time.sleep({HANG})
        print("@ahead " + json.dumps({{"fa4": "no"}} if job["case"] == "fails" else {{}}), flush=True)
"""


def test_what_dies_or_hangs_takes_only_its_own_job_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask = ahead.Child.ask
    monkeypatch.setattr(ahead.Child, "ask", lambda self, job, seconds: ask(self, job, 2 if job["case"] == "hangs" else HANG))
    jobs = [Job(case, ("fa4",)) for case in ("good", "dies", "fails", "hangs", "good", "good")]
    said: list[str] = []
    pretender = ("-c", textwrap.dedent(PRETENDER))
    done = compile_ahead(jobs, 2, HANG, HANG, tmp_path / "log", said.append, pretender)
    failed = {d.job.case: d.failed for d in done}
    assert len(done) == 6 and failed["good"] == {} and failed["fails"] == {"fa4": "no"}
    assert "exit code 3" in failed["dies"]["fa4"] and "exit code -9" in failed["hangs"]["fa4"]
    assert said[0].startswith("compiled ahead: 6 of 6 jobs") and any(
        "fa4 of dies: its process ended with exit code 3" in line for line in said
    )


# ---- the run


def test_a_case_is_done_when_every_contestant_was_tried() -> None:
    case, seconds = BACKWARD[0], {OURS: 1.0, "flex-triton": 1.0}
    found = ratios(case.name, seconds)
    assert not is_done(found, case) and is_done(found, replace(case, peers=("flex-triton",))) and not is_done(found, BACKWARD[1])
    found.records[case.name].unavailable["anyattn-auto"] = "it hung"
    assert is_done(found, case) and not is_done(found, "memory")
    refused = Record(case.name, "", "", "", "", "", refused="broken")
    assert is_done(Found({case.name: refused}, {}), case)


def test_a_run_compiles_what_is_left_then_times_and_ends_with_the_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    monkeypatch.setattr(command.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(command, "_supervise", lambda store, arguments, deadline: said.append("timed"))
    monkeypatch.setattr(ahead, "compile_ahead", lambda jobs, *rest: said.append([(job.case, job.names) for job in jobs]))
    for name in ahead.CACHES:
        monkeypatch.setenv(name, "0")  # what the user says stands
    out, name = tmp_path / "gpu", "backward/softcap/d128/8192"
    store = Store(out)
    store.save(
        {"date": "", "commit": "", "command": "", "gpu": "", "versions": {}},
        ratios(name, {OURS: 1.0, "anyattn-auto": 1.0, "flex-triton": 1.5}),
    )
    store.save_state(State(banned={"backward/alibi/d128/8192": {"flex-triton": "it hung"}}))
    arguments = ["--group", "backward", "--only", "softcap|alibi|prefix", "--keep", "--out", str(out), "--jobs", "3"]
    done = CliRunner().invoke(command.main, arguments)
    assert done.exit_code == 0, done.output
    jobs, timed = said
    assert timed == "timed" and {case for case, _ in jobs} == {"backward/alibi/d128/8192", "backward/prefix/d128/8192"}
    assert ("backward/alibi/d128/8192", ("flex-triton",)) not in jobs and ("backward/prefix/d128/8192", ("flex-triton",)) in jobs
    assert "estimated: compiling 3 jobs ahead" in done.output and "2 of  3 cases" in done.output
    assert "reached Triton backward, softcap, vs flex TRITON: 1.5 x" in done.output and done.output.rstrip().endswith("without figures")
    assert all(os.environ[name] == "0" for name in ahead.CACHES)
    json.loads((tmp_path / "gpu.json").read_text())
