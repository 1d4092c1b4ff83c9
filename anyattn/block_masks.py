"""``create_block_mask``: the entry point that makes a block mask, in eager code and inside ``torch.compile``."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from anyattn.custom_ops import entry_point
from anyattn.sparsity.arguments import may_have_kernels
from anyattn.sparsity.block_mask import BlockMask, block_mask_of_lists, build_block_mask
from anyattn.tensors.dynamo import opaque

__all__ = ["create_block_mask"]


@entry_point
def create_block_mask(
    mask_mod: Callable,
    B: int | None,
    H: int | None,
    Q_LEN: int,
    KV_LEN: int,
    device: torch.device | str | None = None,
    BLOCK_SIZE: int | tuple[int, int] = 128,
    _compile: bool = False,
    separate_full_blocks: bool = True,
    compute_dq_write_order: bool = False,
    dq_kv_order: bool = True,
) -> BlockMask:
    """The ``BlockMask`` of a mask, with torch's signature and, block for block, torch's lists. The mask is not evaluated at pairs that its
    structure already decides.

    mask_mod: a function of ``(b, h, q_idx, kv_idx)`` that returns a bool. B, H: None where the mask ignores them (the lists then have
    dimension 1, which broadcasts). Q_LEN, KV_LEN: lengths in tokens, 0 allowed. device: default the device of the mask's captured tensors,
    else the accelerator, else "cpu". BLOCK_SIZE: query rows and keys of a block. _compile: accepted and ignored.
    separate_full_blocks: False lists full blocks as partial ones. compute_dq_write_order, dq_kv_order: as in torch 2.13.

    A tail block (a length that BLOCK_SIZE does not divide) is partial even if all its pairs inside the lengths are visible, as in torch.

    Memory: the lists, and one byte per block while building. Time: proportional to rows and blocks, never to pairs, for masks that are
    ranges per row (causal, windows, prefix, documents, their combinations).

    On a CUDA device with Triton installed the call does not synchronise: it returns while the lists are being made. If the index into a
    captured tensor is itself read from a captured tensor, it is then clamped to the tensor's bounds instead of checked.

    Raises ``TypeError`` or ``ValueError`` naming the argument; ``ModError`` for a mask that cannot be expressed.

    >>> mask = create_block_mask(lambda b, h, q, k: q >= k, None, None, 512, 512, device="cpu")
    >>> mask.kv_num_blocks.tolist(), mask.full_kv_num_blocks.tolist()
    ([[[1, 1, 1, 1]]], [[[0, 1, 2, 3]]])
    """
    if not isinstance(dq_kv_order, bool):
        raise ValueError(f"dq_kv_order is {dq_kv_order!r}; wanted a bool (explicit orders go to BlockMask.from_kv_blocks)")
    if torch.compiler.is_compiling():
        if compute_dq_write_order:
            raise TypeError("compute_dq_write_order=True inside torch.compile or torch.export; wanted False: make the block mask outside")
        from anyattn.custom_ops.entry_points import block_lists

        lists, tile = block_lists(mask_mod, B, H, Q_LEN, KV_LEN, device, BLOCK_SIZE, separate_full_blocks)
        made = block_mask_of_lists(lists, mask_mod, (Q_LEN, KV_LEN), tile)
        made._exact = None
        return made
    order = dq_kv_order if compute_dq_write_order else None
    if order is None and may_have_kernels(device):
        return _block_mask_call()(mask_mod, (B, H), (Q_LEN, KV_LEN), device, BLOCK_SIZE, separate_full_blocks)
    return build_block_mask(mask_mod, (B, H), (Q_LEN, KV_LEN), device, BLOCK_SIZE, separate_full_blocks, order)


@cache
@opaque
def _block_mask_call() -> Callable[..., BlockMask]:
    """The entry of the call cache, imported at the first call on a GPU: a CPU has no use for it."""
    from anyattn.call_cache.block_mask import block_mask_call

    return block_mask_call
