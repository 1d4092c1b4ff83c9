"""``apply_rotary_emb``: positions by offsets and cu_seqlens, against ``apply_rotary``, whose arithmetic ``test_rotary`` judges."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.kvcache.rotary import apply_rotary
from tests.kvcache.test_rotary import tables

COS, SIN = tables(40, 6, torch.float32)
X = torch.randn(3, 10, 4, 16, generator=torch.Generator().manual_seed(0))
ENDS = torch.tensor([0, 4, 4, 30], dtype=torch.int32)
OFFSETS = torch.tensor([3, 0, 7], dtype=torch.int32)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", [0, 5, OFFSETS])
@pytest.mark.parametrize("ends", [None, ENDS])
def test_positions(ends, offsets, dtype, interleaved):
    x = X.to(dtype) if ends is None else X.flatten(0, 1).to(dtype)
    lengths = [10] * 3 if ends is None else ends.diff().tolist()
    firsts = offsets.tolist() if isinstance(offsets, torch.Tensor) else [offsets] * 3
    positions = torch.cat([torch.arange(n) + first for n, first in zip(lengths, firsts, strict=True)])
    wanted = apply_rotary(x.reshape(-1, 4, 16), COS, SIN, positions, interleaved).view(x.shape)
    got = anyattn.apply_rotary_emb(x, COS, SIN, interleaved, seqlen_offsets=offsets, cu_seqlens=ends)
    assert torch.equal(got, wanted)
    view = torch.zeros(*x.shape[:-1], 32, dtype=dtype)[..., ::2].copy_(x)
    assert anyattn.apply_rotary_emb(view, COS, SIN, interleaved, True, offsets, ends, 26) is view and torch.equal(view, wanted)


def test_gradients_are_those_of_the_inverse_turn():
    x = X.clone().requires_grad_()
    weights = torch.randn(X.shape)
    (anyattn.apply_rotary_emb(x, COS, SIN, seqlen_offsets=OFFSETS) * weights).sum().backward()
    assert torch.equal(x.grad, anyattn.apply_rotary_emb(weights, COS, -SIN, seqlen_offsets=OFFSETS))
    y = X.clone().requires_grad_()
    (anyattn.apply_rotary_emb(y * 1, COS, SIN, inplace=True, seqlen_offsets=OFFSETS) * weights).sum().backward()
    assert torch.equal(y.grad, x.grad)


@pytest.mark.slow
def test_compiled_and_short_tables():
    call = torch.compile(
        lambda x, offsets: anyattn.apply_rotary_emb(x, COS, SIN, seqlen_offsets=offsets), backend="aot_eager", fullgraph=True
    )
    assert torch.equal(call(X, OFFSETS), anyattn.apply_rotary_emb(X, COS, SIN, seqlen_offsets=OFFSETS))
    short = call(X, OFFSETS + torch.tensor([28, 40, 0]))  # positions that no table has give NaN where the host cannot look
    assert short[0, 8].isfinite().all() and short[0, -1, :, :12].isnan().all() and short[1, :, :, :12].isnan().all()
    assert short[2].isfinite().all() and short[..., 12:].isfinite().all()


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seqlen_offsets": 31}, ValueError, "hold 40 positions but position 40 is needed"),
        ({"seqlen_offsets": OFFSETS + 30}, ValueError, "hold 40 positions but position 46 is needed"),
        ({"seqlen_offsets": -1}, ValueError, "seqlen_offsets=-1; wanted 0 or more"),
        ({"seqlen_offsets": OFFSETS - 1}, ValueError, r"seqlen_offsets begins with \[2, -1, 6\]; wanted 0 or more"),
        ({"seqlen_offsets": OFFSETS[:2]}, ValueError, r"seqlen_offsets has shape \(2,\) .*; wanted an int, or integers \(3,\)"),
        ({"x": X.flatten(0, 1)}, ValueError, r"x has shape \(30, 4, 16\) .*; wanted a float tensor \(batch, length, heads, head_dim\)"),
        ({"x": X, "cu_seqlens": ENDS}, ValueError, r"wanted a float tensor \(total, heads, head_dim\) with cu_seqlens"),
        ({"x": X[..., :8]}, ValueError, "rotary_dim 12, wider than head_dim 8"),
        ({"cos": COS.to("meta")}, ValueError, "rotary_cos is on meta but x is on cpu"),
    ],
)  # fmt: skip
def test_refusals(arguments, error, text):
    with pytest.raises(error, match=text):
        anyattn.apply_rotary_emb(**{"x": X, "cos": COS, "sin": SIN, **arguments})
