"""Launches of the backward kernel of small problems, and what compilers make of it for GPUs that are not here."""

from __future__ import annotations

import importlib.util
import re

import pytest
import torch

from anyattn.problem import Problem
from anyattn.validate import flex
from tests.support.covering import few
from tests.support.triton.pinned import judged_with_the_pinned_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead

BF16, FP32 = torch.bfloat16, torch.float32


def problem_of(batch: int, length: int, dim: int, bias: str = "", dtype: torch.dtype = BF16) -> Problem:
    q, k, v = (torch.zeros(batch, 8, length, dim, dtype=dtype, requires_grad=True) for _ in range(3))
    table, at = torch.zeros(225, 8, dtype=dtype, requires_grad=True), torch.zeros(length, length, dtype=torch.int64)
    pairs = torch.zeros(8, length, length, dtype=dtype, requires_grad=True)
    scores = {"table": lambda s, b, h, i, j: s + table[at[i, j], h], "pairs": lambda s, b, h, i, j: s + pairs[h, i, j]}
    return flex.flex_problem(q, k, v, scores.get(bias), None, None, None, None, False, None, True, False, False)


def kernels(problem: Problem, capability: tuple[int, int] = (9, 0)) -> dict:
    """The launches of a backward pass by kernel."""
    names = ("prepare_tile", "dq_tile", "dkdv_tile", "pair_tile")
    made = ahead.launches(problem, capability, backward=True)
    return {next(n for n in names if n in one.kernel.fn.__code__.co_filename): one for one in made}


def test_kernels_of_a_call() -> None:
    """One for a small problem, else three."""
    assert [*kernels(problem_of(4, 64, 32))] == [*kernels(problem_of(4, 49, 128, "table"))] == ["pair_tile"]
    frozen = problem_of(8, 64, 32, "pairs")
    assert [*kernels(frozen.like(**{name: getattr(frozen, name).detach() for name in "qkv"}))] == ["pair_tile"]
    others = problem_of(8, 65, 32, "pairs"), problem_of(8, 64, 256), problem_of(8, 64, 32, dtype=FP32)
    assert all([*kernels(other)] == ["prepare_tile", "dq_tile", "dkdv_tile"] for other in others)


def test_wide_gradients_of_keys_are_left_to_the_other_kernels() -> None:
    """In turns on one plan."""
    from anyattn.backends.triton import Repeater

    problem, found = problem_of(4, 64, 32), []
    repeater = Repeater(problem, ahead.planned(problem, (9, 0)))
    with ahead.caught((9, 0)) as made:
        results = repeater.forward(problem)
        for is_wide in (False, True, False, True):
            made.clear()
            wide = problem.like(wide_kv_grads=is_wide)
            dq, dk, dv = repeater.backward(wide, results.out, results.lse, results.out, None)[:3]
            found.append((len(made), dq.dtype, dk.dtype, dv.dtype))
    assert found == [(1, BF16, BF16, BF16), (3, BF16, FP32, FP32)] * 2


@pytest.mark.parametrize(("batch", "heads", "entries"), [(1024, 4, 16), (256, 8, 8), (3, 8, 1), (4096, 600, 4096), (70000, 1, 266)])
def test_programs(batch: int, heads: int, entries: int) -> None:
    """About two for each of 132 multiprocessors, and no fewer entries than one."""
    from anyattn.backends.triton.pair_tiles import _entries_each

    q = torch.zeros(1, 1, 16, 16).expand(batch, heads, 16, 16)
    problem = flex.flex_problem(q, q, q, None, None, None, None, None, False, None, True, False, False)
    assert _entries_each(problem) == entries


CALLS = {
    "windows of 64": (256, 64, 32, "table"),
    "windows of 49": (1024, 49, 64, "table"),
    "wide windows": (64, 64, 128, "table"),
    "plain": (64, 49, 128),
    "few positions": (64, 17, 128),
    "pairs": (64, 64, 32, "pairs"),
}
EVERYWHERE = ("windows of 64", "pairs")  # wider heads need warp groups
COMPILED = [(name, gpu) for gpu in ((9, 0), (10, 0), (8, 0), (8, 6)) for name in (CALLS if gpu >= (9, 0) else EVERYWHERE)]


@judged_with_the_pinned_triton
@pytest.mark.parametrize(("name", "gpu"), few([pytest.param(*c) for c in COMPILED], *(pytest.param(*c) for c in COMPILED[:2])), ids=str)
def test_registers_and_memory(name: str, gpu: tuple[int, int]) -> None:
    """A loop spills next to nothing, and a bias by pair is loaded before it."""
    from anyattn.backends.triton import pair_tiles, tile_config
    from anyattn.backends.triton.codegen.assumptions import shape_of

    problem = problem_of(*CALLS[name])
    launch = kernels(problem, gpu)["pair_tile"]
    kernel, options = ahead.compiled(launch, gpu), launch.options
    tiles = tile_config.Tiles(options["TILE_M"], options["TILE_N"], options["num_warps"], options["num_stages"])
    needed = pair_tiles.needed(tiles, shape_of(problem), gpu)
    assert kernel.metadata.shared <= needed <= tile_config.shared_memory(gpu), (name, tiles)
    assert ahead.spilled(kernel) <= ahead.MOST_SPILLED, (name, tiles)
    loop = "\n".join(max(ahead.loops(kernel), key=len))
    assert not re.search(r"ld\.global\S*(nc|v2|v4|16)", loop), name  # lse and delta alone are loaded without going by way of shared memory
