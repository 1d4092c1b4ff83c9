"""Diagnostics of ``ModError``: the user's source line at which a mod failed, and the code to write instead.

An exception that the tracer raises inside a mod's body is raised again after the body if the body caught it: ``nothing_swallowed``.
"""

from __future__ import annotations

import ast
import contextlib
import dis
import functools
import inspect
import linecache
import re
import sys
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, NamedTuple

import torch

from anyattn.errors import ModError

__all__ = [
    "FUNCTION_CURE",
    "MODE_CURE",
    "at_line",
    "called_from",
    "defined_at",
    "failed",
    "mod_error",
    "note_raised",
    "nothing_swallowed",
    "raised_at",
    "truth_cure",
    "user_line",
]

# Frames in these folders are never the user's. Full paths, since a user's folder may be called torch/ too.
_PACKAGES = (Path(__file__).resolve().parents[2], Path(str(torch.__file__)).resolve().parent)
_FOLDERS = tuple(f"{folder}/".replace("\\", "/") for folder in _PACKAGES)
_FILES = frozenset(str(m.__file__) for m in (functools, contextlib))
MODE_CURE = "take the `with` out of the mod: put it around the attention call"
FUNCTION_CURE = "write what its forward does as plain arithmetic, of which anyattn takes the gradient itself"


class _Span(NamedTuple):
    """Lines from 1 and columns from 0 (in bytes), end excluded; columns are None before Python 3.11."""

    line: int
    end_line: int
    column: int | None = None
    end_column: int | None = None


@functools.lru_cache(maxsize=1024)
def _is_library(filename: str) -> bool:
    """Whether frames of this file never belong to the user."""
    if filename in _FILES or filename.startswith("<frozen"):
        return True
    return not filename.startswith("<") and str(Path(filename).resolve()).replace("\\", "/").startswith(_FOLDERS)


def _user_frame() -> FrameType:
    """The innermost frame of the user's code; the outermost frame if there is none."""
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


_node_lines: list[str | None] = []  # stack traces of the graph nodes being run, innermost last


@contextlib.contextmanager
def at_line(stack_trace: str | None) -> Iterator[None]:
    """Context of a graph node: errors inside it name the last line of ``stack_trace``, a traceback as text (None if unknown)."""
    _node_lines.append(stack_trace)
    try:
        yield
    finally:
        _node_lines.pop()


def _line_of_node() -> tuple[str, str] | None:
    """Place and text of the last line in the traceback of the node being run."""
    found = re.findall(r'File "([^"\n]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', (_node_lines[-1] if _node_lines else None) or "")
    return (f"{found[-1][0]}:{found[-1][1]}", found[-1][2]) if found else None


def user_line() -> tuple[str, str]:
    """Place and text of the user's code that is running: the lines of the expression being evaluated."""
    of_node = _line_of_node()
    if of_node is not None:
        return of_node
    frame = _user_frame()
    return _quoted(frame.f_code, frame.f_lasti, frame.f_lineno)


def _quoted(code: CodeType, instruction: int, line: int) -> tuple[str, str]:
    span = _span(code, instruction, line)
    lines = [linecache.getline(code.co_filename, n).strip() for n in range(span.line, span.end_line + 1)]
    return f"{code.co_filename}:{span.line}", " ".join(filter(None, lines))


def mod_error(problem: str, cure: str, at: tuple[str, str] | None = None) -> ModError:
    """The error with the problem, its place and the cure. at: a place other than ``user_line``, in the same form."""
    place, text = at or user_line()
    error = ModError(f"{problem}\n  at {place}\n    {text or '<source not available>'}\n  {cure}")
    note_raised(error)
    return error


class _Raised(threading.local):
    """The exceptions raised in each mod body that this thread is running, innermost body last: a mod may trace another mod."""

    def __init__(self) -> None:
        self.by_body: list[list[Exception]] = []


_raised = _Raised()


def note_raised(error: Exception) -> None:
    """Records an exception that is about to be raised, if a mod's body is running."""
    if _raised.by_body:
        _raised.by_body[-1].append(error)


@contextlib.contextmanager
def nothing_swallowed() -> Iterator[None]:
    """Context of a mod's body: if the body caught recorded exceptions, raises the first of them.

    If the body raised an exception of its own instead of a ``ModError``, its own is raised, with the ``ModError`` as its context.
    """
    _raised.by_body.append([])
    try:
        yield
    except Exception as error:
        first = next(iter(_raised.by_body[-1]), error)
        if isinstance(first, ModError) or first is error:
            raise
        raise first from None
    else:
        if _raised.by_body[-1]:
            raise _raised.by_body[-1][0]
    finally:
        refused = [error for error in _raised.by_body.pop() if isinstance(error, ModError)]
        if _raised.by_body:
            _raised.by_body[-1].extend(refused)


def defined_at(fn: Any, word: str) -> tuple[str, str]:
    """The first line of ``fn`` that contains ``word``, else its first line, in the form of ``user_line``."""
    fn = inspect.unwrap(fn)
    while isinstance(fn, functools.partial):
        fn = fn.func
    called = fn.forward if isinstance(fn, torch.nn.Module) else type(fn).__call__
    code = getattr(fn, "__code__", None) or getattr(called, "__code__", None)
    if code is None:
        return repr(fn), ""
    first = code.co_firstlineno
    lines = sorted({first, *(line for _, _, line in code.co_lines() if line)})
    texts = {line: linecache.getline(code.co_filename, line).strip() for line in lines}
    line = next((line for line in lines if word in texts[line]), first)
    return f"{code.co_filename}:{line}", texts[line]


def called_from(outermost: CodeType) -> tuple[str, str] | None:
    """The user's line that applies a ``torch.autograd.Function``, in the form of ``user_line``; None if no frame below ``outermost``
    is that of a ``forward``, which may be another callable than a function."""
    frame: FrameType | None = sys._getframe(1)
    forwards = _custom_forwards()
    while frame is not None and frame.f_code is not outermost:
        if frame.f_code in forwards:
            frame = frame.f_back
            while frame is not None and frame.f_back is not None and _is_library(frame.f_code.co_filename):
                frame = frame.f_back
            return None if frame is None else _quoted(frame.f_code, frame.f_lasti, frame.f_lineno)
        frame = frame.f_back
    return None


def _custom_forwards() -> set[CodeType]:
    """The code of ``forward`` of every ``torch.autograd.Function``: ``apply`` has no frame of its own from torch 2.15 on."""
    codes: set[CodeType] = set()
    waiting: list[type] = [torch.autograd.Function]
    while waiting:
        kind = waiting.pop()
        waiting += type.__subclasses__(kind)
        if isinstance(code := getattr(getattr(kind, "forward", None), "__code__", None), CodeType):
            codes.add(code)
    return codes


def raised_at(error: BaseException) -> tuple[str, str] | None:
    """The user's innermost line in the traceback of ``error``, in the form of ``user_line``; None if it has none."""
    ours = _last_of_the_user(error)
    return None if ours is None else _quoted(ours.tb_frame.f_code, ours.tb_lasti, ours.tb_lineno)


def _last_of_the_user(error: BaseException) -> TracebackType | None:
    steps = _steps(error)
    return next((step for step in reversed(steps) if not _is_library(step.tb_frame.f_code.co_filename)), None)


def _steps(error: BaseException) -> list[TracebackType]:
    steps, step = [], error.__traceback__
    while step is not None:
        steps.append(step)
        step = step.tb_next
    return steps


def failed(error: Exception, name: str) -> ModError | None:
    """The ``ModError`` for an exception that the body of the mod called ``name`` did not catch.

    None for an exception that the user's code raises itself, by ``raise`` or ``assert``, and for one whose traceback has no line of the
    user's: those are not replaced.
    """
    last = _last_of_the_user(error)
    if last is None or (last.tb_next is None and _is_raised_there(last)):
        return None
    where = _quoted(last.tb_frame.f_code, last.tb_lasti, last.tb_lineno)
    forwards = _custom_forwards()
    if any(step.tb_frame.f_code in forwards for step in _steps(error)):
        return mod_error(f"{name} calls a torch.autograd.Function, whose gradient no kernel could take", FUNCTION_CURE, where)
    cure = "a mod is arithmetic on single numbers: Python's operators, torch's functions of one element, and captured tensors by index"
    if "numpy" in str(error):
        cure += "; wrap an array outside the mod: table = torch.from_numpy(array)"
    if "TorchScript" in str(error):
        cure = "call the Python function, not the function of torch.jit that was made of it"
    return mod_error(f"{name} failed while it was traced: {type(error).__name__}: {error}", cure, where)


def _is_raised_there(step: TracebackType) -> bool:
    code = step.tb_frame.f_code.co_code
    return dis.opname[code[step.tb_lasti]] in ("RAISE_VARARGS", "RERAISE")


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
    """The replacement for the Python construct that has just converted a symbolic value to a bool."""
    frame = _user_frame()
    span = _span(frame.f_code, frame.f_lasti, frame.f_lineno)
    tree = _parsed(frame.f_code.co_filename)
    if tree is None:
        return _CURES[""]
    around = [(node, kind) for node in ast.walk(tree) if _covers(node, span) and (kind := _truth_of(node))]
    # ast.walk visits outer nodes first, so the last one is the innermost
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
    """The kind of ``node`` as a construct that needs a Python truth value, '' if it is not one."""
    if isinstance(node, ast.BoolOp):
        return "and" if isinstance(node.op, ast.And) else "or"
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return "not"
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        return "chain"
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max", "sorted"):
        return "extreme"
    return "branch" if isinstance(node, (ast.If, ast.IfExp, ast.While, ast.Assert)) else ""
