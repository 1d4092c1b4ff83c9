"""Row ranges: limits of masks that are, for every query row, a short union of ranges ``lo <= kv_idx < hi``.

Causal, sliding window, prefix, sink + window, chunks and packed documents have this form, and so have their combinations by ``&``, ``|``,
``~`` and ``torch.where``. A kernel then compares a column with two numbers per range instead of evaluating the mask, and the tile classes
follow from the limits without evaluating any (q, kv) pair. A derivation (``solver.py``) is exact; without one the result is None.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.evaluate import run
from anyattn.mods.analysis.solver import NO_LIMIT, NotRangesError, Solver
from anyattn.mods.ir.dependence import Dep, dependence
from anyattn.mods.ir.expr import OPS, Builder, Expr
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Extent
from anyattn.mods.tracing.trace import TracedMod
from anyattn.mods.tracing.weak_captures import negative_zeros

__all__ = [
    "ALL_KEYS",
    "LONGEST",
    "MAX_RANGES",
    "MOST_POSITIONS",
    "NO_KEYS",
    "NO_LIMIT",
    "RowRanges",
    "check_positions",
    "has_range_on_host",
    "limits",
    "limits_of_rows",
    "mask_of",
    "never_fall",
    "range_on_host",
    "ranges_unread",
    "row_ranges",
]

LONGEST = 2**30  # most positions of a sequence: limits and tile lists are int32, and so is the sum of a limit and a tile size
MAX_RANGES = 4  # a kernel keeps two registers per range and row
_MOST_ROWS = 2**15  # of all batch entries and heads, whose limits are kept
_OF_INTEGERS = frozenset(("add", "sub", "mul", "neg", "min", "max", "cast"))
MOST_POSITIONS = 2**MOST_INDEX_BITS  # limits are proved right for sequences up to this length


def check_positions(name: str, count: int) -> None:
    """Raises ``ValueError`` for a sequence of more than ``LONGEST`` positions."""
    if count > LONGEST:
        raise ValueError(f"{name} is {count}; wanted at most {LONGEST} (2^30), for positions are counted in 32 bits: attend to it in parts")


@dataclass(frozen=True, eq=False)
class RowRanges:
    """Row ranges in symbolic form.

    expr: outputs ``lo0, hi0, lo1, hi1, ...``, int64 functions of b, h and q_idx alone. kv_idx (>= 0) is visible exactly when
    ``lo_i <= kv_idx < hi_i`` for some i. Limits are not clipped (hi may be ``NO_LIMIT``, lo may be negative), a range with lo >= hi is
    empty, and ranges may overlap; ``limits`` returns them clipped, sorted and disjoint.
    scalars, tensors: run-time values for the slots of ``expr``; the mod's own, then tensors derived from their values.
    is_constant: the tensors are copies to which nothing is written.
    """

    expr: Expr
    scalars: tuple[int | float, ...]
    tensors: tuple[Tensor, ...]
    is_constant: bool = False

    @property
    def count(self) -> int:
        return len(self.expr.outputs) // 2

    @property
    def shows_all(self) -> bool:
        """Whether there is one range, which contains every key of every row."""
        if self.count != 1:
            return False
        lo, hi = (self.expr.nodes[at] for at in self.expr.outputs)
        return lo.op == hi.op == "const" and lo.attr <= 0 and hi.attr >= NO_LIMIT  # type: ignore[operator]


def _constant(lo: int, hi: int) -> RowRanges:
    builder = Builder()
    return RowRanges(builder.build(builder.const(lo, torch.int64), builder.const(hi, torch.int64)), (), ())


@lru_cache(maxsize=1024)
def mask_of(ranges: Expr) -> Expr:
    """The mask with these row ranges: true for a key in one of them.

    >>> ranges = RowRanges(_constant(0, 5).expr, (), ())
    >>> [node.op for node in mask_of(ranges.expr).nodes]
    ['index', 'const', 'lt']
    """
    builder, found = Builder(), None
    key = builder.add("index", dtype=torch.int64, attr="kv_idx")
    for lo, hi in zip(ranges.outputs[::2], ranges.outputs[1::2], strict=True):
        inside = builder.const(True)
        low, high = (ranges.nodes[at].attr if ranges.nodes[at].op == "const" else None for at in (lo, hi))
        if low is None or low > 0:  # type: ignore[operator]
            inside = builder.add("and", inside, builder.add("ge", key, builder.copy(ranges, lo)))
        if high is None or high < NO_LIMIT:  # type: ignore[operator]
            inside = builder.add("and", inside, builder.add("lt", key, builder.copy(ranges, hi)))
        found = inside if found is None else builder.add("or", found, inside)
    assert found is not None, "row ranges of no range"
    return builder.build(found)


ALL_KEYS, NO_KEYS = _constant(0, NO_LIMIT), _constant(0, 0)


def row_ranges(mod: TracedMod) -> RowRanges | None:
    """The row ranges of a mask; None if it has none that can be derived.

    Reads captured integer tensors that kv_idx indexes, to see whether they are sorted and whether each id is one run, in O(their size).

    >>> from anyattn.mods.tracing.trace import trace
    >>> row_ranges(trace(lambda b, h, q, k: (q >= k) & (q - k < 64), "mask")).count
    1
    """
    if mod.kind != "mask":
        raise TypeError(f"row_ranges takes a mask; {mod.name!r} is a {mod.kind} mod")
    if mod.tensors:
        return _derive(mod, _held(mod))
    return _derive_once(mod.expr, mod.scalars, negative_zeros(mod.scalars))


@lru_cache(maxsize=1024)
def _derive_once(expr: Expr, scalars: tuple[int | float, ...], zeros: tuple[int, ...]) -> RowRanges | None:
    """``_derive``, memoised: without captured tensors, whose values may change in place, the result never changes. zeros: the scalars'
    ``negative_zeros``."""
    return _derive(TracedMod("mask", expr, scalars, ()))


def _held(mod: TracedMod) -> tuple[Extent | None, ...]:
    """Extents of captured int64 tensors, since by their dtype alone sums with them could wrap around: of tensors that kv_idx indexes, and
    of tensors on the CPU, where reading does not synchronise. None for all others."""
    deps = dependence(mod.expr)
    by_key = {node.attr for node in mod.expr.nodes if node.op == "load" and any(deps[a].kv for a in node.args)}
    found: list[Extent | None] = []
    for slot, t in enumerate(mod.tensors):
        is_read = t.dtype is torch.int64 and t.numel() > 0 and (slot in by_key or t.device.type == "cpu")
        found.append(Extent(*(int(x) for x in t.aminmax())) if is_read else None)
    return tuple(found)


def _derive(mod: TracedMod, held: tuple[Extent | None, ...] = ()) -> RowRanges | None:
    solver = Solver(mod, held)
    try:
        ranges = solver.solve(mod.expr.outputs[0], True)
    except (NotRangesError, RecursionError):
        return None
    if len(ranges) > MAX_RANGES:
        return None
    out = solver.out
    outputs = [p for lo, hi in ranges or [(solver.number(0), solver.number(0))] for p in (solver.lower(lo), solver.upper(hi))]
    return RowRanges(out.build(*outputs), mod.scalars, tuple(solver.tensors))


def ranges_unread(mask: TracedMod) -> RowRanges | None:
    """The row ranges of a mask, derived without reading captured tensors,
    which on a GPU would synchronise; None if that is not possible."""
    if any(n.op == "load" and d.kv for n, d in zip(mask.expr.nodes, dependence(mask.expr), strict=True)):
        return None
    ranges = _derive(mask) if mask.tensors else row_ranges(mask)
    # the slots of the ranges must be those of the mask's own tensors: a derivation that added tensors is not used
    return ranges if ranges is not None and len(ranges.tensors) <= len(mask.tensors) else None


@lru_cache(maxsize=1024)
def never_fall(expr: Expr) -> bool:
    """Whether limits never decrease from row to row and are the same for every head, so that a tile's least and greatest limits are those
    of its first and last row. False if it cannot be proved.

    >>> from anyattn.mods.tracing.trace import trace
    >>> never_fall(row_ranges(trace(lambda b, h, q, k: (q >= k) & (q - k < 64), "mask")).expr)
    True
    >>> never_fall(row_ranges(trace(lambda b, h, q, k: k < 64 - q, "mask")).expr)
    False
    """
    deps = dependence(expr)

    def rises(at: int) -> bool:
        node, slope = expr.nodes[at], deps[at].slope
        if node.op in ("min", "max"):
            return all(rises(a) for a in node.args)
        return slope is not None and slope[0] >= 0

    return all(rises(at) and not deps[at].h for at in expr.outputs)


# ---- numbers


def limits(
    mod: TracedMod | RowRanges, seqlen_q: int, seqlen_k: int, B: int = 1, H: int = 1, device: torch.device | str | None = None
) -> tuple[Tensor, Tensor] | None:
    """``lo, hi`` of shape (n, B or 1, H or 1, seqlen_q), int32, n <= 4: row q of (b, h) sees kv exactly where lo <= kv < hi for some n.

    Clipped to [0, seqlen_k]; per row sorted, disjoint and with a gap between neighbours. Empty ranges (lo = hi) come last and start at the
    end of the range before, so a row's span is ``lo[0]`` to ``hi[-1]``. A dimension of size 1 is broadcast: the mask ignores it. None if
    the mask has no row ranges, or a sequence is longer than ``MOST_POSITIONS``. O(seqlen_q) time and memory for each (b, h) that the mask
    distinguishes.
    """
    ranges = mod if isinstance(mod, RowRanges) else row_ranges(mod)
    if ranges is None or max(seqlen_q, seqlen_k) > MOST_POSITIONS:
        return None
    device = device if device is not None else (ranges.tensors[0].device if ranges.tensors else "cpu")
    of = _constant_limits if ranges.is_constant and B * H * seqlen_q <= _MOST_ROWS else _computed_limits
    return of(ranges, seqlen_q, seqlen_k, B, H, device)


def _computed_limits(ranges: RowRanges, seqlen_q: int, seqlen_k: int, B: int, H: int, device: torch.device | str) -> tuple[Tensor, Tensor]:
    leaves = {
        "b": torch.arange(B, device=device)[:, None, None],
        "h": torch.arange(H, device=device)[:, None],
        "q_idx": torch.arange(seqlen_q, device=device),
    }
    sees = _sees(ranges)
    return _limits(ranges, leaves, (B if sees.b else 1, H if sees.h else 1, seqlen_q), seqlen_k, seqlen_k, device)


_constant_limits = lru_cache(maxsize=32)(_computed_limits)


def has_range_on_host(ranges: RowRanges) -> bool:
    """Whether ``range_on_host`` takes these ranges: one range, whose limits are sums, products, minima or maxima of q_idx and numbers."""
    return _steps(ranges.expr) is not None and ranges.count == 1


def range_on_host(ranges: RowRanges, q_idx: int) -> tuple[int, int]:
    """The range ``lo, hi`` of the row at position ``q_idx``, not clipped, in Python numbers; for ``has_range_on_host``.

    >>> from anyattn.mods.tracing.trace import trace
    >>> range_on_host(row_ranges(trace(lambda b, h, q, k: (q >= k) & (q - k < 64), "mask")), 99)
    (36, 100)
    """
    steps = _steps(ranges.expr)
    assert steps is not None
    values: list[Any] = []
    for function, args in steps:
        if function is not None:
            values.append(function(*[values[a] for a in args]))
        else:
            values.append(q_idx if args is None else ranges.scalars[args] if type(args) is int else args[0])
    lo, hi = (values[at] for at in ranges.expr.outputs)
    return lo, hi


@lru_cache(maxsize=256)
def _steps(expr: Expr) -> tuple[tuple[Callable | None, Any], ...] | None:
    """For each node a function and the nodes of its operands; without a function None for q_idx, the slot of a scalar, or a constant in a
    tuple. None if there are other operations. Limits are proved not to wrap around (``solver.py``), so Python's integers are right."""
    steps: list[tuple[Callable | None, Any]] = []
    for node in expr.nodes:
        if node.dtype not in (int, torch.int64):
            return None
        if node.op in _OF_INTEGERS:
            steps.append((OPS[node.op].on_host or int, node.args))
        elif node.op == "index" and node.attr == "q_idx":
            steps.append((None, None))
        elif node.op in ("const", "scalar"):
            steps.append((None, (node.attr,) if node.op == "const" else node.attr))
        else:
            return None
    return tuple(steps)


def limits_of_rows(mod: TracedMod | RowRanges, b: Tensor, q_idx: Tensor, seqlen_k: Tensor, H: int) -> tuple[Tensor, Tensor] | None:
    """``limits`` for rows of many sequences at once: ``lo, hi`` of shape (n, 1, H or 1, rows), int32.

    b, q_idx, seqlen_k: int64 (rows,): each row's batch entry, its position, and the number of keys of its sequence.
    """
    ranges = mod if isinstance(mod, RowRanges) else row_ranges(mod)
    if ranges is None:
        return None
    leaves = {"b": b, "h": torch.arange(H, device=b.device)[:, None], "q_idx": q_idx}
    longest = int(seqlen_k.max()) if len(seqlen_k) else 0
    if longest > MOST_POSITIONS:
        return None
    return _limits(ranges, leaves, (1, H if _sees(ranges).h else 1, len(b)), seqlen_k, longest, b.device)


def _sees(ranges: RowRanges) -> Dep:
    deps = [dependence(ranges.expr)[o] for o in ranges.expr.outputs]
    return Dep(b=any(d.b for d in deps), h=any(d.h for d in deps))


def _limits(
    ranges: RowRanges, leaves: dict[str, Tensor], shape: tuple[int, ...], seqlen_k: int | Tensor, longest: int, device: Any
) -> tuple[Tensor, Tensor]:
    """The limits at the rows of ``leaves``, clipped to each row's ``seqlen_k``; longest: the greatest ``seqlen_k``."""
    values = run(ranges.expr, leaves, ranges.scalars, ranges.tensors)

    def column(value: Tensor | int) -> Tensor:
        value = value if isinstance(value, Tensor) else torch.tensor(value, device=device)
        if isinstance(seqlen_k, int):
            value = value.clamp(0, seqlen_k)
        else:
            value = torch.minimum(value.clamp(min=0), seqlen_k)
        return value.to(device=device, dtype=torch.int32).expand(shape)

    lo, hi = torch.stack([column(v) for v in values[0::2]]), torch.stack([column(v) for v in values[1::2]])
    return (lo, torch.maximum(lo, hi)) if len(lo) == 1 else _disjoint(lo, hi, longest)


def _disjoint(lo: Tensor, hi: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    """The same sets of keys as sorted ranges: overlapping or touching ranges are merged, empty ones come last."""
    return _two_disjoint(lo, hi, seqlen_k) if len(lo) == 2 else _many_disjoint(lo, hi, seqlen_k)


def _two_disjoint(lo: Tensor, hi: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    lo = torch.where(hi <= lo, seqlen_k + 1, lo)  # sorts an empty range last, where it touches no other
    swap = lo[1] < lo[0]
    first_lo, second_lo = torch.minimum(lo[0], lo[1]), torch.maximum(lo[0], lo[1])
    first_hi, second_hi = torch.where(swap, hi[1], hi[0]), torch.where(swap, hi[0], hi[1])
    joined = (second_lo <= first_hi) & (second_lo <= seqlen_k)
    first_hi = torch.where(joined, torch.maximum(first_hi, second_hi), first_hi)
    first_lo, first_hi = (torch.where(first_lo > seqlen_k, 0, t) for t in (first_lo, first_hi))
    single = joined | (second_lo > seqlen_k)
    if bool(single.all()):
        return first_lo[None], first_hi[None]
    second = (torch.where(single, first_hi, t) for t in (second_lo, second_hi))
    return tuple(torch.stack(pair) for pair in zip((first_lo, first_hi), second, strict=True))  # type: ignore[return-value]


def _many_disjoint(lo: Tensor, hi: Tensor, seqlen_k: int) -> tuple[Tensor, Tensor]:
    empty = hi <= lo
    lo, order = lo.masked_fill(empty, seqlen_k + 1).sort(dim=0)
    hi = hi.masked_fill(empty, 0).gather(0, order)
    reach = hi.cummax(dim=0).values
    starts = torch.cat([torch.zeros_like(lo[:1]), (lo[1:] > reach[:-1]).to(lo.dtype)])
    group = starts.cumsum(dim=0)
    new_lo = torch.full_like(lo, seqlen_k + 1).scatter_reduce(0, group, lo, "amin")
    new_hi = torch.zeros_like(hi).scatter_reduce(0, group, hi, "amax")
    used = int((new_hi > new_lo).sum(dim=0).max()) if new_lo.numel() else 1
    new_lo, new_hi = new_lo[: max(used, 1)], new_hi[: max(used, 1)].cummax(dim=0).values
    return torch.minimum(new_lo, new_hi), new_hi
