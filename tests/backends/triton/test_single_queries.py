"""Launches for chosen blocks of single queries, compiled for Hopper: the rows and keys that share tiles, and what the compiler makes."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import BlockMask
from tests.support.chosen_blocks import choice
from tests.support.triton import ahead
from tests.support.triton.ahead import Launch

pytest.importorskip("triton")
HOPPER = (9, 0)


def launches(tile: tuple[int, int], heads: tuple[int, int], listed: int, dim: int = 128, score: object = None) -> dict[str, Launch]:
    """By name: forward_tile, dq_tile, and dkdv_tile or dkdv_of_queries. heads: query heads and K/V heads. listed: heads of the lists."""
    indices = choice((2, listed), (100, 300), tile, 4)
    block_mask = BlockMask.from_topk(indices, BLOCK_SIZE=tile, seq_lengths=(100, 300), causal=True)
    q, k, v = (torch.zeros(2, n, s, dim, dtype=torch.bfloat16, requires_grad=True) for n, s in ((heads[0], 100), *2 * [(heads[1], 300)]))
    with ahead.on(HOPPER) as made:
        out = anyattn.flex_attention(q, k, v, score, block_mask=block_mask, enable_gqa=True, backend="triton")  # type: ignore[arg-type]
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    names = [launch.kernel.fn.__code__.co_filename.split()[-1].rpartition("_")[0] for launch in made]
    return dict(zip(names, made, strict=True))


def test_heads_share_tiles_and_queries_are_gathered() -> None:
    """The 16 query heads of a K/V head: rows of a tile in each pass."""
    made = launches((1, 64), (32, 2), 2)
    forward, dq, dkdv = made["forward_tile"], made["dq_tile"], made["dkdv_of_queries"]
    assert (forward.options["TILE_M"], forward.options["TILE_N"], forward.grid) == (16, 64, (100, 2, 2))
    assert (dq.options["TILE_M"], dq.options["GROUP"], dq.grid) == (16, 16, (100, 2, 2))
    assert (dkdv.options["TILE_M"], dkdv.options["GROUP"], dkdv.options["TILE_N"], dkdv.grid) == (64, 16, 64, (5, 2, 2))


def test_small_blocks_fill_tiles() -> None:
    """Of keys, in the forward pass and for dq; as many tiles are loaded ahead as from blocks of 64 keys."""
    whole = launches((1, 64), (32, 2), 2)
    for keys in (1, 16, 32):
        made = launches((1, keys), (32, 2), 1)
        for name in ("forward_tile", "dq_tile"):
            assert (made[name].options["TILE_N"], made[name].options["JOINS"]) == (64, 64 // keys)
    shared, wanted = (ahead.resources(ahead.compiled(x["dq_tile"], HOPPER)).shared for x in (made, whole))
    assert shared >= wanted - 1024
    assert launches((64, 16), (4, 4), 4)["forward_tile"].options["JOINS"] > 1


def test_what_heads_do_not_share() -> None:
    """Lists of query heads, and gradients of what a score mod captures."""
    made = launches((1, 64), (8, 2), 8)
    assert made["dq_tile"].options["GROUP"] == 0 and made["dq_tile"].grid[1] == 8 and "dkdv_tile" in made
    bias = torch.zeros(8, requires_grad=True)
    made = launches((1, 16), (8, 2), 2, score=lambda s, b, h, i, j: s + bias[h])
    assert (made["dq_tile"].options["GROUP"], made["dq_tile"].options["JOINS"]) == (0, 0) and "dkdv_of_queries" in made


@pytest.mark.parametrize(
    ("tile", "dim"),
    [((1, 64), 128), ((1, 1), 128), *(pytest.param(t, d, marks=pytest.mark.slow) for t in ((1, 64), (1, 16)) for d in (64, 256))],
)
def test_no_loop_spills_and_rows_are_copied_in_wide_pieces(tile: tuple[int, int], dim: int) -> None:
    made = launches(tile, (32, 2), 2, dim)
    for name in ("forward_tile", "dq_tile", "dkdv_of_queries"):
        kernel = ahead.compiled(made[name], HOPPER)
        assert ahead.spilled(kernel) == 0.0, name
        assert "cp.async.cg" in "\n".join(max(ahead.loops(kernel), key=len)) and not ahead._narrow(kernel), name
