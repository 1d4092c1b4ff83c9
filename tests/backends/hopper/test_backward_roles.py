"""The backward kernel's text on the CPU: gradients of its roles against float64, whoever goes on when, and bugs planted in it are found."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anyattn import masks
from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.backward_config import BackwardConfig, BackwardTiles, backward_tiles_for, padded_for_backward
from anyattn.backends.hopper.backward_tables import order_of_lists
from anyattn.backends.hopper.captured_sums import CapturedSum, with_derivatives
from anyattn.backends.hopper.config import Ask
from anyattn.mods.analysis.captured_loads import slots_alone
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.mods.tracing.trace import trace
from anyattn.sequences.l2_groups import fills_one_round
from anyattn.sparsity.block_sparse import tensors_of
from anyattn.sparsity.compute import tile_lists
from anyattn.sparsity.grid import TileGrid
from anyattn.sparsity.ranked_lists import ranked
from tests.mutants.hopper_role_mutants import MUTANTS, planted
from tests.mutants.mutant import Mutant
from tests.support.covering import few
from tests.support.hopper.backward_roles import Call, Table, captured_of, run_grid
from tests.support.hopper.backward_totals import Total
from tests.support.hopper.emitted import Array
from tests.support.hopper.masks import MASKS as WORDS
from tests.support.hopper.role_source import Changes, compiled
from tests.support.hopper.schedule import Broken

SCALE = 0.2
MOST = 0.02  # of the greatest gradient: P, dS and the operands have 8 bits; a lost key or row is off by several times that


class Case(NamedTuple):
    """What is computed. kind: how the mask reaches the kernel, as a band, as lists with a predicate, or as a predicate alone. learned:
    the shapes of tensors that get gradients, and what makes a score mod of them, instead of ``score``; a third item makes the oracle's."""

    sizes: tuple[int, int] = (150, 200)
    heads: tuple[int, int] = (2, 1)
    batch: int = 1
    mask: Any = None
    kind: str = "band"
    score: Any = None
    learned: tuple[Any, ...] | None = None
    tiles: BackwardTiles | None = None
    dims: tuple[int, int] = (64, 64)
    is_deterministic: bool = False
    workers: int = 1
    list_tile: tuple[int, int] = (128, 128)
    is_sorted: bool = False  # tiles of keys come in ``order_of_lists``
    stores_dq: bool = False
    dropout: float = 0.0
    parts: int = 1
    is_wide: bool = False  # dk and dv in float32
    of_kv_heads: bool = False  # lists


COPIES = 4  # of totals that have some
BUCKETS = (torch.arange(349) // 9) % 5
IDS = torch.arange(400) * 3 // 70
EXACT = 1e-4  # of the greatest gradient of a captured tensor, whose terms have 24 bits
SLOPES = torch.tensor([0.02, -0.05])
HALVED = backward_tiles_for(192, 128, is_plain=True, is_bare=True)
ALONE = BackwardTiles(64, 64, 2, 1, 1, 2, delta="before", blocks=2)
CASES = {
    "full": Case(),
    "several blocks": Case((150, 300), (4, 2), batch=2, workers=3),
    "causal": Case(mask=masks.causal(), workers=2),
    "window": Case((300, 300), mask=masks.sliding_window(70, 9)),
    "left": Case((300, 300), mask=masks.sliding_window(30, None)),
    "by head": Case((200, 300), mask=lambda b, h, i, j: i >= j + 60 * h),
    "sees nothing": Case((100, 400), mask=masks.causal()),
    "large tiles": Case((300, 200), tiles=BackwardTiles(128, 128, ds_stages=1), mask=masks.causal()),
    "tall tiles": Case((300, 200), (2, 1), dims=(128, 128), tiles=BackwardTiles(80, 128)),
    "tall tiles, one stage of dS, narrow heads": Case((170, 140), dims=(104, 112), tiles=BackwardTiles(80, 128, ds_stages=1)),
    "tall tiles, deterministic": Case((330, 260), dims=(128, 128), tiles=BackwardTiles(80, 128), is_deterministic=True, workers=3),
    "held keys": Case((200, 300), (2, 1), tiles=BackwardTiles(64, 128, holds_k=64, holds_v=32), mask=masks.causal(), workers=2),
    "delta before": Case((200, 300), tiles=BackwardTiles(64, 128, delta="before"), mask=masks.sliding_window(70, 9)),
    "delta between": Case((300, 200), (2, 1), tiles=BackwardTiles(128, 128, holds_v=64, delta="between"), mask=masks.causal()),
    "delta before a score mod": Case(
        (150, 200), tiles=BackwardTiles(64, 128, delta="before"), score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3)
    ),
    "one stage": Case((300, 200), tiles=BackwardTiles(64, 128, 1, 1, 1)),
    "one stage of dS": Case((300, 200), tiles=BackwardTiles(64, 128, 2, 2, 1)),
    "one tile of keys": Case((100, 100), (4, 2), batch=2, stores_dq=True, workers=3),
    "one tile of keys, narrow heads": Case((100, 128), dims=(40, 48), stores_dq=True),
    "one tile of keys, causal": Case((200, 90), (2, 1), mask=lambda b, h, i, j: j <= i - 70, stores_dq=True, workers=2),
    "one tile of keys, lists": Case((200, 90), mask=lambda b, h, i, j: (i + 3 * j) % 700 < 300, kind="lists", stores_dq=True),
    "one tile of shared keys": Case((100, 60), (2, 1), dims=(256, 256), stores_dq=True, workers=2),
    "one tile of keys, dP by halves": Case((100, 100), dims=(192, 128), tiles=HALVED, stores_dq=True),
    "interleaved": Case((330, 300), (9, 3), mask=masks.causal(), workers=6),
    "interleaved, rounds that begin inside a section": Case((330, 300), (6, 3), mask=masks.causal(), workers=4),
    "deterministic": Case((200, 400), (2, 1), mask=masks.sliding_window(200, 9), is_deterministic=True, workers=2),
    "deterministic by three blocks": Case((200, 500), (4, 2), mask=lambda b, h, i, j: i >= j - 250, is_deterministic=True, workers=3),
    "interleaved, deterministic": Case((330, 500), (9, 3), mask=masks.causal(), is_deterministic=True, workers=6),
    "interleaved pairs, deterministic": Case((500, 330), (4, 2), batch=2, mask=masks.causal(), is_deterministic=True, workers=3),
    "interleaved parts, deterministic": Case((330, 300), (6, 1), mask=masks.causal(), is_deterministic=True, parts=3, workers=4),
    "interleaved, deterministic, dP by halves": Case(
        (200, 300), (4, 2), mask=masks.causal(), dims=(192, 128), tiles=HALVED, is_deterministic=True, workers=3
    ),
    "interleaved, deterministic, shared keys": Case(
        (130, 200), (4, 2), mask=masks.causal(), dims=(256, 256), is_deterministic=True, workers=3
    ),
    "one head each, deterministic": Case((330, 300), (2, 2), mask=masks.causal(), is_deterministic=True, workers=3),
    "folds of key tiles": Case((1000, 1250), (1, 1), mask=lambda b, h, i, j: i >= j - 193, is_deterministic=True, workers=6),
    "folds of key tiles, tall tiles": Case(
        (900, 1100), (1, 1), dims=(128, 128), tiles=BackwardTiles(80, 128), mask=masks.causal(), is_deterministic=True, workers=4
    ),
    "one head each, deterministic, shared keys": Case(
        (200, 330), (1, 1), mask=masks.causal(), dims=(256, 256), is_deterministic=True, workers=3
    ),
    "not rounded": Case((200, 300), (4, 2), mask=masks.causal(), is_wide=True, workers=2),
    "parts": Case((150, 300), (4, 1), batch=2, parts=2, workers=3),
    "parts of one head each, causal": Case((200, 300), (6, 2), mask=masks.causal(), parts=3, workers=2),
    "interleaved parts": Case((330, 300), (6, 1), mask=masks.causal(), parts=3, workers=4),
    "parts that nothing sees": Case((100, 400), (4, 2), mask=masks.causal(), parts=2),
    "parts, deterministic": Case((200, 400), (4, 1), mask=masks.sliding_window(200, 9), is_deterministic=True, parts=2, workers=3),
    "lists of K/V heads": Case(
        (200, 300), (6, 2), mask=lambda b, h, i, j: j < 20 + 150 * (h // 3) + i // 8, kind="lists", of_kv_heads=True
    ),
    "parts, lists of K/V heads": Case(
        (200, 300),
        (4, 2),
        mask=lambda b, h, i, j: j < 20 + 150 * (h // 2) + i // 8,
        kind="lists",
        parts=2,
        workers=2,
        of_kv_heads=True,
    ),
    "deterministic lists of K/V heads": Case(
        (200, 300),
        (4, 2),
        mask=lambda b, h, i, j: j < 20 + 150 * (h // 2) + i // 8,
        kind="lists",
        is_deterministic=True,
        workers=2,
        of_kv_heads=True,
    ),
    "parts, lists": Case((300, 300), (4, 1), mask=masks.prefix_lm(70), kind="lists", parts=2, workers=2),
    "parts, tall tiles": Case((300, 200), (4, 1), dims=(128, 128), tiles=BackwardTiles(80, 128), parts=2),
    "parts, one tile of keys": Case((100, 100), (4, 2), batch=2, stores_dq=True, parts=2, workers=3),
    "parts, narrow heads": Case((150, 200), (4, 2), dims=(40, 48), parts=2),
    "parts, dP by halves": Case((150, 300), (4, 2), dims=(192, 128), tiles=HALVED, parts=2, workers=2),
    "parts, widest": Case((150, 150), (4, 2), mask=masks.causal(), dims=(256, 256), parts=2, workers=2),
    "always": Case((150, 200), mask=masks.dilated(3, 90), kind="always"),
    "lists": Case((300, 300), mask=masks.prefix_lm(70), kind="lists"),
    "sorted lists": Case((300, 500), (4, 2), mask=masks.prefix_lm(400), kind="lists", workers=2, list_tile=(64, 256), is_sorted=True),
    "deterministic lists": Case(
        (300, 500), mask=lambda b, h, i, j: (i + 3 * j) % 700 < 300, kind="lists", is_deterministic=True, workers=3
    ),
    "deterministic wide lists": Case(
        (300, 700), mask=lambda b, h, i, j: (i + 3 * j) % 900 < 300, kind="lists", is_deterministic=True, workers=3, list_tile=(256, 256)
    ),
    "strided": Case((300, 500), (2, 1), mask=WORDS["strided"], kind="lists", workers=2),
    "strided in large tiles": Case((300, 400), mask=WORDS["strided"], kind="lists", tiles=BackwardTiles(128, 128)),
    "image of another size": Case((200, 300), mask=WORDS["tiny image"], kind="lists"),
    "image in pieces": Case((200, 300), mask=WORDS["image of 50"], kind="lists", workers=2),
    "words and pairs": Case((200, 300), mask=WORDS["hashed"], kind="always"),
    "sinks": Case((200, 300), mask=masks.sink_window(4, 70), kind="lists"),
    "softcap": Case(score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3)),
    "alibi": Case(score=lambda s, b, h, i, j: s + SLOPES[h] * (i - j), mask=masks.causal()),
    "96 columns": Case((150, 200), mask=masks.causal(), dims=(80, 96)),
    "96 columns of K": Case((150, 200), dims=(96, 128)),
    "alone": Case((150, 300), (4, 2), mask=masks.prefix_lm(70), kind="lists", dims=(128, 128), tiles=ALONE, list_tile=(64, 64), workers=3),
    "alone, no stage to spare": Case(
        (150, 200), kind="lists", mask=WORDS["strided"], dims=(64, 96), list_tile=(128, 64), tiles=replace(ALONE, q_stages=1, do_stages=1)
    ),
    "alone, deterministic": Case(
        (150, 200),
        mask=masks.dilated(3, 90),
        kind="lists",
        dims=(64, 64),
        tiles=ALONE,
        list_tile=(64, 128),
        is_deterministic=True,
        workers=3,
    ),
    "alone, softcap": Case(
        (100, 150),
        (2, 1),
        mask=masks.prefix_lm(20),
        kind="lists",
        score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3),
        dims=(128, 128),
        tiles=ALONE,
        list_tile=(64, 64),
        parts=2,
    ),
    "wide": Case((150, 150), dims=(192, 192), workers=2),
    "dP by halves": Case((150, 300), (4, 2), dims=(192, 128), tiles=HALVED, workers=2),
    "dP by halves, causal": Case((300, 200), (2, 1), mask=masks.causal(), dims=(160, 96), tiles=HALVED),
    "dP by halves, deterministic": Case(
        (200, 300), mask=masks.sliding_window(100, 9), dims=(128, 192), tiles=HALVED, is_deterministic=True, workers=3
    ),
    "wide through shared memory": Case((150, 150), dims=(192, 128), tiles=BackwardTiles(64, 64, holds_k=192, delta="before"), workers=2),
    "widest": Case((150, 150), (4, 2), mask=masks.causal(), dims=(256, 256), workers=2),
    "wide keys alone": Case((130, 70), dims=(256, 64)),
    "wide and deterministic": Case((130, 200), mask=masks.sliding_window(100, 9), dims=(192, 256), is_deterministic=True, workers=3),
    "wide lists": Case((200, 200), mask=masks.prefix_lm(70), kind="lists", dims=(192, 128)),
    "wide softcap": Case((100, 100), score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3), dims=(192, 192), mask=masks.causal()),
    "dropout": Case((100, 150), (2, 1), batch=2, dropout=0.3, tiles=BackwardTiles(64, 128)),
    "dropout, causal": Case((200, 300), (2, 1), mask=masks.causal(), dropout=0.1, tiles=BackwardTiles(64, 128), workers=2),
    "dropout, lists": Case((300, 300), mask=masks.prefix_lm(70), kind="lists", dropout=0.5, tiles=BackwardTiles(64, 128), dims=(128, 128)),
    "dropout, one tile of keys": Case((150, 100), (2, 1), stores_dq=True, dropout=0.2, tiles=BackwardTiles(64, 128)),
}


CAPTURED = {
    "per head": Case((150, 300), (4, 2), batch=2, workers=2, learned=(((4,),), lambda t: lambda s, b, h, i, j: s + t[h] * (j % 3))),
    "one number": Case(learned=(((),), lambda t: lambda s, b, h, i, j: s + t * (j % 3 + h))),
    "slopes": Case(mask=masks.causal(), learned=(((2,),), lambda t: lambda s, b, h, i, j: s - t[h] * (i - j) * 0.01)),
    "a factor infinite where it is hidden": Case(
        mask=lambda b, h, i, j: i != j,
        kind="always",
        learned=(((2,),), lambda t: lambda s, b, h, i, j: s + t[h] / (i - j), lambda t: lambda s, b, h, i, j: s + t[h] / (i - j + (i == j))),
    ),
    "temperature": Case(mask=masks.dilated(2, 90), kind="always", learned=(((2,),), lambda t: lambda s, b, h, i, j: s * t[h])),
    "by row": Case((150, 200), batch=2, learned=(((2, 150),), lambda t: lambda s, b, h, i, j: s + t[h, i] * (j % 3))),
    "large tiles by row": Case((300, 200), tiles=BackwardTiles(128, 128, ds_stages=1), learned=(((300,),), lambda t: lambda s, b, h, i, j: s + t[i] * (j % 3))),
    "by key": Case((300, 200), (4, 2), workers=2, mask=masks.causal(), learned=(((4, 200),), lambda t: lambda s, b, h, i, j: s + t[h, j])),
    "distances": Case((150, 200), learned=(((2, 349),), lambda t: lambda s, b, h, i, j: s + t[h, i - j + 199])),
    "clamped distances": Case((300, 200), mask=masks.causal(), learned=(((2, 19),), lambda t: lambda s, b, h, i, j: s + t[h, torch.clamp(i - j, -9, 9) + 9])),
    "looked-up distances": Case((150, 200), learned=(((2, 5),), lambda t: lambda s, b, h, i, j: s + t[h, BUCKETS[i - j + 199]])),
    "buckets": Case((200, 300), workers=2, learned=(((8, 2),), lambda t: lambda s, b, h, i, j: s + t[torch.clamp((i - j).abs() // 30, 0, 7), h])),
    "large tiles by distance": Case((300, 200), (1, 1), tiles=BackwardTiles(128, 128, ds_stages=1), learned=(((499,),), lambda t: lambda s, b, h, i, j: s + t[i - j + 199])),
    "pairs": Case((130, 200), batch=2, learned=(((2, 130, 200),), lambda t: lambda s, b, h, i, j: s + t[h, i, j])),
    "each pair": Case((150, 200), batch=2, mask=masks.causal(), learned=(((2, 2, 150, 200),), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j])),
    "looked up": Case((150, 200), mask=masks.causal(), learned=(((2, 9, 9),), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i], IDS[j]])),
    "by row, capped": Case(mask=masks.causal(), learned=(((2, 150),), lambda t: lambda s, b, h, i, j: 3 * torch.tanh((s + t[h, i]) / 3))),
    "temperatures of heads and rows": Case((100, 200), mask=masks.dilated(2, 90), kind="always", learned=(((2,), (2, 100)), lambda t, u: lambda s, b, h, i, j: s * t[h] * u[h, i])),
    "large tiles, temperature": Case((300, 200), mask=masks.causal(), tiles=BackwardTiles(128, 128, ds_stages=1), learned=(((2,),), lambda t: lambda s, b, h, i, j: s * t[h])),
    "two": Case(learned=(((2, 150), (2, 200)), lambda t, u: lambda s, b, h, i, j: s + t[h, i] * u[h, j])),
    "lists of rows": Case((300, 300), mask=masks.prefix_lm(70), kind="lists", learned=(((2, 300),), lambda t: lambda s, b, h, i, j: s + t[h, i] * (j % 3))),
}  # fmt: skip


class Prepared(NamedTuple):
    """What a case and a seed give, whatever is planted in the kernel. given: q, k, v, dout, LSE in base 2 and delta. own: the tensors that
    get gradients. wanted: gradients in float64."""

    config: BackwardConfig
    given: list[np.ndarray]
    own: list[torch.Tensor]
    wanted: list[torch.Tensor]
    scale: float
    lists: tuple[Any, ...]
    captured: tuple[tuple, tuple]


@functools.cache
def _prepared(case: Case, seed: int) -> Prepared:
    (rows, keys), (heads, kv_heads), (d, dv) = case.sizes, case.heads, case.dims
    g = torch.Generator().manual_seed(seed)
    shapes = tuple((case.batch, *shape) for shape in ((heads, rows, d), (kv_heads, keys, d), (kv_heads, keys, dv), (heads, rows, dv)))
    q, k, v, dout = (torch.randn(shape, generator=g).bfloat16().double() for shape in shapes)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    own = [torch.randn(shape, generator=g, dtype=torch.float64).float() for shape in (case.learned[0] if case.learned else ())]
    own = [t.double().requires_grad_() for t in own]
    given_score = case.learned[1](*(t.detach().float() for t in own)) if case.learned else case.score
    score, mask = (None if m is None else trace(m, kind) for m, kind in ((given_score, "score"), (case.mask, "mask")))
    whole_k, whole_v = (t.repeat_interleave(heads // kv_heads, 1) for t in leaves[1:])
    scale = SCALE * (64 / d) ** 0.5
    s = leaves[0] @ whole_k.transpose(-1, -2) * scale
    place = [torch.arange(n).view([-1 if a == at else 1 for a in range(4)]) for at, n in enumerate((case.batch, heads, rows, keys))]
    if case.learned is not None:
        s = case.learned[-1](*own)(s, *place)
    elif case.score is not None:
        s = case.score(s, *place) if not score.tensors else s + SLOPES.double()[place[1]] * (place[2] - place[3])  # type: ignore[union-attr]
    seen = torch.ones(s.shape, dtype=torch.bool)
    if mask is not None:
        seen = torch.as_tensor(evaluate(mask, *place)).expand(s.shape)
    s = s.masked_fill(~seen, float("-inf"))
    lse = s.logsumexp(-1)
    p = torch.exp(s - lse.masked_fill(lse.isinf(), 0.0)[..., None])
    dropout = dropout_of(Seeded(torch.tensor([seed - 7, 2**31 - 1 - seed], dtype=torch.int32), case.dropout)) if case.dropout else None
    if dropout is not None:
        p = torch.where(evaluate(dropout.keep, *place), p * dropout.scale, 0.0)
    out = p @ whole_v
    wanted = torch.autograd.grad(out, [*leaves, *own], dout)
    padded = padded_for_backward(*case.dims)
    tiles = case.tiles or backward_tiles_for(*padded)
    fields, mods = _masked(case, mask, tiles)
    if score is not None:
        mods.insert(0, score)
        slots_wanted = tuple(i for i, t in enumerate(score.tensors) if t.is_floating_point()) if case.learned else ()
        alone = slots_alone(score.expr, slots_wanted, (case.batch, heads, rows, keys), tuple(t.shape for t in score.tensors))
        fields["score"], fields["sums"] = with_derivatives(score.expr, slots_wanted, alone)
    fields["has_dropout"] = dropout is not None
    fields |= {"is_deterministic": case.is_deterministic, "stores_dq": case.stores_dq, "stores_float32": case.parts > 1 or case.is_wide}
    config = BackwardConfig(*padded, True, tiles, **fields)
    base_2 = torch.where(lse.isinf(), float("inf"), lse * LOG2E)
    given = [t.detach().float().numpy() for t in (q, k, v, dout, base_2, (out * dout).sum(-1))]
    for tensor in given:
        tensor.flags.writeable = False
    numbers, tensors = captured_of(mods, config)
    if dropout is not None:
        (least, factor), (drawn,) = dropout.captured
        numbers, tensors = (*numbers, least, np.float32(factor)), (*tensors, Array(drawn))
    return Prepared(config, given, own, list(wanted), scale, _lists(case, mask), (numbers, tensors))


def run(
    case: Case, seed: int = 0, changes: Changes = (), orders: int = 2, begins_late: Callable[[int], bool] = lambda number: False
) -> dict[str, float]:
    """The errors of dq, dk and dv, and of the gradients of captured tensors, in units of the greatest gradient; rerun: whether another of so
    many orders of events changes a bit of dq, where it must not. Where the first order is wrong already, others are not run."""
    prepared = _prepared(case, seed)
    config, given, own = prepared.config, prepared.given, prepared.own

    def computed(schedule: int) -> list[np.ndarray]:
        call = Call(config, tuple(given[:4]), given[4], given[5], prepared.scale, prepared.lists, case.parts)
        call.factor = 1.0 / (1.0 - case.dropout)
        if case.is_sorted:
            lists = tuple(None if t is None else torch.from_numpy(t) for t in prepared.lists)
            order = order_of_lists(lists, config.list_cut[1], call.work[0]).order
            assert order is not None
            call.order = order.numpy()
        totals = tuple(_total(t.shape, [s for s in config.sums if s.total == i]) for i, t in enumerate(own))
        dq = run_grid(call, schedule, case.workers, changes, *prepared.captured, totals, begins_late)
        of_keys = (t.reshape(case.batch, -1, case.parts, *t.shape[2:]).sum(2) for t in (call.dk, call.dv))
        return [dq, *of_keys, *(t.values.reshape(*own[i].shape, -1).sum(-1) for i, t in enumerate(totals))]

    found = computed(seed)
    names = ["dq", "dk", "dv", *(f"captured {i}" for i in range(len(own)))]
    errors = {
        name: float(np.nan_to_num(np.abs(got - want.numpy()), nan=np.inf).max() / want.abs().max())
        for name, got, want in zip(names, found, prepared.wanted, strict=True)
    }
    if case.is_deterministic and max(errors.values()) <= MOST:
        others = (computed(seed + n)[0] for n in range(1, orders))
        errors["rerun"] = 0.0 if all(np.array_equal(found[0], other) for other in others) else np.inf
    return errors


def _total(shape: tuple[int, ...], sums: list[CapturedSum]) -> Total:
    return Total((*(shape or (1,)), *([COPIES] if any(s.has_copies for s in sums) else [])))


def _masked(case: Case, mask: Any, tiles: BackwardTiles) -> tuple[dict[str, Any], list[Any]]:
    """The config's fields of a mask, and the mods that they are of."""
    if mask is None:
        return {}, []
    ranges = row_ranges(mask)
    if case.kind == "band":
        assert ranges is not None
        return {"bands": (ranges.expr,)}, [mask]
    ask = Ask(mask.expr, False) if ranges is None else Ask(ranges.expr, True)
    if case.kind == "always":
        return {"always": (Ask(mask.expr, False),)}, [mask]
    return {
        "lists": "dense",
        "list_cut": tuple(n // own for n, own in zip(case.list_tile, (tiles.tile_m, tiles.tile_n), strict=True)),
        "partial": ask,
        "per_head": case.of_kv_heads,
        "by_kv_head": case.of_kv_heads,
    }, [mask]


def _lists(case: Case, mask: Any) -> tuple[Any, ...]:
    if case.kind != "lists":
        return ()
    lists = tile_lists(mask, TileGrid(case.sizes, case.list_tile, (1, case.heads[0] if case.of_kv_heads else 1)), "cpu")
    if case.of_kv_heads:
        lists = lists.from_classes(lists.classes()[:, :: case.heads[0] // case.heads[1]], lists.tile, lists.lengths)
    turned = lists.transposed()
    tensors = (*tensors_of(turned), None)
    if case.is_deterministic:
        counts, tiles, ranks = ranked(tensors_of(lists), tensors_of(turned))
        tensors = (counts, tiles, None, None, ranks)
    return tuple(None if t is None else t.numpy() for t in tensors)


# mistakes in who waits for whom show in some orders of events alone: these cases have barriers and stages of every kind
RACES = ("full", "alone", "one stage of dS", "window", "wide", "wide through shared memory", "wide keys alone", "dP by halves")
SEEDS = [
    pytest.param(name, seed, marks=[pytest.mark.slow] * (seed > 0 and name not in RACES))
    for name in CASES
    for seed in range(7 if name in RACES else 3)
]


@pytest.mark.parametrize(("name", "seed"), SEEDS)
def test_gradients(name: str, seed: int) -> None:
    errors = run(CASES[name], seed)
    assert max(errors.values()) <= MOST, errors


@pytest.mark.parametrize("seed", few(range(2), 0))
@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captured_tensors(name: str, seed: int) -> None:
    errors = run(CAPTURED[name], seed)
    assert max(errors.values()) <= MOST, errors
    assert max(error for of, error in errors.items() if of.startswith("captured")) <= EXACT, errors


_EACH, _WIDE = (
    "self._see_each(seen, expr, at, line, places, captured)",
    "are_wide(known, *self.captured(captured, at), places, line, LEVELS[-1])",
)


@pytest.mark.parametrize(("fault", "new"), [("", ""), (_EACH, "pass"), (_WIDE, "True")])
def test_words_of_pairs_are_applied(fault: str, new: str) -> None:
    """What both passes make of tiny divisors, in the text that they share."""
    edits = [Mutant("", "backends.hopper.kernel.softmax:Softmax._see_if_wide", fault, new, "")] if fault else []
    assert (max(run(CASES["image of another size"], 0, planted(*edits)).values()) > MOST) is bool(fault)


_LOADER, _SCHEDULER = (f"backends.hopper.kernel.backward.{name}" for name in ("producer:LoadsRows", "scheduler:VisitsRows"))


@pytest.mark.parametrize("name", ["deterministic by three blocks", "folds of key tiles", "folds of key tiles, tall tiles"])
@pytest.mark.parametrize("is_first", [True, False])
def test_no_tile_waits_for_a_block_that_has_not_begun(name: str, is_first: bool) -> None:
    """The first block begins after the others, or the others after the first."""
    assert max(run(CASES[name], begins_late=lambda number: (number == 0) == is_first).values()) <= MOST


@pytest.mark.parametrize(
    ("name", "is_first", "mistakes"),
    [
        (
            "deterministic by three blocks",
            True,
            [
                Mutant("", f"{_LOADER}._first_drawn", "if const_expr(self.config.is_deterministic): ...", "if False: ...", ""),
                Mutant("", f"{_LOADER}._next_drawn", "self.config.is_deterministic", "False", ""),
            ],
        ),
        ("folds of key tiles", False, [Mutant("", f"{_LOADER}.load", "if const_expr(self.config.folds_keys): ...", "if False: ...", "")]),
        (
            "folds of key tiles",
            False,
            [Mutant("", f"{_SCHEDULER}.folded_turn", "self.folded(n_block, __, __1, __2)", "n_block", "")],
        ),
    ],
)
def test_a_tile_that_waits_for_a_late_block_is_found(name: str, is_first: bool, mistakes: list[Mutant]) -> None:
    with pytest.raises(Broken):
        run(CASES[name], changes=planted(*mistakes), begins_late=lambda number: (number == 0) == is_first)


def _scheduling() -> dict[str, Any]:
    """The names of the scheduler's module, for numbers of Python."""
    names: dict[str, Any] = {"Int32": int, "NamedTuple": NamedTuple, "const_expr": bool, "fills_one_round": fills_one_round, "Any": Any}
    names |= {"Softmax": SimpleNamespace(captured=None), "Visits": SimpleNamespace(band=None), "cutlass": SimpleNamespace(min=min)}
    names["select"] = lambda condition, yes, no, kind: yes if condition else no
    exec(*compiled(("backward/scheduler",))[0], names)
    return names


@pytest.mark.parametrize(
    ("tiles", "ratio", "parts", "order"),
    [
        (8, 1, None, [7, 6, 5, 4, 3, 2, 1, 0]),
        (11, 1, None, [7, 6, 5, 4, 3, 2, 1, 0, 8, 9, 10]),
        (18, 1, 1, [7, 6, 5, 4, 3, 2, 1, 0, 8, 9, 10, 11, 12, 13, 14, 15, 17, 16]),
        (7, 1, None, [0, 1, 2, 3, 4, 5, 6]),
        (9, 2, None, [0, 1, 2, 3, 4, 5, 6, 7, 8]),
        (9, 1, 2, [0, 1, 2, 3, 4, 5, 6, 7, 8]),  # one query head for each part of a group of two
    ],
)
def test_folds(tiles: int, ratio: int, parts: int | None, order: list[int]) -> None:
    names = _scheduling()
    sizes = names["KeySizes"](tiles, 1, 1, 1, ratio, parts)
    assert [names["VisitsRows"]().folded(i, tiles, tiles, sizes) for i in range(tiles)] == order


@pytest.mark.parametrize("ahead", [(3, 1, 0), (2, 1, 0), (3, 0, 0), (3, 1, 2)])
def test_turns_read_ahead_are_those_of_one_row_tile(ahead: tuple[int, int, int]) -> None:
    asked: list[int] = []

    def load(at: Any, dtype: Any, **_: Any) -> int:
        asked.append(int(at.of[at.at]))
        return asked[-1] if len(asked) == 1 else 7

    names: dict[str, Any] = {"Int32": int, "cute": SimpleNamespace(arch=SimpleNamespace(load=load))}
    exec(*compiled(("backward/adder",))[0], names)
    turns = np.arange(24, dtype=np.int32).reshape(3, 2, 4) // 4  # less than the turn, in each row tile of an entry's head its own
    names["Adds"]()._await(Table(turns), (3, 1, 0), 7, ahead, 7)
    assert asked == ([] if ahead == (3, 1, 0) else [1, 1])


@pytest.mark.parametrize("ratio", [1, 2, 3, 4, 9])
def test_the_turn_read_ahead_is_that_of_the_next_visit_but_one(ratio: int) -> None:
    names: dict[str, Any] = {"Any": Any, "cutlass": SimpleNamespace(max=max)}
    exec(*compiled(("backward/adder",))[0], names)
    adds = names["Adds"]()
    for interleaves in (True, False):
        adds.config = SimpleNamespace(interleaves_heads=interleaves)
        heads = range(2 * ratio, 3 * ratio)
        places = [(m, h, 5) for m in (4, 3, 2) for h in heads] if interleaves else [(m, h, 5) for h in heads for m in (4, 3, 2)]
        for place, after in zip(places, places[2:], strict=False):
            if place[1] == after[1] or interleaves:  # else the next head's, of which nothing is read ahead
                assert adds._after_next(*place, ratio) == after


@pytest.mark.parametrize(
    ("has_entries", "ratio", "section", "places", "is_fixed"),
    [
        (False, 2, 2, {0: 1, 127: 1, 128: 0, 255: 0, 256: 1}, False),  # 2 x 64 key tiles fill one round of 132 thread blocks
        (False, 2, 1, {0: 1, 63: 1, 64: 1, 131: 1, 132: 0, 264: 1}, False),  # 64 do not: rounds begin inside a section
        (True, 2, 2, {0: 1, 127: 1, 128: 1, 255: 1}, False),
        (False, 1, 2, {0: 0, 127: 0, 128: 0}, False),
        (True, 1, 2, {0: 0, 128: 0}, False),
        (False, 2, 2, {0: 1, 128: 1, 256: 1}, True),
        (True, 1, 2, {0: 1, 128: 1}, True),
    ],
)
def test_rounds_of_interleaved_heads_begin_at_alternate_ends(
    has_entries: bool, ratio: int, section: int, places: dict[int, int], is_fixed: bool
) -> None:
    rows = _scheduling()["VisitsRows"]()
    rows.config = SimpleNamespace(has_entries=has_entries, is_deterministic=is_fixed)
    assert {work: rows.begins_last(work, (64, 16, section, 8, ratio, None), 132) for work in places} == places
    assert [rows.interleaved(i, 3, 2, 0) for i in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [rows.interleaved(i, 3, 2, 1) for i in range(6)] == [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]


def test_which_heads_are_interleaved() -> None:
    causal, window = (row_ranges(trace(m, "mask")).expr for m in (masks.causal(), masks.sliding_window(9, 0)))
    by_head = row_ranges(trace(lambda b, h, i, j: j <= i + h, "mask")).expr

    def interleaves(*bands: Any, **fields: Any) -> bool:
        return BackwardConfig(64, 64, True, BackwardTiles(64, 128), bands=bands, **fields).interleaves_heads

    assert interleaves(causal) and interleaves(causal, has_entries=True)
    assert not any(interleaves(*bands) for bands in ((), (window,), (by_head,)))
    assert interleaves(causal, is_deterministic=True) and not interleaves(window, is_deterministic=True)

    def folds(*bands: Any, is_deterministic: bool = True) -> bool:
        return BackwardConfig(64, 64, True, BackwardTiles(64, 128), bands=bands, is_deterministic=is_deterministic).folds_keys

    assert folds(causal) and not folds(causal, is_deterministic=False) and not folds(window) and not folds()
    shared = BackwardTiles(64, 64, delta="before")
    assert not BackwardConfig(64, 64, True, shared, bands=(causal,), is_deterministic=True).folds_keys


DETERMINISTIC = [name for name, case in CASES.items() if case.is_deterministic]


@pytest.mark.parametrize("name", few(DETERMINISTIC, "deterministic", "deterministic lists"))
def test_the_order_of_sums_is_fixed(name: str) -> None:
    assert run(CASES[name], orders=6)["rerun"] == 0.0


@pytest.mark.parametrize("name", [name for name, mutant in MUTANTS.items() if mutant.killer in CASES | CAPTURED])
def test_planted_bugs_are_found(name: str) -> None:
    changes = planted(MUTANTS[name])
    for seed in range(8):
        try:
            errors = run((CASES | CAPTURED)[MUTANTS[name].killer], seed, changes)
            if any(error > (EXACT if of.startswith("captured") else MOST) for of, error in errors.items()):
                return
        except Broken:
            return
    pytest.fail("not found")
