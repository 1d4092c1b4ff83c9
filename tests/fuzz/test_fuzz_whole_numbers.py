"""Random mods of whole numbers against torch, for everything that reads a mod.

Some hundred fixed programs as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones, whose seeds are printed; ANYATTN_FUZZ_SEED
repeats them, and ``whole_numbers.program(seed)`` the one that a failure names.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.fuzz.cute_checks import check_cute, check_words
from tests.support.fuzz.geometric_masks import geometric_masks
from tests.support.fuzz.readers import SHARDS, check_mask, check_readers, check_triton_text, seeds_of
from tests.support.fuzz.shards import shards
from tests.support.fuzz.whole_number_checks import check_evaluation, traced
from tests.support.fuzz.whole_numbers import FRESH, programs

pytestmark = [pytest.mark.timeout(0)] if FRESH else []  # as long as it is asked to

PLACES = [(0, 0), (192, 130), (70, 128), (1024, 960), (70_000, 69_999)]  # rows and keys of tiles in which masks of geometry have edges


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_readers(shard: int) -> None:
    """The evaluator, the torch backend's stages, classes of tiles, row ranges, and the text for CuTe by value."""
    first, count = seeds_of(shard, 300)
    read = check_readers(programs(count, first))
    assert read.asked > 0.9 * count and read.has_ranges > 0.2 * count and read.is_taken > 0.6 * count
    assert read.has_words > 0.05 * count


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_readers_of_geometry(shard: int) -> None:
    """The same, and words of bits along tiles, for masks of images, strides, blocks and windows."""
    first, count = seeds_of(shard, 150)
    has_ranges = has_words = asked = 0
    for made in geometric_masks(count, first):
        mod = traced(made)
        if mod is None:
            continue
        asked += 1
        check_evaluation(made, mod)
        assert check_cute(made, mod)
        has_ranges += check_mask(made, mod)
        found = [check_words(made, mod, at) for at in ([(0, 0)] if made.reads_positions else PLACES)]
        has_words += any(found)
    assert asked > 0.9 * count and has_ranges > 0.1 * count and has_words > 0.2 * count


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_triton_text(shard: int) -> None:
    check_triton_text("whole", shard)
