"""How many heads are computed at a time: what both kernels' orders of work ask."""

from __future__ import annotations

import importlib.util

import pytest

from anyattn.sequences.l2_groups import heads_side_by_side


@pytest.mark.parametrize(
    ("head_bytes", "ratio", "room", "wanted"),
    [(1 << 20, 1, 8 << 20, 8), (3 << 20, 4, 8 << 20, 8), (9 << 20, 5, 8 << 20, 5), (0, 2, 8 << 20, 16 << 20)],
)
def test_as_many_as_fit_and_one_head_of_keys_at_least(head_bytes: int, ratio: int, room: int, wanted: int) -> None:
    assert heads_side_by_side(head_bytes, ratio, room) == wanted


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("heads", "head_bytes", "wanted"), [(12, 4 << 20, 6), (7, 4 << 20, 1), (48, 1, 24), (5, 1 << 30, 1), (32, 0, 32)])
def test_triton_goes_through_equal_groups(heads: int, head_bytes: int, wanted: int) -> None:
    """A divisor, so that no program of the grid has nothing to do; 24 MB have room for six heads of four, and 32 is the most."""
    from anyattn.backends.triton.tile_config import heads_together

    assert heads_together(heads, head_bytes) == wanted
