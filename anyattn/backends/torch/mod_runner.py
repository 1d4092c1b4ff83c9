"""Mod runner: evaluates a mod on one tile of scores at a time; everything that does not change from tile to tile is hoisted.

Each node of the expression belongs to one stage, by its dependences:

=========  ===========================  ==================================================
stage      computed                     stored as
=========  ===========================  ==================================================
per_head   once per call                (B or 1, H or 1, 1, 1)
row        once per call                (B or 1, H or 1, Sq, 1), a tile takes its rows
col        once per call                (B or 1, H or 1, 1, Sk), a tile takes its columns
diagonal   once per call                (B or 1, H or 1, Sq + Sk - 1), a tile is a sheared view
entry_col  once per call                (1, H or 1, 1, all keys), in a varlen batch where a column also depends on b
tile       for every tile               (b, h, rows, columns), in place if the operand is not needed again
=========  ===========================  ==================================================

If a mod has diagonals, the rows of a tile are in descending order of q_idx. Then a step down a column and a step along a row both lower
q_idx - kv_idx by one, and a diagonal vector is read in place through strides (1, 1): a bias by distance costs one addition and no memory
traffic of its own.

In a varlen batch rows are concatenated, (1, H or 1, all rows, 1); columns and diagonals are those of the longest sequence, and the other
sequences use parts of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from anyattn.backends.torch.lower import steady, with_choices
from anyattn.backends.torch.vectors import BY_BITS, by_bits
from anyattn.mods.analysis.evaluate import TORCH_OPS, Positions, apply, as_operand, run
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr, Node, category, is_weak
from anyattn.problem import Problem

if TYPE_CHECKING:
    from anyattn.sequences.batch import Sequences

__all__ = ["Bound", "Tile", "bind", "has_diagonals", "stage_of", "staging_of"]

_IN_PLACE = frozenset(TORCH_OPS) - {"where", "fold", "eq", "ne", "lt", "le", "gt", "ge"}

_DIMS = {"b": -4, "h": -3, "q_idx": -2, "kv_idx": -1}


class Tile(NamedTuple):
    """The coordinates of a tile: half-open ranges of batch entries, query heads,
    query rows and keys; rows and keys count from 0 in a sequence.

    q_first: the position of query row 0 for mods. row_base, key_base: the (first) sequence's first row and key when all sequences are
    concatenated. seqlen_q, seqlen_k: of each sequence, None if every entry fills its storage. descends: the order of the rows.
    """

    b_lo: int
    b_hi: int
    h_lo: int
    h_hi: int
    q_lo: int
    q_hi: int
    k_lo: int
    k_hi: int
    q_first: int = 0
    row_base: int = 0
    key_base: int = 0
    seqlen_q: int | None = None
    seqlen_k: int | None = None
    descends: bool = True

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (self.b_hi - self.b_lo, self.h_hi - self.h_lo, self.q_hi - self.q_lo, self.k_hi - self.k_lo)

    def rows_of(self, x: Tensor, dim: int) -> Tensor:
        """The tile's rows of ``x``, whose dimension ``dim`` is the concatenation;
        several sequences are stacked along dimension ``dim - 2``."""
        return self._entries(x, dim, dim - 2, self.row_base, self.seqlen_q, self.q_lo, self.q_hi)

    def keys_of(self, x: Tensor, dim: int) -> Tensor:
        """The tile's keys of ``x``, as ``rows_of``; several sequences are stacked along dimension ``dim - 3``."""
        return self._entries(x, dim, dim - 3, self.key_base, self.seqlen_k, self.k_lo, self.k_hi)

    def _entries(self, x: Tensor, dim: int, entry_dim: int, base: int, size: int | None, lo: int, hi: int) -> Tensor:
        count = self.b_hi - self.b_lo
        if size is None or count == 1:
            return x.narrow(dim, base + lo, hi - lo)
        whole = x.narrow(dim, base, count * size).unflatten(dim, (count, size)).narrow(dim + 1, lo, hi - lo)
        return whole.transpose(entry_dim, dim).squeeze(dim)

    @property
    def is_stacked(self) -> bool:
        """Whether it has several sequences, which are concatenated in hoisted rows and columns."""
        return self.seqlen_q is not None and self.b_hi - self.b_lo > 1

    def columns(self, lo: int, hi: int) -> Tile:
        return self._replace(k_lo=lo, k_hi=hi)


@dataclass(frozen=True)
class Staging:
    """An expression divided into stages: each node's stage, the nodes of other stages that tiles read, those of them that are computed (all
    but indices), the tile nodes in order, those of them that compute with an index, and each node's last reader."""

    stage: tuple[str, ...]
    boundary: tuple[int, ...]
    hoisted: tuple[int, ...]
    schedule: tuple[int, ...]
    operands: frozenset[int]
    last_use: tuple[int, ...]


# Float operations whose result is the exact one, rounded, or one of their operands: an element has the same bits in every vector.
_ROUNDED_ONCE = frozenset(
    ("add", "sub", "mul", "div", "neg", "abs", "sign", "sqrt", "floor", "ceil", "trunc", "round", "min", "max", "where", "cast", "detach")
)
_READ = frozenset(("index", "bound", "score", "const", "scalar", "load", "tensor"))


def _is_approximate(node: Node) -> bool:
    """Whether torch may round the operation's result in another way at the end of a vector, where it computes element by element."""
    is_float = category(node.dtype) == "float" and not is_weak(node.dtype)
    return is_float and node.op not in _ROUNDED_ONCE and node.op not in _READ


@lru_cache(maxsize=1024)
def staging_of(expr: Expr, is_ragged: bool, in_pairs: bool = False) -> Staging:
    """in_pairs: what torch rounds by an element's place in a vector, and what depends on it, is computed for each pair."""
    deps, by_place = dependence(expr), [False] * len(expr.nodes)
    for at, node in enumerate(expr.nodes):
        by_place[at] = in_pairs and (_is_approximate(node) or any(by_place[a] for a in node.args))
    stage = []
    for at, d in enumerate(deps):
        if d.score or by_place[at]:
            stage.append("tile")
        elif d.per_head:
            stage.append("per_head")
        elif d.diagonal and not (is_ragged and d.b):
            stage.append("diagonal")
        elif d.q and d.kv:
            stage.append("tile")
        else:
            stage.append("row" if d.q else "entry_col" if is_ragged and d.b else "col")
    schedule = tuple(i for i, s in enumerate(stage) if s == "tile" and expr.nodes[i].op != "score")
    read = {a for i in schedule for a in expr.nodes[i].args} | set(expr.outputs)
    last_use = [-1] * len(expr.nodes)
    for i in schedule:
        for a in expr.nodes[i].args:
            last_use[a] = i
    for o in expr.outputs:
        last_use[o] = len(expr.nodes)
    boundary = tuple(i for i in sorted(read) if stage[i] != "tile")
    hoisted = tuple(i for i in boundary if expr.nodes[i].op != "index")
    operands = frozenset(i for i in schedule if expr.nodes[i].op != "load" and any(expr.nodes[a].op == "index" for a in expr.nodes[i].args))
    return Staging(tuple(stage), boundary, hoisted, schedule, operands, tuple(last_use))


@lru_cache(maxsize=1024)
def has_diagonals(expr: Expr) -> bool:
    return any(d.diagonal for d in dependence(expr))


class Bound:
    """An expression with its captured values and lengths; ``on(tile, score)`` returns its outputs on a tile."""

    def __init__(
        self,
        expr: Expr,
        scalars: Sequence,
        tensors: Sequence[Tensor],
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        device: torch.device,
        sequences: Sequences | None = None,
        in_pairs: bool = False,
    ):
        expr = expr.without_detach  # a detach result would share the operand's memory
        self.expr, self.tensors = expr, tensors
        self.staging = staging_of(expr, sequences is not None, in_pairs)
        # entry y of a diagonal vector holds the value at q - kv = greatest_difference - y
        self.greatest_difference = seqlen_q - 1 if sequences is None else sequences.end_position - 1
        self.hoisted: dict[int, Any] = {}
        self._descending: dict[int, Tensor] = {}  # rows in reverse order
        if min(batch, heads, seqlen_q, seqlen_k) == 0 or (sequences is not None and not sequences.has_pairs):
            return
        self._sizes, self._device, self._sequences = (batch, heads, seqlen_q, seqlen_k), device, sequences
        for stage in dict.fromkeys(self.staging.stage[i] for i in self.staging.hoisted):
            wanted = tuple(i for i in self.staging.hoisted if self.staging.stage[i] == stage)
            self.hoisted.update(zip(wanted, map(_in_four, run(_only(expr, wanted), self._leaves(stage), scalars, tensors)), strict=True))

    def _leaves(self, stage: str) -> dict[str, Any]:
        """The indices of a stage."""
        (batch, heads, seqlen_q, seqlen_k), device, sequences = self._sizes, self._device, self._sequences
        b = _positions(batch, -4, device) if sequences is None else sequences.asked_entry.view(-1, 1, 1, 1)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        q: Any = zero
        kv: Any = zero
        if stage == "col":
            kv = _positions(seqlen_k if sequences is None else sequences.longest_asked_k, -1, device)
        elif stage == "diagonal":
            least = 1 - seqlen_k if sequences is None else sequences.least_difference
            q = torch.arange(self.greatest_difference, least - 1, -1, device=device)
        elif stage == "row" and sequences is None:
            q = _positions(seqlen_q, -2, device)
        elif stage == "row":
            assert sequences is not None
            b, q = (x.view(-1, 1) for x in sequences.asked_rows)
        elif stage == "entry_col":
            assert sequences is not None
            b, kv = sequences.asked_keys
        return {"b": b, "h": _positions(heads, -3, device), "q_idx": q, "kv_idx": kv, "score": None}

    @property
    def is_plain_load(self) -> bool:
        """Whether the only output is a load at constants and different indices."""
        nodes = self.expr.nodes
        output = nodes[self.expr.outputs[0]]
        indices = [a for a in output.args if nodes[a].op == "index"]
        is_plain = all(nodes[a].op in ("index", "const") for a in output.args)
        return output.op == "load" and is_plain and len(set(indices)) == len(indices)

    def place(self, node: int, tile: Tile) -> Any:
        """``part``; of an index, its positions."""
        name, n = self.expr.nodes[node].attr, tile
        if self.expr.nodes[node].op != "index":
            return self.part(node, tile)
        limits = {
            "b": (n.b_lo, n.b_hi),
            "h": (n.h_lo, n.h_hi),
            "q_idx": (n.q_first + n.q_lo, n.q_first + n.q_hi),
            "kv_idx": (n.k_lo, n.k_hi),
        }
        lo, hi = limits[name]  # type: ignore[index]
        return Positions(lo, hi - lo, _DIMS[name], partial(self.part, node, tile), descends=n.descends and name == "q_idx")  # type: ignore[index]

    def part(self, node: int, tile: Tile) -> Any:
        """A hoisted node's value on a tile, as a view that broadcasts to the tile's shape."""
        stage, value = self.staging.stage[node], self.value(node)
        if not isinstance(value, Tensor) or value.ndim == 0:
            return value
        rows, keys = tile.shape[2:]
        if stage in ("row", "entry_col") and tile.is_stacked:
            value = tile.rows_of(_view(value, tile), 2) if stage == "row" else tile.keys_of(_view(value, tile), 3)
            return value.flip(2) if stage == "row" and tile.descends else value
        if stage == "row" and tile.descends:
            if node not in self._descending:
                self._descending[node] = value.flip(2)
            return _view(self._descending[node], tile, value.shape[2] - tile.row_base - tile.q_hi, (rows, 1))
        if stage == "row":
            return _view(value, tile, tile.row_base + tile.q_lo, (rows, 1))
        if stage == "diagonal":
            assert tile.descends, "the call's mods have no diagonals"
            return _view(value, tile, self._first_diagonal(tile), (rows, keys))
        start = tile.k_lo if stage == "col" else tile.key_base + tile.k_lo if stage == "entry_col" else 0
        return _view(value, tile, start, (1, 1 if stage == "per_head" else keys))

    def value(self, node: int) -> Any:
        """A hoisted node's value on all tiles, as the module's table says, with four dimensions; or a number."""
        value = self.hoisted.get(node)
        if value is None:  # an index, made where it is read
            index = self._leaves(self.staging.stage[node])[self.expr.nodes[node].attr]  # type: ignore[index]
            value = self.hoisted[node] = _in_four(as_operand(index))
        return value

    def _first_diagonal(self, tile: Tile) -> int:
        """The place of the tile's first diagonal in diagonal vectors: row r (descending), column c reads the entry r + c after it."""
        return self.greatest_difference + 1 - tile.q_first - tile.q_hi + tile.k_lo

    def along_diagonals(self, tile: Tile) -> list[Any]:
        """The outputs, all of stage per_head or diagonal, on the diagonals of ``tile``: (b, h, 1, rows + columns - 1)."""
        width = tile.q_hi - tile.q_lo + tile.k_hi - tile.k_lo - 1
        is_diagonal = [self.staging.stage[o] == "diagonal" for o in self.expr.outputs]
        return [
            _view(self.hoisted[o], tile, self._first_diagonal(tile), (1, width)) if along else self.part(o, tile)
            for o, along in zip(self.expr.outputs, is_diagonal, strict=True)
        ]

    def on(self, tile: Tile, score: Tensor | None = None, owns_score: bool = False) -> list[Any]:
        """The outputs on ``tile``; with ``owns_score`` the score's memory may be overwritten."""
        nodes, last_use = self.expr.nodes, self.staging.last_use
        values: dict[int, Any] = {i: self.place(i, tile) for i in self.staging.boundary}
        mine: set[int] = set()
        for i, node in enumerate(nodes):
            if node.op == "score":
                values[i] = score
                if owns_score:
                    mine.add(i)
        for i in self.staging.schedule:
            node = nodes[i]
            args = [values[a] for a in node.args]
            if i in self.staging.operands:
                args = [as_operand(a) for a in args]
            value = by_bits(node, args) if node.op in BY_BITS else None
            target = next((a for a in node.args if a in mine and last_use[a] == i and nodes[a].dtype == node.dtype), None)
            if value is None and target is not None and node.op in _IN_PLACE and _fits(values[target], args):
                values[i] = TORCH_OPS[node.op](*_operands(args, values[target]), out=values[target])
                mine.discard(target)
                mine.add(i)
            else:
                values[i] = apply(node, args, self.tensors) if value is None else value
                if isinstance(values[i], Tensor) and values[i].shape == tile.shape and node.op not in ("load", "cast"):
                    mine.add(i)
        return [as_operand(values[o]) for o in self.expr.outputs]


def _in_four(value: Any) -> Any:
    return value[(None,) * (4 - value.ndim)] if isinstance(value, Tensor) and 0 < value.ndim < 4 else value


def _view(value: Tensor, tile: Tile, first: int = 0, last: tuple[int, int] | None = None) -> Tensor:
    """``value`` at the batch entries and heads of ``tile``. last: the last two dimensions of the result; both run along the longer of the
    value's, from ``first`` on."""
    shape, strides, offset = list(value.shape), list(value.stride()), value.storage_offset()
    for dim, lo, hi in ((0, tile.b_lo, tile.b_hi), (1, tile.h_lo, tile.h_hi)):
        if shape[dim] != 1:
            offset += lo * strides[dim]
            shape[dim] = hi - lo
    if last is not None:
        step = strides[3] if shape[2] == 1 else strides[2]
        shape[2:], strides[2:] = last, (step, step)
        offset += first * step
    return value.as_strided(shape, strides, offset)


def _positions(count: int, dim: int, device: torch.device) -> Positions:
    return Positions(0, count, dim, lambda: torch.arange(count, device=device).view(-1, *(1,) * (-1 - dim)))


def _fits(target: Tensor, args: list[Any]) -> bool:
    return all(not isinstance(a, Tensor) or a is target or a.ndim <= target.ndim for a in args)


def _operands(args: list[Any], like: Tensor) -> list[Any]:
    return [a if isinstance(a, Tensor) else torch.full((), a, dtype=like.dtype, device=like.device) for a in args]


@lru_cache(maxsize=1024)
def _only(expr: Expr, outputs: tuple[int, ...]) -> Expr:
    builder = Builder()
    return builder.build(*(builder.copy(expr, o) for o in outputs))


def stage_of(expr: Expr, is_ragged: bool) -> str:
    """The stage of the only output of ``expr``."""
    expr = expr.without_detach
    return staging_of(expr, is_ragged).stage[expr.outputs[0]]


def bind(expr: Expr, scalars: Sequence, tensors: Sequence[Tensor], problem: Problem, in_pairs: bool = False) -> Bound:
    """``expr`` prepared for the tiles of ``problem``; for a KV cache with operations whose
    rounding does not depend on the rest of the batch. in_pairs: of ``staging_of``."""
    expr = with_choices(expr, tensors)
    if problem.sequences is not None and problem.sequences.is_cache and not in_pairs:
        expr = steady(expr)
    sizes = (problem.batch, problem.heads_q, problem.seqlen_q, problem.seqlen_k)
    return Bound(expr, scalars, tensors, *sizes, problem.q.device, problem.sequences, in_pairs)
