"""Block masks whose captures change after their lists were made: the lists say which blocks are visited, and inside partial blocks the mask
decides, with its captures as they are now, whatever the mask's form."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch

import anyattn
from anyattn import masks, oracle
from anyattn.sparsity import BlockSparseTensors
from anyattn.testing import budget
from anyattn.testing.rounding import rounding

S, BLOCK = 96, 16


class Changing:
    """A mask, and what changes a thing that it captures."""

    def __init__(self, mask: Callable, change: Callable[[], Any]):
        self.mask, self.change = mask, change


def written(start: torch.Tensor, now: torch.Tensor, mask_of: Callable[[torch.Tensor], Callable]) -> Changing:
    held = start.clone()
    return Changing(mask_of(held), lambda: held.copy_(now))


def number() -> Changing:
    width = 7

    def change() -> None:
        nonlocal width
        width = 50

    return Changing(lambda b, h, i, j: (i >= j) & (i - j < width), change)


def rebound() -> Changing:
    limit = torch.tensor([3])

    def change() -> None:
        nonlocal limit
        limit = torch.tensor([40])

    return Changing(lambda b, h, i, j: (i >= j) & (i - j < limit[0]), change)


AT = torch.arange(S)
FORMS = {
    "ranges": lambda: written(torch.tensor(40), torch.tensor(70), lambda t: lambda b, h, i, j: (i >= j) & (j < t)),
    "documents": lambda: written(AT // 24, AT // 40, lambda t: lambda b, h, i, j: t[i] == t[j]),
    "the library's documents": lambda: written(AT // 24, AT // 40, lambda t: masks.document(t) & masks.causal()),
    "a table": lambda: written(AT % 5 < 2, AT % 7 < 3, lambda t: lambda b, h, i, j: t[(i + j) % 96] | (i == j)),
    "a number": number,
    "another tensor": rebound,
}


def meant(block_mask: Any, mask: Callable) -> Callable:
    """The rule, pair by pair."""
    classes = BlockSparseTensors.from_block_mask(block_mask).classes()[0, 0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    visible = (classes == 2) | ((classes == 1) & torch.as_tensor(mask(0, 0, AT[:, None], AT)))
    return lambda b, h, i, j: visible[i, j]


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("form", FORMS)
def test_lists_hold_when_captures_change(form: str, is_compiled: bool) -> None:
    case, generator = FORMS[form](), torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, S, 16, generator=generator)
    made = anyattn.create_block_mask(case.mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    call = torch.compile(anyattn.flex_attention, backend="eager") if is_compiled else anyattn.flex_attention
    for _ in range(2):
        call(q, k, v, block_mask=made)
    assert made.is_exact
    case.change()
    assert not made.is_exact and not copy.copy(made).is_exact and not made[:, :, 1:].is_exact
    mask = meant(made, case.mask)
    exact, plain, noise = (f(q, k, v, mask=mask).out for f in (oracle.attention, oracle.same_dtype, rounding))
    for _ in range(2):
        budget.check("out", call(q, k, v, block_mask=made), exact, plain, noise)
    again = anyattn.create_block_mask(case.mask, 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    assert again.is_exact and torch.equal(call(q, k, v, block_mask=again), anyattn.flex_attention(q, k, v, block_mask=again))


def test_copies_are_as_exact_as_what_they_are_copies_of() -> None:
    ids = AT // 24
    made = anyattn.create_block_mask(masks.document(ids), 1, 1, S, S, device="cpu", BLOCK_SIZE=BLOCK)
    stored, copied = pickle.dumps(made), copy.deepcopy(made)
    assert copied.is_exact and pickle.loads(stored).is_exact and made.to("cpu").is_exact
    ids.add_(1)
    assert copied.is_exact and not copy.deepcopy(made).is_exact and not pickle.loads(pickle.dumps(made)).is_exact
