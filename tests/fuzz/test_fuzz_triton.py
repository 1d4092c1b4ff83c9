"""The Triton kernels on random calls of every door, by Triton's interpreter (``test_fuzz_triton_interpreted.py``).

A few dozen fixed calls as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n / 10 fresh ones in all, for each takes a second, and as many
batches for ``deterministic="batch"``, whose seeds are printed and can be given back as ANYATTN_FUZZ_SEED.
``make fuzz FUZZ=20000 ARGS="-k 'triton and batches'"`` runs 2,000 batches.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import pytest

from tests.support.fuzz.fresh import FIRST_SEED, FRESH
from tests.support.fuzz.shards import shards
from tests.support.limits import HANG
from tests.support.processes import in_the_interpreter

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

SHARDS = 4
# of a shard; their calls differ in how long they take
FIXED = {
    "calls": {
        "flex": 5,
        "chosen blocks": 2,
        "requests": 2,
        "thresholds": 2,
        "sequences": 2,
        "chosen sequences": 1,
        "cache": 3,
        "8 bits": 3,
    },
    "batches": {"batches": 4},
}


@pytest.mark.timeout(0 if FRESH else HANG + 600)
@pytest.mark.parametrize("shard", shards(SHARDS, FRESH))
@pytest.mark.parametrize("kinds", FIXED)
def test_random_calls(kinds: str, shard: int) -> None:
    """The interpreter is chosen when Triton is imported, so it gets a process of its own."""
    fixed = FIXED[kinds]
    examples = dict.fromkeys(fixed, -(-FRESH // (10 * SHARDS * len(fixed)))) if FRESH else fixed
    if FRESH:
        print(f"ANYATTN_FUZZ_SEED={FIRST_SEED} (shard {shard})", file=sys.stderr)
    in_the_interpreter(
        "fuzz/test_fuzz_triton_interpreted.py", options=("-o", "timeout=0"), seconds=None if FRESH else HANG,
        ANYATTN_TEST_BACKEND="triton", ANYATTN_TEST_TILES="32x16", ANYATTN_TEST_FILL="1",
        ANYATTN_FUZZ_SEED=str(FIRST_SEED + shard), ANYATTN_FUZZ_OF_EACH=json.dumps(examples), ANYATTN_FUZZ_SHRINKS=str(int(FRESH > 0)),
    )  # fmt: skip
