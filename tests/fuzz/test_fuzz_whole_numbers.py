"""Random mods of whole numbers against torch, for everything that reads a mod.

Some hundred fixed programs as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones, whose seeds are printed; ANYATTN_FUZZ_SEED
repeats them, and ``whole_numbers.program(seed)`` the one that a failure names.
"""

from __future__ import annotations

import importlib.util
import sys

import pytest

from anyattn.mods.tracing.trace import TracedMod
from tests.support.fuzz.cute_checks import check_cute, check_cute_ranges, check_words
from tests.support.fuzz.geometric_masks import geometric_masks
from tests.support.fuzz.shards import shards
from tests.support.fuzz.whole_number_checks import check_classes, check_evaluation, check_ranges, check_stages, traced
from tests.support.fuzz.whole_numbers import FIRST_SEED, FRESH, Program, programs
from tests.support.limits import HANG
from tests.support.processes import python

pytestmark = [pytest.mark.timeout(0)] if FRESH else []  # as long as it is asked to

SHARDS = 8 if FRESH else 2
PLACES = [(0, 0), (192, 130), (70, 128), (1024, 960), (70_000, 69_999)]  # rows and keys of tiles in which masks of geometry have edges


def seeds_of(shard: int, fixed: int) -> tuple[int, int]:
    """(first seed, how many programs) of a shard."""
    count = -(-(FRESH or fixed) // SHARDS)
    if FRESH:
        print(f"ANYATTN_FUZZ_SEED={FIRST_SEED} (shard {shard}: programs {FIRST_SEED + shard * count} and on)", file=sys.stderr)
    return FIRST_SEED + shard * count, count


def check_mask(made: Program, mod: TracedMod) -> bool:
    """What is read of masks alone; whether the mask has row ranges."""
    check_stages(made, mod)
    check_classes(made, mod)
    has_ranges = check_ranges(made, mod)
    check_cute_ranges(made, mod)
    return has_ranges


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_readers(shard: int) -> None:
    """The evaluator, the torch backend's stages, classes of tiles, row ranges, and the text for CuTe by value."""
    first, count = seeds_of(shard, 300)
    has_ranges = is_taken = has_words = asked = 0
    for made in programs(count, first):
        mod = traced(made)
        if mod is None:
            continue
        asked += 1
        check_evaluation(made, mod)
        is_taken += check_cute(made, mod)
        if made.kind == "mask":
            has_ranges += check_mask(made, mod)
            has_words += check_words(made, mod)
    assert asked > 0.9 * count and has_ranges > 0.2 * count and is_taken > 0.6 * count
    assert has_words > 0.05 * count


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
    """The interpreter is chosen when Triton is imported, so it gets a process of its own."""
    first, count = seeds_of(shard, 200)
    command = ["-W", "ignore", "-m", "tests.support.fuzz.programs_in_triton", "whole", str(first), str(count)]
    done = python(*command, seconds=None if FRESH else HANG, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-12000:]
