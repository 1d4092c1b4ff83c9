"""Faster code paths for Triton's interpreter that compute the same numbers in fewer Python steps; part of ``interpreter.mend``.

An operation on two tensors of one type calls NumPy directly, which broadcasts by the same rule; all others (mixed types, bfloat16, int1
beside integers) take Triton's own path. Block types, the language's patched functions, and functions rewritten for the interpreter are
made once and cached. After a launch the whole storage behind a CPU tensor is not copied onto itself, and sums of integers are not computed
three times for a check that only a GPU makes; reductions by our own functions halve a tile at each step instead of going number by number;
Python gets one large stack chunk per launch, where it would allocate and free one at each call that just exceeds the current chunk.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import math
import threading
from collections.abc import Callable, Set
from functools import cache, lru_cache
from types import CodeType
from typing import Any

import numpy as np
import torch

__all__ = ["mend_launches", "mend_operations", "mend_reductions", "mend_rewriting", "mend_types"]

_DEEP = 60_000  # entries of a frame, half a megabyte: Python then asks for a megabyte at once, which holds all that a kernel's calls take
_INT32 = range(-(2**31), 2**31)
_INTEGERS = {"int32", "int64"}
_NUMPY = {
    "fp16": np.float16, "fp32": np.float32, "fp64": np.float64, "int32": np.int32, "int64": np.int64,
    "uint32": np.uint32, "uint64": np.uint64, "int1": np.bool_,
}  # fmt: skip
_NUMBERS = _NUMPY.keys() - {"int1"}
_LONG_NAMES = {"fp16": "float16", "fp32": "float32", "fp64": "float64"}


def mend_types() -> None:
    """Makes the shape and type of blocks once for all their values."""
    import triton.language as tl
    from triton.runtime import interpreter

    block_init, numpy_kind, fits = tl.block_type.__init__, interpreter._get_np_dtype, interpreter._validate_np_data_size
    unwrap, to_tensor = tl.core._unwrap_if_constexpr, interpreter.TritonSemantic.to_tensor
    blocks: dict[tuple[Any, ...], dict[str, Any]] = {}
    kinds_of_numpy: dict[str, Any] = {}
    bytes_of = {name: max(tl.core.get_primitive_bitwidth(name) // 8, 1) for name in (*_NUMPY, "int8", "int16", "bf16")}
    plain = {tl.tensor, int, float, bool, str, type(None), tl.dtype, tl.block_type}

    @cache
    def shape_of(lengths: tuple[int, ...]) -> tuple[Any, Any]:
        return tl.tuple([tl.constexpr(n) for n in lengths]), tl.constexpr(math.prod(lengths))

    nothing = shape_of(())

    def made_tensor(self: Any, handle: Any, kind: Any) -> None:
        self.handle, self.type = handle, kind
        if type(kind) is tl.block_type:
            self.dtype, (self.shape, self.numel) = kind.scalar, kind.__dict__.get("sizes") or shape_of(tuple(kind.shape))
        else:
            self.dtype, (self.shape, self.numel) = kind.scalar, nothing

    def made_block(self: Any, kind: Any, lengths: Any) -> None:
        at = kind.name, *(n.value if isinstance(n, tl.constexpr) else n for n in lengths)
        if at not in blocks:
            block_init(self, kind, lengths)
            blocks[at] = self.__dict__ | {"sizes": shape_of(at[1:])}
        self.__dict__.update(blocks[at])

    def kind_of(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in kinds_of_numpy:
            kinds_of_numpy[name] = numpy_kind(kind.scalar)
        return kinds_of_numpy[name]

    def has_room(data: Any, kind: Any) -> Any:
        most = bytes_of.get(kind.name)
        return fits(data, kind) if most is None else data.itemsize <= most

    def unwrapped(value: Any) -> Any:
        return value if type(value) in plain else unwrap(value)

    def as_tensor(self: Any, value: Any, check_type: bool = True) -> Any:
        return value if type(value) is tl.tensor else to_tensor(self, value, check_type)

    tl.tensor.__init__, tl.block_type.__init__ = made_tensor, made_block
    interpreter._get_np_dtype, interpreter._validate_np_data_size = kind_of, has_room
    tl.core._unwrap_if_constexpr, interpreter.TritonSemantic.to_tensor = unwrapped, as_tensor


@cache
def _computed(tl: Any, handle: Any) -> Callable[..., Any]:
    """A function of NumPy as one of two tensors; None where their types, or a number's beside a tensor, need Triton's own rules."""
    numpy_of, new = {name: np.dtype(kind) for name, kind in _NUMPY.items()}, object.__new__
    tensor, nothing = tl.tensor, tl.tensor(None, tl.int32)

    @cache
    def block(scalar: str, shape: tuple[int, ...]) -> Any:
        return tl.tensor(None, tl.block_type(getattr(tl.core, _LONG_NAMES.get(scalar, scalar)), list(shape)))

    def number(value: Any, name: str) -> Any:
        kind = type(value)
        if kind is int and value in _INT32 and (name in _INTEGERS or name == "fp32"):
            return _NUMPY[name](value)
        if kind is float and name == "fp32" and (2.0**-126 <= abs(value) < 2.0**127 or value == 0.0 or math.isinf(value)):
            return np.float32(value)
        return None

    def computed(function: Any, a: Any, b: Any, names: Set[str], is_bool: bool, *condition: Any) -> Any:
        if type(a) is not tensor:
            first, name, y = b, b.dtype.name, b.handle.data
            x = number(a, name)
            is_block = b.type is not b.dtype
        elif type(b) is not tensor:
            first, name, x = a, a.dtype.name, a.handle.data
            y = number(b, name)
            is_block = a.type is not a.dtype
        else:
            first, name, other, x, y = a, a.dtype.name, b.dtype.name, a.handle.data, b.handle.data
            is_block = a.type is not a.dtype or b.type is not b.dtype
            if name != other:
                if name not in _INTEGERS or other not in _INTEGERS or x.dtype != numpy_of[name] or y.dtype != numpy_of[other]:
                    return None
                first, name = (a if name == "int64" else b), "int64"
            elif x.dtype != y.dtype:
                return None
        if name not in names or x is None or y is None or first.handle.data.dtype != numpy_of[name]:
            return None
        data = function(*condition, x, y)
        dtype = tl.int1 if is_bool else first.dtype
        like = block("int1" if is_bool else name, data.shape) if is_block else nothing
        held, made = new(handle), new(tensor)
        held.data, held.dtype, held.attr = data, dtype, {}
        made.handle, made.dtype, made.shape, made.numel = held, dtype, like.shape, like.numel
        made.type = like.type if is_block else dtype
        return made

    return computed


def _quotient(x: Any, y: Any) -> Any:
    """Rounded toward zero, as C's."""
    return (x - np.fmod(x, y)) // y


@cache
def _block_types(tl: Any) -> Callable[..., Any]:
    """The type of a block of a scalar type, made once."""
    types: dict[tuple[str, tuple[int, ...]], Any] = {}

    def block_of(scalar: Any, shape: tuple[int, ...]) -> Any:
        at = scalar.name, shape
        if at not in types:
            types[at] = tl.block_type(scalar, list(shape))
        return types[at]

    return block_of


_ARITHMETIC: dict[str, tuple[Callable[..., Any], Set[str]]] = {
    "add": (np.add, _NUMBERS), "sub": (np.subtract, _NUMBERS), "mul": (np.multiply, _NUMBERS),
    "minimum": (np.minimum, _NUMBERS), "maximum": (np.maximum, _NUMBERS), "truediv": (np.divide, {"fp32", "fp64"}),
    "floordiv": (_quotient, _INTEGERS), "mod": (np.fmod, _INTEGERS),
    "and_": (np.bitwise_and, _INTEGERS | {"int1"}), "or_": (np.bitwise_or, _INTEGERS | {"int1"}),
}  # fmt: skip
_COMPARISONS = {
    "less_than": np.less, "less_equal": np.less_equal, "greater_than": np.greater, "greater_equal": np.greater_equal,
    "equal": np.equal, "not_equal": np.not_equal,
}  # fmt: skip


def mend_operations() -> None:
    """Arithmetic, comparisons and choices among values of one type go straight to NumPy."""
    import triton.language as tl
    from triton.runtime import interpreter

    semantic, computed = interpreter.TritonSemantic, _computed(tl, interpreter.TensorHandle)

    def method(name: str, function: Any, names: Set[str], is_bool: bool = False) -> None:
        slow = getattr(semantic, name)

        def fast(self: Any, a: Any, b: Any, *rest: Any) -> Any:
            if type(a) is tl.tensor or type(b) is tl.tensor:
                done = computed(function, a, b, names, is_bool)
                if done is not None:
                    return done
            return slow(self, a, b, *rest)

        setattr(semantic, name, fast)

    for name, (function, names) in _ARITHMETIC.items():
        method(name, function, names)
    for name, function in _COMPARISONS.items():
        method(name, function, _NUMBERS, is_bool=True)
    add, where, cast, block_of = semantic.add, semantic.where, semantic.cast, _block_types(tl)

    def moved(self: Any, a: Any, b: Any, sanitize_overflow: bool) -> Any:
        """Adds distances to pointers too."""
        if type(a) is tl.tensor and a.dtype.is_ptr():
            width = max(1, a.dtype.element_ty.primitive_bitwidth // 8)
            if type(b) is tl.tensor and b.dtype.name in _INTEGERS:
                data = a.handle.data + width * b.handle.data.astype(np.uint64)
                is_block = a.type.is_block() or b.type.is_block()
                kind = block_of(a.dtype, data.shape) if is_block else a.dtype
                return tl.tensor(interpreter.TensorHandle(data, a.handle.dtype), kind)
            if type(b) is int and 0 <= b < 2**31:
                return tl.tensor(interpreter.TensorHandle(a.handle.data + np.uint64(width * b), a.handle.dtype), a.type)
        return add(self, a, b, sanitize_overflow)

    def chosen(self: Any, condition: Any, a: Any, b: Any) -> Any:
        shown = condition.handle.data
        blocks = [x.handle.data for x in (a, b) if type(x) is tl.tensor and x.type.is_block()]
        # where neither is a block the condition must not be one
        is_alike = any(x.shape == shown.shape for x in blocks) or not (blocks or condition.type.is_block())
        if is_alike and shown.dtype == np.bool_ and (type(a) is tl.tensor or type(b) is tl.tensor):
            done = computed(np.where, a, b, _NUMPY.keys(), False, shown)
            if done is not None:
                return done
        return where(self, condition, a, b)

    def converted(self: Any, value: Any, kind: Any, fp_downcast_rounding: Any = None) -> Any:
        source, target = value.dtype.name, kind.scalar.name
        if source == target and source in _NUMPY:
            return value
        if source in _INTEGERS and target in _INTEGERS and fp_downcast_rounding is None:
            data = value.handle.data.astype(_NUMPY[target])
            target_kind = block_of(kind.scalar, data.shape) if value.type.is_block() else kind.scalar
            return tl.tensor(interpreter.TensorHandle(data, kind.scalar), target_kind)
        return cast(self, value, kind, fp_downcast_rounding)

    semantic.add, semantic.where, semantic.cast = moved, chosen, converted


def _operators(tl: Any, semantic: Any, handle: Any) -> dict[str, Callable[..., Any]]:
    """A tensor's operators without the wrappers of the language, which only pass on the caller."""
    unwrapped, computed, tensor = tl.core._unwrap_if_constexpr, _computed(tl, handle), tl.tensor

    def arithmetic(name: str, *rest: Any) -> tuple[Any, Any]:
        of, (function, names) = getattr(semantic, name), _ARITHMETIC[name]

        def forward(a: Any, b: Any) -> Any:
            if type(b) is not tensor:
                b = unwrapped(b)
            done = computed(function, a, b, names, False)
            return of(a, b, *rest) if done is None else done

        def reversed_(b: Any, a: Any) -> Any:
            a = unwrapped(a)
            done = computed(function, a, b, names, False)
            return of(a, b, *rest) if done is None else done

        return forward, reversed_

    def comparison(name: str) -> Callable[..., Any]:
        of, as_tensor, function = getattr(semantic, name), semantic.to_tensor, _COMPARISONS[name]

        def compared(a: Any, b: Any) -> Any:
            done = computed(function, a, b, _NUMBERS, True)
            return of(a, as_tensor(b)) if done is None else done

        return compared

    found = {
        "__lt__": comparison("less_than"), "__le__": comparison("less_equal"), "__gt__": comparison("greater_than"),
        "__ge__": comparison("greater_equal"), "__eq__": comparison("equal"), "__ne__": comparison("not_equal"),
    }  # fmt: skip
    for operator, name, *rest in (
        ("add", "add", False), ("sub", "sub", False), ("mul", "mul", False), ("truediv", "truediv"), ("and", "and_"), ("or", "or_"),
        ("floordiv", "floordiv"), ("mod", "mod"),
    ):  # fmt: skip
        found[f"__{operator}__"], found[f"__r{operator}__"] = arithmetic(name, *rest)
    return found


def mend_rewriting() -> None:
    """Rewrites a function for the interpreter once per source text, also if its module is imported again."""
    from triton.runtime import interpreter

    class Transformer(interpreter.ASTTransformer):  # type: ignore[misc]
        def visit_Assign(self, node: ast.Assign) -> Any:
            """Gives inserted nodes the position of the node they replace, so that no later pass looks for nodes without one."""
            made = super().visit_Assign(node)
            call = made.value
            for new in (call, call.func, call.func.value, *call.args[1:]):
                ast.copy_location(new, node)
            return made

    rewriter, transformer = interpreter.FunctionRewriter, Transformer()
    slow = rewriter.rewrite_ast

    @lru_cache(maxsize=64)
    def functions_of(text: str) -> dict[tuple[str, int], ast.FunctionDef]:
        nodes = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef))
        return {(node.name, min(x.lineno for x in (node, *node.decorator_list))): node for node in nodes}

    @lru_cache(maxsize=64)
    def lines_of(text: str) -> list[str]:
        return text.splitlines(keepends=True)

    def alone(text: str, name: str, line: int) -> ast.FunctionDef | None:
        """A function at the top of its module, parsed without the rest of it; None for any other."""
        lines = lines_of(text)
        start = last = line - 1
        while last < len(lines) and lines[last].startswith("@"):
            last += 1
        last += 1
        while last < len(lines) and lines[last][0] in " )\n":
            last += 1
        try:
            body = ast.parse("".join(lines[start:last])).body
        except SyntaxError:
            return None
        if len(body) != 1 or not isinstance(body[0], ast.FunctionDef) or body[0].name != name:
            return None
        node: ast.FunctionDef = ast.increment_lineno(body[0], start)
        return node

    @lru_cache(maxsize=4096)
    def code_of(text: str, file: str, name: str, line: int) -> CodeType | None:
        node = alone(text, name, line) or functions_of(text).get((name, line))
        if node is None:
            return None
        node.decorator_list = []
        return compile(ast.Module(body=[transformer.visit(node)], type_ignores=[]), file, "exec")

    def rewritten(self: Any) -> Any:
        code, space = self.fn.__code__, self.fn.__globals__
        text = "".join(linecache.getlines(code.co_filename, space))
        made = code_of(text, code.co_filename, code.co_name, code.co_firstlineno)
        if made is None:
            return slow(self)
        local = dict(self.kwargs)
        for key, value in vars(interpreter).items():
            space.setdefault(key, value)
        exec(made, space, local)
        return local[code.co_name]

    rewriter.rewrite_ast = rewritten


class _Everything:
    def __init__(self, language: Any) -> None:
        self.__globals__ = {"tl": language, "core": language.core}


def mend_launches() -> None:
    """One launch at a time; the language is patched once for all functions of a kernel, by functions that are made once."""
    import triton.language as tl
    from triton.runtime import interpreter

    executor, patch, patch_tensor = interpreter.GridExecutor, interpreter._patch_lang, interpreter._patch_lang_tensor
    launch, restore, one_at_a_time = executor.__call__, executor._restore_args_dev, threading.RLock()
    semantic, by_index = interpreter.interpreter_semantic, tl.tensor.__getitem__
    operators, wrapper, block_of = _operators(tl, semantic, interpreter.TensorHandle), tl.core.load.__code__, _block_types(tl)

    def patched_tensor(tensor: Any, scope: Any) -> None:
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.reshape(-1)[0]))
        for name, operator in operators.items():
            scope.set_attr(tensor, name, operator)
        scope.set_attr(tensor, "__getitem__", indexed)
        scope.set_attr(tensor, "to", to)

    def told_who_calls(member: Any) -> Callable[..., Any]:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def called(*args: Any, **named: Any) -> Any:
            named["_semantic"] = semantic
            return inner(*args, **named)

        return called

    def extreme(name: str, slow: Callable[..., Any]) -> Callable[..., Any]:
        of, as_tensor = getattr(semantic, name), semantic.to_tensor

        def called(x: Any, y: Any, *rest: Any, **named: Any) -> Any:
            x, y = as_tensor(x), as_tensor(y)
            if rest or named or x.dtype is tl.bfloat16 or y.dtype is tl.bfloat16:
                return slow(x, y, *rest, **named)
            return of(x, y, tl.PropagateNan.NONE)

        return called

    @cache
    def members(package: Any) -> dict[str, Callable[..., Any]]:
        found = {name: told_who_calls(member) for name, member in inspect.getmembers(package) if tl.core.is_builtin(member)}
        return found | {name: extreme(name, found[name]) for name in ("minimum", "maximum") if name in found}

    def patched_builtin(package: Any, builder: Any, scope: Any) -> None:
        for name, member in members(package).items():
            scope.set_attr(package, name, member)

    def indexed(self: Any, at: Any) -> Any:
        """A row or a column made from a tensor of one dimension; everything else takes Triton's own path."""
        data = self.handle.data
        if type(at) is tuple and len(at) == 2 and data.ndim == 1 and slice(None) in at and None in at:
            data = data[at]
            return tl.tensor(interpreter.TensorHandle(data, self.handle.dtype), block_of(self.dtype, data.shape))
        return by_index(self, at, _semantic=semantic)

    def to(self: Any, dtype: Any, fp_downcast_rounding: Any = None, bitcast: Any = False) -> Any:
        if type(dtype) is tl.dtype and fp_downcast_rounding is None and bitcast is False:
            return self if dtype is self.dtype else semantic.cast(self, dtype, None)
        return tl.core.cast(self, dtype, fp_downcast_rounding, bitcast)

    def patched_language(fn: Any) -> Any:
        """Patches all of the language, not only the part that a kernel's module imports: functions that it calls may use more."""
        return patch(_Everything(tl)) if tl.core.is_builtin(tl.core.load) else interpreter._LangPatchScope()

    def called(self: Any, *args: Any, **named: Any) -> Any:
        """A device function: in a launch, the language is patched. Errors are told once, by the launch."""
        return self.rewrite()(*args, **named)

    def restored(self: Any, args: Any, *rest: Any) -> None:
        if any(isinstance(t, torch.Tensor) and t.device.type != "cpu" for t in torch.utils._pytree.tree_leaves(args)):
            restore(self, args, *rest)

    def launched(self: Any, *args: Any, **options: Any) -> None:
        with one_at_a_time:
            launch(self, *args, **options)

    launched.__code__ = launched.__code__.replace(co_stacksize=_DEEP)
    interpreter._patch_lang, interpreter._patch_lang_tensor, interpreter._patch_builtin = patched_language, patched_tensor, patched_builtin
    executor._restore_args_dev, executor.__call__, interpreter.InterpretedFunction.__call__ = restored, launched, called


def mend_reductions() -> None:
    """By neighbours: half as many numbers each time. A dimension has a power of two of them, as all of Triton's."""
    import triton.language as tl
    from triton.runtime import interpreter

    numpy_of, block_of = interpreter._get_np_dtype, _block_types(tl)

    def block(data: Any, kind: Any) -> Any:
        wanted = numpy_of(kind)
        held = data if data.dtype == wanted else data.astype(wanted)
        return tl.tensor(interpreter.TensorHandle(held, kind.scalar), block_of(kind, data.shape))

    def reduced(self: Any, given: Any) -> list[Any]:
        parts, axis = self.unravel(given, self.axis)
        data, kinds = [x.handle.data for x in parts], [x.dtype for x in parts]
        before = (slice(None),) * (axis % data[0].ndim)
        while data[0].shape[axis] > 1:
            sides = [block(x[(*before, slice(i, None, 2))], kind) for i in (0, 1) for x, kind in zip(data, kinds, strict=True)]
            found = self.combine_fn.fn(*sides)
            data = [x.handle.data for x in (found if isinstance(found, tuple) else (found,))]
        if not self.keep_dims:
            data = [x.squeeze(axis) for x in data]
        elif self.axis is None:
            data = [x.reshape((1,) * given[0].handle.data.ndim) for x in data]
        return [self.to_tensor(x, kind) for x, kind in zip(data, kinds, strict=True)]

    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(sanitize_overflow=False)
    interpreter.ReduceOps.generic_reduce = reduced
