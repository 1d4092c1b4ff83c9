"""``HopperInOrderForward``: the forward kernel that visits keys in their order, with sums of its own for each section of them."""

from typing import Any

import cutlass.cute as cute
from cutlass import Float32

from anyattn.arithmetic import LN2, LOG2E
from anyattn.backends.hopper.kernel.forward import HopperForward
from anyattn.backends.hopper.kernel.in_order.arithmetic import product
from anyattn.backends.hopper.kernel.in_order.in_place import MultipliesInPlace
from anyattn.backends.hopper.kernel.in_order.mma import MultipliesInOrder
from anyattn.backends.hopper.kernel.in_order.producer import LoadsInOrder

__all__ = ["HopperInOrderForward"]


class HopperInOrderForward(LoadsInOrder, MultipliesInOrder, HopperForward):
    """Attention forward for one ``Config`` that is ``in_order``."""

    def of_nothing(self, logit: Any) -> Any:
        return product(product(logit, Float32(LOG2E)), Float32(LN2))

    def _parts(self) -> Any:
        """Each consumer thread's part of a row tile's output so far, 4 numbers at a time."""
        return cute.make_layout((4, 128 * self.config.consumers, self.config.head_dim_v // 8))

    def more_in_smem(self, storage: Any) -> tuple[Any, ...]:
        return () if self.config.has_global_sums else (storage.sums.get_tensor(self._parts()),)

    def of_sections(self, in_smem: Any, captured: Any) -> Any:
        """``_parts`` in shared memory, or those of this thread block in the last captured tensor."""
        if not self.config.has_global_sums:
            return in_smem[4]
        block, _, _ = cute.arch.block_idx()
        place = (captured[1][-1].iterator + block * self.config.sums).toint()
        return cute.make_tensor(cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16), self._parts())


class HopperInPlaceForward(MultipliesInPlace, HopperInOrderForward):
    """The same with weights in the place of scores."""
