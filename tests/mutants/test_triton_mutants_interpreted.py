"""Every mutant of the Triton backend is caught by the check that it names, in Triton's interpreter; with no bug all checks pass.

Run by ``tests/backends/triton/test_in_the_interpreter.py`` in a process of its own.
"""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import anyattn.backends
from tests.mutants import triton_mutants
from tests.mutants.triton_killers import KILLERS


@pytest.mark.parametrize("name", KILLERS)
def test_without_a_bug_the_checks_pass(name: str) -> None:
    KILLERS[name]()


@pytest.mark.parametrize("name", triton_mutants.MUTANTS)
def test_killed(name: str, tmp_path: Path) -> None:
    mutant = triton_mutants.MUTANTS[name]
    with triton_mutants.active(name, tmp_path):
        with pytest.raises(AssertionError) as said:
            KILLERS[mutant.killer]()
        module = importlib.import_module(mutant.module)
        assert module.__file__ == str(tmp_path / f"{name}.py"), "the plain backend ran"
    print(name, "said:", str(said.value)[:200])


def test_the_backend_is_whole_again() -> None:
    from anyattn.backends import triton

    assert triton.__file__ is not None and Path(triton.__file__).parent == Path(anyattn.backends.__file__).parent / "triton"
    KILLERS["full"]()
