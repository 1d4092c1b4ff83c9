"""``create_block_mask`` as on a GPU, without one: its tensors are a CPU's, and the launches of the kernels are noted instead of made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from anyattn import block_masks
from anyattn.call_cache import signature
from anyattn.sparsity import compute
from anyattn.sparsity.block_mask import LISTS, BlockMask
from anyattn.sparsity.kernels import block_lists, prepared_lists
from anyattn.triton_tools.fast_launch import Handle

__all__ = ["Launched", "Launches", "as_on_a_gpu"]


class Launched(NamedTuple):
    """One launch. given: tensors as their addresses."""

    is_warm: bool
    kernel: Any
    grid: tuple[int, ...]
    options: tuple
    given: tuple


class Launches:
    """The launches so far. run: what a launch does."""

    def __init__(self, run: Callable[[Any, tuple[int, ...], list[Any], dict[str, Any]], None]) -> None:
        self.made: list[Launched] = []
        self.allocated: list[Tensor] = []  # by warm calls
        self.handles: dict[tuple, Handle] = {}
        self.run = run

    def launch(self, kernel: Any, grid: tuple[int, ...], given: list[Any], device: Any, options: dict[str, Any], known: tuple) -> Handle:
        self._note(False, kernel, grid, options, given)

        def send(grid: tuple[int, ...], given: Any) -> None:
            assert all(type(x) is int for x in given), given
            self._note(True, kernel, grid, options, given)

        self.handles[kernel, tuple(options.values()), known] = made = Handle(send, True)
        return made

    def known(self, kernel: Any, device: Any, options: dict[str, Any], known: tuple) -> Handle | None:
        return self.handles.get((kernel, tuple(options.values()), known))

    def allocate(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        self.allocated.append(torch.zeros(shape, dtype=dtype).as_strided(shape, strides))
        return self.allocated[-1]

    def tensor_at(self, address: int, *others: Tensor) -> Tensor:
        """What is allocated from an address on, or another tensor whose address it is."""
        for t in self.allocated:
            if 0 <= (at := address - t.data_ptr()) < t.nbytes:
                return t.view(-1)[at // t.itemsize :]
        return next(t for t in others if t.data_ptr() == address)

    def told(self, mask: BlockMask) -> list[tuple]:
        """The launches that made a block mask, the same for all calls that do the same: its lists have names instead of addresses."""
        names: dict[Any, str] = {t.data_ptr(): name for name in LISTS if (t := getattr(mask, name)) is not None}
        names.setdefault(self.made[0].given[0], "scratch memory")  # ``store_hulls`` comes first, and begins with it
        return [(x.kernel, x.grid, x.options, tuple(names.get(given, given) for given in x.given)) for x in self.made]

    def _note(self, is_warm: bool, kernel: Any, grid: tuple[int, ...], options: dict[str, Any], given: Any) -> None:
        addresses = tuple([x.data_ptr() if isinstance(x, Tensor) else x for x in given])
        self.made.append(Launched(is_warm, kernel, grid, tuple(options.items()), addresses))
        self.run(kernel, grid, list(given), options)


@contextmanager
def as_on_a_gpu(run: Callable[..., None] = lambda *about: None) -> Iterator[Launches]:
    """Context in which a CPU's tensors are taken for a GPU's. Lists that nothing has filled are zeros."""
    launches = Launches(run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compute, "runs_kernels", lambda device: True)
        patch.setattr(signature, "_current_device", lambda: 0)  # of a torch for GPUs it raises where there is none
        patch.setattr(block_masks, "may_have_kernels", lambda device: True)
        patch.setattr(block_lists, "launch", launches.launch)
        patch.setattr(prepared_lists, "known_handle", launches.known)
        patch.setattr(prepared_lists, "allocator", lambda device: launches.allocate)
        yield launches
