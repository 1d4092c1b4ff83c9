"""Packed GQA: whether query heads that share K and V share row tiles, so that few queries fill a tile and K and V are loaded once."""

from __future__ import annotations

from typing import Any

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.codegen.score_analysis import is_foreseen
from anyattn.backends.hopper.config import PACKED, PACKED_WIDE, Config
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.problem import Problem
from anyattn.sequences.unread_varlen import MANY_QUERIES, queries_each

__all__ = ["groups_of", "groups_of_entry", "heads_per_tile", "reason_against_packing", "row_tiles", "row_tiles_of_batch", "why_apart"]

_WORTH = 0.9  # packing must leave at most this fraction of the row tiles


def heads_per_tile(problem: Problem, score: Expr | None, tile_m: int, fields: dict[str, Any], asked: bool | None = None) -> int:
    """How many heads share a row tile of ``tile_m`` rows, 1 for no packing.

    score: the kernel's score mod. fields: the config's fields for lists and bands. asked: the caller's preference; heads that see
    different tiles are not packed in any case.

    The time of a tile depends on its keys, not on how many of its rows are in use: packing pays if it makes fewer tiles. The decision uses
    only sizes that the host knows, and there are few kernels: 4 or 8 heads for any ratio. Wide heads, of which a K/V head often has 64 or
    128 queries and few of them at a time, may fill a tile with heads.
    """
    ratio = problem.qhead_per_kvhead
    if asked is False or ratio == 1 or reason_against_packing(fields):
        return 1
    # with 4 heads a thread's rows lie 2 positions apart: no two of its scores lie on one diagonal, too many values to prefetch
    is_wide = score is not None and is_foreseen(score)
    packed = next((n for n in PACKED if ratio <= n and not is_wide), PACKED[-1])
    length = _queries(problem)
    if problem.has_wide_heads and not _tells_heads_apart(score, fields):
        length = few = min(length, problem.bound_q)
        packed = min((packed, *PACKED_WIDE), key=lambda n: row_tiles(few, ratio, tile_m, n))
    is_worth = length < MANY_QUERIES and row_tiles(length, ratio, tile_m, packed) <= _WORTH * row_tiles(length, ratio, tile_m, 1)
    return packed if asked or is_worth else 1


def reason_against_packing(fields: dict[str, Any]) -> str | None:
    """Why a group's heads cannot share tiles, None if they can. fields: as for ``heads_per_tile``."""
    if fields.get("has_dropout"):
        return "dropout decides four pairs at once, two of them 8 rows apart"
    if (fields.get("per_head") or fields.get("spread") == "none") and not fields.get("by_kv_head"):
        return "each head has its own lists of tiles"
    if any(d.h for band in fields.get("bands", ()) for d in dependence(band)):
        return "the keys that a row may see differ from head to head"
    return None


def _tells_heads_apart(score: Expr | None, fields: dict[str, Any]) -> bool:
    """Whether some mod depends on the head, or lists of tiles are read, which count rows of up to 8 heads. With bands of each head none
    share a tile."""
    exprs = ([] if score is None else [score]) + [ask.expr for ask in fields.get("always", ())]
    return fields.get("lists") is not None or any(d.h for expr in exprs for d in dependence(expr))


def why_apart(config: Config, ratio: int) -> str | None:
    """Why a config does not pack heads though packing is wanted; None if it packs or there is nothing to pack."""
    if config.heads_per_tile > 1 or ratio == 1:
        return None
    return reason_against_packing({name: getattr(config, name) for name in ("per_head", "by_kv_head", "spread", "bands", "has_dropout")})


def _queries(problem: Problem) -> int:
    """Queries per entry; for sequences whose lengths are on the device roughly their mean."""
    if problem.sequences is None:
        return problem.q.shape[2]
    return queries_each(problem.q.shape[0] * problem.q.shape[2], problem.batch, problem.bound_q)


def row_tiles(length: int, ratio: int, tile_m: int, packed: int) -> int:
    """The row tiles of ``length`` queries for the ``ratio`` heads that share K and V.

    >>> row_tiles(16, 8, 128, 1), row_tiles(16, 8, 128, 8)
    (8, 1)
    """
    return groups_of(ratio, packed) * ceil_div(length, tile_m // packed)


def row_tiles_of_batch(problem: Problem, positions: int) -> float:
    """The row tiles of so many query positions that a head has, or a group of heads that share them. In sequences, whose lengths may be
    unknown, half of the last tile of each is taken to be empty."""
    if problem.sequences is None:
        return problem.batch * ceil_div(problem.q.shape[2], positions)
    return problem.q.shape[0] * problem.q.shape[2] / positions + problem.batch / 2


def groups_of(ratio: int, packed: int) -> int:
    """The number of groups, each sharing row tiles, for the query heads of a K/V head."""
    return ceil_div(ratio, packed)


def groups_of_entry(problem: Problem, config: Config) -> int:
    """The number of such groups of a batch entry: its query heads, if none share row tiles."""
    return problem.heads_kv * groups_of(problem.qhead_per_kvhead, config.heads_per_tile)
