"""The GPU benchmark without a GPU: cases, FLOPs, rounds, what is banned and resumed, bars and tables. A fake clock stands for CUDA's."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from anyattn.testing.harness import peers, runner, timing
from anyattn.testing.harness.case import LARGEST_DIFFERENCE, OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs, intervals
from anyattn.testing.harness.judge import difference
from anyattn.testing.harness.peers import PEERS, PRODUCT_SIZE, Peer
from anyattn.testing.harness.runner import run_case
from anyattn.testing.harness.timing import Limits, measure, shuffled_rounds
from anyattn.testing.harness.variants import VARIANTS as ALL_VARIANTS
from anyattn.testing.harness.variants import Setting, document_lengths
from benchmarks import process, report
from benchmarks.bars import Found, versus
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bars, memory, probes
from benchmarks.gpu.cases import BESIDE_A_PRODUCT, CASES, DENSE, SCORE_VARIANTS, chosen, gpu_case
from benchmarks.store import State, Store
from tests.support.limits import HANG

VARIANTS = ALL_VARIANTS["cuda"]
SMALL = Shape.square(96, heads=2, head_dim=16, batch=2)
LIMITS = Limits(rounds=6, seconds=math.inf, least=3)
MACHINE: dict[str, Any] = {"date": "today", "commit": "abc", "command": "it", "gpu": "a GPU", "versions": {"torch": "2"}}


def test_the_device_is_timed_with_the_calls_queued_and_the_cache_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    host = [0.0]  # seconds

    def slow() -> None:
        host[0] += 5e-3

    class Event:
        def __init__(self, enable_timing: bool):
            self.at = 0

        def record(self) -> None:
            done.append("event")
            self.at = len(done)

        def synchronize(self) -> None:
            done.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 10.0 * (other.at - self.at - 1)  # ms: 10 a call

    class Cache:
        def zero_(self) -> None:
            done.append("flush")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("idle"))
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: done.append("sleep"), raising=False)
    monkeypatch.setattr(timing.torch, "empty", lambda *a, **k: Cache())
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: host[0]))
    clock = timing.CudaClock()
    assert round(clock.sample(lambda: done.append("call"), 3, 1e-3), 9) == 0.01
    assert done == ["idle", "sleep", "flush", "event", "call", "call", "call", "event", "wait"]
    times, head_start = clock.times(lambda: done.append("call"), Limits(sample=0.05))
    assert times == 5 and 2e-4 <= head_start <= 0.02
    times, head_start = clock.times(slow, Limits(sample=10))
    assert 1 <= times <= 2 and head_start <= 0.02  # no more calls than the host can queue while the device waits
    assert timing.CudaClock(has_head_start=False).times(lambda: None, Limits())[1] == 0.0


class FakeClock:
    """Calls, and claims ``seconds[n]`` for the n-th sample."""

    def __init__(self, seconds: list[float] | None = None):
        self.seconds = seconds or [1.0]
        self.samples = 0

    def times(self, call: Any, limits: Limits) -> tuple[int, float]:
        call()
        return 2, 0.0

    def sample(self, call: Any, times: int, head_start: float) -> float:
        for _ in range(times):
            call()
        self.samples += 1
        return self.seconds[(self.samples - 1) % len(self.seconds)]


CLOCK = FakeClock()


def test_cases_are_those_of_the_table() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert len(DENSE) == 3 * 3 * 2 and {"fa3", "fa4", "cudnn"} <= set(DENSE[0].peers)
    for case in DENSE:
        shape = case.shape
        assert shape.batch * shape.seqlen_q == 32_768 and shape.heads_q * shape.head_dim == 2048
    for case in CASES:
        assert case.device == "cuda" and case.variant in VARIANTS, case.name
        assert all("cuda" in PEERS[name].devices for name in case.contestants), case.name
        if case.kind in ("flash", "varlen", "decode"):
            assert VARIANTS[case.variant].native is not None
    assert {c.shape.seqlen_q for c in CASES if c.group == "masks"} == {8192, 32_768, 131_072}


def test_groups_and_patterns_choose_in_the_order_asked_for() -> None:
    assert [c.group for c in chosen(CASES, ("host", "gqa"))] == ["host", "gqa"]
    assert {c.group for c in chosen(CASES, (), "^variants/(alibi|prefix)")} == {"variants"}
    assert len(chosen(CASES, ("dense",), "d64/2048$")) == 2


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_count_each_visible_pair(variant: str) -> None:
    case = gpu_case("t", "flex", variant, Shape.square(80, 2, 16, 3), ())
    mask = VARIANTS[variant].mods(Setting(80, 2)).mask
    seen = int(_seen(mask, 80).sum())
    assert Inputs(case, "cpu").pairs() == seen * 3 * 2
    assert case.flops(seen) == 4 * 16 * seen


def test_documents_fill_the_sequence_and_are_the_same_in_both_forms() -> None:
    lengths = document_lengths(8192)
    assert len(lengths) == 8 and sum(lengths) == 8192 and min(lengths) > 0
    inputs = Inputs(gpu_case("t", "varlen", "document", Shape.square(200, 2, 16, 2), ()), "cpu")
    ends = inputs.cu_seqlens.tolist()
    assert len(ends) == 17 and ends[-1] == 400 and ends[8] == 200
    assert inputs.pairs() == 2 * 2 * sum(n * n for n in document_lengths(200))


@pytest.mark.parametrize("variant", [name for name in VARIANTS if name not in (*SCORE_VARIANTS, "pair_bias", "bucket_bias")])
def test_intervals_say_what_the_mask_says(variant: str) -> None:
    mask = VARIANTS[variant].mods(Setting(300, 1)).mask
    if variant == "sink_window":
        mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & ((kv_idx < 9) | (q_idx - kv_idx <= 40))
    elif variant == "sliding_window":
        mask = lambda b, h, q_idx, kv_idx: (q_idx >= kv_idx) & (q_idx - kv_idx <= 40)
    ends = intervals(mask, 300, 300, "cpu", rows_at_once=70)
    _check_intervals(ends, mask, 300)


def test_intervals_of_ragged_and_empty_rows() -> None:
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx % 3 != 0) & ((q_idx + kv_idx) % (q_idx + 2) < 4)

    ends = intervals(mask, 60, 60, "cpu", rows_at_once=16)
    assert ends.shape[0] > 3
    _check_intervals(ends, mask, 60)


def _seen(mask: Any, seqlen: int) -> torch.Tensor:
    """Which keys each query sees: bool (seqlen, seqlen)."""
    at = torch.arange(seqlen)
    seen = True if mask is None else mask(0, 0, at[:, None], at)
    return torch.as_tensor(seen, dtype=torch.bool).expand(seqlen, seqlen)


def _check_intervals(ends: torch.Tensor, mask: Any, seqlen: int) -> None:
    assert ends.dtype == torch.int32 and ends.shape[0] % 2 == 1 and ends.is_contiguous()
    assert bool((ends.diff(dim=0) >= 0).all()) and int(ends.min()) >= 0 and int(ends.max()) <= seqlen
    visible = _seen(mask, seqlen).tolist()
    for i in range(seqlen):
        row = [0, *ends[:, i].tolist()]
        listed = {j for lo, hi in zip(row[::2], row[1::2]) for j in range(lo, hi)}
        seen = {j for j in range(seqlen) if visible[i][j]}
        assert listed == seen, i


def test_every_round_has_everyone_once_in_changing_order() -> None:
    rounds = list(shuffled_rounds(["a", "b", "c", "d"], 20))
    assert all(sorted(order) == ["a", "b", "c", "d"] for order in rounds)
    assert len({tuple(order) for order in rounds}) > 5
    assert {order[0] for order in rounds} == {"a", "b", "c", "d"}


def test_rounds_stay_aligned_when_a_contestant_drops_out() -> None:
    failures: dict[str, Exception] = {}
    calls = {"good": lambda: None, "late": lambda: late.append(1) or (1 / 0 if len(late) > 6 else None), "bad": lambda: 1 / 0}
    late: list[int] = []
    timings = measure(calls, FakeClock(), LIMITS, lambda name, error: failures.update({name: error}))
    assert set(timings) == {"good"} and len(timings["good"].seconds) == 6
    assert set(failures) == {"bad", "late"} and all(isinstance(e, ZeroDivisionError) for e in failures.values())


def test_rounds_end_when_time_is_up() -> None:
    timings = measure({"a": lambda: None}, FakeClock(), replace(LIMITS, seconds=0), lambda name, error: None)
    assert len(timings["a"].seconds) == LIMITS.least


def test_a_ratio_is_the_median_of_the_ratios_within_rounds() -> None:
    record = _record("x", {OURS: (1.0, 10.0, 1.0), "peer": (2.0, 20.0, 4.0)})
    assert record.ratio("peer") == 2.0  # of the medians: 4
    assert _record("x", {OURS: (1.0, 1.0), "peer": (1.0, 2.0)}).ratio("peer") == 1.5


def _record(name: str, seconds: dict[str, tuple[float, ...]], flops: int = 0, differences: dict[str, float] | None = None) -> Record:
    timings = {who: Timing(times) for who, times in seconds.items()}
    case = next((c for c in CASES if c.name == name), CASES[0])
    return Record(name, case.group, case.kind, case.variant, "", "shape", timings, difference=differences or {}, flops=flops)


@pytest.mark.parametrize(
    ("kind", "variant", "others"),
    [
        ("flash", "causal", ()),
        ("flash", "sliding_window", ()),
        ("varlen", "document-causal", ()),
        ("flex", "document", ("anyattn-mod", "cudnn-fe")),
        ("flex", "softcap", ("anyattn-mod", "anyattn-causal", "fa3")),
        ("flex", "full", ("anyattn-flash", "anyattn-mods", "sdpa")),
    ],
)
def test_a_case_runs_here_and_missing_peers_are_named(kind: str, variant: str, others: tuple[str, ...]) -> None:
    record = run_case(gpu_case("t", kind, variant, SMALL, others), LIMITS, "cpu", CLOCK)
    here = {OURS, *(name for name in others if name.startswith("anyattn") or name == "sdpa")}
    assert set(record.timings) == here and set(record.unavailable) == set(others) - here
    assert record.extra["backend"] == "torch" and "NVIDIA GPU" in record.extra["why_torch"]
    assert all(difference <= LARGEST_DIFFERENCE for difference in record.difference.values())
    assert set(record.budget) == {OURS} and record.budget[OURS] <= 1.0 and "not_judged" not in record.extra
    assert json.loads(json.dumps(record.as_json()))["case"] == record.case


def test_the_functions_agree_with_one_another() -> None:
    """The same documents packed and by a block mask: else two columns of a table would be different jobs."""
    results = []
    for kind in ("varlen", "flex"):
        inputs = Inputs(gpu_case("t", kind, "document-causal", SMALL, ()), "cpu")
        call, layout = PEERS[OURS].entry(OURS, inputs)
        results.append(inputs.comparable(call(), layout))
    assert difference(*results) < 1e-2


def test_mask_cases_compare_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    case = gpu_case("t", "mask", "causal", Shape.square(1024, 1, 64), ("flex-mask",))

    def other(inputs: Inputs) -> peers.Entry:
        wrong = VARIANTS["full"] if how == "wrong" else VARIANTS["causal"]
        mask = wrong.mods(Setting(1024, 1)).mask or (lambda b, h, q_idx, kv_idx: kv_idx >= 0)
        from torch.nn.attention.flex_attention import create_block_mask

        return lambda: create_block_mask(mask, *inputs.grid, device="cpu"), "mask"

    monkeypatch.setitem(PEERS, "flex-mask", Peer(other))
    for how in ("right", "wrong"):
        record = run_case(case, LIMITS, "cpu", CLOCK)
        assert record.differs("flex-mask") == (how == "wrong") and record.budget == {OURS: 0.0}
        assert record.flops == 0 and record.extra["syncs"] == ""


def test_a_peer_that_computes_something_else_is_flagged_and_clears_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "fa3", Peer(lambda inputs: (lambda: PEERS["sdpa"].prepare(inputs)[0]() * 1.1, "bhsd")))
    record = run_case(gpu_case("gqa", "flash", "full", SMALL, ("fa3", "sdpa")), LIMITS, "cpu", CLOCK)
    assert record.differs("fa3") and not record.differs("sdpa")
    assert "**differs**" in "\n".join(report.as_markdown(MACHINE, Found({record.case: record}, {}), bars.BARS).splitlines())
    with pytest.raises(KeyError):
        versus(Found({record.case: record}, {}), record.case, ["fa3"])
    assert versus(Found({record.case: record}, {}), record.case, ["fa3", "sdpa"]) == 1.0


def test_a_long_case_is_not_run_on_torch() -> None:
    record = run_case(gpu_case("t", "flash", "causal", Shape.square(4112, 1, 16), ("sdpa",)), LIMITS, "cpu", CLOCK)
    assert set(record.timings) == {"sdpa"} and "torch" in record.unavailable[OURS]


def test_banned_contestants_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS, "fa4", Peer(lambda inputs: pytest.fail("called")))
    seen: list[str] = []
    case = gpu_case("t", "flash", "full", SMALL, ("fa4", "sdpa"))
    record = run_case(case, LIMITS, "cpu", CLOCK, {"fa4": "it hung"}, seen.append)
    assert record.unavailable["fa4"] == "it hung" and set(record.timings) == {OURS, "sdpa"}
    assert seen[0] == "" and {OURS, "sdpa"} == set(seen[1:])


def test_the_device_is_given_up_when_it_no_longer_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def lost() -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lost)
    run = runner._Run(Inputs(gpu_case("t", "flash", "full", SMALL, ()), "cpu"), _record("x", {}), lambda name: None)
    with pytest.raises(runner.DeviceLost, match="fa4: ValueError: bad"):
        run.failed("fa4", ValueError("bad"))


def test_what_was_under_way_is_banned_and_the_rest_kept(tmp_path: Path) -> None:
    store = Store(tmp_path / "deep" / "gpu")
    assert store.state() == State() and not store.found().records
    record = _record("gqa/causal/d128/8192", {OURS: (1.0,) * 3, "fa3": (2.0,) * 3}, 10**12, {"fa3": float("inf")})
    store.save(MACHINE, Found({record.case: record}, {"first-call": {"cold_s": 1.0}}))
    again = store.found()
    assert again.records[record.case].ratio("fa3") == 2.0 and again.probes["first-call"]["cold_s"] == 1.0
    store.save_state(State(("dense/full", "fa4")))
    state = store.state()
    assert state.ban("it hung") and not state.ban("again")
    assert state.banned == {"dense/full": {"fa4": "it hung"}}
    store.save_state(state)
    assert store.state() == state
    store.clear()
    assert store.state() == State()


def test_a_peer_that_keeps_dying_is_left_out_everywhere() -> None:
    state = State(banned={"a": {"fa3": "hung", OURS: "hung"}, "b": {OURS: "hung"}})
    assert state.banned_in("c", ("fa3", "fa4")) == {}
    state.banned["b"]["fa3"] = "hung"
    assert set(state.banned_in("c", ("fa3", "fa4"))) == {"fa3"}  # anyattn itself is tried again
    assert state.banned_in("a", ("fa3",)) == {"fa3": "hung", OURS: "hung"}


def test_a_dead_child_is_replaced_without_its_contestant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, runs = Store(tmp_path / "gpu"), []

    def child(command: list[str], timeout: float) -> Any:
        runs.append(dict(store.state().banned))
        if len(runs) < 3:
            store.save_state(replace(store.state(), under_way=("case", f"contestant {len(runs)}")))
        return type("Done", (), {"returncode": 0 if len(runs) == 3 else 1})

    monkeypatch.setattr(command.subprocess, "run", child)
    command._supervise(store, [], command.time.monotonic() + HANG)
    assert len(runs) == 3 and set(runs[2]["case"]) == {"contestant 1", "contestant 2"}


def _everything() -> Found:
    """A run in which anyattn is exactly twice as fast as everyone, and everything else is as wanted."""
    records = {}
    for case in CASES:
        seconds = {name: (1e-5 if name.startswith(OURS) else 2e-5,) * 3 for name in case.contestants}
        flops = case.flops(10**6)
        if case.name == BESIDE_A_PRODUCT:
            seconds["matrix-product"] = (2e-5 * 2 * PRODUCT_SIZE**3 / flops,) * 3
        records[case.name] = _record(case.name, seconds, flops)
        if case.kind == "mask":
            records[case.name].extra["syncs"] = ""
    kernels = {"random_shapes": 1, "new_closure": 0}
    probed: dict[str, dict[str, Any]] = {
        "first-call": {"cold_s": 1.0, "warm_s": 0.1},
        "training-call": {"cold_s": 1.0, "warm_s": 0.1, "host_us": 50.0},
        "compilations": kernels,
        "compilations-triton": kernels,
    }
    probed["memory"] = {f"{name}_{what}": 1.0 for name in memory.FUNCTIONS for what in ("largest", "peak")}
    wanted = ("over_flex", "mask_over_flex", "replaced_extra_us", "compiled_replaced_extra_us")
    probed["compiled-call"] = dict.fromkeys(wanted, 0.5)
    mine = {
        "first_s": 1.0,
        "peak_bytes": 1,
        "graphs": 1,
        "steps": 20,
        "breaks": 0,
        "waits": 0.0,
        "budget": {"losses": 0.5},
        "rounds": [[1.0]],
    }
    names = "anyattn", "anyattn-forward", "anyattn-replaced", "flex-triton"
    contestants = {name: {**mine, "passed_on": 0} for name in names} | {"flex-flash": {**mine, "rounds": [[2.0]]}}
    probed |= {f"gpt-{size}": {"size": size, "contestants": contestants} for size in ("8k", "32k")}
    return Found(records, probed)


def test_every_bar_finds_its_figures() -> None:
    rows = report.shown_bars(_everything(), bars.BARS)
    assert len(rows) == len(bars.BARS) == len({row[0] for row in rows})
    short = [row for row in rows if row[4] != "reached"]
    assert not [row for row in short if not row[0].startswith("block mask causal 131,072") and "131,072" not in row[0]], short
    assert len(short) == 2  # 2x where 5x is asked for


def test_bars_are_read_as_the_table_means_them() -> None:
    found = _everything()
    case = found.records[DENSE[0].name]
    case.timings["fa4"] = Timing((0.8e-5,) * 3)  # the faster of the two counts
    rows = {row[0]: row for row in report.shown_bars(found, bars.BARS)}
    worst = rows["dense vs the faster of FA3 and FA4, worst"]
    assert worst[1].startswith("0.8 x") and DENSE[0].name in worst[1] and worst[4] == "**short**"
    assert rows["dense vs the faster of FA3 and FA4, geometric mean"][4] == "reached"
    found.records["masks/causal/8192"].extra["syncs"] = "called a synchronizing operation"
    found.records["variants/t5_bias/d128/8192"].timings["flex-flash"] = Timing((1.1e-5,) * 3)
    del found.records["variants/prefix/d128/8192"].timings["cudnn-fe"]
    found.probes["first-call"] = {"error": "no"}
    rows = {row[0]: row for row in report.shown_bars(found, bars.BARS)}
    assert rows["block masks whose building waits for the GPU"][1] == "1 cases"
    assert rows["T5 bias vs flex FLASH"][4] == "**short**" and rows["variants vs flex FLASH, worst"][4] == "reached"
    assert "6 of 7 cases" in rows["mask variants vs cuDNN's interval masks, worst"][1]
    assert rows["first call, cold disk cache"][1] == "not measured"


def test_tables_name_backends_speeds_and_gaps() -> None:
    found = _everything()
    record = found.records["variants/causal/d128/8192"]
    record.extra.update(backend="torch", backend_mod="hopper", seconds=3)
    record.timings.pop("fa4")
    record.unavailable["fa4"] = "it hung"
    text = report.as_markdown(MACHINE, found, bars.BARS)
    line = next(line for line in text.splitlines() if line.startswith("| variants/causal"))
    assert "torch (mod: hopper)" in line and "51 TF/s ±0 %" in line and "2.00x" in line
    assert "- variants/causal/d128/8192: no fa4: it hung" in text and "| masks/causal/8192 |" in text and "10.0 us" in text
    assert "no fa4 (it hung)" in report.describe(record)


def test_a_probe_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Done:
        returncode, stdout, stderr = 1, "", "Traceback\nRuntimeError: no GPU"

    monkeypatch.setattr(process.subprocess, "run", lambda *a, **k: Done)
    assert probes.measure("compilations") == {"error": "RuntimeError: no GPU"}
    for name in ("first-call", "training-call"):
        assert probes.measure(name) == {"cold": {"error": "RuntimeError: no GPU"}, "warm": {"error": "RuntimeError: no GPU"}}


@pytest.mark.skipif(torch.cuda.is_available(), reason="what is said where there is no GPU")
def test_the_command_line_without_a_gpu() -> None:
    listed = CliRunner().invoke(command.main, ["--list"])
    assert listed.exit_code == 0, listed.output
    assert all(case.name in listed.output for case in CASES) and all(bar.name in listed.output for bar in bars.BARS)
    some = CliRunner().invoke(command.main, ["--list", "--group", "gqa"])
    assert "gqa/causal" in some.output and "dense/full" not in some.output and "first-call" not in some.output.split("bar:")[0]
    refused = CliRunner().invoke(command.main, [])
    assert refused.exit_code == 2 and "CUDA" in refused.output
    nothing = CliRunner().invoke(command.main, ["--only", "no such case"])
    assert nothing.exit_code == 2 and "nothing matches" in nothing.output


def test_the_worker_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "_where", lambda: MACHINE)
    monkeypatch.setattr(command.torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(command.faulthandler, "dump_traceback_later", lambda *a, **k: None)
    monkeypatch.setattr(sys, "argv", ["x"])
    ran: list[tuple[str, dict[str, str]]] = []

    def fake(case: Case, limits: Limits, banned: dict[str, str], watch: Any, cold: bool) -> Record:
        ran.append((case.name, banned))
        if len(ran) == 2:
            raise ValueError("broken")
        absent = {**dict.fromkeys(case.peers, "not here"), **banned}
        return run_case(replace(case, shape=SMALL), limits, "cpu", CLOCK, absent, watch)

    monkeypatch.setattr(command, "run_case", fake)
    store, cases = Store(tmp_path / "gpu"), chosen(CASES, ("gqa", "window", "varlen"))
    command._work(store, cases[:2], LIMITS, command.time.monotonic() + HANG, 60, True)
    found = store.found()
    assert len(found.records) == 2 and found.records[cases[1].name].refused == "ValueError: broken"
    assert store.state().under_way is None and "refused" in (tmp_path / "gpu.md").read_text()
    command._work(store, cases, LIMITS, command.time.monotonic() + HANG, 60, True)
    assert [name for name, _ in ran[2:]] == [case.name for case in cases if case.name not in found.records]


def test_first_calls_begin_with_empty_caches_that_the_second_process_finds_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def child(command: list[str], env: dict[str, str], **rest: Any) -> Any:
        folder = Path(env["XDG_CACHE_HOME"])
        assert env["CUTE_DSL_CACHE_DIR"] == env["TRITON_CACHE_DIR"] == str(folder)
        seen.append((str(folder), len(list(folder.iterdir()))))
        (folder / "kernel").write_text("")
        backend = "torch" if torch_only else "hopper"
        return type("Done", (), {"returncode": 0, "stdout": json.dumps({"causal": len(seen), "backend": backend})})

    monkeypatch.setattr(process.subprocess, "run", child)
    torch_only = False
    figures = probes.measure("first-call")
    assert (figures["cold_s"], figures["warm_s"]) == (1, 2)
    assert seen[0][0] == seen[1][0] and [files for _, files in seen] == [0, 1] and not Path(seen[0][0]).exists()
    torch_only = True
    assert "cold_s" not in probes.measure("first-call")  # nothing was compiled: no figure
