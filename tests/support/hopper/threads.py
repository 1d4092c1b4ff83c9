"""Writes of single Hopper kernel threads to shared memory: the source is run once for each thread of a warp or a warp group."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from tests.support.hopper.role_source import compiled
from tests.support.hopper.schedule import State
from tests.support.hopper.stubs import View

__all__ = ["rows_gathered", "wiped_by_a_group"]


def wiped_by_a_group(tile_n: int, head_dim_v: int, room: int) -> list[tuple[int, int]]:
    """(entry, key) of V for each one that the 128 threads of a warp group wipe where a sequence ends after ``room`` keys."""
    found: list[tuple[int, int]] = []

    def tile_of(_: Any, shape: tuple[int, int], at: tuple[int, int]) -> View:
        found.extend((at[0] * shape[0] + i, at[1]) for i in range(shape[0]))
        return View("v")

    done = SimpleNamespace(fill=lambda _: None)
    pipes = [SimpleNamespace(consumer_wait=lambda _: None)] * 3
    arch = SimpleNamespace(fence_proxy=lambda *_, **__: None, barrier=lambda **_: None)
    cute = SimpleNamespace(arch=arch, local_tile=tile_of, autovec_copy=lambda *_: None, make_rmem_tensor=lambda *_: done)
    names: dict[str, Any] = {"cute": cute, "cutlass": SimpleNamespace(range=lambda *n, **_: range(*n)), "const_expr": bool}
    names.update(again=lambda x: x, MEETING=0)
    exec(*compiled(("mma",))[0], names)
    kernel = names["Multiplies"]()
    kernel.dtype, kernel.holds_thread = "dtype", False
    kernel.config = SimpleNamespace(tiles=SimpleNamespace(tile_n=tile_n), head_dim_v=head_dim_v)
    for thread in range(128, 256):
        kernel._wiped(View("v"), pipes, State(1, 0, 0), room, thread, 1)
    return found


class _Target:
    """A stage of keys, or one of its keys."""

    def __init__(self, shape: tuple[int, int], key: int | None = None):
        self.shape, self.key = shape, key

    def __getitem__(self, at: tuple) -> _Target:
        return _Target(self.shape, at[0])


class _Pool:
    """Rows of a pool, from the step of 16 bytes on that is asked for."""

    def __init__(self, segment: int):
        self.segment = segment  # entries from a part of a row to the next

    def __getitem__(self, at: tuple) -> int:
        _, part, step = at
        return step * 8 + part * self.segment  # of the row that begins at step 0


def rows_gathered(tile_n: int, width: int) -> dict[tuple[int, int], list[tuple[int, int]]]:
    """(key, entry) of a tile, by 16 bytes, that the loader's lanes write: what is copied there each time, as (key, entry) of the source."""
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    at = [0]  # the lane
    far = 1000  # steps from a row to the next

    def copy(_: Any, source: int, to: tuple[int, int]) -> None:
        found.setdefault(to, []).append(divmod(source, far * 8))

    arch = SimpleNamespace(lane_idx=lambda: at[0], shuffle_sync=lambda of, lane: of[lane], cp_async_mbarrier_arrive_noinc=lambda _: None)
    cute = SimpleNamespace(
        arch=arch,
        copy=copy,
        make_copy_atom=lambda *_, **__: None,
        size=lambda target, mode: target.shape[mode[0]],
        make_layout=lambda shape, stride: stride,
        make_tensor=lambda _, stride: _Pool(stride[1]),
        local_tile=lambda target, shape, place: (target.key, place[0] * shape[0]),
    )
    names: dict[str, Any] = {
        "cute": cute,
        "cutlass": SimpleNamespace(range=lambda *n, **_: range(*n), range_constexpr=range),
        "const_expr": bool,
        "cpasync": SimpleNamespace(CopyG2SOp=lambda _: None, LoadCacheMode=SimpleNamespace(GLOBAL=None)),
    }
    exec(*compiled(("paged_gather",))[0], names)
    kernel = names["Gathers"]()
    kernel.dtype, kernel._offset = "dtype", lambda _, row, page: [far * key for key in page]
    source = SimpleNamespace(iterator=None)
    pages = tuple(list(range(first, first + 32)) for first in range(0, tile_n, 32))
    for at[0] in range(32):
        kernel.gather(source, _Target((tile_n, width)), pages, pages, None)
    return found
