"""Source of the Hopper kernels' roles as Python code: without decorators, types and what is imported of the DSL, for which stand-ins do."""

from __future__ import annotations

import ast
import functools
from pathlib import Path
from types import CodeType

import anyattn

__all__ = ["Changes", "compiled", "text_of"]

Changes = tuple[tuple[str, str], ...]  # (module of the kernel, the text that is run in place of its own)
_KERNEL = Path(anyattn.__file__).parent / "backends" / "hopper" / "kernel"
_KEPT = (
    "typing", "collections", "anyattn.arithmetic", "anyattn.sequences", "anyattn.mods.analysis", "anyattn.mods.dropout",
    "anyattn.backends.hopper.backward_config", "anyattn.backends.hopper.captured_sums",
    "anyattn.backends.hopper.codegen.score_analysis", "anyattn.backends.hopper.wide_backward_config",
)  # fmt: skip


def text_of(module: str) -> str:
    """module: of the kernel, such as "backward/mma"."""
    return (_KERNEL / f"{module}.py").read_text()


@functools.lru_cache(maxsize=64)
def compiled(modules: tuple[str, ...], changes: Changes = (), states: tuple[str, ...] = ()) -> tuple[list[CodeType], dict[str, list[str]]]:
    """The modules' code, and their lines by file. states: arguments that are passed by value, as under a traced loop: a caller does not see
    changes that a function does not return."""
    codes, lines = [], {}
    for module in modules:
        text, file = dict(changes).get(module) or text_of(module), str(_KERNEL / f"{module}.py")
        lines[file] = text.splitlines()
        codes.append(_code(text, file, states))
    return codes, lines


@functools.lru_cache(maxsize=64)
def _code(text: str, file: str, states: tuple[str, ...]) -> CodeType:
    tree = ast.parse(text)
    tree.body = [n for n in tree.body if not isinstance(n, (ast.Import, ast.ImportFrom)) or str(getattr(n, "module", "")).startswith(_KEPT)]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            node.decorator_list, node.returns = [], None
            for argument in node.args.args:
                argument.annotation = None
            copied = [a.arg for a in node.args.args if a.arg in states]
            node.body[:0] = ast.parse("\n".join(f"{name} = {name}.clone()" for name in copied)).body
    return compile(ast.fix_missing_locations(tree), file, "exec")
