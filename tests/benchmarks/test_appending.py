"""The benchmark of appending appends what it says, in every form, and attends to nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner

from anyattn import autograd
from benchmarks import appending
from tests.support.no_reading import noted_launches

pytest.importorskip("triton")


@pytest.mark.parametrize("case", appending.CASES, ids=lambda case: case.name)
def test_each_form_appends(case: appending.Case, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyattn.backends.triton import append_rotary

    gpu = noted_launches(monkeypatch, (9, 0))
    noted: list[tuple] = []
    monkeypatch.setattr(append_rotary, "run_plain", lambda *given: noted.append(given))
    monkeypatch.setattr(autograd, "compute", lambda *given: pytest.fail("attends"))
    small = case._replace(batch=min(case.batch, 2))
    for form, call in appending.calls_of(small, "cpu").items():
        before = len(noted)
        call()
        assert len(noted) == before + 1 and not gpu.made, form


def test_the_ratio_and_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    def medians(calls: dict[str, Callable[[], Any]], *more: int) -> dict[str, float]:
        return {form: 2.0 + i for i, form in enumerate(calls)}

    monkeypatch.setattr(appending, "medians", medians)
    monkeypatch.setattr(appending, "calls_of", lambda case, device: dict.fromkeys(appending.FORMS))
    assert appending.appending_times()["ratio"] == 3.0
    shown = CliRunner().invoke(appending.main, [], catch_exceptions=False).output
    assert "B64, 1 new, pages of 16" in shown and "factors of heads 4.00 (2.00)" in shown and "the greatest ratio 3.00" in shown
