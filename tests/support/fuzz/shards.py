"""Shards of fixed random calls: ``make test`` runs the first shard of each kind, ``make test-long`` all; new calls fill any."""

from __future__ import annotations

import pytest

__all__ = ["shards"]


def shards(count: int, fresh: int) -> list:
    return [shard if fresh or not shard else pytest.param(shard, marks=pytest.mark.slow) for shard in range(count)]
