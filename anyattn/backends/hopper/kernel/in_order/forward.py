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

    def _fours(self, numbers: int) -> Any:
        """So many numbers of a row tile's output so far: 4 of each consumer thread at a time."""
        threads = 128 * self.config.consumers
        return cute.make_layout((4, threads, numbers // (4 * threads)))

    def fours_in_smem(self) -> int:
        """How many times 4 numbers of a thread's output so far shared memory has, those of the first columns."""
        return self.config.sums_in_smem // (4 * 128 * self.config.consumers)

    def more_in_smem(self, storage: Any) -> tuple[Any, ...]:
        return (storage.sums.get_tensor(self._fours(self.config.sums_in_smem)),)

    def of_sections(self, in_smem: Any, captured: Any) -> tuple[Any, Any]:
        """``_fours`` in shared memory, and those of this thread block in the last captured tensor; None if all are in shared memory."""
        if not self.config.global_sums:
            return in_smem[4], None
        block, _, _ = cute.arch.block_idx()
        place = (captured[1][-1].iterator + block * self.config.global_sums).toint()
        far = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
        return in_smem[4], cute.make_tensor(far, self._fours(self.config.global_sums))


class HopperInPlaceForward(MultipliesInPlace, HopperInOrderForward):
    """The same with weights in the place of scores."""
