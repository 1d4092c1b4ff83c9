"""``ad.start``: an exchange of keys that begins before its call; its mistakes, and a rank that does not start one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.distributed import faults, started
from tests.support.ranks import new_ranks, on_ranks


@pytest.mark.parametrize("options", [{}, {"overlap": True, "keep_kv": True}, {"overlap": True, "keep_kv": False}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_started_exchange_is_the_calls_own(ranks: int, options: dict[str, Any]) -> None:
    for is_same, more in on_ranks(ranks, started.results, options):
        assert is_same
        assert more == 0


@pytest.mark.parametrize(
    "program",
    [started.checkpointed, started.one_of_several_masks, started.in_compiled_code, started.where_heads_travel],
    ids=lambda f: f.__name__,
)
def test_ways_to_use_it(program: Callable[[Any], bool]) -> None:
    assert all(on_ranks(2, program))
    assert all(on_ranks(1, program))


@pytest.mark.parametrize("mistake", started.MISTAKES, ids=lambda f: f.__name__)
def test_a_mistake_is_an_error_on_every_rank_and_leaves_no_exchange_behind(mistake: Callable[[Any], Any]) -> None:
    for text, is_whole in on_ranks(2, faults.message, mistake):
        assert started.MISTAKES[mistake] in text
        assert is_whole


@pytest.mark.parametrize("warm", ["", "started"])
def test_a_rank_that_does_not_start_is_found(warm: str) -> None:
    with new_ranks(3) as ranks:
        texts = [text for text, _ in ranks.run(started.one_rank_does_not_start, warm)]
    assert all("Error" in text for text in texts), texts
    assert any("start" in text for text in texts), texts


def test_a_rank_that_does_not_start_sends_the_same_message_in_its_call() -> None:
    with new_ranks(2) as ranks:
        for text, is_right in ranks.run(started.one_rank_does_not_start, "both"):
            assert text == "no error"
            assert is_right
