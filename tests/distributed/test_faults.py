"""Errors of context parallelism: one that names the argument and the cure, on every rank; and ranks that fail alone."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from anyattn.distributed.channel import Channel
from tests.distributed import faults
from tests.support.ranks import RankError, new_ranks, on_ranks


@pytest.mark.parametrize("mistake", faults.EVERY_RANK, ids=lambda f: f.__name__)
def test_a_mistake_is_told_on_every_rank_and_leaves_the_group_whole(mistake: Callable[[Any], Any]) -> None:
    for text, is_whole in on_ranks(2, faults.message, mistake):
        assert faults.EVERY_RANK[mistake] in text
        assert is_whole


def test_a_rank_that_fails_alone_is_named_to_the_others() -> None:
    with new_ranks(3) as ranks:
        texts = ranks.run(faults.one_rank_fails)
    assert texts[1].startswith("ValueError: query has ")
    for text in (texts[0], texts[2]):
        assert "waits for a rank that has failed: rank 1: ValueError: query has " in text


def test_a_rank_that_fails_between_two_exchanges_is_named_to_the_others() -> None:
    """last: the first exchange that rank 1 does not make; a forward and a backward pass have four, and two more if keys are not kept."""
    with new_ranks(4) as ranks:
        for last, keep_kv in ((2, True), (3, True), (4, True), (6, False)):
            texts = ranks.run(faults.one_rank_fails_before, last, keep_kv)
            assert texts[1] == f"MemoryError: before exchange {last}"
            for rank in (0, 2, 3):
                assert f"waits for a rank that has failed: rank 1: MemoryError: before exchange {last}" in texts[rank]


def test_after_an_error_of_one_rank_no_message_reaches_a_wrong_call() -> None:
    with new_ranks(2) as ranks:
        texts = ranks.run(faults.one_rank_fails_and_goes_on)
    assert texts[1][0].startswith("ValueError: query has ")
    assert "waits for a rank that has failed: rank 1" in texts[0][0]
    for each in texts:
        for text in each[1:]:
            assert "none can know whose the next one is; wanted a new process group" in text


def test_a_rank_that_dies_leaves_no_rank_waiting() -> None:
    with new_ranks(2) as ranks, pytest.raises(RankError) as raised:
        ranks.run(faults.one_rank_dies)
    assert raised.value.messages[1] == "its process has ended"


@pytest.mark.parametrize(("name", "polls"), [("nccl", 0), ("gloo", 1)])
def test_the_host_waits_where_the_backend_of_the_device_asks_it_to(name: str, polls: int) -> None:
    """A group that ``init_device_mesh`` has made names no backend: it has one for each type of device."""

    class Group:
        group_name = "a group of this test"

        def _get_backend(self, device: torch.device) -> Any:
            return SimpleNamespace(name=lambda: name)

    asked: list[int] = []
    work = SimpleNamespace(is_completed=lambda: asked.append(1) or True, wait=lambda: None)
    channel = object.__new__(Channel)
    channel.group, channel._waits_on_host, channel._device = Group(), {}, torch.device("cuda", 0)  # type: ignore[assignment]
    channel.finish(work, "a message")
    assert len(asked) == polls
