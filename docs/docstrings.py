"""Docstrings as Markdown, for mkdocstrings: ``name: meaning`` becomes an item of a list, examples become code."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

import griffe

_NAMES = r"\*{0,2}[A-Za-z]\w*(?:, \*{0,2}[A-Za-z]\w*)*"
_AT_LINE, _IN_LINE = re.compile(rf"({_NAMES}): (?=\S)"), re.compile(rf"(?:(?<=\. )|(?<=; ))({_NAMES}): (?=\S)")
_NO_ARGUMENT = {"source", "raises", "returns", "example", "note"}


def as_markdown(text: str, arguments: Collection[str] = ()) -> str:
    """Paragraphs that describe arguments as lists, those that begin with ``>>>`` as fenced code.

    arguments: names that begin an item in the middle of a line too.
    """
    return "\n\n".join(_paragraph(part, set(arguments)) for part in re.split(r"\n[ \t]*\n", text.strip("\n")))


def _paragraph(part: str, arguments: set[str]) -> str:
    lines = [line.strip() for line in part.splitlines()]
    if lines[0].startswith(">>>"):
        return "```pycon\n" + "\n".join(lines) + "\n```"
    lines = [piece for line in lines for piece in _apart(line, arguments)]
    if not any(_argument(line) for line in lines):
        return "\n".join(lines)
    written = []
    for line in lines:
        found = _argument(line)
        written.append(f"- **{found[1]}**: {line[found.end() :]}" if found else ("  " if written else "") + line)
    return "\n".join(written)


def _apart(line: str, arguments: set[str]) -> list[str]:
    """The line, cut before each argument that is described in its middle."""
    cuts = [m.start() for m in _IN_LINE.finditer(line) if set(re.findall(r"\w+", m[1])) <= arguments]
    return [line[a:b].strip() for a, b in zip([0, *cuts], [*cuts, len(line)])]


def _argument(line: str) -> re.Match[str] | None:
    found = _AT_LINE.match(line)
    return found if found and found[1].lower() not in _NO_ARGUMENT else None


class Docstrings(griffe.Extension):
    """Rewrites each docstring before it is parsed."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None and "Args:" not in obj.docstring.value:
            names = [parameter.name for parameter in obj.parameters] if isinstance(obj, griffe.Function) else []
            obj.docstring.value = as_markdown(obj.docstring.value, names)
