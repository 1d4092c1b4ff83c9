"""That docs/edge-cases.md speaks of tests that are there and are run."""

from __future__ import annotations

import ast
import re

from tests.backends.triton.test_in_the_interpreter import EDGES, PARTS
from tests.support.processes import ROOT, TESTS

PAGE = ROOT / "docs" / "edge-cases.md"
TRITON = "backends/triton"
FILES = {
    "C": "entry_points/test_edge_cases.py",
    "E": f"{TRITON}/kernels/test_edge_cases_interpreted.py",
    "V": f"{TRITON}/kernels/test_every_variant_interpreted.py",
    "S": f"{TRITON}/kernels/test_sequences_interpreted.py",
    "K": f"{TRITON}/test_launch_keys.py",
    "M": f"{TRITON}/test_memory.py",
    "D": f"{TRITON}/test_decoding_interpreted.py",
    "P": f"{TRITON}/kernels/test_append_rotary_interpreted.py",
    "J": f"{TRITON}/kernels/test_combine_interpreted.py",
    "I": f"{TRITON}/test_batch_invariance_interpreted.py",
}


def rows() -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|\n").split("|")] for line in PAGE.read_text().splitlines() if re.match(r"\| \d", line)]


def names_in(file: str) -> set[str]:
    """Its own, and those of other files that it imports to be run."""
    found: set[str] = set()
    for node in ast.parse((TESTS / file).read_text()).body:
        if isinstance(node, ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
    return found


def test_every_case_has_tests_and_they_are_there() -> None:
    known = {letter: names_in(file) for letter, file in FILES.items()}
    chosen = re.findall(r"test_\w+", EDGES)
    assert [int(row[0].split()[0]) for row in rows()] == list(range(1, 25))
    for _, *cells in rows():
        assert len(cells) == 3
        for cell in cells:
            named = re.findall(r"([A-Z]) (test_\w+)", cell)
            assert named or re.fullmatch("has no tables|takes no block masks|has none", cell), cell
            for letter, name in named:
                assert name in known[letter], f"{FILES[letter]} has no {name}"
                if letter == "C":
                    assert any(word in name for word in chosen), f"{name} is not among what the interpreter runs"
    run = {file for part in PARTS.values() for file in part.files}
    assert {FILES[letter] for letter in "CEVS"} <= run
