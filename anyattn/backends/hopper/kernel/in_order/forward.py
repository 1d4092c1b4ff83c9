"""``HopperInOrderForward``: the forward kernel that visits keys in their order, with sums of its own for each section of them."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.hopper.kernel.forward import HopperForward
from anyattn.backends.hopper.kernel.in_order.arithmetic import product
from anyattn.backends.hopper.kernel.in_order.mma import MultipliesInOrder
from anyattn.backends.hopper.kernel.in_order.producer import LoadsInOrder

__all__ = ["HopperInOrderForward"]


class HopperInOrderForward(LoadsInOrder, MultipliesInOrder, HopperForward):
    """Attention forward for one ``Config`` that is ``in_order``."""

    def of_nothing(self, logit: Any) -> Any:
        return product(product(logit, Float32(LOG2E)), Float32(LN2))

    def more_in_smem(self, storage: Any) -> tuple[Any, ...]:
        """Each consumer thread's part of a row tile's output so far, 4 numbers at a time."""
        threads = 128 * self.config.consumers
        return (storage.sums.get_tensor(cute.make_layout((4, threads, self.config.head_dim_v // 8))),)
