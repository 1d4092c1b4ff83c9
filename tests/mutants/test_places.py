"""Mutants of GPU kernels still find their place, and name a check that exists.

That they are caught is shown on a GPU (``tests/gpu/test_mutants_gpu.py``), in Triton's interpreter (``test_triton_mutants_interpreted.py``)
and by the simulated thread blocks of ``tests/backends/hopper``.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.backends.hopper import test_backward_packed as packed
from tests.backends.hopper import test_backward_roles as roles
from tests.mutants import hopper_mutants, hopper_role_mutants, triton_mutants
from tests.mutants.mutant import Mutant, changed, package, unchanged

HERE = Path(__file__).parent
CHECKS = {
    "hopper": (HERE / "hopper_killers.py").read_text(),
    "triton": (HERE / "triton_killers.py").read_text(),
    "role": " ".join(
        f'"{name}":'
        for name in (
            "schedules",
            "wide schedules",
            "wide backward schedules",
            "skipping schedules",
            "schedules in order",
            "machine code",
            *roles.CASES,
            *roles.CAPTURED,
            *(f"packed: {name}" for name in packed.CASES),
        )
    ),
}
TABLES = {"hopper": hopper_mutants.MUTANTS, "triton": triton_mutants.MUTANTS, "role": hopper_role_mutants.MUTANTS}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, table in TABLES.items() for name in table])
def test_the_place_is_there_and_the_bug_is_python(kind: str, name: str) -> None:
    mutant = TABLES[kind][name]
    source = changed(mutant)
    ast.parse(source)
    assert source != unchanged(mutant) and f'"{mutant.killer}":' in CHECKS[kind]


def test_a_copy_has_one_bug(tmp_path: Path) -> None:
    folder = hopper_mutants.planted(hopper_mutants.MUTANTS["v_not_wiped"], tmp_path)
    differ = [
        p.relative_to(folder / "anyattn").as_posix()
        for p in (folder / "anyattn").rglob("*.py")
        if p.read_text() != (package() / p.relative_to(folder / "anyattn")).read_text()
    ]
    assert differ == ["backends/hopper/kernel/mma.py"]


def test_a_seam_that_moved_is_reported() -> None:
    with pytest.raises(LookupError, match=r"mutant moved of .*: 'no_such_name' stands 0 times in is_off"):
        changed(Mutant("moved", "backends.triton.kernels.addressing:is_off", "no_such_name", "0", "full"))
