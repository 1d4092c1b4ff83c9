"""Gradients that nobody asks for, by Triton's interpreter: the others have the bits that they have beside all, and nothing else is written.

A kernel that leaves out what is not wanted is given any pointer in its place, the operand's own: so operands are compared too. Run by
``test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn import masks
from anyattn.custom_ops import flex as ops
from tests.support import cases
from tests.support.covering import few

NAMES = ("q", "k", "v", "captured")
SUBSETS = {n: list(itertools.combinations(NAMES, n)) for n in (1, 2, 3)}  # by how many are wanted
Call = Callable[[dict[str, Tensor]], Tensor]


def drawn(hidden: float = 0.0) -> dict[str, Tensor]:
    """hidden: what stands in the last five positions, which ``windowed`` and ``causal`` hide from all before them."""
    q, k, v, _ = cases.inputs("normal", cases.Shape(1, 2, 1, 41, 41, 16, 16), torch.float32, 0)
    if hidden:
        for t in (q, k, v):
            t[:, :, -5:] = hidden
    return {"q": q, "k": k, "v": v, "captured": torch.randn(2, 41, generator=torch.Generator().manual_seed(1))}


def flex(mask: Any = None, score: bool = True, **more: Any) -> Call:
    def run(x: dict[str, Tensor]) -> Tensor:
        mod = (lambda s, b, h, i, j: s + x["captured"][h, j]) if score else None
        return anyattn.flex_attention(x["q"], x["k"], x["v"], mod, mask_mod=mask, enable_gqa=True, **more)

    return run


def packed(x: dict[str, Tensor]) -> Tensor:
    ends = torch.tensor([0, 17, 17, 38], dtype=torch.int32)  # the last rows are no sequence's
    q, k, v = (x[n][0].transpose(0, 1) for n in "qkv")
    return anyattn.flash_attn_varlen_func(q, k, v, cu_seqlens_q=ends, cu_seqlens_k=ends, causal=True)


def paged(x: dict[str, Tensor]) -> Tensor:
    k, v = (x[n][0, :, :40].transpose(0, 1).reshape(5, 8, 1, 16) for n in "kv")
    table, used = torch.tensor([[1, 0], [4, 2]], dtype=torch.int32), torch.tensor([13, 16], dtype=torch.int32)
    ends = torch.tensor([0, 20, 41], dtype=torch.int32)
    return anyattn.flash_attn_varlen_func(x["q"][0].transpose(0, 1), k, v, cu_seqlens_q=ends, seqused_k=used, page_table=table)


CALLS: dict[str, Call] = {
    "causal": flex(masks.causal()),
    "one loop for both kinds of tiles": flex(masks.sliding_window(9, 0), score=False),
    "lists": flex(lambda b, h, i, j: (i - j) % 3 != 1),
    "packed": packed,
    "pages": paged,
}


def grads(call: Call, given: dict[str, Tensor], wanted: tuple[str, ...]) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """The gradients that ``backward()`` leaves, and the operands after it."""
    leaves = {n: t.clone().requires_grad_(n in wanted) for n, t in given.items()}
    out = call(leaves)
    out.backward(torch.linspace(-1, 1, out.numel()).view(out.shape))
    return {n: t.grad for n, t in leaves.items()}, {n: t.detach() for n, t in leaves.items()}


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


def check(call: Call, given: dict[str, Tensor], wanted: tuple[str, ...], all_of_them: dict[str, Tensor | None]) -> None:
    found, after = grads(call, given, wanted)
    for name in NAMES:
        assert same(after[name], given[name]), f"{name} was written to"
        one, other = found[name], all_of_them[name] if name in wanted else None
        assert (one is None) == (other is None), name
        assert one is None or other is None or same(one, other), name


@pytest.mark.parametrize("counts", few([(1, 3), (2,)], (1, 3)), ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_what_is_wanted_is_the_same(name: str, counts: tuple[int, ...]) -> None:
    """One alone and all but one; ``make test-long``: two too."""
    given = drawn()
    every, _ = grads(CALLS[name], given, NAMES)
    for wanted in (s for n in counts for s in SUBSETS[n]):
        if any(every[n] is not None for n in wanted):
            check(CALLS[name], given, wanted, every)


@pytest.mark.parametrize("hidden", [math.nan, math.inf])
def test_what_is_computed_again_is_the_same(hidden: float) -> None:
    given, call = drawn(hidden), flex(masks.causal())
    every, _ = grads(call, given, NAMES)
    for wanted in (("q",), ("k",), ("v",), ("captured",), ("k", "v")):
        check(call, given, wanted, every)


@pytest.mark.parametrize("wanted", [(True, True, True), (False, True, False), (True, False, False)])
def test_a_graphs_own_tensors(wanted: tuple[bool, ...]) -> None:
    """In a compiled graph no tensor requires a gradient: what is wanted is said beside them, and is computed."""
    q, k, v = (drawn()[n] for n in "qkk")
    k, v = (t.repeat_interleave(2, 1) for t in (k, v))
    nothing = ("", [], [], "", [], [], [], [0, 0], True, 0.25)  # no mods, no lists
    out, lse, _ = ops.attend(q, k, v, None, *nothing, False, False, "", "triton")
    found = ops.attend_backward(q, k, v, None, *nothing, False, "", "triton", out, lse, torch.ones_like(out), None, [*wanted, False])
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    whole = anyattn.flex_attention(*leaves, scale=0.25)
    whole.backward(torch.ones_like(whole))
    for one, leaf, is_wanted in zip(found, leaves, wanted, strict=False):
        assert leaf.grad is not None
        assert same(one, leaf.grad) if is_wanted else not one.numel()


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True)


@pytest.mark.parametrize("door", [anyattn.flex_attention, flash])
def test_projections_inside_of_a_compiled_graph(door: Callable) -> None:
    """Queries, keys and values that the graph itself makes, as every model's are."""
    x, weight = drawn()["q"], torch.eye(16).add(0.1).requires_grad_()

    def model(x: Tensor) -> Tensor:
        return door(x @ weight, (2 * x) @ weight, x @ (weight + 1)).sum()  # type: ignore[no-any-return]

    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.equal(*(torch.autograd.grad(run(x), weight)[0] for run in (model, compiled)))
