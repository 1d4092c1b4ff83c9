"""Split-KV on every path, and the merge of partial results."""

from __future__ import annotations

import itertools

import pytest
import torch

import anyattn
from anyattn.sequences.split_kv import num_splits, split_range
from tests.entry_points.test_flash_varlen import dense_call, packed_call, results
from tests.support import cases
from tests.support import sequences as seq
from tests.support.flex_calls import results as flex_results
from tests.support.sequences import Meaning

SINK = torch.tensor([0.5, -1.0, 2.0, 0.0])
MEANINGS = {
    "full": Meaning(),
    "causal": Meaning(causal=True),
    "window": Meaning(window_size=(9, 2)),
    "empty band": Meaning(window_size=(2, -4), sink=SINK),
    "mask by entry": Meaning(mask_mod=lambda b, h, i, j: (i * 3 + j * 5 + b + h) % 4 != 0),
    "everything": Meaning(causal=True, window_size=(200, 0), softcap=5.0, sink=SINK, score_mod=lambda s, b, h, i, j: s - 0.01 * (j % 7)),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("splits", [2, 3, 7])
@pytest.mark.parametrize("name", MEANINGS)
def test_packed_and_dense(name: str, splits: int) -> None:
    """Forward and backward; with 7 splits there are more than key tiles, and of short sequences nearly all are empty."""
    meaning = MEANINGS[name]
    for dtype in (torch.float32, torch.bfloat16):
        batch = seq.ragged([5, 0, 300, 64], [300, 3, 310, 1], dtype=dtype)
        for return_lse in (True, False):
            got, shared = results(batch, meaning, packed_call, num_splits=splits, return_lse=return_lse)
            seq.judge(got, batch, meaning, shared=shared, label=name)
    batch = seq.ragged([40] * 2, [400] * 2)
    got, shared = results(batch, meaning, dense_call, num_splits=splits)
    seq.judge(got, batch, meaning, shared=shared, label=name)


def test_one_split_is_no_split_to_the_bit() -> None:
    batch = seq.ragged([3, 40], [300, 200])
    one, none = (results(batch, Meaning(causal=True), packed_call, num_splits=n)[0] for n in (1, 0))
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], none[name]))


def reference(out: torch.Tensor, lse: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    weights = torch.softmax(lse.double(), 0)  # NaN where no part has seen anything
    seen = torch.isfinite(lse)
    merged = (torch.where(seen[..., None], out.double(), 0.0) * torch.where(seen, weights, 0.0)[..., None]).sum(0)
    return merged, torch.logsumexp(lse.double(), 0)


@pytest.mark.parametrize("shape", [(1, 2, 3, 4), (2, 1, 1, 2), (5, 7, 2), (9, 2, 6, 3)])
def test_combine(shape: tuple[int, ...]) -> None:
    g = torch.Generator().manual_seed(0)
    out, lse = torch.randn(*shape, 8, generator=g), torch.randn(shape, generator=g) * 20
    lse[torch.rand(shape, generator=g) < 0.4] = -torch.inf
    lse[:, 0] = -torch.inf  # nobody has seen anything
    out[torch.isneginf(lse)] = seq.NAN  # what stands there does not matter
    merged, total = anyattn.flash_attn_combine(out, lse)
    wanted, wanted_lse = reference(out, lse)
    assert not merged[0].any() and torch.isneginf(total[0]).all()
    seen = torch.isfinite(wanted_lse)
    assert torch.equal(torch.isfinite(total), seen)
    # a convex combination: the error is a few units in the last place of its largest part
    top = torch.where(torch.isfinite(lse)[..., None], out, 0.0).abs().amax(0).double()
    assert bool(((merged - wanted).abs() <= 4 * torch.finfo(torch.float32).eps * top)[seen].all())
    assert bool(((total - wanted_lse).abs() <= 4 * torch.finfo(torch.float32).eps * wanted_lse.abs().clamp(min=1))[seen].all())


def test_combine_is_the_single_pass() -> None:
    """Partial attention over three stretches of the keys, merged, is judged as attention over all of them; gradients flow through."""
    batch = seq.ragged([20] * 2, [90] * 2)
    q, k, v = (torch.stack(part).transpose(1, 2).requires_grad_() for part in (batch.q, batch.k, batch.v))
    parts = [anyattn.flash_attn_func(q, k[:, a:b], v[:, a:b], return_lse=True) for a, b in ((0, 13), (13, 80), (80, 90))]
    out, lse = anyattn.flash_attn_combine(torch.stack([p[0] for p in parts]), torch.stack([p[1].transpose(1, 2) for p in parts]))
    grads = torch.autograd.grad(out, [q, k, v], torch.stack(batch.dout).transpose(1, 2))
    got = {"out": list(out.detach().transpose(1, 2)), "lse": list(lse.detach().transpose(1, 2))}
    got |= {name: list(g.transpose(1, 2)) for name, g in zip(("dq", "dk", "dv"), grads)}
    seq.judge(got, batch, Meaning())


@pytest.mark.parametrize(
    "out,lse,words",
    [
        (torch.ones(2, 3, 4, 8).half(), torch.ones(2, 3, 4), "out_partial has dtype"),
        (torch.ones(2, 3, 4, 8), torch.ones(2, 3, 5), r"lse_partial \(2, 3, 5\)"),
        (torch.ones(3, 4), torch.ones(3), "out_partial has shape"),
        (torch.ones(0, 3, 4, 8), torch.ones(0, 3, 4), "no splits"),
        ([1.0], torch.ones(3), "out_partial is a list"),
    ],
)
def test_combine_refuses(out: object, lse: object, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        anyattn.flash_attn_combine(out, lse)  # type: ignore[arg-type]


def test_shares_cover_the_range() -> None:
    for lo, hi in ((0, 0), (3, 3), (0, 20), (5, 12), (2, 3)):
        for splits in (1, 2, 3, 4, 9):
            parts = [split_range(lo, hi, i, splits) for i in range(splits)]
            assert [n for a, b in parts for n in range(a, b)] == list(range(lo, hi))
            assert max(b - a for a, b in parts) <= -(-(hi - lo) // splits)


def test_number_of_splits() -> None:
    assert num_splits(64, 64, heads=32, batch=4, sm_count=132) == 1, "enough row tiles for every processor"
    assert num_splits(1, 1, heads=1, batch=1, sm_count=132) == 1, "one key tile cannot be divided"
    assert num_splits(0, 9, 1, 1, 132) == num_splits(1, 0, 1, 1, 132) == 1
    for tiles, keys, sms in itertools.product((1, 8, 48, 66, 132, 500), (1, 4, 64, 512), (2, 108, 132)):
        found = num_splits(1, keys, 1, tiles, sms)
        assert 1 <= found <= min(keys, 128)
        if tiles * 2 <= sms and keys >= 64:
            busy = [tiles * s / (-(-tiles * s // sms) * sms) for s in (1, found)]
            assert found > 1 and busy[1] > busy[0], "idle processors are used"
    assert num_splits(1, 1000, 1, 1, 132, max_splits=16) <= 16
    for bad in ({"sm_count": 0}, {"heads": -1}, {"max_splits": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            num_splits(**({"num_m_blocks": 1, "num_n_blocks": 1, "heads": 1, "batch": 1, "sm_count": 1} | bad))


@pytest.mark.parametrize("variant", ["causal", "sink", "relative_window", "islands"])
def test_flex_attention(variant: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        case = cases.Case(variant, cases.Shape(2, 4, 2, 67, 300, 16, 16), "normal")
        for with_lse in (True, False):
            want = cases.expected(case, dtype, with_lse=with_lse)
            want.check(flex_results(case, want, kernel_options={"num_splits": 3}), variant)
