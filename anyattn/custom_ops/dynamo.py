"""Dynamo's tracing of ``call_with_mods``: every mod becomes a subgraph, and its captured values become operands of the subgraph.

Dynamo has a table from names of higher-order operators to the classes that trace them. It is semi-private: ``install`` adds ours if this
torch has such a table. A call that cannot be captured (a mod that Dynamo cannot trace, a torch without the table) breaks the graph once;
after one warning the entry points run as in eager mode, opaque to Dynamo.
"""

from __future__ import annotations

import functools
import sys
import warnings
from typing import Any, NoReturn

import torch
from torch._dynamo.exc import ObservedException, TorchRuntimeError, Unsupported, raise_observed_exception, unimplemented
from torch._dynamo.utils import proxy_args_kwargs
from torch._dynamo.variables import higher_order_ops
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import wrap_fx_proxy
from torch._dynamo.variables.builtin import BuiltinVariable
from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

from anyattn.custom_ops import run_uncompiled
from anyattn.custom_ops.capture import call_with_mods
from anyattn.distributed.rows.local_captures import marked, marked_by_program
from anyattn.errors import ModError
from anyattn.mods.algebra import Mask
from anyattn.mods.tracing.trace import refuse_scripted
from anyattn.tensors import kinds as tensor_kinds

__all__ = ["install", "run_uncompiled"]

_TRANSFORMED = (
    "attention is inside torch.func.{} inside torch.compile or torch.export; wanted torch.func.grad or vjp outside of compiled functions, "
    "or backward() and torch.autograd.grad"
)
_warned: set[str] = set()


class CallWithModsVariable(higher_order_ops.TorchHigherOrderOperatorVariable):
    """A call of ``call_with_mods`` that Dynamo traces."""

    _HOP_NAME = "anyattn.call_with_mods"

    def _call_function(self, tx: Any, args: Any, kwargs: Any) -> VariableTracker:
        entry, like, operands, kinds, mods = args
        if active := tensor_kinds.transforms():
            _refuse(tx, TypeError(_TRANSFORMED.format(active[-1])), _is_replaced(tx))
        graphs, captured, known = [], [], []
        for (kind, name), fn in zip(kinds.as_python_constant(), mods.items, strict=True):
            graph, lifted = None, ()
            _refuse_scripted(tx, fn, name)
            if not (fn.is_python_constant() and fn.as_python_constant() is None):
                try:
                    graph, lifted = _subgraph(tx, self.value, like, fn, kind, name)
                except Unsupported as reason:
                    _warn(name, reason)
                    run_uncompiled()
                    raise
                # Dynamo supports fewer types than Python: the mod itself may not raise; or another torch has other private functions
                except (ObservedException, AttributeError, TypeError) as error:
                    broken = Unsupported(f"it raises {type(error).__name__.removeprefix('Observed')} where it is captured: {error}")
                    _warn(name, broken)
                    run_uncompiled()
                    raise broken from error
            graphs.append(graph)
            captured.append(lifted)
            known.append((kind, name, *marked_by_program(lifted)))
        proxies, _ = proxy_args_kwargs([entry, like, operands], {})
        proxy = tx.output.create_proxy("call_function", self.value, (*proxies, tuple(known), tuple(graphs), tuple(captured)), {})
        call_with_mods.refusal, is_replaced = None, _is_replaced(tx)
        try:
            return wrap_fx_proxy(tx=tx, proxy=proxy, example_value=None)
        except (TorchRuntimeError, Unsupported, ObservedException) as error:  # the last from torch 2.14 on
            refusal = call_with_mods.refusal or (error if is_replaced else None)
            if refusal is None:
                raise
        if not proxy.node._erased:  # a program that catches the exception continues with this graph
            tx.output.remove_node(proxy.node)
        call_with_mods.refusal = refusal
        _refuse(tx, refusal, is_replaced)


def _refuse(tx: Any, error: Exception, is_replaced: bool = False) -> NoReturn:
    """Raises ``error`` in the traced program; if the program does not catch it, the graph breaks and the eager call raises it."""
    if not is_replaced:
        run_uncompiled()
    # Dynamo can only raise Python's own exception types
    kind = next((k for k in (ValueError, TypeError) if isinstance(error, k)), RuntimeError)
    raise_observed_exception(kind, tx, args=[VariableTracker.build(tx, str(error))])


def _refuse_scripted(tx: Any, fn: Any, name: str) -> None:
    """Refuses a function of torch.jit, for which Dynamo would trace the Python function that it was made of."""
    try:
        refuse_scripted(_object_of_program(tx, fn), name)
    except ModError as error:
        _refuse(tx, error, _is_replaced(tx))


def _object_of_program(tx: Any, fn: Any) -> Any:
    """The object that the program passes for ``fn``; None if it is made inside the compiled function."""
    return tx.output.resolve_source_value(fn.source) if fn.source and hasattr(tx.output, "resolve_source_value") else None


def _is_replaced(tx: Any) -> bool:
    """Whether Dynamo traces a call of a replaced function of torch, which catches exceptions."""
    replaced_call = sys.modules.get("anyattn.integrations.torch_flex_call")
    while tx is not None and replaced_call is not None:
        if tx.f_code is replaced_call.computed.__code__:
            return True
        tx = getattr(tx, "parent", None)
    return False


def _warn(name: str, reason: Unsupported) -> None:
    """Warns, once per reason, that a call runs uncompiled, and how to change that."""
    first = str(reason).strip().splitlines()[0]
    if (key := f"{name}: {first}") in _warned:
        return
    _warned.add(key)
    warnings.warn(
        f"torch.compile cannot capture a {name} of anyattn: {first}. The call runs outside the compiled graph. Write the mod with torch "
        "operations on its arguments and on tensors that it closes over, and compute what else it needs before the call "
        "(torch.compile(fullgraph=True) shows the line)",
        stacklevel=2,
    )


def _subgraph(tx: Any, operator: Any, like: Any, fn: Any, kind: str, name: str) -> tuple[Any, tuple]:
    """The attribute of Dynamo's graph that holds the mod as a graph, and the proxies of the mod's captured values."""
    build = VariableTracker.build

    def scalar(dtype: torch.dtype, requires_grad: bool = False) -> Any:
        options = {"dtype": build(tx, dtype), "requires_grad": build(tx, requires_grad)}
        return like.call_method(tx, "new_empty", [build(tx, [])], options)

    with higher_order_ops.discard_graph_changes(tx):
        arguments = [scalar(torch.int64) for _ in range(4)]
        if kind == "score":  # the dtype of scores in eager mode, which does not depend on a 16-bit query
            dtype = torch.float64 if like.dtype is torch.float64 else torch.float32
            arguments.insert(0, scalar(dtype, like.requires_grad))
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

    fn_object = _object_of_program(tx, fn)
    if isinstance(fn_object, functools.partial) and type(fn_object) is not functools.partial:
        unimplemented(
            gb_type="subclass of functools.partial as a mod",
            context=name,
            explanation=f"{name} is of a subclass of functools.partial, and Dynamo would call what it wraps instead of it.",
            hints=["Write the subclass as a function or a class with __call__."],
        )
    drawn = len(getattr(tx.output, "random_calls", ()))
    with TransformGetItemToIndex():  # table[q_idx] is a load; without this Dynamo would need the value of q_idx
        # "flatten_manual" would also trace torch's pytree, and guard all of its parts at every call
        _, graph, lifted = higher_order_ops.speculate_subgraph(
            tx, fn, arguments, {}, description=f"anyattn: {name}", source_target=operator, set_subgraph_inputs="manual"
        )
    if len(getattr(tx.output, "random_calls", ())) > drawn:
        unimplemented(
            gb_type="random number in a mod",
            context=name,
            explanation=f"{name} draws a random number, which would be one and the same for all (b, h, q_idx, kv_idx).",
            hints=["Compute it from a captured seed and the indices, by a hash in integer arithmetic."],
        )
    installed = tx.output.install_subgraph(name.replace(".", "_"), torch.fx.GraphModule(tx.output.nn_modules, graph))
    return higher_order_ops.make_attr(tx, installed), tuple(lifted)


def _invert(self: BuiltinVariable, tx: Any, operand: VariableTracker) -> VariableTracker | None:
    """``operator.invert`` of a ``Mask``; returns None for any other operand, which Dynamo then handles."""
    if isinstance(operand, UserDefinedObjectVariable) and issubclass(operand.python_type(), Mask):
        return operand.call_method(tx, "__invert__", [], {})
    return None


def install() -> None:
    """Adds the operator to Dynamo's table; raises ``AttributeError`` if this torch lacks it, or a function that traces mods.

    Up to torch 2.13, Dynamo calls ``__and__`` and ``__or__`` of a user's class but not ``__invert__``, so ``~mask`` is registered here too.
    """
    if not hasattr(BuiltinVariable, "call_invert"):
        BuiltinVariable.call_invert = _invert  # type: ignore[attr-defined]
    for name in ("speculate_subgraph", "discard_graph_changes", "make_attr"):
        getattr(higher_order_ops, name)
    torch.compiler.allow_in_graph(marked)
    higher_order_ops._hop_name_to_variable_class["anyattn_call_with_mods"] = CallWithModsVariable


install()
