"""A dispatch mode that watches what attention is made of, instead of its operators, as which calls under other modes run."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from anyattn.tensors import kinds

__all__ = ["InsideMode"]


class InsideMode(TorchDispatchMode):
    """The base of modes with which tests count operations, reads and allocations."""

    def __enter__(self) -> Any:
        self._count, kinds.count_modes = kinds.count_modes, lambda: 0
        return super().__enter__()

    def __exit__(self, *given: Any) -> Any:
        kinds.count_modes = self._count
        return super().__exit__(*given)
