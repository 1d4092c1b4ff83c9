"""The Hopper backend: attention forward and backward on NVIDIA Hopper by CuTe DSL kernels, specialised for each variant's mods.

For users of CuTe itself the package also exports ``HopperForward``; ``cute_api`` describes, compiles and launches it.
"""

from typing import Any

from anyattn.backends.hopper.repeater import Repeater

__all__ = ["HopperForward", "Repeater"]


def __getattr__(name: str) -> Any:
    """Imports ``HopperForward``, and CuTe DSL with it, at first use."""
    if name == "HopperForward":
        from anyattn.backends.hopper.kernel.forward import HopperForward

        return HopperForward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
