"""Programs of users over ranks: several masks, checkpointing, gathered numbers, tensor parallelism, compiled calls, one rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed import programs, training, uses
from tests.support.ranks import on_ranks


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("ranks", [2, 3])
def test_with_the_same_tiles_a_row_has_the_bits_of_one_process(ranks: int, dtype: torch.dtype) -> None:
    for of_out, of_lse, of_dq, *_ in on_ranks(ranks, uses.same_bits, dtype):
        assert of_out
        assert of_lse
        assert of_dq


@pytest.mark.parametrize("ranks", [2, 4])
def test_deterministic_gradients_repeat(ranks: int) -> None:
    assert all(on_ranks(ranks, uses.reruns))


@pytest.mark.parametrize("ranks", [2, 3])
def test_ways_to_write_a_call_agree(ranks: int) -> None:
    for differences in on_ranks(ranks, uses.ways):
        of_two_masks = differences.pop("mask_mod too")  # of other tiles
        assert of_two_masks <= 2**-22
        assert differences == dict.fromkeys(differences, 0.0)


@pytest.mark.parametrize("ranks", [2, 3])
def test_several_masks_share_a_placement(ranks: int) -> None:
    assert all(map(all, on_ranks(ranks, uses.several_masks)))


def test_mods_see_the_heads_of_all_tensor_parallel_ranks() -> None:
    assert all(map(all, on_ranks(2, uses.tensor_parallel)))


def test_a_gathered_tensor_of_the_model_gets_its_gradient() -> None:
    assert all(map(all, on_ranks(3, uses.gathered)))


def test_one_rank_is_flex_attention() -> None:
    assert all(map(all, on_ranks(1, uses.one_rank)))


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_new_documents_compile_nothing(backend: str) -> None:
    for agree, graphs in on_ranks(2, programs.compiled, 256, 3, backend):
        assert agree
        assert graphs == 1


@pytest.mark.parametrize("how", ["fsdp", "ddp"])
def test_data_parallelism_sums_the_gradients_of_all_ranks(how: str) -> None:
    assert all(map(all, on_ranks(4, training.gradients, how)))


@pytest.mark.parametrize("program", [uses.rebound, uses.shared_keys, uses.many_intervals], ids=lambda f: f.__name__)
def test_calls_that_a_plan_must_not_remember_or_cut_wrongly(program: Callable[[Any], list[bool]]) -> None:
    assert all(map(all, on_ranks(2, program)))


def test_gathered_tensors_have_no_second_derivative() -> None:
    for text in on_ranks(2, uses.second_derivative_of_gathered):
        assert "once_differentiable" in text
