"""The kernel that appends to caches and turns queries, by Triton's interpreter on the CPU, against the torch operations bit for bit.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

import importlib
import math
import random

import pytest
import torch

from anyattn.backends.triton.append_rotary import append
from anyattn.kvcache import rotary
from anyattn.sequences.seqlen_info import SeqlenInfoQKNewK
from anyattn.sequences.unread_kvcache import CacheSizes, CacheStep, CacheTables, StoredCache
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments, cache_call
from tests.support.covering import few

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
LAYOUTS = ("plain", "heads first", "wide heads", "every other")


def laid_out(x, layout):  # type: ignore[no-untyped-def]
    """The same numbers at other strides."""
    if layout == "heads first":
        return x.transpose(-2, -3).contiguous().transpose(-2, -3)
    if layout == "wide heads":
        return torch.cat((x, torch.full_like(x, math.nan)), -1)[..., : x.shape[-1]]
    if layout == "every other":
        return torch.stack((x, torch.full_like(x, math.nan if x.is_floating_point() else -1)), -1)[..., 0]
    return x


def random_call(seed):  # type: ignore[no-untyped-def]
    """Arguments of the door, everything different from entry to entry, and its options."""
    rng, g = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads_kv, group = rng.choice((1, 2, 5)), rng.choice((1, 2, 3)), rng.choice((1, 2))
    width, width_v = rng.choice((8, 16, 24, 33)), rng.choice((8, 20, 32))
    dtype, capacity = rng.choice(DTYPES), 40
    page_size = rng.choice((0, 0, 1, 3, 16))
    packed, packed_new = rng.random() < 0.5, rng.random() < 0.5
    queries = [rng.choice((0, 1, 2, 7)) if packed else 3 for _ in range(batch)]
    each = rng.choice((0, 1, 4))
    new = queries if packed and packed_new else [each] * batch
    leftpad = [rng.choice((0, 0, 3)) for _ in range(batch)]
    cached = [rng.randint(pad, capacity - n) for pad, n in zip(leftpad, new)]

    def rows(lengths, heads, size, together):  # type: ignore[no-untyped-def]
        shape = (sum(lengths), heads, size) if together else (batch, lengths[0], heads, size)
        return laid_out(torch.randn(shape, generator=g).to(dtype), rng.choice(LAYOUTS))

    integers = rng.choice((torch.int32, torch.int64))
    made = {"q": rows(queries, heads_kv * group, width, packed)}
    together = packed and packed_new
    made |= {"k": rows(new, heads_kv, width, together), "v": rows(new, heads_kv, width_v, together)}
    if packed:
        made["cu_seqlens_q"] = torch.tensor([0, *queries]).cumsum(0).to(integers)
    storage = batch + 2
    if page_size:
        pages = -(-capacity // page_size)
        storage = batch * pages + 3
        table = torch.randperm(storage, generator=g)[: batch * pages].view(batch, pages)
        for b, n in enumerate(c + m for c, m in zip(cached, new)):
            table[b, -(-n // page_size) :] = rng.choice((-1, storage, 10**6))  # not in use
        made["page_table"] = laid_out(table.to(integers), "every other") if rng.random() < 0.3 else table.to(integers)
    elif rng.random() < 0.5:
        made["cache_batch_idx"] = torch.randperm(storage, generator=g)[:batch].to(integers)
    shape = (storage, page_size or capacity, heads_kv)
    for name, size in (("k_cache", width), ("v_cache", width_v)):
        made[name] = laid_out(torch.full((*shape, size), math.nan, dtype=dtype), rng.choice(LAYOUTS))
    made |= {"cache_seqlens": torch.tensor(cached, dtype=integers), "cache_leftpad": torch.tensor(leftpad, dtype=integers)}
    half = rng.choice((0, 0, 1, 4, width // 2))
    if half:
        angles = torch.rand(capacity + 8, half, generator=g) * 6.3
        table_dtype = rng.choice((torch.float32, torch.float16, torch.float64))
        made |= {"rotary_cos": angles.cos().to(table_dtype), "rotary_sin": laid_out(angles.sin().to(table_dtype), rng.choice(LAYOUTS[2:]))}
        made["rotary_interleaved"] = rng.random() < 0.5
        made["rotary_last"] = rng.random() < 0.5
    return made, Options(causal=rng.random() < 0.5)


def same_bits(a, b):  # type: ignore[no-untyped-def]
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(whole), b.contiguous().view(whole))


class Torch:
    """A plan of the torch backend, as far as it is asked."""

    backend = "torch"


def turned_by_hand(x, cos, sin, positions, interleaved, is_last=False):  # type: ignore[no-untyped-def]
    """``rotary.apply_rotary`` with every product and sum rounded: torch's complex product on the CPU leaves some out where it can."""
    wide, half = torch.promote_types(x.dtype, torch.float32), cos.shape[1]
    c, s = (t[positions].to(wide)[:, None] for t in (cos, sin))
    found = x.clone(memory_format=torch.contiguous_format)
    at = x.shape[-1] - 2 * half if is_last else 0
    end = at + 2 * half
    first, second = (slice(at, end, 2), slice(at + 1, end, 2)) if interleaved else (slice(at, at + half), slice(at + half, end))
    a, b = x[..., first].to(wide), x[..., second].to(wide)
    found[..., first], found[..., second] = (a * c - b * s).to(x.dtype), (a * s + b * c).to(x.dtype)
    return found


@pytest.mark.parametrize("seed", few(range(80), *range(24)))
def test_the_same_bits_as_by_torch(seed, monkeypatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(rotary, "apply_rotary", turned_by_hand)
    made, options = random_call(seed)
    ours, theirs = ({n: t.clone() if n.endswith("_cache") and t.is_contiguous() else t for n, t in made.items()} for _ in range(2))
    for name in ("k_cache", "v_cache"):  # clones of views keep their strides
        theirs[name] = torch.empty_strided(made[name].shape, made[name].stride(), dtype=made[name].dtype).copy_(made[name])
    wanted = cache_call(CacheArguments(**theirs), options).prepared(Torch()).q
    before = [t.clone() for t in (made["k"], made["v"], made["q"])]
    turned = append(cache_call(CacheArguments(**ours), options).step)
    for name in ("k_cache", "v_cache"):
        assert same_bits(ours[name], theirs[name]), name  # what is not appended is NaN in both
    wanted = wanted.transpose(1, 2)
    used = int(made["cu_seqlens_q"][-1]) if "cu_seqlens_q" in made else None
    assert same_bits(turned, wanted[0, :used] if used is not None else wanted)
    assert all(same_bits(a, b) for a, b in zip(before, (made["k"], made["v"], made["q"])))
    if "rotary_cos" in made:
        assert turned.is_contiguous() and (turned.numel() == 0 or turned.data_ptr() != made["q"].data_ptr())
    else:
        assert turned is made["q"]


def a_step(cached, new=2, capacity=8, **more):  # type: ignore[no-untyped-def]
    batch, dims = len(cached), more.pop("dims", (2, 16))
    q, k, v = (torch.randn(batch, new, *dims) for _ in range(3))
    storage = more.pop("storage", batch)
    caches = [torch.zeros(storage, more.get("page_size") or capacity, *dims) for _ in range(2)]
    tables = CacheTables(torch.tensor(cached), *(more.pop(n, None) for n in ("leftpad", "rows", "ends", "pages")))
    sizes = CacheSizes(batch, new, new, new, capacity, storage, more.pop("page_size", 0))
    return CacheStep(q, *caches, k, v, tables, sizes, **more)


def written(cache):  # type: ignore[no-untyped-def]
    return [tuple(at) for at in (cache != 0).any(-1).any(-1).nonzero().tolist()]


def test_what_has_no_place_is_not_written():  # type: ignore[no-untyped-def]
    """Whatever the tables hold: rows beyond the capacity, before the beginning, in cache rows or on pages that do not exist."""
    step = a_step([7, -1, 8, 2**40, 3])
    append(step)
    assert written(step.k_cache) == written(step.v_cache) == [(0, 7), (1, 0), (4, 3), (4, 4)]
    step = a_step([0, 1, 2, 3], rows=torch.tensor([4, -1, 3, 2**33]), storage=4)
    append(step)
    assert written(step.k_cache) == [(3, 2), (3, 3)]
    pages = torch.tensor([[0, 9, 2, 3], [-1, 4, 5, 6], [2**35, 1, 7, 8], [11, 2, 10, 10]])
    step = a_step([1, 1, 1, 7], pages=pages, page_size=2, storage=10)
    append(step)
    assert written(step.k_cache) == written(step.v_cache) == [(0, 1), (1, 0), (4, 0), (9, 0)]


def test_a_page_outside_the_pool_is_not_written():  # type: ignore[no-untyped-def]
    step = a_step([0], pages=torch.tensor([[10, 0]]), page_size=2, storage=10, capacity=4)
    append(step)
    assert written(step.k_cache) == []


def test_rows_beyond_the_rotary_tables_are_loud():  # type: ignore[no-untyped-def]
    ones = torch.ones(4, 3)
    step = a_step([1, 3, 6], cos=ones, sin=ones * 0, follows=True)
    turned = append(step)
    assert torch.equal(turned[0], step.q[0]) and torch.equal(turned[..., 6:], step.q[..., 6:])
    assert torch.equal(turned[1, 0], step.q[1, 0]) and bool(turned[1, 1, :, :6].isnan().all()) and bool(turned[2, ..., :6].isnan().all())
    assert torch.equal(step.k_cache[1, 3], step.k[1, 0]) and bool(step.k_cache[1, 4, :, :6].isnan().all())
    assert not bool(step.v_cache.isnan().any())


def test_ends_that_make_no_sense():  # type: ignore[no-untyped-def]
    """Packed rows of no entry are left out; ends that fall or lie outside harm nothing."""
    q, caches = torch.randn(6, 1, 16), [torch.zeros(3, 8, 1, 16) for _ in range(2)]
    for ends, places in (
        ([2, 3, 3, 5], [(0, 0), (2, 0), (2, 1)]),
        ([0, 1, 2, 100], [(0, 0), (1, 0), (2, 0), (2, 1), (2, 2), (2, 3)]),
        ([0, 0, 0, 0], []),
    ):
        for cache in caches:
            cache.zero_()
        tables = CacheTables(torch.zeros(3, dtype=torch.int32), cu_seqlens_q=torch.tensor(ends))
        append(CacheStep(q, *caches, q, q, tables, CacheSizes(3, 6, 6, None, 8, 3)))
        assert written(caches[0]) == places
    for ends in ([0, 5, 1, 6], [-7, -9, 2**31, 4]):
        tables = CacheTables(torch.zeros(3, dtype=torch.int32), cu_seqlens_q=torch.tensor(ends))
        append(CacheStep(q, *caches, q, q, tables, CacheSizes(3, 6, 6, None, 8, 3)))


def test_many_lines(monkeypatch):  # type: ignore[no-untyped-def]
    """More programs than one of every kind, whole blocks and parts of them."""
    # (the package's attribute of this name is the function)
    monkeypatch.setattr(importlib.import_module("anyattn.backends.triton.append_rotary"), "_ELEMENTS", 64)
    for seed in (1, 5, 9):
        test_the_same_bits_as_by_torch(seed, monkeypatch)


@pytest.mark.parametrize("seed", few(range(20), *range(8)))
def test_sequences_that_the_host_has_not_read(seed):  # type: ignore[no-untyped-def]
    """Their fields, computed from the tables, are those of ``SeqlenInfoQKNewK`` for each entry; so are those of the read ones."""
    made, options = random_call(seed)
    call = cache_call(CacheArguments(**made), options)
    unread, read = StoredCache(call.step.tables, call.step.sizes, torch.device("cpu")), call.problem.sequences
    ends, used, leftpad = (made.get(n) for n in ("cu_seqlens_q", "cache_seqlens", "cache_leftpad"))
    q, k, packed = made["q"], made["k"], made["k"].ndim == 3
    for b in range(len(used)):
        statics, cu_seqlens = (
            (None if ends is not None else q.shape[1], None, 0 if packed else k.shape[1]),
            (ends, None, ends if packed else None),
        )
        info = SeqlenInfoQKNewK.create(b, *statics, *cu_seqlens, None, used, leftpad)
        row = made["cache_batch_idx"][b] if "cache_batch_idx" in made else b
        wanted = {
            "seqlens_q": info.seqlen_q, "seqlens_k": info.seqlen_k, "q_row": 0 if ends is not None else b, "q_start": info.offset_q,
            "k_start": info.offset_k, "q_first": info.seqlen_k - info.seqlen_q,
        } | ({} if "page_table" in made else {"k_row": row})  # fmt: skip
        for s in (unread, read):
            assert {n: int(getattr(s, n)[b]) for n in wanted} == {n: int(x) for n, x in wanted.items()}
    assert len(unread.seqlens_q) == len(read.seqlens_q) == len(used)
    first, end = unread.position_bounds
    assert (first, end) == (first, max(end, read.end_position)) and first <= read.position_bounds[0]
    assert unread.bound_q >= read.max_seqlen_q and unread.bound_k >= read.max_seqlen_k
    again = unread.kept()
    assert again.on_host == unread.on_host and again.is_cache


def test_nothing_to_do():  # type: ignore[no-untyped-def]
    step = a_step([3], new=0)
    assert append(step) is step.q
    step = a_step([], cos=torch.ones(4, 3), sin=torch.ones(4, 3))
    assert append(step).shape == step.q.shape
