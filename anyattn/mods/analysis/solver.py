"""Solver of masks for kv_idx: turns a boolean expression into ranges ``lo <= kv_idx < hi`` whose limits do not depend on kv_idx.

The derivation reads the IR only. A comparison becomes ``T(kv) >= e`` or ``T(kv) < e`` with ``e`` independent of kv_idx, and T is then
inverted step by step (``A // n >= e`` is ``A >= e * n``, ``abs(A) < e`` is ``A < e & A >= 1 - e``, ...) until only ``kv_idx`` is left. A
captured id tensor indexed by kv_idx is replaced by derived tensors with the start and the end of each id's run (``id_runs.py``).

These are the rules of unbounded integers. The user's arithmetic is transformed only where it cannot wrap around (``extents.py``); a
subexpression without kv_idx is computed as the user wrote it, with torch's wrap-around. The solver's own arithmetic never wraps: a limit
that is too large is clamped to the largest one with the same effect, and if that is not possible the mask has no ranges.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyattn.mods.analysis import id_runs
from anyattn.mods.analysis.evaluate import apply, run
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import MIRRORED, Builder, category
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Box, Extent, exact, extent_of, extents, unwrapped
from anyattn.mods.tracing.trace import TracedMod

__all__ = ["NO_LIMIT", "NotRangesError", "Range", "Ranges", "Solver"]

NO_LIMIT = 2**31 - 1  # hi of a range without an upper limit; no sequence is longer
_MAX_INTERMEDIATE = 12
_NEAR = 2**61  # sums of three such numbers, and products with small ones, fit int64
_OPPOSITE = {"eq": "ne", "ne": "eq", "lt": "ge", "ge": "lt", "gt": "le", "le": "gt"}

Range = tuple[int | None, int | None]  # (lo, hi) as positions in the output builder; None is no limit on that side
Ranges = list[Range]


class NotRangesError(Exception):
    """The mask is not a short union of ranges, or the derivation does not find one."""


class Solver:
    """Solves boolean nodes of one mask for kv_idx; the limits are built in ``out``."""

    def __init__(self, mod: TracedMod, held: tuple[Extent | None, ...] = ()) -> None:
        """held: the least and greatest entry of each captured tensor; None if unknown."""
        self.mod, self.nodes, self.deps = mod, mod.expr.nodes, dependence(mod.expr)
        self.box = Box.of_numbers(2**MOST_INDEX_BITS, mod.scalars)._replace(tensors=held)
        self.extents, self.exact = extents(mod.expr, self.box), exact(mod.expr, self.box)
        self.plain = unwrapped(mod.expr, self.box)
        self.out = Builder()
        self.reach: list[tuple[Extent | None, bool]] = []  # extent and exactness of each node of ``out``
        self.tensors = list(mod.tensors)
        self.conditions: dict[int, int] = {}  # hi of a range that is everything or nothing -> the condition for everything

    # -- building limits
    def number(self, value: int) -> int:
        return self.out.const(value, torch.int64)

    def lower(self, lo: int | None) -> int:
        return self.number(0) if lo is None else lo

    def upper(self, hi: int | None) -> int:
        return self.number(NO_LIMIT) if hi is None else hi

    def free(self, node: int) -> int:
        """A node that does not depend on kv_idx, copied as the user wrote it."""
        return self.out.copy(self.mod.expr, node)

    def whole(self, node: int) -> int:
        """An integer that does not depend on kv_idx, as int64. If it may wrap around from row to row it is made opaque (``& -1``): it is
        not linear, and ``Dep.slope`` must find no slope."""
        found = self.out.cast(self.free(node), torch.int64)
        return found if self.plain[node] or not self.deps[node].q else self.out.add("and", found, self.number(-1))

    def extent(self, position: int) -> Extent:
        """The extent of a limit, or of another integer node of ``out``."""
        return self._reach(position)[0] or Extent(-(2**63), 2**63 - 1)

    def _reach(self, position: int) -> tuple[Extent | None, bool]:
        nodes, box = self.out.nodes, self.box._replace(tensors=(*self.box.tensors, *[None] * len(self.tensors)) if self.box.tensors else ())
        for node in nodes[len(self.reach) : position + 1]:
            self.reach.append(extent_of(node, [nodes[a].dtype for a in node.args], [self.reach[a][0] for a in node.args], box))
        return self.reach[position]

    def sure(self, op: str, *args: int) -> int:
        """An operation of the solver's own; raises ``NotRangesError`` if its result may wrap around."""
        made = self.out.add(op, *args)
        if not self._reach(made)[1]:
            raise NotRangesError
        return made

    def plus(self, node: int, amount: int) -> int:
        """node + amount, with literals folded."""
        this = self.out.nodes[node]
        if amount == 0:
            return node
        if this.op == "const" and abs(this.attr + amount) < 2**63:  # type: ignore[operator]
            return self.number(this.attr + amount)  # type: ignore[operator]
        if this.op == "add" and self.out.nodes[this.args[1]].op == "const" and self._reach(node)[1]:
            return self.plus(this.args[0], self.out.nodes[this.args[1]].attr + amount)  # type: ignore[operator]
        return self.sure("add", node, self.number(amount))

    def between(self, node: int, lo: int, hi: int) -> int:
        """node, clamped to lo..hi."""
        extent, this = self.extent(node), self.out.nodes[node]
        if this.op == "const":
            return self.number(max(lo, min(this.attr, hi)))  # type: ignore[type-var, call-overload]
        node = node if extent.hi <= hi else self.out.add("min", node, self.number(hi))
        return node if extent.lo >= lo else self.out.add("max", node, self.number(lo))

    def in_sight(self, bound: int, node: int) -> int:
        """``bound`` of a comparison ``node >= bound``, clamped to the extent of ``node`` if it
        is far; the comparison has the same results."""
        extent, own = self.extents[node], self.extent(bound)
        if own.lo >= -_NEAR and own.hi <= _NEAR:
            return bound
        if extent is None or extent.lo < -_NEAR or extent.hi > _NEAR:
            raise NotRangesError
        return self.between(bound, extent.lo, extent.hi + 1)

    def pick(self, op: str, a: int | None, b: int | None, none_wins: bool) -> int | None:
        """min or max of two limits. none_wins: whether None (no limit) is the result or is ignored."""
        if a is None or b is None:
            return None if none_wins else (a if b is None else b)
        if a == b:
            return a
        left, right = self.out.nodes[a], self.out.nodes[b]
        if left.op == right.op == "const":
            return self.number((min if op == "min" else max)(left.attr, right.attr))  # type: ignore[type-var, call-overload]
        return self.out.add(op, a, b)

    # -- sets of ranges
    def when(self, condition: int) -> Ranges:
        literal = self.out.nodes[condition]
        if literal.op == "const":
            return [(None, None)] if literal.attr else []
        hi = self.out.add("where", condition, self.number(NO_LIMIT), self.number(0))
        self.conditions[hi] = condition
        return [(None, hi)]

    def intersect(self, a: Ranges, b: Ranges) -> Ranges:
        pairs = [(self.pick("max", x[0], y[0], False), self.pick("min", x[1], y[1], False)) for x in a for y in b]
        return self._few([(lo, hi) for lo, hi in pairs if lo is None or lo != hi])

    def union(self, a: Ranges, b: Ranges) -> Ranges:
        for some, rest in ((a, b), (b, a)):
            if len(some) == 1 and some[0][0] is None and some[0][1] in self.conditions and rest:
                condition, (lo, hi) = self.conditions[some[0][1]], rest[0]  # type: ignore[index, call-overload]
                return [self._select(condition, (None, None), (lo, hi)), *rest[1:]]
        result = list(a)
        for lo, hi in b:
            for i, (other_lo, other_hi) in enumerate(result):
                if lo == other_lo:
                    result[i] = (lo, self.pick("max", hi, other_hi, True))
                elif hi == other_hi:  # if one range is empty its lo is beyond hi, and min ignores it
                    result[i] = (self.pick("min", lo, other_lo, True), hi)
                else:
                    continue
                break
            else:
                result.append((lo, hi))
        return self._few(result)

    def _select(self, condition: int, x: Range, y: Range) -> Range:
        where = self.out.add
        lo = None if x[0] is None and y[0] is None else where("where", condition, self.lower(x[0]), self.lower(y[0]))
        hi = None if x[1] is None and y[1] is None else where("where", condition, self.upper(x[1]), self.upper(y[1]))
        return lo, hi

    def select(self, condition: int, a: Ranges, b: Ranges) -> Ranges:
        nothing = (None, self.number(0))
        length = max(len(a), len(b))
        pad = lambda r: [*r, *[nothing] * (length - len(r))]  # noqa: E731
        return [self._select(condition, x, y) for x, y in zip(pad(a), pad(b), strict=True)]

    def _few(self, ranges: Ranges) -> Ranges:
        if len(ranges) > _MAX_INTERMEDIATE:
            raise NotRangesError
        return ranges

    # -- boolean nodes
    def solve(self, node: int, want: bool) -> Ranges:
        """The keys at which the boolean ``node`` is ``want``."""
        this = self.nodes[node]
        if not self.deps[node].kv:
            condition = self.free(node)
            return self.when(condition if want else self.out.add("not", condition))
        if this.op == "not":
            return self.solve(this.args[0], not want)
        if this.op in ("and", "or"):
            combine = self.intersect if (this.op == "and") == want else self.union
            return combine(self.solve(this.args[0], want), self.solve(this.args[1], want))
        if this.op == "where":
            return self._solve_where(this.args, want)
        if this.op == "load":
            return self._bool_load(node, want)
        if this.op == "cast" and category(self.nodes[this.args[0]].dtype) == "int":
            return self.compare("ne" if want else "eq", this.args[0], None)
        if this.op == "xor" or (this.op in ("eq", "ne") and self.nodes[this.args[0]].dtype is torch.bool):
            a, b = this.args
            same = (this.op == "eq") == want
            return self.union(
                self.intersect(self.solve(a, True), self.solve(b, same)), self.intersect(self.solve(a, False), self.solve(b, not same))
            )
        if this.op in _OPPOSITE and category(self.nodes[this.args[0]].dtype) == "int":
            return self.compare(this.op if want else _OPPOSITE[this.op], *this.args)
        raise NotRangesError

    def _solve_where(self, args: tuple[int, ...], want: bool) -> Ranges:
        condition, yes, no = args
        return self._choose(condition, lambda: self.solve(yes, want), lambda: self.solve(no, want))

    def _choose(self, condition: int, yes: Callable[[], Ranges], no: Callable[[], Ranges]) -> Ranges:
        if not self.deps[condition].kv:
            return self.select(self.free(condition), yes(), no())
        return self.union(self.intersect(self.solve(condition, True), yes()), self.intersect(self.solve(condition, False), no()))

    # -- comparisons of integers
    def compare(self, op: str, left: int, right: int | None) -> Ranges:
        """The keys at which ``left op right`` (right None: 0)."""
        terms: dict[int, int] = {}
        rest: list[tuple[int, int]] = []
        self._linear(left, 1, terms, rest)
        if right is not None:
            self._linear(right, -1, terms, rest)
        return self._solve_linear(op, terms, rest)

    def _linear(self, node: int, factor: int, terms: dict[int, int], rest: list[tuple[int, int]]) -> None:
        """Adds ``factor * node`` to ``terms`` (node -> factor, parts that depend on kv_idx) and ``rest`` (factor, output node)."""
        this = self.nodes[node]
        if not self.deps[node].kv:
            rest.append((factor, self.whole(node)))
            return
        if not self.exact[node]:
            terms[node] = terms.get(node, 0) + factor
            return
        if this.op in ("add", "sub", "neg"):
            self._linear(this.args[0], -factor if this.op == "neg" else factor, terms, rest)
            if this.op != "neg":
                self._linear(this.args[1], factor if this.op == "add" else -factor, terms, rest)
            return
        if this.op == "mul":
            for a, b in (this.args, this.args[::-1]):
                if self.nodes[b].op == "const":
                    return self._linear(a, factor * self.nodes[b].attr, terms, rest)  # type: ignore[operator]
        if this.op == "cast" and category(self.nodes[this.args[0]].dtype) == "int":  # exact, so the value fits the dtype
            return self._linear(this.args[0], factor, terms, rest)
        terms[node] = terms.get(node, 0) + factor

    def _sum(self, rest: list[tuple[int, int]], sign: int, reach: int) -> int:
        """``sign`` times the sum of ``rest``, for a comparison with numbers up to ``reach``; uses as few negations as possible."""
        parts = [(sign * f, n) for f, n in rest if self.out.nodes[n].op != "const"]
        literal = sum(sign * f * self.out.nodes[n].attr for f, n in rest if self.out.nodes[n].op == "const")  # type: ignore[operator, misc]
        literal = self._bring_near(parts, literal, reach + 2)
        total = None
        for factor, node in sorted(parts, key=lambda item: item[0] < 0):
            if abs(factor) != 1:
                node = self.sure("mul", node, self.number(abs(factor)))
            if total is None:
                total = node if factor > 0 else self.sure("neg", node)
            else:
                total = self.sure("add" if factor > 0 else "sub", total, node)
        return self.number(literal) if total is None else self.plus(total, literal)

    def _bring_near(self, parts: list[tuple[int, int]], literal: int, reach: int) -> int:
        """Returns the literal of a sum, and changes in ``parts`` the one part that may be far from 0, such as a captured sentinel: both are
        clamped so that they can be added without wrapping, but stay large enough to decide against
        the other parts and numbers up to ``reach``."""
        sizes = [abs(f) * max(-self.extent(n).lo, self.extent(n).hi, 0) for f, n in parts]
        far = [i for i, size in enumerate(sizes) if size > _NEAR // 4]
        is_far = abs(literal) > _NEAR // 4
        rest = reach + sum(size for i, size in enumerate(sizes) if i not in far) + abs(literal) * (not is_far)
        if not far and not is_far:
            return literal
        if len(far) + is_far > 1 or rest > _NEAR:
            raise NotRangesError
        room = max(2**40, 1 << rest.bit_length())
        if is_far:
            return max(-room, min(literal, room))
        factor, node = parts[far[0]]
        if abs(factor) != 1:
            raise NotRangesError
        parts[far[0]] = factor, self.between(node, -room, room)
        return literal

    def _solve_linear(self, op: str, terms: dict[int, int], rest: list[tuple[int, int]]) -> Ranges:
        """The keys at which ``sum(factor * term) + rest op 0``."""
        terms = {t: f for t, f in terms.items() if f}
        if not terms:
            return self.when(self.out.add(op, self._sum(rest, 1, 0), self.number(0)))
        if len(terms) > 1:
            raise NotRangesError
        ((term, factor),) = terms.items()
        extent = self.extents[term]
        assert extent is not None  # terms are integers
        if len(rest) == 1 and abs(rest[0][0]) == 1 and rest[0][0] * factor < 0:  # the bound as the user wrote it, of any size
            bound = rest[0][1]
        else:
            bound = self._sum(rest, -1 if factor > 0 else 1, abs(factor) * max(-extent.lo, extent.hi))
        op = MIRRORED[op] if factor < 0 else op
        return self._solve_term(op, term, abs(factor), bound)

    def _solve_term(self, op: str, term: int, factor: int, bound: int) -> Ranges:
        """The keys at which ``factor * term op bound``, factor > 0."""
        if op in ("eq", "ne"):
            if factor == 1 and self.nodes[term].op == "load":
                return self._load_equal(term, bound, op == "eq")
            below, from_next = self._solve_term("lt", term, factor, bound), self._solve_term("gt", term, factor, bound)
            if op == "ne":
                return self.union(below, from_next)
            return self.intersect(self._solve_term("ge", term, factor, bound), self._solve_term("le", term, factor, bound))
        extent, own = self.extents[term], self.extent(bound)
        if own.lo < -_NEAR or own.hi > _NEAR:  # bounds just outside the extent of factor * T give the same result
            assert extent is not None
            if max(-extent.lo, extent.hi) * factor > _NEAR:
                raise NotRangesError
            bound = self.between(bound, factor * extent.lo - 1, factor * extent.hi + 1)
        if op in ("gt", "le"):  # T > e is T >= e + 1
            bound = self.plus(bound, 1)
        if factor != 1:  # factor * T >= e is T >= ceil(e / factor); likewise for T < e
            bound = self.plus(self.sure("floordiv", self.plus(bound, -1), self.number(factor)), 1)
        return self.threshold(term, op in ("gt", "ge"), bound)

    def threshold(self, node: int, at_least: bool, bound: int) -> Ranges:
        """The keys at which ``node >= bound`` (``at_least``) or ``node < bound``."""
        this = self.nodes[node]
        op = "ge" if at_least else "lt"
        if not self.deps[node].kv:
            return self.when(self.out.add(op, self.whole(node), bound))
        if this.op == "index":
            return [(bound, None)] if at_least else [(None, bound)]
        if this.op == "where" or (this.op == "cast" and self.nodes[this.args[0]].dtype is torch.bool):
            return self._threshold_where(node, at_least, bound)
        if this.op == "load":
            return self._load_threshold(node, at_least, bound)
        if this.op in ("min", "max"):
            combine = self.union if (this.op == "max") == at_least else self.intersect
            return combine(self.threshold(this.args[0], at_least, bound), self.threshold(this.args[1], at_least, bound))
        if not self.exact[node]:
            raise NotRangesError
        bound = self.in_sight(bound, node)
        if this.op == "abs":
            below = self.plus(self.sure("neg", bound), 1)
            combine = self.union if at_least else self.intersect
            return combine(self.threshold(this.args[0], at_least, bound), self.threshold(this.args[0], not at_least, below))
        if this.op in ("floordiv", "mul"):
            return self._threshold_scaled(node, at_least, bound)
        terms: dict[int, int] = {}
        rest: list[tuple[int, int]] = []
        self._linear(node, 1, terms, rest)
        if node in terms:
            raise NotRangesError
        return self._solve_linear(op, terms, [*rest, (-1, bound)])

    def _threshold_where(self, node: int, at_least: bool, bound: int) -> Ranges:
        this = self.nodes[node]
        if this.op == "where":
            condition, yes, no = this.args
            return self._choose(condition, lambda: self.threshold(yes, at_least, bound), lambda: self.threshold(no, at_least, bound))
        op = "ge" if at_least else "lt"
        value = lambda v: self.when(self.out.add(op, self.number(v), bound))  # noqa: E731
        return self._choose(this.args[0], lambda: value(1), lambda: value(0))

    def _literal(self, node: int) -> int | None:
        """The value of an integer computed only from captured numbers and literals; None for any other node."""
        builder = Builder()
        number = builder.build(builder.copy(self.mod.expr, node))
        if any(n.op in ("index", "load") for n in number.nodes):
            return None
        value = run(number, {}, self.mod.scalars, ())[0]
        value = value.item() if isinstance(value, Tensor) else value
        return value if isinstance(value, int) else None

    def _threshold_scaled(self, node: int, at_least: bool, bound: int) -> Ranges:
        """``threshold`` for ``A // n`` and ``A * n`` with a captured or literal n; a negative n reverses the comparison."""
        this = self.nodes[node]
        a, b = this.args
        if this.op == "mul" and self._literal(b) is None:
            a, b = b, a
        size = self._literal(b)
        if size is None or size == 0:
            raise NotRangesError
        n = self.whole(b)
        if this.op == "floordiv":
            if size < 0:
                raise NotRangesError
            return self.threshold(a, at_least, self.sure("mul", bound, n))
        if size > 0:
            return self.threshold(a, at_least, self.plus(self.sure("floordiv", self.plus(bound, -1), n), 1))
        return self.threshold(a, not at_least, self.plus(self.sure("floordiv", bound, n), 1))

    # -- captured tensors indexed by kv_idx
    def _table(self, node: int) -> tuple[Tensor, tuple[int, ...]]:
        """The tensor of a load with the dimension that kv_idx indexes moved last, and the (output) nodes of its other indices."""
        this = self.nodes[node]
        at = [d for d, a in enumerate(this.args) if self.deps[a].kv]
        if len(at) != 1 or self.nodes[this.args[at[0]]].op != "index":
            raise NotRangesError
        others = tuple(self.free(a) for d, a in enumerate(this.args) if d != at[0])
        return self.mod.tensors[this.attr].detach().movedim(at[0], -1), others  # type: ignore[index, call-overload]

    def _derived(self, tensor: Tensor, indices: tuple[int, ...]) -> int:
        self.tensors.append(tensor)
        return self.out.add("load", *indices, dtype=tensor.dtype, attr=len(self.tensors) - 1)

    def _bool_load(self, node: int, want: bool) -> Ranges:
        table, others = self._table(node)
        for value in (want, not want):
            found = id_runs.run_of(table, value)
            if found is not None:
                start, end = (self._derived(t, others) for t in found)
                return [(start, end)] if value == want else [(None, start), (end, None)]
        raise NotRangesError

    def _load_equal(self, node: int, bound: int, equal: bool) -> Ranges:
        found = self._find(node, bound, id_runs.equal_runs)
        if found is None:
            raise NotRangesError
        start, end = found
        return [(start, end)] if equal else [(None, start), (end, None)]

    def _load_threshold(self, node: int, at_least: bool, bound: int) -> Ranges:
        found = self._find(node, bound, id_runs.first_at_least)
        if found is None:
            raise NotRangesError
        return [(found[0], None)] if at_least else [(None, found[0])]

    def _find(self, node: int, bound: int, search: Callable[[Tensor, Tensor, bool], tuple[Tensor, ...] | None]) -> tuple[int, ...] | None:
        """The positions of the values of ``bound`` in the table of ``node``, as loads from derived tensors.

        ``bound`` is a captured or literal number, or computed from one load of a captured tensor; so all its values are known, and the
        result is a tensor of the same shape, loaded with the same indices.
        """
        table, others = self._table(node)
        if table.dtype.is_floating_point or table.dtype is torch.bool:
            return None
        table = table.to(torch.int64) if table.dtype in (torch.uint16, torch.uint32) else table  # torch cannot compare uint16 and uint32
        wanted = self._values_of(bound)
        if wanted is None:
            return None
        values, indices = wanted
        lead = len(others)
        paired = indices[:lead] == others and values.shape[:lead] == table.shape[:lead]
        if not paired:  # searches every value in every row of the table
            if table[..., :1].numel() * values.numel() > 2**26:
                return None
            values = values.expand(*table.shape[:-1], *values.shape)
            indices = (*others, *indices)
        found = search(table, values.to(table.device), self._same_tensor(node, bound) and paired)
        return None if found is None else tuple(self._derived(t, indices) for t in found)

    def _same_tensor(self, node: int, bound: int) -> bool:
        """Whether ``bound`` is the tensor of ``node`` itself, without arithmetic: then table and values have the same positions."""
        this = self.out.nodes[bound]
        while this.op == "cast":
            this = self.out.nodes[this.args[0]]
        return this.op == "load" and this.attr == self.nodes[node].attr and self.deps[self.nodes[node].args[-1]].kv

    def _values_of(self, bound: int) -> tuple[Tensor, tuple[int, ...]] | None:
        """All values of ``bound``, and the indices that select one of them."""
        order, stack, loads = set(), [bound], set()
        while stack:
            position = stack.pop()
            this = self.out.nodes[position]
            order.add(position)
            if this.op == "index":
                return None
            if this.op == "load":
                loads.add(position)
            else:
                stack.extend(this.args)
        if len(loads) > 1:
            return None
        values: dict[int, object] = {}
        for position in sorted(order):
            this = self.out.nodes[position]
            if this.op == "load":
                values[position] = self.tensors[this.attr].detach()  # type: ignore[index, call-overload]
            elif this.op in ("const", "scalar"):
                values[position] = this.attr if this.op == "const" else self.mod.scalars[this.attr]  # type: ignore[index, call-overload]
            else:
                values[position] = apply(this, [values[a] for a in this.args], self.tensors)
        result = values[bound]
        indices = self.out.nodes[next(iter(loads))].args if loads else ()
        return (result if isinstance(result, Tensor) else torch.tensor(result, device="cpu")).to(torch.int64), indices
