"""Replays of warm calls are to the bit what first calls of the same arguments are, in Triton's interpreter on the CPU.

Run by tests/backends/triton/test_in_the_interpreter.py. Tables are not read, as on a GPU.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.call_cache import attention
from anyattn.validate import sequences as check_lengths
from tests.entry_points import test_flash_cache as cache_tests
from tests.support import flash_calls as calls
from tests.support.flash_calls import RECIPES
from tests.support.replayed import decoded, noted_replays

TURNED = cache_tests.SETTINGS["turned"]
ONE_EACH = cache_tests.SETTINGS["one each"]
OPAQUE = ("bias_key", "bias_entry", *cache_tests.NEVER_BEFORE_KEY_0)  # mods that capture a dictionary have no signature
# every setting, and every recipe once
CASES = [(name, "causal") for name in cache_tests.SETTINGS if name != "no queries"]
CASES += [("one each", name) for name in RECIPES if name not in OPAQUE]


@pytest.fixture(autouse=True)
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(check_lengths, "skips_device_reads", lambda device, validate: validate is not True)
    attention.clear()
    yield
    attention.clear()


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    return noted_replays(monkeypatch)


def given(setting: cache_tests.Setting, recipe: str, seed: int) -> dict[str, Any]:
    """Arguments with tensors of their own for each seed; even seeds have the same dtypes."""
    s = replace(setting, seed=seed, page_seed=seed)
    tensors = RECIPES[recipe].draw(s.heads[0], len(s.cached), s.capacity + 8, s.dtype, seed)
    return cache_tests.arguments(s) | RECIPES[recipe].options({n: t.detach() for n, t in tensors.items()})


def same(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(calls.same_bits(x, y) and x.stride() == y.stride() for x, y in zip(a, b, strict=True))


def warm_and_first(make: Callable[[int], dict[str, Any]], **more: Any) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """The results of a call whose signature is known, and those that it has as a first call."""
    for seed in range(0, 14, 2):
        decoded(make(seed), **more)
    warm = decoded(make(14), **more)
    attention.clear()
    return warm, decoded(make(14), **more)


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize(("setting", "recipe"), CASES, ids=str)
def test_a_replay_is_a_first_call(setting: str, recipe: str, splits: int, replays: list[bool]) -> None:
    warm, first = warm_and_first(lambda seed: given(cache_tests.SETTINGS[setting], recipe, seed), num_splits=splits)
    assert same(warm, first)
    assert all(replays) and bool(replays)


def test_numbers_that_scale_an_8_bit_cache_are_replayed(replays: list[bool]) -> None:
    """They are tensors that outlive calls; others are other calls."""

    def make(seed: int) -> dict[str, Any]:
        found = given(replace(ONE_EACH, rotary_dim=0, new=None), "causal", seed)
        caches = {n: found[n].to(torch.float8_e5m2) for n in ("k_cache", "v_cache")}
        return found | caches | {"k_descale": 0.5, "v_descale": 2.0}

    warm, first = warm_and_first(make)
    assert same(warm[:2], first[:2]) and all(replays) and bool(replays)
    assert not same(decoded(make(14) | {"v_descale": 1.5})[:1], first[:1])


def with_mods(kind: str, seed: int) -> dict[str, Any]:
    """A call with mods that capture tensors and numbers of their own for each seed; a score's integers are those of ``seed % 3``."""
    g = torch.Generator().manual_seed(seed)
    seen, table = torch.rand(4, 99, generator=g) < 0.7, torch.randn(4, 99, generator=g)
    strength, shift = 0.5 + seed, 2 if seed % 3 else 1
    found: dict[str, dict[str, Any]] = {
        "mask": {"mask_mod": lambda b, h, i, j: seen[b, j]},
        "score": {"score_mod": lambda s, b, h, i, j: s + strength * table[h, j]},
        "both": {"score_mod": lambda s, b, h, i, j: s * strength, "mask_mod": lambda b, h, i, j: seen[b, j], "softcap": 3.0},
        "integers": {"score_mod": lambda s, b, h, i, j: s * shift + strength * table[h, j]},
        "aux": {"score_mod": lambda s, b, h, i, j, aux: s + aux[0][h, j], "aux_tensors": [table]},
        "scale": {"softmax_scale": 0.1 + seed / 10, "sink": torch.randn(4, generator=g)},
    }
    return given(TURNED if seed % 2 == 0 else ONE_EACH, "causal", seed) | found[kind]


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["mask", "score", "both", "integers", "aux", "scale"])
def test_values_that_mods_capture_are_the_calls_own(kind: str, splits: int, replays: list[bool]) -> None:
    for seed in range(0, 28, 2):
        arguments = with_mods(kind, seed)
        warm = decoded(arguments, num_splits=splits)
        if seed > 12:
            before = [*attention_state()]
            attention.clear()
            assert same(warm, decoded(arguments, num_splits=splits)), seed
            restore(before)
    assert replays.count(True) >= 5


def strided(kind: str, seed: int) -> dict[str, Any]:
    """A call some of whose tensors are parts of larger ones."""
    setting = cache_tests.SETTINGS["turned by halves, in part, in pages" if kind == "a wide page table" else "turned"]
    arguments = given(setting, "causal", seed)
    if kind == "a wide page table":
        table = torch.zeros(arguments["page_table"].shape[0], 30, dtype=torch.int64)
        table[:, : arguments["page_table"].shape[1]] = arguments["page_table"]
        return arguments | {"page_table": table[:, : arguments["page_table"].shape[1]]}
    if kind == "lengths in a column":
        lengths = torch.zeros(4, 2, dtype=torch.int32)
        lengths[:, 0] = arguments["cache_seqlens"]
        return arguments | {"cache_seqlens": lengths[:, 0]}
    together = torch.zeros(*arguments["q"].shape[:2], 8, 17)  # q, k and v of one projection, whose rows are not aligned
    together[..., :4, :16], together[..., 4:6, :16], together[..., 6:, :16] = (arguments[n] for n in ("q", "k", "v"))
    return arguments | {"q": together[..., :4, :16], "k": together[..., 4:6, :16], "v": together[..., 6:, :16]}


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["a wide page table", "lengths in a column", "one projection"])
def test_parts_of_larger_tensors(kind: str, splits: int, replays: list[bool]) -> None:
    warm, first = warm_and_first(lambda seed: strided(kind, seed), num_splits=splits)
    assert same(warm, first) and replays and all(replays)


def attention_state() -> list[dict]:
    from anyattn.call_cache.calls import _calls

    return [dict(_calls.young), dict(_calls.old)]


def restore(state: list[dict]) -> None:
    from anyattn.call_cache.calls import _calls

    _calls.young, _calls.old = state


def test_captured_values_that_are_written_are_read_anew(replays: list[bool]) -> None:
    seen, table = torch.ones(4, 99, dtype=torch.bool), torch.randn(4, 99)
    arguments = given(TURNED, "causal", 0)
    mods = {"mask_mod": lambda b, h, i, j: seen[b, j], "score_mod": lambda s, b, h, i, j: s + table[h, j]}
    before = [decoded(arguments, **mods) for _ in range(7)][-1]
    seen[:, ::2] = False
    table.mul_(3)
    arguments["cache_seqlens"].sub_(3)
    warm = decoded(arguments, **mods)
    assert replays == [True] * 3 and not same(warm, before)
    attention.clear()
    assert same(warm, decoded(arguments, **mods))


@pytest.mark.parametrize("splits", [1, 3])
def test_lengths_that_are_numbers(splits: int, replays: list[bool]) -> None:
    arguments = given(TURNED, "causal", 0)
    for length in (5, 9, 5, 40, 68, None):
        more = {"k": None, "v": None, "rotary_cos": None, "rotary_sin": None} if length is None else {}
        found = [decoded(arguments | more | {"cache_seqlens": length}, num_splits=splits) for _ in range(7)][-1]
        same_lengths = torch.full((4,), 72 if length is None else length)
        assert same(found, decoded(arguments | more | {"cache_seqlens": same_lengths}, num_splits=splits))
    assert len(replays) > 20 and all(replays)
    with pytest.raises(ValueError, match=r"cache_seqlens=73; wanted at most 72"):
        decoded(arguments | {"cache_seqlens": 73}, num_splits=splits)


def test_a_cache_that_grows_is_replayed_by_later_layers(replays: list[bool]) -> None:
    for rows in (40, 41, 42):
        for layer in range(9):
            g = torch.Generator().manual_seed(rows + layer)
            q, k, v = (torch.randn(2, n, h, 16, generator=g) for n, h in ((1, 4), (rows, 2), (rows, 2)))
            arguments = {"q": q, "k_cache": k, "v_cache": v, "causal": True}
            found = decoded(arguments)
        before = attention_state()
        attention.clear()
        assert same(found, decoded(arguments))
        restore(before)
    assert len(replays) >= 3 * 2 and all(replays)


def test_tensors_at_one_address_that_are_apart_later(replays: list[bool]) -> None:
    """Which of them a launch was passed is not known."""
    arguments = given(replace(ONE_EACH, new=None), "causal", 0)
    arguments["cache_leftpad"] = arguments["cache_seqlens"].clone()
    shared = arguments | {"cache_leftpad": arguments["cache_seqlens"]}
    for _ in range(6):
        together = anyattn.flash_attn_with_kvcache(**shared, backend="triton")
    assert replays == [True]
    apart = anyattn.flash_attn_with_kvcache(**arguments, backend="triton")
    assert replays == [True, False]
    assert torch.equal(anyattn.flash_attn_with_kvcache(**shared, backend="triton"), together)
    attention.clear()
    assert torch.equal(apart, anyattn.flash_attn_with_kvcache(**arguments, backend="triton"))


def test_scales_beyond_the_ordinary(replays: list[bool]) -> None:
    arguments = given(TURNED, "causal", 0)
    for _ in range(6):
        decoded(arguments, softmax_scale=0.3)
    count = len(replays)
    for scale in (0.0, -0.3, 1e-35, 1e32):
        warm = decoded(arguments, softmax_scale=scale)
        attention.clear()
        assert same(warm, decoded(arguments, softmax_scale=scale))
    assert len(replays) == count > 0


def test_what_is_read_may_not_share_an_element_with_a_cache() -> None:
    arguments = given(TURNED, "causal", 0)
    for _ in range(7):
        decoded(arguments)
    pool = torch.zeros(4, 72 + 4, 2, 16)
    arguments |= {"k_cache": pool[:, :72], "k": pool[:, 40:44]}
    for _ in range(7):
        with pytest.raises(ValueError, match=r"k_cache and k share memory .*k\.clone\(\)"):
            anyattn.flash_attn_with_kvcache(**arguments, backend="triton")
    for _ in range(7):
        anyattn.flash_attn_with_kvcache(**arguments | {"k": pool[:, 72:]}, backend="triton")


@pytest.mark.parametrize("name", ["q", "k_cache", "v", "rotary_cos", "sink"])
def test_a_tensor_that_requires_grad_is_refused_in_grad_mode_alone(name: str) -> None:
    arguments = given(TURNED, "sink", 0)
    for _ in range(7):
        decoded(arguments)
    wanting = arguments | {name: arguments[name].clone().requires_grad_()}
    for _ in range(7):
        with torch.no_grad():
            decoded(wanting)
        with pytest.raises(ValueError, match=f"{name} requires grad"):
            anyattn.flash_attn_with_kvcache(**wanting, backend="triton")


def test_a_profiler_has_the_names_of_calls(replays: list[bool]) -> None:
    arguments = given(TURNED, "causal", 0)
    for _ in range(7):
        decoded(arguments)
    count = len(replays)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        decoded(arguments)
    assert len(replays) == count > 0
    assert "anyattn::attention (triton)" in [event.key for event in profile.key_averages()]


def test_nothing_is_kept_alive() -> None:
    gc.collect()
    gc.disable()
    try:
        for seed in range(0, 16, 2):
            arguments = with_mods("both", seed)
            results = decoded(arguments)
            dead = [weakref.ref(t) for t in (*arguments.values(), *results) if isinstance(t, Tensor) or callable(t)]
            del arguments, results
            assert not any(ref() is not None for ref in dead), seed
    finally:
        gc.enable()


# ---- flash_attn_varlen_func


def packed(lengths: tuple[int, ...], seed: int, heads: tuple[int, int] = (4, 2)) -> dict[str, Any]:
    """A batch of sequences of these lengths, with rows of no sequence behind them."""
    g = torch.Generator().manual_seed(seed)
    rows = sum(lengths) + 3
    q, k, v = (torch.randn(rows, h, 16, generator=g) for h in (heads[0], heads[1], heads[1]))
    ends = torch.tensor((0, *lengths)).cumsum(0).int()
    return {"q": q, "k": k, "v": v, "cu_seqlens_q": ends, "cu_seqlens_k": ends.clone(), "max_seqlen_q": 40, "max_seqlen_k": 40}


def attended(arguments: dict[str, Any], **more: Any) -> tuple[Tensor, ...]:
    return anyattn.flash_attn_varlen_func(**{"backend": "triton", "causal": True, "return_lse": True, **arguments, **more})


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("kind", ["causal", "window", "score", "sink", "pages"])
def test_varlen(kind: str, splits: int, replays: list[bool]) -> None:
    """The lengths are in tables, which a replay reads anew."""
    batches = ((20, 7, 33), (33, 20, 7), (1, 40, 19), (0, 30, 30))

    def arguments(seed: int) -> dict[str, Any]:
        g = torch.Generator().manual_seed(seed)
        table, strength = torch.randn(4, 50, generator=g), 0.5 + seed
        found = packed(batches[seed % len(batches)], seed)
        if kind == "score":  # with other lengths of keys the offset of causality would be computed anew
            found["cu_seqlens_k"] = found["cu_seqlens_q"]
        if kind == "pages":
            pool = {n: torch.randn(12, 16, 2, 16, generator=g) for n in ("k", "v")}
            lengths = torch.tensor(batches[seed % len(batches)], dtype=torch.int32)
            pages = torch.randperm(12, generator=g)[:9].view(3, 3).int()
            return found | pool | {"cu_seqlens_k": None, "max_seqlen_k": None, "seqused_k": lengths, "page_table": pages}
        more: dict[str, dict[str, Any]] = {
            "window": {"window_size": (9, 2), "softcap": 4.0},
                "sink": {"sink": torch.randn(4, generator=g), "softmax_scale": 0.1 * strength},
            "score": {"score_mod": lambda s, b, h, i, j: s * strength + table[h, j], "alibi_slopes": table[:, 0].abs().contiguous()},
        }  # fmt: skip
        return found | more.get(kind, {})

    for seed in range(12):
        warm = attended(arguments(seed), num_splits=splits)
    state = attention_state()
    attention.clear()
    assert same(warm, attended(arguments(11), num_splits=splits))
    restore(state)
    assert len(replays) >= 4 and all(replays)


def test_varlen_of_other_sizes(replays: list[bool]) -> None:
    """The signature by which calls are planned is that of other numbers of rows too; replays are not."""
    for turn in range(3):
        for lengths in ((20, 7, 33), (20, 7, 34), (25, 25, 25)):
            for layer in range(7):
                arguments = packed(lengths, layer + turn)
                warm = attended(arguments)
            state = attention_state()
            attention.clear()
            assert same(warm, attended(arguments))
            restore(state)
    assert len(replays) > 3 * 7 and all(replays)


def test_varlen_after_many_batches_of_other_sizes(replays: list[bool], monkeypatch: pytest.MonkeyPatch) -> None:
    """No exact signature is made where none would be found; calls of equal sizes are found out, and replayed."""
    monkeypatch.setattr(attention, "_MANY_UNKNOWN", 4)
    monkeypatch.setattr(attention, "_sizes", attention._Sizes())
    made = []
    exact = attention.exact_signature
    monkeypatch.setattr(attention, "exact_signature", lambda *given: (made.append(1), exact(*given))[1])
    for rows in range(12):
        attended(packed((20, 7, 20 + rows), rows))
    assert len(made) == 5 and not replays
    for seed in range(9):
        arguments = packed((20, 7, 33), seed)
        warm = attended(arguments)
    assert len(replays) >= 2 and all(replays)
    attention.clear()
    assert same(warm, attended(arguments))


def test_varlen_with_gradients_is_not_replayed(replays: list[bool]) -> None:
    for _ in range(9):
        arguments = packed((20, 7, 33), 0)
        arguments["q"].requires_grad_()
        out, _ = attended(arguments)
        out.sum().backward()
        assert arguments["q"].grad is not None
    assert not replays
    for _ in range(9):
        with torch.no_grad():
            attended(arguments)
    assert len(replays) > 2 and all(replays)


def test_tables_at_other_alignments(replays: list[bool]) -> None:
    arguments = packed((20, 7, 33), 0)
    for shift in (0, 1, 2, 4):
        ends = torch.zeros(12, dtype=torch.int32)
        ends[shift : shift + 4] = arguments["cu_seqlens_q"]
        found = [attended(arguments | {"cu_seqlens_q": ends[shift : shift + 4]}) for _ in range(8)][-1]
        assert same(found, attended(arguments))
    assert all(replays)
