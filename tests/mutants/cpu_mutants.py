"""Mutants of everything above the kernels and of the torch backend: a function is compiled anew with one edit while ``active`` lasts.

The production code knows nothing of them. ``ANYATTN_MUTANT=name pytest`` runs any tests under one (``tests/conftest.py``). Each names a
``killer``, a check of ``test_cpu_mutants.py`` that fails under it. A bug that a user finds becomes a mutant first.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from anyattn.backends.torch.captured_gradients import programs
from anyattn.call_cache import attention, kvcache
from anyattn.mods.ir.bounds import bounds
from anyattn.tensors import by_contents
from tests.mutants.mutant import Mutant, by_name
from tests.mutants.syntax import scope_of

__all__ = ["MUTANTS", "active"]

_FORWARD, _BACKWARD, _TILES = "backends.torch.forward", "backends.torch.backward", "backends.torch.tiles"
_SPANS, _STAGES, _CAPTURED = "backends.torch.coverage", "backends.torch.mod_runner", "backends.torch.captured_gradients"
_WHOLE, _RUN, _KEYS = "backends.torch.unstreamed", "backends.torch.api", "backends.torch.kv_matrices"
_MEMORY, _DROPS, _DECODE = "backends.torch.workspace", "backends.torch.drops", "backends.torch.decode"
_CACHE, _APPEND, _STORED = "validate.kvcache", "kvcache.append", "sequences.unread_kvcache:StoredCache"
_QUANTISE = "kvcache.quantise"

MUTANTS = by_name(
    # the forward's arithmetic
    Mutant(
        "scale_1_percent_off", f"{_FORWARD}:Scores.products",
        "factor * self.call.problem.scale", "factor * self.call.problem.scale * 1.01", "full",
    ),
    Mutant("lost_last_key", f"{_SPANS}:_intersect", "Segment(0, seqlen_k)", "Segment(0, seqlen_k - 1)", "full"),
    Mutant("stale_maximum", f"{_FORWARD}:_stream", "row_max = new_max", "row_max = new_max if row_max is None else row_max", "chunks"),
    Mutant("output_not_rescaled", f"{_FORWARD}:_stream", "acc.mul_(rescale)", "acc", "chunks"),
    Mutant("sum_not_rescaled", f"{_FORWARD}:_stream", "row_sum.mul_(rescale)", "row_sum", "chunks"),
    Mutant("dropped_chunk", f"{_FORWARD}:_stream", "acc.mul_(rescale).add_(part)", "acc.mul_(rescale)", "chunks"),
    Mutant("lse_in_base_2", f"{_FORWARD}:forward", "row_max.mul_(LN2).add_(row_sum.log())", "row_max.add_(row_sum.log2())", "full"),
    Mutant(
        "dropped_weights_leave_the_sum", f"{_FORWARD}:_stream",
        "p.sum(-1, keepdim=True, dtype=stat)",
        "(call.drops.apply(p, tile), p.sum(-1, keepdim=True, dtype=stat))[1]", "dropout",
    ),
    Mutant("kept_weights_not_scaled", f"{_FORWARD}:forward", "result *= problem.dropout.scale", "pass", "dropout"),
    Mutant(
        "dropped_pairs_of_another_tile", f"{_DROPS}:Drops.apply",
        "self.dropped(tile)",
        "self.dropped(tile._replace(q_first=0, k_lo=0, k_hi=tile.k_hi - tile.k_lo))", "dropout",
    ),
    Mutant("both_rows_of_a_word_exchanged", f"{_DROPS}:Drops.dropped", "(2, 0)", "(0, 2)", "dropout"),
    Mutant("phases_of_ascending_rows", f"{_DROPS}:Drops._least", "sixteen.flip(0)", "sixteen", "dropout"),
    Mutant("dv_of_dropped_weights", f"{_BACKWARD}:_row_tile", "call.drops.apply(kept, tile)", "pass", "dropout"),
    Mutant("dp_of_dropped_weights", f"{_BACKWARD}:_row_tile", "call.drops.apply(dp, tile)", "pass", "dropout"),
    Mutant(
        "dv_not_scaled", f"{_BACKWARD}:_row_tile",
        "_accumulate(operands.dv[:, here], __, wide_dout, factor)",
        "_accumulate(operands.dv[:, here], __, wide_dout, 1.0)", "dropout",
    ),
    Mutant(
        "a_warm_call_drops_what_the_first_did", "call_cache.calls:RememberedCall.filled",
        "dropout_of(signature.dropout)", "None", "dropout_again",
    ),
    Mutant("sink_counted_twice", f"{_FORWARD}:_add_sink", "_exp2(logit - new_max, __)", "2 * _exp2(logit - new_max, __)", "sink"),
    Mutant("sink_does_not_rescale", f"{_FORWARD}:_add_sink", "acc.mul_(rescale)", "pass", "sink"),
    Mutant(
        "light_rows_taken_for_the_sinks", f"{_BACKWARD}:_Statistics.of",
        "finite_or_zero(t)", "torch.zeros_like(t)", "garbage_at_a_sink",
    ),
    Mutant(
        "mask_forgotten_with_a_mod", f"{_FORWARD}:Scores.of",
        "self.call.masks.apply(view, tile, chunk.asked)", "pass", "relative_window",
    ),
    # which keys and heads
    Mutant("window_one_too_wide", f"{_TILES}:Masks._visible", "columns < hi", "columns <= hi", "window"),
    Mutant("window_one_too_narrow", f"{_TILES}:Masks._visible", "columns >= lo", "columns > lo", "window"),
    Mutant("last_stretch_unmasked", f"{_TILES}:Masks._covers", "for segment in asked: ...", "for segment in asked[:-1]: ...", "causal"),
    Mutant("wrong_gqa_head", f"{_TILES}:Heads.keys", "x[__]", "x[__].flip(1)", "gqa"),
    Mutant("rows_in_reverse", f"{_TILES}:Masks._rows_of", "rows.flip(3)", "rows", "relative_window"),
    Mutant("rows_in_reverse_without_diagonals", f"{_TILES}:Masks._rows_of", "tile.descends", "True", "causal"),
    Mutant("partial_taken_for_full", f"{_SPANS}:_from_ranges", "hi.amin", "hi.amax", "causal"),
    Mutant("band_edge_taken_for_full", f"{_SPANS}:_from_ranges", "lo.amax", "lo.amin", "window"),
    Mutant("full_blocks_dropped", f"{_SPANS}:_runs", "kind != EMPTY", "kind == 1", "block_mask"),
    Mutant("block_end_off_by_one", f"{_SPANS}:_runs", "end * block_n", "end * block_n - 1", "block_mask"),
    Mutant(
        "block_row_off_by_one", f"{_SPANS}:_from_classes",
        "t * tile_m // tile[0]", "min((t + 1) * tile_m // tile[0], len(rows) - 1)", "block_mask",
    ),
    Mutant("heads_share_one_mask", f"{_SPANS}:_groups", "x != per_b[0]", "x is None", "by_head"),
    Mutant("batch_shares_one_mask", f"{_SPANS}:_agree", "s.stretches[one] == s.stretches[other]", "True", "by_batch"),
    # mods
    Mutant(
        "head_offset_forgotten", f"{_STAGES}:_view",
        "offset += lo * strides[dim]", "offset += lo * strides[dim] * (dim != 1)", "by_head",
    ),
    Mutant(
        "batch_offset_forgotten", f"{_STAGES}:_view",
        "offset += lo * strides[dim]", "offset += lo * strides[dim] * (dim != 0)", "by_batch",
    ),
    Mutant(
        "distance_off_by_one", f"{_STAGES}:Bound._leaves",
        "torch.arange(__, least - 1, -1, device=device)", "torch.arange(__ + 1, least - 1, -1, device=device)", "relative_window",
    ),
    Mutant(
        "index_in_32_bits", "mods.analysis.evaluate:_load",
        "i if isinstance(i, Tensor) else __", "i.int() if isinstance(i, Tensor) else __", "huge_table",
    ),
    Mutant(
        "stale_closure", "mods.tracing.trace:_Memo.lookup",
        "[found[s] for s in __]", "[10 + s for s in __]", "closures_of_other_lengths",
    ),
    Mutant("stale_call", "call_cache.rebind:Recipe.captured", "numbers[s]", "10 + s", "closures"),
    Mutant(
        "traced_numbers_in_another_order", "call_cache.signature:_traced_reading",
        "scalars != tuple(range(len(mod.scalars)))", "False", "traced_mods",
    ),
    Mutant("known_mask_of_another_number", "call_cache.block_mask:RememberedMask.block_mask", "mask_mod", "None", "known_mask"),
    Mutant("known_mask_reads_outside", "call_cache.block_mask:_remember", "held is not user", "False", "hidden_index"),
    Mutant("known_mask_of_a_far_number", "call_cache.block_mask:_remember", "user.source is None or has_far", "False", "far_numbers"),
    Mutant("narrowing_cast_taken_for_none", "mods.analysis.solver:Solver._linear", "not self.exact[node]", "False", "narrowed"),
    Mutant("bounds_that_overflow", "mods.ir.bounds:_Writer.fit", "outside.where(end, value)", "value", "bounds"),
    Mutant("bounds_of_unknown_operands", "mods.ir.bounds:_Writer.result", "for a in args: ...", "for a in (): ...", "bounds"),
    Mutant("subtracted_bias_added", "mods.analysis.additive_bias:additive_bias", "node.op == 'sub'", "False", "alibi"),
    # the backward
    Mutant("stale_lse", f"{_BACKWARD}:_Statistics.of", "lse * LOG2E", "lse.roll(1, -1) * LOG2E", "full"),
    Mutant("delta_dropped", f"{_BACKWARD}:_Statistics.of", "dout.to(stat) * out", "dout.to(stat) * out * 0", "full"),
    Mutant("lse_gradient_ignored", f"{_BACKWARD}:_Statistics.of", "dlse is None", "True", "full"),
    Mutant("delta_in_16_bits", f"{_BACKWARD}:_with_delta", "range(width, width + 3)", "range(width, width + 1)", "one_key_half"),
    Mutant("dk_not_scaled", f"{_BACKWARD}:_row_tile", "_accumulate(__, __1, wide_q, scale)", "_accumulate(__, __1, wide_q, 1.0)", "full"),
    Mutant(
        "dv_two_percent_off", f"{_BACKWARD}:_row_tile",
        "_accumulate(__, __1, wide_dout, factor)", "_accumulate(__, __1, wide_dout, 1.02 * factor)", "full",
    ),
    Mutant("gqa_gradients_overwritten", f"{_TILES}:Heads.add_to_keys", "target += __", "target[:] = __", "by_head"),
    Mutant("hidden_derivative_kept", f"{_BACKWARD}:_row_tile", "call.masks.zero(dscore, tile, chunk.asked)", "pass", "infinite_derivative"),
    Mutant("sink_gradient_sign", f"{_BACKWARD}:_dsink", "__.neg_()", "__", "sink"),
    Mutant("diagonal_sums_shifted", f"{_CAPTURED}:_Sum._add_diagonals", "width + 1", "width", "relative"),
    Mutant(
        "shared_index_counted_once", f"{_CAPTURED}:_Sum._add_indexed",
        "part.sum(shared, keepdim=True)", "part.amax(shared, True)", "relative",
    ),
    Mutant("tanh_derivative", "mods.ir.grad:_UNARY", "tanh", "sigmoid", "softcap"),
    Mutant(
        "branches_swapped", "mods.ir.grad:_Reverse.parts",
        "self.op('where', condition, g, zero)", "self.op('where', condition, zero, g)", "where",
    ),
    # tables
    Mutant("slice_of_the_first_tile", "mods.analysis.evaluate:slice_at", "offset += first * stride", "offset += 0", "tables"),
    Mutant("rows_of_a_slice_in_reverse", "mods.analysis.evaluate:_load", "view.flip(2)", "view", "tables"),
    Mutant("bias_in_another_base", f"{_FORWARD}:Scores._biased", "self.bias_factor", "1.0", "tables"),
    Mutant("gradient_of_a_slice_in_reverse", f"{_CAPTURED}:_Sum.add", "tile.descends", "True", "tables"),
    Mutant(
        "entries_of_a_choice_swapped", "backends.torch.lower:_with_choices",
        'builder.add("where", new[condition], yes, no)', 'builder.add("where", new[condition], no, yes)', "tables",
    ),
    Mutant("bits_of_the_other", "backends.torch.vectors:_select", "__.bitwise_xor_(y_bits)", "__.bitwise_xor_(x_bits)", "tables"),
    Mutant(
        "rows_hidden_by_a_bias_count", "backends.torch.aten_flash:Rectangle.forward",
        "(lse == 0) & __", "(lse != lse) & __", "hidden_by_a_bias",
    ),
    # low precision without statistics
    Mutant("span_rows_not_cleared", f"{_WHOLE}:_Rows.probabilities", "call.masks.zero", "lambda *_: None", "blind_half"),
    Mutant("span_runs_on_one_another", f"{_WHOLE}:_Rows.gathered", "run.hi - run.lo", "0", "runs_half"),
    Mutant(
        "span_dk_not_scaled", f"{_WHOLE}:_row_tile",
        "_add_to_runs(dk, __, spans, call.problem.scale)", "_add_to_runs(dk, __, spans, 1.0)", "full_half",
    ),
    # sequences
    Mutant("rows_of_another_sequence", f"{_STAGES}:Tile._entries", "base + lo", "lo", "packed"),
    Mutant(
        "queries_of_another_sequence", f"{_TILES}:Heads.rows",
        "__[__1, __2, self.q_start + lo : self.q_start + hi]", "__[__1, __2, lo:hi]", "packed",
    ),
    Mutant(
        "offset_of_another_sequence", "validate.flash:_checked_sequences",
        "sequences.seqlens_q", "sequences.seqlens_q.flip(0)", "packed",
    ),
    Mutant(
        "entry_forgotten", f"{_STAGES}:Bound._leaves",
        "(x.view(-1, 1) for x in sequences.asked_rows)", "(x.view(-1, 1) * n for n, x in enumerate(sequences.asked_rows))", "packed",
    ),
    Mutant("tiles_of_another_sequence", f"{_SPANS}:_by_sequence", "start += count", "start += 0", "packed"),
    Mutant("unused_rows_left", f"{_TILES}:rows_of_queries", "out.zero_()", "out", "used"),
    # caches
    Mutant(
        "page_off_by_one", f"{_KEYS}:PoolRows.of",
        "self.storage_rows[:, None]", "(self.storage_rows[:, None] + page_size) % (len(pool) * page_size)", "pages",
    ),
    Mutant("slot_off_by_one", f"{_APPEND}:slots", "row // page_size", "(row + 1) // page_size", "pages"),
    Mutant("leftpad_ignored", f"{_STORED}.k_start", "self.tables.leftpad is None", "True", "leftpad"),
    Mutant("leftpad_counted_as_keys", f"{_STORED}.seqlens_k", "__ - self.k_start", "__", "leftpad"),
    Mutant(
        "padding_not_turned", f"{_CACHE}:CacheCall.prepared",
        "_q_positions(step, sequences, start)", "_q_positions(step, sequences, start - sequences.k_start)", "leftpad_rotary",
    ),
    Mutant(
        "rotary_off_by_one", "kvcache.rotary:apply_rotary",
        "__.index_select(0, positions)", "__.index_select(0, positions + 1)", "rotary",
    ),
    Mutant("rotary_stands_still", f"{_CACHE}:_q_positions", "step.follows", "False", "rotary"),
    Mutant("wrong_batch_row", f"{_STORED}.k_row", "self.tables.rows.to(__)", "self.tables.rows.to(__).flip(0)", "rows"),
    Mutant("appended_to_the_wrong_row", f"{_APPEND}:slots", "cache_rows[entry]", "entry", "rows"),
    Mutant("place_counted_from_0", f"{_STORED}.q_first", "self.seqlens_k - self.seqlens_q", "self.seqlens_q * 0", "places"),
    Mutant("known_row_one_late", "call_cache.kvcache:_row_places", "s + j", "s + j + 1", "known"),
    Mutant("known_page_off_by_one", "call_cache.kvcache:_page_places", "row // page_size", "(row + 1) // page_size", "known_pages"),
    Mutant("decoding_loses_a_key", f"{_DECODE}:_visible", "max(lo, first)", "max(lo, first + 1)", "decode"),
    Mutant("decoding_one_page_row_late", f"{_DECODE}:Decoder._keys", "start - first * size", "start - first * size + 1", "decode"),
    Mutant(
        "decoding_counts_the_sink_twice", f"{_DECODE}:_with_sink",
        "(sink - highest).exp_()", "2 * (sink - highest).exp_()", "decode_sink",
    ),
    Mutant("known_call_of_one_length", "call_cache.kvcache:_numbers", "tuple(lengths.tolist())", "(int(lengths[0]),) * batch", "known"),
    Mutant(
        "pages_of_other_heads", f"{_KEYS}:PoolRows.tokens",
        "__[:, __1 * width : __2 * width]", "__[:, : (__2 - __1) * width]", "pages_by_head",
    ),
    # 8-bit caches
    Mutant("ties_away_from_zero", f"{_QUANTISE}:quantised", "found.round()", "(found + 0.5).floor()", "rounding"),
    Mutant("wraps_beyond_the_range", f"{_QUANTISE}:quantised", "exact.clamp(limits.least, limits.greatest)", "exact", "rounding"),
    Mutant("saturation_from_the_range_on", f"{_QUANTISE}:quantised", "exact > limits.above", "exact > limits.greatest", "counting"),
    Mutant("nan_not_counted", f"{_QUANTISE}:quantised", "is_out | is_nan", "is_out", "own_scales"),
    Mutant("infinity_decides_a_scale", f"{_QUANTISE}:row_scales", "_without_infinite(magnitudes)", "magnitudes", "own_scales"),
    Mutant("scale_of_0", f"{_QUANTISE}:row_scales", "__.clamp(min=SMALLEST_SCALE)", "__", "own_scales"),
    Mutant("rotated_keys_rounded_twice", f"{_CACHE}:CacheCall.prepared", "k.to(torch.promote_types(__, __1))", "k", "appended_to_8_bits"),
    Mutant("scales_of_the_first_entry", f"{_APPEND}:_given_scales", "of_entries[entry]", "of_entries[entry * 0]", "appended_to_8_bits"),
    Mutant("scale_not_written", f"{_APPEND}:append", "descale.index_put_(__, scales)", "pass", "appended_to_8_bits"),
    Mutant(
        "scales_of_other_known_entries", "call_cache.kvcache:KnownCall.prepared",
        "torch.arange(len(k), device='cpu')[:, None]", "torch.arange(len(k), device='cpu')[:, None] * 0", "known_8_bits",
    ),
    Mutant("bits_by_place", f"{_FORWARD}:_exp2", "is_small", "False", "bits"),
    # splits
    Mutant("split_lost", f"{_RUN}:_forward_by_splits", "range(plan.num_splits)", "range(plan.num_splits - 1)", "splits"),
    Mutant("split_weight_dropped", "backends.torch.combine:combine", "seen * weights[..., None]", "seen", "splits"),
    Mutant(
        "sink_in_every_split", f"{_RUN}:_forward_by_splits",
        "problem.like(sink=None, wants_lse=True)", "problem.like(wants_lse=True)", "splits",
    ),
    Mutant("split_end_lost", "sequences.split_kv:split_range", "first + share", "first + share - 1", "splits"),
    # tile ranges
    Mutant("range_one_tile_short", "sequences.block_info:_tiles", "n_min + __", "n_min + 0 * tile + (-1) * (count > 9) + __", "blocks"),
    Mutant(
        "diagonal_top_left", "sequences.block_info:BlockInfo._keys_of_rows",
        "seqlen_info.seqlen_k - seqlen_info.seqlen_q", "0", "blocks",
    ),
    Mutant("packed_heads_forgotten", "sequences.block_info:BlockInfo._rows", "group > 1", "False", "blocks"),
    # memory
    Mutant("sums_start_anywhere", f"{_MEMORY}:zeros_in_order", "__.zero_()", "__", "full"),
    Mutant(
        "written_past_the_end", f"{_MEMORY}:zeros_in_order",
        "return empty_in_order(like, like.shape[-1], dtype).zero_()",
        "x = empty_in_order(like, like.shape[-1], dtype); x.as_strided((x.numel() + 1,), (1,)).zero_(); return x", "full",
    ),
    Mutant(
        "input_overwritten", f"{_KEYS}:KeyRows.__init__",
        "self._view.reshape(self.shape)", "self._view.reshape(self.shape).mul_(1.0)", "inputs",
    ),
)  # fmt: skip


@contextlib.contextmanager
def active(name: str) -> Iterator[None]:
    """The package with one bug in it. Raises ``LookupError`` if the function no longer has the fragment that the mutant replaces."""
    mutant = MUTANTS[name]
    module = importlib.import_module(mutant.module)
    owner: Any = module
    *parents, last = mutant.scope.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = inspect.getattr_static(owner, last)
    if isinstance(original, dict):
        with _table_entry(original, mutant):
            yield
        return
    mutated = _rewritten(mutant, module)
    _forget()
    places = [(owner, last)] if parents else _bindings(original)
    if hasattr(mutated, "__set_name__"):  # a cached_property
        mutated.__set_name__(owner, last)
    for place, attribute in places:
        setattr(place, attribute, mutated)
    try:
        yield
    finally:
        _forget()
        for place, attribute in places:
            setattr(place, attribute, original)


def _forget() -> None:
    """Nothing that an earlier call left goes round the bug, and nothing that the bug made outlives it."""
    attention.clear()
    kvcache._step.cache_clear()
    by_contents.forget()
    bounds.cache_clear()
    programs.cache_clear()


@contextlib.contextmanager
def _table_entry(table: dict[str, Any], mutant: Mutant) -> Iterator[None]:
    """Replaces the entry ``old`` of a table by its entry ``new``."""
    original = table[mutant.old]
    table[mutant.old] = table[mutant.new]
    _forget()
    try:
        yield
    finally:
        _forget()
        table[mutant.old] = original


def _rewritten(mutant: Mutant, module: Any) -> Any:
    """The function with its bug, in its module's namespace."""
    edited = mutant.edited(ast.parse(Path(module.__file__).read_text()))
    function = scope_of(edited, mutant.scope)
    code = compile(ast.Module([function], []), f"<mutant {mutant.name}>", "exec", flags=annotations.compiler_flag)
    found: dict[str, Any] = {}
    exec(code, vars(module), found)
    return found[function.name]


def _bindings(function: Callable) -> list[tuple[Any, str]]:
    """Every module of the package that holds ``function`` under some name: importers have their own reference."""
    return [
        (module, attribute)
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] == "anyattn" and module is not None
        for attribute, value in list(vars(module).items())
        if value is function
    ]
