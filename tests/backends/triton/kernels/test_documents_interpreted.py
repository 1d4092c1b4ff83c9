"""Masks of documents by Triton's interpreter: as sequences, by their lists, and launched both pipeline, of which one does nothing.

Run by ``test_in_the_interpreter.py`` in a process of its own, in which all memory holds NaN first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch

import anyattn
from anyattn import hardware, masks, planner
from anyattn.backends.triton import launch_cache, repeater, tile_config
from anyattn.backends.triton.documents import Form
from anyattn.backends.triton.tile_config import PipelineOptions, TmaUse
from anyattn.call_cache import attention
from anyattn.documents import rewrite
from anyattn.documents.rewrite import DocumentTables
from anyattn.sparsity import read_lists
from anyattn.validate import flex
from tests.support import cases
from tests.support.covering import few
from tests.support.flex_calls import judge

LENGTH = 70
RUNS = torch.repeat_interleave(torch.tensor([5, 2, 9, 1, 7]), torch.tensor([20, 1, 33, 15, 1]))  # in no order
PAIR = torch.stack([RUNS, torch.repeat_interleave(torch.tensor([3, 8]), torch.tensor([45, 25]))])
APART = torch.where(torch.arange(LENGTH) < 9, 1, RUNS)  # the document of id 1 begins twice
TABLE = torch.linspace(-1, 1, 2 * LENGTH, dtype=torch.float64).reshape(2, LENGTH)


class Case(NamedTuple):
    ids: Any = RUNS
    rest: Any = None
    score: Any = None
    shape: tuple[int, ...] = (1, 2, 1, LENGTH, LENGTH, 16, 8)
    has_sink: bool = False
    holds: bool = True
    dtype: torch.dtype = torch.float32


CASES = {
    "documents": Case(),
    "causal": Case(rest=lambda i, j: i >= j),
    "causal, of a batch that shares ids": Case(rest=lambda i, j: i >= j, shape=(2, 2, 2, LENGTH, LENGTH, 8, 24)),
    "window": Case(rest=lambda i, j: (i - j <= 7) & (j - i <= 1), dtype=torch.bfloat16),
    "ids of each entry": Case(ids=PAIR, rest=lambda i, j: i >= j, shape=(2, 3, 1, LENGTH, LENGTH, 16, 16), has_sink=True),
    "a score mod that learns": Case(score=lambda s, b, h, i, j: s + TABLE[h, abs(i - j)], shape=(2, 2, 1, LENGTH, LENGTH, 16, 16)),
    "ids that come back": Case(ids=APART, holds=False, rest=lambda i, j: i >= j, shape=(2, 2, 1, LENGTH, LENGTH, 16, 16)),
    "ids that come back, learning": Case(ids=APART, holds=False, score=lambda s, b, h, i, j: s + TABLE[h, abs(i - j)]),
    "one document": Case(ids=RUNS * 0, rest=lambda i, j: i >= j),
}


def mask_of(case: Case) -> Any:
    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        same = case.ids[i] == case.ids[j] if case.ids.ndim == 1 else case.ids[b, i] == case.ids[b, j]
        return same if case.rest is None else same & case.rest(i, j)

    return mask


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where looking at ids would wait for the device, a block mask's lists are kept beside its mask."""
    monkeypatch.setattr(read_lists, "row_ranges", lambda mask: None)
    attention.clear()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every launch of the two passes."""
    made: list[dict[str, Any]] = []
    run = launch_cache.run_entry

    def counted(*given: Any) -> None:
        made.append(given[-1])
        run(*given)

    monkeypatch.setattr(launch_cache, "run_entry", counted)
    return made


def block_mask(case: Case, mask: Any, block: int = 32) -> Any:
    batch = case.shape[0] if case.ids.ndim == 2 else None
    return anyattn.create_block_mask(mask, batch, None, LENGTH, LENGTH, device="cpu", BLOCK_SIZE=block)


def results(case: Case, made: Any, mask: Any) -> dict[str, torch.Tensor]:
    q, k, v = cases.inputs("normal", cases.Shape(*case.shape), case.dtype, 0)[:3]
    sink = torch.linspace(-1, 1, q.shape[1]) if case.has_sink else None
    return judge(q, k, v, mask=mask, score=case.score, sink=sink, captured=[TABLE] if case.score else [], block_mask=made)


ONCE = ("causal, of a batch that shares ids", "window", "ids of each entry", "a score mod that learns", "ids that come back")


@pytest.mark.parametrize("name", few(CASES, *ONCE))
def test_launched_both_ways(name: str, launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the host knows whether ids come in runs: what both forms together write is all, and each score is counted once."""
    monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    case = CASES[name]
    mask = mask_of(case)
    results(case, block_mask(case, mask), mask)
    assert len(launched) == 8  # of the forward pass, and three kernels of the backward
    assert [options["HAS_ENTRIES"] for options in launched].count(True) == 4
    # the statistics of rows that see all of a document's keys need no ranges
    pipeline = [(options["HAS_ENTRIES"], options["HAS_GUARD"], options["RANGES"] > 0) for options in launched if "TILE_N" in options]
    assert set(pipeline) == {(True, False, True), (False, True, False)} and pipeline.count((True, False, True)) == 3


KNOWN = ("causal", "a score mod that learns", "ids that come back, learning")


@pytest.mark.parametrize("name", few(KNOWN, *KNOWN[1:]))
def test_known_is_the_same_to_the_bit(name: str, launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    case = CASES[name]
    mask = mask_of(case)
    made = block_mask(case, mask)
    known = results(case, made, mask)
    assert len(launched) == 4 and all(options["HAS_ENTRIES"] is case.holds and not options["HAS_GUARD"] for options in launched)
    monkeypatch.setattr(DocumentTables, "answer", lambda self: None)
    unknown = results(case, made, mask)
    assert len(launched) == 12 and all(torch.equal(known[what], unknown[what]) for what in known)


def test_tables_are_made_once_for_the_same_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """And those that were made before anybody knew how many documents there are lose what no document fills."""
    made: list[Any] = []
    make, begin = rewrite.documents_in_order, DocumentTables.__init__
    seen: list[tuple[DocumentTables, int | None]] = []

    def begun(self: DocumentTables, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        seen.append((self, self.count))
        self.count = None

    monkeypatch.setattr(rewrite, "documents_in_order", lambda *given: made.append(given[1:]) or make(*given))
    ids = RUNS.clone()
    case = CASES["causal"]._replace(ids=ids)
    mask = mask_of(case)
    lists = block_mask(case, mask)
    with monkeypatch.context() as patch:
        patch.setattr(DocumentTables, "__init__", begun)
        unknown = results(case, lists, mask)
    ((found, count),) = seen
    first = sorted(made)
    assert len(set(made)) == len(made) == 3 and count == 5  # the tiles of the three kernels differ
    found.count = count
    known = results(case, lists, mask)
    assert sorted(made) == first and all(torch.equal(known[what], unknown[what]) for what in known)
    for tile, ends_with_row in made:
        full, cut = (found.prepared["triton", tile, ends_with_row, n] for n in (None, count))
        assert cut[0] == len(cut[2]) < full[0] == len(full[2]) and not int((full[2][cut[0] :, 1] >= 0).sum())
    ids.copy_(RUNS.flip(0))
    results(case, block_mask(case, mask), mask)
    assert sorted(made) == sorted(2 * first)


@pytest.mark.parametrize("name", few(["causal", "ids that come back"], "causal"))
def test_a_graph_has_both_forms(name: str, launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose replays may find other ids: nothing is kept of what was found while it was captured."""
    begin, made = DocumentTables.__init__, []

    def begun(self: DocumentTables, *given: Any, **options: Any) -> None:
        begin(self, *given, **options)
        self.count = None  # as on a GPU
        made.append(options)

    monkeypatch.setattr(rewrite, "_is_capturing", lambda ids: True)
    monkeypatch.setattr(DocumentTables, "__init__", begun)
    case = CASES[name]
    mask = mask_of(case)
    results(case, block_mask(case, mask), mask)
    assert made == [{"is_kept": False}] * 2 and len(launched) == 8
    assert sum(options["HAS_ENTRIES"] for options in launched) == sum(options["HAS_GUARD"] for options in launched) == 4


def test_other_tiles_of_the_same_documents() -> None:
    case = CASES["causal"]
    mask = mask_of(case)
    made = block_mask(case, mask)
    q, k, v = cases.inputs("normal", cases.Shape(*case.shape), case.dtype, 0)[:3]
    for tiles in ((16, 64), (64, 16)):
        judge(q, k, v, mask=mask, block_mask=made, kernel_options=dict(zip(("tile_m", "tile_n"), tiles, strict=True)))


@pytest.mark.parametrize(
    "pipeline",
    few(
        [(False, TmaUse.KV_IN_KERNEL), (True, TmaUse.KV), (True, TmaUse.KV_OUT, True), (False, TmaUse.KV_OUT, True)],
        (True, TmaUse.KV_OUT, True),
    ),
    ids=str,
)
def test_keys_by_descriptors(pipeline: tuple, launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors of all of storage, where the tile behind a document's last one holds keys of the next."""
    monkeypatch.setattr(tile_config, "pipeline_of", lambda *_: PipelineOptions(*pipeline))
    for name in ("documents", "ids of each entry"):
        case = CASES[name]
        mask = mask_of(case)
        launched.clear()
        results(case, block_mask(case, mask), mask)
        assert launched[0]["IS_DESCRIBED"] == min(pipeline[1], TmaUse.KV) and launched[0]["IS_JOINED"] is (pipeline[2:] == (True,))


def test_a_mask_of_more_ranges_than_a_kernel_keeps_is_asked(launched: list) -> None:
    case = Case(rest=lambda i, j: (abs(i - j) <= 3) | (abs(i - j - 10) <= 2) | (abs(j - i - 10) <= 2))
    mask = mask_of(case)
    results(case, block_mask(case, mask), mask)
    assert not any(options["HAS_ENTRIES"] for options in launched)


def test_the_plan_says_so() -> None:
    q, k, v = cases.inputs("normal", cases.Shape(1, 2, 1, LENGTH, LENGTH, 16, 16), torch.float32, 0)[:3]
    for name, says in (("causal", True), ("ids that come back", True), (None, False)):
        mask = masks.causal() if name is None else mask_of(CASES[name])
        problem = flex.flex_problem(q, k, v, None, block_mask(Case(), mask), None, None, None, True, None, False, False, False)
        for splits, wanted in ((1, says), (2, False)):
            made = planner.choose(problem, hardware.of("cpu"), "triton", {"num_splits": splits})
            assert any("documents" in line for line in made.why) is wanted


# ---- the guard by itself


def guarded(number: int, monkeypatch: pytest.MonkeyPatch, score: Any = None) -> list[torch.Tensor]:
    """out, lse and gradients of a call, all of whose launches have a guard that holds this number."""
    guard = torch.tensor([number], dtype=torch.int32)
    with monkeypatch.context() as patch:
        patch.setattr(repeater, "forms_of", lambda problem, form: (Form(problem, guard),))
        return plainly(score)


def plainly(score: Any = None) -> list[torch.Tensor]:
    q, k, v, dout = cases.inputs("normal", cases.Shape(1, 2, 1, 40, 40, 16, 16), torch.float32, 0)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    wanted = [*leaves, TABLE.requires_grad_()] if score else leaves
    out, lse = anyattn.flex_attention(*leaves, score, mask_mod=masks.causal(), enable_gqa=True, return_lse=True)
    return [out.detach(), lse.detach(), *torch.autograd.grad(out, wanted, dout)]


def test_a_launch_with_work_is_as_one_without_a_guard(monkeypatch: pytest.MonkeyPatch) -> None:
    score = CASES["a score mod that learns"].score
    for guarded_one, plain in zip(guarded(0, monkeypatch, score), plainly(score), strict=True):
        assert torch.equal(guarded_one, plain)


@pytest.mark.parametrize("number", [1, -7])
def test_a_launch_without_work_writes_nothing(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    *others, of_table = guarded(number, monkeypatch, CASES["a score mod that learns"].score)
    assert not of_table.any()  # what is added up begins with 0
    assert all(t.isnan().all() for t in others)
