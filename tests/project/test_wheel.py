"""The wheel holds what users run: no mutants, no patches of Triton's interpreter, no tests."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.processes import ROOT

wheel = pytest.importorskip("hatchling.builders.wheel", reason="needs hatchling, of the dev extra")
PATCHES = re.compile(r"triton\.runtime import interpreter|triton\.runtime\.interpreter|InterpreterBuilder")


def files() -> dict[str, str]:
    """Where each file of the wheel will be -> where it is."""
    return {file.distribution_path: file.path for file in wheel.WheelBuilder(str(ROOT)).recurse_included_files()}


def test_it_is_the_package() -> None:
    found = files()
    assert {name.split("/")[0] for name in found} == {"anyattn"}
    assert {"anyattn/__init__.py", "anyattn/py.typed", "anyattn/testing/budget.py", "anyattn/cli/__init__.py"} <= set(found)
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "anyattn").rglob("*.py")}
    assert {name for name in found if name.endswith(".py")} == sources


def test_no_mutant_and_no_patch_of_the_interpreter() -> None:
    found = files()
    assert not [name for name in found if "mutant" in name or "killers" in name]
    for name, path in found.items():
        source = Path(path).read_text(encoding="utf-8") if name.endswith(".py") else ""
        assert not PATCHES.search(source), f"{name} reaches into Triton's interpreter"
        assert not re.search(r"^\s*(from|import) tests\b", source, re.M), f"{name} imports tests"
