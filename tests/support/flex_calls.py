"""Calls of ``flex_attention`` on a test case, with every result by name."""

from __future__ import annotations

import os
from collections.abc import Callable

import torch
from torch import Tensor

import anyattn
from anyattn import oracle
from anyattn.testing import budget
from anyattn.testing.rounding import Noise, later
from tests.support import cases, poison

flex = anyattn.flex_attention


def results(
    case: cases.Case, want: cases.Expected, backward: bool = True, forward_is: Callable[[dict[str, Tensor]], None] | None = None, **options
) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """out, lse and all gradients of the case, computed in poisoned memory; without LSE if ``want`` has none.

    forward_is: called with out and lse before the backward pass, which is not run if it raises.
    """
    leaves = [t.clone().requires_grad_(backward) for t in (want.q, want.k, want.v)]
    sink = None if want.sink is None else want.sink.clone().requires_grad_(backward)
    tensors = tuple(t.clone().requires_grad_(backward) if t.is_floating_point() else t for t in want.tensors)
    mods = cases.VARIANTS[case.variant].mods(tensors, case.shape)
    options |= {"score_mod": mods["score"], "mask_mod": mods["mask"], "sink": sink, "enable_gqa": True}
    with poison.enabled():
        named = {}
        if want.dlse is None:
            named["out"] = flex(*leaves, **options)
        else:
            named["out"], named["lse"] = flex(*leaves, return_lse=True, **options)
        if forward_is is not None:
            forward_is({name: t.detach() for name, t in named.items()})
        if backward:
            loss = (named["out"].double() * want.dout.double()).sum()
            if want.dlse is not None:
                # LSE is -inf, a constant, where nothing is seen: 0 * inf must not enter the sum
                loss = loss + (torch.where(named["lse"].isneginf(), 0.0, named["lse"]).double() * want.dlse.double()).sum()
            loss.backward()
            named |= {"dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
            if sink is not None:
                named["dsink"] = sink.grad
            named |= {f"captured{i}": t.grad for i, t in enumerate(t for t in tensors if t.is_floating_point())}
    return {name: t.detach() for name, t in named.items() if t is not None}


def judge(
    q, k, v, *, score=None, mask=None, sink=None, scale=None, dout=None, captured=(), label="", meant=None, **options
) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """Calls flex_attention on these very tensors (strides and all), forward and backward, and judges every result by the budget.

    score, mask: functions that work on single numbers and on broadcast tensors alike; a block mask in ``options`` replaces ``mask`` in
    the library's call only. captured: the float64 tensors that ``score`` closes over and wants gradients for. meant: the q, k, v that the
    oracle gets instead, without the garbage that must not matter.
    """
    # asked for the output alone, a backend may go another way: torch's does
    goes_two_ways = "ANYATTN_TEST_BACKEND" not in os.environ
    leaves = [t.detach().requires_grad_() for t in (q, k, v)]
    logits = None if sink is None else sink.detach().requires_grad_()
    for t in captured:
        t.requires_grad_().grad = None
    if "block_mask" not in options:
        options["mask_mod"] = mask
    mods = {"score": score, "mask": mask, "sink": sink, "scale": scale}
    rows, *keys = meant or (q, k, v)
    keys = [t.expand(rows.shape[0], *t.shape[1:]) for t in keys]
    names = ["dq", "dk", "dv", *(["dsink"] if sink is not None else []), *(f"captured{i}" for i in range(len(captured)))]
    wanted = [t for t in (*leaves, logits, *captured) if t is not None]
    got: dict[str, Tensor] = {}
    only: dict[str, Tensor] = {}

    def check(name: str, *reference: Tensor | Callable[[], Noise | None]) -> None:
        budget.check(f"{label} {name}", got[name], *reference)
        if name in only:
            budget.check(f"{label} {name} without lse", only[name], *reference)

    with poison.enabled():
        out, lse = flex(*leaves, score_mod=score, sink=logits, scale=scale, enable_gqa=True, return_lse=True, **options)
        got |= {"out": out.detach(), "lse": lse.detach()}
        if goes_two_ways:
            only_out = flex(*leaves, score_mod=score, sink=logits, scale=scale, enable_gqa=True, **options)
            only["out"] = only_out.detach()
        if dout is None:
            dout = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64).to(q)
        want = [f(rows, *keys, **mods) for f in (oracle.attention, oracle.same_dtype)]
        noise = later(rows, *keys, dout, **mods, captured=captured)
        for name in ("out", "lse"):  # where one is wrong the backward pass need not be run
            check(name, *(getattr(t, name) for t in want), noise.of(name))
        got |= zip(names, torch.autograd.grad(out, wanted, dout), strict=True)
        if goes_two_ways:
            only |= zip(names, torch.autograd.grad(only_out, wanted, dout), strict=True)
    back = [f(rows, *keys, dout, **mods, captured=captured) for f in (oracle.gradients, oracle.same_dtype_gradients)]
    for name in names:
        if name.startswith("captured"):
            i = int(name[8:])
            check(name, *(t.captured[i] for t in back), noise.of_captured(i))
            continue
        reference = [getattr(t, name) for t in back]
        if name in ("dk", "dv") and got[name].shape != reference[0].shape:  # a batch of 1 shared by all
            of_all = noise.of(name, lambda t: t.square().sum(0, keepdim=True).sqrt())
            check(name, *(t.sum(0, keepdim=True) for t in reference), of_all)
        else:
            check(name, *reference, noise.of(name))
    return got
