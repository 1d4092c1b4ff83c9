"""Loads of captured tensors on a CPU: slices where the indices are plain, choices where an index is a bool, gathers elsewhere."""

from __future__ import annotations

import math

import pytest
import torch

import anyattn
from anyattn.backends.torch.lower import with_choices
from anyattn.backends.torch.mod_runner import Bound, Tile
from anyattn.backends.torch.vectors import by_bits
from anyattn.mods.analysis.evaluate import Positions, run, slice_at
from anyattn.mods.ir.expr import Node
from anyattn.mods.tracing.trace import trace
from tests.support.flex_calls import judge
from tests.support.inside import InsideMode

B, H, S = 2, 2, 48
GATHERS = {"index", "index_put", "index_put_", "_index_put_impl_", "index_add", "index_add_", "gather", "take", "scatter_add_"}
ids = torch.randint(0, 3, (B, S), generator=torch.Generator().manual_seed(5))
same = lambda b, h, i, j: ids[b, i] == ids[b, j]
causal_or_same = lambda b, h, i, j: (i >= j) | (ids[b, i] == ids[b, j])


class Names(InsideMode):
    """The names of the operations that ran inside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def random(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def qkv(heads_kv=H, dtype=torch.float32):
    return random(B, H, S, 16, seed=1, dtype=dtype), *(random(B, heads_kv, S, 16, seed=n, dtype=dtype) for n in (2, 3))


# the captured tensor's shape, and the score mod
PLAIN = {
    "pair": ((B, H, S, S), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    "pair, for all batch entries": ((1, H, S, S), lambda t: lambda s, b, h, i, j: s + t[0, h, i, j]),
    "pair, three dimensions": ((H, S, S), lambda t: lambda s, b, h, i, j: s + t[h, i, j]),
    "pair, for all heads": ((B, 1, S, S), lambda t: lambda s, b, h, i, j: s + t[b, 0, i, j]),
    "keys first": ((S, H, S), lambda t: lambda s, b, h, i, j: s + t[j, h, i]),
    "larger than the call": ((B + 1, H + 2, S + 3, S + 9), lambda t: lambda s, b, h, i, j: s + t[b, h, i, j]),
    "from the end": ((3, S, S), lambda t: lambda s, b, h, i, j: s + t[-1, i, j]),
    "scaled": ((H, S, S), lambda t: lambda s, b, h, i, j: s + 0.5 * t[h, i, j] - t[h, j, i]),
    "capped": ((B, H, S, S), lambda t: lambda s, b, h, i, j: torch.tanh(s + t[b, h, i, j])),
    "slope": ((H,), lambda t: lambda s, b, h, i, j: s - t[h] * (i - j).abs()),
    "row": ((B, S), lambda t: lambda s, b, h, i, j: s * 0.5 + t[b, i]),
    "column": ((B, S), lambda t: lambda s, b, h, i, j: s + t[b, j]),
    "row times column": ((H, S), lambda t: lambda s, b, h, i, j: s + t[h, i] * t[h, j]),
    "a number": ((), lambda t: lambda s, b, h, i, j: s * t),
}
CHOICES = {
    "two numbers a head": ((2, H), lambda t: lambda s, b, h, i, j: s + t[(ids[b, i] == ids[b, j]).to(torch.int32), h]),
    "two bools": ((2, 2), lambda t: lambda s, b, h, i, j: s + t[(i > j).to(torch.int64), (ids[b, j] > 1).to(torch.int64)]),
    "more than two entries": ((3, H), lambda t: lambda s, b, h, i, j: s * (1.0 + t[(ids[b, i] == ids[b, j]).to(torch.int32), h])),
}
BOTH = {**PLAIN, **CHOICES}


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads_kv", [H, 1])
@pytest.mark.parametrize("mask", [None, same, causal_or_same], ids=["all", "same", "causal_or_same"])
@pytest.mark.parametrize("name", BOTH)
def test_results_and_gradients(name, mask, heads_kv, dtype):
    shape, mod = BOTH[name]
    for table in (random(*shape, seed=6, dtype=torch.float64), random(*shape, seed=6)):  # the second is added in the scores' dtype
        judge(*qkv(heads_kv, dtype), score=mod(table), mask=mask, captured=[table])
    judge(*qkv(heads_kv, dtype), score=mod(table.detach()), mask=mask)


@pytest.mark.parametrize("name", BOTH)
def test_no_gather(name):
    shape, mod = BOTH[name]
    table = random(*shape).requires_grad_()
    q, k, v = (t.requires_grad_() for t in qkv())
    mask = anyattn.create_block_mask(same, B, None, S, S, device="cpu")
    anyattn.flex_attention(q, k, v, mod(table), mask)  # the first call checks the indices
    with Names() as work:
        out = anyattn.flex_attention(q, k, v, mod(table), mask)
        torch.autograd.grad(out.sum(), (q, k, v, table))
    assert {"bmm", "baddbmm", "baddbmm_"} & set(work.names) and not GATHERS & set(work.names)


def test_a_gather_is_counted():
    """The check of ``test_no_gather`` can fail."""
    table = random(3).requires_grad_()
    q, k, v = (t.requires_grad_() for t in qkv())
    with Names() as work:
        out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[(ids[b, i] + ids[b, j]) % 3])
        torch.autograd.grad(out.sum(), (q, k, v, table))
    assert {"index", "index_add_"} <= set(work.names)


def test_a_bias_in_memory_is_read_by_one_kernel():
    table, (q, k, v) = random(H, S, S), qkv()
    with Names() as work:
        anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i, j])
    assert "_scaled_dot_product_flash_attention_for_cpu" in work.names and "exp2_" not in work.names


@pytest.mark.parametrize("mask", [None, causal_or_same], ids=["all", "causal_or_same"])
def test_rows_that_a_bias_hides(mask):
    """Through ATen's kernel and beside it: nothing is seen, so the results are those of rows that see no key."""
    table = random(H, S, S)
    table[:, 5] = table[1, 9:12] = -math.inf
    table[0, 20, 30:] = -math.inf
    dead = torch.isneginf(table).all(-1)
    q, k, v = (t.requires_grad_() for t in qkv())
    out, lse = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i, j], mask_mod=mask, return_lse=True)
    grads = torch.autograd.grad(out.sum(), (q, k, v))
    assert not out[:, dead].any() and lse[:, dead].isneginf().all() and not grads[0][:, dead].any()
    assert torch.isfinite(lse[:, ~dead]).all() and all(torch.isfinite(g).all() for g in grads)
    sink = torch.zeros(H)
    _, with_sink = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i, j], mask_mod=mask, sink=sink, return_lse=True)
    assert not with_sink[:, dead].any()


def test_a_log_sum_exp_of_zero_is_no_sign_of_a_hidden_row():
    q, k, v = torch.zeros(1, 1, 32, 16), torch.zeros(1, 1, 32, 16), random(1, 1, 32, 16)
    table = torch.full((1, 32, 32), -math.inf)
    table[0].fill_diagonal_(0.0)
    out, lse = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i, j], return_lse=True)
    assert torch.equal(lse, torch.zeros(1, 1, 32)) and torch.equal(out, v)


def test_a_bias_far_from_zero():
    """A log-sum-exp of that size has no room for the logarithm of the sum: each of the 32 keys has a weight of 1 / 32 all the same."""
    q, k = torch.zeros(2, 1, 1, 32, 16).requires_grad_().unbind()
    v, dout = (torch.randint(-8, 8, (1, 1, 32, 16), generator=torch.Generator().manual_seed(n)).float() for n in (0, 1))
    table = torch.full((32, 32), -1e9)
    v.requires_grad_()
    with Names() as work:
        out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[i, j])
        (dv,) = torch.autograd.grad(out, v, dout)
    assert "_scaled_dot_product_flash_attention_for_cpu" in work.names
    assert torch.equal(dv, dout.mean(2, keepdim=True).expand_as(dv))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_a_poisoned_bias_spoils_its_rows_alone(poison):
    table, (q, k, v) = random(H, S, S), qkv()
    clean = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i, j])
    table[1, 33, 4] = poison
    out = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[h, i, j])
    spoilt = torch.zeros(H, S, dtype=torch.bool)
    spoilt[1, 33] = True
    assert out[:, spoilt].isnan().all() and torch.equal(out[:, ~spoilt], clean[:, ~spoilt])


def test_a_table_that_is_too_short_is_an_error():
    q, k, v = qkv()
    for table, mod in (
        (random(H - 1), lambda t: lambda s, b, h, i, j: s + t[h]),
        (random(S, S - 1), lambda t: lambda s, b, h, i, j: s + t[i, j]),
    ):
        with pytest.raises(ValueError, match="captured tensor of shape"):
            anyattn.flex_attention(q, k, v, mod(table))


def test_a_bool_that_is_never_true_may_index_one_entry():
    table, (q, k, v) = random(1, H), qkv()
    never = ids + 10
    judge(q, k, v, score=lambda s, b, h, i, j: s + table[(ids[b, i] == never[b, j]).to(torch.int32), h])
    with pytest.raises(ValueError, match="captured tensor of shape"):
        anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + table[(ids[b, i] == ids[b, j]).to(torch.int32), h])


def test_choices_are_the_loads():
    i, j = torch.arange(9).view(9, 1), torch.arange(7)
    leaves = {"b": 0, "h": 1, "q_idx": i, "kv_idx": j, "score": torch.zeros(9, 7)}
    for rows, choices in ((2, 3), (1, 1)):  # the choice of an entry that a tensor does not have stays a load
        table = random(rows, 2)
        traced = trace(lambda s, b, h, i, j: s + table[(i > 9).to(torch.int64), (j > 3).to(torch.int32)] + table[0, h % 2], "score")  # noqa: B023
        expr = with_choices(traced.expr, traced.tensors)
        assert sum(n.op == "where" for n in expr.nodes) == choices
        assert torch.equal(*(run(e, leaves, traced.scalars, traced.tensors)[0] for e in (expr, traced.expr)))


# ---- slices


def positions(first, count, dim):
    return Positions(first, count, dim, lambda: torch.arange(first, first + count).view(-1, *(1,) * (-1 - dim)))


def test_slices():
    t = torch.arange(3 * 5 * 7).view(3, 5, 7)
    h, i, j = positions(1, 2, -3), positions(2, 3, -2), positions(0, 7, -1)
    assert torch.equal(slice_at(t, [h, i, j]), t[None, 1:3, 2:5])
    assert torch.equal(slice_at(t, [h, -1, j]), t[None, 1:3, 4:5])
    assert torch.equal(slice_at(t.transpose(0, 2), [j, i, h]), t[None, 1:3, 2:5])
    assert torch.equal(slice_at(t, [positions(-2, 2, -3), i, j]), t[None, 1:3, 2:5])
    assert torch.equal(slice_at(t.expand(2, 3, 5, 7)[0], [h, i, j]), t[None, 1:3, 2:5])
    assert slice_at(t, [h, i, i]) is None, "a diagonal"
    assert slice_at(t, [positions(-1, 2, -3), i, j]) is None, "negative in part"
    assert slice_at(t, [positions(2, 2, -3), i, j]) is None and slice_at(t, [3, i, j]) is None, "outside"
    assert slice_at(t, [h, i, torch.arange(7)]) is None


@pytest.mark.parametrize("descends", [False, True])
def test_tiles_in_both_orders(descends):
    table = random(H, S, S)
    traced = trace(lambda s, b, h, i, j: table[h, i, j] * 2.0 + table[h, i, 0] + j, "score")
    bound = Bound(traced.expr, traced.scalars, traced.tensors, B, H, S, S, torch.device("cpu"))
    tile = Tile(0, B, 1, 2, 5, 20, 7, 40, descends=descends)
    want = (table * 2.0 + table[:, :, :1] + torch.arange(S))[None, 1:2, 5:20, 7:40]
    assert torch.equal(bound.on(tile)[0].expand(1, -1, -1, -1), want.flip(2) if descends else want)


# ---- by bits


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool], ids=str
)
def test_where_by_bits(dtype):
    condition = random(2, 1, 64, 64) > 0
    x, y = ((4 * random(*shape, seed=n)).to(dtype) for n, shape in ((1, (3, 1, 64)), (2, (2, 3, 64, 64))))
    if dtype.is_floating_point:
        x.view(-1)[:4] = torch.tensor([math.nan, math.inf, -math.inf, -0.0])
    for a, b in ((x, y), (y, x), (x, x)):
        got, want = by_bits(Node("where", (0, 1, 2), dtype), [condition, a, b]), torch.where(condition, a, b)
        assert got.dtype is dtype and torch.equal(*(t.contiguous().view(torch.uint8) for t in (got, want)))


def test_where_of_numbers_by_bits():
    condition = random(64, 64) > 0
    for a, b in ((1.5, -math.inf), (0.1, random(64, 1))):
        got = by_bits(Node("where", (0, 1, 2), torch.float32), [condition, a, b])
        assert torch.equal(got, torch.where(condition, torch.tensor(a), torch.as_tensor(b)))


@pytest.mark.parametrize("op", ["and", "or", "xor"])
def test_bools_by_bytes(op):
    tile, column, row = random(64, 64) > 0, random(64, 1, seed=1) > 0, random(64, seed=2) > 0
    torch_op = getattr(torch, f"bitwise_{op}")
    for a, b in ((tile, column), (column, tile), (tile, torch.tensor(True)), (row.expand(64, 64), column)):
        assert torch.equal(by_bits(Node(op, (0, 1), torch.bool), [a, b]), torch_op(a, b))
    assert by_bits(Node(op, (0, 1), torch.bool), [tile, tile]) is None and by_bits(Node(op, (0, 1), torch.bool), [row, column]) is None


@pytest.mark.parametrize("least", [torch.finfo(torch.float32).min, -3e38, -2e38, -math.inf], ids=str)
def test_a_row_hidden_by_its_bias_is_empty(least: float) -> None:
    """Scores below -1e38 count as hidden, also where ATen's kernel adds the bias: Transformers' masks have the least finite number."""
    q, k, v = (torch.randn(1, 2, n, 16).requires_grad_() for n in (40, 50, 50))
    bias = torch.randn(40, 50)
    bias[3], bias[7, :30] = least, least
    out, lse = anyattn.flex_attention(q, k, v, lambda s, b, h, i, j: s + bias[i, j], return_lse=True)
    found = torch.autograd.grad(out, (q, k, v), torch.randn_like(out).detach().fill_(1.0))
    seen = bias > -1e38
    s = (q @ k.transpose(-1, -2) / 4 + bias).masked_fill(~seen, -math.inf)
    p = torch.softmax(s, -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    wanted = p @ v
    assert (out[:, :, 3] == 0).all() and (lse[:, :, 3] == -math.inf).all() and torch.isfinite(lse[:, :, 7]).all()
    assert (out - wanted).abs().max() < 1e-5
    p = torch.softmax(s.masked_fill(~seen.any(-1, keepdim=True), 0.0), -1).masked_fill(~seen.any(-1, keepdim=True), 0.0)
    for own, true in zip(found, torch.autograd.grad((p @ v).sum(), (q, k, v)), strict=True):
        assert torch.isfinite(own).all() and (own - true).abs().max() < 2e-5
    assert (found[0][:, :, 3] == 0).all()
