"""Programs of users over ranks: several masks, checkpointing, gathered numbers, tensor parallelism, compiled calls, one rank."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from tests.distributed import programs, training, uses
from tests.support.ranks import on_ranks

BOTH = pytest.mark.parametrize(("ranks", "transport"), [(2, "keys"), (3, "keys"), (2, "heads"), (4, "heads")])


@pytest.mark.parametrize(
    ("ranks", "transport", "dtype"),
    [
        *[(ranks, "keys", dtype) for ranks in (2, 3) for dtype in (torch.float32, torch.bfloat16)],
        *[(ranks, "heads", torch.float32) for ranks in (2, 4)],
    ],
    ids=str,
)
def test_with_the_same_tiles_a_row_has_the_bits_of_one_process(ranks: int, transport: str, dtype: torch.dtype) -> None:
    for of_out, of_lse, of_dq, *of_keys in on_ranks(ranks, uses.same_bits, dtype, transport):
        assert of_out
        assert of_lse
        assert of_dq
        # each of the two K/V heads is on one of two ranks
        assert all(of_keys) or transport == "keys" or ranks > 2


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_head_of_several_ranks_gets_the_sum_of_their_gradients_rounded_once(ranks: int) -> None:
    assert all(map(all, on_ranks(ranks, uses.summed_in_float32)))


@pytest.mark.parametrize(("ranks", "node_size", "dtype"), [(4, 2, torch.float32), (4, 2, torch.bfloat16)], ids=str)
def test_keys_that_are_passed_on_have_the_same_bits(ranks: int, node_size: int, dtype: torch.dtype) -> None:
    assert all(map(all, on_ranks(ranks, uses.same_as_without_nodes, node_size, dtype)))


def test_nodes_are_found_alike_on_every_rank() -> None:
    for sizes in on_ranks(4, uses.nodes_of_torchrun):
        assert sizes == [2, 4, 4, 1, 4]


@pytest.mark.parametrize(
    ("ranks", "transport", "node_size"), [(2, "keys", None), (4, "keys", None), (4, "keys", 2), (2, "heads", None), (4, "heads", None)]
)
def test_deterministic_gradients_repeat(ranks: int, transport: str, node_size: int | None) -> None:
    assert all(on_ranks(ranks, uses.reruns, transport, node_size))


@BOTH
def test_ways_to_write_a_call_agree(ranks: int, transport: str) -> None:
    for differences in on_ranks(ranks, uses.ways, transport):
        of_two_masks = differences.pop("mask_mod too")  # of other tiles
        assert of_two_masks <= 2**-22
        assert differences == dict.fromkeys(differences, 0.0)


@BOTH
def test_several_masks_share_a_placement(ranks: int, transport: str) -> None:
    assert all(map(all, on_ranks(ranks, uses.several_masks, transport)))


@pytest.mark.parametrize("program", [uses.tensor_parallel, uses.by_head], ids=lambda f: f.__name__)
@pytest.mark.parametrize("transport", ["keys", "heads"])
def test_mods_see_the_heads_of_all_ranks(program: Callable[..., list[bool]], transport: str) -> None:
    assert all(map(all, on_ranks(2, program, transport)))


@BOTH
def test_results_and_gradients_that_calls_want(ranks: int, transport: str) -> None:
    for found in on_ranks(ranks, uses.wanted, transport):
        assert found == dict.fromkeys(found, True)


@BOTH
def test_a_gathered_tensor_of_the_model_gets_its_gradient(ranks: int, transport: str) -> None:
    assert all(map(all, on_ranks(ranks, uses.gathered, transport)))


def test_one_rank_is_flex_attention() -> None:
    assert all(map(all, on_ranks(1, uses.one_rank)))


@pytest.mark.parametrize(
    ("backend", "ranks", "transport", "node_size"),
    [("aot_eager", 2, "keys", None), ("inductor", 2, "keys", None), ("aot_eager", 2, "heads", None), ("aot_eager", 4, "keys", 2)],
)
def test_new_documents_compile_nothing(backend: str, ranks: int, transport: str, node_size: int | None) -> None:
    for agree, graphs in on_ranks(ranks, programs.compiled, 256, 3, backend, transport, node_size):
        assert agree
        assert graphs == 1


@pytest.mark.parametrize(("how", "transport"), [("fsdp", "keys"), ("ddp", "keys"), ("fsdp", "heads")])
def test_data_parallelism_sums_the_gradients_of_all_ranks(how: str, transport: str) -> None:
    assert all(map(all, on_ranks(4, training.gradients, how, transport)))


@pytest.mark.parametrize("transport", ["keys", "heads"])
@pytest.mark.parametrize("program", [uses.rebound, uses.shared_keys], ids=lambda f: f.__name__)
def test_calls_that_a_plan_must_not_remember_or_cut_wrongly(program: Callable[..., list[bool]], transport: str) -> None:
    assert all(map(all, on_ranks(2, program, transport)))


def test_lists_written_to_before_the_backward_pass() -> None:
    """Where keys travel each rank has copies of its part of the lists."""
    assert on_ranks(2, uses.lists_written, "keys") == [(True, "no error")] * 2
    for repeats, text in on_ranks(2, uses.lists_written, "heads"):
        assert not repeats
        assert text.startswith("RuntimeError: the block mask's lists have been modified by an inplace operation")


def test_rows_in_many_intervals() -> None:
    assert all(map(all, on_ranks(2, uses.many_intervals)))


def test_gathered_tensors_have_no_second_derivative() -> None:
    for text in on_ranks(2, uses.second_derivative_of_gathered):
        assert "once_differentiable" in text


def test_a_plan_is_freed_with_its_last_user() -> None:
    for found in on_ranks(2, uses.freed):
        assert found == [True] * 4


def test_ids_of_inference_mode_on_ranks_without_rows() -> None:
    for found in on_ranks(4, uses.inference_ids):
        assert all(found)
