"""``plan.rows``: captured tensors that hold a rank's rows alone, eager, compiled and wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import faults, marked_rows
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("is_dealt", [False, True], ids=["few intervals", "many intervals"])
@pytest.mark.parametrize(("ranks", "overlap"), [(2, True), (2, False), (3, True)])
def test_results_and_gradients_are_those_of_one_process(ranks: int, overlap: bool, is_dealt: bool) -> None:
    assert all(map(all, on_ranks(ranks, marked_rows.results, {"overlap": overlap}, is_dealt)))


def test_other_ways_to_call() -> None:
    assert all(map(all, on_ranks(2, marked_rows.in_a_mode)))
    assert all(on_ranks(1, marked_rows.one_rank))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_code_marks_inside(backend: str) -> None:
    for agree, graphs in on_ranks(2, marked_rows.compiled, backend):
        assert agree
        assert graphs == 1


@pytest.mark.parametrize("wants_grad", [False, True])
def test_a_mark_from_outside_of_compiled_code_is_never_read_by_global_positions(wants_grad: bool) -> None:
    assert all(on_ranks(2, marked_rows.marked_outside_of_compiled_code, wants_grad))


@pytest.mark.parametrize("mistake", marked_rows.MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_an_error_on_every_rank(mistake: Callable[[Any], Any]) -> None:
    for text, is_whole in on_ranks(2, faults.message, mistake):
        assert marked_rows.MISTAKES[mistake] in text
        assert is_whole
