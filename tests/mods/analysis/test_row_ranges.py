"""Row ranges say exactly what the mask says, for every row, wherever they are given."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.mods import masks
from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.row_ranges import NO_LIMIT, limits, never_fall, row_ranges
from anyattn.mods.tracing.trace import trace
from tests.support.tiles import dense, library_masks, random_mask

LENGTHS = [(1, 1), (7, 7), (40, 40), (33, 57), (57, 33), (1, 64), (64, 1), (0, 5), (5, 0)]


def seen(lo, hi, seqlen_k):
    column = torch.arange(seqlen_k)
    return ((lo[..., None] <= column) & (column < hi[..., None])).sum(0)


def assert_exact(mod, seqlen_q, seqlen_k, B=2, H=2):
    """The limits are the mask; they are also clipped, sorted, apart, and empty ones last. False where there are none."""
    found = limits(trace(mod, "mask"), seqlen_q, seqlen_k, B, H)
    if found is None:
        return False
    lo, hi = found
    assert lo.dtype == hi.dtype == torch.int32
    assert 1 <= len(lo) <= 4 and lo.shape[1] in (1, B) and lo.shape[2] in (1, H) and lo.shape[3] == seqlen_q
    count = seen(lo, hi, seqlen_k)
    assert int(count.max()) <= 1 if count.numel() else True
    assert torch.equal((count > 0).expand(B, H, seqlen_q, seqlen_k), dense(mod, seqlen_q, seqlen_k, B, H))
    assert bool(((lo >= 0) & (lo <= hi) & (hi <= seqlen_k)).all())
    empty = lo == hi
    assert not bool((empty[:-1] & ~empty[1:]).any())
    assert bool(((lo[1:] > hi[:-1]) | empty[1:]).all())
    assert torch.equal(lo[1:][empty[1:]], hi[:-1][empty[1:]])
    return True


@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_library(lengths):
    for name, mod in library_masks(*lengths).items():
        has_ranges = assert_exact(mod, *lengths)
        if min(lengths) > 8 and name not in ("dilated", "tree", "prefix_or_document", "neighborhood_3d", "sliding_tiles"):
            assert has_ranges, name


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5, 16, 23]), st.integers(-7, 7))
@settings(max_examples=250, deadline=None)
def test_random_trees(seed, seqlen_k, more):
    seqlen_q = max(1, seqlen_k + more)
    assert_exact(random_mask(seed, max(seqlen_q, seqlen_k)), seqlen_q, seqlen_k)


def test_random_trees_mostly_have_ranges():
    found = [row_ranges(trace(random_mask(seed, 16), "mask")) is not None for seed in range(200)]
    assert sum(found) > 80


ids = torch.tensor([4, 4, 4, 1, 1, 7, 7, 7, 7, 0])
N = 5
FORMS = {
    "affine, scaled": lambda b, h, q, k: 3 * k - q <= 2 * q + 1,
    "block of scalar": lambda b, h, q, k: k // N <= q // N,
    "scaled by scalar": lambda b, h, q, k: k * N > q,
    "scaled by negative": lambda b, h, q, k: k * -N > q - 40,
    "nested floor": lambda b, h, q, k: (k // 2 + q) // 3 == 1,
    "abs eq": lambda b, h, q, k: torch.abs(q - k) == 2,
    "abs of blocks": lambda b, h, q, k: torch.abs(q // 2 - k // 2) <= 1,
    "clamp": lambda b, h, q, k: torch.clamp(q - k, 0, 4) < 3,
    "weights": lambda b, h, q, k: torch.where(k < 3, 5, q) >= 4,
    "bool as number": lambda b, h, q, k: (k < q).to(torch.int32) >= (q % 2),
    "nonzero": lambda b, h, q, k: (k - q).to(torch.bool),
    "xor": lambda b, h, q, k: (q >= k) ^ (k < 3),
    "equal bools": lambda b, h, q, k: (q >= k) == (k < 3),
    "de morgan": lambda b, h, q, k: ~((q < k) | ~(k > 1)),
    "no kv": lambda b, h, q, k: (q % 3 == 0) | (h == 1),
    "constant": lambda b, h, q, k: q < 0,
    "cancels": lambda b, h, q, k: k - k == q,
    "runs": lambda b, h, q, k: ids[q] == ids[k],
    "other runs": lambda b, h, q, k: ids[q] != ids[k],
    "runs against a number": lambda b, h, q, k: ids[k] == 7,
    "runs against arithmetic": lambda b, h, q, k: ids[k] == ids[q] + 3,
    "sentinel": lambda b, h, q, k: k <= torch.tensor([2**63 - 1, 3])[q % 2],
    "weird index": lambda b, h, q, k: k < ids[(q * q) % 10],
    "int32": lambda b, h, q, k: q.to(torch.int32) >= k.to(torch.int32),
}


@pytest.mark.parametrize("name", FORMS)
def test_forms_have_ranges(name):
    assert assert_exact(FORMS[name], 10, 10)


def test_per_batch_tables():
    per_batch = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 3, 0, 0]])
    kept = torch.tensor([[True, True, False, False, False, False], [False, True, True, True, True, False]])
    assert assert_exact(lambda b, h, q, k: (per_batch[b, q] == per_batch[b, k]) & (q >= k), 6, 6)
    assert assert_exact(lambda b, h, q, k: kept[b, k] & ~kept[b, q], 6, 6)
    assert assert_exact(lambda b, h, q, k: per_batch[b, k] == per_batch[1 - b, q], 6, 6)
    turned = per_batch.T.contiguous()
    assert assert_exact(lambda b, h, q, k: turned[q, b] == turned[k, b], 6, 6)
    square = torch.randint(0, 2, (6, 6), generator=torch.Generator().manual_seed(1)).sort(0).values
    assert_exact(lambda b, h, q, k: square[k, q] == square[q, 5], 6, 6)


@pytest.mark.parametrize(
    "mod",
    [
        lambda b, h, q, k: (q - k) % 3 == 0,
        lambda b, h, q, k: torch.tensor([0, 1, 0, 1, 1, 0])[k] == 1,
        lambda b, h, q, k: q * k < 9,
        lambda b, h, q, k: k.to(torch.int8) < q,
        lambda b, h, q, k: k * 0.5 < q,
    ],
)
def test_none_where_there_are_none(mod):
    assert row_ranges(trace(mod, "mask")) is None


def test_scalars_stay_runtime_values():
    def window(w):
        return lambda b, h, q, k: (q >= k) & (q - k < w)

    one, two = (row_ranges(trace(window(w), "mask")) for w in (3, 9))
    assert one.expr.key == two.expr.key and one.scalars != two.scalars


def test_symbolic_form():
    ranges = row_ranges(trace(lambda b, h, q, k: q < k, "mask"))
    assert ranges.count == 1 and ranges.expr.nodes[ranges.expr.outputs[1]].attr == NO_LIMIT


def test_rejects_score():
    with pytest.raises(TypeError, match="is a score mod"):
        row_ranges(trace(lambda s, b, h, q, k: s, "score"))


def test_linear_memory():
    """A mask over 2^20 x 2^20 pairs is described in a few megabytes."""
    document = torch.arange(2**20) // 1000
    lo, hi = limits(trace(masks.document(document) & masks.causal(), "mask"), 2**20, 2**20)
    assert lo.shape == (1, 1, 1, 2**20) and int((hi - lo).max()) == 1000


RISING = {
    "causal": masks.causal(3), "window": masks.sliding_window(9, 2), "sink and window": masks.sink_window(4, 9),
    "prefix": masks.prefix_lm(7), "first keys": lambda b, h, q, k: k < 9, "by entry": lambda b, h, q, k: k < 9 + b,
}  # fmt: skip
FALLING = {
    "antidiagonal": lambda b, h, q, k: k < 40 - q, "by head": lambda b, h, q, k: q + h >= k, "blocks": lambda b, h, q, k: q // 4 == k // 4,
    "two ways": lambda b, h, q, k: (q >= k) & (k >= 9 - q),
}  # fmt: skip


@pytest.mark.parametrize("name", [*RISING, *FALLING])
def test_what_is_said_to_never_fall_never_does(name):
    mod = trace({**RISING, **FALLING}[name], "mask")
    assert never_fall(row_ranges(mod).expr) is (name in RISING)


@given(st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_random_masks_that_never_fall(seed):
    ranges = row_ranges(trace(random_mask(seed, 16), "mask"))
    if ranges is None or not never_fall(ranges.expr):
        return
    leaves = {"b": torch.tensor(1), "h": torch.arange(3)[:, None], "q_idx": torch.arange(20)}
    for limit in run(ranges.expr, leaves, ranges.scalars, ranges.tensors):
        limit = torch.as_tensor(limit).expand(3, 20)
        assert bool((limit[:, 1:] >= limit[:, :-1]).all()) and bool((limit == limit[:1]).all())


def test_ranges_know_a_zeros_sign():
    """1 / 0.0 is infinite, and 1 / -0.0 minus infinite."""

    def by(number):
        return trace(lambda b, h, q, k: 1 / (number * (q + 1.0)) > 0, "mask")

    for number, end in ((0.0, 5), (-0.0, 0), (0.0, 5)):
        lo, hi = limits(by(number), 3, 5)
        assert lo.flatten().tolist() == [0, 0, 0] and hi.flatten().tolist() == [end] * 3
