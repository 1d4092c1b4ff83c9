"""Calls with ``deterministic="batch"`` that Hopper's kernel in the order of keys has, and its configs; ``tests/gpu`` compares its bits."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable
from ctypes import c_float
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyattn
from anyattn import autograd, masks, planner, scores
from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper import plan as hopper_plan
from anyattn.backends.hopper.config import Ask, Config, Tiles
from anyattn.backends.hopper.make_config import TILES_IN_ORDER
from anyattn.backends.hopper.slower import slower_forward
from anyattn.backends.triton.launch_shape import tiles_in_order
from anyattn.backends.triton.tile_config import Shape, row_sums
from anyattn.call_cache import attention
from anyattn.call_cache.kvcache_step import step_call
from anyattn.mods.tracing.trace import trace
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sequences.sections import KEYS_IN_ORDER, SECTION
from anyattn.validate.flash import Options
from anyattn.validate.kvcache import CacheArguments, with_values
from tests.support.hopper.pretended import Launch

triton = pytest.importorskip("triton")
if importlib.util.find_spec("cutlass") is None:
    pytest.skip("needs nvidia-cutlass-dsl", allow_module_level=True)

BF16 = torch.bfloat16


@pytest.fixture
def chosen(launched: list[Launch], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """Launches, of calls that the planner gives to the faster backend."""
    monkeypatch.setattr(planner, "_slower", slower_forward)
    return launched


def qkv(length: int = 2048, dim: int = 128, dtype: torch.dtype = BF16, heads: int = 32) -> list[torch.Tensor]:
    return [torch.zeros(1, n, length, dim, dtype=dtype) for n in (heads, 8, 8)]


def why(given: list[torch.Tensor], **options: Any) -> tuple[str, str]:
    plan = anyattn.explain(*given, enable_gqa=True, deterministic="batch", **options).plan
    return plan.backend, "\n".join(plan.why)


TAKEN: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"mask_mod": masks.causal()}, "window": {"mask_mod": masks.sliding_window(100, 20)},
    "two bands": {"mask_mod": lambda b, h, i, j: (i >= j) & (i - j < 500)}, "a scale": {"scale": 0.7},
    "a sink": {"sink": torch.zeros(32)},
}  # fmt: skip
LEFT: dict[str, tuple[dict[str, Any], str]] = {
    "a score mod": ({"score_mod": scores.softcap(30.0)}, "no score mods"),
    "documents": ({"mask_mod": masks.document(torch.arange(2048) // 100)}, "bands around the diagonal"),
    "a prefix": ({"mask_mod": masks.prefix_lm(100)}, "bands around the diagonal"),
    "a negative scale": ({"scale": -0.1}, "scales above 1e-30 and below 1e+30: scale is -0.1"),
    "a tiny scale": ({"scale": 1e-35}, "scale is 1e-35"),
}


@pytest.mark.parametrize("name", TAKEN)
@pytest.mark.parametrize("dims", TILES_IN_ORDER, ids=str)
def test_taken(name: str, dims: tuple[int, int], chosen: list[Launch]) -> None:
    q, k, v = qkv(dim=dims[0])
    backend, told = why([q, k, v[..., : dims[1]].contiguous()], **TAKEN[name])
    tiles = TILES_IN_ORDER[dims]
    assert backend == "hopper" and f"sums by sections of {SECTION} keys, tiles of {tiles.tile_m} x {KEYS_IN_ORDER}" in told, told


@pytest.mark.parametrize(
    ("entries", "length", "heads", "rows"),
    [
        (1, 8192, 32, 256),
        (8, 1024, 12, 256),
        (1, 1024, 48, 256),
        (1, 4096, 16, 256),
        (2, 2048, 16, 256),
        (1, 2048, 24, 192),
        (1, 4096, 8, 192),
        (8, 640, 12, 192),
        (32, 300, 12, 192),
    ],
)
def test_four_warp_groups_if_no_multiprocessor_waits(entries: int, length: int, heads: int, rows: int, chosen: list[Launch]) -> None:
    x = torch.zeros(entries, heads, length, 64, dtype=BF16)
    _, told = why([x, x, x])
    assert f"tiles of {rows} x {KEYS_IN_ORDER} in their order" in told, told


def test_packed_sequences_and_highest_scores_at_64(chosen: list[Launch]) -> None:
    """Sequences of 1,024 rows as many row tiles make worth it; each of two numbers of them has a launch of its own."""
    for entries, rows in ((8, 256), (2, 192), (8, 256)):
        ends = torch.arange(entries + 1, dtype=torch.int32) * 1024
        x = torch.zeros(entries * 1024, 32, 64, dtype=BF16)
        with torch.no_grad():
            anyattn.flash_attn_varlen_func(x, x, x, ends, ends, 1024, 1024, deterministic="batch", backend="hopper")
        assert chosen[-1][0].tiles.tile_m == rows  # type: ignore[union-attr]
    q, k, v = qkv(8192, dim=64)
    for wants, rows in ((False, 256), (True, 192)):
        with torch.no_grad():
            aux = anyattn.AuxRequest(max_scores=wants)
            anyattn.flex_attention(q, k, v, enable_gqa=True, deterministic="batch", return_aux=aux)
        assert chosen[-1][0].tiles.tile_m == rows  # type: ignore[union-attr]


@pytest.mark.parametrize("name", LEFT)
def test_left_to_triton(name: str, chosen: list[Launch]) -> None:
    options, words = LEFT[name]
    backend, told = why(qkv(), **options)
    assert backend == "triton" and words in told, told


def test_left_by_shape(chosen: list[Launch]) -> None:
    for given, words in (
        (qkv(dim=80), "it has head dimensions 64, 96, 128, 192 with 128, 192, 256: q's is 80"),
        ([*qkv()[:2], torch.zeros(1, 8, 2048, 64, dtype=BF16)], "v's 64"),
        (qkv(100), "32 row tiles are for fewer than 45% of the multiprocessors"),
        (qkv(300, dim=64), "64 row tiles are for fewer than 65% of the multiprocessors"),
        (qkv(16), "programs for each section of keys, which at most 16 queries want"),
        (qkv(dtype=torch.float32), "multiplies bfloat16 and float16"),
    ):
        backend, told = why(given)
        assert backend == "triton" and words in told, told
    assert why(qkv(528))[0] == "hopper"  # 5 x 32 row tiles for 132 multiprocessors


@pytest.mark.parametrize("dtype", [BF16, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("pages", [False, True])
def test_caches_are_tritons(pages: bool, dtype: torch.dtype, chosen: list[Launch]) -> None:
    """Also for many queries, whose keys are gathered for Hopper's kernel otherwise: those of 8 bits would be rounded in between."""
    q, cache = torch.zeros(2, 512, 32, 128, dtype=BF16), torch.zeros(64 if pages else 2, 128 if pages else 4096, 8, 128).to(dtype)
    table = torch.arange(64, dtype=torch.int32).view(2, 32) if pages else None
    given = with_values(CacheArguments(q, cache, cache.clone(), cache_seqlens=torch.full((2,), 4096, dtype=torch.int32), page_table=table))
    plans = [step_call(given, Options(num_splits=0, deterministic=mode), None, True)[1] for mode in (False, "batch")]  # type: ignore[index]
    assert [plan.backend for plan in plans] == ["hopper", "triton"] and 'deterministic="batch"' in plans[1].why[0], plans


@pytest.mark.parametrize("scale", [-0.1, 0.0, 1e-35, 1e35])
def test_a_warm_call_of_an_extreme_scale_is_tritons(scale: float, chosen: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever call is remembered first."""
    q, k, v = qkv()
    flat = [x.transpose(1, 2) for x in (q, k, v)]
    ends = torch.tensor([0, 2048], dtype=torch.int32)
    packed = [x[0] for x in flat]
    calls: list[Callable[[float], Any]] = [
        lambda s: anyattn.flex_attention(q, k, v, enable_gqa=True, scale=s, deterministic="batch"),
        lambda s: anyattn.flash_attn_func(*flat, softmax_scale=s, deterministic="batch"),
        lambda s: anyattn.flash_attn_varlen_func(*packed, ends, ends, 2048, 2048, softmax_scale=s, deterministic="batch"),  # type: ignore[arg-type]
    ]
    planned: list[str] = []

    def compute(problem: Problem, plan: Plan) -> tuple[torch.Tensor, torch.Tensor, None]:
        planned.append(plan.backend)
        return torch.empty_like(problem.q), torch.empty(problem.q.shape[:3]), None

    monkeypatch.setattr(autograd, "compute", compute)
    for call in calls:
        for scales, wanted in (((0.1, scale, 0.2), "hopper triton hopper"), ((scale, 0.1, scale), "triton hopper triton")):
            attention.clear()
            planned.clear()
            for s in scales:
                call(s)
            assert " ".join(planned) == wanted


def test_another_triton_has_all_calls(chosen: list[Launch], monkeypatch: pytest.MonkeyPatch) -> None:
    hopper_plan._is_known_triton.cache_clear()
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    try:
        backend, told = why(qkv())
    finally:
        hopper_plan._is_known_triton.cache_clear()
    assert backend == "triton" and "compared with those of Triton 3.6.x" in told


def test_launches(chosen: list[Launch]) -> None:
    with torch.no_grad():
        anyattn.flex_attention(*qkv(), mask_mod=masks.causal(), enable_gqa=True, scale=0.3, deterministic="batch", return_lse=True)
    ((config, arguments),) = chosen
    assert isinstance(config, Config) and config.in_order and config.tiles == TILES_IN_ORDER[128, 128]
    assert config.has_right and config.has_lse
    scale = arguments[15]
    assert scale == c_float(scale).value == c_float(c_float(0.3).value * c_float(LOG2E).value).value != 0.3 * LOG2E


@pytest.mark.parametrize("dims", TILES_IN_ORDER, ids=str)
def test_sums_of_sections_in_global_memory(dims: tuple[int, int], chosen: list[Launch]) -> None:
    """Of columns for which shared memory has no room: new memory for every launch, whose number of thread blocks has its own."""
    (q, k, v), owned = qkv(dim=dims[0]), []
    v = v[..., : dims[1]].contiguous()
    with torch.no_grad():
        for _ in range(3):
            anyattn.flex_attention(q, k, v, enable_gqa=True, deterministic="batch")
            config, arguments = chosen[-1]
            assert isinstance(config, Config) and config.sums.in_global == 128 * {192: 32, 256: 160}.get(dims[1], 0)
            owned.append(arguments[-1])
    assert len(chosen) == 3
    if config.sums.in_global:
        assert all(sums.shape == (arguments[-3], config.sums.in_global) and sums.dtype is torch.float32 for (sums,) in owned)
        assert sum(config.sums) == 128 * dims[1] and config.sums.in_smem == 128 * 64
        assert len({sums.data_ptr() for (sums,) in owned}) == 3
    else:
        assert owned == [(), (), ()] and sum(config.sums) == config.sums.in_smem


def test_packed_sequences_are_launched(chosen: list[Launch]) -> None:
    ends = torch.tensor([0, 1000, 4096], dtype=torch.int32)
    q, k, v = (torch.zeros(4096, n, 128, dtype=BF16) for n in (32, 8, 8))
    with torch.no_grad():
        anyattn.flash_attn_varlen_func(q, k, v, ends, ends, 3096, 3096, causal=True, deterministic="batch")
    (config,) = (config for config, _ in chosen if isinstance(config, Config))
    assert config.in_order and config.has_entries and not config.is_paged


def test_both_backends_have_one_order() -> None:
    """The tiles, sections and partial sums of Triton's kernel, which Hopper's repeats."""
    for dims, dtype in itertools.product(TILES_IN_ORDER, (BF16, torch.float16)):
        tiles = tiles_in_order(Shape(*dims, dtype), (9, 0))
        assert tiles.tile_n == KEYS_IN_ORDER == TILES_IN_ORDER[dims].tile_n and SECTION % KEYS_IN_ORDER == 0
        assert row_sums(tiles.tile_m, tiles.tile_n, dtype) == 8  # of columns 8 apart: two of each thread, which adds them in order


def test_impossible_configs_are_refused() -> None:
    make = lambda **fields: Config(
        **{"head_dim": 128, "head_dim_v": 128, "is_bf16": True, "tiles": TILES_IN_ORDER[128, 128], "in_order": True, **fields}
    )
    assert make().sums == (128 * 128, 0, 0) and make().q_stages == 2 and replace(make(), in_order=False).sums == (0, 0, 0)
    document = trace(masks.document(torch.arange(9)), "mask").expr
    for fields, words in (
        ({"tiles": Tiles(128, 128, 2)}, "wanted tile_n=64"),
        ({"lists": "dense"}, "lists, predicates besides bands"),
        ({"always": (Ask(document, False),)}, "lists, predicates besides bands"),
        ({"has_dropout": True}, "dropout"),
        ({"has_skip": True}, "skips"),
        ({"piece": 16}, "pages"),
        ({"tiles": Tiles(128, 64, 6)}, "bytes of shared memory"),
        ({"tiles": Tiles(256, 64, 1)}, "at head_dim_v 128, in_order=True, has_max=False; wanted at most three warp groups"),
        ({"head_dim": 64, "head_dim_v": 64, "tiles": TILES_IN_ORDER[64, 64], "has_max": True}, "has_max=True; wanted at most three"),
        ({"head_dim": 64, "head_dim_v": 64, "tiles": TILES_IN_ORDER[64, 64], "in_order": False}, "in_order=False"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**fields)
