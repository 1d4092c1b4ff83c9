"""The GPU benchmark's backward, decoding, memory and compiling ahead, without a GPU: small shapes on the CPU, processes that pretend."""

from __future__ import annotations

import importlib
import json
import math
import os
import textwrap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from anyattn.testing.harness import decode, peers
from anyattn.testing.harness.case import LARGEST_DIFFERENCE, OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.judge import Judge, difference
from anyattn.testing.harness.peers import PEERS, PRODUCT_SIZE, Unavailable
from anyattn.testing.harness.runner import run_case
from anyattn.testing.harness.timing import Limits
from benchmarks import report
from benchmarks.bars import Found, geometric_mean, versus
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import ahead, bars_backward, bars_triton, estimate, memory, probes
from benchmarks.gpu.ahead import Done, Job, compile_ahead, jobs_of
from benchmarks.gpu.bars import BARS
from benchmarks.gpu.cases import BACKWARD, BESIDE_A_PRODUCT, CASES, DECODE, FA2, GRADIENTS, chosen
from benchmarks.store import State, Store, is_done
from tests.support.limits import HANG
from tests.support.processes import python

LIMITS = Limits(rounds=2, seconds=math.inf, least=2)
HERE = ("anyattn", "splits-", "copy", "fa2")  # contestants that need no GPU


class Clock:
    def times(self, call: Any, limits: Limits) -> tuple[int, float]:
        call()
        return 1, 0.0

    def sample(self, call: Any, times: int, head_start: float) -> float:
        return 1.0


CLOCK = Clock()


def small(case: Case, backend: str | None = None) -> Case:
    ratio = case.shape.heads_q // case.shape.heads_kv
    shape = Shape(2, 2 * ratio, 2, 1, 128, 16) if case.kind == "decode" else Shape(2, 2 * ratio, 2, 48, 48, 16)
    return replace(case, shape=shape, backend=backend, peers=tuple(p for p in case.peers if p.startswith(HERE)))


def ratios(case: str, seconds: dict[str, float]) -> Found:
    record = Record(case, "", "", "", "", "", {name: Timing((s,) * 3) for name, s in seconds.items()})
    return Found({case: record}, {})


def bar(name: str) -> Any:
    (found,) = [b for b in bars_triton.BARS if b.name.startswith(name)]
    return found


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


def test_layouts_have_the_same_gradient_of_the_output() -> None:
    inputs = Inputs(replace(small(BACKWARD[0]), kind="flash"), "cpu")
    plain = inputs.gradient("bshd")
    assert torch.equal(inputs.gradient("bhsd").transpose(1, 2), plain) and inputs.gradient("bhsd").is_contiguous()
    assert torch.equal(inputs.gradient("packed").view(plain.shape), plain)
    assert all(t.requires_grad and t.is_leaf for layout in ("bshd", "bhsd", "packed") for t in inputs.leaves(layout))
    assert not any(t.requires_grad for t in Inputs(replace(small(BACKWARD[0]), is_backward=False), "cpu").bhsd)


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


def test_pages_hold_the_cache_in_another_order() -> None:
    inputs = Inputs(small(DECODE[0]), "cpu")
    k, v, table = decode.pages(inputs, 16)
    assert table.shape == (2, 8) and table.flatten().tolist() != list(range(16)) and sorted(table.flatten().tolist()) == list(range(16))
    assert torch.equal(k[table.long()].view(inputs.bshd[1].shape), inputs.bshd[1])
    assert torch.equal(v[table.long()].view(inputs.bshd[2].shape), inputs.bshd[2])


def test_copying_moves_as_many_bytes_as_decoding_reads() -> None:
    inputs = Inputs(small(DECODE[0]), "cpu")
    target = decode.copy(inputs)()
    keys, values = inputs.bshd[1:]
    assert torch.equal(target, keys) and 2 * target.nbytes == keys.nbytes + values.nbytes == inputs.case.bytes
    assert DECODE[2].bytes == 131_072 * 8 * 128 * 2 * 2


def test_a_plan_with_torch_in_it_is_not_timed_on_long_cases() -> None:
    case = replace(small(BACKWARD[0]), shape=Shape.square(4112, 1, 16), peers=())
    record = run_case(case, LIMITS, "cpu", CLOCK)
    assert not record.timings and "its plan is torch" in record.unavailable[OURS]


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_the_triton_backend_takes_the_cases_that_insist_on_it() -> None:
    """By its interpreter, which is chosen when Triton is imported: in a process of its own."""
    program = """
        from dataclasses import replace
        from benchmarks.gpu.memory import FUNCTIONS, long_documents
        from tests.benchmarks.test_gpu_passes import CASES, CLOCK, Meter, run_case, small
        from tests.benchmarks.test_gpu_passes import Limits
        from tests.support.interpreter import mend
        mend()
        wanted = ("variants/softcap/", "backward/causal/", "gradients/head_bias/", "fa2-backward/full/d64/2048", "decode/b1-")
        for case in CASES:
            if case.name.startswith(wanted):
                peers = ("anyattn-triton",) if case.group == "variants" else ("anyattn-paged-64",) if case.group == "decode" else ()
                record = run_case(replace(small(case, case.backend), peers=peers), Limits(1, 1, 1), "cpu", CLOCK)
                assert not record.unavailable and set(record.timings) == {"anyattn", *peers}, (case.name, record.unavailable)
                print(case.name, record.extra["backend"])
        sums = [long_documents(name, Meter(), "cpu", "triton", tokens=40, heads=1)["sums"] for name in FUNCTIONS]
        assert all(abs(a / b - 1) < 1e-2 for a, b in zip(*sums)), sums
    """
    done = python("-c", textwrap.dedent(program), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-3000:]
    backends = dict(line.split(maxsplit=1) for line in done.stdout.splitlines())
    assert len(backends) == 5 and all("triton" in backend for name, backend in backends.items() if not name.startswith("variants"))


# ---- bars


def test_bars_of_the_triton_backend_read_the_right_contestants() -> None:
    name = "variants/t5_bias/d128/8192"
    found = ratios(name, {OURS: 1.0, "anyattn-triton": 2.0, "flex-triton": 3.0, "flex-flash": 0.1})
    assert bar("Triton forward, T5 bias").measure(found) == 1.5
    assert bar("Triton forward vs flex TRITON, worst").note(found) == f"{name}, 1 of 11 cases"
    found = ratios(
        DECODE[1].name, {OURS: 1.0, "copy": 0.9, "anyattn-alibi": 1.2, "anyattn-paged-64": 1.1, "splits-1": 3.0, "splits-8": 0.8}
    )
    assert bar("decode, share of").measure(found) == 0.9
    assert bar("decode with a score mod").measure(found) == pytest.approx(0.75, rel=1e-9)
    paged, chosen_splits = bar("decode, pages of 64"), bar("decode, chosen splits")
    assert paged.measure(found) == pytest.approx(1.1, rel=1e-9) and not paged.passes(1.1) and paged.passes(1.04)
    assert chosen_splits.measure(found) == pytest.approx(1.25, rel=1e-9)
    times = {OURS: 1.0, "anyattn-paged-16": 1.2, "anyattn-paged-16-splits-2": 1.0, "anyattn-paged-16-splits-16": 2.0, "splits-8": 0.5}
    assert bar("decode from pages of 16").measure(ratios(DECODE[1].name, times)) == pytest.approx(1.2, rel=1e-9)
    with pytest.raises(KeyError):
        bar("decode, pages of 16").measure(found)
    found = ratios(GRADIENTS[1].name, {OURS: 3.0, "anyattn-frozen": 2.0, "anyattn-plain": 1.0})
    assert bar("backward with the gradient of a captured (H, S)").measure(found) == pytest.approx(1.5, rel=1e-9)


def test_forward_and_backward_bars_are_over_every_variant_of_the_peers_table() -> None:
    table = {"full", "causal", "sliding_window", "document", "document-causal", "prefix", "sink_window", "alibi", "t5_bias", "softcap"}
    names = {c.name for c in CASES}
    assert {n.split("/")[1] for n in bars_triton._FORWARD if n.startswith("variants")} == table
    assert "gqa/causal/d128/8192" in bars_triton._FORWARD and "backward/causal-gqa/d128/8192" in bars_triton._BACKWARD
    assert {n.split("/")[1].removesuffix("-gqa") for n in bars_triton._BACKWARD} == table
    assert {*bars_triton._FORWARD, *bars_triton._BACKWARD} <= names
    seconds = {OURS: 1.0, "flex-triton": 4.0}
    found = Found({**ratios(BACKWARD[0].name, seconds).records, **ratios(BACKWARD[1].name, {**seconds, OURS: 4.0}).records}, {})
    assert bar("Triton backward vs flex TRITON, geometric mean").measure(found) == geometric_mean([4.0, 1.0]) == 2.0


def test_the_rate_over_a_matrix_product_counts_both_kinds_of_operations() -> None:
    (case,) = (c for c in CASES if c.name == BESIDE_A_PRODUCT)
    assert case.is_backward and "matrix-product" in case.peers and not [c for c in CASES if c is not case and "matrix-product" in c.peers]
    found = ratios(case.name, {OURS: 2.0, "matrix-product": 0.5})
    found.records[case.name].flops = 8 * PRODUCT_SIZE**3
    (share,) = (b for b in bars_backward.BARS if "matrix product" in b.name)
    assert share.measure(found) == 1.0 and not share.passes(0.79)
    del found.records[case.name].timings["matrix-product"]
    with pytest.raises(KeyError):
        share.measure(found)


def test_a_matrix_product_is_timed_itself_not_its_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "PRODUCT_SIZE", 4)
    case = replace(BACKWARD[0], shape=Shape.square(8, 1, 16))
    with pytest.raises(Unavailable, match="does not run on cpu"):
        PEERS["matrix-product"].entry("matrix-product", Inputs(replace(case, device="cpu")))
    peer = replace(PEERS["matrix-product"], devices=("cpu",))
    call, _ = peer.entry("matrix-product", Inputs(replace(case, device="cpu")))
    assert call().shape == (4, 4) and call().dtype == torch.bfloat16


def test_a_contestant_of_ours_that_differs_clears_no_bar() -> None:
    found = ratios(DECODE[0].name, {OURS: 1.0, "anyattn-paged-16": 0.5})
    assert versus(found, DECODE[0].name, [OURS], "anyattn-paged-16") == 2.0
    found.records[DECODE[0].name].difference["anyattn-paged-16"] = 0.3
    with pytest.raises(KeyError):
        versus(found, DECODE[0].name, [OURS], "anyattn-paged-16")


def test_bars_are_printed_in_few_characters() -> None:
    lines = report.bar_lines(ratios("variants/t5_bias/d128/8192", {OURS: 1.0, "anyattn-triton": 2.0, "flex-triton": 3.0}), BARS)
    assert "reached Triton forward, T5 bias, vs flex TRITON: 1.5 x, wanted ≥ 1.3 x" in lines
    assert lines[-1] == f"bars: {len(lines) - 1} reached, 0 short, {len(BARS) - len(lines) + 1} without figures"
    lines = report.bar_lines(ratios(DECODE[0].name, {OURS: 1.0, "copy": 0.5}), BARS)
    assert lines == [
        f"short   decode, share of the copy bandwidth, worst: 0.5 x ({DECODE[0].name}, 1 of 4 cases), wanted ≥ 0.85 x",
        lines[-1],
    ]
    text = "\n".join(report._table([ratios(DECODE[0].name, {OURS: 1e-3}).records[DECODE[0].name]]))
    assert "GB/s" not in text
    record = ratios(DECODE[0].name, {OURS: 1e-3}).records[DECODE[0].name]
    record.extra["bytes"] = DECODE[0].bytes
    assert "537 GB/s" in report.describe(record)


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
    for name, value in (
        ("synchronize", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 100),
        ("max_memory_allocated", 1000),
    ):
        monkeypatch.setattr(torch.cuda, name, lambda name=name, value=value: calls.append(name) or value)
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda enabled, **options: calls.append(enabled))
    monkeypatch.setattr(torch.cuda.memory, "_snapshot", lambda: {"device_traces": [events, []]})
    meter = memory.CudaMeter()
    meter.start()
    assert meter.stop() == (500, 900)
    assert calls.index("reset_peak_memory_stats") < calls.index("all") < calls.index("max_memory_allocated") and calls[-1] is None


def test_the_memory_probe_goes_on_with_the_other_function(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(name: str, meter: Any) -> dict[str, Any]:
        if name == "flex":
            raise torch.OutOfMemoryError("too much")
        return {"largest": 1.0, "peak": 1.0}

    monkeypatch.setattr(memory, "long_documents", one)
    assert probes._memory() == {"flex_error": "OutOfMemoryError: too much", "varlen_largest": 1.0, "varlen_peak": 1.0}
    monkeypatch.setattr(probes, "_in_process", lambda name, environment, timeout_s: {"caches": environment.get("TRITON_CACHE_DIR")})
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert probes.measure("memory") == {"caches": None}  # finds what was compiled ahead
    assert probes.measure("compilations-triton")["caches"]  # finds nothing


# ---- compiling ahead


def test_jobs_are_ours_together_and_peers_alone() -> None:
    jobs = jobs_of(chosen(CASES, ("variants",), "causal/"))
    names = [job.names for job in jobs if job.case == "variants/causal/d128/8192"]
    assert (OURS, "anyattn-mod", "anyattn-triton") in names and ("flex-triton",) in names and ("fa4",) in names
    assert not {"fa3", "cudnn-fe"} & {name for group in names for name in group}
    every = jobs_of(CASES)
    assert {n for job in every for n in job.names} >= {
        name for name, peer in PEERS.items() if "cuda" in peer.devices and name.startswith(("anyattn", "splits", "flex"))
    }
    assert sum(job.case.startswith("dense/") for job in every) == 3 * 2 * 2  # D, full or causal, ours and FA4: not every length
    assert sum(job.case.startswith("decode/") for job in every) == 4
    assert sum(job.names == ("flex-mask",) for job in every) == 2 * 3 + 2 + 2  # sizes that bars name, other masks, host times


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


def test_compiling_ahead_ends_when_its_time_is_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of the test's own, on which every job takes a second."""
    said: list[str] = []
    now: list[dict] = []
    monkeypatch.setattr(ahead, "time", SimpleNamespace(monotonic=lambda: float(len(now))))
    monkeypatch.setattr(ahead.Child, "ask", lambda self, job, seconds: now.append(job) or {})
    jobs = [Job("slow", ("fa4",))] * 9
    done = compile_ahead(jobs, 1, 0.5, 5, tmp_path / "log", said.append, ("-c", textwrap.dedent(PRETENDER)))
    assert len(done) == 1 and "8 left to the run itself" in said[0]


def test_a_process_that_compiles_answers_for_a_case() -> None:
    case = replace(small(BACKWARD[1]), peers=("anyattn-auto", "fa3"))
    failed = ahead.answer(Job(case.name, case.contestants), {case.name: case}, "cpu")
    assert set(failed) == {"fa3"} and "cannot be imported" in failed["fa3"]


def test_its_answers_are_told_apart_from_what_compilers_print(tmp_path: Path) -> None:
    """The real process, asked for a case that it does not know."""
    done: list[Done] = compile_ahead([Job("no such case", ("fa4",))], 1, HANG, HANG, tmp_path / "log", lambda line: None)
    assert "KeyError" in done[0].failed["fa4"]


# ---- the run


def test_steps_go_from_what_tells_most_and_follow_the_order_asked_for() -> None:
    groups = list(dict.fromkeys(s if isinstance(s, str) else s.group for s in command._steps((), None, None)))
    assert groups[:8] == ["variants", "gqa", "backward", "decode", "fa2", "fa2-backward", "gradients", "memory"]
    assert set(groups) == {*(c.group for c in CASES), *probes.NAMES}
    some = command._steps(("memory", "decode"), None, None)
    assert some[0] == "memory" and [s.group for s in some[1:]] == ["decode"] * 4
    only = command._steps((), "softcap", "triton")
    assert [(s.name.split("/")[0], s.peers) for s in only] == [
        ("variants", ("anyattn-triton", "flex-triton")),
        ("backward", ("flex-triton",)),
        ("variants-backward", ("anyattn-triton", "flex-triton")),
    ]


def test_estimates_shrink_with_what_is_done_and_what_is_compiled() -> None:
    limits, cases = Limits(), chosen(CASES, ("decode", "variants"))
    cold, warm = (sum(estimate.case_seconds(c, limits, compiled) for c in cases) for compiled in (False, True))
    assert warm < cold
    done = Found({c.name: ratios(c.name, dict.fromkeys(c.contestants, 1.0)).records[c.name] for c in DECODE}, {"memory": {}})
    lines = estimate.described([*cases, "memory"], limits, True, done)
    assert any("decode" in line and "0 of  4 cases  ~   0 s" in line for line in lines)
    assert any("variants" in line and "11 of 11 cases" in line for line in lines) and "~   0 s" in lines[-1]
    assert estimate.ahead_seconds(100, 40, 16) < estimate.ahead_seconds(100, 40, 4) and estimate.ahead_seconds(0, 0, 4) == 0


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


@pytest.mark.parametrize("function", memory.FUNCTIONS)
def test_the_gradient_reaches_the_backward_pass_without_a_copy(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many bytes as an output has: what indexing a batch of one entry would cost."""
    from anyattn import autograd

    seen: list[torch.Tensor] = []
    backward = autograd.backward
    monkeypatch.setattr(autograd, "backward", lambda problem, plan, *results: seen.append(results[2]) or backward(problem, plan, *results))
    qkv = tuple(torch.randn(64, 2, 128, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    gradient = torch.randn(64, 2, 128, dtype=torch.bfloat16)
    memory._pass(function, qkv, gradient, lambda b, h, i, j: i >= j, [30, 34], None)
    assert seen[0].data_ptr() == gradient.data_ptr()
