"""Docstrings as Markdown, for mkdocstrings: ``name: meaning`` lines become a list, examples become code."""

from __future__ import annotations

import re
from typing import Any

import griffe

ARGUMENT = re.compile(r"(?:(?<=\. )|^)((?:\*{0,2}[A-Za-z]\w*)(?:, \*{0,2}[A-Za-z]\w*)*): (?=\S)")
NO_ARGUMENT = {"source", "raises", "returns", "example", "note"}


def as_markdown(text: str) -> str:
    """The docstring's paragraphs: those that describe arguments as a list, those that begin with ``>>>`` as fenced code."""
    return "\n\n".join(_paragraph(part) for part in re.split(r"\n[ \t]*\n", text.strip("\n")))


def _paragraph(part: str) -> str:
    lines = part.splitlines()
    if lines[0].lstrip().startswith(">>>"):
        return "```pycon\n" + "\n".join(line.strip() for line in lines) + "\n```"
    if not any(_argument(line) for line in lines):
        return "\n".join(line.strip() for line in lines)
    written = []
    for line in lines:
        found = _argument(line)
        written.append(f"- **{found[1]}**: {line[found.end() :]}" if found else ("  " if written else "") + line.strip())
    return "\n".join(written)


def _argument(line: str) -> re.Match[str] | None:
    found = ARGUMENT.match(line)
    return found if found and found[1].lower() not in NO_ARGUMENT else None


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and "Args:" not in obj.docstring.value:
            obj.docstring.value = as_markdown(obj.docstring.value)
