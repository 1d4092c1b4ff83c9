"""The kernel that appends to 8-bit caches, by Triton's interpreter on the CPU, against ``kvcache.append`` bit for bit.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

import dataclasses
import math

import pytest
import torch

from anyattn.backends.triton.append_rotary import append
from anyattn.kvcache import append as in_torch
from anyattn.kvcache.quantise import LIMITS, Scaling
from anyattn.sequences.unread_kvcache import CacheSizes, CacheStep, CacheTables
from tests.backends.triton.kernels.test_append_rotary_interpreted import turned_by_hand
from tests.support.quantised_rows import DTYPES, descales, every_rounding

FORMS = ("none", "number", "one element", "by entry", "by page", "by token", "inline")


def a_step(dtype, page_size=4, new=3, head_dim=24, head_dim_v=16, form="none", rows_dtype=torch.bfloat16, seed=0):  # type: ignore[no-untyped-def]
    """Three entries, the first full but for two rows, over pages in random order; packed rows if new is None."""
    g = torch.Generator().manual_seed(seed)
    batch, heads, width = 3, 2, -(-12 // page_size)
    ends = torch.tensor([0, 1, 1, 6]) if new is None else None
    shape = (batch, new) if ends is None else (6,)
    q, k = (torch.randn(*shape, n * heads, head_dim, generator=g).to(rows_dtype) for n in (2, 1))
    v = torch.randn(*shape, heads, head_dim_v, generator=g).to(rows_dtype) * 300
    storage = batch * width + 2
    table = torch.randperm(storage, generator=g)[: batch * width].view(batch, width)
    places = (storage, page_size, heads)
    caches = [torch.zeros(*places, n, dtype=torch.uint8).view(dtype) for n in (head_dim, head_dim_v)]
    caches, scales = descales(form, caches, batch, g)
    angles = torch.rand(20, head_dim // 2, generator=g) * 6.3
    sizes = CacheSizes(batch, 6 if ends is not None else new, new or 6, new, width * page_size, storage, page_size)
    return CacheStep(
        q, *caches, k, v, CacheTables(torch.tensor([7, 0, 3]), None, None, ends, table), sizes, angles.cos(), angles.sin(), False, True,
        *scales, torch.zeros(1, dtype=torch.int64),
    )  # fmt: skip


def copied(step):  # type: ignore[no-untyped-def]
    """The step with memory of its own for all that it writes, at the same strides."""
    kept = {}

    def copy(x):  # type: ignore[no-untyped-def]
        if not isinstance(x, torch.Tensor):
            return x
        memory = x.untyped_storage()
        if memory.data_ptr() not in kept:
            kept[memory.data_ptr()] = memory.clone()
        return torch.empty(0, dtype=x.dtype).set_(kept[memory.data_ptr()], x.storage_offset(), x.shape, x.stride())

    return dataclasses.replace(step, **{n: copy(getattr(step, n)) for n in ("k_cache", "v_cache", "k_descale", "v_descale", "saturated")})


def by_torch(step):  # type: ignore[no-untyped-def]
    cached, table, size = step.tables.cached, step.tables.page_table, step.sizes.page_size
    ends = step.tables.cu_seqlens_q
    new = torch.full_like(cached, step.sizes.new) if ends is None else ends.diff()
    first, second = in_torch.slots(cached, new, cached, table, size)
    entry, row = in_torch.end_to_end(cached, new)
    k, v = (x.reshape(-1, *x.shape[-2:]) for x in (step.k, step.v))
    k = turned_by_hand(k.float(), step.cos, step.sin, row, step.interleaved)
    in_torch.append(step.k_cache, k, first, second, Scaling(step.k_descale, step.saturated), entry)
    in_torch.append(step.v_cache, v, first, second, Scaling(step.v_descale, step.saturated), entry)


def bits(x):  # type: ignore[no-untyped-def]
    return bytes(x.contiguous().view(torch.uint8).numpy())


def memory_of(x):  # type: ignore[no-untyped-def]
    return bytes(x.untyped_storage()) if isinstance(x, torch.Tensor) else x


@pytest.mark.parametrize("page_size", [1, 3, 4, 16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_same_bytes_as_by_torch(dtype, form, page_size):  # type: ignore[no-untyped-def]
    for new, rows_dtype in ((3, torch.bfloat16), (None, torch.float32), (1, torch.float16)):
        ours = a_step(dtype, page_size, new, form=form, rows_dtype=rows_dtype)
        theirs = copied(ours)
        append(ours)
        by_torch(theirs)
        for name in ("k_cache", "v_cache", "k_descale", "v_descale", "saturated"):
            assert memory_of(getattr(ours, name)) == memory_of(getattr(theirs, name)), (name, new)
        assert ours.k_cache.view(torch.uint8).any() and ours.v_cache.view(torch.uint8).any()
        has_own_scales = form in ("by token", "inline") or (form == "by page" and page_size == 1)
        assert has_own_scales is (int(ours.saturated) == 0) or dtype is torch.float8_e5m2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_rounding(dtype):  # type: ignore[no-untyped-def]
    """All numbers of the dtype, what lies halfway between two, both neighbours of that, and what is out of range."""
    values = every_rounding(dtype)
    rows = torch.nn.functional.pad(values, (0, -len(values) % 64)).view(-1, 1, 64)
    caches = [torch.zeros(1, len(rows), 1, 64, dtype=torch.uint8).view(dtype) for _ in range(2)]
    sizes = CacheSizes(1, len(rows), len(rows), len(rows), len(rows), 1)
    step = CacheStep(
        rows[None], *caches, rows[None], rows[None], CacheTables(torch.tensor([0])), sizes, saturated=torch.zeros(1, dtype=torch.int32)
    )
    append(step)
    expected, count = torch.zeros_like(caches[0]), torch.zeros(1, dtype=torch.int32)
    in_torch.append(expected, rows, torch.zeros(len(rows), dtype=torch.int64), torch.arange(len(rows)), Scaling(None, count))
    assert bits(caches[0]) == bits(caches[1]) == bits(expected)
    assert int(step.saturated) == 2 * int(count) > 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_that_are_not_finite(dtype):  # type: ignore[no-untyped-def]
    """A row of zeros has a scale that is not 0; infinity is the end of the range, by a scale that the finite values decide."""
    rows = torch.tensor([[0.0] * 16, [1.0] * 15 + [math.inf], [-2.0] * 15 + [math.nan], [math.inf] * 16, [1e-42] * 16])[None, :, None]
    caches = [torch.ones(1, 8, 1, 16, dtype=torch.uint8).view(dtype) for _ in range(2)]
    scales = [torch.full((1, 8, 1), math.nan) for _ in range(2)]
    step = CacheStep(
        rows, *caches, rows, rows, CacheTables(torch.tensor([1])), CacheSizes(1, 5, 5, 5, 8, 1), None, None, True, False, *scales
    )
    step = dataclasses.replace(step, saturated=torch.zeros(1, dtype=torch.int64))
    append(step)
    found, greatest = scales[0].flatten(), LIMITS[dtype].row_max
    assert bool(found[[0, 6, 7]].isnan().all()) and bool((found[1:6] > 0).all())
    assert found[2] == torch.tensor(1.0) / greatest and found[3] == torch.tensor(2.0) / greatest and bits(scales[0]) == bits(scales[1])
    stored = caches[0][0, 1:6, 0].float()
    assert not bool(stored[0].any()) and bool((stored[1] == greatest).all()) and bool((stored[3] == greatest).all())
    assert bool((stored[2, :15] == -greatest).all())
    assert bool(stored[2, 15].isnan()) if dtype.is_floating_point else stored[2, 15] == 0
    assert int(step.saturated) == 2 * (17 + (dtype is torch.int8))


def test_what_has_no_place_has_no_scale():  # type: ignore[no-untyped-def]
    """Rows beyond the capacity and on pages outside the pool write neither bytes nor scales, and are not counted."""
    step = a_step(torch.int8, page_size=4, new=3, form="by token")
    step.tables.cached[0], step.tables.page_table[1, 0] = 11, 99
    append(step)
    changed = ~step.k_descale.isnan().any(-1)
    assert [tuple(at) for at in changed.nonzero().tolist()] == sorted(
        [(int(step.tables.page_table[0, 2]), 3), (int(step.tables.page_table[2, 0]), 3)]
        + [(int(step.tables.page_table[2, 1]), j) for j in range(2)]
    )
    given = a_step(torch.int8, page_size=4, new=3)
    given = dataclasses.replace(given, v=given.v * 1e6)
    given.tables.cached.fill_(12)
    append(given)
    assert int(given.saturated) == 0
