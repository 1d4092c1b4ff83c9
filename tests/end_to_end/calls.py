"""How the tests of this folder call ``flex_attention`` on a case and gather every result by name."""

from __future__ import annotations

import torch
from torch import Tensor

import anyattn
from anyattn.testing import cases, poison

flex = anyattn.flex_attention


def results(case: cases.Case, want: cases.Expected, backward: bool = True, **options) -> dict[str, Tensor]:  # type: ignore[no-untyped-def]
    """out, lse and all gradients of the case, computed in poisoned memory."""
    leaves = [t.clone().requires_grad_(backward) for t in (want.q, want.k, want.v)]
    sink = None if want.sink is None else want.sink.clone().requires_grad_(backward)
    tensors = tuple(t.clone().requires_grad_(backward) if t.is_floating_point() else t for t in want.tensors)
    mods = cases.VARIANTS[case.variant].mods(tensors, case.shape)
    with poison.enabled():
        out, lse = flex(
            *leaves, score_mod=mods["score"], mask_mod=mods["mask"], sink=sink, enable_gqa=True, return_lse=True, **options
        )
        named = {"out": out, "lse": lse}
        if backward:
            # LSE is -inf, a constant, where nothing is seen: 0 * inf must not enter the sum
            loss = (out.double() * want.dout.double()).sum() + (torch.where(lse.isneginf(), 0.0, lse).double() * want.dlse.double()).sum()
            loss.backward()
            named |= {"dq": leaves[0].grad, "dk": leaves[1].grad, "dv": leaves[2].grad}
            if sink is not None:
                named["dsink"] = sink.grad
            floats = [t for t in tensors if t.is_floating_point()]
            named |= {f"captured{i}": t.grad for i, t in enumerate(floats)}
    return {name: t.detach() for name, t in named.items() if t is not None}
