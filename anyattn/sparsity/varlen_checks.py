"""Checks of ``VarlenBlockSparseTensors``: shapes when it is made, contents in ``validate``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.mods.analysis.varlen_grid import RaggedTiles
from anyattn.sparsity.arguments import length

__all__ = [
    "check_batch",
    "check_classes",
    "check_contents",
    "check_counts",
    "check_disjoint",
    "check_layout",
    "check_lengths",
    "check_place",
    "check_shapes",
    "check_table",
]


def check_layout(layout: Any) -> None:
    if layout not in ("flat", "padded"):
        raise ValueError(f"layout is {layout!r}; wanted 'flat' (H, total_n) or 'padded' (H, total_m, max_n)")


def check_place(name: str, value: Any, count: int, what: str) -> None:
    if length(name, value) >= count:
        raise ValueError(f"{name} is {value}, but there are {count} {what}" + (f"; wanted 0 to {count - 1}" if count else ""))


def check_batch(seqlens_q: Tensor, seqlens_k: Tensor) -> None:
    if len(seqlens_q) != len(seqlens_k):
        raise ValueError(f"there are {len(seqlens_q)} sequences of queries and {len(seqlens_k)} of keys; wanted equally many")


def check_lengths(seqlens_q: Any, seqlens_k: Any) -> None:
    for name, lengths in (("seqlens_q", seqlens_q), ("seqlens_k", seqlens_k)):
        _check_tensor(name, lengths, torch.int64, (1,), "(B,)")
        if bool((lengths < 0).any()):
            bad = int((lengths < 0).nonzero()[0])
            raise ValueError(f"{name}[{bad}] is {int(lengths[bad])}; wanted 0 or more")
    if len(seqlens_q) != len(seqlens_k):
        raise ValueError(f"seqlens_q has {len(seqlens_q)} entries and seqlens_k {len(seqlens_k)}; wanted one of each per sequence")
    _check_device("seqlens_k", seqlens_k, "seqlens_q", seqlens_q)


def check_table(name: str, table: Any, wanted: Tensor) -> None:
    """Raises unless cu_block_cnt or cu_block_idx equals ``wanted``, the table that follows from the lengths and the tile."""
    _check_tensor(name, table, wanted.dtype, (1,), "(B + 1,)")
    _check_device(name, table, "seqlens_q", wanted)
    if table.shape != wanted.shape:
        raise ValueError(f"{name} has {len(table)} entries; wanted {len(wanted)}, one more than there are sequences")
    if not torch.equal(table, wanted):
        bad = int((table != wanted).nonzero()[0])
        raise ValueError(
            f"{name}[{bad}] is {int(table[bad])}, but seqlens_q and seqlens_k in this tile make it {int(wanted[bad])}; leave {name} out, "
            "or pass the tile and the lengths that the lists were built for"
        )


def check_classes(classes: Any, tiles: RaggedTiles) -> None:
    _check_tensor("classes", classes, torch.uint8, (2,), "(H, total_n)")
    if classes.shape[1] != tiles.total_n:
        raise ValueError(f"classes has {classes.shape[1]} tiles, but the lengths in tiles of {tiles.tile} make {tiles.total_n}")
    _check_device("classes", classes, "seqlens_q", tiles.seqlens_q)


def check_shapes(name: str, cnt: Any, idx: Any, tiles: RaggedTiles) -> None:
    """Checks type, dtype, rank, device, and that the sizes are the totals of the lengths; on a CPU also the counts."""
    counts, indices = f"{name}_block_cnt", f"{name}_block_idx"
    _check_tensor(counts, cnt, torch.int32, (2,), "(H, total_m), with H = 1 to broadcast")
    _check_tensor(indices, idx, torch.int32, (2, 3), "(H, total_n) or (H, total_m, max_n), with H = 1 to broadcast")
    for what, tensor in ((counts, cnt), (indices, idx)):
        _check_device(what, tensor, "seqlens_q", tiles.seqlens_q)
    if len(cnt) != len(idx):
        raise ValueError(f"{counts} has {len(cnt)} heads and {indices} {len(idx)}; wanted the same")
    tables_make = f"the lengths in tiles of {tiles.tile} make"
    cure = "pass the tile and the lengths that the lists were built for"
    if cnt.shape[1] != tiles.total_m:
        raise ValueError(f"{counts} has {cnt.shape[1]} row tiles, but {tables_make} {tiles.total_m}; {cure}")
    if idx.ndim == 2 and idx.shape[1] != tiles.total_n:
        raise ValueError(f"{indices} has {idx.shape[1]} entries (flat layout), but {tables_make} {tiles.total_n}; {cure}")
    if idx.ndim == 3 and tuple(idx.shape[1:]) != (tiles.total_m, tiles.max_n):
        raise ValueError(
            f"{indices} has {idx.shape[1]} row tiles of {idx.shape[2]} entries (padded layout), but {tables_make} {tiles.total_m} of "
            f"{tiles.max_n}; {cure}"
        )
    if cnt.device.type == "cpu":
        check_counts(name, cnt, tiles)


def check_counts(name: str, cnt: Tensor, tiles: RaggedTiles) -> None:
    """Raises ``ValueError`` for a row tile whose list is longer than its sequence has key tiles, or of negative length."""
    width = tiles.num_n[tiles.sequence_of_row]  # (total_m,)
    _complain(
        (cnt < 0) | (cnt > width),
        tiles,
        None,
        lambda where, h, row, _: f"{name}_block_cnt of {where} is {int(cnt[h, row])}; wanted 0 to {int(width[row])}, its key tiles",
    )


def check_contents(name: str, cnt: Tensor, idx: Tensor, tiles: RaggedTiles) -> None:
    """Checks the counts and lists of one class; see ``VarlenBlockSparseTensors.validate``."""
    check_counts(name, cnt, tiles)
    width = tiles.num_n[tiles.sequence_of_row]  # (total_m,)
    row, position = _entries(idx, tiles)
    flat = idx.flatten(1)
    listed = position < cnt[:, row]
    value = lambda h, at: int(flat[h, at])  # noqa: E731
    _complain(
        listed & ((flat < 0) | (flat >= width[row])),
        tiles,
        row,
        lambda where, h, r, at: f"{name}_block_idx of {where} lists tile {value(h, at)}; wanted 0 to {int(width[r]) - 1}",
    )
    falls = torch.zeros_like(listed)
    falls[:, 1:] = listed[:, 1:] & (position[1:] > 0) & (flat[:, 1:] <= flat[:, :-1])
    _complain(
        falls,
        tiles,
        row,
        lambda where, h, r, at: (
            f"{name}_block_idx of {where} is not strictly increasing: {value(h, at)} follows {value(h, at - 1)}; sort each row's tiles and "
            "list every tile once"
        ),
    )
    _complain(
        ~listed & (flat != 0),
        tiles,
        row,
        lambda where, h, r, at: f"{name}_block_idx of {where} is {value(h, at)} after the listed tiles; fill the tail with 0",
    )


def check_disjoint(both: Tensor, tiles: RaggedTiles) -> None:
    """both: bool (H, total_n), the tiles that are listed twice."""
    if bool(both.any()):
        h, at = both.nonzero()[0]
        b, m, n = (int(x) for x in tiles.locate(at))
        raise ValueError(f"tile {n} of sequence {b}, row tile {m}, head {int(h)} is listed as mask block and as full block; list it once")


def _complain(bad: Tensor, tiles: RaggedTiles, row: Tensor | None, message: Any) -> None:
    """Raises ``ValueError`` at the first true entry of ``bad``, (H, entries). row: each entry's row tile (None: entry i is row tile i)."""
    if bool(bad.any()):
        h, at = bad.nonzero()[0].tolist()
        r = at if row is None else int(row[at])
        where = f"sequence {int(tiles.sequence_of_row[r])}, row tile {int(tiles.row_in_sequence[r])}, head {h}"
        raise ValueError(message(where, h, r, at))


def _entries(idx: Tensor, tiles: RaggedTiles) -> tuple[Tensor, Tensor]:
    """The row tile, and the position in its list, of every entry of an index list in either layout."""
    rows = torch.arange(tiles.total_m, device=tiles.device)
    if idx.ndim == 3:
        row = rows.repeat_interleave(tiles.max_n)
        return row, torch.arange(tiles.max_n, device=tiles.device).repeat(tiles.total_m)
    row = rows.repeat_interleave(tiles.row_begins.diff())
    return row, torch.arange(tiles.total_n, device=tiles.device) - tiles.row_begins[row]


def _check_tensor(name: str, tensor: Any, dtype: torch.dtype, ranks: tuple[int, ...], shape: str) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a {dtype} tensor {shape}")
    if tensor.dtype is not dtype:
        raise TypeError(f"{name} is {tensor.dtype}; wanted {dtype}, as tensor.to({dtype})")
    if tensor.ndim not in ranks:
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted {' or '.join(map(str, ranks))} dimensions {shape}")


def _check_device(name: str, tensor: Tensor, other: str, like: Tensor) -> None:
    if tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device} and {other} on {like.device}; wanted one device")
