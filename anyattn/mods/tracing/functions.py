"""Torch functions inside a mod that take more than one operation: casts, shapes, constants, and functions with extra arguments.

A number has the shape ``()`` and is on the mod's device. Arguments that request another shape, reinterpreted bits or a new tensor are
refused, and so are copies that torch would detach from gradients. Importing this module completes ``FUNCTIONS``: it extends every function
to rows of captured tensors, element by element, and adds Python's operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from anyattn.mods.ir.expr import HALVES, category, is_weak, result_dtype
from anyattn.mods.tracing.arguments import check_device, check_flags, check_memory_format, dtype_of, fitting, options_of
from anyattn.mods.tracing.clamps import EXTREME_TIE, clamp
from anyattn.mods.tracing.diagnostics import mod_error
from anyattn.mods.tracing.reductions import with_rows
from anyattn.mods.tracing.symbolic import FUNCTIONS, Value, View, binary, builder_in, cast
from anyattn.mods.tracing.vectors import Vector
from anyattn.mods.tracing.weak_captures import ask_for_truths

__all__ = ["FUNCTIONS"]


def _number(x: Any, *beside: Any) -> Value:
    """``x`` as a value. beside: other arguments, of which one is symbolic if ``x`` is not."""
    builder = builder_in((x, *beside))
    assert builder is not None, "called without a symbolic value"
    return Value.lift(builder, x)


def _rounded_once(f: Callable[..., Any]) -> Callable[..., Any]:
    """``f`` of several operations, whose result torch rounds once: of 16-bit values it is computed in float32."""

    @functools.wraps(f)
    def apply(*args: Any, **kwargs: Any) -> Any:
        named: dict[Any, Any] = {**dict(enumerate(args)), **kwargs}
        values = {at: _number(x, *named.values()) for at, x in named.items() if isinstance(x, (Value, View, torch.Tensor))}
        strong = [at for at in values if values[at].is_tensor]
        dtype: Any = result_dtype([v.kind for v in values.values()])
        if not strong or dtype not in HALVES:
            return f(*args, **kwargs)
        named |= values | {at: cast(cast(values[at], dtype), torch.float32) for at in strong}
        return cast(f(*(named[at] for at in range(len(args))), **{key: named[key] for key in kwargs}), dtype)

    return apply


# ---- arithmetic

_ADD, _SUB, _MUL = (FUNCTIONS[name] for name in ("add", "sub", "mul"))  # of two values, without alpha
_POW, _SHIFTED = FUNCTIONS["pow"], FUNCTIONS["lshift"]  # pow takes floats, or a whole number with a literal exponent
_WHERE = FUNCTIONS["where"]
_ROUNDED_ONCE = (
    "silu", "gelu", "softplus", "log_sigmoid", "mish", "elu", "selu", "celu", "hardsigmoid", "hardswish", "lerp",
    "addcmul", "addcdiv", "logaddexp", "logaddexp2",
)  # fmt: skip


_multiply_add = _rounded_once(lambda factor, other, addend: _ADD(addend, _MUL(other, factor)))


def _converted(number: Value, dtype: Any) -> Value:
    """A number in a function that rounds it to the dtype of 16-bit values before it computes; others take it as it is."""
    if not is_weak(number.kind) or dtype not in HALVES:
        return cast(number, dtype)
    return Value(number.builder, number.builder.add("cast", number.node, dtype=dtype, attr="rounded"))


def _scaled(name: str, swapped: bool = False) -> Callable[..., Value]:
    """add and sub: ``input + alpha * other``, the product in the dtype of the result; rsub, ``swapped``, is ``other - alpha * input``."""

    def apply(input: Any, other: Any, *, alpha: Any = 1) -> Value:
        a, b = _number(input, other, alpha), _number(other, input, alpha)
        a, b = (b, a) if swapped else (a, b)
        if not (isinstance(alpha, (int, float)) and not isinstance(alpha, bool) and alpha == 1):
            factor = _number(alpha, a)
            dtype: Any = result_dtype([a.kind, b.kind])
            kind = category(dtype)
            if not is_weak(factor.kind) or kind == "bool" or (kind == "int" and factor.kind is float):
                raise mod_error(f"{name} is given an alpha of {factor.kind} for {dtype} values", "write it out: x + alpha * y")
            factor = factor if name == "add" else -factor  # type: ignore[operator] # as torch does, which has no subtraction with alpha
            factor = fitting(factor, dtype, f"alpha of torch.{name}")
            return _multiply_add(*(_converted(x, dtype) for x in (factor, b, a)))  # type: ignore[no-any-return]
        return (_ADD if name == "add" else _SUB)(a, b)  # type: ignore[no-any-return]

    return apply


def _addcmul(input: Any, tensor1: Any, tensor2: Any, *, value: Any = 1) -> Value:
    kinds = [_number(x, input, tensor1, tensor2).kind for x in (input, tensor1, tensor2)]
    factor = fitting(_number(value, input, tensor1, tensor2), result_dtype(kinds), "addcmul")
    return _ADD(input, _MUL(_MUL(factor, tensor1), tensor2))  # type: ignore[no-any-return]


def _positive(input: Any) -> Value:
    value = _number(input)
    ask_for_truths(value.builder.nodes, "neg", value.node)
    if value.kind is torch.bool:
        raise mod_error("`+` does not apply to a torch.bool value", "convert it first, as in x.to(torch.int64)")
    return value


def _relu(input: Any, inplace: Any = False) -> Value:
    if inplace is not False:
        raise mod_error("relu is given inplace=True, and a mod has no tensor to write into", "use what torch.relu(x) returns")
    return binary("max", tie="second")(_number(input), 0)


def _extreme(op: str) -> Callable[..., Value]:
    """torch.min and torch.max of two tensors; torch takes a number in the second place for the dimension to reduce."""

    def apply(input: Any, other: Any) -> Value:
        second = _number(other, input)
        if is_weak(second.kind) or not isinstance(other, (Value, View, torch.Tensor)):
            raise mod_error(f"torch.{op}(x, {other!r}) takes the number for a dimension", f"use torch.clamp, or torch.{op}imum(x, number)")
        return FUNCTIONS[f"{op}imum"](input, second)

    return apply


def _ignoring_nan(op: str) -> Callable[..., Value]:
    """fmin and fmax: if one value is NaN, the other."""

    def apply(input: Any, other: Any) -> Value:
        a, b = _number(input, other), _number(other, input)
        result = binary(op, tie=EXTREME_TIE)(a, b)
        if category(result.kind) != "float":
            return result
        return _WHERE(a != a, cast(b, result.dtype), _WHERE(b != b, cast(a, result.dtype), result))  # type: ignore[no-any-return]

    return apply


def _masked_fill(input: Any, mask: Any, value: Any) -> Value:
    x, fill = _number(input, mask, value), _number(value, mask, input)
    if category(result_dtype([x.kind, fill.kind])) != category(x.kind):
        raise mod_error(f"masked_fill puts a {fill.kind} value into a {x.kind} one", "use torch.where(mask, value, x)")
    return cast(_WHERE(mask, fill, x), x.dtype)


def _pow(input: Any, exponent: Any) -> Value:
    base, power = _number(input, exponent), _number(exponent, input)
    if type(exponent) is int and exponent == 2 and base.kind is not torch.bool:
        return _MUL(base, base)  # type: ignore[no-any-return]
    if category(result_dtype([base.kind, power.kind])) != "int" or _literal(power, 0) is not None:
        return _POW(base, fitting(power, result_dtype([base.kind, power.kind]), "pow"))  # type: ignore[no-any-return]
    if (two := _literal(base, 2)) is not None and is_weak(base.kind) and two & (two - 1) == 0:
        bits = two.bit_length() - 1
        if is_weak(power.kind):
            return _SHIFTED(1, _MUL(power, bits))  # type: ignore[no-any-return]
        return _POW(_SHIFTED(1, power), bits)  # type: ignore[no-any-return]
    cure = "make one side a float: 3.0 ** n, or use powers of two, as in 1 << n"
    for value in (power, base):
        if is_weak(value.kind) and _literal(value) is None:
            value.python_number("a power of whole numbers", cure)
    raise mod_error("an integer is raised to a power that is not a literal integer of at least 0", cure)


def _literal(value: Value, least: int | None = None) -> int | None:
    """The literal, if the value is a whole literal and not below ``least``; else None."""
    node = value.builder.nodes[value.node]
    is_one = node.op == "const" and category(node.dtype) == "int"
    return node.attr if is_one and (least is None or node.attr >= least) else None  # type: ignore[return-value, operator]


def _xlogy(input: Any, other: Any) -> Value:
    """``input * log(other)``, and 0 where input is 0 for any logarithm; the derivative by input is the logarithm where that is
    finite."""
    x, y = _number(input, other), _number(other, input)
    kind = result_dtype([x.kind, y.kind])
    dtype = kind if isinstance(kind, torch.dtype) and kind.is_floating_point else torch.get_default_dtype()
    by: Any = cast(y, dtype)
    times: Any = cast(x, dtype)
    has_none = (by <= 0) | (by == torch.inf)
    return _WHERE((times == 0) & has_none, 0.0, times * FUNCTIONS["log"](by))  # type: ignore[no-any-return]


def _detach(input: Any) -> Value:
    value = _number(input)
    has_gradient = category(value.kind) == "float" and any(node.op == "score" for node in value.builder.nodes)  # masks have no gradient
    return Value(value.builder, value.builder.add("detach", value.node)) if has_gradient else value


# ---- casts


def _to(
    input: Any, *args: Any, dtype: Any = None, device: Any = None, tensor: Any = None, non_blocking: Any = False, copy: Any = False,
    memory_format: Any = None,
) -> Value:  # fmt: skip
    """Tensor.to, in its three forms: (dtype, ...), (device, dtype, ...) and (tensor, ...). Only the dtype changes a number."""
    rest = list(args)
    if rest and isinstance(rest[0], (torch.Tensor, Value, View)):
        tensor = rest.pop(0)
    elif rest and dtype_of(rest[0]) is None:
        device = rest.pop(0)
        if isinstance(device, int) and rest:
            raise mod_error(f"x.to is given the number {device} as a device, and other arguments", "name the dtype: x.to(torch.float32)")
    if tensor is None and rest and not isinstance(rest[0], bool):
        dtype = rest.pop(0)
    if isinstance(tensor, Value) and is_weak(tensor.kind):
        tensor.python_number(".to() of a captured number", "name the dtype: x.to(torch.float32)")
    wanted = dtype_of(dtype) if tensor is None else dtype_of(getattr(tensor, "dtype", None))
    if (wanted is None and (tensor is not None or dtype is not None)) or len(rest) > 2:
        raise mod_error(f"x.to is given {tensor if tensor is not None else dtype!r}", "give it a dtype: x.to(torch.float32)")
    check_device(device)
    check_flags(non_blocking=non_blocking, copy=copy, **dict(zip(("non_blocking ", "copy "), rest, strict=False)))
    check_memory_format(memory_format)
    return _number(input) if wanted is None else cast(input, wanted)


def _type(input: Any, dtype: Any, non_blocking: Any = False) -> Value:
    check_flags(non_blocking=non_blocking)
    wanted = dtype_of(dtype)
    if wanted is None:
        raise mod_error(f"x.type is given {dtype!r}", "name a dtype: x.to(torch.float32)")
    return cast(input, wanted)


def _caster(dtype: torch.dtype) -> Callable[..., Value]:
    def apply(input: Any, memory_format: Any = None) -> Value:
        check_memory_format(memory_format)
        return cast(input, dtype)

    return apply


# ---- shapes (a number has the shape ()) and constants of that shape


def _check_shape(name: str, shape: tuple) -> None:
    """Refuses every shape but ``()``. A captured number in the shape of a real tensor raises the request for a Python number."""
    sizes = [size for item in shape for size in (item if isinstance(item, (tuple, list)) else (item,))]
    for size in sizes:
        if isinstance(size, Value):
            size.python_number(f"a size in {name}", "sizes are Python numbers or captured ones")
    if sizes or len(shape) > 1:
        raise mod_error(
            f"{name} is given the shape {shape[0] if len(shape) == 1 else shape}, and a mod's values are single numbers",
            f"leave {name} out, or reshape the captured tensor outside the mod",
        )


def _same_number(name: str) -> Callable[..., Value]:
    """view, reshape and expand."""

    def apply(input: Any, *shape: Any) -> Value:
        if not shape:
            raise mod_error(f"{name} is called without a shape", f"leave {name} out")
        if name == "view" and dtype_of(shape[0]) is not None:
            same = isinstance(input, Value) and dtype_of(shape[0]) is input.dtype
            if not same or len(shape) > 1:
                raise mod_error(f"view({shape[0]}) reads the bits of a number as another", "convert the number: x.to(dtype)")
            return input
        _check_shape(name, shape)
        return _number(input)

    return apply


def _squeeze(input: Any, dim: Any = None) -> Value:
    if dim not in (None, 0, -1, ()):
        raise mod_error(f"squeeze is given dim={dim}, and a mod's values have no dimensions", "leave squeeze out")
    return _number(input)


def _unchanged(input: Any, memory_format: Any = None) -> Any:
    check_memory_format(memory_format)
    return input


def _filled(name: str, value: int) -> Callable[..., Value]:
    """ones_like, zeros_like, new_ones and new_zeros."""

    def like(input: Any, **options: Any) -> Value:
        return _constant(name, _number(input), value, options)

    def new(input: Any, *sizes: Any, size: Any = (), **options: Any) -> Value:
        _check_shape(name, sizes or (size,))
        return _constant(name, input, value, options)

    return like if name.endswith("_like") else new


def _constant(name: str, like: Any, fill: Any, options: dict[str, Any]) -> Value:
    """``fill`` in the dtype that the options name, else in the dtype of ``like``."""
    builder = builder_in((like, fill))
    assert builder is not None, "called without a symbolic value"
    number = Value.lift(builder, fill)
    if not is_weak(number.kind) and number.is_floating_point():
        raise mod_error(f"{name} cuts a value off from its gradient", "use the value itself, or x.to(dtype)")
    dtype = options_of(name, options) or like.dtype
    return cast(fitting(number, dtype, name), dtype)


def _new_full(input: Any, size: Any, fill_value: Any, **options: Any) -> Value:
    _check_shape("new_full", (size,))
    return _constant("new_full", input, fill_value, options)


def _full_like(input: Any, fill_value: Any, **options: Any) -> Value:
    return _constant("full_like", _number(input, fill_value), fill_value, options)


def _new_tensor(input: Any, data: Any, **options: Any) -> Value:
    return _constant("new_tensor", input, data, options)


def _tensor(name: str) -> Callable[..., Value]:
    """tensor, as_tensor and scalar_tensor of one number. A list has no meaning per (q, kv): its captured numbers become constants."""

    def apply(data: Any, dtype: Any = None, device: Any = None, **options: Any) -> Value:
        _pin(data, name)
        if name == "as_tensor" and "copy" in options:
            check_flags(copy=options.pop("copy"))
        value = _number(data)
        if name == "tensor" and not is_weak(value.kind) and value.is_floating_point():
            raise mod_error("torch.tensor cuts a value off from its gradient", "use the value itself, or x.clone()")
        wanted = options_of(name, {**options, "dtype": dtype, "device": device})
        default = torch.get_default_dtype() if name == "scalar_tensor" else value.dtype
        return cast(fitting(value, wanted or default, f"torch.{name}"), wanted or default)

    return apply


def _pin(data: Any, name: str) -> None:
    """Requests every captured number in a list as a Python number."""
    for item in data if isinstance(data, (list, tuple)) else ():
        if isinstance(item, Value):
            item.python_number(f"torch.{name} of a list", "make the tensor outside the mod, and index it")
        _pin(item, name)


FUNCTIONS.update({
    "add": _scaled("add"),
    **{name: _scaled("sub") for name in ("sub", "subtract")},
    "rsub": _scaled("sub", swapped=True),
    "pow": _pow,
    "rpow": lambda input, other: _pow(_number(other, input), input),
    "square": lambda input: _pow(input, 2),
    **dict.fromkeys(("xlogy", "special_xlogy"), _xlogy),
    "addcmul": _addcmul,
    "detach": _detach,
    "positive": _positive,
    "relu": _relu,
    **dict.fromkeys(("clamp", "clip"), clamp),
    "clamp_min": lambda input, min: clamp(input, min),
    "clamp_max": lambda input, max: clamp(input, None, max),
    **{name: _extreme(name) for name in ("min", "max")},
    **{"f" + name: _ignoring_nan(name) for name in ("min", "max")},
    "where of a tensor": lambda input, condition, other: _WHERE(condition, input, other),  # the method, whose first argument is self
    "masked_fill": _masked_fill,
    "to": _to,
    "type": _type,
    "type_as": lambda input, other: _to(input, other),
    **{name: _caster(dtype) for name, dtype in {"float": torch.float32, "double": torch.float64, "half": torch.float16,
                                               "bfloat16": torch.bfloat16, "bool": torch.bool, "int": torch.int32, "long": torch.int64,
                                               "short": torch.int16, "char": torch.int8, "byte": torch.uint8}.items()},
    **{name: _filled(name, 1) for name in ("new_ones", "ones_like")},
    **{name: _filled(name, 0) for name in ("new_zeros", "zeros_like")},
    "new_full": _new_full,
    "full_like": _full_like,
    "new_tensor": _new_tensor,
    **dict.fromkeys(("clone", "contiguous", "cpu"), _unchanged),
    **{name: _same_number(name) for name in ("view", "reshape", "expand")},
    "squeeze": _squeeze,
    **{name: _tensor(name) for name in ("tensor", "as_tensor", "scalar_tensor")},
})  # fmt: skip
FUNCTIONS.update((name, _rounded_once(FUNCTIONS[name])) for name in _ROUNDED_ONCE)
FUNCTIONS.update(with_rows(dict(FUNCTIONS)))

for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"):
    for _class in (Value, View, Vector):
        setattr(_class, f"__{_name}__", FUNCTIONS[_name])
        setattr(_class, f"__r{_name}__", FUNCTIONS["r" + _name])
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "pos"):
    for _class in (Value, View, Vector):
        setattr(_class, f"__{_name}__", FUNCTIONS[_name])
for _name in ("matmul", "rmatmul"):
    for _class in (Value, View, Vector):
        setattr(_class, f"__{_name}__", FUNCTIONS[_name])
setattr(Value, "__getitem__", FUNCTIONS["getitem"])  # noqa: B010 - mypy reads an assignment as a generic class
