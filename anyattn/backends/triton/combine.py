"""Combination of partial results over parts of the keys by their log-sum-exps, as one kernel (``kernels.combine``)."""

from __future__ import annotations

import torch
from torch import Tensor

from anyattn.arithmetic import next_power_of_2
from anyattn.triton_tools.launch import run_plain

__all__ = ["combine", "merge", "merge_sections", "merge_shares"]

_PARTS_AT_ONCE, _SHARES_AT_ONCE = 8, 1024  # parts; elements of parts
_ELEMENTS_AT_ONCE, _SECTIONS_AT_ONCE = 1024, 8  # of the outputs of a program that merges sections; whose loads are under way
_MANY_ROWS = 2048  # below which a program that merges sections has one row, so that there are programs for all multiprocessors


def combine(outs: Tensor, lses: Tensor, sink: Tensor | None = None, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """outs: float32 (parts, ..., Dv), lses: float32 (parts, ...), natural logarithm -> out (..., Dv) in ``dtype``, lse (...) in float32.

    A part with lse -inf has seen no key: its output is ignored. sink: a logit, broadcast with lse, that is added to the denominator once.
    No gradients.
    """
    lead = outs.shape[1:-1]
    out, lse = (torch.empty(shape, dtype=t, device=outs.device) for shape, t in ((outs.shape[1:], dtype), (lead, torch.float32)))
    rows = lead.numel()
    if sink is None or len(lead) > 3:
        grid, logits = (1, 1, rows), None if sink is None else sink.expand(lead).reshape(1, 1, rows)
    else:
        grid = (*(1,) * (3 - len(lead)), *lead)
        logits = sink.expand(lead).reshape(grid) if len(lead) < 3 else sink.expand(lead)
    parts, width = outs.shape[0], outs.shape[-1]
    merge(outs.reshape(parts, *grid, width), lses.reshape(parts, *grid), logits, out.view(*grid, width), lse.view(grid), False)
    return out, lse


def merge(outs: Tensor, lses: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor | None, has_unused: bool) -> None:
    """Writes the results of ``combine``. outs (parts, B, H, S, Dv) and lses (parts, B, H, S) are contiguous except in the first dimension;
    out (B, H, S, Dv) has any strides with a contiguous last dimension, lse (B, H, S) is contiguous, sink (B, H, S) has any strides.

    has_unused: a row with lses of +inf, which no part can compute, belongs to no sequence and gives 0 and -inf for any sink.
    """
    parts, _, heads, positions, width = outs.shape
    rows = lses.numel() // max(1, parts)
    if rows == 0:
        return
    outs, lses = (t if t.is_contiguous() or t[0].is_contiguous() else t.contiguous() for t in (outs.detach(), lses.detach()))
    block = max(16, next_power_of_2(width))
    at_once = min(_PARTS_AT_ONCE, next_power_of_2(parts))
    from anyattn.backends.triton.kernels.combine import combine_row

    run_plain(
        combine_row, rows,
        (
            outs, lses, lses if sink is None else sink.detach(), out, lses if lse is None else lse, heads, positions, parts, outs.stride(0),
            lses.stride(0), *((0, 0, 0) if sink is None else sink.stride()), *out.stride()[:3], width,
        ),
        (), outs.device,
        {
            "HAS_SINK": sink is not None, "HAS_UNUSED": has_unused, "HAS_LSE": lse is not None, "PARTS": at_once, "BLOCK": block,
            "num_warps": 1 if at_once * block <= 512 else 4,
        },
    )  # fmt: skip


def merge_sections(
    outs: Tensor, statistics: Tensor, sink: Tensor | None, out: Tensor, lse: Tensor | None, max_scores: Tensor | None
) -> None:
    """Writes out, lse and max_scores, as in ``merge``, from the sums of the keys' sections: outs (sections, B, H, S, Dv), statistics
    (sections, 2 or with max_scores 3, B, H, S), as ``store_results`` with IS_PART stores them, all contiguous; a first sum below 0 marks a
    row of no sequence. sink: (H,). The numbers are those of one program that visits all sections."""
    sections, _, heads, positions, width = outs.shape
    rows = statistics[0, 0].numel()
    if rows == 0:
        return
    from anyattn.backends.triton.kernels.softmax.sections import combine_sections

    block = max(16, next_power_of_2(width))
    at_once = max(1, _ELEMENTS_AT_ONCE // block) if rows >= _MANY_ROWS else 1
    given = (
        outs, statistics, statistics if sink is None else sink.detach(), out, statistics if lse is None else lse,
        statistics if max_scores is None else max_scores, rows, heads, positions, sections, outs.stride(0), statistics.stride(0),
        0, int(sink is not None), 0, *out.stride()[:3],
    )  # fmt: skip
    options = {
        "WIDTH": width, "HAS_SINK": sink is not None, "HAS_LSE": lse is not None, "HAS_MAX": max_scores is not None,
        "PRECISION": "ieee" if out.dtype is torch.float32 else None, "ROWS": at_once, "BLOCK": block, "num_warps": 4,
        "GROUP": _SECTIONS_AT_ONCE, "enable_fp_fusion": False,
    }  # fmt: skip
    run_plain(combine_sections, -(-rows // at_once), given, (), outs.device, options)


def merge_shares(parts: Tensor, sums: Tensor, rows: Tensor, used: int, sink: Tensor | None, out: Tensor, lse: Tensor | None) -> None:
    """Writes the rows of out and lse, as in ``merge``, whose keys several programs visited, from what ``even_shares.store_part`` stored:
    parts (programs, 2, tile_m, width padded), sums (programs, 2, tile_m, 2), rows (programs, tile_m + 1). used: the first rows of a tile,
    which may exist. sink: (H,), contiguous."""
    programs, _, tile_m, block = parts.shape
    from anyattn.backends.triton.kernels.combine import combine_shares

    given = (parts, sums, rows, sums if sink is None else sink, out, sums if lse is None else lse, used, *out.shape[1:3], *out.stride()[:3])
    options = {
        "HAS_SINK": sink is not None, "HAS_LSE": lse is not None, "PARTS": max(1, _SHARES_AT_ONCE // block), "TILE_M": tile_m,
        "WIDTH": out.shape[3], "BLOCK": block, "num_warps": 1,
    }  # fmt: skip
    run_plain(combine_shares, programs * used, given, (), out.device, options)
