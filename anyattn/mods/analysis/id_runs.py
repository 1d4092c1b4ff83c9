"""Runs of equal ids in captured tensors: the begin and end, along kv_idx, of the run of a row's id.

Every function takes ``table`` (..., n) and returns positions in 0..n, or None if the table's values do not form runs. All work is done on
whole tensors, in O(n log n) time.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["equal_runs", "first_at_least", "run_of"]


def run_of(table: Tensor, value: bool) -> tuple[Tensor, Tensor] | None:
    """Start and end, shape (...), of the only run of ``value`` in each row of a bool table; a missing value is an empty run at 0."""
    n = table.shape[-1]
    hit = table if value else ~table
    at = torch.arange(n, device=table.device)
    count = hit.sum(-1)
    start = torch.where(hit, at, n).amin(-1) if n else torch.zeros_like(count)
    end = torch.where(hit, at + 1, 0).amax(-1) if n else torch.zeros_like(count)
    if not bool((torch.where(count > 0, end - start, 0) == count).all()):
        return None
    start = torch.where(count > 0, start, 0)
    return start, start + count


def first_at_least(table: Tensor, values: Tensor, same: bool = False) -> tuple[Tensor] | None:
    """The first position whose entry is >= each value, for a table sorted along its last dimension.

    values: (*table.shape[:-1], ...), one group per row of the table.
    """
    if not _is_sorted(table):
        return None
    return (_search(table, values, right=False),)


def equal_runs(table: Tensor, values: Tensor, same: bool = False) -> tuple[Tensor, Tensor] | None:
    """Start and end of the run of each value; ``same``: ``values`` is ``table`` itself. A missing value has start = end."""
    if same and values.shape == table.shape:
        return _own_runs(table)
    if _is_sorted(table):
        return _search(table, values, right=False), _search(table, values, right=True)
    return _unsorted_runs(table, values)


def _is_sorted(table: Tensor) -> bool:
    return bool((table[..., 1:] >= table[..., :-1]).all())


def _search(table: Tensor, values: Tensor, right: bool) -> Tensor:
    rows = table.to(torch.int64).reshape(-1, table.shape[-1]).contiguous()
    asked = values.reshape(rows.shape[0], -1).contiguous() if rows.shape[0] else values.reshape(0, 0)
    return torch.searchsorted(rows, asked, right=right).reshape(values.shape)


def _own_runs(table: Tensor) -> tuple[Tensor, Tensor] | None:
    n = table.shape[-1]
    if n == 0:
        return torch.zeros_like(table, dtype=torch.int64), torch.zeros_like(table, dtype=torch.int64)
    change = table[..., 1:] != table[..., :-1]
    if not (bool((table[..., 1:] >= table[..., :-1]).all()) or _each_value_once(table, change)):
        return None
    edge = torch.ones_like(change[..., :1]) if n > 1 else torch.ones_like(table, dtype=torch.bool)
    at = torch.arange(n, device=table.device)
    first, last = (torch.cat([edge, change], -1), torch.cat([change, edge], -1)) if n > 1 else (edge, edge)
    start = torch.where(first, at, 0).cummax(-1).values
    end = torch.where(last, at + 1, n).flip(-1).cummin(-1).values.flip(-1)
    return start, end


def _each_value_once(table: Tensor, change: Tensor) -> bool:
    """Whether no value occurs again after a different value has followed it."""
    rows, changes = table.reshape(-1, table.shape[-1]), change.reshape(-1, change.shape[-1]).sum(-1)
    ordered = rows.sort(dim=-1).values
    distinct = (ordered[:, 1:] != ordered[:, :-1]).sum(-1)
    return bool((changes == distinct).all())


def _unsorted_runs(table: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
    own = _own_runs(table)
    if own is None:
        return None
    n = table.shape[-1]
    rows, order = table.to(torch.int64).reshape(-1, n).contiguous().sort(dim=-1, stable=True)
    rows = rows.contiguous()
    start, end = (t.reshape(-1, n).gather(1, order) for t in own)
    asked = values.reshape(rows.shape[0], -1).contiguous()
    at = torch.searchsorted(rows, asked).clamp(max=max(n - 1, 0))
    hit = rows.gather(1, at) == asked
    return tuple(torch.where(hit, t.gather(1, at), 0).reshape(values.shape) for t in (start, end))  # type: ignore[return-value]
