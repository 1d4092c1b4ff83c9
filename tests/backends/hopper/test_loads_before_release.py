"""Loads from shared memory that a kernel must have executed when it releases their memory: the check of machine code that judges that.

Every kernel that the tests compile for sm_90a is checked (``cross_compile.cubin_of``).
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.mutants import hopper_mutants, hopper_role_mutants
from tests.support.hopper.loads_before_release import Late, late_loads
from tests.support.processes import python

NONE = 7  # no scoreboard
HIDDEN = [name for name, mutant in hopper_role_mutants.MUTANTS.items() if mutant.killer == "machine code"]


def line(text: str, scoreboard: int = NONE, waits: tuple[int, ...] = ()) -> str:
    """An instruction, and its encoding as far as it says which scoreboard its result has and which ones it waits for."""
    control = scoreboard << 5 | NONE << 8 | sum(1 << 11 + number for number in waits)
    return f"{text} ; /* 0x0000000000000000 */\n/* 0x{control << 41:016x} */"


def kernel(*lines: str) -> str:
    """nvdisasm's text, with addresses before what are no labels and no lines of the source."""
    return "\n".join(text if text[0] in "./" else f"/*{16 * i:04x}*/ {text}" for i, text in enumerate((*lines, line("EXIT"))))


LOAD, BEFORE = line("LDS.64 R4, [R2+0x180]", 0), line("LDS.64 R8, [R2+0x160]")
TILE = line("LDSM.16.M88.4 R4, [R2]", 0)
USE, OTHER = line("FADD R6, R4, R5", waits=(0,)), line("FADD R6, R10, R11", waits=(1, 5))
LATER = line("FADD R12, R8, R9", waits=(0,))
RELEASE = line("@!P0 SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x48], RZ")
FENCE = (line("MEMBAR.ALL.CTA"), line("FENCE.VIEW.ASYNC.S"))
SKIP, AGAIN = line("@P1 BRA `(.L_x_1)"), line("@P1 BRA `(.L_x_0)")


@pytest.mark.parametrize(
    ("lines", "is_late"),
    [
        ((LOAD, RELEASE, USE), True),
        ((TILE, RELEASE, USE), True),
        ((LOAD, USE, RELEASE, USE), False),
        ((LOAD, OTHER, RELEASE, USE), True),
        ((LOAD, *FENCE, RELEASE, USE), False),
        ((*FENCE, LOAD, RELEASE, USE), True),
        ((LOAD, line("@P2 MEMBAR.ALL.CTA"), RELEASE, USE), True),
        ((LOAD, line("SYNCS.ARRIVE.TRANS64.A1T0 RZ, [UR4+0x48], RZ", waits=(0,)), USE), False),
        ((LOAD, line("DEPBAR.LE SB0, 0x0"), RELEASE, USE), False),
        ((LOAD, line("DEPBAR.LE SB0, 0x1"), RELEASE, USE), True),
        ((LOAD, line("BAR.ARV 0xb, 0x100"), USE), False),
        # the load without a scoreboard ends before the one that follows
        ((BEFORE, RELEASE, LATER), True),
        ((BEFORE, LOAD, USE, RELEASE, LATER), False),
        ((BEFORE, LOAD, OTHER, RELEASE, LATER), True),
        ((BEFORE, line("@P2 LDS.64 R4, [R2+0x180]", 0), USE, RELEASE, LATER), True),
        # numbers that nothing reads afterwards
        ((LOAD, RELEASE, LATER), False),
        ((TILE, RELEASE, line("FADD R4, R6, R7", waits=(0,))), True),
        ((LOAD, RELEASE, line("CS2R R4, SRZ", waits=(0,)), USE), False),
        ((LOAD, RELEASE, line("MOV R4, R2", waits=(0,)), USE), True),
        ((LOAD, RELEASE, line("@P2 CS2R R4, SRZ", waits=(0,)), USE), True),
        ((LOAD, RELEASE, line("HGMMA.64x16x16.F32.BF16 R24, R4, gdesc[UR8], R24, gsb0", waits=(0,))), True),
        ((LOAD, RELEASE, line("HGMMA.64x16x16.F32.BF16 R24, gdesc[UR8], R24, gsb0"), LATER), False),
        # paths
        ((LOAD, SKIP, USE, ".L_x_1:", RELEASE, USE), True),
        ((LOAD, SKIP, USE, RELEASE, USE, line("EXIT"), ".L_x_1:", USE), False),
        ((USE, ".L_x_0:", RELEASE, USE, LOAD, AGAIN, USE), True),
        ((USE, ".L_x_0:", RELEASE, LOAD, USE, AGAIN), False),
    ],
)
def test_which_loads_may_be_late(lines: tuple[str, ...], is_late: bool) -> None:
    assert bool(late_loads(kernel(*lines))) is is_late


def test_what_is_late_is_named_by_its_lines_and_the_board_is_no_matter(tmp_path: Path) -> None:
    source = tmp_path / "role.py"
    source.write_text("fact = board[1][state.index]\nrow = delta[state.index]\npipe.consumer_release(state)\n")
    first, second, third = (f'//## File "{source}", line {n}' for n in (1, 2, 3))
    assert late_loads(kernel(first, LOAD, third, RELEASE, USE)) == []
    assert late_loads(kernel(first, LOAD, second, TILE, third, RELEASE, USE)) == [Late((str(source), 2), (str(source), 3))]
    (late,) = late_loads(kernel(LOAD, third, RELEASE, USE))
    assert late.load == 0 and str(late).startswith(f"{source}:3 releases what /*0000*/ may not have loaded yet")


@pytest.mark.skipif(importlib.util.find_spec("cutlass") is None, reason="needs nvidia-cutlass-dsl")
@pytest.mark.parametrize("name", HIDDEN)
def test_a_kernel_that_does_not_wait_is_found(name: str, tmp_path: Path) -> None:
    copy = hopper_mutants.planted(hopper_role_mutants.MUTANTS[name], tmp_path)
    case = "dk 512: causal"
    done = python("-m", "tests.support.hopper.cross_compile_wide", str(tmp_path / "out"), case, at=copy, CUTE_DSL_ARCH="sm_90a")
    assert done.returncode != 0 and f"{copy}/anyattn/backends/hopper/kernel/backward/scores.py" in done.stderr, done.stderr[-3000:]
    assert "may not have loaded yet" in done.stderr
