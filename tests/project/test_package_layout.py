"""Modules and folders of the package stay small, and import what pyproject.toml declares. Who may import whom: ``make lint``."""

from __future__ import annotations

import ast
import sys
from collections import Counter

from tests.support.processes import ROOT

PACKAGE = ROOT / "anyattn"
MODULES = sorted(PACKAGE.rglob("*.py"))
MAX_LINES, MAX_AT_THE_ROOT, MAX_IN_A_FOLDER = 500, 18, 22
DECLARED = {
    "torch", "numpy", "click", "rich", "triton", "cutlass", "cuda", "tvm_ffi", "filelock", "matplotlib", "psutil", "transformers",
    "vllm", "anyattn",
}  # fmt: skip


def test_modules_stay_small() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in MODULES}
    large = {name: lines for name, lines in sizes.items() if lines > MAX_LINES}
    assert len(sizes) > 200 and not large, f"over {MAX_LINES} lines, split by role: {large}"


def test_folders_stay_small() -> None:
    counts = Counter(path.parent for path in MODULES)
    assert counts[PACKAGE] <= MAX_AT_THE_ROOT, f"{counts[PACKAGE]} files in {PACKAGE.name}/: wanted at most {MAX_AT_THE_ROOT}"
    large = {folder.relative_to(ROOT).as_posix(): n for folder, n in counts.items() if n > MAX_IN_A_FOLDER}
    assert not large, f"over {MAX_IN_A_FOLDER} files, split by role: {large}"


def test_only_declared_dependencies_are_imported() -> None:
    """A package that pyproject.toml does not declare would work on the machine of its author only."""
    strays = []
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) and not node.level else []
            tops = {name.split(".")[0] for name in names} - DECLARED - set(sys.stdlib_module_names)
            strays += [f"{path.relative_to(ROOT)}:{node.lineno} imports {top}" for top in sorted(tops)]
    assert not strays, "\n".join(strays)
