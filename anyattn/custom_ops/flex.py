"""Operators that ``torch.compile`` and ``torch.export`` record for attention.

A compiled graph cannot hold a Python function, so an operator takes a mod as its program's text (``mods/ir/codec.py``), the captured
numbers as integers (floats by their bits) and a list of captured tensors. The operators check, plan and run like an eager call, warm calls
from the call cache included; eager calls do not use the operators, which saves the dispatcher's overhead. An operator takes no list of
strings: mask programs are one text (``codec.joined``).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from anyattn import autograd
from anyattn.call_cache import attention
from anyattn.custom_ops import list_operands, warm_attend
from anyattn.custom_ops.arguments import Masks, Results, Score
from anyattn.custom_ops.flops import count_operator, flex_pairs
from anyattn.custom_ops.graph_nodes import captures_in_graph
from anyattn.custom_ops.operators import called, differentiable, operator, returned
from anyattn.custom_ops.own_lists import own_lists
from anyattn.determinism import backend_and_mode, backend_text
from anyattn.errors import ModError
from anyattn.mods.dropout import KEEP_PROGRAM, Seeded, dropout_of
from anyattn.mods.ir import codec
from anyattn.mods.tracing.arguments import misfit
from anyattn.mods.tracing.fingerprint import Pattern
from anyattn.mods.tracing.trace import Source, TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers, numbers_of_bits, overflowing_slots, unfit
from anyattn.plan import Plan
from anyattn.planner import check_backend
from anyattn.problem import Problem, Skip
from anyattn.sparsity.block_mask import are_unwritten, lists_are_complete
from anyattn.sparsity.made_of import follow
from anyattn.tensors import autocast
from anyattn.tensors import kinds as tensor_kinds
from anyattn.tensors.dynamo import opaque
from anyattn.tensors.strides import empty_in_order
from anyattn.validate import flex

__all__ = [
    "Attend",
    "attend",
    "call_of",
    "fake_gradients",
    "fake_results",
    "flex_with_mods",
    "masks_of_operands",
    "mods_of_operands",
    "never_empty",
    "operands_of",
    "operands_of_call",
    "options_of",
    "options_text",
    "requiring",
    "sources_of",
]

_FAR = (
    "a mod of a compiled graph captures the numbers {}, for which its arithmetic exceeds 64 bits or raises a Python exception, such as a "
    "division by zero; wanted other numbers, or numbers that are constants of the graph (torch.compile(dynamic=False), or a constant in "
    "the mod)"
)


# ---- mods as operands


def operands_of(like: Tensor, *mods: TracedMod | None, dropout: Seeded | None = None) -> tuple[str, list[int], list[Tensor]]:
    """The programs, the captured numbers and the captured tensors of traced mods; None is left out.

    like: any tensor of the call, or the tensor that ``never_empty`` would make from one. No list is empty, see ``never_empty``.
    dropout: its mask follows the mods, and its probability the numbers, so that graphs without dropout keep their format.
    """
    dropped = dropout_of(dropout)
    present = [m for m in (*mods, dropped and dropped.keep) if m is not None]
    numbers = [*bits_of_numbers([*(x for m in present for x in m.scalars), *(() if dropped is None else (dropped.p,))])]
    tensors = [t for m in present for t in m.tensors]
    return codec.joined([codec.encode(m.expr) for m in present]), numbers or [0], never_empty(tensors, like)


def never_empty(tensors: list[Tensor], like: Tensor) -> list[Tensor]:
    """A list for an operator. AOTInductor passes None for an empty list, so in an exported graph a tensor without entries is put into it.

    The operators know from their other arguments how many entries are real, and take empty lists too.
    """
    if tensors or not torch.compiler.is_exporting():
        return tensors
    return [like if like.shape == (0,) else like.new_empty(0)]


def mods_of_operands(kind: str, programs: str, numbers: list[int], tensors: list[Tensor]) -> list[TracedMod]:
    """The inverse of ``operands_of``."""
    return [
        mod if start == stop else TracedMod.of_fields({**vars(mod), "tensors": tuple(tensors[start:stop])})
        for mod, start, stop in mods_and_places(kind, programs, numbers)
    ]


def masks_of_operands(programs: str, numbers: list[int], tensors: list[Tensor]) -> tuple[list[TracedMod], Seeded | None]:
    """The masks and the dropout that ``operands_of`` made operands of."""
    masks = mods_of_operands("mask", programs, numbers, tensors)
    if not has_dropout(programs):
        return masks, None
    return masks[:-1], Seeded(masks[-1].tensors[0], float(*numbers_of_bits(numbers[-1:], (float,))))


def has_dropout(programs: str) -> bool:
    """Whether the last of some masks' programs is that of dropout, which no user's mask can have."""
    return programs.endswith(KEEP_PROGRAM)


def mods_and_places(kind: str, programs: str, numbers: list[int]) -> list[tuple[TracedMod, int, int]]:
    """Each mod without its tensors, and their range in the list of all tensors."""
    return _read_programs(kind, programs, tuple(numbers)) if programs else []


@lru_cache(maxsize=1024)
def _read_programs(kind: str, programs: str, numbers: tuple[int, ...]) -> list[tuple[TracedMod, int, int]]:
    """Each program as a mod without tensors, and the range of its tensors in the list of all."""
    mods_and_slots, first = [], 0
    for program in codec.separated(programs):
        expr, kinds, pattern, count = _read_program(program)
        scalars = numbers_of_bits(numbers[: len(kinds)], kinds)
        if (use := unfit(expr, scalars)) is not None:
            raise ModError("; ".join(misfit(*use)))
        if overflowing_slots(expr, scalars):
            raise ValueError(_FAR.format(scalars))
        source = Source(pattern, tuple(range(len(kinds))), tuple(range(count)))
        mods_and_slots.append((TracedMod(kind, expr, scalars, (), "compiled mod", source), first, first + count))
        numbers, first = numbers[len(kinds) :], first + count
    return mods_and_slots


@lru_cache(maxsize=1024)
def _read_program(program: str) -> tuple[Any, tuple[type, ...], Pattern, int]:
    """A program's expression, the types of its numbers, its pattern in the call cache, and its number of tensors."""
    expr = codec.decode(program)
    kinds = {node.attr: node.dtype for node in expr.nodes if node.op == "scalar"}
    ordered = tuple(kinds[i] for i in range(len(kinds)))
    return expr, ordered, Pattern(("program", program)), len(expr.tensor_slots)  # type: ignore[arg-type, return-value]


def options_text(options: dict[str, Any] | None) -> str:
    """``kernel_options`` as text; empty for none."""
    return codec.quoted(flex.kernel_options(options)) if options else ""


@lru_cache(maxsize=256)
def options_of(text: str) -> dict[str, Any] | None:
    return codec.read(text) if text else None


# ---- the operators


class Attend(NamedTuple):
    """The arguments of ``anyattn::attend``. options: ``options_text``. backend: ``determinism.backend_text``.

    masks: the block mask's first, if block_size says that there is one; the last may be that of dropout. block_lists: its two or four
    lists. exactness: whether they follow from its mask (``list_operands``), which holds only while they are not written to.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    sink: Tensor | None
    score: Score
    masks: Masks
    block_lists: list[Tensor]
    block_size: list[int]
    exactness: int
    scale: float
    wants_max: bool
    deterministic: bool
    options: str
    backend: str


def call_of(operands: Attend, skip: Skip | None = None, is_backward: bool = False) -> tuple[Problem, Plan]:
    """The problem and the plan of an operator's call, from the caches if the call is warm. skip: of ``attend_skipping``."""
    q, k, v, sink, of_score, of_masks, block_lists, block_size, exactness, scale, wants_max, deterministic, options, text = operands
    has_lists, values = any(block_size), (*operands[:4], *of_score, *of_masks, *operands[6:])
    is_exact = has_lists and list_operands.still_follow(exactness, block_lists, *of_masks, is_backward)
    is_remembered = skip is None and warm_attend.is_remembered(values) and not has_dropout(of_masks.mask_programs)
    if is_remembered and (warm := warm_attend.warm_call(values, is_exact)) is not None:
        return warm
    blocks = lists = None
    if has_lists:
        list_arguments = block_lists, (tuple(block_size), (q.shape[2], k.shape[2])), is_exact
        lists = list_operands.known_by_now(*list_arguments)
        blocks = list_operands.stand_in(*list_arguments) if lists is None else lists.stands_for
    score = next(iter(mods_of_operands("score", *of_score)), None)
    masks, dropout = masks_of_operands(*of_masks)
    listed = None
    if blocks is not None:
        listed, *masks = masks
    mask = masks[0] if masks else None
    backend, mode = backend_and_mode(text, deterministic)
    call = attention.FlexCall(q, k, v, score, blocks, mask, None, scale, True, sink, True, wants_max, mode, dropout, listed, skip)
    problem, plan = attention.flex_call(call, backend, options_of(options), is_operator=True)  # type: ignore[misc]
    is_remembered = is_remembered and has_lists is (lists is not None) and attend.direct.may_pass(*values)
    if is_remembered and (remembered := attention.known_flex(call, backend, options_of(options))) is not None:
        read = (*mods_and_places("score", *of_score[:2]), *mods_and_places("mask", *of_masks[:2]))
        readers = [warm_attend.Reader(mod.kind == "score", list(mod.scalars), start, stop) for mod, start, stop in read]
        warm_attend.remember(values, is_exact, lists, remembered, tuple(readers), problem)
    return problem, plan


def fake_results(operands: Any) -> tuple[Tensor, Tensor, Tensor]:
    """What the operators of ``Attend`` and of ``AttendSharded`` return, without values."""
    tensor_kinds.refuse_forward_mode()
    q, rows = operands.q, operands.q.shape[:3]
    stat = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = empty_in_order(q, last=operands.v.shape[3]), q.new_empty(rows, dtype=stat)
    return out, lse, q.new_empty(rows if operands.wants_max else (0,), dtype=stat)


@operator(Attend, fake=fake_results)
def attend(operands: Attend) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of one attention; max_scores is empty unless wanted. Layouts as in ``flex_attention``."""
    tensor_kinds.refuse_forward_mode()
    problem, chosen = call_of(operands)
    result = autograd.forward(problem, chosen)
    return result.out, result.lse, result.max_scores if operands.wants_max else result.lse.new_empty(0)


attend.direct = opaque(warm_attend.direct(attend))


def sources_of(operands: Any) -> tuple[Tensor | None, ...]:
    """The arguments of ``Attend`` or ``AttendSharded`` that may receive gradients, in the order of ``Results.wants``."""
    return (*operands[:4], *operands.score.score_tensors)


def requiring(operands: Any, wants: Sequence[bool]) -> Any:
    """The arguments with ``requires_grad`` where a gradient is wanted: the graph's tensors themselves do not require it."""
    needed: list[Any] = [autograd.requiring_grad(t, w) for t, w in zip(sources_of(operands), wants, strict=True)]
    q, k, v, sink, *captured = needed
    return operands._replace(q=q, k=k, v=v, sink=sink, score=operands.score._replace(score_tensors=captured))


def fake_gradients(operands: Any, results: Results) -> list[Tensor]:
    q, k, v = operands[:3]
    of_others = (operands.sink, *operands.score.score_tensors)
    gradients = [*map(empty_in_order, (q, k, v)), *(None if t is None else t.new_empty(t.shape) for t in of_others)]
    return [g if g is not None and w else q.new_empty(0) for g, w in zip(gradients, results.wants, strict=True)]


@operator(Attend, Results, fake=fake_gradients, left_out={"wants_max": False})
def attend_backward(operands: Attend, results: Results) -> list[Tensor]:
    """Gradients of q, k, v, sink and each score tensor; empty where ``wants`` is False."""
    wants = results.wants
    problem, chosen = call_of(requiring(operands, wants), is_backward=True)
    grads = [*autograd.backward(problem, chosen, *results[:4])]
    grads += [None] * (len(wants) - len(grads))  # for the placeholders in empty lists
    return returned(grads, wants, sources_of(operands), operands.q)


differentiable(attend, attend_backward, ("q", "k", "v", "sink", "score_tensors"), constant=(2,))
count_operator(attend, flex_pairs, attend_backward)


def flex_with_mods(
    call: tuple,
    lists: tuple[Tensor | None, ...],
    listing: tuple | None,
    backend: str | None,
    options: dict[str, Any] | None,
    score: TracedMod | None,
    listed: TracedMod | None,
    mask: TracedMod | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``flex_attention`` as one operator call with traced mods; arguments as ``operands_of_call``."""
    return called(attend, operands_of_call(call, lists, listing, backend, options, score, listed, mask))  # type: ignore[no-any-return]


def operands_of_call(
    call: tuple,
    lists: tuple[Tensor | None, ...],
    listing: tuple | None,
    backend: str | None,
    options: dict[str, Any] | None,
    score: TracedMod | None,
    listed: TracedMod | None,
    mask: TracedMod | None,
) -> Attend:
    """The operator's arguments for a ``flex_attention`` call with traced mods. call: a ``FlexCall`` without them. listing: a block mask's
    lengths, block size, whether it is exact, and ``_leaves_heads``; None for lists that the graph computes itself.

    Raises as the eager call for wrong shapes, dtypes and devices; contents of tensors are checked when the operator runs.
    """
    check_backend(backend)
    flex_call = attention.FlexCall(*call)
    query, key, value = autocast.arguments(flex_call.query, flex_call.key, flex_call.value)
    key, value = flex.tensors(query, key, value, bool(flex_call.enable_gqa))
    sink = flex.sink_logits(flex_call.sink, query)
    for mod in (score, listed, mask):
        if mod is not None:
            flex.captured_devices(mod, query.device)
    block_lists, block_size, exactness = [], [0, 0], list_operands.INEXACT
    if listing is not None and listed is not None:
        lengths, size, is_exact, leaves_heads = listing
        block_lists, block_size = [t for t in lists if t is not None], list(size)
        counts: Any = lists[0]
        exactness = _exactness(is_exact, counts, listed) if are_unwritten(*block_lists) else exactness
        flex.check_lists(lengths, counts, query, key)
        flex.check_heads_of_lists(listed, counts, query.shape[1], lists[3] is not None or not leaves_heads)
        block_lists = own_lists(block_lists)
    nothing = query.new_empty(0)  # one for all lists: a compiled graph creates it at every call
    return Attend(
        query, key, value, sink, Score(*operands_of(nothing, score)), Masks(*operands_of(nothing, listed, mask, dropout=flex_call.dropout)),
        never_empty(block_lists, nothing), block_size, exactness, flex.scale_of("scale", flex_call.scale, query.shape[3], query.dtype),
        flex_call.wants_max, bool(flex_call.deterministic), options_text(options), backend_text(backend, flex_call.deterministic),
    )  # fmt: skip


def _exactness(is_exact: bool | None, counts: Any, listed: TracedMod) -> int:
    """The operator's argument for lists that nothing has written to. is_exact: of the block mask; None if a compiled graph made it."""
    if is_exact is None:
        is_known = lists_are_complete(listed, counts.shape[:2]) and follow(counts, captures_in_graph(listed))
        return list_operands.EXACT_IN_GRAPH if is_known else list_operands.INEXACT
    # an exported program holds copies of lists from outside
    return list_operands.EXACT_BY_BLOCK_MASK if is_exact and not torch.compiler.is_exporting() else list_operands.INEXACT
