"""The launches of the Hopper backward pass: rows' statistics; dk, dv and the sums of dq, or dq itself; dq from its sums, dk and dv from
their parts.

The kernels for the calls of one signature are prepared once, and so are the sizes of a dense call, which its signature determines. A warm
backward pass allocates its results and calls the kernels with its own tensors, scale and captured values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import LOG2E, ceil_div
from anyattn.backends.hopper.api import counter_of, multiprocessors
from anyattn.backends.hopper.backward_config import BackwardConfig, RowsConfig
from anyattn.backends.hopper.backward_tables import KeyOrder, row_tiles
from anyattn.backends.hopper.compile.cache_key import AnyConfig
from anyattn.backends.hopper.compile.launch import indexable, kinds_of, launch, loaded
from anyattn.backends.hopper.make_backward_config import BackwardSpec
from anyattn.backends.hopper.tables import CACHE_FOR_KEYS
from anyattn.problem import Problem
from anyattn.sequences.l2_groups import fills_one_round, heads_side_by_side
from anyattn.tensors.strides import Allocator, Layout, contiguous_strides

__all__ = ["NO_LISTS", "Gradients", "Results", "Tables", "launch_all", "numbers_of_keys"]

# key tiles per multiprocessor in a group of heads, whose longest tiles go first, and of packed ones, whose longest sequences do
_ROUNDS, _ROUNDS_OF_SEQUENCES = 2, 4
# deterministic sums: key tiles of one head at a time; each begins when the one before it has added to the first row tile. Tiles that warp
# groups share, if all are seen by as many rows: the L2 cache holds the rows of fewer heads
_IN_TURN, _IN_TURN_SHARED = 9, 36
_MANY_ROUNDS = 24  # key tiles per multiprocessor in all: with so many, a long tile that starts late adds at most 4 %
# out and lse of the forward pass; their gradients; delta, (B, Hq, Sq) float32, written if a sink needs it
Results = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
Gradients = tuple[Tensor, Tensor, Tensor]  # dq, dk, dv
NO_LISTS: tuple[Tensor | None, ...] = (None,) * 5
_NOTHING: tuple[tuple, tuple] = ((), ())
_NO_PARTS: tuple[None, ...] = (None,) * 4
_FLOAT = torch.float32
_rows_configs: dict[tuple, RowsConfig] = {}


class Tables(NamedTuple):
    """lists: the lists and ranks of ``backward.scheduler.KeyTables``. guard: int32 (1,); if it is 1, no gradient is written, and ``order``
    has no tiles. kinds: ``kinds_of`` all of these, () if all are None."""

    lists: tuple[Tensor | None, ...] = NO_LISTS
    order: KeyOrder = KeyOrder()
    kinds: tuple = ()
    guard: Tensor | None = None


class _Sizes(NamedTuple):
    """statistics: the layout of the rows' lse (base 2) and delta, (B, Hq, M, tile_m). sums: that of the sums of dq, (B, Hq, M, tile_m *
    head_dim). With sequences B is 1, and M counts the row tiles of all of them. numbers: the integer arguments of the second launch.
    parts: the layouts of the parts of dk and dv, () if there are none."""

    statistics: Layout
    sums: Layout
    numbers: tuple[int, int, int, int]
    parts: tuple[Layout, ...] = ()


class _Prepared(NamedTuple):
    """kernels: of the three launches; the third is None if there are neither parts of dk and dv nor sums of a dq that is wanted.
    loaded: the mapping that holds the second kernel; empty once kernels are forgotten. is_plain: whether captured tensors can be passed
    unchanged. sizes: of a dense call, else None."""

    kernels: tuple[Callable[..., None], Callable[..., None], Callable[..., None] | None]
    loaded: Mapping[tuple, Any]
    is_plain: bool
    sizes: _Sizes | None


def launch_all(
    problem: Problem,
    spec: BackwardSpec,
    tables: Tables,
    results: Results,
    gradients: Gradients,
    empty: Allocator,
    totals: tuple[Tensor, ...] = (),
) -> None:
    """Writes the gradients of a call. empty: allocates on its device. totals: zeros, for the gradients of captured tensors."""
    q, config, (lists, order, of_tables, guard) = problem.q, spec.config, tables
    scale = problem.scale * (1.0 if problem.dropout is None else problem.dropout.scale)  # of gradients: the kernel leaves the factor out
    out, lse, dout, dlse, delta = results
    numbers, tensors = spec.captured(problem) if spec.captures else _NOTHING
    wants_dq, device = q.requires_grad, q.device
    # the key has what the signature leaves open; the signature determines q, k, v, the numbers' types and the tensors allocated here
    of_dlse, strides = None if dlse is None else kinds_of((dlse,))[0], tuple([t.stride() for t in tensors]) if tensors else None
    key = (wants_dq, dout.dtype, lse.stride()[-1] == 1, of_dlse, delta is None, of_tables, strides)
    prepared = spec.prepared.get(key)
    if prepared is not None and not prepared.loaded:
        prepared = None
    if prepared is None or prepared.sizes is None:
        of_statistics, of_sums, places, of_parts = sizes = _sizes(problem, spec, order, dout.shape[3])
    else:
        of_statistics, of_sums, places, of_parts = sizes = prepared.sizes
    if prepared is not None and not prepared.is_plain:
        tensors = indexable(tensors)
    own_lse, own_delta = empty(*of_statistics, _FLOAT), empty(*of_statistics, _FLOAT)
    sums = None if config.stores_dq else empty(*of_sums, _FLOAT)
    turns = torch.zeros(of_statistics[0][:3], dtype=torch.int32, device=device) if config.is_deterministic else None
    dq, *of_keys = gradients
    # rows that belong to no sequence have no part
    parts = [torch.zeros(shape, dtype=_FLOAT, device=device) if config.has_entries else empty(shape, s, _FLOAT) for shape, s in of_parts]
    if config.stores_dq and wants_dq and (config.bands or config.lists is not None):  # rows may see no key
        if guard is None:
            dq.zero_()
        else:  # another launch has written dq unless the guard is 0
            dq.masked_fill_(guard == 0, 0.0)
    before = (out, dout, lse, dlse, delta, order.entries, own_lse, own_delta, sums)
    products = (
        q, problem.k, problem.v, dout, *(parts or of_keys), own_lse, own_delta, dq if config.stores_dq else sums, turns, *lists, *order,
        counter_of(device), scale, problem.scale * LOG2E, *places, numbers, tensors, totals,
    )  # fmt: skip
    of_dq = (sums, dq) if wants_dq and not config.stores_dq else ()
    after = None
    if parts or of_dq:
        after = *(of_dq or (None, None)), order.entries, guard, scale, *((*parts, *of_keys) if parts else _NO_PARTS)
    if prepared is None:
        _launch_first(spec, key, sizes if problem.sequences is None else None, before, products, after)
        return
    first, second, third = prepared.kernels
    first(*before)
    second(*products)
    if third is not None and after is not None:
        third(*after)


def _launch_first(spec: BackwardSpec, key: tuple, sizes: _Sizes | None, before: tuple, products: tuple, after: tuple | None) -> None:
    """Runs the launches and, if their kernels are loaded, prepares them for later calls."""
    config = spec.config
    made: list[tuple[AnyConfig, tuple]] = [(_rows_config(config, False, before[3] is not None), before), (config, products)]
    if after is not None:
        made.append((_rows_config(config, True, False, spec.parts > 1), after))
    for one in made:
        launch(*one)
    found = [loaded(of).get(kinds_of(arguments)[0]) for of, arguments in made]
    if None not in found:
        kernels: Any = (*found, None)[:3]
        spec.prepared[key] = _Prepared(kernels, loaded(config), kinds_of(products)[1], sizes)


def _rows_config(config: BackwardConfig, is_after: bool, has_dlse: bool, divides_heads: bool = False) -> RowsConfig:
    """The ``RowsConfig``, one object for all calls, because kernels are stored on config objects."""
    key = config.head_dim, config.head_dim_v, config.is_bf16, config.tiles.tile_m, is_after, has_dlse, config.has_entries, divides_heads
    return _rows_configs.get(key) or _rows_configs.setdefault(key, RowsConfig(*key))


def _sizes(problem: Problem, spec: BackwardSpec, order: KeyOrder, width: int) -> _Sizes:
    """The sizes of a call. width: the head dimension of v."""
    q, k, config, tiles = problem.q, problem.k, spec.config, spec.config.tiles
    heads, ratio = problem.heads_kv * spec.parts, problem.qhead_per_kvhead // spec.parts
    if config.has_entries:
        shape = (1, q.shape[1], row_tiles(problem, tiles.tile_m))
    else:
        shape = (*q.shape[:2], ceil_div(q.shape[2], tiles.tile_m))
    key_tiles = order.tiles(k.shape[2], tiles.tile_n)
    spread = heads * (1 if config.has_entries else problem.batch)
    # bytes that the thread blocks of one head read and add to repeatedly: Q, dO and the sums of dQ, also where dQ has none
    size = q.shape[2] * ratio * (2 * (q.shape[3] + width) + 4 * config.head_dim)
    numbers = numbers_of_keys(config, key_tiles, spread, ratio, size, multiprocessors(q.device) * tiles.blocks)
    parts: tuple[Layout, ...] = ()
    if spec.parts > 1:
        parts = tuple(_dense((k.shape[0], heads, k.shape[2], columns)) for columns in (q.shape[3], width))
    return _Sizes(_dense((*shape, tiles.tile_m)), _dense((*shape, tiles.tile_m * config.head_dim)), numbers, parts)


def numbers_of_keys(config: Any, key_tiles: int, spread: int, ratio: int, size: int, processors: int) -> tuple[int, int, int, int]:
    """(key tiles, heads that have each, how many of these run side by side, thread blocks) of a launch over key tiles. size: bytes that the
    thread blocks of one head read, and add to, repeatedly. processors: thread blocks that run at a time."""
    together = heads_side_by_side(size, 1, CACHE_FOR_KEYS)
    is_uneven = config.lists is not None or config.has_left != config.has_right or config.has_entries
    if config.is_deterministic and (is_uneven or not config.has_left):  # key tiles of a window begin at rows of their own, in turn
        in_turn = _IN_TURN_SHARED if config.tiles.shares_keys and not is_uneven else _IN_TURN
        together = max(together, min(spread, ceil_div(processors, in_turn)))
        together = together if is_uneven else _evenly(together, spread)
    if is_uneven:
        drifts = ratio > 1 or config.looks_up_pairs
        one_round = drifts and not config.is_deterministic  # deterministic tiles wait for one another
        in_one_round = _heads_in_one_round(spread, key_tiles, processors) if one_round else 0
        rounds = _ROUNDS_OF_SEQUENCES if config.has_entries else _ROUNDS
        together = in_one_round or _heads_of_uneven_tiles(together, spread, key_tiles, processors, rounds)
    return key_tiles, spread, min(spread, together), max(1, min(key_tiles * spread, processors))


@lru_cache(maxsize=1024)
def _dense(shape: tuple[int, ...]) -> Layout:
    return shape, contiguous_strides(shape)


def _heads_in_one_round(heads: int, key_tiles: int, processors: int) -> int:
    """The number of K/V heads side by side whose key tiles are as many as the multiprocessors, or hardly fewer; 0 if there is none.

    For grouped heads, with uneven tiles: interleaved heads (``kernel.backward.scheduler``) then begin a round together. Where heads are not
    interleaved, thread blocks of one K/V head read its query heads' rows one head after another and drift apart, by a tile's length times
    the group's size; the fewer K/V heads at a time, the more of these rows the L2 cache holds. The same holds for lists from a table, whose
    key tiles are seen by rows in no order (``BackwardConfig.looks_up_pairs``).

    >>> _heads_in_one_round(16, 64, 132), _heads_in_one_round(16, 47, 132)
    (2, 0)
    """
    found = processors // max(key_tiles, 1)
    return found if found and heads % found == 0 and fills_one_round(found * key_tiles, processors) else 0


@lru_cache(maxsize=1024)
def _heads_of_uneven_tiles(together: int, heads: int, key_tiles: int, processors: int, rounds: int = _ROUNDS) -> int:
    """The number of heads that go side by side if some key tiles are seen by more rows than others: these, or the longest sequences, come
    first, and there are enough heads that none of them starts last and runs alone. With many tiles in all, fewer heads suffice
    (``_MANY_ROUNDS``).

    together: heads whose rows fit the L2 cache. rounds: key tiles per multiprocessor of these heads, unless there are many in all.

    >>> _heads_of_uneven_tiles(3, 32, 64, 132), _heads_of_uneven_tiles(61, 1024, 4, 132)
    (8, 64)
    """
    rounds = 1 if key_tiles * heads >= _MANY_ROUNDS * processors else rounds
    return _evenly(max(together, ceil_div(rounds * processors, key_tiles)), heads)


def _evenly(least: int, heads: int) -> int:
    """The number of heads side by side, from ``least`` on, whose last group is as large as the others, or nearly so.

    >>> _evenly(15, 32), _evenly(15, 20)
    (16, 20)
    """
    return min(range(least, 2 * least), key=lambda n: -heads % n)
