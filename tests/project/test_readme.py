"""The README's examples run as they stand."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path

import pytest
import torch

import anyattn

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
EXAMPLES = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", README, flags=re.S | re.M))


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) == README.count("```python")


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch.compile" in EXAMPLES[title] and shutil.which("g++") is None:
        pytest.skip("torch.compile on the CPU needs g++")
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo of torch 2.11 imports the module that a function names
    exec(compile(EXAMPLES[title], f"README.md, {title}", "exec"), module.__dict__)


# ---- what the README says of torch.func

X = torch.randn(3, 2, 2, 20, 8, generator=torch.Generator().manual_seed(0))


def causal(q: torch.Tensor) -> torch.Tensor:
    return anyattn.flex_attention(q, X[1], X[2], mask_mod=anyattn.masks.causal())


def total(q: torch.Tensor) -> torch.Tensor:
    return causal(q).sin().sum()


TRANSFORMS = {
    "grad": lambda: torch.func.grad(total)(X[0]),
    "vjp": lambda: torch.func.vjp(causal, X[0])[1](causal(X[0]).cos())[0],
    "vmap": lambda: torch.func.vmap(causal)(X[0][None]),
    "jvp": lambda: torch.func.jvp(causal, (X[0],), (X[0],)),
    "jacrev": lambda: torch.func.jacrev(causal)(X[0]),
    "jacfwd": lambda: torch.func.jacfwd(causal)(X[0]),
    "hessian": lambda: torch.func.hessian(total)(X[0]),
}


def gradient(q: torch.Tensor, **options: bool) -> torch.Tensor:
    return torch.autograd.grad(total(q), q, **options)[0]


def test_what_works_of_torch_func() -> None:
    """Each name on the side on which the README has it."""
    works, refused = re.search(r"- Over q, k, v and captured tensors, (.*?) work\. (.*?) do not:", README, flags=re.S).groups()  # type: ignore
    works, refused = (re.findall(r"`torch\.func\.(\w+)`", x) for x in (works, refused))
    assert {*works, *refused} == set(TRANSFORMS)
    wanted = gradient(X[0].clone().requires_grad_())
    for name in works:
        assert torch.equal(TRANSFORMS[name](), wanted), name
    for name in refused:
        with pytest.raises((TypeError, NotImplementedError), match=r"fold the mapped dimension into the batch|no forward-mode derivative"):
            TRANSFORMS[name]()


def test_second_derivatives_are_refused() -> None:
    q = X[0].clone().requires_grad_()
    first = gradient(q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention has no second derivative"):
        first.pow(2).sum().backward()
