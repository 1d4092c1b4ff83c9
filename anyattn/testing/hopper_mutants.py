"""Mutants of the Hopper backend. A kernel is traced from its source file, so a mutant is a copy of the package with one text changed.

``where`` of these is a file below ``anyattn/``. ``planted`` makes the copy; a process that finds it first on its path runs the mutant. Each
names a ``killer``, a check in ``tests/gpu/killers_gpu.py`` that fails under it. None changes a role's trip count, which would hang instead
of giving wrong results.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import anyattn
from anyattn.testing.mutants import Mutant

__all__ = ["MUTANTS", "planted"]

_EPILOGUE = "backends/hopper/kernel/epilogue.py"
_MMA = "backends/hopper/kernel/mma.py"
_PAGED_GATHER = "backends/hopper/kernel/paged_gather.py"
_PRODUCER = "backends/hopper/kernel/producer.py"
_SOFTMAX = "backends/hopper/kernel/softmax.py"
_SPECULATIVE_SOFTMAX = "backends/hopper/kernel/speculative_softmax.py"
_TILE_SCHEDULER = "backends/hopper/kernel/tile_scheduler.py"

MUTANTS = {
    m.name: m
    for m in (
        # what a row sees
        Mutant("edge_not_masked", _SOFTMAX, "end = facts.seqlen_k - first\n", "end = facts.seqlen_k + 64 - first\n", "full"),
        Mutant("row_limit_off_by_one", _TILE_SCHEDULER, "Int32(high) + q_first", "Int32(high) + q_first + 1", "causal"),
        Mutant("left_limit_off_by_one", _TILE_SCHEDULER, "Int32(low) + q_first", "Int32(low) + q_first + 1", "window"),
        Mutant("last_tile_not_visited", _TILE_SCHEDULER, "total = ceil_div(seqlen_k, tile_n)", "total = seqlen_k // tile_n", "full"),
        Mutant(
            "predicate_asked_in_first_tile_alone", _MMA,
            "asks = is_masked or len(self.config.always) > 0",
            "asks = False", "window",
        ),
        Mutant("full_tiles_not_asked", _MMA, "is_masked or len(self.config.always) > 0", "is_masked", "beside_lists"),
        # lists
        Mutant("full_tile_taken_for_partial", _TILE_SCHEDULER, "n, Int32(1) if in_partial else Int32(0)", "n, Int32(1)", "lists"),
        Mutant(
            "list_read_from_its_second_tile", _TILE_SCHEDULER,
            "entries[cutlass.max(size - 1 - place, 0)]\n",
            "entries[cutlass.max(size - 2 - place, 0)]\n", "lists",
        ),
        Mutant("heads_share_one_list", _TILE_SCHEDULER, "head if const_expr(self.config.per_head) else Int32(0)", "Int32(0)", "lists"),
        Mutant(
            "entries_share_one_list", _TILE_SCHEDULER,
            "entry if const_expr(self.config.per_entry) else Int32(0)",
            "Int32(0)", "lists",
        ),
        Mutant("wrong_part_of_a_list_tile", _TILE_SCHEDULER, "* cut + cut - 1 - place % cut", "* cut + place % cut", "cut_lists"),
        Mutant("lists_of_the_first_sequence", _TILE_SCHEDULER, "at = tables.entries[entry, 7] + row", "at = row", "ragged_lists"),
        Mutant(
            "flat_list_offset", _TILE_SCHEDULER,
            "tables.entries[entry, 8] + row * columns",
            "tables.entries[entry, 8] + row", "ragged_lists",
        ),
        Mutant("row_of_lists_of_another_size", _TILE_SCHEDULER, "row = m_block // cut_m", "row = m_block // (2 * cut_m)", "lists"),
        # sums
        Mutant("output_not_rescaled", _MMA, "out[r, None].load() * row_scale[r]", "out[r, None].load()", "peaky"),
        Mutant("sum_not_rescaled", _SOFTMAX, "row_sum[r] * row_scale[r] + total", "row_sum[r] + total", "peaky"),
        Mutant(
            "stale_maximum", _SOFTMAX,
            "            row_max[r] = top\n",
            "            row_max[r] = top if const_expr(is_first) else row_max[r]\n", "peaky",
        ),
        Mutant("guess_never_wrong", _SPECULATIVE_SOFTMAX, "right & (sums[r] <= _MOST)", "right", "steep"),
        Mutant("cap_always_far", _SPECULATIVE_SOFTMAX, "vote_all_sync(top <= most)", "vote_all_sync(most > 0.0)", "capped"),
        Mutant("sums_of_guesses_lost", _MMA, "row_sum.load() + added.load()", "row_sum.load()", "full"),
        Mutant(
            "sink_ignored", _EPILOGUE,
            "total * rescale + cute.math.exp2(logit - higher, fastmath=True)",
            "total * rescale", "sink",
        ),
        Mutant("sink_in_base_2", _EPILOGUE, "Float32(sink[head]) * Float32(LOG2E)", "Float32(sink[head])", "sink"),
        Mutant("sink_of_another_head", _EPILOGUE, "Float32(sink[head]) * Float32(LOG2E)", "Float32(sink[0]) * Float32(LOG2E)", "sink"),
        Mutant(
            "lse_in_base_2", _EPILOGUE,
            "found = (top + cute.math.log2(total, fastmath=True)) * Float32(LN2)",
            "found = top + cute.math.log2(total, fastmath=True)", "full",
        ),
        # heads and storage
        Mutant(
            "wrong_gqa_head", _PRODUCER,
            "kv_head = head // sizes.ratio",
            "kv_head = head % (sizes.heads // sizes.ratio)", "full",
        ),
        Mutant(
            "queries_of_the_first_sequence", _PRODUCER,
            "cute.domain_offset((q_start, 0), q[",
            "cute.domain_offset((q_start * 0, 0), q[", "packed",
        ),
        Mutant(
            "keys_of_the_first_sequence", _PRODUCER,
            "cute.domain_offset((k_start, 0), k[",
            "cute.domain_offset((k_start * 0, 0), k[", "packed",
        ),
        Mutant(
            "values_of_the_first_sequence", _PRODUCER,
            "cute.domain_offset((0, k_start), v[",
            "cute.domain_offset((0, k_start * 0), v[", "packed",
        ),
        Mutant("v_not_wiped", _MMA, "if room < tile_n:", "if room < 0:", "packed"),
        Mutant(
            "rows_behind_a_sequence_written", _EPILOGUE,
            "if facts.m_block * self.config.tile_q + (group + 1) * (64 // self.config.heads_per_tile) > facts.seqlen_q:",
            "if facts.m_block < 0:", "packed",
        ),
        Mutant(
            "pages_of_the_first_sequence", _PRODUCER,
            "tables.pages[entry, Int32(Uint32(at)",
            "tables.pages[0, Int32(Uint32(at)", "pages",
        ),
        Mutant(
            "page_off_by_one", _PRODUCER,
            "tables.pages[entry, Int32(Uint32(at)",
            "tables.pages[entry, Int32(Uint32(at + 1)", "pages",
        ),
        Mutant("first_piece_of_every_page", _PRODUCER, "% Uint32(sizes.pieces_in_page)", "% Uint32(1)", "pages"),
        Mutant(
            "page_of_the_lane_before", _PRODUCER,
            "shuffle_sync(pages[group], i)", "shuffle_sync(pages[group], cutlass.max(i - 1, 0))", "pieces",
        ),
        Mutant(
            "last_piece_left_out", _PRODUCER,
            "if at * self.config.piece < seqlen_k:", "if (at + 1) * self.config.piece <= seqlen_k:", "pieces",
        ),
        Mutant(
            "row_of_the_lane_before", _PAGED_GATHER,
            "shuffle_sync(offset, lane)", "shuffle_sync(offset, cutlass.max(lane - 1, 0))", "gathered",
        ),
        Mutant(
            "first_half_of_every_row", _PAGED_GATHER,
            "entries[None, part, first]", "entries[None, 0, first]", "gathered",
        ),
        Mutant(
            "pieces_exchanged", _PRODUCER,
            "target[None, group * LANES + i,", "target[None, (group * LANES + i) ^ 1,", "pieces",
        ),
        Mutant(
            "column_of_the_first_tile", _SOFTMAX,
            "positions[0, 0][1] + n * self.config.tiles.tile_n", "positions[0, 0][1]", "score",
        ),
        # work
        Mutant("counter_left_as_it_is", _PRODUCER, "counter[0] = Int32(0)\n", "counter[0] = Int32(1)\n", "twice"),
    )
}  # fmt: skip


def planted(name: str, folder: Path) -> Path:
    """A copy of the package in ``folder`` with one bug in it; what goes on the path.

    Raises ``LookupError`` if the code no longer has the text that the mutant replaces.
    """
    mutant = MUTANTS[name]
    shutil.copytree(_package(), folder / "anyattn", ignore=shutil.ignore_patterns("__pycache__"))
    path = folder / "anyattn" / mutant.where
    path.write_text(_changed(mutant))
    return folder


def _changed(mutant: Mutant) -> str:
    source = (_package() / mutant.where).read_text()
    if source.count(mutant.old) != 1:
        raise LookupError(f"mutant {mutant.name}: {mutant.old!r} stands {source.count(mutant.old)} times in {mutant.where}; wanted once")
    return source.replace(mutant.old, mutant.new)


def _package() -> Path:
    assert anyattn.__file__ is not None
    return Path(anyattn.__file__).parent
