"""Direct calls of the operators in Inductor's Python code, without torch's dispatcher, which takes longer than a warm attention call.

Inductor writes ``torch.ops.anyattn.attend.default(...)`` into the code that it generates for a graph; that call converts each argument to
C++ and back. Inductor's table of custom code for operators is given another line: a call of ``direct``, a Python function. Where a call
needs the dispatcher (modes, transforms, subclasses, autograd, profilers), that function calls the operator. The table is semi-private:
without it, and in C++ code (AOTInductor), the operator is called as usual.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import forward_ad

from anyattn.custom_ops.arguments import Arguments

__all__ = ["direct", "install", "needs_dispatcher"]

_Below = torch._C._AutoDispatchBelowAutograd  # type: ignore[attr-defined]
# looked up once: every call uses all of them
_are_transforms_active, _count_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack  # type: ignore
_is_traced, _is_profiled = torch._C._is_tracing, torch._C._autograd._profiler_enabled  # type: ignore
_has_function_mode, _is_grad_enabled = torch._C._is_torch_function_mode_enabled, torch._C.is_grad_enabled  # type: ignore
_any_requires_grad = torch._C._any_requires_grad  # type: ignore[attr-defined]
_count_write = torch.autograd.graph.increment_version


def direct(operator: Any, arguments: Arguments, run: Callable[..., Any], written: Sequence[int] = ()) -> Callable[..., Any]:
    """A function that calls ``run`` directly where the dispatcher would do nothing but call it, and else the operator.

    written: the positions of the tensors that it writes to, whose writes are counted as the operator counts them.
    Its attributes: ``run``, and ``may_pass``, the condition on a call's arguments; ``needs_dispatcher`` is the condition on modes.
    """
    are_plain = arguments.are_plain

    def may_pass(*values: Any) -> bool:
        return are_plain(*values) and not (_is_grad_enabled() and _any_requires_grad(*values))

    def call(*values: Any) -> Any:
        if needs_dispatcher() or not may_pass(*values):
            return operator(*values)
        for i in written:
            _count_write(values[i])
        with _Below():
            return run(*values)

    call.run, call.may_pass = run, may_pass  # type: ignore[attr-defined]
    return call


def needs_dispatcher() -> bool:
    """Whether a mode, transform or profiler intercepts torch's operators."""
    return bool(
        _are_transforms_active()
        or _count_modes()
        or _has_function_mode()
        or forward_ad._current_level >= 0
        or _is_traced()
        or _is_profiled()
    )


def install(operator: Any, module: str) -> bool:
    """Makes Inductor write direct calls of this module's operator; False if this torch has no table of custom code."""
    with contextlib.suppress(ImportError, AttributeError, TypeError):
        from torch._inductor.codegen import custom_extern_kernel_codegen as table

        code = table.CustomCodegen(python=partial(_write, module))
        table.CUSTOM_EXTERN_KERNEL_CODEGEN[f"torch.ops.{operator}"] = code
        return True
    return False


def _write(module: str, node: Any, writeline: Callable[[Any], None]) -> None:
    """Writes Inductor's line for a ``FallbackKernel``, with another callee, which is imported at the top of the code."""
    from torch._inductor.codegen.wrapper import ExternKernelAllocLine
    from torch._inductor.virtualized import V

    wrapper: Any = V.graph.wrapper_code
    whole = wrapper.get_root_graph() if hasattr(wrapper, "get_root_graph") else wrapper  # imports of a subgraph are not written
    operator = node.op_overload._opname
    name = f"anyattn_{operator}"
    whole.add_import_once(f"from {module} import {operator} as {name}")
    # code from Inductor's cache may run in a version of anyattn without direct calls
    whole.add_import_once(f'{name} = getattr({name}, "direct", {name})')
    node.python_kernel_name = name
    writeline(ExternKernelAllocLine(wrapper, node))
