"""Dropout of attention weights at every entry point: against the oracle with the same bits, and where the seed comes from."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import anyattn
from anyattn import oracle
from anyattn.call_cache import attention
from anyattn.integrations.flash_attention import version2
from anyattn.mods.dropout import Dropout, Seeded, dropout_of
from anyattn.testing import budget
from anyattn.testing.rounding import later

P = 0.3


def drawn(seed: int, p: float = P, device: Any = "cpu") -> Dropout:
    """The dropout of a call after ``torch.manual_seed(seed)``."""
    torch.manual_seed(seed)
    found = dropout_of(Seeded(torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=device), p))
    assert found is not None
    return found


class Path(NamedTuple):
    """A call of ``flex_attention``. shapes: Hq, Hkv, Sq, Sk, D, Dv."""

    shapes: tuple[int, ...] = (4, 2, 40, 50, 16, 24)
    mask: Callable | None = None
    score: Callable | None = None
    options: dict[str, Any] | None = None
    block_size: Any = None
    has_sink: bool = False


CAUSAL = lambda b, h, q, k: q + 20 >= k
PATHS = {
    "dense": Path(),
    "causal": Path(mask=CAUSAL),
    "window": Path(mask=lambda b, h, q, k: (q - k).abs() < 9),
    "pairs": Path((2, 1, 40, 50, 16, 24), mask=lambda b, h, q, k: (q * k + h) % 3 > 0),
    "score": Path(score=lambda s, b, h, q, k: 3 * torch.tanh(s / 3) - 0.1 * h, mask=CAUSAL),
    "sink": Path(has_sink=True),
    "tiles": Path(options={"tile_m": 16, "tile_n": 32}),
    "splits": Path(options={"num_splits": 3}),
    "block mask": Path((2, 2, 90, 90, 16, 16), mask=lambda b, h, q, k: (q // 16) % 3 != (k // 16) % 3, block_size=32),
    "documents": Path((2, 1, 90, 90, 16, 16), mask=lambda b, h, q, k: q // 37 == k // 37, block_size=(32, 32)),
    "odd blocks": Path((2, 1, 70, 70, 16, 16), mask=lambda b, h, q, k: (q // 16) % 3 != (k // 16) % 3, block_size=(31, 40)),
    "one query": Path((4, 1, 1, 90, 16, 16)),
    "large": Path((1, 1, 600, 1100, 16, 16), mask=CAUSAL),
}


def operands(shapes: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, ...]:
    g, (hq, hkv, sq, sk, d, dv) = torch.Generator().manual_seed(seed), shapes
    given = ((2, hq, sq, d), (2, hkv, sk, d), (2, hkv, sk, dv), (2, hq, sq, dv))
    return tuple(torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in given)


def judged(got: dict[str, Tensor], q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **mods: Any) -> None:
    """Judges out, lse and gradients of a call by the oracle with the same bits."""
    exact, plain = (f(q, k, v, **mods) for f in (oracle.attention, oracle.same_dtype))
    grads, by_hand = (f(q, k, v, dout, **mods) for f in (oracle.gradients, oracle.same_dtype_gradients))
    noise = later(q, k, v, dout, **mods)
    for name, found in got.items():
        true, hand = (exact, plain) if hasattr(exact, name) else (grads, by_hand)
        budget.check(name, found, getattr(true, name), getattr(hand, name), noise.of(name))


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PATHS)
def test_flex_against_the_oracle(name: str, dtype: torch.dtype) -> None:
    path = PATHS[name]
    q, k, v, dout = operands(path.shapes, dtype)
    sink = torch.linspace(-1, 1, path.shapes[0]).to(dtype).requires_grad_() if path.has_sink else None
    leaves = [t.requires_grad_() for t in (q, k, v)]
    mask: dict[str, Any] = {"mask_mod": path.mask}
    if path.block_size is not None:
        made = anyattn.create_block_mask(path.mask, None, None, *path.shapes[2:4], device="cpu", BLOCK_SIZE=path.block_size)
        mask = {"block_mask": made}
    dropout = drawn(3)
    torch.manual_seed(3)
    out, lse = anyattn.flex_attention(
        q, k, v, path.score, enable_gqa=True, return_lse=True, kernel_options=path.options, sink=sink, dropout_p=P, **mask
    )
    found = torch.autograd.grad(out, [*leaves, *([] if sink is None else [sink])], dout)
    got = {"out": out, "lse": lse, **dict(zip(("dq", "dk", "dv", "dsink"), found))}
    judged(got, q, k, v, dout, mask=path.mask, score=path.score, sink=sink, dropout=dropout)


def test_packed_sequences_see_their_own_positions() -> None:
    """A sequence of a packed batch keeps the pairs that it would keep as the batch entry of its number."""
    lengths = [(40, 40), (7, 30), (23, 50)]
    ends = [torch.tensor([0, *itertools.accumulate(n)]) for n in zip(*lengths)]
    q, k, v, dout = (t[0].transpose(0, 1) for t in operands((4, 2, 70, 120, 16, 16), torch.float32))
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    dropout = drawn(5)
    torch.manual_seed(5)
    out = anyattn.flash_attn_varlen_func(*leaves, *ends, causal=True, dropout_p=P)
    found = torch.autograd.grad(out, leaves, dout)
    keep = dropout.keep
    for i, (rows, keys) in enumerate(lengths):
        of_q, of_k = (slice(int(e[i]), int(e[i + 1])) for e in ends)
        parts = [t[None, at].transpose(1, 2) for t, at in ((q, of_q), (k, of_k), (v, of_k), (dout, of_q))]
        got = {"out": out[None, of_q], "dq": found[0][None, of_q], "dk": found[1][None, of_k], "dv": found[2][None, of_k]}
        judged(
            {name: t.transpose(1, 2) for name, t in got.items()},
            *parts,
            mask=lambda b, h, q, k, n=keys - rows: k - q <= n,
            dropout=Dropout(shifted(keep, i), P),
        )


def shifted(keep: Any, entry: int) -> Any:
    """The mask of batch entry ``entry`` as that of entry 0."""
    from anyattn.mods.analysis.evaluate import evaluate

    return lambda b, h, q, k: evaluate(keep, b + entry, h, q, k)


def flex(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return anyattn.flex_attention(q, k, v, mask_mod=lambda b, h, q, k: q >= k, dropout_p=p)


def flash(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    return anyattn.flash_attn_func(q, k, v, causal=True, dropout_p=p)


def varlen(q: Tensor, k: Tensor, v: Tensor, p: float) -> Tensor:
    ends = torch.arange(0, 2 * q.shape[1] + 1, q.shape[1], device=q.device)
    return anyattn.flash_attn_varlen_func(*(t.flatten(0, 1) for t in (q, k, v)), ends, ends, causal=True, dropout_p=p)


CALLS = (flex, flash, varlen)


def given() -> list[Tensor]:
    return [t.requires_grad_() for t in operands((4, 4, 40, 40, 16, 16), torch.float32)[:3]]


@pytest.mark.parametrize("call", CALLS)
def test_a_seed_for_each_call_which_manual_seed_repeats(call: Callable) -> None:
    """Warm calls draw new seeds too; a call without dropout draws nothing and has the bits of one without the argument."""
    qkv, found = given(), []
    for _ in range(2):
        torch.manual_seed(0)
        runs = [call(*qkv, P) for _ in range(3)]
        found.append([*runs, torch.rand(1), *torch.autograd.grad(runs[2].square().sum(), qkv)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(found[0][:3], 2))
    torch.manual_seed(0)
    without, after = call(*qkv, 0.0), torch.rand(1)
    torch.manual_seed(0)
    assert torch.equal(after, torch.rand(1)) and torch.equal(without, call(*qkv, 0))


def test_packed_tensors_and_flash_attention_s_modules() -> None:
    """They drop what ``flash_attn_func`` drops, by FlashAttention's place of the argument too."""
    q, k, v = (t.detach() for t in given())
    qkv, found = torch.stack((q, k, v), 2), []
    for run in (
        lambda: anyattn.flash_attn_func(q, k, v, causal=True, dropout_p=P),
        lambda: anyattn.flash_attn_qkvpacked_func(qkv, causal=True, dropout_p=P),
        lambda: anyattn.flash_attn_kvpacked_func(q, qkv[:, :, 1:], causal=True, dropout_p=P),
        lambda: version2.flash_attn_func(q, k, v, P, causal=True),
    ):
        torch.manual_seed(6)
        found.append(run())
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_probability_and_seed_are_no_part_of_a_call_s_key() -> None:
    qkv = given()
    attention.clear()
    for p in (0.1, 0.2, 0.7):
        flash(*qkv, p)
    assert attention.size() == 1
    flash(*qkv, 0.0)
    assert attention.size() == 2


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("is_reentrant", [False, True])
def test_a_checkpoint_drops_the_same_again(call: Callable, is_reentrant: bool) -> None:
    qkv, found = given(), []
    for run in (lambda *t: checkpoint(call, *t, P, use_reentrant=is_reentrant), lambda *t: call(*t, P)):
        torch.manual_seed(2)
        out = run(*qkv)
        out.square().sum().backward()
        found.append([out, *[t.grad for t in qkv]])
        for t in qkv:
            t.grad = None
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("call", [flex, pytest.param(flash, marks=pytest.mark.slow), pytest.param(varlen, marks=pytest.mark.slow)])
def test_compiled_calls_draw_what_eager_calls_draw(call: Callable) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled, qkv, found = torch.compile(call, fullgraph=True, backend=counter), given(), []
    for run in (compiled, compiled, call):
        torch.manual_seed(4)
        outs = [run(*qkv, P) for _ in range(2)]
        found.append([*outs, *torch.autograd.grad(outs[1].square().sum(), qkv)])
    assert counter.frame_count == 1  # another seed compiles nothing
    assert not torch.equal(*found[0][:2])
    for run in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], run, strict=True))


def test_a_gradient_of_torch_func() -> None:
    q, k, v = (t.detach() for t in given())
    torch.manual_seed(1)
    found = torch.func.grad(lambda q: flash(q, k, v, P).square().sum())(q)
    torch.manual_seed(1)
    leaf = q.clone().requires_grad_()
    flash(leaf, k, v, P).square().sum().backward()
    assert torch.equal(found, leaf.grad)  # type: ignore[arg-type]


@pytest.mark.parametrize("p,words", [(1.0, "dropout_p=1"), (-0.1, "dropout_p=-0.1"), (float("nan"), "dropout_p=nan")])
@pytest.mark.parametrize("call", CALLS)
def test_wrong_probabilities(call: Callable, p: float, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call(*given(), p)


@pytest.mark.parametrize("p", [True, "0.1", torch.tensor(0.1), None])
def test_wrong_types(p: Any) -> None:
    with pytest.raises(TypeError, match="dropout_p is a"):
        flash(*given(), p)


def test_explained() -> None:
    q, k, v = given()
    state = torch.get_rng_state()
    assert "dropout 0.1" in str(anyattn.explain(q, k, v, dropout_p=0.1)) and "dropout" not in str(anyattn.explain(q, k, v))
    assert torch.equal(state, torch.get_rng_state())
