"""Mutants of the Triton backend: one text of one of its files, replaced while ``active`` lasts, in a process that interprets.

``where`` of these is a file below ``anyattn/``. Each names a ``killer``, a check in ``tests/triton/killers.py`` that fails under it. None
makes a kernel read far from what it was given: a bug has to be noticed by the judge, not by the operating system.
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

import anyattn
from anyattn.backends import backend_module
from anyattn.call_cache import attention
from anyattn.tensors import by_contents
from tests.mutants.cpu_mutants import Mutant

__all__ = ["MUTANTS", "active", "changed"]

# whatever reads Triton: imported anew around every mutant
_PACKAGES = (
    "anyattn.backends.triton",
    "anyattn.triton_tools",
    "anyattn.sparsity.kernels",
    "anyattn.documents.device",
    "anyattn.documents.kernels",
)
_INTERPRETER = "anyattn.triton_tools.interpreter"
_FORWARD = "backends/triton/kernels/forward.py"
_BACKWARD = "backends/triton/kernels/backward.py"
_ROW_TILE_BOUNDS = "backends/triton/kernels/row_tile_bounds.py"
_ITERATOR = "backends/triton/kernels/tile_iterator.py"
_ADDRESSING = "backends/triton/kernels/addressing.py"
_COMBINE = "backends/triton/kernels/combine.py"
_MATMUL = "backends/triton/kernels/matmul.py"
_PAGED_KV = "backends/triton/kernels/paged_kv.py"
_BACKWARD_PASS = "backends/triton/backward_pass.py"
_CAPTURED_GRADIENTS = "backends/triton/codegen/captured_gradients.py"
_PROGRAMS = "backends/triton/codegen/programs.py"
_DETERMINISTIC_SUM = "backends/triton/kernels/deterministic_sum.py"
_NONFINITE = "backends/triton/kernels/nonfinite.py"
_PAGED_GRADIENTS = "backends/triton/kernels/paged_gradients.py"
_HOST_PAGED_GRADIENTS = "backends/triton/paged_gradients.py"
_PRIVATIZED_SUM = "backends/triton/privatized_sum.py"
_DEVICE_MATH = "triton_tools/device_math.py"
_OF_HIDDEN = "if (IS_PARTIAL or HAS_ALWAYS) and of_score[1].type.is_block():\n            ds = tl.where("

MUTANTS = {
    m.name: m
    for m in (
        # what a row sees
        Mutant("unmasked_tail", _ITERATOR, "limits[0], tl.minimum(limits[1], seqlen_k)\n", "limits[0], limits[1]\n", "full"),
        Mutant(
            "lost_last_key", _ITERATOR,
            "limits[0], tl.minimum(limits[1], seqlen_k)\n",
            "limits[0], tl.minimum(limits[1], seqlen_k - 1)\n", "full",
        ),
        Mutant("unmasked_tail_of_lists", _FORWARD, "seen = (lane < end)[None, :]", "seen = (lane < end + 1)[None, :]", "uneven_lists"),
        Mutant("lost_last_key_of_lists", _FORWARD, "seen = (lane < end)[None, :]", "seen = (lane < end - 1)[None, :]", "lists"),
        Mutant("row_limit_off_by_one", _PROGRAMS, "(kv_idx < rows[{i + 1}])", "(kv_idx <= rows[{i + 1}])", "causal"),
        Mutant("left_limit_off_by_one", _DEVICE_MATH, "(place - lo).to(", "(place - lo - 1).to(", "window"),
        Mutant("mask_forgotten", _FORWARD, "seen = seen & (MASK(", "seen = seen | (MASK(", "dilated"),
        Mutant("mask_beside_lists_forgotten", _FORWARD, "    if HAS_ALWAYS:\n        s =", "    if False:\n        s =", "beside_lists"),
        Mutant("column_of_the_first_tile", _FORWARD, "    kv = lane[None, :]\n", "    kv = (lane - first)[None, :]\n", "alibi"),
        Mutant(
            "partial_taken_for_full", _ITERATOR,
            "tl.minimum(all_hi // TILE_N, end)",
            "tl.minimum(most // TILE_N, end)", "causal",
        ),
        Mutant("window_edge_taken_for_full", _ITERATOR, "full = tl.maximum((all_lo", "full = tl.maximum((least", "window"),
        Mutant("tiles_before_the_full_ones_lost", _ITERATOR, "(first, full - first), (full_end,", "(first, nothing), (full_end,", "window"),
        Mutant("least_of_limits_kept", _ITERATOR, "tl.minimum(all_hi, other_all_hi)", "tl.maximum(all_hi, other_all_hi)", "causal"),
        Mutant("limits_of_the_first_row_alone", _ITERATOR, "_inside(last[AT + 1], seqlen_k)", "_inside(first[AT + 1], seqlen_k)", "causal"),
        Mutant("limits_of_the_last_row_alone", _ITERATOR, "_inside(first[AT + 1], seqlen_k)", "_inside(last[AT + 1], seqlen_k)", "causal"),
        Mutant("last_tile_lost", _ITERATOR, "(full_end, end - full_end), (nothing", "(full_end, end - full_end - 1), (nothing", "full"),
        Mutant(
            "tiles_after_the_first_range_lost", _ITERATOR,
            "middle = tl.where(apart, a1, g0)",
            "middle = tl.where(apart, f1, g0)", "sink_window",
        ),
        Mutant("second_range_lost", _ITERATOR, "fourth_end = tl.where(apart, b1, nothing)", "fourth_end = fourth", "sink_window"),
        Mutant("shared_tile_visited_twice", _ITERATOR, "g0 = tl.maximum(g0, f1)\n", "g0 = g0 + 0\n", "overlap"),
        # lists
        Mutant("full_tile_of_lists_taken_for_partial", _ITERATOR, "is_full = i >= found[2]", "is_full = i < 0", "lists"),
        Mutant("whole_of_a_list_tile_missed", _ITERATOR, "LIST_N + (i % CUT) * TILE_N", "LIST_N", "lists"),
        Mutant("beyond_the_list_tile", _ITERATOR, "tl.minimum((n + 1) * LIST_N, seqlen_k)", "seqlen_k", "uneven_lists"),
        Mutant("heads_share_one_list", _ITERATOR, "head = h.to(tl.int64) * strides[1]", "head = h.to(tl.int64) * 0", "lists"),
        Mutant("entries_share_one_list", _ITERATOR, "at = b.to(tl.int64) * strides[0] + head", "at = head", "lists"),
        Mutant("lists_of_the_first_sequence", _ITERATOR, "at = head + found[7] + line", "at = head + line", "ragged_lists"),
        Mutant("flat_list_offset", _ITERATOR, "found[8] + line.to(tl.int64)", "found[8] * 0 + line.to(tl.int64)", "ragged_lists"),
        Mutant("rows_of_the_next_lists", _ADDRESSING, "tl.minimum((line + 1) * LIST_M, seqlen_q)", "seqlen_q", "uneven_lists"),
        # sums
        Mutant("scale_1_percent_off", _FORWARD, "else scale * _LOG2E\n", "else scale * _LOG2E * 1.01\n", "full"),
        Mutant("output_not_rescaled", _MATMUL, "tl.fma(acc, rescale[:, None], product)", "tl.fma(acc, 1.0, product)", "peaky"),
        Mutant("sum_not_rescaled", _FORWARD, "row_sum * rescale[:, None] + sums_of", "row_sum + sums_of", "peaky"),
        Mutant("stale_maximum", _FORWARD, "row_sum), highest\n", "row_sum), row_max\n", "peaky"),
        Mutant("sink_counted_twice", _FORWARD, "+ tl.exp2(logit - highest)", "+ 2 * tl.exp2(logit - highest)", "sink"),
        Mutant("sink_does_not_rescale", _FORWARD, "acc = acc * rescale[:, None]\n        row_max", "row_max", "sink"),
        Mutant("sink_in_base_2", _FORWARD, ".to(tl.float32) * _LOG2E\n        highest", ".to(tl.float32)\n        highest", "sink"),
        Mutant("sink_of_another_head", _FORWARD, "tl.load(tensors[6] + h)", "tl.load(tensors[6] + h * 0)", "sink"),
        Mutant("lse_in_base_2", _FORWARD, "row_max * _LN2 + tl.log(total))", "row_max + tl.log2(total))", "full"),
        Mutant("nan_of_a_row_that_sees_nothing", _FORWARD, "tl.where(row_sum == 0, 1.0, row_sum)", "row_sum", "islands"),
        # heads and storage
        Mutant("wrong_gqa_head", _ADDRESSING, "kv_head, split\n", "sizes[2] // sizes[7] - 1 - kv_head, split\n", "full"),
        Mutant("first_head_of_whole_tiles", _ADDRESSING, "kv_head * sizes[7] + part * dealt[0]", "h * dealt[0]", "uneven_group"),
        Mutant("packed_heads_are_one", _FORWARD, "heads = h + r % group", "heads = h + r % group * 0", "few_rows"),
        Mutant("head_dim_not_cut", _FORWARD, "mask=is_row & (d < HEAD_DIM)", "mask=is_row & (d <= HEAD_DIM)", "head_dim"),
        Mutant("queries_of_the_first_sequence", _FORWARD, "at = found[1] + position", "at = position", "packed"),
        Mutant("keys_of_the_first_sequence", _FORWARD, "tl.arange(0, TILE_N) + key[3]\n", "tl.arange(0, TILE_N)\n", "packed"),
        Mutant("page_off_by_one", _PAGED_KV, "tl.load(pages + asked)", "tl.load(pages + (tl.maximum(asked, 1) - 1))", "pages"),
        Mutant(
            "row_of_page_off_by_one", _PAGED_KV,
            "((first + lane).to(tl.uint32) %", "((first + lane + 1).to(tl.uint32) %", "uneven_pages",
        ),
        Mutant("row_of_fitting_page_off_by_one", _PAGED_KV, "(lane % PAGE_SIZE) * stride", "((lane + 1) % PAGE_SIZE) * stride", "pages"),
        Mutant("page_table_of_the_first_sequence", _FORWARD, "tensors[9] + b.to(tl.int64) * sizes[6]", "tensors[9]", "pages"),
        Mutant("launch_without_work_does_it", _ADDRESSING, "tl.load(guard) != 0", "tl.load(guard) == 7", "documents"),
        Mutant("launch_with_work_leaves_it", _ADDRESSING, "tl.load(guard) != 0", "tl.load(guard) >= 0", "documents"),
        # splits
        Mutant("split_lost", _FORWARD, "begin = tl.minimum(split * share", "begin = tl.minimum((split + 1) * share", "splits"),
        Mutant("last_tile_of_every_split_lost", _FORWARD, "tl.minimum(begin + share, full", "tl.minimum(begin + share - 1, full", "splits"),
        Mutant(
            "splits_weighed_alike", _COMBINE,
            "weight = tl.exp(found - near)",
            "weight = tl.where(found > float('-inf'), 1.0, 0.0)", "splits",
        ),
        Mutant("sink_of_splits_counted_twice", _COMBINE, "total += share\n", "total += 2 * share\n", "splits"),
        # the backward pass
        Mutant("delta_dropped", _BACKWARD, "0.0, out * dout), 1)", "0.0, out * dout * 0), 1)", "full"),
        Mutant("lse_gradient_ignored", _BACKWARD, "    if HAS_DLSE:", "    if False:", "full"),
        Mutant("stale_lse", _BACKWARD, "tl.load(tensors[2] + place, mask", "tl.load(tensors[2] + place // 2 * 2, mask", "full"),
        Mutant("statistics_of_two_sequences_in_one_place", _BACKWARD, "TILE_M + b + m)", "TILE_M + m)", "packed"),
        Mutant("statistics_of_the_first_rows", _BACKWARD, "tl.where(first < end, first, 0)", "first * 0", "causal"),
        Mutant(
            "statistics_of_the_first_rows_alone", _BACKWARD,
            "tl.load(heads[2] + first + m_lane)",
            "tl.load(heads[2] + m_lane)", "window",
        ),
        Mutant("heads_in_turn_lost", _BACKWARD, "first + at % width", "first + at % width // 2 * 2", "causal"),
        Mutant("dq_not_scaled", _BACKWARD, "(dq * scale)", "(dq * 1.0)", "full"),
        Mutant("dk_1_percent_off", _BACKWARD, "(dk * scale)", "(dk * scale * 1.01)", "full"),
        Mutant("row_tile_lost", _ROW_TILE_BOUNDS, "tl.where(touches, m + 1, 0)", "tl.where(touches, m, 0)", "full"),
        Mutant("dk_of_one_head_alone", _BACKWARD, "h = kv_head * sizes[7] + g", "h = kv_head * sizes[7]", "full"),
        Mutant(
            "dv_overwritten", _BACKWARD,
            "plus_product(dv, None, p, dout, PRECISION)\n    if",
            "plus_product(dv * 0, None, p, dout, PRECISION)\n    if", "window",
        ),
        Mutant(
            "dv_overwritten_in_two_loops", _BACKWARD,
            "plus_product(dv, None, p, dout, PRECISION)\n    else",
            "plus_product(dv * 0, None, p, dout, PRECISION)\n    else", "full",
        ),
        Mutant(
            "rows_filled_in_part", _ROW_TILE_BOUNDS,
            "fills = (all_lo <= n_first) & (all_hi >= n_end)\n",
            "fills = (all_lo <= n_first) & (hi >= n_end)\n", "causal",
        ),
        Mutant(
            "rows_filled_from_later_on", _ROW_TILE_BOUNDS,
            "fills = (all_lo <= n_first) & (all_hi >= n_end)\n",
            "fills = (lo <= n_first) & (all_hi >= n_end)\n", "window",
        ),
        Mutant("second_range_of_rows_lost", _ROW_TILE_BOUNDS, "touches = touches | (", "touches = touches & (", "sink_window"),
        Mutant("tile_that_is_cut_not_asked", _BACKWARD, "is_cut = (m < runs[1])", "is_cut = (m < 0)", "window"),
        Mutant("hidden_probability_kept", _BACKWARD, "p = tl.where(seen, p, 0.0)\n    if part", "p = p * 1.0\n    if part", "causal"),
        Mutant("hidden_score_kept_in_dq", _BACKWARD, "p = tl.where(seen, p, 0.0)\n    ds", "p = p * 1.0\n    ds", "causal"),
        Mutant("hidden_derivative_kept", _BACKWARD, f"{_OF_HIDDEN}p != 0.0", f"{_OF_HIDDEN}p == p", "infinite_derivative"),
        Mutant("hidden_derivative_kept_in_dq", _BACKWARD, f"{_OF_HIDDEN}seen", f"{_OF_HIDDEN}seen | True", "infinite_derivative"),
        Mutant(
            "derivative_forgotten_in_dk", _BACKWARD,
            f"of_score[1].to(tl.float32)\n        {_OF_HIDDEN}p",
            f"1.0\n        {_OF_HIDDEN}p", "softcap",
        ),
        Mutant(
            "derivative_forgotten_in_dq", _BACKWARD,
            f"of_score[1].to(tl.float32)\n        {_OF_HIDDEN}seen",
            f"1.0\n        {_OF_HIDDEN}seen", "softcap",
        ),
        Mutant("mask_forgotten_in_dk", _BACKWARD, "(shown | is_shown)", "(shown | (kv >= 0))", "dilated"),
        Mutant(
            "mask_forgotten_in_dq", _BACKWARD,
            "rows[1], captured[1][0], captured[1][1]) | is_shown)",
            "rows[1], captured[1][0], captured[1][1]) | (kv >= 0))", "dilated",
        ),
        # what is not finite
        Mutant("hidden_values_met", _FORWARD, "is_right = not HIDES or is_finite(acc, None)", "is_right = True", "not_finite"),
        Mutant("hidden_keys_met", _BACKWARD, "k, ds = finite(k), tl", "k, ds = k, tl", "not_finite"),
        Mutant("hidden_queries_met", _BACKWARD, "q = finite(load_columns(", "q = (load_columns(", "not_finite"),
        Mutant("seen_infinities_lost", _MATMUL, "tl.where(wide != other, one, 0.0)", "0.0", "not_finite"),
        Mutant(
            "infinities_of_the_other_sign", _MATMUL,
            "other = tl.where(turn == 0", "other = tl.where(turn == 1", "not_finite",
        ),
        Mutant("hidden_infinities_counted", _NONFINITE, "(s != float(\"-inf\")).to", "(s != 0.0).to", "not_finite"),
        Mutant("sink_gradient_sign", _BACKWARD_PASS, "return -(share * delta)", "return (share * delta)", "sink"),
        Mutant("captured_derivative_forgotten", _CAPTURED_GRADIENTS, "ds * found[{load.factor}].to(tl.float32)", "ds", "gated"),
        Mutant("pair_stored_by_rows_beyond_the_end", _CAPTURED_GRADIENTS, "element_ty), mask=seen)", "element_ty), mask=is_key)", "pairs"),
        Mutant("captured_gradient_one_place_on", _CAPTURED_GRADIENTS, "totals[{load.total}]", "totals[{0 * load.total}]", "two_tables"),
        Mutant("diagonals_one_place_on", _DEVICE_MATH, "entry % 8 - entry // 8  #", "entry % 8 - entry // 8 + 1  #", "relative"),
        Mutant("diagonals_of_blocks_mixed", _DEVICE_MATH, "block // COLUMNS + ROWS - 1 ==", "block // COLUMNS + ROWS - 2 ==", "relative"),
        Mutant("diagonals_before_the_tile_lost", _DEVICE_MATH, "is_there = (i <", "is_there = (i < 1) & (i <", "relative"),
        Mutant("diagonals_of_the_first_head", _DEVICE_MATH, "PLACES(begin[0], begin[1]", "PLACES(begin[0], begin[1] * 0", "relative"),
        Mutant("copies_but_the_first_lost", _PRIVATIZED_SUM, "total.sum(-1)", "total[..., 0]", "few_entries"),
        Mutant("entries_begin_at_copies", _CAPTURED_GRADIENTS, "or load.has_copies else", "else", "few_entries"),
        Mutant("first_entry_taken_for_all", _DEVICE_MATH, "(tl.min(least) == most)", "(tl.min(least) <= most)", "few_entries"),
        Mutant("sum_of_a_tile_lost", _DEVICE_MATH, "tl.sum(sent).to(dtype)", "tl.max(sent).to(dtype)", "few_entries"),
        Mutant("exact_sign_lost", _DEVICE_MATH, "number = tl.where(bits < 0, -number, number)\n", "number = number\n", "exact"),
        Mutant("exact_leading_one_lost", _DEVICE_MATH, "tl.where(field > 0, 0x800000, 0)", "tl.where(field > 0, 0x400000, 0)", "exact"),
        Mutant("exact_shift_by_all", _DEVICE_MATH, "(exponent - plane * width).to", "(exponent % 16).to", "exact"),
        Mutant("exact_planes_alike", _DETERMINISTIC_SUM, "1023 - 149 + plane * width", "1023 - 149 + plane * (width - 1)", "exact"),
        Mutant(
            "exact_planes_lost", _DETERMINISTIC_SUM, "for plane in range(0, powers)", "for plane in range(powers // 2, powers)", "exact",
        ),
        Mutant(
            "second_holder_of_a_page_lost", _PAGED_GRADIENTS,
            "for i in range(tl.load(starts + page), tl.load(starts + page + 1)):",
            "for i in range(tl.load(starts + page), tl.minimum(tl.load(starts + page) + 1, tl.load(starts + page + 1))):", "shared_pages",
        ),
        Mutant("pages_of_the_first_sequence", _HOST_PAGED_GRADIENTS, "k_row=own)", "k_row=own * 0)", "shared_pages"),
        Mutant(
            "keys_of_a_shared_entry_lost", _CAPTURED_GRADIENTS,
            "tl.sum(part{i}, {axis}, keep_dims=True)",
            "tl.max(part{i}, {axis}, keep_dims=True)", "alibi",
        ),
    )
}  # fmt: skip


@contextlib.contextmanager
def active(name: str, folder: Path) -> Iterator[None]:
    """The backend with one bug in it, imported anew from a file in ``folder``.

    Raises ``LookupError`` if the code no longer has the text that the mutant replaces.
    """
    mutant = MUTANTS[name]
    path = folder / f"{name}.py"  # a file of its own: Triton reads a kernel's source
    path.write_text(changed(mutant))
    finder = _Finder(f"anyattn.{mutant.where.removesuffix('.py').replace('/', '.')}", path)
    sys.meta_path.insert(0, finder)
    _forget()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        _forget()


def changed(mutant: Mutant) -> str:
    """The source of the file with its bug."""
    assert anyattn.__file__ is not None
    source = (Path(anyattn.__file__).parent / mutant.where).read_text()
    if source.count(mutant.old) != 1:
        raise LookupError(f"mutant {mutant.name}: {mutant.old!r} stands {source.count(mutant.old)} times in {mutant.where}; wanted once")
    return source.replace(mutant.old, mutant.new)


class _Finder(MetaPathFinder):
    def __init__(self, module: str, path: Path) -> None:
        self.module, self.path = module, path

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return importlib.util.spec_from_file_location(fullname, self.path) if fullname == self.module else None


def _forget() -> None:
    """The backend is imported again when it is next used; the mends of the interpreter are made once."""
    for name in list(sys.modules):
        if any(name == p or name.startswith(f"{p}.") for p in _PACKAGES) and name != _INTERPRETER:
            del sys.modules[name]
            parent, _, last = name.rpartition(".")
            if hasattr(sys.modules.get(parent), last):
                delattr(sys.modules[parent], last)
    backend_module.cache_clear()
    attention.clear()
    by_contents.forget()
