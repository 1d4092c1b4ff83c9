"""The README's examples run as they stand, and what the guide says of torch.func."""

from __future__ import annotations

import re

import pytest
import torch

import anyattn
from tests.support import snippets
from tests.support.processes import ROOT

README = ROOT / "README.md"
GUIDE = (ROOT / "docs" / "guide.md").read_text()
EXAMPLES = snippets.of_page(README)


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) == README.read_text().count("```python") > 0


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: f"line {example.line}")
def test_example(example: snippets.Snippet) -> None:
    if example.is_compiled and not snippets.can_compile():
        pytest.skip("torch.compile on the CPU needs g++")
    snippets.run(example, snippets.module("readme_example").__dict__, f"README.md:{example.line}")


# ---- what the guide says of torch.func

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
    """Each name on the side on which the page has it."""
    works, refused = re.search(r"Over q, k, v and captured tensors, (.*?) work\. (.*?) do not:", GUIDE, flags=re.S).groups()  # type: ignore
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
