"""The Triton backend without a GPU: compiled for Hopper, and shown to wait for nothing."""

from __future__ import annotations

import importlib.util
import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from anyattn import masks
from anyattn.block_masks import create_block_mask
from anyattn.mods.analysis.load_bounds import check_loads
from anyattn.mods.ir.expr import OPS, Builder, category
from anyattn.mods.tracing.trace import trace
from anyattn.sparsity import compute_block_sparsity
from anyattn.sparsity.compute import tile_lists
from anyattn.sparsity.grid import BLOCK_MASK, BLOCK_SPARSE, TileGrid
from tests.support.covering import few
from tests.support.tiles import library_masks, random_mask
from tests.support.triton.built import POINTERS, Waits, built
from tests.support.triton.pretended_lists import as_on_a_gpu

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")

# ---- compiled


BYTES = ("given", "classes")  # pointers to uint8
WIDE = ("hulls", "places", "seqlens_q", "seqlens_k", "q_first")  # pointers to int64


def compiled(kernel: Any, constants: dict[str, Any], tensors: tuple[torch.Tensor, ...] = ()) -> None:
    named = {f"t{i}": POINTERS[t.dtype] for i, t in enumerate(tensors)}
    types = {}
    for parameter in kernel.params:
        pointer = named.get(parameter.name, "*i64" if parameter.name in WIDE else "*u8" if parameter.name in BYTES else "*i32")
        types[parameter.name] = "constexpr" if parameter.is_constexpr else parameter.annotation_type or pointer
    assembly = built(kernel, types, constants, "ptx").asm["ptx"]
    assert "st.global" in assembly and "ld.local" not in assembly


RAGGED = ["causal", "document_causal", "tree", "dilated", "sink_window", "random 1", "random 2"]
CASES = [*((name, False) for name in [*library_masks(64, 64), "random 0", "random 1", "random 2"]), *((name, True) for name in RAGGED)]


QUICK = [*((name, False) for name in ("causal", "sink_window", "chunked", "document_causal", "tree", "random 1")), ("dilated", True)]


@pytest.mark.parametrize(("name", "is_ragged"), few([pytest.param(*c) for c in CASES], *(pytest.param(*c) for c in QUICK)))
def test_compiles_for_hopper(name: str, is_ragged: bool) -> None:
    from anyattn.sparsity.kernels import block_lists as kernels

    mod = random_mask(int(name[7:]), 64) if name.startswith("random") else library_masks(64, 64)[name]
    traced = trace(mod, "mask")
    mask = kernels.mask_of(traced.expr, is_ragged)
    tile = {"TILE_M": 128, "TILE_N": 128} if is_ragged else {"TILE_M": 192, "TILE_N": 80}
    options = {"CHUNK": 64, "BLOCK_M": 32, "BLOCK_N": 128, "SEPARATE_FULL": True, "HAS_FULL_TAILS": is_ragged}
    compiled(mask.kernels.list_tiles, {**tile, **options}, traced.tensors)
    if mask.row_leaves or mask.column_leaves:
        compiled(mask.kernels.store_hulls, {**tile, "BLOCK": 128 if is_ragged else 256}, traced.tensors)
        if is_ragged or mask.row_leaves + mask.column_leaves <= kernels._MOST_LEAVES:
            compiled(mask.kernels.list_tiles_at_once, {**tile, **options}, traced.tensors)


@pytest.mark.parametrize("name", ["causal", "dilated", "document_causal"])
def test_lists_of_given_classes_compile_for_hopper(name: str) -> None:
    from anyattn.sparsity.kernels import block_lists as kernels

    traced = trace(library_masks(64, 64)[name], "mask")
    for is_ragged in (False, True):
        mask = kernels.mask_of(traced.expr, is_ragged, has_given=True)
        options = {"CHUNK": 1024, "BLOCK_M": 32, "BLOCK_N": 128, "SEPARATE_FULL": True, "HAS_FULL_TAILS": is_ragged}
        compiled(mask.kernels.list_tiles, {"TILE_M": 64, "TILE_N": 64, **options}, traced.tensors)


@pytest.mark.parametrize("has_count", [False, True])
def test_listed_classes_compile_for_hopper(has_count: bool) -> None:
    from anyattn.sparsity.kernels.block_lists import mask_of
    from anyattn.sparsity.kernels.class_grids import EVERYTHING
    from anyattn.sparsity.kernels.listed_classes import store_class

    compiled(store_class, {"CLASS": 2, "HAS_COUNT": has_count, "BLOCK": 256})
    options = {"CHUNK": 1024, "BLOCK_M": 16, "BLOCK_N": 16, "SEPARATE_FULL": True, "HAS_FULL_TAILS": True}
    compiled(mask_of(EVERYTHING.expr, has_given=True).kernels.list_tiles, {"TILE_M": 1, "TILE_N": 1, **options})


def test_ranked_lists_compile_for_hopper() -> None:
    from anyattn.sparsity.kernels.ranked_lists import store_ranked

    compiled(store_ranked, {"BLOCK": 128})


@pytest.mark.parametrize("has_count", [False, True])
def test_lists_of_single_queries_compile_for_hopper(has_count: bool) -> None:
    from anyattn.sparsity.kernels.block_lists import mask_of
    from anyattn.sparsity.kernels.sorted_choice import store_sorted

    for rows, width in ((64, 16), (1, 4096)):
        compiled(store_sorted, {"HAS_COUNT": has_count, "ROWS": rows, "WIDTH": width})
    traced = trace(masks.document(torch.zeros(9, dtype=torch.int32)) & masks.causal(), "mask")
    options = {"CHUNK": 64, "BLOCK_M": 16, "BLOCK_N": 64, "SEPARATE_FULL": True, "HAS_FULL_TAILS": False, "TILE_M": 1, "TILE_N": 64}
    compiled(mask_of(traced.expr, has_choice=True).kernels.list_tiles, options, traced.tensors)


def test_the_table_of_sequences_compiles_for_hopper() -> None:
    from anyattn.sparsity.kernels import block_lists as kernels

    compiled(kernels._store_places(), {"TILE_M": 128, "TILE_N": 96, "CHUNK": 1024})


KERNEL = """
@triton.jit
def everywhere(out, t0, t1):
    q, kv = tl.arange(0, 16)[:, None], tl.arange(0, 32)[None, :]
    value = mod(0, 0, q, kv, (), ((t0, 1, 16), (t1, 1, 32)))
    tl.store(out + q * 32 + kv, tl.broadcast_to(value, (16, 32)).to(tl.float32))
"""


@pytest.mark.parametrize(
    "dtype",
    [torch.bool, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64],
    ids=str,
)
def test_every_operation_compiles(dtype: torch.dtype) -> None:
    """All operations on one dtype, in one kernel each."""
    from anyattn.triton_tools import emit, jit_source

    builder = Builder()
    q, kv = (builder.add("index", dtype=torch.int64, attr=name) for name in ("q_idx", "kv_idx"))
    a, b = builder.add("load", q, dtype=dtype, attr=0), builder.add("load", kv, dtype=dtype, attr=1)
    total = builder.const(0.0, torch.float32)
    for op, spec in OPS.items():
        if op != "cast" and category(dtype) in spec.operands:
            args = {1: [a], 2: [a, b], 3: [builder.add("lt", q, kv), a, b]}[spec.arity]
            total = builder.add("add", total, builder.cast(builder.add(op, *args), torch.float32))
    expr = builder.build(total)
    kernel = jit_source.load(emit.function("mod", expr) + KERNEL, f"all_{dtype}").everywhere
    name = {torch.bool: "i1", torch.uint8: "u8", torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype)
    name = name or str(dtype).replace("torch.int", "i").replace("torch.float", "fp")
    until = "cubin" if dtype is torch.float32 else "ptx"
    assert "st.global" in built(kernel, {"out": "*fp32", "t0": f"*{name}", "t1": f"*{name}"}, {}, until).asm["ptx"]


# ---- nothing waits


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """Kernels are not launched but listed, and fake tensors stand for those of a GPU that need not be here."""
    from anyattn.sparsity import arguments, compute
    from anyattn.sparsity.kernels import block_lists as kernels

    made: list[tuple] = []
    monkeypatch.setattr(arguments, "usable_device", torch.device)
    monkeypatch.setattr(compute, "reads_nothing", lambda mod, device: False)
    monkeypatch.setattr(kernels, "_launch", lambda *args, **more: made.append(args))
    return made


def fake_masks() -> dict[str, Any]:
    ids, per_batch = torch.zeros(1000, dtype=torch.int32, device="cuda"), torch.zeros(2, 1000, dtype=torch.int64, device="cuda")
    lengths = torch.zeros(2, dtype=torch.int64, device="cuda")
    return {
        "causal": masks.causal(),
        "window": masks.causal() & masks.sliding_window(100, 0),
        "document": masks.document(ids),
        "document_causal": masks.document(per_batch) & masks.causal(),
        "prefix": masks.prefix_lm(lengths),
        "sink": masks.sink_window(4, 100),
        "padding": masks.left_padding(lengths),
        "dilated": masks.dilated(5, 3),
        "computed index": lambda b, h, q, k: ids[q // 3 + 1] == ids[k],
        "far index": lambda b, h, q, k: ids[(q - k).abs()] == 0,
        "captured index": lambda b, h, q, k: ids[ids[q]] == 0,
    }


def test_nothing_waits(launches: list[tuple]) -> None:
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake:
        mods = fake_masks()
    for mod in mods.values():
        for batch in (1, 2):  # computed on the CPU, once: a fake CPU tensor has no values either
            check_loads(trace(mod, "mask"), batch, batch, 1000, 1000, reads_values=False)
    with fake:
        for name, mod in mods.items():
            for _ in range(2):  # traced, then remembered
                with Waits() as waits:
                    mask = create_block_mask(mod, 2, 2, 1000, 1000, device="cuda")
                    compute_block_sparsity(128, 64, 2, 2, 1000, 1000, mod, device="cuda")
                    tile_lists(trace(mod, "mask"), TileGrid((1000, 1000), (192, 128), (2, 2)), "cuda")
            assert mask.kv_indices.shape == (2, 2, 8, 8) and mask.kv_indices.device.type == "cuda", name
            assert len(launches) == 6, name
            launches.clear()
            with Waits() as waits:
                create_block_mask(mod, None, None, 1000, 1000, device="cuda")
            launches.clear()
            calls = [c for c in waits.calls if c not in ("promote_types", "device")]  # the lists' own memory and views of it
            assert len(calls) <= 12, (name, calls)


def test_the_checker_itself() -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        x = torch.zeros(4, device="cuda")
        for wait in (lambda: x.sum().item(), lambda: x[x > 0], lambda: x.cpu(), lambda: x.nonzero(), lambda: torch.equal(x, x)):
            with pytest.raises((AssertionError, RuntimeError)), Waits():
                wait()


def test_an_index_outside_is_still_found(launches: list[tuple]) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        table = torch.zeros(100, dtype=torch.int32, device="cuda")
    for mod in (lambda b, h, q, k: table[q] == table[k], lambda b, h, q, k: table[(q - k).abs()] == 0):
        with pytest.raises(ValueError, match=r"captured tensor of shape \(100,\)"):
            create_block_mask(mod, 1, 1, 200, 200, device="cuda")
    assert not launches


def test_what_the_kernels_leave_to_torch(launches: list[tuple]) -> None:
    """A captured number beyond the kernels' bounds."""
    from anyattn.sparsity.kernels import block_lists as kernels

    far = 2**45
    assert not kernels.can_list(trace(lambda b, h, q, k: q + far >= k, "mask"), (8, 8))
    assert kernels.can_list(trace(lambda b, h, q, k: q + 1.5e300 >= k, "mask"), (8, 8))
    assert not kernels.can_list(trace(masks.causal(), "mask"), (2**30, 8))


def test_a_grid_has_room_for_any_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond its first axis a CUDA grid has 65,535 places: batch and heads get an axis each, for 4,096 entries of 32 heads have more."""
    from anyattn.sparsity.kernels import block_lists as kernels

    real, grids = kernels.mask_of, []

    def kernel() -> Any:
        return type("Grid", (), {"__getitem__": lambda self, grid: grids.append(grid) or (lambda *args, **options: None)})()

    def mask_of(expr: Any, **options: bool) -> Any:
        names = ("list_tiles", "list_tiles_at_once", "store_hulls")
        return real(expr)._replace(kernels=SimpleNamespace(**{n: kernel() for n in names}))

    monkeypatch.setattr(kernels, "mask_of", mask_of)
    monkeypatch.setattr(kernels, "launches_of", kernels.launches_of.__wrapped__)  # caches nothing
    table, device = torch.zeros(4096, 1000, dtype=torch.int32), torch.device("cpu")
    for mask in (masks.causal(), lambda b, h, q, k: table[b, q] == table[b, k] % (h + 1)):
        kernels.list_tiles(trace(mask, "mask"), TileGrid((1000, 1000), (128, 128), (4096, 32)), device, BLOCK_MASK)
        kernels.list_tiles(trace(mask, "mask"), TileGrid((8000, 8000), (512, 512), (4096, 2)), device, BLOCK_SPARSE)
    assert len(grids) > 4 and {grid[1:] for grid in grids} == {(32, 4096), (2, 4096)}, grids


def test_compiled_for_all_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths, captured numbers, strides and addresses are no part of what Triton compiles for; few tiles and many are."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import compute_cache_key, create_function_from_signature

    from anyattn.sparsity.kernels import block_lists as kernels

    found: dict[tuple[str, str], set] = {}
    target = make_backend(GPUTarget("cuda", 90, 32))

    def launched(key: str, kernel: Any) -> Any:
        bind, texts = create_function_from_signature(kernel.signature, kernel.params, target), {}  # type: ignore[var-annotated]

        def launch(*args: Any, **options: Any) -> None:
            _, special, rest = bind(*args, **options)
            found.setdefault((key, kernel.__name__), set()).add(compute_cache_key(texts, special, rest))

        return type("Grid", (), {"__getitem__": lambda self, grid: launch})()

    real = kernels.mask_of

    def mask_of(expr: Any, **options: bool) -> Any:
        mask = real(expr)
        names = ("list_tiles", "list_tiles_at_once", "store_hulls")
        return mask._replace(kernels=SimpleNamespace(**{n: launched(expr.key, getattr(mask.kernels, n)) for n in names}))

    monkeypatch.setattr(kernels, "mask_of", mask_of)
    monkeypatch.setattr(kernels, "launches_of", kernels.launches_of.__wrapped__)  # caches nothing
    rng, table = random.Random(0), torch.zeros(20001, dtype=torch.int32)
    for at in range(60):
        lengths = tuple(rng.choice([1, 16, 17, rng.randrange(1, 20000)]) for _ in range(2))
        for mod in (masks.sliding_window(rng.choice([1, 2, 16, 1000, 2**33]), 0), masks.document(table[at % 3 :]) & masks.causal()):
            grid = TileGrid(lengths, (128, 128), (1, 1))  # type: ignore[arg-type]
            kernels.list_tiles(trace(mod, "mask"), grid, torch.device("cpu"), BLOCK_MASK)
    assert found and all(len(keys) <= 2 for keys in found.values()), {name: len(keys) for name, keys in found.items()}


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.func.grad(torch.func.grad(f)), torch.func.functionalize])
def test_lists_are_allocated_outside_of_function_transforms(transform: Any) -> None:
    """Inside of them a new tensor has no address that a kernel could be given."""
    ids = torch.arange(300) // 70
    made: list[torch.Tensor] = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        mask = create_block_mask(lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k), 1, 1, 300, 300, "cpu", 32)
        tiles = compute_block_sparsity(32, 32, 1, 1, 300, 300, lambda b, h, q, k: q - k < 40, device="cpu")
        made.extend([mask.kv_indices, mask.full_q_num_blocks, tiles.mask_block_idx, tiles.full_block_cnt])
        return x**3

    def fill(kernel: Any, grid: Any, given: list[Any], options: Any) -> None:
        for t in given:
            if isinstance(t, torch.Tensor) and t is not ids:
                t.zero_()

    with as_on_a_gpu(fill) as launches:
        for _ in range(2):
            transform(loss)(torch.tensor(1.0))
    assert len(made) == 8 and not any(map(torch._C._functorch.is_functorch_wrapped_tensor, made))
    addresses = {address for launched in launches.made for address in launched.given}
    assert all(t.data_ptr() in addresses for t in made)
