"""Validation of ``flex_attention``: raises every user error and returns a validated ``Problem``."""

from __future__ import annotations

import math
import numbers
import re
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from anyattn.determinism import mode_of
from anyattn.mods.analysis.row_ranges import check_positions
from anyattn.mods.analysis.visible_loads import Dense, Listed, check_call, held
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.mods.float32_scores import check_held
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.tracing.cute_mod import native_mod
from anyattn.mods.tracing.trace import TracedMod, trace
from anyattn.problem import Problem, Skip
from anyattn.sparsity.read_lists import lists_of
from anyattn.tensors.kinds import refuse_hidden, refuse_hidden_captures

if TYPE_CHECKING:
    pass

__all__ = [
    "DTYPES",
    "aux_list",
    "captured_devices",
    "check_heads_of_lists",
    "check_lists",
    "check_shared",
    "classes_of",
    "flex_problem",
    "is_no_mask",
    "kernel_options",
    "scale_of",
    "sink_logits",
    "tensors",
    "traced",
    "wanted",
]

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# Options that change how torch's Triton kernels are built, not their results: accepted, without effect here.
_TORCH_OPTIONS = frozenset(
    [
        "num_warps", "num_stages", "BLOCK_M", "BLOCK_N", "BLOCK_M1", "BLOCK_N1", "BLOCK_M2", "BLOCK_N2", "PRESCALE_QK",
        "ROWS_GUARANTEED_SAFE", "BLOCKS_ARE_CONTIGUOUS", "WRITE_DQ", "FORCE_USE_FLEX_ATTENTION", "USE_TMA", "kpack",
        "matrix_instr_nonkdim", "waves_per_eu", "BACKEND",
    ]
)  # fmt: skip
_TORCH_BACKENDS = ("AUTO", "TRITON", "FLASH", "TRITON_DECODE")

_FEW_QUERIES, _MANY_KEYS = 16, 1024


def wanted(return_lse: bool, return_aux: Any) -> tuple[bool, bool]:
    """Whether (lse, max_scores) are requested, by either of torch's two arguments."""
    if return_lse and return_aux is not None:
        raise ValueError("return_lse=True and return_aux are both given; wanted one of them: use return_aux=AuxRequest(lse=True)")
    if return_aux is None:
        return bool(return_lse), False
    if not hasattr(return_aux, "lse") or not hasattr(return_aux, "max_scores"):
        raise TypeError(f"return_aux is a {type(return_aux).__name__}; wanted anyattn.AuxRequest(lse=..., max_scores=...)")
    return bool(return_aux.lse), bool(return_aux.max_scores)


def kernel_options(options: Any) -> dict[str, int]:
    """The options that have a meaning here: tile_m, tile_n, num_splits, autotune and pack_gqa."""
    if options is None:
        return {}
    if not isinstance(options, dict):
        raise TypeError(f"kernel_options is a {type(options).__name__}; wanted a dict such as {{'tile_m': 128, 'tile_n': 64}}")
    found = {}
    for name, value in options.items():
        if name in ("tile_m", "tile_n", "num_splits"):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"kernel_options[{name!r}]={value!r}; wanted a positive int")
            found[name] = value
        elif name in ("autotune", "pack_gqa"):
            if not isinstance(value, bool):
                raise TypeError(f"kernel_options[{name!r}] is a {type(value).__name__}; wanted True or False")
            found[name] = value
        elif (torchs := re.sub("^(fwd|bwd)_", "", str(name))) == "BACKEND":
            if value not in _TORCH_BACKENDS:
                wanted = ", ".join(map(repr, _TORCH_BACKENDS))
                raise ValueError(f"kernel_options[{name!r}]={value!r}; wanted one of torch's {wanted} (without effect here; see backend=)")
        elif torchs not in _TORCH_OPTIONS:
            known = ", ".join(sorted(_TORCH_OPTIONS))
            raise ValueError(
                f"kernel_options has an unknown name {name!r}; wanted tile_m, tile_n, num_splits, autotune, pack_gqa (or torch's {known}, "
                "also with the prefix fwd_ or bwd_)"
            )
    fixed = [name for name in ("tile_m", "tile_n") if name in found]
    if found.get("autotune") and fixed:
        raise ValueError(f"kernel_options has autotune=True and {fixed[0]}={found[fixed[0]]}; wanted one of them: autotune measures tiles")
    return found


def flex_problem(
    query: Any,
    key: Any,
    value: Any,
    score_mod: Callable | None,
    block_mask: Any,
    mask_mod: Callable | None,
    aux_tensors: Any,
    scale: Any,
    enable_gqa: bool,
    sink: Any,
    wants_lse: bool,
    wants_max: bool,
    deterministic: Any,
    dropout: Seeded | None = None,
    listed: TracedMod | None = None,
    skip: Skip | None = None,
    reads_captured: bool = True,
) -> Problem:
    """The problem of a ``flex_attention`` call; raises before any work is done.

    listed: the mask of a block mask that is given as lists alone, as operators pass it. reads_captured: False if captured tensors must not
    be read on the host: indices that depend on their contents are then clamped instead of checked.
    """
    key, value = tensors(query, key, value, enable_gqa)
    aux = aux_list(aux_tensors, query.device)
    batch, heads, seqlen_q, head_dim = query.shape
    lengths = (batch, heads, seqlen_q, key.shape[2])
    check_positions("the length of query", seqlen_q)
    check_positions("the length of key", key.shape[2])
    scores = [] if score_mod is None else [_traced(score_mod, "score", query, aux)]
    predicates = []
    blocks, follows = None, False
    if block_mask is not None:
        is_operator = listed is not None  # which gets lists alone, checked before
        if not is_operator:
            check_block_mask(block_mask, query, key)
        for part in ("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"):
            refuse_hidden(f"block_mask.{part}", getattr(block_mask, part))
        listed = _traced(listed or block_mask.mask_mod, "mask", query, aux, "block_mask.mask_mod")
        predicates.append(listed)
        if not is_operator:
            only_chosen = block_mask.full_kv_indices is None and getattr(block_mask, "_leaves_heads", False)
            check_heads_of_lists(listed, block_mask.kv_num_blocks, heads, not only_chosen)
        blocks, follows = lists_of(block_mask, listed)
        warn_of_shared_lists(block_mask, query)
    if mask_mod is not None:
        predicates.append(_traced(mask_mod, "mask", query, aux))
    if reads_captured:
        unfollowed = None if follows else blocks
        of_lists = tensors_of(unfollowed)
        predicates, scores = check_call(Dense(*lengths), predicates, scores, classes_of(unfollowed, heads), list_tensors=of_lists)
    else:
        predicates, scores = ([held(m, *lengths) for m in mods] for mods in (predicates, scores))
    return Problem(
        query,
        key,
        value,
        scale_of("scale", scale, head_dim, query.dtype),
        scores[0] if scores else None,
        tuple(predicates),
        blocks,
        sink_logits(sink, query),
        wants_lse,
        wants_max,
        mode_of(deterministic),
        num_splits=_splits_of(query, key),
        blocks_follow=follows,
        dropout=dropout_of(dropout),
        skip=skip,
    )


def _splits_of(query: Tensor, key: Tensor) -> int:
    """0, the plan's choice, for few queries and many keys on a GPU, which several programs should read; else 1."""
    is_decoding = query.device.type == "cuda" and query.shape[2] <= _FEW_QUERIES and key.shape[2] >= _MANY_KEYS
    return 0 if is_decoding else 1


def tensors(query: Any, key: Any, value: Any, enable_gqa: bool) -> tuple[Tensor, Tensor]:
    """key and value, checked against query, and expanded if their batch is 1."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}; wanted a torch.Tensor of shape (batch, heads, length, head_dim)")
        if tensor.ndim != 4:
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}; wanted 4 dimensions (batch, heads, length, head_dim): unsqueeze it")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"{name} has dtype {tensor.dtype}; wanted float64, float32, bfloat16 or float16: convert it with .to()")
        if tensor.dtype != query.dtype:
            raise TypeError(f"{name} has dtype {tensor.dtype} but query has {query.dtype}; wanted one dtype: convert one with .to()")
        if tensor.device != query.device:
            raise ValueError(f"{name} is on {tensor.device} but query is on {query.device}; wanted one device: move one with .to()")
    batch, heads_q, _, head_dim = query.shape
    if key.shape[3] != head_dim:
        raise ValueError(f"key has head_dim {key.shape[3]} but query has {head_dim}; wanted the same last dimension")
    if value.shape[:3] != key.shape[:3]:
        raise ValueError(f"value has (batch, heads, length) {tuple(value.shape[:3])} but key has {tuple(key.shape[:3])}; wanted the same")
    if head_dim == 0:
        raise ValueError(f"query has shape {tuple(query.shape)} with head_dim 0; wanted at least 1")
    heads_kv = key.shape[1]
    if heads_q != heads_kv and not enable_gqa:
        raise ValueError(
            f"query has {heads_q} heads but key and value have {heads_kv}; pass enable_gqa=True to share K/V heads among query heads"
        )
    if heads_q != heads_kv and (0 in (heads_q, heads_kv) or heads_q % heads_kv):
        raise ValueError(f"query has {heads_q} heads, not a multiple of the {heads_kv} of key and value; wanted Hq % Hkv == 0")
    if key.shape[0] != batch:
        if key.shape[0] != 1:
            raise ValueError(f"key has batch {key.shape[0]} but query has {batch}; wanted the same, or 1 to share it")
        key, value = (t.expand(batch, *t.shape[1:]) for t in (key, value))
    return key, value


def aux_list(aux_tensors: Any, device: torch.device) -> list[Tensor] | None:
    if aux_tensors is None:
        return None
    if isinstance(aux_tensors, Tensor) or not isinstance(aux_tensors, Sequence):
        raise TypeError(f"aux_tensors is a {type(aux_tensors).__name__}; wanted a list of tensors: aux_tensors=[table]")
    for i, tensor in enumerate(aux_tensors):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"aux_tensors[{i}] is a {type(tensor).__name__}; wanted a torch.Tensor")
        if tensor.device != device:
            raise ValueError(f"aux_tensors[{i}] is on {tensor.device} but query is on {device}; move it with .to()")
    return list(aux_tensors)


def _traced(mod: Any, kind: str, query: Tensor, aux: list[Tensor] | None, name: str = "") -> TracedMod:
    found = traced(mod, kind, query, aux, name)
    refuse_hidden_captures(found, name)
    return found


def traced(mod: Any, kind: str, query: Tensor, aux: list[Tensor] | None, name: str = "") -> TracedMod:
    """A mod traced for ``query``'s dtype and device; the bounds of its loads are not checked yet."""
    if isinstance(mod, TracedMod):
        return mod
    score_dtype = torch.float64 if query.dtype is torch.float64 else torch.float32
    found = native_mod(mod, kind, aux) or trace(mod, kind, score_dtype=score_dtype, aux_tensors=aux, device=query.device)
    captured_devices(found, query.device, name)
    return found


def captured_devices(mod: TracedMod, device: torch.device, name: str = "") -> None:
    """Raises if a mod captures a tensor on another device than the call's; tensors of rank 0 may be on any device."""
    for tensor in mod.tensors:
        if tensor.device != device and tensor.ndim > 0:
            raise ValueError(
                f"{name or mod.kind + '_mod'} {mod.name!r} captures a tensor of shape {tuple(tensor.shape)} on {tensor.device} but query "
                f"is on {device}; move it with .to()"
            )


def classes_of(blocks: Any, heads_q: int) -> Callable[[], Listed] | None:
    """A call's lists in the form that ``check_call`` takes; None without lists."""
    return None if blocks is None else lambda: Listed(blocks.of_heads(heads_q).classes(), blocks.tile)


def tensors_of(blocks: Any) -> list[Tensor]:
    """The tensors of a call's lists."""
    return [] if blocks is None else [t for t in vars(blocks).values() if isinstance(t, Tensor)]


_NO_MASK = 2**30  # the block size of torch's empty block mask


def is_no_mask(block_mask: Any) -> bool:
    """Whether this is torch's empty block mask (``_create_empty_block_mask``): one block of 2^30 rows and keys."""
    size = getattr(block_mask, "BLOCK_SIZE", None)
    if size is None or tuple(size) != (_NO_MASK, _NO_MASK) or tuple(block_mask.seq_lengths) != (1, 1):
        return False
    from torch.nn.attention.flex_attention import noop_mask

    count = block_mask.kv_num_blocks
    if block_mask.mask_mod is not noop_mask or block_mask.full_kv_num_blocks is not None or count.numel() != 1:
        return False
    # an unmodified count is 1; a modified one is read, to see whether the block is still listed
    return torch.compiler.is_compiling() or (not count.is_inference() and count._version == 0) or int(count) == 1


def check_block_mask(block_mask: Any, query: Tensor, key: Tensor) -> None:
    """Raises if ``block_mask`` is not a block mask, or was made for another device, other lengths, batches or heads."""
    is_block_mask(block_mask)
    check_lists(block_mask.seq_lengths, block_mask.kv_num_blocks, query, key)


def is_block_mask(block_mask: Any) -> None:
    """Raises ``TypeError`` unless ``block_mask`` is anyattn's or torch's ``BlockMask``."""
    from torch.nn.attention.flex_attention import BlockMask

    if not isinstance(block_mask, BlockMask):
        cure = "pass a function of (b, h, q_idx, kv_idx) as mask_mod" if callable(block_mask) else "make one with anyattn.create_block_mask"
        raise TypeError(f"block_mask is a {type(block_mask).__name__}; wanted a BlockMask (anyattn's or torch's): {cure}")


def check_lists(made_for: Any, counts: Tensor, query: Tensor, key: Tensor) -> None:
    """Raises if a block mask's lists were made for other lengths, batches, heads or another device. counts: (..., rows of blocks)."""
    lengths = (query.shape[2], key.shape[2])
    if tuple(made_for) != lengths:
        raise ValueError(
            f"block_mask was made for lengths (q, kv) = {tuple(made_for)} but query and key have {lengths}; make it for "
            f"these lengths: create_block_mask(mask_mod, B, H, {lengths[0]}, {lengths[1]}); or, if query has the rows of one of several "
            "ranks, pass the mask of anyattn.distributed.plan"
        )
    if counts.device != query.device:
        raise ValueError(f"block_mask is on {counts.device} but query is on {query.device}; move it with .to({str(query.device)!r})")
    check_shared(counts, query, key.shape[1])


def check_shared(counts: Tensor, query: Tensor, heads_kv: int | None = None) -> None:
    """Raises if a block mask's lists are neither of the query's batch entries and heads nor shared by them. heads_kv: lists may also be of
    each K/V head, for its query heads."""
    listed = tuple(counts.shape[:-1])
    for got, have, axis in zip(listed[-2:], query.shape[:2], ("batch", "heads"), strict=False):
        others = (heads_kv,) if axis == "heads" and heads_kv not in (None, 1, have) else ()
        if got not in (1, have, *others):
            wanted = "".join(f", {n} (one for each K/V head)" for n in others)
            raise ValueError(f"block_mask has {axis} {got} but query has {have}; wanted 1 (shared){wanted} or {have}")


def check_heads_of_lists(mask: TracedMod, counts: Tensor, heads_q: int, follows: bool, name: str = "block_mask") -> None:
    """Raises ``ValueError`` if a block mask has lists of each K/V head that follow from a mask which depends on the query head.

    follows: the mask may have decided which blocks are empty or full; if not, lists only choose blocks."""
    listed = counts.shape[-2] if counts.ndim > 1 else 1
    if not follows or listed in (1, heads_q) or not any(d.h for d in dependence(mask.expr)):
        return
    raise ValueError(
        f"{name} has lists of {listed} heads, the query has {heads_q}, and its mask_mod depends on the query head h, for which these lists "
        f"do not say what is empty and full; wanted lists of {heads_q} heads, or flex_attention with BlockMask.from_topk"
    )


def warn_of_shared_lists(block_mask: Any, query: Tensor) -> None:
    """Warns if ``create_block_mask`` made lists of one batch entry or head although the mask differs between entries or heads."""
    for name, index, axis in (("B", "b", 0), ("H", "h", 1)):
        if query.shape[axis] > 1 and name in getattr(block_mask, "_told_apart", ()):
            warnings.warn(
                f"block_mask was made for {name}=1 (or None) of a mask_mod that reads {index}, but query has {query.shape[axis]}: which "
                f"blocks are skipped, and which are seen whole, {index} = 0 decides for all, as in torch; make it with "
                f"create_block_mask(mask_mod, {name}={query.shape[axis]}, ...)",
                stacklevel=4,
            )


def scale_of(name: str, scale: Any, head_dim: int, dtype: torch.dtype) -> float:
    """The scale of scores, which are float64 for inputs of ``dtype`` float64 and float32 otherwise."""
    if scale is None:
        return 1.0 / math.sqrt(head_dim)
    if isinstance(scale, Tensor) and scale.ndim == 0:
        scale = scale.item()
    if not isinstance(scale, (numbers.Real, torch.SymFloat)) or isinstance(scale, bool):
        raise TypeError(f"{name} is a {type(scale).__name__}; wanted a number, or None for 1 / sqrt(head_dim)")
    try:
        number = float(scale)
    except OverflowError:  # a very large int
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name}={scale!r}; wanted a finite number, or None for 1 / sqrt(head_dim)")
    if dtype is not torch.float64:
        check_held(name, number)
    return number


def sink_logits(sink: Any, query: Tensor) -> Tensor | None:
    if sink is None:
        return None
    if not isinstance(sink, Tensor):
        raise TypeError(f"sink is a {type(sink).__name__}; wanted a float tensor of shape ({query.shape[1]},), one logit per query head")
    if tuple(sink.shape) != (query.shape[1],) or not sink.is_floating_point():
        raise ValueError(
            f"sink has shape {tuple(sink.shape)} and dtype {sink.dtype}; wanted a float tensor of shape ({query.shape[1]},), one logit "
            f"per query head"
        )
    if sink.device != query.device:
        raise ValueError(f"sink is on {sink.device} but query is on {query.device}; move it with .to()")
    return sink
