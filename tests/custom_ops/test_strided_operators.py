"""The operators return what their fake kernels say, whatever the inputs' strides: a compiled graph is built on that.

On the backend that ``tests/conftest.py`` names, else torch's.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import anyattn
from anyattn.custom_ops.flash import decode, flash, flash_backward
from anyattn.custom_ops.flex import attend, attend_backward
from tests.support.covering import few
from tests.support.operands import as_its_fake, decode_operands, flash_operands, flex_operands
from tests.support.small_gpt import Sizes, check_compiled_step
from tests.support.strided import EACH, EXPANDED, LAYOUTS, inputs

B, H, S, D = 2, 4, 24, 8


@pytest.mark.covering(1)
@pytest.mark.parametrize("wanted", [(True,) * 4, (False, True, False, True), (True, False, True, False)], ids=["all", "dk", "dq and dv"])
@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_attend(layouts: tuple[str, str, str], wanted: tuple[bool, ...]) -> None:
    sink = torch.randn(2 * H)[::2]
    for heads_kv in (H, 2):
        x = inputs(*layouts, heads_kv=heads_kv)
        args = flex_operands(*x, sink, wants_max=wanted[0])
        out, lse, _ = as_its_fake(attend, args)
        slopes = len(args[6])
        # as a graph hands it on: laid out as out, as a loss has it (expanded), or anyhow
        for dout in (torch.randn_like(out), torch.ones(()).expand(out.shape), torch.randn(out.shape)):
            dlse = torch.randn(S, B, H).permute(1, 2, 0)
            as_its_fake(attend_backward, (*args[:14], *args[15:], out, lse, dout, dlse, [*wanted, *([wanted[0]] * slopes)]))


@pytest.mark.parametrize("layouts", EACH, ids="-".join)
def test_flash(layouts: tuple[str, str, str]) -> None:
    for splits in (1, 2):
        x = [t.transpose(1, 2) for t in inputs(*layouts, heads_kv=2)]
        args = flash_operands(*x, splits=splits)
        out, lse = as_its_fake(flash, args)
        dout = torch.randn(B, H, S, D).transpose(1, 2)
        as_its_fake(flash_backward, (*args, out, lse, dout, None, [True] * 6))
        as_its_fake(flash_backward, (*args, out, lse, dout, torch.ones_like(lse), [True, False, True, True, False, False]))


def packed(name: str) -> list[Tensor]:
    x = torch.randn(40, 3, H, D)
    if name == "projected":
        return list(x.unbind(1))
    return list(x.permute(1, 2, 0, 3).contiguous().transpose(1, 2)) if name == "heads first" else [t.contiguous() for t in x.unbind(1)]


@pytest.mark.parametrize("name", ["contiguous", "projected", "heads first"])
def test_flash_of_packed_rows(name: str) -> None:
    ends = torch.tensor([0, 9, 9, 40], dtype=torch.int32)
    for used in (None, torch.tensor([5, 0, 30])):
        args = flash_operands(*packed(name), ends, ends, used, None, None)
        out, lse = as_its_fake(flash, args)
        as_its_fake(flash_backward, (*args, out, lse, torch.randn_like(out), torch.ones_like(lse), [True] * 6))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (0, 2, 1, 3), (2, 0, 1, 3)], ids=str)
def test_flash_of_pages(order: tuple[int, ...]) -> None:
    back = [order.index(i) for i in range(4)]
    for heads in (1, 2):
        pools = [torch.randn(10, 4, heads, D).permute(order).contiguous().permute(back) for _ in range(2)]
        args = flash_operands(torch.randn(B, S, H, D), *pools, None, None, None, torch.tensor([20, 7]), torch.randperm(10).view(B, 5))
        out, lse = as_its_fake(flash, args)
        as_its_fake(flash_backward, (*args, out, lse, torch.randn_like(out), None, [True] * 6))


@pytest.mark.covering(1)
@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("name", [*LAYOUTS, *EXPANDED])
def test_decode(name: str, turned: bool) -> None:
    as_its_fake(decode, decode_operands(name, turned))


CHECKED = [("projected",) * 3, ("one batch entry",) * 3, ("sliced", "one head", "transposed")]


@pytest.mark.parametrize("layouts", few(CHECKED, CHECKED[2]), ids="-".join)
def test_opcheck(layouts: tuple[str, str, str]) -> None:
    x = [t.requires_grad_() for t in inputs(*layouts, heads_kv=2)]
    torch.library.opcheck(attend, flex_operands(*x, torch.randn(H, requires_grad=True)))
    torch.library.opcheck(flash, flash_operands(*(t.detach().transpose(1, 2).requires_grad_() for t in x)))


@pytest.mark.parametrize("turned", [False, True], ids=["plain", "rotary"])
@pytest.mark.parametrize("name", ["projected", "sliced"])
def test_opcheck_of_decoding(name: str, turned: bool) -> None:
    torch.library.opcheck(decode, decode_operands(name, turned))


# ---- graphs


def flex(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyattn.flex_attention(q, k, v, mask_mod=CAUSAL, enable_gqa=True)


def flash_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return anyattn.flash_attn_func(*(t.transpose(1, 2) for t in (q, k, v)), causal=True).transpose(1, 2)


CAUSAL = anyattn.mod(lambda b, h, i, j: i >= j)


def both(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (flex(q, k, v) + flash_attention(q, k, v)) / 2


@pytest.mark.parametrize(
    ("attention", "compiler", "sizes"),
    [(flex, "aot_eager", Sizes()), (flash_attention, "aot_eager", Sizes()), (both, "inductor", Sizes(length=40, layers=1))],
    ids=["flex-aot_eager", "flash_attention-aot_eager", "both-inductor"],
)
def test_a_compiled_step_of_a_gpt(attention: Callable[..., Tensor], compiler: str, sizes: Sizes) -> None:
    check_compiled_step(attention, compiler, sizes)


@pytest.mark.parametrize("layout", ["projected", "one batch entry", "sequence first"])
def test_a_graph_of_sizes_that_change(layout: str) -> None:
    torch._dynamo.reset()
    call = torch.compile(flex, fullgraph=True, backend="aot_eager", dynamic=True)
    for length in (24, 40):
        found = []
        for f in (flex, call):
            x = [t.requires_grad_() for t in inputs(layout, layout, layout, shape=(2, 4, length, 8), heads_kv=2)]
            out = f(*x)
            found.append([out, *torch.autograd.grad(out.sin().sum(), x)])
        assert all(a.stride() == b.stride() and torch.equal(a, b) for a, b in zip(*found, strict=True))
