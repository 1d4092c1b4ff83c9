"""Attention forward on NVIDIA Hopper: one kernel in CuTe DSL for every variant, specialised by what the mods are.

For users of CuTe itself ``HopperForward`` stands here too, and ``direct`` has what goes with it.
"""

from typing import Any

from anyattn.backends.hopper.api import forward

__all__ = ["HopperForward", "forward"]


def __getattr__(name: str) -> Any:
    """``HopperForward`` imports CuTe DSL, which only who asks for it needs."""
    if name == "HopperForward":
        from anyattn.backends.hopper.kernel.forward import HopperForward

        return HopperForward
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
