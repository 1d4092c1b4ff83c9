"""Calls whose rows have the same bits in every batch (``deterministic="batch"``): what the kernel in the order of keys has where.

Its numbers are those of Triton's kernel, instruction by instruction, so that the two may be chosen call by call: prefill is Hopper's, and
decoding, pages and all that ``plan`` refuses Triton's. Where Triton's compiler may write other instructions, all of it is Triton's. Prefill
of 8,192 rows, 32 heads on an H200, in the default's time, causal, full and in a window of 1,024: at head dimension 128 1.08, 1.11 and 1.19
(Triton's kernel 1.54, 1.61, 1.46; without sections 1.05, 1.05 and 1.15), at 64 1.08, 1.08 and 1.12, at 192 1.06, 1.10 and 0.97, at 256
1.10, 1.10 and 1.08.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["NO_SUMS", "Sums", "columns_of_q_held", "sums_of"]

_HELD = {(256, 64): 16, (192, 96): 16, (128, 256): 96}  # columns of Q in registers, by rows and head dimensions for which all have no room
_BLOCK = 64  # columns of a tile of Q that follow one another in shared memory, for all rows


class Sums(NamedTuple):
    """float32 numbers of a row tile. in_smem: in shared memory of their own. in_q: in that of Q's columns which registers hold. in_global:
    in global memory, beside the captured tensors."""

    in_smem: int
    in_q: int
    in_global: int


NO_SUMS = Sums(0, 0, 0)


def columns_of_q_held(tile_m: int, head_dim: int) -> int:
    """The columns of Q that registers hold: the first ones, or all."""
    return _HELD.get((tile_m, head_dim), head_dim)


def sums_of(tile_m: int, head_dim: int, head_dim_v: int) -> Sums:
    """All are in shared memory of their own, or those of 64 columns if there are over 128 (192: more would take Q's stage).

    What goes to global memory and back costs time, however many loads are under way: at D 256 192 columns there took 1.103 of the default's
    time and 160 take 1.097, with no sections at all 1.03; at D 192 128 took 1.10, in full attention 1.15, and 32 take 1.06 and 1.10 (H200).
    Registers for 128 of D 256's columns of Q, which leave 128 there, take 1.09 and spill.

    >>> sums_of(128, 128, 128), sums_of(128, 256, 256)
    (Sums(in_smem=16384, in_q=0, in_global=0), Sums(in_smem=8192, in_q=4096, in_global=20480))
    """
    if head_dim_v <= 128:
        return Sums(tile_m * head_dim_v, 0, 0)
    in_smem = tile_m * 64
    in_q = columns_of_q_held(tile_m, head_dim) // _BLOCK * _BLOCK * tile_m // 2  # of 16 bits each
    return Sums(in_smem, in_q, tile_m * head_dim_v - in_smem - in_q)
