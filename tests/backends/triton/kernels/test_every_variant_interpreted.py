"""Every variant, forward and backward, by Triton's interpreter. Run by ``test_in_the_interpreter.py`` in a process of its own."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.triton import api, launch_shape
from anyattn.backends.triton.codegen import entry
from tests.support import cases
from tests.support.covering import few
from tests.support.flex_calls import judge, results
from tests.support.triton import proof

NAMES = {"ids": lambda x: str(x).removeprefix("torch.")}


@pytest.mark.covering(1, of=lambda case, dtype: (case.variant, case.kind, case.shape, dtype))
@pytest.mark.parametrize(("case", "dtype"), proof.matrix(proof.FEW), **NAMES)
def test_variant(case, dtype):
    want = cases.expected(case, dtype)
    want.check(results(case, want), str(case))


@pytest.mark.covering(1, of=lambda case, dtype: (case.shape, dtype))
@pytest.mark.parametrize(("case", "dtype"), proof.alone(proof.FEW), **NAMES)
def test_output_alone(case, dtype):
    want = cases.expected(case, dtype, with_lse=False, backward=False)
    want.check(results(case, want, backward=False), str(case))


def test_both_passes_are_tritons(monkeypatch):
    from anyattn.backends import torch as other

    monkeypatch.delattr(other, "Repeater")
    case = cases.Case("gated_sink", proof.FEW[3], "normal")
    results(case, cases.expected(case, torch.float32))


def qkv(*shape, dtype=torch.float32, kind="normal"):
    return cases.inputs(kind, cases.Shape(*shape), dtype, 0)[:3]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", proof.LADDER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], **NAMES)
def test_ladder(name, dtype):
    rung = proof.LADDER[name]
    judge(*qkv(1, rung.ratio, 1, 75, 75, 16, 16, dtype=dtype), mask=rung.mask)


@pytest.mark.parametrize(("ratio", "packed", "splits"), [pytest.param(71, 24, 3, marks=pytest.mark.slow), (33, 17, 1)])
def test_heads_that_share_tiles_unevenly(ratio, packed, splits, monkeypatch):
    """71 heads are 24, 24 and 23; each sees other keys than its neighbours, and the next K/V head's are others again."""
    q, k, v = qkv(1, 2 * ratio, 2, 1, 70, 16, 16)
    slopes, real, seen = torch.linspace(-1, 1, 2 * ratio, dtype=torch.float64), api._launch, []
    monkeypatch.setattr(api, "_launch", lambda form, target: (seen.append(form.plan.heads_per_tile), real(form, target))[1])
    options = {"kernel_options": {"num_splits": splits}, "sink": slopes.float()}
    judge(q, k, v, mask=lambda b, h, i, j: j <= 69 - h % 50, score=lambda s, b, h, i, j: s + slopes[h] * j * 0.1, **options)
    assert set(seen) == {packed}


@pytest.mark.parametrize(("rows", "packs"), [(1, True), (70, False)])
def test_more_entries_than_an_axis_has_room_for(rows, packs, monkeypatch):
    """They are the first axis of every launch's grid then, forward and backward."""
    grids, real = [], entry.launch
    monkeypatch.setattr(launch_shape, "MOST_BLOCKS", 2)
    monkeypatch.setattr(entry, "launch", lambda kernel, grid, *more: (grids.append(grid), real(kernel, grid, *more))[1])
    judge(*qkv(3, 4, 2, rows, 40, 16, 16), mask=lambda b, h, i, j: j - b <= i + 30 - rows // 2, sink=torch.zeros(4))
    assert len(grids) == 4 and {grid[0] for grid in grids} == {3} and grids[0][1] == (2 if packs else 4), grids


@pytest.mark.parametrize("ratio", few(proof.RATIOS, 3, 8))
def test_grouped_heads(ratio):
    q, k, v = qkv(1, 2 * ratio if ratio < 5 else ratio, 2 if ratio < 5 else 1, 35 if ratio < 5 else 20, 24, 8, 8)
    bias = torch.linspace(-1, 1, q.shape[1], dtype=torch.float64)
    mask = lambda b, h, i, j: (i - j) % 2 <= h % 2
    judge(q, k, v, mask=mask, score=lambda s, b, h, i, j: s + bias[h] * j * 0.1, captured=[bias], sink=bias.float())


@pytest.mark.parametrize("dims", few(proof.DIMS, (16, 40), (72, 72), (128, 64), (256, 256)), ids=str)
def test_head_dims(dims):
    judge(*qkv(1, 2, 1, 40, 37, *dims, dtype=proof.DTYPES[proof.DIMS.index(dims) % 3]), mask=masks.causal(5))


@pytest.mark.covering(1)
@pytest.mark.parametrize("tiles", [(16, 64), (64, 16), (128, 32)], ids=str)
@pytest.mark.parametrize("name", ["sink_window", "relative_window", "documents"])
def test_tiles_of_any_size(tiles, name):
    case = cases.Case(name, cases.Shape(1, 2, 1, 70, 70, 16, 16), "peaky")
    want = cases.expected(case, torch.float32)
    want.check(results(case, want, kernel_options={"tile_m": tiles[0], "tile_n": tiles[1]}), str(case))


@pytest.mark.parametrize("block", few((16, 32, 48, 64, (32, 80), (100, 16), 256), 16, (32, 80), (100, 16)), ids=str)
def test_block_masks_of_other_sizes(block):
    from torch.nn.attention.flex_attention import create_block_mask

    q, k, v = qkv(1, 2, 1, 90, 101, 16, 16)
    mask = lambda b, h, i, j: (i + 30 >= j) & (i - j < 60) & ((j < 70) | (i > 80))
    make = create_block_mask if block in (32, 64, (100, 16)) else anyattn.create_block_mask
    judge(q, k, v, mask=mask, block_mask=make(mask, None, None, 90, 101, device="cpu", BLOCK_SIZE=block))


@pytest.mark.parametrize("sizes", few([(2, 3), (2, None), (None, 3)], (2, None), (None, 3)), ids=str)
def test_block_masks_by_batch_and_head(sizes):
    q, k, v = qkv(2, 3, 1, 40, 50, 8, 8)
    batch, heads = sizes
    mask = lambda b, h, i, j: (i + 20 - j >= 3 * (b if batch else 0)) & (i - j < 20 - 5 * (h if heads else 0))
    judge(q, k, v, mask=mask, block_mask=anyattn.create_block_mask(mask, batch, heads, 40, 50, device="cpu", BLOCK_SIZE=32))


def test_lists_alone_say_what_is_seen():
    """Torch's full blocks are not asked, its partial ones are; blocks in no list are not seen, whatever the mask says."""
    q, k, v = qkv(2, 2, 1, 128, 96, 16, 16)
    kinds = torch.randint(0, 3, (2, 2, 4, 3), generator=torch.Generator().manual_seed(4))
    kinds[0, 1, 2] = 0
    tables = []
    for wanted in (1, 2):
        at = kinds == wanted
        tables += [at.sum(-1, dtype=torch.int32), at.int().argsort(dim=-1, descending=True, stable=True).int()]
    shown = lambda b, h, i, j: (i + j) % 3 != 0
    made = anyattn.BlockMask.from_kv_blocks(*tables, BLOCK_SIZE=32, mask_mod=shown, seq_lengths=(128, 96))

    def meant(b, h, i, j):
        kind = kinds[b, h, i // 32, j // 32]
        return (kind == 2) | ((kind == 1) & shown(b, h, i, j))

    judge(q, k, v, mask=meant, block_mask=made)


def test_windows_wider_than_the_sequence_are_none_to_the_bit():
    q, k, v = qkv(1, 2, 2, 50, 50, 16, 16)
    for wide, none in ((masks.sliding_window(50, 50), None), (masks.sliding_window(1000, 0), masks.causal())):
        a, b = (judge(q, k, v, mask=mask) for mask in (wide, none))
        assert all(torch.equal(a[n], b[n]) for n in a), wide


@pytest.mark.parametrize("left", few([1, 15, 16, 17, 33], 15, 16))
def test_windows_around_the_tile_size(left):
    judge(*qkv(1, 1, 1, 70, 70, 16, 16), mask=lambda b, h, i, j: (i - j <= left) & (j - i <= 2))


def test_strides():
    """Tokens before heads, rows of a wider tensor, every second row; aligned or not, the same bits."""
    q, k, v = qkv(1, 4, 2, 40, 50, 16, 16)
    plain = judge(q, k, v, mask=masks.causal())
    wide = torch.full((1, 50, 2, 40), torch.nan)
    wide[..., 5:21] = k.transpose(1, 2)
    tokens_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    every_other = [torch.stack([t, t * torch.nan], 3).flatten(2, 3)[:, :, ::2] for t in (q, k, v)]
    for tensors in (tokens_first, every_other, [q, wide[..., 5:21].transpose(1, 2), every_other[2]]):
        got = judge(*tensors, mask=masks.causal())
        assert all(torch.equal(got[n], plain[n]) for n in got)


def test_score_mod_and_block_mask_on_ragged_lengths():
    q, k, v = qkv(1, 4, 2, 41, 67, 24, 24)
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    mask = lambda b, h, i, j: j <= i + 26
    made = anyattn.create_block_mask(mask, None, None, 41, 67, device="cpu", BLOCK_SIZE=32)
    judge(q, k, v, mask=mask, score=lambda s, b, h, i, j: s - slopes[h] * abs(i + 26 - j) * 0.1, captured=[slopes], block_mask=made)


@pytest.mark.parametrize("name", few(["gated_sink", "documents", "t5", "islands_sink"], "gated_sink"))
def test_deterministic_reruns_agree_bitwise(name):
    case = cases.Case(name, cases.Shape(1, 2, 1, 70, 70, 16, 16), "normal")
    want = cases.expected(case, torch.bfloat16)
    first, second = (results(case, want, deterministic=True) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)
    want.check(first, str(case))


def in_turn(monkeypatch, together):
    from anyattn.backends.triton import backward_pass
    from anyattn.call_cache import attention

    monkeypatch.setattr(backward_pass, "heads_in_turn", lambda *about: together)
    attention.clear()


@pytest.mark.parametrize("name", few(["causal", "sink"], "sink"))
def test_heads_in_turn_are_all_heads(name, monkeypatch):
    """However many heads programs go through at a time, all of them or a number that does not divide them: the same bits."""
    q, k, v = qkv(3, 2, 1, 40, 40, 8, 8)
    found = []
    for together in (1, 4, 6):
        in_turn(monkeypatch, together)
        found.append(judge(q, k, v, mask={"causal": masks.causal(), "sink": masks.sink_window(3, 12)}[name]))
    assert all(torch.equal(got[n], found[0][n]) for got in found[1:] for n in got)


@pytest.mark.parametrize("name", few(["band", "not one run"], "not one run"))
def test_more_row_tiles_than_are_looked_at_together(name):
    """128 are; and those that see all of a tile's keys need not be one run."""
    band = lambda b, h, i, j: (j >= i // 50) & (j < i // 50 + 20)
    alternate = lambda b, h, i, j: (j <= torch.where(i // 48 % 2 == 0, 40, 3)) & (i >= j)
    options = {"tile_m": 16, "tile_n": 16}
    judge(*qkv(1, 1, 1, 16 * 129 + 5, 50, 8, 8), mask=band if name == "band" else alternate, kernel_options=options)
