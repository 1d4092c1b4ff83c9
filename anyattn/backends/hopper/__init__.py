"""Attention forward on NVIDIA Hopper: one kernel in CuTe DSL for every variant, specialised by what the mods are."""

from anyattn.backends.hopper.run import forward

__all__ = ["forward"]
