"""The README's examples run as they stand."""

from __future__ import annotations

import re
import shutil
import sys
import types
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text()
EXAMPLES = dict(re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?```python\n(.*?)```", README, flags=re.S | re.M))


def test_every_example_is_found() -> None:
    assert len(EXAMPLES) == README.count("```python")


@pytest.mark.parametrize("title", EXAMPLES)
def test_example(title: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if "torch.compile" in EXAMPLES[title] and shutil.which("g++") is None:
        pytest.skip("torch.compile on the CPU needs g++")
    module = types.ModuleType("readme_example")
    monkeypatch.setitem(sys.modules, module.__name__, module)  # Dynamo of torch 2.11 imports the module that a function names
    exec(compile(EXAMPLES[title], f"README.md, {title}", "exec"), module.__dict__)
