"""What cannot be captured, or is wrong: eager's errors, one graph break at the call, one warning; never another result."""

from __future__ import annotations

import enum
import json
import os
import random
import warnings

import pytest
import torch
from torch._dynamo.utils import counters

import anyattn
from anyattn.custom_ops import dynamo
from anyattn.errors import ModError

S, D = 48, 8
Q = torch.randn(1, 2, S, D, generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def _reset():
    torch._dynamo.reset()
    counters.clear()
    dynamo._warned.clear()
    yield
    dynamo.run_uncompiled(False)  # other tests compile the entry points themselves


def unreadable(s, b, h, i, j):
    return s * json.loads("2.0")  # Dynamo skips json


def attention(q, mod):
    q = q * 2
    return anyattn.flex_attention(q, q, q, score_mod=mod) + 1


def test_a_mod_that_dynamo_cannot_trace_breaks_the_graph_once_and_warns_once() -> None:
    compiled = torch.compile(attention, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert torch.equal(compiled(Q, unreadable), attention(Q, unreadable))
    told = [w for w in caught if "torch.compile cannot capture a score_mod of anyattn" in str(w.message)]
    assert len(told) == 1 and "compute what else it needs before the call" in str(told[0].message)
    assert sum(counters["graph_break"].values()) == 1
    # the two halves of the user's function, and nothing of ours
    assert counters["stats"]["unique_graphs"] == 2 and counters["frames"]["total"] <= 2


def test_later_calls_are_captured_as_before() -> None:
    torch.compile(attention, backend="eager")(Q, unreadable)
    torch._dynamo.reset()
    double = lambda s, b, h, i, j: s * 2
    assert torch.equal(torch.compile(attention, backend="aot_eager", fullgraph=True)(Q, double), attention(Q, double))


ERRORS = {
    "mod": (
        ModError,
        r"cumsum has no meaning inside a mod\n  at .*test_refusals\.py:\d+\n    .*cumsum",
        lambda q: anyattn.flex_attention(q, q, q, lambda s, b, h, i, j: s.cumsum(0)),
    ),
    "lengths": (ValueError, "value has .* but key has", lambda q: anyattn.flex_attention(q, q[:, :, :9], q[:, :, :8])),
    "other lengths than the mask's": (
        ValueError,
        r"block_mask was made for lengths .* \(16, 16\) .* create_block_mask",
        lambda q: anyattn.flex_attention(q, q, q, block_mask=SMALL),
    ),
    "another device": (
        ValueError,
        "score_mod .* captures a tensor of shape .* on meta but query is on cpu",
        lambda q: anyattn.flex_attention(q, q, q, lambda s, b, h, i, j: s + ELSEWHERE[h]),
    ),
    "heads": (ValueError, "enable_gqa=True", lambda q: anyattn.flex_attention(q, q[:, :1], q[:, :1])),
    "kernel_options": (ValueError, "unknown name 'tile'", lambda q: anyattn.flex_attention(q, q, q, kernel_options={"tile": 3})),
    "block_mask": (TypeError, "block_mask is a list", lambda q: anyattn.flex_attention(q, q, q, block_mask=[1])),
    "window": (TypeError, "window_size", lambda q: anyattn.flash_attn_func(q, q, q, window_size=(1, 2, 3))),
}  # fmt: skip
SMALL = anyattn.create_block_mask(lambda b, h, i, j: i >= j, None, None, 16, 16, device="cpu", BLOCK_SIZE=16)
ELSEWHERE = torch.zeros(2, device="meta")


@pytest.mark.parametrize("name", ERRORS)
def test_errors_are_eager_ones(name: str) -> None:
    kind, text, call = ERRORS[name]
    with pytest.raises(kind, match=text):
        call(Q)
    with pytest.raises(kind, match=text):
        torch.compile(call, backend="aot_eager")(Q)
    torch._dynamo.reset()
    with pytest.raises(Exception, match=text.replace(r"\n", r"(\\n|\n)")):
        torch.compile(call, backend="aot_eager", fullgraph=True)(Q)


@pytest.mark.parametrize(
    "draw",
    [lambda: random.random(), lambda: torch.rand(()), lambda: torch.randint(3, ()), lambda: os.urandom(1)[0]],
    ids=["python", "torch", "int", "system"],
)
def test_random_numbers_in_mods_are_refused(draw) -> None:
    call = lambda q: anyattn.flex_attention(q, q, q, lambda s, b, h, i, j: s + draw())
    with pytest.raises(ModError, match="would be one and the same for all"):
        torch.compile(call, backend="aot_eager")(Q)
    torch._dynamo.reset()
    with pytest.raises(Exception):  # noqa: B017 - whose words depend on torch's version
        torch.compile(call, backend="aot_eager", fullgraph=True)(Q)


def test_an_edit_between_forward_and_backward_is_noticed() -> None:
    table = torch.randn(2)
    q = Q.clone().requires_grad_()
    out = torch.compile(lambda q: anyattn.flex_attention(q, q, q, lambda s, b, h, i, j: s * table[h]), backend="aot_eager")(q)
    table.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


LENGTHS = torch.tensor([S, 20])
LISTS = {
    "dense": (anyattn.compute_block_sparsity, {"batch_size": 1, "num_heads": 1, "seqlen_q": S, "seqlen_k": S, "device": "cpu"}),
    "varlen": (
        anyattn.compute_varlen_block_sparsity,
        {"num_heads": 1, "cu_seqlens_q": None, "cu_seqlens_k": None, "seqused_q": LENGTHS, "seqused_k": LENGTHS},
    ),
}


@pytest.mark.parametrize("name", LISTS)
def test_lists_of_a_mask_that_dynamo_cannot_trace_break_the_graph_once_and_warn_once(name: str) -> None:
    make, options = LISTS[name]

    def untraceable(b, h, i, j):
        return i - j >= json.loads("2")

    def call(x):
        x = x * 2
        lists = make(16, 16, mask_mod=untraceable, **options)
        return x + 1, lists.mask_block_cnt, lists.mask_block_idx

    compiled = torch.compile(call, backend="eager")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert all(map(torch.equal, compiled(Q), call(Q)))
    assert len([w for w in caught if "torch.compile cannot capture a mask_mod of anyattn" in str(w.message)]) == 1
    assert sum(counters["graph_break"].values()) == 1 and counters["frames"]["total"] <= 2


class Width(enum.IntEnum):
    NARROW = 3


def test_a_mod_in_which_dynamo_sees_an_error_that_python_does_not_raise_runs_uncompiled() -> None:
    """Dynamo has no comparison of a tensor and an IntEnum; a program that catches TypeError must not take that way."""
    width = Width.NARROW

    def narrow(b, h, i, j):
        return i - j < width

    def call(x):
        try:
            return anyattn.flex_attention(x, Q, Q, mask_mod=narrow) * 2
        except TypeError:
            return x * 0

    with pytest.warns(UserWarning, match="torch.compile cannot capture a mask_mod of anyattn: it raises TypeError"):
        got = torch.compile(call, backend="eager")(Q)
    assert torch.equal(got, call(Q)) and got.abs().max() > 0


def test_an_error_of_a_mods_own_is_raised_as_it_is() -> None:
    def failing(b, h, i, j):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        torch.compile(lambda x: anyattn.flex_attention(x, Q, Q, mask_mod=failing), backend="eager")(Q)
