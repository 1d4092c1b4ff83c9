"""Where in the user's source a mod went wrong, and what to write instead: the second half of every ``ModError``."""

from __future__ import annotations

import ast
import contextlib
import functools
import linecache
import sys
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from anyattn.errors import ModError

__all__ = ["mod_error", "truth_cure", "user_line"]

# Frames of these are never the user's own. Whole paths: a user's folder may be called torch/ as well.
_FOLDERS = tuple(f"{Path(p).resolve().parent}/".replace("\\", "/") for p in (Path(__file__).parent, str(torch.__file__)))
_FILES = frozenset(str(m.__file__) for m in (functools, contextlib))


class _Span(NamedTuple):
    """Lines from 1 and columns from 0 (in bytes), the end excluded; columns are None before Python 3.11."""

    line: int
    end_line: int
    column: int | None = None
    end_column: int | None = None


@functools.lru_cache(maxsize=1024)
def _is_library(filename: str) -> bool:
    if filename in _FILES or filename.startswith("<frozen"):
        return True
    return not filename.startswith("<") and str(Path(filename).resolve()).replace("\\", "/").startswith(_FOLDERS)


def _user_frame() -> FrameType:
    """The innermost frame that is the user's own; the outermost of all if none is."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def _span(code: CodeType, instruction: int, line: int) -> _Span:
    if not hasattr(code, "co_positions"):
        return _Span(line, line)
    start, end, column, end_column = next(islice(code.co_positions(), instruction // 2, None))
    if start is None or end is None:
        return _Span(line, line)
    return _Span(start, end, column, end_column)


def user_line() -> tuple[str, str]:
    """The place and the text of what the user's own code is doing: the lines of the expression that is being evaluated."""
    frame = _user_frame()
    span = _span(frame.f_code, frame.f_lasti, frame.f_lineno)
    filename = frame.f_code.co_filename
    lines = [linecache.getline(filename, n).strip() for n in range(span.line, span.end_line + 1)]
    return f"{filename}:{span.line}", " ".join(filter(None, lines))


def mod_error(problem: str, cure: str, at: tuple[str, str] | None = None) -> ModError:
    """The error that says what is wrong, where, and how to write it instead. at: another ``user_line`` than where the user's code is."""
    place, text = at or user_line()
    return ModError(f"{problem}\n  at {place}\n    {text or '<source not available>'}\n  {cure}")


_CURES = {
    "and": "use & instead of `and`, with parentheses around each comparison: (a < b) & (c < d)",
    "or": "use | instead of `or`, with parentheses around each comparison: (a < b) | (c < d)",
    "not": "use ~ instead of `not`: ~(a < b)",
    "chain": "split the chained comparison and join it with &: (a <= b) & (b < c)",
    "extreme": "use torch.minimum / torch.maximum instead of min / max",
    "branch": "use torch.where(condition, value_if_true, value_if_false) instead of branching on an index or a score",
    "": "compare with torch operations (&, |, ~, torch.where): there is no Python truth value per (q, kv)",
}


def truth_cure() -> str:
    """What to write instead of the Python construct that has just asked a symbolic value for its truth."""
    frame = _user_frame()
    span = _span(frame.f_code, frame.f_lasti, frame.f_lineno)
    tree = _parsed(frame.f_code.co_filename)
    if tree is None:
        return _CURES[""]
    around = [(node, kind) for node in ast.walk(tree) if _covers(node, span) and (kind := _truth_of(node))]
    # ast.walk goes from the outside in: the last is the innermost
    return _CURES[around[-1][1] if around else ""]


@functools.lru_cache(maxsize=16)
def _parsed(filename: str) -> ast.Module | None:
    try:
        return ast.parse("".join(linecache.getlines(filename)))
    except (SyntaxError, ValueError):
        return None


def _covers(node: ast.AST, span: _Span) -> bool:
    if not isinstance(node, (ast.expr, ast.stmt)) or node.end_lineno is None or node.end_col_offset is None:
        return False
    if span.column is None or span.end_column is None:
        return node.lineno <= span.line and span.end_line <= node.end_lineno
    starts_before = (node.lineno, node.col_offset) <= (span.line, span.column)
    return starts_before and (span.end_line, span.end_column) <= (node.end_lineno, node.end_col_offset)


def _truth_of(node: ast.AST) -> str:
    """Which construct that needs a Python truth value ``node`` is, '' if none."""
    if isinstance(node, ast.BoolOp):
        return "and" if isinstance(node.op, ast.And) else "or"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "chain"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "sorted"):
        return "extreme"
    return "branch" if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else ""
