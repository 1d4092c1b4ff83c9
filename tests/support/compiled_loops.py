"""Calls for the tests of the torch backend's compiled loops: of no tile's size, and compiled although they are small."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from anyattn.backends.torch.compiled import decision
from tests.support.machines import PLAIN, planned_for

B, H, HK, S, K = 2, 4, 2, 150, 203


@contextlib.contextmanager
def for_small_calls() -> Iterator[None]:
    """Inside, small calls are compiled too, as on a CPU without 16-bit instructions."""
    with pytest.MonkeyPatch.context() as patch, planned_for(PLAIN):
        patch.setattr(decision, "_LEAST_SCORES", 0)
        patch.setattr(decision, "_LEAST_ROWS", 1)
        yield


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(dtype: torch.dtype = torch.float32, d: int = 24, dv: int = 40) -> tuple[Tensor, Tensor, Tensor]:
    return random(B, H, S, d, seed=21, dtype=dtype), random(B, HK, K, d, seed=22, dtype=dtype), random(B, HK, K, dv, seed=23, dtype=dtype)
