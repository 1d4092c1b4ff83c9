"""``flash_attn_with_kvcache`` and split keys by the Triton backend, in Triton's interpreter on the CPU.

Run by test_in_the_interpreter.py, for the interpreter has to be chosen before Triton is imported.
"""

import math
from dataclasses import replace

import pytest
import torch

import anyattn
from anyattn import autograd, flash_attn_func, flash_attn_varlen_func
from anyattn.backends.triton import launch_shape, tile_config
from anyattn.call_cache import attention
from anyattn.validate import sequences as check_lengths
from tests.entry_points import test_flash_cache as cache_tests
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.flash_calls import RECIPES

# it has no gradients, and refuses the tensors of other calls' recipes, which want some
flash_attn_with_kvcache = torch.no_grad()(anyattn.flash_attn_with_kvcache)


DTYPES = (torch.float32, torch.float16, torch.bfloat16)
SPLITS = (0, 1, 2, 3, 5)
MATRIX = [(name, setting, turn) for name, setting, turn in cache_tests.MATRIX if setting != "no queries"]
# every setting and every recipe once; which of the two ways tables are taken alternates
FEW = list({setting: (name, setting, turn) for name, setting, turn in MATRIX}.values())
FEW += [(name, "padding", 2) for name in RECIPES if name not in (*(n for n, *_ in FEW), *cache_tests.NEVER_BEFORE_KEY_0)]
FEW += [(name, "pages of 64", 1) for name in cache_tests.NEVER_BEFORE_KEY_0]


def unread(monkeypatch):  # type: ignore[no-untyped-def]
    """As on a GPU: nobody looks at tables."""
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)


def check(name, setting, turn, i):  # type: ignore[no-untyped-def]
    s = replace(cache_tests.SETTINGS[setting], dtype=DTYPES[i % 3], seed=turn)
    return cache_tests.check(s, RECIPES[name], num_splits=SPLITS[turn], backend="triton")


@pytest.mark.parametrize(("i", "case"), enumerate(FEW), ids=str)
def test_against_the_reference(i, case, monkeypatch):  # type: ignore[no-untyped-def]
    if i % 2:
        unread(monkeypatch)
    check(*case, i)


@pytest.mark.slow
@pytest.mark.parametrize("is_unread", [False, True])
@pytest.mark.parametrize(("i", "case"), enumerate(MATRIX), ids=str)
def test_all_against_the_reference(i, case, is_unread, monkeypatch):  # type: ignore[no-untyped-def]
    if is_unread:
        unread(monkeypatch)
    check(*case, i)


# ---- to the bit


def same(a, b):  # type: ignore[no-untyped-def]
    return all(calls.same_bits(x, y) for x, y in zip(a, b, strict=True))


def decoded(given, **more):  # type: ignore[no-untyped-def]
    """A call on copies of its caches: out, lse and both caches."""
    caches = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    found = flash_attn_with_kvcache(**{**given, **caches, "return_lse": True, "backend": "triton", "causal": True, **more})
    return (*found, *caches.values())


RAGGED = cache_tests.Setting(cached=(40, 7, 63, 0), queries=(3,) * 4, leftpad=(5, 0, 33, 0), rotary_dim=8, heads=(6, 2))


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("page_size", [1, 5, 16])
def test_where_pages_lie_changes_no_bit(page_size, splits, monkeypatch):  # type: ignore[no-untyped-def]
    found = []
    for seed in (None, 1, 2):
        found.append(decoded(cache_tests.arguments(replace(RAGGED, page_size=page_size, page_seed=seed)), num_splits=splits)[:2])
    found.append(decoded(cache_tests.arguments(RAGGED), num_splits=splits)[:2])  # nor whether there are any
    unread(monkeypatch)
    found.append(decoded(cache_tests.arguments(replace(RAGGED, page_size=page_size, page_seed=2)), num_splits=splits)[:2])
    assert all(same(found[0], other) for other in found[1:])


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["mask", "score", "both"])
def test_a_warm_call_with_mods_is_to_the_bit_a_first_call(kind, splits, monkeypatch):  # type: ignore[no-untyped-def]
    """With closures over other tensors and, of a score, other numbers, by which the call is known."""
    unread(monkeypatch)
    attention.clear()

    def asked(seed):  # type: ignore[no-untyped-def]
        random = torch.Generator().manual_seed(seed)
        seen, table, strength = torch.rand(4, 99, generator=random) < 0.7, torch.randn(6, 99, generator=random), 0.5 + seed
        first = torch.randint(0, 3, (4,), generator=random)
        mods = {
            "mask_mod": lambda b, h, i, j: seen[b, j + first[b]],
            "score_mod": lambda s, b, h, i, j: s + strength * table[h, j],
        }  # fmt: skip
        given = cache_tests.arguments(RAGGED)
        return given | {n: m for n, m in mods.items() if kind in ("both", n[: len(kind)])}

    found = []
    for seed in range(3):
        found.append(decoded(asked(seed), num_splits=splits))
        assert attention.size() == 1
    attention.clear()
    assert not same(found[1], found[2]) and same(found[2], decoded(asked(2), num_splits=splits))


def test_a_growing_cache_is_read_to_its_end(monkeypatch):  # type: ignore[no-untyped-def]
    """By calls that are known by another length, with more rows and with fewer."""
    unread(monkeypatch)
    attention.clear()
    for rows in (40, 64, 33, 57):
        random = torch.Generator().manual_seed(rows)
        q, k, v = (torch.randn(2, n, h, 16, generator=random) for n, h in ((1, 4), (rows, 2), (rows, 2)))
        seen, first = torch.rand(2, 64, generator=random) < 0.7, torch.tensor([5, 0])

        def mask(b, h, i, j, seen=seen, first=first):  # type: ignore[no-untyped-def]
            return seen[b, j + first[b]]

        given = {"cache_seqlens": rows, "cache_leftpad": first, "causal": True}
        out = flash_attn_with_kvcache(q, k, v, **given, mask_mod=mask, backend="triton")
        assert attention.size() == 1
        wanted = reference.cached(q, k, v, **given)
        reference.judge(wanted.sequences, {"out": out}, lambda tensors, mask=mask: {"causal": True, "mask_mod": mask}, label=str(rows))


SEEN = torch.rand(4, 99, generator=torch.Generator().manual_seed(1)) < 0.7
LIMITED = {  # what has row ranges, beside what is asked of each pair
    "window": {"window_size": (9, 0), "mask_mod": lambda b, h, i, j: SEEN[b, j]},
    "conjunction": {"mask_mod": lambda b, h, i, j: SEEN[b, j] & (i - j < 10) & ((i + j) % 3 > 0) & (j >= b)},
    "two ranges": {"mask_mod": lambda b, h, i, j: ((j < 3) | (i - j < 10)) & SEEN[b, j]},
    "no key": {"mask_mod": lambda b, h, i, j: (j > i) & SEEN[b, j]},
}


@pytest.mark.parametrize("page_size", [0, 5])
@pytest.mark.parametrize("kind", LIMITED)
def test_a_mask_of_which_part_has_row_ranges(kind, page_size):  # type: ignore[no-untyped-def]
    given = cache_tests.arguments(replace(RAGGED, page_size=page_size, rotary_dim=0)) | {"causal": True}
    options = {"window_size": (-1, -1)} | LIMITED[kind]
    found = [decoded(given, **options, num_splits=splits)[:2] for splits in (1, 3)]
    wanted = reference.cached(**{n: t.clone() if isinstance(t, torch.Tensor) else t for n, t in given.items() if n != "causal"})
    for out, lse in found:
        reference.judge(wanted.sequences, {"out": out, "lse": lse}, lambda tensors: {"causal": True} | options, label=kind)


@pytest.mark.parametrize("more", [{}, {"window_size": (70, 0)}, {"cache_leftpad": torch.tensor([0, 33, 7])}, {"num_splits": 3}], ids=str)
def test_pages_of_every_size_that_tiles_may_meet(more, monkeypatch):  # type: ignore[no-untyped-def]
    """Several tiles of 32 keys a sequence: of many pages, of one, of part of one, and of pages that begin anywhere in them."""
    unread(monkeypatch)
    monkeypatch.setattr(tile_config, "_few_rows", lambda tiles, rows, dtype: tile_config.Tiles(16, 32, 4, 2))
    random = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(3, n, h, 16, generator=random) for n, h in ((2, 4), (240, 2), (240, 2)))
    lengths = torch.tensor([197, 64, 240], dtype=torch.int32)
    options = {"cache_seqlens": lengths, "causal": True, "return_lse": True, "backend": "triton", "num_splits": 1} | more
    right = flash_attn_with_kvcache(q, k, v, **options)
    assert bool((right[0] != 0).any())
    for size in (1, 8, 12, 16, 32, 48, 64, 240):
        each = -(-240 // size)
        place = torch.randperm(3 * each, generator=random).view(3, each).int()
        pools = [torch.full((3 * each, size, 2, 16), math.nan) for _ in (k, v)]
        for pool, cache in zip(pools, (k, v), strict=True):
            rows = torch.nn.functional.pad(cache, (0, 0, 0, 0, 0, each * size - 240))
            pool[place.flatten().long()] = rows.reshape(3 * each, size, 2, 16)
        attention.clear()
        assert same(flash_attn_with_kvcache(q, *pools, page_table=place, **options), right), size


@pytest.mark.parametrize("splits", [1, 4])
def test_the_rest_of_the_batch_changes_no_bit(splits):  # type: ignore[no-untyped-def]
    for s in (RAGGED, replace(RAGGED, queries=(3, 0, 8, 1), packed=True)):
        given = cache_tests.arguments(s)
        together = decoded(given, num_splits=splits)
        for b in (0, 2):
            one = {n: v[b : b + 1] if n in ("cache_seqlens", "cache_leftpad") else v for n, v in given.items()}
            rows = slice(sum(s.queries[:b]), sum(s.queries[: b + 1])) if s.packed else slice(b, b + 1)
            one |= {n: given[n][rows] for n in ("q", "k", "v")} | {"cache_batch_idx": torch.tensor([b])}
            if s.packed:
                one["cu_seqlens_q"] = torch.tensor([0, s.queries[b]])
            alone = decoded(one, num_splits=splits)
            assert calls.same_bits(alone[0], together[0][rows])
            assert calls.same_bits(alone[1], together[1][:, rows] if s.packed else together[1][rows])


def test_tables_that_make_no_sense_harm_their_own_entry_only(monkeypatch):  # type: ignore[no-untyped-def]
    """Unread: rows beyond the capacity, cache rows and pages that do not exist, padding longer than the cache."""
    right = {n: decoded(cache_tests.arguments(replace(RAGGED, page_size=p)), num_splits=1) for n, p in (("rows", 0), ("pages", 16))}
    unread(monkeypatch)
    for name, value in (("cache_seqlens", 2**30), ("cache_seqlens", -5), ("cache_leftpad", 99), ("cache_leftpad", -3), ("page", 10**6)):
        for kind, page_size in (("rows", 0), ("pages", 16)):
            given = cache_tests.arguments(replace(RAGGED, page_size=page_size))
            if name != "page":
                given[name][1] = value
            elif page_size:
                given["page_table"][1] = value
            found = decoded(given, num_splits=1)
            others = [0, 2, 3]
            assert same([t[others] for t in found[:2]], [t[others] for t in right[kind][:2]]), (name, value, kind)
    given = cache_tests.arguments(RAGGED) | {"cache_batch_idx": torch.tensor([0, -1, 2, 3])}
    out, lse, *caches = decoded(given)
    assert bool((out[1] == 0).all()) and bool((lse[1] == -math.inf).all())
    assert all(calls.same_bits(c[1], given[n][1]) for c, n in zip(caches, ("k_cache", "v_cache")))


def test_a_known_step_is_what_a_first_one_is(monkeypatch):  # type: ignore[no-untyped-def]
    """Of other tensors, numbers and tables of the same facts; and what the host can see is still refused."""
    unread(monkeypatch)
    for s in (
        RAGGED,
        replace(RAGGED, page_size=5),
        replace(RAGGED, queries=(3, 0, 8, 1), packed=True),
        replace(RAGGED, new=None, rotary_dim=0),
    ):
        first, second = (cache_tests.arguments(replace(s, seed=seed)) for seed in (0, 2))
        options = {"softmax_scale": 0.3, "sink": torch.randn(6), "num_splits": 1, "window_size": (20, 0)}
        attention.clear()
        decoded(first, **options)
        assert attention.size() == 1
        options |= {"softmax_scale": 0.4, "sink": torch.randn(6)}
        known = decoded(second, **options)
        assert attention.size() == 1, "the second call is known"
        attention.clear()
        assert same(known, decoded(second, **options))
        if s.new is not None:
            both = {"k_cache": second["v_cache"], "v_cache": second["v_cache"]}
            with pytest.raises(ValueError, match="share memory"):
                flash_attn_with_kvcache(**second | both, **options, causal=True, return_lse=True, backend="triton")
        decoded(second | {"cache_seqlens": 30}, **options)
        for wrong in (-1, 1000):
            with pytest.raises(ValueError, match=f"cache_seqlens={wrong}"):
                decoded(second | {"cache_seqlens": wrong}, **options)


def test_validate_looks(monkeypatch):  # type: ignore[no-untyped-def]
    unread(monkeypatch)
    given = cache_tests.arguments(RAGGED)
    given["cache_seqlens"][1] = 1000
    decoded(given)
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\]=1000"):
        flash_attn_with_kvcache(**given, backend="triton", validate=True)
    with pytest.raises(ValueError, match="cache_seqlens=1000"):  # a number that the host has
        flash_attn_with_kvcache(**given | {"cache_seqlens": 1000}, backend="triton")
    with pytest.raises(ValueError, match=r"cache_seqlens\[1\]=1000"):  # a backend that has to look, before it writes
        flash_attn_with_kvcache(**given, backend="torch")
    assert calls.same_bits(before, given["k_cache"])


def test_by_torch_unread_as_looked_at(monkeypatch):  # type: ignore[no-untyped-def]
    """A GPU's call that this backend does not take, such as of float64."""
    s = replace(RAGGED, dtype=torch.float64, page_size=16)
    looked = decoded(cache_tests.arguments(s), backend="torch")
    attention.clear()
    unread(monkeypatch)
    assert same(decoded(cache_tests.arguments(s), backend=None), looked)


# ---- heads in one tile, and splits, outside of caches


class Plans:
    """Notes the plans by which forward passes are computed."""

    def __init__(self, monkeypatch):  # type: ignore[no-untyped-def]
        self.made = []  # type: ignore[var-annotated]
        real = autograd.repeater_of
        monkeypatch.setattr(autograd, "repeater_of", lambda problem, plan: (self.made.append(plan), real(problem, plan))[1])


def judged(recipe, heads, sq, sk, dtype=torch.float32, splits=1, seed=0, **more):  # type: ignore[no-untyped-def]
    """One ``flash_attn_func`` call by the reference; its results."""
    drawn = calls.ragged([sq] * 2, [sk] * 2, heads, (16, 24), dtype, seed=seed)
    q, k, v = (torch.stack(t) for t in (drawn.q, drawn.k, drawn.v))
    tensors = {n: t.detach() for n, t in RECIPES[recipe].draw(heads[0], 2, max(sq, sk), dtype, seed).items()}
    out, lse = flash_attn_func(q, k, v, **RECIPES[recipe].options(tensors), num_splits=splits, return_lse=True, backend="triton", **more)
    reference.judge(reference.dense(q, k, v), {"out": out, "lse": lse}, RECIPES[recipe].options, tensors, label=recipe)
    return out, lse


@pytest.mark.parametrize(
    ("recipe", "heads"),
    [
        ("causal", (4, 2)),
        ("causal", (24, 2)),
        ("alibi_by_entry", (5, 1)),
        ("bias_row", (6, 2)),
        ("bias_row", (3, 3)),
        ("everything", (4, 2)),
    ],
    ids=str,
)
def test_heads_share_a_tile(recipe, heads, monkeypatch):  # type: ignore[no-untyped-def]
    plans = Plans(monkeypatch)
    for sq, splits in ((1, 1), (3, 3)):
        judged(recipe, heads, sq, 40, splits=splits)
    # a mask whose tiles are listed lists them for every head
    wanted = 1 if recipe == "everything" else heads[0] // heads[1]
    assert {p.heads_per_tile for p in plans.made} == {wanted} and {p.num_splits for p in plans.made} == {1, 3}


def test_sharing_changes_where_rows_are_computed_only(monkeypatch):  # type: ignore[no-untyped-def]
    shared = judged("causal", (6, 2), 3, 40)
    monkeypatch.setattr(launch_shape, "has_few_rows", lambda *about: False)
    assert same(shared, judged("causal", (6, 2), 3, 40))


@pytest.mark.parametrize(
    ("recipe", "splits", "sizes"),
    [("full", 2, (70, 70)), ("causal_window", 5, (20, 33)), ("sink", 9, (1, 200)), ("sink_empty_band", 3, (20, 33)), ("mask", 2, (20, 70))],
)
def test_splits(recipe, splits, sizes):  # type: ignore[no-untyped-def]
    judged(recipe, (2, 1), *sizes, DTYPES[splits % 3], splits, seed=splits)


@pytest.mark.parametrize("is_unread", [False, True])
def test_splits_of_packed_sequences(is_unread, monkeypatch):  # type: ignore[no-untyped-def]
    """Rows of no sequence give 0 and -inf, with a sink too."""
    if is_unread:
        unread(monkeypatch)
    lengths_q, lengths_k = (1, 0, 20, 5), (70, 9, 0, 33)
    drawn = calls.ragged(lengths_q, lengths_k, (4, 2), (16, 16), torch.float32)
    tables = {"cu_seqlens_q": calls.ends(lengths_q, torch.int32), "cu_seqlens_k": calls.ends(lengths_k, torch.int32)}
    q, k, v = (torch.cat([*t, torch.full_like(t[2][:1] if len(t[2]) else t[0][:1], math.nan)]) for t in (drawn.q, drawn.k, drawn.v))
    for name in ("causal", "sink", "everything"):
        recipe = RECIPES[name]
        tensors = {n: t.detach() for n, t in recipe.draw(4, 4, 70, torch.float32).items()}
        given = {**tables, **recipe.options(tensors), "return_lse": True, "backend": "triton"}
        sequences = reference.packed(q, k, v, **tables)
        for splits in (1, 3):
            out, lse = flash_attn_varlen_func(q, k, v, **given, num_splits=splits)
            reference.judge(sequences, {"out": out, "lse": lse}, recipe.options, tensors, label=f"{name} {splits}")


def test_gradients_through_splits():  # type: ignore[no-untyped-def]
    q, k, v = (torch.randn(1, 20, h, 16) for h in (4, 2, 2))
    found = []
    for splits in (1, 3):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = flash_attn_func(*leaves, causal=True, num_splits=splits, backend="triton")
        found.append(torch.autograd.grad(out.square().sum(), leaves))
    # the backward pass does not know of splits: it differs by what out and lse were rounded to
    assert all(float((a - b).abs().max()) <= 64 * torch.finfo(torch.float32).eps * float(a.abs().max()) for a, b in zip(*found))
