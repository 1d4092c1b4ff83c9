"""The Triton kernels by Triton's interpreter, on a CPU: every variant, the tests of all front doors, and planted bugs.

The interpreter is chosen when Triton is imported, so each part gets a process of its own; there the tests of other folders, which name no
backend, run on this one (``tests/conftest.py``).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.limits import HANG

pytestmark = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")
TESTS = Path(__file__).resolve().parent.parent


class Part(NamedTuple):
    """files: below tests/. chosen: pytest's ``-k``. tiles: of calls that name none. fills: memory holds garbage first (not where a test
    reserves gigabytes that it never touches)."""

    files: str
    chosen: str = ""
    tiles: str = "32x16"
    fills: bool = True


# of the edge cases those that are small enough; the others, at a smaller size, are among the variants
EDGES = """test_01_everything or test_02 or (test_03 and float32) or test_04_window_of or test_04_an_empty or test_05 or test_06_expanded
    or test_06_gradients or test_06_dimensions or test_06_one or test_09_a_mask or test_09_lists or test_10 or test_11
    or (test_13 and float32-32) or test_16 or test_17 or test_18_a_new or test_gradient_through or test_only_the"""
PARTS = {
    "mutants": Part("triton/interpreted_mutants.py"),
    "documents": Part("triton/interpreted_documents.py"),
    "sequences": Part("triton/interpreted_sequences.py"),
    "variants": Part("triton/interpreted_variants.py", "test_variant"),
    "more of variants": Part("triton/interpreted_variants.py", "not test_variant"),
    "edges": Part("triton/interpreted_edges.py"),
    "exact sums": Part("triton/interpreted_exact.py"),
    "frozen": Part("triton/interpreted_frozen.py"),
    "copies": Part("triton/interpreted_copies.py"),
    "strides": Part("test_strides.py", "(test_flex and score_mod) or remembered or packed or pages or decoding"),
    "operators": Part("test_strided_operators.py", "(test_attend and all) or pages or packed or decode or (gpt and flex and aot_eager)"),
    "operations": Part("end_to_end/test_operations.py", "test_float32 or (test_rows_of_64 and float32)"),
    "edge cases": Part("end_to_end/test_edge_cases.py", f"({' '.join(EDGES.split())}) and not float64", "64x32", fills=False),
}


def run(part: Part, **more: str) -> subprocess.CompletedProcess:
    found = os.pathsep.join([str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {
        **os.environ, "TRITON_INTERPRET": "1", "ANYATTN_TEST_BACKEND": "triton", "ANYATTN_TEST_TILES": part.tiles, "PYTHONPATH": found,
        "OMP_NUM_THREADS": "1", "ANYATTN_TEST_FILL": str(int(part.fills)), **more,
    }  # fmt: skip
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "ignore", "--durations=5"]
    command += [str(TESTS / part.files), *(["-k", part.chosen] if part.chosen else [])]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=HANG)


@pytest.mark.parametrize("name", PARTS)
def test_part(name: str) -> None:
    done = run(PARTS[name])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout[-800:])
