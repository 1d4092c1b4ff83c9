"""Attention over ranks against the oracle: outputs, lse and all gradients, for masks, scores, lengths and numbers of ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.distributed.programs import attention, tensors_of
from tests.support import cases
from tests.support.cases import KINDS, VARIANTS, Case, Shape
from tests.support.ranks import on_ranks

SHAPES = (
    Shape(1, 4, 2, 300, 300, 16, 8),
    Shape(2, 3, 1, 257, 257, 24, 40),
    Shape(1, 2, 2, 67, 67, 16, 16),
    Shape(2, 4, 4, 129, 129, 8, 16),
)
BLOCKS: tuple[Any, ...] = (16, (32, 16), 8, (16, 64))
PLANS: tuple[dict[str, Any], ...] = ({}, {"overlap": True}, {"overlap": True, "keep_kv": False}, {"overlap": False, "keep_kv": True})
MATRIX = [
    (
        Case(name, SHAPES[(i + ranks) % 4], KINDS[(i + ranks) % 3], seed=7 * i + ranks),
        ranks,
        BLOCKS[(i + ranks // 2) % 4],
        PLANS[(i + i // 4 + ranks) % 4],
    )
    for i, name in enumerate(VARIANTS)
    for ranks in (2, 3, 4)
]


# heads for rows: (query heads, K/V heads) that so many ranks divide, fewer K/V heads than ranks among them
DIVIDED = {2: ((4, 2), (6, 6), (4, 1), (2, 2)), 3: ((6, 3), (3, 1), (6, 6), (3, 3)), 4: ((8, 2), (4, 4), (8, 1), (8, 8))}


def _of_heads(i: int, ranks: int) -> Shape:
    shape, (queries, keys) = SHAPES[(i + ranks) % 4], DIVIDED[ranks][(i + i // 4) % 4]
    return shape._replace(heads_q=queries, heads_kv=keys)


BY_HEADS = [
    (
        Case(name, _of_heads(i, ranks), KINDS[(i + ranks) % 3], seed=7 * i + ranks),
        ranks,
        BLOCKS[i % 4],
        {"transport": "heads", **PLANS[i % 4]},
    )
    for i, name in enumerate(VARIANTS)
    for ranks in (2 + i % 3,)
]


@pytest.mark.parametrize(("case", "ranks", "block", "plan"), MATRIX + BY_HEADS, ids=str)
def test_equals_the_oracle(case: Case, ranks: int, block: Any, plan: dict[str, Any]) -> None:
    want = cases.expected(case, torch.float32)
    for got in on_ranks(ranks, attention, case, tensors_of(want), block, plan, {}):
        want.check(got, f"{case} on {ranks} ranks")


NODES = [
    (
        Case(name, SHAPES[(i + 1) % 4], KINDS[(i + 1) % 3], seed=5 * i),
        (6, 3) if i % 8 == 1 else (6, 2) if i % 8 == 5 else (4, 1) if i % 8 == 7 else (4, 2),
        BLOCKS[(i + i // 4) % 4],
        PLANS[(i + i // 4) % 4],
    )
    for i, name in enumerate(VARIANTS)
]


@pytest.mark.parametrize(("case", "nodes", "block", "plan"), NODES, ids=str)
def test_equals_the_oracle_over_nodes(case: Case, nodes: tuple[int, int], block: Any, plan: dict[str, Any]) -> None:
    """nodes: ranks, and how many of them play one."""
    want, (ranks, size) = cases.expected(case, torch.float32), nodes
    for got in on_ranks(ranks, attention, case, tensors_of(want), block, {**plan, "node_size": size}, {}):
        want.check(got, f"{case} on {ranks} ranks, {size} a node")


HALVES = [
    (Case(name, SHAPES[i % 4], KINDS[i % 3], seed=i), (torch.bfloat16, torch.float16)[i % 2], 2 + i % 3)
    for i, name in enumerate(("causal", "window", "documents", "alibi", "gated_sink", "islands_sink"))
]


BOTH = [
    *[(*half, "keys") for half in HALVES],
    *[(replace(case, shape=_of_heads(i, ranks)), dtype, ranks, "heads") for i, (case, dtype, ranks) in enumerate(HALVES)],
]


@pytest.mark.parametrize(("case", "dtype", "ranks", "transport"), BOTH, ids=str)
def test_sixteen_bits_keep_the_budget_of_one_process(case: Case, dtype: torch.dtype, ranks: int, transport: str) -> None:
    want = cases.expected(case, dtype)
    plan = {"overlap": True, "transport": transport, "node_size": 2 if ranks == 4 else None}
    for got in on_ranks(ranks, attention, case, tensors_of(want), 16, plan, {}):
        want.check(got, f"{case} on {ranks} ranks")


@pytest.mark.parametrize("plan", [{"transport": "keys"}, {"transport": "keys", "node_size": 2}, {"transport": "heads"}], ids=str)
@pytest.mark.parametrize(("length", "block"), [(20, 16), (1, 16), (33, 32), (64, 64), (129, 16)])
def test_short_sequences_leave_ranks_without_rows(length: int, block: int, plan: dict[str, Any]) -> None:
    case = Case("alibi" if length in (20, 33) else "sink", Shape(2, 4, 2, length, length, 16, 16), "normal")
    want = cases.expected(case, torch.float32)
    for got in on_ranks(4, attention, case, tensors_of(want), block, plan, {"deterministic": True}):
        want.check(got, f"{length} positions on 4 ranks")
