"""``flash_attn_with_kvcache`` against the oracle, its promises to the bit, and what it leaves alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from tests.support import poison
from tests.support import sequences as seq
from tests.support.sequences import Meaning

TABLE = torch.linspace(-1.5, 1.5, 4 * 120, dtype=torch.float64).view(4, 120)


@dataclass(frozen=True)
class Setting:
    """One call. cached: rows in the cache before, padding included. new: rows appended (0: none). page_size 0: no pages."""

    cached: tuple[int, ...] = (40, 7, 63, 12)
    new: int = 1
    queries: int = 1
    page_size: int = 0
    leftpad: tuple[int, ...] | None = None
    shuffled_rows: bool = False
    rotary_dim: int = 0
    interleaved: bool = True
    capacity: int = 70
    heads: int = 4
    kv_heads: int = 2
    d: int = 16
    dv: int = 16
    dtype: torch.dtype = torch.float32
    seed: int = 0


@dataclass
class Case:
    """The arguments of the call, and what it means as a ragged batch after appending."""

    args: tuple[Tensor, Tensor, Tensor]
    options: dict[str, Any]
    batch: seq.Ragged
    firsts: list[int]
    caches_after: tuple[Tensor, Tensor]


def turned(x: Tensor, cos: Tensor, sin: Tensor, positions: list[int], interleaved: bool) -> Tensor:
    """(heads, rows, D) rotated as complex numbers in float64, rounded once."""
    half = cos.shape[1]
    head = x[..., : 2 * half].double()
    pairs = head.unflatten(-1, (half, 2)) if interleaved else head.unflatten(-1, (2, half)).transpose(-1, -2)
    angle = torch.complex(cos.double(), sin.double())[positions]
    pairs = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * angle)
    head = pairs.flatten(-2) if interleaved else pairs.transpose(-1, -2).flatten(-2)
    return torch.cat([head.to(x.dtype), x[..., 2 * half :]], -1)


def made(s: Setting, meaning: Meaning) -> Case:
    g = torch.Generator().manual_seed(s.seed)
    count = len(s.cached)
    pads = s.leftpad or (0,) * count
    old = seq.ragged([s.queries] * count, [c - p for c, p in zip(s.cached, pads)], s.heads, s.kv_heads, s.d, s.dv, s.dtype, s.seed)
    new = seq.ragged([1] * count, [s.new] * count, s.heads, s.kv_heads, s.d, s.dv, s.dtype, s.seed + 1)
    q_call = torch.stack(old.q).transpose(1, 2)
    options: dict[str, Any] = {"cache_seqlens": torch.tensor(s.cached, dtype=torch.int32), **meaning.options()}
    moves = meaning.causal or meaning.window_size != (-1, -1)
    new_k, old_q = new.k, old.q
    if s.new:
        options |= {name: torch.stack(part).transpose(1, 2) for name, part in (("k", new.k), ("v", new.v))}
    if s.rotary_dim:
        cos, sin = (torch.randn(s.capacity + 9, s.rotary_dim // 2, generator=g).to(s.dtype) for _ in range(2))
        options |= {"rotary_cos": cos, "rotary_sin": sin, "rotary_interleaved": s.interleaved}
        new_k = [turned(t, cos, sin, [c + j for j in range(s.new)], s.interleaved) for t, c in zip(new.k, s.cached)]
        old_q = [turned(t, cos, sin, [c + i * moves for i in range(s.queries)], s.interleaved) for t, c in zip(old.q, s.cached)]
    if s.leftpad is not None:
        options["cache_leftpad"] = torch.tensor(s.leftpad, dtype=torch.int32)
    keys, values = ([torch.cat(pair, 1) for pair in zip(*parts)] for parts in ((old.k, new_k), (old.v, new.v)))
    if s.page_size:
        table, pages = seq.shuffled_table(count, s.capacity, s.page_size, s.seed)
        options["page_table"] = table
        store = lambda parts: seq.paged(parts, s.page_size, table, pages, pads)
    else:
        rows = torch.randperm(count + 2, generator=g)[:count].tolist() if s.shuffled_rows else list(range(count))
        if s.shuffled_rows:
            options["cache_batch_idx"] = torch.tensor(rows, dtype=torch.int32)
        store = lambda parts: seq.padded(parts, s.capacity, rows, count + 2 if s.shuffled_rows else count, pads)
    batch = seq.Ragged(old_q, keys, values, old.dout)
    return Case((q_call, store(old.k), store(old.v)), options, batch, [t.shape[1] - s.queries for t in keys], (store(keys), store(values)))


def same_or_nan(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def call(case: Case, **options: Any) -> tuple[Tensor, Tensor]:
    with poison.enabled():
        return anyattn.flash_attn_with_kvcache(*case.args, return_lse=True, **{**case.options, **options})


def check(s: Setting, meaning: Meaning, **options: Any) -> tuple[Tensor, Tensor]:
    case = made(s, meaning)
    out, lse = call(case, **options)
    # rotated keys may differ in the last bit from the reference's: the row that was written is what attention must have seen
    for cache, wanted in zip(case.args[1:], case.caches_after):
        close = same_or_nan(cache, wanted) if not s.rotary_dim else same_or_nan(cache.isnan(), wanted.isnan())
        assert close, "the cache holds something else than before plus the new rows"
    seq.judge({"out": list(out.transpose(1, 2)), "lse": list(lse)}, case.batch, meaning, case.firsts, label=str(s))
    return out, lse


MEANINGS = {
    "full": Meaning(),
    "causal": Meaning(causal=True),
    "window": Meaning(window_size=(9, 0)),
    "alibi": Meaning(causal=True, alibi_slopes=torch.tensor([0.5, 0.25, 0.125, 0.0625])),
    "sink and softcap": Meaning(causal=True, softcap=3.0, sink=torch.tensor([0.5, -1.0, 2.0, 0.0])),
    "mods see places": Meaning(
        score_mod=lambda s, b, h, i, j: s + TABLE[h, i] * (b + 1) - TABLE[h, j], mask_mod=lambda b, h, i, j: (i - j) % 7 != 3
    ),
    "distance": Meaning(causal=True, score_mod=lambda s, b, h, i, j: s + TABLE[h, (i - j).abs()]),
}
SETTINGS = {
    "plain": Setting(),
    "nothing new": Setting(new=0),
    "several at once": Setting(new=5, queries=5),
    "more new than queries": Setting(new=4, queries=2),
    "fewer new than queries": Setting(new=1, queries=3),
    "pages of 1": Setting(page_size=1, new=3, queries=3),
    "pages of 3": Setting(page_size=3, new=2, queries=2),
    "pages of 16": Setting(page_size=16),
    "pages of 64": Setting(page_size=64, new=6, queries=6),
    "left padding": Setting(leftpad=(5, 0, 33, 12), new=2, queries=2),
    "left padding in pages": Setting(leftpad=(5, 0, 33, 11), page_size=16, new=2, queries=2),
    "other rows": Setting(shuffled_rows=True, new=2, queries=2),
    "rotary": Setting(rotary_dim=16, new=3, queries=3),
    "rotary halves, in part": Setting(rotary_dim=8, interleaved=False, new=3, queries=3, page_size=3),
    "rotary with left padding": Setting(rotary_dim=12, leftpad=(5, 0, 33, 12), new=2, queries=2),
    "empty cache": Setting(cached=(0, 0, 5, 0), new=4, queries=4),
    "alike": Setting(cached=(20, 20, 20, 20), new=2, queries=2),
    "alike in pages": Setting(cached=(20, 20, 20, 20), new=2, queries=2, page_size=16),
}


@pytest.mark.parametrize("meaning", ["full", "causal", "window"])
def test_many_heads(meaning: str) -> None:
    check(Setting(heads=12, kv_heads=1, d=40, dv=24), MEANINGS[meaning])


@pytest.mark.covering(1)
@pytest.mark.parametrize("meaning", MEANINGS)
@pytest.mark.parametrize("name", SETTINGS)
def test_against_the_oracle(name: str, meaning: str) -> None:
    check(SETTINGS[name], MEANINGS[meaning])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["plain", "pages of 16", "rotary", "left padding", "alike"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    for meaning in ("causal", "window", "distance"):
        check(replace(SETTINGS[name], dtype=dtype), MEANINGS[meaning])


def test_a_long_cache() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for s in (Setting((2500, 1100, 3), capacity=2600), Setting((2500, 1100, 3), capacity=2600, page_size=64, new=40, queries=40)):
            check(replace(s, dtype=dtype), Meaning(causal=True))
            check(replace(s, dtype=dtype), Meaning(causal=True), num_splits=3)


@pytest.mark.parametrize("page_size", [3, 16])
def test_where_pages_lie_changes_no_bit(page_size: int) -> None:
    for meaning in ("causal", "mods see places"):
        found = [call(made(replace(SETTINGS["several at once"], page_size=page_size, seed=0), MEANINGS[meaning]))]
        case = made(replace(SETTINGS["several at once"], page_size=page_size, seed=0), MEANINGS[meaning])
        table = case.options["page_table"]
        order = torch.randperm(len(case.args[1]), generator=torch.Generator().manual_seed(5))
        moved = tuple(pool[order] for pool in case.args[1:])  # page order[i] now stands at i
        case.args = (case.args[0], *moved)
        case.options["page_table"] = torch.argsort(order)[table.long()].to(torch.int32)
        found.append(call(case))
        found.append(call(made(replace(SETTINGS["several at once"], page_size=0, seed=0), MEANINGS[meaning])))
        for out, lse in found[1:]:
            assert torch.equal(out, found[0][0]) and torch.equal(lse, found[0][1])


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [0, 1, 3])
@pytest.mark.parametrize("cached", [(20, 20, 20, 20), (40, 7, 63, 12), (300, 20, 1500, 20), (700, 700, 700, 700)])
def test_the_batch_changes_no_bit_of_an_entry(cached: tuple[int, ...], splits: int) -> None:
    """Also where entries that are alike are computed together, and where a longer entry asks for other tiles."""
    sigmoid = Meaning(causal=True, score_mod=lambda s, b, h, i, j: s + torch.sigmoid(TABLE[h, j % 120]) * torch.exp2(0.01 * i))
    sink = Meaning(window_size=(50, 0), sink=torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, 0.25]))
    for meaning, heads in ((Meaning(causal=True), 6), (sink, 6), (sigmoid, 4)):
        s = Setting(cached, new=3, queries=3, capacity=1600, heads=heads, kv_heads=2, d=24, dv=8)
        case = made(s, meaning)
        out, lse = call(made(s, meaning), num_splits=splits)
        for b in range(4):
            alone = {n: t[b : b + 1] if n in ("k", "v", "cache_seqlens") else t for n, t in case.options.items()}
            alone_case = Case(tuple(t[b : b + 1].clone() for t in case.args), alone, case.batch, [], case.caches_after)  # type: ignore[arg-type]
            one, one_lse = call(alone_case, num_splits=splits)
            assert torch.equal(one[0], out[b]) and torch.equal(one_lse[0], lse[b]), (meaning, b)


def test_an_infinite_bias_of_one_entry_changes_no_bit_of_another() -> None:
    bias = torch.tensor([0.3, 1.7, -torch.inf])
    q, caches = torch.randn(3, 1, 4, 16), torch.randn(2, 3, 64, 2, 16)
    options = {"cache_seqlens": 33, "return_lse": True, "score_mod": lambda s, b, h, i, j: s + bias[b]}
    both = anyattn.flash_attn_with_kvcache(q, *caches, **options)
    alone = anyattn.flash_attn_with_kvcache(q[:2], *caches[:, :2], **options)
    assert all(torch.equal(x[:2], y) for x, y in zip(both, alone))


def test_packed_queries() -> None:
    """Queries, and new keys, of different numbers per entry, laid end to end by cu_seqlens_q."""
    cached, counts = [20, 7, 33], [3, 0, 6]
    old, new = seq.ragged(counts, cached), seq.ragged([1] * 3, counts, seed=1)
    caches = [seq.padded(part, 60) for part in (old.k, old.v)]
    options = {"cache_seqlens": torch.tensor(cached), "cu_seqlens_q": seq.ends(counts), "causal": True, "max_seqlen_q": 6}
    out, lse = anyattn.flash_attn_with_kvcache(
        seq.packed(old.q), *caches, k=seq.packed(new.k), v=seq.packed(new.v), return_lse=True, **options
    )
    batch = seq.Ragged(old.q, *([torch.cat(pair, 1) for pair in zip(*parts)] for parts in ((old.k, new.k), (old.v, new.v))), old.dout)
    assert same_or_nan(caches[0], seq.padded(batch.k, 60)) and same_or_nan(caches[1], seq.padded(batch.v, 60))
    seq.judge({"out": seq.unpacked(out, counts), "lse": list(lse.split(counts, 1))}, batch, Meaning(causal=True), cached)


@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("has_rotary", [False, True])
@pytest.mark.parametrize("counts", [(2, 0, 1), (0, 0)])
def test_packed_new_rows_behind_the_last_entry_are_not_appended(counts, has_rotary, is_compiled):
    rows, batch = sum(counts), len(counts)
    q, k, v = torch.randn(3, rows + 2, 2, 16)
    caches = torch.randn(2, batch, 8, 2, 16)
    tables = dict.fromkeys(("rotary_cos", "rotary_sin"), torch.rand(8, 4) if has_rotary else None)
    call = torch.compile(anyattn.flash_attn_with_kvcache, backend="eager") if is_compiled else anyattn.flash_attn_with_kvcache
    found = []
    for end in (rows, rows + 2):
        k_cache, v_cache = caches.clone()
        new = (t[:end] for t in (q, k, v))
        out = call(next(new), k_cache, v_cache, *new, cache_seqlens=3, cu_seqlens_q=seq.ends(counts), causal=True, **tables)
        found.append((out[:rows], k_cache, v_cache))
        assert not out[rows:].any()
    assert all(map(torch.equal, *found))
    assert torch.equal(found[0][1][:, :3], caches[0][:, :3]) and torch.equal(found[0][1], caches[0]) == (rows == 0)


def test_decoding_step_by_step_is_attention_over_all() -> None:
    """A mod written for training, with the same q_idx and kv_idx, decodes unchanged."""
    bias = torch.randn(4, 40, 40, dtype=torch.float64)
    mods = {"score_mod": lambda s, b, h, i, j: s + bias[h, i, j], "mask_mod": lambda b, h, i, j: (i - j < 20) | (j == 0), "causal": True}
    batch = seq.ragged([40] * 2, [40] * 2)
    q, k, v = (torch.stack(part).transpose(1, 2) for part in (batch.q, batch.k, batch.v))
    caches = [torch.full_like(t, seq.NAN) for t in (k, v)]
    outs = []
    for t in range(40):
        step = slice(t, t + 1)
        outs.append(anyattn.flash_attn_with_kvcache(q[:, step], *caches, k=k[:, step], v=v[:, step], cache_seqlens=t, **mods))
    got = {"out": list(torch.cat(outs, 1).transpose(1, 2))}
    seq.judge(got, batch, Meaning(causal=True, score_mod=mods["score_mod"], mask_mod=mods["mask_mod"]))


def test_whole_cache_without_lengths_and_strided_caches() -> None:
    batch = seq.ragged([2] * 3, [9] * 3)
    k, v = (seq.padded(part, 9) for part in (batch.k, batch.v))
    heads_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    q = torch.stack(batch.q).transpose(1, 2)
    for caches in ((k, v), heads_first):
        out = anyattn.flash_attn_with_kvcache(q, *caches, causal=True)
        seq.judge({"out": list(out.transpose(1, 2))}, batch, Meaning(causal=True), [7] * 3)
    pools = [t.reshape(9, 3, 2, 16).transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v)]
    table = torch.arange(9).view(3, 3)
    for caches in (pools, [p.contiguous() for p in pools], [torch.cat([p, p], 2)[:, :, :2] for p in pools]):
        out = anyattn.flash_attn_with_kvcache(q, *caches, cache_seqlens=9, page_table=table, causal=True)
        seq.judge({"out": list(out.transpose(1, 2))}, batch, Meaning(causal=True), [7] * 3)


def test_entries_may_share_pages_that_nobody_writes() -> None:
    prefix = seq.ragged([1], [8])
    pools = [torch.randn(8, 4, 2, 16) for _ in range(2)]
    for pool, part in zip(pools, (prefix.k, prefix.v)):
        pool[:2] = part[0].transpose(0, 1).reshape(2, 4, 2, 16)
    table = torch.tensor([[0, 1, 4], [0, 1, 6]])
    q, k, v = torch.randn(2, 1, 4, 16), torch.randn(2, 1, 2, 16), torch.randn(2, 1, 2, 16)
    out = anyattn.flash_attn_with_kvcache(q, *pools, k=k, v=v, cache_seqlens=8, page_table=table)
    keys, values = ([torch.cat([part[0], x[b].transpose(0, 1)], 1) for b in range(2)] for part, x in ((prefix.k, k), (prefix.v, v)))
    batch = seq.Ragged(list(q.transpose(1, 2)), keys, values, list(torch.zeros(2, 4, 1, 16)))
    seq.judge({"out": list(out.transpose(1, 2))}, batch, Meaning())


def bad_calls() -> dict[str, tuple[dict[str, Any], str]]:
    cos = torch.ones(200, 8)
    pages = torch.zeros(4, 3, dtype=torch.int32) + torch.arange(12).view(4, 3)
    outside = pages.clone().to(torch.int32)
    outside[2, 1] = 99
    twice = pages.clone().to(torch.int32)
    twice[3] = twice[0]
    return {
        "no room": ({"cache_seqlens": torch.tensor([5, 64, 5, 5])}, r"65 in all|64 of entry 1"),
        "more than the capacity": ({"cache_seqlens": torch.tensor([5, 99, 5, 5])}, r"cache_seqlens\[1\]=99"),
        "negative length": ({"cache_seqlens": torch.tensor([5, -1, 5, 5])}, r"cache_seqlens\[1\]=-1"),
        "lengths of another batch": ({"cache_seqlens": torch.tensor([5, 5])}, "cache_seqlens has 2 entries"),
        "floats for lengths": ({"cache_seqlens": torch.ones(4)}, "cache_seqlens has dtype"),
        "a row twice": ({"cache_batch_idx": torch.tensor([0, 1, 2, 1])}, "cache_batch_idx"),
        "a row outside": ({"cache_batch_idx": torch.tensor([0, 1, 2, 9])}, r"cache_batch_idx\[3\]=9"),
        "a page outside": ({"page_table": outside, "cache_seqlens": torch.tensor([5, 5, 30, 5])}, r"page_table\[2, 1\]=99"),
        "a page twice": ({"page_table": twice}, "page_table"),
        "rows beyond the page table": (
            {"page_table": pages, "cache_batch_idx": torch.tensor([0, 1, 4, 2])},
            r"cache_batch_idx\[2\]=4 but page_table has 4 rows",
        ),
        "fewer rows than queries": ({"page_table": pages, "cache_batch_idx": torch.arange(3)}, "cache_batch_idx has 3 entries; wanted 4"),
        "padding over the length": ({"cache_leftpad": torch.tensor([0, 9, 0, 0])}, r"cache_leftpad\[1\]=9"),
        "rotary too short": ({"rotary_cos": cos[:6], "rotary_sin": cos[:6], "cache_seqlens": 6}, "rotary_cos"),
        "rotary too wide": ({"rotary_cos": torch.ones(200, 9), "rotary_sin": torch.ones(200, 9)}, "rotary"),
        "rotary without sin": ({"rotary_cos": cos}, "rotary_sin"),
        "rotary without keys": ({"rotary_cos": cos, "rotary_sin": cos, "k": None, "v": None}, "rotary_cos"),
        "k without v": ({"v": None}, "v is None"),
        "k of other heads": ({"k": torch.ones(4, 1, 4, 16), "v": torch.ones(4, 1, 4, 16)}, "k has"),
        "k of another batch": ({"k": torch.ones(3, 1, 2, 16), "v": torch.ones(3, 1, 2, 16)}, "k has batch 3"),
        "splits": ({"num_splits": -1}, "num_splits=-1"),
        "window of one": ({"window_size": (3,)}, "window_size"),
        "window and rotary": ({"window_size": 3, "rotary_cos": cos, "rotary_sin": cos}, "window_size=3"),
        "a mod that leaves its table": ({"score_mod": lambda s, b, h, i, j: s + cos[i * 100, 0]}, "captured tensor"),
        "a mod that branches": ({"mask_mod": lambda b, h, i, j: i > j and j > 3}, "and"),
    }


@pytest.mark.parametrize("name", bad_calls())
def test_bad_input_is_refused_before_anything_is_written(name: str) -> None:
    changes, words = bad_calls()[name]
    is_paged = "page_table" in changes and "cache_batch_idx" not in changes
    caches = [torch.randn(12, 16, 2, 16) if is_paged else torch.randn(4, 64, 2, 16) for _ in range(2)]
    before = [c.clone() for c in caches]
    options = {"k": torch.randn(4, 1, 2, 16), "v": torch.randn(4, 1, 2, 16), "cache_seqlens": torch.tensor([5, 5, 5, 5])} | changes
    with pytest.raises((ValueError, TypeError, anyattn.ModError), match=words):
        anyattn.flash_attn_with_kvcache(torch.randn(4, 1, 4, 16), *caches, **options)
    assert all(torch.equal(a, b) for a, b in zip(caches, before))


def test_an_expanded_cache_is_refused() -> None:
    cache, new = torch.randn(1, 64, 2, 16).expand(4, -1, -1, -1), torch.randn(4, 1, 2, 16)
    with pytest.raises(ValueError, match="k_cache"):
        anyattn.flash_attn_with_kvcache(torch.randn(4, 1, 4, 16), cache, cache, k=new, v=new, cache_seqlens=3)


def test_one_cache_for_keys_and_other_values_is_refused() -> None:
    cache, new = torch.randn(4, 64, 2, 16), torch.randn(4, 1, 2, 16)
    before = cache.clone()
    with pytest.raises(ValueError, match="k_cache and v_cache"):
        anyattn.flash_attn_with_kvcache(torch.randn(4, 1, 4, 16), cache, cache, k=new, v=new.clone(), cache_seqlens=3)
    assert torch.equal(cache, before)


@pytest.mark.parametrize("name", ["q", "k_cache", "v_cache", "k", "v", "rotary_cos", "alibi_slopes", "sink", "a score mod's"])
def test_what_requires_grad_is_refused_where_autograd_records(name: str) -> None:
    """There is no backward pass: a result without a gradient would say nothing of it."""
    given = {n: torch.randn(1, 1, h, 16) for n, h in (("q", 4), ("k", 2), ("v", 2))}
    given |= {n: torch.randn(1, 8, 2, 16) for n in ("k_cache", "v_cache")}
    given |= {"rotary_cos": torch.randn(9, 4), "rotary_sin": torch.randn(9, 4), "alibi_slopes": torch.rand(4), "sink": torch.randn(4)}
    bias = torch.randn(4)
    given.get(name, bias).requires_grad_()
    before = given["k_cache"].detach().clone()

    def call():
        return anyattn.flash_attn_with_kvcache(**given, score_mod=lambda s, b, h, i, j: s + bias[h], cache_seqlens=3)

    with pytest.raises(ValueError, match=f"^({name}|a tensor .* that score_mod reads) requires grad.*no_grad.*flash_attn_varlen_func"):
        call()
    assert torch.equal(given["k_cache"].detach(), before)
    with torch.no_grad():
        assert not call().requires_grad
    with torch.inference_mode():
        call()


def test_parameters_that_require_no_grad_are_as_good_as_buffers() -> None:
    q, cache = torch.randn(1, 1, 4, 16), torch.nn.Parameter(torch.randn(1, 8, 2, 16), requires_grad=False)
    assert torch.equal(anyattn.flash_attn_with_kvcache(q, cache, cache), anyattn.flash_attn_with_kvcache(q, cache.data, cache.data))


@pytest.mark.parametrize("is_packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("has_new", [False, True], ids=["read", "append"])
def test_a_page_table_may_have_a_row_for_each_cache_entry(has_new: bool, is_packed: bool) -> None:
    """cache_batch_idx then selects, as in FlashAttention-3: the call is the one with the selected rows."""
    g = torch.Generator().manual_seed(5)
    q, new = torch.randn(5, 1, 4, 16, generator=g), torch.randn(2, 5, 1, 2, 16, generator=g)
    pools = torch.randn(2, 40, 8, 2, 16, generator=g)
    table, rows = torch.randperm(40, generator=g).view(10, 4), torch.tensor([7, 2, 9, 0, 4])
    lengths = torch.tensor([3, 0, 17, 30, 31]) if has_new else torch.tensor([3, 1, 17, 30, 32])
    given = {"cache_seqlens": lengths, "causal": True, "return_lse": True}
    if is_packed:
        q, new = q[:, 0], new[:, :, 0]
        given["cu_seqlens_q"] = torch.arange(6)
    wanted_pools = pools.clone()
    extra = ({"k": new[0], "v": new[1]}) if has_new else {}
    wanted = anyattn.flash_attn_with_kvcache(q, *wanted_pools, **extra, **given, page_table=table[rows])
    for dtype in (torch.int32, torch.int64):
        for _ in range(2):
            own = pools.clone()
            found = anyattn.flash_attn_with_kvcache(q, *own, **extra, **given, page_table=table.to(dtype), cache_batch_idx=rows.to(dtype))
            assert all(torch.equal(a, b) for a, b in zip((*found, own), (*wanted, wanted_pools), strict=True))
    if has_new:
        with pytest.raises(ValueError, match="appended to it for both"):
            anyattn.flash_attn_with_kvcache(q, *pools, **extra, **given, page_table=table, cache_batch_idx=torch.tensor([7, 2, 9, 0, 0]))
