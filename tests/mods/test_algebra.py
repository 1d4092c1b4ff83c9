"""Masks compose, scores chain, names say so, and torch's own doors take them."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.attention.flex_attention import create_mask as dense_mask

import anyattn
from anyattn import ModError, and_masks, masks, mod, or_masks, scores

M, N = 9, 11
A, B_, C = masks.causal(), masks.sliding_window(2, 1), masks.block_diagonal(3)


def dense(mask):
    return dense_mask(mask, 1, 1, M, N, device="cpu")[0, 0]


def plain(b, h, q_idx, kv_idx):
    return (q_idx + kv_idx) % 2 == 0


def test_every_composition_is_that_of_the_sets():
    a, b, c, p = map(dense, (A, B_, C, plain))
    for mask, want in (
        (A & B_, a & b),
        (A | B_, a | b),
        (~A, ~a),
        (A & ~(B_ | C), a & ~(b | c)),
        (A & plain, a & p),
        (plain & A, p & a),
        (plain | A, p | a),
        (and_masks(A, B_, plain), a & b & p),
        (or_masks(plain, B_, C), p | b | c),
        (and_masks(), torch.ones(M, N, dtype=torch.bool)),
        (or_masks(), torch.zeros(M, N, dtype=torch.bool)),
        (and_masks(plain), p),
        (~~A, a),
        (~(A & B_) | C, ~(a & b) | c),
    ):
        assert torch.equal(dense(mask), want), mask


@pytest.mark.parametrize(
    ("mask", "name"),
    [
        (A, "causal"),
        (masks.causal(2), "causal(offset=2)"),
        (A & B_, "causal & sliding_window(left=2, right=1)"),
        (A & B_ & C, "causal & sliding_window(left=2, right=1) & block_diagonal(3)"),
        ((A | C) & A, "(causal | block_diagonal(3)) & causal"),
        (~(A & C), "~(causal & block_diagonal(3))"),
        (~A | C, "~causal | block_diagonal(3)"),
        (A | (A & C), "causal | (causal & block_diagonal(3))"),
        (mod(plain), "plain"),
        (A & plain, "causal & plain"),
        (and_masks(), "full"),
        (or_masks(), "nothing"),
    ],
)
def test_mask_names(mask, name):
    assert mask.name == name == mask.__name__ and repr(mask) == f"Mask({name})"


def test_scores_chain_in_order():
    def double(score, b, h, q_idx, kv_idx):
        return score * 2

    s = torch.tensor(3.0)
    chained = scores.temperature(4.0).then(scores.softcap(2.0)).then(double)
    assert chained.name == "temperature(4.0) then softcap(2.0) then double"
    assert torch.equal(chained(s, 0, 0, 0, 0), 2 * (2.0 * torch.tanh(s / 4.0 / 2.0)))
    add = scores.head_bias(torch.tensor([1.0]))
    zero = torch.tensor(0)
    assert float(mod(double).then(add)(s, zero, zero, zero, zero)) == 7 and float(add.then(double)(s, zero, zero, zero, zero)) == 8


def test_mod_tells_kinds_apart():
    assert isinstance(mod(plain), anyattn.mods.algebra.Mask)
    assert mod(lambda b, h, q, k, aux_tensors: aux_tensors[0][q] == k).kind == "mask"
    assert mod(lambda s, b, h, q, k: s).kind == "score"
    assert mod(lambda s, b, h, q, k, aux_tensors: s + aux_tensors[0][h]).kind == "score"
    assert mod(A) is A


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: mod(3), TypeError, "fn is a int"),
        (lambda: mod(lambda q, k: q), TypeError, "takes 2 arguments"),
        (lambda: mod(lambda b, h, q, k: q > k > 1), ModError, "split the chained comparison"),
        (lambda: A & 3, TypeError, "cannot join a mask with a int by &"),
        (lambda: A | scores.softcap(1.0), TypeError, "with a Score by |"),
        (lambda: and_masks(A, None), TypeError, r"mask_mods\[1\] is a NoneType"),
        (lambda: scores.softcap(1.0).then(A), TypeError, "takes 4 arguments"),
    ],
)
def test_errors(make, error, words):
    with pytest.raises(error, match=words):
        make()


def test_torchs_own_doors():
    q, k, v = torch.randn(3, 1, 2, 32, 8, generator=torch.Generator().manual_seed(0))
    mask = (masks.causal() & masks.sliding_window(7, None)) | masks.block_diagonal(4)
    score = scores.alibi(torch.tensor([0.5, 0.25])).then(scores.softcap(5.0))
    theirs = flex_attention(q, k, v, score_mod=score, block_mask=create_block_mask(mask, 1, 2, 32, 32, device="cpu", BLOCK_SIZE=16))
    wide = [t.double() for t in (q, k, v)]
    exact = flex_attention(*wide, score_mod=score, block_mask=create_block_mask(mask, 1, 2, 32, 32, device="cpu", BLOCK_SIZE=16))
    ours = anyattn.flex_attention(q, k, v, score_mod=score, mask_mod=mask)
    from anyattn.testing import budget

    budget.check("ours", ours, exact, theirs)


def test_eager_calls_read_captured_numbers_anew():
    window = 1

    def f(b, h, q_idx, kv_idx):
        return (q_idx - kv_idx <= window) & (q_idx >= kv_idx)

    wrapped, values = mod(f), torch.eye(4).view(1, 1, 4, 4)
    zeros = torch.zeros(1, 1, 4, 4)
    for window in (1, 2):
        seen = anyattn.flex_attention(zeros, zeros, values, mask_mod=wrapped)[0, 0] > 0
        assert all(bool(seen[i, j]) == (0 <= i - j <= window) for i, j in itertools.product(range(4), repeat=2))
