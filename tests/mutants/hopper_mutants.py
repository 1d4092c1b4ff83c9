"""Mutants of the Hopper backend. A kernel is traced from its source file, so a mutant is a copy of the package with one edit.

``planted`` makes the copy; a process that finds it first on its path runs the bug. Each names a ``killer``, a check in
``hopper_killers.py`` that fails under it. None changes how often a role goes round, which would hang instead of erring.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tests.mutants.mutant import Mutant, by_name, changed, package

__all__ = ["MUTANTS", "planted"]

_EPILOGUE = "backends.hopper.kernel.epilogue"
_MMA = "backends.hopper.kernel.mma"
_PAGED_GATHER = "backends.hopper.kernel.paged_gather"
_PRODUCER = "backends.hopper.kernel.producer"
_SOFTMAX = "backends.hopper.kernel.softmax"
_SPECULATIVE_SOFTMAX = "backends.hopper.kernel.speculative_softmax"
_TILE_SCHEDULER = "backends.hopper.kernel.tile_scheduler"

MUTANTS = by_name(
    # what a row sees
    Mutant("edge_not_masked", f"{_SOFTMAX}:Softmax._band", "facts.seqlen_k - first", "facts.seqlen_k + 64 - first", "full"),
    Mutant("row_limit_off_by_one", f"{_TILE_SCHEDULER}:Visits.band", "Int32(high) + q_first", "Int32(high) + q_first + 1", "causal"),
    Mutant("left_limit_off_by_one", f"{_TILE_SCHEDULER}:Visits.band", "Int32(low) + q_first", "Int32(low) + q_first + 1", "window"),
    Mutant("last_tile_not_visited", f"{_TILE_SCHEDULER}:Visits.band_visits", "ceil_div(seqlen_k, tile_n)", "seqlen_k // tile_n", "full"),
    Mutant(
        "predicate_asked_in_first_tile_alone", f"{_MMA}:Multiplies._step",
        "is_masked or len(self.config.always) > 0", "False", "window",
    ),
    Mutant("full_tiles_not_asked", f"{_MMA}:Multiplies._step", "is_masked or len(self.config.always) > 0", "is_masked", "beside_lists"),
    # lists
    Mutant("full_tile_taken_for_partial", f"{_TILE_SCHEDULER}:Visits.listed", "Int32(1) if in_partial else Int32(0)", "Int32(1)", "lists"),
    Mutant("list_read_from_its_second_tile", f"{_TILE_SCHEDULER}:Visits._at", "size - 1 - place", "size - 2 - place", "lists"),
    Mutant(
        "heads_share_one_list", f"{_TILE_SCHEDULER}:Visits._lists",
        "head if const_expr(self.config.per_head) else Int32(0)", "Int32(0)", "lists",
    ),
    Mutant(
        "entries_share_one_list", f"{_TILE_SCHEDULER}:Visits._lists",
        "entry if const_expr(self.config.per_entry) else Int32(0)", "Int32(0)", "lists",
    ),
    Mutant("wrong_part_of_a_list_tile", f"{_TILE_SCHEDULER}:Visits._at", "__ + cut - 1 - place % cut", "__ + place % cut", "cut_lists"),
    Mutant("lists_of_the_first_sequence", f"{_TILE_SCHEDULER}:Visits._lists", "tables.entries[entry, 7] + row", "row", "ragged_lists"),
    Mutant("flat_list_offset", f"{_TILE_SCHEDULER}:Visits._lists", "row * columns", "row", "ragged_lists"),
    Mutant("row_of_lists_of_another_size", f"{_TILE_SCHEDULER}:Visits.list_visits", "m_block // cut_m", "m_block // (2 * cut_m)", "lists"),
    # sums
    Mutant("output_not_rescaled", f"{_MMA}:Multiplies._rescaled", "out[r, None].load() * row_scale[r]", "out[r, None].load()", "peaky"),
    Mutant("sum_not_rescaled", f"{_SOFTMAX}:Softmax.exponentials", "row_sum[r] * row_scale[r]", "row_sum[r]", "peaky"),
    Mutant(
        "stale_maximum", f"{_SOFTMAX}:Softmax.exponentials",
        "row_max[r] = top", "row_max[r] = top if const_expr(is_first) else row_max[r]", "peaky",
    ),
    Mutant("guess_never_wrong", f"{_SPECULATIVE_SOFTMAX}:Guesses._by_held", "right & (sums[r] <= _MOST)", "right", "steep"),
    Mutant("cap_always_far", f"{_SPECULATIVE_SOFTMAX}:Guesses._far_from_cap", "top <= most", "most > 0.0", "capped"),
    Mutant("sums_of_guesses_lost", f"{_MMA}:Multiplies._guessed", "row_sum.load() + added.load()", "row_sum.load()", "full"),
    Mutant(
        "sink_ignored", f"{_EPILOGUE}:Epilogue.finished",
        "total * rescale + cute.math.exp2(logit - higher, fastmath=True)", "total * rescale", "sink",
    ),
    Mutant("sink_in_base_2", f"{_EPILOGUE}:Epilogue.finished", "Float32(sink[heads[r]]) * Float32(LOG2E)",
           "Float32(sink[heads[r]])", "sink"),
    Mutant("sink_of_another_head", f"{_EPILOGUE}:Epilogue.finished", "sink[heads[r]]", "sink[0]", "sink"),
    Mutant("lse_in_base_2", f"{_EPILOGUE}:Epilogue.finished", "found = __ * Float32(LN2)", "found = __", "full"),
    # heads and storage
    Mutant("wrong_gqa_head", f"{_PRODUCER}:Loads._sources", "head // sizes.ratio", "head % (sizes.heads // sizes.ratio)", "full"),
    Mutant("queries_of_the_first_sequence", f"{_PRODUCER}:Loads._sources", "(q_start, 0)", "(q_start * 0, 0)", "packed"),
    Mutant("keys_of_the_first_sequence", f"{_PRODUCER}:Loads.part_of_tile", "(start, 0)", "(start * 0, 0)", "packed"),
    Mutant("values_of_the_first_sequence", f"{_PRODUCER}:Loads.part_of_tile", "(0, start)", "(0, start * 0)", "packed"),
    Mutant("v_not_wiped", f"{_MMA}:Multiplies._wiped", "room < tile_n", "room < 0", "packed"),
    Mutant("rows_behind_a_sequence_written", f"{_EPILOGUE}:Epilogue.stored", "__ > facts.seqlen_q", "facts.m_block < 0", "packed"),
    Mutant("pages_of_the_first_sequence", f"{_PRODUCER}:Loads._page", "tables.pages[entry, __]", "tables.pages[0, __]", "pages"),
    Mutant("page_off_by_one", f"{_PRODUCER}:Loads._page", "Uint32(at)", "Uint32(at + 1)", "pages"),
    Mutant("first_piece_of_every_page", f"{_PRODUCER}:Loads._start_copies", "sizes.pieces_in_page", "1", "pages"),
    Mutant(
        "page_of_the_lane_before", f"{_PRODUCER}:Loads._start_copies",
        "__(pages[group], i)", "__(pages[group], cutlass.max(i - 1, 0))", "pieces",
    ),
    Mutant(
        "last_piece_left_out", f"{_PRODUCER}:Loads._page",
        "at * self.config.piece < seqlen_k", "(at + 1) * self.config.piece <= seqlen_k", "pieces",
    ),
    Mutant(
        "row_of_the_lane_before", f"{_PAGED_GATHER}:Gathers.gather",
        "__(offset, lane)", "__(offset, cutlass.max(lane - 1, 0))", "gathered",
    ),
    Mutant("first_half_of_every_row", f"{_PAGED_GATHER}:Gathers.gather", "(None, part, first)", "(None, 0, first)", "gathered"),
    Mutant("pieces_exchanged", f"{_PRODUCER}:Loads._start_copies", "group * LANES + i", "group * LANES + i ^ 1", "pieces"),
    Mutant(
        "column_of_the_first_tile", f"{_SOFTMAX}:Softmax._places",
        "positions[0, 0][1] + n * self.config.tiles.tile_n", "positions[0, 0][1]", "score",
    ),
    # work
    Mutant("counter_left_as_it_is", f"{_PRODUCER}:Loads._left", "counter[0] = Int32(0)", "counter[0] = Int32(1)", "twice"),
)  # fmt: skip


def planted(mutant: Mutant, folder: Path) -> Path:
    """A copy of the package in ``folder`` with one bug in it; what goes on the path.

    Raises ``LookupError`` if the function no longer has the fragment that the mutant replaces.
    """
    shutil.copytree(package(), folder / "anyattn", ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "anyattn" / mutant.file).write_text(changed(mutant))
    return folder
