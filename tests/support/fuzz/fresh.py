"""Fixed and fresh random calls by hypothesis: how many a run makes, by which seeds, and the loop over them."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Callable
from typing import Any

import hypothesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

__all__ = ["FIRST_SEED", "FRESH", "first_seed", "many"]


def first_seed(fresh: int) -> int:
    return int(os.environ.get("ANYATTN_FUZZ_SEED") or (random.SystemRandom().randrange(10**6) if fresh else 0))


# fresh calls that are asked for, 0 for the fixed ones; the first shard's seed
FRESH = int(os.environ.get("ANYATTN_FUZZ") or os.environ.get("ANYATTN_FUZZ_EXAMPLES") or 0)
FIRST_SEED = first_seed(FRESH)


def many(
    run: Callable[[Any], None], drawn: st.SearchStrategy, examples: int, shard: int, seed: int = FIRST_SEED, fresh: int = FRESH,
    shrinks: bool = True,
) -> None:  # fmt: skip
    """Runs a shard's ``examples`` calls. seed: of the first shard, which is printed for ``fresh`` calls. shrinks: whether a failing call is
    made smaller."""
    if fresh:
        print(f"ANYATTN_FUZZ_SEED={seed} (shard {shard})", file=sys.stderr)

    @hypothesis.seed(seed + shard)
    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        print_blob=bool(fresh),
        suppress_health_check=list(HealthCheck),
        phases=(Phase.generate, Phase.shrink) if shrinks else (Phase.generate,),
    )
    @hypothesis.given(drawn)
    def calls(values: Any) -> None:
        run(values)

    calls()
