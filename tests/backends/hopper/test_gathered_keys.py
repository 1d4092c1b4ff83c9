"""Prefill from caches of 8 bits and from pages, on a pretended Hopper GPU: when keys are gathered, what is launched, and replays."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, planner
from anyattn.backends.hopper.compile import launch as hopper_launch
from anyattn.backends.hopper.tables_config import TablesConfig
from anyattn.call_cache import kvcache_step
from anyattn.plan import Plan
from anyattn.triton_tools import launch as triton_launch
from anyattn.triton_tools.fast_launch import Handle
from anyattn.validate import flash
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments
from tests.support.compiling import fresh
from tests.support.hopper.pretended import H200, Launch, count_in_one_tensor, described, noting
from tests.support.no_reading import no_reading, pretend_unread
from tests.support.replayed import replayed_and_first

if importlib.util.find_spec("cutlass") is None or importlib.util.find_spec("triton") is None:
    pytest.skip("needs nvidia-cutlass-dsl and triton", allow_module_level=True)

E4M3, BF16, FP16 = torch.float8_e4m3fn, torch.bfloat16, torch.float16


@pytest.fixture
def made(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, tuple]]:
    """(a Hopper kernel's config or a Triton kernel's name, arguments) of every launch."""
    found: list[tuple[Any, tuple]] = []

    def noted(kernel: Any, grid: Any, given: Any, *others: Any) -> Handle:
        def send(grid: Any, given: Any) -> None:
            found.append((kernel.fn.__name__, tuple(given)))

        send(grid, given)
        return Handle(send)

    pretend_unread(monkeypatch, H200)
    count_in_one_tensor(monkeypatch)
    monkeypatch.setattr(triton_launch, "_launched", noted)
    monkeypatch.setattr(hopper_launch, "_found_or_made", lambda config, kinds: noting(found, config, kinds))
    return found


def kinds_of(launches: list[tuple[Any, tuple]]) -> list[str]:
    return [what if isinstance(what, str) else "tables" if isinstance(what, TablesConfig) else "attention" for what, _ in launches]


@dataclass(frozen=True)
class Call:
    """A call of ``flash_attn_with_kvcache``, or ``flash_attn_varlen_func`` if ``is_varlen``. Nothing is in its memory but one number."""

    dtype: torch.dtype = E4M3
    q_dtype: torch.dtype = BF16
    is_varlen: bool = False
    batch: int = 4
    queries: int = 512
    keys: int = 1024  # that an entry's pages or row have room for
    page_size: int = 16
    heads: tuple[int, int] = (12, 2)
    d: int = 64
    form: str = "none"
    is_packed: bool = False
    options: tuple[tuple[str, Any], ...] = (("causal", True),)

    def arguments(self) -> dict[str, Any]:
        rows = (self.batch * self.keys // self.page_size, self.page_size) if self.page_size else (self.batch, self.keys)
        shape = (*rows, self.heads[1], self.d)
        strides = (0, 0, self.d + 8, 1) if self.form == "inline" else (0, 0, self.d, 1)
        memory = torch.zeros(2, self.heads[1] * (self.d + 8), dtype=self.dtype)
        caches = [m.as_strided(shape, strides) for m in memory]
        q_shape = (self.batch * self.queries,) if self.is_packed else (self.batch, self.queries)
        q = torch.zeros(self.heads[0] * self.d, dtype=self.q_dtype).view(self.heads[0], self.d).expand(*q_shape, self.heads[0], self.d)
        used = torch.full((self.batch,), self.keys, dtype=torch.int32)
        places: dict[str, Any] = {"seqused_k" if self.is_varlen else "cache_seqlens": used}
        if self.is_packed:
            places["cu_seqlens_q"] = torch.arange(self.batch + 1, dtype=torch.int32) * self.queries
            places["max_seqlen_q"] = self.queries
        if self.page_size:
            places["page_table"] = torch.arange(rows[0], dtype=torch.int32).view(self.batch, -1)
        scale = {"head": torch.ones(self.batch, self.heads[1]), "key": torch.ones(1, 1, 1).expand(shape[:3]), "number": 0.5}.get(self.form)
        scales = {} if scale is None else {"k_descale": scale, "v_descale": scale}
        return {"q": q, "k": caches[0], "v": caches[1], **places, **scales, **dict(self.options)}

    def run(self, **more: Any) -> Any:
        arguments = self.arguments() | more
        if not self.is_varlen:
            arguments = {{"k": "k_cache", "v": "v_cache"}.get(name, name): x for name, x in arguments.items()}
        return (anyattn.flash_attn_varlen_func if self.is_varlen else anyattn.flash_attn_with_kvcache)(**arguments)

    def plan(self, backend: str | None = None) -> Plan:
        a = self.arguments()
        names = {"seqused_k", "cache_seqlens", "page_table", "cu_seqlens_q", "max_seqlen_q"}
        q, k, v = a.pop("q"), a.pop("k"), a.pop("v")
        places = {name: a.pop(name) for name in names & a.keys()}
        if not self.is_varlen:
            arguments = CacheArguments(q, k, v, **places)
            found = kvcache_step.step_call(arguments, Options(**{"num_splits": 0, **a}), backend, True)
            assert found is not None
            return found[1]
        tables = (places.get("cu_seqlens_q"), None, places.get("max_seqlen_q"), None, None, places["seqused_k"], places.get("page_table"))
        return planner.planned(flash.varlen_problem(q, k, v, *tables, None, Options(**a)), backend)


WINDOW = (("window_size", (100, 0)),)
GATHERED = {
    "8 bits in pages": Call(),
    "8 bits in rows": Call(page_size=0),
    "with scales": Call(form="head"),
    "with a number": Call(form="number"),
    "with scales of keys": Call(form="key"),
    "packed queries": Call(is_packed=True),
    "float16": Call(q_dtype=FP16),
    "scales of keys and float16": Call(q_dtype=FP16, options=(("causal", True), ("k_descale", torch.ones(4, 2)))),
    "int8": Call(dtype=torch.int8),
    "16 bits in pages": Call(dtype=BF16),
    "16 bits in large pages": Call(dtype=BF16, page_size=128),
    "varlen": Call(is_varlen=True),
    "varlen, packed": Call(is_varlen=True, is_packed=True, form="head"),
    "few queries of many keys": Call(queries=128, keys=16_384, batch=12),
    "a window over few keys": Call(options=WINDOW),
    "any mask": Call(options=(("mask_mod", lambda b, h, i, j: (i - j) % 7 != 3),)),
    "a score mod": Call(options=(("causal", True), ("score_mod", lambda s, b, h, i, j: s + 0.1 * (i - j)))),
    "no mask": Call(options=()),
}
READ_IN_PLACE = {
    "decoding": (Call(queries=1), "few queries read them faster"),
    "few queries": (Call(queries=100, batch=20), "from 128 queries"),
    "few tiles of rows": (Call(queries=1024, batch=1), "if they fill all multiprocessors"),
    "a window over many keys": (Call(keys=16_384, options=WINDOW, queries=256, batch=8), "few keys are hidden"),
    "any mask over many keys": (
        Call(keys=16_384, queries=256, batch=8, options=(("mask_mod", masks.sink_window(4, 99)),)),
        "few keys are hidden",
    ),
    "scales and float16": (Call(form="head", q_dtype=FP16), "out of float16's range"),
    "too large": (Call(keys=2**18, queries=2048, batch=16), "a copy may have 2048 MiB; 1024 are allowed"),
    "float32": (Call(q_dtype=torch.float32), "no products of 16 bits"),
    "split keys": (Call(options=(("num_splits", 3),)), "split keys"),
    "decoding from pages of 16 bits": (Call(dtype=BF16, queries=1), "split keys and caches"),
}


@pytest.mark.parametrize("name", GATHERED)
def test_gathered(name: str, made: list[Any]) -> None:
    plan = GATHERED[name].plan()
    assert plan.backend == "hopper" and plan.gathers
    what = "gathered" if GATHERED[name].dtype is BF16 else "converted to "
    assert f"keys and values are {what}" in plan.why[1] and "first, by triton: at most" in plan.why[1]
    assert not any("backward" in why for why in plan.why)


@pytest.mark.parametrize("name", READ_IN_PLACE)
def test_read_in_place(name: str, made: list[Any]) -> None:
    call, why = READ_IN_PLACE[name]
    plan = call.plan()
    assert plan.backend == "triton" and not plan.gathers
    assert why in plan.why[0]


@pytest.mark.parametrize("options", [(("causal", True),), WINDOW, ()])
def test_rows_of_16_bits_are_read_where_they_are(options: Any, made: list[Any]) -> None:
    call = Call(dtype=BF16, page_size=0, keys=16_384, queries=256, batch=8, options=options)
    plan = call.plan()
    assert plan.backend == "hopper" and plan.gathers and "first" not in "".join(plan.why)
    with no_reading():
        call.run()
    assert kinds_of(made) == ["tables", "attention"]
    assert Call(dtype=BF16, page_size=0, queries=1).plan().backend == "triton"


def test_varlen_pages_of_16_bits_are_hoppers_own(made: list[Any]) -> None:
    plan = Call(dtype=BF16, is_varlen=True).plan()
    assert plan.backend == "hopper" and not plan.gathers


def test_a_named_backend(made: list[Any]) -> None:
    assert not Call().plan("triton").gathers
    assert Call(queries=20).plan("hopper").gathers
    with pytest.raises(anyattn.BackendError, match=r"k and v have 8 bits.*they are not converted first: values times their scales"):
        Call(form="head", q_dtype=FP16).plan("hopper")


@pytest.mark.parametrize("name", sorted(GATHERED.keys() - {"any mask"}))  # whose lists a kernel makes
def test_launches(name: str, made: list[Any]) -> None:
    """Nothing is read. Hopper's kernel gets contiguous keys in the queries' dtype, one line for each entry."""
    call = GATHERED[name]
    for _ in range(3):
        made.clear()
        with no_reading(), torch.no_grad():
            call.run()
        names = [n for n in kinds_of(made) if n in ("gather_keys", "attention")]
        assert names == ["gather_keys", "attention"]
    q, k, v = made[-1][1][:3]
    shape = (call.batch, call.heads[1], call.keys, call.d)
    assert k.dtype is v.dtype is q.dtype is call.q_dtype and k.shape == v.shape == shape
    config = made[-1][0]
    assert k.transpose(1, 2).is_contiguous() and not config.is_paged and config.lists is None
    assert bool(config.bands) is (name != "no mask") and not config.always  # a cache's rows begin behind keys: a band all the same


def test_the_sizes_of_a_varlen_call_decide(made: list[Any]) -> None:
    """Sizes of which a warm call's signature has few."""
    for _ in range(2):
        for keys in (1024, 16_384):
            made.clear()
            Call(is_varlen=True, queries=256, batch=8, keys=keys, options=WINDOW).run()
            assert ("gather_keys" in kinds_of(made)) is (keys == 1024)


LSE = (("causal", True), ("return_lse", True))
REPLAYED = {
    **{f"varlen, {form}": Call(is_varlen=True, is_packed=True, form=form, options=LSE) for form in ("none", "head", "key")},
    **{f"cache, {form}": Call(form=form, options=LSE) for form in ("none", "head", "key")},
    "packed queries": Call(is_packed=True, options=LSE),
    "window": Call(options=(("window_size", (100, 0)), ("return_lse", True))),
    "score mod": Call(options=(*LSE, ("score_mod", lambda s, b, h, i, j: s + 0.1 * (i - j)))),
    "pages of 16 bits": Call(dtype=BF16, options=LSE),
    "rows of 16 bits": Call(dtype=BF16, page_size=0, options=LSE),
}


@pytest.mark.parametrize("name", REPLAYED)
def test_replays(name: str, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    call = REPLAYED[name]

    def launches(number: int) -> list[Any]:
        made.clear()
        arguments = call.arguments()
        if not call.is_varlen:
            arguments = {{"k": "k_cache", "v": "v_cache"}.get(n, n): x for n, x in arguments.items()}
        function = anyattn.flash_attn_varlen_func if call.is_varlen else anyattn.flash_attn_with_kvcache
        return described(made, arguments, function(**arguments))

    warm, first = replayed_and_first(launches, range(12), 12, monkeypatch)
    assert warm == first and len(warm) == (2 if name == "rows of 16 bits" else 3)


@pytest.mark.parametrize("name", ["with scales", "varlen, packed", "16 bits in pages"])
def test_compiled(name: str, made: list[Any]) -> None:
    call = GATHERED[name]
    arguments = call.arguments()
    arguments |= {n: arguments[n].contiguous() for n in "kv"}  # an operator that may append takes no overlapping rows
    tensors = {n: x for n, x in arguments.items() if isinstance(x, Tensor)}
    numbers = {n: x for n, x in arguments.items() if n not in tensors}
    if not call.is_varlen:
        tensors = {{"k": "k_cache", "v": "v_cache"}.get(n, n): x for n, x in tensors.items()}
    function = anyattn.flash_attn_varlen_func if call.is_varlen else anyattn.flash_attn_with_kvcache
    compiled, counter = fresh(lambda **given: function(**given, **numbers))
    with torch.no_grad():
        compiled(**tensors)
    assert counter.frame_count == 1
    assert [n for n in kinds_of(made) if n in ("gather_keys", "attention")] == ["gather_keys", "attention"]
