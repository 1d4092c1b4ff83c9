"""Which masks are documents and something that does not care where a document begins, and which are not."""

import pytest
import torch

from anyattn import and_masks, masks, scores
from anyattn.mods.analysis.document_masks import document_form, ignores_origin, rest_of
from anyattn.mods.tracing.trace import trace
from tests.support.tiles import dense

S = 24
ids = torch.tensor([3] * 5 + [1] * 9 + [8] * 10)
other = ids.clone()
of_entries = torch.stack([ids, ids.roll(3)])
floats = ids.float()
window = torch.tensor([2, 5])
lengths = torch.tensor([9, 4])

DOCUMENTS = {
    "library": (masks.document(ids), masks.full()),
    "of entries": (masks.document(of_entries), masks.full()),
    "plain": (lambda b, h, q, k: ids[q] == ids[k], masks.full()),
    "turned": (lambda b, h, q, k: ids[k] == ids[q], masks.full()),
    "by entry and position": (lambda b, h, q, k: of_entries[b, k] == of_entries[b, q], masks.full()),
    "by entry, then position": (lambda b, h, q, k: of_entries[b][q] == of_entries[b][k], masks.full()),
    "causal": (masks.document(ids) & masks.causal(), masks.causal()),
    "causal first": (masks.causal() & masks.document(ids), masks.causal()),
    "and_masks": (and_masks(masks.causal(), masks.document(ids), masks.sliding_window(7, 0)), masks.sliding_window(7, 0)),
    "window of heads": (lambda b, h, q, k: (q - k <= window[h]) & (ids[q] == ids[k]), lambda b, h, q, k: q - k <= window[h]),
    "both sides": (masks.sliding_window(3, 2) & masks.document(ids), masks.sliding_window(3, 2)),
    "shifted": (masks.document(ids) & masks.causal(-2), masks.causal(-2)),
}
OTHERS = {
    "causal": masks.causal(),
    "two tensors": lambda b, h, q, k: ids[q] == other[k],
    "not equal": lambda b, h, q, k: ids[q] != ids[k],
    "or": masks.document(ids) | masks.causal(),
    "not": ~masks.document(ids),
    "two documents": lambda b, h, q, k: (ids[q] == ids[k]) & (other[q] == other[k]),
    "floats": lambda b, h, q, k: floats[q] == floats[k],
    "same position": lambda b, h, q, k: ids[q] == ids[q],
    "of heads": lambda b, h, q, k: of_entries[h, q] == of_entries[h, k],
    "one entry's": lambda b, h, q, k: of_entries[0, q] == of_entries[0, k],
    "next position": lambda b, h, q, k: ids[q] == ids[torch.clamp(k + 1, max=S - 1)],
    "prefix": masks.document(ids) & masks.prefix_lm(4),
    "a position": lambda b, h, q, k: (ids[q] == ids[k]) & (k != 4),
    "blocks": masks.document(ids) & masks.block_diagonal(4),
    "of entry": lambda b, h, q, k: (ids[q] == ids[k]) & (q - k < lengths[b]),
    "chunked": masks.document(ids) & masks.chunked(8),
}


def traced(mask):
    return trace(mask, "mask")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_documents_and_their_rest(name):
    mask, rest = DOCUMENTS[name]
    mask = traced(mask)
    form = document_form(mask.expr)
    assert form is not None
    captured = mask.tensors[form.ids]
    found = rest_of(mask, form)
    of_rest = dense(rest, S, S, 2, 2)
    if found is None:
        assert bool(of_rest.all())
    else:
        assert ignores_origin(found.expr) and all(t is not captured for t in found.tensors)
        assert torch.equal(dense(found, S, S, 2, 2), of_rest)
    is_one = dense(lambda b, h, q, k: captured[b, q] == captured[b, k] if captured.ndim == 2 else captured[q] == captured[k], S, S, 2, 2)
    assert torch.equal(dense(mask, S, S, 2, 2), is_one & of_rest)


@pytest.mark.parametrize("name", OTHERS)
def test_other_masks(name):
    assert document_form(traced(OTHERS[name]).expr) is None


def test_the_same_rest_is_the_same_program():
    rests = [document_form(traced(masks.document(t) & masks.causal()).expr).rest for t in (ids, of_entries)]
    assert rests[0].key == rests[1].key == traced(masks.causal()).key


SHIFTED = {
    "alibi": scores.alibi(torch.rand(2)),
    "t5": scores.t5_bias(torch.randn(8, 2)),
    "relative": scores.relative_bias(torch.randn(2, 2 * S + 1)),
    "softcap": scores.softcap(5.0),
    "head bias": scores.head_bias(torch.randn(2)),
    "temperature": scores.temperature(torch.tensor(2.0)),
    "chain": scores.softcap(5.0).then(scores.alibi(torch.rand(2))),
    "where": lambda s, b, h, q, k: torch.where(q - k > 3, s * 0.5, s),
}
NAILED = {
    "pair bias": scores.pair_bias(torch.randn(1, 2, S, S)),
    "of entries": scores.alibi(torch.rand(2, 2)),
    "row": lambda s, b, h, q, k: s + floats[q],
    "column": lambda s, b, h, q, k: s * (k + 1),
    "sum": lambda s, b, h, q, k: s + (q + k),
    "floats": lambda s, b, h, q, k: s + (q.to(torch.float32) - k.to(torch.float32)),
    "entry": lambda s, b, h, q, k: s + b,
}


@pytest.mark.parametrize("name", SHIFTED)
def test_scores_that_ignore_a_shift(name):
    assert ignores_origin(trace(SHIFTED[name], "score").expr)


@pytest.mark.parametrize("name", NAILED)
def test_scores_that_see_a_shift(name):
    assert not ignores_origin(trace(NAILED[name], "score").expr)
