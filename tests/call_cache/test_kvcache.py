"""``flash_attn_with_kvcache`` called again: a call of known facts is what a first call would be, bit for bit, and refuses what it would.

What changes between the calls is what a decoder changes: lengths and page tables in place, the caches' contents, now and then a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from anyattn import flash_attn_with_kvcache
from anyattn.call_cache import attention, kvcache
from anyattn.problem import Problem
from anyattn.sequences.batch import OnHost
from anyattn.validate import sequences
from anyattn.validate.flash import Options
from tests.entry_points import test_flash_cache as flash_cache
from tests.entry_points.test_flash_cache import BAD, GOOD, Setting, arguments
from tests.support import flash_calls as calls
from tests.support.inside import InsideMode


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    attention.clear()
    yield
    attention.clear()


def copied(given: dict[str, Any]) -> dict[str, Any]:
    """The same arguments in memory of their own, strides included."""
    return {n: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) if isinstance(t, Tensor) else t for n, t in given.items()}


def outcome(given: dict[str, Any]) -> list[Tensor]:
    """out, lse and both caches after a call, which changes ``given`` as the door does."""
    return [*flash_attn_with_kvcache(**given, return_lse=True), given["k_cache"], given["v_cache"]]


def first(given: dict[str, Any]) -> list[Tensor]:
    """The outcome of a first call, of copies."""
    attention.clear()
    return outcome(copied(given))


def known(given: dict[str, Any]) -> list[Tensor]:
    """The outcome of a call that no check but the tables' is made for, of copies."""
    with mock.patch.object(kvcache, "cache_call", side_effect=AssertionError("not known")):
        return outcome(copied(given))


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return all(calls.same_bits(x, y) for x, y in zip(a, b, strict=True))


KNOWN = {
    "one each": Setting(),
    "all alike": Setting(cached=(30,) * 4),
    "alike in pages": Setting(cached=(30,) * 4, page_size=16),
    "pages of 1": Setting(page_size=1),
    "pages of 3, several": Setting(page_size=3, queries=(5,) * 4),
    "pages of 64": Setting(cached=(64, 63, 0, 66), queries=(3,) * 4, page_size=64, heads=(12, 4)),
    "padding": Setting(leftpad=(40, 0, 33, 5), queries=(4,) * 4, heads=(4, 1)),
    "padding in pages": Setting(leftpad=(17, 0, 32, 12), queries=(4,) * 4, page_size=16, dims=(33, 40)),
    "other rows": Setting(rows=(5, 0, 6, 2), queries=(3,) * 4, heads=(3, 3)),
    "more queries than new": Setting(queries=(5,) * 4, new=(2,) * 4),
    "more new than queries": Setting(queries=(2,) * 4, new=(6,) * 4, dims=(20, 12)),
    "nothing new": Setting(new=None),
    "no new row": Setting(queries=(1,) * 4, new=(0,) * 4, page_size=16),
    "no queries": Setting(queries=(0,) * 4, new=(2,) * 4),
    "empty": Setting(cached=(0, 0, 9, 0)),
    "long, in pages": Setting((3000, 1030, 0, 300), page_size=16, capacity=3100, heads=(8, 2)),
    "long, in pages, bfloat16": Setting((3000, 1030, 0, 300), page_size=16, capacity=3100, heads=(8, 2), dtype=torch.bfloat16),
    "long, in pages, float16": Setting((1500, 7, 300), (1,) * 3, page_size=64, capacity=1600, dtype=torch.float16),
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "plain": {},
    "window, softcap, sink, scale": {"window_size": (9, 0), "softcap": 3.0, "sink": torch.tensor([0.5, -1.0, 2.0]), "softmax_scale": 0.3},
    "splits": {"causal": True, "num_splits": 3},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("name", KNOWN)
def test_a_known_call_is_a_first_call(name: str, options: str) -> None:
    s = KNOWN[name]
    more = dict(OPTIONS[options])
    if "sink" in more:
        more["sink"] = more["sink"].repeat(4)[: s.heads[0]]
    outcome(arguments(s) | more)
    again = arguments(replace(s, seed=2)) | more
    warm = known(again)
    assert same(warm, first(again))
    flash_cache.check(s, flash_cache.RECIPES["causal"])  # known or not, it is what the reference says


@pytest.mark.parametrize("name", KNOWN)
def test_numbers_on_the_host_are_those_of_the_vectors(name: str) -> None:
    """Where a known call's rows are is what ``check_cache`` says, number for number, kept copies included."""
    given = arguments(KNOWN[name])
    asked = kvcache.CacheArguments(**dict.fromkeys(kvcache.CacheArguments._fields) | given)
    with torch.no_grad():
        want, _ = kvcache.decode_call(asked, Options(causal=True, num_splits=0), None)
        got, _ = kvcache.decode_call(asked, Options(causal=True, num_splits=0), None)
    assert isinstance(got, kvcache.KnownCall) and got.problem.sequences is not None and want.problem.sequences is not None
    for found in (got.problem.sequences, got.problem.sequences.kept()):
        assert found.on_host == want.problem.sequences.on_host and found.batch == want.problem.sequences.batch
        for field in OnHost._fields:
            assert calls.same_bits(getattr(found, field), getattr(want.problem.sequences, field)), field
        assert (found.page_table is None) == (want.problem.sequences.page_table is None) and found.is_cache
        assert found.most_q == want.problem.sequences.most_q
        assert found.page_size == want.problem.sequences.page_size and found.alike == want.problem.sequences.alike
    assert dict(vars(got.problem)).keys() >= {f.name for f in fields(Problem)}


def follows(given: dict[str, Any], change: Callable[[], Any], changes_facts: bool = False) -> None:
    """The call follows ``change``, a change in place of its arguments, without being told."""
    before = [outcome(copied(given)) for _ in range(2)][-1]
    change()
    warm = outcome(copied(given)) if changes_facts else known(given)
    assert same(warm, first(given)), "stale"
    assert not same(before, warm), "the change changes nothing: this test shows nothing"


def test_tables_changed_in_place() -> None:
    three_pages_each = Setting((40, 38, 33, 45), page_size=16)
    for s in (three_pages_each, Setting(rows=(5, 0, 6, 2)), Setting(leftpad=(4, 0, 3, 5))):
        given = arguments(s) | {"causal": True}
        follows(given, lambda given=given: given["cache_seqlens"].add_(1))
        follows(given, lambda given=given: np.copyto(given["cache_seqlens"].numpy(), 33))  # unseen by torch's counter of versions
        if s.page_size:
            follows(given, lambda given=given: given["page_table"].copy_(given["page_table"].flip(0)))
            follows(given, lambda given=given: np.copyto(given["page_table"].numpy()[0, :3], given["page_table"][0, [2, 0, 1]]))
        if s.rows:
            follows(given, lambda given=given: given["cache_batch_idx"].copy_(torch.tensor([6, 0, 5, 2])))
        if s.leftpad:
            follows(given, lambda given=given: given["cache_leftpad"].add_(1))


@pytest.mark.parametrize("page_size", [0, 16])
def test_lengths_of_every_size(page_size: int) -> None:
    """More lengths than plans are kept, on both sides of where one read of the keys becomes two; an int, and a tensor of one length."""
    given = arguments(Setting(cached=(1010,) * 2, queries=(1,) * 2, page_size=page_size, capacity=1056)) | {"causal": True}
    for t in ("k_cache", "v_cache"):
        given[t].nan_to_num_(0.5)
    if page_size:
        pages = torch.randperm(len(given["k_cache"]), generator=torch.Generator().manual_seed(0))
        given["page_table"] = pages[:132].view(2, 66).to(torch.int32)
    for length in (1010, 40, 41, 0, 255, 256, 257, 1022, 1023, 1024, 1025, 1040, 7, 1010):
        for lengths in (length, torch.full((2,), length)):
            given["cache_seqlens"] = lengths
            outcome(copied(given))
            warm = known(given)
            assert same(warm, first(given)), length
            outcome(copied(given))


def test_other_contents() -> None:
    given = arguments(Setting(page_size=16)) | {"causal": True, "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])}
    for name in ("q", "k", "v", "sink"):
        follows(given, lambda name=name: given[name].mul_(1.5))


def test_other_numbers_and_options() -> None:
    given = arguments(Setting(queries=(3,) * 4)) | {"softmax_scale": 0.3, "causal": True}
    for changes in (
        {"softmax_scale": 0.7}, {"softmax_scale": 1}, {"causal": False}, {"window_size": (4, 0)}, {"window_size": (4, 1)}, {"softcap": 2.0},
        {"num_splits": 3, "window_size": (3, 0)}, {"sink": torch.zeros(4)}, {"sink": None}, {"softmax_scale": None},
    ):  # fmt: skip
        follows(given, lambda changes=changes: given.update(changes), changes_facts=True)


def test_caches_of_other_strides_shapes_and_dtypes() -> None:
    """Each kind of cache is checked for itself, and a known kind is known again after another one."""
    s = Setting(page_size=16, heads=(4, 2))
    kinds: list[dict[str, Any]] = []
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        given = arguments(replace(s, dtype=dtype)) | {"causal": True}
        heads_first = {n: given[n].transpose(1, 2).contiguous().transpose(1, 2) for n in ("k_cache", "v_cache")}
        wide = {n: torch.cat([given[n], given[n]], 2)[:, :, :2] for n in ("k_cache", "v_cache")}
        larger = {n: torch.cat([given[n], given[n][:3]]) for n in ("k_cache", "v_cache")}
        kinds += [given, given | heads_first, given | wide, given | larger]
    want = [first(given) for given in kinds]
    for _ in range(2):
        found = [outcome(copied(given)) for given in kinds]
        assert all(same(a, b) for a, b in zip(found, want, strict=True))
    assert all(same(known(given), w) for given, w in zip(kinds, want, strict=True))


def test_a_cache_that_is_expanded_or_both_is_refused_again() -> None:
    given = arguments(GOOD)
    good = copied(given)
    outcome(good), outcome(good)
    before = given["k_cache"].clone()
    with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
        flash_attn_with_kvcache(**given | {"v_cache": given["k_cache"]})
    assert calls.same_bits(before, given["k_cache"])
    with pytest.raises(ValueError, match="its dimension 0 is expanded"):
        flash_attn_with_kvcache(**given | {"v_cache": given["v_cache"][:1].expand(4, -1, -1, -1)})
    assert calls.same_bits(before, given["k_cache"])


def test_caches_that_overlap_are_refused_and_those_that_interleave_are_not() -> None:
    """First calls and known ones alike: known are the facts of two caches that lie apart as the others do not."""
    given = arguments(GOOD)
    shape = given["k_cache"].shape
    pool = torch.zeros(2 * shape[0], 2, *shape[1:])
    apart = {"k_cache": pool[: shape[0], 0], "v_cache": pool[: shape[0], 1]}
    shifted = {"k_cache": pool[: shape[0], 0], "v_cache": pool[1 : shape[0] + 1, 0]}
    for _ in range(2):
        for name in ("k_cache", "v_cache"):
            apart[name].copy_(given[name])
        separate = flash_attn_with_kvcache(**copied(given))
        assert torch.equal(flash_attn_with_kvcache(**given | apart), separate)
        before = pool.clone()
        with pytest.raises(ValueError, match="k_cache and v_cache share memory"):
            flash_attn_with_kvcache(**given | shifted)
        assert calls.same_bits(before, pool)


def rows_of(cache: Tensor, like: Tensor) -> Tensor:
    """The first rows of a cache as an argument of ``like``'s shape and contents."""
    found = cache[: like.shape[0], : like.shape[1], :, : like.shape[3]]
    assert found.shape == like.shape
    return found


@pytest.mark.parametrize("page_size", [0, 16])
@pytest.mark.parametrize("cache", ["k_cache", "v_cache"])
@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_what_is_read_may_not_share_an_element_with_a_cache(name: str, cache: str, page_size: int) -> None:
    """First calls and known ones alike, before anything is written; with nothing to append nothing is written over what is read."""
    s = Setting(queries=(2,) * 4, heads=(2, 2), page_size=page_size)
    given = arguments(s)
    sharing = given | {name: rows_of(given[cache], given[name])}
    before = [given[n].clone() for n in ("k_cache", "v_cache")]
    for _ in range(2):
        attention.clear()
        for _ in range(2):
            words = rf"{cache} and {name} share memory .*{cache} is written before {name} is read; wanted .*{name}\.clone\(\)"
            with pytest.raises(ValueError, match=words):
                flash_attn_with_kvcache(**sharing)
            assert all(calls.same_bits(given[n], t) for n, t in zip(("k_cache", "v_cache"), before, strict=True))
            good = copied(sharing)  # of the same strides, so that the next call is a known one
            outcome(good), outcome(good)
    if name == "q":
        nothing = {"k": None, "v": None}
        assert calls.same_bits(flash_attn_with_kvcache(**sharing | nothing), flash_attn_with_kvcache(**copied(sharing) | nothing))


def test_what_is_read_may_interleave_with_a_cache_and_with_itself() -> None:
    """A buffer that holds everything, cut so that no element is in two; q, k and v may be views of the same rows."""
    s = Setting(queries=(2,) * 4, heads=(2, 2), dims=(8, 8))
    given = arguments(s)
    entries, capacity, heads, width = given["k_cache"].shape
    pool = torch.zeros(entries, capacity + 2, heads, 2, width)
    interleaved = {"k_cache": pool[:, :capacity, :, 0], "v_cache": pool[:, :capacity, :, 1]}
    interleaved |= {"k": pool[:4, capacity:, :, 0], "v": pool[:4, capacity:, :, 1], "q": pool[:4, capacity:, :, 0]}
    for _ in range(3):
        for name, view in interleaved.items():
            view.copy_(given[name])
        expected = flash_attn_with_kvcache(**copied(given | interleaved))
        assert torch.equal(flash_attn_with_kvcache(**given | interleaved), expected)


@pytest.mark.parametrize("name", BAD)
def test_a_known_call_refuses_what_a_first_call_refuses(name: str) -> None:
    """With the same words, before anything is written; known are the good arguments and, as far as they go, those of the bad call."""
    s, changes, error, words = BAD[name]
    good = {n: _good(n, t, arguments(s).get(n)) for n, t in changes.items()}
    for given in (arguments(s), arguments(s) | good):
        try:
            flash_attn_with_kvcache(**given)
            flash_attn_with_kvcache(**given)
        except (TypeError, ValueError):  # then there is nothing to know
            continue
    given = arguments(s) | changes
    before = {n: given[n].clone() for n in ("k_cache", "v_cache")}
    with pytest.raises(error, match=words) as warm:
        flash_attn_with_kvcache(**given)
    assert all(calls.same_bits(before[n], given[n]) for n in before)
    attention.clear()
    with pytest.raises(error) as cold:
        flash_attn_with_kvcache(**given)
    assert str(warm.value) == str(cold.value)


def _good(name: str, bad: Any, have: Any) -> Any:
    """An argument of the bad one's kind with nothing wrong in it."""
    if not isinstance(bad, Tensor) or name not in ("cache_seqlens", "cache_batch_idx", "cache_leftpad", "page_table"):
        return have
    if name == "page_table":
        return torch.arange(bad.numel()).view(bad.shape).to(bad.dtype)
    return torch.arange(len(bad)).to(bad.dtype)


def test_pages_of_a_sequence_whose_heads_see_other_keys() -> None:
    """Then each head is computed for itself, from its part of every page."""
    by_head = calls.Recipe(lambda t: {"mask_mod": lambda b, h, i, j: i - j < 100 * (h + 1)})
    for dtype in (torch.float32, torch.float16):
        flash_cache.check(Setting((1500, 700, 300), (2,) * 3, page_size=16, capacity=1600, heads=(6, 3), dtype=dtype), by_head)


def test_what_is_not_known_is_not_remembered() -> None:
    """Mods, rotary tables, ALiBi and packed queries go the long way; so does a call that something listens to."""
    table = torch.randn(80)
    given = arguments(GOOD)
    for more in (
        {"score_mod": lambda s, b, h, i, j: s + table[j]}, {"mask_mod": lambda b, h, i, j: i - j < 9}, {"alibi_slopes": torch.ones(4)},
        {"rotary_cos": torch.ones(90, 8), "rotary_sin": torch.ones(90, 8)},
    ):  # fmt: skip
        outcome(copied(given | more)), outcome(copied(given | more))
    outcome(arguments(replace(GOOD, packed=True)))
    assert attention.size() == 0
    with mock.patch.object(sequences, "skips_device_reads", lambda device, validate: True):  # as on a GPU, where no table is read
        outcome(copied(given)), outcome(copied(given))
    assert attention.size() == 0

    class Listens(InsideMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    with Listens():
        warm = outcome(copied(given))
    assert attention.size() == 0 and same(warm, first(given))


def test_in_inference_mode_and_out_of_it() -> None:
    given = arguments(GOOD) | {"causal": True}
    want = first(given)
    with torch.inference_mode():
        inside = [outcome(copied(given)) for _ in range(2)]
    assert all(same(want, found) for found in (*inside, known(given)))
