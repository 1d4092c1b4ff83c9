"""What torch computes on a CPU is what a mod's functions compute: every function, dtype by dtype."""

from __future__ import annotations

import pytest
import torch

from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.trace import trace
from tests.support.torch_functions import CASES, DTYPES, arguments, wrong

SIZE = 4096


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_functions_of_captured_values_are_torchs(name: str, dtype: torch.dtype) -> None:
    """Single operations to the bit; compounds of 16-bit values are rounded once."""
    f, count, terms = CASES[name]
    table, at = arguments(count, dtype, SIZE), torch.arange(SIZE)
    theirs = f(*table)
    traced = trace(lambda s, b, h, q, k: f(*(table[n, k] for n in range(count))).double(), "score", score_dtype=torch.float64)
    ours = evaluate(traced, 0, 0, 0, at)
    if terms is None:
        assert torch.equal(ours.nan_to_num(7.25), theirs.double().nan_to_num(7.25))
    else:
        bad = wrong(ours, theirs, 4, terms(*table.double()))
        assert not bad.any(), (table[:, bad], ours[bad], theirs[bad])
