"""flex_attention, forward and backward, against the oracle: every variant on several shapes, kinds of input and dtypes."""

from __future__ import annotations

import pytest
import torch

from tests.support import cases
from tests.support.flex_calls import results

HALVES = (torch.bfloat16, torch.float16)


def _dtypes(position: int, case: cases.Case) -> list[torch.dtype]:
    """Small cases in float32 and one more dtype in turn, large ones in one dtype in turn: each variant meets several."""
    if max(case.shape) >= 2048:
        return [(torch.float32, torch.bfloat16, torch.float32, torch.float16)[position // 3 % 4]]
    return [torch.float32, (torch.float64, *HALVES)[position % 3]]


MATRIX = [(case, dtype) for i, case in enumerate(cases.CASES) for dtype in _dtypes(i, case)]


def _kind(case: cases.Case) -> str:
    variant = cases.VARIANTS[case.variant]
    if variant.score is None:
        return "mask"
    return "capturing score" if variant.make(case.shape, torch.Generator()) else "score"


def _covered(case: cases.Case, dtype: torch.dtype) -> tuple:
    """Each variant; long ones with a mask alone, with a score, and with one that captures tensors; each shape in each dtype that it meets,
    and each kind of input."""
    is_long = max(case.shape) >= 2048
    return case.variant, (_kind(case), is_long), (is_long, case.kind), (case.shape, dtype)


def _cost(case: cases.Case, dtype: torch.dtype) -> float:
    """Pairs, of which a mask hides half, and what every call takes. The noise of captured tensors' gradients takes dozens of derivatives of
    the mod for every pair."""
    pairs = case.shape.batch * case.shape.heads_q * case.shape.seqlen_q * case.shape.seqlen_k
    factor = {"mask": 1, "score": 3, "capturing score": 20}[_kind(case)]
    return 200_000 + pairs * factor / (2 if cases.VARIANTS[case.variant].mask is not None else 1)


@pytest.mark.covering(1, of=_covered, cost=_cost)
@pytest.mark.parametrize(("case", "dtype"), MATRIX, ids=lambda x: str(x).removeprefix("torch."))
def test_case(case, dtype):
    want = cases.expected(case, dtype)
    want.check(results(case, want), str(case))


HALF_MATRIX = [(case, HALVES[i % 2]) for i, case in enumerate(c for c in cases.CASES if cases.VARIANTS[c.variant].score is None)]


@pytest.mark.covering(1, of=lambda case, dtype: (case.variant, case.kind, case.shape, dtype), cost=_cost)
@pytest.mark.parametrize(("case", "dtype"), HALF_MATRIX, ids=lambda x: str(x).removeprefix("torch."))
def test_case_without_lse(case, dtype):
    """In low precision the output alone may be computed another way."""
    want = cases.expected(case, dtype, with_lse=False)
    want.check(results(case, want), str(case))


def test_a_third_of_the_cases_is_long():
    assert sum(max(c.shape) >= 2048 for c in cases.CASES) * 3 >= len(cases.CASES)
