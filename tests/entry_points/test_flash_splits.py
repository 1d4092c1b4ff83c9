"""Any number of splits on every path, and ``flash_attn_combine``: the budget of the single pass, whatever part has seen nothing."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from anyattn import flash_attn_combine, flash_attn_func, flash_attn_varlen_func, flex_attention, oracle
from anyattn.testing import budget
from anyattn.testing.rounding import rounding
from tests.entry_points.test_flash_packed import FORMS, judged
from tests.support import cases
from tests.support import flash_calls as calls
from tests.support import flash_reference as reference
from tests.support.flash_calls import NAN, RECIPES
from tests.support.flex_calls import results as flex_results

LENGTHS = ([5, 0, 17, 64, 1, 33], [5, 3, 0, 50, 70, 33])


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [1, 2, 3, 7, 71])
@pytest.mark.parametrize("name", RECIPES)
def test_every_option_in_splits(name, splits):
    """From one split to more than there are keys, forward and backward, in a form of storage that rotates."""
    turn = list(RECIPES).index(name) + splits
    dtype = (torch.float32, torch.bfloat16, torch.float32, torch.float64, torch.float16)[turn % 5]
    made = calls.ragged(*LENGTHS, ((4, 2), (3, 1))[turn % 2], (16, 24), dtype, ("normal", "peaky", "coded")[turn % 3], seed=turn)
    judged(made, list(FORMS.values())[turn % len(FORMS)](made), RECIPES[name], with_lse=turn % 2 == 0, num_splits=splits)


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [0, 1, 2, 3, 4, 5, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_splits_of_several_tiles(splits, dtype):
    """Above 1,024 keys a split holds key tiles, of which there are 3 here: fewer splits than tiles, as many, and more."""
    made = calls.ragged([40, 3], [2500, 1100], (2, 1), dtype=dtype)
    for name in ("full", "causal", "sink"):
        judged(made, FORMS["packed"](made), RECIPES[name], with_lse=splits != 2, num_splits=splits)


@pytest.mark.parametrize("splits", [2, 5])
def test_equal_splits_give_equal_bits(splits):
    made = calls.ragged([20] * 2, [90] * 2)
    q, k, v = (torch.stack(part) for part in (made.q, made.k, made.v))
    one, other = (flash_attn_func(q, k, v, causal=True, num_splits=splits, return_lse=True) for _ in range(2))
    assert all(calls.same_bits(a, b) for a, b in zip(one, other))
    reference.judge(reference.dense(q, k, v), {"out": one[0], "lse": one[1]}, RECIPES["causal"].options)


def test_one_split_is_no_split_to_the_bit():
    made = calls.ragged([3, 40], [300, 200])
    one, none = (judged(made, FORMS["packed"](made), RECIPES["causal"], num_splits=n) for n in (1, 0))
    assert all(calls.same_bits(one[name], none[name]) for name in one)


@pytest.mark.parametrize("variant", ["causal", "sink", "relative_window", "islands"])
def test_flex_attention(variant):
    for dtype in (torch.float32, torch.bfloat16):
        case = cases.Case(variant, cases.Shape(2, 4, 2, 67, 300, 16, 16), "normal")
        for with_lse in (True, False):
            want = cases.expected(case, dtype, with_lse=with_lse)
            want.check(flex_results(case, want, kernel_options={"num_splits": 3}), variant)


# ---- merging


def in_parts(made: calls.Ragged, cuts: list[int], **options: Any) -> tuple[list[Tensor], Tensor, Tensor]:
    """Leaves, and the partial results over the keys between the cuts; causal and windows are counted in whole sequences by a mask."""
    q, k, v = (torch.stack(part).requires_grad_() for part in (made.q, made.k, made.v))
    outs, lses = [], []
    mask = options.get("mask")
    for a, b in pairwise(cuts):
        shifted = None if mask is None else (lambda entry, h, i, j, a=a: mask(entry, h, i, j + a))
        out, lse = flash_attn_func(q, k[:, a:b], v[:, a:b], mask_mod=shifted, return_lse=True)
        outs.append(out)
        lses.append(lse.transpose(1, 2))
    return [q, k, v], torch.stack(outs), torch.stack(lses)


MASKS = {
    "full": None,
    "causal": lambda b, h, i, j: j <= i,  # the later parts have seen nothing of the first rows
    "band": lambda b, h, i, j: (j >= i) & (j < i + 4),
    "islands": lambda b, h, i, j: (i % 3 == 1) & (j > 30),  # no part has seen anything of most rows
}
CUTS = {"one": [0, 90], "three": [0, 13, 80, 90], "empty parts": [0, 0, 40, 40, 90, 90], "single keys": list(range(91))}


@pytest.mark.covering(1)
@pytest.mark.parametrize("cuts", CUTS)
@pytest.mark.parametrize("name", MASKS)
def test_merged_parts_are_the_whole(name, cuts):
    """Forward, and backward through out and lse, with -inf on any side."""
    made = calls.ragged([40] * 2, [90] * 2, dims=(16, 12))
    leaves, outs, lses = in_parts(made, CUTS[cuts], mask=MASKS[name])
    out, lse = flash_attn_combine(outs, lses)
    dout, dlse = torch.stack(made.dout), torch.stack(made.dlse)
    options = lambda t: {"mask_mod": MASKS[name]}
    got = {"out": out.detach(), "lse": lse.detach().transpose(1, 2)}
    grads = torch.autograd.grad(out, leaves, dout, retain_graph=True)
    sequences = reference.dense(*(t.detach() for t in leaves))
    reference.judge(sequences, got | dict(zip(("dq", "dk", "dv"), grads)), options, {}, dout)
    grads = torch.autograd.grad([out, lse], leaves, [dout, dlse])
    reference.judge(sequences, got | dict(zip(("dq", "dk", "dv"), grads)), options, {}, dout, dlse.transpose(1, 2))


def plain(outs: Tensor, lses: Tensor) -> tuple[Tensor, Tensor]:
    """The definition in the tensors' own precision."""
    outs = torch.where(lses.isneginf()[..., None], 0.0, outs)
    lse = torch.logsumexp(lses, 0)
    weights = torch.where(lses.isneginf(), 0.0, torch.exp(lses - torch.where(lse.isneginf(), 0.0, lse)))
    return (outs * weights[..., None]).sum(0), lse


def drawn(shape: tuple[int, ...], spread: float, hidden: float) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    outs, lses = torch.randn(*shape, 20, generator=g), torch.randn(shape, generator=g) * spread
    lses[torch.rand(shape, generator=g) < hidden] = -torch.inf
    outs[lses.isneginf()] = NAN  # what stands there does not matter
    return outs, lses


@pytest.mark.parametrize("shape", [(1, 2, 9, 4), (2, 1, 1, 3), (5, 7, 2), (9, 2, 6, 3), (33, 40, 2), (3, 0, 4, 2), (3, 0, 2)])
@pytest.mark.parametrize(("spread", "hidden"), [(1.0, 0.0), (5.0, 0.5), (300.0, 0.3), (2.0, 1.0)])
def test_random_parts(shape, spread, hidden):
    outs, lses = drawn(shape, spread, hidden)
    out, lse = flash_attn_combine(outs, lses)
    assert out.dtype == lse.dtype == torch.float32 and out.shape == (*shape[1:], 20) and lse.shape == shape[1:]
    exact, by_hand = plain(outs.double(), lses.double()), plain(outs, lses)
    budget.check("out", out, exact[0], by_hand[0])
    budget.check("lse", lse, exact[1], by_hand[1])


def test_gradients_past_what_was_not_seen():
    """Garbage in a part that has seen nothing reaches no gradient, nor does a row that no part has seen."""
    outs, lses = drawn((4, 6, 3), 2.0, 0.4)
    lses[:, 0] = -torch.inf
    leaves = [outs.requires_grad_(), lses.requires_grad_()]
    out, lse = flash_attn_combine(*leaves)
    for outputs in ([out], [out, lse]):
        douts, dlses = torch.autograd.grad(outputs, leaves, [torch.ones_like(o) for o in outputs], retain_graph=True)
        assert bool(torch.isfinite(douts).all()) and bool(torch.isfinite(dlses).all())
        assert not douts[lses.isneginf()].any() and not dlses[lses.isneginf()].any()


def test_one_part_is_itself():
    outs, lses = drawn((1, 5, 3), 2.0, 0.3)
    out, lse = flash_attn_combine(outs, lses)
    seen = ~lses[0].isneginf()
    assert calls.same_bits(out[seen], outs[0][seen]) and calls.same_bits(lse, lses[0]) and not out[~seen].any()


def test_equal_parts_and_extremes():
    out, lse = flash_attn_combine(torch.ones(2, 1, 1, 4), torch.tensor([[[1e4]], [[-1e4]]]))
    assert bool((out == 1).all()) and float(lse) == 1e4
    out, lse = flash_attn_combine(torch.tensor([1.0, 3.0]).view(2, 1, 1, 1), torch.full((2, 1, 1), -3e38))
    assert float(out) == 2.0 and float(lse) == float(torch.tensor(-3e38))


def test_packed_parts():
    """(splits, total, H, Dv), from the varlen door."""
    made = calls.ragged([5, 0, 17], [9, 3, 30])
    stored = FORMS["packed"](made)
    parts = []
    for parity in (0, 1):
        mask = lambda b, h, i, j, parity=parity: j % 2 == parity
        parts.append(flash_attn_varlen_func(*stored.qkv, **stored.where, mask_mod=mask, return_lse=True))
    out, lse = flash_attn_combine(torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(0, 1) for p in parts]))
    reference.judge(stored.sequences(), {"out": out, "lse": lse.transpose(0, 1)}, RECIPES["full"].options)


BRANCHES = (  # of q: (keys, mask); the second and third share keys, and some rows of the first see nothing
    (9, lambda b, h, i, j: j * 4 + 3 <= i),
    (36, lambda b, h, i, j: (j // 12 == i // 12) & (j <= i)),
    (36, lambda b, h, i, j: (i - j <= 5) & (j <= i)),
)


def test_gated_branches_share_one_softmax():
    """Of ``flex_attention``'s layout, with other keys and values for each: outputs and gradients, those of the gates among them, are those
    of one call over the keys of all branches, to whose scores the logarithms of the gates are added."""
    g = torch.Generator().manual_seed(0)
    keys = [n for n, _ in BRANCHES]
    q, k, v = (torch.randn(2, 3, n, 16, generator=g) for n in (36, sum(keys), sum(keys)))
    log_gates = torch.nn.functional.logsigmoid(torch.randn(3, 2, 3, 36, generator=g))
    dout, dlse = torch.randn(2, 3, 36, 16, generator=g), torch.randn(2, 3, 36, generator=g)
    leaves = [t.clone().requires_grad_() for t in (q, k, v, log_gates)]
    parts = zip(leaves[1].split(keys, 2), leaves[2].split(keys, 2), BRANCHES, strict=True)
    parts = [flex_attention(leaves[0], *kv, mask_mod=mask, return_lse=True) for *kv, (_, mask) in parts]
    outs, lses = map(torch.stack, zip(*parts, strict=True))
    made = flash_attn_combine(outs, lses + leaves[3])
    got = torch.autograd.grad(made, leaves, [dout, dlse])

    branch = torch.repeat_interleave(torch.arange(3), torch.tensor(keys))
    place = torch.cat([torch.arange(n) for n in keys])

    def joint(dtype):
        leaf = log_gates.to(dtype, copy=True).requires_grad_()
        seen = lambda b, h, i, j: torch.stack([mask(b, h, i, place[j]) & (branch[j] == n) for n, (_, mask) in enumerate(BRANCHES)]).any(0)
        return {"score": lambda s, b, h, i, j: s + leaf[branch[j], b, h, i], "mask": seen}, [leaf]

    mods, captured = joint(torch.float64)
    noise = rounding(q, k, v, dout, dlse=dlse, **mods, captured=captured)
    for name, other in zip(("out", "lse"), made, strict=True):
        forward = [f(q, k, v, **joint(t)[0]) for f, t in ((oracle.attention, torch.float64), (oracle.same_dtype, torch.float32))]
        budget.check(name, other, *(getattr(f, name) for f in forward), getattr(noise, name))
    backward = []
    for f, dtype in ((oracle.gradients, torch.float64), (oracle.same_dtype_gradients, torch.float32)):
        mods, captured = joint(dtype)
        backward.append(f(q, k, v, dout, dlse=dlse, **mods, captured=captured))
    for name, other in zip(("dq", "dk", "dv"), got, strict=False):
        budget.check(name, other, *(getattr(f, name) for f in backward), getattr(noise, name))
    budget.check("gates", got[3], *(f.captured[0] for f in backward), noise.captured[0])
    assert not got[3][0, :, :, :3].any(), "gates of a branch that saw nothing"


BAD = {
    "half": (torch.ones(2, 3, 4, 8).half(), torch.ones(2, 3, 4), TypeError, r"out_partial.*float16.*float32"),
    "half lse": (torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4).bfloat16(), TypeError, r"lse_partial.*bfloat16"),
    "heads before rows": (torch.ones(2, 3, 5, 4, 8), torch.ones(2, 3, 4, 5), ValueError, r"lse_partial.*\(2, 3, 4, 5\)"),
    "too few dimensions": (torch.ones(2, 3, 4), torch.ones(2, 3), ValueError, r"out_partial.*\(2, 3, 4\)"),
    "no splits": (torch.ones(0, 3, 4, 8), torch.ones(0, 3, 4), ValueError, r"out_partial.*no splits"),
    "other splits": (torch.ones(2, 3, 4, 8), torch.ones(3, 3, 4), ValueError, r"lse_partial.*\(3, 3, 4\)"),
    "a list": (torch.ones(2, 3, 4, 8), [1.0], TypeError, r"lse_partial.*list"),
    "two devices": (torch.ones(2, 3, 4, 8), torch.ones(2, 3, 4, device="meta"), ValueError, r"lse_partial.*meta"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name):
    outs, lses, error, words = BAD[name]
    with pytest.raises(error, match=words):
        flash_attn_combine(outs, lses)
