"""Backward adding role: a warp that adds the warp groups' parts of dQ to global memory and stores finished dK and dV, by TMA.

Deterministic sums take two such warps, in turns. A row tile's sums are complete in global memory about one visit after the addition begins,
and only then may the next key tile add. Meanwhile the other warp waits for the turn of the next visit's row tile, and adds to it. Each warp
group's part is free as soon as it has been read: at 256 columns, whose dQ passes in two steps, waiting for both groups took 6 % longer.
"""

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from anyattn.backends.hopper.kernel.bulk_copy import add_floats

__all__ = ["ADD_THREADS", "END", "FILLED", "FREE", "KEYS", "KEYS_LEFT", "LEFT_THREADS", "NOTED", "Adds"]

KEYS_LEFT = 1  # named barrier: dV of the previous key tile has been read out of the buffer of dS
_YOURS = 2  # first of the named barriers, one per adding warp if there are two: the next part is left to it
FILLED = 6  # first of the named barriers, one per warp group: its part of dQ, or of dK and dV, is complete in shared memory
FREE = 8  # first of the named barriers, one per warp group: its part has been read out of the buffer of dQ
ADD_THREADS = 160  # threads of a warp group and an adding warp
LEFT_THREADS = 288  # threads of two warp groups and an adding warp
_BOTH_THREADS = 64  # threads of two adding warps
NOTED = 6  # numbers that a warp group's first thread posts with its part
_LOOKS = 3  # at the count of a row tile to come, before its turn has to be waited for
END, KEYS = -1, -2  # posted in place of a row tile: the work is finished; the part is dK and dV of a key tile


class Adds:
    """The adding role of ``HopperBackward``."""

    config: Any
    store_whole_parts: Any

    @cute.jit
    def add(self, warp, dq, board, sums, turns, keys, leaving, ratio):
        """Adds and stores until ``END`` is posted. warp: this one's number among the adding warps. board: for each warp group (row tile,
        head, entry, turn), or (``KEYS``, kv head, entry or row of storage, whether this warp stores them, key tile, first row in storage),
        or (``END``, how many more times it is posted: once for each adding warp). keys: (copy atom, tensor) of dK and dV. leaving: dK and
        dV in shared memory. ratio: query heads of a key tile."""
        groups, steps = self.config.tiles.warp_groups, self.config.tiles.dq_steps
        size = self.config.tiles.tile_m * self.config.head_dim // groups
        more, step = Int32(1), Int32(0)
        ahead, passed = (Int32(-1), Int32(0), Int32(0)), Int32(0)
        if warp == 0:
            self._freed()
            if const_expr(self.config.posts_keys):
                cute.arch.barrier_arrive(barrier_id=KEYS_LEFT, number_of_threads=LEFT_THREADS)
        elif const_expr(turns is not None):
            self._hand_to(0)
        while more != 0:
            if const_expr(turns is not None):
                if step == 0:
                    cute.arch.barrier(barrier_id=_YOURS + warp, number_of_threads=_BOTH_THREADS)
            m, head, entry, turn = (Int32(0) for _ in range(4))
            for group in cutlass.range_constexpr(groups):
                cute.arch.barrier(barrier_id=FILLED + group, number_of_threads=ADD_THREADS)
                m, head, entry, turn = (board[i, group] for i in range(4))
                if m == END:
                    more = Int32(0)
                if m >= 0:
                    if cute.arch.lane_idx() == 0:
                        if const_expr(turns is not None and group == 0):
                            if step == 0:
                                self._await(turns, (m, head, entry), turn, ahead, passed)
                        target = sums[entry, head, m, None].iterator + group * size + step * (size // steps)
                        add_floats(target, dq[None, None, None, group].iterator, 4 * (size // steps))
                        cute.arch.cp_async_bulk_commit_group()
                        cute.arch.cp_async_bulk_wait_group(0, read=True)
                    cute.arch.sync_warp()
                    cute.arch.barrier_arrive(barrier_id=FREE + group, number_of_threads=ADD_THREADS)
                if const_expr(group == groups - 1 and self.config.posts_keys):
                    if m == KEYS:  # each group has posted the same key tile
                        self._store_keys(board, keys, leaving)
            if const_expr(turns is not None):
                if m >= 0:  # each group has posted the same row tile
                    if step == steps - 1:
                        self._hand_to(1 - warp)
                        ahead = self._after_next(m, head, entry, ratio)
                        if cute.arch.lane_idx() == 0:
                            self._pass_on(turns, (m, head, entry))
                            passed = self._passed_soon(turns, ahead, turn)
                elif m == KEYS:
                    self._hand_to(1 - warp)
                elif head > 0:  # the end, which the other warp is told after this one
                    self._freed()
                    self._hand_to(1 - warp)
            step = steps - 1 - step
        cute.arch.cp_async_bulk_wait_group(0, read=False)

    def _after_next(self, m: Any, head: Any, entry: Any, ratio: Any) -> tuple[Any, Any, Any]:
        """The row tile to which this warp adds next: that of the next visit but one, unless the key tile ends before."""
        if not self.config.interleaves_heads:
            return cutlass.max(m - 2, 0), head, entry
        of_group = head % ratio
        after = of_group + 2
        return cutlass.max(m - after // ratio, 0), head - of_group + after % ratio, entry

    def _freed(self) -> None:
        """Signals both warp groups that their part has been read out of shared memory."""
        for group in range(self.config.tiles.warp_groups):
            cute.arch.barrier_arrive(barrier_id=FREE + group, number_of_threads=ADD_THREADS)

    def _hand_to(self, warp: Any) -> None:
        """Hands the next part of dQ to adding warp ``warp``."""
        cute.arch.barrier_arrive(barrier_id=_YOURS + warp, number_of_threads=_BOTH_THREADS)

    @cute.jit
    def _store_keys(self, board, keys, leaving):
        """Stores dV, then dK: the buffer that dV is in is needed first."""
        self.store_whole_parts(board, keys[1], leaving[1], self.config.head_dim_v)
        cute.arch.cp_async_bulk_commit_group()
        self.store_whole_parts(board, keys[0], leaving[0], self.config.head_dim)
        cute.arch.cp_async_bulk_commit_group()
        cute.arch.cp_async_bulk_wait_group(1, read=True)
        cute.arch.sync_warp()
        cute.arch.barrier_arrive(barrier_id=KEYS_LEFT, number_of_threads=LEFT_THREADS)
        cute.arch.cp_async_bulk_wait_group(0, read=True)
        cute.arch.sync_warp()
        self._freed()

    @cute.jit
    def _await(self, turns, place, turn, ahead, passed):
        """Waits until ``turn`` key tiles have added to the row tile at ``place``. passed: the count of row tile ``ahead``."""
        known = Int32(0)
        if (place[0] == ahead[0]) & (place[1] == ahead[1]) & (place[2] == ahead[2]):
            known = passed
        while known < turn:
            known = self._passed(turns, place)

    @cute.jit
    def _passed_soon(self, turns, place, turn):
        """The count of a row tile to come, read while the other warp adds. It is read again if it is not ``turn`` yet, which is the tile's
        own turn, or near it: a count that is known when the tile is posted saves a load that the warp groups would wait for."""
        passed = self._passed(turns, place)
        for _ in cutlass.range_constexpr(_LOOKS - 1):
            if passed < turn:
                passed = self._passed(turns, place)
        return passed

    def _passed(self, turns: Any, place: Any) -> Any:
        """The number of key tiles that have added to a row tile. The load is relaxed, because this thread reads nothing that they wrote: it
        only issues an addition after the count is known."""
        m, head, entry = place
        return cute.arch.load(turns[entry, head, None].iterator + m, Int32, sem="relaxed", scope="gpu")

    @cute.jit
    def _pass_on(self, turns, place):
        """Increments a row tile's count once the sums of all warp groups are written to global memory, not only read from shared memory.

        The increment releases: the copies' completion is known to this thread only, and a count that others saw before the sums would let
        them add too early.
        """
        m, head, entry = place
        cute.arch.cp_async_bulk_wait_group(0, read=False)
        cute.arch.fence_proxy("async.global")
        cute.arch.atomic_add(turns[entry, head, None].iterator + m, Int32(1), sem="release", scope="gpu")
