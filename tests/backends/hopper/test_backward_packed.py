"""Sequences of different lengths in the backward kernel's text on the CPU: gradients against float64, and planted bugs are found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn import masks
from anyattn.arithmetic import LOG2E, ceil_div
from anyattn.backends.hopper.backward_config import BackwardConfig, BackwardTiles, backward_tiles_for
from anyattn.backends.hopper.backward_tables import ragged_lists_by_key
from anyattn.backends.hopper.captured_sums import with_derivatives
from anyattn.backends.hopper.config import Ask
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.varlen_tables import entries_table
from anyattn.sparsity.varlen_block_sparse import VarlenBlockSparseTensors
from anyattn.sparsity.varlen_lists import ragged_lists
from tests.mutants.hopper_role_mutants import MUTANTS, planted
from tests.support.hopper.backward_packed_roles import PackedCall, sequences_of
from tests.support.hopper.backward_roles import Table, captured_of, run_grid
from tests.support.hopper.role_source import Changes, compiled
from tests.support.hopper.schedule import Broken

SCALE = 0.2
MOST = 0.02  # of the greatest gradient, as in ``test_backward_roles``


class Case(NamedTuple):
    """lengths: queries and keys of each sequence. gaps: rows of storage behind each that nobody uses. kind: how the mask reaches the
    kernel: as a band, as a predicate alone, or by lists, made for it or given in the padded layout."""

    lengths: tuple[list[int], list[int]] = ([70, 0, 129, 1], [130, 5, 100, 64])
    gaps: tuple[list[int], list[int]] = ([0] * 4, [0] * 4)
    is_padded: bool = False
    heads: tuple[int, int] = (2, 1)
    mask: Any = None
    kind: str = "band"
    score: Any = None
    tiles: BackwardTiles = BackwardTiles(64, 128)
    is_deterministic: bool = False
    workers: int = 1
    d: int = 64
    parts: int = 1
    is_wide: bool = False  # dk and dv in float32


ENDS = torch.tensor([0, 60, 2, 30, 7])
HALVED = backward_tiles_for(192, 128, is_plain=True, is_bare=True)
CASES = {
    "packed": Case(),
    "full tiles": Case(([64, 128], [128, 256])),
    "no queries": Case(([0, 0, 3], [140, 128, 2])),
    "no keys": Case(([70, 64, 3], [0, 0, 2])),
    "gaps": Case(gaps=([3, 10, 70, 0], [9, 0, 3, 130])),
    "padded": Case(gaps=([60, 130, 1, 129], [0, 125, 30, 66]), is_padded=True),
    "causal": Case(([100, 70, 1], [100, 70, 1]), mask=masks.causal(), workers=2),
    "interleaved": Case(([200, 64, 130], [200, 64, 130]), gaps=([3, 5, 0], [9, 0, 4]), heads=(6, 2), mask=masks.causal(), workers=3),
    "causal, one query head each": Case(([100, 70, 1], [100, 70, 1]), gaps=([3, 5, 0], [9, 0, 4]), heads=(2, 2), mask=masks.causal()),
    "deterministic gaps": Case(([200, 70], [300, 200]), gaps=([3, 5], [9, 0]), mask=masks.sliding_window(90, 100), is_deterministic=True),
    "interleaved, deterministic": Case(
        ([200, 64, 130], [200, 64, 130]), gaps=([3, 5, 0], [9, 0, 4]), heads=(6, 2), mask=masks.causal(), is_deterministic=True, workers=3
    ),
    "causal, deterministic, one query head each": Case(
        ([64, 330], [64, 330]), gaps=([3, 5], [9, 0]), heads=(2, 2), mask=masks.causal(), is_deterministic=True, workers=3
    ),
    "folds of key tiles": Case(
        ([64, 1100, 300], [64, 1030, 300]), gaps=([3, 5, 0], [9, 0, 4]), heads=(1, 1), mask=masks.causal(), is_deterministic=True, workers=6
    ),
    "bands by head": Case(([200, 70], [300, 200]), gaps=([3, 5], [9, 0]), mask=lambda b, h, i, j: j <= i + 100 - 170 * h),
    "lists and gaps": Case(([200, 70], [300, 200]), gaps=([3, 5], [9, 0]), mask=lambda b, h, i, j: (j < 20) | (j > i - 9), kind="flat"),
    "a predicate": Case(mask=lambda b, h, i, j: (i + j + b) % 3 > 0, kind="always"),
    "ranges": Case(mask=lambda b, h, i, j: (j < 20 + b) | (j > i), kind="always"),
    "score": Case(score=lambda s, b, h, i, j: s * s * 0.3 + ENDS[b] * 0.01, mask=masks.causal()),
    "flat lists": Case(([200, 0, 129, 1], [300, 5, 200, 64]), mask=masks.prefix_lm(70), kind="flat"),
    "padded lists": Case(([200, 0, 129, 1], [300, 5, 200, 64]), gaps=([9, 0, 1, 0], [1, 2, 0, 3]), mask=masks.prefix_lm(70), kind="ragged"),
    "lists by head": Case(([200, 70], [300, 200]), mask=lambda b, h, i, j: j < 20 + 150 * h + 10 * b, kind="flat"),
    "large tiles": Case(tiles=BackwardTiles(128, 128, ds_stages=1), gaps=([3, 1, 2, 0], [0, 0, 0, 0])),
    "tall tiles": Case(d=128, tiles=BackwardTiles(80, 128), gaps=([3, 1, 2, 0], [0, 0, 0, 0])),
    "dP by halves": Case(d=128, tiles=HALVED, gaps=([3, 1, 2, 0], [0, 4, 0, 70])),
    "dP by halves, causal": Case(([100, 170, 1], [100, 170, 1]), heads=(4, 2), d=128, tiles=HALVED, mask=masks.causal(), workers=2),
    "dP by halves, deterministic": Case(
        ([200, 70], [300, 200]), d=128, tiles=HALVED, mask=masks.sliding_window(90, 100), is_deterministic=True, workers=2
    ),
    "not rounded": Case(heads=(4, 2), is_wide=True, gaps=([3, 1, 2, 0], [0, 4, 0, 70]), workers=2),
    "parts": Case(heads=(4, 2), parts=2, gaps=([3, 1, 2, 0], [0, 4, 0, 70]), workers=2),
    "interleaved parts": Case(([200, 64, 130], [200, 64, 130]), heads=(8, 2), mask=masks.causal(), parts=2, workers=3),
    "parts, padded": Case(heads=(3, 1), parts=3, gaps=([60, 130, 1, 129], [0, 125, 30, 66]), is_padded=True),
    "parts, dP by halves": Case(heads=(2, 1), parts=2, d=128, tiles=HALVED, gaps=([3, 1, 2, 0], [0, 4, 0, 70])),
    "one stage": Case(tiles=BackwardTiles(64, 128, 1, 1, 1), gaps=([3, 1, 2, 0], [1, 1, 1, 1])),
}


class _Sequence(NamedTuple):
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    dout: torch.Tensor
    lse: np.ndarray
    delta: np.ndarray
    wanted: tuple[torch.Tensor, ...]


def meant(case: Case, b: int, g: torch.Generator) -> _Sequence:
    """A sequence, heads first, and its gradients."""
    (heads, kv_heads), (rows, keys) = case.heads, (case.lengths[0][b], case.lengths[1][b])
    shapes = ((heads, rows, case.d), *((kv_heads, keys, case.d),) * 2, (heads, rows, case.d))
    q, k, v, dout = (torch.randn(shape, generator=g).bfloat16().double() for shape in shapes)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = [t.repeat_interleave(heads // kv_heads, 0) for t in leaves[1:]]
    s = leaves[0] @ whole[0].transpose(-1, -2) * SCALE
    place = [torch.tensor(b), *(torch.arange(n).view([-1 if a == at else 1 for a in range(3)]) for at, n in enumerate((heads, rows, keys)))]
    if case.score is not None:
        s = case.score(s, *place)
    if case.mask is not None:
        s = s.masked_fill(~torch.as_tensor(evaluate(trace(case.mask, "mask"), *place)).expand(s.shape), float("-inf"))
    lse = s.logsumexp(-1)
    out = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None]) @ whole[1]
    wanted = torch.autograd.grad(out, leaves, dout)
    base_2 = torch.where(lse.isinf(), float("inf"), lse * LOG2E).detach().float().numpy()
    return _Sequence(q, k, v, dout, base_2, (out * dout).sum(-1).detach().float().numpy(), wanted)


def stored(case: Case, parts: list[torch.Tensor], side: int) -> tuple[np.ndarray, list[Any]]:
    """(rows of storage, heads, positions, D) with NaN wherever no sequence is, and where each sequence is."""
    rooms = [n + gap for n, gap in zip(case.lengths[side], case.gaps[side], strict=False)]
    heads = parts[0].shape[0]
    shape = (len(parts), heads, max(rooms), case.d) if case.is_padded else (1, heads, sum(rooms), case.d)
    whole, at = np.full(shape, np.nan, dtype=np.float32), []
    for b, part in enumerate(parts):
        start = 0 if case.is_padded else sum(rooms[:b])
        at.append((b if case.is_padded else 0, slice(None), slice(start, start + part.shape[1])))
        whole[at[-1]] = part.float().numpy()
    return whole, at


def run(case: Case, seed: int = 0, changes: Changes = (), orders: int = 1) -> dict[str, float]:
    """The errors of dq, dk and dv, in units of the greatest gradient; infinite where a row of no sequence is written. "rerun": infinite if
    one of so many orders of events changes a bit of dq."""
    g = torch.Generator().manual_seed(seed)
    batch = [meant(case, b, g) for b in range(len(case.lengths[0]))]
    rooms = tuple([n + gap for n, gap in zip(*pair, strict=False)] for pair in zip(case.lengths, case.gaps, strict=True))
    s = sequences_of(case.lengths, rooms, case.is_padded)  # type: ignore[arg-type]
    (q, q_at), (dout, _) = (stored(case, [getattr(one, n) for one in batch], 0) for n in ("q", "dout"))
    (k, k_at), (v, _) = (stored(case, [getattr(one, n) for one in batch], 1) for n in ("k", "v"))
    mods, fields = [], {}
    if case.mask is not None:
        mods, ranges = [trace(case.mask, "mask")], row_ranges(trace(case.mask, "mask"))
        ask = Ask(mods[0].expr, False) if ranges is None else Ask(ranges.expr, True)
        fields = {"bands": (ask.expr,)} if case.kind == "band" else {"always": (ask,)}
    lists = None
    if case.kind in ("flat", "ragged"):
        lists = listed(case, s, mods[0])
        per_head = lists[0][0].shape[0] > 1
        fields = {"lists": case.kind, "list_cut": (128 // case.tiles.tile_m, 1), "partial": ask, "per_head": per_head}
    if case.score is not None:
        mods.insert(0, trace(case.score, "score"))
        fields["score"] = with_derivatives(mods[0].expr)[0]
    fields |= {"is_deterministic": case.is_deterministic, "has_entries": True, "stores_float32": case.parts > 1 or case.is_wide}
    config = BackwardConfig(case.d, case.d, True, case.tiles, **fields)  # type: ignore[arg-type]
    captured = captured_of(mods, config)

    def computed(order: int) -> tuple[PackedCall, np.ndarray]:
        call = PackedCall(config, s, (q, k, v, dout), [one.lse for one in batch], [one.delta for one in batch], SCALE, lists, case.parts)
        return call, run_grid(call, seed + order, case.workers, changes, *captured)

    call, dq = computed(0)
    others = [computed(n)[1] for n in range(1, orders)]
    found = {"rerun": 0.0 if all(np.array_equal(dq, other, equal_nan=True) for other in others) else np.inf}
    dk, dv = (t.reshape(len(t), -1, case.parts, *t.shape[2:]).sum(2) for t in (call.dk, call.dv))
    for i, (name, got, at) in enumerate((("dq", dq, q_at), ("dk", dk, k_at), ("dv", dv, k_at))):
        most = max(float(one.wanted[i].abs().max()) for one in batch if one.wanted[i].numel())
        errors = [np.abs(got[place] - one.wanted[i].numpy()) for place, one in zip(at, batch, strict=True)]
        found[name] = max(float(np.nan_to_num(e, nan=np.inf).max()) for e in errors if e.size) / most
        rest = np.ones(got.shape, dtype=bool)
        for place in at:
            rest[place] = False
        if not np.isnan(got[rest]).all():
            found[name] = np.inf
    return found


def listed(case: Case, s: Sequences, mask: TracedMod) -> tuple[tuple[Any, ...], torch.Tensor]:
    """The lists' tensors and the table of entries, as the host makes them for a launch."""
    storage = torch.zeros(1, case.heads[0], 1, case.d)
    blocks = None
    if case.kind == "ragged":
        made = ragged_lists(mask, s, (128, 128), case.heads[0])
        tensors = (made.mask_block_cnt, made.mask_block_idx, made.full_block_cnt, made.full_block_idx)
        blocks = VarlenBlockSparseTensors(*tensors, tile=(128, 128), seqlens_q=s.seqlens_q, seqlens_k=s.seqlens_k).to_padded()
    problem = Problem(storage, storage, storage, 1.0, predicates=(mask,), sequences=s, blocks=blocks)  # type: ignore[arg-type]
    return ragged_lists_by_key(problem, 0)


SEEDS = [pytest.param(name, seed, marks=[pytest.mark.slow] * seed) for name in CASES for seed in range(1 + (CASES[name].workers > 1))]


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_gradients(name: str, seed: int) -> None:
    errors = run(CASES[name], seed, orders=4 if CASES[name].is_deterministic else 1)
    assert max(errors.values()) <= MOST, errors


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer.startswith("packed: ")])
def test_planted_bugs_are_found(name: str) -> None:
    changes = planted(MUTANTS[name])
    for seed in range(8):
        try:
            if max(run(CASES[MUTANTS[name].killer.removeprefix("packed: ")], seed, changes).values()) > MOST:
                return
        except (Broken, IndexError):  # what the machine says, or numpy of a place outside
            return
    pytest.fail("not found")


def rows_kernel(tile_m: int) -> tuple[Any, Any]:
    """A row kernel for tiles of so many rows, and ``first_tile``."""
    names: dict[str, Any] = {"cute": None, "cutlass": SimpleNamespace(range=range, Constexpr=None), "const_expr": bool, "Int32": int}
    names |= {"BFloat16": None, "Float16": None}
    for code in compiled(("backward/packed", "backward/rows"))[0]:
        exec(code, names)
    return names["RowsAfter"](SimpleNamespace(head_dim=64, head_dim_v=64, is_bf16=True, tile_m=tile_m)), names["first_tile"]


@settings(max_examples=200, deadline=None)
@given(
    rooms=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 80)), min_size=1, max_size=9),
    tile_m=st.sampled_from([64, 128]),
    is_padded=st.booleans(),
)
def test_no_two_sequences_share_a_row_tile(rooms: list[tuple[int, int]], tile_m: int, is_padded: bool) -> None:
    lengths = [n for n, _ in rooms]
    s = sequences_of((lengths, lengths), ([sum(r) for r in rooms],) * 2, is_padded)
    storage = max(sum(r) for r in rooms) if is_padded else sum(sum(r) for r in rooms)
    tiles = ceil_div(storage, tile_m)
    rows, first_tile = rows_kernel(tile_m)
    table, owner = Table(entries_table(s.turned()).numpy()), {}
    most = (len(rooms) if is_padded else 1) * tiles + len(rooms)
    for b, (n, row, start) in enumerate(zip(lengths, s.q_row.tolist(), s.q_start.tolist(), strict=True)):
        for m in range(ceil_div(n, tile_m)):
            slot = first_tile(row, start, b, tile_m, tiles) + m
            assert 0 <= slot < most and slot not in owner
            owner[slot] = (row, start + m * tile_m, n - m * tile_m)
    for slot in range(most):
        found = rows.located(slot, table, storage)
        assert found == owner[slot] if slot in owner else found[2] <= 0
