"""Edits of Python source by syntax: a fragment of a named function is replaced, however the text around it is laid out.

A fragment is an expression, or statements, in Python. It is compared as a syntax tree, so comments, line breaks, quotes and parentheses do
not matter, nor where in its function it stands; it has to be there exactly once. In a fragment

- ``__``, ``__1``, ``__2``... stand for any expression; a second use of the same name stands for an equal one. In the new fragment they are
  what they stood for in the old one.
- a body of ``...`` stands for any body: ``if condition: ...`` names the head of a statement, whose body and ``else`` stay.
- ``text('...')`` is a piece of a string or f-string: of source that a function writes.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator
from typing import Any

__all__ = ["edited", "scope_of"]

_ANY = re.compile(r"__\d*")
Bindings = dict[str, ast.AST]


def edited(tree: Any, scope: str, old: str, new: str) -> Any:
    """``tree``, changed in place: in its function or class ``scope`` (``Class.method``) the fragment ``old`` is replaced by ``new``.

    Raises LookupError if there is no such scope, or if ``old`` is not there exactly once.
    """
    within = scope_of(tree, scope)
    before, after = ast.parse(old).body, ast.parse(new).body
    if (texts := _text_of(before)) is not None:
        found = [lambda at=at: _put(at, _with_text(at[0], texts, str(_text_of(after)))) for at in _strings_with(within, texts)]
    elif _is_expression(before) and _is_expression(after):
        found = [lambda at=at, b=b: _put(at, _filled(after[0].value, b)) for at, b in _expressions(within, before[0].value)]  # type: ignore[attr-defined]
    else:
        found = [lambda at=at, b=b: _put_all(*at, after, b) for at, b in _statements(within, before)]
    if len(found) != 1:
        raise LookupError(f"{old!r} stands {len(found)} times in {scope or 'the module'}; wanted once")
    found[0]()
    return ast.fix_missing_locations(tree)


def scope_of(tree: ast.Module, scope: str) -> Any:
    """The function or class of that dotted name. Raises LookupError if there is none, or several."""
    node: Any = tree
    for name in filter(None, scope.split(".")):
        found = [inner for inner in _named(node) if inner.name == name]
        if len(found) != 1:
            raise LookupError(f"{len(found)} functions and classes of the name {name!r} on the way to {scope!r}; wanted one")
        [node] = found
    return node


def _named(node: ast.AST) -> Iterator[Any]:
    """The functions and classes defined in ``node``, not in one another."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.FunctionDef, ast.ClassDef)):
            yield child
        else:
            yield from _named(child)


# ---- comparing


def _is_expression(body: list[ast.stmt]) -> bool:
    return len(body) == 1 and isinstance(body[0], ast.Expr)


def _is_any_body(body: Any) -> bool:
    return isinstance(body, list) and _is_expression(body) and isinstance(body[0].value, ast.Constant) and body[0].value.value is ...


def _same(pattern: Any, node: Any, bound: Bindings) -> bool:
    if isinstance(pattern, ast.Name) and _ANY.fullmatch(pattern.id):
        if not isinstance(node, ast.expr):
            return False
        known = bound.setdefault(pattern.id, node)
        return known is node or _same(known, node, {})
    if isinstance(pattern, list):
        return isinstance(node, list) and len(pattern) == len(node) and all(_same(p, n, bound) for p, n in zip(pattern, node))
    if not isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and pattern == node
    if type(pattern) is not type(node):
        return False
    left_out = {"ctx", "kind", "type_comment"} | ({"body", "orelse"} if _is_any_body(getattr(pattern, "body", None)) else set())
    return all(_same(getattr(pattern, f), getattr(node, f), bound) for f in pattern._fields if f not in left_out)


def _places(within: ast.AST) -> Iterator[tuple[ast.AST, tuple[ast.AST, str, int | None]]]:
    """Every node below ``within`` with where it is held: (parent, field, index)."""
    for parent in ast.walk(within):
        for field, value in ast.iter_fields(parent):
            for index, child in enumerate(value) if isinstance(value, list) else [(None, value)]:
                if isinstance(child, ast.AST):
                    yield child, (parent, field, index)


def _expressions(within: ast.AST, pattern: ast.expr) -> Iterator[tuple[Any, Bindings]]:
    for node, place in _places(within):
        bound: Bindings = {}
        if isinstance(node, ast.expr) and _same(pattern, node, bound):
            yield (node, place), bound


def _statements(within: ast.AST, pattern: list[ast.stmt]) -> Iterator[tuple[Any, Bindings]]:
    for parent in ast.walk(within):
        for _, body in ast.iter_fields(parent):
            if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
                for i in range(len(body) - len(pattern) + 1):
                    bound: Bindings = {}
                    if all(_same(p, n, bound) for p, n in zip(pattern, body[i:])):
                        yield (body, i, len(pattern)), bound


# ---- replacing


def _put(at: tuple[ast.AST, tuple[Any, str, int | None]], made: ast.AST) -> None:
    _, (parent, field, index) = at
    if index is None:
        setattr(parent, field, made)
    else:
        getattr(parent, field)[index] = made


def _put_all(body: list[ast.stmt], start: int, count: int, after: list[ast.stmt], bound: Bindings) -> None:
    made = [_filled(statement, bound) for statement in after]
    if count == len(made) == 1 and _is_any_body(getattr(made[0], "body", None)):
        made[0].body = body[start].body  # type: ignore[attr-defined]
        made[0].orelse = body[start].orelse  # type: ignore[attr-defined]
    body[start : start + count] = made


class _Fill(ast.NodeTransformer):
    def __init__(self, bound: Bindings) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return copy.deepcopy(self.bound[node.id]) if _ANY.fullmatch(node.id) else node


def _filled(made: Any, bound: Bindings) -> Any:
    return _Fill(bound).visit(copy.deepcopy(made))


# ---- source in strings


def _text_of(body: list[ast.stmt]) -> str | None:
    match body:
        case [ast.Expr(ast.Call(ast.Name("text"), [ast.Constant(str(found))]))]:
            return found
    return None


def _template(node: ast.AST) -> str | None:
    """A string as the inside of an f-string's literal, which shows ``{expressions}``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return None
    parts = []
    for part in node.values:
        if isinstance(part, ast.Constant):
            parts.append(part.value.replace("{", "{{").replace("}", "}}"))
        else:
            parts.append(ast.unparse(ast.JoinedStr([part]))[2:-1])
    return "".join(parts)


def _strings_with(within: ast.AST, text: str) -> list[Any]:
    inner = {id(part) for node in ast.walk(within) if isinstance(node, ast.JoinedStr) for part in node.values}
    found = [(node, place, _template(node)) for node, place in _places(within) if id(node) not in inner]
    return [(node, place) for node, place, template in found if template for _ in range(template.count(text))]


def _with_text(node: ast.AST, old: str, new: str) -> ast.AST:
    text = str(_template(node)).replace(old, new)
    if isinstance(node, ast.Constant):
        return ast.Constant(text)
    quoted = text.replace("\\", "\\\\").replace('"""', '\\"\\"\\"').replace("\n", "\\n")
    return ast.parse(f'f"""{quoted} """', mode="eval").body if text.endswith('"') else ast.parse(f'f"""{quoted}"""', mode="eval").body
