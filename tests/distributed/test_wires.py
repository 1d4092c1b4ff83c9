"""``plan(wire="bfloat16")``: sums of keys' gradients are rounded once, on their way home."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed import wires
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("options", [{"overlap": True}, {"overlap": False, "keep_kv": False}], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_gradients_of_keys_are_rounded_once_on_their_way(ranks: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    for found in on_ranks(ranks, wires.both_wires, dtype, options):
        assert found == dict.fromkeys(found, True)


def test_mistakes() -> None:
    for unknown, other in on_ranks(2, wires.mistakes):
        assert unknown.startswith("ValueError: wire='float16'; wanted one of ['float32', 'bfloat16']")
        assert other.startswith("ValueError: the plan differs between the 2 ranks")
