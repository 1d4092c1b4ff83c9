"""The Triton backend's part in decoding, without a GPU: compiled ahead of time."""

from __future__ import annotations

import importlib.util
import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import anyattn
from anyattn.call_cache import attention
from tests.backends.triton.test_in_the_interpreter import PARTS
from tests.support.limits import HANG
from tests.support.no_reading import Waited, no_reading, noted_launches
from tests.support.processes import in_the_interpreter
from tests.support.triton.built import compiling_until

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.mark.slow
@pytest.mark.timeout(HANG * 4 + 600)
def test_every_setting_in_the_interpreter() -> None:
    """Those that are not slow are a part of ``test_in_the_interpreter.py``."""
    in_the_interpreter(*PARTS["decoding"].files, options=("-m", "slow"), seconds=4 * HANG)


# ---- compiled

TARGETS = (80, 90, 100)
DTYPES = {"fp16": "*fp16", "bf16": "*bf16", "fp32": "*fp32"}


def built(kernel: Any, types: dict[str, str], constants: dict[str, Any], capability: int, until: str = "cubin", **options: Any) -> Any:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    fixed = {p.name for p in kernel.params if p.is_constexpr or p.name in constants}
    types = {p.name: "constexpr" if p.name in fixed else types.get(p.name) or p.annotation_type for p in kernel.params}
    target = GPUTarget("cuda", capability, 32)
    attributes = {(i,): [["tt.divisibility", 16]] for i, p in enumerate(kernel.params) if str(types[p.name]).startswith("*")}
    with compiling_until(until):
        return triton.compile(
            ASTSource(kernel, types, constants, attributes), target=target, options={"enable_fp_fusion": False, **options}
        )


def step_of(dtype: str, options: dict[str, Any]) -> tuple[Any, dict[str, str], dict[str, Any]]:
    """The kernel that appends, its types and its constants; rows are contiguous."""
    from anyattn.backends.triton.kernels.append_rotary import cache_step

    flags = ("NEW_IS_PACKED", "Q_IS_PACKED", "HAS_ROWS", "HAS_PAGES", "TURNS", "INTERLEAVED", "FOLLOWS")
    flags = (*flags, "FORMAT", "K_SCALES", "V_SCALES", "COUNTS", "SEARCH_STEPS")
    units = dict.fromkeys(("UNIT", "CACHE_UNIT", "TABLE_UNIT"), 8)
    constants = {**dict.fromkeys(flags, 0), **units, "LINES": 8, "BLOCK_D": 128, "BLOCK_DV": 128}
    last = ("new_k_d", "new_v_d", "q_d", "k_cache_d", "v_cache_d", "cos_d", "sin_d")
    types = dict.fromkeys(("new_k", "new_v", "q", "k_cache", "v_cache", "turned"), DTYPES[dtype])
    types |= {"cos": "*fp32", "sin": "*fp32", "cached": "*i32", "rows": "*i64", "ends": "*i32", "pages": "*i32"}
    types |= {"k_descale": "*fp32", "v_descale": "*fp32", "saturated": "*i64"}
    if options.get("FORMAT"):
        types |= {"k_cache": "*u8", "v_cache": "*u8"}
    return cache_step, types, {**constants, **options, **dict.fromkeys(last, 1)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        ("bf16", {"HAS_PAGES": True, "TURNS": True, "INTERLEAVED": False, "FOLLOWS": True}),
        ("fp16", {"HAS_ROWS": True, "TURNS": True, "INTERLEAVED": True}),
        ("fp32", {"NEW_IS_PACKED": True, "Q_IS_PACKED": True, "SEARCH_STEPS": 8, "TURNS": True, "FOLLOWS": True}),
        ("bf16", {"Q_IS_PACKED": True, "SEARCH_STEPS": 4, "HAS_PAGES": True}),
        ("bf16", {"HAS_PAGES": True, "TURNS": True, "FOLLOWS": True, "FORMAT": 1, "K_SCALES": 3, "V_SCALES": 3, "COUNTS": True}),
        ("fp32", {"HAS_PAGES": True, "TURNS": True, "INTERLEAVED": True, "FORMAT": 2, "K_SCALES": 1, "V_SCALES": 2}),
        ("fp16", {"HAS_ROWS": True, "FORMAT": 3, "V_SCALES": 3, "COUNTS": True, "CACHE_UNIT": 4}),
    ],
)
def test_the_step_compiles(capability: int, dtype: str, options: dict[str, Any]) -> None:
    made = built(*step_of(dtype, options), capability)
    assert "cubin" in made.asm and "ld.local" not in made.asm["ptx"]
    assert "fma.rn.f32" not in made.asm["ptx"], "a product and a sum rounded once give other bits than torch"


@pytest.mark.parametrize("options", [{}, {"FORMAT": 1, "K_SCALES": 3, "V_SCALES": 3, "CACHE_UNIT": 4}, {"FORMAT": 3}])
def test_the_step_moves_16_bytes_at_a_time(options: dict[str, Any]) -> None:
    """Rows, tables and the partners of rotated elements; 8-bit rows by what their strides allow."""
    ptx = built(*step_of("bf16", {"HAS_PAGES": True, "TURNS": True, **options}), 90).asm["ptx"]
    stores = {"v4.b32"} if not options else {"v4.b32", "b32"} if "CACHE_UNIT" in options else {"v4.b32", "v2.b32"}
    assert set(re.findall(r"st\.global\.([\w.]+)", ptx)) == stores
    loads = re.findall(r"ld\.global\.([\w.]+)", ptx)
    assert set(loads) == {"v4.b32", "b32"} and loads.count("v4.b32") > 10, "32 bits at a time are tables of lengths and pages"


@pytest.mark.covering(1)
@pytest.mark.parametrize("capability", TARGETS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("parts", "block", "flag"), [(1, 16, False), (8, 128, True), (8, 256, False)])
def test_merging_compiles(capability: int, dtype: str, parts: int, block: int, flag: bool) -> None:
    from anyattn.backends.triton.kernels.combine import combine_row

    types = dict.fromkeys(("outs", "lses", "sink", "lse"), "*fp32") | {"out": DTYPES[dtype]}
    constants = {"HAS_SINK": flag, "HAS_UNUSED": flag, "HAS_LSE": True, "PARTS": parts, "BLOCK": block}
    made = built(combine_row, types, constants, capability)
    assert "cubin" in made.asm and "ld.local" not in made.asm["ptx"]


# ---- the forward kernel as a decoder launches it

SHARED = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.int32: "*i32", torch.int64: "*i64"}


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Any:
    """CPU tensors are taken for a GPU's, of a capability to be named; launches of the forward kernel are noted and not made."""
    attention.clear()  # one device has one capability
    yield noted_launches(monkeypatch, (9, 0))
    attention.clear()


def decode(sq: int = 1, heads: tuple[int, int] = (32, 8), width: int = 128, page: int = 0, dtype: Any = torch.bfloat16, **more: Any) -> Any:
    pages = {"page_table": torch.zeros(4, 9, dtype=torch.int32)} if page else {}
    k = torch.zeros(40, page, heads[1], width, dtype=dtype) if page else torch.zeros(4, 1024, heads[1], width, dtype=dtype)
    q = torch.zeros(7, heads[0], width, dtype=dtype) if "cu_seqlens_q" in more else torch.zeros(4, sq, heads[0], width, dtype=dtype)
    given = {"cache_seqlens": torch.zeros(4, dtype=torch.int32), "backend": "triton", **pages, **more}
    return anyattn.flash_attn_with_kvcache(q, k, k.clone(), **given)


DECODES: dict[str, dict[str, Any]] = {
    "plain": {"causal": True, "num_splits": 1},
    "split": {"causal": True, "num_splits": 8, "return_lse": True},
    "pages": {"page": 16, "num_splits": 0, "causal": True},
    "pages of 3, window": {"page": 3, "window_size": (100, 0), "sq": 5, "dtype": torch.float16},
    "padding, softcap": {"cache_leftpad": torch.zeros(4, dtype=torch.int64), "softcap": 30.0, "num_splits": 3},
    "other rows, seven heads": {"cache_batch_idx": torch.zeros(4, dtype=torch.int64), "heads": (14, 2), "sq": 2, "width": 64},
    "wide heads": {"width": 256, "heads": (8, 1), "num_splits": 4},
    "float32": {"dtype": torch.float32, "num_splits": 4, "sink": torch.zeros(32)},
    "a mask that is asked": {"mask_mod": lambda b, h, i, j: (i ^ j) != 5, "num_splits": 2},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "capability"), [("split", c) for c in TARGETS] + [(n, TARGETS[i % 3]) for i, n in enumerate(DECODES) if n != "split"]
)
def test_decoding_compiles_and_fits(name: str, capability: int, launches: Any) -> None:
    launches.capability = divmod(capability, 10)
    decode(**DECODES[name])
    (kernel, _, values, captured, _, options) = launches.made[-1]
    names = [p.name for p in kernel.params if not p.is_constexpr]
    numbers = [n for read in captured for n in (*read.scalars, *(0 for t in read.tensors for _ in range(2 * t.ndim)), *read.tensors)]
    given = dict(zip(names, [*values, *numbers], strict=True))
    types = {n: POINTERS[v.dtype] for n, v in given.items() if isinstance(v, torch.Tensor)}
    constants = {n: v for n, v in options.items() if n.isupper()}
    warps = {n: options[n] for n in ("num_warps", "num_stages")}
    made = built(kernel, types, constants, capability, "cubin" if name in ("split", "pages") else "llir", enable_fp_fusion=True, **warps)
    assert "cubin" in made.asm and made.metadata.shared <= SHARED[capability]


# ---- nothing waits


ENDS = torch.tensor([0, 1, 1, 3, 7], dtype=torch.int32)
STEPS: dict[str, dict[str, Any]] = {
    **DECODES,
    "whole cache": {"cache_seqlens": None, "causal": True},
    "a number": {"cache_seqlens": 100, "causal": True},
    "packed": {"cu_seqlens_q": ENDS, "max_seqlen_q": 4, "causal": True},
    "packed, in pages": {"cu_seqlens_q": ENDS, "causal": True, "page": 16, "num_splits": 2},
    "a bias by row": {"causal": True, "score_mod": lambda s, b, h, i, j: s + BIAS[h, i]},
    "a mask read at places of a table": {"causal": True, "mask_mod": lambda b, h, i, j: SEEN[b, j + PADS[b]]},
}
BIAS = torch.zeros(32, 1024)
SEEN, PADS = torch.arange(4 * 1024).view(4, 1024) % 5 > 0, torch.tensor([0, 7, 30, 1])


@pytest.mark.parametrize("appends", [False, True])
@pytest.mark.parametrize("name", STEPS)
def test_a_step_reads_nothing(name: str, appends: bool, launches: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from anyattn.backends.triton.kernels import append_rotary

    steps: list[Any] = []
    monkeypatch.setattr(
        append_rotary, "cache_step", type("Grid", (), {"__getitem__": lambda self, grid: lambda *a, **o: steps.append((a, o))})()
    )
    options = dict(STEPS[name])
    if appends:
        heads, width, dtype = options.get("heads", (32, 8))[1], options.get("width", 128), options.get("dtype", torch.bfloat16)
        rows = (7,) if "cu_seqlens_q" in options else (4, options.get("sq", 1))
        angles = torch.zeros(2048, width // 2)
        options |= {"k": torch.zeros(*rows, heads, width, dtype=dtype), "v": torch.zeros(*rows, heads, width, dtype=dtype)}
        options |= {"rotary_cos": angles, "rotary_sin": angles}
    with no_reading():
        decode(**options)
    assert len(launches.made) == 1 and len(steps) == appends
    decode(**options)  # remembered, unless it has mods
    with no_reading(through_dispatch=False):
        decode(**options)
    first, second, third = [(grid, constants) for _, grid, *_, constants in launches.made]
    assert first == second == third and len(steps) == 3 * appends
    has_entries = launches.made[0][-1]["HAS_ENTRIES"]
    assert has_entries is ("cu_seqlens_q" in options), "a step of decoding is one launch, or two where it appends"


def test_the_checkers_themselves() -> None:
    x = torch.zeros(4)
    for read in (
        lambda: x.sum().item(),
        lambda: x[x > 0],
        lambda: bool(x.any()),
        lambda: x.tolist(),
        lambda: x.repeat_interleave(x.long()),
    ):
        with pytest.raises(Waited), no_reading():
            read()


# ---- plans


def planned(launches: Any, **options: Any) -> dict[str, Any]:
    launches.made.clear()
    decode(**options)
    (kernel, grid, values, *_, constants) = launches.made[0]
    names = [p.name for p in kernel.params if not p.is_constexpr]
    return {"grid": grid, **dict(zip(names, values, strict=False)), **constants}


def test_heads_of_a_group_share_a_tile(launches: Any) -> None:
    for heads, sq, packed in (((32, 8), 1, 4), ((32, 32), 1, 1), ((14, 2), 1, 7), ((32, 8), 16, 4), ((32, 8), 65, 1), ((142, 2), 1, 15)):
        found = planned(launches, heads=heads, sq=sq, num_splits=1)
        assert (found["packed"], found["grid"][1]) == (packed, heads[1] * -(-heads[0] // heads[1] // packed)), heads
        group = found["padded"]
        assert packed <= group < 2 * packed and group <= found["TILE_M"] and found["grid"][0] == -(-sq * group // found["TILE_M"])
    assert planned(launches, heads=(256, 2), sq=1, num_splits=1)["packed"] == 16, "so many as a tile may have"


def test_programs_fill_the_processors(launches: Any) -> None:
    """Two to a multiprocessor, whatever the batch."""
    found = planned(launches, num_splits=0, heads=(256, 256))
    assert found["TILE_M"] == 16 and found["grid"] == (264, 1, 1) and found["IS_SHARED"]
    found = planned(launches, num_splits=0)
    assert 120 <= math.prod(found["grid"]) <= 264 and not found["IS_SHARED"], "few keys are cut by number"
    assert planned(launches, num_splits=7)["grid"] == (1, 8, 28), "what is asked for is done"


def test_a_known_kernel_is_asked_directly(monkeypatch: pytest.MonkeyPatch) -> None:
    """And Triton for every other that it would compile: another dtype, alignment, number that it compiles for, or option."""
    from anyattn.triton_tools import launch

    made: list[tuple[str, tuple[Any, ...]]] = []

    class Kernel:
        params = (SimpleNamespace(name="x", is_constexpr=False), SimpleNamespace(name="SIZE", is_constexpr=True))

        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            def launched(*given: Any, **options: Any) -> Any:
                made.append((self.name, given))
                return Kernel("known")

            return launched

    kernel, device, storage = Kernel("new"), torch.device("cuda", 0), torch.zeros(64)
    monkeypatch.setattr(launch, "_ready", {})
    for x, number, stride, size, name in (
        (storage, 3, 1, 8, "new"), (storage, 4, 1, 8, "known"), (storage[1:], 4, 1, 8, "new"), (storage[4:], 4, 1, 8, "known"),
        (storage.int(), 4, 1, 8, "new"), (storage, 4, 2, 8, "new"), (storage, 4, 1, 16, "new"), (storage, 5, 1, 8, "known"),
    ):  # fmt: skip
        launch.run_plain(kernel, 7, (x, number), (stride,), device, {"SIZE": size, "num_warps": 4})
        assert made[-1] == (name, (x, number, stride) if name == "new" else (x, number, stride, size))


def test_a_row_of_others_changes_no_tile(launches: Any) -> None:
    """How many queries other entries have must not choose a tile: it could change an entry's last bits."""
    for more in ({}, {"max_seqlen_q": 4}):
        tiles = set()
        for ends in ([0, 1, 1, 3, 7], [0, 1, 2, 3, 4], [0, 1, 100, 200, 300]):
            q = torch.zeros(ends[-1], 32, 128, dtype=torch.bfloat16)
            cache = torch.zeros(4, 1024, 8, 128, dtype=torch.bfloat16)
            tables = {"cu_seqlens_q": torch.tensor(ends), "cache_seqlens": torch.zeros(4, dtype=torch.int32)}
            launches.made.clear()
            anyattn.flash_attn_with_kvcache(q, cache, cache.clone(), **tables, **more, num_splits=2, backend="triton")
            constants = launches.made[0][-1]
            heads = launches.made[0][1][1]  # how many programs share them says how many share a tile
            tiles.add((heads, *[constants[n] for n in ("TILE_M", "TILE_N", "IS_PACKED", "num_warps")]))
        assert len(tiles) == 1, more
