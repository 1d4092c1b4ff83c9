"""The Triton backend's planted bugs still find their place; that they are caught is shown in ``tests/triton/test_interpreted.py``."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import triton_mutants
from tests.mutants.cpu_mutants import Mutant

KILLERS = Path(__file__).parent.parent / "triton" / "killers.py"


@pytest.mark.parametrize("name", triton_mutants.MUTANTS)
def test_the_place_is_there_and_the_bug_is_python(name: str) -> None:
    mutant = triton_mutants.MUTANTS[name]
    ast.parse(triton_mutants.changed(mutant))
    assert mutant.old != mutant.new and f'"{mutant.killer}":' in KILLERS.read_text()


def test_a_seam_that_moved_is_reported() -> None:
    with pytest.raises(LookupError, match=r"'no such text' stands 0 times in places.py"):
        triton_mutants.changed(Mutant("moved", "places.py", "no such text", "", "full"))


def test_there_are_enough() -> None:
    assert len(triton_mutants.MUTANTS) >= 20
