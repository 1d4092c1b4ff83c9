"""PagedKVCache of 8 bits: a decode loop, appended prompts, copies of wider caches, its scales and count, and every refusal."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import PagedKVCache
from anyattn.kvcache.quantise import quantised, row_scales
from tests.kvcache.test_pages import stored
from tests.support.quantised_rows import DTYPES

HEADS, WIDTH, PAGE = 2, 8, 4


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def made(dtype: torch.dtype, num_pages: int = 20, **given: Any) -> PagedKVCache:
    """A used pool: pages come in another order than that of the sequences, and hold noise."""
    cache = PagedKVCache(num_pages, PAGE, HEADS, WIDTH, dtype=dtype, **given)
    for layer in range(cache.num_layers):
        for pool, scales in ((cache.k_cache(layer), cache.k_descale(layer)), (cache.v_cache(layer), cache.v_descale(layer))):
            pool.view(torch.uint8).fill_(0x7F)  # NaN in float8
            if isinstance(scales, Tensor) and scales.ndim == 3:
                scales.fill_(math.nan)
    first = [cache.add_sequence() for _ in range(3)]
    cache.reserve(first, 9)
    cache.free([first[0], first[2]])
    return cache


def attended(cache: PagedKVCache, handles: list[int], layer: int, q: Tensor, **new: Any) -> Tensor:
    return anyattn.flash_attn_with_kvcache(
        q, cache.k_cache(layer), cache.v_cache(layer), k_descale=cache.k_descale(layer), v_descale=cache.v_descale(layer),
        cache_seqlens=cache.seqlens(handles), page_table=cache.page_table(handles), saturated=cache.saturated, causal=True, **new,
    )  # fmt: skip


def values(cache: PagedKVCache, handle: int, layer: int, of_keys: bool) -> Tensor:
    """The values of a sequence's tokens, (tokens, heads, width)."""
    pool, scales = (cache.k_cache, cache.k_descale) if of_keys else (cache.v_cache, cache.v_descale)
    table, count, scale = cache.page_table(handle)[0], int(cache.seqlens(handle, layer)), scales(layer)
    own = stored(pool(layer), table, count).float()
    if isinstance(scale, Tensor):
        return own * (stored(scale[..., None], table, count) if scale.ndim == 3 else scale[0, :, None])
    return own * scale


def expected(rows: Tensor, dtype: torch.dtype, scale: Any = None) -> Tensor:
    scale = row_scales(rows, dtype) if scale is None else scale
    found = quantised(rows, scale, dtype).rows.float()
    return found * (scale[..., None] if isinstance(scale, Tensor) else scale)


GIVEN: dict[str, Any] = {"own": None, "a number": 0.05, "one element": torch.tensor([0.05]), "heads": torch.tensor([0.05, 0.04])}


@pytest.mark.parametrize("form", GIVEN)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_prompts_and_steps(dtype: torch.dtype, form: str) -> None:
    """Prompts by ``append`` and by attention, then steps: every token's values are those of its row by itself."""
    layers, prompts = 2, [5, 1, 11]
    cache = made(dtype, num_layers=layers, k_descale=GIVEN[form], v_descale=GIVEN[form])
    sequences = [cache.add_sequence() for _ in prompts]
    kept: list[list[list[Tensor]]] = [[[] for _ in prompts] for _ in range(2 * layers)]
    for layer in range(layers):
        rows = [torch.randn(2, n, HEADS, WIDTH, dtype=torch.bfloat16) for n in prompts]
        cache.append(sequences, [r[0] for r in rows], [r[1] for r in rows], layer)
        for b, (key, value) in enumerate(rows):
            kept[2 * layer][b].append(key)
            kept[2 * layer + 1][b].append(value)
    for new in (1, 3, 1):
        cache.reserve(sequences, new)
        for layer in range(layers):
            q, k, v = torch.randn(3, 3, new, HEADS, WIDTH).bfloat16()
            attended(cache, sequences, layer, q, k=k, v=v)
            for b in range(3):
                kept[2 * layer][b].append(k[b])
                kept[2 * layer + 1][b].append(v[b])
        cache.advance(sequences, new)
    scale = GIVEN[form].expand(1, HEADS) if isinstance(GIVEN[form], Tensor) else GIVEN[form]
    for layer in range(layers):
        for b, handle in enumerate(sequences):
            for at, of_keys in ((2 * layer, True), (2 * layer + 1, False)):
                rows = torch.cat(kept[at][b])
                assert torch.equal(values(cache, handle, layer, of_keys), expected(rows, dtype, scale))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("form", GIVEN)
def test_a_quantised_copy(form: str, dtype: torch.dtype) -> None:
    """The same sequences and pages, the values row by row; then both live on by themselves."""
    wide = made(torch.bfloat16, num_layers=2)
    a, b = wide.add_sequence(), wide.add_sequence()
    for layer in range(2):
        rows = [torch.randn(2, n, HEADS, WIDTH).bfloat16() for n in (7, 2)]
        wide.append([a, b], [r[0] for r in rows], [r[1] for r in rows], layer)
    one_layer = torch.randn(2, 1, HEADS, WIDTH).bfloat16()
    wide.append(b, one_layer[:1], one_layer[1:], layer=1)  # in the middle of a step
    wide.reserve(a, 4)
    copy = PagedKVCache.quantised(wide, dtype, k_descale=GIVEN[form], v_descale=GIVEN[form])
    handles = [1, a, b]
    scale = GIVEN[form].expand(1, HEADS) if isinstance(GIVEN[form], Tensor) else GIVEN[form]
    for layer in range(2):
        assert torch.equal(copy.seqlens(handles, layer), wide.seqlens(handles, layer))
        for handle in (a, b):
            table, count = wide.page_table(handle)[0], int(wide.seqlens(handle, layer))
            for of_keys, pool in ((True, wide.k_cache(layer)), (False, wide.v_cache(layer))):
                assert torch.equal(values(copy, handle, layer, of_keys), expected(stored(pool, table, count), dtype, scale))
    assert torch.equal(copy.page_table(handles), wide.page_table(handles)) and copy.free_pages == wide.free_pages
    assert int(copy.saturated) == 0 and copy.k_cache().dtype is dtype
    before = wide.page_table(a).clone()
    copy.free(a)
    c = copy.add_sequence()
    assert c == wide.add_sequence() and torch.equal(wide.page_table(a), before) and copy.free_pages == wide.free_pages + 3
    copy.append(b, one_layer[:1], one_layer[1:], layer=0)
    assert int(copy.seqlens(b)) == 3 and int(wide.seqlens(b)) == 2


def test_agreement_with_the_wide_cache() -> None:
    """Attention over a quantised copy is attention over the wide cache, up to what 8 bits are off by."""
    wide = made(torch.float32)
    a = wide.add_sequence()
    wide.append(a, *torch.randn(2, 1, 30, HEADS, WIDTH))
    q = torch.randn(1, 1, 2 * HEADS, WIDTH)
    exact = attended(wide, [a], 0, q)
    off = {d: float((attended(wide.quantised(d), [a], 0, q) - exact).abs().max() / exact.abs().max()) for d in DTYPES}
    assert 0 < off[torch.int8] < off[torch.float8_e4m3fn] < off[torch.float8_e5m2] < 0.2


def test_a_copy_of_an_empty_cache() -> None:
    copy = PagedKVCache(4, PAGE, HEADS, WIDTH, dtype=torch.float32).quantised(torch.int8)
    assert copy.free_pages == 4 and copy.add_sequence() == 0


def test_what_is_out_of_range_is_counted() -> None:
    cache = made(torch.int8, k_descale=1.0, v_descale=torch.tensor([2.0, 1.0]))
    a = cache.add_sequence()
    rows = torch.full((1, 3, HEADS, WIDTH), 200.0)
    assert cache.saturated is not None and cache.saturated.dtype is torch.int64
    cache.append(a, rows, rows)
    assert int(cache.saturated) == 3 * WIDTH * 3  # keys of both heads, values of one
    cache.reserve(a, 1)
    attended(cache, [a], 0, rows[:, :1], k=-rows[:, :1], v=rows[:, :1])
    assert int(cache.saturated) == 3 * WIDTH * 4
    assert made(torch.float16).saturated is None


def test_memory_and_scales() -> None:
    wide = PagedKVCache(8, 16, 2, 64, head_dim_v=32, num_layers=3, dtype=torch.bfloat16)
    assert wide.nbytes == 3 * 8 * 16 * 2 * (64 + 32) * 2 and wide.k_descale(2) is None and wide.v_descale() is None
    own = wide.quantised(torch.float8_e5m2)
    assert own.nbytes == 3 * 8 * 16 * 2 * (64 + 32 + 2 * 4)
    scales = own.k_descale(1)
    assert isinstance(scales, Tensor) and scales.shape == (8, 16, 2) and scales.stride() == (32, 1, 16), "a head's scales lie side by side"
    assert scales.data_ptr() == own.k_descale(1).data_ptr() != own.v_descale(1).data_ptr()  # type: ignore[union-attr]
    by_layer = torch.rand(3, 2) + 0.5
    given = wide.quantised(torch.int8, k_descale=by_layer, v_descale=3)
    assert torch.equal(given.k_descale(2), by_layer[2:]) and given.v_descale(1) == 3.0  # type: ignore[arg-type]
    assert given.nbytes == 3 * 8 * 16 * 2 * (64 + 32) + 3 * 2 * 4
    by_layer.zero_()
    assert bool((given.k_descale(0) > 0).all()), "a copy"  # type: ignore[operator,union-attr]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"dtype": torch.uint8}, TypeError, r"dtype is torch.uint8; wanted a float dtype.*or float8_e4m3fn.*pass torch.float8_e4m3fn"),
        ({"dtype": torch.bool}, TypeError, "dtype is torch.bool; wanted a float dtype"),
        ({"dtype": torch.float8_e4m3fnuz}, TypeError, "dtype is torch.float8_e4m3fnuz; wanted a float dtype"),
        ({"dtype": torch.float32, "k_descale": 1.0}, ValueError, "k_descale is given for a cache of torch.float32, which has no scales"),
        ({"k_descale": "token"}, TypeError, "k_descale is a str; wanted None, a number or a float32 tensor"),
        ({"k_descale": True}, TypeError, "k_descale is a bool"),
        ({"v_descale": 0.0}, ValueError, "v_descale is 0.0; wanted a finite number above 0"),
        ({"v_descale": math.nan}, ValueError, "v_descale is nan"),
        ({"v_descale": torch.ones(2, dtype=torch.float64)}, TypeError, "v_descale has dtype torch.float64; wanted float32"),
        ({"k_descale": torch.ones(3)}, ValueError, r"k_descale has shape \(3,\); wanted one element, \(2,\) for the heads, or \(1, 2\)"),
        ({"k_descale": torch.tensor([1.0, math.inf])}, ValueError, "k_descale is inf for layer 0, head 1; wanted a finite number above 0"),
    ],
    ids=str,
)
def test_bad_caches(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        PagedKVCache(**{"num_pages": 4, "page_size": 4, "num_heads_kv": 2, "head_dim": 3, "dtype": torch.int8, **change})


def test_bad_copies_and_rows() -> None:
    wide, small = made(torch.float32), made(torch.int8)
    with pytest.raises(TypeError, match=r"dtype is torch.bfloat16; wanted float8_e4m3fn, float8_e5m2 or int8"):
        wide.quantised(torch.bfloat16)
    with pytest.raises(TypeError, match=r"the cache is torch.int8 already"):
        small.quantised(torch.float8_e4m3fn)
    rows = torch.ones(1, 1, HEADS, WIDTH, dtype=torch.int8)
    with pytest.raises(ValueError, match=r"k\[0\] is torch.int8 on cpu but the cache is torch.int8 on cpu; wanted"):
        small.append(small.add_sequence(), rows, rows)
