"""The training of examples/context_parallel.py: ranks agree with one process, and the comparison would notice if they did not."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from anyattn import distributed as ad
from tests.support.ranks import on_ranks

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


@pytest.fixture(scope="module")
def training() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)  # its processes import it by name
        yield importlib.import_module("context_parallel")


def test_the_command(training: ModuleType) -> None:
    done = CliRunner().invoke(training.main, ["--steps", "3", "--length", "400"])
    assert done.exit_code == 0, done.output
    assert "losses and gradients of one process and of 2 ranks agree at every step" in done.output


def train(mesh: Any, is_compiled: bool, steps: int, plan: Any = None) -> list:
    """The steps of one rank. plan: in place of ``anyattn.distributed.plan``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        training = importlib.import_module("context_parallel")
        if plan is not None:
            patch.setattr(training.ad, "plan", plan)
        return [tuple(step) for step in training.train(training.Settings(400, steps, is_compiled, 3), mesh)]


@pytest.mark.slow
def test_compiled_blocks_agree_too(training: ModuleType) -> None:
    alone = training.train(training.Settings(400, 2, False, 3), None)
    for steps in on_ranks(2, train, True, 2):
        training.judge(alone, [training.Step(*step) for step in steps])


def _with_one_mask(masks: Any, *args: Any, **options: Any) -> Any:
    """The mask of the layers without a window for all of them."""
    return ad.context_plan.plan(dict.fromkeys(masks, masks["full"]), *args, **options)


def test_a_wrong_mask_is_noticed(training: ModuleType) -> None:
    alone = training.train(training.Settings(400, 1, False, 3), None)
    for steps in on_ranks(3, train, False, 1, _with_one_mask):
        with pytest.raises(click.ClickException, match=r"step 0: the loss is .* in one process and .* over the ranks"):
            training.judge(alone, [training.Step(*step) for step in steps])


def test_documents(training: ModuleType) -> None:
    """Every byte's target is the next one of its document."""
    batch = training.pack(700, 5)
    ids, targets, document = batch.ids[0], batch.targets[0], batch.document
    assert len(ids) == len(targets) == len(document) == 700
    ends = (document[1:] != document[:-1]).nonzero()[:, 0]
    assert len(ends) > 0
    assert all(targets[ends] == training.IGNORED) and all(ids[ends] == ord("\n"))
    inside = (document[1:] == document[:-1]).nonzero()[:, 0]
    assert bool((targets[inside] == ids[inside + 1]).all())
