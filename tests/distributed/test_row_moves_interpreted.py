"""Rows moved by one launch of the Triton kernel, in its interpreter, are those that torch moves, bit for bit.

Run by ``test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

import random

import pytest
import torch

from anyattn.distributed.row_moves import Move, Part, RowMoves, _Launch, part_of, summed

DTYPES = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16), (torch.float64, torch.float64)]


def _tensors(chance: random.Random, count: int, dtype: torch.dtype, rows: int, width: int) -> list[torch.Tensor]:
    """(2, 3, rows, width), some with positions outside of heads, some inside of a longer tensor."""
    found = []
    for _ in range(count):
        t = torch.randn(2, rows, 3, width, dtype=torch.float64, device="cpu").to(dtype)
        t[:, 0] = -0.0
        found.append(t.transpose(1, 2) if chance.random() < 0.5 else t.transpose(1, 2).contiguous()[:, :, chance.randrange(2) :])
    return found


@pytest.mark.parametrize(("source", "target"), DTYPES)
@pytest.mark.parametrize("width", [1, 8, 20, 33])
def test_the_kernel_moves_what_torch_moves(source: torch.dtype, target: torch.dtype, width: int) -> None:
    chance = random.Random(width)
    torch.manual_seed(width)
    sources, targets = _tensors(chance, 3, source, 90, width), _tensors(chance, 2, target, 100, width)
    moves: list[Move] = []
    for number, to in enumerate(targets):
        first = 0
        while first + 40 < 99:
            spans = [(begin := chance.randrange(60), begin + chance.randrange(1, 60)) for _ in range(chance.randrange(4))]
            given = [((a, b), part_of(i, t, chance.randrange(89 - (b - a)))) for i, ((a, b), t) in enumerate(zip(spans, sources))]
            moves += summed(part_of(number, to, first), (20, 60), given, width)
            first += 40
    torch_targets = [t.clone(memory_format=torch.preserve_format) for t in targets]
    kernel_targets = [t.clone(memory_format=torch.preserve_format) for t in targets]
    moves = [m._replace(target=_moved(m.target, targets, torch_targets)) for m in moves]
    RowMoves(moves, 2, 3).run(sources, torch_targets)
    _Launch(moves, 2, 3, torch.device("cpu")).run(sources, kernel_targets)
    for a, b, before in zip(torch_targets, kernel_targets, targets):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        assert not torch.equal(a, before)


def _moved(part: Part, before: list[torch.Tensor], after: list[torch.Tensor]) -> Part:
    """The part of a clone, whose strides may be others."""
    rows = part.offset // part.strides[2]
    return part_of(part.tensor, after[part.tensor], rows)


def test_a_negative_zero_stays_one() -> None:
    source, target = torch.full((1, 1, 4, 8), -0.0, device="cpu"), torch.ones(1, 1, 4, 8, device="cpu")
    RowMoves([Move(part_of(0, target), (part_of(0, source),), 4, 8)], 1, 1).run([source], [target])
    assert torch.equal(target.view(torch.int32), source.view(torch.int32))
