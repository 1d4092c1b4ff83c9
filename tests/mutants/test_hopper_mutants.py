"""Mutants of the Hopper backend still find their place; that they are caught is for a GPU (tests/gpu/test_mutants_gpu.py)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import hopper_mutants
from tests.mutants.mutant import Mutant, changed, package, unchanged

KILLERS = Path(__file__).with_name("hopper_killers.py")


@pytest.mark.parametrize("name", hopper_mutants.MUTANTS)
def test_the_place_is_there_and_the_bug_is_python(name: str) -> None:
    mutant = hopper_mutants.MUTANTS[name]
    source = changed(mutant)
    ast.parse(source)
    assert source != unchanged(mutant)


def test_a_copy_has_one_bug(tmp_path: Path) -> None:
    folder = hopper_mutants.planted("v_not_wiped", tmp_path)
    differ = [
        p.relative_to(folder / "anyattn").as_posix()
        for p in (folder / "anyattn").rglob("*.py")
        if p.read_text() != (package() / p.relative_to(folder / "anyattn")).read_text()
    ]
    assert differ == ["backends/hopper/kernel/mma.py"]


def test_a_seam_that_moved_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    moved = Mutant("moved", "backends.hopper.kernel.producer:Loads._page", "no_such_name", "0", "full")
    monkeypatch.setitem(hopper_mutants.MUTANTS, "moved", moved)
    with pytest.raises(LookupError, match=r"'no_such_name' stands 0 times in Loads._page"):
        hopper_mutants.planted("moved", tmp_path)


def test_there_are_enough_and_each_names_a_check() -> None:
    source = KILLERS.read_text()
    assert len(hopper_mutants.MUTANTS) >= 20
    assert all(f'"{m.killer}":' in source for m in hopper_mutants.MUTANTS.values())
