"""Conversion of a problem to a ``BackwardConfig``, and the reasons against the backward kernel."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn.arithmetic import ceil_div
from anyattn.backends.hopper.api import processors_of
from anyattn.backends.hopper.backward_config import (
    SHARED_TILE_N,
    TILE_N,
    BackwardConfig,
    BackwardTiles,
    backward_tiles_for,
    fits_halved,
    padded_for_backward,
    short_tiles_for,
    tall_tiles_for,
)
from anyattn.backends.hopper.backward_parts import parts_for
from anyattn.backends.hopper.captured_sums import CapturedSum, with_derivatives
from anyattn.backends.hopper.codegen.operations import WRITTEN
from anyattn.backends.hopper.codegen.score_analysis import is_words, stages, work_by_pair
from anyattn.backends.hopper.config import HEAD_DIMS, TILE_M, Ask, sides
from anyattn.backends.hopper.make_config import ABILITIES, are_of_kv_heads, captured_by, mods_of, tile_of
from anyattn.backends.hopper.wide_backward_config import HELD
from anyattn.documents.dispatch import over_unknown_documents
from anyattn.mask_plan import mask_plan
from anyattn.mods.analysis.captured_loads import slots_alone
from anyattn.mods.analysis.document_masks import DocumentForm
from anyattn.mods.ir.dependence import dependence
from anyattn.mods.ir.expr import Expr
from anyattn.mods.tracing.cute_mod import has_native
from anyattn.problem import Problem

__all__ = [
    "BackwardDispatch",
    "BackwardSpec",
    "backward_dispatch",
    "backward_spec",
    "by_lengths",
    "reason_against_backward",
]


_MOST_WORK = 64  # operations per pair of the mod and its derivative together; see ``plan``
_WIDEST_SUMS = 128  # head dimension of the kernels whose fragments support captured sums
_MOST_SUMS = 4  # loads whose derivatives are summed
# time per pair in a tall tile relative to another one, without a mask and under a causal one (docs/history); True: of packed sequences
_TALL_COST = {False: (0.955, 0.965), True: (0.98, 0.985)}
_ROWS = 64  # a list's tiles are joined until their rows are a multiple of this


@dataclass(frozen=True)
class BackwardSpec:
    """The config of calls of the same signature, and where their captured values and lists come from.

    sources: for each of ``config.exprs`` the predicate that it comes from (-1: the score mod), and its counts of numbers and tensors.
    listed: the predicate that the lists belong to, None without lists. list_tile: (query rows, keys) of the lists' tiles. wanted: the
    slots of captured tensors whose gradients are summed, in the order of the launch's totals. parts: of each K/V head's query heads
    (``backward_parts``). prepared: launches (``backward_launches``).
    """

    config: BackwardConfig
    sources: tuple[tuple[int, int, int], ...]
    listed: int | None
    list_tile: tuple[int, int] | None
    wanted: tuple[int, ...] = ()
    parts: int = 1
    prepared: dict[tuple, Any] = field(default_factory=dict, init=False, compare=False, repr=False)

    @cached_property
    def captures(self) -> bool:
        """Whether anything is captured."""
        return self.config.has_dropout or any(numbers or tensors for _, numbers, tensors in self.sources)

    def captured(self, problem: Problem) -> tuple[tuple[int | float, ...], tuple[Tensor, ...]]:
        """See ``captured_by``."""
        numbers, tensors = captured_by(self.sources, problem)
        return tuple(numbers), tuple([t.detach() for t in tensors])


def backward_spec(problem: Problem) -> BackwardSpec:
    """The ``BackwardSpec`` of ``problem``; reads no tensor."""
    score, sums = (None, ()) if problem.score is None else _score_and_sums(problem)
    sources, listed, fields = mods_of(problem, score)
    asks = tuple(ask for ask in (fields.get("partial"), *fields["always"]) if ask is not None)
    d, dv = _padded(problem)
    has_dropout = problem.dropout is not None
    is_bare = score is None and not asks and listed is None and not has_dropout
    is_plain = is_bare or (score is None and not has_dropout and _are_words(problem, asks))
    is_packed = problem.sequences is not None
    tiles = backward_tiles_for(d, dv, is_plain, is_bare, is_packed)
    if score is not None and not sums and not tiles.shares_keys and _is_plain_bias(score):
        tiles = replace(tiles, delta="behind")  # there are enough registers, and the product S starts earlier
    stores_dq = _has_one_key_tile(problem, tiles)
    tall = tall_tiles_for(d, dv, is_packed) if is_bare and not stores_dq else None
    if tall is not None and _pays(problem, fields.get("bands", ())):
        tiles = tall
    if has_dropout:
        tiles = replace(tiles, delta="behind")  # the gradient of a dropped weight is minus delta
    fields["has_entries"], list_tile = is_packed, None
    if listed is not None and (short := _short_tiles(problem, fields["partial"])) is not None:
        tiles, stores_dq = short, False
    if listed is not None:
        list_tile = (TILE_M, TILE_M) if problem.blocks is None else _joined(tile_of(problem.blocks), tiles.tile_n)
        cut = (list_tile[0] // tiles.tile_m, list_tile[1] // tiles.tile_n)
        kind = "dense" if problem.sequences is None else _layout(problem.blocks)
        fields |= {"lists": kind, "list_cut": cut, **_differing(problem, listed)}
    is_bf16 = problem.q.dtype is torch.bfloat16
    is_deterministic = bool(problem.deterministic) and not stores_dq  # one key tile has no order
    parts = _parts_of(problem)[listed is not None or bool(fields.get("bands"))]
    config = BackwardConfig(
        d, dv, is_bf16, tiles, score, **fields, is_deterministic=is_deterministic, sums=sums, stores_dq=stores_dq, has_dropout=has_dropout,
        stores_float32=parts > 1 or problem.wide_kv_grads,
    )  # fmt: skip
    return BackwardSpec(config, sources, listed, list_tile, problem.wanted_slots, parts)


def by_lengths(problem: Problem) -> tuple[Any, ...]:
    """What lengths decide, which the signature of a varlen call does not have: ``tall_pays``, and the parts of K/V heads."""
    return tall_pays(problem), _parts_of(problem)


def _parts_of(problem: Problem) -> tuple[int, int]:
    """``parts_for`` this problem if all rows see all keys, and if a band or lists determine which rows see a key tile."""
    if (ratio := problem.qhead_per_kvhead) == 1:
        return 1, 1
    (entries, queries, keys), s = (problem.batch, problem.q.shape[2], problem.k.shape[2]), problem.sequences
    if s is not None:  # of average length; documents whose number is known on the device only count as one
        entries = max(s.batch, 1)
        queries, keys = ceil_div(problem.q.shape[0] * queries, entries), ceil_div(problem.k.shape[0] * keys, entries)
    tile_m, tile_n = _tile_sizes(_padded(problem))
    key_tiles, row_tiles = ceil_div(keys, tile_n), ceil_div(queries, tile_m)
    processors = processors_of(problem.q.device)
    heads = problem.heads_kv * entries
    even, uneven = (parts_for(ratio, heads, key_tiles, row_tiles, is_uneven, processors) for is_uneven in (False, True))
    return even, uneven


@lru_cache(maxsize=64)
def _tile_sizes(dims: tuple[int, int]) -> tuple[int, int]:
    tiles = backward_tiles_for(*dims, is_plain=True, is_bare=True)
    return tiles.tile_m, tiles.tile_n


def _has_one_key_tile(problem: Problem, tiles: BackwardTiles) -> bool:
    return problem.sequences is None and problem.k.shape[2] <= tiles.tile_n


def _are_words(problem: Problem, asks: tuple[Ask, ...]) -> bool:
    """Whether all predicates are words of bits in tiles of 128 rows, and the lists' tiles consist of such tiles: then the predicates take
    no additional registers, and 128-row tiles visit no rows that 64-row tiles would skip."""
    blocks = problem.blocks
    if problem.sequences is not None or (blocks is not None and tile_of(blocks)[0] % TILE_M):
        return False
    return all(is_words(ask.expr, ask.by_row, "q_idx", TILE_M) for ask in asks)


def _is_plain_bias(score: Expr) -> bool:
    """Whether a score mod only adds a number that depends on no load per pair. score: the mod's value and its derivative."""
    derivative, due = score.nodes[score.outputs[1]], stages(score)
    loads = any(node.op == "load" and when == "tile" for node, when in zip(score.nodes, due, strict=True))
    return derivative.op == "const" and derivative.attr == 1.0 and not loads


def _score_and_sums(problem: Problem) -> tuple[Expr, tuple[CapturedSum, ...]]:
    score, wanted = problem.score, problem.wanted_slots
    assert score is not None
    sizes = problem.batch, problem.heads_q, problem.q.shape[2], problem.k.shape[2]
    alone = slots_alone(score.expr, wanted, sizes, tuple([t.shape for t in score.tensors])) if wanted else ()
    return with_derivatives(score.expr, wanted, alone)


class BackwardDispatch(NamedTuple):
    """How calls of the same signature are launched. spec: for the call as it is. form, sequences_spec: the form of its mask, and the spec
    for its documents as sequences; None if they cannot run so. They are used if the ids turn out to be documents
    (``documents.dispatch``)."""

    spec: BackwardSpec
    form: DocumentForm | None = None
    sequences_spec: BackwardSpec | None = None


def backward_dispatch(problem: Problem) -> BackwardDispatch:
    """How ``problem`` is launched; reads no tensor."""
    spec = backward_spec(problem)
    if spec.listed is None or spec.wanted or (form_and_problem := over_unknown_documents(problem)) is None:
        return BackwardDispatch(spec)
    form, over_documents = form_and_problem
    if reason_against_backward(over_documents):
        return BackwardDispatch(spec)
    sequences_spec = backward_spec(over_documents)
    if sequences_spec.listed is not None or sequences_spec.config.always:
        return BackwardDispatch(spec)
    return BackwardDispatch(spec, form, sequences_spec)


def _layout(blocks: Any) -> str:
    """The layout of a call's lists over sequences; lists that are made here are flat."""
    return "flat" if blocks is None or blocks.layout == "flat" else "ragged"


def _differing(problem: Problem, listed: int) -> dict[str, bool]:
    """How lists differ between batch entries and between heads."""
    if problem.sequences is not None:
        if problem.blocks is not None:
            heads = problem.blocks.mask_block_cnt.shape[0]
            return {"per_head": heads > 1, "by_kv_head": are_of_kv_heads(problem, heads)}
        return {"per_head": any(d.h for d in dependence(problem.predicates[listed].expr))}
    if problem.blocks is not None:
        batch, heads = problem.blocks.mask_block_cnt.shape[:2]
        return {"per_entry": batch > 1, "per_head": heads > 1, "by_kv_head": are_of_kv_heads(problem, heads)}
    depends = [d for p in problem.predicates for d in dependence(p.expr)]
    return {"per_entry": problem.batch > 1 and any(d.b for d in depends), "per_head": problem.heads_q > 1 and any(d.h for d in depends)}


def _pays(problem: Problem, bands: tuple[Expr, ...]) -> bool:
    """Whether tall tiles are taken. Windows, whose length is a captured number, and documents, whose number is unknown here, keep the other
    tiles; deterministic sums of documents do not: fewer visits take fewer turns."""
    return all(sides(band) == (False, True) for band in bands) and tall_pays(problem)[bool(bands)]


def tall_pays(problem: Problem) -> tuple[bool, bool]:
    """Whether tall tiles take less time, without a mask and under a causal one: fewer visits, but more rows past the last one, and more
    pairs at a causal edge that no row sees. The lengths decide, which the signature of a varlen call does not have."""
    sequences = problem.sequences
    if sequences is not None and sequences.batch == 0:  # no sequence, or documents whose lengths are known on the device only
        return bool(problem.deterministic), bool(problem.deterministic)
    entries = None if sequences is None else sequences.batch / max(problem.q.shape[0], 1)
    return _tall_pays(_padded(problem), entries, problem.q.shape[2], problem.k.shape[2])


@lru_cache(maxsize=1024)
def _tall_pays(dims: tuple[int, int], entries: float | None, queries: float, keys: float) -> tuple[bool, bool]:
    """entries: the sequences of a row of storage of a varlen batch; None for other calls. queries, keys: of a row of storage."""
    tall = tall_tiles_for(*dims, entries is not None)
    if tall is None:
        return False, False
    tiles = backward_tiles_for(*dims, is_plain=True, is_bare=True)
    if entries is not None:
        queries, keys = queries / entries, keys / entries  # averages

    def time(t: BackwardTiles, is_causal: bool) -> float:
        rows = ceil_div(queries, t.tile_m) * t.tile_m if entries is None else queries + t.tile_m / 2
        edge = (t.tile_m + t.tile_n - math.gcd(t.tile_m, t.tile_n)) / 2
        return rows * (max(keys / 2, keys - queries / 2) + edge if is_causal else keys)

    without, causal = _TALL_COST[entries is not None]
    return time(tall, False) * without < time(tiles, False), time(tall, True) * causal < time(tiles, True)


def _padded(problem: Problem) -> tuple[int, int]:
    return padded_for_backward(problem.q.shape[3], problem.v.shape[3])


def _short_tiles(problem: Problem, partial: Ask | None) -> BackwardTiles | None:
    """The tiles for block lists whose key tiles are 64 keys, or odd multiples; None if larger tiles, or other lists, are read.

    partial: the predicate inside listed partial tiles. As in the forward pass, lists of a mask of row ranges are joined to larger tiles.
    """
    blocks, is_joined = problem.blocks, problem.blocks_follow and partial is not None and partial.by_row
    if blocks is None or is_joined or tile_of(blocks)[1] % TILE_N != SHARED_TILE_N or tile_of(blocks)[0] % _ROWS:
        return None
    if problem.sequences is not None or problem.wanted_slots or problem.dropout is not None:
        return None
    return short_tiles_for(*_padded(problem))


def _joined(tile: tuple[int, int], tile_n: int) -> tuple[int, int]:
    """The tile to which lists in tiles of ``tile`` are joined. tile_n: keys of the kernel's."""
    return ceil_div(tile[0], _ROWS) * _ROWS, ceil_div(tile[1], tile_n) * tile_n


def reason_against_backward(problem: Problem) -> str | None:
    """None if the backward kernel can run a ``problem`` whose forward pass this backend runs, else the reason against it, as text."""
    if has_native((problem.score, *problem.predicates)):
        return "a CuTe function has no derivative"
    widest = max(problem.q.shape[3], problem.v.shape[3])
    if widest > HEAD_DIMS[-1] and problem.sequences is not None:
        return f"its backward kernels for head dimensions above {HEAD_DIMS[-1]} take no packed or padded sequences"
    if problem.dropout is not None and (problem.score is not None or widest > _WIDEST_SUMS):
        return f"its backward kernel takes dropout up to head dimension {_WIDEST_SUMS}, and without a score mod"
    sequences, is_wide = problem.sequences, widest > _WIDEST_SUMS
    if problem.wanted_slots and (is_wide or sequences is not None):
        of_what = f"head dimensions above {_WIDEST_SUMS}" if is_wide else "packed or padded sequences"
        return f"its backward kernel sums no gradients of captured tensors for {of_what}"
    if sequences is not None and (sequences.page_table is not None or sequences.is_cache):
        return "its backward kernel takes no keys in pages and no caches that grow"
    if sequences is not None and is_wide and (against := _against_wide_sequences(problem)):
        return against
    against = None if problem.score is None else _against_sums(problem) or _against_score(problem)
    if against:
        return against
    plan = mask_plan(problem, ABILITIES)
    if sequences is not None and problem.deterministic and plan.has_lists:
        return "its backward kernel adds in no fixed order where lists of packed sequences say which tiles are visited"
    blocks = problem.blocks
    if plan.uses_blocks and blocks is not None:
        tile, partial = tile_of(blocks), plan.of_blocks
        ask = None if partial is None else Ask(partial.mask.expr, partial.ranges is not None)
        if widest > HEAD_DIMS[-1]:
            keys_of_tile = HELD
        else:
            keys_of_tile = (_short_tiles(problem, ask) or backward_tiles_for(*_padded(problem))).tile_n
        wanted = _joined(tile, keys_of_tile)
        if wanted != tile and not (sequences is None and problem.blocks_follow):
            own, of_lists = f"{_ROWS} rows x {keys_of_tile} keys", f"{tile[0]} x {tile[1]}"
            return f"its backward kernel has tiles of {own}, and these block lists are in tiles of {of_lists}"
    return None


def _against_wide_sequences(problem: Problem) -> str | None:
    """The reason against packed or padded sequences of heads wider than 128."""
    d, dv = _padded(problem)
    if not fits_halved(d, dv):
        most = "192 with value head dimension 128, or 128 with 192"
        return f"its backward kernel takes packed and padded sequences up to head dimension {most}; these have {d} and {dv}, padded"
    plan = mask_plan(problem, ABILITIES)
    if problem.score is not None or plan.has_lists or plan.always:
        kinds = "score mods, block lists and masks other than bands"
        return f"its backward kernel takes packed and padded sequences of head dimensions above {_WIDEST_SUMS} without {kinds}"
    return None


def _against_sums(problem: Problem) -> str | None:
    _, sums = _score_and_sums(problem)
    if len(sums) > _MOST_SUMS:
        return f"the score mod reads captured tensors that require grad {len(sums)} times; its backward kernel has room for {_MOST_SUMS}"
    if any(s.place is not None and s.place.uses_score for s in sums):
        return "the score mod reads a captured tensor that requires grad at an index that depends on the score"
    if problem.deterministic and any(s.kind != "alone" for s in sums):
        return "with deterministic=True it has no exact sums for the gradients of captured tensors"
    if max(problem.q.shape[3], problem.v.shape[3]) > HEAD_DIMS[0] and any(s.late is not None and not s.is_running for s in sums):
        return (
            "a derivative of the score mod by what it reads at a query or a key depends on the score, and at head dimensions above "
            f"{HEAD_DIMS[0]} its backward kernel has no registers for it"
        )
    return None


def _against_score(problem: Problem) -> str | None:
    score, sums = _score_and_sums(problem)
    own = [score, *(s.factor for s in sums if s.factor is not None), *(s.place for s in sums if s.place is not None)]
    missing = sorted({n.op for expr in own for n in expr.nodes} - WRITTEN)
    if missing:
        return f"the score mod's derivative uses {', '.join(missing)}, which this backend's emitter does not write yet"
    by_pair = [
        score,
        *(s.factor for s in sums if s.factor is not None),
        *(s.place for s in sums if s.place is not None and s.kind == "any"),
    ]
    if (work := sum(map(work_by_pair, by_pair))) > _MOST_WORK:
        return f"the score mod and its derivative take {work} operations for every pair; its backward kernel has room for {_MOST_WORK}"
    return None
