"""``deterministic="batch"`` on random batches: a sequence alone and among others, in every form of storage, is the same bits.

64 fixed batches, a quarter of them in ``make test``; with ANYATTN_FUZZ=n (or ``make fuzz``) n fresh ones, whose seeds are printed and can
be given back as ANYATTN_FUZZ_SEED. ``make fuzz FUZZ=2000 ARGS="-k fuzz_batches"`` runs these alone. ``test_fuzz_triton.py`` has batches for
Triton's interpreter, ``tests/gpu/fuzz.py`` for a GPU.
"""

from __future__ import annotations

import collections
import random
from collections.abc import Iterator

import pytest
import torch
from hypothesis import strategies as st

from tests.support.fuzz.fresh import FRESH, many
from tests.support.fuzz.random_batches import Batch, Limits, check, drawn, of_threads
from tests.support.fuzz.shards import shards

SHARDS, FIXED = 4, 64

# of a generator with its own numbers: hypothesis prefers first choices and equal ones, of which a batch has few combinations
batches = st.integers(0, 2**32 - 1).map(lambda n: drawn(random.Random(n), Limits()))


@pytest.fixture
def _threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
def test_random_batches(shard: int) -> None:
    ran, examples = collections.Counter[str](), -(-(FRESH or FIXED) // SHARDS)

    def one(batch: Batch) -> None:
        check(batch, between=of_threads)
        ran.update({"batches": 1, "ways": len(batch.forms), batch.option: 1, str(batch.dims): 1, str(batch.dtype): 1})

    many(one, batches, examples, shard)
    print(dict(ran))
    assert ran["batches"] >= examples
