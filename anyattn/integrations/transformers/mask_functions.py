"""Recognition of Transformers' mask functions: which are causal masks, windows or packed sequences, and which remain functions.

A mask function ``(b, h, q, kv) -> bool`` is composed of closures of ``transformers.masking_utils``. A closure is recognised by its code
object, which only its factory produces, and by its captured values; any other function remains a function and is called.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

__all__ = ["Form", "form_of", "kind_of"]


@dataclass(frozen=True)
class Form:
    """A mask as the conjunction of its parts, over global positions.

    causal: ``kv <= q``. left, right: most positions before and after q, None for no limit. documents: integers (B, S), q and kv are in the
    same document. rest: mask functions that are not recognised.
    """

    causal: bool = False
    left: int | None = None
    right: int | None = None
    documents: Tensor | None = None
    rest: tuple[Callable, ...] = ()

    @property
    def is_band(self) -> bool:
        """Whether the mask consists of causality and distances only."""
        return self.documents is None and len(self.rest) == 0  # Dynamo does not support `not` of a tuple

    @property
    def depends_on_places(self) -> bool:
        """Whether the mask depends on the positions of queries and keys."""
        return self.causal or self.left is not None or self.right is not None or not self.is_band

    @property
    def window(self) -> tuple[int, int]:
        """FlashAttention's ``window_size``, without causality."""
        return (-1 if self.left is None else self.left, -1 if self.right is None else self.right)


def form_of(mask_function: Callable) -> Form:
    """The parts of a mask function; one that is not recognised is the only part, in ``rest``."""
    if mask_function is masking_utils.causal_mask_function:
        return Form(causal=True)
    if mask_function is _bidirectional:
        return Form()  # q >= 0, true for every position
    if torch.compiler.is_compiling():
        return Form(rest=(mask_function,))  # Dynamo cannot trace closure contents
    form = Form()
    for part in _conjuncts(mask_function):
        form = _joined(form, _read(part))
    return form


def kind_of(mask_function: Callable) -> tuple[str | None, bool]:
    """The kind of layers, as configs name it, whose mask this is, leaving out what keeps packed sequences apart; and whether it is causal.

    None for a mask with functions that are not recognised, which counts as causal.
    """
    form = form_of(mask_function)
    parts = [_captured(f, "mask_function") if getattr(f, "__code__", None) is _REMAPPED else f for f in form.rest]
    for part in parts:
        form = _joined(replace(form, rest=()), form_of(part))
    if form.rest:
        return None, True
    return ("full_attention" if form.left is None else "sliding_attention"), form.causal


_bidirectional = getattr(masking_utils, "bidirectional_mask_function", None)


def _code_of(factory: str, *arguments: Any) -> Any:
    """The code of the closures that a factory of ``masking_utils`` makes; if there is no such factory, an object that equals no code."""
    make = getattr(masking_utils, factory, None)
    code = getattr(make(*arguments), "__code__", None) if make is not None else None
    return code if code is not None else object()


_AND = _code_of("and_masks", masking_utils.causal_mask_function)
_WINDOW = _code_of("sliding_window_overlay", 1)
_BAND = _code_of("sliding_window_bidirectional_overlay", 1)
_DOCUMENTS = _code_of("packed_sequence_mask_function", torch.zeros(1, 1, dtype=torch.int64, device="cpu"))
_REMAPPED = _code_of(
    "remap_positions_for_packed_sequence", masking_utils.causal_mask_function, torch.zeros(1, 1, dtype=torch.int64, device="cpu")
)


def _captured(function: Callable, name: str) -> Any:
    """The value of a closure's captured variable; None if it captures no variable of that name."""
    code, cells = getattr(function, "__code__", None), getattr(function, "__closure__", None) or ()
    names = code.co_freevars if code is not None else ()
    return cells[names.index(name)].cell_contents if name in names else None


def _conjuncts(mask_function: Callable) -> list[Callable]:
    if getattr(mask_function, "__code__", None) is not _AND:
        return [mask_function]
    return [part for function in _captured(mask_function, "mask_functions") for part in _conjuncts(function)]


def _read(part: Callable) -> Form:
    code = getattr(part, "__code__", None)
    if part is masking_utils.causal_mask_function or part is _bidirectional:
        return form_of(part)
    if code is _WINDOW:
        width = _captured(part, "sliding_window")
        # kv > q - width. An empty window has no window_size, since -1 there is no limit
        return Form(left=width - 1) if type(width) is int and width >= 1 else Form(rest=(part,))
    if code is _BAND:
        width = _captured(part, "sliding_window")
        return Form(left=width, right=width) if type(width) is int and width >= 0 else Form(rest=(part,))
    if code is _DOCUMENTS:
        ids = _captured(part, "packed_sequence_mask")
        return Form(documents=ids) if isinstance(ids, Tensor) and ids.ndim == 2 else Form(rest=(part,))
    return Form(rest=(part,))


def _joined(a: Form, b: Form) -> Form:
    documents, rest = a.documents, a.rest + b.rest
    if b.documents is not None:
        if documents is None:
            documents = b.documents
        else:
            rest = (*rest, masking_utils.packed_sequence_mask_function(b.documents))
    joined = Form(a.causal or b.causal, _least(a.left, b.left), _least(a.right, b.right), documents, rest)
    return _without_remapping(joined)


def _without_remapping(form: Form) -> Form:
    """The form without the indirection through ``position_ids``, if positions are consecutive inside every document.

    ``find_packed_sequence_indices`` begins a document wherever a position is not the previous one plus 1. If the documents are those of the
    positions, q - kv is the same in positions and in rows, and causality and windows depend on nothing else.
    """
    if form.documents is None or len(form.rest) != 1 or getattr(form.rest[0], "__code__", None) is not _REMAPPED:
        return form
    positions, inner = _captured(form.rest[0], "position_ids"), form_of(_captured(form.rest[0], "mask_function"))
    if not inner.is_band or not _are_documents_of(form.documents, positions):
        return form
    return _joined(replace(form, rest=()), inner)


def _are_documents_of(documents: Tensor, positions: Tensor) -> bool:
    """Whether positions are consecutive inside every document. On a GPU it is assumed,
    as ``create_causal_mask`` ensures it: a read synchronises."""
    if documents.shape != positions.shape:
        return False
    if documents.device.type != "cpu":
        return True
    continues = documents[:, 1:] == documents[:, :-1]
    ascends = bool((documents[:, 1:] >= documents[:, :-1]).all())  # no document occurs twice
    return ascends and bool(((positions.diff(dim=1) == 1) | ~continues).all())


def _least(a: int | None, b: int | None) -> int | None:
    return b if a is None else a if b is None else min(a, b)
