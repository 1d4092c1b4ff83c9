"""Conversion of a problem to a ``Config``, and of its mods' captured values to the order of the config's expressions."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.backward_parts import PROCESSORS
from anyattn.backends.hopper.codegen.score_analysis import MOST_NUMBER, bound, caps, factored
from anyattn.backends.hopper.config import (
    LEAST_PIECE,
    LEAST_ROWS,
    LEAST_SHARED_PIECE,
    MOST,
    TILE_M,
    WIDE,
    Ask,
    Config,
    Tiles,
    padded,
    sides,
    slots,
    tiles_for,
)  # fmt: skip
from anyattn.backends.hopper.pack_gqa import heads_per_tile, row_tiles, row_tiles_of_batch
from anyattn.documents.dispatch import over_unknown_documents
from anyattn.errors import BackendError
from anyattn.mask_plan import MaskAbilities, MaskPart, mask_plan
from anyattn.mods.analysis.document_masks import DocumentForm
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Builder, Expr
from anyattn.mods.tracing.trace import TracedMod
from anyattn.problem import Problem
from anyattn.sequences.sections import KEYS_IN_ORDER

__all__ = [
    "ABILITIES", "TILES_IN_ORDER", "ByDocument", "ForwardSpec", "by_document", "captured_by", "forward_spec", "forward_storage",
    "is_bounded", "list_tile_misfit", "mods_of", "tile_of", "tiles_in_order",
]  # fmt: skip

# The kernel keeps two ranges per row in registers. Tiles follow from bands alone, of which there may be several.
ABILITIES = MaskAbilities(most_ranges=2, tiles_follow=lambda ranges: sides(ranges.expr) is not None)
# How many of 8 exponentials after a cap are polynomials: then 104 operations of the special-function pipe, at 8 clocks each, and 577
# instructions in all compare with 1,024 clocks of products for the 64 scores of a thread in a 128 x 128 tile (SASS counts)
_EMULATED = 3
_KEYS_READ_ONCE = 32  # of a tile: see ``_keys_are_read_once``
_TIME_OF_FOUR = 0.95  # measured time of a row with four warp groups, over that with three
_SCORE = -1  # the score mod among sources, which are else numbers of predicates


class ForwardSpec(NamedTuple):
    """The config of calls of the same signature, and where their captured values and lists come from.

    sources: for each of ``config.exprs`` the predicate whose numbers and tensors it captures (-1: the score mod), and how many.
    positive: the score mod's numbers that must be above 0 if ``config.is_factored``.
    may_be_bounded: whether its numbers may bound the scores.
    listed: the predicate that the lists belong to, None without lists. list_tile: (query rows, keys) of the lists' tiles.
    """

    config: Config
    sources: tuple[tuple[int, int, int], ...]
    positive: tuple[int, ...]
    listed: int | None
    list_tile: tuple[int, int] | None
    may_be_bounded: bool

    def config_for(self, problem: Problem) -> Config:
        """The config, which depends on the signs and sizes of the score mod's captured numbers."""
        if self.positive and any(problem.score.scalars[i] <= 0 for i in self.positive):  # type: ignore[union-attr]
            return _varied(self.config, False, False)
        if self.may_be_bounded and is_bounded(self.config, problem.score.scalars):  # type: ignore[union-attr]
            return _varied(self.config, True, True)
        return self.config

    def without_order(self) -> ForwardSpec:
        """The same for a batch of which the kernel needs the numbers of keys alone (``api.needs_lengths_alone``)."""
        return self._replace(config=_without_order(self.config))

    def captured(self, problem: Problem) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
        """See ``captured_by``."""
        numbers, tensors = captured_by(self.sources, problem)
        if any(type(x) is int and abs(x) >= MOST_NUMBER for x in numbers):
            raise BackendError("a mod captures a number of 2^29 or more, which the kernel's 32 bits have no room for; use backend='triton'")
        return tuple(numbers), tuple(tensors)


def forward_spec(problem: Problem, packs: bool | None = None, is_split: bool = False) -> ForwardSpec:
    """The ``ForwardSpec`` of ``problem``; reads no tensor.

    packs: whether heads share row tiles if they can, None for the preference of ``problem``. is_split: see ``Config``.
    """
    score = problem.score if problem.score is not None or problem.scale > 0 else _IDENTITY
    expr = None if score is None else score.expr
    sources, listed, fields = mods_of(problem, expr)
    list_tile = None
    if listed is not None:
        list_tile = (TILE_M, TILE_M) if problem.blocks is None else _list_tile(problem, fields["partial"])
    config = _config(problem, expr, list_tile, fields | forward_storage(problem, listed is not None), packs)
    if is_split:
        config = replace(config, is_split=True, has_sink=False, has_lse=True)  # the sink is added where the splits are combined
    positive = () if score is None or problem.scale <= 0 else factored(score.expr).positive
    has_maxima = problem.skip is not None  # what a tile is compared with
    may_be_bounded = config.score is not None and config.is_factored and config.is_bf16 and caps(config.score) and not has_maxima
    return ForwardSpec(config, sources, positive, listed, list_tile, may_be_bounded)


def mods_of(problem: Problem, score: Expr | None) -> tuple[tuple[tuple[int, int, int], ...], int | None, dict[str, Any]]:
    """(sources, listed, the config's fields ``always``, and ``bands`` or, with lists, ``partial``) as in ``ForwardSpec``. score: the
    config's."""
    plan = mask_plan(problem, ABILITIES)
    listed = 0 if plan.uses_blocks else plan.listed[0].predicates[0] if plan.listed else None
    partial = [part for part in (plan.of_blocks, *plan.listed) if part is not None]
    sources = [] if score is None else [(_SCORE, *slots(score))]
    sources += [(part.predicates[0], *slots(_ask(part).expr)) for part in (*plan.ranged, *partial, *plan.always)]
    fields: dict[str, Any] = {"always": tuple(map(_ask, plan.always))}
    if listed is None:
        fields["bands"] = tuple(_ask(part).expr for part in plan.ranged)
    else:
        fields["partial"] = _ask(partial[0]) if partial else None
    return tuple(sources), listed, fields


def captured_by(sources: tuple[tuple[int, int, int], ...], problem: Problem) -> tuple[list[int | float], list[Tensor]]:
    """The captured numbers and tensors of ``config.exprs``, expression by expression, then those of the threshold and the dropout."""
    numbers: list[int | float] = []
    tensors: list[Tensor] = []
    for at, count, tensor_count in sources:
        mod = problem.score if at == _SCORE else problem.predicates[at]
        if mod is not None:  # the identity score mod captures nothing
            numbers += mod.scalars[:count]
            tensors += mod.tensors[:tensor_count]
    if problem.skip is not None:
        tensors += [t for t in problem.skip if t is not None]
    if problem.dropout is not None:
        more, seed = problem.dropout.captured
        numbers += more
        tensors += seed
    return numbers, tensors


class ByDocument(NamedTuple):
    """How calls of the same signature are launched if their ids may be documents (``documents.dispatch``). form: that of their masks.
    sequences_spec: of the kernel that runs documents as sequences. lists_spec: of the kernel that reads lists of tiles, if the ids are not
    documents. Both kernels read their number of row tiles, which is 0 for one of them."""

    form: DocumentForm
    sequences_spec: ForwardSpec
    lists_spec: ForwardSpec


def by_document(problem: Problem) -> ByDocument | None:
    """How a call is run by its documents, None without block lists that follow from the mask, if the rest of the mask is not bands, or if
    tiles may be skipped, since what is a tile would depend on the ids. Reads no tensor. Heads are not packed, since the documents' lengths
    are unknown."""
    if problem.skip is not None or (form_and_problem := over_unknown_documents(problem)) is None:
        return None
    form, over_documents = form_and_problem
    sequences_spec, lists_spec = forward_spec(over_documents, False), forward_spec(problem, False)
    if sequences_spec.listed is not None or sequences_spec.config.always or lists_spec.listed is None:
        return None
    return ByDocument(form, _counted(sequences_spec), _counted(lists_spec))


def _counted(spec: ForwardSpec) -> ForwardSpec:
    return spec._replace(config=replace(spec.config, has_count=True))


def is_bounded(config: Config, scalars: tuple[int | float, ...]) -> bool:
    """Whether the captured numbers bound the scores, so that no row maximum is needed."""
    size = bound(config.score, scalars) if config.score is not None else None
    return size is not None and size <= MOST


@lru_cache(maxsize=256)
def _without_order(config: Config) -> Config:
    return replace(config, has_order=False)


@lru_cache(maxsize=256)
def _varied(config: Config, is_factored: bool, is_bounded: bool) -> Config:
    tiles = replace(config.tiles, emulated=_EMULATED) if is_bounded else config.tiles
    return replace(config, is_factored=is_factored, is_bounded=is_bounded, tiles=tiles)


# In the order of keys, by head dimensions; at 64 ``tiles_in_order`` may take fewer rows. 128 rows took 20 % longer at 64, and 8 % at 96; at
# 128 a fourth stage, for one of Q, up to 9 %.
TILES_IN_ORDER = {
    (64, 64): Tiles(256, KEYS_IN_ORDER, 4), (96, 96): Tiles(192, KEYS_IN_ORDER, 3), (128, 128): Tiles(128, KEYS_IN_ORDER, 3),
    (192, 128): Tiles(128, KEYS_IN_ORDER, 2), (192, 192): Tiles(128, KEYS_IN_ORDER, 2), (256, 256): Tiles(128, KEYS_IN_ORDER, 2),
}  # fmt: skip


def tiles_in_order(problem: Problem, dims: tuple[int, int]) -> Tiles:
    """The tiles of the kernel in the order of keys, by head dimensions as padded.

    Four warp groups take 5 % less time for a row than three. But multiprocessors without work wait for longer tiles, and last tiles have
    more empty rows: 16 heads of 2,048 causal rows took 35.2 us with four and 28.3 with three, of 4,096 rows 69.7 and 80.3, 12 heads of 640
    rows of 8 entries 27.0 and 25.0, 48 heads of 1,024 rows 23.5 and 24.7, 32 heads of 8,192 rows 488 and 514 (H200). The estimated time is
    that of a multiprocessor's share of the tiles and 0.7 of a tile. The highest scores take registers that four groups do not have.
    """
    tiles = TILES_IN_ORDER[dims]
    if tiles.warp_groups < 4:
        return tiles

    def time(tile_m: int) -> float:
        return tile_m * (problem.heads_q * row_tiles_of_batch(problem, tile_m) / PROCESSORS + 0.7)

    fewer = tiles.tile_m - LEAST_ROWS
    return replace(tiles, tile_m=fewer) if problem.wants_max or time(fewer) < _TIME_OF_FOUR * time(tiles.tile_m) else tiles


def _tiles(problem: Problem, wanted: dict[str, Any]) -> tuple[tuple[int, int], Tiles, dict[str, Any]]:
    """The head dimensions, the tiles, and the config's fields for pages. wanted: the other arguments of ``tiles_for``."""
    unpadded, page = (problem.q.shape[3], problem.v.shape[3]), wanted["page"]
    dims = padded(*unpadded)
    if problem.is_batch_invariant:
        return dims, tiles_in_order(problem, dims), {"piece": 0}
    tiles = tiles_for(*dims, **wanted)
    piece = math.gcd(page, tiles.tile_n) if page else 0
    if 0 < piece < LEAST_PIECE and dims == unpadded:
        return dims, tiles_for(*dims, **{**wanted, "page": 1}), {"piece": 1, "gathers": True}
    if piece % 2 and dims[0] == 96:  # a copy starts at a multiple of 128 bytes, which hold two rows' parts of 64 bytes
        dims = (128, 128)
        tiles = tiles_for(*dims, **wanted)
        piece = math.gcd(page, tiles.tile_n)
    return dims, tiles, {"piece": piece}


def _config(problem: Problem, score: Expr | None, list_tile: tuple[int, int] | None, flags: dict[str, Any], packs: bool | None) -> Config:
    asks = tuple(ask for ask in (flags.get("partial"), *flags["always"]) if ask is not None)
    wanted = {"score": score, "tile_n": list_tile[1] if list_tile else None, "asked": asks, "page": flags.pop("page")}
    wanted["has_dropout"] = flags["has_dropout"] = problem.dropout is not None
    wanted["rows"] = list_tile[0] if list_tile else TILE_M
    wanted["has_one_kv"] = flags["has_one_kv"] = padded(problem.q.shape[3], problem.v.shape[3]) in WIDE and problem.has_one_kv
    (d, dv), tiles, pages = _tiles(problem, wanted)
    packed = heads_per_tile(problem, score, tiles.tile_m, flags, problem.packs if packs is None else packs)
    if packed > 1:
        (d, dv), tiles, pages = _tiles(problem, wanted | {"is_packed": True, "rows": wanted["rows"] * packed})
    is_bare = score is None and list_tile is None and not (asks or flags.get("bands") or flags["has_dropout"])
    if d == dv == 128 and packed == 1 and is_bare and not pages["piece"]:
        tiles = replace(tiles, ping_pong=False)  # faster on an H200 if all tiles are bare, slower if some are masked
    flags["pairs"] = (d, dv) in WIDE and _pairs(problem, list_tile, packed, pages["piece"])
    if flags["has_one_kv"] and score is None and list_tile is None and not asks and _keys_are_read_once(problem, packed):
        _, small, pieces = _tiles(problem, wanted | {"tile_n": _KEYS_READ_ONCE})
        if pieces["piece"] >= min(pages["piece"], LEAST_SHARED_PIECE):  # else loading takes more copies
            tiles, pages = small, pieces
    if flags["pairs"] and _fills_with_heads(problem, packed):
        packed = 2 * LEAST_ROWS  # each thread block has half of the heads
    tile_m = tiles.tile_m * (1 + flags["pairs"])
    cut = (1, 1) if list_tile is None else (list_tile[0] * packed // tile_m, list_tile[1] // tiles.tile_n)
    is_bf16 = problem.q.dtype is torch.bfloat16
    results: dict[str, Any] = {
        "has_sink": problem.sink is not None,
        "has_lse": problem.wants_lse,
        "has_max": problem.wants_max,
        "has_skip": problem.skip is not None,
        "counts_skips": problem.skip is not None and problem.skip.counts is not None,
        "in_order": problem.is_batch_invariant,
    }
    return Config(d, dv, is_bf16, tiles, score, problem.scale > 0, heads_per_tile=packed, list_cut=cut, **pages, **flags, **results)


def _pairs(problem: Problem, list_tile: tuple[int, int] | None, packed: int, piece: int) -> bool:
    """Whether two thread blocks with wide heads load keys together: where all rows that see a K/V head's keys are theirs, and neither
    could be alone with them.

    TFLOP/s with pairs and without (H200): decoding 128 heads of 576/512, 66 entries of 8,192 keys in pages of 64, 595 and 523, contiguous
    616 and 586, 132 entries of 4,096 keys 590 and 540. With more row tiles than two work is not drawn as it comes, and the blocks of a pair
    wait for one another: causal D 512 462 and 540, K = V 552 and 641, 576/512 628 and 722; full D 512 525 and 517, K = V 671 and 669.
    """
    rows = packed * problem.bound_q
    has_rows = LEAST_ROWS < rows <= 2 * LEAST_ROWS and (list_tile is None or list_tile[0] * packed % (2 * LEAST_ROWS) == 0)
    return (has_rows or _fills_with_heads(problem, packed)) and (piece == 0 or piece >= LEAST_SHARED_PIECE)


def _keys_are_read_once(problem: Problem, packed: int) -> bool:
    """Whether all rows that see a K/V head's keys share a row tile. Memory then takes longer than the products, and more and smaller tiles
    in flight help: decoding 16 heads of 576/512, 32 entries of 8,192 keys, 86 instead of 91 us, in pages of 64 91 and 94, 64 heads 107 and
    112 (H200). Heads of 512 take 83 us in both. With V's product ended before the next tile is waited for 97 us."""
    return row_tiles(problem.bound_q, problem.qhead_per_kvhead, LEAST_ROWS, packed) == 1


def _fills_with_heads(problem: Problem, packed: int) -> bool:
    """Whether two thread blocks have heads of the same positions, which see the same keys: every group of 128 has some for both."""
    rest = problem.qhead_per_kvhead % (2 * LEAST_ROWS)
    return packed == LEAST_ROWS < problem.qhead_per_kvhead and (rest == 0 or rest > LEAST_ROWS)


def forward_storage(problem: Problem, has_lists: bool) -> dict[str, Any]:
    """The config's fields for the storage of sequences and lists, and the rows of a page, 0 without pages."""
    sequences, blocks = problem.sequences, problem.blocks
    depends = [d for p in problem.predicates for d in dependence(p.expr)]
    if sequences is None:
        if not has_lists:
            return {"has_entries": False, "page": 0}
        if blocks is not None:
            batch, heads = blocks.mask_block_cnt.shape[:2]
        else:
            batch, heads = problem.batch if any(d.b for d in depends) else 1, problem.heads_q if any(d.h for d in depends) else 1
        spread = "none" if heads > 1 else "heads" if batch > 1 else "all"
        spreads = {"per_entry": batch > 1, "per_head": heads > 1, "by_kv_head": are_of_kv_heads(problem, heads), "spread": spread}
        return {"has_entries": False, "page": 0, "lists": "dense", "has_order": True, **spreads}
    page = 0 if sequences.page_table is None else problem.k.shape[2]
    fields = {"has_entries": True, "page": page, "has_order": True, "spread": "heads"}
    if has_lists and blocks is None:
        fields |= {"lists": "flat", "per_head": any(d.h for d in depends)}
    elif has_lists:
        heads = blocks.mask_block_cnt.shape[0]  # type: ignore[union-attr]
        fields |= {"lists": "flat" if blocks.layout == "flat" else "ragged", "per_head": heads > 1}  # type: ignore[union-attr]
        fields["by_kv_head"] = are_of_kv_heads(problem, heads)
    return fields


def are_of_kv_heads(problem: Problem, heads: int) -> bool:
    """Whether a call's lists of ``heads`` heads are of K/V heads that several query heads share."""
    return 1 < heads == problem.heads_kv < problem.heads_q


def tile_of(blocks: Any) -> tuple[int, int]:
    """The tile of block lists. A tile that holds a whole sequence is enlarged to a multiple of the kernel's tile."""
    lengths = getattr(blocks, "lengths", None) or (math.inf, math.inf)
    rows, keys = (ceil_div(size, TILE_M) * TILE_M if size >= n else size for size, n in zip(blocks.tile, lengths, strict=True))
    return rows, keys


def _list_tile(problem: Problem, partial: Ask | None) -> tuple[int, int]:
    """The tile of the lists that the kernel reads: that of the call's lists, or one to which they are converted."""
    tile = tile_of(problem.blocks)
    # rows of a mask with few ranges see runs of keys: larger tiles visit few more pairs, and take less time for each
    is_better_whole = problem.blocks_follow and problem.sequences is None and partial is not None and partial.by_row
    if list_tile_misfit(tile) or (is_better_whole and tile[0] % TILE_M):
        return ceil_div(tile[0], TILE_M) * TILE_M, ceil_div(tile[1], TILE_M) * TILE_M
    return tile


def list_tile_misfit(tile: tuple[int, int]) -> bool:
    """Whether lists in such tiles cannot be read because the kernel's tiles do not divide them."""
    return bool(tile[0] % LEAST_ROWS or tile[1] % 16)


def _ask(part: MaskPart) -> Ask:
    return Ask(part.mask.expr, False) if part.ranges is None else Ask(part.ranges.expr, True)


def _identity() -> TracedMod:
    """The identity score mod: with it the scale is applied before the row maximum is computed, as a negative scale requires."""
    builder = Builder()
    return TracedMod("score", builder.build(builder.add("score", dtype=torch.float32)), (), (), "identity")


_IDENTITY = _identity()
