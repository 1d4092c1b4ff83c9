"""``HopperAloneBackward``: the backward kernel for lists of 64 keys, by one warp group per thread block and two thread blocks."""

from anyattn.backends.hopper.kernel.backward.alone_mma import MultipliesAlone
from anyattn.backends.hopper.kernel.backward.backward import HopperBackward

__all__ = ["HopperAloneBackward"]


class HopperAloneBackward(MultipliesAlone, HopperBackward):
    """Attention backward for one ``BackwardConfig`` whose tiles have two ``blocks``."""
