"""Groups of values that describe a row tile and a portion of its keys (device code)."""

from typing import Any, NamedTuple

__all__ = ["Portion", "RowTile"]


class RowTile(NamedTuple):
    """A row tile of a sequence: int32. m: its number. b: its batch entry. h: its first query head. kv_head: the K/V head. line: its line in
    block lists. first, end: its positions, none if first >= end. group: rows of a position. at, heads, position: of each row, its place in
    storage, query head and position, those of a row that exists where is_row is False. sequence: ``Sequence``."""

    m: Any
    b: Any
    h: Any
    kv_head: Any
    line: Any
    first: Any
    end: Any
    group: Any
    position: Any
    is_row: Any
    heads: Any
    at: Any
    sequence: Any


class Portion(NamedTuple):
    """Parts ``first`` to ``first + count`` of the key tiles that a row tile visits, which are divided into ``of`` parts: int32."""

    first: Any
    count: Any
    of: Any
