"""Arguments of ``plan``: the group, its nodes, masks, chunks and weights, checked and completed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch.nn.attention import flex_attention as torch_flex

from anyattn.distributed.channel import channel_of
from anyattn.distributed.placement import chunk_of
from anyattn.distributed.sharded_mask import ShardedMask
from anyattn.sparsity.block_mask import BlockMask, build_block_mask

__all__ = ["BLOCK", "ONE", "chosen_chunk", "group_of", "mask_of", "masks_of", "node_size_of", "weights_of"]

BLOCK, _LEAST = 128, 16  # of masks that are made here: smaller for sequences of few blocks a rank
ONE = ""  # the name of the mask of a plan that has one


def group_of(where: Any, ranks: int | None) -> tuple[Any, int]:
    """The process group, None for a plan without one, and its size."""
    if where is None:
        if ranks is None:
            raise TypeError("where is None; wanted a DeviceMesh of one dimension or a ProcessGroup, or ranks= for a plan without a group")
        if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
            raise ValueError(f"ranks={ranks!r}; wanted a positive int")
        return None, ranks
    if ranks is not None:
        raise TypeError("where and ranks are both given; wanted one of them")
    if isinstance(where, dist.ProcessGroup):
        return where, dist.get_world_size(where)
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(where, DeviceMesh):
        raise TypeError(f"where is a {type(where).__name__}; wanted a DeviceMesh of one dimension or a ProcessGroup")
    if where.ndim != 1:
        names = where.mesh_dim_names
        cure = f"mesh[{names[-1]!r}]" if names else "mesh['cp']"
        raise ValueError(f"where is a DeviceMesh of {where.ndim} dimensions {names or ''}; wanted one dimension, such as {cure}")
    return where.get_group(), where.size()


def node_size_of(node_size: int | None, ranks: int, group: Any) -> int | None:
    if node_size is None:
        return None if group is None or ranks == 1 else channel_of(group).node_size
    if not isinstance(node_size, int) or isinstance(node_size, bool) or node_size < 1 or ranks % node_size:
        cure = f"wanted a divisor of the {ranks} ranks, how many of them share a node, or {ranks} to treat all alike"
        raise ValueError(f"node_size={node_size!r}; {cure}")
    return node_size


def masks_of(mask: Any, S: int | None, ranks: int, device: Any) -> dict[str, BlockMask]:
    named = mask if isinstance(mask, dict) else {ONE: mask}
    if not named or not all(isinstance(n, str) for n in named) or (isinstance(mask, dict) and ONE in named):
        raise ValueError(
            f"mask is a dict of {list(named)}; wanted a mask for each of one or more names, such as {{'full': m, 'window': n}}"
        )
    block = BLOCK
    while S is not None and block > _LEAST and block * 4 * ranks > S:
        block //= 2
    masks = {n: mask_of(f"mask[{n!r}]" if n else "mask", m, S, block, device) for n, m in named.items()}
    lengths = {m.seq_lengths[0] for m in masks.values()}
    if len(lengths) > 1:
        raise ValueError(f"mask has masks of {sorted(lengths)} positions; wanted one length")
    if S is not None and lengths != {S}:
        raise ValueError(f"S={S}, but mask covers {lengths.pop()} positions; wanted the same, or no S")
    return masks


def mask_of(name: str, mask: Any, S: int | None, block: int, device: Any) -> BlockMask:
    """A block mask of equal lengths from what a user passes as a mask."""
    if isinstance(mask, ShardedMask):
        raise TypeError(f"{name} is the mask of a plan already; wanted the mask of the whole sequence")
    if isinstance(mask, torch_flex.BlockMask):
        made = BlockMask.from_torch(mask)
    elif mask is None or callable(mask):
        if S is None:
            raise TypeError(f"{name} is {'None' if mask is None else 'a mask_mod'}, and S is None; wanted S=, the length of the sequence")
        every: Callable = torch_flex.noop_mask if mask is None else mask
        made = build_block_mask(every, (None, None), (S, S), device, block, True, None)
    else:
        raise TypeError(f"{name} is a {type(mask).__name__}; wanted a BlockMask, a mask_mod, None, or a dict of them")
    rows, keys = made.seq_lengths
    if rows != keys:
        raise ValueError(f"{name} has {rows} queries and {keys} keys; wanted a mask of one sequence, with as many keys as queries")
    return made


def chosen_chunk(chunk: int | None, unit: int, length: int, ranks: int) -> int:
    if chunk is None:
        return chunk_of(length, ranks, unit)
    if not isinstance(chunk, int) or isinstance(chunk, bool) or chunk < 1 or chunk % unit:
        raise ValueError(f"chunk={chunk!r}; wanted a multiple of {unit}, the blocks of the mask: make it with another BLOCK_SIZE")
    return chunk


def weights_of(weights: Mapping[str, float] | None, masks: dict[str, BlockMask]) -> dict[str, float]:
    if weights is None:
        return dict.fromkeys(masks, 1.0)
    if not isinstance(weights, Mapping) or set(weights) != set(masks) or not all(w > 0 for w in weights.values()):
        raise ValueError(f"weights={weights!r}; wanted a positive number of layers for each of {sorted(masks)}")
    return {n: float(weights[n]) for n in masks}
