"""Every score of the library against its definition in plain Python, in float64, to a count of ulps."""

from __future__ import annotations

import math

import pytest
import torch

from anyattn import flex_attention, scores
from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.trace import trace

B, H, M, N = 2, 3, 9, 11
SCORE = torch.randn(B, H, M, N, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def is_within(mod, definition, ulps):
    """Both in float64: at most ``ulps`` units in the last place apart, relative to the larger of the score and the result."""
    leaves = (torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1), torch.arange(M).view(-1, 1), torch.arange(N))
    got = evaluate(trace(mod, "score", score_dtype=torch.float64), *leaves, score=SCORE).expand(B, H, M, N)
    for b, h, i, j in torch.cartesian_prod(*(torch.arange(n) for n in (B, H, M, N))).tolist():
        s = float(SCORE[b, h, i, j])
        want, have = definition(s, b, h, i, j), float(got[b, h, i, j])
        assert abs(have - want) <= ulps * math.ulp(max(abs(want), abs(s))), ((b, h, i, j), have, want)


def table_of(*shape, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("heads", [1, 2, 8, 64])
def test_alibi_slopes_of_powers_of_two(heads):
    assert scores.alibi_slopes(heads).tolist() == [float(torch.tensor(2 ** (-8 * (i + 1) / heads))) for i in range(heads)]


def test_alibi_slopes_of_other_counts():
    assert scores.alibi_slopes(3).tolist() == [2**-4, 2**-8, 2**-2]
    assert scores.alibi_slopes(6).tolist() == [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]
    assert scores.alibi_slopes(12).shape == (12,)


def test_alibi():
    slopes = table_of(H)
    is_within(scores.alibi(slopes), lambda s, b, h, i, j: s - float(slopes[h]) * abs(i - j), 2)


@pytest.mark.parametrize("reach", [0, 3, 30])
def test_relative_bias(reach):
    table = table_of(H, 2 * reach + 1)

    def at(i, j):
        return max(-reach, min(reach, i - j)) + reach

    is_within(scores.relative_bias(table), lambda s, b, h, i, j: s + float(table[h, at(i, j)]), 0)
    is_within(scores.relative_bias(table[1]), lambda s, b, h, i, j: s + float(table[1, at(i, j)]), 0)


def t5_bucket(relative, bidirectional, buckets, max_distance):
    """T5's published function on one relative position (memory - query), after the text of section 2.1."""
    result = 0
    if bidirectional:
        buckets //= 2
        result += buckets if relative > 0 else 0
        distance = abs(relative)
    else:
        distance = max(-relative, 0)
    exact = buckets // 2
    if distance < exact:
        return result + distance
    far = exact + int(math.log(distance / exact) / math.log(max_distance / exact) * (buckets - exact))
    return result + min(far, buckets - 1)


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "max_distance"), [(8, 10), (32, 128), (4, 5)])
def test_t5_bias(bidirectional, buckets, max_distance):
    table = table_of(buckets, H)
    mod = scores.t5_bias(table, bidirectional, max_distance)
    is_within(mod, lambda s, b, h, i, j: s + float(table[t5_bucket(j - i, bidirectional, buckets, max_distance), h]), 0)


def test_t5_buckets_at_long_distances():
    """The rounding of log in float32 moves no distance of T5's own configuration to another bucket."""
    table = torch.arange(32.0, dtype=torch.float64)[:, None]
    traced = trace(scores.t5_bias(table), "score", score_dtype=torch.float64)
    got = evaluate(traced, 0, 0, torch.arange(400).view(-1, 1), torch.arange(400), score=torch.zeros(400, 400, dtype=torch.float64))
    want = [[t5_bucket(j - i, True, 32, 128) for j in (0, 399)] for i in range(400)]
    assert got[:, [0, 399]].long().tolist() == want


def test_forget_gate():
    """The sum of the log gates after the key, up to the query; its negative for keys after the query."""
    gates = -table_of(B, H, max(M, N)).abs()
    log = lambda b, h, i, j: math.fsum(gates[b, h, j + 1 : i + 1]) - math.fsum(gates[b, h, i + 1 : j + 1])
    is_within(scores.forget_gate(gates.cumsum(-1)), lambda s, b, h, i, j: s + log(b, h, i, j), 64)


def clamped(distance, reach):
    """DeBERTa's equation 3."""
    return 0 if distance <= -reach else 2 * reach - 1 if distance >= reach else distance + reach


def bucketed(distance, reach, max_distance):
    """DeBERTa-v2's bucket of one distance, clamped as its code does."""
    half = reach // 2
    if abs(distance) > half:
        steps = math.ceil(math.log(abs(distance) / half) / math.log((max_distance - 1) / half) * (half - 1) - 1e-6)
        distance = math.copysign(half + steps, distance)
    return int(max(0, min(2 * reach - 1, distance + reach)))


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize("reach", [1, 3, 8, 30])
def test_disentangled(reach, by_query):
    c2p, p2c = table_of(B, H, M, 2 * reach), table_of(B, H, N, 2 * reach).flip(0)

    def definition(s, b, h, i, j):
        return s + float(c2p[b, h, i, clamped(i - j, reach)]) + float(p2c[b, h, j, clamped(i - j if by_query else j - i, reach)])

    is_within(scores.disentangled(c2p, p2c, p2c_by_query=by_query), definition, 4)


@pytest.mark.parametrize("by_query", [False, True])
@pytest.mark.parametrize(("reach", "max_distance"), [(2, 4), (4, 8), (8, 9), (8, 40), (256, 512)])
def test_disentangled_with_buckets(reach, max_distance, by_query):
    c2p, p2c = table_of(B, H, M, 2 * reach), table_of(B, H, N, 2 * reach).flip(0)
    place = lambda distance: bucketed(distance, reach, max_distance)

    def definition(s, b, h, i, j):
        return s + float(c2p[b, h, i, place(i - j)]) + float(p2c[b, h, j, place(i - j if by_query else j - i)])

    is_within(scores.disentangled(c2p, p2c, max_distance, by_query), definition, 4)


def test_disentangled_at_long_distances():
    """DeBERTa-v3's configuration at every distance, a table of numbers of its places."""
    places = torch.arange(512.0, dtype=torch.float64).expand(1, 1, 1500, 512)
    traced = trace(scores.disentangled(places, torch.zeros_like(places), 512), "score", score_dtype=torch.float64)
    got = evaluate(traced, 0, 0, torch.arange(1500).view(-1, 1), torch.arange(1500), score=torch.zeros((), dtype=torch.float64))
    for column in (0, 1499):
        assert got[:, column].long().tolist() == [bucketed(i - column, 256, 512) for i in range(1500)]


def test_head_bias():
    bias = table_of(H, dtype=torch.bfloat16)
    is_within(scores.head_bias(bias), lambda s, b, h, i, j: s + float(bias[h]), 0)


@pytest.mark.parametrize("batch", [1, B])
@pytest.mark.parametrize("heads", [1, H])
def test_pair_bias(batch, heads):
    bias = table_of(batch, heads, M, N)
    is_within(scores.pair_bias(bias), lambda s, b, h, i, j: s + float(bias[b % batch, h % heads, i, j]), 0)


@pytest.mark.parametrize("wrap", [float, lambda x: torch.tensor(x, dtype=torch.float64)], ids=["number", "tensor"])
def test_softcap_and_temperature(wrap):
    is_within(scores.softcap(wrap(0.75)), lambda s, b, h, i, j: 0.75 * math.tanh(s / 0.75), 4)
    is_within(scores.temperature(wrap(1.7)), lambda s, b, h, i, j: s / 1.7, 1)


def test_numbers_at_the_ends_of_float32() -> None:
    """The greatest and the least that are taken give numbers; what float32 does not hold is for float64, as a tensor."""
    nought, keys = torch.zeros(1, 1, 8, 16), torch.randn(1, 1, 8, 16)
    for score in (scores.softcap(2.3e38), scores.softcap(1.2e-38), scores.temperature(2.3e38), scores.temperature(1.2e-38)):
        assert bool(flex_attention(nought, keys, keys, score_mod=score).isfinite().all())
    double = [t.double() for t in (keys, keys, keys)]
    wide = flex_attention(*double, score_mod=scores.softcap(torch.tensor(1e300, dtype=torch.float64)))
    assert torch.allclose(wide, flex_attention(*double), rtol=1e-12)


BAD = [
    (lambda: scores.alibi_slopes(0), ValueError, "num_heads=0"),
    (lambda: scores.alibi_slopes(2.0), TypeError, "num_heads=2.0"),
    (lambda: scores.alibi([1.0]), TypeError, "slopes is a list"),
    (lambda: scores.alibi(torch.ones(2, 2, 2)), ValueError, r"slopes has shape \(2, 2, 2\)"),
    (lambda: scores.forget_gate(torch.ones(2, 3)), ValueError, r"cumulative has shape \(2, 3\).* of shape \(B, Hq, S\)"),
    (lambda: scores.disentangled(torch.ones(4), torch.ones(1, 1, 2, 4)), ValueError, r"c2p has shape \(4,\)"),
    (lambda: scores.disentangled(*torch.ones(2, 1, 1, 2, 5)), ValueError, "c2p has 5 places and p2c 5; wanted the same even number 2k"),
    (lambda: scores.disentangled(torch.ones(1, 1, 2, 4), torch.ones(1, 1, 2, 6)), ValueError, "c2p has 4 places and p2c 6"),
    (lambda: scores.disentangled(*torch.ones(2, 1, 1, 2, 8), 3), ValueError, "max_distance=3; wanted an int above 3"),
    (lambda: scores.disentangled(*torch.ones(2, 1, 1, 2, 2), 30), ValueError, "tables of at least 4 places"),
    (lambda: scores.disentangled(*torch.ones(2, 1, 1, 2, 8), 30.0), ValueError, "max_distance=30.0"),
    (lambda: scores.disentangled(*torch.ones(2, 1, 1, 2, 8), p2c_by_query=1), TypeError, "p2c_by_query=1 is a int"),
    (lambda: scores.head_bias(torch.ones(2, dtype=torch.int64)), ValueError, "torch.int64; wanted a float tensor"),
    (lambda: scores.relative_bias(torch.ones(4)), ValueError, "4 distances; wanted an odd number"),
    (lambda: scores.t5_bias(torch.ones(3, 2)), ValueError, "3 buckets; wanted at least 4"),
    (lambda: scores.t5_bias(torch.ones(8, 2), True, 2), ValueError, "max_distance=2"),
    (lambda: scores.t5_bias(torch.ones(8, 2), True, 20.0), ValueError, "max_distance=20.0"),
    (lambda: scores.pair_bias(torch.ones(3, 3)), ValueError, r"\(B or 1, Hq or 1, Sq, Sk\)"),
    (lambda: scores.softcap(0), ValueError, "cap=0; wanted a positive finite number"),
    (lambda: scores.softcap(math.inf), ValueError, "cap=inf"),
    (lambda: scores.softcap(10**400), ValueError, "wanted a positive finite number"),
    (lambda: scores.softcap(1e300), ValueError, r"cap=1e\+300; wanted at most 2\.34e\+38 in size, .*float32, or .* a tensor of that dtype"),
    (lambda: scores.softcap(1e-300), ValueError, r"cap=1e-300; wanted at least 1\.18e-38, .*float32, or .* a tensor of that dtype"),
    (lambda: scores.temperature(1e300), ValueError, r"t=1e\+300; wanted at most 2\.34e\+38"),
    (lambda: scores.temperature(1e-300), ValueError, r"t=1e-300; wanted at least 1\.18e-38"),
    (lambda: scores.softcap("30"), TypeError, "cap='30' is a str"),
    (lambda: scores.temperature(True), TypeError, "t=True is a bool"),
    (lambda: scores.temperature(torch.ones(2)), ValueError, r"t has shape \(2,\)"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_arguments(case):
    make, error, words = BAD[case]
    with pytest.raises(error, match=words):
        make()
