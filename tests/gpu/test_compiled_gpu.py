"""Compiled graphs on a GPU: a step of a GPT against the formula, operators against their fake kernels, and the layout of results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import anyattn
from anyattn.custom_ops.flash import decode, flash, flash_backward
from anyattn.custom_ops.flex import attend, attend_backward
from tests.support.gpu import judging
from tests.support.gpu.judging import BACKEND, DEVICE
from tests.support.operands import as_its_fake, decode_operands, flash_operands, flex_operands
from tests.support.small_gpt import Sizes, check_compiled_step
from tests.support.strided import EACH, inputs, nesting

pytestmark = [pytest.mark.gpu, judging.where_calls_run]
judging.needs_the_backend()

HALF = torch.bfloat16
B, H, S, D = SHAPE = (2, 8, 320, 64)
CAUSAL = anyattn.mod(lambda b, h, i, j: i >= j)


def made(layouts: tuple[str, str, str], heads_kv: int = 2) -> list[Tensor]:
    return inputs(*layouts, shape=SHAPE, heads_kv=heads_kv, dtype=HALF, device=DEVICE)


def flex(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
    return anyattn.flex_attention(q, k, v, mask_mod=CAUSAL, enable_gqa=True, backend=BACKEND, **options)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True, backend=BACKEND).transpose(1, 2)


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
@pytest.mark.parametrize("attention", [flex, flash_attention])
def test_a_step_of_a_gpt(attention: Any, compiler: str) -> None:
    """16 query heads and 4 of keys and values, split from one projection."""
    sizes = Sizes(head_dim=128, length=512) if DEVICE == "cuda" else Sizes()
    check_compiled_step(attention, compiler, sizes, HALF, DEVICE)


TABLE = torch.linspace(-1, 1, H * 2 * S).view(H, 2 * S)
MASKS = {"exact": lambda b, h, i, j: i >= j, "tiles": lambda b, h, i, j: (i // 64 + j // 64) % 3 != 1}


@pytest.mark.parametrize("name", ["plain", "table", *MASKS])
def test_direct_calls_are_as_eager(name: str) -> None:
    """Inductor's code, with other tensors and lists in each step, and after the lists were written to."""
    torch._dynamo.reset()
    table = TABLE.to(DEVICE)
    score = (lambda s, b, h, i, j: s + table[h, i - j + S]) if name == "table" else None
    call = lambda q, k, v, blocks: anyattn.flex_attention(
        q, k, v, score_mod=score, block_mask=blocks, enable_gqa=True, return_lse=True, backend=BACKEND
    )
    compiled = torch.compile(call, fullgraph=True)
    for _ in range(3):
        blocks = anyattn.create_block_mask(MASKS[name], 1, 1, S, S, device=DEVICE) if name in MASKS else None
        for step in range(4):
            if step == 3 and blocks is not None:  # the same lists, which now show less
                blocks.full_kv_num_blocks.zero_()
            x = made(EACH[0])
            with torch.no_grad():
                for found, wanted in zip(compiled(*x, blocks), call(*x, blocks), strict=True):
                    assert torch.equal(found, wanted)


@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_attend_is_as_its_fake(layouts: tuple[str, str, str]) -> None:
    sink = torch.randn(2 * H, device=DEVICE)[::2]
    for heads_kv in (H, 2):
        args = flex_operands(*made(layouts, heads_kv), sink, wants_max=True, backend=BACKEND)
        out, lse, _ = as_its_fake(attend, args)
        for dout in (torch.randn_like(out), torch.ones((), device=DEVICE, dtype=HALF).expand(out.shape), torch.randn(out.shape).to(out)):
            for wanted in ((True,) * 5, (False, True, False, True, False), (True, False, True, False, True)):
                as_its_fake(attend_backward, (*args[:14], *args[15:], out, lse, dout, torch.ones_like(lse), list(wanted)))


@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_flash_is_as_its_fake(layouts: tuple[str, str, str]) -> None:
    args = flash_operands(*(t.transpose(1, 2) for t in made(layouts)), backend=BACKEND)
    out, lse = as_its_fake(flash, args)
    as_its_fake(flash_backward, (*args, out, lse, torch.randn(B, H, S, D).to(out).transpose(1, 2), None, [True] * 6))


def test_packed_rows_are_as_their_fake() -> None:
    ends = torch.tensor([0, 100, 100, S], dtype=torch.int32, device=DEVICE)
    for x in (torch.randn(S, 3, H, D), torch.randn(3, H, S, D).permute(2, 0, 1, 3)):
        args = flash_operands(*x.to(DEVICE, HALF).unbind(1), ends, ends, None, None, None, backend=BACKEND)
        out, lse = as_its_fake(flash, args)
        as_its_fake(flash_backward, (*args, out, lse, torch.randn_like(out), torch.ones_like(lse), [True] * 6))


# the other one compares bits of two runs, and gradients of captured tensors and of GQA's keys are sums in any order
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("layouts", [("projected",) * 3, ("one batch entry",) * 3], ids="-".join)
def test_opcheck(layouts: tuple[str, str, str]) -> None:
    x = [t.requires_grad_() for t in made(layouts)]
    sink = torch.randn(H, device=DEVICE, requires_grad=True)
    torch.library.opcheck(attend, flex_operands(*x, sink, backend=BACKEND), test_utils=CHECKS)
    x = [t.detach().transpose(1, 2).requires_grad_() for t in x]
    torch.library.opcheck(flash, flash_operands(*x, backend=BACKEND), test_utils=CHECKS)


@pytest.mark.parametrize("is_rotary", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("layout", ["projected", "sliced"])
def test_opcheck_of_decoding(layout: str, is_rotary: bool) -> None:
    """By the backend that decodes there: bits of two runs too."""
    torch.library.opcheck(decode, decode_operands(layout, is_rotary, D, HALF, DEVICE))


@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_results_are_laid_out_as_inputs(layouts: tuple[str, str, str]) -> None:
    """In the first call and in those that make its launch again."""
    for _ in range(3):
        x = [t.requires_grad_() for t in made(layouts)]
        out, lse = flex(*x, return_lse=True)
        assert lse.is_contiguous() and not out._is_view()
        for t, name in zip((out, *torch.autograd.grad(out.sum(), x)), (layouts[0], *layouts), strict=True):
            assert t.permute(nesting(name)).is_contiguous()


def test_fake_tensors_launch_nothing() -> None:
    with FakeTensorMode():
        x = [torch.randn(B, H, S, D, dtype=HALF, device=DEVICE, requires_grad=True) for _ in range(3)]
        blocks = anyattn.create_block_mask(lambda b, h, i, j: i >= j, B, H, S, S, device=DEVICE)
        out = anyattn.flex_attention(*x, block_mask=blocks, backend=BACKEND)
        of_flash = flash_attention(*x)
        merged = anyattn.flash_attn_combine(torch.randn(2, B, S, H, D, device=DEVICE), torch.randn(2, B, S, H, device=DEVICE))
        cache = torch.randn(B, 2 * S, H, D, dtype=HALF, device=DEVICE)
        q, new = x[0].transpose(1, 2)[:, :1].detach(), cache[:, :1].clone()
        step = anyattn.flash_attn_with_kvcache(q, cache, cache.clone(), cache_seqlens=S, k=new, v=new)
        found = (out, *torch.autograd.grad(out.sum(), x), of_flash, *torch.autograd.grad(of_flash.sum(), x), *merged, step)
    assert all(isinstance(t, FakeTensor) and t.device.type == DEVICE for t in found)
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def test_gradients_by_torch_func() -> None:
    x = made(("projected", "transposed", "contiguous"))
    leaves = [t.clone().requires_grad_() for t in x]
    wanted = torch.autograd.grad(flex(*leaves).float().sin().sum(), leaves)
    found = torch.func.grad(lambda *y: flex(*y).float().sin().sum(), argnums=(0, 1, 2))(*x)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).abs().max()) <= 2 * torch.finfo(HALF).eps * float(b.abs().max())
