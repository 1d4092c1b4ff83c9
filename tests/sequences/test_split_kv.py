"""Shares of a range of key tiles, and the number of splits that fills a GPU."""

from __future__ import annotations

import itertools

import pytest

from anyattn.sequences.split_kv import num_splits, split_range


def test_shares_cover_the_range() -> None:
    for lo, hi in ((0, 0), (3, 3), (0, 20), (5, 12), (2, 3)):
        for splits in (1, 2, 3, 4, 9):
            parts = [split_range(lo, hi, i, splits) for i in range(splits)]
            assert [n for a, b in parts for n in range(a, b)] == list(range(lo, hi))
            assert max(b - a for a, b in parts) <= -(-(hi - lo) // splits)


def test_number_of_splits() -> None:
    assert num_splits(64, 64, heads=32, batch=4, sm_count=132) == 1, "enough row tiles for every processor"
    assert num_splits(1, 1, heads=1, batch=1, sm_count=132) == 1, "one key tile cannot be divided"
    assert num_splits(0, 9, 1, 1, 132) == num_splits(1, 0, 1, 1, 132) == 1
    for tiles, keys, sms in itertools.product((1, 8, 48, 66, 132, 500), (1, 4, 64, 512), (2, 108, 132)):
        found = num_splits(1, keys, 1, tiles, sms)
        assert 1 <= found <= min(keys, 128)
        if tiles * 2 <= sms and keys >= 64:
            busy = [tiles * s / (-(-tiles * s // sms) * sms) for s in (1, found)]
            assert found > 1 and busy[1] > busy[0], "idle processors are used"
    assert num_splits(1, 1000, 1, 1, 132, max_splits=16) <= 16
    for bad in ({"sm_count": 0}, {"heads": -1}, {"max_splits": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            num_splits(**({"num_m_blocks": 1, "num_n_blocks": 1, "heads": 1, "batch": 1, "sm_count": 1} | bad))
