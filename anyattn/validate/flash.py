"""Validation of the entry points with FlashAttention's names: raises every user error and returns a validated ``Problem``."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from anyattn.determinism import mode_of
from anyattn.kvcache.append import check_pages
from anyattn.kvcache.scales import EIGHT_BITS
from anyattn.mods import masks, scores
from anyattn.mods.analysis.load_bounds import unsettled
from anyattn.mods.analysis.row_ranges import check_positions
from anyattn.mods.analysis.visible_loads import Dense, Ragged, check_call, clamped, is_captured
from anyattn.mods.compose import chained
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.mods.float32_scores import check_held
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sequences.batch import Sequences
from anyattn.sequences.unread_varlen import LengthTables
from anyattn.tensors.by_contents import kept
from anyattn.tensors.kinds import has_memory, refuse, refuse_hidden_captures, refuse_mixed
from anyattn.validate import flex
from anyattn.validate import scales as check_scales
from anyattn.validate import sequences as check_lengths
from anyattn.validate.sequences import (
    batch_of_ends,
    check_max,
    check_used,
    ends,
    not_negative,
    offset_unread,
    unread_sequences,
)
from anyattn.validate.window import TableOffset, band

__all__ = [
    "Options",
    "batch_of_ends",
    "check_dense_storage",
    "check_max",
    "check_slopes",
    "check_varlen_storage",
    "combine_arguments",
    "dense_problem",
    "ends",
    "heads_first",
    "laid_out",
    "other_names",
    "page_lengths",
    "problem_of",
    "refuse_8_bit_gradients",
    "refuse_positional",
    "softcap_score",
    "storage",
    "varlen_problem",
]


class Options(NamedTuple):
    """The entry points' common arguments, unchecked. reads_captured: as in ``flex.flex_problem``; set by operators."""

    softmax_scale: Any = None
    causal: Any = False
    window_size: Any = (-1, -1)
    softcap: Any = 0.0
    alibi_slopes: Any = None
    sink: Any = None
    score_mod: Any = None
    mask_mod: Any = None
    block_sparse_tensors: Any = None
    aux_tensors: Sequence[Tensor] | None = None
    deterministic: Any = False
    return_lse: bool = False
    num_splits: Any = 1
    pack_gqa: Any = None
    dropout: Seeded | None = None
    k_descale: Any = None
    v_descale: Any = None
    reads_captured: bool = True


def refuse_positional(function: Callable, beyond: tuple) -> NoReturn:
    """Raises ``TypeError`` for positional arguments ``beyond`` those whose order is the same in all versions of FlashAttention."""
    parameters = inspect.signature(function).parameters.values()
    taken = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    named = [f"{p.name}=" for p in parameters if p.kind is p.KEYWORD_ONLY]
    raise TypeError(
        f"{function.__name__} is given {len(taken) + len(beyond)} positional arguments; wanted at most {len(taken)} ({', '.join(taken)}), "
        f"for versions of FlashAttention order the others differently: pass them by keyword ({', '.join(named)})"
    )


_IN_FLEX = (
    "anyattn.flex_attention {}; packed sequences are one row there, q.transpose(0, 1)[None], with "
    "mask_mod=anyattn.masks.document_from_cu_seqlens(cu_seqlens)"
)
# FlashAttention's other options, and those of flex_attention: None, 0 and False change nothing, and for any other value here is the way out
_CURES = {
    "return_attn_probs": "return_lse=True returns (out, lse)",
    "qv": "torch.cat((q, qv), -1) as q and torch.cat((k, v), -1) as k give the same scores",
    "q_descale": "multiply q by it, in a dtype that anyattn computes",
    "k_descale": "8-bit keys and values are for flash_attn_varlen_func and flash_attn_with_kvcache",
    "v_descale": "8-bit keys and values are for flash_attn_varlen_func and flash_attn_with_kvcache",
    "attention_chunk": "pass mask_mod=anyattn.masks.chunked(attention_chunk)",
    "sm_margin": "leave it out, all multiprocessors may be used",
    "scheduler_metadata": "leave it out, each call is planned anew",
    "cu_seqlens_k_new": "pack k and v as q is, by cu_seqlens_q, and leave it out",
    "return_aux": _IN_FLEX.format("returns sums of the probabilities and maxima of the scores"),
    "skip_below": _IN_FLEX.format("leaves tiles out at run time"),
    "rotary_seqlens": "rotate q and k before the call, with anyattn.apply_rotary_emb(..., seqlen_offsets=rotary_seqlens)",
}
_WITH_CACHE = ("flash_attn_with_kvcache",)
_ONLY_IN = {
    "block_table": ("flash_attn_varlen_func", *_WITH_CACHE), "scheduler_metadata": _WITH_CACHE, "cu_seqlens_k_new": _WITH_CACHE,
    "rotary_seqlens": _WITH_CACHE,
}  # fmt: skip


def other_names(function: str, others: dict[str, Any], return_lse: bool, page_table: Any = None) -> tuple[bool, Any]:
    """return_lse and page_table of a call that has ``others`` among its options: FlashAttention's names for the two, and its options that
    anyattn's functions take only at the value that changes nothing."""
    for name, value in others.items():
        is_known = name in _CURES or name in ("block_table", "return_softmax_lse")
        if not is_known or function not in _ONLY_IN.get(name, (function,)):
            raise TypeError(f"{function}() got an unexpected keyword argument {name!r}")
        if name == "return_softmax_lse":
            return_lse = return_lse or bool(value)
        elif name == "block_table":
            if value is not None and page_table is not None:
                raise TypeError(f"{function} is given page_table and block_table, which are one argument; wanted one of the two")
            page_table = page_table if value is None else value
        elif value is not None and not (isinstance(value, int) and value == 0):
            shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
            raise ValueError(f"{name} is {shown}; wanted None, 0 or False: {_CURES[name]}")
    return return_lse, page_table


def page_lengths(cu_seqlens_k: Any, seqused_k: Any) -> Any:
    """seqused_k of a call with pages and cu_seqlens_k: as in FlashAttention 2, differences of cu_seqlens_k unless there is a seqused_k."""
    batch = batch_of_ends("cu_seqlens_k", cu_seqlens_k)
    if seqused_k is None:
        return cu_seqlens_k.diff()
    if isinstance(seqused_k, Tensor) and len(seqused_k) != batch:
        raise ValueError(
            f"cu_seqlens_k means a batch of {batch} but seqused_k one of {len(seqused_k)}; wanted the same number of sequences"
        )
    return seqused_k


def dense_problem(q: Any, k: Any, v: Any, options: Options) -> Problem:
    """The problem of a ``flash_attn_func`` call."""
    check_dense_storage(q, k, v)
    return problem_of(q, k, v, None, options, k.shape[1] - q.shape[1])


def check_dense_storage(q: Any, k: Any, v: Any) -> None:
    storage({"q": q, "k": k, "v": v}, "(batch, length, heads, head_dim)", 4)
    _same_heads("k", k, "v", v)
    if not q.shape[0] == k.shape[0]:
        raise ValueError(f"k has batch {k.shape[0]} but q has {q.shape[0]}; wanted the same")
    if k.shape[1] != v.shape[1]:
        raise ValueError(f"v has length {v.shape[1]} but k has {k.shape[1]}; wanted the same")


def varlen_problem(
    q: Any,
    k: Any,
    v: Any,
    cu_seqlens_q: Any,
    cu_seqlens_k: Any,
    max_seqlen_q: Any,
    max_seqlen_k: Any,
    seqused_q: Any,
    seqused_k: Any,
    page_table: Any,
    validate: bool | None,
    options: Options,
) -> Problem:
    """The problem of a ``flash_attn_varlen_func`` call."""
    check_varlen_storage(q, k, v, cu_seqlens_q, cu_seqlens_k, page_table)
    lengths, pool = (max_seqlen_q, max_seqlen_k), None if page_table is None else k
    if check_lengths.skips_device_reads(q.device, validate):
        tables = LengthTables(cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k)
        unread = unread_sequences(q, k, tables, lengths, page_table)
        found = problem_of(q, k, v, unread, options, offset_unread(unread, any_needs_grad(q, k, v, options)))
        return _without_gradients(found, options)
    given = (cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, page_table)

    def checked() -> tuple[Sequences, int | Tensor]:
        return _checked_sequences(q, k, given, lengths, validate)

    # not with a page table: it changes from step to step, and the sequences keep a reference to it
    may_keep = pool is None and not any(isinstance(n, Tensor) for n in lengths)
    if may_keep and all(t is None or (type(t) is Tensor and t.device == q.device) for t in given) and not q.is_meta:
        facts = ("varlen", q.shape[:-2], k.shape[:-2], q.device, lengths, tuple(map(type, lengths)), validate)
        sequences, offset = kept(given, facts, checked)
    else:
        sequences, offset = checked()
    found = _without_gradients(problem_of(q, k, v, sequences, options, offset), options)
    check_scales.check_contents(found.kv_scales, sequences)
    return found


def _without_gradients(problem: Problem, options: Options) -> Problem:
    """The problem; raises ``ValueError`` if its keys have 8 bits and it needs gradients."""
    if problem.k.dtype in EIGHT_BITS and torch.is_grad_enabled():
        check_scales.check_no_gradient(options.k_descale, options.v_descale)
        if problem.needs_grad:
            refuse_8_bit_gradients(problem.k.dtype)
    return problem


def refuse_8_bit_gradients(dtype: torch.dtype) -> NoReturn:
    raise ValueError(
        f"k and v are {dtype} and an argument requires grad, but 8-bit keys and values have no gradients; wanted a call under "
        "torch.no_grad(), arguments that are detached, or k and v in q's dtype"
    )


def any_needs_grad(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether a backward pass may follow; any score mod counts, since its tensors are not checked here."""
    if not torch.is_grad_enabled():
        return False
    known = (q, k, v, options.sink, options.alibi_slopes)
    return options.score_mod is not None or any(isinstance(t, Tensor) and t.requires_grad for t in known)


def _checked_sequences(
    q: Tensor, k: Tensor, tables: tuple[Tensor | None, ...], lengths: tuple[Any, Any], validate: bool | None
) -> tuple[Sequences, int | Tensor]:
    """The sequences, and the offset of each one's queries among its keys. Reads the tables' contents."""
    cu_seqlens_q, cu_seqlens_k, seqused_q, seqused_k, table = tables
    stored = unread_sequences(q, k, LengthTables(*tables[:4]), (None, None), table)
    ends("cu_seqlens_q", cu_seqlens_q, q, validate)
    ends("cu_seqlens_k", cu_seqlens_k, k, validate)
    not_negative("seqused_q", seqused_q)
    not_negative("seqused_k", seqused_k)
    sequences = stored.read()
    check_used(sequences, cu_seqlens_q, "seqused_q", None if cu_seqlens_q is not None else q.shape[1])
    capacity = table.shape[1] * k.shape[1] if table is not None else None if cu_seqlens_k is not None else k.shape[1]
    check_used(sequences, cu_seqlens_k, "seqused_k", capacity)
    check_max("max_seqlen_q", lengths[0], sequences.max_seqlen_q)
    check_max("max_seqlen_k", lengths[1], sequences.max_seqlen_k)
    if table is not None:
        check_pages(table, sequences.k_start, sequences.k_start + sequences.seqlens_k, sequences.page_size, k.shape[0])
    offset = sequences.seqlens_k - sequences.seqlens_q
    return sequences, offset if bool(offset.any()) else 0


def check_varlen_storage(q: Any, k: Any, v: Any, cu_seqlens_q: Any, cu_seqlens_k: Any, page_table: Any) -> None:
    padded, packed = ("(batch, length, heads, head_dim)", 4), ("(total, heads, head_dim)", 3)
    storage({"q": q}, *(padded if cu_seqlens_q is None else packed))
    if page_table is not None and cu_seqlens_k is not None:  # of an operator: the entry point passes ``page_lengths``
        raise ValueError("cu_seqlens_k and page_table are both given; wanted one: paged keys are counted by seqused_k")
    shape, rank = ("(pages, page_size, heads, head_dim)", 4) if page_table is not None else padded if cu_seqlens_k is None else packed
    storage({"q": q, "k": k, "v": v}, shape, rank, skip="q", stored=("k", "v"))
    _same_heads("k", k, "v", v)
    if k.shape[: rank - 2] != v.shape[: rank - 2]:
        raise ValueError(f"v has shape {tuple(v.shape)} but k has {tuple(k.shape)}; wanted the same but for head_dim")


def problem_of(q: Tensor, k: Tensor, v: Tensor, sequences: Sequences | None, options: Options, offset: Any) -> Problem:
    """The problem of any entry point, given its sequences. offset: the first query's position among the keys, minus its ``q_idx``."""
    heads = q.shape[-2]
    q4, k4, v4 = (heads_first(t) for t in (q, k, v))
    aux = flex.aux_list(options.aux_tensors, q.device)
    sink = flex.sink_logits(options.sink, q4)
    bare = Problem(q4, k4, v4, flex.scale_of("softmax_scale", options.softmax_scale, q.shape[-1], q.dtype), sequences=sequences)
    check_positions("the length of q", bare.bound_q)
    check_positions("the length of k", bare.bound_k)

    def traced(mod: Callable | TracedMod, kind: str) -> TracedMod:
        found = flex.traced(mod, kind, q4, aux)
        refuse_hidden_captures(found)
        return found

    predicates = []
    blocks = None
    if options.block_sparse_tensors is not None:
        from anyattn.validate.block_sparse import blocks_of

        blocks = blocks_of(options.block_sparse_tensors, bare)
        predicates.append(traced(options.mask_mod if options.mask_mod is not None else masks.full(), "mask"))
        flex.check_heads_of_lists(predicates[0], blocks.mask_block_cnt, bare.heads_q, True, "block_sparse_tensors")
    elif options.mask_mod is not None:
        predicates.append(traced(options.mask_mod, "mask"))
    visible = band(options.causal, options.window_size, offset, bare.bound_q, bare.bound_k, q.device)
    if visible is not None:
        predicates.append(visible)
    scores = []
    offset = offset if sequences is None or not isinstance(offset, TableOffset) else sequences.seqlens_k - sequences.seqlens_q
    for mod in (
        softcap_score(options.softcap, q.dtype),
        _alibi(options.alibi_slopes, bare.batch, heads, offset, q.device),
        options.score_mod,
    ):
        if mod is not None:
            scores.append(traced(mod, "score"))
    predicates, scores = _inside(predicates, scores, blocks, bare, options.reads_captured)
    return Problem(
        q4,
        k4,
        v4,
        bare.scale,
        reduce(chained, scores) if scores else None,
        tuple(predicates),
        blocks,
        sink,
        bool(options.return_lse),
        False,
        mode_of(options.deterministic),
        sequences,
        _splits(options.num_splits),
        packs=_packs(options.pack_gqa),
        dropout=dropout_of(options.dropout),
        kv_scales=check_scales.scales_of(options.k_descale, options.v_descale, k4, bare.batch),
    )


def _inside(
    masks: list[TracedMod], scores: list[TracedMod], blocks: Any, bare: Problem, reads_captured: bool
) -> tuple[list[TracedMod], list[TracedMod]]:
    """The masks and scores of a call, with loads that are proved to be in bounds or are clamped.

    If the tables are not read, captured tensors are not read either: an index that is read from another captured tensor is clamped. An
    index computed from positions is checked; only if it could leave its tensor at the greatest lengths are the tables read for it.
    """
    s = bare.sequences
    if not reads_captured or (s is not None and s.is_unread):
        first, end = (0, bare.bound_q) if s is None else s.position_bounds
        mods = (*masks, *scores)
        left = [unsettled(m, bare.batch, bare.heads_q, end, bare.bound_k, first) for m in mods]
        if not reads_captured or not any(loads.by_positions for loads in left) or is_captured():
            found = [clamped(m, loads) for m, loads in zip(mods, left, strict=True)]
            return found[: len(masks)], found[len(masks) :]
    lists = flex.classes_of(blocks, bare.heads_q)
    if s is None:
        pairs = Dense(bare.batch, bare.heads_q, bare.seqlen_q, bare.seqlen_k)
        return check_call(pairs, masks, scores, lists, list_tensors=flex.tensors_of(blocks))
    return check_call(Ragged(bare.heads_q, s.seqlens_q, s.seqlens_k, s.q_first), masks, scores, lists)


# ---- tensors


def storage(tensors: dict[str, Any], shape: str, rank: int, skip: str = "", stored: tuple[str, ...] = ()) -> None:
    """Raises unless all are tensors with the first one's float dtype and device, and all but ``skip`` have ``rank`` dimensions. stored:
    keys and values, which may have 8 bits instead."""
    first_name, first = next(iter(tensors.items()))
    pair = [tensors[name] for name in stored]
    has_8_bits = bool(pair) and all(isinstance(t, Tensor) for t in pair) and check_scales.check_stored(stored, *pair)  # type: ignore[arg-type]
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor of shape {shape}")
        if name != skip and tensor.ndim != rank:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted {rank} dimensions {shape}")
        is_stored = has_8_bits and name in stored
        if tensor.dtype not in flex.DTYPES and not is_stored:
            raise TypeError(f"{name} has dtype {tensor.dtype}; wanted float64, float32, bfloat16 or float16: convert it with .to()")
        if tensor.dtype != first.dtype and not is_stored:
            raise TypeError(f"{name} has dtype {tensor.dtype} but {first_name} has {first.dtype}; wanted one dtype: convert one with .to()")
        if tensor.device != first.device:
            raise ValueError(f"{name} is on {tensor.device} but {first_name} is on {first.device}; wanted one device: move one with .to()")
    head_dim, heads = first.shape[-1], first.shape[-2]
    if head_dim == 0:
        raise ValueError(f"{first_name} has shape {tuple(first.shape)} with head_dim 0; wanted at least 1")
    for name, tensor in tensors.items():
        if name.startswith("k") and tensor.shape[-1] != head_dim:
            raise ValueError(f"{name} has head_dim {tensor.shape[-1]} but {first_name} has {head_dim}; wanted the same last dimension")
        if name.startswith("k") and (0 in (heads, tensor.shape[-2]) or heads % tensor.shape[-2]) and heads != tensor.shape[-2]:
            have = f"{first_name} has {heads} heads but {name} has {tensor.shape[-2]}"
            raise ValueError(f"{have}; wanted Hq a multiple of Hkv, and not 0 unless both are")


def _same_heads(k_name: str, k: Tensor, v_name: str, v: Tensor) -> None:
    if k.shape[-2] != v.shape[-2]:
        raise ValueError(f"{v_name} has {v.shape[-2]} heads but {k_name} has {k.shape[-2]}; wanted the same")


def heads_first(x: Tensor) -> Tensor:
    """(B, S, H, D) or packed (total, H, D) as (B or 1, H, S, D), a view."""
    return (x if x.ndim == 4 else x.unsqueeze(0)).transpose(1, 2)


def laid_out(out: Tensor, lse: Tensor | None, is_packed: bool) -> tuple[Tensor, Tensor | None]:
    """The results of ``heads_first`` queries in the queries' own layout."""
    out = torch.transpose(out, 1, 2)  # half a microsecond faster than the method
    if is_packed:
        # not out[0], whose derivative is a copy into a tensor of zeros
        return out.squeeze(0), None if lse is None else lse.squeeze(0)
    return out, lse


# ---- mods


def softcap_score(softcap: Any, dtype: torch.dtype) -> Callable | None:
    """The score mod of ``softcap``, None for none. Raises ``ValueError``."""
    if isinstance(softcap, bool) or not isinstance(softcap, (int, float)) or not 0 <= softcap <= sys.float_info.max:
        raise ValueError(f"softcap={softcap!r}; wanted a positive number, or 0.0 for none")
    if softcap and dtype is not torch.float64:
        check_held("softcap", float(softcap), is_divisor=True)
    return _capped(float(softcap)) if softcap else None


_capped = lru_cache(maxsize=64)(scores.capped)


def _alibi(slopes: Any, batch: int, heads: int, offset: int | Tensor, device: torch.device) -> Callable | None:
    if slopes is None:
        return None
    check_slopes(slopes, batch, heads, device)
    return scores.alibi(slopes, offset)


def check_slopes(slopes: Any, batch: int, heads: int, device: torch.device) -> None:
    if not isinstance(slopes, Tensor) or not slopes.is_floating_point() or tuple(slopes.shape) not in ((heads,), (batch, heads)):
        what = f"shape {tuple(slopes.shape)} and dtype {slopes.dtype}" if isinstance(slopes, Tensor) else f"type {type(slopes).__name__}"
        raise ValueError(f"alibi_slopes has {what}; wanted a float tensor of shape ({heads},) or ({batch}, {heads})")
    if slopes.device != device:
        raise ValueError(f"alibi_slopes is on {slopes.device} but q is on {device}; move it with .to()")


def _splits(given: Any) -> int:
    if isinstance(given, bool) or not isinstance(given, int):
        raise TypeError(f"num_splits={given!r} is a {type(given).__name__}; wanted an int, 0 to choose")
    if given < 0:
        raise ValueError(f"num_splits={given}; wanted at least 1, or 0 to choose")
    return given


def _packs(given: Any) -> bool | None:
    if given is not None and not isinstance(given, bool):
        raise TypeError(f"pack_gqa={given!r} is a {type(given).__name__}; wanted True or False, None to choose")
    return given


def combine_arguments(out_partial: Any, lse_partial: Any) -> tuple[Tensor, Tensor]:
    """The checked arguments of ``flash_attn_combine``."""
    for name, tensor in (("out_partial", out_partial), ("lse_partial", lse_partial)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a float32 tensor")
        if tensor.is_nested or tensor.layout is not torch.strided:
            refuse(name, tensor)
        if tensor.dtype not in (torch.float32, torch.float64):
            raise TypeError(f"{name} has dtype {tensor.dtype}; wanted float32, because rounded partial results cannot be merged exactly")
    if not has_memory(out_partial) or not has_memory(lse_partial):
        refuse_mixed({"out_partial": out_partial, "lse_partial": lse_partial})
    if out_partial.device != lse_partial.device:
        raise ValueError(f"lse_partial is on {lse_partial.device} but out_partial is on {out_partial.device}; move one with .to()")
    if out_partial.ndim not in (4, 5) or out_partial.shape[:-1] != lse_partial.shape:
        raise ValueError(
            f"out_partial has shape {tuple(out_partial.shape)} and lse_partial {tuple(lse_partial.shape)}; wanted (splits, batch, length, "
            "heads, head_dim) or (splits, total, heads, head_dim), and the same without head_dim"
        )
    if out_partial.shape[0] == 0:
        raise ValueError("out_partial has no splits; wanted at least 1")
    return out_partial, lse_partial
