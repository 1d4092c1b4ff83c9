"""Argument groups of the Triton kernel that appends to caches, in the form of ``kernels.arguments``."""

from enum import IntEnum
from typing import Any, NamedTuple

__all__ = ["CachePlaces", "DescaleStrides", "EightBits", "LineScales", "LineStrides", "Rotary", "ScaleForm"]


class EightBits(IntEnum):
    """The dtype of a cache; NONE: not of 8 bits."""

    NONE = 0
    FLOAT8_E4M3 = 1
    FLOAT8_E5M2 = 2
    INT8 = 3


class ScaleForm(IntEnum):
    """Where appending to an 8-bit cache finds the scale of a line. NUMBER: an argument of the launch. BY_ENTRY: by batch entry and head.
    BY_PLACE: by the row's place in the cache, and head. WRITTEN: computed from the line, and stored by its place."""

    NUMBER = 0
    BY_ENTRY = 1
    BY_PLACE = 2
    WRITTEN = 3


class LineStrides(NamedTuple):
    """Strides in elements between entries, rows and heads of a tensor whose unit is a line (one head of one row): int64."""

    entry: Any
    row: Any
    head: Any


class CachePlaces(NamedTuple):
    """The places of rows in a decoder's cache. rows: pointer to integers (B,), each entry's cache row. pages: pointer to integers (B, pages
    per entry). pages_entry: stride between entries in the page table: int64. capacity: rows per entry. storage: number of cache rows or
    pages.
    page_size: rows per page."""

    rows: Any
    pages: Any
    pages_entry: Any
    capacity: Any
    storage: Any
    page_size: Any


class DescaleStrides(NamedTuple):
    """Strides in elements of an 8-bit cache's scales between batch entries, cache rows or pages, between rows of these, and between heads:
    int64; 0 where they share a scale."""

    first: Any
    row: Any
    head: Any


class LineScales(NamedTuple):
    """The scales of a block of lines, see ``ScaleForm``. at: pointers to float32, one for each line. number: float32.
    saturated: pointer to an integer that counts saturated values."""

    at: Any
    number: Any
    saturated: Any


class Rotary(NamedTuple):
    """Rotary tables. cos, sin: pointers to (positions, half). Fields ending in _row and _element: their strides: int64."""

    cos: Any
    cos_row: Any
    cos_element: Any
    sin: Any
    sin_row: Any
    sin_element: Any
    half: Any
    positions: Any
