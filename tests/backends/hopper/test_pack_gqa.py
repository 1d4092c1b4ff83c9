"""Heads that share row tiles: when the plan has them do so, what becomes of tables and sizes, and which rows a thread holds."""

from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
import torch

import anyattn
from anyattn import BackendError, masks, planner
from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.api import config_of
from anyattn.backends.hopper.config import PACKED, Config, Tiles
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.pack_gqa import groups_of, row_tiles, why_apart
from anyattn.backends.hopper.tables import visits_of
from anyattn.call_cache.varlen import Places, key_of_places
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.sequences.unread_varlen import MANY_QUERIES, queries_each
from anyattn.validate import flash, sequences
from anyattn.validate.flash import Options
from tests.support.hopper.pretended import H200

needs_cutlass = pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")


def problem(ratio: int, queries: int, kv_heads: int = 2, mask=None, score=None, d: int = 128, **changes) -> Problem:  # type: ignore[no-untyped-def]
    q, k = (torch.zeros(2, heads, n, d, dtype=torch.bfloat16) for heads, n in ((ratio * kv_heads, queries), (kv_heads, 400)))
    predicates = () if mask is None else (trace(mask, "mask"),)
    return Problem(q, k, k, 0.1, None if score is None else trace(score, "score"), predicates, **changes)


@pytest.mark.parametrize(
    "ratio,packed",  # by number of queries: 1, 16, 32, 64, 100, 128, 129, 1000
    [
        (1, (1, 1, 1, 1, 1, 1, 1, 1)),
        (2, (4, 4, 4, 1, 1, 1, 1, 1)),
        (3, (4, 4, 4, 4, 1, 1, 4, 1)),
        (4, (4, 4, 4, 4, 1, 1, 4, 1)),
        (8, (8, 8, 8, 8, 8, 1, 8, 1)),
        (16, (8, 8, 8, 8, 8, 1, 8, 1)),
        (71, (8, 8, 8, 8, 8, 1, 8, 1)),
    ],
)
def test_few_queries_are_packed(ratio: int, packed: tuple[int, ...]) -> None:
    """Where that makes fewer row tiles; any ratio, and two kernels for all up to 4."""
    lengths = (1, 16, 32, 64, 100, 128, 129, 1000)
    assert tuple(config_of(problem(ratio, n, mask=masks.causal())).heads_per_tile for n in lengths) == packed
    for n, found in zip(lengths, packed, strict=True):
        assert found == 1 or row_tiles(n, ratio, 128, found) < row_tiles(n, ratio, 128, 1)


def test_row_tiles_hold_every_row_of_a_group() -> None:
    for ratio in (1, 2, 3, 8, 13, 71):
        for packed in (1, *PACKED):
            for length in (1, 31, 32, 33, 500):
                rooms = row_tiles(length, ratio, 128, packed) * 128
                assert ratio * length <= rooms and groups_of(ratio, packed) * packed < ratio + packed


def test_asking_for_it_and_against_it() -> None:
    assert config_of(problem(8, 9), False).heads_per_tile == 1 == config_of(problem(8, 9, packs=False)).heads_per_tile
    assert config_of(problem(8, 1000), True).heads_per_tile == 8 == config_of(problem(8, 1000, packs=True)).heads_per_tile
    assert config_of(problem(1, 9), True).heads_per_tile == 1  # there is nothing to share
    for mask in (lambda b, h, i, j: i >= j + 3 * h, lambda b, h, i, j: (j < 20 + h) | (i == j)):  # it is a preference
        assert config_of(problem(8, 9, mask=mask)).heads_per_tile == 1 == config_of(problem(8, 9, mask=mask), True).heads_per_tile
    lists = anyattn.compute_block_sparsity(128, 128, 2, 16, 9, 400, lambda b, h, i, j: j < 50 * h + 9, device="cpu")
    by_head = problem(8, 9, mask=masks.full(), blocks=lists)
    assert config_of(by_head).heads_per_tile == 1 == config_of(by_head, True).heads_per_tile
    assert why_apart(config_of(by_head, True), 8) == "each head has its own lists of tiles"


@needs_cutlass
def test_the_plan_says_so() -> None:
    chosen = planner.choose(problem(8, 9), H200)
    assert (chosen.backend, chosen.heads_per_tile) == ("hopper", 8) and any("8 query heads that share K and V" in w for w in chosen.why)
    assert planner.choose(problem(8, 9), H200, options={"pack_gqa": False}).heads_per_tile == 1
    assert planner.choose(problem(8, 1000), H200, options={"pack_gqa": True}).heads_per_tile == 8
    assert planner.choose(problem(8, 1000, packs=True), H200).heads_per_tile == 8


@needs_cutlass
def test_what_is_preferred_and_not_followed_is_said() -> None:
    by_head = problem(8, 9, mask=lambda b, h, i, j: i >= j + 3 * h, packs=True)
    chosen = planner.choose(by_head, H200)
    assert (chosen.backend, chosen.heads_per_tile) == ("hopper", 1)
    assert [w for w in chosen.why if "pack_gqa=True is not followed: the keys that a row may see differ from head to head" in w]
    for packs in (False, None):
        assert not any("pack_gqa" in w for w in planner.choose(by_head.like(packs=packs), H200).why)
    assert not any("pack_gqa" in w for w in planner.choose(problem(1, 9, packs=True), H200).why)  # there is nothing to share


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
def test_triton_is_asked_too() -> None:
    assert planner.choose(problem(8, 3), H200, "triton").heads_per_tile == 8
    assert planner.choose(problem(8, 3, packs=False), H200, "triton").heads_per_tile == 1
    assert planner.choose(problem(8, 3), H200, "triton", {"pack_gqa": False}).heads_per_tile == 1
    many = planner.choose(problem(8, 5000, packs=True), H200, "triton")
    assert many.heads_per_tile == 1 and any("pack_gqa=True is not followed: few queries only" in w for w in many.why)


def test_doors_take_it_and_judge_it() -> None:
    """On a CPU it changes nothing: there are no row tiles of heads apart."""
    q, k = torch.randn(1, 5, 4, 16), torch.randn(1, 9, 2, 16)
    want = anyattn.flash_attn_func(q, k, k, causal=True)
    for packs in (True, False, None):
        assert torch.equal(want, anyattn.flash_attn_func(q, k, k, causal=True, pack_gqa=packs))
        assert flash.dense_problem(q, k, k, Options(pack_gqa=packs)).packs is packs
    with pytest.raises(TypeError, match="pack_gqa=1 is a int; wanted True or False, None"):
        anyattn.flash_attn_func(q, k, k, pack_gqa=1)  # type: ignore[arg-type]
    heads_first = [t.transpose(1, 2) for t in (q, k, k)]
    for packs in (True, False):
        out = anyattn.flex_attention(*heads_first, enable_gqa=True, mask_mod=masks.causal(4), kernel_options={"pack_gqa": packs})
        assert out.shape == (1, 4, 5, 16)
    with pytest.raises(TypeError, match="'pack_gqa'"):
        anyattn.flex_attention(*heads_first, enable_gqa=True, kernel_options={"pack_gqa": 1})


@pytest.mark.parametrize(
    "fields,words",
    [
        ({"heads_per_tile": 2}, "heads_per_tile=2; wanted one of 1, 4, 8"),
        ({"heads_per_tile": 4, "lists": "dense", "per_head": True}, "lists or bands of each head"),
        ({"heads_per_tile": 8, "lists": "dense", "spread": "none"}, "lists or bands of each head"),
    ],
)
def test_configs_judge_it(fields: dict, words: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ValueError, match=words):
        Config(128, 128, True, Tiles(128, 128, 2), **fields)
    ranges = row_ranges(trace(lambda b, h, i, j: i >= j + 3 * h, "mask"))
    assert ranges is not None
    with pytest.raises(ValueError, match="bands of each head"):
        Config(128, 128, True, Tiles(128, 128, 2), bands=(ranges.expr,), heads_per_tile=4)


def test_row_tiles_of_lists() -> None:
    """A list's row tile is as many positions as before, and so more row tiles of the kernel."""
    p = problem(8, 300, mask=masks.prefix_lm(20), packs=True)
    spec = forward_spec(p)
    assert (spec.config.heads_per_tile, spec.config.tile_q, spec.config.list_cut[0]) == (8, 16, 8)
    order = visits_of(p, spec).order
    assert order is not None and sorted(m for m, _, _ in order.tolist()) == list(range(ceil_div(300, 16)))
    apart = visits_of(p, forward_spec(p, False)).order
    assert apart is not None and sorted(m for m, _, _ in apart.tolist()) == [0, 1, 2]


def test_row_tiles_of_sequences() -> None:
    cu, ends = (torch.tensor(x) for x in ([0, 5, 5, 45, 46], [0, 100, 200, 300, 400]))
    q, k = torch.randn(46, 16, 128, dtype=torch.bfloat16), torch.randn(400, 2, 128, dtype=torch.bfloat16)
    p = flash.varlen_problem(q, k, k, cu, ends, None, None, None, None, None, None, Options(causal=True))
    spec = forward_spec(p)
    assert (spec.config.heads_per_tile, spec.config.tile_q) == (8, 16)
    order = visits_of(p, spec).order
    assert order is not None and sorted((b, m) for m, _, b in order.tolist() if m >= 0) == [(0, 0), (2, 0), (2, 1), (2, 2), (3, 0)]


def test_queries_of_sequences_are_many_or_in_few_steps() -> None:
    found = {queries_each(rows, 4, 1000) for rows in range(1, 5000)}
    assert found == set(range(16, MANY_QUERIES + 1, 16)) and max(found) == MANY_QUERIES
    assert all(queries_each(rows, 4, 1000) >= min(rows / 4, MANY_QUERIES) for rows in range(1, 5000))
    assert queries_each(5000, 4, 7) == 16 and queries_each(0, 0, 0) == 16


def test_calls_are_told_apart_by_what_the_plan_looks_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Packed sequences are recalled whatever their lengths; where heads may share tiles, whether queries are few is a fact."""
    monkeypatch.setattr(sequences, "skips_device_reads", lambda device, validate: validate is not True)

    def fact(rows: int, heads_kv: int) -> object:
        q, k = torch.zeros(rows, 8, 64, dtype=torch.bfloat16), torch.zeros(rows, heads_kv, 64, dtype=torch.bfloat16)
        cu = torch.tensor([0, rows // 3, rows // 2, rows])
        found = key_of_places(q, k, k, Places((cu, cu, None, None, None), (None, None), None), Options(causal=True))
        assert found is not None
        return found[0]

    assert fact(3000, 8) == fact(300, 8) and fact(3000, 1) == fact(2000, 1) != fact(300, 1)


@needs_cutlass
@pytest.mark.parametrize("packed", [1, *PACKED])
@pytest.mark.parametrize("tile_m", [128, 192])
def test_rows_of_threads(packed: int, tile_m: int) -> None:
    """Row r of a tile is head r % packed at position r // packed, by the formulas that the kernel is traced through."""
    from anyattn.backends.hopper.kernel.softmax import Softmax

    kernel = Softmax()
    kernel.config = Config(64, 64, True, Tiles(tile_m, 128, 2), heads_per_tile=packed)
    facts = SimpleNamespace(m_block=3, head=40, more=min(packed, 3), seqlen_q=10**6)
    held = []
    for warp in range(tile_m // 16):
        for lane in range(0, 32, 4):  # four lanes hold a row, and its neighbour 8 further
            positions = {(0, 0): (warp * 16 + lane // 4, 0)}
            for r in range(2):
                row = warp * 16 + lane // 4 + 8 * r
                held.append(row)
                assert kernel.first_row(positions, facts) + kernel.apart(r) == 3 * tile_m // packed + row // packed
                assert kernel.head(positions, facts) == 40 + min(row % packed, facts.more - 1)
    assert sorted(held) == list(range(tile_m))


def test_for_users_of_cute() -> None:
    """Lengths are run-time there: the caller says whether heads share tiles, and sizes follow."""
    from anyattn.backends.hopper.cute_api import arguments, describe

    q, k = torch.zeros(2, 16, 40, 128, dtype=torch.bfloat16), torch.zeros(2, 2, 300, 128, dtype=torch.bfloat16)
    counter = torch.zeros(2, dtype=torch.int32)
    rows = {}
    for packs in (False, True):
        described = describe(q, k, k, mask_mod=masks.causal(), pack_gqa=packs)
        given = arguments(described, q, k, k, torch.empty_like(q), counter)
        rows[described.config.heads_per_tile] = given[-6:-3]
    # row tiles, what shares them, what goes side by side: all heads of a batch entry, or their groups
    assert rows == {1: (1, 32, 32), 8: (3, 4, 4)}
    with pytest.raises(BackendError, match="pack_gqa=True"):
        describe(q, k, k, mask_mod=lambda b, h, i, j: i >= j + h, pack_gqa=True)
