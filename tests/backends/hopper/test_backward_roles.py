"""The backward kernel's text on the CPU: gradients of its roles against float64, whoever goes on when, and bugs planted in it are found."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from anyattn import masks
from anyattn.arithmetic import LOG2E
from anyattn.backends.hopper.backward import ranked
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
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.compute import tile_lists
from tests.support.covering import few
from tests.support.hopper.backward_roles import MODULES, Call, Changes, Table, captured_of, compiled, run_grid
from tests.support.hopper.backward_totals import Total
from tests.support.hopper.emitted import Array
from tests.support.hopper.masks import MASKS as WORDS
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


COPIES = 4  # of totals that have some
BUCKETS = (torch.arange(349) // 9) % 5
IDS = torch.arange(400) * 3 // 70
EXACT = 1e-4  # of the greatest gradient of a captured tensor, whose terms have 24 bits
SLOPES = torch.tensor([0.02, -0.05])
HALVED = backward_tiles_for(192, 128, is_plain=True, is_bare=True)
CASES = {
    "one tile": Case((64, 128), (1, 1)),
    "full": Case(),
    "several blocks": Case((150, 300), (4, 2), batch=2, workers=3),
    "causal": Case(mask=masks.causal(), workers=2),
    "window": Case((300, 300), mask=masks.sliding_window(70, 9)),
    "left": Case((300, 300), mask=masks.sliding_window(30, None)),
    "by head": Case((200, 300), mask=lambda b, h, i, j: i >= j + 60 * h),
    "sees nothing": Case((100, 400), mask=masks.causal()),
    "large tiles": Case((300, 200), tiles=BackwardTiles(128, 128, ds_stages=1), mask=masks.causal()),
    "large tiles, two stages of dS": Case((300, 300), (2, 1), tiles=BackwardTiles(128, 128), mask=masks.sliding_window(70, 9)),
    "tall tiles": Case((300, 200), (2, 1), dims=(128, 128), tiles=BackwardTiles(80, 128)),
    "tall tiles, causal": Case((200, 300), dims=(128, 128), tiles=BackwardTiles(80, 128), mask=masks.causal()),
    "tall tiles, one stage of dS, narrow heads": Case((170, 140), dims=(104, 112), tiles=BackwardTiles(80, 128, ds_stages=1)),
    "tall tiles, deterministic": Case((330, 260), dims=(128, 128), tiles=BackwardTiles(80, 128), is_deterministic=True, workers=3),
    "tall tiles, deterministic window": Case(
        (330, 260), dims=(128, 128), tiles=BackwardTiles(80, 128), mask=masks.sliding_window(70, 9), is_deterministic=True
    ),
    "held keys": Case((200, 300), (2, 1), tiles=BackwardTiles(64, 128, holds_k=64, holds_v=32), mask=masks.causal(), workers=2),
    "delta before": Case((200, 300), tiles=BackwardTiles(64, 128, delta="before"), mask=masks.sliding_window(70, 9)),
    "delta between": Case((300, 200), (2, 1), tiles=BackwardTiles(128, 128, holds_v=64, delta="between"), mask=masks.causal()),
    "delta before a score mod": Case(
        (150, 200), tiles=BackwardTiles(64, 128, delta="before"), score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3)
    ),
    "sums from registers": Case((200, 200), (2, 1), tiles=BackwardTiles(128, 128, dq_eighths=3), workers=2),
    "one stage": Case((300, 200), tiles=BackwardTiles(64, 128, 1, 1, 1)),
    "one stage of dS": Case((300, 200), tiles=BackwardTiles(64, 128, 2, 2, 1)),
    "one tile of keys": Case((150, 100), (4, 2), batch=2, stores_dq=True, workers=3),
    "one tile of keys, narrow heads": Case((150, 128), dims=(40, 48), stores_dq=True),
    "one tile of keys, causal": Case((300, 90), (2, 1), mask=lambda b, h, i, j: j <= i - 70, stores_dq=True, workers=2),
    "one tile of keys, large tiles": Case((300, 90), tiles=BackwardTiles(128, 128, ds_stages=1), stores_dq=True),
    "one tile of keys, lists": Case((300, 90), mask=lambda b, h, i, j: (i + 3 * j) % 700 < 300, kind="lists", stores_dq=True),
    "one tile of keys, wide": Case((150, 100), dims=(128, 128), stores_dq=True),
    "one tile of shared keys": Case((150, 60), (4, 2), dims=(256, 256), stores_dq=True, workers=2),
    "one tile of keys, dP by halves": Case((150, 100), dims=(192, 128), tiles=HALVED, stores_dq=True),
    "interleaved": Case((330, 300), (9, 3), mask=masks.causal(), workers=6),
    "interleaved, rounds that begin inside a section": Case((330, 300), (6, 3), mask=masks.causal(), workers=4),
    "interleaved, tall tiles": Case((330, 250), (4, 2), dims=(128, 128), tiles=BackwardTiles(80, 128), mask=masks.causal(), workers=4),
    "deterministic": Case((200, 400), (2, 1), mask=masks.sliding_window(200, 9), is_deterministic=True, workers=2),
    "deterministic by three blocks": Case((200, 500), (4, 2), mask=lambda b, h, i, j: i >= j - 250, is_deterministic=True, workers=3),
    "deterministic by one block": Case((200, 400), (2, 1), mask=masks.causal(), is_deterministic=True),
    "always": Case((150, 200), mask=masks.dilated(3, 90), kind="always"),
    "lists": Case((300, 300), mask=masks.prefix_lm(70), kind="lists"),
    "sorted lists": Case((300, 500), (4, 2), mask=masks.prefix_lm(400), kind="lists", workers=2, list_tile=(64, 256), is_sorted=True),
    "lists and a predicate": Case((300, 200), mask=lambda b, h, i, j: (i + j) % 7 < 90 - i // 3, kind="lists"),
    "deterministic lists": Case(
        (300, 500), mask=lambda b, h, i, j: (i + 3 * j) % 700 < 300, kind="lists", is_deterministic=True, workers=3
    ),
    "deterministic wide lists": Case(
        (300, 700), mask=lambda b, h, i, j: (i + 3 * j) % 900 < 300, kind="lists", is_deterministic=True, workers=3, list_tile=(256, 256)
    ),
    "neighbourhood": Case((300, 300), mask=WORDS["neighbourhood"], kind="lists"),
    "strided": Case((300, 500), (2, 1), mask=WORDS["strided"], kind="lists", workers=2),
    "strided in large tiles": Case((300, 400), mask=WORDS["strided"], kind="lists", tiles=BackwardTiles(128, 128)),
    "image of another size": Case((200, 300), mask=WORDS["odd image"], kind="lists"),
    "image in pieces": Case((200, 300), mask=WORDS["image of 50"], kind="lists", workers=2),
    "words and pairs": Case((200, 300), mask=WORDS["hashed"], kind="always"),
    "sinks": Case((200, 300), mask=masks.sink_window(4, 70), kind="lists"),
    "valid keys": Case((150, 200), mask=WORDS["valid"], kind="always"),
    "wide neighbourhood": Case((200, 200), mask=WORDS["neighbourhood"], kind="lists", dims=(192, 128)),
    "softcap": Case(score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3)),
    "alibi": Case(score=lambda s, b, h, i, j: s + SLOPES[h] * (i - j), mask=masks.causal()),
    "96 columns": Case((150, 200), mask=masks.causal(), dims=(80, 96)),
    "96 columns of K": Case((150, 200), dims=(96, 128)),
    "wide": Case((150, 150), dims=(192, 192), workers=2),
    "dP by halves": Case((150, 300), (4, 2), dims=(192, 128), tiles=HALVED, workers=2),
    "dP by halves, causal": Case((300, 200), (2, 1), mask=masks.causal(), dims=(160, 96), tiles=HALVED),
    "dP by halves, deterministic": Case(
        (200, 300), mask=masks.sliding_window(100, 9), dims=(128, 192), tiles=HALVED, is_deterministic=True, workers=3
    ),
    "wide through shared memory": Case((150, 150), dims=(192, 128), tiles=BackwardTiles(64, 64, holds_k=192, delta="before"), workers=2),
    "widest": Case((150, 150), (4, 2), mask=masks.causal(), dims=(256, 256), workers=2),
    "odd and wide": Case((100, 100), dims=(136, 200), mask=masks.sliding_window(50, 9)),
    "wide keys alone": Case((130, 70), dims=(256, 64)),
    "wide values alone": Case((70, 130), dims=(40, 256), mask=masks.causal()),
    "wide and deterministic": Case((130, 200), mask=masks.sliding_window(100, 9), dims=(192, 256), is_deterministic=True, workers=3),
    "wide lists": Case((200, 200), mask=masks.prefix_lm(70), kind="lists", dims=(192, 128)),
    "wide softcap": Case((100, 100), score=lambda s, b, h, i, j: 3 * torch.tanh(s / 3), dims=(192, 192), mask=masks.causal()),
    "wide always": Case((100, 150), mask=masks.dilated(3, 90), kind="always", dims=(136, 64)),
    "dropout": Case((100, 150), (2, 1), batch=2, dropout=0.3, tiles=BackwardTiles(64, 128)),
    "dropout, causal": Case((200, 300), (2, 1), mask=masks.causal(), dropout=0.1, tiles=BackwardTiles(64, 128), workers=2),
    "dropout, lists": Case((300, 300), mask=masks.prefix_lm(70), kind="lists", dropout=0.5, tiles=BackwardTiles(64, 128), dims=(128, 128)),
    "dropout, one tile of keys": Case((150, 100), (2, 1), stores_dq=True, dropout=0.2, tiles=BackwardTiles(64, 128)),
    "square": Case(score=lambda s, b, h, i, j: s * s * 0.3, mask=masks.dilated(2, 90), kind="always"),
}


CAPTURED = {
    "per head": Case((150, 300), (4, 2), batch=2, workers=2, learned=(((4,),), lambda t: lambda s, b, h, i, j: s + t[h] * (j % 3))),
    "one number": Case(learned=(((),), lambda t: lambda s, b, h, i, j: s + t * (j % 3 + h))),
    "by entry and head": Case(batch=2, learned=(((2, 2),), lambda t: lambda s, b, h, i, j: s + t[b, -1 - h] * (j % 3))),
    "slopes": Case(mask=masks.causal(), learned=(((2,),), lambda t: lambda s, b, h, i, j: s - t[h] * (i - j) * 0.01)),
    "a factor infinite where it is hidden": Case(
        mask=lambda b, h, i, j: i != j,
        kind="always",
        learned=(((2,),), lambda t: lambda s, b, h, i, j: s + t[h] / (i - j), lambda t: lambda s, b, h, i, j: s + t[h] / (i - j + (i == j))),
    ),
    "temperature": Case(mask=masks.dilated(2, 90), kind="always", learned=(((2,),), lambda t: lambda s, b, h, i, j: s * t[h])),
    "half": Case(learned=(((2,),), lambda t: lambda s, b, h, i, j: s * 0.5 + t[h] * (j % 3))),
    "by row": Case((150, 200), batch=2, learned=(((2, 150),), lambda t: lambda s, b, h, i, j: s + t[h, i] * (j % 3))),
    "large tiles by row": Case((300, 200), tiles=BackwardTiles(128, 128, ds_stages=1), learned=(((300,),), lambda t: lambda s, b, h, i, j: s + t[i] * (j % 3))),
    "by id of a row": Case(learned=(((2, 9),), lambda t: lambda s, b, h, i, j: s + t[h, IDS[i]] * (j % 3))),
    "by key": Case((300, 200), (4, 2), workers=2, mask=masks.causal(), learned=(((4, 200),), lambda t: lambda s, b, h, i, j: s + t[h, j])),
    "by key, capped": Case(learned=(((2, 200),), lambda t: lambda s, b, h, i, j: 3 * torch.tanh((s + t[h, j]) / 3))),
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
    tiles = case.tiles or backward_tiles_for(*padded, is_deterministic=case.is_deterministic)
    fields, mods = _masked(case, mask, tiles)
    if score is not None:
        mods.insert(0, score)
        slots_wanted = tuple(i for i, t in enumerate(score.tensors) if t.is_floating_point()) if case.learned else ()
        alone = slots_alone(score.expr, slots_wanted, (case.batch, heads, rows, keys), tuple(t.shape for t in score.tensors))
        fields["score"], fields["sums"] = with_derivatives(score.expr, slots_wanted, alone)
    fields["has_dropout"] = dropout is not None
    config = BackwardConfig(*padded, True, tiles, is_deterministic=case.is_deterministic, stores_dq=case.stores_dq, **fields)
    base_2 = torch.where(lse.isinf(), float("inf"), lse * LOG2E)
    given = [t.detach().float().numpy() for t in (q, k, v, dout, base_2, (out * dout).sum(-1))]
    for tensor in given:
        tensor.flags.writeable = False
    numbers, tensors = captured_of(mods, config)
    if dropout is not None:
        (least, factor), (drawn,) = dropout.captured
        numbers, tensors = (*numbers, least, np.float32(factor)), (*tensors, Array(drawn))
    return Prepared(config, given, own, list(wanted), scale, _lists(case, mask), (numbers, tensors))


def run(case: Case, seed: int = 0, changes: Changes = (), orders: int = 2, is_first_late: bool = False) -> dict[str, float]:
    """The errors of dq, dk and dv, and of the gradients of captured tensors, in units of the greatest gradient; rerun: whether another of so
    many orders of events changes a bit of dq, where it must not. Where the first order is wrong already, others are not run."""
    prepared = _prepared(case, seed)
    config, given, own = prepared.config, prepared.given, prepared.own

    def computed(schedule: int) -> list[np.ndarray]:
        call = Call(config, tuple(given[:4]), given[4], given[5], prepared.scale, prepared.lists)
        call.factor = 1.0 / (1.0 - case.dropout)
        if case.is_sorted:
            lists = tuple(None if t is None else torch.from_numpy(t) for t in prepared.lists)
            order = order_of_lists(lists, config.list_cut[1], call.work[0]).order
            assert order is not None
            call.order = order.numpy()
        totals = tuple(_total(t.shape, [s for s in config.sums if s.total == i]) for i, t in enumerate(own))
        dq = run_grid(call, schedule, case.workers, changes, *prepared.captured, totals, is_first_late)
        return [dq, call.dk, call.dv, *(t.values.reshape(*own[i].shape, -1).sum(-1) for i, t in enumerate(totals))]

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
    }, [mask]


def _lists(case: Case, mask: Any) -> tuple[Any, ...]:
    if case.kind != "lists":
        return ()
    found = tile_lists(mask, 1, 1, *case.sizes, case.list_tile, torch.device("cpu"))
    turned = BlockSparseTensors(*found, tile=case.list_tile, lengths=case.sizes).transposed()
    tensors = (turned.mask_block_cnt, turned.mask_block_idx, turned.full_block_cnt, turned.full_block_idx, None)
    return tuple(None if t is None else t.numpy() for t in (ranked(turned.classes()) if case.is_deterministic else tensors))


@pytest.mark.parametrize("seed", few(range(3), 0))
@pytest.mark.parametrize("name", CASES)
def test_gradients(name: str, seed: int) -> None:
    errors = run(CASES[name], seed)
    assert max(errors.values()) <= MOST, errors


@pytest.mark.parametrize("seed", few(range(2), 0))
@pytest.mark.parametrize("name", CAPTURED)
def test_gradients_of_captured_tensors(name: str, seed: int) -> None:
    errors = run(CAPTURED[name], seed)
    assert max(errors.values()) <= MOST, errors
    assert max(error for of, error in errors.items() if of.startswith("captured")) <= EXACT, errors


@pytest.mark.parametrize("fault", ["", "no pair is asked", "words are taken where divisors are small"])
def test_words_of_pairs_are_applied(fault: str) -> None:
    """What the forward pass makes of small divisors, in its text, which both passes share."""
    changes: Changes = (("backward/scores", "pairs_are_words = False", "pairs_are_words = True"),)
    changes += {
        "": (),
        "no pair is asked": (("softmax", "elif const_expr(self.pairs_are_words):", "elif False:"),),
        "words are taken where divisors are small": (
            ("softmax", "if are_wide(known, *self.captured(captured, at), places, line):", "if True:"),
        ),
    }[fault]
    assert (max(run(CASES["image of another size"], 0, changes).values()) > MOST) is bool(fault)


_LATE = "deterministic by three blocks"


def test_no_tile_waits_for_a_block_that_has_not_begun() -> None:
    assert max(run(CASES[_LATE], is_first_late=True).values()) <= MOST
    by_number = (
        LOADER,
        "return cute.arch.shuffle_sync(self._next_drawn(counter, Int32(1), Int32(0)), 0)",
        "return cute.arch.block_idx()[0]",
    )
    and_then = (LOADER, "Int32(0) if const_expr(self.config.is_deterministic) else workers", "workers")
    with pytest.raises(Broken):
        run(CASES[_LATE], changes=(by_number, and_then), is_first_late=True)


@pytest.mark.parametrize("ahead", [(3, 1, 0), (2, 1, 0), (3, 0, 0), (3, 1, 2)])
def test_turns_read_ahead_are_those_of_one_row_tile(ahead: tuple[int, int, int]) -> None:
    asked: list[int] = []

    def load(at: Any, dtype: Any, **_: Any) -> int:
        asked.append(int(at.of[at.at]))
        return asked[-1] if len(asked) == 1 else 7

    names: dict[str, Any] = {"Int32": int, "cute": SimpleNamespace(arch=SimpleNamespace(load=load))}
    exec(compiled()[0][MODULES.index("backward/adder")], names)
    turns = np.arange(24, dtype=np.int32).reshape(3, 2, 4) // 4  # less than the turn, in each row tile of an entry's head its own
    names["Adds"]()._await(Table(turns), (3, 1, 0), 7, ahead, 7)
    assert asked == ([] if ahead == (3, 1, 0) else [1, 1])


@pytest.mark.parametrize(
    ("has_entries", "ratio", "section", "places"),
    [
        (False, 2, 2, {0: 1, 127: 1, 128: 0, 255: 0, 256: 1}),  # 2 x 64 key tiles fill one round of 132 thread blocks
        (False, 2, 1, {0: 1, 63: 1, 64: 1, 131: 1, 132: 0, 264: 1}),  # 64 do not: rounds begin inside a section
        (True, 2, 2, {0: 1, 127: 1, 128: 1, 255: 1}),
        (False, 1, 2, {0: 0, 127: 0, 128: 0}),
        (True, 1, 2, {0: 0, 128: 0}),
    ],
)
def test_rounds_of_interleaved_heads_begin_at_alternate_ends(has_entries: bool, ratio: int, section: int, places: dict[int, int]) -> None:
    names: dict[str, Any] = {"Int32": int, "NamedTuple": NamedTuple, "const_expr": bool, "fills_one_round": fills_one_round}
    names |= {"Softmax": SimpleNamespace(captured=None), "Visits": SimpleNamespace(band=None), "Any": Any}
    exec(compiled()[0][MODULES.index("backward/scheduler")], names)
    rows = names["VisitsRows"]()
    rows.config = SimpleNamespace(has_entries=has_entries)
    assert {work: rows.begins_last(work, (64, 16, section, 8, ratio), 132) for work in places} == places
    names["select"] = lambda condition, yes, no, kind: yes if condition else no
    assert [rows.interleaved(i, 3, 2, 0) for i in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert [rows.interleaved(i, 3, 2, 1) for i in range(6)] == [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]


def test_which_heads_are_interleaved() -> None:
    causal, window = (row_ranges(trace(m, "mask")).expr for m in (masks.causal(), masks.sliding_window(9, 0)))
    by_head = row_ranges(trace(lambda b, h, i, j: j <= i + h, "mask")).expr

    def interleaves(*bands: Any, **fields: Any) -> bool:
        return BackwardConfig(64, 64, True, BackwardTiles(64, 128), bands=bands, **fields).interleaves_heads

    assert interleaves(causal) and interleaves(causal, has_entries=True)
    assert not any(interleaves(*bands) for bands in ((), (window,), (by_head,)))
    assert not interleaves(causal, is_deterministic=True)


DETERMINISTIC = [name for name, case in CASES.items() if case.is_deterministic]


@pytest.mark.parametrize("name", few(DETERMINISTIC, "deterministic", "deterministic lists"))
def test_the_order_of_sums_is_fixed(name: str) -> None:
    assert run(CASES[name], orders=6)["rerun"] == 0.0


MMA, ADDER, SCORES, SCHEDULER, LOADER, EPILOGUE, ROWS, CAPTURES, WIDE, HALVES, PACKED = (
    "backward/mma", "backward/adder", "backward/scores", "backward/scheduler", "backward/producer", "backward/epilogue", "backward/rows",
    "captured/sums", "backward/wide_mma", "backward/halved_mma", "backward/packed",
)  # fmt: skip
MUTANTS: dict[str, tuple[str, Changes]] = {
    "dS is not exchanged": (
        "full",
        ((MMA, "        cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=128 * tiles.warp_groups)\n", ""),),
    ),
    "dS is not fenced": ("full", ((MMA, '        cute.arch.fence_proxy("async.shared", space="cta")\n        cute.arch.barrier(', "        cute.arch.barrier("),)),
    "dS has one stage and nobody waits": ("one stage of dS", ((MMA, "if const_expr(tiles.ds_stages == 1):", "if const_expr(False):"),)),
    "dS stays in one stage": ("full", ((MMA, "stage = tiles.ds_stages - 1 - stage", "stage = stage"),)),
    "dQ is written before it has left": (
        "full",
        ((ADDER, "cute.arch.cp_async_bulk_wait_group(0, read=True)", "pass"),),
    ),
    "dQ is not fenced": ("full", ((MMA, '            cute.arch.fence_proxy("async.shared", space="cta")\n', ""),)),
    "dQ is added to the first group's part": ("full", ((ADDER, ".iterator + group * size", ".iterator"),)),
    "the adder is not told of the end": ("full", ((MMA, "return Int32(END), Int32(slots)", "return Int32(0), Int32(slots)"),)),
    "dQ goes to the first row tile": ("full", ((MMA, "return slot, visit.head", "return slot * 0, visit.head"),)),
    "dO is given back while it is being read": ("full", ((MMA, "        pipes[1].consumer_release(do_state)\n", ""), (MMA, "        dq = cute.make_rmem_tensor(", "        pipes[1].consumer_release(do_state)\n        dq = cute.make_rmem_tensor("))),
    "Q is not given back": ("full", ((MMA, "        pipes[0].consumer_release(q_state)\n", ""),)),
    "dP is not waited for": ("full", ((MMA, "            warpgroup.wait_group(0)\n            if const_expr(self.config.has_dropout)", "            if const_expr(self.config.has_dropout)"),)),
    "S is not waited for": ("full", ((MMA, "            warpgroup.wait_group(1)\n            self.probabilities", "            self.probabilities"),)),
    "dK keeps the tile before": ("several blocks", ((MMA, "                sums[0].fill(0.0)\n", "                sums[0].fill(0.0) if facts.n_block == 0 else None\n"),)),
    "dK is not scaled": ("full", ((EPILOGUE, "sums[0].load() * scale", "sums[0].load() * 1"),)),
    "K is overwritten while another group reads it": ("full", ((EPILOGUE, "        cute.arch.barrier(barrier_id=READ, number_of_threads=128 * self.config.tiles.warp_groups)\n", ""),)),
    "K is given back while dK leaves": ("several blocks", ((EPILOGUE, "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),)),
    "dS is written while dV leaves": ("window", ((MMA, "                self.await_dv_read()\n", ""),)),
    "dV is called gone before it is read": ("window", ((ADDER, "wait_group(1, read=True)", "wait_group(2, read=True)"),)),
    "dQ is written while dK leaves": ("window", ((ADDER, "        cute.arch.cp_async_bulk_wait_group(0, read=True)\n        cute.arch.sync_warp()\n        self._freed", "        self._freed"),)),
    "dK is written while dQ leaves": ("window", ((EPILOGUE, "        cute.arch.barrier(barrier_id=FREE + group, number_of_threads=ADD_THREADS)\n", ""),)),
    "dV is written while another group reads dS": ("window", ((EPILOGUE, "        # then all of dQ has been read out of its buffer, and no product dQ reads dS any more\n        cute.arch.barrier(barrier_id=READ, number_of_threads=128 * self.config.tiles.warp_groups)\n", ""),)),
    "dK and dV leave before they are fenced": ("window", ((EPILOGUE, '        cute.arch.fence_proxy("async.shared", space="cta")\n        cute.arch.barrier_arrive', "        cute.arch.barrier_arrive"),)),
    "dK and dV are those of the first keys": ("window", ((EPILOGUE, "facts.n_block, where[1])", "facts.n_block * 0, where[1])"),)),
    "dK leaves when one group has written it": ("window", ((ADDER, "group == groups - 1 and", "group == 0 and"),)),
    "the band's right side is off by one": ("causal", ((SCORES, "apart - visit.right + 1", "apart - visit.right"),)),
    "the band's left side is off by one": ("left", ((SCORES, "apart - visit.left + 1", "apart - visit.left"),)),
    "words begin at the first tile": ("strided", ((SCORES, "visit.m_block * tile_m, positions[0, 0][1], cute.size", "0, positions[0, 0][1], cute.size"),)),
    "words are those of the other key": ("strided", ((SCORES, "words = tuple(seen[r * line.words + i]", "words = tuple(seen[(1 - r) * line.words + i]"),)),
    "what is no word is not asked": ("words and pairs", ((SCORES, "self._ask_rest(fragments, rest, at, line, places, captured)", "pass"),)),
    "partial tiles are asked nothing": ("strided", ((SCORES, "            if visit.asks != 0:\n                self._see", "            if False:\n                self._see"),)),
    "small divisors are taken for large ones": ("image of another size", (("softmax", "if are_wide(known, *self.captured(captured, at), places, line):", "if True:"),)),
    "pieces are not seen": ("image in pieces", ((SCORES, "self._see_if_wide(seen, rest, at, line, places, captured)", "pass"),)),
    "masked tiles are taken for bare ones": ("causal", ((SCHEDULER, "        is_masked = Int32(1)\n        if (m >= bare_first)", "        is_masked = Int32(0)\n        if (m >= bare_first)"),)),
    "the first row tile is one too late": ("causal", ((SCHEDULER, "cutlass.max(start - right + 1, 0) // tile_m", "cutlass.max(start - right + 1, 0) // tile_m + 1"),)),
    "the last row tile is one too early": ("window", ((SCHEDULER, "ceil_div(cutlass.max(end - left, 0), tile_m)", "cutlass.max(end - left, 0) // tile_m"),)),
    "bands are the first head's": ("by head", ((LOADER, "of_head, plan = self.plan_of(n_block, head, entry", "of_head, plan = self.plan_of(n_block, 0, entry"),)),
    "interleaved rows are those of one head after another": ("interleaved", ((SCHEDULER, "at = i // ratio", "at = i % of_head"),)),
    "interleaved heads are those of one row after another": ("interleaved", ((SCHEDULER, "return i % ratio, select", "return i // of_head, select"),)),
    "the last row is visited first and last": ("interleaved", ((SCHEDULER, "of_head - 1 - at, at, ", "of_head - 1 - at // 2, at, "),)),
    "a turn too many is awaited": ("deterministic", ((SCHEDULER, "        return turn\n", "        return turn + 1\n"),)),
    "a turn is passed on before the sums are written": ("deterministic lists", ((ADDER, "        cute.arch.cp_async_bulk_wait_group(0, read=False)\n        cute.arch.fence_proxy", "        cute.arch.fence_proxy"),)),
    "dQ is overwritten while it is being read": ("deterministic", ((ADDER, "                        cute.arch.cp_async_bulk_wait_group(0, read=True)\n                    cute.arch.sync_warp()\n                    self._freed", "                        pass\n                    self._freed"),)),
    "both adding warps take the first part": ("deterministic", ((ADDER, "                    cute.arch.barrier(barrier_id=_YOURS + warp, number_of_threads=_BOTH_THREADS)\n", "                    pass\n"),)),
    "nobody is left the part after finished keys": ("deterministic", ((ADDER, "                elif m == KEYS:\n                    self._hand_to(1 - warp)\n", "                elif m == KEYS:\n                    pass\n"),)),
    "the other adding warp is not told of the end": ("deterministic", ((MMA, "self.config.adding_warps - 1, -1, -1", "0, -1, -1"),)),
    "the end leaves the next part to nobody": ("deterministic", ((ADDER, "                    self._freed()\n                    self._hand_to(1 - warp)\n", "                    self._freed()\n"),)),
    "the first end frees nothing": ("deterministic", ((ADDER, "                    self._freed()\n                    self._hand_to(1 - warp)\n", "                    self._hand_to(1 - warp)\n"),)),
    "ranked rows past the last are visited": ("deterministic wide lists", ((SCHEDULER, "missing = cutlass.max((entries[0] // 2 + 1) * cut - ceil_div(seqlen_q, tile_m), 0)", "missing = 0"),)),
    "ranked full tiles are asked alone": ("deterministic lists", ((SCHEDULER, "partial_list[i // cut] % 2", "1 - partial_list[i // cut] % 2"),)),
    "parts of a ranked tile are the first one": ("deterministic lists", ((SCHEDULER, "// 2 * cut + cut - 1 - i % cut", "// 2 * cut + cut - 1"),)),
    "turns are not passed on": ("deterministic", ((ADDER, "        cute.arch.atomic_add(turns[entry, head, None].iterator + m, Int32(1), sem=\"release\", scope=\"gpu\")\n", "        pass\n"),)),
    "the derivative is left out": ("softcap", ((SCORES, "ds * Float32(derivative)", "ds"),)),
    "delta is added": ("delta before", ((SCORES, "else negative(delta[c])", "else delta[c]"),)),
    "delta is subtracted twice": ("delta before", ((MMA, "if self.config.tiles.delta != \"behind\":", "if False:"),)),
    "dP loses delta": ("delta between", ((MMA, "tiles.delta == \"behind\")\n", "True)\n"),)),
    "delta is read before it has come": ("delta before", ((MMA, "        if const_expr(tiles.delta == \"before\"):\n            pipes[1].consumer_wait(do_state)\n", "        if const_expr(tiles.delta == \"before\"):\n"),)),
    "held keys are those of the tile before": ("held keys", ((MMA, "                self.hold(fixed, in_smem)\n", "                self.hold(fixed, in_smem) if facts.n_block == 0 else None\n"),)),
    "held columns are multiplied twice": ("held keys", ((MMA, "(held if is_held else whole)[None, None, i]", "(held if is_held else whole)[None, None, 0 if i == 2 else i]"),)),
    "K is given back while dQ reads it": ("window", ((MMA, "        warpgroup.wait_group(1)\n        pipes[1]", "        warpgroup.wait_group(2)\n        pipes[1]"),)),
    "keys are given back a row tile too early": ("window", ((MMA, "i + 1 == total", "i + 2 == total"),)),
    "keys are given back twice": ("window", ((EPILOGUE, "            if facts.total == 0:", "            if True:"),)),
    "unseen keys are not given back": ("sees nothing", ((EPILOGUE, "            if facts.total == 0:", "            if False:"),)),
    "keys come with each row tile": ("window", ((LOADER, "                        waits_for_keys = Int32(0)\n", ""),)),
    "unseen keys do not come": ("sees nothing", ((LOADER, "            if waits_for_keys != 0:  # no", "            if False:  # no"),)),
    "sums from registers are the first group's": ("sums from registers", ((MMA, "before = (group * config", "before = (0 * config"),)),
    "sums from registers are sent again": ("sums from registers", ((MMA, "cutlass.range_constexpr(self.config.dq_direct, cute", "cutlass.range_constexpr(0, cute"), (ADDER, "direct = DQ_CHUNK * self.config.dq_direct", "direct = 0"))),
    "sums from registers begin a chunk too late": ("sums from registers", ((MMA, "(first + c * DQ_CHUNK)", "(first + (c + 1) * DQ_CHUNK)"),)),
    "sums from registers are all in the first step": ("widest", ((MMA, "tiles.dq_steps + step) *", "tiles.dq_steps) *"),)),
    "sums behind those from registers are sent from the first on": ("sums from registers", ((ADDER, "group].iterator + direct", "group].iterator + 0"), (ADDER, "4 * (size // steps - direct)", "4 * (size // steps)"))),
    "delta is that of the row beside": ("full", ((SCORES, "else dp[r, c] - delta[c])", "else dp[r, c] - delta[c ^ 1])"),)),
    "sorted key tiles are the first alone": ("sorted lists", ((SCHEDULER, "            n_block = tables.order[n_block, 0]\n", "            n_block = tables.order[0, 0]\n"),)),
    "listed full tiles are the first part alone": ("lists", ((SCHEDULER, "m = full_list[(i - partials) // cut] * cut", "m = full_list[(i - partials) // cut] * 1"),)),
    "a visit's rank is that of another row tile": ("deterministic lists", ((SCHEDULER, "plan[3][m // cut_m]", "plan[3][m]"),)),
    "parts of a list's tile take one turn": ("deterministic wide lists", ((SCHEDULER, " * cut_n + n_block % cut_n", " * cut_n"),)),
    "ranks count a list's tiles alone": ("deterministic wide lists", ((SCHEDULER, " * cut_n + n_block % cut_n", " + n_block % cut_n"),)),
    "a head's sum leaves out half of the lanes": ("per head", ((CAPTURES, "(1, 2, 4, 8, 16)", "(1, 2, 4, 8)"),)),
    "all lanes send a head's sum": ("per head", ((CAPTURES, "lane_idx() == 0", "lane_idx() >= 0"),)),
    "a key's sum leaves out half of the rows": ("by key", ((CAPTURES, "_over_lanes(_sum(line), (1, 2))", "_over_lanes(_sum(line), (1,))"),)),
    "a lane's second key lies beside its first": ("by key", ((CAPTURES, "Int32(8), Int32(0)", "Int32(1), Int32(0)"),)),
    "three lanes send a key's sum": ("by key", ((CAPTURES, "side < 2", "side < 3"),)),
    "keys' sums are exchanged": ("by key", ((CAPTURES, "select(side == 0, low, high", "select(side == 0, high, low"),)),
    "lanes halve the rows in another order": ("by row", ((CAPTURES, "(16, 8, 4)", "(4, 8, 16)"),)),
    "lanes keep what they send": ("by row", ((CAPTURES, "kept = [select(is_upper, high, low", "kept = [select(is_upper, low, high"),)),
    "rows' sums past the last have entries": ("by row", ((CAPTURES, "cutlass.min(row + a, facts.seqlen_q - 1)", "row + a"),)),
    "a lane's rows are the first's": ("by row", ((CAPTURES, "row = row + lane // 4 * (len(apart) // 2)", "row = row + lane // 4"),)),
    "diagonals are read before they are written": ("distances", ((CAPTURES, "        cute.arch.sync_warp()\n        found = []", "        found = []"),)),
    "diagonals are written before they are read": ("distances", ((CAPTURES, "        cute.arch.sync_warp()\n        row, key", "        row, key"),)),
    "diagonals begin with what was there": ("distances", ((CAPTURES, "captured[3][first + 32 * i] = Float32(0.0)", "pass"),)),
    "zeros are not waited for": ("distances", ((CAPTURES, "            cute.arch.sync_warp()\n\n", "\n"),)),
    "lanes read past the last diagonal": ("distances", ((CAPTURES, "select(lane < count - 32 * i, value, Float32(0.0), \"float\")", "value"),)),
    "diagonals are one too early": ("distances", ((CAPTURES, "- 15 + lane", "- 14 + lane"),)),
    "a second key has its first one's diagonals": ("distances", ((CAPTURES, "for r in range(2) if 0 <= j - 1 + r < columns", "for r in range(1) if 0 <= j - 1 + r < columns"),)),
    "diagonals of no pair are looked up": ("looked-up distances", ((CAPTURES, "cutlass.max(cutlass.min(least + 32 * i, facts.seqlen_q - 1), 1 - facts.seqlen_k)", "least + 32 * i"),)),
    "warps share their memory": ("distances", ((CAPTURES, "group, first = lane // 4, (cute.arch.warp_idx() - _WARPS_BEFORE)", "group, first = lane // 4, 0"),)),
    "a bank is left out on one side": ("distances", ((CAPTURES, "32 * i + g * width + g // 4", "32 * i + g * width"),)),
    "rows of pairs are 7 apart": ("pairs", ((CAPTURES, "step * 7", "step * 6"),)),
    "keys of pairs are 4 apart": ("pairs", ((CAPTURES, "goal.stride[-1] * 8 *", "goal.stride[-1] * 4 *"),)),
    "rows past the last have entries": ("pairs", ((CAPTURES, "row + (c // 2 * 8 + c % 2), facts.seqlen_q)", "0, 1)"),)),
    "keys past the last have entries": ("pairs", ((CAPTURES, "key + 8, facts.seqlen_k)", "0, 1)"),)),
    "first rows past the last have entries": ("pairs", ((CAPTURES, "first = cutlass.min(row, facts.seqlen_q - 1)", "first = row"),)),
    "first keys past the last have entries": ("pairs", ((CAPTURES, "cutlass.min(key, facts.seqlen_k - 1)\n        target", "key\n        target"),)),
    "keys of single pairs are 4 apart": ("each pair", ((CAPTURES, ".element_type, 8 * r)", ".element_type, 4 * r)"),)),
    "what waits is lost": ("looked up", ((CAPTURES, "select(is_same, pending + value, value", "select(is_same, value, value"),)),
    "what waits is sent twice": ("looked up", ((CAPTURES, "select(is_same, Float32(0.0), pending", "select(is_same, pending, pending"),)),
    "the last sum is not sent": ("looked up", ((CAPTURES, "        add_to(self._address(total, goal, waiting[0][0]), waiting[0][1])\n", ""),)),
    "rows behind the first four are taken for these": ("looked up", ((CAPTURES, "values[r][first[0] + c]", "values[r][c]"),)),
    "there are more copies than there are": ("looked up", ((CAPTURES, " & (goal.shape[len(whole)] - 1)", ""),)),
    "what is hidden has a factor": ("a factor infinite where it is hidden", ((CAPTURES, "if total.is_guarded else value", "if False else value"),)),
    "a factor is left out": ("slopes", ((CAPTURES, "value = parts[r, c] * Float32(factor)", "value = parts[r, c]"),)),
    "a factor that reads the score is left out": ("by row, capped", ((SCORES, "ds * Float32(factor), \"float\")", "ds, \"float\")"),)),
    "a running sum is its last term": ("temperature", ((CAPTURES, "self.by_key[place[0]] = self.by_key[place[0]] + value", "self.by_key[place[0]] = value"),)),
    "hidden pairs stay in running sums": ("temperature", ((SCORES, "self.words[word] & ~bit", "self.words[word] | bit"),)),
    "pairs share a bit": ("temperature", ((SCORES, "at = 2 * row + key", "at = row + key"),)),
    "64 pairs have one word": ("large tiles, temperature", ((SCORES, "return at // 32, Int32", "return 0, Int32"),)),
    "sums are the first one's": ("two", ((CAPTURES, "goal, place = captured[2][total.total], ()", "goal, place = captured[2][0], ()"),)),
    "dq's halves are exchanged": ("full", ((ROWS, "column = column + group * (head_dim // 2)", "column = column + (1 - group) * (head_dim // 2)"),)),
    "wide: P is not exchanged": ("wide", ((WIDE, "self._exchanged(exchange, scores, stage, _P_WRITTEN)", "self._stored((exchange.store, exchange.ds[None, None, stage]), scores)"),)),
    "wide: P is not fenced": ("wide", ((WIDE, '        cute.arch.fence_proxy("async.shared", space="cta")\n        cute.arch.barrier(barrier_id=barrier', "        cute.arch.barrier(barrier_id=barrier"),)),
    "wide: dS is not exchanged": ("wide", ((WIDE, "self._exchanged(exchange, dp, of_ds, _DS_WRITTEN)", '(self._stored((exchange.store, exchange.ds[None, None, of_ds]), dp), cute.arch.fence_proxy("async.shared", space="cta"))'),)),
    "wide: P has one stage": ("wide", ((WIDE, "scores, stage, _P", "scores, 0, _P"), (WIDE, "p[None, None, None, stage]", "p[None, None, None, 0]"))),
    "wide: dS takes P's place": ("wide", ((WIDE, "of_ds = self.config.tiles.ds_stages", "of_ds = stage"),)),
    "wide: P is written a stage too far": ("wide", ((WIDE, "scores, stage, _P", "scores, 1 - stage, _P"),)),
    "wide: dV is P of the row tile before": ("wide", ((WIDE, "p[None, None, None, stage]", "p[None, None, None, 1 - stage]"),)),
    "wide: dK is multiplied from P": ("wide", ((WIDE, "ds[None, None, None, of_ds], q_t", "ds[None, None, None, stage], q_t"),)),
    "wide: dQ is multiplied from P": ("wide", ((WIDE, "ds_t[None, None, None, of_ds]", "ds_t[None, None, None, stage]"),)),
    "wide: K is not read anew": ("wide", ((MMA, "                self.hold(fixed, in_smem)\n", "                self.hold(fixed, in_smem) if facts.n_block == 0 else None\n"),)),
    "wide: V is held before it has come": ("wide keys alone", ((MMA, "                self.hold(fixed, in_smem)\n", ""), (MMA, "                pipes[3].consumer_wait(key_state)\n", "                self.hold(fixed, in_smem)\n                pipes[3].consumer_wait(key_state)\n"))),
    "wide: K is never held": ("wide", ((MMA, "((0, in_smem[2], tiles.holds_k)", "((0, in_smem[2], 0)"),)),
    "wide: S is not waited for": ("wide", ((WIDE, "            warpgroup.wait_group(1)\n            self.probabilities", "            self.probabilities"),)),
    "wide: dP is not waited for": ("wide", ((WIDE, "            warpgroup.wait_group(1)\n            self.score_gradients", "            self.score_gradients"),)),
    "wide: dP is not waited for before a score mod": ("wide softcap", ((WIDE, "            warpgroup.wait_group(0)\n            self.modified", "            warpgroup.wait_group(1)\n            self.modified"),)),
    "dropped weights lose delta": ("dropout", (("dropout", "dp[r, c] = weight * dp[r, c] - p[r, c] * below", "dp[r, c] = weight * (dp[r, c] - below)"),)),
    "P keeps dropped weights": ("dropout", (("dropout", "                    p[r, c] = weight\n", ""),)),
    "both keys of a word are decided alike": ("dropout", (("dropout", "_SIGN[at // 2 * 2 + r]", "_SIGN[at // 2 * 2]"),)),
    "both rows of a word are decided alike": ("dropout", (("dropout", "_SIGN[at // 2 * 2 + r]", "_SIGN[r]"),)),
    "all rows of a tile have one word": ("dropout", (("dropout", "at_words + 1 + sixteen", "at_words + 1"),)),
    "delta is not divided": ("dropout, causal", (("dropout", "delta[c] * divided", "delta[c]"),)),
    "dV lacks the factor": ("dropout", ((MMA, "sums[1].store(sums[1].load() * self.factor(captured))", "pass"),)),
    "wide: what a score mod hides stays in dS": ("wide softcap", ((WIDE, "self.hidden((scores, dp),", "self.hidden((scores,),"),)),
    "wide: dO is given back while it is being read": ("wide", ((WIDE, "        warpgroup.wait_group(2)\n", ""),)),
    "wide: dO is not given back": ("wide", ((WIDE, "        pipes[1].consumer_release(do_state)\n", ""),)),
    "one tile: dQ is not scaled": ("one tile of keys", ((MMA, "dq.store(dq.load() * scale)", "pass"),)),
    "one tile: a row past the last is written": ("one tile of keys", ((MMA, "tiles.tile_m, facts.seqlen_q)", "tiles.tile_m, facts.seqlen_q + 1)"),)),
    "one tile: the last row is not written": ("one tile of keys", ((MMA, "tiles.tile_m, facts.seqlen_q)", "tiles.tile_m, facts.seqlen_q - 1)"),)),
    "one tile: grouped heads write to one": ("one tile of keys", ((MMA, "target[None, None, visit.head, facts.entry]", "target[None, None, facts.kv_head, facts.entry]"),)),
    "one tile: entries write to the first": ("one tile of keys", ((MMA, "target[None, None, visit.head, facts.entry]", "target[None, None, visit.head, 0]"),)),
    "one tile: padded columns are written": ("one tile of keys, narrow heads", ((PACKED, "if column < columns:", "if True:"),)),
    "one tile: dQ is added too": ("one tile of keys", ((MMA, "        else:\n            for step in", "        if True:\n            for step in"),)),
    "wide: dQ is not waited for": ("wide", ((WIDE, "        warpgroup.wait_group(1)\n        self._passed_on", "        self._passed_on"),)),
    "wide: dK is not waited for": ("wide", ((WIDE, "        warpgroup.wait_group(0)\n        pipes[0]", "        pipes[0]"),)),
    "wide: Q is not given back": ("wide", ((WIDE, "        pipes[0].consumer_release(q_state)\n", ""),)),
    "wide: dQ's halves are sent the other way round": ("widest", ((MMA, "columns_of(dq, step, steps)", "columns_of(dq, steps - 1 - step, steps)"),)),
    "wide: dQ's first half is sent alone": ("widest", ((MMA, "in cutlass.range_constexpr(steps)", "in cutlass.range_constexpr(1)"),)),
    "wide: dQ's halves are added to the first": ("widest", ((ADDER, " + step * (size // steps)", ""),)),
    "wide: dQ's second half is never reached": ("widest", ((ADDER, "step = steps - 1 - step", "step = step"),)),
    "tall: dQ is not transposed": ("tall tiles", ((MMA, "*(of_dq[::-1] if tiles.transposes_dq else of_dq)", "*of_dq"),)),
    "tall: the second warp group's columns are read at the first one's": ("tall tiles", ((ROWS, "((warp // 4) * chunks + chunk)", "chunk"),)),
    "tall: 16 columns are read as those of the next warp": ("tall tiles", ((ROWS, "warp % 4 * 32 + lane", "(warp + 1) % 4 * 32 + lane"),)),
    "halves: dS is not exchanged": ("dP by halves", ((HALVES, "        cute.arch.barrier(barrier_id=EXCHANGED, number_of_threads=128 * self.config.tiles.warp_groups)\n", ""),)),
    "halves: dS is not fenced": ("dP by halves", ((HALVES, '        cute.arch.fence_proxy("async.shared", space="cta")\n', ""),)),
    "halves: S is not waited for": ("dP by halves", ((HALVES, "        warpgroup.wait_group(1)\n        self.probabilities", "        self.probabilities"),)),
    "halves: the first half of dP is not waited for": ("dP by halves", ((HALVES, "        warpgroup.wait_group(0)\n        p = ", "        p = "),)),
    "halves: the second half of dP is not waited for": ("dP by halves", ((HALVES, "        warpgroup.wait_group(1)\n        p = ", "        p = "),)),
    "halves: dV is not waited for": ("dP by halves", ((HALVES, "        warpgroup.wait_group(0)\n        pipes[1]", "        pipes[1]"),)),
    "halves: dQ is not waited for": ("dP by halves", ((HALVES, "        warpgroup.wait_group(1)\n        self._passed_on", "        self._passed_on"),)),
    "halves: dK is not waited for": ("dP by halves", ((HALVES, "        warpgroup.wait_group(0)\n        pipes[0]", "        pipes[0]"),)),
    "halves: dO is not given back": ("dP by halves", ((HALVES, "        pipes[1].consumer_release(do_state)\n", ""),)),
    "halves: Q is not given back": ("dP by halves", ((HALVES, "        pipes[0].consumer_release(q_state)\n", ""),)),
    "halves: both are stored in one place": ("dP by halves", ((HALVES, "(0, half))", "(0, 0))"),)),
    "halves: both have the first rows of dO": ("dP by halves", ((HALVES, "dout[1][None", "dout[0][None"),)),
    "halves: both have the first rows of dO for dV": ("dP by halves", ((HALVES, "dout_t[1][None", "dout_t[0][None"),)),
    "halves: both have the first rows' delta": ("dP by halves", ((HALVES, "self.of_rows(delta, positions, 1, 2)", "self.of_rows(delta, positions, 0, 2)"),)),
    "halves: delta of the last rows is read at the first": ("dP by halves", ((SCORES, " + 2 * columns * part", ""),)),
    "halves: dS stays in one stage": ("dP by halves", ((HALVES, "exchange.ds[None, None, stage]", "exchange.ds[None, None, 0]"),)),
    "halves: dK is multiplied from the tile before": ("dP by halves", ((HALVES, "dk, ds[None, None, None, stage]", "dk, ds[None, None, None, 1 - stage]"),)),
    "halves: dQ's halves are exchanged": ("dP by halves", ((MMA, "columns_of(dq, step, steps)", "columns_of(dq, steps - 1 - step, steps)"),)),
    "halves: nothing is hidden": ("dP by halves, causal", ((HALVES, "        self.hidden((scores,), positions, slots, captured)\n", ""),)),
    "halves: K is overwritten while another group reads it": ("dP by halves", ((EPILOGUE, "        cute.arch.barrier(barrier_id=READ, number_of_threads=128 * self.config.tiles.warp_groups)\n        if", "        if"),)),
    "wide: dQ's halves have one turn": ("wide and deterministic", ((ADDER, "if step == steps - 1:", "if step == 0:"),)),
    "wide: K is overwritten while another group reads it": ("wide through shared memory", ((WIDE, "        cute.arch.barrier(barrier_id=READ, number_of_threads=threads)\n", ""),)),
    "wide: dK leaves before both groups have written it": ("wide", ((WIDE, "        cute.arch.barrier(barrier_id=STORED, number_of_threads=threads)\n", ""),)),
    "wide: dK is not fenced": ("wide", ((WIDE, '        cute.arch.fence_proxy("async.shared", space="cta")\n        cute.arch.barrier(barrier_id=STORED', "        cute.arch.barrier(barrier_id=STORED"),)),
    "wide: both groups send dK": ("wide", ((WIDE, "if group == 0:", "if group >= 0:"),)),
    "wide: dV is sent to the second 64 keys": ("wide", ((WIDE, "self.config.head_dim_v, 0, facts", "self.config.head_dim_v, 1, facts"),)),
    "wide: K is given back while dK leaves": ("wide", ((WIDE, "            cute.arch.cp_async_bulk_wait_group(0, read=True)\n", ""),)),
    "wide: dK is not scaled": ("wide", ((EPILOGUE, "sums[0].load() * scale", "sums[0].load() * 1"),)),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_planted_bugs_are_found(name: str) -> None:
    case, changes = MUTANTS[name]
    for seed in range(8):
        try:
            errors = run((CASES | CAPTURED)[case], seed, changes, orders=4)
            if any(error > (EXACT if of.startswith("captured") else MOST) for of, error in errors.items()):
                return
        except Broken:
            return
    pytest.fail("not found")
