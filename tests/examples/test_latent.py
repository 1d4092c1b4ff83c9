"""The layer of examples/latent.py: its three ways agree, and the comparison notices one that differs."""

from __future__ import annotations

from types import ModuleType

import pytest

from tests.support.examples import example


@pytest.fixture(scope="module")
def latent() -> ModuleType:
    return example("latent")


def test_the_command(latent: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    latent.main()
    shown = capsys.readouterr().out
    assert shown.count("from materialised") == 3 and "The cache holds 40 numbers a token" in shown


@pytest.mark.parametrize("way", ["absorbed", "paged"])
def test_a_way_that_differs_is_noticed(way: str, latent: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    real = getattr(latent.LatentAttention, way)
    monkeypatch.setattr(latent.LatentAttention, way, lambda self, x: real(self, x) * (1 + 1e-9))
    with pytest.raises(SystemExit, match=way):
        latent.main()
