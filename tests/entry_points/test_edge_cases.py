"""The edge cases that hurt users of other libraries, in the order of the project's list; each is one named test or more."""

from __future__ import annotations

import concurrent.futures
import math
from collections.abc import Callable

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.mods.tracing import trace as tracing
from anyattn.testing import budget
from anyattn.testing.rounding import later, rounding
from tests.support import cases, chosen_blocks
from tests.support.counting import peak_bytes
from tests.support.covering import few
from tests.support.flex_calls import flex, judge, results
from tests.support.fuzz.requests import Operands, Request, Threshold, judge_request, judge_threshold

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def qkv(*shape, dtype=torch.float32, seed=0, kind="normal"):
    return cases.inputs(kind, cases.Shape(*shape), dtype, seed)[:3]


def causal(b, h, q, k):
    return q >= k


def lengths_of(q, k):
    return q.shape[2], k.shape[2]


def block_mask(mask, q, k, block=128, per_batch=False):
    b, h = (q.shape[0], q.shape[1]) if per_batch else (None, None)
    return anyattn.create_block_mask(mask, b, h, *lengths_of(q, k), device="cpu", BLOCK_SIZE=block)


def backward_of(q, k, v, **options):
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    out, lse = flex(*leaves, return_lse=True, enable_gqa=True, **options)
    out.double().sum().backward()
    return out.detach(), lse.detach(), *(t.grad for t in leaves)


# ---- 1. rows and tiles that see nothing


@pytest.mark.covering(1)
@pytest.mark.parametrize("by", ["mask_mod", "block_mask"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_01_everything_masked(by, dtype):
    q, k, v = qkv(2, 4, 2, 70, 90, 16, 8, dtype=DTYPES[dtype])
    nothing = lambda b, h, q, k: q < 0
    option = {"mask_mod": nothing} if by == "mask_mod" else {"block_mask": block_mask(nothing, q, k)}
    out, lse, *grads = backward_of(q, k, v, **option)
    assert not out.any() and (lse == -math.inf).all() and not any(g.any() for g in grads)
    sink = torch.tensor([0.5, -1.0, 2.0, 0.0], dtype=DTYPES[dtype])
    out, lse, *grads = backward_of(q, k, v, sink=sink, **option)
    assert not out.any() and not any(g.any() for g in grads)
    assert torch.equal(lse, sink.to(lse.dtype)[None, :, None].expand_as(lse))


@pytest.mark.parametrize("by", ["mask_mod", "block_mask"])
def test_01_masked_rows_and_tiles_among_others(by):
    q, k, v = qkv(1, 2, 1, 300, 300, 16, 16)
    mask = lambda b, h, q, k: (q // 70 % 2 == 0) & (k <= q) & (q % 7 != 3)
    judge(q, k, v, mask=mask, **({} if by == "mask_mod" else {"block_mask": block_mask(mask, q, k, 64)}))


# ---- 2. empty shapes


EMPTY = [(0, 2, 1, 5, 5, 8, 8), (1, 2, 1, 0, 5, 8, 8), (2, 2, 1, 5, 0, 8, 4), (1, 2, 1, 0, 0, 8, 8), (1, 0, 0, 5, 5, 8, 8)]
MODS = {"plain": {}, "mask": {"mask_mod": causal}, "both": {"score_mod": lambda s, b, h, q, k: s * 2, "mask_mod": causal}}


@pytest.mark.parametrize("shape", EMPTY, ids=str)
@pytest.mark.parametrize("mods", MODS.values(), ids=MODS)
def test_02_empty_shapes(shape, mods):
    q, k, v = qkv(*shape)
    out, lse, dq, dk, dv = backward_of(q, k, v, **mods)
    assert out.shape == (*q.shape[:3], v.shape[3]) and lse.shape == q.shape[:3]
    assert not out.any() and (lse == -math.inf).all()
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, v.shape) and not any(g.any() for g in (dq, dk, dv))


def test_02_empty_keys_with_a_sink():
    q, k, v = qkv(1, 2, 1, 5, 0, 8, 8)
    sink = torch.tensor([1.0, -2.0], requires_grad=True)
    out, lse = flex(q, k, v, sink=sink, enable_gqa=True, return_lse=True)
    assert not out.any() and torch.equal(lse[0, :, 0], sink.detach())
    lse.sum().backward()
    assert sink.grad.tolist() == [5.0, 5.0]


@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(1, 1), (1, 300), (300, 1), (2, 3)])
def test_02_single_rows(seqlen_q, seqlen_k):
    judge(*qkv(2, 2, 1, seqlen_q, seqlen_k, 8, 8), mask=lambda b, h, q, k: k <= q + seqlen_k - seqlen_q)


# ---- 3. fewer keys than queries


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("aligned", ["top_left", "bottom_right"])
def test_03_fewer_keys_than_queries_causal(aligned, dtype):
    q, k, v = qkv(1, 2, 2, 200, 77, 16, 16, dtype=DTYPES[dtype])
    mask = masks.causal() if aligned == "top_left" else masks.causal_bottom_right(200, 77)
    plain = causal if aligned == "top_left" else lambda b, h, q, k: k <= q - 123
    got = judge(q, k, v, mask=plain)
    assert torch.equal(got["out"], flex(q, k, v, mask_mod=mask, return_lse=True)[0])


# ---- 4. windows wider than the sequence, and empty ones


def test_04_a_window_wider_than_the_sequence_is_none_bitwise():
    q, k, v = qkv(1, 2, 2, 257, 257, 16, 16)
    for wide, none in (
        (masks.sliding_window(257, 257), None),
        (masks.sliding_window(1000, 0), masks.causal()),
        (masks.sliding_window(-1, 0), masks.causal()),
        (masks.sliding_window(None, None), None),
    ):
        for a, b in zip(backward_of(q, k, v, mask_mod=wide), backward_of(q, k, v, mask_mod=none)):
            assert torch.equal(a, b), wide


def test_04_window_of_itself_alone():
    q, k, v = qkv(1, 2, 2, 100, 100, 16, 16)
    assert torch.equal(flex(q, k, v, mask_mod=masks.sliding_window(0, 0)), v)
    judge(q, k, v, mask=lambda b, h, q, k: q == k)


def test_04_an_empty_band_masks_everything():
    q, k, v = qkv(1, 2, 2, 60, 60, 8, 8)
    out, lse, *grads = backward_of(q, k, v, mask_mod=lambda b, h, q, k: (q - k <= 3) & (q - k >= 5))
    assert not out.any() and (lse == -math.inf).all() and not any(g.any() for g in grads)


def test_04_windows_around_the_tile_size():
    q, k, v = qkv(1, 1, 1, 300, 300, 8, 8)
    for left in (1, 63, 64, 65, 255, 256, 257):
        window = lambda b, h, q, k: (q - k <= left) & (k - q <= 2)  # noqa: B023
        judge(q, k, v, mask=window, label=f"left={left}")


# ---- 5. offsets past 2^31


def test_05_huge_strides_on_small_views():
    """The second batch entry lies 2^31 + 64 elements after the first: memory that is reserved and never touched."""
    shape, jump = (2, 1, 40, 8), 2**31 + 64
    small = qkv(2, 1, 1, 40, 40, 8, 8, dtype=torch.bfloat16)
    far = []
    for tensor in small:
        view = torch.empty(jump + 1024, dtype=torch.bfloat16).as_strided(shape, (jump, 320, 8, 1))
        view.copy_(tensor)
        far.append(view)
    for a, b in zip(judge(*far, mask=causal).values(), judge(*small, mask=causal).values()):
        assert torch.equal(a, b)


def test_05_heads_that_lie_far_apart_in_packed_sequences():
    """The second head lies 2^31 + 64 elements after the first."""
    jump, ends = 2**31 + 64, torch.tensor([0, 15, 40])
    found = []
    for is_far in (False, True):
        leaves = []
        for tensor in qkv(1, 2, 2, 40, 40, 8, 8, dtype=torch.bfloat16):
            view = tensor[0].transpose(0, 1)
            if is_far:
                view = torch.empty(jump + 1024, dtype=torch.bfloat16).as_strided((40, 2, 8), (8, jump, 1)).copy_(view)
            leaves.append(view.detach().requires_grad_())
        out, lse = anyattn.flash_attn_varlen_func(*leaves, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True, return_lse=True)
        found.append([out, lse, *torch.autograd.grad(out.float().sum(), leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_05_pages_past_two_to_the_31():
    """A pool of 2^31 elements and more, reserved and hardly touched: pages at its end, read and written."""
    size, pages, new = 16, 2**31 // (16 * 8) + 4, torch.randn(1, 1, 1, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    q, k, v = (t.transpose(1, 2) for t in qkv(1, 2, 1, 1, 48, 8, 8, dtype=torch.bfloat16))
    q, found = torch.randn(1, 1, 2, 8, generator=torch.Generator().manual_seed(1)).bfloat16(), []
    for count, places in ((3, [0, 1, 2]), (pages, [pages - 1, 1, pages - 3])):
        pools = [torch.empty(count * size * 8, dtype=torch.bfloat16).view(count, size, 1, 8) for _ in "kv"]
        for pool, rows in zip(pools, (k, v)):
            for at, place in enumerate(places):
                pool[place] = rows[0, at * size : (at + 1) * size]
        table = torch.tensor([places], dtype=torch.int32)
        more = {"k": new, "v": -new, "cache_seqlens": torch.tensor([40], dtype=torch.int32), "causal": True}
        out, lse = anyattn.flash_attn_with_kvcache(q, *pools, page_table=table, **more, num_splits=2, return_lse=True)
        found.append([out, lse, *(pool[places] for pool in pools)])
        assert torch.equal(pools[0][places[2], 8], new[0, 0]) and torch.equal(pools[1][places[2], 8], -new[0, 0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_05_a_captured_table_indexed_past_two_to_the_31():
    rows = torch.randn(40, generator=torch.Generator().manual_seed(0))
    step = 2**31 // 16
    table = torch.empty(40 * step, dtype=torch.float32)[: 39 * step + 1]  # only 40 of its elements are ever touched
    table[::step] = rows
    q, k, v = qkv(1, 1, 1, 40, 40, 8, 8)
    got = flex(q, k, v, score_mod=lambda s, b, h, i, j: s + table[j * step])
    assert torch.equal(got, flex(q, k, v, score_mod=lambda s, b, h, i, j: s + rows[j]))


def test_05_a_captured_view_whose_offsets_pass_two_to_the_31():
    base = torch.empty(2**31 + 4096, dtype=torch.bfloat16)
    table = base.as_strided((2, 40), (2**31 + 8, 1))
    table.copy_(torch.randn(2, 40, generator=torch.Generator().manual_seed(0)))
    near = table.clone()
    q, k, v = qkv(2, 1, 1, 40, 40, 8, 8)
    got = flex(q, k, v, score_mod=lambda s, b, h, i, j: s + table[b, j])
    assert torch.equal(got, flex(q, k, v, score_mod=lambda s, b, h, i, j: s + near[b, j]))


# ---- 6. strides


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_06_any_strides(dtype):
    q, k, v = qkv(2, 4, 2, 90, 110, 16, 16, dtype=DTYPES[dtype])
    plain = judge(q, k, v, mask=causal)
    wide_k = torch.zeros(2, 110, 2, 40, dtype=k.dtype)
    wide_k[..., 5:21] = k.transpose(1, 2)
    strided = {
        "transposed": [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)],
        "k sliced from a wider tensor, v transposed": [q, wide_k[..., 5:21].transpose(1, 2), v.mT.contiguous().mT],
        "last dimension not contiguous": [t.mT.contiguous().mT for t in (q, k, v)],
        "every second row": [torch.stack([t, t * 0 + 7], 3).flatten(2, 3)[:, :, ::2] for t in (q, k, v)],
    }
    for name, tensors in strided.items():
        assert not all(t.is_contiguous() for t in tensors)
        got = judge(*tensors, mask=causal, label=name)
        for key in ("out", "lse"):
            assert torch.equal(got[key], plain[key]), name


def test_06_expanded_inputs_get_summed_gradients():
    q, k, v = qkv(1, 4, 1, 50, 60, 16, 16)
    judge(q, k.expand(1, 4, 60, 16), v.expand(1, 4, 60, 16), mask=causal, label="heads")
    judge(q[:, :, :1].expand(1, 4, 50, 16), k, v, mask=causal, label="rows of q")
    judge(q, k[:, :, :1].expand(1, 1, 60, 16), v, label="rows of k")
    leaf = k.clone().requires_grad_()
    flex(q, leaf.expand(1, 4, 60, 16), v.expand(1, 4, 60, 16)).sum().backward()
    assert leaf.grad.shape == k.shape


def test_06_gradients_arrive_with_any_strides():
    q, k, v = qkv(2, 2, 2, 50, 60, 16, 24)
    generator = torch.Generator().manual_seed(3)
    judge(q, k, v, mask=causal, dout=torch.randn(2, 50, 2, 24, generator=generator).transpose(1, 2), label="transposed")
    judge(q, k, v, mask=causal, dout=torch.ones(1, 1, 1, 1).expand(2, 2, 50, 24), label="expanded")
    judge(q, k, v, mask=causal, dout=torch.randn(2, 2, 50, 48, generator=generator)[..., ::2], label="every second")


def test_06_dimensions_of_one_with_odd_strides():
    q, k, v = qkv(1, 1, 1, 33, 40, 8, 8)
    odd = [t.as_strided(t.shape, (7, 13, t.stride(2), 1)) for t in (q, k, v)]
    for a, b in zip(judge(*odd).values(), judge(q, k, v).values()):
        assert torch.equal(a, b)
    single = [t[:, :, :1].as_strided((1, 1, 1, 8), (5, 11, 3, 1)) for t in (q, k, v)]
    judge(*single)


def test_06_one_batch_entry_of_keys_for_all():
    q, k, v = qkv(3, 2, 1, 40, 50, 8, 8)
    judge(q, k[:1], v[:1], mask=causal)


# ---- 7. head dims


@pytest.mark.parametrize(("d", "dv"), [(1, 1), (3, 8), (7, 13), (20, 4), (65, 64), (100, 100), (8, 96), (256, 256), (576, 512)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_07_head_dims(d, dv, dtype):
    judge(*qkv(1, 2, 1, 65, 80, d, dv, dtype=DTYPES[dtype]), mask=causal)


# ---- 8. grouped heads


@pytest.mark.parametrize("ratio", [1, 3, 5, 6, 7, 12])
def test_08_gqa_ratios_with_a_mod_that_uses_the_query_head(ratio):
    q, k, v = qkv(1, 2 * ratio, 2, 70, 70, 8, 8)
    bias = torch.linspace(-1, 1, 2 * ratio, dtype=torch.float64)
    judge(q, k, v, mask=lambda b, h, i, j: (i - j) % 2 <= h % 2, score=lambda s, b, h, i, j: s + bias[h] * j * 0.1, captured=[bias])


# ---- 9. block masks of other sizes and lengths


@pytest.mark.covering(1)
@pytest.mark.parametrize("block", [16, 48, 100, 128, (32, 80), (300, 7), 1024])
@pytest.mark.parametrize("made_by", ["anyattn", "torch"])
def test_09_block_sizes_that_do_not_divide(block, made_by):
    q, k, v = qkv(1, 2, 1, 211, 301, 16, 16)
    mask = lambda b, h, q, k: (q + 90 >= k) & ((q - k) % 64 != 5)
    if made_by == "anyattn":
        made = block_mask(mask, q, k, block)
    else:
        from torch.nn.attention.flex_attention import create_block_mask

        made = create_block_mask(mask, None, None, 211, 301, device="cpu", BLOCK_SIZE=block)
    judge(q, k, v, mask=mask, block_mask=made)


def test_09_a_mask_for_another_length_names_both():
    q, k, v = qkv(1, 1, 1, 64, 96, 8, 8)
    made = anyattn.create_block_mask(causal, None, None, 128, 96, device="cpu")
    with pytest.raises(ValueError, match=r"128.*96.*64.*96"):
        flex(q, k, v, block_mask=made)


def test_09_lists_beyond_the_mask_mod_are_kept():
    """A block mask from lists means its lists: unlisted blocks are invisible whatever mask_mod says, listed full ones visible."""
    q, k, v = qkv(1, 1, 1, 256, 256, 8, 8)
    count, index = torch.tensor([[[1, 2]]], dtype=torch.int32), torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    made = anyattn.BlockMask.from_kv_blocks(count, index, BLOCK_SIZE=128, mask_mod=None)
    seen = torch.tensor([[False, True], [True, True]])
    judge(q, k, v, mask=lambda b, h, i, j: seen[i // 128, j // 128], block_mask=made)


# ---- 10. masks that broadcast over batch and heads


@pytest.mark.parametrize("per_batch", [False, True])
def test_10_broadcast_masks(per_batch):
    q, k, v = qkv(3, 4, 2, 130, 140, 8, 8)
    mask = (lambda b, h, i, j: (i >= j) & ((j + b) % 3 != h % 3)) if per_batch else causal
    judge(q, k, v, mask=mask, block_mask=block_mask(mask, q, k, 64, per_batch))


def test_10_one_of_batch_and_heads():
    q, k, v = qkv(2, 3, 3, 100, 100, 8, 8)
    for batch, heads, mask in ((2, None, lambda b, h, i, j: i - j >= b), (None, 3, lambda b, h, i, j: i - j >= h)):
        made = anyattn.create_block_mask(mask, batch, heads, 100, 100, device="cpu", BLOCK_SIZE=32)
        judge(q, k, v, mask=mask, block_mask=made)


# ---- 11. indices in range


def test_11_mods_meet_only_indices_inside_their_sequence():
    """Tables of exactly the lengths: an index past the end raises in torch, and a negative one would read the poisoned last entry."""
    q, k, v = qkv(2, 3, 3, 67, 91, 8, 8)
    by_row, by_key = torch.randn(67, dtype=torch.float64), torch.randn(91, dtype=torch.float64)
    by_head, allowed = torch.randn(2, 3, dtype=torch.float64), torch.arange(91) % 5 != 0
    score = lambda s, b, h, i, j: s + by_row[i] * by_key[j] + by_head[b, h]
    mask = lambda b, h, i, j: allowed[j] & (i >= j - 30)
    judge(q, k, v, score=score, mask=mask, captured=[by_row, by_key, by_head], kernel_options={"tile_m": 32, "tile_n": 32})
    judge(q, k, v, score=score, mask=mask, captured=[by_row, by_key, by_head], block_mask=block_mask(mask, q, k, 48))


# ---- 12. NaN and infinity where nothing looks


@pytest.mark.covering(1)
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("by", ["mask_mod", "block_mask", "score_mod"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_12_garbage_in_padding(poison, by, dtype):
    """In queries that see no key, and in keys that no tile visits: those behind the last range, or behind the last listed block."""
    q, k, v = qkv(2, 2, 1, 100, 120, 16, 16, dtype=DTYPES[dtype])
    mask = lambda b, h, i, j: (j < 90 - 13 * b) & (j <= i + 20) & (i < 80)
    options = {"block_mask": block_mask(mask, q, k, 32, per_batch=True)} if by == "block_mask" else {}
    score = (lambda s, b, h, i, j: torch.tanh(s) * 3) if by == "score_mod" else None
    clean = [t.clone() for t in (q, k, v)]
    want = judge(*clean, mask=mask, score=score, **options)
    q[:, :, 80:] = poison
    for b in range(2):
        end = 96 if by == "block_mask" else 90 - 13 * b
        k[b, :, end:], v[b, :, end:] = poison, poison
    got = judge(q, k, v, mask=mask, score=score, meant=clean, **options)
    assert all(torch.equal(got[name], want[name]) for name in want), "the results depend on what nobody sees"


def test_12_garbage_in_a_key_reaches_only_the_row_tiles_that_visit_it():
    q, k, v = qkv(1, 1, 1, 64, 64, 8, 8)
    k[:, :, 40], v[:, :, 40] = math.nan, math.nan
    out = flex(q, k, v, mask_mod=causal, kernel_options={"tile_m": 40})
    assert out[:, :, 40:].isnan().all()
    before = [t[:, :, :40] for t in (q, k, v)]
    exact, plain = (f(*before, mask=causal).out for f in (oracle.attention, oracle.same_dtype))
    budget.check("out", out[:, :, :40], exact, plain, rounding(*before, mask=causal).out)


@pytest.mark.parametrize("dtype", DTYPES)
def test_12_garbage_in_a_row_that_sees_only_the_sink(dtype):
    """It harms nobody: neither rows of which the sink takes nearly all, nor, through the gradient of the LSE, itself."""
    q, k, v = qkv(1, 2, 1, 40, 30, 16, 8, dtype=DTYPES[dtype])
    q[:, :, ::3] -= 80 * k[:, :, :1] / k[:, :, :1].square().sum(-1, keepdim=True)  # of which key 0 has about e^-20
    mask = lambda b, h, i, j: torch.where(i % 3 == 0, j == 0, j <= i) & (i % 7 != 5)
    sink = torch.tensor([1.5, -0.5], dtype=DTYPES[dtype])
    dout, dlse = torch.randn(1, 2, 40, 8, dtype=torch.float64).to(q), torch.randn(1, 2, 40, dtype=torch.float64).to(q).float()
    clean = [t.clone() for t in (q, k, v)]
    q[:, :, 5::7], spoilt = math.nan, dout.clone()
    spoilt[:, :, 12::7] = math.inf
    leaves = [t.requires_grad_() for t in (q, k, v, sink.clone())]
    out, lse = flex(*leaves[:3], mask_mod=mask, sink=leaves[3], enable_gqa=True, return_lse=True)
    got = torch.autograd.grad((out, lse), leaves, (spoilt, dlse.to(lse.dtype)))
    dout[:, :, 12::7] = 0
    found = [f(*clean, dout, dlse=dlse, mask=mask, sink=sink) for f in (oracle.gradients, oracle.same_dtype_gradients)]
    noise = later(*clean, dout, dlse=dlse, mask=mask, sink=sink)
    for name, value in zip(("dq", "dk", "dv", "dsink"), got, strict=True):
        budget.check(name, value, *(getattr(f, name) for f in found), noise.of(name))


# ---- 13. merging when one side has seen nothing


@pytest.mark.covering(1)
@pytest.mark.parametrize("tile_n", [1, 7, 32])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_13_chunks_that_see_nothing_first_last_and_between(tile_n, dtype):
    q, k, v = qkv(1, 2, 1, 40, 200, 8, 8, dtype=DTYPES[dtype], kind="peaky")
    mask = lambda b, h, i, j: ((j > 100 + i) & (j < 130 + i)) | (j == 3 * i) & (i > 20)
    judge(q, k, v, mask=mask, kernel_options={"tile_m": 16, "tile_n": tile_n})
    sink = torch.tensor([3.0, -3.0], dtype=DTYPES[dtype])
    judge(q, k, v, mask=mask, sink=sink, kernel_options={"tile_m": 16, "tile_n": tile_n})


# ---- 15. a score mod with a block mask on ragged lengths


@pytest.mark.parametrize("dtype", few(DTYPES, "float32", "bfloat16"))
def test_15_score_mod_and_block_mask_on_ragged_lengths(dtype):
    q, k, v = qkv(2, 4, 2, 203, 331, 24, 24, dtype=DTYPES[dtype])
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], dtype=torch.float64)
    mask = lambda b, h, i, j: j <= i + 128
    score = lambda s, b, h, i, j: s - slopes[h] * abs(i + 128 - j) * 0.1
    judge(q, k, v, mask=mask, score=score, captured=[slopes], block_mask=block_mask(mask, q, k, 128))


# ---- 16. infinite and huge scores


def test_16_minus_infinity_from_the_score_mod_is_a_mask():
    q, k, v = qkv(1, 2, 2, 90, 90, 8, 8)
    judge(q, k, v, score=lambda s, b, h, i, j: torch.where((i >= j) & (i % 9 != 4), s, -math.inf))


@pytest.mark.parametrize("size", [1e4, 1e30, -1e30])
def test_16_huge_bias(size):
    q, k, v = qkv(1, 2, 2, 90, 90, 8, 8)
    judge(q, k, v, score=lambda s, b, h, i, j: s + torch.where(j == 17, size, 0.0), mask=causal)


def test_16_the_mask_applies_after_the_score_mod():
    q, k, v = qkv(1, 2, 2, 90, 90, 8, 8)
    judge(q, k, v, score=lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), mask=causal)
    out = flex(q, k, v, score_mod=lambda s, b, h, i, j: s * 0 + 1.0, mask_mod=lambda b, h, i, j: j < 2)
    two = flex(q, k[:, :, :2], v[:, :, :2], score_mod=lambda s, b, h, i, j: s * 0 + 1.0)
    assert torch.equal(out, two)


def test_16_a_derivative_that_is_infinite_under_the_mask():
    q, k, v = qkv(1, 1, 1, 40, 40, 8, 8)
    judge(q, k, v, score=lambda s, b, h, i, j: s / torch.clamp(i - j + 1, min=0), mask=causal)


# ---- 17. captured values


def test_17_a_captured_value_that_changes_between_calls():
    q, k, v = qkv(1, 2, 1, 70, 70, 8, 8)
    state = {"window": 5}

    class Window:
        left = 3

        def __call__(self, b, h, i, j):
            return (i >= j) & (i - j <= self.left)

    window = Window()
    table = torch.zeros(70, dtype=torch.float64)
    for left in (3, 9, 4, 40):
        window.left = left
        judge(q, k, v, mask=window, label=f"attribute {left}")
        table.data.fill_(0).requires_grad_(False)[:left] = 2.0
        judge(q, k, v, score=lambda s, b, h, i, j: s + table[j], captured=[table], label=f"tensor {left}")
    del state


def test_17_two_closures_with_equal_code():
    q, k, v = qkv(1, 2, 1, 70, 70, 8, 8)

    def window(left):
        return lambda b, h, i, j: (i >= j) & (i - j <= left)

    def scaled(factor):
        return lambda s, b, h, i, j: s * factor

    for left, factor in ((2, 0.5), (30, 2.0), (2, 2.0), (30, 0.5)):
        judge(q, k, v, mask=window(left), score=scaled(factor), label=f"{left} {factor}")
    first, second = (flex(q, k, v, mask_mod=window(n), enable_gqa=True) for n in (2, 30))
    assert not torch.equal(first, second)


def test_17_closures_with_equal_code_in_calls_of_other_lengths():
    """Such a call is planned anew, while the mods' programs are known."""

    def window(left):
        return lambda b, h, i, j: (i >= j) & (i - j <= left)

    for left, length in ((2, 60), (30, 61)):
        judge(*qkv(1, 2, 1, length, length, 8, 8), mask=window(left), label=f"{left}")


# ---- 18. traces and compilations


@pytest.fixture
def traces(monkeypatch):
    """How often a mod is run by the tracer."""
    count, run = [], tracing._run
    monkeypatch.setattr(tracing, "_run", lambda *a: (count.append(1), run(*a))[1])
    return count


def test_18_a_thousand_shapes_trace_once(traces):
    g = torch.Generator().manual_seed(0)
    left = 9
    mask = lambda b, h, i, j: (i >= j) & (i - j < left)
    score = lambda s, b, h, i, j: s - 0.1 * abs(i - j)
    for _ in range(1000):
        sq, sk, d = (int(torch.randint(1, n, (), generator=g)) for n in (24, 24, 12))
        q, k, v = torch.randn(1, 1, sq, d), torch.randn(1, 1, sk, d), torch.randn(1, 1, sk, d)
        flex(q, k, v, mask_mod=mask, score_mod=score)
    assert len(traces) <= 2 * 2


def test_18_a_new_closure_traces_nothing(traces):
    q, k, v = qkv(1, 1, 1, 16, 16, 8, 8)

    def call(n, factor, table):
        flex(q, k, v, mask_mod=lambda b, h, i, j: i - j < n, score_mod=lambda s, b, h, i, j: s * factor + table[j])

    call(3, 0.5, torch.randn(16))
    first = len(traces)
    for n in range(20):
        call(n, 0.1 * n, torch.randn(16))
    assert len(traces) == first


# ---- 19. memory


def test_19_no_square_tensor_at_length_65536():
    """S x S of bytes would be 4 GiB; forward and backward may take 150 MiB, of which the gradients themselves are 48."""
    q, k, v = (torch.randn(1, 1, 65536, 64, requires_grad=True) for _ in range(3))
    window = lambda b, h, i, j: (i >= j) & (i - j < 512)
    assert peak_bytes(lambda: flex(q, k, v, mask_mod=window).sum().backward()) < 150 * 2**20


# ---- 20. threads


def test_20_threads_calling_at_once():
    chosen = [c for c in cases.CASES if max(c.shape) < 400][:12]
    wanted = [cases.expected(c, torch.float32) for c in chosen]

    def call(i):
        case, want = chosen[i], wanted[i]
        mods = cases.VARIANTS[case.variant].mods(want.tensors, case.shape)
        leaves = [t.clone().requires_grad_() for t in (want.q, want.k, want.v)]
        out = flex(*leaves, score_mod=mods["score"], mask_mod=mods["mask"], sink=want.sink, enable_gqa=True)
        out.backward(want.dout)
        return out.detach(), *(t.grad for t in leaves)

    alone = [call(i) for i in range(len(chosen))]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        together = list(pool.map(call, list(range(len(chosen))) * 4))
    for i, got in enumerate(together):
        assert all(torch.equal(a, b) for a, b in zip(got, alone[i % len(chosen)])), chosen[i % len(chosen)]


# ---- beyond the list


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", ["gated_sink", "documents", "t5", "softcap_full", "islands_sink"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_reruns_agree_bitwise(name, dtype):
    shape = cases.Shape(2, 4, 2, 190, 190, 16, 16)
    case = cases.Case(name, shape, "normal")
    want = cases.expected(case, DTYPES[dtype])
    first = results(case, want, deterministic=True)
    for _ in range(5):
        again = results(case, want, deterministic=True)
        assert all(torch.equal(first[n], again[n]) for n in first)


@pytest.mark.parametrize("name", cases.VARIANTS)
def test_gradcheck(name):
    variant, shape = cases.VARIANTS[name], cases.Shape(1, 2, 1, 5, 5, 2, 2)
    q, k, v = qkv(*shape, dtype=torch.float64)
    g = torch.Generator().manual_seed(1)
    tensors = tuple(t.requires_grad_() if t.is_floating_point() else t for t in variant.make(shape, g))
    sink = torch.randn(2, generator=g, dtype=torch.float64, requires_grad=True) if variant.has_sink else None
    leaves = [t.requires_grad_() for t in (q, k, v)]
    others = [t for t in (sink, *tensors) if t is not None and t.requires_grad]

    def call(q, k, v, *_):
        mods = variant.mods(tensors, shape)
        out, lse = flex(q, k, v, score_mod=mods["score"], mask_mod=mods["mask"], sink=sink, enable_gqa=True, return_lse=True)
        return out, torch.where(lse.isneginf(), 0.0, lse)

    assert torch.autograd.gradcheck(call, (*leaves, *others), fast_mode=True)


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["full", "islands", "alibi", "gated_sink"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_max_scores(name, dtype):
    """The greatest visible score after the mods, without the sink; -inf where nothing is seen."""
    shape = cases.Shape(1, 4, 2, 130, 140, 16, 16)
    case = cases.Case(name, shape, "normal")
    want = cases.expected(case, DTYPES[dtype], backward=False)
    mods = cases.VARIANTS[name].mods(want.tensors, shape)
    out, aux = flex(
        want.q, want.k, want.v, mods["score"], mask_mod=mods["mask"], sink=want.sink, enable_gqa=True,
        return_aux=anyattn.AuxRequest(lse=True, max_scores=True),
    )  # fmt: skip
    exact, plain = (f(want.q, want.k, want.v, **mods, sink=want.sink) for f in (oracle.attention, oracle.same_dtype))
    noise = rounding(want.q, want.k, want.v, **mods, sink=want.sink)
    budget.check("out", out, exact.out, plain.out, noise.out)
    budget.check("lse", aux.lse, exact.lse, plain.lse, noise.lse)
    # one score's rounding: of the order of LSE's, which is a mean over several
    slack = type(noise.lse)(noise.lse.sigma * 2, noise.lse.row_sigma * 2)
    budget.check("max_scores", aux.max_scores, exact.max_scores, plain.max_scores, slack)


def test_inputs_are_never_modified():
    for name in ("gated_sink", "islands", "pair_bias", "documents"):
        shape = cases.Shape(2, 4, 2, 100, 100, 16, 16)
        for dtype in (torch.float32, torch.bfloat16):
            case = cases.Case(name, shape, "normal")
            want = cases.expected(case, dtype)
            inputs = [t for t in (want.q, want.k, want.v, want.dout, want.sink, *want.tensors) if t is not None]
            before, versions = [t.clone() for t in inputs], [t._version for t in inputs]
            mods = cases.VARIANTS[name].mods(want.tensors, shape)
            for t in inputs[:3]:
                t.requires_grad_()
            out = flex(*inputs[:3], score_mod=mods["score"], mask_mod=mods["mask"], sink=want.sink, enable_gqa=True)
            out.backward(want.dout)
            for t, b, version in zip(inputs, before, versions):
                assert torch.equal(t.detach(), b) and t._version == version


def test_gradient_through_lse_alone_and_out_alone():
    q, k, v = (t.requires_grad_() for t in qkv(1, 2, 1, 50, 60, 8, 8, dtype=torch.float64))
    for of_out, of_lse in ((True, False), (False, True), (True, True)):
        out, lse = flex(q, k, v, mask_mod=causal, enable_gqa=True, return_lse=True)
        grads = torch.autograd.grad(out.sum() * of_out + lse.sum() * of_lse, (q, k, v))
        ones, zeros = torch.ones_like(out), torch.zeros_like(out)
        args = (q, k, v, ones if of_out else zeros)
        dlse = torch.full_like(lse, float(of_lse))
        want, plain = (f(*args, dlse=dlse, mask=causal) for f in (oracle.gradients, oracle.same_dtype_gradients))
        noise = rounding(*(t.detach() for t in args), dlse=dlse, mask=causal)
        for name, got in zip(("dq", "dk", "dv"), grads):
            budget.check(name, got, getattr(want, name), getattr(plain, name), getattr(noise, name))


def test_only_the_gradients_asked_for():
    for wanted in range(3):
        leaves = list(qkv(1, 2, 1, 50, 60, 8, 8))
        leaves[wanted].requires_grad_()
        flex(*leaves, mask_mod=causal, enable_gqa=True).sum().backward()
        assert [t.grad is not None for t in leaves] == [i == wanted for i in range(3)]


# ---- 21. chosen blocks; 22. sums of their probabilities; 23. tiles that are left out at run time


def chosen(name):
    """A call of an edge case of chosen blocks of 16, with the mask that it means."""
    lengths, indices = chosen_blocks.edge(name, 16)
    q, k, v = qkv(1, 4, 2, *lengths, 16, 8)
    table = chosen_blocks.table_of(indices, -(-lengths[1] // 16))
    lists = anyattn.BlockMask.from_topk(indices, BLOCK_SIZE=16, seq_lengths=lengths)
    return Operands(q, k, v, None, chosen_blocks.mask_of(table, (16, 16), 4, lengths), None, {"block_mask": lists})


@pytest.mark.parametrize("name", chosen_blocks.EDGES)
def test_21_chosen_blocks(name):
    call = chosen(name)
    judge(call.q, call.k, call.v, mask=call.mask, **call.options)


@pytest.mark.parametrize("name", chosen_blocks.EDGES)
def test_22_sums_of_chosen_blocks(name):
    judge_request(chosen(name), Request(True, 2, None, (16, 16), (16, 16), (1, 16), "K/V heads", 4, 0))


@pytest.mark.parametrize("name", chosen_blocks.EDGES)
def test_23_thresholds_beside_chosen_blocks(name):
    judge_threshold(chosen(name), Threshold(0.5, True, False))


# ---- 24. the same under deterministic="batch"

IN_THE_MODE: dict[str, Callable[[], None]] = {
    "nothing visible": lambda: test_01_everything_masked("mask_mod", "bfloat16"),
    "nothing visible by lists": lambda: test_01_everything_masked("block_mask", "float32"),
    "rows that see nothing": lambda: test_01_masked_rows_and_tiles_among_others("block_mask"),
    "one row and key": lambda: test_02_single_rows(1, 1),
    "one row": lambda: test_02_single_rows(1, 300),
    "one key": lambda: test_02_single_rows(300, 1),
    "no keys, a sink": test_02_empty_keys_with_a_sink,
    "fewer keys than queries": lambda: test_03_fewer_keys_than_queries_causal("bottom_right", "float16"),
    "a window as wide as the sequence": test_04_a_window_wider_than_the_sequence_is_none_bitwise,
    "an empty band": test_04_an_empty_band_masks_everything,
    "windows": test_04_windows_around_the_tile_size,
    "strides": lambda: test_06_any_strides("bfloat16"),
    "one entry of keys": test_06_one_batch_entry_of_keys_for_all,
    "dims 7, 13": lambda: test_07_head_dims(7, 13, "float32"),
    "dims 576, 512": lambda: test_07_head_dims(576, 512, "bfloat16"),
    "7 heads": lambda: test_08_gqa_ratios_with_a_mod_that_uses_the_query_head(7),
    "blocks of 1024": lambda: test_09_block_sizes_that_do_not_divide(1024, "torch"),
    "blocks of 128": lambda: test_09_block_sizes_that_do_not_divide(128, "anyattn"),
    "lists beyond the mask": test_09_lists_beyond_the_mask_mod_are_kept,
    "masks of each entry": lambda: test_10_broadcast_masks(True),
    "scores and lists": lambda: test_15_score_mod_and_block_mask_on_ragged_lengths("bfloat16"),
    "scores of -inf": test_16_minus_infinity_from_the_score_mod_is_a_mask,
    "a huge bias": lambda: test_16_huge_bias(1e30),
    "the mask comes last": test_16_the_mask_applies_after_the_score_mod,
    "values that change": test_17_a_captured_value_that_changes_between_calls,
    "threads": test_20_threads_calling_at_once,
}


@pytest.mark.parametrize("name", IN_THE_MODE)
def test_24_in_the_mode(name):
    with anyattn.batch_invariant():
        IN_THE_MODE[name]()
