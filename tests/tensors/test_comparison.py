"""Which tensors are alike."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from anyattn.tensors.comparison import comparison

X, Y = torch.zeros(2, 3), torch.zeros(2, 3, requires_grad=True)
UNLIKE: dict[str, Tensor] = {
    "shape": torch.zeros(2, 4),
    "strides": torch.zeros(3, 2).T,
    "dtype": torch.zeros(2, 3, dtype=torch.float64),
    "device": X.to("meta"),
    "gradient": Y,
    "class": torch.nn.Parameter(X, requires_grad=False),
    "sign": torch.zeros(2, 3, dtype=torch.complex64).conj().imag,
}


@pytest.mark.parametrize("name", UNLIKE)
def test_tensors_differ_in(name: str) -> None:
    are_alike = comparison((X, Y))
    assert are_alike(X + 1, Y) and are_alike(X, Y.detach().requires_grad_())
    assert not are_alike(UNLIKE[name], Y)
    assert not comparison((UNLIKE[name], X))(X, X.clone())


def test_what_is_no_tensor_or_comes_twice_is_alike_to_none() -> None:
    are_alike = comparison((X, X.clone()))
    assert are_alike(X, X.clone()) and not are_alike(X, X) and not are_alike(None, X) and not are_alike(3, X)


def test_without_dynamos_comparison_none_are_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._dynamo.guards, "TensorGuards")
    assert not comparison((X, Y))(X, Y)
