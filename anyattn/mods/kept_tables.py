"""Tables that follow from numbers alone, such as the buckets of distances: made once for each device and kept.

A mod that is made anew in every layer then captures one tensor, so that its calls are warm: bounds checks that read a table remember it by
its identity (``analysis.by_writes``).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from anyattn.mods.analysis.visible_loads import is_captured

__all__ = ["kept_table"]

_MOST, _MOST_BYTES = 256, 2**26
_tables: dict[tuple, Tensor] = {}
_are_transforms_active, _count_modes = torch._C._are_functorch_transforms_active, torch._C._len_torch_dispatch_stack  # type: ignore
_is_traced = torch._C._is_tracing  # type: ignore[attr-defined]


def kept_table(make: Callable[..., Tensor], *numbers: int, device: torch.device) -> Tensor:
    """The table ``make(*numbers, device=device)``. Callers must not write to it. make: a function at the top level of a module.

    Once kept, a table is never released, because a captured CUDA graph or another stream may still read it; so when 256 or 64 MiB are kept,
    further ones are made at each call. So are those that torch intercepts (compilation, modes, transforms), and those of a graph's capture,
    which have no contents before its replay. The first call for a device waits for the table, which all of its streams may read from then
    on.

    >>> kept_table(torch.ones, 3, device=torch.device("cpu")) is kept_table(torch.ones, 3, device=torch.device("cpu"))
    True
    """
    if torch.compiler.is_compiling() or _are_transforms_active() or _count_modes() or _is_traced():
        return make(*numbers, device=device)
    key = make, numbers, device
    found = _tables.get(key)
    if found is not None:
        return found
    if len(_tables) >= _MOST or device.type == "meta" or (device.type == "cuda" and is_captured()):
        return make(*numbers, device=device)
    with torch.inference_mode(False):  # autograd saves no inference tensor
        made = make(*numbers, device=device)
    if type(made) is not Tensor:  # made under a mode of functions
        return made
    if sum(t.nbytes for t in [made, *_tables.values()]) > _MOST_BYTES:
        return made
    if device.type != "cpu" and made.numel():
        made.flatten()[-1].item()  # waits for it
    return _tables.setdefault(key, made)
