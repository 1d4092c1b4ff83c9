"""Captured tables by (query, key) whose rows are loaded in wide pieces, in Triton's interpreter, and views whose rows are not.

Run by ``test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from anyattn.backends.triton.codegen.assumptions import style_of
from anyattn.mods.analysis.captured_loads import has_even_rows
from anyattn.mods.tracing.trace import trace
from anyattn.validate import flex
from tests.support import cases
from tests.support.covering import few
from tests.support.flex_calls import judge

HEADS, ROWS, KEYS = 2, 37, 40
TILES = {"tile_m": 16, "tile_n": 16}


def table(keys: int, first: int = 0) -> Tensor:
    """(HEADS, ROWS, keys) numbers from the element ``first`` of their storage on."""
    count = HEADS * ROWS * keys
    storage = torch.linspace(-1, 1, count + first, dtype=torch.float64).mul(7000).sin()
    return storage[first:].view(HEADS, ROWS, keys)


def hidden_end(keys: int) -> Tensor:
    found = table(keys)
    found[..., KEYS:] = torch.nan
    return found


# the table, and whether its rows are even
VIEWS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "contiguous": (lambda: table(KEYS), True),
    "padded": (lambda: table(KEYS + 8)[..., :KEYS], True),
    "wider": (lambda: hidden_end(KEYS + 8), True),
    "of all heads": (lambda: table(KEYS)[:1].expand(HEADS, -1, -1), True),
    "odd rows": (lambda: table(KEYS + 1)[..., :KEYS], False),
    "odd end": (lambda: hidden_end(KEYS + 3), False),
    "shifted": (lambda: table(KEYS, 1), False),
    "turned": (lambda: table(KEYS).transpose(1, 2).contiguous().transpose(1, 2), False),
}
CASES = [pytest.param(name, dtype) for name in VIEWS for dtype in (torch.bfloat16, torch.float32)]


def qkv(dtype: torch.dtype, keys: int = KEYS) -> tuple[Tensor, Tensor, Tensor]:
    return cases.inputs("normal", cases.Shape(2, HEADS, HEADS, ROWS, keys, 16, 16), dtype, 0)[:3]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_a_bias_by_pair(name: str, dtype: torch.dtype) -> None:
    """Numbers beside the last key are not part of any result. Gradients of the bias are sums over the batch."""
    make, is_even = VIEWS[name]
    bias = make()
    score = lambda s, b, h, i, j: s + bias[h, i, j]
    assert has_even_rows(bias) or not is_even
    x = qkv(dtype)
    problem = flex.flex_problem(*x, score, None, None, None, None, False, None, True, False, False)
    assert style_of(problem.score, problem.score.expr, problem).even == ((0,) if is_even else ())
    judge(*x, score=score, captured=[bias] if bias.is_contiguous() and bias.shape[2] == KEYS else [], label=name, kernel_options=TILES)


@pytest.mark.parametrize("keys", few([33, 40, 48, 16], 33, 48))
def test_a_table_of_booleans_as_mask(keys: int) -> None:
    """Beside a bias, and a value of the key alone, which is not read beyond the keys."""
    seen, bias = table(48) > -0.5, table(48)
    of_key = torch.linspace(-1, 1, keys, dtype=torch.float64)
    assert has_even_rows(seen)
    for score in (None, lambda s, b, h, i, j: s + bias[h, i, j], lambda s, b, h, i, j: s + bias[h, i, j] * of_key[j]):
        judge(*qkv(torch.float32, keys), score=score, mask=lambda b, h, i, j: seen[h, i, j], label=str(keys), kernel_options=TILES)


def test_a_slot_that_is_read_in_two_ways_is_not_even() -> None:
    bias = table(KEYS)
    for read, even in ((lambda i, j: bias[0, i, j] + bias[1, i, j], (0,)), (lambda i, j: bias[0, i, j] + bias[0, i, (j + 1) % KEYS], ())):
        score = lambda s, b, h, i, j, read=read: s + read(i, j)
        problem = flex.flex_problem(*qkv(torch.float32), score, None, None, None, None, False, None, True, False, False)
        traced = trace(score, "score")
        assert style_of(traced, traced.expr, problem).even == even
        judge(*qkv(torch.float32), score=score, kernel_options=TILES)
