"""Custom operator of ``create_block_mask`` for ``torch.compile`` and ``torch.export``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from anyattn.custom_ops.define import operator
from anyattn.custom_ops.flex import mods_of_operands, operands_of
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sequences.integers import ceil_div
from anyattn.sparsity.arguments import device_of, length, pair, positions
from anyattn.sparsity.block_mask import lists_of_mask
from anyattn.sparsity.list_stacks import lists_of_stacks, stack_shapes

__all__ = ["block_lists", "lists_with_mods"]


@operator
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
    """The lists of ``create_block_mask``, int32, as stacks (``sparsity.list_stacks``). like: any tensor on their device."""
    (mask,) = mods_of_operands("mask", program, numbers, tensors)
    sizes = ((q_len, kv_len), (block_m, block_n), (batch, heads))
    # .data: whether a list is exact is told by how often it was written to since it was made
    return [t.data for t in lists_of_mask(mask, *sizes, like.device, separate_full, stacks=True)]


@torch.library.register_fake("anyattn::block_lists")
def _(like: Tensor, program: str, numbers: list[int], tensors: list[Tensor], *facts: int) -> list[Tensor]:
    batch, heads, q_len, kv_len, block_m, block_n, separate_full = facts
    grid = (ceil_div(q_len, block_m), ceil_div(kv_len, block_n))
    shapes = stack_shapes((batch, heads), grid, 1 + separate_full, True)
    return [like.new_empty(shape, dtype=torch.int32) for pair in shapes for shape in pair]


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
    """A block mask's lists, made by the operator: eight, or four without separate full blocks. Raises as the eager call."""
    lengths = [n if isinstance(n, torch.SymInt) else positions(name, n) for name, n in (("Q_LEN", q_len), ("KV_LEN", kv_len))]
    sizes = [1 if n is None else n if isinstance(n, torch.SymInt) else length(name, n) for name, n in (("B", batch), ("H", heads))]
    like = torch.empty(0, device=device_of(device, mask))
    stacks = block_lists(like, *operands_of(like, mask), *sizes, *lengths, *pair("BLOCK_SIZE", block_size), separate_full)
    return [t for t in lists_of_stacks(stacks, 1 + separate_full) if t is not None]
