"""Tile configurations: shapes, warps and stages of tiles by architecture, head dimension, dtype and pass, and whether they fit a device.

The tables were chosen by the compiler's output: no register spills inside a loop, shared memory for the stages, and among the rest the
fewest instructions per (query, key) pair. With two stages Triton starts loading a tile at the end of one step and waits for it at the
beginning of the next; only with three or more does a load have a whole step to arrive.
``kernel_options={"autotune": True}`` measures instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache

import torch

from anyattn.backends.triton.wide_tiles import blocks_of, is_divided, is_wide, padded, tiles_of, tiles_of_few
from anyattn.sequences.l2_groups import equal_groups, heads_side_by_side

__all__ = [
    "FEW", "LEAST_FRONT", "PASSES", "PipelineOptions", "Shape", "Tiles", "TmaUse", "architecture", "backward_tiles", "candidates",
    "capability_of", "fits", "fitting", "forward_tiles", "heads_in_turn", "heads_together", "most_keys_of", "most_short", "most_wrap",
    "needed", "pipeline_of", "reason_against", "requested_tiles", "resident", "row_sums", "shared_memory",
]  # fmt: skip

PASSES = ("forward", "dq", "dkdv")
# Shared memory bytes per block, by compute capability; an unlisted capability gets the least value of its generation.
_SHARED = {
    (7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10, (9, 0): 227 << 10, (10, 0): 227 << 10,
    (11, 0): 227 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10,
}  # fmt: skip
_LEAST_SHARED, _OF_AMD = {True: 99 << 10, False: 48 << 10}, 64 << 10  # from compute capability 8.0 on, and before
# Partial sums of a row's weights, added at the row's end: a thread has one column of eight, or two adjacent ones, and adds only its own.
# Tiles of few rows have a partial sum per column.
_ROW_SUMS = 8
LEAST_FRONT = 16  # bytes of a row's front (``kernels.wrapped_rows``): as many as the matrix products' loads take at a time
FEW = 32  # with at most so many rows, a tile leaves registers unused
_SMALL_PARTS = 2 << 10  # bytes of barriers, statistics and reductions
_OF_A_BLOCK = 1 << 10  # bytes that the system reserves in every block
_REGISTERS = 1 << 16  # of a multiprocessor, for a tile's scores; Triton itself only refuses tiles of more than 16 times as many
_WARPS = 8  # that fit at the 190 to 255 registers per thread of a tile of few rows
# Tiles of 16 rows on Hopper behave as if they took 168 registers per thread: H200 measurements fit that even where they take more, and
# forcing them to 168 was slower. This does not hold if mods load values at the keys.
_FEWEST, _MORE_WARPS = 16, 12


@dataclass(frozen=True)
class Tiles:
    """tile_m: query rows of a program. tile_n: keys of a step. num_warps, num_stages: Triton's. Powers of two, except the stages.

    Raises ``ValueError`` for tiles that are not powers of two from 16 on, or have more scores than a multiprocessor has registers.
    """

    tile_m: int
    tile_n: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        for name in ("tile_m", "tile_n"):
            size = getattr(self, name)
            if size < 16 or size & (size - 1):
                wanted = padded(min(max(size, 1), 256))
                raise ValueError(
                    f"{name}={size} in kernel_options; wanted a power of two of at least 16 for this backend, such as {wanted}"
                )
        if self.tile_m * self.tile_n > _REGISTERS:
            raise ValueError(
                f"tile_m={self.tile_m}, tile_n={self.tile_n} in kernel_options are tiles of {self.tile_m * self.tile_n} scores, and a "
                f"multiprocessor has {_REGISTERS} registers for them; wanted smaller tiles, such as 128 and 128"
            )


class TmaUse(IntEnum):
    """The tensors that the forward kernel accesses by tensor descriptors (TMA, from Hopper on). Each value includes the tensors and the
    conditions of those before it; the number is the kernel's constant IS_DESCRIBED.

    NONE: no tensor.
    KV_IN_KERNEL: keys and values of the program's sequence; the program makes the descriptors. All base addresses and strides are multiples
    of 16 bytes, keys are neither in pages nor in a decoder's cache, and the lists' tiles are multiples of tile_n.
    KV: keys and values; the descriptors are made with the launch. The call is dense, or its sequences are documents that fill the storage,
    whose tiles may contain keys of the next document; no two rows of k, or of v, share memory.
    KV_OUT: the output too. The call is dense and without splits, heads do not share a row tile, the lists' tiles are multiples of tile_m,
    and no two rows of out share memory.
    ALL: queries too. No two rows of q share memory.
    """

    NONE = 0
    KV_IN_KERNEL = 1
    KV = 2
    KV_OUT = 3
    ALL = 4


@dataclass(frozen=True)
class PipelineOptions:
    """Pipeline options of the forward kernel's loop over full tiles. is_late: a tile's second product overlaps the next tile's
    exponentials, so a tile's weights stay in registers. tma: the greatest use of TMA; a call whose condition for it fails has a lower one.
    is_joined: partial tiles are visited in the same loop, and evaluate their mask in a branch. is_grouped: programs process a few heads at
    a time, as many as fit in ``_NEAR`` bytes."""

    is_late: bool
    tma: TmaUse
    is_joined: bool = False
    is_grouped: bool = False


def most_keys_of(keys: int) -> int:
    """The class of a call by its number of keys: the least bound in the tables that holds, 0 above all of them."""
    return next((most for most in (_FEWEST_KEYS, _SHORT_KEYS) if keys <= most), _ANY_KEYS)


@lru_cache(maxsize=16)
def capability_of(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a CUDA device, None for any other device."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def most_wrap(d: int, dv: int) -> int:
    """The most bytes of a row that are loaded in pieces of 4, for these padded head dimensions; see ``launch.wrap_bytes``."""
    return _MOST_WRAP[_column_of(d, dv)]


def shared_memory(capability: tuple[int, int] | None) -> int:
    """Shared memory bytes that one block can have; for an unknown device the greatest value of any device."""
    if torch.version.hip is not None and capability is not None:
        return _OF_AMD
    if capability is None:
        return _SHARED[9, 0]
    return _SHARED.get(capability, _SHARED.get((capability[0], 0), _LEAST_SHARED[capability[0] >= 8]))


@dataclass(frozen=True)
class Shape:
    """The properties that tiles are chosen for: padded head dimensions, dtype, whether there is a score mod.

    columns: number of values that mods load per key. asks: lists name the tiles, and the mask is evaluated in partial ones. has_pairs: the
    score mod loads a value for every (row, key) pair. is_band: for a backward pass, whether each row sees a band of keys
    (``Program.has_band``). pair_bytes: of a pair's captured values that are loaded ahead, a tile at a time (``Style.even``). most_keys: see
    ``most_keys_of``. has_8_bits: keys and values are stored in 8 bits. wrap: of kernels over few rows, see ``launch.wrap_bytes``.
    is_narrow: their rows do not begin at multiples of 8 bytes, and columns are not wrapped. listed: rows and keys of the tiles of the
    call's own block lists, (0, 0) without. has_one_kv: a tile of keys has all of the values; only of wide heads.
    """

    d: int
    dv: int
    dtype: torch.dtype
    has_score: bool = False
    columns: int = 0
    asks: bool = False
    has_pairs: bool = False
    is_band: bool = False
    pair_bytes: int = 0
    most_keys: int = 0
    has_8_bits: bool = False
    wrap: int = 0
    is_narrow: bool = False
    listed: tuple[int, int] = (0, 0)
    has_one_kv: bool = False

    @property
    def kv_size(self) -> int:
        """Bytes of an element of the stored keys and values."""
        return 1 if self.has_8_bits else self.dtype.itemsize


def architecture(capability: tuple[int, int] | None) -> str:
    """The row of the tables: "sm_80", "sm_86" (little shared memory), "sm_90" or "sm_100"; other devices get one of the first two."""
    if capability is None:
        return "sm_80"
    if torch.version.hip is None and capability[0] in (9, 10, 11):
        return "sm_90" if capability[0] == 9 else "sm_100"
    return "sm_86" if shared_memory(capability) < 128 << 10 else "sm_80"


# (tile_m, tile_n, num_warps, num_stages) by architecture and pass, for 16 bits and a wider head dimension of up to 64, 128 and 256.
# Hopper's backward tiles up to 128 are the fastest of a sweep on an H200.
_TILES: dict[str, dict[str, tuple[tuple[int, int, int, int], ...]]] = {
    "sm_80": {
        "forward": ((128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2)),
        "dq": ((128, 64, 8, 2), (128, 32, 8, 2), (64, 32, 8, 1)),
        "dkdv": ((32, 128, 8, 2), (64, 64, 8, 2), (32, 64, 8, 1)),
    },
    "sm_86": {
        "forward": ((128, 64, 4, 3), (128, 64, 8, 2), (64, 32, 8, 2)),
        "dq": ((128, 64, 8, 2), (128, 32, 8, 1), (32, 32, 8, 1)),
        "dkdv": ((32, 128, 8, 2), (64, 64, 8, 1), (32, 32, 8, 1)),
    },
    "sm_90": {
        "forward": ((64, 128, 4, 2), (64, 64, 4, 3), (128, 64, 8, 2)),
        "dq": ((64, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 3)),
        "dkdv": ((64, 64, 4, 4), (64, 128, 8, 3), (32, 64, 8, 3)),
    },
    "sm_100": {
        "forward": ((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 2)),
        "dq": ((128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 1)),
        "dkdv": ((64, 128, 8, 2), (64, 64, 8, 2), (32, 64, 8, 1)),
    },
}  # fmt: skip
# float32: IEEE products do not use the tensor cores, and keep whole rows in registers. With one stage, directly from memory, they spill
# (except dq of the widest heads); with two, loops do not spill.
_FLOATS: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": ((64, 32, 8, 2), (64, 16, 8, 2), (32, 16, 8, 2)),
    "dq": ((32, 32, 4, 2), (32, 32, 8, 2), (32, 32, 8, 1)),
    "dkdv": ((32, 32, 4, 2), (32, 32, 8, 2), (16, 32, 8, 2)),
}
# The same up to head dimension 32, where whole rows leave registers for larger tiles: on an H200 forward and dq take 0.61 of the time.
_NARROW, _NARROW_FLOATS = 32, {"forward": (64, 64, 4, 3), "dq": (64, 64, 4, 2), "dkdv": (32, 32, 4, 2)}
# Forward pass over 8-bit keys and values, which become 16 bits in registers.
_TILES_8_BITS: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((64, 128, 4, 2), (128, 64, 8, 3), (64, 64, 8, 3))}
# Forward pass of up to ``_MOST_SHORT`` queries: one kernel for any number of heads in a tile, with the least tile_m of a product, because
# reading keys takes the time; more queries use the tiles for many. An architecture that is not listed uses tiles of as many rows as there
# are, in powers of two, with one kernel each.
_SHORT: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((16, 128, 4, 3), (16, 64, 4, 4), (16, 64, 4, 2))}
# The same where programs take even shares of all key tiles, and begin and end several row tiles: fewer bytes in flight, larger steps or
# fewer. The fastest of a sweep on an H200 (uneven batches of 32 sequences).
_SHORT_SHARED: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((16, 128, 4, 3), (16, 64, 4, 3), (16, 32, 4, 3))}
# The same for more than 16 rows of ``_SEVERAL`` queries or more; from 129 rows on with twice the rows and warps. On an H200, 8 sequences of
# 8,192 keys, 32 / 8 heads of 128: 16 queries 111 instead of 143 us, 32 queries 112 instead of 164.
_SEVERAL = 8
_SHORT_FULL: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 8, 2))}
# The same for 8-bit keys and values: wider tiles, whose conversions take most of the time; and for rows that are loaded in pieces of 4
# bytes, more threads for their addresses. The fastest of sweeps on an H200: 16 sequences of 32,768 keys, 32 / 8 heads of 128, take 273 us
# with 256 keys in a tile and 8 warps, 316 with 128 and 4 (in five stages).
_SHORT_8_BITS: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((16, 256, 4, 2), (16, 256, 8, 3), (16, 64, 4, 3))}
_SHORT_NARROW: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((16, 64, 8, 6), (16, 128, 8, 3), (16, 32, 8, 6))}
# The same for rows in wrapped columns (``kernels.wrapped_rows``), and the most bytes of their WRAP: the fastest of 21 on an H200.
_SHORT_WRAPPED: dict[str, tuple[tuple[int, int, int, int], ...]] = {"sm_90": ((16, 128, 4, 3), (16, 256, 8, 3), (16, 64, 4, 3))}
_MOST_WRAP = (8, 32, 32)
_MOST_SHORT = 16
# Pipeline options of the 16-bit forward pass, by head dimension as above; all off for other architectures, and for few queries.
_PIPELINES = {"sm_90": (
    PipelineOptions(False, TmaUse.ALL, is_grouped=True), PipelineOptions(True, TmaUse.ALL, True, True),
    PipelineOptions(False, TmaUse.KV, is_grouped=True), PipelineOptions(False, TmaUse.KV, True, True),
)}  # fmt: skip
# With a score mod, which also needs registers.
_PIPELINES_OF_SCORES = {"sm_90": (
    PipelineOptions(False, TmaUse.KV_OUT, is_grouped=True), PipelineOptions(True, TmaUse.KV, is_grouped=True),
    *2 * (PipelineOptions(False, TmaUse.KV, is_grouped=True),),
)}  # fmt: skip
# Backward pass of rows that see a band of keys, 16 bits: two programs per multiprocessor overlap their prologues and epilogues.
_BANDS: dict[str, dict[str, tuple[int, int, int, int]]] = {"sm_90": {"dq": (64, 64, 4, 2)}}
# Score mods that load a value per pair, 16 bits, head dimensions up to 64, by the greatest number of keys: with few, one or two steps need
# no pipeline; above ``_FEWEST_KEYS`` values that are loaded ahead (``Style.even``). The fastest of sweeps on an H200.
_FEWEST_KEYS, _SHORT_KEYS, _ANY_KEYS = 64, 384, 0
_PAIRS: dict[str, dict[int, dict[str, tuple[int, int, int, int]]]] = {
    "sm_90": {
        _FEWEST_KEYS: {"forward": (64, 32, 4, 1), "dq": (64, 32, 4, 1), "dkdv": (32, 64, 4, 1)},
        _SHORT_KEYS: {"forward": (64, 64, 4, 3), "dq": (128, 32, 4, 3), "dkdv": (32, 64, 4, 2)},
        _ANY_KEYS: {"forward": (64, 64, 4, 3), "dq": (64, 32, 4, 3), "dkdv": (64, 64, 4, 2)},
    }
}
_NEAR = 24 << 20  # bytes of keys and values that stay in the L2 cache, with room for the rest
_MOST_TOGETHER = 32  # heads
# The same for the backward pass: bytes that a program streams, for all heads together. On an H200 dk and dv are slightly faster with 64 MiB
# than with 32 or 128, since the last programs are shorter with more heads; dq, whose programs are shorter, has the forward pass's limit.
_NEAR_BACKWARD = {"dq": _NEAR, "dkdv": 64 << 20}
# More candidates for autotuning, for all architectures; those that do not fit are skipped.
_MORE: dict[str, tuple[tuple[int, int, int, int], ...]] = {
    "forward": ((128, 128, 8, 2), (128, 64, 8, 3), (128, 64, 4, 3), (64, 64, 4, 3), (64, 128, 4, 2), (64, 32, 4, 3), (128, 32, 8, 2)),
    "dq": ((128, 64, 8, 1), (128, 64, 8, 3), (64, 64, 4, 2), (64, 64, 4, 3), (64, 32, 8, 1), (128, 32, 8, 2)),
    "dkdv": (
        (64, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3), (32, 128, 8, 2), (64, 128, 8, 1), (64, 128, 8, 3), (32, 64, 8, 1), (64, 32, 8, 1),
    ),
}  # fmt: skip


def _default(name: str, shape: Shape, capability: tuple[int, int] | None) -> Tiles:
    arch = architecture(capability)
    if is_wide(shape.d, shape.dv):
        return Tiles(*tiles_of(name, shape.has_one_kv, shape.dtype.itemsize, arch))
    if shape.is_band and shape.dtype.itemsize == 2 and _column(shape) == 1 and name in _BANDS.get(arch, ()):
        return Tiles(*_BANDS[arch][name])
    loads_ahead = shape.has_pairs and (shape.pair_bytes > 0 or shape.most_keys == _FEWEST_KEYS)
    if loads_ahead and arch in _PAIRS and shape.dtype.itemsize == 2 and _column(shape) == 0:
        return Tiles(*_PAIRS[arch][shape.most_keys][name])
    if shape.dtype.itemsize != 2 and max(shape.d, shape.dv) <= _NARROW:
        return Tiles(*_NARROW_FLOATS[name])
    if name == "forward" and shape.has_8_bits and shape.dtype.itemsize == 2 and arch in _TILES_8_BITS:
        return _with_registers_to_spare(name, Tiles(*_TILES_8_BITS[arch][_column(shape)]), shape, arch)
    tiles = Tiles(*(_TILES[arch][name] if shape.dtype.itemsize == 2 else _FLOATS[name])[_column(shape)])
    if arch == "sm_90" and name == "forward" and shape.asks and shape.dtype.itemsize == 2 and _column(shape) < 2:
        # without descriptors (``pipeline_of``) larger tiles were faster
        tiles = Tiles(128, 64, 4, 3) if _column(shape) == 0 else Tiles(128, 128, 8, 2)
    return _with_registers_to_spare(name, tiles, shape, arch)


def _with_registers_to_spare(name: str, tiles: Tiles, shape: Shape, arch: str) -> Tiles:
    """``tiles``, or tiles with more registers per thread for programs that keep more values alive than the tables assume."""
    if shape.dtype.itemsize != 2:
        return tiles
    loads_much = shape.columns > 0 and shape.has_pairs  # per score, one value of the key and one of the pair
    if name == "forward" and tiles.tile_m // tiles.num_warps > 16 and (loads_much or (arch == "sm_90" and shape.has_score)):
        return replace(tiles, num_warps=8)  # with two blocks per multiprocessor a score mod has too few registers
    if name == "forward" and arch == "sm_100" and tiles.tile_n > 64 and (loads_much or shape.asks):
        return replace(tiles, tile_n=64, num_stages=3)
    if name == "dkdv" and arch == "sm_90" and _column(shape) == 0 and shape.has_score:
        return replace(tiles, num_warps=8, num_stages=3)
    return tiles


def needed(name: str, tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> int:
    """Shared memory bytes that suffice for a pass ("forward", "dq", "dkdv"): for resident operands and for every stage."""
    m, n, stages = tiles.tile_m, tiles.tile_n, tiles.num_stages
    if shape.wrap and name == "forward" and m <= FEW:  # a stage that is computed with has left its buffer
        stages = max(1, stages - 1)
    both, size = shape.d + shape.dv, shape.dtype.itemsize
    of_key = shape.d if shape.has_one_kv else both
    stay, step = {"forward": (m * shape.d, n), "dq": (m * both, n), "dkdv": (n * of_key, m)}[name]
    both = both if name == "dkdv" else of_key
    loaded = shape.kv_size if name == "forward" else size
    total = size * stay + loaded * stages * step * both + stages * (8 * step * shape.columns + m * n * shape.pair_bytes) + _SMALL_PARTS
    if name == "forward" and shape.has_8_bits:
        total += 8 * stages * step  # factors
        if shape.wrap and m <= FEW:  # fronts of rows, and weights
            total += 2 * max(shape.wrap, LEAST_FRONT) * stages * step + size * m * n
        if m > FEW:  # a warp group's products take operands from shared memory, converted
            total += size * step * both
    if name == "dkdv":  # lse and delta of a row
        total += stages * m * 8
    if name != "forward" and stages == 1:  # operands that two products need in different layouts are stored twice then
        total += size * step * max(shape.d, shape.dv)
    if name == "dq" and shape.has_score:  # a captured tensor's gradients may be transposed there before the store
        total += m * n * size + (m * n // 64) * (max(m, n) // 4) * size  # the second term: which 8 x 8 blocks are on one diagonal
    is_blackwell = capability is not None and capability[0] >= 10
    # a product's left operand goes through shared memory unless it comes from registers
    passed = m * n * (2 if name != "forward" else 1)
    about = shape.has_one_kv, shape.d, shape.dv, architecture(capability), n if name == "dkdv" else m, tiles.num_warps
    if size == 4 or (is_blackwell and name != "forward") or is_divided(name, *about):
        total += passed * size
    if name == "dq" and shape.has_score and capability is not None and capability[0] == 9:
        total += m * n * size  # for values added to captured tensors the left operand does not come from registers either
    if is_blackwell and name == "dkdv" and stages > 1:  # a step's last product still reads its rows while the next step's are loaded
        total += size * step * max(shape.d, shape.dv)
    return total


def resident(tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> int:
    """An estimate of the programs of a forward pass with few rows that are resident on a multiprocessor, by shared memory and registers."""
    is_warpgroup = capability is not None and capability[0] == 9 and tiles.tile_m >= 64  # its products read in-flight stages
    stages = max(1, tiles.num_stages - (not is_warpgroup))
    step = tiles.tile_n * (shape.d + shape.dv)
    passed = tiles.tile_n * (not is_warpgroup)  # weights; a warp group's products take them from registers
    used = shape.dtype.itemsize * tiles.tile_m * (shape.d + passed) + shape.kv_size * stages * step
    is_fewest = architecture(capability) == "sm_90" and tiles.tile_m <= _FEWEST and shape.dtype.itemsize == 2 and not shape.columns
    warps = _MORE_WARPS if is_fewest else _WARPS
    return max(1, min(shared_memory(capability) // (used + _OF_A_BLOCK), warps // tiles.num_warps))


def fits(name: str, tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> bool:
    """Whether the shared memory is enough for a pass with these tiles."""
    return needed(name, tiles, shape, capability) <= shared_memory(capability)


def reason_against(name: str, tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> str | None:
    """None if the tiles fit, else the reason against them, for people."""
    if fits(name, tiles, shape, capability):
        return None
    need, room = (x >> 10 for x in (needed(name, tiles, shape, capability), shared_memory(capability)))
    return f"its least tiles for head dimensions of {shape.d} and {shape.dv} take {need} KiB of shared memory, and a block has {room}"


def fitting(name: str, tiles: Tiles, shape: Shape, capability: tuple[int, int] | None) -> Tiles:
    """``tiles`` with fewer stages, then a narrower step, then a smaller resident side, until they fit the device. dk and dv in float32
    spill with one stage, so there the resident side shrinks before the second stage is given up."""
    step, stay = ("tile_m", "tile_n") if name == "dkdv" else ("tile_n", "tile_m")
    while not fits(name, tiles, shape, capability):
        is_last = name == "dkdv" and shape.dtype.itemsize == 4 and tiles.num_stages == 2 and getattr(tiles, step) == 16
        if tiles.num_stages > 1 and not (is_last and getattr(tiles, stay) > 16):
            tiles = replace(tiles, num_stages=tiles.num_stages - 1)
        elif getattr(tiles, step) > 16:
            tiles = replace(tiles, **{step: getattr(tiles, step) // 2})
        elif getattr(tiles, stay) > 16:
            tiles = replace(tiles, **{stay: getattr(tiles, stay) // 2})
        else:
            break
    return tiles


def most_short(dtype: torch.dtype, capability: tuple[int, int] | None, is_cache: bool = False) -> int:
    """The greatest number of queries for which heads of a group share a tile; with more queries, each head fills a tile alone. is_cache:
    keys are those of a decoder's cache, of which there are many more than queries."""
    return _MOST_SHORT if _has_short(dtype, capability) and not is_cache else 64


def _has_short(dtype: torch.dtype, capability: tuple[int, int] | None) -> bool:
    return architecture(capability) in _SHORT and dtype.itemsize == 2


def forward_tiles(
    shape: Shape, capability: tuple[int, int] | None, rows: int, is_short: bool, is_shared: bool = False, queries: int = 1
) -> Tiles:
    """The tiles of a forward pass over ``rows`` query rows, packed heads included, of ``queries`` positions. is_short: at most
    ``most_short`` queries. is_shared: programs take even shares of all key tiles."""
    if not _has_short(shape.dtype, capability):
        tiles = _few_rows(_default("forward", shape, capability), rows, shape.dtype)
    elif is_short and is_wide(shape.d, shape.dv):
        tiles = Tiles(*tiles_of_few(rows, shape.has_one_kv))
    elif is_short:
        is_full = rows > _FEWEST and queries >= _SEVERAL and not shape.has_8_bits
        of_16_bits = _SHORT_FULL if is_full else _SHORT_SHARED if is_shared else _SHORT
        of_8_bits = _SHORT_NARROW if shape.is_narrow else _SHORT_WRAPPED if shape.wrap else _SHORT_8_BITS
        table = of_8_bits if shape.has_8_bits else of_16_bits
        tiles = Tiles(*table[architecture(capability)][_column(shape)])
        if is_full and rows > 2 * tiles.tile_m:
            tiles = replace(tiles, tile_m=2 * tiles.tile_m, num_warps=8)
    else:
        tiles = _default("forward", shape, capability)
    rows_of_list = 0 if is_short else shape.listed[0]  # tiles of few rows have the heads of a group
    return fitting("forward", _within("forward", tiles, rows_of_list, shape.listed[1]), shape, capability)


def _within(name: str, tiles: Tiles, rows: int, keys: int) -> Tiles:
    """The tiles, made no larger than a tile of block lists, beyond which they would be empty. rows, keys: 0 for no limit."""
    m, n = (min(size, padded(most)) if most else size for size, most in ((tiles.tile_m, rows), (tiles.tile_n, keys)))
    if (m, n) == (tiles.tile_m, tiles.tile_n):
        return tiles
    # with 4 warps a 64 x 64 tile of dk and dv spills at a head dimension of 128
    warps = tiles.num_warps if name == "dkdv" and m * n >= 64 * 64 else max(4, tiles.num_warps * m * n // (tiles.tile_m * tiles.tile_n))
    return Tiles(m, n, min(warps, tiles.num_warps), max(tiles.num_stages, 3) if m < tiles.tile_m else tiles.num_stages)


def _few_rows(tiles: Tiles, rows: int, dtype: torch.dtype) -> Tiles:
    if rows > 64:
        return tiles
    tile_m = min(tiles.tile_m, padded(rows))
    warps = 4 if dtype.itemsize == 2 else max(4, tiles.num_warps * tile_m // tiles.tile_m)  # rows per thread as in the table
    return replace(tiles, tile_m=tile_m, num_warps=warps)


def _column(shape: Shape) -> int:
    return _column_of(shape.d, shape.dv)


def _column_of(d: int, dv: int) -> int:
    return 0 if max(d, dv) <= 64 else 1 if max(d, dv) <= 128 else 2


@lru_cache(maxsize=1024)
def pipeline_of(shape: Shape, capability: tuple[int, int] | None, is_short: bool) -> PipelineOptions:
    """The forward kernel's pipeline options. is_short: see ``forward_tiles``.

    Programs of documents have too few keys each for descriptors that they would make themselves. A score mod's loads per key need the
    registers that is_late takes. Its loads per pair overlap the first product, unless the compiler computes all addresses first; it does
    not if the output has a descriptor.
    """
    pipelines = (_PIPELINES_OF_SCORES if shape.has_score else _PIPELINES).get(architecture(capability))
    if pipelines is None or is_short or blocks_of(shape.d)[1] or shape.asks or shape.dtype.itemsize != 2 or shape.has_8_bits:
        return PipelineOptions(False, TmaUse.NONE)
    options = pipelines[3 if is_wide(shape.d, shape.dv) and not shape.has_one_kv else _column(shape)]
    options = replace(options, is_late=False) if shape.has_score and shape.columns else options
    return replace(options, tma=TmaUse.KV_OUT) if shape.has_pairs else options


def row_sums(tile_m: int, tile_n: int, dtype: torch.dtype) -> int:
    """The number of partial sums of a row's weights in the forward kernel. float32 takes one, for accuracy, and so do AMD's GPUs, on some
    of which more do not compile."""
    if tile_m <= FEW:
        return tile_n
    return 1 if dtype is torch.float32 or torch.version.hip is not None else _ROW_SUMS


def heads_together(heads: int, head_bytes: int) -> int:
    """L2 grouping: the number of heads that programs compute at a time, a divisor of ``heads``. head_bytes:
    of one head's keys and values."""
    return equal_groups(heads, min(_MOST_TOGETHER, heads_side_by_side(head_bytes, 1, _NEAR)))


def heads_in_turn(name: str, heads: int, head_bytes: int, is_uneven: bool) -> int:
    """L2 grouping of a backward pass: the number of heads, over all entries, computed at a time. head_bytes: streamed per head. is_uneven:
    the first tiles see many more queries or keys than others (a sink's keys), so those of all heads must start before the others."""
    return heads if is_uneven else min(heads, heads_side_by_side(head_bytes, 1, _NEAR_BACKWARD[name]))


def backward_tiles(shape: Shape, capability: tuple[int, int] | None) -> dict[str, Tiles]:
    """The tiles of the kernels "dq" and "dkdv"."""
    return {name: fitting(name, _within(name, _default(name, shape, capability), *shape.listed), shape, capability) for name in PASSES[1:]}


def requested_tiles(name: str, tiles: Tiles, shape: Shape, capability: tuple[int, int] | None, device: str) -> Tiles:
    """The tiles that kernel_options request, with as many stages as fit. Raises ``ValueError`` if even one
    stage does not fit the device."""
    while tiles.num_stages > 1 and not fits(name, tiles, shape, capability):
        tiles = replace(tiles, num_stages=tiles.num_stages - 1)
    if not fits(name, tiles, shape, capability):
        raise ValueError(
            f"kernel_options tile_m={tiles.tile_m}, tile_n={tiles.tile_n} take {needed(name, tiles, shape, capability) >> 10} KiB "
            f"of shared memory, and {device} has {shared_memory(capability) >> 10} for a block; wanted smaller ones, or none for ours"
        )
    return tiles


def candidates(name: str, shape: Shape, capability: tuple[int, int] | None, rows: int, is_short: bool, group: int) -> list[Tiles]:
    """The candidates of autotuning: the default first, then others that fit. rows, is_short: see ``forward_tiles``. group: rows of a
    position, all of which are in one tile."""
    default = forward_tiles(shape, capability, rows, is_short) if name == "forward" else backward_tiles(shape, capability)[name]
    others = [Tiles(*t) for t in _MORE[name]]
    if name == "forward":
        others = [_few_rows(t, rows, shape.dtype) for t in others]
    return list(dict.fromkeys([default, *(t for t in others if fits(name, t, shape, capability) and t.tile_m >= group)]))
