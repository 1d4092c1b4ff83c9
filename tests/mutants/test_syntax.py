"""Edits by syntax: what a fragment matches, what it leaves alone, and that layout decides nothing."""

from __future__ import annotations

import ast

import pytest

from tests.mutants.syntax import edited

SOURCE = '''
class Sums:
    def add(self, total, part):
        """Adds ``part * 2``."""
        if part > 0:  # nothing else counts
            total += part * 2
        else:
            total = total
        return total


def add(x, y):
    text = f"{x.name} + tl.sum(part{y}, {{keep}})\\n"
    return x[0:y, None] * (y + 1)
'''


def after(scope: str, old: str, new: str, source: str = SOURCE) -> str:
    return ast.unparse(edited(ast.parse(source), scope, old, new))


@pytest.mark.parametrize(
    ("scope", "old", "new", "gone", "made"),
    [
        ("Sums.add", "part * 2", "part * 3", "total += part * 2", "total += part * 3"),
        ("Sums.add", "total += __", "total = __", "total += part * 2", "total = part * 2"),
        ("Sums.add", "if part > 0: ...", "if False: ...", "if part > 0:", "if False:\n            total += part * 2\n        else:"),
        ("Sums.add", "total = total", "pass", "total = total", "pass"),
        ("Sums.add", "return total", "total = -total; return total", "return", "total = -total\n        return total"),
        ("add", "__ * (y + 1)", "(y + 1) * __", "x[0:y, None] * (y + 1)", "(y + 1) * x[0:y, None]"),
        ("add", "__[__1 : y, None]", "__[__1:, None]", "x[0:y, None]", "x[0:, None]"),
        (
            "add",
            "text('{x.name} + tl.sum')",
            "text('{x.name * 2} + tl.max')",
            "tl.sum(part{y}",
            "{x.name * 2} + tl.max(part{y}, {{keep}})\\n",
        ),
    ],
)
def test_a_fragment_is_replaced(scope: str, old: str, new: str, gone: str, made: str) -> None:
    plain, found = ast.unparse(ast.parse(SOURCE)), after(scope, old, new)
    assert gone in plain and made in found and made not in plain


def test_layout_and_place_do_not_matter() -> None:
    moved = "import os\n\n\ndef other(): return 1\n" + SOURCE.replace("x[0:y, None] * (y + 1)", "(x[0:y,\n   None]  # rows\n * ((y+1)))")
    assert "x[0:y, None] * y" in after("add", "__ * (y + 1)", "__ * y", moved)


@pytest.mark.parametrize(
    ("scope", "old", "said"),
    [
        ("Sums.add", "total", "stands 4 times in Sums.add"),
        ("add", "part * 2", "stands 0 times in add"),  # of another function
        ("Sums.add", "part * 2.0", "stands 0 times"),
        ("add", "text('tl.max')", "stands 0 times"),
        ("Sums.sub", "total", "0 functions and classes of the name 'sub'"),
    ],
)
def test_what_is_not_there_once_is_reported(scope: str, old: str, said: str) -> None:
    with pytest.raises(LookupError, match=said):
        edited(ast.parse(SOURCE), scope, old, "0")
