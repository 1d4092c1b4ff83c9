"""``ShardedMask``: the block mask of a plan, which a model passes to ``flex_attention`` with the rows of its rank."""

from __future__ import annotations

import itertools
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from anyattn.distributed.head_share import HeadShare
from anyattn.distributed.share import Share
from anyattn.sparsity.block_mask import LISTS, BlockMask

__all__ = ["ShardedMask", "mask_of_handle", "sharded"]


_FIELDS = frozenset(("mask_mod", "seq_lengths", "BLOCK_SIZE", *LISTS))


class ShardedMask(BlockMask):
    """The mask of the whole sequence, with the plan of who computes which rows of it.

    Its lists, ``shape`` and ``seq_lengths`` are those of the whole sequence. ``flex_attention`` takes it with the rows of this rank
    (``ContextPlan.shard``), and gets what these rows need from the other ranks.
    """

    plan: Any = None  # the ``ContextPlan``
    share: Share | HeadShare | None = None  # what this rank computes; None without a group
    handle: Tensor  # by which compiled graphs find the mask

    def __setattr__(self, name: str, value: Any) -> None:
        is_same = isinstance(value, Tensor) and value.data_ptr() == self.__dict__[name].data_ptr() if name in _FIELDS else True
        if not is_same:
            raise TypeError(f"{name} of a plan's mask cannot be assigned; wanted anyattn.distributed.plan of the mask with another {name}")
        super().__setattr__(name, value)

    def __getitem__(self, index: Any) -> NoReturn:
        raise TypeError("a mask of a plan cannot be indexed; wanted anyattn.distributed.plan(mask[...], ...) of the part of the whole mask")

    def _adjust(self, new_q_len: int, new_kv_len: int) -> NoReturn:
        raise TypeError(
            f"a mask of a plan cannot be cropped to {(new_q_len, new_kv_len)}; wanted anyattn.distributed.plan of the cropped mask"
        )

    def _state(self) -> dict[str, Any]:
        state = super()._state()
        return state | {"share": None, "handle": None}  # which belong to a process

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        _give_handle(self)


def sharded(mask: BlockMask, plan: Any, share: Share | HeadShare | None) -> ShardedMask:
    """``mask`` as the mask of ``plan``; share: None where the plan belongs to no group yet."""
    made = object.__new__(ShardedMask)
    made.__dict__.update(vars(mask))
    made.__dict__.update(plan=plan, share=share)
    _give_handle(made)
    return made


_numbers = itertools.count()
_by_handle: WeakValueDictionary[int, ShardedMask] = WeakValueDictionary()


def _give_handle(mask: ShardedMask) -> None:
    number = next(_numbers)
    mask.__dict__["handle"] = torch.tensor([number], device="cpu")
    _by_handle[number] = mask


def mask_of_handle(handle: Tensor) -> ShardedMask:
    """The mask whose ``handle`` a compiled graph got. Raises ``RuntimeError`` if it exists no more."""
    mask = _by_handle.get(int(handle))
    if mask is None:
        raise RuntimeError("the plan of this call was deleted before its backward pass; wanted a plan that is kept until then")
    return mask
