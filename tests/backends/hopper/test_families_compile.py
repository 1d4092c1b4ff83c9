"""A kernel of each family compiled for sm_90a without a GPU: nothing spills. The tests of each family compile all (``make test-long``)."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from tests.backends.hopper import test_backward_compile as backward
from tests.backends.hopper import test_plan_and_compile as forward
from tests.support.processes import python

pytest.importorskip("cutlass")


def words(parts: list[tuple]) -> str:
    """As the scripts take them: those of different head dimensions with "and" between them."""
    return json.dumps([str(word) for part in parts for word in ("and", *part)][1:])


def test_kernels_compile_without_spilling(tmp_path: Path) -> None:
    """In one process: the compiler takes seconds to import."""
    parts = [(*head_dim, *names) for head_dim, names in forward.FAMILIES.items()]
    arguments = words(parts), words(list(backward.FAMILIES))
    done = python("-m", "tests.support.hopper.cross_compile_families", str(tmp_path), *arguments, CUTE_DSL_ARCH="sm_90a")
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    forward.check_frames(found["forward"], list(map(len, forward.FAMILIES.values())))
    backward.check_loops(backward.FAMILIES, found["backward"])
    check_rounding([ptx.read_text() for ptx in tmp_path.glob("forward/64_64/*/*.ptx")])


def check_rounding(kernels: list[str]) -> None:
    """A mask of floats is computed as torch rounds it: no product joins its sum, and no quotient or root is approximate."""
    counts = [Counter(re.findall(r"\b(\w+(?:\.\w+)*\.f32)\b", kernel)) for kernel in kernels]
    counts = [c for c in counts if not c["div.full.f32"]]  # by which the kernel in the order of keys divides, as Triton's does
    (found,) = [c for c in counts if c["div.rn.f32"]]
    (other,) = [c for c in counts if not c["div.rn.f32"]]
    assert min(found[name] for name in ("mul.rn.f32", "sqrt.rn.f32", "max.NaN.f32")) > 0
    assert not any("sqrt.approx" in name or "div.full" in name or "min.f32" in name for name in found)
    assert found["rcp.approx.ftz.f32"] == other["rcp.approx.ftz.f32"]  # those of the softmax
    assert found["fma.rn.f32"] < min(32, found["mul.rn.f32"])  # those of the softmax, and the corrections of each row's quotient
