"""``MaskDescription``: the mask of all layers of one type in one forward pass, and the anyattn call that each of them makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from anyattn.integrations.transformers import forward_passes
from anyattn.sparsity.block_mask import BlockMask

__all__ = [
    "Aligned",
    "Cached",
    "FewRows",
    "Listed",
    "MaskDescription",
    "Masked",
    "Packed",
    "Unplanned",
    "Way",
    "mark_used",
    "refuse_dropped",
]


class Aligned(NamedTuple):
    """``flash_attn_func`` with causality and a window: the last query sees the last key."""

    causal: bool
    window: tuple[int, int]


class Cached(NamedTuple):
    """``flash_attn_with_kvcache``: the queries are the last of the rows in use.

    lengths: int32 (B,), key rows in use, padding included; None is all rows. leftpad: integers (B,), padding rows at the beginning.
    mask_mod: an additional mask, over the positions of that call.
    """

    lengths: Tensor | None
    leftpad: Tensor | None
    causal: bool
    window: tuple[int, int]
    mask_mod: Callable | None


class Listed(NamedTuple):
    """``flex_attention`` with block lists, which are made once for all layers."""

    block_mask: BlockMask

    def to(self, device: Any) -> Listed:
        return Listed(self.block_mask.to(device))


class Packed(NamedTuple):
    """``flash_attn_varlen_func`` over the rows of all batch entries, one after the other: inside ``anyattn.batch_invariant()``, where keys
    have to have the places in tiles that they have in a sequence of their own.

    ends: int32 (sequences + 1,), cumulative lengths. longest: the greatest length.
    """

    ends: Tensor
    longest: int
    causal: bool
    window: tuple[int, int]


class Masked(NamedTuple):
    """``flex_attention`` with a mask mod over query and key rows, inside a compiled graph; that call finds the tiles itself."""

    mask_mod: Callable


class Unplanned(NamedTuple):
    """A mask that the active plan of context parallelism does not have, refused if a layer receives it: models also make masks that none
    of their layers has. kind: of the layers. names: of the plan's masks."""

    kind: str
    names: tuple[str, ...]

    def refuse(self) -> NoReturn:
        raise ValueError(
            f"a layer of {self.kind} has no mask in the active plan, which has {list(self.names)}; wanted "
            "anyattn.distributed.plan(anyattn.distributed.transformers_masks(model.config, batch), ...)"
        )


Way = Aligned | Cached | Listed | Packed | Masked | Unplanned


class FewRows(NamedTuple):
    """A few query rows on a CPU, which see the keys ``lo <= kv < hi``, each up to its own row if ``is_causal``, except hidden ones.

    hidden: (B, hi - lo), None if no key is hidden.
    """

    lo: int
    hi: int
    hidden: Tensor | None
    is_causal: bool


class MaskDescription:
    """A mask as a description instead of a tensor or lists. It is cheap: one is made per forward pass for each type of layer.

    A model may pass it on, to ``create_causal_mask`` too, move it to a device and read its shape. Everything else that a model does with a
    tensor is refused, because the description has no elements. It is no ``BlockMask``: models that test for one treat it as nothing to do.
    """

    def __init__(self, batch: int, lengths: tuple[int, int], way: Way, rows: FewRows | None, listed: Callable[[], Listed] | None):
        """lengths: of queries and keys. rows: set if the layers have few rows on a CPU. listed: makes the same mask as lists, for a way
        without gradients."""
        self.batch = batch
        self.seq_lengths = lengths
        self.way = way
        self.rows = rows
        self.is_decoding = False  # one row on a CPU, determined by ``way`` alone, as in a graph
        self.has_documents = False
        self.model = "this model"
        self.of_documents: Callable[[Tensor], MaskDescription | None] | None = None
        self.is_used = False
        self.replaced_by = "another"
        self._listed = listed
        self._biases: dict[torch.dtype, Tensor] = {}
        self._separated: tuple[MaskDescription | None, Tensor | None] = (None, None)

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.batch, 1, *self.seq_lengths))

    ndim = 4

    def dim(self) -> int:
        return 4

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def contiguous(self) -> MaskDescription:
        """The mask itself; ``generate`` calls this on every mask."""
        return self

    def to(self, device: Any) -> MaskDescription:
        """A copy for another device, for models spread over several; block lists are moved, also those that are made later, but tensors
        that mods read are not. Numbers about few rows belong to a CPU and are left out elsewhere."""
        if isinstance(device, (torch.dtype, Tensor)):
            self._refuse(f"converts its mask to {device if isinstance(device, torch.dtype) else 'the dtype of a tensor'}")
        way, listed = self.way, self._listed
        if isinstance(way, Listed):
            way = way.to(device)
        elif isinstance(way, Packed):
            way = way._replace(ends=way.ends.to(device))
        elif isinstance(way, Cached):
            moved = [None if t is None else t.to(device) for t in (way.lengths, way.leftpad)]
            way = Cached(moved[0], moved[1], *way[2:])
        stays_on_cpu = torch.device(device).type == "cpu"
        later = None if listed is None else lambda: listed().to(device)
        other = MaskDescription(self.batch, self.seq_lengths, way, self.rows if stays_on_cpu else None, later)
        other.is_decoding, other.has_documents = self.is_decoding and stays_on_cpu, self.has_documents
        other.model, other.of_documents = self.model, self.of_documents
        self.is_used = True
        return other

    def separated(self, position_ids: Tensor) -> MaskDescription:
        """The mask of packed sequences where ``position_ids``, integers (B or 1, S) or (axes, B or 1, S), start again; the mask itself if
        they do not."""
        if self.of_documents is None:
            return self
        found, of = self._separated
        if of is not position_ids:
            found = self.of_documents(position_ids)
            self._separated = (found, position_ids)
        return self if found is None else found

    def refuse_if_unused(self) -> None:
        """Raises ``TypeError`` if no layer has received the mask, but another in its place."""
        if not self.is_used:
            self._refuse(f"drops the mask {self!r} and passes {self.replaced_by} to attention in its place, or changes it")

    def with_gradients(self) -> Way:
        """The call of the layers, replaced by one with gradients if it has none."""
        if isinstance(self.way, Cached) and self._listed is not None:
            self.way, self._listed = self._listed(), None
        return self.way

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """The bias of ``rows`` on scores, (B, 1, 1, hi - lo), 0 or -inf; computed at the first layer."""
        rows = self.rows
        if rows is None or rows.hidden is None:
            return None
        found = self._biases.get(dtype)
        if found is None:
            found = torch.zeros_like(rows.hidden, dtype=dtype).masked_fill_(rows.hidden, float("-inf"))[:, None, None]
            self._biases[dtype] = found
        return found

    def __repr__(self) -> str:
        return f"MaskDescription(shape={self.shape}, {self.way!r})"

    __str__ = __repr__

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(self._refusal(what))

    def _refusal(self, what: str) -> str:
        return (
            f"{self.model} {what} before attention: it does not leave its mask to Transformers' attention interface, and the mask of "
            "attn_implementation='anyattn' has no elements; wanted a model that does not edit its mask: use attn_implementation='sdpa' or "
            "'eager' for this one"
        )

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # of Python's own protocols, which try whether there is one
            raise AttributeError(name)
        raise AttributeError(self._refusal(f"reads .{name} of its mask"))

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> NoReturn:
        found = _first_of(cls, (*args, *(kwargs or {}).values()))
        raise TypeError(found._refusal(f"calls torch's {getattr(function, '__name__', function)} with its mask"))

    def __getitem__(self, index: Any) -> NoReturn:
        self._refuse(f"indexes its mask by {index!r}")

    def __eq__(self, other: object) -> Any:
        if isinstance(other, (bool, int, float, Tensor)):
            self._refuse("compares its mask with a number")
        return self is other

    __hash__ = object.__hash__


def _first_of(cls: type, values: Any) -> Any:
    """The first instance of ``cls`` among the values and the sequences in them."""
    for value in values:
        found = _first_of(cls, value) if isinstance(value, (list, tuple)) else value
        if isinstance(found, cls):
            return found
    return None


def _refusing(name: str) -> Callable:
    def method(self: MaskDescription, *args: Any) -> NoReturn:
        self._refuse(f"computes with its mask ({name})")

    return method


_REFUSED = (
    "add", "radd", "iadd", "sub", "rsub", "isub", "mul", "rmul", "imul", "truediv", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg",
    "pos", "abs", "invert", "and", "rand", "iand", "or", "ror", "ior", "xor", "rxor", "lt", "le", "gt", "ge", "len", "iter", "contains",
    "bool", "int", "float", "setitem",
)  # fmt: skip
for _name in _REFUSED:
    setattr(MaskDescription, f"__{_name}__", _refusing(f"__{_name}__"))


def mark_used(mask: MaskDescription) -> None:
    """Notes that a layer has received the mask; a compiled graph notes nothing."""
    if not mask.is_used and not torch.compiler.is_compiling():
        mask.is_used = True
        forward_passes.forget(mask)


def refuse_dropped(lengths: tuple[int, int], what: str, harmless: Callable[[Way], bool] = lambda way: False) -> None:
    """Raises ``TypeError`` if a mask was described for layers of these lengths, queries and keys, and none has received it: the model has
    dropped the causality and the padding that it describes. If the layer may be of another model, inside the one that has made the mask,
    the error is raised at the end of that one's forward pass, and only if no layer has received the mask by then.
    what: the mask that has come in its place. harmless: whether that is the same.
    """
    if torch.compiler.is_compiling():
        return
    for mask, is_of_innermost in forward_passes.unused_masks():
        if mask.seq_lengths == lengths and not mask.is_used and not harmless(mask.way):
            mask.replaced_by = what
            if is_of_innermost:
                mask.refuse_if_unused()
            forward_passes.note_replaced(mask)
