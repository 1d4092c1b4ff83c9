"""Plans with even shares of all key tiles: which calls have them, how many programs, and what explains them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from anyattn import hardware
from anyattn.backends.triton import launch_shape, tile_config
from anyattn.problem import Problem

H200 = hardware.Hardware("cuda", "a GPU", 0, frozenset(), (9, 0), 132)


def problem_of(window: int | None = None, keys: int = 131072, rows: int = 1, dim: int = 128, **more: Any) -> Problem:
    """Queries at the end of many keys, which are one number spread over all of them."""
    from anyattn.mods.tracing.trace import trace

    q, k = torch.zeros(1, 32, rows, dim, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16).expand(1, 8, keys, dim)
    mask: Any = (lambda b, h, i, j: i + keys - 1 >= j) if window is None else lambda b, h, i, j: (i + keys - 1 - j < window) & (
        i + keys - 1 >= j
    )  # fmt: skip
    return Problem(q, k, k, 0.1, **{"predicates": (trace(mask, "mask"),), "num_splits": 0, **more})


@pytest.mark.parametrize("dim", [64, 128, 256])
def test_two_programs_on_a_multiprocessor(dim: int) -> None:
    found = launch_shape.layout_of(problem_of(dim=dim), H200, {})
    assert found.shares is not None and (found.shares.programs, found.num_splits) == (264, 1) and "264 programs" in found.why[-1]
    assert tile_config.resident(found.tiles, tile_config.Shape(dim, dim, torch.bfloat16), (9, 0)) >= 2, "what the table promises"


def test_a_number_of_splits_is_followed() -> None:
    for splits in (1, 7):
        found = launch_shape.layout_of(problem_of(), H200, {"num_splits": splits})
        assert (found.shares, found.num_splits) == (None, splits)
    assert launch_shape.layout_of(problem_of(num_splits=3), H200, {}).num_splits == 3


def test_many_rows_greatest_scores_and_few_keys_are_cut_into_splits() -> None:
    for problem in (problem_of(rows=64), problem_of(wants_max=True), problem_of(keys=8192)):
        found = launch_shape.layout_of(problem, H200, {})
        assert found.shares is None and found.num_splits > 1


def test_tiles_that_are_measured_later_are_not_shared() -> None:
    """The parts have room for the rows of the planned tiles; on an H200 some that are measured have four times as many."""
    found = launch_shape.layout_of(problem_of(rows=16), H200, {"autotune": True})
    assert found.shares is None and found.num_splits > 1


def test_a_window_bounds_the_tiles_of_an_item() -> None:
    whole, window = (launch_shape.layout_of(problem_of(w), H200, {}) for w in (None, 32768))
    assert whole.shares is not None and window.shares is not None
    assert whole.tiles == window.tiles and whole.shares.most >= 131072 // whole.tiles.tile_n
    assert 32768 // whole.tiles.tile_n < window.shares.most <= 32768 // whole.tiles.tile_n + 2
    assert launch_shape.layout_of(problem_of(1024), H200, {}).shares is None, "so few keys are read in no time"
