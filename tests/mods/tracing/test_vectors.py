"""Rows of captured tensors inside a mod, reduced to one number: what ``torch.vmap`` makes of the same function, derivatives included."""

from __future__ import annotations

import re

import pytest
import torch

from anyattn import flex_attention
from anyattn.errors import ModError
from anyattn.mods.analysis.evaluate import evaluate, run
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import category
from anyattn.mods.ir.grad import score_gradients
from anyattn.mods.tracing.trace import trace

B, H, M, N = 2, 3, 5, 7
PLACES = [torch.arange(n) for n in (B, H, M, N)]


def randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


SCORE = randn(B, H, M, N, seed=9)
a, b, w, bhd = randn(M, 8), randn(N, 8, seed=1), randn(8, seed=2), randn(B, H, M, 6, seed=3)
kr, pairs, grid, signed = randn(B, 1, N, 6, seed=4), randn(M, N, 4, seed=5), randn(M, 2, 3, seed=6), randn(N, 2, 3, seed=7)
ids, wanted = torch.randint(0, N, (M, 4), generator=torch.Generator().manual_seed(8)), torch.tensor([0, 3, 5])
half, ids32, flags = a.bfloat16(), ids.int(), randn(M, 5) > 0.7
bytes_ = torch.randint(0, 3, (M, 4), generator=torch.Generator().manual_seed(9)).to(torch.uint8)
seven, size = 7, 3


def by_vmap(fn, score=None):
    """The function called as torch's flex_attention calls it: on tensors without dimensions, under vmap."""
    axes = [0, None, None, None], [None, 0, None, None], [None, None, 0, None], [None, None, None, 0]
    if score is None:
        for dims in reversed(axes):
            fn = torch.vmap(fn, in_dims=tuple(dims))
        return fn(*PLACES)
    for dims in reversed(axes):
        fn = torch.vmap(fn, in_dims=(0, *dims))
    return fn(score, *PLACES)


def places():
    return [p.view(-1, *[1] * (3 - i)) for i, p in enumerate(PLACES)]


SCORES = {
    "dot": lambda s, b_, h, i, j: s + torch.dot(a[i], b[j]),
    "rope": lambda s, b_, h, i, j: s + (bhd[b_, h, i] * kr[b_, 0, j]).sum(),
    "rope_dot": lambda s, b_, h, i, j: s + torch.dot(bhd[b_, h, i], kr[b_, 0, j]) * 0.3,
    "distance": lambda s, b_, h, i, j: s - (a[i] - b[j]).pow(2).sum(-1),
    "euclid": lambda s, b_, h, i, j: s - (a[i] - b[j]).norm(),
    "norm_of_one": lambda s, b_, h, i, j: s - torch.norm(a[i] - b[j], p=1) * torch.linalg.vector_norm(a[i], ord=float("inf")),
    "linalg_norm": lambda s, b_, h, i, j: s + torch.linalg.norm(grid[i] * signed[j]) + torch.linalg.norm(a[i], 2, dim=-1),
    "cosine": lambda s, b_, h, i, j: s * (a[i] @ b[j]) / (a[i].norm(dim=-1) * b[j].norm(dim=0)),
    "inner": lambda s, b_, h, i, j: torch.inner(a[i], b[j]) * s + torch.vdot(a[i], w) + torch.linalg.vecdot(b[j], w),
    "weighted": lambda s, b_, h, i, j: s + (w * torch.tanh(a[i] - b[j])).mean(-1),
    "captured_left": lambda s, b_, h, i, j: s + (w - a[i]).sum() + (w / (2 + a[i] ** 2)).sum() + (w @ b[j]),
    "matrix": lambda s, b_, h, i, j: s + torch.sin(grid[i] @ w[:3]).sum() + (w[:2] @ grid[i]).amax(),
    "pairs": lambda s, b_, h, i, j: s + pairs[i, j].sum(-1) * torch.sigmoid(pairs[i, j]).prod(),
    "extremes": lambda s, b_, h, i, j: s + (a[i] + b[j]).amax(-1) - a[i].amin() + torch.max(b[j]) * (a[i] * b[j]).min(),
    "max_along": lambda s, b_, h, i, j: s + (a[i] * b[j]).max(-1).values + (a[i] - b[j]).min(dim=0)[0],
    "with_score": lambda s, b_, h, i, j: (s * a[i] + b[j]).sum(-1) / 8,
    "of_score": lambda s, b_, h, i, j: torch.maximum(a[i], s).sum() + torch.where(b[j] > s, a[i], 0.5).mean(),
    "softmax": lambda s, b_, h, i, j: s + torch.log(torch.exp(a[i] * b[j]).sum(-1)),
    "slices": lambda s, b_, h, i, j: s + (a[i, :4] * b[j, 4:]).sum() - (a[i][1::2] * b[j][..., ::2]).sum() + a[i, -1],
    "rotated": lambda s, b_, h, i, j: s + (a[i, 0] * b[j, 1] - a[i, 1] * b[j, 0]) * (a[i, 2:4] * b[j, 2:4]).sum(),
    "two_axes": lambda s, b_, h, i, j: s + (grid[i] * signed[j]).sum(-1).amax(-1) + (grid[i] - signed[j]).sum((0, 1)) * 0.1,
    "kept": lambda s, b_, h, i, j: s + (a[i] / a[i].norm(dim=-1, keepdim=True) * b[j]).sum(-1),
    "outer": lambda s, b_, h, i, j: s + (a[i, :3, None] * b[j, None, :4]).abs().sum(),
    "unsqueezed": lambda s, b_, h, i, j: s + (a[i, :3].unsqueeze(-1) * b[j, :4].unsqueeze(0)).flatten().sum() + grid[i].reshape(6)[4],
    "captured_number": lambda s, b_, h, i, j: s + a[i][size] + (a[i][:size] * seven).sum(),
    "transposed": lambda s, b_, h, i, j: s + (a.T[:, i] * b[j]).sum(-1) + pairs[:, j][i].sum(),
    "promoted": lambda s, b_, h, i, j: s + (ids[i] * w[:4]).sum() + (ids32[i] * 0.5).mean() + flags[i].sum() * 0.25,
    "lerp": lambda s, b_, h, i, j: s + torch.lerp(a[i], b[j], 0.3).sum() + torch.hypot(a[i], b[j]).mean() + torch.logaddexp(a[i], w).sum(),
    "squeezed": lambda s, b_, h, i, j: s + kr[b_, :, j].squeeze(0).sum() + s.sum() + s[..., None].sum(-1),
    "loop": lambda s, b_, h, i, j: s + sum(x * y for x, y in zip(a[i], b[j] * 2)) * sum(x for x in grid[i].unbind(1)[0]),
    "reduced_twice": lambda s, b_, h, i, j: s + sum((a[i] * b[j])[c] for c in range(8)),
}
MASKS = {
    "any_of_neighbours": lambda b_, h, i, j: (ids[i] == j[..., None]).any(-1),
    "no_neighbour": lambda b_, h, i, j: (ids[i] != j).all(-1),
    "captured_list": lambda b_, h, i, j: (wanted == j).any() | (wanted == i).any(),
    "in_int32": lambda b_, h, i, j: (ids32[i] == j).any(dim=-1),
    "near": lambda b_, h, i, j: (a[i] - b[j]).pow(2).sum(-1) < 12.0,
    "positive_product": lambda b_, h, i, j: torch.dot(a[i], b[j]) > 0,
    "flags": lambda b_, h, i, j: flags[i].any() & torch.all(flags[i] | (j > 2)),
    "counts": lambda b_, h, i, j: (ids[i] > j).sum(-1) >= 2,
    "extreme": lambda b_, h, i, j: (ids[i].amax(-1) >= j) & (ids[i].min() <= j),
    "logical": lambda b_, h, i, j: torch.logical_or(ids[i] == j, ids[i] == i).any(),
    "window_of_rows": lambda b_, h, i, j: ((grid[i] - signed[j]).abs() < 1.5).all(-1).any(-1),
    "bytes": lambda b_, h, i, j: (bytes_[i].sum() > j) | (bytes_[i].any() == 0),
    "nan": lambda b_, h, i, j: ~torch.isnan(a[i] / 0 * 0).any() | torch.isfinite(b[j]).all(),
}


def in_spans(spans, b_, i, j):
    seen = i >= j
    for begin, length in spans[b_]:
        seen = seen | ((i >= begin) & (j < begin + length))
    return seen


def zipped(b_, h, i, j):
    seen = i == j
    for n, (one, other) in enumerate(zip(ids[i], pairs[i, j], strict=True)):
        seen = seen | (one + n == j) & (other > 0)
    return seen


def unpacked(b_, h, i, j):
    first, *rest = ids[i]
    (x, y), _, (z, *_) = spans[b_]
    return (first > j) ^ (sum(rest) + x > i + y * z)


def unbound(b_, h, i, j):
    begins, ends = spans[b_].unbind(-1)
    (least, *_), columns = torch.unbind(grid[i] - signed[j]), grid[i].unbind(dim=1)
    return (begins[0] > j) ^ (ends[-1] > i) ^ (least.sum() > 0) ^ (columns[size - 1][1] > 0)


def sized(b_, h, i, j):
    table = spans[b_]
    seen = i >= table.size(0) + table.dim() - len(table)
    for n in range(len(table)):
        seen = seen ^ (table[n].size()[0] + table.numel() + table[n][0] > j + table[n, 1])
    return seen


def reversed_and_flipped(b_, h, i, j):
    seen = i == j
    for x in reversed(ids[i] - j):
        seen = ~(seen & (x > 0))
    return seen & (grid[i].flip(0, 1)[0, 0] > 0) | (grid[i].flip(-1)[0, 0] > 0.5) & (ids[i][-1] == 0)


spans = torch.tensor([[(1, 3), (2, 1), (4, 2)], [(0, 2), (3, 0), (6, 5)]])
MASKS |= {
    "loop": lambda b_, h, i, j: in_spans(spans, b_, i, j),
    "loop_over_nothing": lambda b_, h, i, j: in_spans(spans[:, :0], b_, i, j),
    "zipped": zipped,
    "unpacked": unpacked,
    "unbound": unbound,
    "sized": sized,
    "reversed": reversed_and_flipped,
}


@pytest.mark.parametrize("name", MASKS)
def test_masks_are_those_of_vmap(name):
    want = by_vmap(MASKS[name])
    got = evaluate(trace(MASKS[name], "mask"), *places()).expand(B, H, M, N)
    assert torch.equal(got, want.expand(B, H, M, N))


@pytest.mark.parametrize("name", SCORES)
def test_scores_are_those_of_vmap(name):
    want = by_vmap(SCORES[name], SCORE)
    got = evaluate(trace(SCORES[name], "score", score_dtype=torch.float64), *places(), SCORE)
    assert bool(((got - want).abs() <= 64 * torch.finfo(torch.float64).eps * (1 + want.abs())).all())


CAPTURED = (a, b, w, bhd, kr, pairs, grid, signed)


@pytest.mark.parametrize("name", SCORES)
def test_derivatives_are_autograds(name):
    """By the score and by every captured tensor, in float64."""
    for t in CAPTURED:
        t.requires_grad_()
    try:
        weight, score = randn(B, H, M, N, seed=11), SCORE.clone().requires_grad_()
        traced = trace(SCORES[name], "score", score_dtype=torch.float64)
        value = by_vmap(SCORES[name], score)
        wanted = [score, *CAPTURED]
        theirs = torch.autograd.grad((value * weight).sum(), wanted, allow_unused=True, materialize_grads=True)
        gradients = score_gradients(traced.expr)
        with torch.no_grad():
            leaves = dict(zip(("b", "h", "q_idx", "kv_idx"), places(), strict=True)) | {"score": SCORE}
            found = [torch.as_tensor(v) for v in run(gradients.expr, leaves, traced.scalars, traced.tensors)]
            totals = {id(t): torch.zeros_like(t) for t in CAPTURED}
            for load in gradients.loads:
                tensor = traced.tensors[load.slot]
                base = tensor if id(tensor) in totals else tensor._base
                total = totals[id(base)].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
                indices = tuple(found[i].expand(B, H, M, N) for i in load.indices)
                total.index_put_(indices, (found[load.output] * weight).expand(B, H, M, N), accumulate=True)
            ours = [(found[0] * weight).expand(B, H, M, N), *totals.values()]
        for got, want in zip(ours, theirs, strict=True):
            room = 4096 * torch.finfo(torch.float64).eps * (1 + want.abs().max())
            assert bool(((got - want).abs() <= room).all()), (got, want)
    finally:
        for t in CAPTURED:
            t.requires_grad_(False)


def test_the_norm_of_a_zero_row_has_the_derivative_zero():
    zero = torch.zeros(4, 3, dtype=torch.float64, requires_grad=True)
    traced = trace(lambda s, b_, h, i, j: s + (zero[i] - zero[j]).norm(dim=-1), "score", score_dtype=torch.float64)
    gradients = score_gradients(traced.expr)
    leaves = dict(zip(("b", "h", "q_idx", "kv_idx"), places(), strict=True)) | {"q_idx": torch.zeros(1, dtype=torch.int64)}
    leaves |= {"kv_idx": torch.zeros(1, dtype=torch.int64), "score": torch.zeros(1, dtype=torch.float64)}
    found = run(gradients.expr, leaves, traced.scalars, [zero.detach()])
    assert all(float(found[load.output].sum()) == 0 for load in gradients.loads)


SIXTEEN_BITS = {
    "sum": lambda s, b_, h, i, j: s + (half[i] * half[j % M]).sum(-1),
    "dot": lambda s, b_, h, i, j: s + torch.dot(half[i], half[j % M]),
    "mean": lambda s, b_, h, i, j: s + half[i].mean(),
    "norm": lambda s, b_, h, i, j: s + half[i].norm(),
    "sum_in_float32": lambda s, b_, h, i, j: s + half[i].sum(dtype=torch.float32),
    "score_meets_row": lambda s, b_, h, i, j: (half[i] * s).amax(),
}


@pytest.mark.parametrize("name", SIXTEEN_BITS)
def test_rows_of_16_bits_are_summed_in_float32_and_rounded_once(name):
    """Equal to torch but for the order of additions: one rounding of bfloat16, where the sum in float32 lies between two."""
    score = torch.ones(B, H, M, N) * 0
    want = by_vmap(SIXTEEN_BITS[name], score)
    got = evaluate(trace(SIXTEEN_BITS[name], "score"), *places(), score)
    assert trace(SIXTEEN_BITS[name], "score").expr.output.dtype is torch.float32
    near = (got - want).abs() <= torch.finfo(torch.bfloat16).eps * want.abs()
    assert bool(near.all()) and float((got == want).double().mean()) > 0.9


MEETING = {"equal": lambda x, j: x == j, "sum": lambda x, j: x + j > 100, "where": lambda x, j: torch.where(x > 3, x, j) > 90}


@pytest.mark.parametrize("f", MEETING.values(), ids=MEETING)
def test_a_row_of_bytes_meets_a_position_as_under_vmap(f):
    """Compared as they are, added in int8."""
    small = torch.tensor([[3, 100], [44, 5]], dtype=torch.int8)
    mask = lambda b_, h, i, j: f(small[i % 2], j).any(-1)
    at = torch.arange(400)
    want = torch.vmap(torch.vmap(lambda i, j: mask(0, 0, i, j), in_dims=(None, 0)), in_dims=(0, None))(torch.arange(2), at)
    assert torch.equal(evaluate(trace(mask, "mask"), 0, 0, torch.arange(2)[:, None], at), want)


def test_only_what_sees_both_positions_is_computed_for_every_pair():
    """64 products and their sum; the loads are a row's and a column's."""
    left, right = torch.zeros(9, 64), torch.zeros(9, 64)
    expr = trace(lambda s, b_, h, i, j: s + torch.dot(left[i], right[j]), "score").expr
    by_pair = [n for n, d in zip(expr.nodes, dependence(expr), strict=True) if d.score or (d.q and d.kv)]
    assert len(by_pair) == 64 + 63 + 2 and not any(n.op == "load" for n in by_pair)
    assert all(category(n.dtype) == "float" for n in by_pair)


def test_a_row_is_loaded_once():
    expr = trace(lambda s, b_, h, i, j: s + (a[i] - b[j]).pow(2).sum() + (a[i] - b[j]).abs().sum(), "score").expr
    assert sum(n.op == "load" for n in expr.nodes) == 16


long, empty, nine = torch.zeros(M, 65), torch.zeros(M, 0), torch.zeros(9)
REFUSED = {
    "too_long": (lambda b_, h, i, j: long[i].sum() > 0, "65 elements; a mod computes with rows of 1 to 64"),
    "nothing": (lambda b_, h, i, j: empty[i].sum() > 0, "0 elements"),
    "not_reduced": (lambda b_, h, i, j: a[i] > b[j], "reduce the row"),
    "lengths": (lambda b_, h, i, j: (a[i] * wanted).sum() > 0, "do not fit together"),
    "dtypes": (lambda b_, h, i, j: torch.dot(a[i], half[i]) > 0, "convert one"),
    "lengths_of_dot": (lambda b_, h, i, j: torch.dot(a[i], ids[i].double()) > 0, "two rows of one length"),
    "mean_of_ints": (lambda b_, h, i, j: ids[i].mean() > 0, "takes floats"),
    "dim": (lambda b_, h, i, j: a[i].sum(1) > 0, "out of range"),
    "truth": (lambda b_, h, i, j: a[i] > 0 and j > 0, "has no truth value"),
    "loop": (lambda b_, h, i, j: sum(x for x in i) > 0, "cannot be looped over"),
    "unbound": (lambda b_, h, i, j: a[i].unbind(1)[0] > 0, "unbind is given dim=1 for a row of 1 dimensions"),
    "unbound_number": (lambda b_, h, i, j: torch.unbind(a[i, 0])[0] > 0, "unbind is given dim=0 for a row of 0 dimensions"),
    "indices": (lambda b_, h, i, j: a[i].max(-1).indices.long() == j, "use its value"),
    "computed_index": (lambda b_, h, i, j: (a[i] * 2)[j] > 0, "differs per"),
    "unknown_method": (lambda b_, h, i, j: (a[i] * 2).cumsum(0).any(), "cumsum"),
    "unknown_function": (lambda b_, h, i, j: torch.cumsum(a[i], 0).any(), "cumsum"),
    "order": (lambda b_, h, i, j: a[i].norm(p=3) > 0, "order 3"),
    "matrix_norm": (lambda b_, h, i, j: torch.linalg.norm(grid[i], 2) > 0, "matrix"),
    "as_mask": (lambda b_, h, i, j: flags[i], "index every dimension"),
    "shape": (lambda b_, h, i, j: a[i].reshape(3, 3).sum() > 0, "no shape"),
    "outer_too_long": (lambda b_, h, i, j: (a[i][:, None] * nine).sum() > 0, "72 elements"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_names_line_and_cure(name):
    fn, words = REFUSED[name]
    with pytest.raises(ModError, match=re.escape(words)) as error:
        trace(fn, "mask")
    assert __file__ in str(error.value)
    if name != "as_mask":
        assert "lambda b_, h, i, j" in str(error.value) or "[i]" in str(error.value), str(error.value)


def seen_by_spans(spans):
    return torch.stack([in_spans(spans, b_, torch.arange(32)[:, None], torch.arange(32)) for b_ in range(2)])[:, None]


def test_rows_of_another_length_are_looped_over_anew():
    """Eager, cold and warm, with other values in the same tensor, and compiled with a dynamic length."""
    q, k, v = torch.zeros(2, 1, 32, 4), torch.zeros(2, 1, 32, 4), torch.eye(32).expand(2, 1, 32, 32)

    def weights(spans):
        return flex_attention(q, k, v, mask_mod=lambda b_, h, i, j: in_spans(spans, b_, i, j))

    compiled = torch.compile(weights, backend="aot_eager", fullgraph=True)
    for length in (1, 3, 2, 1, 3):
        table = torch.randint(0, 30, (2, length, 2), generator=torch.Generator().manual_seed(length))
        for _ in range(2):
            assert torch.equal(weights(table) > 0, seen_by_spans(table))
            assert torch.equal(compiled(table) > 0, seen_by_spans(table))
            table += 2


def test_other_values_in_captures_compile_nothing():
    def make(x, y):
        return lambda s, b_, h, i, j: s + torch.dot(x[i], y[j])

    assert trace(make(a, b), "score").key == trace(make(b, a), "score").key != trace(make(a[:, :4], b[:, :4]), "score").key
