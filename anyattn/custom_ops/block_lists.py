"""The operator through which ``torch.compile`` and ``torch.export`` see the making of a block mask."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.custom_ops.define import operator
from anyattn.custom_ops.flex import mods_of_operands, operands_of
from anyattn.custom_ops.gradients import called
from anyattn.mods.tracing.trace import TracedMod
from anyattn.sparsity.arguments import device_of, length, pair, positions
from anyattn.sparsity.block_mask import lists_of_mask
from anyattn.sparsity.list_stacks import lists_of_stacks, stack_shapes

__all__ = ["block_lists", "lists_with_mods"]


class BlockLists(NamedTuple):
    """The arguments of ``anyattn::block_lists``: those of ``create_block_mask``. like: any tensor on the lists' device."""

    like: Tensor
    program: str
    numbers: list[int]
    tensors: list[Tensor]
    batch: int
    heads: int
    q_len: int
    kv_len: int
    block_m: int
    block_n: int
    separate_full: bool


def _fake(given: BlockLists) -> list[Tensor]:
    grid = (ceil_div(given.q_len, given.block_m), ceil_div(given.kv_len, given.block_n))
    shapes = stack_shapes((given.batch, given.heads), grid, 1 + given.separate_full, True)
    return [given.like.new_empty(shape, dtype=torch.int32) for pair in shapes for shape in pair]


@operator(BlockLists, fake=_fake)
def block_lists(given: BlockLists) -> list[Tensor]:
    """The lists of ``create_block_mask``, int32, as stacks (``sparsity.list_stacks``)."""
    like, program, numbers, tensors, batch, heads, q_len, kv_len, block_m, block_n, separate_full = given
    (mask,) = mods_of_operands("mask", program, numbers, tensors)
    sizes = ((q_len, kv_len), (block_m, block_n), (batch, heads))
    # .data: whether a list is exact is told by how often it was written to since it was made
    return [t.data for t in lists_of_mask(mask, *sizes, like.device, separate_full, stacks=True)]


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
    (b, h), (m, n), (block_m, block_n) = sizes, lengths, pair("BLOCK_SIZE", block_size)
    given = BlockLists(like, *operands_of(like, mask), b, h, m, n, block_m, block_n, separate_full)
    stacks = called(block_lists, given)
    return [t for t in lists_of_stacks(stacks, 1 + separate_full) if t is not None]
