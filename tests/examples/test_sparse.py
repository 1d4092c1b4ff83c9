"""The layers of examples/sparse.py: gradients of dense attention, and checks that notice what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import click
import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.support.examples import example


@pytest.fixture(scope="module")
def sparse() -> ModuleType:
    return example("sparse")


def test_the_command(sparse: ModuleType) -> None:
    done = CliRunner().invoke(sparse.main, ["--check"])
    assert done.exit_code == 0, done.output
    assert done.output.count("the loss falls ok") == 2 and "moba: gradients differ from those of dense attention by" in done.output


@pytest.mark.parametrize("merge", ["gates", "lse"])
def test_gradients_are_those_of_dense_attention(sparse: ModuleType, merge: str) -> None:
    assert sparse.check("nsa", merge, seed=3) <= sparse.AGREE


def test_layers_that_learn_nothing_fail(sparse: ModuleType) -> None:
    done = CliRunner().invoke(sparse.main, ["--steps", "2"])
    assert done.exit_code == 1 and "nsa: the loss has come from" in done.output and "wanted 1.248 or less" in done.output


@pytest.mark.parametrize("name", ["nsa", "moba"])
def test_another_mask_is_noticed(sparse: ModuleType, name: str) -> None:
    """Without the first key."""

    def shifted(q: Tensor, k: Tensor, v: Tensor, mask: Callable[..., Any], visited: Tensor | None) -> Any:
        return sparse.dense(q, k, v, lambda b, h, i, j: mask(b, h, i, j) & (j > 0), visited)

    with pytest.raises(click.ClickException, match=f"{name}: the loss is .* by sparse and .* by dense attention"):
        sparse.check(name, "gates", 0, shifted)


def test_a_choice_is_causal_and_has_the_own_block(sparse: ModuleType) -> None:
    suits = torch.randn(2, 3, 6 * sparse.BLOCK, 6, generator=torch.Generator().manual_seed(0))
    chosen = sparse.chosen_blocks(suits)
    own = torch.arange(suits.shape[2]) // sparse.BLOCK
    assert bool(chosen.gather(-1, own[:, None].expand(2, 3, -1, 1)).all())
    assert torch.equal(chosen.sum(-1), (own + 1).clamp(max=sparse.CHOSEN).expand(2, 3, -1))
    assert not bool(chosen[..., torch.arange(6) > own[:, None]].any())
    best = suits.masked_fill(torch.arange(6) >= own[:, None], -torch.inf).argmax(-1, keepdim=True)
    assert bool(chosen.gather(-1, best)[:, :, sparse.BLOCK :].all()), "the best block before the query's own"


def test_the_dense_definition_is_the_oracles(sparse: ModuleType) -> None:
    """By which the example judges itself, with rows that see nothing."""
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 20, sparse.HEAD_DIM, generator=g) for h in (sparse.HEADS, sparse.HEADS_KV, sparse.HEADS_KV))
    mask = lambda b, h, i, j: (j < i - 2) & ((i + j + h) % 3 > 0)
    want, plain, noise = (f(q, k, v, mask=mask) for f in (oracle.attention, oracle.same_dtype, rounding))
    for name, got, exact, by_hand, drawn in zip(("out", "lse"), sparse.dense(q, k, v, mask, None), want, plain, noise):
        budget.check(name, got, exact, by_hand, drawn)
