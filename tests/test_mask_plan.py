"""The mask plan of small calls, for every backend: which predicates row ranges, block lists or an evaluation in every tile decide."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks
from anyattn.backends.hopper import make_config
from anyattn.backends.torch import coverage
from anyattn.backends.triton.codegen import programs
from anyattn.mask_plan import MaskAbilities, MaskPart, MaskPlan, mask_plan
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.cute_mod import native_mod
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.problem import Problem
from anyattn.validate import kvcache
from anyattn.validate.flash import Options

LENGTH = 64
BACKENDS = {"torch": coverage._ABILITIES, "triton": programs._ABILITIES, "hopper": make_config.ABILITIES}
IDS = torch.tensor([0] * 20 + [1] * 44)
MASKS = {
    "full": masks.full(),
    "causal": masks.causal(),
    "prefix": masks.prefix_lm(5),
    "sink": masks.sink_window(4, 9),
    "three": lambda b, h, q, k: (k < 3) | (k == q) | (k == 50),
    "document": masks.document(IDS),
    "dilated": masks.dilated(3, 2),
    "none": lambda b, h, q, k: k < 0,
}


def opaque(b, h, q_idx, kv_idx, aux_tensors):  # type: ignore[no-untyped-def]
    return q_idx >= kv_idx


def predicate_of(name: str) -> TracedMod:
    if name != "opaque":
        return trace(MASKS[name], "mask")
    found = native_mod(pytest.importorskip("cutlass.cute").jit(opaque), "mask", None)
    assert found is not None
    return found


def problem_of(*names: str, lists: str = "") -> Problem:
    """lists: "given" or "follow", block lists of the first mask."""
    q = torch.zeros(1, 2, LENGTH, 64)
    predicates = tuple(map(predicate_of, names))
    changes: dict[str, Any] = {}
    if lists:
        blocks = anyattn.compute_block_sparsity(32, 32, 1, 1, LENGTH, LENGTH, MASKS.get(names[0], MASKS["full"]), device="cpu")
        changes = {"blocks": blocks, "blocks_follow": lists == "follow"}
    return Problem(q, q, q, 1.0, predicates=predicates, **changes)


def shown(plan: MaskPlan) -> str:
    """Predicates by number with their count of row ranges, "e" where the mask itself is evaluated: "lists given 0:1, always 1:e"."""

    def of(part: MaskPart) -> str:
        return f"{'+'.join(map(str, part.predicates))}:{'e' if part.ranges is None else part.ranges.count}"

    given = ["lists" + ("" if plan.of_blocks is None else f" {of(plan.of_blocks)}")] if plan.uses_blocks else []
    kinds = {"ranged": plan.ranged, "made": plan.listed, "always": plan.always}
    return ", ".join([*given, *(f"{kind} {' '.join(map(of, parts))}" for kind, parts in kinds.items() if parts)])


TABLE = {
    # masks, lists: (torch, triton, hopper)
    ((), ""): ("", "", ""),
    (("full",), ""): ("ranged 0:1", "ranged 0:1", "ranged 0:1"),
    (("causal",), ""): ("ranged 0:1", "ranged 0:1", "ranged 0:1"),
    (("none",), ""): ("ranged 0:1", "ranged 0:1", "made 0:1"),  # a constant limit is no line along the diagonal
    (("prefix",), ""): ("ranged 0:1", "ranged 0:1", "made 0:1"),  # its limit runs along the diagonal only behind the prefix
    (("sink",), ""): ("ranged 0:2", "ranged 0:2", "made 0:2"),
    (("three",), ""): ("ranged 0:3", "made 0:e", "made 0:e"),
    (("document",), ""): ("ranged 0:1", "made 0:e", "made 0:e"),  # its ranges are found by reading the ids
    (("dilated",), ""): ("made 0:e", "made 0:e", "made 0:e"),
    (("causal", "causal"), ""): ("ranged 0:1 1:1", "ranged 0+1:1", "ranged 0:1 1:1"),
    (("causal", "sink"), ""): ("ranged 0:1 1:2", "ranged 0+1:2", "made 1:2, always 0:1"),
    (("causal", "document"), ""): ("ranged 0:1 1:1", "made 0+1:e", "made 1:e, always 0:1"),
    (("full", "dilated", "document"), ""): ("ranged 0:1 2:1, made 1:e", "made 0+1+2:e", "made 1:e, always 2:e"),
    (("full",), "given"): ("lists", "lists", "lists"),
    (("causal",), "given"): ("lists 0:1", "lists 0:1", "lists 0:1"),
    (("causal",), "follow"): ("lists 0:1", "ranged 0:1", "ranged 0:1"),
    (("sink",), "follow"): ("lists 0:2", "ranged 0:2", "lists 0:2"),
    (("document",), "follow"): ("lists 0:1", "lists 0:e", "lists 0:e"),
    (("document", "causal"), "given"): ("lists 0:1, ranged 1:1", "lists 0:e, always 1:1", "lists 0:e, always 1:1"),
    (("causal", "dilated"), "follow"): ("lists 0:1, made 1:e", "lists 0:1, always 1:e", "lists 0:1, always 1:e"),
    (("dilated", "causal", "sink"), "given"): (
        "lists 0:e, ranged 1:1 2:2", "lists 0:e, always 1+2:2", "lists 0:e, always 1:1 2:2",
    ),
    (("causal", "full"), "given"): ("lists 0:1, ranged 1:1", "lists 0:1", "lists 0:1"),
}  # fmt: skip


@pytest.mark.covering(2)
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("case", "expected"), TABLE.items(), ids=str)
def test_where_each_predicate_decides(case: tuple, expected: tuple[str, ...], backend: str) -> None:
    names, lists = case
    found = mask_plan(problem_of(*names, lists=lists), BACKENDS[backend])
    assert shown(found) == expected[list(BACKENDS).index(backend)]
    assert found.has_lists == ("made" in shown(found) or "lists" in shown(found))


def test_an_opaque_mask_is_evaluated_in_every_tile_unless_lists_are_given() -> None:
    abilities = BACKENDS["hopper"]
    assert shown(mask_plan(problem_of("opaque"), abilities)) == "always 0:e"
    assert shown(mask_plan(problem_of("causal", "opaque"), abilities)) == "ranged 0:1, always 1:e"
    assert shown(mask_plan(problem_of("opaque", "dilated"), abilities)) == "made 1:e, always 0:e"
    assert shown(mask_plan(problem_of("opaque", lists="given"), abilities)) == "lists 0:e"
    assert shown(mask_plan(problem_of("causal", "opaque", lists="follow"), abilities)) == "ranged 0:1, always 1:e"


CACHED = {  # masks: (causal, window_size, mask_mod), (torch, triton, hopper)
    "strided": ((False, (-1, -1), lambda b, h, q, k: (q - k) % 3 == 0), ("made 0:e", "always 0:e", "made 0:e")),
    "causal, strided": ((True, (-1, -1), lambda b, h, q, k: (q - k) % 3 == 0), ("made 0:e", "always 0:e", "made 0:e")),  # of the last row
    "window, document": (
        (True, (7, 0), lambda b, h, q, k: IDS[q] == IDS[k]), ("ranged 0:1 1:1", "ranged 0+1:1, always 0+1:e", "made 0:e, always 1:1"),
    ),
    "a conjunction": (
        (False, (-1, -1), lambda b, h, q, k: (q >= k) & ((k % 2 == 0) & (q - k < 8)) & (IDS[k] == 0)),
        ("made 0:e", "ranged 0:1, always 0:e", "made 0:e"),
    ),
    "too many ranges": (
        (False, (-1, -1), lambda b, h, q, k: ((k < 3) | (k > 9)) & ((k < 20) | (k > 30)) & (k % 2 == 0)),
        ("made 0:e", "ranged 0:2, always 0:e", "made 0:e"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("case", CACHED)
def test_a_cache_has_lists_where_they_are_made_for_it(case: str, backend: str) -> None:
    """Elsewhere the conjuncts that have row ranges say which tiles are visited, and show all that the mask shows."""
    (causal, window, mask), expected = CACHED[case]
    q, cache = torch.zeros(2, 1, 2, 64), torch.zeros(2, LENGTH, 2, 64)
    given = kvcache.CacheArguments(q, cache, cache, cache_seqlens=torch.tensor([9, 40]))
    problem = kvcache.cache_call(given, Options(causal=causal, window_size=window, mask_mod=mask)).problem
    found = mask_plan(problem, BACKENDS[backend])
    assert shown(found) == expected[list(BACKENDS).index(backend)]
    if backend == "triton":
        places = torch.arange(LENGTH)
        pairs = torch.tensor(0), torch.tensor(0), places[:, None], places[None]
        parts = [part.mask for part in (*found.ranged, *found.always)]
        by_plan, by_call = (
            torch.stack([evaluate(m, *pairs).expand(LENGTH, LENGTH) for m in masks]).all(0) for masks in (parts, problem.predicates)
        )
        assert torch.equal(by_plan, by_call)


def test_abilities_are_arguments_of_one_rule() -> None:
    problem = problem_of("three")
    assert [shown(mask_plan(problem, MaskAbilities(n))) for n in (2, 3)] == ["made 0:e", "ranged 0:3"]
    both = problem_of("dilated", "three")
    assert shown(mask_plan(both, MaskAbilities(3))) == "made 0:e, always 1:3"
    assert shown(mask_plan(both, MaskAbilities(3, most_lists=None))) == "ranged 1:3, made 0:e"
    assert shown(mask_plan(both, MaskAbilities(3, joins=True))) == "made 0+1:e"
    assert shown(mask_plan(problem_of("sink"), MaskAbilities(2, tiles_follow=lambda ranges: ranges.count == 1))) == "made 0:2"


def test_parts_keep_their_masks_and_their_own_captures() -> None:
    problem = problem_of("sink", "document")
    joint = mask_plan(problem, BACKENDS["triton"]).listed[0].mask
    assert joint.scalars == problem.predicates[0].scalars and joint.tensors[0] is problem.predicates[1].tensors[0]
    apart = mask_plan(problem, BACKENDS["hopper"])
    assert apart.listed[0].mask is problem.predicates[0] and apart.always[0].mask is problem.predicates[1]
    ranges = mask_plan(problem, BACKENDS["torch"]).ranged
    assert [part.ranges for part in ranges] == list(problem.row_ranges)


def test_without_pairs_no_captured_table_is_read() -> None:
    q, ids = torch.zeros(1, 2, 0, 64), torch.zeros(0, dtype=torch.int64)
    problem = Problem(q, q, q, 1.0, predicates=(trace(masks.document(ids), "mask"),))
    assert shown(mask_plan(problem, BACKENDS["torch"])) == "ranged 0:1"
    lo, hi = problem.row_limits[0]  # type: ignore[misc]
    assert lo.shape == hi.shape == (1, 1, 1, 0) and lo.dtype is torch.int32
