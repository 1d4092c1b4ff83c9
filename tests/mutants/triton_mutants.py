"""Mutants of the Triton backend: while ``active`` lasts, a module is read from a file with one edit. For a process that interprets.

Each names a ``killer``, a check in ``triton_killers.py`` that fails under it. None makes a kernel read far from what it was given: a bug
has to be noticed by the judge, not by the operating system.
"""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Iterator
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from anyattn.backends import backend_module
from anyattn.call_cache import attention
from anyattn.tensors import by_contents
from tests.mutants.mutant import Mutant, by_name, changed

__all__ = ["MUTANTS", "active"]

# whatever reads Triton: imported anew around every mutant
_PACKAGES = (
    "anyattn.backends.triton",
    "anyattn.tensors.privatized_sum",
    "anyattn.triton_tools",
    "anyattn.sparsity.kernels",
    "anyattn.backends.sink_gradient",
    "anyattn.documents.device",
    "anyattn.documents.kernels",
)
_INSIDE = tuple(f"{name}." for name in _PACKAGES)
_FORWARD = "backends.triton.kernels.forward"
_VISITS = "backends.triton.kernels.softmax.visits"
_WEIGHTS = "backends.triton.kernels.softmax.weights"
_ASCENDING = "backends.triton.kernels.softmax.ascending"
_SECTIONS = "backends.triton.kernels.softmax.sections"
_APPEND = "backends.triton.kernels.append_rotary"
_QUANTISE = "backends.triton.kernels.quantise"
_KEY_TILES = "backends.triton.kernels.key_tiles"
_BACKWARD = "backends.triton.kernels.backward"
_KEEP = "backends.triton.kernels.bands.keep"
_SUM = "backends.triton.kernels.bands.sum"
_KEY_GRADIENTS = "backends.triton.kernels.chosen.key_gradients"
_SORTED_CHOICE, _RANKED = "sparsity.kernels.sorted_choice", "sparsity.kernels.ranked_lists"
_PAIR_TILE = "backends.triton.kernels.pair_tile"
_REDUCTIONS = "backends.triton.kernels.reductions"
_ROW_TILE_BOUNDS = "backends.triton.kernels.row_tile_bounds"
_ITERATOR = "backends.triton.kernels.tile_iterator"
_ADDRESSING = "backends.triton.kernels.addressing"
_RESULTS = "backends.triton.kernels.results"
_WRAPPED = "backends.triton.kernels.wrapped_rows"
_SHARES = "backends.triton.kernels.even_shares"
_COMBINE = "backends.triton.kernels.combine"
_DROPOUT = "backends.triton.kernels.dropout"
_PAGED_KV = "backends.triton.kernels.paged_kv"
_CAPTURED_GRADIENTS = "backends.triton.codegen.captured_gradients"
_PROGRAMS = "backends.triton.codegen.programs"
_DETERMINISTIC_SUM = "backends.triton.kernels.deterministic_sum"
_GATHERED_KEYS = "backends.triton.kernels.gathered_keys"
_HOST_GATHERED_KEYS = "backends.triton.gathered_keys"
_PRIVATIZED_SUM = "tensors.privatized_sum"
_DEVICE_MATH = "triton_tools.device_math"

MUTANTS = by_name(
    # reductions of the probabilities and scores
    Mutant("scores_of_hidden_keys", f"{_REDUCTIONS}:_visit_keys", "tl.where(seen, s, float('-inf'))", "s", "reductions"),
    Mutant("maxima_in_base_2", f"{_REDUCTIONS}:_visit_keys", "highest * _LN2", "highest * 1.0", "reductions"),
    Mutant("blocks_of_the_first_rows", f"{_REDUCTIONS}:_visit_keys", "first_row // c.BLOCK_ROWS", "first_row * 0", "reductions"),
    Mutant("hidden_probability_in_key_sums", f"{_REDUCTIONS}:_visit_rows", "tl.where(__, p, 0.0)", "p * 1.0", "reductions"),
    Mutant("key_sums_without_full_tiles", f"{_REDUCTIONS}:key_sums_tile", "range(skipped, fulls)", "range(skipped, skipped)", "reductions"),
    Mutant("sums_over_all_queries", f"{_REDUCTIONS}:_visit_rows", "first + m_lane >= first_query", "first + m_lane >= 0", "last_queries"),
    # a row's bits in every batch
    Mutant("sections_not_rescaled", f"{_SECTIONS}:merged", "tl.fma(sums, before, row_sum * own)", "sums + row_sum * own", "batch"),
    Mutant("maxima_of_what_hides_all", f"{_SECTIONS}:settled", "tl.where(row_sum == 0, _LOWEST, row_max)", "row_max + 1.0", "batch"),
    Mutant(
        "sections_from_the_first_visit", f"{_VISITS}:visit_sections",
        "(first // c.SECTION + 1) * c.SECTION", "first + c.SECTION", "batch_of_windows",
    ),
    Mutant("maxima_that_stay", f"{_WEIGHTS}:weights_of", "above > _LAG", "above > 1e30", "batch_of_rising"),
    Mutant("greatest_subtracted", f"{_RESULTS}:store_results", "greatest(row_sum, top)", "greatest(row_sum, row_max)", "batch_of_rising"),
    Mutant("greatest_of_the_last_section", f"{_VISITS}:visit_sections", "tl.maximum(top, highest)", "highest", "batch_of_falling"),
    Mutant(
        "greatest_subtracted_in_parts", f"{_SECTIONS}:combine_sections", "2 * rows.to(tl.int64)", "rows.to(tl.int64)",
        "batch_of_rising_parts",
    ),
    Mutant("cut_tiles_not_masked", f"{_VISITS}:visit_in_order", "is_whole == 0", "is_whole == 2", "batch"),
    Mutant("second_run_from_the_first", f"{_ASCENDING}:visit_at", "visits.second + i", "visits.first + i", "batch_of_two_ranges"),
    Mutant("listed_tiles_all_masked", f"{_ASCENDING}:visit_at", "listed >= _WHOLE", "listed < 0", "batch_of_lists"),
    Mutant("sections_that_overlap", f"{_VISITS}:visit_sections", "(part + 1) * c.SECTION", "(part + 2) * c.SECTION", "batch_of_parts"),
    # skipped tiles
    Mutant(
        "skipped_if_a_row_skips", f"{_VISITS}:visit_or_skip", "__ > 0", "tl.min((distance < below).to(tl.int32) ^ 1, 0) > 0", "skipping"
    ),
    Mutant("nothing_skipped", f"{_VISITS}:visit_or_skip", "__ > 0", "row_max.shape[0] > 0", "skipping"),
    # what a row sees
    Mutant("unmasked_tail", f"{_ITERATOR}:inside_of", "(limits[0], tl.minimum(limits[1], seqlen_k))", "(limits[0], limits[1])", "full"),
    Mutant(
        "lost_last_key", f"{_ITERATOR}:inside_of",
        "(limits[0], tl.minimum(limits[1], seqlen_k))", "(limits[0], tl.minimum(limits[1], seqlen_k - 1))", "full",
    ),
    Mutant("unmasked_tail_of_lists", f"{_VISITS}:seen_in", "lanes < end", "lanes < end + 1", "uneven_lists"),
    Mutant("lost_last_key_of_lists", f"{_VISITS}:seen_in", "lanes < end", "lanes < end - 1", "lists"),
    Mutant(
        "row_limit_off_by_one", f"{_PROGRAMS}:_ranges_source",
        "text('(kv_idx < rows[{i + 1}])')", "text('(kv_idx <= rows[{i + 1}])')", "causal",
    ),
    Mutant("left_limit_off_by_one", f"{_DEVICE_MATH}:between", "place - lo", "place - lo - 1", "window"),
    Mutant("mask_forgotten", f"{_VISITS}:seen_in", "seen & __", "seen | __", "dilated"),
    Mutant("mask_beside_lists_forgotten", f"{_VISITS}:seen_always", "tl.where(__, s, float('-inf'))", "s", "beside_lists"),
    Mutant("tile_that_begins_sure", f"{_VISITS}:scores_of", "first + c.TILE_N > rows.sure[1]", "first > rows.sure[1]", "drafts"),
    Mutant("tile_that_ends_sure", f"{_VISITS}:scores_of", "first < rows.sure[0]", "first + c.TILE_N < rows.sure[0]", "drafts"),
    Mutant("sure_keys_of_one_row", f"{_ITERATOR}:sure_of", "tl.min(__)", "tl.max(clipped(hi, seqlen_k, c.TILE_M))", "drafts"),
    Mutant("column_of_the_first_tile", f"{_VISITS}:scores_of", "lanes = lane[None, :]", "lanes = (lane - first)[None, :]", "alibi"),
    Mutant("partial_taken_for_full", f"{_ITERATOR}:_run", "all_hi // TILE_N", "most // TILE_N", "causal"),
    Mutant("window_edge_taken_for_full", f"{_ITERATOR}:_run", "all_lo + TILE_N", "least + TILE_N", "window"),
    Mutant("tiles_before_the_full_ones_lost", f"{_ITERATOR}:by_ranges", "one.full - one.first", "zero", "window"),
    Mutant("least_of_limits_kept", f"{_ITERATOR}:_wider", "tl.minimum(all_hi, other_all_hi)", "tl.maximum(all_hi, other_all_hi)", "causal"),
    Mutant("limits_of_the_first_row_alone", f"{_ITERATOR}:_spread_of", "last[AT + 1]", "first[AT + 1]", "causal"),
    Mutant("limits_of_the_last_row_alone", f"{_ITERATOR}:_spread_of", "first[AT + 1]", "last[AT + 1]", "causal"),
    Mutant("last_tile_lost", f"{_ITERATOR}:by_ranges", "one.end - one.full_end", "one.end - one.full_end - 1", "full"),
    Mutant("tiles_after_the_first_range_lost", f"{_ITERATOR}:_joined", "tl.where(apart, a1, g0)", "tl.where(apart, f1, g0)", "sink_window"),
    Mutant("second_range_lost", f"{_ITERATOR}:_joined", "tl.where(apart, b1, nothing)", "fourth", "sink_window"),
    Mutant("shared_tile_visited_twice", f"{_ITERATOR}:_joined", "tl.maximum(g0, f1)", "g0 + 0", "overlap"),
    # far sides
    Mutant(
        "near_key_tile_taken_for_far", f"{_ITERATOR}:near_keys",
        "q_first - score.after.reach(score.scalars) + 1", "q_first - score.after.reach(score.scalars) + TILE_N", "far_sides",
    ),
    Mutant(
        "key_tile_far_for_the_first_row", f"{_ITERATOR}:near_keys",
        "q_last + score.before.reach(score.scalars)", "q_first + score.before.reach(score.scalars)", "far_sides",
    ),
    Mutant("far_key_tiles_of_no_side", f"{_ITERATOR}:near_keys", "tl.minimum(tl.maximum(far, first), stop)", "first", "far_sides"),
    Mutant(
        "near_row_tile_taken_for_far", f"{_ITERATOR}:near_rows",
        "k_first - score.before.reach(score.scalars) + 1", "k_first - score.before.reach(score.scalars) + TILE_M", "far_sides",
    ),
    Mutant(
        "row_tile_far_for_the_first_key", f"{_ITERATOR}:near_rows",
        "k_last + score.after.reach(score.scalars)", "k_first + score.after.reach(score.scalars)", "far_sides",
    ),
    # tables by row and distance
    Mutant("far_side_taken_for_the_other", f"{_KEEP}:kept", "score.side == 1", "score.side == 2", "bands"),
    Mutant("far_pairs_of_a_cut_tile_lost", f"{_KEEP}:kept", "apart >= reach", "apart >= 2 * reach", "bands"),
    Mutant("far_sums_of_the_first_head", f"{_KEEP}:store_sums", "h.to(tl.int64)", "0", "bands"),
    Mutant("near_derivatives_of_the_first_entry", f"{_KEEP}:kept", "b.to(tl.int64)", "0", "bands"),
    Mutant("place_of_the_opposite_distance", f"{_SUM}:store_places", "tl.maximum(-apart, 0)", "tl.maximum(apart, 0)", "bands"),
    Mutant(
        "steps_of_the_first_places_skipped", f"{_SUM}:sum_band",
        "tl.load(own_bounds + 2 * step + 1) >= first", "tl.load(own_bounds + 2 * step + 1) >= first + 32", "bands",
    ),
    Mutant("rows_one_column_apart", f"{_SUM}:sum_band", "row.to(tl.int64) * (2 * reach + 1)", "row.to(tl.int64) * 2 * reach", "bands"),
    # lists
    Mutant("full_tile_of_lists_taken_for_partial", f"{_ITERATOR}:_listed_partial", "i >= listed.listed", "i < 0", "lists"),
    Mutant("whole_of_a_list_tile_missed", f"{_ITERATOR}:_listed_full", "__ + i % CUT * TILE_N", "__", "lists"),
    Mutant("beyond_the_list_tile", f"{_ITERATOR}:_listed_partial", "tl.minimum((n + 1) * LIST_N, seqlen_k)", "seqlen_k", "uneven_lists"),
    Mutant("heads_share_one_list", f"{_ITERATOR}:place_of_lists", "strides.head", "0", "lists"),
    Mutant("entries_share_one_list", f"{_ITERATOR}:place_of_lists", "b.to(tl.int64) * strides.entry + head", "head", "lists"),
    Mutant("query_heads_of_the_wrong_lists", f"{_ITERATOR}:place_of_lists", "strides.group", "(2 * strides.group)", "lists_of_kv_heads"),
    Mutant("lists_of_the_first_sequence", f"{_ITERATOR}:place_of_lists", "head + sequence.lists_line", "head", "ragged_lists"),
    Mutant(
        "flat_list_offset", f"{_ITERATOR}:place_of_lists",
        "listed * strides.flat + sequence.lists_place", "listed * strides.flat", "ragged_lists",
    ),
    Mutant("ranks_among_one_list", f"{_RANKED}:_store_list", "place + low", "place", "ranked_lists"),
    Mutant("partial_tiles_taken_for_full", f"{_RANKED}:_store_list", "2 * tile + IS_PARTIAL", "2 * tile", "ranked_lists"),
    Mutant("repeated_choices_kept", f"{_SORTED_CHOICE}:store_sorted", "number != before", "number >= before", "sorted_choices"),
    Mutant("choices_behind_the_count", f"{_SORTED_CHOICE}:store_sorted", "place < entries[:, None]", "place < width", "sorted_choices"),
    Mutant("nothing_gathered_counts", f"{_ITERATOR}:_joined_partial", "tl.where(exists, keys, seqlen_k)", "keys", "single_queries"),
    Mutant("gathered_full_taken_for_partial", f"{_ITERATOR}:_joined_partial", "number >= listed.listed", "number < 0", "single_queries"),
    Mutant("rest_of_gathered_lists_lost", f"{_ITERATOR}:by_lists", "partial + rest + JOINS - 1", "partial + JOINS - 1", "single_queries"),
    Mutant("cut_tile_gathered_as_full", f"{_ITERATOR}:by_lists", "(last + 1) * LIST_N > seqlen_k", "last < 0", "single_queries"),
    Mutant("first_keys_of_gathered_tiles", f"{_ITERATOR}:_joined_full", "__ + lane % LIST_N", "__", "single_queries"),
    Mutant("query_of_the_next_line", f"{_KEY_GRADIENTS}:dkdv_of_queries", "number < count", "number <= count", "single_queries"),
    Mutant("gathered_query_sees_all", f"{_KEY_GRADIENTS}:dkdv_of_queries", "item & 1", "item | 1", "single_queries"),
    Mutant("rows_of_no_head", f"{_KEY_GRADIENTS}:dkdv_of_queries", "r % c.GROUP < sizes.ratio", "r >= 0", "single_queries"),
    Mutant(
        "gathered_queries_of_one_head", f"{_KEY_GRADIENTS}:dkdv_of_queries",
        "tl.minimum(r % c.GROUP, sizes.ratio - 1)", "0 * r", "single_queries",
    ),
    Mutant("dq_of_one_head", f"{_BACKWARD}:dq_tile", "h * sizes.ratio + r % c.GROUP", "h * sizes.ratio + r * 0", "single_queries"),
    Mutant("rows_of_the_next_lists", f"{_ADDRESSING}:row_tile", "tl.minimum((line + 1) * LIST_M, seqlen_q)", "seqlen_q", "uneven_lists"),
    # sums
    Mutant("scale_1_percent_off", f"{_FORWARD}:visited", "scale * _LOG2E", "scale * _LOG2E * 1.01", "full"),
    Mutant(
        "output_not_rescaled", f"{_DROPOUT}:plus_product",
        "tl.fma(acc, rescale[:, None], product)", "tl.fma(acc, 1.0, product)", "peaky",
    ),
    Mutant("sum_not_rescaled", f"{_WEIGHTS}:weights_of", "row_sum * rescale[:, None]", "row_sum", "peaky"),
    Mutant("stale_maximum", f"{_WEIGHTS}:weights_of", "(p, rescale, __, highest)", "(p, rescale, __, row_max)", "peaky"),
    Mutant("kept_weights_not_scaled", f"{_FORWARD}:visited", "total = total * factor_of(mods)", "pass", "dropout"),
    Mutant(
        "dropped_lanes_of_the_first_tile", f"{_DROPOUT}:kept_of",
        "places(first, TILE_N, IS_FOUR, not IS_TRANSPOSED)", "places(first * 0, TILE_N, IS_FOUR, not IS_TRANSPOSED)", "dropout",
    ),
    Mutant("dropped_eight_rows_for_eight_keys", f"{_DROPOUT}:kept_of", "down * 2 + along", "down + along * 2", "dropout"),
    Mutant(
        "dv_of_dropped_weights", f"{_BACKWARD}:_visit_rows",
        "plus_product(dv, None, kept_p, dout, c.PRECISION)",
        "plus_product(dv, None, p, dout, c.PRECISION)", "dropout",
    ),
    Mutant(
        "dq_of_dropped_weights", f"{_BACKWARD}:_visit_keys",
        "kept_of(dp, b, h, first, rows.dropout, mods.dropout, False)", "dp", "dropout",
    ),
    Mutant(
        "dk_of_dropped_weights", f"{_BACKWARD}:_visit_rows",
        "kept_of(dp, b, h, n_first, rows, mods.dropout, True)", "dp", "dropout",
    ),
    Mutant("sink_counted_twice", f"{_RESULTS}:finished", "tl.exp2(logit - highest)", "2 * tl.exp2(logit - highest)", "sink"),
    Mutant("sink_does_not_rescale", f"{_RESULTS}:finished", "acc = acc * rescale[:, None]", "pass", "sink"),
    Mutant("sink_in_base_2", f"{_RESULTS}:store_results", "tl.load(__).to(tl.float32) * _LOG2E", "tl.load(__).to(tl.float32)", "sink"),
    Mutant("sink_of_another_head", f"{_RESULTS}:store_results", "tensors.sink + h", "tensors.sink + h * 0", "sink"),
    Mutant("lse_in_base_2", f"{_RESULTS}:finished", "row_max * _LN2 + tl.log(total)", "row_max + tl.log2(total)", "full"),
    Mutant("nan_of_a_row_that_sees_nothing", f"{_RESULTS}:finished", "tl.where(row_sum == 0, 1.0, row_sum)", "row_sum", "islands"),
    # heads and storage
    Mutant(
        "wrong_gqa_head", f"{_ADDRESSING}:work_of",
        "(m, b, __, kv_head, split)", "(m, b, __, sizes.heads // sizes.ratio - 1 - kv_head, split)", "full",
    ),
    Mutant(
        "first_head_of_whole_tiles", f"{_ADDRESSING}:work_of",
        "kv_head * sizes.ratio + part * dealt.packed", "h * dealt.packed", "uneven_group",
    ),
    Mutant("packed_heads_are_one", f"{_ADDRESSING}:tile_of", "r % group", "r % group * 0", "few_rows"),
    Mutant("head_dim_not_cut", f"{_KEY_TILES}:load_rows", "is_row & (d < HEAD_DIM)", "is_row & (d <= HEAD_DIM)", "head_dim"),
    Mutant("queries_of_the_first_sequence", f"{_ADDRESSING}:tile_of", "sequence.q_start + position", "position", "packed"),
    Mutant(
        "keys_of_the_first_sequence", f"{_KEY_TILES}:places_at",
        "lanes_of(first, c) + key.start", "lanes_of(first, c)", "packed",
    ),
    Mutant("page_off_by_one", f"{_PAGED_KV}:page_numbers", "pages + indices", "pages + (tl.maximum(indices, 1) - 1)", "pages"),
    Mutant("row_of_page_off_by_one", f"{_PAGED_KV}:paged_places", "first + lane", "first + lane + 1", "uneven_pages"),
    Mutant("row_of_fitting_page_off_by_one", f"{_PAGED_KV}:paged_places", "lane % c.PAGE_SIZE", "(lane + 1) % c.PAGE_SIZE", "pages"),
    Mutant(
        "page_table_of_the_first_sequence", f"{_FORWARD}:visited",
        "tensors.pages + b.to(tl.int64) * sizes.pages_each", "tensors.pages", "pages",
    ),
    # 8-bit keys
    Mutant(
        "factors_of_keys_left_out", f"{_VISITS}:scores_of",
        "s * factors_at(key, first, end, numbers, c, False, IS_CUT)[None, :]", "s", "factors_of_keys",
    ),
    Mutant("factors_of_values_left_out", f"{_WEIGHTS}:scaled_weights_of", "p * factors", "p", "factors_of_keys"),
    Mutant("factors_of_keys_for_values", f"{_KEY_TILES}:factors_at", "key.factors.v", "key.factors.k", "factors_of_keys"),
    Mutant(
        "factor_of_the_first_head", f"{_FORWARD}:visited",
        "tensors.k_factors + kv_head * spans.k_factors.head", "tensors.k_factors", "factors_of_keys",
    ),
    Mutant("front_not_wrapped", f"{_WRAPPED}:load_wrapped", "tl.where(d < wrap, d + HEAD_DIM, d)", "d", "wrapped"),
    Mutant("front_of_one_piece_less", f"{_WRAPPED}:joined", "tl.where(i == 0, -1, 0)", "0", "wrapped"),
    Mutant("queries_in_the_order_of_columns", f"{_KEY_TILES}:load_rows", "WRAP > 0", "WRAP < 0", "wrapped"),
    Mutant("output_in_the_order_of_columns", f"{_WRAPPED}:output_columns", "c.WRAP > 0", "c.WRAP < 0", "wrapped"),
    Mutant("factor_of_the_head_left_out", f"{_FORWARD}:visited", "factor * of_head", "factor", "factors_of_heads"),
    Mutant(
        "factor_of_the_first_entry", f"{_FORWARD}:visited",
        "b.to(tl.int64) * spans.v_factors.rows", "b.to(tl.int64) * 0", "factors_of_heads",
    ),
    Mutant(
        "odd_columns_before_even_ones", f"{_RESULTS}:whole_output",
        "tl.join(acc[0], acc[1])", "tl.join(acc[1], acc[0])", "factors_of_keys",
    ),
    # appending to 8 bits
    Mutant("appended_ties_up", f"{_QUANTISE}:_float8", "magnitude + (__ - 1) + is_odd", "magnitude + __", "appended"),
    Mutant("appended_scales_of_the_first_head", f"{_APPEND}:_scales", "head * strides.head", "head * 0", "appended_scales"),
    Mutant("appended_scales_of_entries_by_page", f"{_APPEND}:_scales", "FORM == _BY_ENTRY", "False", "appended_scales"),
    Mutant(
        "appended_keys_rounded_twice", f"{_APPEND}:_store_line",
        "x.dtype if FORMAT == _PLAIN else wide_dtype", "x.dtype", "appended_scales",
    ),
    Mutant("launch_without_work_does_it", f"{_ADDRESSING}:is_off", "tl.load(guard) != 0", "tl.load(guard) == 7", "documents"),
    Mutant("launch_with_work_leaves_it", f"{_ADDRESSING}:is_off", "tl.load(guard) != 0", "tl.load(guard) >= 0", "documents"),
    # splits
    Mutant("split_lost", f"{_FORWARD}:visited", "portion.first * share", "(portion.first + 1) * share", "splits"),
    Mutant("last_tile_of_every_split_lost", f"{_FORWARD}:visited", "begin + share", "begin + share - 1", "splits"),
    Mutant(
        "splits_weighed_alike", f"{_COMBINE}:combine_row",
        "tl.exp(lse_of_parts - near)", "tl.where(lse_of_parts > float('-inf'), 1.0, 0.0)", "splits",
    ),
    Mutant("sink_of_splits_counted_twice", f"{_COMBINE}:combine_row", "tl.where(__, 0.0, 1.0)", "tl.where(__, 0.0, 2.0)", "splits"),
    Mutant("eight_splits_not_rescaled", f"{_COMBINE}:combine_row", "acc * rescale", "acc", "many splits"),
    Mutant("sum_of_eight_splits_not_rescaled", f"{_COMBINE}:combine_row", "total * rescale", "total", "many splits"),
    # even shares
    Mutant("share_one_tile_short", f"{_SHARES}:start_of_share", "at + share", "at + share - 1", "shares"),
    Mutant("heads_of_an_item_lost", f"{_SHARES}:start_of_share", "inside // own", "inside // own * 0", "shares"),
    Mutant("item_of_a_share_off_by_one", f"{_SHARES}:_item_of", "ends <= at", "ends < at", "shares"),
    Mutant("second_chunk_of_items_counted_twice", f"{_SHARES}:start_of_share", "item + more_items", "item + 2 * more_items", "shares"),
    Mutant("next_head_skipped", f"{_SHARES}:next_in_share", "head += is_done.to(tl.int32)", "head += 2 * is_done.to(tl.int32)", "shares"),
    Mutant("parts_in_one_place", f"{_SHARES}:store_part", "program * 2 + (begin == 0)", "program * 2", "shares"),
    Mutant(
        "end_of_a_row_tile_noted_by_others", f"{_SHARES}:store_part",
        "tl.where(is_end, rows, -1)", "tl.where(is_end, -1, rows)", "shares",
    ),
    Mutant("first_part_of_another_program", f"{_COMBINE}:combine_shares", "program - first + 1", "program - first", "shares"),
    Mutant("sink_of_shares_forgotten", f"{_COMBINE}:combine_shares", "total + 1", "total", "shares"),
    Mutant(
        "parts_of_shares_weighed_alike", f"{_COMBINE}:combine_shares",
        "tl.exp2(maxima - near)", "(maxima > float('-inf')).to(tl.float32)", "shares",
    ),
    Mutant("first_partial_tile_taken_for_full", f"{_VISITS}:visit_portion", "i >= full", "i > full", "shares"),
    # the backward pass
    Mutant("delta_dropped", f"{_BACKWARD}:prepare_tile", "out * dout", "out * dout * 0", "full"),
    Mutant("lse_gradient_ignored", f"{_BACKWARD}:prepare_tile", "if c.HAS_DLSE: ...", "if False: ...", "full"),
    Mutant("stale_lse", f"{_BACKWARD}:prepare_tile", "tensors.natural_lse + place", "tensors.natural_lse + place // 2 * 2", "full"),
    Mutant("statistics_of_two_sequences_in_one_place", f"{_ADDRESSING}:slot_of", "__ + b", "__", "packed"),
    Mutant("statistics_of_the_first_rows", f"{_BACKWARD}:_visit_rows", "tl.where(first < end, first, 0)", "first * 0", "causal"),
    Mutant("statistics_of_the_first_rows_alone", f"{_BACKWARD}:_visit_either", "heads.lse + first", "heads.lse", "window"),
    Mutant("heads_in_turn_lost", f"{_ADDRESSING}:place_of_program", "at % width", "at % width // 2 * 2", "causal"),
    Mutant("dq_not_scaled", f"{_KEY_TILES}:store_whole", "x * scale", "x * 1.0", "full"),
    Mutant(
        "dk_1_percent_off", f"{_BACKWARD}:dkdv_tile",
        "store_whole(dk_out, dk, scale, is_key, c)", "store_whole(dk_out, dk, scale * 1.01, is_key, c)", "full",
    ),
    Mutant("row_tile_lost", f"{_ROW_TILE_BOUNDS}:_extent", "tl.where(touches, m + 1, 0)", "tl.where(touches, m, 0)", "causal"),
    Mutant(
        "last_row_tile_lost", f"{_ROW_TILE_BOUNDS}:rows_that_see",
        "(sequence.seqlen_q + c.TILE_M - 1) // c.TILE_M - fulls", "fulls * 0", "full"
    ),
    Mutant("dk_of_one_head_alone", f"{_BACKWARD}:dkdv_tile", "kv_head * sizes.ratio + g", "kv_head * sizes.ratio", "full"),
    Mutant(
        "dv_overwritten", f"{_BACKWARD}:_visit_either",
        "plus_product(dv, None, p, dout, c.PRECISION)", "plus_product(dv * 0, None, p, dout, c.PRECISION)", "window",
    ),
    Mutant(
        "dv_overwritten_in_two_loops", f"{_BACKWARD}:_visit_rows",
        "plus_product(dv, None, kept_p, dout, c.PRECISION)", "plus_product(dv * 0, None, kept_p, dout, c.PRECISION)", "full",
    ),
    Mutant(
        "rows_filled_in_part", f"{_ROW_TILE_BOUNDS}:_spans_of",
        "fills = __ & (all_hi >= n_end)", "fills = __ & (hi >= n_end)", "causal",
    ),
    Mutant(
        "rows_filled_from_later_on", f"{_ROW_TILE_BOUNDS}:_spans_of",
        "fills = (all_lo <= n_first) & __", "fills = (lo <= n_first) & __", "window",
    ),
    Mutant(
        "second_range_of_rows_lost", f"{_ROW_TILE_BOUNDS}:_spans_of",
        "touches | (lo < n_end) & (hi > n_first)", "touches & ((lo < n_end) & (hi > n_first))", "sink_window",
    ),
    Mutant("tile_that_is_cut_not_asked", f"{_BACKWARD}:dkdv_tile", "m < runs.full", "m < 0", "window"),
    Mutant("hidden_probability_kept", f"{_BACKWARD}:_visit_rows", "tl.where(__, p, 0.0)", "p * 1.0", "causal"),
    Mutant("hidden_score_kept_in_dq", f"{_BACKWARD}:_visit_keys", "tl.where(seen, p, 0.0)", "p * 1.0", "causal"),
    Mutant(
        "hidden_derivative_kept", f"{_BACKWARD}:_visit_rows",
        "if __ and of_score[1].type.is_block(): ds = tl.where(p != 0.0, ds, 0.0)",
        "if __ and of_score[1].type.is_block(): ds = tl.where(p == p, ds, 0.0)", "infinite_derivative",
    ),
    Mutant(
        "hidden_derivative_kept_in_dq", f"{_BACKWARD}:_visit_keys",
        "ds = tl.where(seen, ds, 0.0)", "ds = tl.where(seen | True, ds, 0.0)", "infinite_derivative",
    ),
    Mutant("derivative_forgotten_in_dk", f"{_BACKWARD}:_visit_rows", "of_score[1].to(tl.float32)", "1.0", "softcap"),
    Mutant("derivative_forgotten_in_dq", f"{_BACKWARD}:_visit_keys", "of_score[1].to(tl.float32)", "1.0", "softcap"),
    Mutant("mask_forgotten_in_dk", f"{_BACKWARD}:_visit_rows", "is_shown", "kv >= 0", "dilated"),
    Mutant("mask_forgotten_in_dq", f"{_BACKWARD}:_visit_keys", "is_shown", "lanes >= 0", "dilated"),
    Mutant("sink_gradient_sign", "backends.sink_gradient:sink_gradient", "-__", "__", "sink"),
    Mutant(
        "captured_derivative_forgotten", f"{_CAPTURED_GRADIENTS}:scatter_source",
        "text('ds * found[{load.factor}].to(tl.float32)')", "text('ds')", "gated",
    ),
    Mutant(
        "pair_stored_by_rows_beyond_the_end", f"{_CAPTURED_GRADIENTS}:scatter_source",
        "text('element_ty), mask=seen)')", "text('element_ty), mask=is_key)')", "pairs",
    ),
    Mutant(
        "captured_gradient_one_place_on", f"{_CAPTURED_GRADIENTS}:scatter_source",
        "text('totals[{load.total}]')", "text('totals[{0 * load.total}]')", "two_tables",
    ),
    Mutant("diagonals_one_place_on", f"{_DEVICE_MATH}:send_diagonals", "__ - entry // 8", "__ - entry // 8 + 1", "relative"),
    Mutant("diagonals_of_blocks_mixed", f"{_DEVICE_MATH}:send_diagonals", "__ + ROWS - 1", "__ + ROWS - 2", "relative"),
    Mutant(
        "diagonals_before_the_tile_lost", f"{_DEVICE_MATH}:send_diagonals",
        "i < tl.minimum(begin.rows, 8 * ROWS)", "(i < 1) & (i < tl.minimum(begin.rows, 8 * ROWS))", "relative",
    ),
    Mutant("diagonals_of_the_first_head", f"{_DEVICE_MATH}:send_diagonals", "begin.h", "begin.h * 0", "relative"),
    # batch entries one after the other
    Mutant("entries_of_a_program_alike", f"{_PAIR_TILE}:pair_tile", "begin + i", "begin", "windows"),
    Mutant("delta_of_a_tile_dropped", f"{_PAIR_TILE}:pair_tile", "p * dp", "p * 0.0", "windows"),
    Mutant("statistics_of_the_first_head", f"{_PAIR_TILE}:pair_tile", "entry * sizes.heads + h", "entry * sizes.heads", "windows"),
    Mutant("dv_of_dp", f"{_PAIR_TILE}:pair_tile", "tl.trans(kept_p.to(k.dtype))", "tl.trans(dp.to(k.dtype))", "windows"),
    Mutant("ds_of_the_modified_score", f"{_PAIR_TILE}:pair_tile", "of_score[1].to(tl.float32)", "1.0", "windows"),
    Mutant(
        "mask_of_a_small_problem_forgotten", f"{_PAIR_TILE}:_seen",
        "seen & shown_by(mods.mask, b, h, lanes, end, of_mask, __)", "seen", "windows",
    ),
    Mutant("first_derivative_for_all", f"{_PROGRAMS}:by_entry", "numbers[factor]", "0", "windows"),
    Mutant("sums_of_one_entry", f"{_PAIR_TILE}:pair_tile", "first_sum += terms[0]", "first_sum = terms[0]", "windows"),
    Mutant("copies_but_the_first_lost", f"{_PRIVATIZED_SUM}:read", "total.sum(-1)", "total[..., 0]", "few_entries"),
    Mutant(
        "entries_begin_at_copies", f"{_CAPTURED_GRADIENTS}:_place",
        "d + 1 < len(places) or load.has_copies", "d + 1 < len(places)", "few_entries",
    ),
    Mutant("first_entry_taken_for_all", f"{_DEVICE_MATH}:send_copies", "tl.min(least) == most", "tl.min(least) <= most", "few_entries"),
    Mutant("sum_of_a_tile_lost", f"{_DEVICE_MATH}:send_copies", "tl.sum(sent)", "tl.max(sent)", "few_entries"),
    Mutant("exact_sign_lost", f"{_DEVICE_MATH}:send_exact", "tl.where(bits < 0, -number, number)", "number", "exact"),
    Mutant(
        "exact_leading_one_lost", f"{_DEVICE_MATH}:send_exact",
        "tl.where(field > 0, 0x800000, 0)", "tl.where(field > 0, 0x400000, 0)", "exact",
    ),
    Mutant("exact_shift_by_all", f"{_DEVICE_MATH}:send_exact", "exponent - plane * width", "exponent % 16", "exact"),
    Mutant("exact_planes_alike", f"{_DETERMINISTIC_SUM}:read_sums", "plane * width", "plane * (width - 1)", "exact"),
    Mutant("exact_planes_lost", f"{_DETERMINISTIC_SUM}:read_sums", "range(0, powers)", "range(powers // 2, powers)", "exact"),
    Mutant(
        "second_holder_of_a_page_lost", f"{_GATHERED_KEYS}:sum_pages",
        "tl.load(starts + page + 1)", "tl.minimum(tl.load(starts + page) + 1, tl.load(starts + page + 1))", "shared_pages",
    ),
    Mutant(
        "gathered_padding", f"{_GATHERED_KEYS}:gather_keys",
        "tl.minimum(count + new, line) - start", "tl.minimum(count + new, line)", "gathered",
    ),
    Mutant("gathered_rows_of_padding", f"{_GATHERED_KEYS}:gather_keys", "start + lane", "lane", "gathered"),
    Mutant(
        "gathered_factors_of_the_first_position", f"{_GATHERED_KEYS}:gather_keys",
        "position * v_factor_position", "position * 0", "gathered",
    ),
    Mutant(
        "gathered_factors_of_the_first_head", f"{_GATHERED_KEYS}:gather_keys",
        "b * heads + head", "b * heads", "gathered",
    ),
    Mutant(
        "pages_of_the_first_sequence", f"{_HOST_GATHERED_KEYS}:_in_lines",
        "replace(__, page_table=None, page_size=0, k_row=own, is_cache=False)",
        "replace(__, page_table=None, page_size=0, k_row=own * 0, is_cache=False)", "shared_pages",
    ),
    Mutant(
        "keys_of_a_shared_entry_lost", f"{_CAPTURED_GRADIENTS}:_additions",
        "text('tl.sum(part{i}, {axis}, keep_dims=True)')", "text('tl.max(part{i}, {axis}, keep_dims=True)')", "alibi",
    ),
)  # fmt: skip


@contextlib.contextmanager
def active(name: str, folder: Path) -> Iterator[None]:
    """The backend with one bug in it, imported anew from a file in ``folder``.

    Raises ``LookupError`` if the function no longer has the fragment that the mutant replaces.
    """
    mutant = MUTANTS[name]
    path = folder / f"{name}.py"  # a file of its own: Triton reads a kernel's source
    path.write_text(changed(mutant))
    finder = _Finder(mutant.module, path)
    sys.meta_path.insert(0, finder)
    _forget()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()


class _Finder(MetaPathFinder):
    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path) if fullname == self.module else None


def _forget() -> None:
    """The backend is imported again when it is next used."""
    for name in list(sys.modules):
        if name in _PACKAGES or name.startswith(_INSIDE):
            del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if hasattr(sys.modules.get(parent), last):
                delattr(sys.modules[parent], last)
    backend_module.cache_clear()
    attention.clear()
    by_contents.forget()
