"""Loading of mods named on the command line: gallery names, calls of library masks and scores, or ``file.py:function``."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click

from anyattn import gallery
from anyattn.errors import BackendError, ModError
from anyattn.mods import masks, scores
from anyattn.mods.algebra import Mask, Score, mod
from anyattn.mods.tracing.diagnostics import raised_at

__all__ = ["errors_of", "load", "named_mods"]


@contextlib.contextmanager
def errors_of(text: str) -> Iterator[None]:
    """Converts errors in the mod named by ``text`` to ``click.BadParameter``, with the user's source line if there is one."""
    try:
        yield
    except (click.ClickException, BackendError):
        raise
    except SystemExit as error:
        raise _ended(text, error) from error
    except Exception as error:
        where = None if isinstance(error, ModError) else raised_at(error)
        if where is not None:
            raise click.BadParameter(f"{text} raised {_told(error, where)}") from error
        if not isinstance(error, (ValueError, TypeError, IndexError)):
            raise
        raise click.BadParameter(f"{text}: {error}") from error


def _ended(what: str, error: SystemExit) -> click.ClickException:
    """The error for user code that ends the process; the command ends with its status, or 2 if that would report success."""
    found = click.ClickException(
        f"{what} ended the program with SystemExit({error.code!r}) before its function was read; put what runs a program under "
        f"if __name__ == '__main__':"
    )
    status = error.code if isinstance(error.code, int) else int(error.code is not None)
    found.exit_code = status or click.UsageError.exit_code  # type: ignore[misc]
    return found


def _told(error: Exception, where: tuple[str, str]) -> str:
    place, line = where
    return f"{type(error).__name__}: {error} at {place}: {line or '<source not available>'}"


def named_mods(text: str, setting: gallery.Setting) -> gallery.Mods:
    """The mods named by ``text``. Raises ``click.BadParameter`` with the error and the valid alternatives."""
    if text in gallery.VARIANTS:
        return gallery.VARIANTS[text].mods(setting)
    wrapped = load(text)
    return gallery.Mods(mask=wrapped) if isinstance(wrapped, Mask) else gallery.Mods(score=wrapped)


def load(text: str) -> Mask | Score:
    """A mask or score from ``file.py:function`` or from an expression such as ``causal() & sliding_window(256, 0)``."""
    head, colon, name = text.rpartition(":")
    found = _from_file(Path(head), name) if colon and head.endswith(".py") else _from_library(text)
    with errors_of(text):
        wrapped = mod(found)
    return wrapped


def _from_file(path: Path, name: str) -> Callable:
    if not path.is_file():
        raise click.BadParameter(f"there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"anyattn_user_{path.stem}", path)
    assert spec is not None and spec.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(spec)
    # dataclasses and pickle look up a class's module by name while the class is created
    sys.modules[spec.name] = module
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except SystemExit as error:
        raise _ended(str(path), error) from error
    except Exception as error:
        where = raised_at(error)
        told = f"{type(error).__name__}: {error}" if where is None else _told(error, where)
        raise click.BadParameter(f"{path} cannot be imported: {told}") from error
    finally:
        sys.path.remove(str(path.parent.resolve()))
    if not hasattr(module, name):
        has = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise click.BadParameter(f"{path} has no {name!r}; it has {', '.join(has) or 'no functions'}")
    return getattr(module, name)


def _from_library(text: str) -> Any:
    wanted = f"wanted one of {', '.join(gallery.VARIANTS)}; a call like 'causal() & sliding_window(256, 0)'; or file.py:function"
    try:
        return _value(ast.parse(text, mode="eval").body)
    except (SyntaxError, LookupError, RecursionError, MemoryError) as error:  # the last two: deeper nesting than Python parses
        detail = f" ({error.args[0]})" if isinstance(error, LookupError) else ""
        raise click.BadParameter(f"{text!r} is not a mask or score mod{detail}; {wanted}") from error
    except (TypeError, ValueError) as error:
        raise click.BadParameter(f"{text}: {error}") from error


def _value(node: ast.expr) -> Any:
    """Evaluates calls of the library, ``&``, ``|`` and ``~`` over them, and literals; nothing else, so arbitrary code is rejected."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        left, right = _value(node.left), _value(node.right)
        return left & right if isinstance(node.op, ast.BitAnd) else left | right
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        return ~_value(node.operand)
    if isinstance(node, ast.Name):
        return _library(node.id)()
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        given = [_value(argument) for argument in node.args]
        return _library(node.func.id)(*given, **{k.arg: _value(k.value) for k in node.keywords if k.arg})
    try:
        return ast.literal_eval(node)
    except ValueError as error:
        raise LookupError(f"{ast.unparse(node)!r} is not a call or a number") from error


def _library(name: str) -> Callable:
    for module in (masks, scores):
        if name in module.__all__:
            return getattr(module, name)
    raise LookupError(f"no {name!r} in the library: {', '.join((*masks.__all__, *scores.__all__))}")
