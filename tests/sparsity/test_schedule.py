"""Work lists cover every listed tile once, longest first, and keep workers evenly busy."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.sparsity import work_list

COUNTS = st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 9)).flatmap(
    lambda shape: st.lists(st.integers(0, 60), min_size=shape[0] * shape[1] * shape[2], max_size=shape[0] * shape[1] * shape[2]).map(
        lambda values: torch.tensor(values).reshape(shape)
    )
)


@given(COUNTS, st.integers(1, 40), st.sampled_from([None, 1, 2, 5]))
@settings(max_examples=150, deadline=None)
def test_covers_every_tile_once(counts, workers, max_pieces):
    work = work_list(counts, workers, max_pieces)
    assert work.dtype == torch.int32 and work.shape[1] == 5
    seen: dict = {}
    for b, h, m, begin, end in work.tolist():
        seen.setdefault((b, h, m), []).append((begin, end))
    assert set(seen) == {tuple(at) for at in torch.ones_like(counts).nonzero().tolist()}
    for at, pieces in seen.items():
        pieces.sort()
        assert len(pieces) <= (max_pieces or len(pieces))
        assert pieces[0][0] == 0 and pieces[-1][1] == int(counts[at])
        assert all(a[1] == b[0] and b[0] < b[1] for a, b in itertools.pairwise(pieces))
    lengths = (work[:, 4] - work[:, 3]).tolist()
    assert lengths == sorted(lengths, reverse=True)


@given(COUNTS, st.integers(1, 40))
@settings(max_examples=150, deadline=None)
def test_balance(counts, workers):
    work = work_list(counts, workers)
    share = -(-int(counts.sum()) // workers)
    busy = [0] * workers
    for length in (work[:, 4] - work[:, 3]).tolist():
        assert length <= max(share, 1)
        free = busy.index(min(busy))
        busy[free] += length
    assert max(busy) <= 2 * max(share, 1)


def test_ragged_mask():
    """One very long row among short ones: without a split, one worker would do 100 tiles while 7 wait."""
    counts = torch.tensor([[[100, *[4] * 15]]])
    work = work_list(counts, 8)
    busy = [0] * 8
    for length in (work[:, 4] - work[:, 3]).tolist():
        busy[busy.index(min(busy))] += length
    assert max(busy) == 20


def test_nothing_and_bad_arguments():
    assert work_list(torch.zeros(0, 1, 3, dtype=torch.int32), 4).shape == (0, 5)
    assert work_list(torch.zeros(1, 1, 3, dtype=torch.int32), 4)[:, 3:].tolist() == [[0, 0]] * 3
    with pytest.raises(TypeError, match="wanted integers"):
        work_list(torch.zeros(1, 1, 3), 4)
    with pytest.raises(ValueError, match="workers is 0"):
        work_list(torch.zeros(1, 1, 3, dtype=torch.int32), 0)
    with pytest.raises(ValueError, match="counts holds -1"):
        work_list(torch.tensor([[[-1]]]), 2)
