"""Planted bugs: the tests must fail under every one of them, or they prove nothing.

A mutant replaces a piece of one function's source, or an entry of a table, while ``active(name)`` lasts; the production code knows nothing
of it. ``ANYATTN_MUTANT=name pytest`` runs any tests under one (``tests/conftest.py``). Each names a ``killer``, a check of
``tests/testing/test_mutants.py`` that fails under it. A bug that a user finds becomes a mutant first.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from anyattn.call_cache import attention
from anyattn.tensors import by_contents

__all__ = ["MUTANTS", "Mutant", "active"]


@dataclass(frozen=True)
class Mutant:
    """``where`` is ``module:function`` or ``module:Class.method`` below ``anyattn``; ``old``, once in its source, becomes ``new``."""

    name: str
    where: str
    old: str
    new: str
    killer: str


_FORWARD, _BACKWARD, _TILES = "backends.torch.forward", "backends.torch.backward", "backends.torch.tiles"
_SPANS, _STAGES, _CAPTURED = "backends.torch.coverage", "backends.torch.mod_runner", "backends.torch.captured_gradients"
_WHOLE, _RUN, _KEYS = "backends.torch.unstreamed", "backends.torch.api", "backends.torch.kv_matrices"
_MEMORY = "backends.torch.workspace"
_CACHE, _APPEND, _LENGTHS = "validate.kvcache", "kvcache.append", "sequences.seqlen_info"
_PAST_THE_END = "x = empty_in_order(like, like.shape[-1], dtype); x.as_strided((x.numel() + 1,), (1,)).zero_(); return x"

MUTANTS = {
    m.name: m
    for m in (
        # the forward's arithmetic
        Mutant(
            "scale_1_percent_off", f"{_FORWARD}:Scores.products",
            "* self.call.problem.scale", "* self.call.problem.scale * 1.01", "full",
        ),
        Mutant("lost_last_key", f"{_SPANS}:_intersect", "Segment(0, seqlen_k)", "Segment(0, seqlen_k - 1)", "full"),
        Mutant("stale_maximum", f"{_FORWARD}:_stream", "row_max = new_max", "row_max = new_max if row_max is None else row_max", "chunks"),
        Mutant("output_not_rescaled", f"{_FORWARD}:_stream", "acc.mul_(rescale).add_(part)", "acc.add_(part)", "chunks"),
        Mutant("sum_not_rescaled", f"{_FORWARD}:_stream", "row_sum.mul_(rescale).add_(part_sum)", "row_sum.add_(part_sum)", "chunks"),
        Mutant("dropped_chunk", f"{_FORWARD}:_stream", "acc.mul_(rescale).add_(part)", "acc.mul_(rescale)", "chunks"),
        Mutant("lse_in_base_2", f"{_FORWARD}:forward", "row_max.mul_(LN2).add_(row_sum.log())", "row_max.add_(row_sum.log2())", "full"),
        Mutant("sink_counted_twice", f"{_FORWARD}:_add_sink", "+ _exp2(logit - new_max,", "+ 2 * _exp2(logit - new_max,", "sink"),
        Mutant("sink_does_not_rescale", f"{_FORWARD}:_add_sink", "acc.mul_(rescale)", "pass", "sink"),
        Mutant("nan_of_hidden_values", f"{_FORWARD}:Values.weighted", "if not self.is_guarded", "if True", "garbage"),
        Mutant(
            "mask_forgotten_with_a_mod", f"{_FORWARD}:Scores.of",
            "self.call.masks.apply(view, tile, chunk.asked)", "pass", "relative_window",
        ),
        # which keys and heads
        Mutant("window_one_too_wide", f"{_TILES}:Masks._visible", "columns < hi", "columns <= hi", "window"),
        Mutant("window_one_too_narrow", f"{_TILES}:Masks._visible", "columns >= lo", "columns > lo", "window"),
        Mutant("last_stretch_unmasked", f"{_TILES}:Masks._covers", "for segment in asked:", "for segment in asked[:-1]:", "causal"),
        Mutant(
            "wrong_gqa_head", f"{_TILES}:Heads.keys",
            "x[self.k_rows, self.kv_heads, self.keys_used]", "x[self.k_rows, self.kv_heads, self.keys_used].flip(1)", "gqa",
        ),
        Mutant("rows_in_reverse", f"{_TILES}:Masks._rows_of", ".flip(3)", "", "causal"),
        Mutant(
            "partial_taken_for_full", f"{_SPANS}:_from_ranges",
            "hi.amin(-1)", "hi.amax(-1)", "causal",
        ),
        Mutant(
            "band_edge_taken_for_full", f"{_SPANS}:_from_ranges",
            "lo.amax(-1)", "lo.amin(-1)", "window",
        ),
        Mutant("full_blocks_dropped", f"{_SPANS}:_from_lists", "lists.append(", "repr(", "block_mask"),
        Mutant("block_end_off_by_one", f"{_SPANS}:_merge", "(i + 1) * block_n", "(i + 1) * block_n - 1", "block_mask"),
        Mutant(
            "block_row_off_by_one", f"{_SPANS}:_from_lists",
            "t * tile_m // block_m", "min((t + 1) * tile_m // block_m, rows - 1)", "block_mask",
        ),
        Mutant("heads_share_one_mask", f"{_SPANS}:_groups", "any(x != per_b[0]", "any(x is None", "by_head"),
        Mutant("batch_shares_one_mask", f"{_SPANS}:_groups", "any(x != s.stretches[0]", "any(x is None", "by_batch"),
        # mods
        Mutant("head_offset_forgotten", f"{_STAGES}:Bound._at_heads", "tile.h_lo : tile.h_hi", ": tile.h_hi - tile.h_lo", "by_head"),
        Mutant("batch_offset_forgotten", f"{_STAGES}:Bound._at_heads", "tile.b_lo : tile.b_hi", ": tile.b_hi - tile.b_lo", "by_batch"),
        Mutant(
            "distance_off_by_one", f"{_STAGES}:Bound.__init__",
            "torch.arange(self.greatest_difference, least", "torch.arange(self.greatest_difference + 1, least", "relative_window",
        ),
        Mutant(
            "index_in_32_bits", "mods.analysis.evaluate:_load",
            "i if isinstance(i, Tensor)", "i.int() if isinstance(i, Tensor)", "huge_table",
        ),
        Mutant(
            "stale_closure", "mods.tracing.trace:_Memo.lookup",
            "[found[s] for s in source.scalars]", "[10 + s for s in source.scalars]", "closures_of_other_lengths",
        ),
        Mutant(
            "stale_call", "call_cache.rebind:Recipe.made",
            "[numbers[s] for s in self.scalars]", "[10 + s for s in self.scalars]", "closures",
        ),
        Mutant("narrowing_cast_taken_for_none", "mods.analysis.solver:Solver._linear", "if not self.exact[node]:", "if False:", "narrowed"),
        Mutant("subtracted_bias_added", "mods.analysis.additive_bias:additive_bias", 'node.op == "sub", right', "False, right", "alibi"),
        # the backward
        Mutant("stale_lse", f"{_BACKWARD}:_Statistics.of", "(lse * LOG2E)", "(lse.roll(1, -1) * LOG2E)", "full"),
        Mutant("delta_dropped", f"{_BACKWARD}:_Statistics.of", "(dout.to(stat) * out)", "(dout.to(stat) * out * 0)", "full"),
        Mutant("lse_gradient_ignored", f"{_BACKWARD}:_Statistics.of", "delta -= dlse", "pass", "full"),
        Mutant("dk_not_scaled", f"{_BACKWARD}:_row_tile", "narrow, q, scale", "narrow, q, 1.0", "full"),
        Mutant("dv_two_percent_off", f"{_BACKWARD}:_row_tile", '_narrow(call, p, "p"), dout', '_narrow(call, p, "p"), dout, 1.02', "full"),
        Mutant("gqa_gradients_overwritten", f"{_TILES}:Heads.add_to_keys", "target += part.view", "target[:] = part.view", "by_head"),
        Mutant(
            "hidden_derivative_kept", f"{_BACKWARD}:_row_tile",
            "call.masks.zero(dscore, tile, chunk.asked)", "pass", "infinite_derivative",
        ),
        Mutant("sink_gradient_sign", f"{_BACKWARD}:backward", ".neg_()", "", "sink"),
        Mutant("diagonal_sums_shifted", f"{_CAPTURED}:_Sum._add_diagonals", "width + 1, 1)", "width, 1)", "relative"),
        Mutant(
            "shared_index_counted_once", f"{_CAPTURED}:_Sum._add_indexed",
            "part.sum(shared, keepdim=True)", "part.amax(shared, True)", "relative",
        ),
        Mutant("tanh_derivative", "mods.ir.grad:_UNARY", "tanh", "sigmoid", "softcap"),
        Mutant("branches_swapped", "mods.ir.grad:_Reverse.parts", "condition, g, zero)", "condition, zero, g)", "where"),
        # low precision without statistics
        Mutant(
            "span_rows_not_cleared", f"{_WHOLE}:_Rows.probabilities",
            "scores, call.masks.zero)", "scores, lambda *_: None)", "blind_half",
        ),
        Mutant("span_runs_on_one_another", f"{_WHOLE}:_Rows.gathered", "at += run.hi - run.lo", "at += 0", "runs_half"),
        Mutant("span_dk_not_scaled", f"{_WHOLE}:_row_tile", "spans, call.problem.scale)", "spans, 1.0)", "full_half"),
        # sequences
        Mutant(
            "rows_of_another_sequence", f"{_STAGES}:Tile._entries",
            "x.narrow(dim, base + lo, hi - lo)", "x.narrow(dim, lo, hi - lo)", "packed",
        ),
        Mutant("queries_of_another_sequence", f"{_TILES}:Heads.rows", "self.q_start + lo : self.q_start + hi", "lo:hi", "packed"),
        Mutant(
            "offset_of_another_sequence", "validate.flash:_checked_sequences",
            "sequences.seqlens_q\n", "sequences.seqlens_q.flip(0)\n", "packed",
        ),
        Mutant(
            "entry_forgotten", f"{_STAGES}:Bound.__init__",
            "(row_entry.view(-1, 1),", "(row_entry.view(-1, 1) * 0,", "packed",
        ),
        Mutant("tiles_of_another_sequence", f"{_SPANS}:_by_sequence", "start += count", "start += 0", "packed"),
        Mutant("unused_rows_left", f"{_TILES}:rows_of_queries", "out.zero_() if", "out if", "used"),
        # caches
        Mutant(
            "page_off_by_one", f"{_KEYS}:PoolRows.of",
            "rows = self.storage_rows[:, None]", "rows = (self.storage_rows[:, None] + page_size) % (len(pool) * page_size)", "pages",
        ),
        Mutant("slot_off_by_one", f"{_APPEND}:slots", "row // page_size]", "(row + 1) // page_size]", "pages"),
        Mutant(
            "leftpad_ignored", f"{_LENGTHS}:SeqlenInfoQKNewK.create",
            "cu_seqlens_k[batch_idx]) + leftpad", "cu_seqlens_k[batch_idx]) + 0 * leftpad", "leftpad",
        ),
        Mutant("leftpad_counted_as_keys", f"{_LENGTHS}:SeqlenInfoQKNewK.create", "seqused_k) - leftpad", "seqused_k)", "leftpad"),
        Mutant("padding_not_turned", f"{_LENGTHS}:SeqlenInfoQKNewK.create", "seqlen_k_og + leftpad if", "seqlen_k_og if", "leftpad_rotary"),
        Mutant(
            "rotary_off_by_one", "kvcache.rotary:apply_rotary",
            "index_select(0, positions)", "index_select(0, positions + 1)", "rotary",
        ),
        Mutant("rotary_stands_still", f"{_CACHE}:_turn", "if step.follows else", "if False else", "rotary"),
        Mutant("wrong_batch_row", f"{_CACHE}:_cache_rows", "    return rows\n", "    return rows.flip(0)\n", "rows"),
        Mutant("appended_to_the_wrong_row", f"{_APPEND}:slots", "return cache_rows[entry], row", "return entry, row", "rows"),
        Mutant(
            "place_counted_from_0", f"{_CACHE}:_look",
            "q_first=info.seqlen_k - info.seqlen_q", "q_first=info.seqlen_q * 0", "places",
        ),
        Mutant("known_call_of_one_length", "call_cache.kvcache:_numbers", "lengths.tolist()", "[int(lengths[0])] * batch", "known"),
        Mutant("known_row_one_late", "call_cache.kvcache:_row_places", "_vector(starts)", "_vector([s + 1 for s in starts])", "known"),
        Mutant("known_page_off_by_one", "call_cache.kvcache:_page_places", "row // page_size", "(row + 1) // page_size", "known_pages"),
        Mutant(
            "pages_of_other_heads", f"{_KEYS}:PoolRows.tokens",
            "[:, self.kv_heads.start * width : self.kv_heads.stop * width]",
            "[:, : (self.kv_heads.stop - self.kv_heads.start) * width]", "pages_by_head",
        ),
        Mutant("bits_by_place", f"{_FORWARD}:_exp2", "if is_small else", "if False else", "bits"),
        # splits
        Mutant("split_lost", f"{_RUN}:_forward_by_splits", "range(plan.num_splits)", "range(plan.num_splits - 1)", "splits"),
        Mutant("split_weight_dropped", "backends.torch.combine:combine", "(seen * weights[..., None])", "seen", "splits"),
        Mutant(
            "sink_in_every_split", f"{_RUN}:_forward_by_splits",
            "problem.like(sink=None, wants_lse=True)", "problem.like(wants_lse=True)", "splits",
        ),
        Mutant(
            "split_end_lost", "sequences.split_kv:split_range",
            "return first, minimum(first + share,", "return first, minimum(first + share - 1,", "splits",
        ),
        # tile ranges
        Mutant(
            "range_one_tile_short", "sequences.block_info:_tiles",
            "+ ceil_div(", "+ 0 * tile + (-1) * (count > 9) + ceil_div(", "blocks",
        ),
        Mutant(
            "diagonal_top_left", "sequences.block_info:BlockInfo._keys_of_rows",
            "seqlen_info.seqlen_k - seqlen_info.seqlen_q", "0", "blocks",
        ),
        Mutant("packed_heads_forgotten", "sequences.block_info:BlockInfo._rows", "if group > 1:", "if False:", "blocks"),
        # memory
        Mutant("sums_start_anywhere", f"{_MEMORY}:zeros_in_order", ".zero_()", "", "full"),
        Mutant(
            "written_past_the_end", f"{_MEMORY}:zeros_in_order",
            "return empty_in_order(like, like.shape[-1], dtype).zero_()", _PAST_THE_END, "full",
        ),
        Mutant(
            "input_overwritten", "backends.torch.kv_matrices:KeyRows.__init__",
            "self._view.reshape(self.shape)", "self._view.reshape(self.shape).mul_(1.0)", "inputs",
        ),
    )
}  # fmt: skip


@contextlib.contextmanager
def active(name: str) -> Iterator[None]:
    """The package with one bug in it. Raises ``LookupError`` if the code no longer has the text that the mutant replaces."""
    mutant = MUTANTS[name]
    module_name, path = mutant.where.split(":")
    module = importlib.import_module(f"anyattn.{module_name}")
    owner: Any = module
    *parents, last = path.split(".")
    for parent in parents:
        owner = getattr(owner, parent)
    original = inspect.getattr_static(owner, last)
    if isinstance(original, dict):
        with _table_entry(original, mutant):
            yield
        return
    mutated = _rewritten(original, mutant, module)
    _forget()
    places = [(owner, last)] if parents else _bindings(original)
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
    by_contents.forget()


@contextlib.contextmanager
def _table_entry(table: dict[str, Any], mutant: Mutant) -> Iterator[None]:
    """Replaces the entry ``old`` of a table by its entry ``new``."""
    original = table[mutant.old]
    table[mutant.old] = table[mutant.new]
    try:
        yield
    finally:
        table[mutant.old] = original


def _rewritten(original: Any, mutant: Mutant, module: Any) -> Any:
    plain = original.__func__ if isinstance(original, staticmethod) else inspect.unwrap(original)
    source = textwrap.dedent(inspect.getsource(plain))
    if source.count(mutant.old) != 1:
        raise LookupError(f"mutant {mutant.name}: {mutant.old!r} stands {source.count(mutant.old)} times in {mutant.where}; wanted once")
    code = compile(source.replace(mutant.old, mutant.new), f"<mutant {mutant.name}>", "exec", flags=annotations.compiler_flag)
    found: dict[str, Any] = {}
    exec(code, vars(module), found)
    return found[plain.__name__]


def _bindings(function: Callable) -> list[tuple[Any, str]]:
    """Every module of the package that holds ``function`` under some name: importers have their own reference."""
    return [
        (module, attribute)
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] == "anyattn" and module is not None
        for attribute, value in list(vars(module).items())
        if value is function
    ]
