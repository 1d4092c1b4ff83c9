"""Check of a ``device`` argument, for functions that allocate on a device that the user names."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["usable_device"]


def usable_device(device: Any) -> torch.device:
    """The device of this name. Raises ``ValueError`` if there is no such device, or torch cannot allocate on it.

    >>> usable_device("cpu")
    device(type='cpu')
    >>> usable_device("nonsense")
    Traceback (most recent call last):
    ValueError: device is 'nonsense'; wanted a torch.device or the name of one, such as 'cpu' or 'cuda'
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}; wanted a torch.device or the name of one, such as 'cpu' or 'cuda'") from error
    if found.type != "cpu":
        try:
            torch.empty(0, device=found)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            raise ValueError(f"device is {str(device)!r}, which torch has not here: {str(error).splitlines()[0]}; wanted 'cpu'") from error
    return found
