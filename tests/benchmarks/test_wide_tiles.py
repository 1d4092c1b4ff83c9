"""The sweep of tiles of wide heads: its trials fit the device, its calls use their tiles and run, and what fails is left out."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from anyattn.backends.triton import api, tile_config
from anyattn.backends.triton.tile_config import Shape, Tiles
from benchmarks.gpu import wide_tiles
from benchmarks.gpu.ahead import Done, Job
from benchmarks.gpu.wide_tiles import LOOPS, PASSES, Size, Trial

CASES = [(of, d, one) for of in PASSES for d in (512, 576) for one in (False, True)]
HOPPER = (9, 0)


@pytest.mark.parametrize(("of", "d", "one"), CASES)
def test_the_first_trial_is_the_tables_own(of: str, d: int, one: bool) -> None:
    trials = wide_tiles.candidates(of, d, one, LOOPS)
    assert len({t.name for t in trials}) == len(trials) >= 3
    shape = Shape(d, 512, torch.bfloat16, has_one_kv=one)

    def planned() -> Tiles:
        if of in ("forward", "few"):
            return tile_config.forward_tiles(shape, HOPPER, 64, of == "few")
        return tile_config.backward_tiles(shape, HOPPER)[of]

    tables = tile_config.pipeline_of(shape, HOPPER, False)
    assert planned() == Tiles(*trials[0].numbers)
    for trial in trials:
        with wide_tiles.using(trial):
            assert planned() == Tiles(*trial.numbers)
            loop = tile_config.pipeline_of(shape, HOPPER, False)
            is_divided = api.is_divided("dq", False, shape.d, shape.dv, "sm_90", 64, 8)
        is_joined = tables.is_joined if trial.loop in ("table", "undivided") else trial.loop != "plain"
        assert (loop.is_joined, loop.is_late) == (is_joined, trial.loop == "late")
        assert is_divided == (trial.loop != "undivided")
    assert planned() == Tiles(*trials[0].numbers)


@pytest.mark.parametrize(("of", "one"), [(of, one) for of in PASSES for one in (False, True)])
def test_calls_run(of: str, one: bool) -> None:
    trials = wide_tiles.candidates(of, 512, one)[:2]
    calls = wide_tiles.calls_of(trials, Size(40, 2, 3), "cpu", None)
    found: dict[str, Any] = {name: call() for name, call in calls.items()}
    shapes = {"forward": (1, 8, 40, 512), "few": (2, 1, 3, 512)}
    for trial in trials:
        mine = found[trial.name]
        if of in shapes:
            assert mine.shape == shapes[of] and bool(mine.isfinite().all())
        else:
            assert [g.shape for g in mine] == [(1, 8, 40, 512)] * (of == "dq") + [(1, 4, 40, 512)] * ((2 - one) * (of == "dkdv"))
    lines = wide_tiles._lines(trials, Size(40, 2, 3), dict.fromkeys(calls, 7.0))
    assert len(lines) == 2 and sum(line.endswith("*") for line in lines) == 1


def test_what_fails_to_compile_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = wide_tiles.candidates("dq", 512, False)

    def compiled(jobs: list[Job], processes: int, seconds: float, hang: float, log: Path, echo: Any, command: Any) -> list[Done]:
        assert importlib.util.find_spec(command[1]) is not None
        read = [json.loads(job.case) for job in jobs]
        assert [Trial(of, d, one, tuple(n), loop) for of, d, one, n, loop in read] == trials
        return [Done(job, 1.0, {job.names[0]: "spills 999 words"} if place == 1 else {}) for place, job in enumerate(jobs)]

    monkeypatch.setattr(wide_tiles, "compile_ahead", compiled)
    monkeypatch.setenv(wide_tiles._SPILLS, "0")
    assert wide_tiles._without_failures(trials, 2, 100) == [trials[0], *trials[2:]]
