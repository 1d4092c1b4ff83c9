"""Block masks made on a CUDA device by the Triton kernels: the lists of the CPU, and no wait for the device."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
import torch

from anyattn import masks
from anyattn.block_masks import create_block_mask
from anyattn.call_cache import block_mask as warm_masks
from anyattn.mods.algebra import Mask
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.sparsity import BlockMask, compute_block_sparsity
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.compute import tile_lists_both_ways
from anyattn.sparsity.grid import TileGrid
from tests.support.gpu.waiting import no_waiting
from tests.support.tiles import library_masks, random_mask

HAS_TRITON = torch.cuda.is_available() and importlib.util.find_spec("triton") is not None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_TRITON, reason="needs a CUDA device and triton")]

LISTS = [f"{side}_{part}" for side in ("kv", "full_kv", "q", "full_q") for part in ("num_blocks", "indices")]
SHAPES = [((1000, 1300), (128, 128)), ((2049, 700), (64, 192)), ((5, 3000), (128, 128)), ((3000, 3000), (256, 32))]


def on_gpu(mod: Callable) -> TracedMod:
    """The same mask with its captured tensors on the device; a trace is taken in place of a function."""
    traced = trace(mod, "mask")
    return TracedMod("mask", traced.expr, traced.scalars, tuple(t.cuda() for t in traced.tensors), traced.name)


def assert_same(ours: BlockMask, theirs: BlockMask, name: str) -> None:
    for field in LISTS:
        a, b = getattr(ours, field), getattr(theirs, field)
        assert (a is None) == (b is None) and (a is None or (a.is_cuda and a.is_contiguous() and torch.equal(a.cpu(), b))), (name, field)


@pytest.mark.parametrize("name", library_masks(64, 64))
def test_library_masks(name: str) -> None:
    for lengths, tile in SHAPES:
        mod = library_masks(*lengths)[name]
        for batch in ((None, None), (2, 3)) if "batch" not in name and "padding" not in name else ((2, 3),):
            theirs = create_block_mask(mod, *batch, *lengths, "cpu", tile)
            there = on_gpu(mod)
            with no_waiting():
                ours = create_block_mask(there, *batch, *lengths, "cuda", tile)  # type: ignore[arg-type]
            assert_same(ours, theirs, name)


@pytest.mark.parametrize("seed", range(40))
def test_random_masks(seed: int) -> None:
    lengths, tile = SHAPES[seed % len(SHAPES)]
    mod = random_mask(seed, max(lengths))
    assert_same(
        create_block_mask(on_gpu(mod), 2, 2, *lengths, "cuda", tile),  # type: ignore[arg-type]
        create_block_mask(mod, 2, 2, *lengths, "cpu", tile),
        str(seed),
    )


@pytest.mark.parametrize("tile", [(128, 128), (192, 128), (128, 80)])
def test_tile_lists(tile: tuple[int, int]) -> None:
    for name, mod in library_masks(1500, 1100).items():
        here, there = trace(mod, "mask"), on_gpu(mod)
        theirs = tile_lists_both_ways(here, TileGrid((1500, 1100), tile, (2, 2)), "cpu")
        with no_waiting():
            ours = tile_lists_both_ways(there, TileGrid((1500, 1100), tile, (2, 2)), "cuda")
        for our_side, their_side in zip(ours, theirs, strict=True):
            for a, b in zip(tensors_of(our_side), tensors_of(their_side), strict=True):
                assert torch.equal(a.cpu(), b), name


def test_compute_block_sparsity() -> None:
    for separate in (True, False):
        for name, mod in library_masks(1500, 1100).items():
            sizes = (128, 64, 2, 2, 1500, 1100)
            ours = compute_block_sparsity(*sizes, on_gpu(mod), device="cuda", compute_full_blocks=separate)  # type: ignore[arg-type]
            theirs = compute_block_sparsity(*sizes, mod, device="cpu", compute_full_blocks=separate)
            assert torch.equal(ours.classes().cpu(), theirs.classes()), name
            ours.validate()


@pytest.mark.parametrize("length", [8192, 131072])
def test_long_masks(length: int) -> None:
    cuts = torch.randperm(length // 64, generator=torch.Generator().manual_seed(0))[:40].sort().values * 64 + 7
    ids = torch.bucketize(torch.arange(length), cuts).to(torch.int32)
    cases: dict[str, tuple[Mask, Mask]] = {
        "causal": (masks.causal(), masks.causal()),
        "window": (masks.sliding_window(1024, 0), masks.sliding_window(1024, 0)),
        "sink": (masks.sink_window(4, 4096), masks.sink_window(4, 4096)),
        "document": (masks.document(ids), masks.document(ids.cuda())),
        "document_causal": (masks.document(ids) & masks.causal(), masks.document(ids.cuda()) & masks.causal()),
    }
    for name, (here, there) in cases.items():
        with no_waiting():
            ours = create_block_mask(there, None, None, length, length, "cuda")
        assert_same(ours, create_block_mask(here, None, None, length, length, "cpu"), name)


@pytest.mark.parametrize("separate", [True, False])
def test_warm_calls(separate: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Closures made anew: a call is not checked again, and its kernels list what it captures."""
    tables = [torch.arange(1000, dtype=torch.int32) // n for n in (70, 200, 1000)]
    x, y, z = (torch.arange(1000) // n for n in (30, 100, 170))
    there = {t.data_ptr(): t.cuda() for t in (*tables, x, y, z)}

    def window(n: int, device: str) -> Callable:
        return lambda b, h, q, k: (q >= k) & (q - k < n)

    def documents(ids: torch.Tensor, device: str) -> Callable:
        ids = ids if device == "cpu" else there[ids.data_ptr()]
        return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)

    def of_scratch_memory(n: int, device: str) -> Callable:
        i, j, m = (t if device == "cpu" else there[t.data_ptr()] for t in (x, y, z))
        return lambda b, h, q, k: (i[q] == i[k]) | (j[q] == j[k]) & (m[q] == m[k]) | (q - k == n)

    captured: dict[Any, tuple] = {window: (5, 300, 301), documents: tuple(tables), of_scratch_memory: (0, 1, 2)}
    for make, values in captured.items():
        theirs = [create_block_mask(make(v, "cpu"), 2, 1, 1000, 900, "cpu", separate_full_blocks=separate) for v in values]
        for _ in range(2):
            create_block_mask(make(values[0], "cuda"), 2, 1, 1000, 900, "cuda", separate_full_blocks=separate)
        with monkeypatch.context() as patched:
            patched.setattr(warm_masks, "build_block_mask", None)
            with no_waiting():
                made = [create_block_mask(make(v, "cuda"), 2, 1, 1000, 900, "cuda", separate_full_blocks=separate) for v in values]
        for ours, wanted in zip(made, theirs, strict=True):
            assert_same(ours, wanted, make.__name__)
            assert ours.is_exact


def test_inside_a_cuda_graph() -> None:
    """What waits for nothing can be captured; a replay sees the captured tensor's new values."""
    ids = torch.zeros(1024, dtype=torch.int32, device="cuda")
    mod = masks.document(ids) & masks.causal()
    create_block_mask(mod, None, None, 1024, 1024, "cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mask = create_block_mask(mod, None, None, 1024, 1024, "cuda")
    ids.copy_(torch.arange(1024, device="cuda") // 200)
    graph.replay()
    assert_same(mask, create_block_mask(masks.document(ids.cpu()) & masks.causal(), None, None, 1024, 1024, "cpu"), "document")


def test_compiled_once_for_all_sizes() -> None:
    from anyattn.sparsity.kernels import block_lists as kernels

    def mask_of(window: int) -> Callable:  # used by no other test
        return lambda b, h, q, k: (q - k < window) & (q + 7 >= k)

    for at, window in enumerate((1, 2, 16, 100, 128, 1000)):
        create_block_mask(mask_of(window), None, None, 1 + 1000 * at, 16 + 16 * at, "cuda")
    kernel = kernels.mask_of(trace(mask_of(7), "mask").expr).kernels.list_tiles
    assert len(kernel.device_caches[torch.cuda.current_device()][0]) == 1


def test_an_index_outside() -> None:
    table = torch.zeros(100, dtype=torch.int32, device="cuda")
    with pytest.raises(ValueError, match=r"captured tensor of shape \(100,\)"):
        create_block_mask(lambda b, h, q, k: table[q] == table[k], None, None, 200, 200)
    far = torch.full((200,), 10**6, dtype=torch.int64, device="cuda")
    mask = create_block_mask(lambda b, h, q, k: table[far[q]] == 0, None, None, 200, 200)  # held inside
    assert mask.full_kv_num_blocks is not None and int(mask.kv_num_blocks.sum() + mask.full_kv_num_blocks.sum()) == 4
