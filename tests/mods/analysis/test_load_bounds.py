"""Bounds of loads at indices from tensors: whole tensors' extremes first, finer tables where those are too coarse."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from anyattn.mods.analysis import load_bounds
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.analysis.load_bounds import OutsideError, check_loads, doubt, unsettled
from anyattn.mods.analysis.range_tables import Extremes, RangeTables
from anyattn.mods.analysis.visible_loads import held
from anyattn.mods.tracing.trace import trace

TABLE = torch.zeros(1, 1, 40, 8)


def by_ids(ids: torch.Tensor, first: int = 0):
    return trace(lambda s, b, h, q, k: s + TABLE[b, h, q, ids[q - k + 39 + first].long()], "score")


@pytest.fixture
def finer(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each time that tables of ranges are asked."""
    asked: list[int] = []
    lookup = RangeTables.lookup
    monkeypatch.setattr(RangeTables, "lookup", lambda *a: asked.append(1) or lookup(*a))
    return asked


def test_extremes_alone_decide_where_all_contents_are_inside(finer: list[int]) -> None:
    for ids in (torch.arange(79) % 16 - 8, torch.randint(0, 8, (79,), dtype=torch.int32), torch.arange(79) % 2 > 0):
        check_loads(by_ids(ids), 1, 1, 40, 40)
    assert not finer


def test_finer_tables_decide_where_contents_outside_are_not_read(finer: list[int]) -> None:
    ids = torch.arange(90) % 8
    ids[80:], ids[:1] = 99, -9
    with pytest.raises(OutsideError, match="index -9"):
        check_loads(by_ids(ids), 1, 1, 40, 40)
    check_loads(by_ids(ids, first=1), 1, 1, 40, 40)
    with pytest.raises(OutsideError, match="index 99"):
        check_loads(by_ids(ids, first=2), 1, 1, 40, 40)
    assert finer


def test_contents_of_another_device_are_read_once_for_a_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    ids, read = torch.arange(79) % 8, []
    aminmax = torch.aminmax
    monkeypatch.setattr(torch, "aminmax", lambda x: read.append(x.numel()) or aminmax(x))
    both = trace(lambda s, b, h, q, k: s + TABLE[b, h, q, ids[q - k + 39]] + TABLE[b, h, k, ids[k - q + 39]], "score")
    with monkeypatch.context() as alone:
        alone.setattr(load_bounds, "RangeTables", None)
        check_loads(both, 1, 1, 40, 40)
    assert read == [79]


def test_indices_of_floats(finer: list[int]) -> None:
    """A NaN proves nothing: what it comes to is looked at."""
    places = torch.linspace(0.0, 7.9, 40)
    mod = lambda places: trace(lambda s, b, h, q, k: s + TABLE[b, h, q, places[k].to(torch.int64)], "score")
    check_loads(mod(places), 1, 1, 40, 40)
    assert not finer
    places[3] = float("nan")
    expected = int(places[3].to(torch.int64))
    with pytest.raises(OutsideError, match=f"index {expected}"):
        check_loads(mod(places), 1, 1, 40, 40)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64, torch.bfloat16, torch.float64])
def test_extremes_hold_what_finer_tables_find(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    t = torch.randint(0, 100, (6, 33), generator=g).to(dtype)
    coarse, fine = Extremes([t]), RangeTables([t], "cpu")
    for _ in range(20):
        rows, columns = (torch.randint(0, n, (2, 1), generator=g).sort(0).values for n in t.shape)
        for of_rows in (rows, rows[:1].expand(2, 1)):
            box = [tuple(of_rows), tuple(columns)]
            (lo, hi), (least, most) = coarse.lookup(0, box), fine.lookup(0, box)
            assert lo.dtype == least.dtype and bool((lo <= least).all()) and bool((hi >= most).all())
    assert [x.item() for x in coarse.lookup(0, box)] == [t.min().item(), t.max().item()]


def test_an_empty_tensor_has_no_extremes() -> None:
    lo, hi = Extremes([torch.zeros(0, dtype=torch.int32)]).lookup(0, [])
    assert (lo.item(), hi.item(), lo.dtype) == (0, 0, torch.int64)


# ---- indices that are inside whatever was looked up


CLAMPED = {
    "a table's number, clamped": (torch.int32, lambda x: torch.clamp(x + 4, 0, 7)),
    "its negative": (torch.int32, lambda x: torch.clamp(-x + 4, 0, 7)),
    "a remainder": (torch.int64, lambda x: x.long() % 8),
    "a choice": (torch.bool, lambda x: torch.where(x, 3, -8)),
    "a small dtype": (torch.uint8, lambda x: x.long() // 32),
    "a sum that wraps around": (torch.int8, lambda x: torch.clamp(x + 100, 0, 7).long()),
    "a size that wraps around": (torch.int8, lambda x: x.abs().long() // 16),
    "bits": (torch.int64, lambda x: x & 7),
    "the upper bits": (torch.int32, lambda x: x >> 28),
}
UNCLAMPED = {
    "one side": (torch.int32, lambda x: torch.clamp(x, max=7)),
    "too far": (torch.int32, lambda x: torch.clamp(x, 0, 8)),
    "moved after": (torch.int32, lambda x: torch.clamp(x, 0, 7) + 1),
    "a float, which may be NaN": (torch.float32, lambda x: torch.clamp(x, 0.0, 7.0).long()),
    "a small dtype": (torch.uint8, lambda x: x.long() // 31),
    "a sum that wraps around": (torch.int8, lambda x: torch.clamp(torch.clamp(x, min=0) + 1, max=7).long()),
}


def looked_up(dtype: torch.dtype, place) -> tuple:
    ids = torch.zeros(79, dtype=dtype)
    return trace(lambda s, b, h, q, k: s + TABLE[b, h, q, place(ids[q - k + 39])], "score"), ids


@pytest.mark.parametrize("name", CLAMPED)
def test_contents_that_cannot_matter_are_not_read(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mod, ids = looked_up(*CLAMPED[name])
    assert doubt(mod, 1, 1, 40, 40).slots == () and held(mod, 1, 1, 40, 40).expr is mod.expr
    for extremes in (RangeTables, Extremes):
        monkeypatch.setattr(extremes, "lookup", None)
    check_loads(mod, 1, 1, 40, 40)
    info = (0, 1) if ids.dtype is torch.bool else (torch.iinfo(ids.dtype).min, torch.iinfo(ids.dtype).max)
    for extreme in info:  # and indeed all contents are inside
        ids.fill_(extreme)
        evaluate(mod, 0, 0, torch.arange(40)[:, None], torch.arange(40), score=torch.zeros(()))


@pytest.mark.parametrize("name", UNCLAMPED)
def test_contents_that_may_matter_are_read_or_clamped(name: str) -> None:
    mod, ids = looked_up(*UNCLAMPED[name])
    assert doubt(mod, 1, 1, 40, 40).slots == (0,) and len(unsettled(mod, 1, 1, 40, 40).by_contents) == 1
    check_loads(mod, 1, 1, 40, 40, reads_values=False)
    if name == "a float, which may be NaN":
        ids[7] = float("nan")
    elif name == "one side":
        ids[7] = -9
    else:
        ids[7] = torch.iinfo(ids.dtype).max
    with pytest.raises(OutsideError):
        check_loads(mod, 1, 1, 40, 40)


def test_a_symbolic_number_proves_nothing() -> None:
    ids, most = torch.zeros(40, dtype=torch.int32), 7
    mod = trace(lambda s, b, h, q, k: s + TABLE[b, h, q, torch.clamp(ids[k], 0, most)], "score")
    symbolic = replace(mod, scalars=(ShapeEnv().create_unbacked_symint(),))
    assert not unsettled(mod, 1, 1, 40, 40).by_contents and len(unsettled(symbolic, 1, 1, 40, 40).by_contents) == 1


def test_limits_that_hold_an_index_do_not_settle_the_mod() -> None:
    """Its tensors are still those that another call checks."""
    mod, _ = looked_up(*UNCLAMPED["too far"])
    limited = held(mod, 1, 1, 40, 40)
    assert limited.expr is not mod.expr and doubt(limited, 1, 1, 40, 40).slots == (0,)


def test_a_limit_at_earlier_rows_counts() -> None:
    """The index is clamped to the table's places from a number on that depends on the position."""
    ids = torch.zeros(40, dtype=torch.int32)
    mod = trace(lambda s, b, h, q, k: s + TABLE[b, h, k, torch.minimum(ids[k].clamp(min=0), 7 - q)], "score")
    assert not unsettled(mod, 1, 1, 16, 40).by_contents  # 7 - 15 is -8, the first place
    assert unsettled(mod, 1, 1, 17, 40).by_contents and unsettled(mod, 1, 1, 16, 40, first_q=-1).by_contents
