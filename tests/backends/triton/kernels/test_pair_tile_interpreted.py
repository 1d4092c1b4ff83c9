"""Small problems in Triton's interpreter: one tile of pairs in several batch entries.

Run by ``test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks, oracle
from anyattn.backends.triton import backward_pass, pair_tiles
from anyattn.backends.triton.tile_config import Tiles
from anyattn.mods.dropout import Seeded, dropout_of
from anyattn.testing import budget
from anyattn.testing.rounding import later
from tests.support import cases
from tests.support.covering import few
from tests.support.flex_calls import judge

SMALL = {"tile_m": 64, "tile_n": 64}  # the default's, which tests on this backend replace


def numbers(*shape: int) -> Tensor:
    return torch.linspace(-1, 1, torch.Size(shape).numel(), dtype=torch.float64).mul(7000).sin().view(shape)


def qkv(batch: int, rows: int, keys: int, dims: tuple[int, int], dtype: torch.dtype) -> tuple[Tensor, ...]:
    return cases.inputs("normal", cases.Shape(batch, 2, 2, rows, keys, *dims), dtype, 0)[:3]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Tiles]:
    """The launches of the kernel, two batch entries each."""
    made: list[Tiles] = []
    launch = backward_pass.launch_pairs

    def recorded(launches: Any, problem: Any, pairs: Any, *others: Any) -> None:
        made.append(pairs)
        launch(launches, problem, pairs, *others)

    monkeypatch.setattr(backward_pass, "launch_pairs", recorded)
    monkeypatch.setattr(pair_tiles, "_entries_each", lambda *about: 2)
    monkeypatch.setattr(pair_tiles, "_widest_whole", lambda *about: 128)  # in float32 too, in which errors are seen best
    return made


class Learnt(NamedTuple):
    """A score mod of captured tensors: their shapes for (rows, keys), and the score of them and of ``places``."""

    shapes: Callable[[int, int], list[tuple[int, ...]]]
    score: Callable[..., Callable]
    mask: Any = None


def places(rows: int, keys: int) -> Tensor:
    return (torch.arange(rows)[:, None] * 5 + torch.arange(keys)[None] * 3) % 11


HIDDEN = numbers(64, 64) > -0.7
BY_ENTRY = numbers(3, 64, 64) > -0.7
LEARNT = {
    "table": Learnt(lambda m, n: [(11, 2)], lambda t, at: lambda s, b, h, i, j: s + t[at[i, j], h]),
    "pairs": Learnt(lambda m, n: [(2, m, n)], lambda t, at: lambda s, b, h, i, j: s + t[h, i, j], masks.causal().fn),
    "factor": Learnt(lambda m, n: [(m, n)], lambda t, at: lambda s, b, h, i, j: s * t[i, j], masks.sliding_window(9, 3).fn),
    "two": Learnt(
        lambda m, n: [(11,), (2, m, n)], lambda t, u, at: lambda s, b, h, i, j: s * t[at[i, j]] + u[h, i, j],
        lambda b, h, i, j: HIDDEN[i, j],
    ),
    "share a derivative": Learnt(lambda m, n: [(11, 2), (m,)], lambda t, u, at: lambda s, b, h, i, j: s + t[at[i, j], h] + u[i]),
    "scale and table": Learnt(
        lambda m, n: [(2,), (11, 2)], lambda t, u, at: lambda s, b, h, i, j: s * t[h] + u[at[i, j], h],
        lambda b, h, i, j: BY_ENTRY[b % 3, i, j],
    ),
    "distance": Learnt(lambda m, n: [(m + n,)], lambda t, at: lambda s, b, h, i, j: s + t[i - j + n_of(at)]),
    "cap": Learnt(lambda m, n: [(m, n)], lambda t, at: lambda s, b, h, i, j: 2.0 * torch.tanh((s + t[i, j]) / 2.0)),
}  # fmt: skip


def n_of(at: Tensor) -> int:
    return at.shape[1]


SIZES = [(49, 49), (64, 64), (15, 40), (40, 1), (1, 64)]
DIMS = [(32, 32), (40, 64), (64, 16)]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.covering(1)
@pytest.mark.parametrize(("name", "size", "dims", "dtype"), [*itertools.product(LEARNT, SIZES, DIMS, DTYPES)], ids=str)
def test_a_small_problem(name: str, size: tuple[int, int], dims: tuple[int, int], dtype: torch.dtype, launched: list) -> None:
    """The last program has one batch entry instead of two."""
    learnt, (rows, keys) = LEARNT[name], size
    captured = [numbers(*shape) for shape in learnt.shapes(rows, keys)]
    mods = {"score": learnt.score(*captured, places(rows, keys)), "mask": learnt.mask, "captured": captured}
    judge(*qkv(3, rows, keys, dims, dtype), label=f"{name} {size} {dims} {dtype}", kernel_options=SMALL, **mods)
    assert launched


PLAIN = {
    "full": {},
    "causal": {"mask": masks.causal().fn},
    "two ranges": {"mask": masks.sink_window(3, 5).fn},
    "range by entry": {"mask": lambda b, h, i, j: j < 5 + 4 * b},
    "no ranges": {"mask": lambda b, h, i, j: (i - j) % 3 != 1},
    "table by entry": {"mask": lambda b, h, i, j: BY_ENTRY[b % 3, i, j]},
    "some rows see nothing": {"mask": lambda b, h, i, j: (j >= 5) & (j < i - 9)},
    "softcap": {"score": lambda s, b, h, i, j: 2.0 * torch.tanh(s / 2.0), "mask": masks.causal().fn},
    "by entry": {"score": lambda s, b, h, i, j: s * (1 + b) + torch.where(BY_ENTRY[b % 3, i, j], 0.0, -1.0)},
    "sink": {"sink": numbers(2), "mask": masks.sliding_window(9, 0).fn},
}  # fmt: skip


@pytest.mark.parametrize("size", few([(49, 49), (64, 64), (20, 33)], (49, 49)), ids=str)
@pytest.mark.parametrize("name", PLAIN)
def test_nothing_is_learnt(name: str, size: tuple[int, int], launched: list) -> None:
    options = dict(PLAIN[name])
    if "sink" in options:
        options["sink"] = options["sink"].float()
    judge(*qkv(3, *size, (32, 40), torch.float32), label=name, kernel_options=SMALL, **options)
    assert launched


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_dropout(dtype: torch.dtype, learns: bool, launched: list) -> None:
    q, k, v, dout = cases.inputs("normal", cases.Shape(3, 2, 2, 49, 40, 32, 24), dtype, 0)
    table, at = numbers(11, 2).requires_grad_(learns), places(49, 40)
    score, leaves = (lambda s, b, h, i, j: s + table[at[i, j], h]), [t.requires_grad_() for t in (q, k, v)]
    torch.manual_seed(3)
    dropout = dropout_of(Seeded(torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32), 0.3))
    torch.manual_seed(3)
    out = anyattn.flex_attention(*leaves, score, dropout_p=0.3, kernel_options=SMALL)
    found = torch.autograd.grad(out, [*leaves, *[table] * learns], dout)
    mods = {"score": score, "dropout": dropout, "captured": [table] * learns}
    true, by_hand = oracle.gradients(q, k, v, dout, **mods), oracle.same_dtype_gradients(q, k, v, dout, **mods)
    noise = later(q, k, v, dout, **mods)
    for name, got in zip(("dq", "dk", "dv"), found, strict=False):
        budget.check(name, got, getattr(true, name), getattr(by_hand, name), noise.of(name))
    if learns:
        budget.check("table", found[3], true.captured[0], by_hand.captured[0], noise.of_captured(0))
    assert len(launched) == 1


def test_the_gradient_of_the_log_sum_exp(launched: list) -> None:
    """Beside that of a sink's logits."""
    q, k, v, dout = cases.inputs("normal", cases.Shape(3, 2, 2, 33, 40, 32, 24), torch.float32, 0)
    dlse, sink, table = numbers(3, 33, 2).float().transpose(1, 2), numbers(2).float().requires_grad_(), numbers(33, 40).requires_grad_()
    mods = {"score": lambda s, b, h, i, j: s * table[i, j], "sink": sink}
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out, lse = anyattn.flex_attention(*leaves, mods["score"], sink=sink, return_lse=True, kernel_options=SMALL)
    found = torch.autograd.grad((out, lse), [*leaves, sink, table], (dout, dlse))
    more = {**mods, "dlse": dlse, "captured": [table]}
    true, by_hand = (f(q, k, v, dout, **more) for f in (oracle.gradients, oracle.same_dtype_gradients))
    noise = later(q, k, v, dout, **more)
    for name, got in zip(("dq", "dk", "dv", "dsink"), found, strict=False):
        budget.check(name, got, getattr(true, name), getattr(by_hand, name), noise.of(name))
    budget.check("table", found[4], true.captured[0], by_hand.captured[0], noise.of_captured(0))
    assert len(launched) == 1


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows first": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "part of wider rows": lambda t: torch.cat((t, t, t), 3)[..., t.shape[3] : 2 * t.shape[3]],
    "shared by all entries": lambda t: t[:1].expand(t.shape),
    "backwards in storage": lambda t: t.flip(0).contiguous().flip(0).transpose(0, 1).contiguous().transpose(0, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_strides(name: str, launched: list) -> None:
    table, at = numbers(11, 2), places(49, 40)
    x = [LAYOUTS[name](t) for t in qkv(3, 49, 40, (24, 24), torch.float32)]
    judge(*x, score=lambda s, b, h, i, j: s + table[at[i, j], h], captured=[table], label=name, kernel_options=SMALL)
    assert launched


WANTED = [s for n in (1, 2, 3) for s in itertools.combinations(range(4), n)]


def test_only_some_gradients(launched: list) -> None:
    """They have the bits that they have beside all, and nothing else is written."""
    x = [*qkv(9, 33, 40, (16, 24), torch.bfloat16), numbers(2, 33, 40)]
    dout = numbers(9, 2, 33, 24).bfloat16()

    def gradients(wanted: tuple[int, ...]) -> dict[int, Tensor]:
        leaves = [t.clone().requires_grad_(i in wanted) for i, t in enumerate(x)]
        out = anyattn.flex_attention(*leaves[:3], lambda s, b, h, i, j: s + leaves[3][h, i, j], kernel_options=SMALL)
        found = torch.autograd.grad(out, [leaves[i] for i in wanted], dout)
        assert all(torch.equal(leaf, t) for leaf, t in zip(leaves, x, strict=True)), "an operand was written to"
        return dict(zip(wanted, found, strict=True))

    every = gradients((0, 1, 2, 3))
    for wanted in WANTED:
        launched.clear()
        assert all(torch.equal(g, every[i]) for i, g in gradients(wanted).items()), wanted
        assert len(launched) == 1


def test_deterministic_sums(launched: list, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs in the opposite order give the same bits; without deterministic=True they do not."""
    from triton.runtime import interpreter

    q, k, v = qkv(9, 33, 40, (16, 16), torch.bfloat16)
    dout = numbers(9, 2, 33, 16).bfloat16()
    builder = interpreter.InterpreterBuilder
    there = builder.set_grid_idx

    def gradient(deterministic: bool, turns: bool) -> Tensor:
        turned = lambda self, *at: there(self, *(n - 1 - i for n, i in zip(self.grid_dim, at, strict=True)))
        monkeypatch.setattr(builder, "set_grid_idx", turned if turns else there)
        table = numbers(33, 40).float().requires_grad_()
        score = lambda s, b, h, i, j: s + table[i, j] * (1 + h)
        out = anyattn.flex_attention(q, k, v, score, deterministic=deterministic, kernel_options=SMALL)
        return torch.autograd.grad(out, table, dout)[0]

    assert torch.equal(gradient(True, False), gradient(True, True))
    assert len(launched) == 2 and not torch.equal(gradient(False, False), gradient(False, True))


def test_heads_that_share_keys(launched: list) -> None:
    """dk and dv are sums of query heads, which other kernels compute."""
    q, k, v = cases.inputs("normal", cases.Shape(3, 4, 2, 17, 20, 16, 16), torch.float32, 0)[:3]
    bias = numbers(4, 17, 20)
    judge(q, k, v, score=lambda s, b, h, i, j: s + bias[h, i, j], captured=[bias], kernel_options=SMALL)
    assert not launched


REFUSED: dict[str, tuple[list[tuple[int, ...]], Callable[..., Callable]]] = {
    "of an entry": ([(3, 20, 20)], lambda t: lambda s, b, h, i, j: s + t[b, i, j]),
    "three derivatives": (
        [(20, 20), (20, 20), (20, 20)],
        lambda t, u, w: lambda s, b, h, i, j: s * t[i, j] + torch.tanh(u[i, j]) + torch.sin(w[i, j]),
    ),
    "rows of captured tensors": ([(20, 8), (20, 8)], lambda t, u: lambda s, b, h, i, j: s + sum(t[i, c] * u[j, c] for c in range(8))),
}


@pytest.mark.parametrize("name", REFUSED)
def test_gradients_of_other_kernels(name: str, launched: list) -> None:
    shapes, mod = REFUSED[name]
    captured = [numbers(*shape) for shape in shapes]
    judge(*qkv(3, 20, 20, (16, 16), torch.float32), score=mod(*captured), captured=captured, label=name, kernel_options=SMALL)
    assert not launched


def test_given_lists(launched: list) -> None:
    blocks = anyattn.create_block_mask(lambda b, h, i, j: (i * j) % 3 < 2, None, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    x = qkv(2, 40, 40, (16, 16), torch.float32)
    judge(*x, mask=lambda b, h, i, j: (i * j) % 3 < 2, block_mask=blocks, kernel_options=SMALL)
    assert not launched


@pytest.mark.parametrize("turn", [1, 2, 3])
def test_a_plans_calls_have_other_numbers_and_masks(turn: int, launched: list) -> None:
    """A prepared launch gets each call's own captured values."""
    table, seen, factor = numbers(20, 33) * turn, numbers(20, 33) > -0.3 * turn, 0.5 * turn
    score, mask = lambda s, b, h, i, j: s * factor + table[i, j], lambda b, h, i, j: seen[i, j]
    judge(*qkv(3, 20, 33, (16, 16), torch.float32), score=score, mask=mask, captured=[table], kernel_options=SMALL)
    assert len(launched) == 1
