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

from anyattn.testing.harness import peers, runner, timing
from anyattn.testing.harness.case import LARGEST_DIFFERENCE, OURS, Case, Record, Shape, Timing
from anyattn.testing.harness.inputs import Inputs
from anyattn.testing.harness.judge import difference
from anyattn.testing.harness.peers import PEERS, PRODUCT_SIZE, Peer
from anyattn.testing.harness.runner import run_case
from anyattn.testing.harness.timing import Limits, measure
from anyattn.testing.harness.variants import VARIANTS as ALL_VARIANTS
from anyattn.testing.harness.variants import Setting
from benchmarks import process, report
from benchmarks.bars import Found, versus
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import bars, bars_wide, memory, probes
from benchmarks.gpu.cases import CASES, chosen, gpu_case
from benchmarks.host_time import SERVING_BARS
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


class Clock:
    """Calls, and claims that a call takes a second."""

    def times(self, call: Any, limits: Limits) -> tuple[int, float]:
        call()
        return 1, 0.0

    def sample(self, call: Any, times: int, head_start: float) -> float:
        call()
        return 1.0


CLOCK = Clock()


def test_cases_are_those_of_the_table() -> None:
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    for case in CASES:
        assert case.device == "cuda" and case.variant in VARIANTS, case.name
        assert all("cuda" in PEERS[name].devices for name in case.contestants), case.name
        if case.kind in ("flash", "varlen", "decode"):
            assert VARIANTS[case.variant].native is not None


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_count_each_visible_pair(variant: str) -> None:
    case = gpu_case("t", "flex", variant, Shape.square(80, 2, 16, 3), ())
    mask = VARIANTS[variant].mods(Setting(80, 2)).mask
    seen = int(_seen(mask, 80).sum())
    assert Inputs(case, "cpu").pairs() == seen * 3 * 2
    assert case.flops(seen) == 4 * 16 * seen


def _seen(mask: Any, seqlen: int) -> torch.Tensor:
    """Which keys each query sees: bool (seqlen, seqlen)."""
    at = torch.arange(seqlen)
    seen = True if mask is None else mask(0, 0, at[:, None], at)
    return torch.as_tensor(seen, dtype=torch.bool).expand(seqlen, seqlen)


def test_rounds_stay_aligned_when_a_contestant_drops_out() -> None:
    failures: dict[str, Exception] = {}
    calls = {"good": lambda: None, "late": lambda: late.append(1) or (1 / 0 if len(late) > 6 else None), "bad": lambda: 1 / 0}
    late: list[int] = []
    timings = measure(calls, CLOCK, LIMITS, lambda name, error: failures.update({name: error}))
    assert set(timings) == {"good"} and len(timings["good"].seconds) == 6
    assert set(failures) == {"bad", "late"} and all(isinstance(e, ZeroDivisionError) for e in failures.values())


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
        ("flash", "causal", ("sdpa", "anyattn-batch", "anyattn-one-kv", "ffpa-attn")),
        ("flash", "full", ("ffpa-attn", "anyattn-one-kv")),
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


def _everything(ours: float) -> Found:
    """A run in which anyattn takes ``ours`` seconds for everything and everyone else 1e-4; what is counted goes with it."""
    records = {}
    for case in CASES:
        seconds = {name: (ours if name.startswith(OURS) else 1e-4,) * 3 for name in case.contestants}
        flops = case.flops(10**6)
        if "matrix-product" in case.contestants:
            seconds["matrix-product"] = (1e-4 * 2 * PRODUCT_SIZE**3 / (flops or bars_wide.decoding_flops(case)),) * 3
        records[case.name] = _record(case.name, seconds, flops)
        records[case.name].extra["syncs"] = "" if ours < 1e-4 else "called a synchronizing operation"
    figures = ("cold_s", "warm_s", "first_s", "host_us", "peak_bytes", "waits", "passed_on", "new_closure", "random_shapes", "breaks")
    figures += ("over_flex", "mask_over_flex", "replaced_extra_us", "compiled_replaced_extra_us", "ratio")
    figures += tuple(f"{name}_{what}" for name in memory.FUNCTIONS for what in ("largest", "peak"))
    figures += tuple(SERVING_BARS)
    count = 0 if ours < 1e-4 else 1000
    mine = {**dict.fromkeys(figures, count), "graphs": 1 + count, "steps": 20, "budget": {"losses": count}, "rounds": [[ours]]}
    theirs = {**mine, "first_s": 1, "peak_bytes": 1, "rounds": [[1e-4]]}
    own = ("anyattn", "anyattn-forward", "anyattn-replaced")
    contestants = {**dict.fromkeys(own, mine), "flex-triton": theirs, "flex-flash": theirs}
    return Found(records, {name: {**mine, "contestants": contestants, "size": "8k"} for name in probes.NAMES})


def test_every_bar_is_reached_by_what_is_fast_and_missed_by_what_is_slow() -> None:
    fast, slow = ({row[0]: row[4] for row in report.shown_bars(_everything(ours), bars.BARS)} for ours in (1e-5, 1.0))
    assert len(fast) == len(bars.BARS) and set(fast.values()) == {"reached"}
    of_itself = ("our own causal", "over causal's", "over the default's", "over that without", "over contiguous", "over the best of")
    of_itself = (*of_itself, "over our Triton")
    assert not [name for name, verdict in slow.items() if verdict != "**short**" and not any(words in name for words in of_itself)]
    lines = report.bar_lines(_everything(1.0), bars.BARS)
    assert len(lines) == len(bars.BARS) + 1 and f"{list(slow.values()).count('**short**')} short, 0 without figures" in lines[-1]


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
