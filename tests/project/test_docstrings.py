"""The examples of the package's docstrings, run by doctest."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import anyattn

ROOT = Path(anyattn.__file__).parents[1]
FILES = [path.relative_to(ROOT) for path in sorted((ROOT / "anyattn").rglob("*.py")) if ">>> " in path.read_text()]
MODULES = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in FILES]


@pytest.mark.parametrize("name", MODULES)
def test_examples(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:  # of a package that is not installed, or that cannot be imported without a GPU
        if str(error.name).partition(".")[0] == "anyattn":
            raise
        pytest.skip(str(error))
    found = doctest.testmod(module)
    assert found.attempted and not found.failed, f"{found.failed} of {found.attempted} examples fail; doctest printed why"
