"""Block lists whose row tiles are 64 rows: chosen blocks, any number of them, with masks and score mods, for every head dimension."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, scores
from anyattn.sparsity import BlockMask
from tests.support.gpu import judging
from tests.support.gpu.judging import DEVICE, Capturing, judge, qkv, random, same

pytestmark = pytest.mark.gpu
judging.needs_the_backend("hopper")

SQ, SK = 450, 500
CAUSAL = masks.causal()


def chosen(tile: tuple[int, int] = (64, 64), heads: int = 4, sq: int = SQ, sk: int = SK, share: float = 0.4, seed: int = 3) -> Tensor:
    """bool (1, heads, M, N): random blocks; the first row of blocks has none, the second one, the third the last one, the fourth all."""
    shape = (1, heads, -(-sq // tile[0]), -(-sk // tile[1]))
    found = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share
    for row, blocks in enumerate((slice(0, 0), slice(1, 2), slice(-1, None), slice(None))):
        if row < shape[2]:
            found[:, :, row] = False
            found[:, :, row, blocks] = True
    return found


def mask_of(table: Tensor, tile: tuple[int, int] = (64, 64), and_causal: bool = False) -> Capturing:
    """The mask that a table of blocks means."""

    def make(to: Any) -> Any:
        at, by_head = to(table[0]), table.shape[1] > 1
        listed = lambda b, h, i, j: at[h if by_head else 0, i // tile[0], j // tile[1]]
        return (lambda b, h, i, j: listed(b, h, i, j) & (i >= j)) if and_causal else listed

    return Capturing(make)


def lists(table: Tensor, tile: tuple[int, int] = (64, 64), mask_mod: Any = None, sq: int = SQ, sk: int = SK) -> BlockMask:
    return BlockMask.from_block_map(table.to(DEVICE), BLOCK_SIZE=tile, mask_mod=mask_mod, seq_lengths=(sq, sk))


@pytest.mark.parametrize("kind", judging.KINDS)
def test_blocks_without_a_mask(kind: str) -> None:
    """As full tiles and as partial ones without a predicate the results are the same bits."""
    table = chosen()
    full = judge(qkv(1, sq=SQ, sk=SK, kind=kind), mask=mask_of(table), block_mask=lists(table))
    count, index = (t.to(DEVICE) for t in anyattn.sparsity.lists.lists_of_grid(table.to(torch.uint8), False)[:2])
    partial = BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=64, seq_lengths=(SQ, SK))
    assert same(full, judge(qkv(1, sq=SQ, sk=SK, kind=kind), mask=mask_of(table), block_mask=partial))


@pytest.mark.parametrize(("d", "dv"), [(64, 64), (72, 72), (128, 64), (192, 128), (192, 192), (256, 256)])
def test_head_dims(d: int, dv: int) -> None:
    table, inputs = chosen(), qkv(1, sq=SQ, sk=SK, d=d, dv=dv)
    judge(inputs, mask=mask_of(table), block_mask=lists(table))
    judge(inputs, mask=mask_of(table, and_causal=True), block_mask=lists(table, mask_mod=CAUSAL), dropout_p=0.2 if d == 64 else 0.0)


@pytest.mark.parametrize("tile", [(64, 128), (192, 64), (64, 48), (128, 64)], ids=str)
def test_other_tiles(tile: tuple[int, int]) -> None:
    table = chosen(tile)
    judge(qkv(1, sq=SQ, sk=SK), mask=mask_of(table, tile, True), block_mask=lists(table, tile, CAUSAL), sink=random(4), has_max=True)


@pytest.mark.parametrize("name", ["alibi", "softcap", "table"])
def test_score_mods(name: str) -> None:
    table, bias = chosen(), random(4, SQ + SK)
    score = {
        "alibi": Capturing(lambda to: scores.alibi(to(torch.tensor([0.1, 0.2, 0.3, 0.4])))),
        "softcap": scores.softcap(20.0),
        "table": Capturing(lambda to: (lambda t: lambda s, b, h, i, j: s + t[h, i - j + SK])(to(bias))),
    }[name]
    judge(qkv(1, sq=SQ, sk=SK), score=score, mask=mask_of(table, and_causal=True), block_mask=lists(table, mask_mod=CAUSAL))


def test_a_mask_that_reads_the_table() -> None:
    """Lists that follow from such a mask stay in tiles of 64."""
    table = chosen()
    mask = mask_of(table, and_causal=True)
    made = anyattn.create_block_mask(judging.both(mask)[0], 1, 4, SQ, SK, device=DEVICE, BLOCK_SIZE=64)
    judge(qkv(1, sq=SQ, sk=SK), mask=mask, block_mask=made)


@pytest.mark.parametrize("heads", [8, 12, 16])
def test_packed_heads(heads: int) -> None:
    """Lists that all heads share: 4 or 8 heads of a K/V head share a row tile."""
    table = chosen(heads=1)
    inputs = qkv(1, heads, 2, SQ, SK)
    judge(inputs, mask=mask_of(table), block_mask=lists(table), kernel_options={"pack_gqa": True})
    judge(inputs, mask=mask_of(table, and_causal=True), block_mask=lists(table, mask_mod=CAUSAL), kernel_options={"pack_gqa": True})


def test_more_row_tiles_than_thread_blocks() -> None:
    size = 5000
    table = chosen(heads=8, sq=size, sk=size, share=0.1)
    inputs = qkv(1, 8, 8, size, size)
    first = judge(inputs, mask=mask_of(table), block_mask=lists(table, sq=size, sk=size))
    assert same(first, judge(inputs, mask=mask_of(table), block_mask=lists(table, sq=size, sk=size)))


@pytest.mark.parametrize("d", [64, 96, 128, 256])
def test_gradients(d: int) -> None:
    table = chosen()
    judge(qkv(1, 4, 2, SQ, SK, d=d), mask=mask_of(table), block_mask=lists(table), backward=True)
    judge(qkv(1, 4, 4, SQ, SK, d=d), mask=mask_of(table, and_causal=True), block_mask=lists(table, mask_mod=CAUSAL), backward=True)


@pytest.mark.parametrize("tile", [(64, 192), (128, 64)], ids=str)
def test_gradients_of_other_tiles(tile: tuple[int, int]) -> None:
    """With a score mod; deterministic sums are the same bits again."""
    table, alibi = chosen(tile), Capturing(lambda to: scores.alibi(to(torch.tensor([0.1, 0.2, 0.3, 0.4]))))
    inputs, mask = qkv(1, 4, 1, SQ, SK), mask_of(table, tile, True)
    for is_deterministic in (False, True):
        given = {"block_mask": lists(table, tile, CAUSAL), "deterministic": is_deterministic, "backward": True}
        judge(inputs, score=alibi, mask=mask, **given)


def test_gradients_of_many_key_tiles() -> None:
    size = 3000
    table = chosen(heads=8, sq=size, sk=size, share=0.1)
    judge(qkv(1, 8, 8, size, size), mask=mask_of(table), block_mask=lists(table, sq=size, sk=size), backward=True)
