"""Tiles that are left out at run time (``skip_below``): exact where nothing is skipped, within the stated bound elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import AuxRequest, masks, oracle
from anyattn.testing import budget
from anyattn.testing.rounding import Noise, rounding

CAUSAL = masks.causal()
OPTIONS = {"tile_m": 32, "tile_n": 16}


def operands(heads: int = 4, dtype: torch.dtype = torch.float32, peak: float = 8.0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys 0 to 15 have scores far above all others in heads 0 and 1."""
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(2, heads, 70, 16, generator=g), torch.randn(2, 2, 90, 16, generator=g), torch.randn(2, 2, 90, 16, generator=g)
    q[..., 0], k[..., 0] = 4.0, 0.0
    k[:, :1, :16, 0] = peak
    return q.to(dtype), k.to(dtype), v.to(dtype)


def called(q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, anyattn.AuxOutput]:
    request = AuxRequest(lse=True, max_scores=True, skipped="skip_below" in more)
    return anyattn.flex_attention(q, k, v, enable_gqa=True, return_aux=request, kernel_options=OPTIONS, **more)  # type: ignore[no-any-return]


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["full", "causal"])
def test_a_threshold_of_0_changes_nothing(mask: Any) -> None:
    tensors = operands()
    plain, of_plain = called(*tensors, mask_mod=mask)
    for below in (0.0, 0, torch.zeros(4)):
        out, aux = called(*tensors, mask_mod=mask, skip_below=below)
        assert torch.equal(out, plain) and torch.equal(aux.lse, of_plain.lse) and torch.equal(aux.max_scores, of_plain.max_scores)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, CAUSAL, "lists"], ids=["full", "causal", "lists"])
def test_what_is_skipped_and_the_bound_of_its_error(mask: Any, dtype: torch.dtype) -> None:
    tensors, below = operands(dtype=dtype), 1e-2
    if mask == "lists":
        of_mask = lambda b, h, q, k: (q - k) % 7 != 3
        given: Any = {"block_mask": anyattn.create_block_mask(of_mask, None, None, 70, 90, device="cpu", BLOCK_SIZE=32)}
    else:
        of_mask, given = mask, {"mask_mod": mask}
    out, aux = called(*tensors, skip_below=below, **given)
    exact = oracle.attention(*tensors, mask=of_mask)
    share = aux.skipped
    assert share.shape == (2, 4) and (share[:, :2] > 0.2).all() and (share[:, 2:] == 0).all(), share
    # of a row, skipped probabilities are at most ``below`` times the greatest one each
    lost = torch.exp(exact.lse - exact.max_scores).reciprocal() * below * 90
    rounded = 0.05 if dtype is torch.bfloat16 else 1e-3
    assert (aux.lse.double() <= exact.lse + rounded).all() and (exact.lse - aux.lse <= lost + rounded).all()
    plain, noise = oracle.same_dtype(*tensors, mask=of_mask), rounding(*tensors, mask=of_mask)
    of_heads = Noise(*(t[:, 2:] for t in noise.out))
    budget.check("out", out[:, 2:], exact.out[:, 2:], plain.out[:, 2:], of_heads)
    values = tensors[2].double().abs().amax()
    assert ((out - exact.out).abs().amax(-1) <= 2 * lost * values + rounded).all()
    assert torch.equal(aux.max_scores, called(*tensors, **given)[1].max_scores)


def test_a_threshold_of_each_head() -> None:
    tensors = operands()
    _, aux = called(*tensors, skip_below=torch.tensor([1e-2, 0.0, 1e-2, 0.0]))
    assert (aux.skipped[:, 0] > 0.3).all() and (aux.skipped[:, 1:] == 0).all()
    once = [called(*tensors, skip_below=1e-2)[0] for _ in range(2)]
    assert torch.equal(*once)


def test_a_tile_is_skipped_only_if_all_of_its_rows_skip_it() -> None:
    """Row 5 alone sees keys 40 to 47 with a great score."""
    q, k, v = operands()
    k[:, :, 40:48, 1] = 30.0
    q[..., 1] = 0.0
    q[:, :, 5, 1] = 20.0
    out, aux = called(q, k, v, skip_below=1e-2)
    exact, plain = oracle.attention(q, k, v), oracle.same_dtype(q, k, v)
    budget.check("row 5", out[:, :, 5], exact.out[:, :, 5], plain.out[:, :, 5])
    assert (aux.skipped[:, :2] > 0).all()


def test_few_queries_of_heads_that_share_a_tile() -> None:
    q, k, v = operands()
    out, aux = anyattn.flex_attention(q[:, :, :1], k, v, enable_gqa=True, skip_below=1e-2, return_aux=AuxRequest(skipped=True))
    exact = oracle.attention(q[:, :, :1], k, v).out
    assert aux.skipped.shape == (2, 4) and (aux.skipped[:, 2:] == 0).all()
    assert (out - exact).abs().max() < 0.1


def test_rows_that_see_nothing() -> None:
    tensors = operands()
    out, aux = called(*tensors, mask_mod=lambda b, h, q, k: (q > 40) & (k < q), skip_below=0.1)
    assert not out[:, :, :41].any() and (aux.lse[:, :, :41] == -torch.inf).all() and torch.isfinite(out).all()


def test_reductions_of_a_call_that_skips() -> None:
    tensors = operands()
    request = AuxRequest(key_sums=True, skipped=True)
    _, aux = anyattn.flex_attention(*tensors, enable_gqa=True, skip_below=1e-2, return_aux=request)
    torch.testing.assert_close(aux.key_sums.sum(-1), torch.full((2, 4), 70.0), rtol=1e-2, atol=0)
    assert aux.skipped is not None and aux.lse is None


def test_refusals() -> None:
    q, k, v = operands()
    for below in (-1.0, 2.0, float("nan"), True, "half", torch.zeros(3), torch.zeros(4, dtype=torch.float64)):
        with pytest.raises(ValueError, match=r"skip_below.*wanted"):
            called(q, k, v, skip_below=below)
    with pytest.raises(ValueError, match="skip_below is None"):
        anyattn.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(skipped=True))
    with pytest.raises(ValueError, match=r"skip_below.*no gradients"):
        called(q.requires_grad_(), k, v, skip_below=0.1)
    with torch.no_grad():
        called(q, k, v, skip_below=0.1)


def test_explain_says_what_a_threshold_keeps_away() -> None:
    q = torch.zeros(1, 4, 1024, 64)
    why = anyattn.explain(q, q, q, skip_below=0.1, backend="torch").plan.why
    assert "no compiled loops: they leave out no tiles at run time, as skip_below asks" in why
