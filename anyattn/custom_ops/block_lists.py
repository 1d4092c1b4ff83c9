"""The operator through which ``torch.compile`` and ``torch.export`` see the making of a block mask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.mods.trace import TracedMod
from anyattn.ops import mods_of_operands, operands_of
from anyattn.sparsity.arguments import device_of, length, pair, positions
from anyattn.sparsity.block_mask import lists_of_mask

__all__ = ["block_lists", "lists_with_mods"]


@torch.library.custom_op("anyattn::block_lists", mutates_args=())
def block_lists(
    like: Tensor,
    program: str,
    numbers: list[int],
    tensors: list[Tensor],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    block_m: int,
    block_n: int,
    separate_full: bool,
) -> list[Tensor]:
    """The lists of ``create_block_mask`` in the order of a block mask's fields, int32: eight, or four without separate full blocks.

    like: any tensor on their device.
    """
    (mask,) = mods_of_operands("mask", program, numbers, tensors)
    sizes = ((q_len, kv_len), (block_m, block_n), (batch, heads))
    # .data: whether a list is exact is told by how often it was written to since it was made
    return [t.contiguous().data for t in lists_of_mask(mask, *sizes, like.device, separate_full) if t is not None]


@block_lists.register_fake
def _(
    like: Tensor,
    program: str,
    numbers: list[int],
    tensors: list[Tensor],
    batch: int,
    heads: int,
    q_len: int,
    kv_len: int,
    block_m: int,
    block_n: int,
    separate_full: bool,
) -> list[Tensor]:
    rows, columns = (q_len + block_m - 1) // block_m, (kv_len + block_n - 1) // block_n
    found = []
    for lines, others in ((rows, columns), (columns, rows)):
        for _ in range(1 + separate_full):
            # strides are given: for symbolic sizes torch would ask whether four dimensions lie channels last
            found.append(like.new_empty_strided((batch, heads, lines), (heads * lines, lines, 1), dtype=torch.int32))
            strides = (heads * lines * others, lines * others, others, 1)
            found.append(like.new_empty_strided((batch, heads, lines, others), strides, dtype=torch.int32))
    return found


def lists_with_mods(
    batch: int | None,
    heads: int | None,
    q_len: int,
    kv_len: int,
    device: Any,
    block_size: Any,
    separate_full: bool,
    mask: TracedMod,
) -> list[Tensor]:
    """``block_lists`` of a traced mask; arguments as ``create_block_mask`` takes them. Raises as the eager call."""
    lengths = [n if isinstance(n, torch.SymInt) else positions(name, n) for name, n in (("Q_LEN", q_len), ("KV_LEN", kv_len))]
    sizes = [1 if n is None else n if isinstance(n, torch.SymInt) else length(name, n) for name, n in (("B", batch), ("H", heads))]
    like = torch.empty(0, device=device_of(device, mask))
    return block_lists(like, *operands_of(like, mask), *sizes, *lengths, *pair("BLOCK_SIZE", block_size), separate_full)
