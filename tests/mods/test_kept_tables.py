"""Tables that are kept for each device: one object for equal numbers, and never a tensor that another call could not read."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from anyattn import flex_attention, scores
from anyattn.mods import kept_tables
from anyattn.mods.kept_tables import kept_table

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def tables(monkeypatch: pytest.MonkeyPatch) -> dict:
    made: dict = {}
    monkeypatch.setattr(kept_tables, "_tables", made)
    return made


def squares(count: int, by: int = 1, *, device: torch.device) -> torch.Tensor:
    return torch.arange(count, device=device).square() * by


def captured(score) -> torch.Tensor:
    """The table of buckets that a disentangled score reads."""
    (table,) = (cell.cell_contents for cell in score.fn.__closure__ if getattr(cell.cell_contents, "dtype", None) is torch.int32)
    return table


def test_one_table_for_equal_numbers() -> None:
    first = kept_table(squares, 4, device=CPU)
    assert first.tolist() == [0, 1, 4, 9] and kept_table(squares, 4, device=CPU) is first
    assert kept_table(squares, 5, device=CPU).tolist() == [0, 1, 4, 9, 16]
    assert kept_table(squares, 4, 2, device=CPU).tolist() == [0, 2, 8, 18]


def test_disentangled_scores_share_their_buckets() -> None:
    tables = [torch.zeros(1, 1, 4, 8) for _ in range(4)]
    first, other = (captured(scores.disentangled(*pair, 9)) for pair in (tables[:2], tables[2:]))
    assert first is other and captured(scores.disentangled(*tables[:2], 10)) is not first
    assert torch.equal(first, scores._deberta_buckets(2, 9, device=CPU))


def test_a_table_made_in_inference_mode_serves_training() -> None:
    c2p, p2c = torch.randn(2, 1, 1, 12, 8)
    with torch.inference_mode():
        buckets = captured(scores.disentangled(c2p, p2c, 9))
    assert not buckets.is_inference()
    c2p.requires_grad_()
    score = scores.disentangled(c2p, p2c, 9)
    assert captured(score) is buckets
    q = torch.randn(1, 1, 12, 8)
    flex_attention(q, q, q, score).sum().backward()
    assert c2p.grad is not None and bool(c2p.grad.abs().sum() > 0)


def test_fake_tables_are_not_kept(tables: dict) -> None:
    with FakeTensorMode():
        assert type(kept_table(squares, 4, device=CPU)) is FakeTensor
    assert not tables
    kept = kept_table(squares, 4, device=CPU)
    with FakeTensorMode():
        assert type(kept_table(squares, 4, device=CPU)) is FakeTensor
    assert type(kept) is torch.Tensor and kept_table(squares, 4, device=CPU) is kept


def test_tables_of_transforms_and_of_no_memory_are_not_kept(tables: dict) -> None:
    torch.func.grad(lambda x: (x * kept_table(squares, 4, device=CPU)).sum())(torch.ones(4))
    assert kept_table(squares, 4, device=torch.device("meta")).device.type == "meta"
    assert not tables


def test_a_table_made_during_a_capture_is_not_kept(tables: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its contents are there at the graph's replay only. One that is kept already serves the capture, and waits for nothing."""
    gpu = torch.device("cuda", 0)

    def made(count: int, *, device: torch.device) -> torch.Tensor:
        assert device == gpu
        return torch.arange(count, device="cpu")

    monkeypatch.setattr(kept_tables, "is_captured", lambda: True)
    assert kept_table(made, 4, device=gpu) is not kept_table(made, 4, device=gpu) and not tables
    with monkeypatch.context() as before:
        before.setattr(kept_tables, "is_captured", lambda: False)
        kept = kept_table(made, 4, device=gpu)
    assert kept_table(made, 4, device=gpu) is kept


def test_a_full_store_releases_nothing(tables: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs and streams may still read what is kept."""
    monkeypatch.setattr(kept_tables, "_MOST", 2)
    kept = [kept_table(squares, n, device=CPU) for n in (1, 2)]
    assert kept_table(squares, 3, device=CPU) is not kept_table(squares, 3, device=CPU) and len(tables) == 2
    assert all(kept_table(squares, n, device=CPU) is t for n, t in zip((1, 2), kept, strict=True))


def test_large_tables_are_not_kept(tables: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_tables, "_MOST_BYTES", 64)
    kept = kept_table(squares, 5, device=CPU)
    assert kept_table(squares, 4, device=CPU) is not kept_table(squares, 4, device=CPU)
    assert kept_table(squares, 3, device=CPU) is kept_table(squares, 3, device=CPU) and kept_table(squares, 5, device=CPU) is kept


def test_threads_share_one_table(tables: dict) -> None:
    both = threading.Barrier(8)

    def made(_: int) -> torch.Tensor:
        both.wait()
        return kept_table(squares, 4, device=CPU)

    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(made, range(8)))
    assert len({id(t) for t in found}) == 1 and len(tables) == 1


def test_a_compiled_function_that_makes_the_score(tables: dict) -> None:
    q, c2p, p2c = torch.randn(1, 1, 12, 8), *torch.randn(2, 1, 1, 12, 8)
    attend = lambda: flex_attention(q, q, q, scores.disentangled(c2p, p2c, 9))
    compiled = torch.compile(attend, backend="eager", fullgraph=True)()
    assert not tables and torch.equal(compiled, attend()) and len(tables) == 1
