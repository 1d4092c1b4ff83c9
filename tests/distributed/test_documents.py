"""Document masks whose pieces are sequences of one local call, as on GPUs: against the oracle, with all gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import documents, uses
from tests.distributed.documents import DOCUMENTS, DocumentCase
from tests.distributed.programs import tensors_of
from tests.support import cases
from tests.support.cases import KINDS, Shape
from tests.support.ranks import on_ranks

SHAPES = (Shape(1, 4, 2, 300, 300, 16, 8), Shape(1, 3, 1, 257, 257, 24, 40), Shape(1, 2, 2, 131, 131, 16, 16))
PLANS: tuple[dict[str, Any], ...] = ({"as_causal": True}, {"overlap": True}, {"keep_kv": False, "as_causal": True}, {})
MATRIX = [
    (
        DocumentCase(name, SHAPES[(i + ranks) % 3], KINDS[(i + ranks) % 3], seed=9 * i + ranks),
        ranks,
        PLANS[(i + ranks // 2) % 4] | ({"node_size": 2} if ranks == 4 and i % 2 == 0 else {}),
    )
    for i, name in enumerate(DOCUMENTS)
    for ranks in (2, 3, 4)
]


@pytest.mark.parametrize(("case", "ranks", "plan"), MATRIX, ids=str)
def test_equals_the_oracle(case: DocumentCase, ranks: int, plan: dict[str, Any]) -> None:
    want = cases.expected(case, torch.float32)
    for got in on_ranks(ranks, documents.run, case, tensors_of(want), 16, plan, {}):
        want.check(got, f"{case} on {ranks} ranks")


def test_sequences_are_used_while_the_ids_are_what_they_were() -> None:
    for rank, found in enumerate(on_ranks(2, documents.uses)):
        assert found == [False, rank == 0, True, False, False, False]  # the second rank has one piece


def test_heads_of_tensor_parallelism_are_global() -> None:
    for found in on_ranks(2, documents.head_offsets):
        second = len(found) // 2  # mask, which reads the head
        assert found[0] and not found[second]
        assert all(found[1:second] + found[second + 1 :])


def test_no_key_travels_around_a_gap_of_own_keys() -> None:
    assert all(map(all, on_ranks(2, uses.own_keys_around_a_gap)))


def test_plans_are_kept_for_what_they_depend_on() -> None:
    for counts, is_same, most in on_ranks(2, uses.plans_of_documents):
        assert counts == [1, 1, 2]
        assert is_same
        assert most <= 6
