"""``BlockMask``: a subclass of torch's ``BlockMask``, built from the mask's structure instead of from all its pairs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree

from anyattn.arithmetic import ceil_div
from anyattn.fast_dataclass import OfFields
from anyattn.mods.analysis.tile_classes import EMPTY, FULL, PARTIAL
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.default_device import without_default_device
from anyattn.mods.tracing.pickling import refuse_nameless
from anyattn.mods.tracing.trace import TracedMod, name_of, trace
from anyattn.sparsity import captured
from anyattn.sparsity.arguments import device_of, length, pair, positions, without_transforms
from anyattn.sparsity.block_sparse import BlockSparseTensors
from anyattn.sparsity.chosen_blocks import lists_from_topk
from anyattn.sparsity.compute import lists_of_mask
from anyattn.sparsity.drawing import as_svg
from anyattn.sparsity.grid import BLOCK_MASK, TileGrid
from anyattn.sparsity.lists import both_ways, check_counts, grid_of_lists, lists_of_grid, with_partial_tails
from anyattn.sparsity.made_of import MadeOf, captures, counted_anew, made_of, note
from anyattn.sparsity.slices import as_map, positions_of, sliced, take, widened
from anyattn.tensors.dynamo import opaque
from anyattn.tensors.kinds import has_memory, not_scriptable, refuse_torchscript

__all__ = [
    "LISTS",
    "BlockMask",
    "are_unwritten",
    "block_mask_of_classes",
    "block_mask_of_lists",
    "build_block_mask",
    "lists_are_complete",
    "marked",
]

LISTS = tuple(f"{side}_{what}" for side in ("kv", "full_kv", "q", "full_q") for what in ("num_blocks", "indices"))
_EXACT_BY = frozenset(("mask_mod", "seq_lengths", "BLOCK_SIZE", *LISTS[:4]))


class BlockMask(torch_flex.BlockMask, OfFields):
    """torch's ``BlockMask``: lists of partial and full tiles in both directions, their mask, the block size and the sequence lengths.

    torch's ``flex_attention`` accepts this subclass, and anyattn accepts torch's class. The subclass adds: slices keep a working
    ``mask_mod`` and true ``seq_lengths``; ``_adjust`` crops any mask correctly; ``contiguous()``; ``block_sparse()``, the lists in the form
    that kernels read. In lists that anyattn built, entries of ``*_indices`` beyond a row's count are 0; torch leaves them undefined.
    ``is_exact`` says that the lists are known to follow from ``mask_mod``: a backend may then find the visible keys by either.
    """

    # set by ``marked``; None if a compiled graph made the lists; False again once a field of ``_EXACT_BY`` is assigned
    _exact: bool | None = False
    _is_ordered: bool = False  # set for lists that ``may_share``
    _leaves_heads: bool = False  # the lists only choose blocks, in which ``mask_mod`` decides by the query head, whatever heads they are of

    @classmethod
    def from_kv_blocks(
        cls,
        kv_num_blocks: Tensor,
        kv_indices: Tensor,
        full_kv_num_blocks: Tensor | None = None,
        full_kv_indices: Tensor | None = None,
        BLOCK_SIZE: int | tuple[int, int] = 128,
        mask_mod: Callable | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
        **order: Any,
    ) -> BlockMask:
        """A mask from the lists of key blocks of each row of query blocks; the other direction is derived.

        kv_num_blocks: int32 (..., M). kv_indices: int32 (..., M, N). full_*: the same for blocks that need no mask, or None.
        mask_mod: the mask inside partial blocks; None: all pairs are visible. seq_lengths: by default the lengths of whole blocks.
        order: torch's ``dq_*`` arguments.
        A count below 0 is an empty list, as in torch's kernels; N may be less than the number of key blocks. Raises ``ValueError`` for a
        count above N, and with compute_q_blocks for a block index out of range, unless on a GPU.
        """
        if kv_indices.dim() < 2:
            raise RuntimeError(f"kv_indices has shape {tuple(kv_indices.shape)}; a BlockMask has at least 2 dimensions (rows, columns)")
        if (full_kv_num_blocks is None) != (full_kv_indices is None):
            raise AssertionError("full_kv_num_blocks and full_kv_indices: pass both or neither")
        size = pair("BLOCK_SIZE", BLOCK_SIZE)
        check_counts("kv_num_blocks", kv_num_blocks, kv_indices)
        check_counts("full_kv_num_blocks", full_kv_num_blocks, full_kv_indices)
        seq_lengths = (kv_indices.shape[-2] * size[0], kv_indices.shape[-1] * size[1]) if seq_lengths is None else seq_lengths
        backward: list[Tensor | None] = [None] * 4
        if compute_q_blocks:
            columns = max(kv_indices.shape[-1], ceil_div(seq_lengths[1], size[1]))  # lists may have room for fewer blocks
            classes = [grid_of_lists(kv_num_blocks, kv_indices, None, None, columns)]
            if full_kv_num_blocks is not None and full_kv_indices is not None:
                classes.append(grid_of_lists(full_kv_num_blocks, full_kv_indices, None, None, columns))
            # the two lists are transposed separately: a caller may list a block in both
            for at, grid in enumerate(classes):
                backward[2 * at : 2 * at + 2] = lists_of_grid(grid.transpose(-1, -2), False)[:2]
        dq_order = order.pop("dq_kv_order", None)
        if dq_order is not None:
            order["dq_kv_order_spt" if isinstance(dq_order, bool) else "dq_kv_order"] = dq_order
        order = {name: value for name, value in order.items() if value is not None}
        mask_mod = mask_mod if mask_mod is not None else torch_flex.noop_mask
        lists: Any = (kv_num_blocks, kv_indices, full_kv_num_blocks, full_kv_indices, *backward)
        return cls(seq_lengths=seq_lengths, BLOCK_SIZE=size, mask_mod=mask_mod, **dict(zip(LISTS, lists, strict=True)), **order)

    @classmethod
    def from_block_map(
        cls,
        block_map: Tensor,
        *,
        BLOCK_SIZE: int | tuple[int, int],
        mask_mod: Callable | None = None,
        full_block_map: Tensor | None = None,
        seq_lengths: tuple[int, int] | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A mask from a map of its blocks. Does not wait for a GPU.

        block_map: bool (M, N) or (B, H, M, N), B and H may be 1: the blocks that are visited; mask_mod decides inside them.
        full_block_map: bool, of a shape that broadcasts with it: blocks that are seen whole, whatever mask_mod and block_map say.
        mask_mod: None: all pairs of the blocks are visible. seq_lengths: by default the lengths of whole blocks.
        Raises ``TypeError`` or ``ValueError`` naming the argument.

        >>> near = torch.eye(4, dtype=torch.bool)
        >>> BlockMask.from_block_map(near | near.roll(-1, 0), BLOCK_SIZE=64).seq_lengths
        (256, 256)
        """
        tile = pair("BLOCK_SIZE", BLOCK_SIZE)
        for name, t in (("block_map", block_map), ("full_block_map", full_block_map)):
            if (t is not None or name == "block_map") and not (isinstance(t, Tensor) and t.dtype is torch.bool):
                what = t.dtype if isinstance(t, Tensor) else type(t).__name__
                raise TypeError(f"{name} is {what}; wanted a bool tensor of blocks (M, N) or (B, H, M, N), such as {name} > 0")
            if t is not None and t.ndim not in (2, 4):
                raise ValueError(f"{name} has shape {tuple(t.shape)}; wanted (M, N) or (B, H, M, N), with B = H = 1 to broadcast")
        classes = torch.where(block_map, PARTIAL if mask_mod is not None else FULL, EMPTY)
        if full_block_map is not None:
            try:
                classes = torch.where(full_block_map, FULL, classes)
            except RuntimeError as error:
                raise ValueError(
                    f"full_block_map has shape {tuple(full_block_map.shape)} on {full_block_map.device}, block_map "
                    f"{tuple(block_map.shape)} on {block_map.device}; wanted maps of the same blocks on one device"
                ) from error
        grid = (classes.shape[-2], classes.shape[-1])
        lengths = (grid[0] * tile[0], grid[1] * tile[1]) if seq_lengths is None else seq_lengths
        lengths = (length("seq_lengths[0]", lengths[0]), length("seq_lengths[1]", lengths[1]))
        if tuple(map(ceil_div, lengths, tile)) != grid:
            raise ValueError(
                f"block_map has {grid[0]} x {grid[1]} blocks, but seq_lengths {lengths} in blocks of {tile} make "
                f"{ceil_div(lengths[0], tile[0])} x {ceil_div(lengths[1], tile[1])}; wanted one entry for each block"
            )
        classes = classes.to(torch.uint8).reshape((1,) * (4 - classes.ndim) + classes.shape)
        # a full block stays one at the sequences' ends too, where ``mask_mod`` may hide some of its pairs
        return cls.from_kv_blocks(*lists_of_grid(classes, True), tile, mask_mod, lengths, compute_q_blocks)

    @classmethod
    @not_scriptable
    def from_topk(
        cls,
        indices: Tensor,
        *,
        BLOCK_SIZE: int | tuple[int, int],
        seq_lengths: tuple[int, int],
        counts: Tensor | None = None,
        causal: bool = False,
        mask_mod: Callable | None = None,
        compute_q_blocks: bool = True,
    ) -> BlockMask:
        """A mask of chosen blocks: each row of query blocks sees the key blocks that ``indices`` names. Does not wait for a GPU.

        indices: int32 or int64 (B, H, query blocks, k): block numbers in any order; a repeated number is read once, and a negative one as
        no block. B = 1 shares the choice between batch entries; H is 1, the number of query heads, or the number of K/V heads, whose query
        heads then share it. counts: integers (B, H, query blocks), how many of a row's numbers are read; by default all k.
        seq_lengths: the numbers of queries and keys; the last blocks may be short. causal: a query sees no key after its own position,
        where the last query has the last key's. mask_mod: any other mask inside the blocks; both hold. Blocks that they hide whole are
        left out, and blocks that they show whole need no mask. compute_q_blocks: lists of key blocks too, unless blocks have one query.

        Memory: 8 bytes for each of ``indices``, and for each pair of a query block and a key block if there are lists of key blocks.
        On a GPU nothing is read on the host: a number beyond the keys is read as no block, and a count above k as k. On a CPU both raise
        ``ValueError``. Raises ``TypeError`` or ``ValueError`` naming the argument.

        >>> chosen = torch.tensor([[0, -1], [1, 0], [0, 0], [3, 1]])
        >>> mask = BlockMask.from_topk(chosen[None, None], BLOCK_SIZE=64, seq_lengths=(256, 256), causal=True)
        >>> mask.to_dense()[0, 0].tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 0, 0], [0, 1, 0, 1]]
        """
        if torch.compiler.is_compiling():
            topk_lists: Any = captured.entry_points.topk_lists
            made = topk_lists(indices, counts, BLOCK_SIZE, seq_lengths, causal, mask_mod, compute_q_blocks)
            captured_mask = block_mask_of_lists(made[0], made[1], made[2], made[3], cls)
            captured_mask._leaves_heads = made[0][2] is None
            return captured_mask
        made = lists_from_topk((indices, counts), BLOCK_SIZE, seq_lengths, causal, mask_mod, bool(compute_q_blocks))
        block_mask = block_mask_of_lists(*made, cls)
        block_mask.__dict__.update(_is_ordered=True, _leaves_heads=made[0][2] is None)
        return block_mask

    @classmethod
    def from_torch(cls, block_mask: torch_flex.BlockMask) -> BlockMask:
        """The same mask as ours; nothing is copied."""
        return block_mask if isinstance(block_mask, cls) else _like(block_mask, {}, cls)

    _made_of: MadeOf | None = None  # what the mask captured when the lists were made, set by ``marked``
    _told_apart: tuple[str, ...] = ()  # ``told_apart`` for masks that ``create_block_mask`` made

    @property
    def is_exact(self) -> bool:
        """Whether the lists are known to follow from ``mask_mod``, so that a reader may work from either alone.

        True for masks that ``create_block_mask`` made and for their slices, crops and copies, until a field is assigned, a list or a
        tensor that ``mask_mod`` captures is written to, or ``mask_mod`` captures something else. From then on the lists say which blocks
        are visited and which are seen whole, and inside the others ``mask_mod`` decides, with its captures as they are now.

        torch does not count a write through ``.data`` or ``.numpy()``: after one, ``is_exact`` stays True, and backends may still use
        ``mask_mod`` in place of the lists. Write to the tensor itself (``mask.kv_indices.copy_(new)``), or assign the field
        (``mask.kv_indices = new``). False if all batch entries or heads share one entry's lists although ``mask_mod`` depends on the index,
        and for captured inference tensors, to which torch counts no writes.
        """
        return self.was_exact and self._made_of is not None and self._made_of.holds(captures(self.mask_mod))

    @property
    def may_share(self) -> bool:
        """Whether kernels may read the lists themselves: they are ascending, with 0 beyond the counts."""
        return self._is_ordered and self._lists_are_unwritten()

    @property
    def was_exact(self) -> bool:
        """``is_exact``, but for what ``mask_mod`` captures now."""
        return bool(self._exact) and self._lists_are_unwritten()

    def _lists_are_unwritten(self) -> bool:
        return are_unwritten(self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices)

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)
        if name in _EXACT_BY:
            self.__dict__["_exact"] = self.__dict__["_is_ordered"] = False

    def block_sparse(self) -> BlockSparseTensors:
        """The lists as kernels read them, for tiles of ``BLOCK_SIZE``."""
        return BlockSparseTensors.from_block_mask(self)

    def __getitem__(self, index: Any) -> BlockMask:
        """The mask of some batch entries, heads and rows of query blocks; an integer keeps its dimension, with size 1.

        The result's ``mask_mod`` counts b, h and q_idx from the slice's beginning, and ``seq_lengths`` from its rows.

        >>> from anyattn import create_block_mask
        >>> mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, 512, 512, device="cpu")
        >>> part = mask[:, :, 2:]
        >>> part.shape, bool(part.mask_mod(*map(torch.tensor, (0, 0, 0, 256))))
        ((1, 1, 256, 512), True)
        """
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > 3:
            raise IndexError(f"a BlockMask is indexed by (batch, head, query block); got {len(index)} indices")
        lists = self._lists_4d()
        sizes, names = lists["kv_num_blocks"].shape, ("batch", "head", "query block")
        places = zip(names, sizes, (*index, *(slice(None),) * (3 - len(index))), strict=True)
        batch, head, rows = (positions_of(*place, lists["kv_indices"].device) for place in places)
        taken: dict[str, Any] = {name: None if t is None else take(t, [batch, head, rows]) for name, t in lists.items()}
        q_length = len(rows) * self.BLOCK_SIZE[0]
        if len(rows) and int(rows[-1]) == sizes[2] - 1:  # the last block may be short
            q_length -= sizes[2] * self.BLOCK_SIZE[0] - self.seq_lengths[0]
        # a dimension of size 1 broadcasts over batch entries or heads, so ``mask_mod`` takes the caller's b or h as it is
        b_map, h_map = (as_map(p) if n > 1 else None for p, n in zip((batch, head), sizes, strict=False))
        if self._leaves_heads and h_map is not None and _sees(trace(self.mask_mod, "mask").expr)[1]:
            raise ValueError(
                "this BlockMask is of chosen blocks, its heads may be K/V heads, and its mask_mod depends on the query head: which a head "
                "of the slice has is not known; wanted the first heads, mask[:, :n], or a slice of the indices given to BlockMask.from_topk"
            )
        adjusted = type(self).from_kv_blocks(
            **taken,
            BLOCK_SIZE=self.BLOCK_SIZE,
            mask_mod=sliced(self.mask_mod, b_map, h_map, as_map(rows), self.BLOCK_SIZE[0]),
            seq_lengths=(q_length, self.seq_lengths[1]),
            compute_q_blocks=self.q_indices is not None,
        )
        adjusted._leaves_heads = self._leaves_heads
        return _with_write_order(marked(adjusted, self.is_exact), self)

    def _lists_4d(self) -> dict[str, Any]:
        """The four lists of the forward direction, with batch and head dimensions even where torch's older slices dropped them."""
        lists = {name: getattr(self, name) for name in LISTS[:4]}
        missing = (1,) * (4 - self.kv_indices.ndim)
        return {name: None if t is None else t.reshape(*missing, *t.shape) for name, t in lists.items()}

    def _adjust(self, new_q_len: int, new_kv_len: int) -> BlockMask:
        """The mask of the first ``new_q_len`` rows and ``new_kv_len`` keys.

        A block that becomes a tail turns from full to partial. Raises ``ValueError`` for lengths beyond the mask's own.
        """
        new = (length("new_q_len", new_q_len), length("new_kv_len", new_kv_len))
        if any(n > old for n, old in zip(new, self.seq_lengths, strict=True)):
            raise ValueError(f"this BlockMask covers {tuple(self.seq_lengths)} and cannot grow to {new}; build one with create_block_mask")
        rows, columns = map(ceil_div, new, self.BLOCK_SIZE)
        classes = self._classes(*self._lists_4d().values())[..., :rows, :columns]
        separate, both = self.full_kv_num_blocks is not None, self.q_indices is not None
        retiled = block_mask_of_classes(classes, self.mask_mod, new, self.BLOCK_SIZE, separate, compute_q_blocks=both)
        retiled._leaves_heads = self._leaves_heads
        return _with_write_order(marked(retiled, self.is_exact), self)

    def sparsity(self) -> float:
        """The percentage of the mask's area that its listed blocks leave out (torch's formula: a tail block counts with its whole area)."""
        listed = sum(int(t.clamp(min=0).sum()) for t in (self.kv_num_blocks, self.full_kv_num_blocks) if t is not None)
        return 100 * (1 - listed * self.BLOCK_SIZE[0] * self.BLOCK_SIZE[1] / self.numel()) if self.numel() else 0.0

    def to_dense(self) -> Tensor:
        """int32 (B, H, M, N): 1 where a block is listed."""
        return (self._classes(*(getattr(self, name) for name in LISTS[:4])) != EMPTY).to(torch.int32)

    def _classes(self, cnt: Any, idx: Any, full_cnt: Any, full_idx: Any) -> Tensor:
        """uint8 (..., M, N): the classes of blocks by four lists, which may have room for fewer than N."""
        return grid_of_lists(cnt, idx, full_cnt, full_idx, max(idx.shape[-1], ceil_div(self.seq_lengths[1], self.BLOCK_SIZE[1])))

    def as_tuple(self, flatten: bool = True) -> Any:  # type: ignore[override]
        """torch's, with room for all key blocks in the rows' lists, which torch's kernel for CPUs takes for the number of keys."""
        fields: Any = torch_flex.BlockMask.as_tuple(self, flatten)  # type: ignore[call-overload]
        return widened(fields, (self.kv_indices, self.full_kv_indices), ceil_div(self.seq_lengths[1], self.BLOCK_SIZE[1]))

    def to(self, device: torch.device | str) -> BlockMask:
        """The lists on another device; tensors that ``mask_mod`` captures stay where they are."""
        return _like(self, {n: t.to(device) for n, t in self._tensors().items()})

    def contiguous(self) -> BlockMask:
        """The same mask with every list in contiguous memory."""
        return _like(self, {n: t.contiguous() for n, t in self._tensors().items()})

    def __getstate__(self) -> dict[str, Any]:
        refuse_nameless(self.mask_mod, f"this BlockMask of mask_mod {name_of(self.mask_mod)!r}")
        return self._state()

    def _state(self) -> dict[str, Any]:
        return {**vars(self), "_exact": self.is_exact, "_made_of": None, "_is_ordered": self.may_share}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        marked(self, state["_exact"])

    def __copy__(self) -> BlockMask:
        return _like(self, {})

    def __deepcopy__(self, memo: dict) -> BlockMask:
        copied = object.__new__(type(self))
        copied.__setstate__(copy.deepcopy(self._state(), memo))
        return copied

    def _repr_html_(self) -> str | None:
        """For notebooks: the blocks of the first batch entry and head, as ``anyattn show`` draws them; None for lists without values."""
        if not has_memory(self.kv_indices):
            return None
        lists = [None if t is None else t[:1, :1].cpu() for t in self._lists_4d().values()]
        (batch, heads, rows, keys), (tile_m, tile_n) = self.shape, self.BLOCK_SIZE
        which = f", b = 0 of {batch}, h = 0 of {heads}" if batch * heads > 1 else ""
        title = f"BlockMask of {name_of(self.mask_mod)}: {rows} queries x {keys} keys in blocks of {tile_m} x {tile_n}{which}"
        return as_svg(title, self._classes(*lists)[0, 0].numpy(), self.seq_lengths)

    def _tensors(self) -> dict[str, Tensor]:
        return {n: t for n, t in vars(self).items() if isinstance(t, Tensor)}


def _like(mask: torch_flex.BlockMask, changed: dict[str, Any], cls: type[BlockMask] | None = None) -> BlockMask:
    """A copy of ``mask`` with some fields changed; fields are taken by name, because torch versions differ in them."""
    changed_mask = object.__new__(cls or type(mask))
    changed_mask.__dict__.update(vars(mask))
    changed_mask.__dict__.update(changed, _is_ordered=getattr(mask, "may_share", False))  # copies of lists count no writes
    return marked(changed_mask, getattr(mask, "is_exact", False))  # type: ignore[arg-type]


def are_unwritten(*lists: Tensor | None) -> bool:
    """Whether torch has counted no write to the lists; False for inference tensors, whose writes torch does not count."""
    for t in lists:  # noqa: SIM110 - a generator takes longer
        if t is not None and (t.is_inference() or t._version != 0):
            return False
    return True


def marked(mask: BlockMask, is_exact: bool) -> BlockMask:
    """Records whether the lists follow from the mask; if so, ``counted_anew`` replaces lists whose write counter is not 0."""
    if is_exact and not mask._lists_are_unwritten():
        for name in LISTS[:4]:
            t = getattr(mask, name)
            if not are_unwritten(t):
                setattr(mask, name, counted_anew(t))
    mask._exact = is_exact
    mask._made_of = made_of(captures(mask.mask_mod)) if is_exact else None
    note(mask)
    return mask


def _with_write_order(block_mask: BlockMask, origin: torch_flex.BlockMask) -> BlockMask:
    """Copies the fields that torch's deterministic backward needs, recomputed for the new lists."""
    if getattr(origin, "dq_kv_order", None) is not None:
        raise NotImplementedError("a BlockMask with an explicit dq_kv_order cannot be sliced or cropped; build it anew for its new shape")
    if getattr(origin, "dq_write_order", None) is not None:
        _add_write_order(block_mask, origin.dq_kv_order_spt)
    return block_mask


def _add_write_order(mask: BlockMask, dq_kv_order: bool | None) -> None:
    compute = getattr(torch_flex, "_compute_dq_write_order_from_block_mask", None)
    if compute is None:
        raise NotImplementedError(f"torch {torch.__version__} has no dq write order for block masks; it came with torch 2.13")
    mask.dq_write_order, mask.dq_write_order_full = compute(mask, dq_kv_order=dq_kv_order)
    mask.dq_kv_order, mask.dq_kv_order_spt = None, dq_kv_order


def block_mask_of_classes(
    classes: Tensor,
    mask_mod: Callable | None,
    lengths: tuple[int, int],
    tile: tuple[int, int],
    separate_full: bool = True,
    compute_q_blocks: bool = True,
) -> BlockMask:
    """The block mask of a grid of classes, uint8 (B, H, M, N).

    A tail tile is listed as partial even if all its pairs inside the sequences are visible: torch counts the padding as hidden, and the
    lists equal torch's block for block.
    """
    lists = both_ways(with_partial_tails(classes, lengths, tile), separate_full, compute_q_blocks)
    return block_mask_of_lists(lists, mask_mod if mask_mod is not None else torch_flex.noop_mask, lengths, tile)


BlockSparseTensors.block_mask_of_classes = staticmethod(block_mask_of_classes)


def told_apart(mask: TracedMod, batch: tuple[int, int]) -> tuple[str, ...]:
    """The names among "B" and "H" whose size in ``batch`` is 1 although the mask depends on that index."""
    return tuple([name for name, n, is_read in zip("BH", batch, _sees(mask.expr), strict=True) if is_read and n == 1])


@lru_cache(maxsize=1024)
def _sees(mask: Expr) -> tuple[bool, bool]:
    """Whether the mask depends on the batch entry, and on the head."""
    deps = dependence(mask)
    return any(d.b for d in deps), any(d.h for d in deps)


def lists_are_complete(mask: TracedMod, batch: tuple[int, int]) -> bool:
    """Whether lists of (B, H) describe the mask completely: no dimension is broadcast that the mask depends on."""
    return not told_apart(mask, batch)


def block_mask_of_lists(
    lists: list[Tensor | None], mask_mod: Callable, lengths: tuple[int, int], tile: tuple[int, int], cls: type[BlockMask] = BlockMask
) -> BlockMask:
    fields: dict[str, Any] = dict.fromkeys(LISTS)
    fields.update(zip(LISTS, lists, strict=False))
    return cls(seq_lengths=lengths, BLOCK_SIZE=tile, mask_mod=mask_mod, **fields)


@opaque
@without_default_device
def build_block_mask(
    mask_mod: Callable,
    batch: tuple[int | None, int | None],
    lengths: tuple[int, int],
    device: torch.device | str | None,
    block_size: int | tuple[int, int],
    separate_full_blocks: bool,
    dq_kv_order: bool | None,
) -> BlockMask:
    """``create_block_mask`` outside compiled code: its arguments are checked here. dq_kv_order: None leaves the write order out."""
    refuse_torchscript()
    sizes = (positions("Q_LEN", lengths[0]), positions("KV_LEN", lengths[1]))
    counts = (1 if batch[0] is None else length("B", batch[0]), 1 if batch[1] is None else length("H", batch[1]))
    tile = pair("BLOCK_SIZE", block_size)
    traced = trace(mask_mod, "mask")
    where = device_of(device, traced)
    with without_transforms(traced, where):
        form = BLOCK_MASK._replace(separate_full=bool(separate_full_blocks))
        lists = lists_of_mask(traced, TileGrid(sizes, tile, counts), where, form)
        mask = block_mask_of_lists(lists, mask_mod, sizes, tile)
    mask._told_apart = told_apart(traced, counts)
    marked(mask, not mask._told_apart)
    if dq_kv_order is not None:
        _add_write_order(mask, dq_kv_order)  # by torch.vmap, which needs the transforms
    return mask


def _register() -> None:
    """Registers our class as a pytree node if torch registered its own."""
    if torch_flex.BlockMask in pytree.SUPPORTED_NODES and BlockMask not in pytree.SUPPORTED_NODES:
        pytree.register_pytree_node(
            BlockMask,
            torch_flex.BlockMask._flatten,  # type: ignore[arg-type]
            BlockMask._unflatten,  # type: ignore[arg-type]
            flatten_with_keys_fn=torch_flex.BlockMask._flatten_with_keys,  # type: ignore[arg-type]
            serialized_type_name="anyattn.BlockMask",
        )


_register()
