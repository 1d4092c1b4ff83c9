"""The Hopper backend: attention forward and backward on NVIDIA Hopper by CuTe DSL kernels, specialised for each variant's mods.

For users of CuTe itself the package also exports ``HopperForward``; ``cute_api`` describes, compiles and launches it.
"""

from typing import Any

from anyattn.backends.hopper.api import forward, reads_lists, repeater
from anyattn.backends.hopper.backward import backward

__all__ = ["HopperForward", "backward", "forward", "reads_lists", "repeater"]


def __getattr__(name: str) -> Any:
    """Imports ``HopperForward``, and CuTe DSL with it, at first use."""
    if name == "HopperForward":
        from anyattn.backends.hopper.kernel.forward import HopperForward

        return HopperForward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
