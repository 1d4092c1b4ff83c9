"""Rotary position embedding: pairs of dimensions of a query or key rotated by an angle that depends on its position.

Source: Su et al., RoFormer (arXiv:2104.09864); the two ways of pairing are GPT-J's (interleaved) and GPT-NeoX's (halves).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

__all__ = ["apply_rotary", "apply_rotary_emb", "check_rotary"]


def apply_rotary_emb(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool = False,
    inplace: bool = False,
    seqlen_offsets: int | Tensor = 0,
    cu_seqlens: Tensor | None = None,
    max_seqlen: int | Tensor | None = None,
) -> Tensor:
    """Rotary embedding of queries or keys by their positions in their sequences, with FlashAttention's signature.

    x: (B, S, H, D), or packed (total, H, D) with cu_seqlens, integers (B + 1,). cos, sin: (positions, rotary_dim / 2), of which the first
    rotary_dim of D are rotated, in float32 (float64 for float64). interleaved: True pairs dimensions (0, 1), (2, 3), ...; False pairs
    (0, rotary_dim / 2), ... seqlen_offsets: an int or integers (B,), the position of each sequence's first row. max_seqlen: not needed.
    inplace: writes the result to x and returns x.

    Differentiable in x, cos and sin. Tables that are too short raise ``ValueError`` where the positions are known without waiting for a
    GPU, and give NaN elsewhere; the other errors are ``TypeError``/``ValueError`` naming the argument.

    >>> x, angle = torch.randn(2, 5, 4, 16), torch.arange(5.0)[:, None] * torch.tensor([1.0, 0.1])
    >>> apply_rotary_emb(x, angle.cos(), angle.sin()).shape
    torch.Size([2, 5, 4, 16])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim != (4 if cu_seqlens is None else 3):
        shape = "(batch, length, heads, head_dim)" if cu_seqlens is None else "(total, heads, head_dim) with cu_seqlens"
        what = f"has shape {tuple(x.shape)} and dtype {x.dtype}" if isinstance(x, Tensor) else f"is a {type(x).__name__}"
        raise ValueError(f"x {what}; wanted a float tensor {shape}")
    if not isinstance(seqlen_offsets, Tensor) and seqlen_offsets < 0:
        raise ValueError(f"seqlen_offsets={seqlen_offsets}; wanted 0 or more")
    last = -1 if cu_seqlens is not None or isinstance(seqlen_offsets, Tensor) or 0 in x.shape else x.shape[1] - 1 + seqlen_offsets
    check_rotary(cos, sin, x.shape[-1], last, x.device, "x")
    positions = _positions(x, seqlen_offsets, cu_seqlens)
    if last < 0:  # the tables' contents decide
        if x.device.type == "cpu" and len(positions) and not torch.compiler.is_compiling():
            if int(positions.min()) < 0:
                raise ValueError(f"seqlen_offsets begins with {seqlen_offsets.tolist()[:9]}; wanted 0 or more")  # type: ignore[union-attr]
            check_rotary(cos, sin, x.shape[-1], int(positions.max()), x.device, "x")
        else:
            positions = torch.where((positions < 0) | (positions >= len(cos)), len(cos), positions)
            cos, sin = (torch.cat((t, t.new_full((1, t.shape[1]), float("nan")))) for t in (cos, sin))
    out = apply_rotary(x.reshape(-1, *x.shape[-2:]), cos, sin, positions, interleaved).view(x.shape)
    return x.copy_(out) if inplace else out


def _positions(x: Tensor, offsets: int | Tensor, ends: Tensor | None) -> Tensor:
    """The position of every row of ``apply_rotary_emb``'s x, int64; 0 for packed rows behind the last sequence."""
    batch = x.shape[0] if ends is None else len(ends) - 1
    if isinstance(offsets, Tensor) and (offsets.shape != (batch,) or offsets.is_floating_point() or offsets.device != x.device):
        raise ValueError(
            f"seqlen_offsets has shape {tuple(offsets.shape)} and dtype {offsets.dtype} on {offsets.device}; wanted an int, or integers "
            f"({batch},) on {x.device}"
        )
    if ends is None:
        row = torch.arange(x.shape[1], device=x.device)
        found = row + offsets[:, None].to(torch.int64) if isinstance(offsets, Tensor) else row + offsets
        return found.expand(x.shape[:2]).reshape(-1)
    ends = ends.to(torch.int64)
    row = torch.arange(x.shape[0], device=x.device)
    entry = torch.searchsorted(ends, row, right=True) - 1
    inside = entry.clamp(0, max(batch - 1, 0))
    found = row - ends[inside] + (offsets[inside].to(torch.int64) if isinstance(offsets, Tensor) else offsets)
    return torch.where(entry < batch, found, 0)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool, is_last: bool = False) -> Tensor:
    """``x`` with the pair (a, b) of row r rotated to (a cos - b sin, a sin + b cos), by the angle at ``positions[r]`` of the tables.

    x: (rows, H, D), any float dtype and strides. cos, sin: (seqlen_ro, rotary_dim / 2), any float dtype. positions: int64 (rows,). The
    first rotary_dim of D are rotated, or with is_last the last, and the rest is unchanged. interleaved: True pairs dimensions (0, 1), (2,
    3), ...; False pairs (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ... Computed in float32 (float64 for float64), rounded once to x's
    dtype. Returns a new contiguous tensor. Arguments are not checked here, but in ``check_rotary``.

    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)  # a quarter turn at every position
    >>> apply_rotary(torch.tensor([[[1.0, 2.0, 3.0]]]), zero, one, torch.tensor([1]), interleaved=True).tolist()
    [[[-2.0, 1.0, 3.0]]]
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # selects rows before converting the dtype: a table has a row for every position, a call needs a few
    c, s = (table.index_select(0, positions).to(wide)[:, None] for table in (cos, sin))  # (rows, 1, rotary_dim / 2)
    half = cos.shape[1]
    first = x.shape[-1] - 2 * half if is_last else 0
    turned = x[..., first : first + 2 * half].to(wide)
    if interleaved:
        # one complex product, bitwise equal: 5 times as fast on the CPU as four real products of strided halves
        result = torch.view_as_real(_as_complex(turned) * torch.complex(c, s)).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        result = torch.cat((a * c - b * s, a * s + b * c), -1)
    result = result.to(x.dtype)
    return torch.cat((x[..., :first], result, x[..., first + 2 * half :]), -1) if x.shape[-1] > 2 * half else result


def _as_complex(pairs: Tensor) -> Tensor:
    """Dimensions (0, 1), (2, 3), ... as real and imaginary parts; a view if strides and offset allow a complex view."""
    pairs = pairs.contiguous()
    return torch.view_as_complex((pairs.clone() if pairs.storage_offset() % 2 else pairs).unflatten(-1, (-1, 2)))


def check_rotary(cos: Any, sin: Any, head_dim: int, last_position: int, device: torch.device, beside: str = "q") -> None:
    """Raises ``TypeError`` or ``ValueError`` unless the tables can rotate heads of ``head_dim`` at positions up to ``last_position``.

    cos, sin: ``rotary_cos`` and ``rotary_sin`` of the call, both None without rotary embedding. last_position: the greatest position that
    the call rotates, -1 for none. device: of the rotated tensor, which errors call ``beside``.

    >>> check_rotary(torch.ones(8, 2), torch.ones(8, 2), 4, 8, torch.device("cpu"))
    Traceback (most recent call last):
    ValueError: rotary_cos and rotary_sin hold 8 positions but position 8 is needed; wanted at least 9 rows: compute longer tables
    """
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        given, missing = ("rotary_sin", "rotary_cos") if cos is None else ("rotary_cos", "rotary_sin")
        raise ValueError(f"{given} is given but {missing} is None; wanted both tables or neither: pass {missing} too")
    for name, table in (("rotary_cos", cos), ("rotary_sin", sin)):
        _check_table(name, table, device, beside)
    if cos.shape != sin.shape:
        raise ValueError(
            f"rotary_cos has shape {tuple(cos.shape)} but rotary_sin has {tuple(sin.shape)}; wanted the same: (positions, rotary_dim / 2)"
        )
    rows, columns = cos.shape
    if columns == 0:
        raise ValueError(
            f"rotary_cos and rotary_sin have shape {(rows, columns)}, which rotates no dimension; wanted (positions, rotary_dim / 2) with "
            f"rotary_dim at least 2: leave both out for no rotation"
        )
    if 2 * columns > head_dim:
        raise ValueError(_too_wide(rows, columns, head_dim))
    needed = operator.index(last_position) + 1
    if rows < needed:
        raise ValueError(
            f"rotary_cos and rotary_sin hold {rows} positions but position {needed - 1} is needed; wanted at least {needed} rows: "
            f"compute longer tables"
        )


def _check_table(name: str, table: Any, device: torch.device, beside: str) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"{name} is a {type(table).__name__}; wanted a float tensor of shape (positions, rotary_dim / 2)")
    if not table.is_floating_point():
        raise TypeError(f"{name} has dtype {table.dtype}; wanted a float dtype: convert it with .to(torch.float32)")
    if table.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(table.shape)}; wanted 2 dimensions (positions, rotary_dim / 2), shared by all entries and heads"
        )
    if table.device != device:
        raise ValueError(f"{name} is on {table.device} but {beside} is on {device}; wanted one device: move it with .to({str(device)!r})")


def _too_wide(rows: int, columns: int, head_dim: int) -> str:
    text = (
        f"rotary_cos and rotary_sin have shape {(rows, columns)}, that is rotary_dim {2 * columns}, wider than head_dim {head_dim}; wanted "
        f"at most {head_dim // 2} columns, one for each pair of dimensions"
    )
    # some models keep tables with every angle twice, once per dimension of its pair
    return text + (f": pass one of each pair, such as cos[:, :{columns // 2}]" if columns % 2 == 0 and columns <= head_dim else "")
