"""The operator of ``AuxRequest``'s reductions: in compiled and exported graphs, under dispatch modes and ``torch.func``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import anyattn
from anyattn import AuxRequest

INDICES = torch.tensor([0, 2, -1]).expand(1, 2, 5, 3)
BIAS = torch.linspace(-1, 1, 4)


def attended(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, indices: Tensor) -> tuple[Tensor, anyattn.AuxOutput]:
    request = AuxRequest(lse=True, key_sums=True, block_sums=(16, 16), block_max=(8, 16), listed_sums=(indices, (16, 16)), last_queries=9)
    causal = lambda b, h, i, j: i >= j
    return anyattn.flex_attention(
        q, k, v, lambda s, b, h, i, j: s + bias[h] * i, mask_mod=causal, enable_gqa=True, return_aux=request
    )  # type: ignore[no-any-return]  # fmt: skip


def operands() -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(1, 4, 70, 16, generator=g), *torch.randn(2, 1, 2, 70, 16, generator=g)
    return q, k, v, BIAS.clone(), INDICES.clone()


def same(got: tuple[Tensor, Any], wanted: tuple[Tensor, Any]) -> None:
    for a, b in zip((got[0], *got[1]), (wanted[0], *wanted[1]), strict=True):
        assert (a is None) is (b is None)
        if a is not None:
            assert torch.equal(a, b)


def test_compiled_calls_give_the_eager_results_and_gradients() -> None:
    compiled = torch.compile(attended, fullgraph=True)
    grads = []
    for f in (attended, compiled):
        given = operands()
        leaves = [t.requires_grad_() for t in given[:4]]
        out, aux = f(*given)
        assert not aux.key_sums.requires_grad and not aux.block_max.requires_grad
        (out.sum() + aux.lse.sum()).backward()
        grads.append([t.grad for t in leaves])
        same((out.detach(), [None if t is None else t.detach() for t in aux]), attended(*operands()))
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)


def test_compiled_calls_with_block_masks() -> None:
    mask = anyattn.create_block_mask(lambda b, h, i, j: (i - j).abs() < 20, None, None, 70, 70, device="cpu", BLOCK_SIZE=16)

    def f(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return anyattn.flex_attention(q, k, v, block_mask=mask, enable_gqa=True, return_aux=AuxRequest(key_sums=True, block_max=(16, 16)))

    given = operands()[:3]
    same(torch.compile(f, fullgraph=True)(*given), f(*given))


def test_exported_programs_hold_the_reductions() -> None:
    class Model(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            out, aux = anyattn.flex_attention(q, k, v, enable_gqa=True, return_aux=AuxRequest(block_sums=(16, 16)))
            return out, aux.block_sums

    given = operands()[:3]
    exported = torch.export.export(Model(), given).module()
    assert all(map(torch.equal, exported(*given), Model()(*given)))


def test_dispatch_modes_and_fake_tensors() -> None:
    wanted = attended(*operands())
    with FlopCounterMode(display=False):
        same(attended(*operands()), wanted)
    given = operands()
    with torch._subclasses.FakeTensorMode() as mode:
        _, aux = attended(*(mode.from_tensor(t) for t in given))
    assert [None if t is None else t.shape for t in aux] == [None if t is None else t.shape for t in wanted[1]]


def test_func_grad_of_the_output_beside_reductions() -> None:
    q, *others = operands()
    loss = lambda q: (lambda out, aux: (out.square().sum(), aux.key_sums))(*attended(q, *others))
    grad, sums = torch.func.grad(loss, has_aux=True)(q)
    leaf = q.clone().requires_grad_()
    out, aux = attended(leaf, *others)
    out.square().sum().backward()
    assert torch.equal(grad, leaf.grad) and torch.equal(sums, aux.key_sums)
