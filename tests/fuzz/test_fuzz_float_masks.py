"""Random masks of floats against torch, for everything that reads a mask: infinities, NaN, zeros of both signs, numbers at an overflow.

Some hundred fixed programs as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones, as in ``test_fuzz_whole_numbers.py``.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.support.fuzz.float_masks import float_masks
from tests.support.fuzz.readers import SHARDS, check_readers, check_triton_text, seeds_of
from tests.support.fuzz.shards import shards
from tests.support.fuzz.whole_numbers import FRESH

pytestmark = [pytest.mark.timeout(0)] if FRESH else []


@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_readers(shard: int) -> None:
    """The evaluator, the torch backend's stages, classes of tiles, row ranges, and the text for CuTe by value."""
    first, count = seeds_of(shard, 400)
    read = check_readers(float_masks(count, first))
    assert read.asked > 0.9 * count and read.has_ranges > 0.08 * count
    assert read.is_taken > 0.35 * count and read.has_words > 0.02 * count


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_triton_text(shard: int) -> None:
    check_triton_text("float", shard)
