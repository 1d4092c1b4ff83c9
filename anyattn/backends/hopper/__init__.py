"""The Hopper backend: attention on NVIDIA Hopper by CuTe DSL kernels, forward and backward, specialised for each variant's mods.

For users of CuTe itself it also exports ``HopperForward``; ``cute_api`` has what goes with it.
"""

from typing import Any

from anyattn.backends.hopper.api import forward, reads_lists, repeater
from anyattn.backends.hopper.backward import backward

__all__ = ["HopperForward", "backward", "forward", "reads_lists", "repeater"]


def __getattr__(name: str) -> Any:
    """Imports ``HopperForward``, and with it CuTe DSL, at first use."""
    if name == "HopperForward":
        from anyattn.backends.hopper.kernel.forward import HopperForward

        return HopperForward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
