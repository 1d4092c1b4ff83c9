"""Documents found in ids, against a loop over the ids; and calls run as sequences of documents, against the same calls as they came."""

import gc
import random
import weakref
from typing import NamedTuple

import pytest
import torch

import anyattn
from anyattn import and_masks, autograd, hardware, masks, oracle, planner, scores
from anyattn.documents import rewrite
from anyattn.documents.dispatch import dispatched, over_unknown_documents
from anyattn.documents.rewrite import DocumentTables, form_of, over_sequences, tables_of
from anyattn.documents.sequences import document_sequences, places_of
from anyattn.problem import Problem
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from anyattn.validate import flex

DTYPES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def by_hand(rows, places):
    """For each row the starts and lengths of its runs, None where the runs are no documents or too many."""
    found = []
    for row in rows:
        runs = [(i, x) for i, x in enumerate(row) if i == 0 or row[i - 1] != x]
        if len({x for _, x in runs}) != len(runs) or len(runs) > places:
            return None
        ends = [i for i, _ in runs[1:]] + [len(row)]
        found.append([(i, end - i) for (i, _), end in zip(runs, ends, strict=True)])
    return found


def documents(ids, rows, places):
    """The same as it is found on the device."""
    s, holds = document_sequences(ids, rows, places)
    assert holds.dtype is torch.int32 and holds.shape == (1,) and len(s.seqlens_q) == len(s.q_start) == s.batch == rows * places
    assert s.q_row.tolist() == s.k_row.tolist() == [r for r in range(rows) for _ in range(places)]
    if not holds.item():
        assert int(s.seqlens_q.abs().max()) == int(s.seqlens_k.abs().max()) == 0
        return None
    assert torch.equal(s.seqlens_q, s.seqlens_k) and torch.equal(s.q_start, s.k_start)
    pairs = [
        list(zip(a, b, strict=True)) for a, b in zip(s.q_start.view(rows, -1).tolist(), s.seqlens_q.view(rows, -1).tolist(), strict=True)
    ]
    used = [[p for p in row if p[1]] for row in pairs]
    assert all(row[: len(mine)] == mine for row, mine in zip(pairs, used, strict=True)), "an empty place before a used one"
    return used


IDS = {
    "one": [4] * 9,
    "sorted": [0, 0, 0, 1, 1, 5, 5, 5, 9],
    "unsorted": [7, 7, 0, 0, 0, 3, 3, 3, 3],
    "negative": [-1, -1, -7, 0, 0, 0, 5, 5, 5],
    "each its own": list(range(9)),
    "last comes again": [1, 1, 2, 2, 2, 3, 3, 1, 1],
    "interleaved": [0, 1, 0, 1, 0, 1, 0, 1, 0],
    "only the neighbour comes again": [0, 0, 0, 5, 5, 5, 4, 4, 5],
    "a single position": [3],
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", IDS)
def test_runs(name, dtype):
    row = [x % 256 for x in IDS[name]] if dtype is torch.uint8 else IDS[name]
    ids = torch.tensor(row, dtype=dtype)
    for places in (1, 2, 4, 8, 9, 12):
        assert documents(ids, 1, places) == by_hand([row], places)
        assert documents(ids[None], 1, places) == by_hand([row], places)
        assert documents(ids, 3, places) == by_hand([row] * 3, places)


def test_rows_of_their_own():
    rows = [IDS["sorted"], IDS["negative"], IDS["one"]]
    assert documents(torch.tensor(rows), 3, 8) == by_hand(rows, 8) != None  # noqa: E711
    rows[1] = IDS["last comes again"]
    assert documents(torch.tensor(rows), 3, 8) is None


def test_random_runs():
    rng, held = random.Random(5), 0
    for _ in range(300):
        length, rows, places = rng.randint(1, 20), rng.randint(1, 3), rng.randint(1, 9)
        ids = [sorted(rng.choices(range(-3, 6), k=length)) for _ in range(rows)]
        for row in ids:
            if rng.random() < 0.3:
                at = rng.randrange(length)
                row[at:] = row[at:][::-1]
        want = by_hand(ids, places)
        held += want is not None
        assert documents(torch.tensor(ids), rows, places) == want, (ids, places)
    assert 100 < held < 280


def test_strided_ids():
    wide = torch.tensor([IDS["sorted"], IDS["unsorted"]]).repeat_interleave(2, 1)
    assert documents(wide[:, ::2], 2, 6) == by_hand([IDS["sorted"], IDS["unsorted"]], 6)
    assert documents(torch.tensor([IDS["sorted"]]).expand(2, -1), 2, 6) == by_hand([IDS["sorted"]] * 2, 6)


# ---- calls

S = 75
ids = torch.tensor([3] * 20 + [1] * 1 + [8] * 30 + [-2] * 24)
of_entries = torch.stack([ids, torch.tensor([5] * 70 + [4] * 5)])
MASKS = {
    "document": masks.document(ids),
    "document of entries": masks.document(of_entries),
    "causal": masks.document(of_entries) & masks.causal(),
    "window": and_masks(masks.sliding_window(9, 2), masks.document(ids)),
    "hidden rows": masks.document(ids) & masks.causal(-3),
}
SCORES = {"none": None, "alibi": scores.alibi(torch.tensor([0.2, 0.05, 0.5, 0.1])), "softcap": scores.softcap(2.0)}


def tensors(batch=2, length=S, heads=(4, 2), dtype=torch.float32):
    g = torch.Generator().manual_seed(3)
    return tuple(torch.randn(batch, h, length, 16, generator=g).to(dtype) for h in (heads[0], heads[1], heads[1]))


def problem_of(q, k, v, mask, score=None, block_mask=None):
    return flex.flex_problem(q, k, v, score, block_mask, mask, None, None, True, None, True, True, False)


def run(problem):
    return autograd.compute(problem, planner.choose(problem, hardware.of("cpu")))


class Found(NamedTuple):
    """A call over its documents, and where these are."""

    problem: Problem
    tables: DocumentTables


def documents_of(problem):
    form = form_of(problem)
    tables = tables_of(problem, form)
    return Found(over_sequences(problem, form, tables.sequences), tables)


def judged(q, k, v, mask, score=None):
    """What the call must give, the plain formula's results and the rounding noise."""
    return tuple(f(q, k, v, score=score, mask=mask) for f in (oracle.attention, oracle.same_dtype, rounding))


@pytest.mark.parametrize("score", SCORES)
@pytest.mark.parametrize("name", MASKS)
def test_as_sequences(name, score):
    q, k, v = tensors()
    mask, score = MASKS[name], SCORES[score]
    found = documents_of(problem_of(q, k, v, mask, score))
    assert found.tables.answer() is True and found.problem.blocks is None and found.problem.sequences is found.tables.sequences
    results = run(found.problem)
    want, plain, noise = judged(q, k, v, mask, score)
    for what, got, fp64, same in zip(("out", "lse", "max_scores"), results, want, plain, strict=True):
        budget.check(f"{name} {what}", got, fp64, same, noise.lse if got.ndim == 3 else noise.out)
    wrong = run(documents_of(problem_of(q, k, v, masks.document(ids.roll(1).sort().values) & masks.causal(), score)).problem)
    assert budget.share(wrong[0], want.out, plain.out, noise.out) > 1


def test_two_masks_of_one_call():
    q, k, v = tensors()
    problem = problem_of(q, k, v, masks.causal(), None, anyattn.create_block_mask(masks.document(ids), None, None, S, S, device="cpu"))
    assert len(problem.predicates) == 2
    found = documents_of(problem)
    both = masks.document(ids) & masks.causal()
    want, plain, noise = judged(q, k, v, both)
    budget.check("out", run(found.problem)[0], want.out, plain.out, noise.out)


def test_calls_that_stay_as_they_are():
    q, k, v = tensors()
    assert form_of(problem_of(q, k, v, masks.document(ids))) is not None
    assert form_of(problem_of(q, k, v, None)) is None
    assert form_of(problem_of(q, k, v, masks.causal())) is None
    assert form_of(problem_of(q, k, v, masks.document(ids), scores.pair_bias(torch.randn(1, 1, S, S)))) is None
    assert form_of(problem_of(q, k, v, masks.document(of_entries), scores.alibi(torch.rand(2, 4)))) is None
    assert form_of(problem_of(q[:, :, :40], k, v, masks.document(ids))) is None
    assert form_of(problem_of(q, k, v, lambda b, h, i, j: (ids[i] == ids[j]) & ((i - j) % 2 == 0))) is None  # no row ranges
    lists = anyattn.create_block_mask(masks.document(ids), None, None, S, S, device="cpu")
    lists.kv_num_blocks = lists.kv_num_blocks.clone()  # the caller's own from here on
    assert form_of(problem_of(q, k, v, None, None, lists)) is None


def test_ids_that_are_no_documents():
    q, k, v = tensors()
    found = documents_of(problem_of(q, k, v, masks.document(torch.arange(S) % 3)))
    assert found.tables.answer() is False and found.tables.holds.tolist() == [0] and not found.problem.sequences.seqlens_q.any()
    many = torch.arange(S) // 2
    assert len(many.unique()) > places_of(S)
    assert documents_of(problem_of(q, k, v, masks.document(many))).tables.answer() is False


def test_longer_ids_and_more_rows():
    q, k, v = tensors(batch=1, length=21)
    found = documents_of(problem_of(q, k, v, masks.document(of_entries)))
    assert [n for n in found.problem.sequences.seqlens_q.tolist() if n] == [20, 1]


class Lists:
    """Stands for block lists where these would not be looked at but for their device."""

    mask_block_cnt = torch.zeros(1)


def with_lists(problem, lists):
    return problem.like(blocks=lists, blocks_follow=True)


def test_tables_are_kept_with_the_lists():
    q, k, v = tensors()
    mine = ids.clone()
    problem = problem_of(q, k, v, masks.document(mine))
    assert documents_of(problem).tables is not documents_of(problem).tables
    lists = Lists()
    first = documents_of(with_lists(problem, lists)).tables
    assert documents_of(with_lists(problem, lists)).tables is first
    fewer = with_lists(problem_of(q[:1], k[:1], v[:1], masks.document(mine)), lists)
    assert documents_of(fewer).tables is not first and documents_of(fewer).tables is documents_of(fewer).tables
    assert documents_of(with_lists(problem_of(q, k, v, masks.document(mine.clone())), lists)).tables is not first
    mine[10:] = 2
    second = documents_of(with_lists(problem, lists)).tables
    assert [n for n in second.sequences.seqlens_q[:8].tolist() if n] == [10, 65]
    assert first.count == 2 * 4 and second.count == 2 * 2 and documents_of(with_lists(problem, lists)).tables is second
    assert documents_of(with_lists(problem, Lists())).tables is not second


def test_a_write_that_torch_does_not_count_is_seen_with_the_next_lists():
    """As ``ids.data``'s are, a graph's replay's and a kernel's of the user's own."""
    q, k, v = tensors()
    mine = ids.clone()
    problem, lists = problem_of(q, k, v, masks.document(mine)), Lists()
    documents_of(with_lists(problem, lists))
    before = mine._version
    mine.data[10:] = 2
    assert mine._version == before
    found = documents_of(with_lists(problem, Lists()))
    assert [n for n in found.problem.sequences.seqlens_q[:8].tolist() if n] == [10, 65]


def test_tables_die_with_the_lists():
    lists = Lists()
    tables = weakref.ref(documents_of(with_lists(problem_of(*tensors(), masks.document(ids)), lists)).tables)
    assert tables() is not None
    del lists
    gc.collect()
    assert tables() is None


def test_inference_tensors_are_read_anew():
    with torch.inference_mode():
        q, k, v = tensors()
        mine = ids.clone()
        problem = with_lists(problem_of(q, k, v, masks.document(mine)), Lists())
        documents_of(problem)
        mine[10:] = 2
        assert [n for n in documents_of(problem).problem.sequences.seqlens_q[:8].tolist() if n] == [10, 65]


# ---- dispatch


@pytest.mark.parametrize("needs_both", [False, True])
@pytest.mark.parametrize("answer", [None, True, False])
def test_both_are_launched_until_the_answer_is_known(answer, needs_both, monkeypatch):
    """The launch over sequences has no tiles where it does not apply; the one over lists has a guard while the other one is made too."""
    monkeypatch.setattr(DocumentTables, "answer", lambda self: answer)
    problem = with_lists(problem_of(*tensors(), masks.document(ids) & masks.causal()), Lists())
    form, unknown = over_unknown_documents(problem)
    found = dispatched(problem, form, needs_cache=True, needs_both=needs_both)
    assert (found.by_sequences, found.by_lists) == (answer is not False or needs_both, answer is not True or needs_both)
    assert found.guard is (found.tables.holds if found.by_sequences else None) and found.answer is answer
    over = found.over_sequences()
    assert over.sequences is found.tables.sequences and over.blocks is unknown.blocks is None and not unknown.sequences.batch
    assert [p.expr for p in over.predicates] == [p.expr for p in unknown.predicates] == [form.rest]
    assert dispatched(problem, form, needs_cache=True).tables is found.tables


def test_without_lists_nothing_is_dispatched():
    assert over_unknown_documents(problem_of(*tensors(), masks.document(ids))) is None
    assert over_unknown_documents(with_lists(problem_of(*tensors(), masks.causal()), Lists())) is None


def test_documents_whose_tables_cannot_be_cached(monkeypatch):
    """Ids of inference mode: launched as the call is, where a backend says so; but made anew by a graph's replays, for which both are."""
    with torch.inference_mode():
        mine = ids.clone()
    problem = with_lists(problem_of(*tensors(), masks.document(mine)), Lists())
    form = form_of(problem)
    assert dispatched(problem, form, needs_cache=True) is None
    found = dispatched(problem, form, needs_cache=False)
    assert found.by_sequences and not found.by_lists and found.tables is not dispatched(problem, form, needs_cache=False).tables
    monkeypatch.setattr(rewrite, "_is_capturing", lambda ids: True)
    assert dispatched(problem, form, needs_cache=True) is not None
