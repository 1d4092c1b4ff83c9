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


def _covered(case: cases.Case, dtype: torch.dtype) -> tuple:
    """Each variant; long ones with a mask alone and with a score; each shape in each dtype that it meets, and each kind of input."""
    is_long = max(case.shape) >= 2048
    return case.variant, (cases.VARIANTS[case.variant].score is None, is_long), (is_long, case.kind), (case.shape, dtype)


def _cost(case: cases.Case, dtype: torch.dtype) -> float:
    """The noise of captured tensors' gradients takes dozens of derivatives of the mod for every pair."""
    pairs = case.shape.batch * case.shape.heads_q * case.shape.seqlen_q * case.shape.seqlen_k
    return pairs * (50 if cases.VARIANTS[case.variant].score is not None else 1)


@pytest.mark.covering(1, of=_covered, cost=_cost)
@pytest.mark.parametrize(("case", "dtype"), MATRIX, ids=lambda x: str(x).removeprefix("torch."))
def test_case(case, dtype):
    want = cases.expected(case, dtype)
    want.check(results(case, want), str(case))


HALF_MATRIX = [(case, HALVES[i % 2]) for i, case in enumerate(c for c in cases.CASES if cases.VARIANTS[c.variant].score is None)]


@pytest.mark.covering(1, of=lambda case, dtype: (case.variant, case.kind, case.shape, dtype))
@pytest.mark.parametrize(("case", "dtype"), HALF_MATRIX, ids=lambda x: str(x).removeprefix("torch."))
def test_case_without_lse(case, dtype):
    """In low precision the output alone may be computed another way."""
    want = cases.expected(case, dtype, with_lse=False)
    want.check(results(case, want), str(case))


def test_a_third_of_the_cases_is_long():
    assert sum(max(c.shape) >= 2048 for c in cases.CASES) * 3 >= len(cases.CASES)
