"""Mutants of the Triton backend still find their place; ``test_triton_mutants_interpreted.py`` shows that they are caught."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import triton_mutants
from tests.mutants.mutant import Mutant, changed, unchanged

KILLERS = Path(__file__).with_name("triton_killers.py")


@pytest.mark.parametrize("name", triton_mutants.MUTANTS)
def test_the_place_is_there_and_the_bug_is_python(name: str) -> None:
    mutant = triton_mutants.MUTANTS[name]
    source = changed(mutant)
    ast.parse(source)
    assert source != unchanged(mutant)
    assert f'"{mutant.killer}":' in KILLERS.read_text()


def test_a_seam_that_moved_is_reported() -> None:
    with pytest.raises(LookupError, match=r"'no_such_name' stands 0 times in is_off"):
        changed(Mutant("moved", "backends.triton.kernels.addressing:is_off", "no_such_name", "0", "full"))


def test_there_are_enough() -> None:
    assert len(triton_mutants.MUTANTS) >= 20
