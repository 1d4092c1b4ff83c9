"""Triton emitter: a mod's expression as Triton source, one line per operation, with torch's dtypes and semantics.

The text broadcasts over the shapes of its leaves: with ``q_idx`` as [BLOCK_M, 1] and ``kv_idx`` as [1, BLOCK_N], a subexpression of the row
alone has one value per row. Lines come in stages (once, row, column, tile), so that a caller can hoist each stage out of its loops. The
text contains no run-time value: captured numbers and tensors are the arguments ``scalars`` and ``tensors``, packed by
``weak_captures.bits_of_numbers`` and ``packed_tensors``, and equal expressions have equal text.

torch's integers have 64 bits. Where the extents of the operands (``extents.py``) prove that 32 bits are enough, the operation is computed
in 32, which takes a third of the instructions on a GPU. ``Style`` lists the other assumptions of the text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E
from anyattn.mods.analysis.separated import separated
from anyattn.mods.analysis.sharp import sharp
from anyattn.mods.ir.dependence import Dep, dependence
from anyattn.mods.ir.expr import HALVES, DType, Expr, Node, category, is_weak
from anyattn.mods.ir.extents import MOST_INDEX_BITS, Box, Extent, bits_of, extents, fits
from anyattn.triton_tools.margins import with_margins

__all__ = [
    "LEAVES",
    "NEAR",
    "PLAIN",
    "SMALL",
    "Lines",
    "Style",
    "emit",
    "function",
    "packed_tensors",
    "triton_dtype",
]

SMALL = 2**28  # bound of ``Style.is_small``: sums of a few such numbers fit 32 bits
NEAR = 2**22  # bound of ``Style.is_near``: sums of a few such numbers are exact in float32
_FAR = 2**MOST_INDEX_BITS + 1  # beyond every dividend
_EXACT_BITS = 24  # integers of so many bits are exact in float32

LEAVES = {name: name for name in ("b", "h", "q_idx", "kv_idx", "score")}
_TEMPLATES = {
    "exp": "device_math.exp({0})", "exp2": "tl.exp2({0})", "log": "tl.log({0})", "log2": "tl.log2({0})", "log1p": "device_math.log1p({0})",
    "expm1": "device_math.expm1({0})",
    "sqrt": "device_math.sqrt({0})", "rsqrt": "device_math.divide(1, device_math.sqrt({0}))", "sin": "tl.sin({0})", "cos": "tl.cos({0})",
    "tanh": "device_math.tanh({0})", "sigmoid": "device_math.sigmoid({0})", "erf": "tl.erf({0})",
    "reciprocal": "device_math.divide(1, {0})",
    **{name: f"device_math.{name}({{0}})" for name in ("tan", "atan", "sinh", "cosh", "erfinv")},
    **{name: f"device_math.{name}({{0}}, {{1}})" for name in ("atan2", "hypot")},
    "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "trunc": "device_math.trunc({0})", "round": "device_math.round_even({0})",
    "detach": "{0}",
    "sign": "device_math.sign({0})", "abs": "tl.abs({0})", "add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}",
    "div": "device_math.divide({0}, {1})", "and": "{0} & {1}", "or": "{0} | {1}", "xor": "{0} ^ {1}", "eq": "{0} == {1}",
    "ne": "{0} != {1}", "lt": "{0} < {1}", "le": "{0} <= {1}", "gt": "{0} > {1}", "ge": "{0} >= {1}", "where": "tl.where({0}, {1}, {2})",
    "fold": "device_math.fold({0}, {1})",
}  # fmt: skip
_BY_KIND = {
    ("not", "bool"): "{0} == 0",
    ("not", "int"): "~{0}",
    ("floordiv", "int"): "device_math.floor_div({0}, {1})",
    ("floordiv", "float"): "device_math.floor_div_real({0}, {1})",
    ("mod", "int"): "device_math.floor_mod({0}, {1})",
    ("mod", "float"): "device_math.floor_mod({0}, {1})",
    ("fmod", "int"): "{0} % {1}",
    ("fmod", "float"): "device_math.fmod({0}, {1})",
    ("pow", "int"): "device_math.power_whole({0}, {1})",
    ("pow", "float"): "device_math.power({0}, {1})",
    ("neg", "int"): "-{0}",
    ("neg", "float"): "{0} * -1.0",  # Triton's own is 0 - x, which makes 0 of 0
    ("min", "int"): "tl.minimum({0}, {1})",
    ("max", "int"): "tl.maximum({0}, {1})",
    ("min", "float"): "tl.minimum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
    ("max", "float"): "tl.maximum({0}, {1}, propagate_nan=tl.PropagateNan.ALL)",
}

# in float32, for results that are rounded to 16 bits later
_FAST = {
    "tanh": "device_math.tanh_fast({0})", "sigmoid": "device_math.sigmoid_fast({0})", "sqrt": "tl.sqrt({0})", "rsqrt": "tl.rsqrt({0})",
    "exp": "tl.exp({0})",
    "reciprocal": "1 / {0}", "pow": "device_math.power_fast({0}, {1})",
}  # fmt: skip
_NVIDIA = {
    "tanh": "device_math.tanh_nvidia({0})", "sigmoid": "device_math.sigmoid_nvidia({0})",
    "reciprocal": "device_math.reciprocal_nvidia({0})",
}  # fmt: skip
_COARSE = {"tanh": "device_math.tanh_coarse({0})"}


class Lines(NamedTuple):
    """Source lines by stage, without indentation; the variables of the outputs; and per output whether it is a 32-bit integer below
    2 ** ``MOST_INDEX_BITS``."""

    once: list[str]
    row: list[str]
    column: list[str]
    tile: list[str]
    outputs: tuple[str, ...]
    near: tuple[bool, ...]

    def all(self) -> list[str]:
        return [*self.once, *self.row, *self.column, *self.tile]


class Style(NamedTuple):
    """Assumptions of a generated text about the calls that use it; calls that violate them use another text.

    is_small: positions, heads and captured integers are less than ``SMALL``, sizes and strides of captured tensors less than 2 ** 31.
    is_inside: every index of a captured tensor is from 0 to its size - 1. dense: the slots of captured tensors whose last stride is 1.
    functions: "exact" (rounded as in torch), "fast" (15 bits or more) or "coarse" (11 bits). is_nvidia: NVIDIA's instructions are
    available.
    is_near: positions, heads and captured integers are less than ``NEAR``.
    even: ``captured_loads.even_slots``. by_thread: each thread loads the values per key that it needs: with one load for each key, Triton
    may lay out all scores as that load lays out its keys.
    """

    is_small: bool = False
    is_inside: bool = False
    dense: tuple[int, ...] = ()
    functions: str = "exact"
    is_nvidia: bool = False
    is_near: bool = False
    even: tuple[int, ...] = ()
    by_thread: bool = False


PLAIN = Style()


def emit(expr: Expr, leaves: Mapping[Any, str] = LEAVES, prefix: str = "v", style: Style = PLAIN, is_by_entry: bool = False) -> Lines:
    """The lines that compute ``expr.outputs`` from the variables that ``leaves`` names and from ``scalars`` and ``tensors``.

    leaves: names of the variables for b, h, q_idx, kv_idx (integers of any width, scalars or blocks) and score, and of bounds by attribute.
    prefix: of all new names.
    is_by_entry: for a loop over batch entries; "once" has all that depends neither on b nor on the score, "tile" the rest.
    An int64 output is a 32-bit variable if its values fit.

    >>> from anyattn.mods.tracing.trace import trace
    >>> print(*emit(trace(lambda b, h, q, k: q >= k, "mask").expr).all(), sep="\\n")
    v0 = tl.cast(q_idx, tl.int32)
    v1 = tl.cast(kv_idx, tl.int32)
    v2 = v0 >= v1
    """
    return _Writer(expr, leaves, prefix, style, is_by_entry).lines()


def function(name: str, expr: Expr) -> str:
    """Source of a Triton function ``name(b, h, q_idx, kv_idx, score, scalars, tensors)`` with the value of the expression's only output.

    ``score`` is a parameter only if the expression reads it.
    """
    lines = emit(expr)
    arguments = "b, h, q_idx, kv_idx, " + ("score, " if expr.uses_score else "") + "scalars, tensors"
    body = "\n".join(f"    {line}" for line in [*lines.all(), f"return {lines.outputs[0]}"])
    return f"@triton.jit\ndef {name}({arguments}):\n{body}\n"


_STAGES = ("once", "row", "column", "tile")


def _stage(dep: Dep) -> str:
    if dep.score or (dep.q and dep.kv):
        return "tile"
    return "row" if dep.q else "column" if dep.kv else "once"


def _entry_stage(dep: Dep) -> str:
    return "tile" if dep.b or dep.score else "once"


def _is_long(dtype: DType) -> bool:
    return dtype is int or dtype is torch.int64


def triton_dtype(dtype: DType) -> str:
    """Triton's name of a dtype; weak numbers have 64 bits, as in Python."""
    if is_weak(dtype):
        return "tl.int64" if dtype is int else "tl.float64"
    return "tl.int1" if dtype is torch.bool else f"tl.{str(dtype).removeprefix('torch.')}"


class _Writer:
    """Writes the nodes of one expression, arguments first."""

    def __init__(self, expr: Expr, leaves: Mapping[Any, str], prefix: str, style: Style, is_by_entry: bool) -> None:
        most = NEAR if style.is_near else SMALL
        small = Box.of_sizes(most, most)._replace(by_zero=False)  # a quotient by 0 may be any number
        if style.is_small:
            expr = with_margins(separated(expr, small), small)
        self.expr, self.nodes, self.leaves, self.prefix, self.style = expr, expr.nodes, leaves, prefix, style
        stage = _entry_stage if is_by_entry else _stage
        self.stages = [stage(dep) for dep in dependence(expr)]
        self.extents = extents(expr, small if style.is_small else Box.of_sizes(2**MOST_INDEX_BITS, None))
        self.sure = extents(expr, small._replace(by_zero=True)) if style.is_small else self.extents
        self.sharp = sharp(expr)
        self.found: dict[str, list[str]] = {stage: [] for stage in _STAGES}
        self.made: set[str] = set()

    def lines(self) -> Lines:
        for at in range(len(self.nodes)):
            self.found[self.stages[at]].append(f"{self.prefix}{at} = {self._value(at)}")
        once, row, column, tile = (self.found[stage] for stage in _STAGES)
        near = (_is_long(self.nodes[o].dtype) and fits(self.extents[o], MOST_INDEX_BITS + 1) for o in self.expr.outputs)
        return Lines(once, row, column, tile, tuple(f"{self.prefix}{o}" for o in self.expr.outputs), tuple(near))

    def _aside(self, at: int, name: str, value: str) -> str:
        """An additional variable in the stage of node ``at``, defined once."""
        name = f"{self.prefix}{at}_{name}"
        if name not in self.made:
            self.made.add(name)
            self.found[self.stages[at]].append(f"{name} = {value}")
        return name

    # -- widths
    def _is_narrow(self, at: int) -> bool:
        """Whether the variable of an int64 node has 32 bits."""
        return _is_long(self.nodes[at].dtype) and fits(self.extents[at])

    def _dtype(self, at: int) -> str:
        return "tl.int32" if self._is_narrow(at) else triton_dtype(self.nodes[at].dtype)

    def _widened(self, at: int) -> str:
        return f"{self.prefix}{at}.to(tl.int64)" if self._is_narrow(at) else f"{self.prefix}{at}"

    def _operands(self, at: int) -> tuple[list[str], bool]:
        """Names of a node's operands, and whether it is computed in 64 bits although its result fits 32."""
        node = self.nodes[at]
        long = [a for a in node.args if _is_long(self.nodes[a].dtype)]
        is_same = node.op not in ("pow", "shl") and (self._is_narrow(at) or not _is_long(node.dtype))
        if all(self._is_narrow(a) for a in long) and is_same:
            return [f"{self.prefix}{a}" for a in node.args], False
        return [self._widened(a) for a in node.args], bool(long) and self._is_narrow(at)

    # -- values
    def _value(self, at: int) -> str:
        node = self.nodes[at]
        if node.op in ("index", "bound", "score"):
            return f"tl.cast({self.leaves['score' if node.op == 'score' else node.attr]}, {self._dtype(at)})"  # type: ignore[index]
        if node.op == "const":
            return _constant(node.attr, self._dtype(at))  # type: ignore[arg-type]
        if node.op == "scalar":
            bits = f"tl.full((), scalars[{node.attr}], tl.int64)"
            return f"tl.cast({bits}, tl.float64, bitcast=True)" if node.dtype is float else f"{bits}.to({self._dtype(at)})"
        if node.op == "load":
            return self._load(at)
        operand = self.nodes[node.args[-1]].dtype
        if node.op == "mul" and self._is_score_2(node):
            return self.leaves["score_2"]
        if node.op == "cast" and node.dtype is torch.float32 and (text := self._in_floats(node.args[0])):
            return text
        if node.op == "cast":
            return f"{self.prefix}{node.args[0]} != 0" if node.dtype is torch.bool else f"{self.prefix}{node.args[0]}.to({self._dtype(at)})"
        if (text := self._divided(at)) is not None:
            return text
        args, is_wide = self._operands(at)
        if node.op == "pow":
            return self._power(at, args)
        if operand in HALVES and node.op != "where":  # as torch: computes in float32, then rounds
            args = [f"{a}.to(tl.float32)" for a in args]
            if node.op in ("mul", "div", "floordiv"):
                args = [args[0] if node.op == "floordiv" else self._factor(node.args[0], args[0]), self._factor(node.args[1], args[1])]
        text = self._fast(at, args) or self._operation(at, args)
        if is_wide:
            return f"({text}).to(tl.int32)"
        return f"({text}).to({triton_dtype(node.dtype)})" if node.dtype in HALVES and node.op != "where" else text

    def _divided(self, at: int) -> str | None:
        """A quotient or remainder of many 31-bit integers by one number; None for others. Quotients by a greater run-time number than those
        are those by 2^30 + 1."""
        node = self.nodes[at]
        if node.op not in ("floordiv", "mod") or category(node.dtype) != "int" or self._dtype(at) != "tl.int32":
            return None
        dividend, by = node.args
        if self.stages[at] == "once" or self.stages[by] != "once" or self._dtype(dividend) != "tl.int32":
            return None
        if self.nodes[by].op == "const":
            return self._by_literal(node, f"{self.prefix}{dividend}", self.extents[dividend], self.nodes[by].attr)
        if not fits(self.extents[dividend], MOST_INDEX_BITS + 1):
            return None
        divisor, is_near = f"{self.prefix}{by}", fits(self.extents[by], MOST_INDEX_BITS + 1)
        if not is_near and node.op == "mod":
            return None
        if not is_near:
            divisor = self._aside(by, "near", f"tl.minimum(tl.maximum({divisor}, {-_FAR}), {_FAR}).to(tl.int32)")
        inverse = self._aside(by, "inverse", f"device_math.reciprocal({divisor})")
        return f"device_math.floor_{'div' if node.op == 'floordiv' else 'mod'}_by({self.prefix}{dividend}, {divisor}, {inverse})"

    def _by_literal(self, node: Node, text: str, size: Extent | None, by: Any) -> str | None:
        """A quotient or remainder by a power of 2, or of a number that is not negative."""
        if by > 0 and by & (by - 1) == 0 and by < 2**MOST_INDEX_BITS:
            return f"{text} >> {by.bit_length() - 1}" if node.op == "floordiv" else f"{text} & {by - 1}"
        is_plain = 0 < by < 2**31 and size is not None and size.lo >= 0 and fits(size)
        return f"{text} {'//' if node.op == 'floordiv' else '%'} {by}" if is_plain else None

    def _factor(self, at: int, text: str) -> str:
        """A factor or divisor in float32. torch does not round a number that it multiplies 16-bit floats by to 16 bits."""
        node = self.nodes[at]
        if node.op == "const":
            return _constant(node.attr, "tl.float32")  # type: ignore[arg-type]
        if node.op == "cast" and is_weak(self.nodes[node.args[0]].dtype):
            return f"{self.prefix}{node.args[0]}.to(tl.float32)"
        return text

    def _operation(self, at: int, args: list[str]) -> str:
        node = self.nodes[at]
        operand = self.nodes[node.args[-1]].dtype
        if node.op in ("shl", "shr"):
            is_short = self._is_narrow(at) and all(self._is_narrow(a) for a in node.args) and node.op == "shr"
            bits = 32 if is_short else 64 if is_weak(operand) else torch.iinfo(operand).bits  # type: ignore[arg-type]
            return f"device_math.shift_{'left' if node.op == 'shl' else 'right'}({args[0]}, {args[1]}, {bits})"
        if node.op == "not" and operand is torch.uint8:
            return f"255 - {args[0]}"
        if node.op == "mul" and at in self.sharp and node.dtype is torch.float32 and self.style.is_nvidia:
            return f"device_math.product_nvidia({args[0]}, {args[1]})"
        if node.op == "fold" and node.dtype is torch.int32 and self.stages[at] == "tile" and self.style.is_nvidia:
            return f"device_math.fold_nvidia({args[0]}, {args[1]})"
        return (_TEMPLATES.get(node.op) or _BY_KIND[node.op, category(operand)]).format(*args)

    def _fast(self, at: int, args: list[str]) -> str | None:
        """The text of a faster float32 operation; None where torch's rounding is required or there is none."""
        node = self.nodes[at]
        if self.style.functions == "exact" or at in self.sharp or node.dtype not in (torch.float32, *HALVES):
            return None
        if node.op == "div":
            divisor = node.args[1]
            if self.stages[divisor] == self.stages[at] or self.stages[at] == "once":
                return f"{args[0]} / {args[1]}"
            return f"{args[0]} * {self._aside(divisor, 'turned', f'device_math.divide(1, {args[1]})')}"
        tables = [_FAST]
        if self.style.is_nvidia:
            tables = [_COARSE, _NVIDIA, _FAST] if self.style.functions == "coarse" else [_NVIDIA, _FAST]
        return next((table[node.op].format(*args) for table in tables if node.op in table), None)

    def _is_score_2(self, node: Node) -> bool:
        """Whether the node is the score times log2(e), which the caller may provide."""
        one, other = (self.nodes[a] for a in node.args)
        return "score_2" in self.leaves and one.op == "score" and one.dtype is torch.float32 and other.op == "const" and other.attr == LOG2E

    def _in_floats(self, at: int) -> str | None:
        """An integer of each pair as a float32 expression, if its parts are exact in float32: then only numbers per row and per column are
        converted. None otherwise: a result of less than 32 bits may have wrapped around, and -0.0 has no integer counterpart."""
        node = self.nodes[at]
        is_exact = category(node.dtype) == "int" and (extent := self.extents[at]) is not None and bits_of(extent) <= _EXACT_BITS
        if not is_exact:
            return None
        if self.stages[at] != "tile":
            return self._aside(at, "float", f"{self.prefix}{at}.to(tl.float32)")
        is_plain = node.op in ("add", "sub", "abs") and (_is_long(node.dtype) or node.dtype is torch.int32)
        parts = [self._in_floats(a) for a in node.args] if is_plain else [None]
        return None if None in parts else f"({_TEMPLATES[node.op].format(*parts)})"

    def _power(self, at: int, args: list[str]) -> str:
        """Small whole powers as products, as in torch; other powers as a function call."""
        node = self.nodes[at]
        exponent, kind = self.nodes[node.args[1]], category(node.dtype)
        if node.dtype in HALVES:
            args = [f"{a}.to(tl.float32)" for a in args]
        if exponent.op == "const" and exponent.attr in (1, 2, 3):
            text = " * ".join([args[0]] * int(exponent.attr))  # type: ignore[call-overload]
        elif exponent.op == "const" and exponent.attr == 0.5 and kind == "float":
            text = f"device_math.sqrt({args[0]})"
        else:
            text = self._fast(at, args) or _BY_KIND["pow", kind].format(*args)
        return f"({text}).to({self._dtype(at)})"

    # -- loads
    def _load(self, at: int) -> str:
        """A load of a captured tensor, at a 64-bit offset whose terms are added in the earliest possible stage."""
        node = self.nodes[at]
        slot, last = f"tensors[{node.attr}]", len(node.args) - 1
        base, terms = f"{slot}[0]", {stage: [] for stage in _STAGES}  # type: ignore[var-annotated]
        for dim, arg in enumerate(node.args):
            is_dense = dim == last and node.attr in self.style.dense
            terms[self.stages[arg]].append(self._term(arg, f"{slot}[{1 + 2 * dim}]", f"{slot}[{2 + 2 * dim}]", is_dense))
        own = self.stages[at]
        for stage in ("once", "row"):
            if terms[stage] and stage != own and (stage == "once" or own == "tile"):
                base = self._line(stage, f"{self.prefix}{at}_{stage}", " + ".join([base, *terms.pop(stage)]))
        if own == "tile" and terms["column"]:
            terms["column"] = [self._line("column", f"{self.prefix}{at}_column", " + ".join(terms["column"]))]
        place = " + ".join([base, *(t for stage in terms.values() for t in stage)])
        if node.attr in self.style.even:
            return f"device_math.load_even({place}, {self.prefix}{node.args[last]}, {slot}[{2 + 2 * last}])"
        is_by_thread = own == "tile" or (own == "column" and self.style.by_thread)
        return f"{'device_math.load_nvidia' if is_by_thread and self.style.is_nvidia else 'tl.load'}({place})"

    def _line(self, stage: str, name: str, value: str) -> str:
        self.found[stage].append(f"{name} = {value}")
        return name

    def _term(self, arg: int, stride: str, size: str, is_dense: bool) -> str:
        """The offset of one index, in elements. A kv_idx is not negative, and the caller keeps it inside the tensor. A q_idx may be
        negative: in a cache with fewer keys than queries the first rows come before all keys."""
        place, is_narrow = f"{self.prefix}{arg}", self._is_narrow(arg)
        is_kept_inside = self.nodes[arg].op == "index" and self.nodes[arg].attr != "q_idx"
        if not is_kept_inside and not self.style.is_inside:
            if self.style.is_small and is_narrow:
                size = f"{size}.to(tl.int32)"
            extent = self.sure[arg]  # a quotient by 0 is not read beyond the tensor
            is_positive = extent is not None and extent.lo >= 0
            place = f"device_math.{'below' if is_positive else 'inside'}({place}, {size})"
            is_narrow = is_narrow and self.style.is_small
        if is_dense:
            return place
        return f"{place}.to(tl.int64) * {stride}" if is_narrow else f"{place} * {stride}"


def _constant(value: int | float | bool, dtype: str) -> str:
    text = f"tl.full((), {_literal(value)}, {dtype})"
    return f"(tl.full((), 0.0, {dtype}) * -1.0)" if repr(value) == "-0.0" else text  # a constant -0.0 is 0.0 up to Triton 3.6


def _literal(value: int | float | bool) -> str:
    text = repr(value)
    return f'float("{text}")' if text in ("inf", "-inf", "nan") else text


# ---- arguments


def packed_tensors(tensors: Sequence[Tensor]) -> tuple[tuple, ...]:
    """Captured tensors as (tensor, stride 0, size 0, stride 1, size 1, ...)."""
    return tuple((t, *(n for pair in zip(t.stride(), t.shape, strict=True) for n in pair)) for t in tensors)
