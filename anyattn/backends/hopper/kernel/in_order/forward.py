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

_FLOATS = 32  # in the memory of 64 columns of a row


class HopperInOrderForward(LoadsInOrder, MultipliesInOrder, HopperForward):
    """Attention forward for one ``Config`` that is ``in_order``."""

    def of_nothing(self, logit: Any) -> Any:
        return product(product(logit, Float32(LOG2E)), Float32(LN2))

    def _fours(self, numbers: int) -> Any:
        """So many numbers of a row tile's output so far: 4 of each consumer thread at a time."""
        threads = 128 * self.config.consumers
        return cute.make_layout((4, threads, numbers // (4 * threads)))

    def fours_of_sections(self) -> tuple[int, ...]:
        """How many times 4 numbers of a thread's output so far each place of ``of_sections`` has, the first columns' first."""
        return tuple(numbers // (4 * 128 * self.config.consumers) for numbers in self.config.sums)

    def more_in_smem(self, storage: Any) -> tuple[Any, ...]:
        return (storage.sums.get_tensor(self._fours(self.config.sums.in_smem)),)

    def of_sections(self, in_smem: Any, q_state: Any, captured: Any) -> tuple[Any, ...]:
        """``_fours`` in the places of ``in_order.Sums``, None for none."""
        if not any(self.config.sums[1:]):
            return in_smem[4], None, None
        block, _, _ = cute.arch.block_idx()
        place = (captured[1][-1].iterator + block * self.config.sums.in_global).toint()
        far = cute.make_ptr(Float32, place, cute.AddressSpace.gmem, assumed_align=16)
        return in_smem[4], self._in_q(in_smem[0][None, None, q_state.index]), cute.make_tensor(far, self._fours(self.config.sums.in_global))

    def _in_q(self, q: Any) -> Any:
        """The fours in the place of Q's columns that registers hold. A warp has the memory of its own 16 rows, so no other warp has to have
        read them. In shared memory 64 columns of all rows follow one another, 128 bytes of each."""
        rows, of_warp = self.config.tiles.tile_m, 16 * _FLOATS
        each = of_warp // (4 * 32)  # fours of a lane in 64 columns
        blocks = self.config.sums.in_q // (rows * _FLOATS)
        lanes = cute.make_layout((32, rows // 16), stride=(4, of_warp))
        fours = cute.make_layout((each, blocks), stride=(4 * 32, rows * _FLOATS))
        layout = cute.make_layout((4, lanes.shape, fours.shape), stride=(1, lanes.stride, fours.stride))
        pointer = cute.make_ptr(Float32, q.iterator.toint(), cute.AddressSpace.smem, assumed_align=1024)
        return cute.make_tensor(pointer, layout)


class HopperInPlaceForward(MultipliesInPlace, HopperInOrderForward):
    """The same with weights in the place of scores."""
