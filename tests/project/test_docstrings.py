"""The examples of the package's docstrings, run by doctest."""

from __future__ import annotations

from pathlib import Path

import anyattn
from tests.support.processes import python

ROOT = Path(anyattn.__file__).parents[1]

# In a process of its own, for some examples count calls. What is skipped needs a package that is not installed, or a GPU at import.
RUN = """
import doctest, importlib, sys

for name in sys.argv[1:]:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if str(error.name).partition(".")[0] == "anyattn":
            raise
        print(f"skipped {name}: {error}")
        continue
    found = doctest.testmod(module)
    print(f"{'FAILED' if found.failed or not found.attempted else 'passed'} {name}")
"""


def test_examples() -> None:
    files = [path.relative_to(ROOT) for path in sorted((ROOT / "anyattn").rglob("*.py")) if ">>> " in path.read_text()]
    names = [".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in files]
    done = python("-c", RUN, *names)
    assert done.returncode == 0, done.stderr
    assert "FAILED" not in done.stdout, done.stdout
    assert done.stdout.count("passed ") > 40, done.stdout  # of 73, some of which need Triton or CuTe
