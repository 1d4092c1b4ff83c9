"""Custom operators of ``flex_attention`` for ``torch.compile`` and ``torch.export``.

A compiled graph cannot hold a Python function, so an operator takes a mod as its program's text (``mods/ir/codec.py``), the captured
numbers as integers (floats by their bits) and a list of captured tensors. The operators check, plan and run like an eager call, warm calls
from the call cache included; eager calls do not pass through here, which saves the dispatcher's overhead. An operator takes no list of
strings: mask programs are joined by newlines.
"""

from __future__ import annotations

import json
from functools import lru_cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from anyattn import autocast, autograd
from anyattn.call_cache import attention
from anyattn.custom_ops.define import operator
from anyattn.custom_ops.transforms import called
from anyattn.mods.ir import codec
from anyattn.mods.tracing.fingerprint import Pattern
from anyattn.mods.tracing.trace import Source, TracedMod
from anyattn.mods.tracing.weak_captures import bits_of_numbers, numbers_of_bits, strayed
from anyattn.plan import Plan
from anyattn.problem import Problem
from anyattn.sparsity.block_mask import are_unwritten, tells_no_more
from anyattn.tensors import kinds as tensor_kinds
from anyattn.tensors.strides import empty_in_order
from anyattn.validate import flex

__all__ = ["NO_MOD", "attend", "flex_with_mods", "mods_of_operands", "never_empty", "operands_of", "options_text"]

NO_MOD = ""
_FAR = (
    "a mod of a compiled graph captures whole numbers {} with which its arithmetic leaves 64 bits; wanted smaller ones, or numbers that "
    "the compiler does not leave open (torch.compile(dynamic=False), or a constant in the mod)"
)


# ---- mods as operands


def operands_of(like: Tensor, *mods: TracedMod | None) -> tuple[str, list[int], list[Tensor]]:
    """The programs (a line each), the captured numbers and the captured tensors of traced mods; what is None is left out.

    like: any tensor of the call. No list is empty, see ``never_empty``.
    """
    given = [m for m in mods if m is not None]
    numbers = [*bits_of_numbers([x for m in given for x in m.scalars])]
    tensors = [t for m in given for t in m.tensors]
    return "\n".join([codec.encode(m.expr) for m in given]), numbers or [0], never_empty(tensors, like)


def never_empty(tensors: list[Tensor], like: Tensor) -> list[Tensor]:
    """A list for an operator: AOTInductor hands over None for an empty one, so a tensor without entries stands in it.

    The operators know from their other arguments how many entries are meant, and take empty lists too.
    """
    return tensors or [like.new_empty(0)]


def mods_of_operands(kind: str, programs: str, numbers: list[int], tensors: list[Tensor]) -> list[TracedMod]:
    """The way back of ``operands_of``."""
    found = []
    for program in programs.splitlines():
        expr, kinds, pattern, count = _read_program(program)
        scalars = numbers_of_bits(numbers[: len(kinds)], kinds)
        if strayed(expr, scalars):
            raise ValueError(_FAR.format(scalars))
        source = Source(pattern, tuple(range(len(kinds))), tuple(range(count)))
        found.append(TracedMod(kind, expr, scalars, tuple(tensors[:count]), "compiled mod", source))
        numbers, tensors = numbers[len(kinds) :], tensors[count:]
    return found


@lru_cache(maxsize=1024)
def _read_program(program: str) -> tuple[Any, tuple[type, ...], Pattern, int]:
    """A program's expression, the types of its numbers, the pattern that stands for it in the call cache, and its number of tensors."""
    expr = codec.decode(program)
    kinds = {node.attr: node.dtype for node in expr.nodes if node.op == "scalar"}
    ordered = tuple(kinds[i] for i in range(len(kinds)))
    return expr, ordered, Pattern(("program", program)), len(expr.tensor_slots)  # type: ignore[arg-type, return-value]


def options_text(options: dict[str, Any] | None) -> str:
    """``kernel_options`` as text; empty for none."""
    return json.dumps(flex.kernel_options(options)) if options else ""


@lru_cache(maxsize=256)
def _options(text: str) -> dict[str, Any] | None:
    return json.loads(text) if text else None


# ---- block lists as operands


class _Lists:
    """Stands for the block mask whose lists an operator was given. Its tensors are views: it must not keep alive what it is kept by."""

    def __init__(self, tensors: list[Tensor], facts: tuple):
        views = [t.detach() for t in tensors]
        self.kv_num_blocks, self.kv_indices, self.full_kv_num_blocks, self.full_kv_indices = [*views, None, None][:4]
        self.BLOCK_SIZE, self.seq_lengths, self.is_exact = facts


# While one lives its memory is not reused. It lives as long as the tensor of counts that came first: a backward pass gets
# another one of the same memory, with the same count of writes.
_by_place: WeakValueDictionary[tuple, _Lists] = WeakValueDictionary()
_by_counts: WeakIdKeyDictionary = WeakTensorKeyDictionary()


def _stand_in(tensors: list[Tensor], facts: tuple) -> _Lists:
    """The same one for the same lists: what is found out of a block mask is kept with it."""
    if any(t.is_inference() for t in tensors):  # torch counts no writes to these
        return _Lists(tensors, facts)
    places = (facts, *[(t.data_ptr(), t._version, t.shape, t.stride(), t.dtype, t.device) for t in tensors])
    known = _by_place.get(places)
    if known is None:
        known = _by_place[places] = _by_counts[tensors[0]] = _Lists(tensors, facts)
    return known


def _call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_programs: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    block_lists: list[Tensor],
    block_size: list[int],
    is_exact: bool,
    scale: float,
    wants_max: bool,
    deterministic: bool,
    options: str,
    backend: str,
) -> tuple[Problem, Plan]:
    """The problem and the plan of an operator's call, from the call cache where it knows the call."""
    score = next(iter(mods_of_operands("score", score_program, score_numbers, score_tensors)), None)
    masks = mods_of_operands("mask", mask_programs, mask_numbers, mask_tensors)
    blocks, listed = None, None
    if any(block_size):
        blocks = _stand_in(block_lists, (tuple(block_size), (q.shape[2], k.shape[2]), is_exact and are_unwritten(*block_lists)))
        listed, *masks = masks
    mask = masks[0] if masks else None
    call = attention.FlexCall(q, k, v, score, blocks, mask, None, scale, True, sink, True, wants_max, deterministic, listed)
    return attention.flex_call(call, backend or None, _options(options), is_operator=True)  # type: ignore[return-value]


@operator
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_programs: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    block_lists: list[Tensor],
    block_size: list[int],
    is_exact: bool,
    scale: float,
    wants_max: bool,
    deterministic: bool,
    options: str,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """(out, lse, max_scores) of one attention; max_scores is empty unless wanted. Layouts as in ``flex_attention``."""
    tensor_kinds.refuse_forward_mode()
    problem, chosen = _call(
        q, k, v, sink, score_program, score_numbers, score_tensors, mask_programs, mask_numbers, mask_tensors, block_lists, block_size,
        is_exact, scale, wants_max, deterministic, options, backend,
    )  # fmt: skip
    with autocast.disabled():
        result = autograd.backend_of(chosen).forward(problem, chosen)
    return result.out, result.lse, result.max_scores if wants_max else result.lse.new_empty(0)


@torch.library.register_fake("anyattn::attend")
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    tensor_kinds.refuse_forward_mode()
    wants_max = args[-4]
    rows = q.shape[:3]
    stat = torch.float64 if q.dtype is torch.float64 else torch.float32
    out, lse = empty_in_order(q, last=v.shape[3]), q.new_empty(rows, dtype=stat)
    return out, lse, q.new_empty(rows if wants_max else (0,), dtype=stat)


@operator
def attend_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    score_program: str,
    score_numbers: list[int],
    score_tensors: list[Tensor],
    mask_programs: str,
    mask_numbers: list[int],
    mask_tensors: list[Tensor],
    block_lists: list[Tensor],
    block_size: list[int],
    is_exact: bool,
    scale: float,
    deterministic: bool,
    options: str,
    backend: str,
    out: Tensor,
    lse: Tensor,
    dout: Tensor,
    dlse: Tensor | None,
    wants: list[bool],
) -> list[Tensor]:
    """Gradients of q, k, v, sink and each score tensor; empty where ``wants`` says that none is."""
    # a graph's own tensors, as they come, require none
    asked: list[Any] = [autograd.wanting(t, w) for t, w in zip((q, k, v, sink, *score_tensors), wants, strict=True)]
    q, k, v, sink, *score_tensors = asked
    problem, chosen = _call(
        q, k, v, sink, score_program, score_numbers, score_tensors, mask_programs, mask_numbers, mask_tensors, block_lists, block_size,
        is_exact, scale, False, deterministic, options, backend,
    )  # fmt: skip
    grads = [*autograd.backward(problem, chosen, out, lse, dout, dlse)]
    grads += [None] * (len(wants) - len(grads))  # of what stands in an empty list
    return [g if g is not None and w else q.new_empty(0) for g, w in zip(grads, wants, strict=True)]


@torch.library.register_fake("anyattn::attend_backward")
def _(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None, *args: Any) -> list[Tensor]:
    of_rows, of_others = (q, k, v), (sink, *args[2])
    found = [*map(empty_in_order, of_rows), *(None if t is None else t.new_empty(t.shape) for t in of_others)]
    return [g if g is not None and w else q.new_empty(0) for g, w in zip(found, args[-1], strict=True)]


def _save(ctx: Any, inputs: tuple, output: tuple) -> None:
    q, k, v, sink, program, numbers, tensors, *rest = inputs
    out, lse, highest = output
    mask_programs, mask_numbers, mask_tensors, block_lists, block_size, is_exact, scale, _, deterministic, options, backend = rest
    ctx.save_for_backward(q, k, v, sink, out, lse, *tensors, *mask_tensors, *block_lists)
    ctx.counts = (len(tensors), len(mask_tensors), len(block_lists))
    ctx.mods = (program, numbers, mask_programs, mask_numbers)
    ctx.others = (block_size, is_exact, scale, deterministic, options, backend)
    ctx.wants = [t is not None and t.is_floating_point() and t.requires_grad for t in (q, k, v, sink, *tensors)]
    ctx.mark_non_differentiable(highest)
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, dout: Tensor | None, dlse: Tensor | None, _: Any) -> tuple:
    q, k, v, sink, out, lse, *lists = ctx.saved_tensors
    parts = []
    for count in ctx.counts:
        parts.append(list(lists[:count]))
        lists = lists[count:]
    tensors, mask_tensors, block_lists = parts
    if dout is None:
        dout = torch.zeros_like(out)
    program, numbers, mask_programs, mask_numbers = ctx.mods
    operands = (
        q, k, v, sink, program, numbers, tensors, mask_programs, mask_numbers, mask_tensors, block_lists, *ctx.others, out, lse, dout, dlse,
        ctx.wants,
    )  # fmt: skip
    grads = called(attend_backward, operands)
    dq, dk, dv, dsink, *by_tensor = [g if w else None for g, w in zip(grads, ctx.wants, strict=True)]
    no_mask, no_list = ([None] * n for n in ctx.counts[1:])
    # per input of ``attend``: a list of tensors takes a list, a list of ints, which is never empty, one None
    return dq, dk, dv, dsink, None, None, by_tensor, None, None, no_mask, no_list, None, None, None, None, None, None, None


torch.library.register_autograd("anyattn::attend", _gradients, setup_context=_save)
torch.library.register_autograd("anyattn::attend_backward", autograd.refuse_second_derivative)


def flex_with_mods(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lists: tuple[Tensor | None, ...],
    listing: tuple | None,
    scale: float | None,
    enable_gqa: bool,
    sink: Tensor | None,
    wants_max: bool,
    deterministic: bool,
    backend: str | None,
    options: dict[str, Any] | None,
    score: TracedMod | None,
    listed: TracedMod | None,
    mask: TracedMod | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """``flex_attention`` as one operator, of traced mods. listing: a block mask's lengths, block size, and whether it is exact; None
    for lists that the graph itself makes.

    Raises as the eager call where shapes, dtypes and devices are wrong; the contents of tensors are checked when the operator runs.
    """
    query, key, value = autocast.arguments(query, key, value)
    key, value = flex.tensors(query, key, value, enable_gqa)
    sink = flex.sink_logits(sink, query)
    for mod in (score, listed, mask):
        if mod is not None:
            flex.captured_devices(mod, query.device)
    block_lists, block_size, is_exact = [], [0, 0], False
    if listing is not None and listed is not None:
        lengths, size, is_exact = listing
        block_lists, block_size = [t for t in lists if t is not None], list(size)
        is_from_graph = is_exact is None
        counts: Any = lists[0]
        is_exact = tells_no_more(listed, counts.shape[:2]) if is_from_graph else is_exact and not torch.compiler.is_exporting()
        is_exact = is_exact and are_unwritten(*block_lists)  # an exported program holds copies of lists from outside
        flex.check_lists(lengths, counts, query, key)
    operands = (
        query, key, value, sink, *operands_of(query, score), *operands_of(query, listed, mask), never_empty(block_lists, query), block_size,
        is_exact, flex.scale_of("scale", scale, query.shape[3], query.dtype), wants_max, deterministic, options_text(options),
        backend or "",
    )  # fmt: skip
    return called(attend, operands, _save, _gradients)  # type: ignore[no-any-return]
