"""Block lists of 64-row tiles, without a GPU: their kernels' tiles, which lists stay as they are, and the order of row tiles."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks, planner
from anyattn.backends.hopper import tables
from anyattn.backends.hopper.backward import _tables_of_lists
from anyattn.backends.hopper.config import SHARED_MEMORY, Config, Tiles, bytes_of, tiles_for
from anyattn.backends.hopper.make_backward_config import backward_spec, reason_against_backward
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.plan import reason_against
from anyattn.backends.hopper.tables import visits_of
from anyattn.mods.dropout import dropout_of, seeded
from anyattn.mods.tracing.trace import trace
from anyattn.problem import Problem
from anyattn.sparsity import BlockMask
from anyattn.sparsity.derived import derived
from anyattn.sparsity.read_lists import read_lists
from tests.support.hopper.pretended import H200

TABLE = torch.eye(8, dtype=torch.bool) | torch.eye(8, dtype=torch.bool).roll(3, 0)


def problem(block_mask: BlockMask, heads: int = 2, kv_heads: int = 2, d: int = 128, **more) -> Problem:  # type: ignore[no-untyped-def]
    sq, sk = block_mask.seq_lengths
    q = torch.zeros(1, heads, sq, d, dtype=torch.bfloat16)
    k = torch.zeros(1, kv_heads, sk, d, dtype=torch.bfloat16)
    predicates = (trace(block_mask.mask_mod, "mask"),)
    follows = getattr(block_mask, "is_exact", False)
    return Problem(**({"q": q, "k": k, "v": k, "scale": 0.1, "predicates": predicates, "blocks": read_lists(block_mask)} | more),
                   blocks_follow=follows)  # fmt: skip


def chosen(tile: int | tuple[int, int] = 64, heads: int = 1, mask=None) -> BlockMask:  # type: ignore[no-untyped-def]
    return BlockMask.from_block_map(TABLE.expand(1, heads, 8, 8), BLOCK_SIZE=tile, mask_mod=mask)


@pytest.mark.parametrize("dims", [(64, 64), (96, 96), (128, 128), (128, 64), (192, 128), (192, 192), (256, 256)], ids=str)
def test_thread_blocks_fit_a_multiprocessor(dims: tuple[int, int]) -> None:
    tiles = tiles_for(*dims, None, 64, rows=64)
    config = Config(*dims, True, tiles, lists="dense")
    assert (tiles.tile_m, tiles.tile_n, tiles.ping_pong, tiles.warp_groups) == (64, 64, False, 1)
    assert tiles.blocks == (2 if max(dims) <= 128 else 1) and tiles.stages >= 3
    # a multiprocessor has 228 KiB, of which each thread block takes one more than it asks for
    assert tiles.blocks * (bytes_of(tiles, *dims, config.q_stages) + 1024) <= SHARED_MEMORY + 1024
    consumers, producers = config.registers
    assert 128 * tiles.blocks * (consumers + producers) <= 65_536


def test_impossible_tiles_are_refused() -> None:
    for make, words in (
        (lambda: Tiles(64, 64, 2), "ping_pong with tile_m=64"),
        (lambda: Tiles(128, 64, 2, blocks=2), "blocks=2 with tile_m=128"),
        (lambda: Tiles(64, 64, 2, False, blocks=4), "blocks=4 with tile_m=64"),
        (lambda: Config(128, 128, True, Tiles(64, 64, 4, False, blocks=2)), "each thread block has 115712"),
    ):
        with pytest.raises(ValueError, match=words):
            make()


def test_lists_are_read_as_they_are() -> None:
    for tile, wanted, cut in (
        ((64, 64), (64, 64), (1, 1)),
        ((64, 128), (64, 64), (1, 2)),
        ((192, 64), (64, 64), (3, 1)),
        ((64, 48), (64, 48), (1, 1)),
        ((128, 64), (128, 64), (1, 1)),
        ((256, 64), (128, 64), (2, 1)),
    ):
        for mask in (None, masks.causal()):
            p = problem(chosen(tile, mask=mask))
            spec = forward_spec(p)
            assert reason_against(p) is None and spec.list_tile == tile
            assert ((spec.config.tiles.tile_m, spec.config.tiles.tile_n), spec.config.list_cut) == (wanted, cut)
    assert "multiples" in str(reason_against(problem(chosen((32, 64))))) and "32 x 64" in str(reason_against(problem(chosen((32, 64)))))


def test_lists_of_a_mask_of_row_ranges_are_joined() -> None:
    """Its rows see runs of keys, of which larger tiles hold few more; a mask that reads a table of blocks keeps its own tiles."""
    by_table = lambda b, h, i, j: TABLE[i // 64, j // 64]
    for mask, wanted in ((masks.prefix_lm(100), (128, 128)), (by_table, (64, 64))):
        made = anyattn.create_block_mask(mask, 1, 1, 512, 512, device="cpu", BLOCK_SIZE=64)
        p = problem(made)
        assert p.blocks_follow and forward_spec(p).list_tile == wanted
        order = visits_of(p, forward_spec(p)).order
        assert order is not None and len(order) == 512 // wanted[0]


def test_packed_heads_fill_whole_tiles() -> None:
    """Four heads of a list's 64 rows are two tiles of 128 rows; lists of each head are not packed."""
    p = problem(chosen(), heads=8, kv_heads=2)
    config = forward_spec(p, True).config
    assert (config.heads_per_tile, config.tiles.tile_m, config.list_cut) == (4, 128, (2, 1))
    config = forward_spec(problem(chosen(heads=8), heads=8, kv_heads=2), True).config
    assert (config.heads_per_tile, config.tiles.tile_m, config.per_head) == (1, 64, True)


def test_the_plan_says_who_computes_what() -> None:
    q = torch.zeros(1, 2, 512, 128, dtype=torch.bfloat16, requires_grad=True)
    plan = planner.choose(problem(chosen(), q=q), H200)
    assert (plan.backend, plan.tile_m, plan.tile_n, plan.backward) == ("hopper", 64, 64, "hopper")
    plan = planner.choose(problem(chosen((64, 48)), q=q), H200)
    assert (plan.backend, plan.backward) == ("hopper", "triton")
    assert any("its backward kernel has tiles of 64 rows x 128 keys, and these" in line for line in plan.why)


@pytest.mark.parametrize("d", [64, 96, 128, 192, 256])
def test_the_backward_pass_reads_them_too(d: int) -> None:
    """Up to head dimension 128 one warp group has a key tile; wider heads have tiles of 64 keys anyway."""
    for tile, cut in (((64, 64), (1, 1)), ((128, 64), (2, 1)), ((64, 192), (1, 3))):
        p = problem(chosen(tile, mask=masks.causal()), d=d)
        spec = backward_spec(p)
        assert reason_against_backward(p) is None and spec.list_tile == tile and spec.config.list_cut == cut
        assert spec.config.tiles.blocks == (2 if d <= 128 else 1) and spec.config.tiles.shares_keys == (d > 128)
        assert not spec.config.frees_keys and spec.config.tiles.blocks * (spec.config.shared_memory + 1024) <= SHARED_MEMORY + 1024
    assert backward_spec(problem(chosen((64, 128)), d=d)).config.tiles.blocks == 1
    made = anyattn.create_block_mask(masks.prefix_lm(100), 1, 1, 512, 512, device="cpu", BLOCK_SIZE=64)
    assert backward_spec(problem(made, d=d)).config.tiles.blocks == 1  # joined to larger tiles


def test_what_the_backward_pass_leaves_to_others() -> None:
    learned = torch.zeros(2, requires_grad=True)
    score = trace(lambda s, b, h, i, j: s + learned[h] * (i - j), "score")
    dropout = dropout_of(seeded(0.1, torch.empty(0)))
    for more in ({"score": score}, {"dropout": dropout}):
        assert "tiles of 64 rows x 128 keys" in str(reason_against_backward(problem(chosen(), **more)))


def test_heads_whose_keys_exceed_the_cache_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head's row tiles stay together among those of costs between the same powers of two."""
    table = torch.zeros(1, 2, 8, 8, dtype=torch.bool)
    for head, counts in enumerate(([4, 7, 5, 1, 0, 6, 4, 8], [5, 5, 4, 2, 7, 7, 1, 3])):
        for row, count in enumerate(counts):
            table[0, head, row, :count] = True
    p = problem(BlockMask.from_block_map(table, BLOCK_SIZE=64))
    visits = table.sum(-1)[0]

    def found() -> list[tuple[int, int]]:
        order = visits_of(p, forward_spec(p)).order
        assert order is not None
        return [(int(visits[h, m]), h) for m, h, _ in order.tolist()]

    assert [cost for cost, _ in found()] == sorted(visits.flatten().tolist(), reverse=True)
    monkeypatch.setattr(tables, "CACHE_FOR_KEYS", 1)
    assert p.blocks is not None
    derived(p.blocks).clear()
    by_head = found()
    assert [cost.bit_length() for cost, _ in by_head] == sorted((cost.bit_length() for cost, _ in by_head), reverse=True)
    middle = [head for cost, head in by_head if 4 <= cost < 8]
    assert middle == sorted(middle)


def test_lists_of_key_value_heads_are_read_by_any_number_of_query_heads() -> None:
    """One mask for layers of other numbers of query heads: the tables that are cached with its lists are of the call's."""
    block_mask = chosen(heads=2)
    for heads in (2, 4, 8, 2):
        p = problem(block_mask, heads=heads)
        tables = visits_of(p, forward_spec(p)), _tables_of_lists(p, backward_spec(p)).lists
        assert [found[0].shape[:2] for found in tables] == [(1, 2)] * 2  # type: ignore[index]
