"""C++ emitter: the mods of a call as one loop over the keys of a row.

What does not change from pair to pair is computed before, by torch (``mod_runner.Bound``): the loop reads it as one number per row, or as a
vector along the keys or along q_idx - kv_idx. Only the operations of pairs are written as C++, with torch's dtypes and rounding; an
expression with an operation that this table does not have is not compiled. Equal expressions give equal text: captured values are
arguments.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.torch.compiled.backward_kernel import BACKWARD
from anyattn.backends.torch.compiled.forward_kernel import FORWARD, FORWARD_IN_ORDER
from anyattn.backends.torch.compiled.kernel import COMMON, PRELUDE
from anyattn.backends.torch.mod_runner import staging_of
from anyattn.mods.ir.expr import DType, Expr, Node, category, is_weak
from anyattn.mods.ir.extents import Box, extents, fits

__all__ = [
    "CAPTURED",
    "MOST_POSITIONS",
    "SCORE",
    "Load",
    "Loops",
    "NotCompiledError",
    "Source",
    "Table",
    "backward_loops_of",
    "loops_of",
    "stored_dtype",
]

MOST_POSITIONS = 2**28  # sums of a few positions fit 32 bits
_TYPES = {
    torch.bool: "i32", torch.uint8: "u8", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.float32: "f32", torch.float64: "f64",
}  # fmt: skip
_STORED = {**_TYPES, torch.bool: "u8", torch.bfloat16: "u16", torch.float16: "u16"}
_WIDENED = {torch.bfloat16: "from_bfloat16", torch.float16: "from_float16"}
_ROUNDED = {torch.bfloat16: "rounded_bfloat16", torch.float16: "rounded_float16"}
_UNROUNDED = frozenset(("where", "min", "max", "neg", "abs", "sign", "floor", "ceil", "trunc", "round"))  # of 16 bits: a result fits them
_COMPARE = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
_INFIX = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^"}
_FLOAT = {
    "div": "{0} / {1}", "neg": "-{0}", "abs": "absolute({0})", "sqrt": "root({0})", "rsqrt": "1 / root({0})", "reciprocal": "1 / {0}",
    "floor": "down({0})", "ceil": "up({0})", "trunc": "toward_zero({0})", "round": "to_even({0})", "min": "least({0}, {1})",
    "max": "most({0}, {1})", "sign": "(0 < {0}) - ({0} < 0)",
}  # fmt: skip
_WHOLE = {
    "sign": "(0 < {0}) - ({0} < 0)",
    "neg": "-{0}",
    "abs": "{0} < 0 ? -{0} : {0}",
    "min": "{0} < {1} ? {0} : {1}",
    "max": "{0} > {1} ? {0} : {1}",
}
_SINGLE = {"exp2": "exp2_({0})", "exp": "exp_({0})", "tanh": "tanh_({0})", "sigmoid": "sigmoid_({0})"}
# Functions of the C library for numbers that torch rounds by their place in a vector; never vectorised, for -ffast-math is not set
_OF_LIBRARY = (
    "exp", "exp2", "log", "log2", "log1p", "expm1", "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "erf", "pow", "atan2", "hypot",
)  # fmt: skip
_AHEAD = 6  # rows of a table of pairs that are asked from memory in advance
_MATH = r"""
INLINE f32 absolute(f32 x) { return __builtin_fabsf(x); }
INLINE f64 absolute(f64 x) { return __builtin_fabs(x); }
INLINE f32 root(f32 x) { return __builtin_sqrtf(x); }
INLINE f64 root(f64 x) { return __builtin_sqrt(x); }
INLINE f32 down(f32 x) { return __builtin_floorf(x); }
INLINE f64 down(f64 x) { return __builtin_floor(x); }
INLINE f32 up(f32 x) { return __builtin_ceilf(x); }
INLINE f64 up(f64 x) { return __builtin_ceil(x); }
INLINE f32 toward_zero(f32 x) { return __builtin_truncf(x); }
INLINE f64 toward_zero(f64 x) { return __builtin_trunc(x); }
INLINE f32 to_even(f32 x) { return __builtin_rintf(x); }
INLINE f64 to_even(f64 x) { return __builtin_rint(x); }
template <typename T> INLINE T least(T x, T y) { return (x < y) | (x != x) ? x : y; }
template <typename T> INLINE T most(T x, T y) { return (x > y) | (x != x) ? x : y; }
// e^x = 2^n e^f with f = x - n log(2) in two parts
INLINE f32 exp_(f32 x) {
  const f32 y = x < -104.0f ? -104.0f : (x > 90.0f ? 90.0f : x);
  const f32 n = y * 1.44269504088896341f + 12582912.0f - 12582912.0f;
  const f32 f = fma_(n, -1.42860677e-6f, fma_(n, -0.693145752f, y));
  f32 p = 1.9875691500e-4f;
  p = fma_(p, f, 1.3981999507e-3f);
  p = fma_(p, f, 8.3334519073e-3f);
  p = fma_(p, f, 4.1665795894e-2f);
  p = fma_(p, f, 1.6666665459e-1f);
  p = fma_(p, f, 5.0000001201e-1f);
  p = fma_(p * f, f, f) + 1.0f;
  const i32 whole = (i32)(n == n ? n : 0.0f), half = whole >> 1;
  return p * bits_to<f32>((u32)(half + 127) << 23) * bits_to<f32>((u32)(whole - half + 127) << 23);
}
INLINE f32 sigmoid_(f32 x) { return 1.0f / (1.0f + exp_(-x)); }
// near 0 by its series, as the quotient would lose digits there
INLINE f32 tanh_(f32 x) {
  const f32 size = absolute(x), y = size > 20.0f ? 20.0f : size, t = exp_(-2.0f * y), far = (1.0f - t) / (1.0f + t), z = x * x;
  f32 p = -5.70498872745e-3f;
  p = fma_(p, z, 2.06390887954e-2f);
  p = fma_(p, z, -5.37397155531e-2f);
  p = fma_(p, z, 1.33314422036e-1f);
  p = fma_(p, z, -3.33332819422e-1f);
  const f32 near = fma_(p * z, x, x);
  return size < 0.625f ? near : (x < 0.0f ? -far : far);
}
INLINE f32 rounded_bfloat16(f32 x) { return from_bfloat16(to_bfloat16(x)); }
INLINE f32 rounded_float16(f32 x) { return from_float16(to_float16(x)); }
INLINE i32 inside(i64 x, i64 size, i32 *bad) {
  x = x < 0 ? x + size : x;
  const i32 is_out = (u64)x >= (u64)size;
  *bad |= is_out;
  return is_out ? 0 : (i32)x;
}
INLINE i32 inside(i32 x, i32 size, i32 *bad) {
  x = x < 0 ? x + size : x;
  const i32 is_out = (u32)x >= (u32)size;
  *bad |= is_out;
  return is_out ? 0 : x;
}
"""


class NotCompiledError(Exception):
    """An expression that is not written as C++, for the reason that is the message."""


class Table(NamedTuple):
    """What the text assumes of a captured tensor. is_dense: its last dimension has stride 1."""

    dtype: torch.dtype
    ndim: int
    is_dense: bool


SCORE, CAPTURED = -1, -2


class Source(NamedTuple):
    """A mod to compile: its place among the predicates, SCORE or CAPTURED for the score mod and its derivatives; its expression as
    ``mod_runner.Bound`` has it, and its tensors."""

    mod: int
    expr: Expr
    tables: tuple[Table, ...]


class Load(NamedTuple):
    """One load that gets a gradient: the outputs of the derivative and of the indices. by_key: its last index is the key's position.
    by_head: an index is the head. is_alone: each of its values is read at one pair of the call only, and ``by_key``."""

    slot: int
    output: int
    indices: tuple[int, ...]
    by_key: bool
    by_head: bool
    is_alone: bool


@dataclass(frozen=True)
class Loops:
    """text: the whole C++ source. leaves: the nodes that torch computes, as (``Source.mod``, node), in the order of ``Args.leaves``.
    slots: the captured tensors that pairs load, as (``Source.mod``, slot), in the order of ``Args.tables``."""

    text: str
    leaves: tuple[tuple[int, int], ...]
    slots: tuple[tuple[int, int], ...]


@dataclass
class _Lines:
    row: list[str] = field(default_factory=list)
    pair: list[str] = field(default_factory=list)


def loops_of(sources: tuple[Source, ...], is_ragged: bool, in_order: bool = False) -> Loops:
    """The forward pass with a score mod, if any, and the predicates that are evaluated. in_order: a row's bits do not depend on other rows
    (``forward_kernel``). Raises ``NotCompiledError``."""
    shared = _Shared(in_pairs=in_order)
    text, _ = _modify(sources, is_ragged, shared, has_derivative=False)
    forward = FORWARD_IN_ORDER if in_order else FORWARD
    return Loops(PRELUDE + _constants(sources) + _MATH + text + COMMON + forward, tuple(shared.leaves), tuple(shared.slots))


def backward_loops_of(sources: tuple[Source, ...], captured: Source | None, loads: tuple[Load, ...], is_ragged: bool) -> Loops:
    """The backward pass. The score mod's source has a second output, the derivative by the score. captured, loads: the derivatives by
    loaded values. Raises ``NotCompiledError``."""
    shared = _Shared()
    modify, has_derivative = _modify(sources, is_ragged, shared, has_derivative=True)
    sums = "" if captured is None else _captured(captured, loads, is_ragged, shared)
    flags = f"#define HAS_DERIVATIVE {int(has_derivative)}\n#define HAS_CAPTURED {int(captured is not None)}\n"
    if captured is None:
        sums = "INLINE void captured(Args *, const Place *, const f32 *, i64, i64, i64) {}\n"
    text = PRELUDE + _constants(sources) + flags + _MATH + modify + COMMON + sums + BACKWARD
    return Loops(text, tuple(shared.leaves), tuple(shared.slots))


def _constants(sources: tuple[Source, ...]) -> str:
    return f"#define LOG2E {LOG2E!r}f\n#define LN2 {LN2!r}f\n#define HAS_SCORE {int(any(s.mod == SCORE for s in sources))}\n"


def _modify(sources: tuple[Source, ...], is_ragged: bool, shared: _Shared, has_derivative: bool) -> tuple[str, bool]:
    """The function ``modify``, and whether it writes derivatives that are not 1."""
    score_lines, value, derivative = _Lines(), "s[j]", ""
    score = next((s for s in sources if s.mod == SCORE), None)
    if score is not None:
        writer = _Writer(score, is_ragged, shared)
        score_lines, (value, *others) = writer.lines()
        value = f"{value} * LOG2E"
        if score.expr.nodes[score.expr.outputs[0]].dtype is not torch.float32:
            raise NotCompiledError("score that is no float32 number")
        if has_derivative and score.expr.nodes[score.expr.outputs[1]] != Node("const", (), torch.float32, 1.0):
            derivative = f"const f32 by_score = {others[0]};"
    rows, pairs, seen = list(score_lines.row), [], []
    for mask in sources:
        if mask.mod == SCORE:
            continue
        lines, (visible,) = _Writer(mask, is_ragged, shared).lines()
        rows += [*lines.row, f"const i32 ignored{mask.mod} = !(asked >> {mask.mod} & 1);"]
        pairs += lines.pair
        seen.append(f"({visible} | ignored{mask.mod})")
    bodies, ends = [], [derivative, "by[j] = by_score;"] if derivative else []
    if seen:
        hidden = f"s[j] = ({' & '.join(seen)}) != 0 ? (f32)({value}) : -INF;"
        bodies.append(_loop([*score_lines.pair, *pairs, *ends[:1], hidden, *ends[1:]], "if (asked) "))
    if score is not None:
        bodies.append(_loop([*score_lines.pair, *ends[:1], f"s[j] = {value};", *ends[1:]], "else " if seen else ""))
    name = "void modify(Args *a, const Place *p, f32 *__restrict__ s, f32 *__restrict__ by, i64 lo, i64 hi, i64 asked)"
    return _function(name, rows, bodies), bool(derivative)


def _captured(source: Source, loads: tuple[Load, ...], is_ragged: bool, shared: _Shared) -> str:
    """The function ``captured``, which adds the contributions of a row's derivatives ds to the gradients of loaded values."""
    writer = _Writer(source, is_ragged, shared)
    lines, names = writer.lines()
    if any(node.op == "score" for node in source.expr.nodes):
        raise NotCompiledError("derivative by a captured tensor that depends on the score")
    rows, bodies, first = [*lines.row, "const i64 *sums = (const i64 *)a->sums;"], [], 0
    for n, load in enumerate(loads):
        copy = (f"{n} * sums[{first + at}]" for at, n in enumerate(("p->b", "(p->h / a->ratio)", "(item % a->splits)"), 1))
        base, terms = [f"(f32 *)sums[{first}]", *copy], []
        for dim, index in enumerate(load.indices):
            stride, at = f"sums[{first + 4 + 2 * dim}]", source.expr.outputs[index]
            text = f"(i64){writer.place(at, f'sums[{first + 5 + 2 * dim}]')}"
            if load.by_key and dim == len(load.indices) - 1:  # contiguous
                terms.append(names[index])
            elif writer.stages[at] in ("per_head", "row"):
                base.append(f"{text} * {stride}")
            else:
                terms.append(f"{text} * {stride}")
        first += 4 + 2 * len(load.indices)
        factor = names[load.output]
        is_one = source.expr.nodes[source.expr.outputs[load.output]] == Node("const", (), torch.float32, 1.0)
        rows.append(f"f32 *to{n} = {' + '.join(base)};")
        part = "ds[j]" if is_one else f"(ds[j] == 0.0f ? 0.0f : ds[j] * {factor})"  # a derivative at a hidden pair is arbitrary
        if terms:
            bodies.append(_loop([*lines.pair, f"to{n}[{' + '.join(terms)}] += {part};"], "", "#pragma GCC ivdep" if load.by_key else ""))
        else:
            rows.append(f"f32 sum{n} = 0.0f;")
            bodies.append(
                _loop([*lines.pair, f"sum{n} += {part};"], "", f"#pragma omp simd reduction(+ : sum{n})") + f"\n  *to{n} += sum{n};"
            )
    return _function("void captured(Args *a, const Place *p, const f32 *__restrict__ ds, i64 lo, i64 hi, i64 item)", rows, bodies)


def _function(name: str, rows: list[str], bodies: list[str]) -> str:
    return "\n".join(
        [
            f"static {name} {{",
            "  const Leaf *leaf = (const Leaf *)a->leaves;",
            "  const i64 *table = (const i64 *)a->tables;",
            "  i32 bad = 0;",
            *(f"  {line}" for line in rows),
            *bodies,
            "  if (bad) a->bad = 1;",
            "}\n",
        ]
    )


def _loop(lines: list[str], condition: str, pragma: str = "#pragma GCC ivdep") -> str:
    body = "\n".join(f"    {line}" for line in lines)
    return f"  {condition}\n{pragma}\n  for (i32 j = (i32)lo; j < (i32)hi; ++j) {{\n{body}\n  }}"


@dataclass
class _Shared:
    """in_pairs: of ``mod_runner.staging_of``."""

    in_pairs: bool = False
    leaves: list[tuple[int, int]] = field(default_factory=list)
    slots: list[tuple[int, int]] = field(default_factory=list)
    sizes: int = 0  # numbers of ``Args.tables`` so far: of each slot the address, then stride and size of each dimension


class _Writer:
    """Writes one mod."""

    def __init__(self, source: Source, is_ragged: bool, shared: _Shared) -> None:
        self.source, self.expr, self.mod, self.shared = source, source.expr, source.mod, shared
        self.staging = staging_of(source.expr, is_ragged, shared.in_pairs)
        self.nodes, self.stages = source.expr.nodes, self.staging.stage
        self.prefix = {SCORE: "v", CAPTURED: "c"}.get(source.mod, f"m{source.mod}_")
        self.extents = extents(self.expr, Box.of_sizes(MOST_POSITIONS, None))
        self.found = _Lines()
        self.names: dict[int, str] = {}
        self.tables: dict[int, int] = {}

    def lines(self) -> tuple[_Lines, list[str]]:
        """The lines, and the texts of the outputs."""
        for at in self.staging.boundary:
            self.names[at] = self._leaf(at)
        for at, node in enumerate(self.nodes):
            if node.op == "score":
                self.names[at] = "s[j]"
        for at in self.staging.schedule:
            self.names[at] = f"{self.prefix}{at}"
            self.found.pair.append(f"const {self._type(at)} {self.prefix}{at} = {self._value(at)};")
        return self.found, [self.names[o] for o in self.expr.outputs]

    def _is_narrow(self, at: int) -> bool:
        """Whether an int64 node is computed in 32 bits."""
        return self.nodes[at].dtype is torch.int64 and fits(self.extents[at])

    def _type(self, at: int) -> str:
        return "i32" if self._is_narrow(at) else _type(self.nodes[at].dtype)

    def _line(self, name: str, type_: str, value: str) -> str:
        self.found.row.append(f"const {type_} {name} = {value};")
        return name

    def _leaf(self, at: int) -> str:
        """The text of a value that the loop reads: of an index, a literal, or a number or vector that torch has computed."""
        node, stage, name = self.nodes[at], self.stages[at], f"{self.prefix}{at}"
        if node.op == "index":
            return {"b": "(i32)p->asked", "h": "(i32)p->h", "q_idx": "(i32)p->q_idx", "kv_idx": "j"}[node.attr]  # type: ignore[index]
        if node.op == "const":
            return _literal(node)
        number = len(self.shared.leaves)
        self.shared.leaves.append((self.mod, at))
        stored = _STORED.get(stored_dtype(self.expr, at))
        if stored is None:
            raise NotCompiledError(f"values of dtype {node.dtype}")
        place = f"(const {stored} *)leaf[{number}].address + p->b * leaf[{number}].b + p->h * leaf[{number}].h"
        if stage in ("per_head", "row"):
            row = f" + p->row * leaf[{number}].s" if stage == "row" else ""
            return self._line(name, self._type(at), _read(stored_dtype(self.expr, at), f"*({place}{row})"))
        shift = {"col": "", "entry_col": " + p->key_base", "diagonal": " - p->q_idx"}[stage]
        self._line(name, f"{stored} *__restrict__", place + shift)
        value = _read(node.dtype, f"{name}[j]")
        return f"({self._type(at)})({value})" if self._is_narrow(at) else value

    def _value(self, at: int) -> str:
        node = self.nodes[at]
        if node.op == "load":
            return self._load(node)
        args = [self._operand(node, place) for place in range(len(node.args))]
        operand = self.nodes[node.args[-1]].dtype
        if is_weak(node.dtype) or is_weak(operand) or not {node.dtype, operand} <= _TYPES.keys() | _WIDENED.keys():
            raise NotCompiledError(f"{node.op} of {operand}")
        if node.op == "cast":
            return self._cast(at, args[0])
        if category(operand) == "int" and not all(self._is_narrow(a) or self.nodes[a].dtype is not torch.int64 for a in (at, *node.args)):
            args = [f"(i64){a}" if self.nodes[p].dtype is torch.int64 else a for a, p in zip(args, node.args, strict=True)]
        text = self._operation(node, args, category(operand))
        return f"({self._type(at)})({text})" if node.op in _UNROUNDED else _rounded(node.dtype, f"({self._type(at)})({text})")

    def _operand(self, node: Node, place: int) -> str:
        """An argument. torch rounds a number that meets values of 16 bits to these, except a factor and a divisor."""
        at = node.args[place]
        is_exact = not _is_wide_number(self.expr, at) or node.op == "mul" or (node.op == "div" and place == 1)
        return self.names[at] if is_exact else _rounded(self.nodes[at].dtype, self.names[at])

    def _operation(self, node: Node, args: list[str], kind: str) -> str:
        if node.op in _COMPARE:
            return f"{args[0]} {_COMPARE[node.op]} {args[1]}"
        if node.op == "where":
            return f"{args[0]} ? {args[1]} : {args[2]}"
        if node.op in _INFIX:
            return f"{args[0]} {_INFIX[node.op]} {args[1]}"
        if kind == "float":
            text = _FLOAT.get(node.op) or (_SINGLE.get(node.op) if node.dtype is torch.float32 else None)
            if text is None and node.op == "pow":
                cube = None if node.dtype in _WIDENED else "{0} * {0} * {0}"  # torch rounds some squares on the way, by dtype and CPU
                text = {2: "{0} * {0}", 3: cube}.get(self._constant(node.args[1]))  # type: ignore[call-overload]
            if text is None and self.shared.in_pairs and node.op in _OF_LIBRARY and node.dtype in (torch.float32, torch.float64):
                text = f"__builtin_{node.op}{'f' * (node.dtype is torch.float32)}({', '.join(f'{{{n}}}' for n in range(len(args)))})"
        elif node.op == "not":
            text = "!{0}" if kind == "bool" else "~{0}"
        elif node.op in ("shl", "shr"):
            text = self._shift(node)
        elif node.op in ("floordiv", "mod") and isinstance(by := self._constant(node.args[1]), int) and by > 0:
            text = "{0} / {1} - ({0} % {1} < 0)" if node.op == "floordiv" else "{0} % {1} + ({0} % {1} < 0 ? {1} : 0)"
        else:
            text = _WHOLE.get(node.op)
        if text is None:
            raise NotCompiledError(f"{node.op} of {node.dtype}")
        return text.format(*args)

    def _shift(self, node: Node) -> str | None:
        by = self._constant(node.args[1])
        if not isinstance(by, int) or not 0 <= by < torch.iinfo(node.dtype).bits:  # type: ignore[arg-type]
            return None
        return "{0} >> {1}" if node.op == "shr" else "(i64)((u64)(i64){0} << {1})"

    def _constant(self, at: int) -> object:
        return self.nodes[at].attr if self.nodes[at].op == "const" else None

    def _cast(self, at: int, text: str) -> str:
        node, source = self.nodes[at], self.nodes[self.nodes[at].args[0]].dtype
        if node.dtype is torch.bool:
            return f"{text} != 0"
        if category(source) == "float" and category(node.dtype) == "int":
            raise NotCompiledError("a float as a whole number")
        return _rounded(node.dtype, f"({self._type(at)})({text})")

    def place(self, arg: int, size: str) -> str:
        """An index that is made to be inside of a dimension; negative ones count from its end."""
        kind = "i32" if self._is_narrow(arg) else "i64"
        return f"inside(({kind})({self.names[arg]}), ({kind}){size}, &bad)"

    def _load(self, node: Node) -> str:
        """A load for each pair; what the row decides of its place is added once."""
        slot: int = node.attr  # type: ignore[assignment]
        tensor = self.source.tables[slot]
        if tensor.dtype not in _STORED:
            raise NotCompiledError(f"a table of dtype {tensor.dtype}")
        if slot not in self.tables:
            self.tables[slot] = self.shared.sizes
            self.shared.slots.append((self.mod, slot))
            self.shared.sizes += 1 + 2 * tensor.ndim
        first, terms, name = self.tables[slot], [], f"{self.prefix}t{len(self.found.row)}"
        base = [f"(const {_STORED[tensor.dtype]} *)table[{first}]"]
        for dim, arg in enumerate(node.args):
            stride, size = f"table[{first + 1 + 2 * dim}]", f"table[{first + 2 + 2 * dim}]"
            is_last = dim == len(node.args) - 1 and tensor.is_dense
            if self.nodes[arg].op == "index":  # ``forward.py`` has checked that all positions are inside
                text = self.names[arg]
            else:
                text = self.place(arg, size)
            term = text if is_last else f"(i64){text} * {stride}"
            if self.stages[arg] in ("per_head", "row"):
                base.append(term)
            else:
                terms.append(term if is_last else f"({text}) * {self._line(f'{name}_{dim}', 'i64', stride)}")
        self._line(name, f"{_STORED[tensor.dtype]} *__restrict__", " + ".join(base))
        ops = [(self.nodes[a].op, self.nodes[a].attr) for a in node.args]
        if tensor.is_dense and ("index", "q_idx") in ops and ops[-1] == ("index", "kv_idx"):
            step = f"table[{first + 1 + 2 * ops.index(('index', 'q_idx'))}]"
            self.found.row.append(
                f"for (i64 j = lo; j < hi; j += 64 / sizeof(*{name})) __builtin_prefetch({name} + j + {_AHEAD} * {step});"
            )
        return _read(node.dtype, f"{name}[{' + '.join(terms) or '0'}]")


def strong(dtype: DType) -> torch.dtype:
    """The dtype in which a value is stored: weak numbers have 64 bits."""
    return dtype if not is_weak(dtype) else torch.int64 if dtype is int else torch.float64  # type: ignore[return-value]


def stored_dtype(expr: Expr, at: int) -> torch.dtype:
    """The dtype in which torch hands a value of the expression to the loops."""
    return torch.float32 if _is_wide_number(expr, at) else strong(expr.nodes[at].dtype)


def _is_wide_number(expr: Expr, at: int) -> bool:
    """Whether a value of 16 bits is a literal or a captured number, which torch has not rounded to them."""
    node = expr.nodes[at]
    is_number = node.op == "const" or (node.op == "cast" and node.attr is None and expr.nodes[node.args[0]].dtype is float)
    return node.dtype in _WIDENED and is_number


def _rounded(dtype: DType, text: str) -> str:
    return f"{_ROUNDED[dtype]}({text})" if dtype in _ROUNDED else text  # type: ignore[index]


def _type(dtype: DType) -> str:
    found = "f32" if dtype in _WIDENED else _TYPES.get(strong(dtype))
    if found is None:
        raise NotCompiledError(f"values of dtype {dtype}")
    return found


def _read(dtype: DType, text: str) -> str:
    if dtype in _WIDENED:
        return f"{_WIDENED[dtype]}({text})"  # type: ignore[index]
    return f"({text} != 0)" if dtype is torch.bool else text


def _literal(node: Node) -> str:
    value, kind = node.attr, _type(node.dtype)
    if category(node.dtype) == "float":
        number = float(value)  # type: ignore[arg-type]
        if math.isfinite(number):
            return f"({kind})({number!r})"
        return f"({kind})(" + ('__builtin_nan("")' if math.isnan(number) else f"{'-' * (number < 0)}__builtin_inf()") + ")"
    return f"({kind})({int(value)}{'ll' if abs(int(value)) >= 2**31 else ''})"  # type: ignore[call-overload]
