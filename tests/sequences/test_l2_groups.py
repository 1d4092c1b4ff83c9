"""How many heads are computed at a time: what both kernels' orders of work ask."""

from __future__ import annotations

import importlib.util
import inspect
import itertools
import math
from types import SimpleNamespace

import pytest

from anyattn.sequences.l2_groups import equal_groups, fills_one_round, heads_side_by_side, place_in_groups


@pytest.mark.parametrize(
    ("head_bytes", "ratio", "room", "wanted"),
    [(1 << 20, 1, 8 << 20, 8), (3 << 20, 4, 8 << 20, 8), (9 << 20, 5, 8 << 20, 5), (0, 2, 8 << 20, 16 << 20)],
)
def test_as_many_as_fit_and_one_head_of_keys_at_least(head_bytes: int, ratio: int, room: int, wanted: int) -> None:
    assert heads_side_by_side(head_bytes, ratio, room) == wanted


@pytest.mark.parametrize(("heads", "most", "wanted"), [(12, 8, 6), (7, 6, 1), (7, 9, 7), (48, 24, 24), (5, 1, 1)])
def test_equal_groups(heads: int, most: int, wanted: int) -> None:
    assert equal_groups(heads, most) == wanted


CASES = [(3, 7, 2), (1, 4, 4), (5, 3, 1), (2, 5, 9), (4, 6, 3)]  # tiles, heads, together


def in_groups(tiles: int, heads: int, together: int) -> list[tuple[int, int]]:
    """(tile, head) one after the other."""
    groups = [range(heads)[first : first + together] for first in range(0, heads, together)]
    return [(tile, head) for group in groups for tile in range(tiles) for head in group]


@pytest.mark.parametrize(("tiles", "heads", "together"), CASES)
def test_work_goes_through_a_group_s_first_tiles_first(tiles: int, heads: int, together: int) -> None:
    together = min(heads, together)
    found = [place_in_groups(work, tiles, heads, together) for work in range(tiles * heads)]
    assert found == in_groups(tiles, heads, together)


class _Cute:
    """What ``row_tile`` asks of its class and its tables."""

    def __init__(self) -> None:
        self.config = SimpleNamespace(has_order=False, has_entries=False, has_right=False, spread="heads")


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize(("tiles", "heads", "together"), CASES)
def test_hopper_s_kernel_goes_so(tiles: int, heads: int, together: int) -> None:
    from anyattn.backends.hopper.kernel.tile_scheduler import Sizes, Visits

    together = min(heads, together)
    sizes = Sizes(tiles, heads, together, heads, 1, 0)
    row_tile = inspect.unwrap(Visits.row_tile)
    found = [row_tile(_Cute(), work, None, sizes)[:2] for work in range(tiles * heads)]
    assert [(int(m), int(h)) for m, h in found] == in_groups(tiles, heads, together)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("tiles", "heads", "together"), CASES)
@pytest.mark.parametrize("entries", [1, 3])
def test_triton_s_backward_kernels_go_so(tiles: int, heads: int, together: int, entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the heads of all entries, whatever axis of the grid the tiles are."""
    from anyattn.backends.triton.kernels import addressing

    grid, of_all = (tiles, heads, entries), heads * entries
    at = [0, 0, 0]
    language = SimpleNamespace(
        num_programs=lambda i: grid[i], program_id=lambda i: at[i], where=lambda c, a, b: a if c else b, minimum=min, constexpr=None
    )
    place = addressing.place_of_program.fn
    monkeypatch.setitem(place.__globals__, "tl", language)
    found = []
    for z, y, x in itertools.product(range(entries), range(heads), range(tiles)):
        at[:] = x, y, z
        m, b, h = place(SimpleNamespace(row_tiles=tiles, together=min(together, of_all)), None, False, False)
        found.append((m, b * heads + h))
    assert found == in_groups(tiles, of_all, min(together, of_all))


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("heads", "head_bytes", "wanted"), [(12, 4 << 20, 6), (5, 4 << 20, 5), (99, 1, 99), (5, 1 << 30, 1), (32, 0, 32)])
def test_triton_s_backward_pass_goes_through_as_many_as_fit(heads: int, head_bytes: int, wanted: int) -> None:
    """24 MB have room for six heads of four; all where the first tiles see much more than others."""
    from anyattn.backends.triton.tile_config import heads_in_turn

    assert heads_in_turn("dq", heads, head_bytes, False) == wanted
    assert heads_in_turn("dkdv", heads, head_bytes, True) == heads


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize(("heads", "head_bytes", "wanted"), [(12, 4 << 20, 6), (7, 4 << 20, 1), (48, 1, 24), (5, 1 << 30, 1), (32, 0, 32)])
def test_triton_goes_through_equal_groups(heads: int, head_bytes: int, wanted: int) -> None:
    """A divisor, so that no program of the grid has nothing to do; 24 MB have room for six heads of four, and 32 is the most."""
    from anyattn.backends.triton.tile_config import heads_together

    assert heads_together(heads, head_bytes) == wanted


@pytest.mark.parametrize(("tiles", "processors"), [(132, 132), (126, 132), (95, 100), (1, 1)])
def test_a_round_is_full_from_95_percent_on(tiles: int, processors: int) -> None:
    assert fills_one_round(tiles, processors)
    assert not fills_one_round(processors + 1, processors)
    assert not fills_one_round(math.ceil(0.95 * processors) - 1, processors)
