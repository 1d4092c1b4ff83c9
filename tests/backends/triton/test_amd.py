"""The kernels compiled for AMD's GPUs, of which none has run them: nothing in them is NVIDIA's alone, and they fit."""

from __future__ import annotations

import importlib.util
from unittest import mock

import pytest
import torch

from anyattn import hardware, planner
from tests.support.covering import few

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
if importlib.util.find_spec("triton") is not None:
    from tests.support.triton import ahead

# capabilities as torch has them: that of the first is Hopper's
GPUS = {"gfx90a": (9, 0), "gfx942": (9, 4), "gfx1100": (11, 0)}
BIAS, CAP = torch.zeros(4, requires_grad=True), 30.0
CALLS = {
    "causal": (None, lambda b, h, q, k: q >= k, torch.bfloat16, 64),
    "lists, capped": (lambda s, b, h, q, k: CAP * torch.tanh(s / CAP) + BIAS[h], lambda b, h, q, k: (q + k) % 3 != 0, torch.float16, 128),
    "float32": (lambda s, b, h, q, k: s / (1 + BIAS[h] * (q - k)), lambda b, h, q, k: q - k < 100, torch.float32, 72),
}


PAIRS = [
    pytest.param(*pair) for pair in (("gfx90a", "causal"), ("gfx90a", "lists, capped"), ("gfx942", "float32"), ("gfx1100", "lists, capped"))
]


@pytest.mark.parametrize(("gpu", "name"), few(PAIRS, PAIRS[0], PAIRS[3]))
def test_compiles(gpu: str, name: str) -> None:
    score, mask, dtype, dim = CALLS[name]
    problem = ahead.problem_of(score, mask, dim=dim, dtype=dtype, has_grad=True)
    with ahead.as_amd():
        made = [*ahead.launches(problem, GPUS[gpu]), *ahead.launches(problem, GPUS[gpu], backward=True)]
    assert len(made) == 4
    for launch in made:
        kernel = ahead.compiled(launch, gpu)
        assert kernel.asm["hsaco"] and kernel.metadata.shared <= 64 << 10, launch.kernel


def test_what_nvidia_has_is_in_no_text() -> None:
    """The check of ``test_compiles`` by its words: the same call for NVIDIA's GPUs has instructions of theirs."""
    score, mask, dtype, dim = CALLS["lists, capped"]
    problem = ahead.problem_of(score, mask, dim=dim, dtype=dtype)
    with ahead.as_amd():
        (amd,) = ahead.launches(problem, (9, 0))
    (nvidia,) = ahead.launches(problem, (9, 0))
    assert "_nvidia(" in nvidia.kernel.src + nvidia.kernel.fn.__globals__["score_value"].src
    assert "_nvidia(" not in amd.kernel.src + amd.kernel.fn.__globals__["score_value"].src


def test_the_hopper_kernel_is_not_for_them() -> None:
    """An MI200's capability is 9.0 too."""
    machine = hardware.Hardware("cuda", "AMD Instinct MI210", 0, frozenset(), (9, 0), 104)
    planner._reason_against_hopper.cache_clear()
    try:
        with ahead.as_amd(), mock.patch.object(importlib.util, "find_spec", lambda name: object()):
            assert "NVIDIA" in str(planner._reason_against_hopper(machine)) and planner._reason_against_triton(machine) is None
    finally:
        planner._reason_against_hopper.cache_clear()
