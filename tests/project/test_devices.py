"""Every allocation in the package names its device: without one it follows torch's default device, which belongs to the program."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from torch.utils._device import _device_constructors

PACKAGE = Path(__file__).parents[2] / "anyattn"
# what torch allocates on the default device; where pinned memory is wanted too, that must name the CPU
FACTORIES = frozenset(f.__name__ for f in _device_constructors())
# functions that are called with a device under another name
RENAMED = {("backends/torch/workspace.py", "torch.empty"), ("backends/torch/workspace.py", "torch.empty_strided")}


def without_device(source: str) -> list[tuple[int, str]]:
    """(line, text) of every factory that is called without ``device=``, or used otherwise than by a call."""
    tree = ast.parse(source)
    calls = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "torch":
            found += [(node.lineno, f"from torch import {alias.name}") for alias in node.names if alias.name in FACTORIES]
        if not (
            isinstance(node, ast.Attribute) and node.attr in FACTORIES and ast.unparse(node.value) in ("torch", "torch.nested", "torch.fft")
        ):
            continue
        call = calls.get(id(node))
        if call is None:
            found.append((node.lineno, ast.unparse(node)))
        elif not any(keyword.arg == "device" for keyword in call.keywords):
            found.append((node.lineno, ast.unparse(call)))
    return found


def test_every_allocation_names_its_device() -> None:
    assert {"empty", "zeros", "full", "arange", "tensor", "as_tensor", "eye", "linspace", "randperm", "scalar_tensor"} <= FACTORIES
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        found += [f"{name}:{line}: {text}" for line, text in without_device(path.read_text()) if (name, text) not in RENAMED]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("x = torch.zeros(\n    3,\n    dtype=torch.int32,\n)", [1]),
        ("x = f(1, [torch.tensor(i) for i in y])", [1]),
        ("make = torch.full", [1]),
        ("from torch import Tensor, arange", [1]),
        ("x = torch.zeros(\n    3, device=like.device\n)\ny = x.new_zeros(3)\nz = torch.zeros_like(x)", []),
    ],
)
def test_the_search_sees_calls_over_lines_and_renamed_functions(source: str, lines: list[int]) -> None:
    assert [line for line, _ in without_device(source)] == lines
