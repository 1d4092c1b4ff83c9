"""Decoding of wide heads by the Hopper kernel, on a pretended GPU: which calls it takes, its splits, what is launched, and replays."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

import anyattn
from anyattn import planner
from anyattn.backends.hopper import api
from anyattn.backends.hopper.config import Config, tiles_for
from anyattn.backends.hopper.make_config import forward_spec
from anyattn.backends.hopper.pack_gqa import groups_of
from anyattn.backends.hopper.plan import reason_against
from anyattn.backends.hopper.split_keys import reason_against_splits
from anyattn.call_cache import kvcache_step
from anyattn.plan import Plan
from anyattn.validate import flash
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments, with_values
from tests.backends.hopper.test_gathered_keys import kinds_of, made
from tests.support.hopper.pretended import H200, Launch, described
from tests.support.no_reading import no_reading
from tests.support.replayed import replayed_and_first

if importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs nvidia-cutlass-dsl and triton", allow_module_level=True)

__all__ = ["made"]  # a fixture

BF16 = torch.bfloat16
SLOWER = planner._slower


@pytest.fixture(autouse=True)
def of_an_h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "multiprocessors", lambda _: H200.sm_count)


@pytest.fixture
def chosen(made: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that Triton computes in less time are Triton's."""
    monkeypatch.setattr(planner, "_slower", SLOWER)


@dataclass(frozen=True)
class Call:
    """A call of ``flash_attn_with_kvcache`` over one K/V head. Nothing is in its memory but one row. new: rows that are appended."""

    batch: int = 32
    queries: int = 1
    heads: int = 128
    keys: int = 8192  # that an entry's pages or row have room for
    page_size: int = 64
    dims: tuple[int, int] = (576, 512)
    has_one_kv: bool = True
    new: int = 0
    is_packed: bool = False
    options: tuple[tuple[str, Any], ...] = (("causal", True),)

    def arguments(self) -> dict[str, Any]:
        d, dv = self.dims
        rows = (self.batch * self.keys // self.page_size, self.page_size) if self.page_size else (self.batch, self.keys)
        shape, strides = (*rows, 1, d), (0, 0, d, 1) if not self.new else None
        k = torch.zeros(d, dtype=BF16).as_strided(shape, strides) if strides else torch.zeros(shape, dtype=BF16)
        v = k[..., :dv] if self.has_one_kv else torch.zeros(dv, dtype=BF16).as_strided((*rows, 1, dv), (0, 0, dv, 1))
        q_shape = (self.batch * self.queries,) if self.is_packed else (self.batch, self.queries)
        found: dict[str, Any] = {"q": torch.zeros(*q_shape, self.heads, d, dtype=BF16), "k_cache": k, "v_cache": v}
        found["cache_seqlens"] = torch.full((self.batch,), self.keys - self.new, dtype=torch.int32)
        if self.page_size:
            found["page_table"] = torch.arange(rows[0], dtype=torch.int32).view(self.batch, -1)
        if self.new:
            found["k"] = torch.zeros(self.batch, self.new, 1, d, dtype=BF16)
        if self.is_packed:
            found |= {"cu_seqlens_q": torch.arange(self.batch + 1, dtype=torch.int32) * self.queries, "max_seqlen_q": self.queries}
        return found | dict(self.options)

    def run(self, **more: Any) -> Any:
        with torch.no_grad():
            return anyattn.flash_attn_with_kvcache(**self.arguments() | more)

    def plan(self, backend: str | None = None) -> Plan:
        given = self.arguments()
        arguments = with_values(CacheArguments(**{name: given.pop(name, default) for name, default in _DEFAULTS.items()}))
        found = kvcache_step.step_call(arguments, Options(**{"num_splits": 0, **given}), backend, True)
        assert found is not None
        return found[1]


_DEFAULTS = {name: CacheArguments._field_defaults.get(name) for name in CacheArguments._fields}
WINDOW = (("window_size", (100, 0)),)
TAKEN = {  # the number of splits
    "128 heads": (Call(), 2),
    "a contiguous cache": (Call(page_size=0), 2),
    "pages of 16": (Call(page_size=16), 2),
    "pages of 256": (Call(page_size=256), 2),
    "many entries": (Call(batch=66), 1),
    "few entries": (Call(batch=8, keys=32_768), 8),
    "one entry": (Call(batch=1, keys=65_536), 64),
    "64 heads": (Call(heads=64), 4),
    "16 heads": (Call(heads=16), 4),
    "32 heads": (Call(heads=32), 4),
    "few keys": (Call(keys=512), 2),
    "512 dimensions": (Call(dims=(512, 512)), 2),
    "three tokens": (Call(queries=3), 2),
    "packed queries": (Call(is_packed=True), 2),
    "appending": (Call(new=1, batch=4, keys=16_384), 16),
    "a window": (Call(options=WINDOW), 1),
    "no mask": (Call(options=()), 2),
    "asked for 1": (Call(options=(("num_splits", 1),)), 1),
    "asked for 3": (Call(options=(("num_splits", 3),)), 3),
    "asked for more than there are tiles": (Call(options=(("num_splits", 200),)), 200),
    "a softcap": (Call(options=(("softcap", 20.0),)), 2),
}
LEFT = {
    "slopes of each head": (Call(options=(("causal", True), ("alibi_slopes", torch.rand(128)))), "8 of the 64 rows"),
    "heads apart": (Call(options=(("causal", True), ("pack_gqa", False))), "1 of the 64 rows"),
    "two caches": (Call(has_one_kv=False), "values apart from keys"),
    "odd pages": (Call(page_size=1, keys=64), "pages of an even number of rows, not 1"),
    "narrow heads": (Call(dims=(256, 256)), "split keys and caches that grow"),
    "padding": (Call(page_size=0, options=(("cache_leftpad", torch.zeros(32, dtype=torch.int32)),)), "few queries read them faster"),
    "rows of a cache": (Call(page_size=0, options=(("cache_batch_idx", torch.arange(32)),)), "few queries read them faster"),
    "too few keys": (Call(keys=64), "64 tiles of scores take about as long as the launches"),
    "every batch": (Call(options=(("deterministic", "batch"),)), 'deterministic="batch"'),
}


@pytest.mark.parametrize("name", TAKEN)
def test_taken(name: str, chosen: None) -> None:
    call, splits = TAKEN[name]
    plan = call.plan()
    assert (plan.backend, plan.gathers, plan.num_splits) == ("hopper", True, splits), plan.why
    text = "; ".join(plan.why)
    assert (f"keys in {splits} pieces: for 132 multiprocessors; combined by triton" in text) is (splits > 1)
    assert "heads that share K and V share a row tile" in text


@pytest.mark.parametrize("name", LEFT)
def test_left_to_triton(name: str, chosen: None) -> None:
    call, why = LEFT[name]
    plan = call.plan()
    assert plan.backend == "triton" and not plan.gathers and why in plan.why[0], plan.why


def test_a_named_backend(made: list[Launch]) -> None:
    assert Call(keys=64).plan("hopper").backend == "hopper" and Call().plan("triton").backend == "triton"


def test_splits_have_reasons_against_them(made: list[Launch]) -> None:
    def sequences(**options: Any) -> Any:
        k, ends = torch.zeros(300, 1, 576, dtype=BF16), torch.tensor([0, 300], dtype=torch.int32)
        q = torch.zeros(300, 128, 576, dtype=BF16)
        return flash.varlen_problem(q, k, k[..., :512], ends, ends, 300, 300, None, None, None, None, Options(num_splits=2, **options))

    assert reason_against(sequences()) is None
    listed = sequences(mask_mod=lambda b, h, i, j: (i * j) % 7 != 3)
    assert "by lists of tiles" in str(reason_against_splits(listed)) and "by lists of tiles" in str(reason_against(listed))
    assert "sequences that have tables" in str(reason_against(sequences().like(sequences=None)))
    assert "highest scores" in str(reason_against(sequences().like(wants_max=True)))


def config(**changes: Any) -> Config:
    fields = {"heads_per_tile": 128, "pairs": True, "has_entries": True, "has_order": True, "spread": "heads", "has_lse": True, **changes}
    return Config(576, 512, True, tiles_for(576, 512, None, has_one_kv=True), has_one_kv=True, **fields)


def test_a_config_judges_itself() -> None:
    pair = config(is_split=True)
    assert (pair.own_heads, pair.own_q, pair.tile_q, pair.divides_heads) == (64, 1, 1, True)
    of_rows = config(heads_per_tile=64)
    assert (of_rows.own_heads, of_rows.own_q, of_rows.tile_q, of_rows.divides_heads) == (64, 1, 2, False)
    for wrong, words in (
        ({"pairs": False}, "heads_per_tile=128"),
        ({"heads_per_tile": 24}, "heads_per_tile=24"),
        ({"is_split": True, "has_sink": True}, "is_split; wanted"),
        ({"is_split": True, "has_lse": False}, "is_split; wanted"),
        ({"is_split": True, "has_entries": False}, "is_split; wanted"),
    ):
        with pytest.raises(ValueError, match=words):
            config(**wrong)


@pytest.mark.parametrize("heads,packed,pairs", [(128, 128, True), (64, 64, False), (100, 128, True), (130, 64, False), (256, 128, True)])
def test_heads_fill_row_tiles(heads: int, packed: int, pairs: bool, made: list[Launch]) -> None:
    """Every group of heads that two thread blocks share has some for both: none of them may have an empty tile."""
    Call(heads=heads).run()
    found, arguments = next((c, given) for c, given in made if isinstance(c, Config))
    assert (found.heads_per_tile, found.pairs, found.tile_q) == (packed, pairs, 1)
    spread = arguments[-5]
    assert spread % groups_of(heads, packed) == 0


def test_mods_of_each_head_share_tiles_of_few(made: list[Launch]) -> None:
    slopes = torch.rand(128)
    q, k = torch.zeros(2, 1, 128, 576, dtype=BF16), torch.zeros(2, 200, 1, 576, dtype=BF16)
    used = torch.tensor([100, 200], dtype=torch.int32)
    for score, packed in ((lambda s, b, h, i, j: s + slopes[h] * j, 8), (lambda s, b, h, i, j: s + 0.1 * j, 128)):
        p = flash.varlen_problem(q, k, k[..., :512], None, None, None, None, None, used, None, None, Options(score_mod=score))
        assert forward_spec(p).config.heads_per_tile == packed


WITH_TABLES = ["packed queries", "three tokens", "asked for 3"]
LAUNCHED = ["128 heads", "a contiguous cache", "packed queries", "three tokens", "appending", "a window", "asked for 3"]


@pytest.mark.parametrize("name", LAUNCHED)
def test_launches(name: str, made: list[Launch]) -> None:
    """No table is read. Keys are read where they are; each split has results of its own, which one more launch combines."""
    call = TAKEN[name][0]
    splits = call.plan().num_splits
    sink = torch.rand(call.heads)
    for _ in range(3):
        made.clear()
        with no_reading():
            call.run(sink=sink)
        appends = ["cache_step", "grown_lengths"] if call.new else []
        has_tables = ["tables"] if name in WITH_TABLES else []
        assert kinds_of(made) == [*appends, *has_tables, "attention", *(["combine_row"] if splits > 1 else [])]
    found, given = next((c, given) for c, given in made if isinstance(c, Config))
    q, k, v, out, lse, highest, in_kernel = given[:7]
    assert (found.is_split, found.has_sink, in_kernel is None) == (splits > 1, splits == 1, splits > 1)
    assert highest is None and k.data_ptr() == v.data_ptr() and found.has_one_kv and found.is_paged is (call.page_size > 0)
    if splits > 1:
        rows = (splits * q.shape[0], *q.shape[1:3])
        assert out.shape == (*rows, 512) and out.is_contiguous() and out.dtype is torch.float32 and lse.shape == rows
        assert given[-5] == splits * groups_of(call.heads, found.heads_per_tile)
        if call.is_packed:  # rows behind the last sequence's are no split's
            assert bool((lse == torch.inf).all())


@pytest.mark.parametrize("name", ["128 heads", "a contiguous cache", "a window", "appending"])
def test_replays(name: str, made: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    call = TAKEN[name][0]

    def launches(number: int) -> list[Any]:
        made.clear()
        arguments = call.arguments() | {"return_lse": True}
        with torch.no_grad():
            return described(made, arguments, anyattn.flash_attn_with_kvcache(**arguments))

    warm, first = replayed_and_first(launches, range(12), 12, monkeypatch)
    assert warm == first


def test_values_are_told_from_columns_of_keys_at_every_call(made: list[Launch]) -> None:
    """The signature of a cache that may grow has no strides: values that begin where keys do may have rows of their own."""
    call = Call(page_size=0)
    memory = torch.zeros(call.batch * call.keys * 576, dtype=BF16)
    k = memory.view(call.batch, call.keys, 1, 576)
    apart = memory[: call.batch * call.keys * 512].view(call.batch, call.keys, 1, 512)
    for v, is_one in ((k[..., :512], True), (apart, False), (apart, False), (k[..., :512], True)):
        made.clear()
        call.run(k_cache=k, v_cache=v, backend="hopper")
        assert [config.has_one_kv for config, _ in made if isinstance(config, Config)] == [is_one]


@pytest.mark.parametrize("name", ["a contiguous cache", "128 heads", "16 heads", "a window", "appending", "one entry", "many entries"])
def test_few_entries_need_no_tables(name: str, made: list[Launch]) -> None:
    """Where all work items run at once the kernel reads the numbers of keys itself."""
    call, splits = TAKEN[name]
    for _ in range(2):
        made.clear()
        call.run()
        assert kinds_of(made)[-2 if splits > 1 else -1] == "attention" and "tables" not in kinds_of(made)
    found, given = next((c, given) for c, given in made if isinstance(c, Config))
    assert found.has_entries and not found.has_order and given[11] is None
    assert given[12].shape == (call.batch,) and given[-6:-4] == (call.batch, splits * groups_of(call.heads, found.heads_per_tile))


@pytest.mark.parametrize("changes", [{"batch": 200}, {"is_packed": True}, {"queries": 20}], ids=str)
def test_other_batches_have_tables(changes: dict[str, Any], made: list[Launch]) -> None:
    """More work items than thread blocks, which take the longest first; rows of other entries in one row of storage; several row tiles."""
    replace(TAKEN["16 heads"][0], **changes).run()
    assert kinds_of(made)[:2] == ["tables", "attention"]
    assert all(c.has_order for c, _ in made if isinstance(c, Config))
