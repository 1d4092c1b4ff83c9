"""``Mask`` and ``Score``: wrapped mods that compose by ``&``, ``|``, ``~`` and ``then``.

A wrapped mod is still a function of the same arguments, so torch's own ``flex_attention`` accepts it too. Wrapping traces the mod once, to
report errors early; every attention call reads the captured values again.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from types import FunctionType
from typing import Any, TypeVar

import torch

from anyattn.mods.tracing.pickling import Recipe, attribute, place_of, refuse_nameless, remade_by_call
from anyattn.mods.tracing.trace import name_of, refuse_native, refuse_scripted, trace

__all__ = ["Derived", "Mask", "Score", "and_masks", "mod", "or_masks"]

F = TypeVar("F", bound=Callable)


class _Wrapped:
    """A mod with a name. ``fn`` is the user's function; it is traced once here, so that an unsupported body raises at its definition.

    ``recipe`` makes an equal mod where ``fn`` is not a function of the user's; pickling uses it. A mod made from it has the same key.
    """

    kind: str
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)

    def __init__(self, fn: Callable, name: str | None = None):
        self.fn = function_of(fn)
        if torch.compiler.is_dynamo_compiling():  # the attention call that receives the mod traces it
            self.recipe, self.name = None, name or "compiled mod"
            return
        self.recipe = Recipe(type(self), (fn, name)) if isinstance(fn, _Wrapped) else None
        refuse_native(self.fn, self.kind)
        self.name = name or (fn.name if isinstance(fn, _Wrapped) else name_of(fn))
        self.__name__ = self.name
        # only a call that passes aux_tensors can trace a mod that takes them, and a subclass's own call may need what is not set yet
        if function_of(self) is self.fn and _required_arguments(self.fn) != {"mask": 5, "score": 6}[self.kind]:
            for dtype in self.dtypes:
                trace(self.fn, self.kind, score_dtype=dtype)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name})"

    def __reduce__(self) -> tuple:
        if self.recipe is not None:
            return tuple(self.recipe)
        place = place_of(self.fn)
        if place is not None and isinstance(place[2], _Wrapped) and place[2].fn is self.fn:  # anyattn.mod was used as a decorator
            return attribute, place[:2]
        refuse_nameless(self.fn, f"{self.kind}_mod {self.name!r}")
        return type(self), (self.fn, self.name)

    def __copy__(self) -> _Wrapped:
        made = object.__new__(type(self))
        made.__dict__.update(vars(self))
        return made

    def __deepcopy__(self, memo: dict) -> Any:
        """Copies the captured tensors of the library's mods. A function of the user's is not copied, as by ``copy.deepcopy``."""
        make, args = self.recipe or Recipe(type(self), (self.fn, self.name))
        return make(*copy.deepcopy(args, memo))


def function_of(fn: Any) -> Any:
    """The function that a wrapped mod calls; ``fn`` itself if it is not wrapped, or is of a subclass with a ``__call__`` of its own."""
    return fn.fn if isinstance(fn, _Wrapped) and type(fn).__call__ in (Mask.__call__, Score.__call__) else fn


class Derived:
    """A mask mod derived from another mod, such as a slice of it. It is pickled as the call that made it, and not traced here."""

    def __init__(self, fn: Callable, recipe: Recipe, name: str):
        self.fn, self.recipe, self.name = fn, recipe, name

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.fn(b, h, q_idx, kv_idx)

    def __reduce__(self) -> tuple:
        for part in self.recipe.args:
            refuse_nameless(part, f"a mask_mod made of {self.name!r}")
        return tuple(self.recipe)


class Mask(_Wrapped):
    """A mask mod ``(b, h, q_idx, kv_idx) -> bool`` that composes.

    >>> from anyattn import masks
    >>> masks.causal() & ~masks.sliding_window(2, 0)
    Mask(causal & ~sliding_window(left=2, right=0))
    """

    kind = "mask"

    def __call__(self, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.fn(b, h, q_idx, kv_idx)

    def __and__(self, other: Callable) -> Mask:
        return _joined("&", self, other)

    def __rand__(self, other: Callable) -> Mask:
        return _joined("&", other, self)

    def __or__(self, other: Callable) -> Mask:
        return _joined("|", self, other)

    def __ror__(self, other: Callable) -> Mask:
        return _joined("|", other, self)

    def __invert__(self) -> Mask:
        return _inverted(self)


class Score(_Wrapped):
    """A score mod ``(score, b, h, q_idx, kv_idx) -> score`` that chains.

    >>> from anyattn import scores
    >>> scores.temperature(2.0).then(scores.softcap(30.0))
    Score(temperature(2.0) then softcap(30.0))
    """

    kind = "score"
    dtypes = (torch.float32, torch.float64)

    def __call__(self, score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return self.fn(score, b, h, q_idx, kv_idx)

    def then(self, other: Callable) -> Score:
        """The score mod that applies ``other`` to the result of this one."""
        return _chained(self, other if isinstance(other, Score) else Score(other))


@remade_by_call
def _inverted(mask: Mask) -> Mask:
    inner = function_of(mask)

    def inverted(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return ~inner(b, h, q_idx, kv_idx)

    return Mask(inverted, f"~{_grouped(mask.name)}")


@remade_by_call
def _chained(first: Score, second: Score) -> Score:
    before, after = function_of(first), function_of(second)

    def chained(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return after(before(score, b, h, q_idx, kv_idx), b, h, q_idx, kv_idx)

    return Score(chained, f"{first.name} then {second.name}")


def mod(fn: Callable) -> Mask | Score:
    """Wraps a mod by its number of arguments: 4 (or 5 with ``aux_tensors``) make a ``Mask``, 5 with ``score`` first make a ``Score``.

    A function of 5 arguments is a mask only if its last argument is called ``aux_tensors``. Entry points take plain functions as well;
    wrapping makes a mod composable, and its errors are raised where it is wrapped. Raises ``TypeError`` for other functions, ``ModError``
    for a body that cannot be expressed.

    >>> import anyattn
    >>> anyattn.mod(lambda b, h, q_idx, kv_idx: q_idx >= kv_idx)
    Mask(<lambda>)
    """
    if isinstance(fn, (Mask, Score)):
        return fn
    if not callable(fn):
        raise TypeError(f"fn is a {type(fn).__name__}; wanted a function of (b, h, q_idx, kv_idx) or (score, b, h, q_idx, kv_idx)")
    refuse_scripted(fn, "fn")
    names = _positional(fn)
    if len(names) == 4 or (len(names) == 5 and names[-1] == "aux_tensors"):
        return Mask(fn)
    if len(names) == 5 or (len(names) == 6 and names[-1] == "aux_tensors"):
        return Score(fn)
    raise TypeError(
        f"fn {name_of(fn)!r} takes {len(names)} arguments {tuple(names)}; wanted (b, h, q_idx, kv_idx) for a mask or "
        "(score, b, h, q_idx, kv_idx) for a score, each with an optional trailing aux_tensors"
    )


def and_masks(*mask_mods: Callable) -> Mask:
    """The conjunction of ``mask_mods``; without any, every key is visible. torch has a function of the same name."""
    return _folded("&", mask_mods, empty=True)


def or_masks(*mask_mods: Callable) -> Mask:
    """The disjunction of ``mask_mods``; without any, no key is visible. torch has a function of the same name."""
    return _folded("|", mask_mods, empty=False)


def _folded(symbol: str, mask_mods: Iterable[Callable], empty: bool) -> Mask:
    given = list(mask_mods)
    for i, m in enumerate(given):
        if not callable(m):
            raise TypeError(f"mask_mods[{i}] is a {type(m).__name__}; wanted a function of (b, h, q_idx, kv_idx)")
    if not given:
        return _constant(empty)
    joined = given[0] if isinstance(given[0], Mask) else Mask(given[0])
    for other in given[1:]:
        joined = _joined(symbol, joined, other)
    return joined


@remade_by_call
def _constant(value: bool) -> Mask:
    return Mask(lambda b, h, q_idx, kv_idx: (q_idx == q_idx) if value else (q_idx != q_idx), "full" if value else "nothing")


def _joined(symbol: str, left: Callable, right: Callable) -> Mask:
    for side in (left, right):
        if not callable(side) or isinstance(side, Score):
            raise TypeError(f"cannot join a mask with a {type(side).__name__} by {symbol}; wanted masks (functions of b, h, q_idx, kv_idx)")
    return _joined_masks(symbol, *(m if isinstance(m, Mask) else Mask(m) for m in (left, right)))


@remade_by_call
def _joined_masks(symbol: str, a: Mask, b_: Mask) -> Mask:
    f, g = function_of(a), function_of(b_)
    if symbol == "&":

        def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return f(b, h, q_idx, kv_idx) & g(b, h, q_idx, kv_idx)

    else:

        def joined(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return f(b, h, q_idx, kv_idx) | g(b, h, q_idx, kv_idx)

    return Mask(joined, f"{_grouped(a.name, symbol)} {symbol} {_grouped(b_.name, symbol)}")


def _grouped(name: str, symbol: str = "~") -> str:
    needs = any(f" {s} " in name for s in "&|" if s != symbol)
    return f"({name})" if needs else name


def _positional(fn: Callable) -> list[str]:
    if torch.compiler.is_dynamo_compiling():  # Dynamo cannot trace inspect
        return _of_code(fn)
    if type(fn) is FunctionType and not {"__wrapped__", "__signature__"} & vars(fn).keys():
        return _of_code(fn)  # the same result as inspect's in a tenth of the time
    parameters = inspect.signature(fn).parameters.values()
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty]


def _of_code(fn: Any) -> list[str]:
    code = fn.__code__
    return list(code.co_varnames[: code.co_argcount - len(fn.__defaults__ or ())])


def _required_arguments(fn: Callable) -> int:
    return len(_positional(fn))
