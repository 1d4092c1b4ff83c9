"""The compiled training step's benchmark on the CPU: a tiny model, every worker in this process, graphs by aot_eager."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn.testing.harness import timing
from benchmarks.gpu import compiled_call
from benchmarks.gpu.gpt import contestants
from benchmarks.gpu.gpt.measure import Limits, measured, ratio
from benchmarks.gpu.gpt.model import SIZES, batches
from benchmarks.gpu.gpt.report import tables
from benchmarks.gpu.gpt.worker import Here
from benchmarks.process import Child
from tests.support.covering import few

TINY = SIZES["tiny"]
LIMITS = Limits(rounds=1, timed=2, seconds=10_000)


def _start(folder: Path) -> Callable[[str], Here]:
    return lambda name: Here(name, TINY, "cpu", "aot_eager", folder, folder)


@pytest.fixture
def flex_trains_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's flex attention refuses gradients on the CPU, for the sake of inductor; aot_eager has them."""
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(flex_attention, "_validate_device", lambda *qkv: None)


@pytest.mark.parametrize("mine", few(("anyattn", "anyattn-forward"), "anyattn"))
def test_every_contestant_trains_in_one_graph_and_within_its_budget(mine: str, tmp_path: Path, flex_trains_here: None) -> None:
    torch._dynamo.reset()
    figures = measured(TINY, [mine, "flex-triton"], _start(tmp_path), tmp_path, LIMITS)
    found = figures["contestants"]
    for name in (mine, "flex-triton"):
        of_one = found[name]
        assert "error" not in of_one, of_one["error"]
        assert (of_one["graphs"], of_one["breaks"], len(of_one["rounds"][0])) == (1, 0, 2) and of_one["steps"] > 4, name
        assert max(of_one["budget"].values()) <= 1, (name, of_one["budget"])
        assert len(set(of_one["losses"])) == len(of_one["losses"])  # it learns, of other documents each time
    assert found["flex-triton"]["compiled"].get("create_block_mask", 0) <= 1
    assert ratio(figures, mine, "flex-triton") > 0
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


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w") as log:
        child = Child([sys.executable, "-c", "import time; time.sleep(1000)"], log, {})
        with pytest.raises(RuntimeError, match="exit code"):
            child.ask({"do": "first"}, 0.2)
        child.end(1.0)


def test_compiled_calls_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "_HOST_CALLS", 2)
    torch._dynamo.reset()
    found = compiled_call.host_times("cpu", "aot_eager", timing.Limits(rounds=2, least=1))
    assert "errors" not in found, found["errors"]
    assert {"anyattn compiled", "anyattn compiled, block mask", "flex compiled", "flex compiled, block mask"} <= set(found["microseconds"])
    assert found["over_flex"] > 0 and found["mask_over_flex"] > 0
    assert ("replaced_extra_us" in found) == hasattr(anyattn, "replace_flex_attention")
