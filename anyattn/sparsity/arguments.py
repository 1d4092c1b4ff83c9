"""Checks of the arguments that every maker of tile lists takes."""

from __future__ import annotations

import operator
from typing import Any

import torch

from anyattn.mods.trace import TracedMod

__all__ = ["device_of", "length", "pair"]


def length(name: str, value: Any, least: int = 0) -> int:
    """``value`` as an int >= ``least``."""
    wanted = f"an integer >= {least}"
    if isinstance(value, (bool, float, str)) or value is None:
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}); wanted {wanted}{_int_cure(value)}")
    try:
        number = operator.index(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is a {type(value).__name__}; wanted {wanted}, such as tensor.shape[-2]") from None
    if number < least:
        raise ValueError(f"{name} is {number}; wanted {wanted}")
    return number


def _int_cure(value: Any) -> str:
    return f"; pass {int(value)}" if isinstance(value, float) and value.is_integer() else ""


def pair(name: str, value: Any) -> tuple[int, int]:
    """A tile size: one positive int for both sides, or (rows, columns)."""
    if isinstance(value, (tuple, list)):
        if len(value) != 2:
            raise ValueError(f"{name} is {value!r}; wanted one integer or a pair (query rows, keys)")
        return length(f"{name}[0]", value[0], 1), length(f"{name}[1]", value[1], 1)
    number = length(name, value, 1)
    return number, number


def device_of(device: Any, mod: TracedMod) -> torch.device:
    """The device to build on: as told, else where the mod's captured tensors are, else the accelerator, else the CPU."""
    if device is None:
        if mod.tensors:
            return mod.tensors[0].device
        current = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return torch.device(current or "cpu")
    device = torch.device(device)
    for tensor in mod.tensors:
        if tensor.device.type != device.type:
            raise ValueError(
                f"device is {str(device)!r} but {mod.kind}_mod {mod.name!r} captures a tensor of shape {tuple(tensor.shape)} on "
                f"{str(tensor.device)!r}; move it with .to({str(device)!r}) before capturing it, or build on its device"
            )
    return device
