"""Loading role for wide heads: tiles come in parts of their columns, and two thread blocks may load half of every part for both."""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int16

from anyattn.backends.hopper.kernel.producer import Loads, Part

__all__ = ["LoadsWide", "Pipes"]

_BOTH_BLOCKS = 3  # a bit for each thread block of the cluster


class Pipes(NamedTuple):
    """The pipelines that a role works with. keys: of the parts of K that it reads, for the loading role of all parts. values: of the part
    of V that a warp group multiplies. other_values: of V's other part."""

    q: Any
    keys: tuple[Any, ...] | None
    values: Any
    work: Any
    other_values: Any = None


class LoadsWide(Loads):
    """The loading role of ``HopperWideForward``. With ``config.pairs`` both thread blocks copy a tile and release it.

    Each tensor of a tile comes in two parts, the columns of the first warp group's half of V and the rest, each with a pipeline: a part is
    released, and the next one loaded, while the other is still multiplied. Columns that a tensor does not have are read as zeros.
    """

    def parts(self) -> tuple[Part, ...]:
        """Of K, and unless it lies in K of V."""
        ends = (self.config.head_dim,) if self.config.has_one_kv else (self.config.head_dim, self.config.head_dim_v)
        cut = self.config.columns
        return tuple(Part(i == 1, *columns) for i, end in enumerate(ends) for columns in ((0, cut), (cut, end)))

    def readers(self) -> tuple[set[int], ...]:
        """The warp groups that read each part: the first K and one part of V, the second the other part of V."""
        return ({0}, {0, 1}) if self.config.has_one_kv else ({0}, {0}, {0}, {1})

    def pipes_of_roles(self, q: Any, of_tile: tuple[Any, ...], work: Any) -> tuple[Pipes, Pipes, Pipes]:
        """The pipelines of the loading role and of both warp groups. of_tile: those of the parts."""
        of_k, of_v = of_tile[:2], of_tile[-2:]
        return Pipes(q, of_tile, None, work), Pipes(q, of_k, of_v[0], work, of_v[1]), Pipes(q, None, of_v[1], work, of_v[0])

    def pipes_of_tile(self, pipes: Any) -> tuple[Any, ...]:
        found: tuple[Any, ...] = pipes.keys
        return found

    def parts_of_tile(self, copies: Any, in_smem: Any, place: Any, rank: Any) -> tuple[Any, ...]:
        found = []
        for (atom, x), part in zip(copies, self.parts(), strict=True):
            copy = atom, cute.domain_offset((part.first, 0, 0, 0) if part.are_values else (0, part.first, 0, 0), x)
            target = self.part_in_smem(in_smem[int(part.are_values)], part)
            found.append(self.part_of_tile(copy, target, part, place, rank))
        return tuple(found)

    def part_in_smem(self, tile: Any, part: Part) -> Any:
        """A part of a tensor's tile in shared memory, with its stages."""
        found = cute.domain_offset((part.first, 0, 0) if part.are_values else (0, part.first, 0), tile)
        shape = (*part.shape(self.config.tiles.tile_n), self.config.tiles.stages)
        return cute.make_tensor(found.iterator, cute.composition(found.layout, tuple(cute.make_layout(n) for n in shape)))

    def place(self) -> tuple[Any, Any, Any]:
        if not self.config.pairs:
            return Loads.place(self)
        return cute.arch.block_idx()[0] // 2, cute.arch.grid_dim()[0] // 2, cute.arch.block_idx_in_cluster()

    def own_tile(self, m_block: Any, rank: Any) -> Any:
        return m_block * 2 + rank if self.config.pairs and not self.config.divides_heads else m_block

    def own_heads(self, heads: Any, head: Any, rank: Any) -> tuple[Any, Any]:
        if not self.config.divides_heads:
            return heads, head
        before = rank * self.config.own_heads
        return cutlass.min(heads - before, self.config.own_heads), head + before

    def receivers(self) -> dict[str, Any]:
        return {"mcast_mask": Int16(_BOTH_BLOCKS)} if self.config.pairs else {}
