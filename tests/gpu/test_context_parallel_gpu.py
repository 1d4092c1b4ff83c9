"""Context parallelism on two GPUs, with NCCL, or on one, with gloo: outputs, lse and all gradients against the oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.documents import DOCUMENTS, DocumentCase
from tests.distributed.programs import attention, tensors_of
from tests.support import cases
from tests.support.cases import KINDS, Case, Shape
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300, method="thread"),  # a message that never comes is a failure
]

SHAPES = (Shape(1, 8, 2, 1500, 1500, 128, 128), Shape(2, 4, 4, 1153, 1153, 64, 64), Shape(1, 4, 1, 2048, 2048, 128, 128))
PLANS: tuple[dict[str, Any], ...] = ({}, {"overlap": True}, {"overlap": True, "keep_kv": False})
NAMES = ("causal", "window", "documents", "prefix", "sink_window", "alibi", "relative", "gated_sink", "islands_sink", "full")


@pytest.mark.parametrize("transport", ["keys", "heads"])
@pytest.mark.parametrize("i", range(len(NAMES)), ids=lambda i: NAMES[i])
def test_two_ranks_equal_the_oracle(i: int, transport: str) -> None:
    case = Case(NAMES[i], SHAPES[i % 3], KINDS[i % 3], seed=i)
    want = cases.expected(case, torch.bfloat16)
    plan = {**PLANS[(i + i // 3) % 3], "transport": transport}
    for got in on_ranks(2, attention, case, tensors_of(want), 128, plan, {}, device="cuda"):
        want.check(got, f"{case} on two ranks")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_pieces_of_documents_equal_the_oracle(name: str) -> None:
    """As sequences, but for scores of positions."""
    case = DocumentCase(name, Shape(1, 8, 2, 1900, 1900, 128, 128), KINDS[len(name) % 3], seed=len(name))
    want = cases.expected(case, torch.bfloat16)
    plan = {"as_causal": True, "keep_kv": len(name) % 2 == 0}
    for got in on_ranks(2, attention, case, tensors_of(want), 128, plan, {}, device="cuda"):
        want.check(got, f"{case} on two ranks")


@pytest.mark.parametrize("i", range(3), ids=lambda i: NAMES[i])
def test_four_ranks_that_play_two_nodes_equal_the_oracle(i: int) -> None:
    case = Case(NAMES[i], SHAPES[i], KINDS[i], seed=i)
    want = cases.expected(case, torch.bfloat16)
    for got in on_ranks(4, attention, case, tensors_of(want), 128, {**PLANS[i], "node_size": 2}, {}, device="cuda"):
        want.check(got, f"{case} on four ranks, two a node")
