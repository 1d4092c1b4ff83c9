"""Warm calls of ``flash_attn_with_kvcache`` on a GPU, whose tables the host does not read: with a GPU pretended, launches are noted."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn import Mask, Score, autograd, flash_attn_with_kvcache
from anyattn.backends.triton import append_rotary
from anyattn.call_cache import attention, kvcache_step
from anyattn.custom_ops.flash import decode_with_mods
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.unread_kvcache import StoredCache
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments
from tests.support.no_reading import no_reading, noted_launches

BATCH, HEADS, KV_HEADS, CAPACITY, DIM = 3, 4, 2, 80, 64


def step(seed: int = 0, queries: int = 1, **more: Any) -> dict[str, Any]:
    """The arguments of one decoding step."""
    g = torch.Generator().manual_seed(seed)

    def rows(count: int, heads: int) -> Tensor:
        return torch.randn(BATCH, count, heads, DIM, generator=g).bfloat16()

    lengths = torch.randint(10, 70, (BATCH,), generator=g, dtype=torch.int32)
    new = {"k": rows(queries, KV_HEADS), "v": rows(queries, KV_HEADS)}
    caches = {"k_cache": rows(CAPACITY, KV_HEADS), "v_cache": rows(CAPACITY, KV_HEADS)}
    return {"q": rows(queries, HEADS), **caches, **new, "cache_seqlens": lengths, "causal": True, **more}


def visible(seen: Tensor) -> Callable:
    return lambda b, h, i, j: seen[b, j]


def behind_padding(seen: Tensor, first: Tensor) -> Callable:
    """What the integration of Transformers asks: an index that another tensor decides."""
    inner = visible(seen)
    return lambda b, h, i, j: inner(b, h, i + first[b], j + first[b])


def biased(table: Tensor, strength: float) -> Callable:
    return lambda s, b, h, i, j: s + strength * table[h, j]


def by_lookup(table: Tensor, ids: Tensor) -> Callable:
    return lambda s, b, h, i, j: s + table[ids[b, j]]


def recipe(name: str, seed: int) -> dict[str, Any]:
    """Options of one kind, with tensors and numbers of their own for each seed."""
    g = torch.Generator().manual_seed(seed)
    seen = torch.rand(BATCH, CAPACITY, generator=g) < 0.9
    first = torch.randint(0, 5, (BATCH,), generator=g, dtype=torch.int32)
    table, ids = torch.randn(HEADS, CAPACITY, generator=g), torch.randint(0, 7, (BATCH, CAPACITY), generator=g)
    found: dict[str, dict[str, Any]] = {
        "mask": {"mask_mod": visible(seen)},
        "mask behind padding": {"mask_mod": behind_padding(seen, first), "cache_leftpad": first},
        "wrapped": {"mask_mod": Mask(visible(seen)), "score_mod": Score(biased(table, 0.5 + seed))},
        "score": {"score_mod": biased(table, 0.5 + seed)},
        "score of what is read": {"score_mod": by_lookup(table[0, :7].clone(), ids)},
        "both, a cap, a sink": {
            "score_mod": biased(table, 0.5 + seed), "mask_mod": behind_padding(seen, first), "softcap": 20.0,
            "sink": torch.randn(HEADS, generator=g),
        },
        "aux": {"score_mod": lambda s, b, h, i, j, aux: s + aux[0][h, j], "aux_tensors": [table]},
        "alibi": {"alibi_slopes": torch.rand(HEADS, generator=g)},
        "alibi and a score": {"alibi_slopes": torch.rand(BATCH, HEADS, generator=g), "score_mod": biased(table, 0.5 + seed)},
        "window and a mask": {"mask_mod": visible(seen), "window_size": (30, 0), "causal": False},
    }  # fmt: skip
    return found[name]


RECIPES = (
    "mask", "mask behind padding", "wrapped", "score", "score of what is read", "both, a cap, a sink", "aux", "alibi", "alibi and a score",
    "window and a mask",
)  # fmt: skip


class Noted:
    """What calls came to: each one's problem and plan, and how many were checked from the start."""

    def __init__(self, patch: pytest.MonkeyPatch, gpu: SimpleNamespace) -> None:
        self.gpu, self.problems, self.plans, self.cold = gpu, [], [], 0
        compute, cache_call = autograd.compute, kvcache_step.cache_call

        def noted(problem: Problem, plan: Plan, *more: Any) -> Any:
            self.problems.append(problem)
            self.plans.append(plan)
            return compute(problem, plan, *more)

        def counted(*given: Any) -> Any:
            self.cold += 1
            return cache_call(*given)

        patch.setattr(append_rotary, "run_plain", lambda *given: gpu.made.append(given))
        patch.setattr(autograd, "compute", noted)
        patch.setattr(kvcache_step, "cache_call", counted)

    def call(self, **given: Any) -> tuple[Problem, int]:
        """The problem of a call, and whether it was checked from the start. Nothing that tensors hold is read."""
        before = self.cold
        with torch.no_grad(), no_reading(through_dispatch=False):
            flash_attn_with_kvcache(**given)
        return self.problems[-1], self.cold - before


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Iterator[Noted]:
    attention.clear()
    yield Noted(monkeypatch, noted_launches(monkeypatch, (8, 0)))
    attention.clear()


def described(problem: Problem) -> dict[str, Any]:
    """All that a kernel is told: tensors by identity, what is made for a call by its contents."""

    def of(mod: TracedMod | None) -> Any:
        if mod is None:
            return None
        own = [id(t) if t.data_ptr() else tuple(t.shape) for t in mod.tensors]
        return mod.kind, mod.expr, [(type(n), n) for n in mod.scalars], own

    sequences = problem.sequences
    assert isinstance(sequences, StoredCache)
    return {
        "score": of(problem.score), "masks": [of(p) for p in problem.predicates], "scale": problem.scale, "sizes": sequences.sizes,
        "tables": [None if t is None else t.data_ptr() for t in sequences.tables], "sink": id(problem.sink), "splits": problem.num_splits,
        "rows": [(t.data_ptr(), t.shape, t.stride()) for t in (problem.q, problem.k, problem.v)], "lse": problem.wants_lse,
    }  # fmt: skip


@pytest.mark.parametrize("name", RECIPES)
def test_a_warm_call_is_what_a_first_call_of_it_is(name: str, noted: Noted) -> None:
    """Other closures over other tensors, and over other numbers where these are a score's, are the same call."""
    noted.call(**step(0, **recipe(name, 0)))
    given = step(1, **recipe(name, 1))
    warm, was_cold = noted.call(**given)
    assert not was_cold
    launched = len(noted.gpu.made)
    attention.clear()
    first, was_cold = noted.call(**given)
    assert was_cold and described(first) == described(warm)
    assert noted.plans[-1] == noted.plans[-2] and len(noted.gpu.made) == launched * 3 // 2


@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_read_may_not_share_an_element_with_a_cache(name: str, cache: str, noted: Noted) -> None:
    """Nor may it in a warm call, whose strides alone tell nothing of it."""
    given = step()
    heads = given[name].shape[2]
    pool = torch.zeros(BATCH, CAPACITY + 1, max(HEADS, KV_HEADS), DIM, dtype=torch.bfloat16)
    given[cache] = pool[:, :CAPACITY, :KV_HEADS]
    apart, sharing = given | {name: pool[:, CAPACITY:, :heads]}, given | {name: pool[:, 40:41, :heads]}
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"{cache} and {name} share memory .*{name}\.clone\(\)"):
            noted.call(**sharing)
        noted.call(**apart)
        assert not noted.call(**apart)[1]


def test_layers_of_a_growing_cache(noted: Noted) -> None:
    """Each length is checked once, by the first layer."""
    for capacity in (70, 71, 72):
        mods = recipe("mask behind padding", capacity)
        for layer in range(3):
            given = step(layer, **mods)
            given |= {n: given[n][:, :capacity].contiguous() for n in ("k_cache", "v_cache")}
            assert noted.call(**given)[1] == (layer == 0)


def grown(rows: int, seed: int = 0, **more: Any) -> dict[str, Any]:
    """A call on a cache of so many rows, which appends nothing, as Transformers' dynamic caches are read."""
    given = {**step(seed), "k": None, "v": None, "cache_seqlens": torch.full((BATCH,), rows, dtype=torch.int32), **more}
    g = torch.Generator().manual_seed(seed)
    for name in ("k_cache", "v_cache"):  # heads before rows, as models keep them: every stride tells how many rows there are
        given[name] = torch.randn(BATCH, KV_HEADS, rows, DIM, generator=g).bfloat16().transpose(1, 2)
    return given


@pytest.mark.parametrize("name", ["mask behind padding", "both, a cap, a sink", "alibi", "window and a mask", "score of what is read"])
def test_a_cache_that_grows_is_checked_once_for_many_lengths(name: str, noted: Noted, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each call is what it would be alone, whichever came first."""
    monkeypatch.setattr(sys.modules[__name__], "CAPACITY", 256)  # of what mods read
    for rows, is_cold in ((130, 1), (131, 0), (192, 0), (129, 0), (193, 1), (191, 0), (200, 0)):
        given = grown(rows, rows, **recipe(name, rows))
        warm, was_cold = noted.call(**given)
        assert was_cold == is_cold, rows
        launched, plan = noted.gpu.made[-1], noted.plans[-1]
        with monkeypatch.context() as patch:
            patch.setattr(kvcache_step, "known", lambda found: None)
            alone, was_cold = noted.call(**given)
        assert was_cold and described(alone) == described(warm) and noted.plans[-1] == plan
        assert noted.gpu.made[-1][0] is launched[0] and noted.gpu.made[-1][1] == launched[1]  # kernel and grid


def test_a_growing_cache_is_checked_anew_where_more_keys_would_change_a_mod(noted: Noted) -> None:
    """A table that ends with the cache, a window as wide as it."""
    table = torch.randn(100)
    for rows in (90, 91):
        for is_cold in (1, 0):
            assert noted.call(**grown(rows, score_mod=lambda s, b, h, i, j: s + table[j]))[1] == is_cold
            assert noted.call(**grown(rows, window_size=(100, 0)))[1] == is_cold
    with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
        flash_attn_with_kvcache(**grown(101, score_mod=lambda s, b, h, i, j: s + table[j]))


def test_rows_that_did_not_grow_with_the_others_are_refused(noted: Noted) -> None:
    """The signature of a growing cache has no number of rows: of its values, and of scales of each key, they are compared at every call."""

    def given(rows: int, values: int, scales: int) -> dict[str, Any]:
        found = grown(rows)
        caches = {"k_cache": found["k_cache"].to(torch.int8), "v_cache": found["v_cache"][:, :values].to(torch.int8)}
        room = torch.ones(BATCH, 200, KV_HEADS)
        return found | caches | {"k_descale": room[:, :scales], "v_descale": 0.5}

    for rows in (70, 71, 72):
        noted.call(**given(rows, rows, rows))
    for wrong, told in (((73, 72, 73), "v_cache has shape"), ((73, 73, 72), "k_descale has shape"), ((73, 73, 80), "k_descale has shape")):
        with pytest.raises(ValueError, match=told), torch.no_grad():
            flash_attn_with_kvcache(**given(*wrong))


def test_an_empty_cache_is_a_call_of_its_own(noted: Noted) -> None:
    for rows, backend in ((3, "triton"), (0, "torch"), (1, "triton"), (0, "torch")):
        with torch.no_grad():
            flash_attn_with_kvcache(**grown(rows))
        assert noted.plans[-1].backend == backend
    assert noted.cold == 3  # the plan of an empty one reads the tables


def test_an_aligned_row_and_an_odd_one_are_two_calls(noted: Noted) -> None:
    def given(rows: int, width: int) -> dict[str, Any]:
        found = grown(rows)
        return found | {n: torch.randn(BATCH, rows, KV_HEADS, width).bfloat16()[..., :DIM] for n in ("k_cache", "v_cache")}

    sizes = (70, DIM), (71, DIM), (71, DIM + 8), (72, DIM + 4), (73, DIM + 4)
    assert [noted.call(**given(*each))[1] for each in sizes] == [1, 0, 0, 1, 0]


def test_numbers_of_masks_are_part_of_the_call(noted: Noted) -> None:
    def given(width: int) -> dict[str, Any]:
        return step(0, mask_mod=lambda b, h, i, j: i - j < width)

    assert [noted.call(**given(width))[1] for width in (9, 9, 8, 8, 9)] == [1, 0, 1, 0, 0]


def test_numbers_on_which_an_index_hangs_are_part_of_the_call(noted: Noted) -> None:
    table = torch.randn(CAPACITY + 3)

    def given(shift: int) -> dict[str, Any]:
        return step(0, score_mod=lambda s, b, h, i, j: s + table[j + shift])

    assert [noted.call(**given(shift))[1] for shift in (0, 3, 3, 0, 0)] == [1, 1, 0, 1, 0]
    with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
        flash_attn_with_kvcache(**given(CAPACITY))


def test_an_index_that_had_the_lengths_looked_at_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where sizes alone do not prove that it stays inside, the lengths decide, and they are another call's next time."""
    noted = Noted(monkeypatch, noted_launches(monkeypatch, (8, 0)))
    table = torch.randn(60)

    def given(*lengths: int) -> dict[str, Any]:
        return step(0, cache_seqlens=torch.tensor(lengths), score_mod=lambda s, b, h, i, j: s + table[j])

    with torch.no_grad():
        for _ in range(2):
            flash_attn_with_kvcache(**given(9, 20, 30))
        assert noted.cold == 2
        with pytest.raises(ValueError, match=r"index 60 \(at b=2"):
            flash_attn_with_kvcache(**given(9, 20, 60))


def test_a_mask_behind_which_an_index_hides_is_looked_at_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Causality hides the pairs at which an index leaves its table, at these lengths."""
    noted = Noted(monkeypatch, noted_launches(monkeypatch, (8, 0)))
    for table in (torch.randn(30), torch.ones(30, dtype=torch.bool)):

        def of_distance(*more: Any, table: Tensor = table) -> Any:
            *score, _, _, i, j = more
            return score[0] + table[29 - (i - j)] if score else table[29 - (i - j)]

        mod = {"score_mod" if table.is_floating_point() else "mask_mod": of_distance}
        with torch.no_grad():
            for _ in range(2):
                flash_attn_with_kvcache(**step(0, queries=9, cache_seqlens=torch.tensor([9, 20, 21]), **mod))
            with pytest.raises(ValueError, match="reads dimension 0 of a captured tensor"):
                flash_attn_with_kvcache(**step(0, queries=9, cache_seqlens=torch.tensor([9, 20, 70]), **mod))
    assert noted.cold == 6


def test_what_mods_capture_requires_no_grad_where_autograd_records(noted: Noted) -> None:
    table = torch.randn(HEADS, CAPACITY)
    given = step(0, score_mod=biased(table, 1.0))
    flash_attn_with_kvcache(**given)
    flash_attn_with_kvcache(**given)
    with pytest.raises(ValueError, match="that score_mod reads requires grad"):
        flash_attn_with_kvcache(**step(0, score_mod=biased(table.clone().requires_grad_(), 1.0)))


def test_a_compiled_graph_knows_its_calls_too(noted: Noted) -> None:
    for seed in range(3):
        given = step(seed, **recipe("mask behind padding", seed))
        mask, options = trace(given.pop("mask_mod"), "mask"), Options(causal=given.pop("causal"))
        with torch.no_grad():
            decode_with_mods(tuple(CacheArguments(**given)), tuple(options), None, None, mask)
    assert noted.cold == 1
