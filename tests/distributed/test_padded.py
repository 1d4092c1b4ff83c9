"""``plan.shard(pad=...)``: attention of padded shards, their gradients, and what is gathered from them."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import padded
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("ranks", "length", "transport"), [(2, 203, "keys"), (3, 203, "keys"), (4, 20, "keys"), (2, 203, "heads"), (4, 203, "heads")]
)
def test_padded_rows_are_left_out(ranks: int, length: int, transport: str, dtype: torch.dtype) -> None:
    for found in on_ranks(ranks, padded.results, length, dtype, transport):
        assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("ranks", [2, 3])
def test_shards_of_all_ranks_and_plans_have_one_shape(ranks: int) -> None:
    for found in on_ranks(ranks, padded.shards):
        assert found == dict.fromkeys(found, True)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_uneven_plans_compile_nothing(backend: str) -> None:
    for agree, graphs in on_ranks(3, padded.compiled, backend):
        assert agree
        assert graphs == 1


def test_mistakes() -> None:
    for text in zip(*on_ranks(2, padded.mistakes)):
        assert text[0][:10] == "ValueError"
        assert text[0].startswith(("ValueError: pad=0.5 for a tensor of", "ValueError: pad has 3 values for 2", "ValueError: key has"))
