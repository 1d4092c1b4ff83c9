"""Tracer: turns a user's mod into the IR by calling it once on symbols (``symbols.py``).

Captured numbers become run-time scalars: the function that is called is a copy whose numeric closure cells, defaults, globals and
instance attributes hold symbolic numbers. Where the body needs a Python number (``range(n)``, or arithmetic among captured numbers that
exceeds 64 bits), the mod is traced again with that number as a constant, which becomes part of the key. Captured tensors become run-time
inputs when they are indexed (or, at rank 0, computed with).

A trace takes about 0.2 ms, and some three times that for code of which not every step is known and which captures numbers.
``fingerprint.py`` recognises a function that was traced before with other captured values, and skips it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import FunctionType
from typing import Any, ClassVar, NamedTuple

import torch
from torch.autograd import forward_ad

from anyattn.errors import ModError
from anyattn.fast_dataclass import OfFields
from anyattn.mods.ir.expr import Builder, DType, Expr, category
from anyattn.mods.tracing import closure
from anyattn.mods.tracing.default_device import UsersDefaultDevice
from anyattn.mods.tracing.diagnostics import FUNCTION_CURE, MODE_CURE, called_from, failed, mod_error, nothing_swallowed
from anyattn.mods.tracing.fingerprint import Pattern, Reading, recognise
from anyattn.mods.tracing.random_numbers import check_draws, generators_state
from anyattn.mods.tracing.symbolic import Value, View
from anyattn.mods.tracing.symbols import InterceptTorch, payload, refuse_kept, surfaced
from anyattn.mods.tracing.weak_captures import NeedsNumber, negative_zeros, overflowing_slots, slots_in_question, weak_arithmetic

__all__ = [
    "SCRIPTED",
    "Source",
    "TracedMod",
    "Tracer",
    "compact",
    "finished",
    "inputs_of",
    "is_native",
    "name_of",
    "refuse_native",
    "refuse_scripted",
    "trace",
]

SCRIPTED = (torch.jit.ScriptFunction, torch.jit.ScriptModule, torch._C.ScriptMethod)
_is_grad_enabled = torch.is_grad_enabled
_is_inference = torch.is_inference_mode_enabled
_is_fwd_grad_enabled = torch._C._is_fwd_grad_enabled
_is_autocast = torch._C._is_any_autocast_enabled  # type: ignore[attr-defined]
_INPUTS = {"mask": ("b", "h", "q_idx", "kv_idx"), "score": ("score", "b", "h", "q_idx", "kv_idx")}


class Source(NamedTuple):
    """The sources of a mod's run-time values: places among the numbers, and among the tensors (aux_tensors last), of its ``Reading``."""

    pattern: Pattern
    scalars: tuple[int, ...]
    tensors: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class TracedMod(OfFields):
    """A mod ready to run: its program and the run-time values of this call.

    kind: ``"mask"`` (output torch.bool) or ``"score"`` (output of the score's dtype).
    scalars: the captured numbers, by scalar slot. tensors: the captured tensors, by tensor slot.
    source: how to read them from another mod of the same pattern, None if that takes a new trace.
    local_dims: (slot, dimension) of the tensors' dimensions that hold a rank's rows (``distributed.rows.local_captures``).
    """

    kind: str
    expr: Expr
    scalars: tuple[int | float, ...]
    tensors: tuple[torch.Tensor, ...]
    name: str = field(compare=False, default="mod")
    source: Source | None = field(compare=False, default=None, repr=False)
    local_dims: tuple[tuple[int, int], ...] = ()

    @property
    def key(self) -> str:
        return self.expr.key


class Tracer(Builder):
    """A builder that also assigns slots to captured tensors and numbers."""

    def __init__(self, device: torch.device, symbols: list[Any] | None = None) -> None:
        super().__init__()
        self.device = device
        self.tensors: list[torch.Tensor] = []
        self._captured: list[torch.Tensor] = []  # the objects of which ``tensors`` are the plain tensors
        self.symbols = [] if symbols is None else symbols  # weak references to the objects that the body computes with
        self.is_open = True  # until the body has returned
        self.reads_values = False  # the body read state that the memo's key does not cover, so this trace must not be reused
        self.wants_grad: bool | None = None  # grad mode when the body is called
        self.wants_autocast: bool | None = None  # autocast when the body is called
        self.wants_inference: bool | None = None  # inference mode when the body is called

    def add(self, op: str, *args: int, dtype: DType | None = None, attr: Hashable = None) -> int:
        self.check_modes()
        return super().add(op, *args, dtype=dtype, attr=attr)

    def check_modes(self) -> None:
        """Refuses a step under modes that the body changed, by ``torch.no_grad()`` or by applying a custom function.

        torch switches forward-mode differentiation off while a custom function runs, whatever the grad mode, and ``_run`` switches it on.
        """
        if self.wants_grad is None:
            return
        if not _is_fwd_grad_enabled() and _is_inference() is self.wants_inference:
            applied = called_from(_run.__code__)
            raise mod_error("a mod applies a torch.autograd.Function, whose backward no kernel could call", FUNCTION_CURE, applied)
        if _is_grad_enabled() is not self.wants_grad:
            raise mod_error("a mod computes under another grad mode than it is called in", MODE_CURE)
        if _is_autocast() is not self.wants_autocast:
            raise mod_error("a mod changes autocast while it computes", MODE_CURE)

    def capture(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided or tensor.is_nested or tensor.is_complex() or tensor.is_quantized:
            kind = "nested" if tensor.is_nested else f"{tensor.layout} {tensor.dtype}"
            raise mod_error(f"a captured tensor is {kind}", "capture a dense tensor of a real dtype")
        if tensor.dtype is torch.uint64:
            raise mod_error("a captured tensor is torch.uint64", "capture it as torch.int64, whose sums and products have the same bits")
        slot = next((i for i, t in enumerate(self._captured) if t is tensor), None)
        if slot is None:
            slot = len(self.tensors)
            self._captured.append(tensor)
            self.tensors.append(_without_methods(tensor))
        return View(self, slot, self.tensors[slot], (None,) * tensor.ndim)


def _without_methods(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` without the methods of a subclass, which have run where the mod called them: what the mod loads are its elements."""
    kind = type(tensor)
    if kind in (torch.Tensor, torch.nn.Parameter):
        return tensor
    handler = getattr(kind.__torch_function__, "__func__", kind.__torch_function__)
    if handler not in (torch.Tensor.__torch_function__.__func__, torch._C._disabled_torch_function_impl):  # type: ignore[attr-defined]
        cure = "capture tensor.as_subclass(torch.Tensor), and write what the class does into the mod"
        raise mod_error(f"a captured tensor is a {kind.__name__}, whose __torch_function__ gives torch's functions another meaning", cure)
    has_dispatch = kind.__torch_dispatch__ is not torch._C._disabled_torch_dispatch_impl
    return tensor if has_dispatch else tensor.as_subclass(torch.Tensor)


def name_of(fn: Callable) -> str:
    """The name of a mod in messages: a wrapped mod's name, else the function's, else its class's."""
    if isinstance(getattr(fn, "name", None), str):
        return fn.name  # type: ignore[attr-defined]
    inner = getattr(fn, "func", None) or fn
    return getattr(inner, "__name__", None) or type(inner).__name__


def is_native(fn: Any) -> bool:
    """Whether ``fn`` carries the mark of ``@cute.jit``; works without importing CuTe."""
    return getattr(fn, "_decorator_kind", None) == "jit" and hasattr(fn, "_dsl_cls")


def refuse_native(fn: Any, kind: str) -> None:
    """Raises ``ModError`` for a CuTe function or one of torch.jit, also under ``functools.partial``."""
    refuse_scripted(fn, f"{kind}_mod")
    if is_native(fn.func if type(fn) is partial else fn):
        raise _unreadable(f"{kind}_mod {name_of(fn)!r} is", kind)


def refuse_scripted(fn: Any, what: str) -> None:
    """Raises ``ModError`` for a function, method or module of torch.jit, also under ``functools.partial``. what: the argument's name."""
    inner = fn.func if type(fn) is partial else fn
    if isinstance(inner, SCRIPTED):
        raise ModError(
            f"{what} is a {type(inner).__name__} of torch.jit.trace or torch.jit.script, which runs outside of Python and cannot be read; "
            "wanted the Python function that was traced or scripted, which anyattn compiles itself"
        )


def _unreadable(what: str, kind: str) -> ModError:
    return ModError(
        f"{what} a CuTe function (@cute.jit), which cannot be read here, but only run by the Hopper kernel: pass the CuTe function itself "
        f"to an attention function with backend='hopper', or write it as plain Python of ({', '.join(_INPUTS[kind])})"
    )


def trace(
    fn: Callable,
    kind: str,
    *,
    score_dtype: torch.dtype = torch.float32,
    aux_tensors: Sequence[torch.Tensor] | None = None,
    device: torch.device | str = "cpu",
) -> TracedMod:
    """The ``TracedMod`` of a user's function.

    fn: any callable of ``(b, h, q_idx, kv_idx)`` for a mask or ``(score, b, h, q_idx, kv_idx)`` for a score, each with an optional
    trailing ``aux_tensors``. score_dtype: float32, or float64 for float64 inputs. aux_tensors: the value of the trailing argument.

    Raises ``TypeError`` for a wrong number of arguments and ``ModError`` for a body that the IR cannot express.

    >>> trace(lambda b, h, q, k: q >= k, "mask").expr.output.op
    'ge'
    """
    if isinstance(fn, TracedMod):
        return fn
    refuse_native(fn, kind)
    reading = recognise(fn)
    takes_aux = _takes_aux(fn, kind, aux_tensors, reading)
    aux = list(aux_tensors) if takes_aux and aux_tensors is not None else []
    is_within = torch._C._len_torch_function_stack() > 0 and any(hasattr(t, "_represents") for t in (reading.tensors if reading else ()))
    is_known = reading is not None and not is_within and not _has_symbolic_sizes([*reading.tensors, *aux])
    memo = _Memo.of(reading, kind, score_dtype, aux, torch.device(device)) if reading is not None and is_known else None
    if memo is not None and (known := memo.lookup(fn)) is not None:
        return known
    before = generators_state() if reading is None else None  # code with a pattern uses pure names: it does not draw
    pinned: frozenset[int] = frozenset()

    symbols: list[Any] = []  # of all runs

    def run(pinned: frozenset[int]) -> _Run:
        tracer = Tracer(torch.device(device), symbols)
        return _run(fn, tracer, kind, score_dtype, aux if takes_aux else None, pinned)

    while True:
        try:
            computed, tracer, numbers = run(pinned)
            more = overflowing_slots(computed, numbers)
            if not more and before is not None:
                more = _misread(run, computed, tracer, numbers, pinned)
            if not more:
                break
            pinned |= more
        except NeedsNumber as need:
            if need.slots <= pinned:
                raise  # of the trace inside of which this one runs
            pinned |= need.slots
        except Exception as error:
            if isinstance(error, ModError) and before is None and not _is_of_cute(error):
                raise
            if not (every := _every_slot(fn)) <= pinned:  # torch.arange(n) and others refuse a symbolic n
                pinned = every
                continue
            if isinstance(error, ModError) and not _is_of_cute(error):
                raise
            told = _told(error, fn, kind)
            if told is None:
                raise
            raise told from error
    refuse_kept(symbols, fn, fn, f"{kind}_mod {name_of(fn)!r}")
    if before is not None:
        check_draws(fn, before, lambda: run(pinned))
    expr, scalars, tensors = compact(computed.of_first_output(), tracer.tensors)
    is_kept = memo is not None and not tracer.reads_values
    source = memo.remember(computed, expr, scalars, tensors, numbers, pinned) if is_kept else None  # type: ignore[union-attr]
    return TracedMod(kind, expr, tuple(numbers[s] for s in scalars), tuple(tensors), name_of(fn), source)


def _misread(
    run: Callable[[frozenset[int]], _Run], computed: Expr, tracer: Tracer, numbers: list[int | float], pinned: frozenset[int]
) -> frozenset[int]:
    """The slots of all captured numbers if the mod computes something else with the numbers themselves than with symbols of them.

    For code of which not every step is known: it may read a number's type or identity, or keep its own registry of objects.
    """
    every = frozenset(range(len(numbers)))
    if every <= pinned:
        return frozenset()
    exact, other, _ = run(every)
    is_same = computed.of_first_output().with_numbers(numbers) == exact.of_first_output()
    tensors = zip(tracer.tensors, other.tensors, strict=False)
    has_same = len(tracer.tensors) == len(other.tensors) and all(
        a is b or (a.device.type == "cpu" == b.device.type and a.dtype == b.dtype and torch.equal(a, b)) for a, b in tensors
    )
    return frozenset() if is_same and has_same else every


def _has_symbolic_sizes(tensors: list[torch.Tensor]) -> bool:
    """Whether sizes cannot be part of a key: an export keeps them symbolic, or the tensor is nested and has none."""
    for t in tensors:
        for n in t.shape if not t.is_nested else (None,):
            if type(n) is not int:
                return True
    return False


def _every_slot(fn: Callable) -> frozenset[int]:
    """The slots of all captured numbers of ``fn``."""
    found: list[int | float] = []
    closure.rebuild(fn, lambda number: found.append(number) or number)  # type: ignore[func-returns-value]
    return frozenset(range(len(found)))


def _is_of_cute(error: Exception) -> bool:
    """Whether CuTe has raised the error, or has used a symbol as a tensor with memory."""
    at, names = error.__traceback__, [type(error).__module__]
    while at is not None:
        names.append(at.tb_frame.f_globals.get("__name__", ""))
        at = at.tb_next
    return any(name.startswith("cutlass") for name in names)


def _told(error: Exception, fn: Callable, kind: str) -> ModError | None:
    """The ``ModError`` for an exception from a mod's body; None if the exception itself should be raised."""
    if _is_of_cute(error):
        return _unreadable(f"{kind}_mod {name_of(fn)!r} calls", kind)
    return failed(error, f"{kind}_mod {name_of(fn)!r}")


def _takes_aux(fn: Callable, kind: str, aux_tensors: Sequence | None, reading: Reading | None) -> bool:
    """Whether ``fn`` is passed aux_tensors; a signature is inspected once per pattern."""
    if reading is None:
        return _signature_takes_aux(fn, kind, aux_tensors)
    known, asked = reading.pattern.takes_aux, (kind, aux_tensors is not None)
    if asked not in known:
        known[asked] = _signature_takes_aux(fn, kind, aux_tensors)
    return known[asked]


def _signature_takes_aux(fn: Callable, kind: str, aux_tensors: Sequence | None) -> bool:
    if not callable(fn):
        raise TypeError(f"{kind}_mod is a {type(fn).__name__}; wanted a function of ({', '.join(_INPUTS[kind])})")
    wanted = len(_INPUTS[kind])
    found = _arguments(fn)
    if found is None:
        return False
    positional, required, takes_any = found
    if takes_any:
        return aux_tensors is not None and required > wanted
    if required == wanted + 1 or (required <= wanted < len(positional) and positional[wanted] == "aux_tensors"):
        if aux_tensors is None and required == wanted + 1:
            raise TypeError(
                f"{kind}_mod {name_of(fn)!r} takes {wanted + 1} arguments, the last being aux_tensors, but the call passes no "
                f"aux_tensors; pass aux_tensors=[...] or write it with {wanted} arguments ({', '.join(_INPUTS[kind])})"
            )
        return aux_tensors is not None
    if required > wanted or len(positional) < wanted:
        raise TypeError(
            f"{kind}_mod {name_of(fn)!r} takes {required} arguments; wanted {wanted} ({', '.join(_INPUTS[kind])}) "
            f"or {wanted + 1} with a trailing aux_tensors"
        )
    return False


_PRETENDERS = frozenset(("__wrapped__", "__signature__"))


def _arguments(fn: Callable) -> tuple[tuple[str, ...], int, bool] | None:
    """The positional parameter names, the number of required ones, and whether there is *args; None if the signature is unknown."""
    is_function = type(fn) is FunctionType
    called, skipped = (fn, 0) if is_function else (type(fn).__call__, 1)
    pretends = called.__dict__ if is_function else _PRETENDERS.intersection(getattr(fn, "__dict__", ()))
    if type(called) is FunctionType and not pretends:
        code = called.__code__  # the same result as inspect's in a tenth of the time: every call runs this
        names = code.co_varnames[skipped : code.co_argcount]
        return names, len(names) - len(called.__defaults__ or ()), bool(code.co_flags & inspect.CO_VARARGS)
    try:
        parameters = inspect.signature(fn).parameters.values()
    except (TypeError, ValueError):
        return None
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    required = sum(p.default is p.empty for p in positional)
    return tuple(p.name for p in positional), required, any(p.kind is p.VAR_POSITIONAL for p in parameters)


_Run = tuple[Expr, Tracer, list[int | float]]


def _run(fn: Callable, tracer: Tracer, kind: str, score_dtype: torch.dtype, aux: list | None, pinned: frozenset[int]) -> _Run:
    """One trace: the result and, as further outputs, all arithmetic among captured numbers, whose slots are numbered as in
    ``closure.walk``.

    In the user's function Python computes that arithmetic; torch refuses it beyond 64 bits, even if no result depends on it.
    """
    numbers: list[int | float] = []

    def lift(number: int | float) -> Any:
        slot = len(numbers)
        numbers.append(number)
        return number if slot in pinned else surfaced(Value(tracer, tracer.add("scalar", dtype=type(number), attr=slot)))

    lifted = closure.rebuild(fn, lift)
    of_numbers = len(tracer.symbols)
    tracer.wants_grad, tracer.wants_autocast, tracer.wants_inference = _is_grad_enabled(), _is_autocast(), _is_inference()
    with forward_ad._set_fwd_grad_enabled(True), UsersDefaultDevice(), InterceptTorch(tracer):
        arguments = [*inputs_of(tracer, kind, score_dtype), *([aux] if aux is not None else [])]
        with nothing_swallowed():
            result = lifted(*arguments)
        output = _result_node(payload(result), tracer, kind, score_dtype, name_of(fn))
        expr = tracer.build(output, *weak_arithmetic(tracer.nodes))
    del arguments, result
    refuse_kept(tracer.symbols[of_numbers:], fn, lifted, f"{kind}_mod {name_of(fn)!r}")
    return expr, tracer, numbers


def inputs_of(tracer: Tracer, kind: str, score_dtype: torch.dtype) -> list[Any]:
    """The symbolic arguments of a mod."""
    leaves = (
        tracer.add("score", dtype=score_dtype) if name == "score" else tracer.add("index", dtype=torch.int64, attr=name)
        for name in _INPUTS[kind]
    )
    return [surfaced(Value(tracer, leaf)) for leaf in leaves]


def finished(result: Any, tracer: Tracer, kind: str, score_dtype: torch.dtype, numbers: list, name: str) -> TracedMod:
    """The traced mod of ``result``, which a call on ``inputs_of`` returned. numbers: the captured numbers, by scalar slot."""
    expr = tracer.build(_result_node(payload(result), tracer, kind, score_dtype, name))
    expr, scalars, tensors = compact(expr, tracer.tensors)
    return TracedMod(kind, expr, tuple(numbers[s] for s in scalars), tuple(tensors), name)


def _result_node(result: Any, tracer: Tracer, kind: str, score_dtype: torch.dtype, name: str) -> int:
    if isinstance(result, (tuple, list, dict, str, type(None))):
        raise ModError(
            f"{kind}_mod {name!r} returned {'nothing' if result is None else type(result).__name__}; "
            f"return one {'bool' if kind == 'mask' else 'score'} (is a `return` missing?)"
        )
    value = Value.lift(tracer, result)
    if kind == "mask":
        if value.kind is not torch.bool:
            raise ModError(f"mask_mod {name!r} returned a {value.kind} value; return a bool, as in `x != 0` or `q_idx >= kv_idx`")
        return value.node
    if category(value.kind) == "bool":
        raise ModError(f"score_mod {name!r} returned a bool; a condition on positions is a mask: pass it as mask_mod")
    return tracer.cast(value.node, score_dtype)


def compact(expr: Expr, tensors: Sequence[torch.Tensor]) -> tuple[Expr, list[int], list[torch.Tensor]]:
    """Renumbers scalar and tensor slots by first use, so that equal mods have equal keys even if their other captures differ.

    A tensor has one slot, whether the mod loads from it or hands it over whole to a CuTe function.
    """
    scalars: list[int] = []
    slots: list[int] = []
    nodes = []
    for node in expr.nodes:
        if node.op in ("scalar", "load", "tensor"):
            order = scalars if node.op == "scalar" else slots
            if node.attr not in order:
                order.append(node.attr)  # type: ignore[arg-type]
            node = node._replace(attr=order.index(node.attr))  # type: ignore[arg-type]
        nodes.append(node)
    return Expr(tuple(nodes), expr.outputs), scalars, [tensors[s] for s in slots]


class _Memo:
    """Memo of traces, by code and kinds of captures, then by the numbers that became constants."""

    table: ClassVar[dict[tuple, list[tuple]]] = {}

    def __init__(self, identity: tuple, reading: Reading, kind: str, tensors: list[torch.Tensor]):
        self.identity, self.reading, self.kind, self.tensors = identity, reading, kind, tensors

    @classmethod
    def of(cls, reading: Reading, kind: str, score_dtype: torch.dtype, aux: list, device: torch.device) -> _Memo:
        tensors = [*reading.tensors, *aux]
        described = tuple((type(t), t.dtype, t.shape, t.device) for t in tensors)
        same = tuple(next(j for j, u in enumerate(tensors) if u is t) for t in tensors) if len(tensors) > 1 else ()
        default = torch.get_default_dtype()  # the dtype of a captured float combined with integers
        return cls((reading.pattern, len(aux), kind, score_dtype, default, described, same, device), reading, kind, tensors)

    def lookup(self, fn: Callable) -> TracedMod | None:
        found = self.reading.numbers
        for computed, expr, pinned, source in self.table.get(self.identity, ()):
            if all(_same_number(found[s], value) for s, value in pinned) and not overflowing_slots(computed, found):
                numbers, tensors = tuple([found[s] for s in source.scalars]), tuple([self.tensors[p] for p in source.tensors])
                return TracedMod(self.kind, expr, numbers, tensors, name_of(fn), source)  # equal programs may have different names
        return None

    def remember(
        self, computed: Expr, expr: Expr, scalars: list[int], tensors: list, numbers: list, pinned: frozenset[int]
    ) -> Source | None:
        paths = [next((i for i, t in enumerate(self.tensors) if t is tensor), -1) for tensor in tensors]
        if -1 in paths or len(numbers) != len(self.reading.numbers):
            return None  # the body made a tensor (a view, a constant), whose values hold for this trace only
        entries = self.table.setdefault(self.identity, [])
        if len(entries) >= 64:  # bounds the entries of a number that is a constant and changes at each call
            entries.clear()
        if len(self.table) > 4096:
            self.table.clear()
        self.reading.pattern.fix((*pinned, *slots_in_question(computed)))
        source = Source(self.reading.pattern, tuple(scalars), tuple(paths))
        entries.append((computed, expr, tuple((s, numbers[s]) for s in sorted(pinned)), source))
        return source


def _same_number(a: Any, b: Any) -> bool:
    if a == b:
        return type(a) is type(b) and (a != 0 or negative_zeros((a,)) == negative_zeros((b,)))
    return type(a) is type(b) and a != a and b != b
