"""The benchmark of Transformers on a GPU, at sizes that a CPU computes: every kind of case, its table, and a case that takes too long."""

from __future__ import annotations

from dataclasses import replace

import click.testing
import pytest
import torch

pytest.importorskip("transformers")

import transformers

from benchmarks import transformers_gpu
from benchmarks.transformers_gpu import CASES, main

IS_4 = int(transformers.__version__.split(".")[0]) < 5


@pytest.mark.parametrize("name", ["eager", "paged", "training", "gpt-oss"])
def test_a_case(name: str) -> None:
    if IS_4 and name == "paged":
        pytest.skip("Transformers 4.57 has no ContinuousBatchingConfig")
    case = replace(CASES[name].tiny(), limit=0.0)
    said: list[str] = []
    found = transformers_gpu._measured(case, torch.device("cpu"), said.append)
    assert found["errors"] == {}
    assert {who: len(rates) for who, rates in found["rates"].items()} == dict.fromkeys(("anyattn", *case.peers), 1)
    assert all(rate > 0 for rates in found["rates"].values() for rate in rates)
    assert len(said) == 1 + 1 + len(case.peers) + 1, "the model, first runs, a round"
    ours, peer = transformers_gpu._rows(name, found)
    assert ours[:2] == (name, "anyattn") and ours[3] == "" and peer[:2] == (name, case.peers[0]) and float(peer[3]) > 0


def test_an_implementation_that_raises_leaves_the_others() -> None:
    case = replace(CASES["eager"].tiny(), peers=("sdpa", "no such thing"), limit=0.0)
    found = transformers_gpu._measured(case, torch.device("cpu"), lambda text: None)
    assert set(found["rates"]) == {"anyattn", "sdpa"} and set(found["errors"]) == {"no such thing"}


def test_a_case_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """With its process; what is over when time is, is said."""
    monkeypatch.setattr(transformers_gpu, "_START_S", 0)
    monkeypatch.setitem(CASES, "eager", replace(CASES["eager"], limit=0.01))
    result = click.testing.CliRunner().invoke(main, ["--tiny", "--cases", "eager,paged", "--seconds", "5.005"], catch_exceptions=False)
    assert result.exit_code == 0
    assert "eager: ended, at most 0 s: its process ended" in result.output and "paged: not measured, 5 s are over" in result.output


def test_an_unknown_case_is_refused() -> None:
    result = click.testing.CliRunner().invoke(main, ["--cases", "eager,other"])
    assert result.exit_code == 2 and "no case 'other'; wanted some of eager, paged" in result.output
