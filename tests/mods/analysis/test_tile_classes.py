"""Tile classes equal brute force, by row ranges and by refinement alike; loads are known to be in range before they run."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from anyattn.mods.analysis import range_tables, tile_classes
from anyattn.mods.analysis.load_bounds import check_loads
from anyattn.mods.analysis.row_ranges import row_ranges
from anyattn.mods.analysis.tile_classes import DOUBT, classify, judge, refine
from anyattn.mods.tracing.trace import trace
from tests.support.tiles import brute_classes, dense, library_masks, random_mask

SIDES = (1, 2, 15, 16, 17, 31, 64, 97)
LENGTHS = [(n, m) for i, n in enumerate(SIDES) for m in (SIDES[(i + 1) % 8], n, SIDES[(5 * i + 3) % 8])]  # 24 pairs
TILES = [(m, n) for m in (1, 5, 8, 16, 32, 128) for n in (4, 16, 64)]  # 18


@pytest.mark.covering(1)
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_library_equals_brute_force(lengths):
    for name, mod in library_masks(*lengths).items():
        traced, mask = trace(mod, "mask"), dense(mod, *lengths, 2, 2)
        for tile in TILES:
            wanted = brute_classes(mask, *tile)
            got = classify(traced, *lengths, *tile, 2, 2)
            assert torch.equal(got.expand(wanted.shape), wanted), (name, tile)


@pytest.mark.parametrize("lengths", [(1, 1), (31, 64), (100, 100)], ids=str)
def test_refinement_equals_brute_force(lengths):
    """Without the shortcut of row ranges."""
    for name, mod in library_masks(*lengths).items():
        mask = dense(mod, *lengths, 2, 2)
        for tile in [(1, 1), (7, 5), (16, 16)]:
            assert torch.equal(refine(trace(mod, "mask"), lengths, tile, (2, 2)), brute_classes(mask, *tile)), (name, tile)


@given(st.integers(0, 2**32), st.sampled_from([1, 2, 5, 16, 23, 40]), st.integers(-7, 7), st.sampled_from([(1, 1), (4, 4), (3, 8), (8, 5)]))
@settings(max_examples=200, deadline=None)
def test_random_trees_equal_brute_force(seed, seqlen_k, more, tile):
    lengths = (max(1, seqlen_k + more), seqlen_k)
    mod = random_mask(seed, max(lengths))
    wanted = brute_classes(dense(mod, *lengths, 2, 2), *tile)
    assert torch.equal(classify(trace(mod, "mask"), *lengths, *tile, 2, 2).expand(wanted.shape), wanted)
    assert torch.equal(refine(trace(mod, "mask"), lengths, tile, (2, 2)), wanted)


@given(st.integers(0, 2**32), st.sampled_from([5, 23, 40]), st.sampled_from([(1, 1), (4, 4), (3, 8)]))
@settings(max_examples=150, deadline=None)
def test_intervals_are_sound(seed, length, tile):
    """Interval arithmetic alone, before anything is settled exactly, never calls a tile empty or full that is not."""
    mod = random_mask(seed, length)
    wanted = brute_classes(dense(mod, length, length, 2, 2), *tile)
    got = judge(trace(mod, "mask"), (length, length), tile, (2, 2))
    assert torch.equal(got[got != DOUBT], wanted[got != DOUBT])


def test_intervals_settle_most_tiles():
    """What is doubtful after interval arithmetic lies along the mask's edges."""
    ids = torch.arange(4096) // 700
    for mod in (lambda b, h, q, k: q >= k, lambda b, h, q, k: (q - k < 300) & (q >= k), lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)):
        got = judge(trace(mod, "mask"), (4096, 4096), (64, 64), (1, 1))
        assert int((got == DOUBT).sum()) <= 3 * 64 + 2 * 6 * 12


def test_wild_values_are_left_open():
    big = torch.tensor([2**62, -(2**62), 5, 2**63 - 1])
    for mod in (
        lambda b, h, q, k: big[k] * 4 > 1,
        lambda b, h, q, k: big[q] + big[k] > 7,
        lambda b, h, q, k: (k << 62) > 0,
        lambda b, h, q, k: -big[k] == big[q],
        lambda b, h, q, k: k.to(torch.int8) * 100 > q,
        lambda b, h, q, k: (q - 3) // (k - 1) > 0 if False else (q - 3) // (k + 1) < 0,
        lambda b, h, q, k: (q.to(torch.float16) * 60000.0) > k,
    ):
        wanted = brute_classes(dense(mod, 4, 4), 2, 2)
        assert torch.equal(refine(trace(mod, "mask"), (4, 4), (2, 2), (1, 1)), wanted)


def test_unknown_stays_unknown():
    """A value past what intervals can hold must not come back as a known one after a division or a minimum."""
    big = torch.tensor([2**63 - 1, -(2**63), 2**62, 0])
    for mod in (
        lambda b, h, q, k: big[k] // 1000 > 5 * 10**15,
        lambda b, h, q, k: torch.clamp(big[k], max=5) // 1000 < -5 * 10**15,
        lambda b, h, q, k: (torch.clamp(big[q], min=q) >> 3) > 2**59,
        lambda b, h, q, k: ~torch.abs(big[k] + q) < -(2**61),
    ):
        assert torch.equal(refine(trace(mod, "mask"), (4, 4), (2, 2), (1, 1)), brute_classes(dense(mod, 4, 4), 2, 2))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_times_16_bit_floats_are_not_rounded(dtype):
    """torch multiplies by a number in float32, so bounds that round it to 16 bits first exclude the product."""
    floats, factor = (torch.arange(64) / 7).to(dtype), 0.1
    products = floats * factor
    for mod in (lambda b, h, q, k: floats[q] * factor == products[k], lambda b, h, q, k: floats[q] * 0.1 == products[k]):
        assert torch.equal(refine(trace(mod, "mask"), (64, 64), (1, 1), (1, 1)), brute_classes(dense(mod, 64, 64), 1, 1))


FLOATS, NUMBER, HUGE = torch.arange(64) / 7, 0.1, 1e308
HALVES = FLOATS.half()
QUOTIENTS = HALVES / NUMBER
NUMBERS = {
    "chosen": lambda b, h, q, k: torch.where(k >= 0, 0.1, FLOATS[k]).double() > 0.1,
    "chosen, captured": lambda b, h, q, k: torch.where(k >= 0, NUMBER, FLOATS[k]).double() == NUMBER,
    "chosen in 16 bits": lambda b, h, q, k: torch.where(k >= 0, 0.1, HALVES[k]).float() == 0.1,
    "one of two": lambda b, h, q, k: torch.where(k >= 0, 0.1, 0.2).double() > 0.1,
    "a divisor": lambda b, h, q, k: HALVES[q] / 0.7 == (HALVES / 0.7)[k],
    "a divisor, captured": lambda b, h, q, k: HALVES[q] / NUMBER == QUOTIENTS[k],
    "a divisor that may be 0": lambda b, h, q, k: FLOATS[k] / (FLOATS[q] - 3) >= 0.5,
    "beyond float32": lambda b, h, q, k: (FLOATS[k] >= HUGE) | (FLOATS[k] / HUGE < q - 9),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_are_rounded_where_torch_rounds_them(name):
    """A number that ``where`` chooses is an entry of a tensor; a divisor and a bound stay numbers."""
    mod = NUMBERS[name]
    for tile in [(1, 1), (16, 16)]:
        assert torch.equal(refine(trace(mod, "mask"), (64, 64), tile, (1, 1)), brute_classes(dense(mod, 64, 64), *tile))


def test_long_tables_are_looked_up_in_blocks(monkeypatch):
    monkeypatch.setattr(range_tables, "_MAX_BLOCKS", 5)
    for seed in range(60):
        mod = random_mask(seed, 23)
        assert torch.equal(refine(trace(mod, "mask"), (23, 23), (4, 3), (2, 2)), brute_classes(dense(mod, 23, 23, 2, 2), 4, 3))


@pytest.mark.parametrize("lengths", [(0, 0), (0, 7), (7, 0)], ids=str)
def test_empty_lengths(lengths):
    assert classify(trace(lambda b, h, q, k: q >= k, "mask"), *lengths, 4, 4).shape == (1, 1, -(-lengths[0] // 4), -(-lengths[1] // 4))


def test_broadcast_dimensions():
    assert classify(trace(lambda b, h, q, k: q >= k, "mask"), 16, 16, 4, 4, 3, 5).shape == (1, 1, 4, 4)
    assert classify(trace(lambda b, h, q, k: q + h >= k, "mask"), 16, 16, 4, 4, 3, 5).shape == (1, 5, 4, 4)
    assert classify(trace(lambda b, h, q, k: (q + b) % 3 >= k, "mask"), 16, 16, 4, 4, 3, 5).shape == (3, 1, 4, 4)


def test_ranges_that_touch_make_a_full_tile():
    mod = trace(lambda b, h, q, k: (k < 5) | ((k >= 5) & (k < 9)) | (k == 9), "mask")
    assert row_ranges(mod) is not None
    assert classify(mod, 8, 16, 4, 4)[0, 0].tolist() == [[2, 2, 1, 0]] * 2


def test_never_all_pairs(monkeypatch):
    """2^17 x 2^17 pairs: row ranges look at none, and refinement only at tiles along the edges."""
    looked_at = []
    original = tile_classes.run
    monkeypatch.setattr(tile_classes, "run", lambda *args: looked_at.append(1) or original(*args))
    n = 2**17
    classify(trace(lambda b, h, q, k: q >= k, "mask"), n, n, 128, 128)
    assert not looked_at
    window = trace(lambda b, h, q, k: (q >= k) & (q - k < 512) & ((q - k) % 2 == 0), "mask")
    classes = classify(window, n, n, 128, 128)
    assert int((classes != 0).sum()) == 1024 * 5 - 10 and len(looked_at) < 20


# ---- indices into captured tensors

table = torch.arange(16)
wide = torch.zeros(4, 16)


@pytest.mark.parametrize(
    ("mod", "seqlen_q", "seqlen_k"),
    [
        (lambda b, h, q, k: table[q] == table[k], 16, 16),
        (lambda b, h, q, k: table[q - k] > 3, 16, 17),  # -16 wraps
        (lambda b, h, q, k: table[torch.clamp(q - k, 0, 15)] > 3, 100, 100),
        (lambda b, h, q, k: table[table[q] // 2] > 3, 16, 100),
        (lambda b, h, q, k: table[torch.where(k < 16, k, 0)] > 3, 16, 100),
        (lambda b, h, q, k: table[(q * k) % 16] > 3, 50, 50),
        (lambda b, h, q, k: wide[h + 2 * b, q % 16] > 0, 50, 50),
        (lambda b, h, q, k: table[q] > 3, 100, 0),
        (lambda b, h, q, k: table[torch.where(q + k < 16, q + k, 0)] > 3, 300, 300),
    ],
)
def test_loads_in_range(mod, seqlen_q, seqlen_k):
    check_loads(trace(mod, "mask"), 2, 2, seqlen_q, seqlen_k)


@pytest.mark.parametrize(
    ("mod", "seqlen_q", "seqlen_k", "where"),
    [
        (lambda b, h, q, k: table[q] > 3, 17, 4, "index 16 .at b=0, h=0, q_idx=16"),
        (lambda b, h, q, k: table[k] > 3, 4, 17, "index 16 .*kv_idx=16"),
        (lambda b, h, q, k: table[q - k] > 3, 16, 18, "index -17 .*q_idx=0, kv_idx=17"),
        (lambda b, h, q, k: table[q - k] > 3, 17, 16, "index 16 .*q_idx=16, kv_idx=0"),
        (lambda b, h, q, k: table[torch.abs(q - k)] > 3, 4, 19, "index 18 "),
        (lambda b, h, q, k: table[q + k] > 3, 150, 8, "index .*q_idx="),
        (lambda b, h, q, k: wide[2 * b + 2 * h, q] > 3, 8, 8, "dimension 0 .*index 4 .at b=1, h=1"),
        (lambda b, h, q, k: table[(q * k) % 20] > 3, 50, 50, "index 1[6-9] "),
    ],
)
def test_loads_out_of_range(mod, seqlen_q, seqlen_k, where):
    with pytest.raises(ValueError, match=where):
        check_loads(trace(mod, "mask"), 2, 2, seqlen_q, seqlen_k)


def test_loads_of_a_score():
    check_loads(trace(lambda s, b, h, q, k: s + table[q - k], "score"), 1, 1, 16, 16)
    with pytest.raises(ValueError, match=r"score_mod .*index 16"):
        check_loads(trace(lambda s, b, h, q, k: s + table[q], "score"), 1, 1, 17, 16)
    with pytest.raises(ValueError, match="computed from the score"):
        check_loads(trace(lambda s, b, h, q, k: s + table[s.to(torch.int64)], "score"), 1, 1, 16, 16)


def test_loads_that_shapes_decide_read_no_tensor():
    """What a table on a device holds is not asked where shapes and numbers decide: here the table holds nothing."""
    empty = torch.empty(31, device="meta")
    check_loads(trace(lambda s, b, h, q, k: s + empty[q - k + 15], "score"), 1, 1, 16, 16)
    with pytest.raises(ValueError, match="index 31 "):
        check_loads(trace(lambda s, b, h, q, k: s + empty[q - k + 16], "score"), 1, 1, 16, 16)


def test_what_is_remembered_of_loads():
    """Being inside is known per length, shape and captured number; a table that indexes a table is read anew each time."""

    def shifted(table, by):
        return trace(lambda b, h, q, k: table[q - k + by] > 3, "mask")

    for _ in range(2):
        check_loads(shifted(table, 0), 1, 1, 16, 16)
        for mod, seqlen_q in ((shifted(table, 0), 17), (shifted(table, 1), 16), (shifted(table[:8], 0), 16)):
            with pytest.raises(ValueError, match="reads dimension 0"):
                check_loads(mod, 1, 1, seqlen_q, 16)
    buckets = torch.arange(16)
    nested = trace(lambda b, h, q, k: table[buckets[q]] > 3, "mask")
    check_loads(nested, 1, 1, 16, 16)
    buckets[3] = 16
    with pytest.raises(ValueError, match=r"index 16 .*q_idx=3"):
        check_loads(nested, 1, 1, 16, 16)
