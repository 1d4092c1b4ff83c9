"""Rotary position embedding: pairs of dimensions of a query or key rotated by an angle that depends on its position.

Source: Su et al., RoFormer (arXiv:2104.09864); the two ways of pairing are GPT-J's (interleaved) and GPT-NeoX's (halves).
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

__all__ = ["apply_rotary", "check_rotary"]


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """``x`` with the pair (a, b) of row r rotated to (a cos - b sin, a sin + b cos), by the angle at ``positions[r]`` of the tables.

    x: (rows, H, D), any float dtype and strides. cos, sin: (seqlen_ro, rotary_dim / 2), any float dtype. positions: int64 (rows,).
    The first rotary_dim of D are rotated, the rest is unchanged. interleaved: True pairs dimensions (0, 1), (2, 3), ...; False pairs
    (0, rotary_dim / 2), (1, rotary_dim / 2 + 1), ... Computed in float32 (float64 for float64), rounded once to x's dtype. Returns a new
    contiguous tensor. Arguments are not checked here, but in ``check_rotary``.

    >>> zero, one = torch.zeros(2, 1), torch.ones(2, 1)  # a quarter turn at every position
    >>> apply_rotary(torch.tensor([[[1.0, 2.0, 3.0]]]), zero, one, torch.tensor([1]), interleaved=True).tolist()
    [[[-2.0, 1.0, 3.0]]]
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    # selects rows before converting the dtype: a table has a row for every position, a call needs a few
    c, s = (table.index_select(0, positions).to(wide)[:, None] for table in (cos, sin))  # (rows, 1, rotary_dim / 2)
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half].to(wide), x[..., 2 * half :]
    if interleaved:
        # one complex product, bitwise equal: 5 times as fast on the CPU as four real products of strided halves
        result = torch.view_as_real(_as_complex(turned) * torch.complex(c, s)).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        result = torch.cat((a * c - b * s, a * s + b * c), -1)
    result = result.to(x.dtype)
    return torch.cat((result, rest), -1) if rest.shape[-1] else result


def _as_complex(pairs: Tensor) -> Tensor:
    """Dimensions (0, 1), (2, 3), ... as real and imaginary parts; a view if strides and offset allow a complex view."""
    pairs = pairs.contiguous()
    return torch.view_as_complex((pairs.clone() if pairs.storage_offset() % 2 else pairs).unflatten(-1, (-1, 2)))


def check_rotary(cos: Any, sin: Any, head_dim: int, last_position: int, device: torch.device) -> None:
    """Raises ``TypeError`` or ``ValueError`` unless the tables can rotate heads of ``head_dim`` at positions up to ``last_position``.

    cos, sin: ``rotary_cos`` and ``rotary_sin`` of the call, both None without rotary embedding. last_position: the greatest position that
    the call rotates, -1 for none. device: of the queries.

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
        _check_table(name, table, device)
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


def _check_table(name: str, table: Any, device: torch.device) -> None:
    if not isinstance(table, Tensor):
        raise TypeError(f"{name} is a {type(table).__name__}; wanted a float tensor of shape (positions, rotary_dim / 2)")
    if not table.is_floating_point():
        raise TypeError(f"{name} has dtype {table.dtype}; wanted a float dtype: convert it with .to(torch.float32)")
    if table.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(table.shape)}; wanted 2 dimensions (positions, rotary_dim / 2), shared by all entries and heads"
        )
    if table.device != device:
        raise ValueError(f"{name} is on {table.device} but q is on {device}; wanted one device: move it with .to({str(device)!r})")


def _too_wide(rows: int, columns: int, head_dim: int) -> str:
    text = (
        f"rotary_cos and rotary_sin have shape {(rows, columns)}, that is rotary_dim {2 * columns}, wider than head_dim {head_dim}; wanted "
        f"at most {head_dim // 2} columns, one for each pair of dimensions"
    )
    # some models keep tables with every angle twice, once per dimension of its pair
    return text + (f": pass one of each pair, such as cos[:, :{columns // 2}]" if columns % 2 == 0 and columns <= head_dim else "")
