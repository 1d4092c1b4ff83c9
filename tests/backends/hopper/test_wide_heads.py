"""Heads of more than 256 dimensions on the Hopper backend, without a GPU: which calls it takes, and what their kernels are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, planner
from anyattn.backends.hopper.config import SHARED_MEMORY, WIDE, padded, tiles_for
from anyattn.backends.hopper.make_backward_config import reason_against_backward
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.plan import reason_against
from anyattn.backends.hopper.tables import visits_of
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.validate import flash
from anyattn.validate.flash import Options
from tests.support.hopper.pretended import H200
from tests.support.processes import python


def problem(d: int, dv: int, one: bool = False, sq: int = 300, heads: tuple[int, int] = (4, 2), mask: Any = None, **more: Any) -> Problem:
    q, k = (torch.zeros(1, h, n, d, dtype=torch.bfloat16) for h, n in ((heads[0], sq), (heads[1], 300)))
    v = k[..., :dv] if one else torch.zeros(1, heads[1], 300, dv, dtype=torch.bfloat16)
    return Problem(q, k, v, 0.1, predicates=() if mask is None else (trace(mask, "mask"),), **more)


def paged(page: int, rows: int, one: bool = True) -> Problem:
    k = torch.zeros(1024 // page, page, 1, 576, dtype=torch.bfloat16)
    v = k[..., :512] if one else torch.zeros(1024 // page, page, 1, 512, dtype=torch.bfloat16)
    table, used = torch.arange(512 // page).view(1, -1).int(), torch.tensor([190]).int()
    return flash.varlen_problem(
        torch.zeros(1, rows, 1, 576, dtype=torch.bfloat16), k, v, None, None, None, None, None, used, table, None, Options()
    )


@pytest.mark.parametrize(
    "dims,wanted", [((512, 512), WIDE[0]), ((320, 64), WIDE[0]), ((64, 320), WIDE[0]), ((520, 300), WIDE[1]), ((576, 512), WIDE[1])]
)
def test_head_dimensions_are_padded(dims: tuple[int, int], wanted: tuple[int, int]) -> None:
    assert padded(*dims) == wanted


@pytest.mark.parametrize("dims", WIDE)
@pytest.mark.parametrize("one", [False, True])
def test_a_thread_block_fits_a_multiprocessor(dims: tuple[int, int], one: bool) -> None:
    config = forward_spec(problem(*dims, one)).config
    assert (config.has_one_kv, config.pairs, config.consumers, config.columns) == (one, False, 2, 256)
    assert config.tiles == tiles_for(*dims, None, has_one_kv=one) and config.tiles.stages == 1 + one
    assert config.shared_memory(config.q_stages) <= SHARED_MEMORY and config.q_stages == 1
    consumers, producers = config.registers
    assert 128 * (2 * consumers + producers) <= 65_536


def test_thread_blocks_share_keys_where_all_rows_of_a_kv_head_are_theirs() -> None:
    """More rows take less time alone: ``make_config._pairs`` has the figures."""
    of_rows = ((65, True), (64, False), (128, True), (129, False), (300, False))
    for sq, heads, wanted in (*((n, (2, 2), w) for n, w in of_rows), (16, (8, 1), True), (17, (8, 1), False), (8, (8, 1), False)):
        config = forward_spec(problem(512, 512, sq=sq, heads=heads)).config
        assert config.pairs is wanted, (sq, heads)
        assert config.tile_q == config.own_q * (1 + wanted) == 64 // config.heads_per_tile * (1 + wanted)
    of_pages = ((64, 128, True, 64), (16, 128, True, 16), (8, 128, False, 8), (2, 128, False, 2), (64, 64, False, 32))
    for page, rows, wanted, piece in of_pages:
        config = forward_spec(paged(page, rows)).config
        assert (config.pairs, config.piece, config.has_one_kv) == (wanted, piece, True), (page, rows)


def test_keys_that_one_row_tile_reads_come_in_smaller_tiles() -> None:
    """Memory takes longer than the products there: ``make_config._keys_are_read_once``."""
    for page, rows, one, wanted in ((64, 64, True, (32, 4)), (16, 1, True, (32, 4)), (64, 65, True, (64, 2)), (64, 64, False, (64, 1))):
        config = forward_spec(paged(page, rows, one)).config
        assert (config.tiles.tile_n, config.tiles.stages) == wanted, (page, rows, one)
    for page, wanted in ((2, (32, 2)), (24, (48, 24)), (48, (32, 16)), (32, (32, 32))):  # not with more copies of less than 16 rows
        config = forward_spec(paged(page, 1)).config
        assert (config.tiles.tile_n, config.piece) == wanted, page
    few = problem(512, 512, True, sq=4, heads=(16, 1), mask=masks.causal())
    assert (forward_spec(few).config.heads_per_tile, forward_spec(few).config.tiles.tile_n) == (16, 32)
    for more in ({"mask": masks.prefix_lm(100)}, {"score": trace(lambda s, b, h, q, k: s / 2, "score")}):
        assert forward_spec(problem(512, 512, True, sq=4, heads=(16, 1), **more)).config.tiles.tile_n == 64


def test_lists_count_row_tiles_of_both_thread_blocks() -> None:
    p = problem(512, 512, mask=masks.prefix_lm(100))
    spec = forward_spec(p)
    assert (spec.config.list_cut, spec.config.tile_q) == ((2, 2), 64)
    few = problem(512, 512, mask=masks.prefix_lm(100), sq=100)
    assert (forward_spec(few).config.list_cut, forward_spec(few).config.tile_q) == ((1, 2), 128)
    for given, tiles in ((p, 5), (few, 1)):
        order = visits_of(given, forward_spec(given)).order
        assert order is not None and len(order) == tiles
    by_block = lambda b, h, i, j: TABLE[i // 64, j // 64]
    blocks = anyattn.create_block_mask(by_block, 1, 1, 300, 300, device="cpu", BLOCK_SIZE=64).block_sparse()
    p = problem(512, 512, mask=by_block, blocks=blocks)
    config = forward_spec(p).config
    assert (config.pairs, config.list_cut, config.tile_q) == (False, (1, 64 // config.tiles.tile_n), 64)


TABLE = torch.eye(8, dtype=torch.bool)


def test_what_it_takes_and_why_not_the_rest() -> None:
    for p in (problem(512, 512), problem(576, 512, True), problem(320, 264)):
        assert reason_against(p) is None and reason_against_backward(p) is None
    for p in (paged(2, 128), paged(64, 16, False)):
        assert reason_against(p) is None
        assert "for head dimensions above 256 take no packed or padded sequences" in str(reason_against_backward(p))
    for p, words in (
        (problem(584, 512), "head_dim is 584"),
        (problem(576, 520), "and v's 520; it has kernels up to 576, and 512 for v"),
        (paged(1, 128), "pages of an even number of rows, not 1"),
    ):
        assert words in str(reason_against(p)), words


def test_the_plan_says_who_computes_what() -> None:
    pytest.importorskip("cutlass")
    plan = planner.choose(problem(576, 512, True), H200)
    assert (plan.backend, plan.backward, plan.tile_m, plan.tile_n) == ("hopper", "hopper", 64, 64)
    assert planner.choose(problem(264, 264), H200).backend == "hopper"
    for sq, heads, wanted in ((1, (32, 1), "32 of the 64 rows"), (1, (128, 1), ""), (32, (2, 2), "32 of the 64"), (33, (2, 2), "")):
        plan = planner.choose(problem(576, 512, True, sq=sq, heads=heads), H200)
        assert (plan.backend, wanted in plan.why[0]) == ("triton" if wanted else "hopper", True), (sq, heads)


def test_a_tile_of_keys_lies_in_shared_memory_as_its_values_would() -> None:
    """Column c of key n has the same address in the layout of K and in that of V, whose swizzles are the same."""
    pytest.importorskip("cutlass")
    done = python("-m", "tests.support.hopper.wide_layouts", CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
    pairs = [line.split(" | ") for line in done.stdout.splitlines()]
    assert len(pairs) == 5 and all(keys == values for keys, values in pairs)
