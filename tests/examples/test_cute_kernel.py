"""The example for users of CuTe compiles for Hopper where there is no GPU."""

import importlib.util

import pytest
import torch

from tests.support.examples import example


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
def test_it_compiles_and_says_so(capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    example("cute_kernel").main()
    said = capsys.readouterr().out
    assert "compiled cute_kernel.py's kernel for sm_90a" in said and "no Hopper GPU" in said
