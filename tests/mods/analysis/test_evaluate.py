"""``evaluate`` equals calling the user's function on every index of a small grid, exactly."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import torch

from anyattn.mods.analysis.evaluate import evaluate
from anyattn.mods.tracing.trace import trace
from tests.support import cases

B, H, M, N = 2, 3, 5, 7
SHAPE = cases.Shape(B, H, 1, M, N, 4, 4)
table2 = torch.randn(H, 2 * N + 1, generator=torch.Generator().manual_seed(0))
bucket = torch.tensor([0, 1, 2, 3, 3, 4, 4, 4, 5, 5, 5, 5])
flags = torch.tensor([True, False, True, True, False, False, True])
ids = torch.tensor([[0, 0, 1, 1, 1, 2, 2], [0, 1, 1, 1, 1, 1, 1]], dtype=torch.int32)
half = torch.randn(N, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
zero_dim = torch.tensor(3)


def grid():
    return itertools.product(range(B), range(H), range(M), range(N))


def everywhere(mod, score=None):
    """The evaluated mod on the whole grid."""
    leaves = (
        torch.arange(B).view(-1, 1, 1, 1), torch.arange(H).view(-1, 1, 1), torch.arange(M).view(-1, 1), torch.arange(N),
    )  # fmt: skip
    return evaluate(mod, *leaves, score=score).expand(B, H, M, N)


def check_mask(f):
    got = everywhere(trace(f, "mask"))
    assert got.dtype is torch.bool
    for at in grid():
        assert bool(got[at]) == bool(f(*map(torch.tensor, at))), at


def check_score(f, dtype):
    score = torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(2), dtype=dtype)
    got = everywhere(trace(f, "score", score_dtype=dtype), score)
    assert got.dtype is dtype
    for at in grid():
        want = f(score[at], *map(torch.tensor, at)).to(dtype)
        # the same operation on one number and on a vector of them may take another routine, one rounding apart
        low, high = (torch.nextafter(want, want.new_tensor(x)) for x in (-math.inf, math.inf))
        assert got[at] == want or (_transcendental(f) and low <= got[at] <= high), (at, got[at], want)


def _transcendental(f) -> bool:
    names = set(getattr(f, "__code__", everywhere.__code__).co_names)
    return bool(names & {"exp", "log", "tanh", "sigmoid", "sin", "erf", "exp2", "log2", "rsqrt"})


def offset_of(n):
    return lambda b, h, q, k: q >= k - n


class Window:
    def __init__(self, left):
        self.left = left

    def __call__(self, b, h, q, k):
        return (q - k <= self.left) & (k <= q)

    def method(self, b, h, q, k):
        return q - k == self.left


def by_loop(b, h, q, k):
    seen = q == k
    for n in range(3):
        seen = seen | (q - k == 2 * n + 1)
    return seen


def inner(b, h, q, k):
    return q % 2 == k % 3


def nested(b, h, q, k):
    return inner(b, h, q, k) | ~offset_of(2)(b, h, q, k)


limit, slope = 4, 0.37

MASKS = {
    "lambda": lambda b, h, q, k: q >= k,
    "closure": offset_of(-2),
    "global": lambda b, h, q, k: q + k < limit,
    "partial": functools.partial(lambda n, b, h, q, k: q - k < n, 3),
    "object": Window(2),
    "method": Window(1).method,
    "loop": by_loop,
    "nested": nested,
    "batch_head": lambda b, h, q, k: (b + h) % 2 == (q + k) % 2,
    "documents": lambda b, h, q, k: ids[b, q] == ids[b, k],
    "rows_of_table": lambda b, h, q, k: ids[b][q] != ids[b][k],
    "flags": lambda b, h, q, k: flags[k] & (q != k),
    "not_flags": lambda b, h, q, k: ~flags[k] | flags[q],
    "negative_index": lambda b, h, q, k: ids[b, q - k] == ids[b, -1],
    "zero_dim": lambda b, h, q, k: q - k < zero_dim,
    "floor_division": lambda b, h, q, k: (q - k) // 3 == (k - q) // 2,
    "remainder": lambda b, h, q, k: (q - k) % 3 == (k - q) % -2,
    "truncating": lambda b, h, q, k: torch.div(q - k, 2, rounding_mode="trunc") == torch.fmod(k - q, 2),
    "bits": lambda b, h, q, k: ((q ^ k) & 3 | (q << 1)) >> 1 == 1,
    "abs_min_max": lambda b, h, q, k: torch.maximum(torch.abs(q - k), h) > torch.minimum(q, k + b),
    "clamp": lambda b, h, q, k: torch.clamp(q - k, -2, 2) == torch.clamp(k, max=1),
    "where": lambda b, h, q, k: torch.where(q > k, q - k, k - q) < 3,
    "float_compare": lambda b, h, q, k: q * 0.3 >= k * 0.5,
    "true_division": lambda b, h, q, k: q / 3 < k / 2,
    "float_of_table": lambda b, h, q, k: table2[h, k] > half[k],
    "constant": lambda b, h, q, k: q == q,
    "xor": lambda b, h, q, k: (q > k) ^ (k > 2),
    "and_torch": lambda b, h, q, k: torch.logical_and(q >= k, torch.logical_not(k == 2)),
    "not_equal_bool": lambda b, h, q, k: (q >= k) == (k >= 2),
    "casts": lambda b, h, q, k: (q.to(torch.float32) / 2).to(torch.int64) == k.to(torch.int32),
}
SCORES = {
    "identity": lambda s, b, h, q, k: s,
    "alibi": lambda s, b, h, q, k: s - slope * torch.abs(q - k),
    "table": lambda s, b, h, q, k: s + table2[h, q - k + N],
    "bucketed": lambda s, b, h, q, k: s + table2[h, bucket[torch.abs(q - k)]],
    "half_table": lambda s, b, h, q, k: s * half[k] + half[q],
    "softcap": lambda s, b, h, q, k: 3.0 * torch.tanh(s / 3.0),
    "sigmoid": lambda s, b, h, q, k: torch.sigmoid(s) * 2 + 1,
    "exp_log": lambda s, b, h, q, k: torch.log(torch.exp(s) + 1.0),
    "integer_power": lambda s, b, h, q, k: s * 2.0 ** (-8.0 * (h + 1) / 4),
    "where": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "where_bool": lambda s, b, h, q, k: torch.where(flags[k], s, s * 0.5),
    "clamped": lambda s, b, h, q, k: torch.clamp(s, -0.5, 0.5),
    "rounded": lambda s, b, h, q, k: torch.floor(s * 4) + torch.ceil(s) + torch.round(s * 2) + torch.trunc(s),
    "mixed": lambda s, b, h, q, k: -s / (1 + q) + abs(k - q) * 0.125 + (b - h),
    "square": lambda s, b, h, q, k: s**2 - s * s,
    "sqrt": lambda s, b, h, q, k: torch.sqrt(torch.abs(s)) * torch.sign(s),
    "literal_only": lambda s, b, h, q, k: s + torch.where(q > k, 1 / 3, 0.1),
    "captured_arithmetic": lambda s, b, h, q, k: s * (slope / limit + 1e-3),
}


@pytest.mark.parametrize("name", MASKS)
def test_masks(name):
    check_mask(MASKS[name])


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", SCORES)
def test_scores(name, dtype):
    check_score(SCORES[name], dtype)


@pytest.mark.parametrize("name", cases.VARIANTS)
def test_gallery(name):
    variant = cases.VARIANTS[name]
    shape = SHAPE._replace(seqlen_q=max(M, N)) if name == "documents" else SHAPE
    tensors = variant.make(shape, torch.Generator().manual_seed(3))
    mods = variant.mods(tensors, SHAPE)
    if mods["mask"] is not None:
        check_mask(mods["mask"])
    if mods["score"] is not None:
        check_score(lambda s, *i: mods["score"](s, *i), torch.float64) if name not in _INEXACT else None


_INEXACT = {"t5", "softcap", "softcap_full", "temperature", "gated", "gated_sink"}  # transcendental: covered by test_scores


def test_aux_tensors():
    def biased(s, b, h, q, k, aux):
        return s + aux[0][h, k] * aux[1]

    aux = [table2, torch.tensor(0.5)]
    score = torch.randn(B, H, M, N, generator=torch.Generator().manual_seed(2))
    got = everywhere(trace(biased, "score", aux_tensors=aux), score)
    for at in grid():
        assert got[at] == biased(score[at], *map(torch.tensor, at), aux)


def test_torch_combinators():
    from torch.nn.attention.flex_attention import and_masks, or_masks

    check_mask(and_masks(MASKS["lambda"], MASKS["documents"]))
    check_mask(or_masks(MASKS["flags"], MASKS["closure"]))


BINARY = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b, "/": lambda a, b: a / b, "//": lambda a, b: a // b,
    "%": lambda a, b: a % b, "**": lambda a, b: a**b,
}  # fmt: skip


@pytest.mark.parametrize("name", BINARY)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_numbers_beside_tensors(name, dtype):
    """A captured number before or behind a tensor is rounded where torch rounds it: bit for bit the user's function."""
    operation, table, number = BINARY[name], (torch.arange(1, 700) / 7).to(dtype), 0.1
    before = lambda s, b, h, q, k: s + operation(number, table[k]).double()
    behind = lambda s, b, h, q, k: s + operation(table[k], number).double()
    for mod, expected in ((before, operation(number, table)), (behind, operation(table, number))):
        traced = trace(mod, "score")
        assert traced.scalars == (number,)
        found = evaluate(traced, 0, 0, 0, torch.arange(699), torch.zeros(699, dtype=torch.float64))
        assert torch.equal(found, expected.double())
