"""Sums with copies as compiled for GPUs that are not here: the lanes of a warp add to 32 copies, and no table's size compiles anew."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn.validate import flex
from tests.support.covering import few
from tests.support.triton.pinned import judged_with_the_pinned_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead

LENGTH = 256
IDS = torch.zeros(LENGTH, dtype=torch.int32)
# what is captured, and the mod
MODS: dict[str, tuple[tuple[int, ...], Callable[..., Any]]] = {
    "buckets": ((32, 4), lambda t: anyattn.scores.t5_bias(t)),
    "rows": ((7,), lambda t: lambda s, b, h, i, j: s * t[IDS[i]]),
    "keys": ((4, 7), lambda t: lambda s, b, h, i, j: s + t[h, IDS[j]]),
    "pairs": ((4, 7, 7), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i], IDS[j]]),
}


def launched(table: torch.Tensor, mod: Any, dtype: torch.dtype, gpu: tuple[int, int] = (9, 0)) -> ahead.Launch:
    """The kernel that adds up the table's gradient."""
    q, k, v = (torch.zeros(1, 4, LENGTH, 128, dtype=dtype, requires_grad=True) for _ in range(3))
    problem = flex.flex_problem(q, k, v, mod(table), None, None, None, None, False, None, True, False, False)
    (found,) = [one for one in ahead.launches(problem, gpu, backward=True) if "dq_tile" in one.kernel.fn.__code__.co_filename]
    return found


@judged_with_the_pinned_triton
@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", MODS)
def test_lanes_add_to_copies_of_their_own(name: str, dtype: torch.dtype) -> None:
    """Copies follow the rows (columns where that is all there is), so the lanes of a warp have to lie along them."""
    shape, mod = MODS[name]
    launch = launched(torch.zeros(shape, requires_grad=True), mod, dtype)
    kernel = ahead.compiled(launch, (9, 0), "cubin" if name == "buckets" else "llir")
    text = kernel.asm["ttgir"]
    layouts = dict(re.findall(r"^(#blocked\d*) = #ttg.blocked<\{(.*)\}>", text, re.M))
    adds = re.findall(r"tt.atomic_rmw fadd, relaxed.*?: \(tensor<(\d+)x(\d+)x!tt.ptr<\w+>, (#blocked\d*)>", text)
    assert adds, name
    for rows, columns, layout in adds:
        across, along = map(int, re.findall(r"threadsPerWarp = \[(\d+), (\d+)\]", layouts[layout])[0])
        assert (across if int(rows) > 1 else along) == 32, (rows, columns, layouts[layout])
    assert name != "buckets" or ahead.spilled(kernel) <= ahead.MOST_SPILLED


@pytest.mark.parametrize("name", few(MODS, "buckets", next(n for n in MODS if n not in ("buckets", "pairs"))))
def test_a_tile_of_one_entry_is_asked_for_where_that_may_be(name: str) -> None:
    """By what is computed of distances or looked up on both sides, not where a row or a key is summed anyway."""
    shape, mod = MODS[name]
    text = ahead.compiled(launched(torch.zeros(shape, requires_grad=True), mod, torch.bfloat16), (8, 0), "llir").asm["ttgir"]
    single = re.findall(r"tt.atomic_rmw fadd, relaxed.*: \(!tt.ptr<f32>", text)
    assert bool(single) is (name in ("buckets", "pairs"))


@pytest.mark.parametrize("name", MODS)
def test_tables_of_all_sizes_share_a_kernel(name: str) -> None:
    """Large ones, with one copy, too."""
    shape, mod = MODS[name]
    found = [launched(torch.zeros((*shape[:-1], n), requires_grad=True), mod, torch.bfloat16) for n in (shape[-1], 2**10 + 4, 2**20)]
    assert len({id(one.kernel) for one in found}) == 1
    assert len({tuple(sorted((k, str(v)) for k, v in one.options.items())) for one in found}) == 1
    totals = [one.given[-1] for one in found]
    assert [t.shape[-1] for t in totals][::2] == [1024, 1] and all(t.is_contiguous() for t in totals)


WIDE = (
    ((9, 0), 128, torch.bfloat16), ((9, 0), 256, torch.float16), ((8, 6), 128, torch.bfloat16), ((8, 6), 64, torch.float32),
    ((10, 0), 128, torch.bfloat16), ((8, 0), 256, torch.bfloat16),
)  # fmt: skip


@pytest.mark.covering(1, of=lambda name, gpu, dim, dtype: (name, gpu, dim, dtype))
@pytest.mark.parametrize(("gpu", "dim", "dtype"), WIDE, ids=str)
@pytest.mark.parametrize("name", ["buckets", "pairs"])
def test_they_find_their_room(name: str, gpu: tuple[int, int], dim: int, dtype: torch.dtype) -> None:
    """What is brought into another layout, and what sums a whole tile. Nothing is assembled: only the memory counts."""
    from anyattn.backends.triton import tile_config
    from anyattn.backends.triton.codegen.assumptions import shape_of

    shape, mod = MODS[name]
    score = mod(torch.zeros(shape, requires_grad=True))
    problem = ahead.problem_of(score, lambda b, h, q, k: q >= k, dim=dim, dtype=dtype, has_grad=True)
    launch = next(x for x in ahead.launches(problem, gpu, backward=True) if "SLOT_M" in x.options)
    options = launch.options
    tiles = tile_config.Tiles(options["TILE_M"], options["TILE_N"], options["num_warps"], options["num_stages"])
    taken, needed = ahead.compiled(launch, gpu, "llir").metadata.shared, tile_config.needed("dq", tiles, shape_of(problem), gpu)
    assert taken <= needed <= tile_config.shared_memory(gpu), (tiles, taken, needed)
