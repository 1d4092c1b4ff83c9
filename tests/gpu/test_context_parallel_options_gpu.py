"""Padded shards, marked rows, started exchanges and bfloat16 on the wire, on two GPUs with NCCL, or on one with gloo."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import options
from tests.support.ranks import on_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    pytest.mark.timeout(300, method="thread"),  # a message that never comes is a failure
]


@pytest.mark.parametrize("has_documents", [False, True])
def test_options_give_the_bits_of_the_plain_way(has_documents: bool) -> None:
    for found in on_ranks(2, options.same_bits, has_documents, device="cuda"):
        assert found == dict.fromkeys(found, True)
