"""Backward passes whose gradients of k and v are not rounded (``Problem.wide_kv_grads``), in turns with those that are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

from anyattn import autograd


class Both(NamedTuple):
    """The results of one backward pass: gradients of ``Problem.grad_inputs``, those of k and v in their dtype and in float32."""

    narrow: tuple[Tensor | None, ...]
    wide: tuple[Tensor | None, ...]

    @property
    def of_keys(self) -> list[tuple[Tensor, Tensor]]:
        """(narrow, wide) gradients of k and of v, where wanted."""
        return [(a, b) for a, b in zip(self.narrow[1:3], self.wide[1:3], strict=True) if a is not None and b is not None]


@contextmanager
def in_turns(is_computed: bool = True) -> Iterator[list[Both]]:
    """Inside, every backward pass is computed four times on its plan, in turns without and with wide gradients. The latter differ in dtype
    alone, and each kind returns the same bits again. is_computed: kernels run, and are not only compiled."""
    found: list[Both] = []
    compute = autograd.backward

    def both(problem: Any, plan: Any, *results: Tensor | None) -> tuple[Tensor | None, ...]:
        assert not problem.wide_kv_grads
        made = [compute(problem.like(wide_kv_grads=is_wide), plan, *results) for is_wide in (False, True, False, True)]
        found.append(Both(*made[:2]))
        for first, second in (made[::2], made[1::2]):
            assert not is_computed or all(map(_equal, first[1:3], second[1:3]))
        for narrow, wide in found[-1].of_keys:
            assert wide.dtype is problem.stat_dtype and narrow.dtype is problem.k.dtype
            assert wide.shape == narrow.shape and wide.stride() == narrow.stride()
        for narrow, wide in zip(made[0][:1] + made[0][3:], made[1][:1] + made[1][3:], strict=True):
            assert (narrow is None) is (wide is None) and (narrow is None or narrow.dtype is wide.dtype)  # type: ignore[union-attr]
        return made[2]

    with mock.patch.object(autograd, "backward", both):
        yield found


def _equal(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
