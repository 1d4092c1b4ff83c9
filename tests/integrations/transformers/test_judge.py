"""The judge of the models' results: errors that it must find, and correct float32 evaluations that it must let pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from anyattn.integrations.transformers import NAME
from tests.support.covering import few
from tests.support.inside import InsideMode
from tests.support.model_rounding import KeepsFloat64
from tests.support.transformers_models import DECODERS, DEFINITION, Judge, decoder, definition, gradients, tokens

PLANTED = "planted"
LENGTH = 19
MODELS = list(DECODERS)

_Run = Callable[[str, torch.dtype], dict[str, Tensor]]
_aten = torch.ops.aten


def _runs(name: str) -> _Run:
    return lambda how, dtype: gradients(decoder(name, dtype), how, input_ids=tokens(2, LENGTH), use_cache=False)


def _scale_off(query: Tensor, seen: Tensor, scaling: float) -> tuple[Tensor, float]:
    return seen, 1.01 * scaling


def _key_lost(query: Tensor, seen: Tensor, scaling: float) -> tuple[Tensor, float]:
    """The last row does not see its neighbour."""
    seen = seen.clone()
    seen[..., -1, -2] = False
    return seen, scaling


def _window_off(query: Tensor, seen: Tensor, scaling: float) -> tuple[Tensor, float]:
    """The rows that see the most keys do not see the farthest: a window one too short, of a causal mask the one of all keys but one."""
    counts = seen.sum(-1, keepdim=True)
    farthest = torch.nn.functional.one_hot(seen.int().argmax(-1), seen.shape[-1]).bool()
    return seen & ~(farthest & (counts == counts.max())), scaling


def _plant(error: Callable[..., tuple[Tensor, float]]) -> None:
    def attention(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scaling: float, **others: Any) -> Any:
        seen, scaling = error(query, mask, scaling)
        return definition(module, query, key, value, seen, scaling, **others)

    AttentionInterface.register(PLANTED, attention)
    AttentionMaskInterface.register(PLANTED, lambda **asked: sdpa_mask(**{**asked, "allow_is_causal_skip": False}))


class _OtherOrder(InsideMode):
    """Sums of float32 numbers in an order that is drawn anew for each."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.random = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func in (_aten.mm.default, _aten.bmm.default) and args[0].dtype is torch.float32:
            left, right = args
            order = torch.randperm(left.shape[-1], generator=self.random)
            return func(left[..., order], right.index_select(-2, order))
        if func in (_aten.mean.dim, _aten.sum.dim_IntList) and args[0].dtype is torch.float32 and len(args[1]) == 1:
            order = torch.randperm(args[0].shape[args[1][0]], generator=self.random)
            return func(args[0].index_select(args[1][0], order), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _other_orders(run: _Run, count: int) -> list[dict[str, Tensor]]:
    found = []
    for seed in range(count):
        with _OtherOrder(seed):
            found.append(run(NAME if seed % 2 else DEFINITION, torch.float32))
    return found


@pytest.mark.parametrize("name", few(MODELS, "gemma3", "llama"))
def test_planted_errors_fail(name: str) -> None:
    run = _runs(name)
    judge = Judge(run)
    _plant(lambda query, seen, scaling: (seen, scaling))
    judge.check("unchanged", run(PLANTED, torch.float32))
    assert "noise" not in judge.__dict__
    for error in (_scale_off, _key_lost, _window_off):
        _plant(error)
        with pytest.raises(AssertionError, match="of its budget"):
            judge.check(error.__name__, run(PLANTED, torch.float32))
        assert "noise" in judge.__dict__  # which did not excuse the error


@pytest.mark.parametrize("name", few(["gemma3", "llama"], "gemma3"))
def test_every_order_of_summation_passes(name: str) -> None:
    run = _runs(name)
    judge = Judge(run)
    for i, got in enumerate(_other_orders(run, 12)):
        judge.check(f"order {i}", got)


@pytest.mark.parametrize("name", few(["gemma3", "llama"], "llama"))
def test_the_sampled_noise_is_that_of_float32(name: str) -> None:
    run = _runs(name)
    judge = Judge(run)
    found = _other_orders(run, 6)
    for part, expected in judge.expected.items():
        errors = torch.stack([got[part] - expected for got in found])
        ratio = float(judge.noise[part].sigma.square().mean().sqrt() / errors.square().mean().sqrt())
        assert 0.5 < ratio < 2.0, f"{part}: the sampled standard deviation is {ratio:.2f} times the errors"


def test_products_of_what_a_model_casts_to_float32_are_float64() -> None:
    """Rotary embeddings of Transformers 5.17 multiply frequencies by positions as a matrix product, both cast to float32."""
    frequencies, positions = torch.rand(3, 4, 1, dtype=torch.float64), torch.arange(5).expand(3, 1, 5)
    with KeepsFloat64():
        angles = frequencies.float() @ positions.float()
        shifted = torch.baddbmm(angles.float(), frequencies.float(), positions.float())
    assert angles.equal(frequencies * positions) and shifted.equal(2 * angles)
