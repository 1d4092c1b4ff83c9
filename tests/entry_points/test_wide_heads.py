"""Head dimensions above 256, and values that are the first columns of keys: attention, gradients, caches, errors.

On the torch backend, and by ``ANYATTN_TEST_BACKEND`` on Triton's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import anyattn
from anyattn import masks, oracle
from anyattn.kvcache.quantise import row_scales
from anyattn.testing import budget
from anyattn.testing.rounding import later, rounding
from tests.entry_points.test_8_bit_caches import check
from tests.entry_points.test_flash_packed import judged, paged
from tests.support import cases, eight_bits, poison
from tests.support import flash_calls as calls
from tests.support.flex_calls import flex, judge
from tests.support.sequences import Meaning

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
CAUSAL, BIAS = masks.causal(), torch.tensor([0.5, -0.25], dtype=torch.float64)
WINDOW = masks.causal() & masks.sliding_window(20, 0)


def qkv(d: int, dv: int, dtype: torch.dtype = torch.bfloat16, rows: int = 40, kind: str = "normal") -> tuple[Tensor, Tensor, Tensor]:
    return cases.inputs(kind, cases.Shape(1, 2, 1, rows, 50, d, dv), dtype, 0)[:3]


@pytest.mark.parametrize(("d", "dv"), [(264, 300), (512, 512), (576, 512), (520, 16), (24, 512)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_results_and_gradients(d: int, dv: int, dtype: str) -> None:
    judge(*qkv(d, dv, DTYPES[dtype]), mask=CAUSAL)


@pytest.mark.parametrize("kind", ["peaky", "coded"])
def test_peaky_scores_and_values_that_name_their_keys(kind: str) -> None:
    judge(*qkv(576, 512, kind=kind), mask=WINDOW)


@pytest.mark.parametrize("d", [512, 576])
@pytest.mark.parametrize("is_one", [False, True])
def test_every_part_of_a_call(d: int, is_one: bool) -> None:
    """A window, a score with a gradient of what it captures, a sink, grouped heads, and lists of 128-blocks."""
    q, k, v = qkv(d, 512)
    v = k[..., :512] if is_one else v
    bias = BIAS.clone()
    score = lambda s, b, h, i, j: s + bias[h] * (i - j) * 0.05
    judge(q, k, v, score=score, mask=WINDOW, sink=torch.tensor([0.5, -1.0]), captured=[bias])
    lists = anyattn.create_block_mask(WINDOW, None, None, 40, 50, device="cpu", BLOCK_SIZE=128)
    judge(q, k, v, mask=WINDOW, block_mask=lists)


# values of other columns, other rows, other strides, with fewer columns than a block, and with no key seen
OVERLAPS = {
    "first columns": lambda k: k[..., :512],
    "all columns": lambda k: k,
    "other columns": lambda k: k[..., 64:],
    "fewer columns": lambda k: k[..., :500],
    "few columns": lambda k: k[..., :64],
    "other rows": lambda k: k.flip(2)[..., :512],
    "one row": lambda k: k[:, :, :1, :512].expand(-1, -1, 50, -1),
    "a copy": lambda k: k[..., :512].clone(),
}


@pytest.mark.parametrize(("name", "d"), [(n, d) for n in OVERLAPS for d in (512, 576) if d == 512 or n != "all columns"])
def test_values_that_overlap_keys(name: str, d: int) -> None:
    """dk and dv are judged apart; that autograd sums them is judged below."""
    q, k, _ = qkv(d, 512)
    judge(q, k, OVERLAPS[name](k), mask=CAUSAL)


def test_a_call_after_one_with_other_memory() -> None:
    """Of the same shapes and strides: what is remembered of one is not used for the other, in any order."""
    q, k, v = qkv(576, 576)
    apart, inside = v[..., :512], k[..., :512]
    assert apart.stride() == inside.stride()
    for values in (apart, inside, inside, apart, apart, inside):
        with torch.no_grad():
            out = flex(q, k, values, mask_mod=CAUSAL, enable_gqa=True)
        given = (q, k, values)
        right, plain = (f(*given, mask=CAUSAL) for f in (oracle.attention, oracle.same_dtype))
        budget.check("out", out, right.out, plain.out, rounding(*given, mask=CAUSAL).out)


def test_the_gradient_of_shared_columns_is_a_sum() -> None:
    q, k, _ = qkv(576, 512)
    mask = anyattn.masks.causal(2)  # the gradient of a query that sees one key is 0, but for rounding
    leaves = [t.clone().requires_grad_() for t in (q, k)]
    dout = torch.randn(1, 2, 40, 512, generator=torch.Generator().manual_seed(0)).to(q.dtype)
    with poison.enabled():
        out = flex(*leaves, leaves[1][..., :512], mask_mod=mask, enable_gqa=True)
        dq, dk = torch.autograd.grad(out, leaves, dout)
    right, plain = (f(q, k, k[..., :512], dout, mask=mask) for f in (oracle.gradients, oracle.same_dtype_gradients))
    whole, rough = (t.dk + torch.nn.functional.pad(t.dv, (0, 64)) for t in (right, plain))
    budget.check("dq", dq, right.dq, plain.dq, later(q, k, k[..., :512], dout, mask=mask).of("dq"))
    budget.check("dk", dk, whole, rough)


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (9, 0), (12, 0)], ids=str)
def test_tiles_that_are_alike_in_every_batch_do_not_depend_on_where_values_are(capability: tuple[int, int]) -> None:
    """A server decodes from one cache what a trainer had apart; else more keys fit a tile where a device has little shared memory."""
    from anyattn.backends.triton.launch_shape import tiles_in_order
    from anyattn.backends.triton.tile_config import Shape

    for d in (512, 576):
        apart, together = (tiles_in_order(Shape(d, 512, torch.bfloat16, has_one_kv=one), capability) for one in (False, True))
        assert apart == together


# ---- caches


def turned(x: Tensor, cos: Tensor, sin: Tensor, at: Tensor, interleaved: bool) -> Tensor:
    """The last columns of x (rows, H, D), rotated, in float32 or wider."""
    n = 2 * cos.shape[1]
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rest, last = wide[..., :-n], wide[..., -n:]
    c, s = cos[at][:, None].to(wide), sin[at][:, None].to(wide)
    if interleaved:
        a, b = last[..., ::2], last[..., 1::2]
        return torch.cat((rest, torch.stack((a * c - b * s, b * c + a * s), -1).flatten(-2)), -1)
    a, b = last.chunk(2, -1)
    return torch.cat((rest, a * c - b * s, b * c + a * s), -1)


@pytest.mark.parametrize("page", [1, 16, 64, 256])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("d", "dv"), [(576, 512), (512, 512), (40, 32)])
def test_one_paged_cache(d: int, dv: int, page: int, interleaved: bool) -> None:
    """Keys that were appended are those of the cache, rotated in their last columns, and attention is over their first columns."""
    g = torch.Generator().manual_seed(page)
    lengths, heads, new = [37, 5], 4, 2
    angle = torch.rand(64, 4, generator=g) * 6.3
    cache = anyattn.PagedKVCache(96, page, num_heads_kv=1, head_dim=d, v_dim=dv, dtype=torch.bfloat16)
    handles = [cache.add_sequence() for _ in lengths]
    old = [torch.randn(n, 1, d, generator=g).bfloat16() for n in lengths]
    cache.append(handles, old)
    assert cache.v_cache().data_ptr() == cache.k_cache().data_ptr() and cache.nbytes == cache.k_cache().nbytes
    cache.reserve(handles, new)
    q, k = (torch.randn(2, new, n, d, generator=g).bfloat16() for n in (heads, 1))
    with poison.enabled():
        out = anyattn.flash_attn_with_kvcache(
            q, cache.k_cache(), cache.v_cache(), k=k, rotary_cos=angle.cos(), rotary_sin=angle.sin(), rotary_last=True,
            rotary_interleaved=interleaved, cache_seqlens=cache.seqlens(handles), page_table=cache.page_table(handles), causal=True,
        )  # fmt: skip
    cache.advance(handles, new)
    table = cache.page_table(handles)
    for b, n in enumerate(lengths):
        at, rows = torch.arange(n, n + new), torch.arange(n + new)
        own_q, own_k = (turned(x[b], angle.cos(), angle.sin(), at, interleaved).bfloat16() for x in (q, k))
        held = cache.k_cache()[table[b, rows // page].long(), rows % page]
        assert torch.equal(held[:n], old[b]) and torch.equal(held[n:, :, : d - 8], own_k[..., : d - 8])
        budget.check("rotated keys", held[n:], turned(k[b].double(), angle.cos(), angle.sin(), at, interleaved), own_k)
        given = [x.transpose(0, 1)[None] for x in (own_q, held, held[..., :dv])]
        mask = lambda b, h, i, j, n=n: j <= i + n
        right, plain = (f(*given, mask=mask) for f in (oracle.attention, oracle.same_dtype))
        budget.check("out", out[b].transpose(0, 1)[None], right.out, plain.out, rounding(*given, mask=mask).out)


@pytest.mark.parametrize("page", [0, 16])
def test_many_query_heads_over_one_cache(page: int) -> None:
    """Of 128 heads that share keys, in caches with pages and without."""
    q, memory = torch.randn(2, 1, 128, 576).bfloat16(), torch.randn(8, 16, 1, 576).bfloat16()
    tables = {"page_table": torch.randperm(8).view(2, 4).int()} if page else {}
    cache = memory if page else memory.view(2, 64, 1, 576)
    lengths = torch.tensor([50, 64], dtype=torch.int32)
    out = anyattn.flash_attn_with_kvcache(q, cache, cache[..., :512], cache_seqlens=lengths, **tables)
    for b, n in enumerate(lengths.tolist()):
        held = (memory[tables["page_table"][b].long()].flatten(0, 1) if page else cache[b])[:n]
        given = [x.transpose(0, 1)[None] for x in (q[b], held, held[..., :512])]
        right, plain = oracle.attention(*given), oracle.same_dtype(*given)
        budget.check("out", out[b].transpose(0, 1)[None], right.out, plain.out, rounding(*given).out)


@pytest.mark.parametrize(("dims", "page"), [((576, 512), 1), ((520, 16), 16)])
def test_gradients_of_keys_in_pages(dims: tuple[int, int], page: int) -> None:
    made = calls.ragged([3, 20], [5, 33], (2, 1), dims, torch.bfloat16)
    judged(made, paged(made, page), calls.RECIPES["causal"])


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_one_cache_of_8_bits(dtype: torch.dtype) -> None:
    """One scale for each row, which values share with keys; the same as two caches that hold what it holds."""
    cache = anyattn.PagedKVCache(8, 16, num_heads_kv=1, head_dim=576, v_dim=512, dtype=dtype)
    handles = [cache.add_sequence()]
    rows = torch.randn(1, 30, 1, 576)
    cache.append(handles, rows)
    scales = cache.k_descale()
    assert cache.v_descale() is scales and isinstance(scales, Tensor)
    table = cache.page_table(handles)
    assert torch.equal(scales[table[0].long()].flatten(0, 1)[:30], row_scales(rows[0], dtype))
    cache.reserve(handles, 1)
    q, k = torch.randn(1, 1, 4, 576).bfloat16(), torch.randn(1, 1, 1, 576).bfloat16()
    places = {"cache_seqlens": cache.seqlens(handles), "page_table": table}
    options: dict[str, Any] = {"k_descale": scales, "v_descale": cache.v_descale()}
    out = anyattn.flash_attn_with_kvcache(q, cache.k_cache(), cache.v_cache(), k=k, **places, **options)
    cache.advance(handles, 1)
    held = cache.k_cache()[table[0].long()].flatten(0, 1)[:31].double() * scales[table[0].long()].flatten(0, 1)[:31, :, None].double()
    given = [x.transpose(0, 1)[None] for x in (q[0].double(), held, held[..., :512])]
    narrow = [x.bfloat16() for x in given]
    right, plain = oracle.attention(*given), oracle.same_dtype(*narrow)
    budget.check("out", out[0].transpose(0, 1)[None], right.out, plain.out)


@pytest.mark.parametrize("form", ["none", "inline"])
def test_rows_of_8_bits_that_do_not_begin_at_multiples_of_16(form: str) -> None:
    """Where rows of one block have their columns wrapped."""
    check(eight_bits.Setting(k_form=form, v_form=form, d=520, dv=16), Meaning(causal=True))


def test_what_one_cache_refuses() -> None:
    memory = torch.zeros(1, 16, 1, 24)
    q, k = torch.zeros(1, 1, 2, 24), torch.zeros(1, 1, 1, 24)
    call = lambda **more: anyattn.flash_attn_with_kvcache(q, memory, memory[..., :16], cache_seqlens=3, **more)
    call(k=k), call(k=k, v=k[..., :16])
    with pytest.raises(ValueError, match=r"only k is written, but v is not the same of k; wanted v=None"):
        call(k=k, v=torch.zeros(1, 1, 1, 16))
    with pytest.raises(ValueError, match="v is None but k is given"):
        anyattn.flash_attn_with_kvcache(q, memory, torch.zeros(1, 16, 1, 16), k=k, cache_seqlens=3)
    with pytest.raises(ValueError, match="share memory"):
        anyattn.flash_attn_with_kvcache(q, memory, memory[..., 8:], k=k, v=k[..., 8:], cache_seqlens=3)
    new = lambda **more: anyattn.PagedKVCache(4, 16, num_heads_kv=1, head_dim=24, dtype=torch.float32, **more)
    for more, words in (({"v_dim": 25}, "wanted at most 24"), ({"v_dim": 16, "head_dim_v": 16}, "wanted head_dim_v=None")):
        with pytest.raises(ValueError, match=words):
            new(**more)
    one, two = new(v_dim=16), new(head_dim_v=16)
    with pytest.raises(ValueError, match="v is given, but the values of this cache are the first v_dim=16 columns"):
        one.append(one.add_sequence(), k, k[..., :16])
    with pytest.raises(ValueError, match="v is None; wanted the values"):
        two.append(two.add_sequence(), k)
    bytes_, scale = torch.zeros(1, 16, 1, 24, dtype=torch.int8), torch.ones(1, 16, 1)
    with pytest.raises(ValueError, match="wanted v_descale=k_descale"):
        anyattn.flash_attn_with_kvcache(q, bytes_, bytes_[..., :16], k=k, cache_seqlens=3, k_descale=scale, v_descale=scale.clone())


def appended(memory: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    batch, device = len(memory), memory.device
    q, k = torch.zeros(batch, 1, 4, 24, device=device), torch.zeros(batch, 1, 1, 24, device=device)
    lengths = torch.zeros(batch, dtype=torch.int32, device=device)
    return anyattn.flash_attn_with_kvcache(q, memory, values, k=k, cache_seqlens=lengths, causal=True)


@pytest.mark.parametrize(("batch", "device"), [(0, "cpu"), (2, "meta"), (0, "meta")])
def test_appending_keys_alone_without_entries_or_values(batch: int, device: str) -> None:
    memory = torch.zeros(batch, 32, 1, 24, device=device)
    out = appended(memory, memory[..., :16])
    assert out.shape == (batch, 1, 4, 16) and out.device.type == device
    with FakeTensorMode():
        memory = torch.zeros(batch, 32, 1, 24, device="cpu")
        assert appended(memory, memory[..., :16]).shape == (batch, 1, 4, 16)


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("of", [lambda k: k[..., 8:], lambda k: k[..., ::2], torch.zeros_like], ids=["last", "every second", "others"])
def test_appending_keys_alone_to_other_values_is_refused(of: Callable, device: str) -> None:
    memory = torch.zeros(2, 32, 1, 24, device=device)
    with pytest.raises(ValueError, match=r"v is None but k is given, and v_cache is not the first columns .*v_cache=k_cache\[\.\.\., :n\]"):
        appended(memory, of(memory))
