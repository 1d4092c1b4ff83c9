"""Random masks of floats against torch, for everything that reads a mask: infinities, NaN, zeros of both signs, numbers at an overflow.

Some hundred fixed programs as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones, as in ``test_fuzz_whole_numbers.py``.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.fuzz.test_fuzz_whole_numbers import FRESH, SHARDS, check_mask, seeds_of
from tests.support.fuzz.cute_checks import check_cute, check_words
from tests.support.fuzz.float_masks import float_masks
from tests.support.fuzz.shards import shards
from tests.support.fuzz.whole_number_checks import check_evaluation, traced
from tests.support.limits import HANG
from tests.support.processes import python

pytestmark = [pytest.mark.timeout(0)] if FRESH else []


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_readers(shard: int) -> None:
    """The evaluator, the torch backend's stages, classes of tiles, row ranges, and the text for CuTe by value."""
    first, count = seeds_of(shard, 400)
    has_ranges = is_taken = has_words = asked = 0
    for made in float_masks(count, first):
        mod = traced(made)
        if mod is None:
            continue
        asked += 1
        check_evaluation(made, mod)
        is_taken += check_cute(made, mod)
        has_ranges += check_mask(made, mod)
        has_words += check_words(made, mod)
    assert asked > 0.9 * count and has_ranges > 0.08 * count and is_taken > 0.35 * count and has_words > 0.02 * count


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_triton_text(shard: int) -> None:
    """In a process of its own, as the interpreter is chosen when Triton is imported."""
    first, count = seeds_of(shard, 200)
    command = ["-W", "ignore", "-m", "tests.support.fuzz.programs_in_triton", "float", str(first), str(count)]
    done = python(*command, seconds=None if FRESH else HANG, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-12000:]
