"""Programs that import FlashAttention's modules, unedited: their results on anyattn against those by definition in float64."""

from __future__ import annotations

import pytest
import torch

import anyattn
from anyattn.testing import budget
from tests.support import plain_flash
from tests.support.flash_programs import PROGRAMS, results


@pytest.mark.parametrize("program", PROGRAMS)
def test_eager(program: str) -> None:
    check(program)


@pytest.mark.parametrize("program", ["points", "serving", pytest.param("encoder", marks=pytest.mark.slow)])
def test_compiled(program: str) -> None:
    torch._dynamo.reset()
    check(program, lambda f: torch.compile(f, backend="aot_eager", fullgraph=program != "serving"))


def check(program: str, compiled=lambda f: f) -> None:
    with plain_flash.provided():
        wanted, plain = (results(program, dtype) for dtype in (torch.float64, torch.float32))
    before = anyattn.replaced()
    with anyattn.replace_flash_attention():
        found = results(program, torch.float32, compiled)
    after = anyattn.replaced()
    assert after.taken > before.taken and after.refused == before.refused
    assert found.keys() == wanted.keys()
    for name, got in found.items():
        budget.check(f"{program} {name}", got.flatten()[None], wanted[name].flatten()[None], plain[name].flatten()[None])
