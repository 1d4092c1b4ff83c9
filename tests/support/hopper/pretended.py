"""A CPU that is treated as a Hopper GPU, as far as possible without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from anyattn.backends.hopper.compile.launch import kinds_of
from anyattn.hardware import Hardware

__all__ = ["H200", "Launch", "noting"]

H200 = Hardware("cuda", "an H200", 0, frozenset((torch.float16, torch.bfloat16, torch.float32)), (9, 0), 132)
Launch = tuple[Any, tuple]  # config, arguments


def noting(found: list[Launch], config: Any, kinds: tuple) -> Callable[..., None]:
    """A kernel for ``config`` that notes its launches, and takes arguments of its own kinds alone, as a compiled one does."""
    wanted = list(kinds)
    for i, kind in enumerate(kinds):  # as ``launch.indexable`` passes them
        if kind is torch.bool:
            wanted[i] = torch.uint8
        if isinstance(kind, torch.dtype) and kinds[i + 1] == 0:
            wanted[i + 1] = 1

    def kernel(*arguments: Any) -> None:
        assert [*kinds_of(arguments)[0]] == wanted, f"a kernel for {wanted} is given {kinds_of(arguments)[0]}"
        found.append((config, arguments))

    return kernel
