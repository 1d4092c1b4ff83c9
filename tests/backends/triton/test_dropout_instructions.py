"""What dropout adds to the Triton kernels' loops, compiled for an H100: instructions for a pair, and no exchange between threads."""

from __future__ import annotations

import importlib.util
from typing import NamedTuple

import pytest
import torch

import anyattn
from tests.support.covering import few

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


class Loop(NamedTuple):
    """instructions: of the loop over full tiles, for each pair of a thread. exchanges: of values between threads, in the whole kernel."""

    instructions: float
    exchanges: int


def loops_of(dim: int, dropout_p: float) -> dict[str, Loop]:
    from tests.support.triton import ahead

    q, k, v = (torch.zeros(1, 4, 512, dim, dtype=torch.bfloat16).requires_grad_() for _ in range(3))
    with ahead.on((9, 0)) as launched:
        out = anyattn.flex_attention(q, k, v, dropout_p=dropout_p, backend="triton")
        torch.autograd.grad(out, (q, k, v), torch.zeros_like(out))
    found = {}
    for launch in launched:
        name = next((n for n in ("forward", "dq", "dkdv") if f"{n}_tile" in launch.kernel.fn.__code__.co_filename), None)
        if name is None:
            continue
        kernel, options = ahead.compiled(launch, (9, 0)), launch.options
        pairs = options["TILE_M"] * options["TILE_N"] / (32 * options["num_warps"])
        loops = [ops for ops in ahead.machine_loops(kernel.asm["cubin"]) if any("MMA" in op for op in ops)]
        found[name] = Loop(min(len(ops) for ops in loops) / pairs, kernel.asm["ttgir"].count("ttg.convert_layout"))
    return found


@pytest.mark.parametrize("dim", few((64, 128), 64))
def test_little_is_added_for_a_pair(dim: int) -> None:
    """A word decides for four pairs. A thread that computed one for each pair, as in tiles of packed heads, would take 12 more instructions
    for a pair in the forward pass, 13 for dq and 24 for dk and dv."""
    plain, dropped = loops_of(dim, 0.0), loops_of(dim, 0.1)
    for name, most in {"forward": 3.1, "dq": 4.1, "dkdv": 6}.items():
        print(name, plain[name], dropped[name])
        assert dropped[name].instructions - plain[name].instructions <= most, name
        assert dropped[name].exchanges == plain[name].exchanges, name
