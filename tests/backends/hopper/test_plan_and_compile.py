"""The Hopper backend without a GPU: which calls it takes, and that every kernel it may choose compiles for sm_90a without spilling."""

from __future__ import annotations

import importlib.util
import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, planner, scores
from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.backward import _tables_of_lists
from anyattn.backends.hopper.config import WIDE, Config, Tiles, padded, sides
from anyattn.backends.hopper.make_backward_config import backward_spec, reason_against_backward
from anyattn.backends.hopper.make_config import TILES_IN_ORDER, ForwardSpec, forward_spec
from anyattn.backends.hopper.plan import reason_against
from anyattn.backends.hopper.tables import visits_of
from anyattn.hardware import Hardware
from anyattn.mods.analysis.row_ranges import ranges_unread
from anyattn.mods.analysis.tile_classes import PARTIAL
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.lists import grid_of_lists
from anyattn.validate import flash, flex
from anyattn.validate.flash import Options
from tests.support.hopper.pretended import H200
from tests.support.processes import python
from tests.support.tiles import brute_classes


@pytest.mark.parametrize(
    "mask,band",
    [
        (masks.causal(), (False, True)),
        (masks.causal(-7), (False, True)),
        (masks.causal(torch.tensor([3, 5])), (False, True)),
        (masks.sliding_window(100, 0), (True, True)),
        (masks.sliding_window(9, None), (True, False)),
        (lambda b, h, i, j: (i >= j) & (i - j < 64), (True, True)),
        (lambda b, h, i, j: i >= j + 3 * h, (False, True)),
        (masks.full(), (False, False)),
        (masks.prefix_lm(5), None),
        (masks.sink_window(4, 9), None),
        (masks.document(torch.tensor([0, 0, 1])), None),
        (lambda b, h, i, j: j <= 2 * i, None),
        (lambda b, h, i, j: j < 9, None),
    ],
)
def test_bands(mask, band) -> None:  # type: ignore[no-untyped-def]
    """What is a band around a row's place: its tiles follow in the kernel, whatever numbers it captures."""
    ranges = ranges_unread(trace(mask, "mask"))
    assert (None if ranges is None else sides(ranges.expr)) == band


def problem(**changes) -> Problem:  # type: ignore[no-untyped-def]
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    return Problem(**({"q": q, "k": q, "v": q, "scale": 0.1} | changes))


def test_what_it_takes_and_why_not_the_rest() -> None:
    for score in (lambda s, b, h, i, j: (s.abs() + 1) ** 1.5, lambda s, b, h, i, j: s + torch.fmod(i - j, 3)):
        assert reason_against(problem(score=trace(score, "score"))) is None
    bits = torch.zeros(64, dtype=torch.int64)
    for mask in (masks.causal(), masks.prefix_lm(5), masks.document(bits), masks.chunked(9), masks.dilated(3, 2), masks.tree(bits)):
        assert reason_against(problem(predicates=(trace(mask, "mask"),))) is None
    wide = torch.randn(1, 2, 64, 584, dtype=torch.bfloat16)
    crooked = torch.randn(1, 2, 64, 129, dtype=torch.bfloat16)[..., :128]
    few = torch.randn(1, 2, 64, 20, dtype=torch.bfloat16)
    lists = anyattn.compute_block_sparsity(48, 48, 1, 1, 64, 64, masks.causal(), device="cpu")
    for changes, words in (
        ({name: torch.randn(1, 2, 64, 128) for name in "qkv"}, "not float32"),
        (dict.fromkeys("qkv", wide), "head_dim is 584"),
        (dict.fromkeys("qkv", few), "strides"),
        ({"score": trace(lambda s, b, h, i, j: s + (i - j) * BIG, "score")}, "32 bits"),
        ({"num_splits": 2}, "split keys"),
        ({"num_splits": 0}, "split keys"),
        ({"v": crooked}, "v's strides"),
        ({"blocks": lists, "predicates": (trace(masks.causal(), "mask"),)}, "tiles of 48 x 48"),
    ):
        assert words in str(reason_against(problem(**changes))), words


BIG = 2**40


def test_few_queries_are_left_to_even_shares_unless_it_is_named() -> None:
    from anyattn import hardware
    from anyattn.backends.hopper.slower import slower_forward

    few = problem(q=torch.randn(1, 2, 3, 128, dtype=torch.bfloat16), num_splits=0)
    machine = hardware.Hardware("cuda", "a GPU", 0, frozenset(), (9, 0), 132)
    assert reason_against(few) is None and "split keys" in str(slower_forward(few, machine))
    assert "split keys" not in str(slower_forward(problem(), machine))


def test_scores_of_clamped_distances_are_left_to_triton_where_most_pairs_are_far() -> None:
    from anyattn.backends.hopper.slower import slower_forward

    machine = Hardware("cuda", "a GPU", 0, frozenset(), (9, 0), 132)
    tables = [torch.zeros(1, 64, 4096, 128) for _ in range(2)]
    score = trace(scores.disentangled(*tables), "score")  # distances of 64 and more are far, on both sides

    def reason(keys: int, **more: Any) -> str:
        q = torch.zeros((1, 1, 1, 64), dtype=torch.bfloat16).expand(1, 64, keys, 64)
        return str(slower_forward(problem(q=q, k=q, v=q, score=score, **more), machine))

    assert "far apart" in reason(1024) and "far apart" not in reason(1016)
    assert "far apart" in reason(1024, predicates=(trace(masks.causal(), "mask"),))
    assert "far apart" not in reason(1024, predicates=(trace(lambda b, h, i, j: (i + j) % 2 == 0, "mask"),))


def test_a_comparison_of_floats_that_float32_may_not_decide_is_refused() -> None:
    """In 16 bits 0.3 is another number than in float32, and so is a product; a loaded number and 0.5 are the same."""
    gate, exact, n = torch.rand(64).to(torch.bfloat16), torch.rand(64).double(), 0.3
    taken = (
        lambda s, j: s + gate[j] * 0.3,
        lambda s, j: torch.where(gate[j] > 0.5, s, -1.0),
        lambda s, j: torch.where(gate[j].float() * 0.2 > 0.3, s, -1.0),
        lambda s, j: s * exact[j],
    )
    refused = (
        (lambda s, j: torch.where(gate[j] > 0.3, s, -1.0), "bfloat16"),
        (lambda s, j: torch.where(gate[j] > n, s, -1.0), "bfloat16"),
        (lambda s, j: torch.where(gate[j] * gate[j] > 0.5, s, -1.0), "bfloat16"),
        (lambda s, j: torch.where(exact[j] > 0.5, s, -1.0), "float64"),
    )
    for mod in taken:
        assert reason_against(problem(score=trace(lambda s, b, h, i, j, mod=mod: mod(s, j), "score"))) is None
    for mod, dtype in refused:
        reason = reason_against(problem(score=trace(lambda s, b, h, i, j, mod=mod: mod(s, j), "score")))
        assert reason == f"the score mod computes in torch.{dtype}"


def spec(**changes) -> ForwardSpec:  # type: ignore[no-untyped-def]
    return forward_spec(problem(**changes))


def traced(*given) -> tuple:  # type: ignore[no-untyped-def]
    return tuple(trace(m, "mask") for m in given)


def test_what_a_problem_becomes() -> None:
    """Bands need no lists; the first other predicate has them, and the rest is asked in every tile."""
    assert spec(predicates=traced(masks.causal(), masks.sliding_window(9, 9))).config.lists is None
    joint = spec(predicates=traced(masks.causal(), masks.prefix_lm(5)))
    assert (joint.config.lists, joint.listed, joint.list_tile) == ("dense", 1, (128, 128))
    assert joint.config.partial.by_row and [a.by_row for a in joint.config.always] == [True]  # type: ignore[union-attr]
    ids = traced(masks.document(torch.zeros(64, dtype=torch.int64)))
    assert not spec(predicates=ids).config.partial.by_row  # type: ignore[union-attr]
    lists = anyattn.compute_block_sparsity(128, 128, None, None, 64, 64, masks.causal(), device="cpu")
    everything = traced(masks.full())
    assert spec(predicates=everything, blocks=lists).config.partial is None
    assert spec(predicates=traced(masks.causal()), blocks=lists).config.lists == "dense"
    assert spec(predicates=traced(masks.causal()), blocks=lists, blocks_follow=True).config.lists is None
    negative = spec(scale=-1.0).config
    assert negative.score is not None and spec().config.score is None


def test_run_time_values_are_no_part_of_a_kernel() -> None:
    one, other = (spec(predicates=traced(masks.sliding_window(n, 0))) for n in (5, 500))
    assert one.config == other.config and hash(one.config) == hash(other.config)
    windows = [problem(predicates=traced(masks.sliding_window(n, 0))) for n in (5, 500)]
    assert one.captured(windows[0]) == ((5, 0), ()) and one.captured(windows[1]) == ((500, 0), ())
    far, none = (spec(predicates=traced(masks.sliding_window(left, 0))).config for left in (2**40, -1))
    assert far == none
    longer = torch.randn(1, 2, 999, 128, dtype=torch.bfloat16)
    assert spec(**dict.fromkeys("qkv", longer)).config == spec().config
    assert spec(predicates=traced(masks.causal())).config != spec().config


@pytest.mark.parametrize("cap,bounded", [(30.0, True), (50.0, True), (53.0, False), (-1.0, False)])
def test_capped_scores_need_no_maximum(cap: float, bounded: bool) -> None:
    """Where the cap, a number of the call, is small; the kernel with maxima is another."""
    capped = lambda c: trace(lambda s, b, h, i, j: c * torch.tanh(s / c), "score")
    p = problem(score=capped(cap))
    found = forward_spec(p).config_for(p)
    assert (found.is_bounded, found.is_factored) == (bounded, cap > 0)
    assert forward_spec(p).config_for(problem(score=capped(30.0))) == forward_spec(problem(score=capped(20.0))).config_for(p) or not bounded
    half = torch.randn(1, 2, 64, 128, dtype=torch.float16)
    for changes in ({"scale": -0.1}, dict.fromkeys("qkv", half)):
        other = problem(score=capped(cap), **changes)
        assert not forward_spec(other).config_for(other).is_bounded
    beside = problem(score=trace(lambda s, b, h, i, j: cap * torch.tanh(s / cap) + j, "score"))
    assert not forward_spec(beside).config_for(beside).is_bounded
    with pytest.raises(ValueError, match="is_bounded"):
        Config(128, 128, False, Tiles(128, 128, 2), p.score.expr, is_bounded=True)  # type: ignore[union-attr]


SCORES = {
    "none": None,
    "softcap": lambda s, b, h, i, j: 30.0 * torch.tanh(s / 30.0),
    "high softcap": lambda s, b, h, i, j: 60.0 * torch.tanh(s / 60.0),
    "gate": lambda s, b, h, i, j: 8.0 * torch.sigmoid(s),
    "slope": lambda s, b, h, i, j: s + (i - j),
    "square": lambda s, b, h, i, j: s * s,
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_asking_for_the_highest_scores_changes_nothing_else_of_a_kernel(name: str, dtype: torch.dtype) -> None:
    """Neither tiles nor how exponentials are taken, so that no bit of the output changes."""
    score, inputs = SCORES[name], dict.fromkeys("qkv", torch.randn(1, 2, 64, 128, dtype=dtype))
    found = []
    for wants_max in (False, True):
        p = problem(score=None if score is None else trace(score, "score"), wants_max=wants_max, **inputs)
        found.append(forward_spec(p).config_for(p))
    alone, beside = found
    assert not alone.has_max and beside.has_max and replace(beside, has_max=False) == alone


@pytest.mark.parametrize(
    "d,dv,wanted", [(64, 64, (64, 64)), (40, 40, (64, 64)), (72, 72, (96, 96)), (192, 128, (192, 128)), (90, 64, (128, 64))]
)
def test_head_dimensions_are_padded(d: int, dv: int, wanted: tuple[int, int]) -> None:
    assert padded(d, dv) == wanted
    with pytest.raises(ValueError, match="at most 576, and 512 for v"):
        padded(d, 513)


def test_row_tiles_come_longest_first() -> None:
    mask = traced(masks.prefix_lm(300))
    long = torch.randn(1, 2, 1000, 128, dtype=torch.bfloat16)
    p = problem(predicates=mask, **dict.fromkeys("qkv", long))
    found = visits_of(p, forward_spec(p))
    visited = found.partial_count + found.full_count
    order = found.order.tolist()
    assert sorted(m for m, _, _ in order) == list(range(8)) and {(h, b) for _, h, b in order} == {(0, 0)}
    lengths = [int(visited[0, 0, m]) for m, _, _ in order]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] > lengths[-1]


def test_row_tiles_of_each_head_and_entry() -> None:
    """Lists that differ by head and are shared by the batch still make row tiles for every entry."""
    wide = torch.randn(3, 2, 300, 128, dtype=torch.bfloat16)
    by_head = traced(lambda b, h, i, j: (j < 20 + 30 * h) | ((j - i).abs() < 10))
    p = problem(predicates=by_head, **dict.fromkeys("qkv", wide))
    made = forward_spec(p)
    found = visits_of(p, made)
    assert (made.config.spread, made.config.per_entry, made.config.per_head) == ("none", False, True)
    assert sorted(map(tuple, found.order.tolist())) == [(m, h, b) for m in range(3) for h in range(2) for b in range(3)]


@pytest.mark.parametrize(("length", "packed"), [(1000, 1), (64, 8)])
def test_lists_of_key_value_heads_are_read_in_place(length: int, packed: int) -> None:
    """No copy for each query head; the order has row tiles of every query head, or of groups that share them."""
    indices = torch.randint(-1, 4, (1, 2, ceil_div(length, 64), 3), generator=torch.Generator().manual_seed(0))
    blocks = anyattn.BlockMask.from_topk(indices, BLOCK_SIZE=64, seq_lengths=(length, 256)).block_sparse()
    q, k = torch.randn(3, 12, length, 128, dtype=torch.bfloat16), torch.randn(3, 2, 256, 128, dtype=torch.bfloat16)
    p = problem(predicates=(), blocks=blocks, q=q, k=k, v=k)
    made = forward_spec(p)
    config, found = made.config, visits_of(p, made)
    assert (config.by_kv_head, config.per_head, config.heads_per_tile, config.spread) == (True, True, packed, "none")
    assert found.partial_index.data_ptr() == blocks.mask_block_idx.data_ptr() and found.partial_index.shape[1] == 2
    tiles, groups = ceil_div(length, config.tile_q), 2 * ceil_div(6, packed)
    assert sorted(map(tuple, found.order.tolist())) == [(m, g, b) for m in range(tiles) for g in range(groups) for b in range(3)]
    assert backward_spec(p).config.by_kv_head
    of_each = problem(predicates=(), blocks=blocks.of_heads(12), q=q, k=k, v=k)
    assert not forward_spec(of_each).config.by_kv_head and forward_spec(of_each).config.heads_per_tile == 1


def test_one_block_mask_serves_batches_of_any_size() -> None:
    mask = lambda b, h, i, j: (j < 20 + 30 * h) | ((j - i).abs() < 10)
    lists = anyattn.create_block_mask(mask, None, 2, 300, 300, device="cpu").block_sparse()
    for batch in (1, 3, 2):
        wide = torch.randn(batch, 2, 300, 128, dtype=torch.bfloat16)
        p = problem(predicates=traced(mask), blocks=lists, **dict.fromkeys("qkv", wide))
        order = visits_of(p, forward_spec(p)).order
        assert {b for _, _, b in order.tolist()} == set(range(batch)) and len(order) == batch * 2 * 3


def paged(size: int, d: int = 128, dv: int = 128, mask=None) -> Problem:  # type: ignore[no-untyped-def]
    k, v = (torch.zeros(400 // size + 1, size, 2, n, dtype=torch.bfloat16) for n in (d, dv))
    table, used = torch.arange(400 // size).view(1, -1).int(), torch.tensor([190]).int()
    q = torch.zeros(1, 5, 2, d, dtype=torch.bfloat16)
    return flash.varlen_problem(q, k, v, None, None, None, None, None, used, table, None, Options(mask_mod=mask))


@pytest.mark.covering(1)
@pytest.mark.parametrize("size", [*range(1, 40), 48, 64, 80, 96, 100, 112, 127, 128, 192, 200, 256, 384])
@pytest.mark.parametrize("d,dv", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)])
def test_pages_of_any_size_fill_tiles_of_full_size(size: int, d: int, dv: int) -> None:
    """In pieces of which a page and a tile hold whole ones, and which are not small where that can be helped."""
    plain, lists = forward_spec(paged(384, d, dv)).config.tiles.tile_n, masks.prefix_lm(9)
    tile_of_all = forward_spec(paged(1, d, dv)).config.tiles.tile_n
    for mask in (None, lists):
        p = paged(size, d, dv, mask)
        config = forward_spec(p).config
        assert reason_against(p) is None
        assert config.is_paged and size % config.piece == 0 and config.tiles.tile_n % config.piece == 0
        row = 2 * (64 if config.head_dim != 96 else 32)  # bytes of a row of a swizzled tile
        assert config.gathers or config.piece * row % 128 == 0
        assert config.piece >= 2 or config.gathers
        if mask is None:
            assert config.tiles.tile_n * 8 >= plain * 5
            assert config.piece >= 16 or size % 16
            assert not config.gathers or tile_of_all == config.tiles.tile_n
        else:
            assert 128 % config.tiles.tile_n == 0


def test_padded_rows_are_not_gathered() -> None:
    """The copy engine alone fills up with zeros; at head dimension 96 it takes no odd pieces."""
    for given, wanted in {
        (7, 72, 72): (128, 128, 7),
        (6, 72, 72): (96, 96, 6),
        (1, 120, 128): (128, 128, 1),
        (1, 128, 40): (128, 64, 1),
    }.items():
        config = forward_spec(paged(*given)).config
        assert not config.gathers and (config.head_dim, config.head_dim_v, config.piece) == wanted


def test_the_size_of_a_page_is_run_time() -> None:
    """Pages of whole tiles have one kernel, and so have those of the same pieces."""
    configs = {size: forward_spec(paged(size)).config for size in (128, 256, 384, 16, 48, 80)}
    assert configs[128] == configs[256] == configs[384] != configs[16]
    assert configs[16] == configs[48] == configs[80]
    assert len({forward_spec(paged(size)).config for size in (1, 11, 13, 17, 19)}) == 1


def test_a_tile_longer_than_the_sequence_is_whole() -> None:
    short = torch.randn(1, 2, 100, 128, dtype=torch.bfloat16)
    lists = anyattn.compute_block_sparsity(128, 128, 1, 1, 100, 100, masks.prefix_lm(5), device="cpu")
    cut = BlockSparseTensors(lists.mask_block_cnt, lists.mask_block_idx, tile=(100, 100), lengths=(100, 100))
    p = problem(predicates=traced(masks.prefix_lm(5)), blocks=cut, **dict.fromkeys("qkv", short))
    assert reason_against(p) is None and forward_spec(p).list_tile == (128, 128)
    assert visits_of(p, forward_spec(p)).partial_count is lists.mask_block_cnt


@pytest.mark.parametrize("lengths", [(150, 31), (31, 31), (300, 270)], ids=str)
@pytest.mark.parametrize("size", [(32, 31), (64, 31), (31, 128), (96, 48), (1, 200), (100, 7), (256, 192)], ids=str)
def test_lists_of_a_mask_are_converted_to_tiles_of_the_kernels_whatever_their_size(size, lengths) -> None:  # type: ignore[no-untyped-def]
    def scattered(b, h, i, j):  # type: ignore[no-untyped-def]
        return (i // 40 + j // 25) % 3 < 2

    q, k = (torch.randn(1, 2, n, 64, dtype=torch.bfloat16, requires_grad=True) for n in lengths)
    block_mask = anyattn.create_block_mask(scattered, 1, 1, *lengths, device="cpu", BLOCK_SIZE=size)
    p = flex.flex_problem(q, k, k, None, block_mask, None, None, None, False, None, False, False, False)
    assert p.blocks is not None and reason_against(p) is None and reason_against_backward(p) is None
    forward, backward = forward_spec(p), backward_spec(p)
    for spec, lists in ((forward, visits_of(p, forward)[:4]), (backward, _tables_of_lists(p, backward).lists[:4])):
        assert spec.list_tile is not None
        tile, sizes = (spec.list_tile, lengths) if spec is forward else (spec.list_tile[::-1], lengths[::-1])
        grid = grid_of_lists(*lists, columns=-(-sizes[1] // tile[1]))
        visible = scattered(0, 0, *torch.meshgrid(*map(torch.arange, lengths), indexing="ij"))
        exact = brute_classes((visible if spec is forward else visible.T)[None, None], *tile)
        assert torch.equal(grid[grid != PARTIAL], exact[grid != PARTIAL]) and grid.shape == exact.shape


@pytest.mark.parametrize("ends_with_row", [False, True])
def test_row_tiles_of_a_ragged_batch(ends_with_row: bool) -> None:
    """Every row tile once, those that are not marked, and the longest sequences first."""
    cu = torch.tensor([0, 300, 300, 301, 900])
    q = torch.randn(950, 2, 128, dtype=torch.bfloat16)
    options = Options(causal=ends_with_row)
    p = flash.varlen_problem(q, q, q, cu, cu, None, None, None, None, None, None, options)
    found = visits_of(p, forward_spec(p))
    assert found.entries[:, :7].tolist() == [[0, a, b - a, 0, a, b - a, 0] for a, b in pairwise(cu.tolist())]
    tiles = [(m, b) for m, _, b in found.order.tolist() if m >= 0]
    assert sorted(tiles) == sorted((m, b) for b, n in enumerate((300, 0, 1, 599)) for m in range(-(-n // found_tile(p))))
    assert len(found.order) >= len(tiles) and all(m == -1 for m, _, _ in found.order.tolist()[len(tiles) :])
    assert tiles[0][1] == 3 and (not ends_with_row or tiles[0][0] == max(m for m, b in tiles if b == 3))
    again = flash.varlen_problem(q, q, q, cu, cu, None, None, None, None, None, None, options)
    assert visits_of(again, forward_spec(again)).order is found.order
    cu[-1] = 950
    changed = flash.varlen_problem(q, q, q, cu, cu, None, None, None, None, None, None, options)
    assert visits_of(changed, forward_spec(changed)).entries[3, 2] == 649


def found_tile(p: Problem) -> int:
    return forward_spec(p).config.tiles.tile_m


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_the_plan_chooses_it_on_hopper() -> None:
    longer = torch.randn(1, 2, 65, 128, dtype=torch.bfloat16)  # a backward pass of 64 takes Triton less time
    causal = problem(q=longer, k=longer, v=longer, predicates=traced(masks.causal()))
    chosen = planner.choose(causal, H200)
    assert (chosen.backend, chosen.backward) == ("hopper", "hopper") and "an H200 has it" in chosen.why[0]
    assert planner.choose(causal, H200, "torch").backend == "torch"
    far = 2**40
    other = problem(score=trace(lambda s, b, h, i, j: s + (i + far), "score"))
    assert planner.choose(other, H200).backend == "triton" and "32 bits" in planner.choose(other, H200).why[0]
    with pytest.raises(anyattn.BackendError, match="32 bits"):
        planner.choose(other, H200, "hopper")
    hashed = problem(predicates=traced(lambda b, h, i, j: (i * far + j) % 7 < 3))
    assert planner.choose(hashed, H200).backend == "triton" and "32 bits" in planner.choose(hashed, H200).why[0]


def test_it_says_what_it_needs() -> None:
    q = torch.randn(1, 2, 64, 128, dtype=torch.bfloat16)
    with pytest.raises(anyattn.BackendError, match="NVIDIA GPU, and the tensors are on cpu"):
        anyattn.flex_attention(q, q, q, backend="hopper")
    older = Hardware("cuda", "an A100", 0, H200.fast_dtypes, (8, 0), 108)
    assert "compute capability 9.0" in str(planner.available(older)["hopper"]) and planner.choose(problem(), older).backend == "triton"


@pytest.mark.parametrize(
    "make,words",
    [
        (lambda: Tiles(96, 128, 2), "tile_m=96"),
        (lambda: Tiles(128, 100, 2), "tile_n=100"),
        (lambda: Tiles(128, 128, 0), "stages=0"),
        (lambda: Config(80, 80, True, Tiles(128, 128, 2)), "head_dim=80"),
        (lambda: Config(96, 128, True, Tiles(128, 128, 2)), "wanted 128 instead of 96"),
        (lambda: Config(256, 256, True, Tiles(128, 128, 2)), "shared memory"),
        (lambda: Config(128, 128, True, Tiles(128, 128, 2), lists="sparse"), "lists='sparse'"),
        (lambda: Config(128, 128, True, Tiles(128, 128, 2), has_count=True), "has_count without has_order"),
        (lambda: Config(128, 128, True, Tiles(128, 128, 2), has_entries=True), "has_entries without has_order, spread='all'"),
        (lambda: Config(128, 128, True, Tiles(128, 128, 2), has_entries=True, spread="heads", lists="flat"), "and no lists"),
        (lambda: Config(128, 128, True, Tiles(128, 128, 2), piece=24), "piece=24; wanted a divisor of tile_n=128"),
        (lambda: Config(96, 96, True, Tiles(128, 112, 2), piece=7), "piece=7.*even at head_dim 96"),
        (lambda: Config(512, 64, True, Tiles(64, 64, 1, False)), "head_dim=512"),
        (lambda: Config(512, 512, True, Tiles(128, 64, 1)), "wanted tile_m=64"),
        (lambda: Config(512, 512, True, Tiles(64, 64, 1, False), has_one_kv=True), "stages=1 with has_one_kv"),
        (lambda: Config(512, 512, True, Tiles(64, 64, 1, False), piece=8, pairs=True), "pairs .* pieces of 16"),
        (lambda: Config(128, 128, True, Tiles(128, 128, 2), pairs=True), "pairs at head_dim 128"),
        (lambda: Config(256, 256, True, Tiles(128, 80, 2), has_one_kv=True), "has_one_kv at head_dim 256"),
        (lambda: Config(576, 512, True, Tiles(64, 64, 2, False)), "shared memory"),
    ],
)
def test_configs_judge_themselves(make, words: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ValueError, match=words):
        make()


def cross_compiled(folder: Path, *arguments: str) -> subprocess.CompletedProcess:
    return python("-m", "tests.support.hopper.cross_compile", str(folder), *arguments, CUTE_DSL_ARCH="sm_90a")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_functions_and_rows_compile_for_hopper(tmp_path: Path) -> None:
    done = cross_compiled(tmp_path, "128", "128", "functions")
    assert done.returncode == 0, done.stderr[-3000:]
    (found,) = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 3


# where a score mod is long, the loading role leaves a few numbers that change once a row tile to local memory: it has 24 registers
MOST_BYTES = {
    **dict.fromkeys(("alibi", "dropout alibi"), 8),
    "whole numbers": 88,
    **dict.fromkeys(("ragged", "packed ragged"), 16),  # of 256: what drawing needs after a row tile's keys
    # two more numbers a thread, which change once a row tile
    "dropout": 8,
    # two more numbers a thread, which change once a key tile
    **dict.fromkeys(("window", "highest", "highest of alibi"), 8),
    **dict.fromkeys(("straight", "relative", "by_token", "rounded", "powers", "packed straight", "packed relative"), 32),
    "skipping relative": 8,
    "in order of 256": 8,  # at the end of a row tile
    "in order of 256 packed": 16,
    **dict.fromkeys(("in order of 96", "in order of 96 window"), 24),  # in each key tile: three warp groups, with sinks
}
KERNELS = 65
IN_ORDER = 4  # of head dimensions that have such a kernel
NOT_OF_WIDE = 8  # no rows are gathered and no tiles skipped, but keys are split
# one of each family, which test_families_compile.py compiles: pages gathered row by row and copied in pieces, heads that share a tile, and
# the widest with lists and what is asked beside them, with a score mod, a band and the row maximum, and with tiles that are skipped; some
# in the order of keys
FAMILIES = {
    (64, 64): ("pages of 1", "floats", "in order causal"),
    (128, 128): ("pages and lists", "short alibi", "in order window"),
    (256, 256): ("highest of capped", "skipping causal", "in order of 256 window"),
    (576, 512): ("ragged lists of key heads", "decoding split capped"),
}


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("head_dim", [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256), (512, 512), (576, 512)], ids=str)
def test_every_kernel_compiles_for_hopper_without_spilling(head_dim: tuple[int, int], tmp_path: Path) -> None:
    done = cross_compiled(tmp_path, *map(str, head_dim))
    assert done.returncode == 0, done.stderr[-3000:]
    count = KERNELS - NOT_OF_WIDE * (head_dim in WIDE) + IN_ORDER * (head_dim in TILES_IN_ORDER)
    check_frames(json.loads(done.stdout.splitlines()[-1]), [count])


def check_frames(found: list[dict[str, list[int]]], counts: list[int]) -> None:
    """found: of each head dimension {name: bytes of local memory}."""
    assert [len(frames) for frames in found] == counts and all(all(frames.values()) for frames in found), (
        "a kernel left no cubin to look at"
    )
    spilled = [{name: sizes for name, sizes in frames.items() if any(size > MOST_BYTES.get(name, 0) for size in sizes)} for frames in found]
    assert not any(spilled), f"bytes of local memory: {spilled}"
