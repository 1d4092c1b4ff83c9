"""Varlen batches on the simulated machine of the backward roles: storage with NaN around them, and a launch's tables."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.backward_tables import _in_order
from anyattn.sequences.batch import Sequences
from tests.support.hopper.backward_machine import Acc, Mma, Positions, View, narrow
from tests.support.hopper.schedule import Broken

__all__ = ["FLOAT", "PackedCall", "Rows", "moved", "sequences_of", "with_single_threads"]


class _Element:
    """The type of a tensor's numbers. width: in bits."""

    def __init__(self, width: int):
        self.width = width

    def __call__(self, x: Any) -> Any:
        return narrow(np.float32(x)) if self.width == 16 else np.float32(x)


NARROW, FLOAT = _Element(16), _Element(32)


class Rows:
    """Rows of a tensor in global memory, (positions, head dimension), counted from row ``first`` on."""

    def __init__(self, values: np.ndarray, first: int = 0, element_type: _Element = NARROW):
        self.values, self.first, self.element_type = values, first, element_type

    def __getitem__(self, key: tuple) -> Any:
        row, rest = self.first + int(key[0]), key[1]
        if rest is not None or not 0 <= row < len(self.values):
            raise Broken(f"row {row} of {len(self.values)}")
        return _Row(self.values[row])


def moved(by: tuple, x: Any) -> Any:
    """A tensor from row ``by`` on, or a list in global memory from element ``by`` on."""
    return Rows(x.values, x.first + by[0], x.element_type) if isinstance(x, Rows) else type(x)(x.of, x.at + by[0])


class _Row:
    def __init__(self, values: np.ndarray):
        self.values = values


class PackedCall:
    """``backward_roles.Call`` over sequences: q, dout (rows of storage, Hq, Sq, D), k, v likewise, NaN wherever no sequence is.

    lse, delta: for each sequence (Hq, its queries). lists: (their tensors, ``entries``). factor: of the weights that dropout keeps. parts:
    of each kv head in dk and dv.
    """

    factor = 1.0

    def __init__(
        self,
        config: Any,
        s: Sequences,
        tensors: tuple[np.ndarray, ...],
        lse: list[np.ndarray],
        delta: list[np.ndarray],
        scale: float,
        lists: tuple[tuple[Any, ...], Any] | None = None,
        parts: int = 1,
    ):
        self.config, self.scale, self.sequences = config, scale, s
        self.q, self.k, self.v, self.dout = tensors
        self.heads, self.kv_heads, self.rows, self.keys = self.q.shape[1], self.k.shape[1] * parts, self.q.shape[2], self.k.shape[2]
        self.parts = parts if config.stores_float32 else None
        tile_m, tiles = config.tiles.tile_m, ceil_div(self.rows, config.tiles.tile_m)
        shape = (1, self.heads, len(self.q) * tiles + s.batch)
        self.lse, self.delta = (np.full((*shape, tile_m), np.nan, dtype=np.float32) for _ in range(2))
        host = s.on_host
        for b, (row, start, length) in enumerate(zip(host.q_row, host.q_start, host.seqlens_q, strict=True)):
            first = row * tiles + ceil_div(start, tile_m) + b
            for m in range(ceil_div(length, tile_m)):
                rest = min(tile_m, length - m * tile_m)
                for own, given, fill in ((self.lse, lse, np.inf), (self.delta, delta, 0.0)):
                    if not np.isnan(own[0, :, first + m]).all():
                        raise Broken(f"row tile {first + m} is that of two sequences")
                    own[0, :, first + m] = fill
                    own[0, :, first + m, :rest] = given[b][:, m * tile_m : m * tile_m + rest]
        self.sums = np.zeros((*shape, tile_m * config.head_dim), dtype=np.float32)
        self.turns = np.zeros(shape, dtype=np.int32) if config.is_deterministic else None
        self.dk, self.dv = (np.full_like(t, np.nan).repeat(parts, 1) for t in (self.k, self.v))
        self.lists = (None,) * 5 if lists is None else (*(None if t is None else t.numpy() for t in lists[0]), None)
        self.order, self.entries = (t.numpy() for t in _in_order(s, config, len(self.k) * (self.keys // 128) + s.batch))
        if lists is not None:
            self.entries = lists[1].numpy()

    @property
    def work(self) -> tuple[int, int]:
        """(tiles of keys that there is room for, heads that share them)."""
        return len(self.order) - 1, self.kv_heads

    def gradients_of_rows(self, rows: Any, tiles: np.ndarray, table: Any) -> np.ndarray:
        """dq from (1, Hq, M, tile_m, D), by the last kernel's ``located``; NaN where it writes nothing. table: ``entries``."""
        found = np.full_like(self.q, np.nan)
        for slot in range(tiles.shape[2]):
            row, first, rest = rows.located(slot, table, self.rows)
            if rest > 0:
                count = min(rest, tiles.shape[3])
                if first + count > self.rows:
                    raise Broken(f"rows {first} to {first + count} of {self.rows}")
                found[row, :, first : first + count] = tiles[0, :, slot, :count, : found.shape[3]]
        return found


def with_single_threads(roles: type) -> type:
    """``roles`` with the parts of ``Packed`` that single threads run, by each of the 128 of a warp group in turn."""

    class Threads(roles):  # type: ignore[misc, valid-type]
        def _wiped(self, tile: View, room: int, rows: int, head_dim: int, thread: Any) -> None:
            group = tile.of.block.group.number
            (pipe,) = (p for p in tile.of.block.pipes if p.name == tile.of.name)
            if group not in pipe.held[tile.key[-1]]:
                raise Broken(f"{pipe.name} {tile.key[-1]} is wiped by group {group}, which does not hold it")
            for lane in range(128):
                roles._wiped(self, tile, room, rows, head_dim, lane)  # type: ignore[attr-defined]
            tile.of.unwiped.add(group)

        def rows_stored(self, acc: Acc, mma: Mma, shape: tuple[int, int], target: Any, rows: Any, thread: Any) -> None:
            positions = mma.partition_C(shape)
            for lane in range(128):
                one = SimpleNamespace(get_slice=lambda _, lane=lane: _OnePlace(positions, lane))
                roles.rows_stored(self, _OneThread(acc, lane), one, shape, target, rows, thread)  # type: ignore[attr-defined]

    return Threads


class _OneThread:
    """An accumulator as one thread holds it."""

    def __init__(self, acc: Acc, lane: int):
        self.acc, self.lane = acc, lane

    def __getitem__(self, key: tuple[int, int]) -> np.float32:
        return self.acc.values[self.lane, key[0], key[1]]

    def sizes(self) -> tuple[int, int]:
        return self.acc.sizes()[:2]


class _OnePlace:
    def __init__(self, positions: Positions, lane: int):
        self.positions, self.lane = positions, lane

    def partition_C(self, shape: Any) -> _OnePlace:
        return self

    def __getitem__(self, key: tuple[int, int]) -> tuple[int, int]:
        row, column = self.positions[key]
        return int(row[self.lane]), int(column[self.lane])


def sequences_of(lengths: tuple[list[int], list[int]], rooms: tuple[list[int], list[int]], is_padded: bool) -> Sequences:
    """Sequences with room for more rows than they use: one row of storage, or one for each."""
    fields = []
    for used, room in zip(lengths, rooms, strict=True):
        starts = [0] * len(used) if is_padded else [sum(room[:b]) for b in range(len(used))]
        fields += [used, list(range(len(used))) if is_padded else [0] * len(used), starts]
    (seqlens_q, q_row, q_start), (seqlens_k, k_row, k_start) = fields[:3], fields[3:]
    vectors = (seqlens_q, seqlens_k, q_row, q_start, k_row, k_start, [0] * len(seqlens_q))
    return Sequences(*(torch.tensor(x) for x in vectors))
