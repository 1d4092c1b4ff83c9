"""Calls whose score mod has far sides, and the machine's loops over far tiles."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, scores
from anyattn.backends.triton import distance_bands
from anyattn.backends.triton.codegen.programs import gradient_part, program_of
from anyattn.backends.triton.tile_config import Tiles
from anyattn.problem import Problem
from tests.support.triton.pinned import judged_with_the_pinned_triton

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead

LENGTH = 512
C2P, P2C = (torch.zeros(1, 4, LENGTH, 32, dtype=torch.bfloat16) for _ in range(2))
HUGE = 2**40


def problem(score: Callable, mask: Any = None, **more: Any) -> Problem:
    return ahead.problem_of(score, mask, dim=64, length=LENGTH, **more)


def names(problem: Problem) -> list[str]:
    part = program_of(problem).program.score
    assert part is not None
    return [side.name for side in part.sides if side is not None]


def two_ranges(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (k < 9) | ((k <= q) & (k > q - 100))


def test_calls_with_sides() -> None:
    score = scores.disentangled(C2P, P2C)
    assert names(problem(score)) == names(problem(score, masks.causal())) == ["score_after", "score_before"]
    assert names(problem(lambda s, b, h, q, k: s + C2P[0, h, q, torch.where(q - k > 3, 31, (q + k) % 31)])) == ["score_after"]


def test_calls_without_sides() -> None:
    score = scores.disentangled(C2P, P2C)
    listed = anyattn.create_block_mask(lambda b, h, q, k: (q + k) % 3 > 0, None, None, LENGTH, LENGTH, device="cpu")
    assert names(problem(score, block_mask=listed)) == []
    assert names(problem(score, two_ranges)) == []
    assert names(problem(lambda s, b, h, q, k: s + C2P[0, h, q, torch.clamp(q - k + HUGE, 0, 31)])) == []
    assert names(problem(scores.alibi(torch.zeros(4)))) == []


def test_a_bound_beyond_the_tensor_is_not_read() -> None:
    """Of no pair of the call is the distance so great, but a far tile's values per row are loaded for all rows."""
    table = torch.zeros(4, 2 * LENGTH)

    def is_inside(most: int) -> bool:
        score = program_of(problem(lambda s, b, h, q, k: s + table[h, torch.clamp(q - k + LENGTH, 0, most)])).program.score
        assert score is not None and score.style.is_inside
        after, _ = score.sides
        return after is not None and after.style.is_inside

    assert is_inside(2 * LENGTH - 1) and not is_inside(2 * LENGTH)


def test_gradients_of_a_side_are_sums_of_rows_and_keys() -> None:
    tables = [t.clone().requires_grad_() for t in (C2P, P2C)]
    part = gradient_part(problem(scores.disentangled(*tables), has_grad=True), (0, 1), has_sides=True)
    found = {side.name: [(load.by_row, load.by_key) for load in side.loads] for side in part.sides if side is not None}
    assert [(load.by_row, load.by_key) for load in part.loads] == [(False, False)] * 2
    assert found == {"score_after": [(True, False), (False, True)], "score_before": [(True, False), (False, True)]}


@judged_with_the_pinned_triton
def test_a_far_loop_has_few_instructions() -> None:
    """It loads no value per pair, spills nothing and has less than half of the instructions of a near one."""
    (launch,) = ahead.launches(problem(scores.disentangled(C2P, P2C)), (9, 0))
    loops = [loop for loop in ahead.machine_loops(ahead.compiled(launch, (9, 0)).asm["cubin"]) if any("MMA" in op for op in loop)]
    per_thread = launch.options["TILE_M"] * launch.options["TILE_N"] // (32 * launch.options["num_warps"])
    far = [loop for loop in loops if sum(op.startswith("LDG") for op in loop) < per_thread]
    assert len(loops) == 4 and len(far) == 2
    assert not any(op.startswith(("LDL", "STL")) for loop in far for op in loop)
    assert max(map(len, far)) < 0.5 * min(len(loop) for loop in loops if loop not in far)


@judged_with_the_pinned_triton
def test_no_derivative_of_a_table_by_row_and_distance_is_added_atomically() -> None:
    tables = [t.clone().requires_grad_() for t in (C2P, P2C)]
    launches = ahead.launches(problem(scores.disentangled(*tables, 40), has_grad=True), (9, 0), backward=True)
    made = {}
    for launch in launches:
        name = getattr(launch.kernel.fn, "__name__", "")
        name = name if name != "entry" else launch.kernel.fn.__code__.co_filename.split()[-1].rsplit("_", 1)[0]
        made[name] = ahead.compiled(launch, (9, 0))
    assert list(made) == ["prepare_tile", "dq_tile", "dkdv_tile", "store_places", "sum_band"] and len(launches) == 7
    assert [name for name, kernel in made.items() if re.search(r"(?<![.\w])(red|atom)\.", kernel.asm["ptx"])] == []
    # with four warps on a tile of 64 x 64, dk and dv are 18 % faster on an H200 than with tiles that spill nothing
    assert ahead.spilled(made.pop("dkdv_tile")) <= 0.006 < ahead.MOST_SPILLED
    operations = [op for kernel in made.values() for loop in ahead.machine_loops(kernel.asm["cubin"]) for op in loop]
    assert not any(op.startswith(("LDL", "STL")) for op in operations)


def test_a_band_much_larger_than_its_table_is_not_made() -> None:
    tiles = {"dq": Tiles(64, 64, 4, 3), "dkdv": Tiles(32, 128, 8, 3)}

    def slots(width: int, reach: int, length: int = 4096) -> list[int]:
        table = torch.zeros(1, 4, length, width, dtype=torch.bfloat16, requires_grad=True)
        score = lambda s, b, h, q, k: s + table[b, h, q, torch.clamp(q - k, -reach, reach) % width]
        made = ahead.problem_of(score, dim=64, length=length, has_grad=True)
        return [found.slot for found in distance_bands.tables_of_bands(made, tiles)[0]]

    assert slots(8, 90) == slots(512, 800) == [0]
    assert slots(8, 120) == slots(512, 900) == slots(512, 300, length=512) == []
