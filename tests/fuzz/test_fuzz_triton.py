"""The Triton kernels on random calls of every door, by Triton's interpreter (``triton_fuzz_interpreted.py``).

A few dozen fixed calls as a rule; with ANYATTN_FUZZ=n (or ``make fuzz``) n / 10 fresh ones in all, for each takes a second, whose seeds are
printed and can be given back as ANYATTN_FUZZ_SEED.
"""

from __future__ import annotations

import importlib.util
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.limits import HANG

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
HERE = Path(__file__).resolve().parent

FRESH = int(os.environ.get("ANYATTN_FUZZ") or os.environ.get("ANYATTN_FUZZ_EXAMPLES") or 0)
FIRST_SEED = int(os.environ.get("ANYATTN_FUZZ_SEED") or (random.SystemRandom().randrange(10**6) if FRESH else 0))
SHARDS = 4 if FRESH else 1
FIXED = {"flex": 18, "sequences": 8, "cache": 12}  # their calls differ in how long they take


@pytest.mark.timeout(0 if FRESH else HANG + 600)
@pytest.mark.parametrize("shard", range(SHARDS))
@pytest.mark.parametrize("name", FIXED)
def test_random_calls(name: str, shard: int) -> None:
    """The interpreter is chosen when Triton is imported, so it gets a process of its own."""
    seed, examples = FIRST_SEED + shard, -(-FRESH // (10 * SHARDS * len(FIXED))) if FRESH else FIXED[name]
    if FRESH:
        print(f"ANYATTN_FUZZ_SEED={FIRST_SEED} (shard {shard})", file=sys.stderr)
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "ANYATTN_TEST_BACKEND": "triton", "ANYATTN_TEST_TILES": "32x16", "ANYATTN_TEST_FILL": "1",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(HERE.parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "ANYATTN_FUZZ_SEED": str(seed), "ANYATTN_FUZZ_EXAMPLES": str(examples), "ANYATTN_FUZZ_SHRINKS": str(int(FRESH > 0)),
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "-o", "timeout=0"]
    command += [str(HERE / "triton_fuzz_interpreted.py"), "-k", name]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=None if FRESH else HANG)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-2000:]
