"""torch's default device, suspended while eager calls run.

``torch.set_default_device`` and ``with torch.device(...)`` push a torch-function mode through which every torch function, method and
property then passes, each for a microsecond or more, though it changes only allocations without a ``device``. No allocation of this package
is without one. A user's code that is called meanwhile (the body of a mod, hooks of saved tensors) has the default device again.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._device import DeviceContext

__all__ = ["UsersDefaultDevice", "without_default_device"]

_has_modes = torch._C._is_torch_function_mode_enabled  # type: ignore[attr-defined]
_count_modes, _mode_at = torch._C._len_torch_function_stack, torch._C._get_function_stack_at  # type: ignore[attr-defined]
_Function = TypeVar("_Function", bound=Callable)


class _Suspended(threading.local):
    mode: Any = None


_suspended = _Suspended()


def without_default_device(fn: _Function) -> _Function:
    """Decorates a function that runs without torch's default device, unless other torch-function modes are active too."""

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not _has_modes() or not _is_alone():
            return fn(*args, **kwargs)
        before, _suspended.mode = _suspended.mode, _pop_mode()
        try:
            return fn(*args, **kwargs)
        finally:
            mode, _suspended.mode = _suspended.mode, before
            if mode is not None:  # else the user's code has removed it
                _push_mode(mode)

    return run  # type: ignore[return-value]


class UsersDefaultDevice:
    """Context in which a user's code has the default device that ``without_default_device`` has suspended."""

    def __enter__(self) -> None:
        self.mode, _suspended.mode = _suspended.mode, None
        if self.mode is not None:
            _push_mode(self.mode)

    def __exit__(self, *error: object) -> None:
        if self.mode is not None and _is_alone():
            _suspended.mode = _pop_mode()


def _is_alone() -> bool:
    """Whether a default device is the only torch-function mode."""
    return _count_modes() == 1 and type(_mode_at(0)) is DeviceContext
