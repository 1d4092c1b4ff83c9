"""The compiled training step's benchmark on the CPU: a tiny model, every worker in this process, graphs by aot_eager."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

import anyattn
from anyattn.testing.harness import timing
from benchmarks import report
from benchmarks.bars import Found
from benchmarks.gpu import bars_compiled, compiled_call, probes
from benchmarks.gpu.gpt import __main__ as command
from benchmarks.gpu.gpt import contestants, measure, profile
from benchmarks.gpu.gpt.measure import Limits, measured, ratio
from benchmarks.gpu.gpt.model import SIZES, batches
from benchmarks.gpu.gpt.report import kernels, tables
from benchmarks.gpu.gpt.worker import Here
from benchmarks.process import Child

TINY = SIZES["tiny"]
LIMITS = Limits(rounds=1, timed=2, seconds=10_000)


def _start(folder: Path) -> Callable[[str], Here]:
    return lambda name: Here(name, TINY, "cpu", "aot_eager", folder, folder)


@pytest.fixture
def flex_trains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flex attention refuses gradients on the CPU, for the sake of inductor; aot_eager has them."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)


def test_every_contestant_trains_in_one_graph_and_within_its_budget(tmp_path: Path, flex_trains_here: None) -> None:
    torch._dynamo.reset()
    names = ["anyattn", "anyattn-forward", "flex-triton"]
    figures = measured(TINY, names, _start(tmp_path), tmp_path, LIMITS)
    found = figures["contestants"]
    assert list(found) == names
    for name in names:
        mine = found[name]
        assert "error" not in mine, mine["error"]
        assert (mine["graphs"], mine["breaks"], len(mine["rounds"][0])) == (1, 0, 2) and mine["steps"] > 4, name
        assert max(mine["budget"].values()) <= 1, (name, mine["budget"])
        assert len(set(mine["losses"])) == len(mine["losses"])  # it learns, of other documents each time
    assert found["flex-triton"]["compiled"].get("create_block_mask", 0) <= 1
    assert ratio(figures, "anyattn", "flex-triton") > 0
    text = "\n".join(tables("gpt-tiny", figures))
    assert "| graphs of the model | 1 | 1 | 1 |" in text and "time over flex-triton's" in text
    json.dumps(figures)


@pytest.mark.skipif(not hasattr(anyattn, "replace_flex_attention"), reason="torch's function cannot be replaced yet")
def test_the_program_of_flex_runs_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    with ExitStack() as stack:
        replace_it = anyattn.replace_flex_attention
        monkeypatch.setattr(anyattn, "replace_flex_attention", lambda: stack.enter_context(replace_it()))
        before = anyattn.replaced()
        mine = measured(TINY, ["anyattn-replaced"], _start(tmp_path), tmp_path, LIMITS)["contestants"]["anyattn-replaced"]
    assert "error" not in mine, mine["error"]
    assert (mine["graphs"], mine["breaks"], mine["passed_on"]) == (1, 0, before.passed_on) and mine["taken"] > before.taken
    assert max(mine["budget"].values()) <= 1, mine["budget"]


def test_the_judge_notices_a_mask_that_is_not_causal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(size: Any, backend: str) -> contestants.Contestant:
        make = lambda ids: anyattn.create_block_mask(
            lambda b, h, i, j: ids[b, i] == ids[b, j], size.batch, None, size.seqlen, size.seqlen, device="cpu"
        )
        return replace(contestants.CONTESTANTS["anyattn-eager"](size, backend), seen=lambda batch: make(batch.ids))

    monkeypatch.setitem(contestants.CONTESTANTS, "flex-flash", wrong)
    found = measured(TINY, ["anyattn-eager", "flex-flash"], _start(tmp_path), tmp_path, LIMITS)["contestants"]
    assert max(found["anyattn-eager"]["budget"].values()) <= 1
    assert min(found["flex-flash"]["budget"].values()) > 1


def test_documents_are_new_every_step_and_the_same_for_everyone() -> None:
    first, second = batches(TINY, 3, "cpu"), batches(TINY, 3, "cpu")
    assert all(torch.equal(a.ids, b.ids) and torch.equal(a.tokens, b.tokens) for a, b in zip(first, second))
    assert len({tuple(b.ids.flatten().tolist()) for b in first}) == 3
    for name in ("8k", "32k"):
        batch, size = batches(SIZES[name], 1, "cpu")[0], SIZES[name]
        assert batch.ids.shape == (size.batch, size.seqlen) and batch.ids.dtype == torch.int32
        for ids, lengths in zip(batch.ids, batch.lengths):
            assert size.documents[0] <= len(lengths) <= size.documents[1] and sum(lengths) == size.seqlen and min(lengths) > 0
            assert ids.unique_consecutive(return_counts=True)[1].tolist() == lengths


class Fake:
    """A worker that answers at once. dies_at, fails_at: the questions that it does not survive, or has no answer to."""

    def __init__(self, name: str, folder: Path, dies_at: str = "", fails_at: str = "", seconds: float = 1.0):
        self.name, self.folder, self.dies_at, self.fails_at, self.seconds = name, folder, dies_at, fails_at, seconds
        self.asked: list[str] = []

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        self.asked.append(what := question["do"])
        if what == self.dies_at:
            raise RuntimeError("its process ended with exit code -9")
        if what == self.fails_at:
            return {"error": "ValueError: cannot"}
        if what == "first":
            torch.save({"losses": torch.ones(4)}, self.folder / f"{self.name}.pt")
        answers: dict[str, dict[str, Any]] = {
            "first": {"first_s": 10 * self.seconds, "losses": [2.0]},
            "memory": {"peak_bytes": 2**30, "between_bytes": 2**29, "reserved_bytes": 0},
            "waits": {"waits": 0.0, "waits_at": ""},
            "times": {"seconds": [self.seconds] * question.get("timed", 0)},
            "graphs": {"steps": 30, "graphs": 1, "compiled": {"forward": 1}, "breaks": 0},
        }
        return answers.get(what, {})

    def end(self, seconds: float) -> None:
        self.asked.append("end")


def _faked(folder: Path, **how: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Fake]]:
    workers: dict[str, Fake] = {}

    def start(name: str) -> Fake:
        workers[name] = Fake(name, folder, **how.get(name.replace("-", "_"), {}))
        return workers[name]

    names = ["anyattn", "flex-triton", "anyattn-forward", "flex-flash"]
    return measured(TINY, names, start, folder, Limits(rounds=2, timed=2, seconds=10_000), echo=lambda line: None), workers


def test_who_dies_or_fails_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    figures, workers = _faked(
        tmp_path, anyattn_forward={"fails_at": "first"}, flex_flash={"dies_at": "times"}, flex_triton={"fails_at": "waits", "seconds": 2.0}
    )
    found = figures["contestants"]
    assert "exit code -9" in found["flex-flash"]["error"] and "rounds" not in found["flex-flash"]
    assert found["anyattn-forward"]["error"] == "first: ValueError: cannot" and workers["anyattn-forward"].asked == [
        "begin",
        "first",
        "end",
    ]
    assert ratio(figures, "anyattn", "flex-triton") == 0.5 and found["flex-triton"]["peak_bytes"] == 2**30
    assert all(worker.asked[-1] == "end" for worker in workers.values())
    text = "\n".join(tables("gpt-8k", figures))
    assert "- anyattn-forward: first: ValueError: cannot" in text and "| time over flex-triton's | 0.500 | 1.000 | - |" in text


def test_nothing_is_begun_when_time_is_up(tmp_path: Path) -> None:
    workers = {}

    def start(name: str) -> Fake:
        return workers.setdefault(name, Fake(name, tmp_path))

    figures = measured(TINY, ["anyattn"], start, tmp_path, replace(LIMITS, seconds=measure._RESERVE / 2), echo=lambda line: None)
    assert figures["contestants"]["anyattn"]["missing"] == "time was up before its first step"
    assert workers["anyattn"].asked == ["begin", "end"]


def test_bars_read_the_figures(tmp_path: Path) -> None:
    figures, _ = _faked(tmp_path, flex_triton={"seconds": 2.0}, anyattn_forward={"fails_at": "first"})
    found = Found({}, {"gpt-8k": figures, "compiled-call": {"over_flex": 1.2}})
    values = {}
    for bar in bars_compiled.BARS:
        try:
            values[bar.name] = (bar.measure(found), bar.passes(bar.measure(found)))
        except KeyError:
            continue
    name = "compiled GPT 8k"
    assert values[f"{name}: first step, time over compiled flex's"] == (0.5, True)
    assert values[f"{name}: step, time over compiled flex TRITON's"] == (0.5, True)
    assert values[f"{name}: graphs over 20 steps"] == (1, True) and values[f"{name}: fullgraph"] == (1, True)
    assert values[f"{name}, mask made in forward: fullgraph"] == (0, False)
    assert f"{name}, replaced flex: fullgraph" not in values  # it was not among them
    assert values["compiled call, host time over compiled flex's"] == (1.2, False)
    assert "### gpt-8k" in "\n".join(report.probe_lines("gpt-8k", figures)) and report.probe_lines("x", {"a": 1}) == ["- x: {'a': 1}"]


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        child = Child([sys.executable, "-c", "import time; time.sleep(1000)"], log, {})
        with pytest.raises(RuntimeError, match="exit code"):
            child.ask({"do": "first"}, 0.2)
        child.end(1.0)


def _trace() -> list[dict[str, Any]]:
    """Two steps, 1000 us apart; in each a mask, attention by an operator and by a kernel's name, a product, a copy."""
    events: list[dict[str, Any]] = []

    def span(category: str, name: str, ts: float, dur: float, correlation: int | None = None) -> None:
        args = {} if correlation is None else {"correlation": correlation}
        events.append({"ph": "X", "cat": category, "name": name, "ts": ts, "dur": dur, "tid": 1, "args": args})

    def launch(name: str, at: float, start: float, dur: float, category: str = "kernel") -> None:
        number = len(events)
        span("cuda_runtime", "cudaLaunchKernel", at, 1, number)
        span(category, name, start, dur, number)

    for at in (0.0, 1000.0):
        span("user_annotation", "gpt.step", at, 900)
        span("user_annotation", "gpt.masks", at, 100)
        launch("triton_poi_fused_bitwise_and_0", at + 10, at + 100, 10)
        span("user_annotation", "gpt.forward", at + 100, 100)
        span("cpu_op", "anyattn::attend", at + 110, 20)
        launch("a_kernel_of_any_name", at + 115, at + 110, 50)
        launch("nvjet_tst_128x128", at + 140, at + 160, 40)
        launch("triton_poi_fused_clone_transpose_3", at + 150, at + 200, 5)
        span("user_annotation", "gpt.backward", at + 200, 200)
        launch("triton_tem_fused_flex_attention_backward_7", at + 210, at + 300, 100)
        launch("triton_red_fused_flex_attention_backward_mul_6", at + 220, at + 400, 3)
        launch("Memcpy DtoH (Device -> Pinned)", at + 230, at + 403, 2, "gpu_memcpy")
        span("cuda_runtime", "cudaStreamSynchronize", at + 240, 60)
        span("user_annotation", "gpt.optimizer", at + 400, 100)
        launch("multi_tensor_apply_kernel", at + 410, at + 405, 95)
        launch("triton_per_fused_add_mean_2", at + 510, at + 500, 10)
    return events


def test_a_profile_is_summed_by_family_with_gaps_and_waits() -> None:
    found = profile.summary(_trace())
    assert found["families"] == {
        "attention forward": [0.05, 1],
        "attention backward": [0.1, 1],
        "beside attention": [0.003, 1],
        "masks": [0.01, 1],
        "matrix products": [0.04, 1],
        "elementwise, norms, loss": [0.01, 1],
        "copies": [0.005, 1],
        "optimizer": [0.095, 1],
        "memcpy, memset": [0.002, 1],
    }
    assert found["waits"] == {"cudaStreamSynchronize": [1, 0.06]} and found["host_ms"] == 0.9
    assert (found["gaps"], found["longest_gap_us"]) == (2, 590.0)  # before the step's first kernel, and before the backward pass
    assert round(found["idle_ms"], 6) == 0.685 and round(found["busy_ms"] + found["idle_ms"], 6) == found["span_ms"] == 1.0
    figures = {"size": "s", "contestants": {"anyattn": {"first_s": 1.0, "profile": found}}}
    text = "\n".join(tables("gpt-8k", figures))
    assert "| attention backward | 0.10 (1) |" in text and "1 cudaStreamSynchronize 0.06 ms" in text
    assert "triton_tem_fused_flex_attention_backward_7" in kernels(figures)[0]


@pytest.mark.filterwarnings("ignore:CUDA is not available")
def test_a_record_of_the_profiler_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On this machine without kernels: what torch writes has the spans that are looked for."""
    monkeypatch.setattr(profile.torch.cuda, "synchronize", lambda: None)
    path = tmp_path / "it.trace.json.gz"
    found = profile.profiled(lambda: torch.ones(3) + 1, path)
    assert found["families"] == {} and found["host_ms"] > 0
    with gzip.open(path, "rt") as text:
        assert sum(event["name"] == "gpt.step" for event in json.load(text)["traceEvents"]) == profile._STEPS


def test_compiled_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_HOST_CALLS", 2)
    torch._dynamo.reset()
    found = compiled_call.host_times("cpu", "aot_eager", timing.Limits(rounds=2, least=1))
    assert "errors" not in found, found["errors"]
    assert {"anyattn compiled", "anyattn compiled, block mask", "flex compiled", "flex compiled, block mask"} <= set(found["microseconds"])
    assert found["over_flex"] > 0 and found["mask_over_flex"] > 0
    assert ("replaced_extra_us" in found) == hasattr(anyattn, "replace_flex_attention")


def test_the_groups_run_the_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(command, "run", lambda *a, **k: asked.append((a, k)) or {"size": "s", "contestants": {}})
    assert probes.measure("gpt-32k", 77, tmp_path / "gpu", "flex")["contestants"] == {}
    assert asked == [(("32k", tmp_path / "gpu.gpt-32k", "flex", Limits(seconds=77)), {})]
    shown = CliRunner().invoke(command.main, ["--tiny", "--out", str(tmp_path)])
    assert shown.exit_code == 0 and "gpt-tiny" in shown.output and asked[1][0][0] == "tiny"
    if not torch.cuda.is_available():
        assert CliRunner().invoke(command.main, ["--size", "8k"]).exit_code == 2


def test_contestants_are_chosen_by_their_names() -> None:
    assert measure.chosen(None)[:2] == ["anyattn", "flex-triton"] and not set(measure.chosen(None)) & set(contestants.REFERENCES)
    assert measure.chosen("flex") == ["anyattn", "flex-triton", "flex-flash"]
