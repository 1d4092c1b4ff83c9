"""``PagedKVCache``: a pool of pages for keys and values, and the pages that each sequence holds.

Source: Kwon et al., PagedAttention (arXiv:2309.06180).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from anyattn.arithmetic import ceil_div
from anyattn.errors import OutOfPagesError
from anyattn.kvcache import append
from anyattn.kvcache.quantise import LIMITS, Scaling, given_scale
from anyattn.sparsity.arguments import length
from anyattn.tensors.devices import usable_device

__all__ = ["PagedKVCache"]

Handles = int | Sequence[int]
Counts = int | Sequence[int]


@dataclass(eq=False)
class _Sequence:
    """pages: int32, on the host, in the order of the tokens. lengths: number of tokens by layer;
    these differ only in the middle of a step."""

    pages: Tensor
    lengths: list[int]


class PagedKVCache:
    """Keys and values of many growing sequences, in pages that are allocated as needed and returned when a sequence is freed.

    num_pages, page_size: the pool, which all sequences share; a page holds page_size tokens in every layer. num_heads_kv, head_dim: of the
    keys. head_dim_v: of the values, the same if None. v_dim: the values are the first v_dim columns of the keys (multi-head latent
    attention, shared keys and values), which are held and appended once; then ``v_cache`` is a view of ``k_cache``. num_layers: pools of
    that shape, which are filled together and share one page table. dtype, device: of the pools. dtype: a float dtype, or ``float8_e4m3fn``,
    ``float8_e5m2`` or ``int8`` for a cache of 8 bits.

    k_descale, v_descale: the scales of an 8-bit cache, whose values are stored numbers times scale. None: a scale for each token and head,
    four bytes, which appending computes and the cache keeps. Given scales are constant: a number, or float32 of one element, (Hkv,) or
    (num_layers, Hkv). A value that is out of range becomes the nearest one in range, and is counted (``saturated``).

    A decode step is one ``reserve``, one ``anyattn.flash_attn_with_kvcache`` per layer, which appends, and one ``advance``. ``append`` is
    for keys and values that already exist. Methods take one handle or a list of handles; arguments are checked and pages are found before
    anything is changed. The cache is for inference: it records no gradients. It is not thread-safe.

    Raises ``TypeError``/``ValueError`` for sizes and tensors that do not fit, for a device that this torch does not have and for an unknown
    or freed handle, and ``OutOfPagesError`` if the pool has too few free pages.

    >>> import torch, anyattn
    >>> cache = anyattn.PagedKVCache(num_pages=8, page_size=16, num_heads_kv=2, head_dim=4, num_layers=3, dtype=torch.float32)
    >>> sequences = [cache.add_sequence(), cache.add_sequence()]
    >>> cache.reserve(sequences, [5, 20])  # the prompts' lengths; then one forward pass for each, and
    >>> cache.advance(sequences, [5, 20])
    >>> for step in range(2):
    ...     cache.reserve(sequences, 1)
    ...     for layer in range(3):
    ...         q, k, v = torch.randn(3, 2, 1, 2, 4)
    ...         out = anyattn.flash_attn_with_kvcache(
    ...             q, cache.k_cache(layer), cache.v_cache(layer), k=k, v=v, causal=True,
    ...             cache_seqlens=cache.seqlens(sequences), page_table=cache.page_table(sequences),
    ...         )
    ...     cache.advance(sequences, 1)
    >>> cache.seqlens(sequences)
    tensor([ 7, 22], dtype=torch.int32)
    >>> cache
    PagedKVCache(8 pages of 16 tokens, 5 of them free; 2 sequences; 3 layers, 2 heads, head_dim 4, torch.float32 on cpu)
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        *,
        head_dim_v: int | None = None,
        v_dim: int | None = None,
        num_layers: int = 1,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        k_descale: float | Tensor | None = None,
        v_descale: float | Tensor | None = None,
    ) -> None:
        self.num_pages, self.page_size = length("num_pages", num_pages), length("page_size", page_size, 1)
        self.num_heads_kv, self.num_layers = length("num_heads_kv", num_heads_kv, 1), length("num_layers", num_layers, 1)
        self.head_dim = length("head_dim", head_dim, 1)
        self.v_dim = None if v_dim is None else length("v_dim", v_dim, 1)
        self.head_dim_v = self.v_dim or (self.head_dim if head_dim_v is None else length("head_dim_v", head_dim_v, 1))
        _check_v_dim(self.v_dim, head_dim_v, self.head_dim, v_descale)
        _check_dtype(dtype)
        device = usable_device(device)
        shape = (self.num_layers, self.num_pages, self.page_size, self.num_heads_kv)
        self._k = torch.zeros(*shape, self.head_dim, dtype=dtype, device=device)
        self._k_descales = _descales("k_descale", k_descale, self._k)
        if self.v_dim is None:
            self._v = torch.zeros(*shape, self.head_dim_v, dtype=dtype, device=device)
            self._v_descales = _descales("v_descale", v_descale, self._k)
        else:
            self._v, self._v_descales = self._k[..., : self.v_dim], self._k_descales
        self._saturated = torch.zeros(1, dtype=torch.int64, device=device) if dtype in LIMITS else None
        self._free = list(range(self.num_pages - 1, -1, -1))  # a stack: the page freed last is used first, while it is in cache
        self._sequences: dict[int, _Sequence] = {}
        self._next_handle = 0

    @property
    def free_pages(self) -> int:
        """Pages that no sequence holds."""
        return len(self._free)

    def add_sequence(self) -> int:
        """The handle of a new, empty sequence. It holds no page yet, and its number is never reused."""
        handle = self._next_handle
        self._next_handle += 1
        self._sequences[handle] = _Sequence(torch.empty(0, dtype=torch.int32, device="cpu"), [0] * self.num_layers)
        return handle

    def free(self, handles: Handles) -> None:
        """Returns the sequences' pages to the pool; their handles become invalid."""
        for handle, sequence in zip(_listed(handles), self._of(handles, once=True)):
            self._free += reversed(sequence.pages.tolist())
            del self._sequences[handle]

    def reserve(self, handles: Handles, new_tokens: Counts) -> None:
        """Allocates the pages that ``new_tokens`` more tokens of each sequence need:
        for all sequences or, if the pool is too small, for none.

        new_tokens: one int for all sequences, or one per sequence. Raises ``OutOfPagesError`` if there are too few free pages.
        """
        sequences = self._of(handles, once=True)
        counts = _counts("new_tokens", new_tokens, len(sequences))
        self._hand_out(sequences, [self._in_all(s) + n for s, n in zip(sequences, counts)])

    def append(self, handles: Handles, k: Tensor | Sequence[Tensor], v: Tensor | Sequence[Tensor] | None = None, layer: int = 0) -> None:
        """Appends keys and values of one layer to the sequences, and reserves the pages for them.

        k: (B, S_new, Hkv, D), or a list of B tensors (S_new, Hkv, D), whose lengths may differ. v: the same with Dv; None for a cache with
        v_dim, and only there. Both in the cache's dtype, or in any float dtype for an 8-bit cache. A token counts as appended once it is in
        every layer: until then ``seqlens(handles, layer)`` counts it, and ``advance`` raises.
        """
        sequences, at = self._of(handles, once=True), self._layer(layer)
        if v is None and self.v_dim is None:
            raise ValueError("v is None; wanted the values, which only a cache with v_dim has in its keys")
        if v is not None and self.v_dim is not None:
            raise ValueError(
                f"v is given, but the values of this cache are the first v_dim={self.v_dim} columns of its keys; wanted v=None"
            )
        pools = (self._k[at], self._v[at])
        k_rows, new = _rows("k", k, len(sequences), pools[0])
        v_rows, new_v = (None, new) if v is None else _rows("v", v, len(sequences), pools[1])
        if new != new_v:
            raise ValueError(f"k has {new} new tokens by sequence but v has {new_v}; wanted the same")
        held = [s.lengths[at] for s in sequences]
        self._hand_out(sequences, [have + count for have, count in zip(held, new)])
        start, rows = (torch.tensor(x, dtype=torch.int64, device=self._k.device) for x in (held, new))
        first, second = append.slots(start, rows, start, self._table(sequences), self.page_size)
        with torch.no_grad():
            append.append(pools[0], k_rows, first, second, Scaling(self._k_descales[at], self._saturated))
            if v_rows is not None:
                append.append(pools[1], v_rows, first, second, Scaling(self._v_descales[at], self._saturated))
        for sequence, count in zip(sequences, new):
            sequence.lengths[at] += count

    def advance(self, handles: Handles, n: Counts) -> None:
        """Adds ``n`` to the length of each sequence, for tokens that attention calls have appended in every layer.

        n: one int for all sequences, or one per sequence. Raises ``ValueError`` if their pages are not reserved.
        """
        sequences = self._of(handles, once=True)
        counts = _counts("n", n, len(sequences))
        for handle, sequence, count in zip(_listed(handles), sequences, counts):
            held, room = self._in_all(sequence), len(sequence.pages) * self.page_size
            if max(sequence.lengths) != held:
                raise ValueError(
                    f"sequence {handle} holds {sequence.lengths} tokens by layer, so it cannot advance in all at once: append to the "
                    f"other layers first (append counts its own tokens)"
                )
            if held + count > room:
                raise ValueError(
                    f"n={count} for sequence {handle}, which holds {held} tokens on {len(sequence.pages)} pages of {self.page_size}; "
                    f"wanted at most {room - held}: call reserve before the tokens are appended"
                )
        for sequence, count in zip(sequences, counts):
            sequence.lengths = [have + count for have in sequence.lengths]

    def k_cache(self, layer: int = 0) -> Tensor:
        """The pool of keys of a layer, (num_pages, page_size, Hkv, D): the cache itself, not a copy."""
        return self._k[self._layer(layer)]

    def v_cache(self, layer: int = 0) -> Tensor:
        """The pool of values of a layer, (num_pages, page_size, Hkv, Dv): the cache itself, not a copy."""
        return self._v[self._layer(layer)]

    def k_descale(self, layer: int = 0) -> Tensor | float | None:
        """The argument ``k_descale`` of attention over a layer: the scales themselves, (num_pages, page_size, Hkv), which appending writes,
        or given ones, a number or (1, Hkv). None if the cache does not have 8 bits."""
        return self._k_descales[self._layer(layer)]

    def v_descale(self, layer: int = 0) -> Tensor | float | None:
        """The argument ``v_descale`` of attention over a layer, as ``k_descale``."""
        return self._v_descales[self._layer(layer)]

    @property
    def saturated(self) -> Tensor | None:
        """int64 (1,) on the cache's device: the number of values that were out of range when they were appended; None if the cache does not
        have 8 bits. It is the argument ``saturated`` of attention, which adds to it; ``.zero_()`` starts anew."""
        return self._saturated

    @property
    def nbytes(self) -> int:
        """Bytes of memory on the device: keys, values and their scales."""
        held = (self._k, *self._k_descales) if self.v_dim is not None else (self._k, self._v, *self._k_descales, *self._v_descales)
        return sum(t.numel() * t.element_size() for t in held if isinstance(t, Tensor))

    def quantised(
        self, dtype: torch.dtype, *, k_descale: float | Tensor | None = None, v_descale: float | Tensor | None = None
    ) -> PagedKVCache:
        """A copy with 8 bits: the same sequences, handles and page tables, each with memory of its own.

        dtype: ``float8_e4m3fn``, ``float8_e5m2`` or ``int8``. k_descale, v_descale: as for a new cache; None computes a scale for each
        token and head. The copy's ``saturated`` counts the values that were out of range.

        >>> import torch, anyattn
        >>> cache = anyattn.PagedKVCache(8, 16, num_heads_kv=2, head_dim=64, dtype=torch.bfloat16)
        >>> cache.append(cache.add_sequence(), torch.randn(1, 5, 2, 64).bfloat16(), torch.randn(1, 5, 2, 64).bfloat16())
        >>> small = cache.quantised(torch.float8_e4m3fn)
        >>> small.seqlens([0]).item(), small.nbytes / cache.nbytes
        (5, 0.53125)
        """
        if dtype not in LIMITS:
            raise TypeError(f"dtype is {dtype!r}; wanted float8_e4m3fn, float8_e5m2 or int8, the dtypes of 8-bit caches")
        if self._k.dtype in LIMITS:
            raise TypeError(f"the cache is {self._k.dtype} already; wanted a cache of a float dtype, whose values are still known exactly")
        made = PagedKVCache(
            self.num_pages, self.page_size, self.num_heads_kv, self.head_dim, num_layers=self.num_layers, dtype=dtype,
            head_dim_v=None if self.v_dim is not None else self.head_dim_v, v_dim=self.v_dim, device=self._k.device, k_descale=k_descale,
            v_descale=v_descale,
        )  # fmt: skip
        sequences = list(self._sequences.values())
        made._free, made._next_handle = list(self._free), self._next_handle
        made._sequences = {h: _Sequence(s.pages.clone(), list(s.lengths)) for h, s in self._sequences.items()}
        table = self._table(sequences)
        for at in range(self.num_layers):
            rows = torch.tensor([s.lengths[at] for s in sequences], dtype=torch.int64, device=self._k.device)
            first, second = append.slots(torch.zeros_like(rows), rows, rows, table, self.page_size)
            with torch.no_grad():
                append.append(made._k[at], self._k[at][first, second], first, second, Scaling(made._k_descales[at], made._saturated))
                if self.v_dim is None:
                    append.append(made._v[at], self._v[at][first, second], first, second, Scaling(made._v_descales[at], made._saturated))
        return made

    def page_table(self, handles: Handles) -> Tensor:
        """int32 (B, max_pages) on the cache's device: the pages of each sequence, reserved ones included, then 0."""
        return self._table(self._of(handles))

    def seqlens(self, handles: Handles, layer: int | None = None) -> Tensor:
        """int32 (B,) on the cache's device: the number of tokens of each sequence in a layer;
        for None, the number that is in every layer."""
        sequences = self._of(handles)
        at = None if layer is None else self._layer(layer)
        held = [self._in_all(s) if at is None else s.lengths[at] for s in sequences]
        return torch.tensor(held, dtype=torch.int32, device=self._k.device)

    def __repr__(self) -> str:
        of_values = f" (values {self.head_dim_v})" if self.head_dim_v != self.head_dim else ""
        width = f"head_dim {self.head_dim}" + (of_values if self.v_dim is None else f" (values the first {self.v_dim})")
        return (
            f"PagedKVCache({self.num_pages} pages of {self.page_size} tokens, {self.free_pages} of them free; {len(self._sequences)} "
            f"sequences; {self.num_layers} layers, {self.num_heads_kv} heads, {width}, {self._k.dtype} on {self._k.device})"
        )

    # ---- internals

    def _of(self, handles: Handles, once: bool = False) -> list[_Sequence]:
        """The sequences of handles; raises for an unknown handle, and with ``once`` for a repeated one."""
        listed = _listed(handles)
        for handle in listed:
            if handle in self._sequences:
                continue
            if 0 <= handle < self._next_handle:
                raise ValueError(f"sequence {handle} was freed, and its pages may belong to another; add_sequence() starts a new sequence")
            raise ValueError(f"sequence {handle} is unknown to this cache; wanted a handle that its add_sequence() returned")
        if once and len(set(listed)) < len(listed):
            twice = next(handle for i, handle in enumerate(listed) if handle in listed[:i])
            raise ValueError(f"handles has sequence {twice} twice; wanted each once: leave one out")
        return [self._sequences[handle] for handle in listed]

    def _in_all(self, sequence: _Sequence) -> int:
        return min(sequence.lengths)

    def _layer(self, layer: int) -> int:
        at = length("layer", layer)
        if at >= self.num_layers:
            raise ValueError(f"layer is {at} but the cache has {self.num_layers}; wanted 0 to {self.num_layers - 1}, or more num_layers")
        return at

    def _hand_out(self, sequences: list[_Sequence], lengths: list[int]) -> None:
        """Allocates pages for ``lengths`` tokens of the sequences; raises and allocates none if there are too few."""
        missing = [max(0, ceil_div(n, self.page_size) - len(s.pages)) for s, n in zip(sequences, lengths)]
        if sum(missing) > len(self._free):
            raise OutOfPagesError(
                f"{sum(missing)} more pages of {self.page_size} tokens are needed, but of {self.num_pages} only {len(self._free)} are "
                f"free; nothing was changed: free a sequence, or make the cache with a greater num_pages"
            )
        for sequence, count in zip(sequences, missing):
            if count:
                taken = torch.tensor([self._free.pop() for _ in range(count)], dtype=torch.int32, device="cpu")
                sequence.pages = torch.cat((sequence.pages, taken))

    def _table(self, sequences: list[_Sequence]) -> Tensor:
        if not sequences:
            return torch.zeros(0, 0, dtype=torch.int32, device=self._k.device)
        return pad_sequence([s.pages for s in sequences], batch_first=True).to(self._k.device)


def _check_dtype(dtype: Any) -> None:
    if dtype in LIMITS or (isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1):
        return
    hint = ": what its bytes mean must be known, pass torch.float8_e4m3fn" if dtype in (torch.uint8, torch.bool) else ""
    raise TypeError(f"dtype is {dtype!r}; wanted a float dtype, such as torch.bfloat16, or float8_e4m3fn, float8_e5m2 or int8{hint}")


def _check_v_dim(v_dim: int | None, head_dim_v: int | None, head_dim: int, v_descale: float | Tensor | None) -> None:
    if v_dim is None:
        return
    if v_dim > head_dim:
        raise ValueError(f"v_dim={v_dim} columns of keys with head_dim={head_dim}; wanted at most {head_dim}")
    for name, given in (("head_dim_v", head_dim_v), ("v_descale", v_descale)):
        if given is not None:
            raise ValueError(f"{name} is given with v_dim={v_dim}, whose values are keys; wanted {name}=None: k_descale is that of both")


def _descales(name: str, given: float | Tensor | None, pool: Tensor) -> list[Tensor | float | None]:
    """The descale of each layer. pool: (num_layers, num_pages, page_size, Hkv, D)."""
    layers, pages, page_size, heads = pool.shape[:4]
    if pool.dtype not in LIMITS:
        if given is not None:
            raise ValueError(f"{name} is given for a cache of {pool.dtype}, which has no scales; wanted None, or dtype=torch.float8_e4m3fn")
        return [None] * layers
    if given is None:
        # the scales of a head's tokens lie side by side, as attention reads them
        return list(torch.ones(layers, pages, heads, page_size, dtype=torch.float32, device=pool.device).transpose(-1, -2))
    scale = given_scale(name, given, (layers, heads), pool.device)
    return [scale] * layers if isinstance(scale, float) else [row[None] for row in scale]


def _listed(handles: Any) -> list[int]:
    if isinstance(handles, Tensor) and handles.ndim:
        handles = handles.tolist()
    if isinstance(handles, (list, tuple, range)):
        return [length(f"handles[{i}]", handle) for i, handle in enumerate(handles)]
    return [length("handles", handles)]


def _counts(name: str, value: Any, batch: int) -> list[int]:
    """``value`` as one count per sequence."""
    if isinstance(value, Tensor) and value.ndim:
        value = value.tolist()
    if not isinstance(value, (list, tuple)):
        return [length(name, value)] * batch
    if len(value) != batch:
        raise ValueError(f"{name} has {len(value)} entries for {batch} sequences; wanted one for each, or one int for all")
    return [length(f"{name}[{i}]", n) for i, n in enumerate(value)]


def _rows(name: str, given: Any, batch: int, pool: Tensor) -> tuple[Tensor, list[int]]:
    """(total_new, H, D), the rows of all sequences concatenated, and the number of rows of each."""
    heads, width = pool.shape[2:]
    if isinstance(given, Tensor):
        if given.ndim != 4 or given.shape[0] != batch or given.shape[2:] != (heads, width):
            raise ValueError(f"{name} has shape {tuple(given.shape)}; wanted ({batch}, new tokens, {heads}, {width}), or a list of {batch}")
        given = given.unbind(0)
    elif not isinstance(given, (list, tuple)):
        raise TypeError(
            f"{name} is a {type(given).__name__}; wanted a tensor ({batch}, new tokens, {heads}, {width}), or a list of {batch}"
        )
    if len(given) != batch:
        raise ValueError(f"{name} has {len(given)} tensors for {batch} sequences; wanted one for each: (new tokens, {heads}, {width})")
    for i, rows in enumerate(given):
        if not isinstance(rows, Tensor):
            raise TypeError(f"{name}[{i}] is a {type(rows).__name__}; wanted a tensor (new tokens, {heads}, {width})")
        if rows.ndim != 3 or rows.shape[1:] != (heads, width):
            raise ValueError(f"{name}[{i}] has shape {tuple(rows.shape)}; wanted (new tokens, {heads}, {width})")
        is_right = rows.is_floating_point() if pool.dtype in LIMITS else rows.dtype is pool.dtype
        if not is_right or rows.device != pool.device:
            wanted = f"any float dtype on {pool.device}, which appending quantises" if pool.dtype in LIMITS else "the same"
            raise ValueError(
                f"{name}[{i}] is {rows.dtype} on {rows.device} but the cache is {pool.dtype} on {pool.device}; wanted {wanted}: convert it "
                f"with .to()"
            )
    return (torch.cat(list(given)) if given else pool.new_empty(0, heads, width)), [len(rows) for rows in given]
