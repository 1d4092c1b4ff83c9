"""Python examples of Markdown pages: finds them, and runs a page's one after the other as a reader would paste them."""

from __future__ import annotations

import linecache
import re
import shutil
import sys
import types
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Snippet", "of_page", "run"]

_FENCE = re.compile(
    r"^(?:<!-- (?P<mark>[^\n]*?) -->\n)?```(?P<language>\w*)\n(?P<code>.*?)^```$(?:\n+```text\n(?P<output>.*?)\n```$)?", re.S | re.M
)


@dataclass(frozen=True)
class Snippet:
    """One fenced block of Python. line: where its code begins. raises: the error that the page says it raises, type and message.

    left_out: why it is not run, which the page says in a comment before the block: ``<!-- not run: reason -->``.
    """

    code: str
    line: int
    raises: str | None = None
    left_out: str | None = None

    @property
    def is_compiled(self) -> bool:
        return "torch.compile" in self.code


def of_page(path: Path) -> list[Snippet]:
    text = path.read_text()
    found = []
    for match in _FENCE.finditer(text):
        if match["language"] not in ("python", "py"):
            continue
        mark = match["mark"] or ""
        left_out = mark.removeprefix("not run: ") if mark.startswith("not run: ") else None
        line = text.count("\n", 0, match.start("code")) + 1
        found.append(Snippet(match["code"], line, match["output"], left_out))
    return found


def run(snippet: Snippet, namespace: dict[str, Any], name: str) -> None:
    """Executes one snippet; what it defines stays in ``namespace``. Where there is no GPU, ``"cuda"`` is the CPU.

    Lines are known to ``linecache``, since errors in mods quote them.
    """
    code = snippet.code if torch.cuda.is_available() else snippet.code.replace('"cuda"', '"cpu"')
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    exec(compile(code, name, "exec"), namespace)


def module(name: str) -> types.ModuleType:
    """A module for snippets, known by its name: Dynamo imports the module that a function names."""
    made = types.ModuleType(name)
    sys.modules[name] = made
    return made


def can_compile() -> bool:
    """torch.compile on the CPU needs a C++ compiler."""
    return shutil.which("g++") is not None
