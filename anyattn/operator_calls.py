"""Eager calls that go through the operators: of fake and meta tensors, whose results are fake too, of tensors of ``torch.func.grad`` and
``vjp``, of subclasses that dispatch, and whatever a graph is being made of. ``tensor_kinds`` says which calls those are.

Mods are traced here, for the call, so that they need not be wrapped.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from anyattn import check, check_cache, check_flash, check_lengths, flash_ops, ops, tensor_kinds
from anyattn.check_cache import Given
from anyattn.check_flash import Options
from anyattn.errors import ModError
from anyattn.mods.algebra import Frozen
from anyattn.mods.native import has_native
from anyattn.operator_transforms import called
from anyattn.recall import FlexCall

__all__ = ["decode", "flash", "flex"]

Results = tuple[Tensor, Tensor]


class _BlockMask(NamedTuple):
    """A block mask whose mask is traced."""

    mask_mod: Frozen
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    seq_lengths: tuple[int, int]
    is_exact: bool


def flex(call: FlexCall, backend: str | None, options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of a ``flex_attention`` call; max_scores is empty unless wanted. options: ``kernel_options``."""
    check.kernel_options(options)
    check.tensors(call.query, call.key, call.value, call.enable_gqa)
    check.sink_logits(call.sink, call.query)
    with _among((call.query, call.key, call.value)):
        operands = ops.flex_operands(
            call.query, call.key, call.value, _frozen(call.score_mod, "score", call.query, call.aux_tensors), _block_mask(call),
            _frozen(call.mask_mod, "mask", call.query, call.aux_tensors), None, call.scale, call.enable_gqa, call.sink, call.wants_max,
            backend,
        )  # fmt: skip
        return called(ops.attend, operands, ops._save, ops._gradients)  # type: ignore[no-any-return]


def flash(q: Tensor, k: Tensor, v: Tensor, tables: tuple[Tensor | None, ...], options: Options, backend: str | None) -> Results:
    """(out, lse) of a ``flash_attn_func`` call, or with any table of a ``flash_attn_varlen_func`` call."""
    if all(t is None for t in tables):
        check_flash.check_dense_storage(q, k, v)
    else:
        check_flash.check_varlen_storage(q, k, v, tables[0], tables[1], tables[4])
    names = ("cu_seqlens_q", "cu_seqlens_k", "seqused_q", "seqused_k", "page_table")
    batch = check_lengths.batch_of(q, tables[0], tables[1], k, tables[4])
    _check_options(q, batch, options, dict(zip(names, tables, strict=True)))
    if tensor_kinds.are_fake((q, k, v)):
        options = options._replace(block_sparse_tensors=None)  # which change no result's shape
    with _among((q, k, v)):
        operands = flash_ops.flash_operands(q, k, v, tables, _traced(q, options), backend)
        return called(flash_ops.flash, operands, flash_ops._save, flash_ops._gradients)  # type: ignore[no-any-return]


def decode(given: Given, options: Options, backend: str | None) -> Results:
    """(out, lse) of a ``flash_attn_with_kvcache`` call."""
    if active := tensor_kinds.transforms():
        raise TypeError(f"flash_attn_with_kvcache is called inside torch.func.{active[-1]}, and has no gradients; call it outside of it")
    rows = (given.q, given.k_cache, given.v_cache)
    check_cache.check_storage(*rows, given.k, given.v, given.cu_seqlens_q, given.page_table)
    others = {n: t for n, t in given._asdict().items() if isinstance(t, Tensor)}
    batch = given.q.shape[0] if given.cu_seqlens_q is None else check_lengths.batch_of_ends("cu_seqlens_q", given.cu_seqlens_q)
    _check_options(given.q, batch, options, others)
    with _among(rows):
        return flash_ops.compiled_decode(given, _traced(given.q, options), backend)


def _among(tensors: tuple[Tensor, ...]) -> AbstractContextManager[Any]:
    """Where what is made for the call is fake if its tensors are."""
    from torch._guards import detect_fake_mode

    mode = detect_fake_mode(tensors) if tensor_kinds.are_fake(tensors) else None
    return nullcontext() if mode is None else mode


def _check_options(q: Tensor, batch: int, options: Options, tables: dict[str, Any]) -> None:
    """What FlashAttention's entry points check of arguments that are not q, k and v, as far as no value is looked at."""
    check.sink_logits(options.sink, check_cache.heads_first(q))
    if options.alibi_slopes is not None:
        check_flash.check_slopes(options.alibi_slopes, batch, q.shape[-2], q.device)
    for name, table in tables.items():
        check_lengths.check_device(name, table, q.device)


def _traced(q: Tensor, options: Options) -> Options:
    score, mask = (_frozen(mod, kind, q, options.aux_tensors) for mod, kind in ((options.score_mod, "score"), (options.mask_mod, "mask")))
    return options._replace(score_mod=score, mask_mod=mask, aux_tensors=None)


def _frozen(mod: Any, kind: str, query: Tensor, aux_tensors: Any, name: str = "") -> Frozen | None:
    if mod is None:
        return None
    found = check.traced(mod, kind, query, check.aux_list(aux_tensors, query.device), name)
    if has_native((found,)):
        raise ModError(f"{name or kind + '_mod'} is a CuTe function, which runs on plain tensors alone; wanted a function of plain Python")
    for t in found.tensors:
        tensor_kinds.refuse(f"a tensor that {name or kind + '_mod'} {found.name!r} captures", t)
    return Frozen(found)


def _block_mask(call: FlexCall) -> _BlockMask | None:
    mask = call.block_mask
    if mask is None:
        return None
    check.check_block_mask(mask, call.query, call.key)
    traced = _frozen(mask.mask_mod, "mask", call.query, call.aux_tensors, "block_mask.mask_mod")
    assert traced is not None
    lists = (mask.kv_num_blocks, mask.kv_indices, mask.full_kv_num_blocks, mask.full_kv_indices)
    return _BlockMask(traced, *lists, mask.BLOCK_SIZE, mask.seq_lengths, getattr(mask, "is_exact", False))
