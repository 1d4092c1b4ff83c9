"""Checks of many random programs by everything that reads a mod, in shards; ``ANYATTN_FUZZ=n`` asks for n fresh programs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import NamedTuple

from anyattn.mods.tracing.trace import TracedMod
from tests.support.fuzz.cute_checks import check_cute, check_cute_ranges, check_words
from tests.support.fuzz.whole_number_checks import check_classes, check_evaluation, check_ranges, check_stages, check_tile_bounds, traced
from tests.support.fuzz.whole_numbers import FIRST_SEED, FRESH, Program
from tests.support.limits import HANG
from tests.support.processes import python

__all__ = ["SHARDS", "Read", "check_mask", "check_readers", "check_triton_text", "seeds_of"]

SHARDS = 8 if FRESH else 4


class Read(NamedTuple):
    """Numbers of programs: traced, taken by the Hopper backend, with row ranges, with words of bits."""

    asked: int
    is_taken: int
    has_ranges: int
    has_words: int


def seeds_of(shard: int, fixed: int) -> tuple[int, int]:
    """(first seed, how many programs) of a shard."""
    count = -(-(FRESH or fixed) // SHARDS)
    if FRESH:
        print(f"ANYATTN_FUZZ_SEED={FIRST_SEED} (shard {shard}: programs {FIRST_SEED + shard * count} and on)", file=sys.stderr)
    return FIRST_SEED + shard * count, count


def check_mask(made: Program, mod: TracedMod) -> bool:
    """What is read of masks alone; whether the mask has row ranges."""
    check_stages(made, mod)
    check_classes(made, mod)
    check_tile_bounds(made, mod)
    has_ranges = check_ranges(made, mod)
    check_cute_ranges(made, mod)
    return has_ranges


def check_readers(programs: Iterable[Program]) -> Read:
    """The evaluator, the torch backend's stages, classes and bounds of tiles, row ranges, and the text for CuTe by value."""
    has_ranges = is_taken = has_words = asked = 0
    for made in programs:
        mod = traced(made)
        if mod is None:
            continue
        asked += 1
        check_evaluation(made, mod)
        is_taken += check_cute(made, mod)
        if made.kind == "mask":
            has_ranges += check_mask(made, mod)
            has_words += check_words(made, mod)
    return Read(asked, is_taken, has_ranges, has_words)


def check_triton_text(numbers: str, shard: int) -> None:
    """Of "whole" or "float" programs. The interpreter is chosen when Triton is imported, so it gets a process of its own."""
    first, count = seeds_of(shard, 200)
    command = ["-W", "ignore", "-m", "tests.support.fuzz.programs_in_triton", numbers, str(first), str(count)]
    done = python(*command, seconds=None if FRESH else HANG, TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-12000:]
