"""Rotary embedding against its definition, complex multiplication in float64, and every refusal of its tables."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from anyattn.kvcache.rotary import apply_rotary, check_rotary
from anyattn.testing import budget

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
CPU = torch.device("cpu")


def tables(positions: int, half: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angle = torch.outer(torch.arange(positions, dtype=torch.float64), 100.0 ** (-torch.arange(half, dtype=torch.float64) / max(1, half)))
    return angle.cos().to(dtype), angle.sin().to(dtype)


def pairs(half: int, interleaved: bool) -> list[tuple[int, int]]:
    return [(2 * i, 2 * i + 1) if interleaved else (i, i + half) for i in range(half)]


def definition(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """One complex number for each pair, row and head, in float64."""
    out = x.double().clone()
    for i, (a, b) in enumerate(pairs(cos.shape[1], interleaved)):
        turned = torch.complex(x[..., a].double(), x[..., b].double()) * torch.complex(cos.double(), sin.double())[positions, i][:, None]
        out[..., a], out[..., b] = turned.real, turned.imag
    return out


def by_hand(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """The plain formula, every step in float32 (float64 for float64), rounded once: what the result may err."""
    wide = torch.promote_types(x.dtype, torch.float32)
    out = x.to(wide).clone()
    for i, (a, b) in enumerate(pairs(cos.shape[1], interleaved)):
        c, s = cos.to(wide)[positions, i][:, None], sin.to(wide)[positions, i][:, None]
        out[..., a], out[..., b] = x[..., a].to(wide) * c - x[..., b].to(wide) * s, x[..., a].to(wide) * s + x[..., b].to(wide) * c
    return out.to(x.dtype)


def judge(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    before = x.clone()
    got = apply_rotary(x, cos, sin, positions, interleaved)
    case = (x, cos, sin, positions, interleaved)
    budget.check(f"rotary of {tuple(x.shape)}", got, definition(*case), by_hand(*case))
    assert got.is_contiguous() and got.dtype is x.dtype and got.shape == x.shape
    assert torch.equal(x, before) and (got.numel() == 0 or got.untyped_storage().data_ptr() != x.untyped_storage().data_ptr())
    assert torch.equal(got[..., 2 * cos.shape[1] :], x[..., 2 * cos.shape[1] :])
    return got


@pytest.mark.covering(2)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("head_dim", "half"), [(64, 32), (64, 16), (64, 8), (2, 1), (7, 3), (7, 2), (128, 64), (80, 20)])
def test_equals_complex_multiplication(dtype: torch.dtype, head_dim: int, half: int, interleaved: bool) -> None:
    torch.manual_seed(head_dim + half)
    for table_dtype in (dtype, torch.float32):
        cos, sin = tables(300, half, table_dtype)
        positions = torch.randint(300, (33,))  # out of order, some twice, as those of a ragged batch are
        judge(torch.randn(33, 5, head_dim).to(dtype), cos, sin, positions, interleaved)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_is_rounded_once(dtype: torch.dtype, interleaved: bool) -> None:
    """Nearly every element is the true value's nearest: tables or products that were rounded too would move every third."""
    cos, sin = tables(300, 32, torch.float32)
    x, positions = torch.randn(200, 4, 64).to(dtype), torch.randint(300, (200,))
    moved = apply_rotary(x, cos, sin, positions, interleaved) != definition(x, cos, sin, positions, interleaved).to(dtype)
    assert int(moved.sum()) * 100 < moved.numel()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(dtype: torch.dtype, interleaved: bool) -> None:
    torch.manual_seed(1)
    cos, sin = tables(20, 4, torch.float32)
    positions = torch.arange(6)
    flat = torch.randn(1 + 6 * 3 * 10).to(dtype)
    views = {
        "offset by one": flat[1 : 1 + 6 * 3 * 8].view(6, 3, 8),  # contiguous, yet no complex numbers lie there
        "heads first": torch.randn(3, 6, 8).to(dtype).transpose(0, 1),
        "odd row stride": flat.as_strided((6, 3, 8), (27, 9, 1)),
        "every other element": torch.randn(6, 3, 16).to(dtype)[..., ::2],
        "expanded": torch.randn(6, 1, 8).to(dtype).expand(6, 3, 8),
        "last dimension first": torch.randn(8, 6, 3).to(dtype).permute(1, 2, 0),
        "cut from wider heads": torch.randn(6, 3, 12).to(dtype)[..., 2:10],
    }
    for name, x in views.items():
        got = judge(x, cos, sin, positions, interleaved)
        assert torch.equal(got, apply_rotary(x.contiguous().clone(), cos, sin, positions, interleaved)), name
    wide = torch.stack((cos, sin), -1)  # tables that are views, too
    x = views["heads first"]
    expected = apply_rotary(x, cos, sin, positions, interleaved)
    assert torch.equal(apply_rotary(x, wide[..., 0], wide[..., 1], positions, interleaved), expected)


@pytest.mark.parametrize("interleaved", [True, False])
def test_known_turns(interleaved: bool) -> None:
    """No turn changes no bit; a quarter turn takes (a, b) to (-b, a), exactly."""
    x = torch.randn(2, 3, 10).bfloat16()
    cos, sin = torch.tensor([[1.0] * 4, [0.0] * 4]), torch.tensor([[0.0] * 4, [1.0] * 4])
    got = apply_rotary(x, cos, sin, torch.tensor([0, 1]), interleaved)
    assert torch.equal(got[0], x[0])
    expected = x[1].clone()
    for a, b in pairs(4, interleaved):
        expected[:, a], expected[:, b] = -x[1, :, b], x[1, :, a]
    assert torch.equal(got[1], expected)
    assert torch.equal(apply_rotary(x, cos, sin, torch.tensor([1, 0]), interleaved)[1], x[1])


@pytest.mark.parametrize("interleaved", [True, False])
def test_nothing_to_turn(interleaved: bool) -> None:
    cos, sin = tables(4, 2, torch.float32)
    none = torch.empty(0, dtype=torch.int64)
    assert apply_rotary(torch.empty(0, 3, 6), cos, sin, none, interleaved).shape == (0, 3, 6)
    assert apply_rotary(torch.empty(2, 0, 6), cos, sin, torch.tensor([1, 2]), interleaved).shape == (2, 0, 6)
    assert apply_rotary(torch.empty(0, 3, 6), cos[:0], sin[:0], none, interleaved).shape == (0, 3, 6)


def test_unused_positions_do_not_matter() -> None:
    cos, sin = tables(10, 3, torch.float32)
    x, positions = torch.randn(4, 2, 8), torch.tensor([2, 7, 2, 5])
    used = positions.unique()
    poisoned = [torch.full_like(t, math.nan).index_copy(0, used, t[used]) for t in (cos, sin)]
    for interleaved in (True, False):
        assert torch.equal(apply_rotary(x, *poisoned, positions, interleaved), apply_rotary(x, cos, sin, positions, interleaved))


def test_tables_that_fit_are_accepted() -> None:
    check_rotary(None, None, 8, 100, CPU)
    check_rotary(*tables(8, 4, torch.bfloat16), 8, 7, CPU)
    check_rotary(*tables(8, 4, torch.float64), 9, 7, CPU)
    check_rotary(*tables(0, 1, torch.float32), 8, -1, CPU)  # nothing is turned, so no row is needed
    check_rotary(torch.ones(8, 4), torch.ones(8, 4).half(), 128, 0, CPU)


@pytest.mark.parametrize(
    ("cos", "sin", "head_dim", "last", "error", "message"),
    [
        (torch.ones(8, 2), None, 8, 0, ValueError, "rotary_cos is given but rotary_sin is None; wanted both tables or neither"),
        (None, torch.ones(8, 2), 8, 0, ValueError, "rotary_sin is given but rotary_cos is None.*pass rotary_cos too"),
        ([[1.0]], torch.ones(8, 2), 8, 0, TypeError, "rotary_cos is a list; wanted a float tensor"),
        (
            torch.ones(8, 2),
            torch.ones(8, 2, dtype=torch.int64),
            8,
            0,
            TypeError,
            r"rotary_sin has dtype torch.int64.*\.to\(torch.float32\)",
        ),
        (torch.ones(8, 1, 2), torch.ones(8, 1, 2), 8, 0, ValueError, r"rotary_cos has shape \(8, 1, 2\); wanted 2 dimensions"),
        (torch.ones(8), torch.ones(8), 8, 0, ValueError, r"rotary_cos has shape \(8,\); wanted 2 dimensions"),
        (torch.ones(8, 2), torch.ones(8, 3), 8, 0, ValueError, r"rotary_cos has shape \(8, 2\) but rotary_sin has \(8, 3\)"),
        (torch.ones(8, 2), torch.ones(9, 2), 8, 0, ValueError, r"\(8, 2\) but rotary_sin has \(9, 2\); wanted the same"),
        (torch.ones(8, 0), torch.ones(8, 0), 8, 0, ValueError, r"shape \(8, 0\), which rotates no dimension.*leave both out"),
        (
            torch.ones(8, 5),
            torch.ones(8, 5),
            8,
            0,
            ValueError,
            r"rotary_dim 10, wider than head_dim 8; wanted at most 4 columns.*dimensions$",
        ),
        (torch.ones(8, 4), torch.ones(8, 4), 7, 0, ValueError, r"rotary_dim 8, wider than head_dim 7.*at most 3.*cos\[:, :2\]"),
        (torch.ones(8, 8), torch.ones(8, 8), 8, 0, ValueError, r"rotary_dim 16, wider than head_dim 8.*such as cos\[:, :4\]"),
        (torch.ones(8, 2), torch.ones(8, 2), 8, 8, ValueError, "hold 8 positions but position 8 is needed; wanted at least 9 rows"),
        (torch.ones(0, 2), torch.ones(0, 2), 8, 0, ValueError, "hold 0 positions but position 0 is needed"),
        (torch.ones(8, 2), torch.ones(8, 2, device="meta"), 8, 0, ValueError, r"rotary_sin is on meta but q is on cpu.*\.to\('cpu'\)"),
    ],
)
def test_refusals(cos: object, sin: object, head_dim: int, last: int, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_rotary(cos, sin, head_dim, last, CPU)
