"""Tested releases: which versions are newer, and that a newer torch warns once, at a call and not at import."""

from __future__ import annotations

import importlib.metadata
import warnings

import pytest
import torch

import anyattn
from anyattn.tensors import tested_versions
from anyattn.tensors.tested_versions import TESTED, is_newer, range_of
from tests.support.command_line import call


@pytest.mark.parametrize(
    ("version", "is_later"),
    [
        ("2.11.0", False),
        ("2.15.0+cu132", False),
        ("2.15.9", False),
        ("2.16.0.dev20270101+cpu", True),
        ("2.16.0a0+gitabc1234", True),
        ("3.0", True),
    ],
)
def test_a_later_release_is_newer(version: str, is_later: bool) -> None:
    assert is_newer("torch", version) is is_later


def test_a_range_of_one_release_is_named_once() -> None:
    assert range_of("torch") == " to ".join(TESTED["torch"])
    assert range_of("nvidia-cutlass-dsl") == TESTED["nvidia-cutlass-dsl"][0]


def test_this_torch_is_tested() -> None:
    assert not is_newer("torch", torch.__version__)


def test_a_newer_torch_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", "99.0.1")
    tested_versions.warn_of_newer_torch.cache_clear()
    q = torch.randn(1, 1, 3, 8)
    with pytest.warns(UserWarning, match=r"tested with torch 2\.11 to .* finds torch 99\.0\.1.*anyattn doctor"):
        anyattn.flex_attention(q, q, q, scale=0.71)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        anyattn.flex_attention(q[..., :2, :], q, q)


def test_the_doctor_names_the_tested_releases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TESTED, "transformers", ("1.0", "1.1"))
    out = call("doctor")[1]
    assert f"{importlib.metadata.version('torch')} (tested: {range_of('torch')})" in out  # which may lack "+cu132" of torch.__version__
    assert "(newer than tested: 1.0 to 1.1)" in out
    for package in TESTED:
        assert package in out
