"""Into how many pieces the Triton backend cuts keys, against what was measured."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import hardware
from anyattn.backends.triton import launch_shape, tile_config
from anyattn.backends.triton.launch_shape import Reading, pieces_of
from anyattn.call_cache import attention
from anyattn.problem import Problem
from tests.support.no_reading import noted_launches

H200 = 132  # multiprocessors
# GB/s of one query a sequence by number of pieces (H200, 2026-11-21, 1157500): bfloat16, head dimension 128, tiles of 16 x 128, of which
# that commit's kernels had three on a multiprocessor at once. Of tiles of 64 x 128 nothing was measured.
# By (sequences, query heads, K/V heads, keys).
MEASURED = {
    (16, 32, 8, 8192): {1: 3361, 2: 4045, 3: 4002, 4: 3650, 6: 3961, 8: 3945, 12: 3870, 16: 3867, 24: 3800, 32: 3776},
    (64, 32, 8, 4096): {1: 3886, 2: 4134, 3: 4196, 4: 4188, 6: 4087, 8: 4070, 12: 3978, 16: 3955, 24: 3804, 32: 3649},
    (1, 32, 8, 131072): {1: 284, 2: 498, 3: 730, 4: 958, 6: 1384, 8: 1817, 12: 2499, 16: 3166, 24: 3762, 32: 4003},
    (128, 64, 8, 2048): {1: 4220, 2: 4061, 3: 3965, 4: 3952, 6: 3761, 8: 3768, 12: 3576, 16: 3369, 24: 2764, 32: 2285},
}
# Microseconds in tiles of 16 x 64, of which three are on their way (H200, 2026-11-21, 6f25420), two programs on a multiprocessor.
MEASURED_AHEAD = {
    (16, 32, 8, 8192): {1: 125, 2: 135, 3: 153, 4: 137, 6: 139, 8: 140, 12: 141, 16: 143, 24: 147, 32: 158},
    (64, 32, 8, 4096): {1: 250, 2: 260, 3: 260, 4: 261, 6: 264, 8: 267, 12: 277, 16: 295, 24: 352, 32: 425},
    (1, 32, 8, 131072): {1: 1681, 2: 841, 3: 564, 4: 426, 6: 287, 8: 218, 12: 154, 16: 130, 24: 152, 32: 136},
    (128, 64, 8, 2048): {1: 254, 2: 269, 3: 272, 4: 276, 6: 290, 8: 308, 12: 375, 16: 438, 24: 559, 32: 697},
}
# Microseconds of a step whose mask_mod loads a value at each key, by (sequences, query heads, K/V heads, keys, head dimension): tiles of
# 16 x 64, of D 64 of 16 x 128 (H200, 2026-11-23, after b5ce092).
MEASURED_WAITING = {
    (8, 32, 8, 1024, 128): {1: 27.7, 2: 21.9, 3: 22.1, 4: 20.5, 6: 26.2, 8: 24.4, 16: 31.3},
    (8, 32, 8, 4224, 128): {1: 99.6, 2: 68.7, 3: 54.1, 4: 49.3, 6: 59.0, 8: 54.9, 16: 64.7},
    (8, 64, 8, 4224, 64): {1: 61.7, 2: 42.5, 3: 38.6, 4: 35.7, 6: 44.4, 8: 41.5, 16: 49.1},
    (32, 32, 8, 1024, 128): {1: 40.4, 2: 52.6, 3: 57.1, 4: 64.3, 6: 68.4, 8: 78.0, 16: 105.4},
    (2, 32, 8, 1024, 128): {1: 25.6, 2: 18.9, 3: 16.4, 4: 13.9, 6: 12.8, 8: 11.9, 16: 11.9},
    (64, 32, 8, 1024, 128): {1: 77.0, 2: 96.8, 3: 100.6, 4: 115.7, 6: 122.3, 8: 140.9, 16: 202.0},
}
RATES = [(shape, rates, 128) for shape, rates in MEASURED.items()]
RATES += [(shape, {s: 1e6 / us for s, us in times.items()}, 64) for shape, times in MEASURED_AHEAD.items()]
IDS = [f"{shape}, {tile_n}" for shape, _, tile_n in RATES]


@pytest.fixture(autouse=True)
def no_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut by number, however many keys there are."""
    monkeypatch.setattr(launch_shape, "_LEAST_SHARED", 2**50)


def reading(batch: int, heads: int, heads_kv: int, keys: int, tile_n: int = 128, **other: int) -> Reading:
    """As ``layout`` asked about such a step of decoding: a tile of 128 has 64 KiB, of which one is on its way while one is worked on."""
    ahead = {"stages": 1, "resident": 3} if tile_n == 128 else {"stages": 3, "resident": 2}
    facts = {"tile_bytes": tile_n * 512, "partial_bytes": batch * heads * 128 * 4} | ahead | other
    return Reading(programs=batch * heads_kv, key_tiles=-(-keys // tile_n), **facts)


@pytest.mark.parametrize(("shape", "rates", "tile_n"), RATES, ids=IDS)
def test_the_chosen_number_is_near_the_best_that_was_measured(shape: tuple[int, ...], rates: dict[int, float], tile_n: int) -> None:
    chosen = pieces_of(reading(*shape, tile_n=tile_n), H200)
    # between two numbers that were measured, and beyond them, as bad as the worse of the nearest
    near = {max((s for s in rates if s <= chosen), default=min(rates)), min((s for s in rates if s >= chosen), default=max(rates))}
    assert min(rates[s] for s in near) >= 0.95 * max(rates.values()), f"{chosen} pieces"


@pytest.mark.parametrize(("shape", "rates", "tile_n"), RATES, ids=IDS)
def test_the_model_follows_what_was_measured(shape: tuple[int, ...], rates: dict[int, float], tile_n: int) -> None:
    """Relative to the greatest rate, within 15 % of it where pieces are what they seem: not more than there are tiles."""
    of = reading(*shape, tile_n=tile_n)
    times = {s: launch_shape._reading_time(of, s, H200) for s in rates if -(-of.key_tiles // -(-of.key_tiles // s)) == s}
    best = max(times, key=lambda s: rates[s])
    for s, time in times.items():
        assert abs(times[best] / time * rates[best] / rates[s] - 1) < 0.15, (s, times[best] / time, rates[s] / rates[best])


@pytest.mark.parametrize("shape", MEASURED_WAITING, ids=str)
def test_a_mask_that_loads_values_is_cut_into_more_pieces(shape: tuple[int, int, int, int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """And by what a window beside it shows: its keys are read alone."""
    batch, heads, heads_kv, keys, dim = shape
    q, k = torch.empty(batch, 1, heads, dim, dtype=torch.bfloat16), torch.empty(batch, keys, heads_kv, dim, dtype=torch.bfloat16)
    visible = torch.ones(batch, keys, dtype=torch.bool)
    attention.clear()
    launches = noted_launches(monkeypatch, (9, 0))

    def made(**options: Any) -> tuple[int, dict[str, Any]]:
        launches.made.clear()
        anyattn.flash_attn_with_kvcache(q, k, k, causal=True, mask_mod=lambda b, h, i, j: visible[b, j], **options)
        (_, grid, *_, constants) = launches.made[0]
        return grid[2] // batch, constants

    splits, constants = made()
    assert (constants["TILE_M"], constants["TILE_N"]) == (16, 64 if dim == 128 else 128)
    times = MEASURED_WAITING[shape]
    assert times[splits] <= 1.05 * min(times.values())
    assert made(window_size=(127, 0))[0] == 1
    attention.clear()


def test_small_caches_stay_whole() -> None:
    assert pieces_of(reading(1, 32, 8, 256), H200) == 1, "merging takes longer than a second tile"
    assert pieces_of(reading(1, 32, 8, 512), H200) == 1
    assert pieces_of(reading(256, 32, 8, 256), H200) == 1
    assert pieces_of(reading(0, 32, 8, 256), H200) == pieces_of(reading(4, 32, 8, 0), H200) == 1, "nothing to do"


@pytest.mark.parametrize("shape", [(1, 32, 8, 4096), (8, 32, 8, 8192), (2, 32, 8, 16384), (1, 8, 1, 131072), (1, 32, 32, 131072)], ids=str)
def test_few_sequences_fill_the_device(shape: tuple[int, ...]) -> None:
    of = reading(*shape)
    programs = of.programs * pieces_of(of, H200)
    assert programs >= min(2 * H200, of.programs * min(128, of.key_tiles)) * 0.9


def test_a_number_is_not_chosen_that_leaves_pieces_empty() -> None:
    for tiles in range(1, 200, 7):
        for batch in (1, 3, 16, 40):
            chosen = pieces_of(reading(batch, 32, 8, tiles * 128), H200)
            assert -(-tiles // -(-tiles // chosen)) == chosen, (tiles, batch)


def problem_of(window: int | None, keys: int = 131072) -> Problem:
    """One query at the end of many keys, which are one number spread over all of them."""
    from anyattn.mods.tracing.trace import trace

    q, k = torch.zeros(1, 32, 1, 128, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.bfloat16).expand(1, 8, keys, 128)
    mask: Any = (lambda b, h, i, j: i + keys - 1 >= j) if window is None else lambda b, h, i, j: (i + keys - 1 - j < window) & (
        i + keys - 1 >= j
    )  # fmt: skip
    return Problem(q, k, k, 0.1, predicates=(trace(mask, "mask"),), num_splits=0)


def test_a_window_is_cut_by_what_it_shows() -> None:
    machine = hardware.Hardware("cuda", "a GPU", 0, frozenset(), (9, 0), H200)
    whole, window = (launch_shape.layout_of(problem_of(w), machine, {}) for w in (None, 1024))
    assert whole.num_splits >= 16
    resident = tile_config.resident(whole.tiles, tile_config.Shape(128, 128, torch.bfloat16), (9, 0))
    assert whole.tiles == tile_config.Tiles(16, 64, 4, 4) and resident == 2
    of_tile = {"tile_n": 64, "resident": resident}
    assert whole.num_splits == pieces_of(reading(1, 32, 8, 131072, **of_tile), H200)
    assert window.num_splits == pieces_of(reading(1, 32, 8, 1024, **of_tile), H200) <= 16, "of 2,048 tiles it sees 16 or 17"
    assert launch_shape._most_seen(problem_of(1024)) == 1024
    assert launch_shape._most_seen(problem_of(None)) == 131072


def resident(dim: int, rows: int, capability: tuple[int, int], is_short: bool = True) -> int:
    shape = tile_config.Shape(dim, dim, torch.bfloat16)
    return tile_config.resident(tile_config.forward_tiles(shape, capability, rows, is_short), shape, capability)


def test_what_a_multiprocessor_holds() -> None:
    """72, 102 and 80 KiB of shared memory, and as many registers as the measured figures follow."""
    assert tile_config.forward_tiles(tile_config.Shape(128, 128, torch.bfloat16), (9, 0), 4, True) == tile_config.Tiles(16, 64, 4, 4)
    assert [resident(d, 4, (9, 0)) for d in (64, 128, 256)] == [3, 2, 3]
    assert resident(128, 4, (8, 0)) == 2
