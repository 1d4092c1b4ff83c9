"""Definition of operators: as ``torch.library.custom_op``, but without the work that it repeats at every call.

Its checks of results (whether they share memory with arguments or with each other, which is tested here instead) and its second pass
through the dispatcher take longer than a warm attention call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from anyattn.custom_ops.arguments import Arguments
from anyattn.custom_ops.direct import direct, install
from anyattn.custom_ops.gradients import without_gradients
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.tensors.dynamo import opaque

__all__ = ["operator"]

_library = torch.library.Library("anyattn", "FRAGMENT")
# the ADInplaceOrView key counts writes
_BELOW_COUNTING, _BelowCounting = torch._C._after_ADInplaceOrView_keyset, torch._C._AutoDispatchBelowADInplaceOrView  # type: ignore
_count_write = torch.autograd.graph.increment_version


def operator(
    *records: type, fake: Callable[..., Any], left_out: dict[str, Any] | None = None, changed: tuple[str, ...] = ()
) -> Callable[[Callable[..., Any]], Any]:
    """Decorates the implementation of ``anyattn::NAME`` for every device, where NAME is the function's name; returns the operator.

    records, left_out: of its ``Arguments``; the implementation and the fake implementation take the records. changed: the tensors among
    them that it writes to. Its results are new memory. It has no derivative unless ``gradients.differentiable`` adds one. Its attribute
    ``direct`` is the function that Inductor's code calls instead, see ``direct.py``.
    """
    arguments = Arguments(*records, left_out=left_out)

    def define(fn: Callable[..., Any]) -> Any:
        name = fn.__name__
        written = [arguments.names.index(c) for c in changed]

        @without_default_device
        def run(*values: Any) -> Any:
            return fn(*arguments.records(values))

        def counted(call: Callable[..., Any], values: tuple) -> Any:
            for i in written:
                _count_write(values[i])
            with _BelowCounting():
                return call(*values)

        def counting(keyset: Any, *values: Any) -> Any:
            return counted(partial(overload.redispatch, keyset & _BELOW_COUNTING), values)

        _library.define(name + arguments.schema(fn, changed), tags=(torch.Tag.pt2_compliant_tag,))
        _library.impl(name, opaque(run), "CompositeExplicitAutograd")
        torch.library.register_fake(f"anyattn::{name}", lambda *values: fake(*arguments.records(values)), lib=_library)
        overload = getattr(torch.ops.anyattn, name).default
        if written:
            _library.impl(name, opaque(counting), "ADInplaceOrView", with_keyset=True)
        below_autograd = (lambda *values: counted(run, values)) if written else run
        _library.impl(name, opaque(without_gradients(overload, arguments, below_autograd)), "Autograd", with_keyset=True)
        overload.direct = opaque(without_default_device(direct(overload, arguments, below_autograd)))
        install(overload, fn.__module__)
        return overload

    return define
